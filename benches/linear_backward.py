"""What does writing out the backward pass of the products save on CPU? See `podium.models.linear.product`.

    python -m benches.linear_backward

Three sides in one run, taken in turn: the gradient of SmolLM2-135M's layers (without attention and head) with jax's own
backward pass of einsum; with ours, but the weights' gradient in the order in which they lie; and with ours.
"""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benches.decode import SMOLLM2_135M
from benches.record import arguments, medians, record
from podium.hosts.platform import prepare_platform
from podium.models import decoder, layer_context, linear
from podium.models.params import GATHERED_AXES, TRAIN_AXES
from podium.sharding import ShardingRules, init_params, make_mesh

ROWS, TOKENS, REPEATS = 4, 256, 5
SMOLLM2 = dataclasses.replace(SMOLLM2_135M, vocab=64)  # the embedding is not what is measured


def as_they_lie(x_axes: str, y_axes: str, w_axes: str, x: jax.Array, dy: jax.Array, dtype: Any, *, on_cpu: bool) -> Any:
    """In the place of `linear._gradient_of_weights`."""
    return jnp.einsum(f"{x_axes},{y_axes}->{w_axes}", x, dy, preferred_element_type=dtype)


def main() -> None:
    args = arguments(__doc__).parse_args()
    prepare_platform()
    mesh = make_mesh("auto", jax.devices()[:1])
    params = init_params(0, decoder.param_specs(SMOLLM2), ShardingRules(mesh, TRAIN_AXES))
    rules = ShardingRules(mesh, GATHERED_AXES)
    tokens = jnp.ones((ROWS, TOKENS), jnp.int32)

    def loss(params):
        settings = decoder.PassSettings(config=SMOLLM2, rules=rules, dtype=jnp.dtype(jnp.float32))
        hidden, _, _ = decoder.forward(params, tokens, tokens, lambda kv, _, q, k, v: (kv, q), settings=settings)
        return jnp.sum(hidden)

    ours = jax.jit(jax.grad(loss)).lower(params).compile()
    with mock.patch.object(layer_context, "make_linear", lambda rules: jnp.einsum):
        plain = jax.jit(jax.grad(lambda params: loss(params))).lower(params).compile()
    with mock.patch.object(linear, "_gradient_of_weights", as_they_lie):
        unturned = jax.jit(jax.grad(lambda params: loss(params))).lower(params).compile()
    sides = {"einsum": plain, "as they lie": unturned, "make_linear": ours}
    found = medians({name: functools.partial(program, params) for name, program in sides.items()}, REPEATS)
    rows = [{"backward": name, **seconds} for name, seconds in found.items()]
    cpu = {name: seconds["cpu_s"] for name, seconds in found.items()}
    ratios = {f"cpu_ratio to {name}": cpu["make_linear"] / cpu[name] for name in ("einsum", "as they lie")}
    path = record("linear-backward-cpu", {"tokens": ROWS * TOKENS, "rows": rows} | ratios, args.results)
    print(path.read_text())


if __name__ == "__main__":
    main()
