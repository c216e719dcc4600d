"""The one decoder: Llama 2/3, SmolLM2, Qwen2/2.5 and Qwen3 differ by fields of `DecoderConfig`.

`param_specs` declares the weights, `forward` is the model: tokens in, hidden states out. What attends to what, and
whether keys and values are kept, is the caller's: training brings a mask over packed rows, the engine its cache.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from podium.config.schema import Remat
from podium.models.adapters import dequantised
from podium.models.architecture import DecoderConfig
from podium.models.linear import AnyWeight, Linear, Weight, activation_dtype, make_linear, of_bits, with_adapters
from podium.models.params import LAYERS, SCALE, is_adapter, matrix_dims, param_specs
from podium.sharding import Params, ShardingRules

LAYER_INPUT = "layer_input"
"""The name of what enters a layer, for what decides where it waits."""
Attend = Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]
"""`(kv, layer [], q [B, T, H, Q], k [B, T, K, Q], v [B, T, K, Q]) -> (kv, attended [B, T, H, Q])`."""


def forward(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    kv: Any = (),
    *,
    config: DecoderConfig,
    rules: ShardingRules,
    dtype: jnp.dtype,
    remat: Remat = "none",
    groups: int = 1,
    wide: bool = False,
) -> tuple[jax.Array, Any]:
    """The hidden states from which the next tokens are predicted.

    Args:
        params: as `param_specs` declares them; used in `dtype`, whatever they are stored in. Without the adapters
            that it declares, the model is that under them.
        tokens: [B, T] int32.
        positions: [B, T] int32 of each token in its own sequence, for the rotation.
        attend: called in every layer; carries `kv` from layer to layer.
        kv: what `attend` keeps: () in training, the cache in the engine.
        config: the decoder's numbers.
        rules: where weights and activations are while they compute (not where they are stored).
        dtype: of the products' operands (`podium.models.linear`); norms and softmax are float32 inside.
        remat: what the backward pass makes again: nothing, each layer from its input ("layer"; "offload": kept by
            the host), or all of a layer but the results of its products with weights ("products").
        groups: of each device's rows, which a layer computes one after the other with the weights that it gathered
            once; `kv` is then arrays [B, ...] that `attend` only reads.
        wide: whether the weights' gradients are float32 from the product on, before devices exchange their shares;
            otherwise they are in the format of what they are made of.

    Returns:
        Hidden states after the final norm, [B, T, D] in `activation_dtype(rules, dtype)`, and `kv`.
    """
    weight = functools.partial(_weight, config=config, rules=rules, dtype=dtype, wide=wide and dtype != jnp.float32)

    def layer(carry: tuple[jax.Array, Any], xs: tuple[jax.Array, Params]) -> tuple[tuple[jax.Array, Any], None]:
        x, kv = carry
        index, stored = xs
        x = checkpoint_name(x, LAYER_INPUT)
        w = dequantised({name: weight(LAYERS + name, value) for name, value in stored.items()}, dtype)
        compute = functools.partial(_layer, index=index, attend=attend, config=config, rules=rules)
        if groups > 1:
            return (_in_groups(compute, w, (x, cos, sin, kv), groups, rules, remat), kv), None
        return compute(w, (x, cos, sin, kv)), None

    cos, sin = rope_tables(positions, config)  # [B, T, Q/2]
    # Rows are taken of the table as it is stored: they are less to exchange than the table, or than its gradient.
    with jax.named_scope("embed"):
        rows = of_bits(params["embed"][tokens]).astype(dtype)
        x = _to_rows(rules.storage, rows).astype(activation_dtype(rules, dtype))
    stacked = {name.removeprefix(LAYERS): value for name, value in params.items() if name.startswith(LAYERS)}
    with jax.named_scope("layers"):
        (x, kv), _ = jax.lax.scan(_remat(layer, remat), (x, kv), (jnp.arange(config.layers), stacked))
    return rms_norm(x, weight("final_norm", params["final_norm"]), config.norm_eps), kv


def _layer(
    w: dict[str, Any], rows: tuple, *, index: jax.Array, attend: Attend, config: DecoderConfig, rules: ShardingRules
) -> tuple[jax.Array, Any]:
    """What leaves a layer and what `attend` keeps, of rows (x [B, T, D], cosines, sines, what `attend` kept)."""
    (x, cos, sin, kv), linear = rows, make_linear(rules)
    w = with_adapters(w, config.lora.scale) if config.lora else w
    with jax.named_scope("attention"):
        q, k, v = _project(rms_norm(x, w["attention_norm"], config.norm_eps), w, config, linear, rules)
        turn = rotate_by_product if rules.platform == "tpu" else rotate
        kv, attended = attend(kv, index, turn(q, cos, sin), turn(k, cos, sin), v)
        attended = _from_sequences(rules, attended)
        x = x + _to_rows(rules, linear("bthq,hqd->btd", attended, w["o"]))
    with jax.named_scope("mlp"):
        x = x + _to_rows(rules, _mlp(rms_norm(x, w["mlp_norm"], config.norm_eps), w, linear))
    return rules.constrain(x, "rows", "tokens", None), kv


@jax.named_scope("weights")
def _weight(
    name: str, stored: jax.Array, *, config: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype, wide: bool
) -> Any:
    """A weight as a layer uses it (`AnyWeight`), in `dtype`; with `wide` its gradient, where it is trained, is float32.

    A norm's or a bias has then a number of `dtype` as a float32: what it is added to, or multiplied with, is too.
    """
    spec, as_stored = param_specs(config)[name], stored
    axes, matrix, stored = spec.axes[len(spec.axes) - stored.ndim :], len(matrix_dims(spec)) > 1, of_bits(stored)
    if name.endswith(SCALE) or stored.dtype == jnp.int8:
        return rules.constrain_weight(stored, *axes)
    frozen = config.lora is not None and not is_adapter(name)
    kept = as_stored if rules.on_cpu and rules.mesh.size == 1 else None  # nothing is gathered, and a cast is cheap
    if frozen or not wide:
        value = rules.constrain_weight(stored.astype(dtype), *axes)
        return Weight(value, None, kept) if frozen and matrix else value
    if matrix:
        value = rules.constrain_weight(jax.lax.stop_gradient(stored).astype(dtype), *axes)
        return Weight(value, rules.weight_sums(stored, *axes), kept)
    here = rules.constrain_weight(stored, *axes)
    return here + jax.lax.stop_gradient(here.astype(dtype).astype(jnp.float32) - here)


def _in_groups(
    compute: Callable, w: dict[str, Any], rows: tuple, groups: int, rules: ShardingRules, remat: Remat
) -> jax.Array:
    """What leaves a layer whose rows are computed group by group; the weights' gradients are added in float32."""
    adapters = any(map(is_adapter, w))  # the others are frozen then, and have no gradients
    trained = {name: x for name, x in w.items() if is_adapter(name) or not adapters}
    sums = {name: x if isinstance(x, Weight) else x.astype(jnp.float32) for name, x in trained.items()}

    def group(rows: tuple) -> jax.Array:
        used = {name: x if isinstance(x, Weight) else x.astype(w[name].dtype) for name, x in sums.items()}
        return compute(w | used, rows)[0]

    return _merge(rules, jax.lax.map(_remat(group, remat), jax.tree.map(lambda x: _split(rules, x, groups), rows)))


