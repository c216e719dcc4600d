"""The TPU's kernels of the delta rule over packed rows, emulated, against the rule in pure jax and its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import error_of_scale

from podium.models.attention.mask import packed_rows
from podium.models.blocks.delta_rule import Tokens, packed, unit
from podium.models.packed_delta_rule import by_kernel, row_recurrence
from podium.sharding import ShardingRules, make_mesh

B, T, K, R, N, P = 2, 150, 2, 2, 8, 6  # three chunks, the last one not full

# In the first row a prompt that ends in the second chunk and three completions, of which the last has one token; in the
# second a sequence alone, a prompt that ends with a chunk, its two completions, another group, and padding.
SEGMENTS = np.array(
    [np.repeat([1, 2, 3, 4], [70, 50, 29, 1]), np.repeat([1, 2, 3, 4, 5, 6, 7, 0], [20, 44, 30, 20, 8, 10, 10, 8])]
).astype(np.int32)
PROMPTS = np.array([[1] * T, np.repeat([1, 2, 2, 2, 5, 5, 5, 0], [20, 44, 30, 20, 8, 10, 10, 8])]).astype(np.int32)


def inputs(scale: float) -> list[jax.Array]:
    """q, k, v, g and beta; `scale` is the mean of the logarithms of decays."""
    random = np.random.default_rng(0)
    q, k = (random.normal(size=(B, T, K, N)) for _ in "qk")
    v, g = random.normal(size=(B, T, K * R, P)), -scale * random.exponential(size=(B, T, K * R))
    beta = 1 / (1 + np.exp(-random.normal(size=(B, T, K * R))))
    return [jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta)]


def in_jax(q, k, v, g, beta, rows):
    by_key = [x.reshape(B, T, K, R, *x.shape[3:]) for x in (v, g, beta)]
    return packed(Tokens(unit(q) * N**-0.5, unit(k), *by_key), rows, 64).reshape(v.shape)


@functools.cache
def compiled(rule):
    """Gradients by all inputs of a weighed sum of the outputs, and the outputs."""
    rows = packed_rows(jnp.asarray(SEGMENTS), jnp.asarray(PROMPTS))
    weighing = np.random.default_rng(1).normal(size=(B, T, K * R, P)).astype(np.float32)

    def total(*given):
        y = rule(*given, rows)
        return (y * weighing).sum(), y

    return jax.jit(jax.grad(total, range(5), has_aux=True))


KERNEL = functools.partial(by_kernel, interpret=True)


@pytest.mark.parametrize("scale", [0.05, 1.0, 8.0])
def test_outputs_and_gradients_are_those_of_the_rule(scale):
    (found, y), (expected, in_rule) = (compiled(rule)(*inputs(scale)) for rule in (KERNEL, in_jax))
    assert error_of_scale(np.asarray(y), np.asarray(in_rule)) <= 1e-5
    for name, one, other in zip(("q", "k", "v", "g", "beta"), found, expected, strict=True):
        assert error_of_scale(np.asarray(one), np.asarray(other)) <= 3e-5, name


def test_a_cpu_computes_the_rule_without_a_kernel():
    rules = ShardingRules(make_mesh("auto", jax.devices()[:1]), {})
    assert row_recurrence(rules, (32, 128, 128)) is None
