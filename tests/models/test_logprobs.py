import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import rules_on

from podium.models.logprobs import logits_at, token_logprobs
from podium.models.params import GATHERED_AXES
from podium.sharding import ShardingRules

B, T, D, V = 4, 10, 16, 24
TOLERANCE = 1e-4  # logits are up to 22: the entropy is a difference of two such numbers


def inputs(seed: int = 0):
    random = np.random.default_rng(seed)
    hidden, head = random.standard_normal((B, T, D)), random.standard_normal((V, D))
    return hidden.astype(np.float32), head.astype(np.float32), random.integers(0, V, (B, T)).astype(np.int32)


def naive(hidden, head, targets, temperature=1.0):
    """Log-probabilities and entropies [B, T] by one softmax over everything, in float64."""
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T / temperature
    table = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return np.take_along_axis(table, targets[..., None], -1)[..., 0], -np.sum(np.exp(table) * table, axis=-1)


def computing(mesh: str = "dp:1", devices: int = 1) -> ShardingRules:
    return ShardingRules(rules_on(mesh, devices).mesh, GATHERED_AXES)


def scored(hidden, head, targets, *, temperature=1.0, chunk=1024, rules=None):
    rules = rules or computing()
    settings = {"temperature": temperature, "chunk": chunk, "rules": rules}
    return jax.jit(lambda *arrays: token_logprobs(*arrays, **settings))(hidden, head, targets)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_and_entropy_are_those_of_the_full_softmax(temperature):
    found = scored(*inputs(), temperature=temperature)
    logprobs, entropy = naive(*inputs(), temperature)
    np.testing.assert_allclose(found.logprobs, logprobs, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found.entropy, entropy, rtol=0, atol=TOLERANCE)


def test_a_uniform_distribution_has_the_entropy_of_its_size():
    hidden, head, targets = inputs()
    found = scored(0 * hidden, head, targets)
    np.testing.assert_allclose(found.logprobs, -np.log(V), rtol=1e-6)
    np.testing.assert_allclose(found.entropy, np.log(V), rtol=1e-6)


def test_a_certain_distribution_has_no_entropy_and_no_nan():
    hidden, head = np.ones((1, 1, 1), np.float32), np.array([[1e4], [0.0]], np.float32)
    found = scored(hidden, head, np.zeros((1, 1), np.int32))
    assert (float(found.logprobs[0, 0]), float(found.entropy[0, 0])) == (0.0, 0.0)


@pytest.mark.parametrize("chunk", [1, 4, 12, 28, 40, 1024])  # of 4 rows: 1, 1, 3, 7, 10 and 10 columns at once
def test_chunks_change_neither_values_nor_gradients(chunk):
    hidden, head, targets = inputs()

    def loss(hidden, head, chunk):
        found = token_logprobs(hidden, head, targets, temperature=0.9, chunk=chunk, rules=computing())
        return jnp.sum(jnp.sin(found.logprobs)) + jnp.sum(jnp.cos(found.entropy))

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
    whole, chunked = gradient(hidden, head, B * T), gradient(hidden, head, chunk)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), whole, chunked)


@pytest.mark.parametrize("mesh", ["1,8,1", "2,2,2", "4,1,2"])
@pytest.mark.parametrize("chunk", [3, 1024])
def test_logprobs_are_the_same_where_rows_and_vocabulary_are_split(mesh, chunk):
    hidden, head, targets = (np.concatenate([x, x]) if x.shape[0] == B else x for x in inputs())
    rules = computing(mesh, 8)
    placed = (
        jax.device_put(hidden, rules.sharding("batch", None, None)),
        jax.device_put(head, rules.sharding("vocab", None)),
        jax.device_put(targets, rules.sharding("batch", None)),
    )
    found = scored(*placed, chunk=chunk, rules=rules)
    logprobs, entropy = naive(hidden, head, targets)
    np.testing.assert_allclose(found.logprobs, logprobs, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found.entropy, entropy, rtol=0, atol=TOLERANCE)


def test_no_array_of_all_logits_exists_in_forward_and_backward():
    """B x T x V floats would be 4 MB here; one chunk is 64 kB."""
    rows, columns, vocab = 8, 128, 1024
    hidden, head = jnp.zeros((rows, columns, D)), jnp.zeros((vocab, D))
    targets = jnp.zeros((rows, columns), jnp.int32)

    def loss(hidden, head):
        return jnp.sum(token_logprobs(hidden, head, targets, temperature=1.0, chunk=16, rules=computing()).logprobs)

    memory = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head).compile().memory_analysis()
    assert memory.temp_size_in_bytes < rows * columns * vocab * 4 / 4


def test_logits_are_float32_whatever_the_model_computes_in():
    hidden, head, _ = inputs()
    low = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    logits = logits_at(*low, 2.0)
    assert logits.dtype == jnp.float32
    exact = np.asarray(low[0], np.float64) @ np.asarray(low[1], np.float64).T / 2
    np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-5)