def _remat(body: Callable, remat: Remat) -> Callable:
    """A loop's body whose backward pass keeps what `remat` says, and makes the rest again."""
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    policy = {
        "layer": None,
        "products": policies.dots_with_no_batch_dims_saveable,
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[remat]
    return jax.checkpoint(body, prevent_cse=False, policy=policy)


def _split(rules: ShardingRules, x: jax.Array, groups: int) -> jax.Array:
    """[B, T, ...] in groups of every device's rows, [groups, B/groups, T, ...]; nothing moves between devices."""
    devices = rules.num_shards("batch")
    x = x.reshape(devices, groups, -1, *x.shape[1:])
    x = jnp.moveaxis(x, 1, 0).reshape(groups, -1, *x.shape[3:])
    return rules.constrain(x, None, "batch", "tokens", *[None] * (x.ndim - 3))


def _merge(rules: ShardingRules, x: jax.Array) -> jax.Array:
    """The rows of `_split` as they were."""
    groups, devices = len(x), rules.num_shards("batch")
    x = x.reshape(groups, devices, -1, *x.shape[2:])
    x = jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[3:])
    return rules.constrain(x, "batch", "tokens", *[None] * (x.ndim - 2))


def _to_rows(rules: ShardingRules, x: jax.Array) -> jax.Array:
    """[B, T, D] that weights split by width have made, part of the width each, laid out by rows."""
    x = rules.constrain(x, "batch_by_width", "tokens_by_width", "width")
    x = rules.constrain(x, "rows", "tokens_by_width", "width_of_rows")
    return rules.constrain(x, "rows", "tokens", None)


