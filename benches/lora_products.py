"""The CPU time of adapters in an update's products, apart as they are trained and joined in three ways.

    python -m benches.lora_products

The gradient of SmolLM2-135M's layers (without attention and head) in bfloat16, by six programs that take turns: all
weights trained; all frozen; adapters of rank 8 apart, as they are trained; their products in float32; the A's of
products with one input as one product; and W and A of each product joined, x [W | A] and dy [W ; B]^T. Writes
benches/results/lora-products-cpu.json.
"""

import dataclasses
import functools
from collections.abc import Sequence
from unittest import mock

import jax
import jax.numpy as jnp

from benches.decode import SMOLLM2_135M
from benches.record import arguments, medians, record
from podium.compiler import compiler_options
from podium.config.lora import LoraConfig
from podium.hosts.platform import prepare_platform
from podium.models import decoder, layer_context, linear
from podium.models.architecture import DecoderConfig, make_lora
from podium.models.blocks.weights import Adapted, LayerWeight, LayerWeights, Weight
from podium.models.linear import Linear
from podium.models.params import GATHERED_AXES, TRAIN_AXES, is_adapter, param_specs
from podium.sharding import Params, ShardingRules, init_params, make_mesh

ROWS, TOKENS, REPEATS = 2, 320, 3
PLAIN = dataclasses.replace(SMOLLM2_135M, vocab=64)  # the embedding is not what is measured
ADAPTED = dataclasses.replace(PLAIN, lora=make_lora(LoraConfig(rank=8)))
BF16, F32 = jnp.bfloat16, jnp.float32


def in_float32(rules: ShardingRules) -> Linear:
    """The layers' products, those of adapters in float32."""
    plain = linear.make_linear(rules)

    def product(pattern: str, x: jax.Array, w: LayerWeight) -> jax.Array:
        if not isinstance(w, Adapted):
            return plain(pattern, x, w)
        return plain(pattern, x, Adapted(w.matrix, _stored(w.a), _stored(w.b), w.scale))

    return product


def _stored(w: LayerWeight) -> jax.Array:
    """What a weight is a cast of: float32 values if it is trained, bits if it is frozen."""
    assert isinstance(w, Weight) and w.kept is not None
    return w.kept


def together(
    product: Linear, rules: ShardingRules, pattern: str, x: jax.Array, weights: Sequence[LayerWeight], axis: str
) -> list[jax.Array]:
    """In the place of `linear.several`: the A's of weights with one input as one product."""
    adapted = [each for each in weights if isinstance(each, Adapted)]
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=-1), *(each.a for each in adapted))
    thin = jnp.split(product("btd,dr->btr", x, joined) * adapted[0].scale, len(adapted), axis=-1)
    _, w_axes, y_axes = pattern.replace("->", ",").split(",")
    behind = f"btr,r{w_axes[1:]}->{y_axes}"
    return [product(pattern, x, w.matrix) + product(behind, z, w.b) for z, w in zip(thin, adapted, strict=True)]


def of_layer(
    layer: layer_context.LayerContext, pattern: str, x: jax.Array, w: LayerWeights, names: Sequence[str]
) -> list[jax.Array]:
    """In the place of `LayerContext.several`: `together` for gate and up."""
    return together(layer.linear, layer.rules, pattern, x, [w[name] for name in names], "mlp")


def side_by_side(rules: ShardingRules) -> Linear:
    """The layers' products, those of a matrix and its adapter joined: x [W | A], and dy [W ; B]^T."""
    plain = linear.make_linear(rules)

    def product(pattern: str, x: jax.Array, w: LayerWeight) -> jax.Array:
        if not isinstance(w, Adapted):
            return plain(pattern, x, w)
        a, b, bits = _stored(w.a), _stored(w.b), _stored(w.matrix)
        flat = x.reshape(ROWS * TOKENS, -1)
        y: jax.Array = _joined(w.scale, flat, bits.reshape(flat.shape[1], -1), a, b)
        return y.reshape(ROWS, TOKENS, *bits.shape[a.ndim - 1 :])

    return product