def _to_sequences(rules: ShardingRules, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Parts of every head of all rows, [B, T, H or K, Q], become whole heads of some rows, in one exchange."""
    if rules.num_shards("head_dim") == 1:
        return q, k, v
    B, T, H, Q = q.shape
    K = k.shape[2]
    parts = (q.reshape(B, T, K, H // K, Q), k[:, :, :, None], v[:, :, :, None])
    joined = rules.constrain(jnp.concatenate(parts, axis=3), "rows", None, "kv_heads", None, "head_dim")
    joined = rules.constrain(joined, "batch", None, "cache_heads", None, None)
    return joined[:, :, :, :-2].reshape(B, T, H, Q), joined[:, :, :, -2], joined[:, :, :, -1]


def _from_sequences(rules: ShardingRules, attended: jax.Array) -> jax.Array:
    """[B, T, H, Q]: the way back from `_to_sequences`."""
    if rules.num_shards("head_dim") == 1:
        return attended
    return rules.constrain(attended, "rows", None, "heads", "head_dim")


def head_weights(params: Params, rules: ShardingRules, dtype: jnp.dtype, *, wide: bool = False) -> AnyWeight:
    """The matrix from hidden states to logits, [V, D], as stored: the head, or the embedding where they are tied.

    With `wide` its gradient is float32, summed over chunks of tokens and exchanged so.
    """
    stored, storage = of_bits(params.get("head", params["embed"])), rules.storage
    with jax.named_scope("weights"):
        if not wide or dtype == jnp.float32:
            return storage.constrain(stored.astype(dtype), "vocab", "width")
        value = storage.constrain(jax.lax.stop_gradient(stored).astype(dtype), "vocab", "width")
        return Weight(value, stored)


def _project(
    x: jax.Array, w: dict[str, Any], config: DecoderConfig, linear: Linear, rules: ShardingRules
) -> tuple[jax.Array, ...]:
    """Queries [B, T, H, Q], keys and values [B, T, K, Q] of a layer, not yet rotated.

    Where it trains on TPU, in one product: few heads of keys and values take as long to read and write as many.
    """
    own = [w[name] for name in ("q", "k", "v")]
    if rules.platform == "tpu" and isinstance(w["q"], Weight) and not config.lora and rules.num_shards("heads") == 1:
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *own)
        ends = [config.heads, config.heads + config.kv_heads]
        q, k, v = jnp.split(linear("btd,dhq->bthq", x, joined), ends, axis=2)
    else:
        q, k, v = (linear("btd,dhq->bthq", x, each) for each in own)
    if config.qkv_bias:
        biases = ((q, "q_bias"), (k, "k_bias"), (v, "v_bias"))
        q, k, v = ((y + w[name][None, None]).astype(y.dtype) for y, name in biases)
    q, k, v = _to_sequences(rules, q, k, v)
    if config.qk_norm:
        q, k = rms_norm(q, w["q_norm"], config.norm_eps), rms_norm(k, w["k_norm"], config.norm_eps)
    return q, k, v


def _mlp(x: jax.Array, w: dict[str, Any], linear: Linear) -> jax.Array:
    """SwiGLU (arXiv:2002.05202); [B, T, D] to [B, T, D]."""
    gate, up = linear("btd,df->btf", x, w["gate"]), linear("btd,df->btf", x, w["up"])
    return linear("btf,fd->btd", _gated(gate, up), w["down"])


@functools.partial(jax.checkpoint, prevent_cse=False)
def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Made again in the backward pass, which would else keep three more arrays of its size for each layer."""
    return jax.nn.silu(gate) * up


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMS norm (arXiv:1910.07467) over the last dimension, computed in float32, in the dtype of `x`.

    Made again in the backward pass, which would else keep two float32 arrays of its size.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y.astype(x.dtype) * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


def rope_frequencies(config: DecoderConfig) -> np.ndarray:
    """Radians per position of each pair of a head, [Q/2] float32 (arXiv:2104.09864), stretched as Llama 3.1 does."""
    half = config.head_dim // 2
    frequencies = 1.0 / config.rope_theta ** (np.arange(half, dtype=np.float64) / half)
    if (scaling := config.rope_scaling) is not None:
        wavelengths = 2 * np.pi / frequencies
        turns = scaling.original_max_positions / wavelengths  # rotations within the original context
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)  # 1: fast pairs stay, 0: slow pairs are stretched by the factor
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    return frequencies.astype(np.float32)


def rope_tables(positions: jax.Array, config: DecoderConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each position's angles, [B, T, Q/2] float32."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)[None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary position embedding; halves of a head form the pairs, as in Hugging Face. `x` is [B, T, H, Q]."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]  # [B, T, 1, Q/2]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@jax.custom_vjp
def rotate_by_product(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """`rotate` for TPUs, the same numbers: halves change places in a product with a matrix of 0, 1 and -1.

    XLA fuses all of it into one pass. Slices of half a head, of which registers have lanes for the whole, take three.
    """
    swap = jnp.asarray(np.kron([[0, 1], [-1, 0]], np.eye(x.shape[-1] // 2)), x.dtype)  # (a, b) becomes (-b, a)
    exact = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    turned = jnp.einsum("bthq,qr->bthr", x, swap, **exact)
    cos, sin = (jnp.concatenate([table, table], axis=-1)[:, :, None] for table in (cos, sin))
    return (x.astype(jnp.float32) * cos + turned * sin).astype(x.dtype)


rotate_by_product.defvjp(  # by itself, whose product policies of jax.checkpoint do not see, and so do not keep
    lambda x, cos, sin: (rotate_by_product(x, cos, sin), (cos, sin)),
    lambda tables, d: (rotate_by_product(d, tables[0], -tables[1]), None, None),
)