def _times(pattern: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(pattern, x.astype(BF16), y.astype(BF16), preferred_element_type=F32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _joined(scale: float, x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """XW + scale (xA)B of x [T, D] and the bits w [D, F], as float32 [T, F]."""
    return _forward(scale, x, w, a, b)[0]


def _forward(
    scale: float, x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    both = _times("td,df->tf", x, jnp.concatenate([linear.of_bits(w), a.reshape(len(w), -1).astype(BF16)], axis=1))
    thin = both[:, w.shape[1] :] * scale
    return both[:, : w.shape[1]] + _times("tr,rf->tf", thin, b.reshape(len(b), -1)), (x, w, a, b, thin)


def _backward(scale: float, saved: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array | None, ...]:
    x, w, a, b, thin = saved
    dy = jax.lax.optimization_barrier(dy)
    both = _times("tf,df->td", dy, jnp.concatenate([linear.of_bits(w), b.reshape(len(b), -1).astype(BF16)], axis=0))
    dthin = both[:, len(w) :] * scale
    da = jax.lax.optimization_barrier(_times("tr,td->rd", dthin, x)).T
    dx = both[:, : len(w)] + _times("tr,dr->td", dthin, a.reshape(len(w), -1))
    return dx, None, da.reshape(a.shape), _times("tr,tf->rf", thin, dy).reshape(b.shape)


_joined.defvjp(_forward, _backward)


def main() -> None:
    """Prints and writes CPU seconds of each side, and their ratios to full training."""
    args = arguments(__doc__).parse_args()
    prepare_platform()
    mesh = make_mesh("auto", jax.devices()[:1])
    stored, rules = ShardingRules(mesh, TRAIN_AXES), ShardingRules(mesh, GATHERED_AXES, stored=TRAIN_AXES)
    params = init_params(0, param_specs(PLAIN), stored)
    adapters = {n: x for n, x in init_params(0, param_specs(ADAPTED), stored).items() if is_adapter(n)}
    frozen = linear.kept({name: x.astype(BF16) for name, x in params.items()}, rules)
    tokens = jnp.ones((ROWS, TOKENS), jnp.int32)

    def gradient(config: DecoderConfig, trained: Params, rest: Params) -> jax.stages.Compiled:
        settings = decoder.PassSettings(config=config, rules=rules, dtype=jnp.dtype(BF16), wide=True)

        def loss(trained: Params, rest: Params) -> jax.Array:
            attend = lambda kv, _, q, k, v: (kv, q)  # noqa: E731
            hidden, _, _ = decoder.forward(rest | trained, tokens, tokens, attend, settings=settings)
            return jnp.sum(hidden**2)

        options = compiler_options(jax.default_backend())
        return jax.jit(jax.grad(loss), compiler_options=options).lower(trained, rest).compile()

    embed = {"embed": params["embed"]}
    sides = {
        "full": (gradient(PLAIN, params, {}), params, {}),
        "frozen": (gradient(ADAPTED, embed, frozen), embed, frozen),
        "apart": (gradient(ADAPTED, adapters, frozen), adapters, frozen),
    }
    for name, factory in (("float32", in_float32), ("joined", side_by_side)):
        with mock.patch.object(layer_context, "make_linear", factory):
            sides[name] = (gradient(ADAPTED, adapters, frozen), adapters, frozen)
    with (
        mock.patch.object(layer_context, "several", together),
        mock.patch.object(layer_context.LayerContext, "several", of_layer),
    ):
        sides["A's together"] = (gradient(ADAPTED, adapters, frozen), adapters, frozen)
    found = medians({name: functools.partial(*side) for name, side in sides.items()}, REPEATS)
    ratios = {name: seconds["cpu_s"] / found["full"]["cpu_s"] for name, seconds in found.items()}
    path = record(
        "lora-products-cpu", {"tokens": ROWS * TOKENS, "sides": found, "cpu_ratio_to_full": ratios}, args.results
    )
    print(path.read_text())


if __name__ == "__main__":
    main()
