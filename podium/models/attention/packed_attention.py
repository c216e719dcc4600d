"""Attention over packed rows, with several implementations that agree up to rounding.

`podium.models.attention.blockwise` and the kernels never store all scores of a row. The reference here does, and tests
compare the others with it.
"""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from podium.config.attention_blocks import Backend
from podium.kernels.gpu_attention import gpu_attention, options_for
from podium.kernels.tpu_attention import tpu_attention
from podium.models.attention.blockwise import MASKED, blockwise_attention
from podium.models.attention.mask import Visibility
from podium.models.params import mesh_axis_names
from podium.sharding import ShardingRules

Attention = Callable[[jax.Array, jax.Array, jax.Array, Visibility, jax.Array | None], jax.Array]
"""`(q [B, T, H, Q], k [B, T, K, Q], v [B, T, K, Q], visibility [B, T], sinks [H] or None) -> attended [B, T, H, Q]`."""


class RowAttention(Protocol):
    """Attention over packed rows."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None, /) -> jax.Array:
        """Attended [B, T, H, Q] from q [B, T, H, Q], k and v [B, T, K, Q], and sinks [H] (`At.sinks`)."""
        ...


def row_attention(backend: Backend, visibility: Visibility, rules: ShardingRules) -> RowAttention:
    """Make the attention function for packed rows.

    Each device computes its own rows and heads. If the tokens of a row are split over devices, they are exchanged for
    heads before attention and back after it. Outputs at padding are finite but meaningless.

    Args:
        backend: which implementation to use.
        visibility: which tokens [B, T] attend to which.
        rules: how rows and heads are split over devices.
    """
    if backend == "reference":
        mask = rules.constrain(visibility.mask(), "batch", None, None)  # [B, T, T]
        return lambda q, k, v, sinks=None: causal_attention(q, k, v, mask, sinks)
    batch, tokens = rules.axes.get("batch"), mesh_axis_names(rules.axes.get("tokens"))
    heads = None if set(mesh_axis_names(rules.axes.get("heads"))) & set(mesh_axis_names(batch)) else "heads"
    rows, ids = rules.spec(("batch", "tokens", heads, None)), rules.spec(("batch", "tokens"))
    device = rules.mesh.devices.flat[0]

    def on_gpu(q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, sinks: jax.Array | None) -> jax.Array:
        return gpu_attention(q, k, v, visibility, sinks, options=options_for(q, device))

    of_rows: Attention = {"tpu_kernel": tpu_attention, "gpu_kernel": on_gpu, "blocks": blockwise_attention}[backend]
    if (devices := rules.num_shards("tokens")) > 1:
        of_rows = _over_tokens(of_rows, devices, tokens)
    attention = jax.shard_map(
        of_rows,
        mesh=rules.mesh,
        in_specs=(rows, rows, rows, ids, rules.spec((heads,))),
        out_specs=rows,
        check_vma=False,
    )
    scoped = jax.named_scope("scores")(attention)
    return lambda q, k, v, sinks=None: scoped(q, k, v, visibility, sinks)


def _over_tokens(attention: Attention, devices: int, axes: tuple[str, ...]) -> Attention:
    """Wrap attention over whole rows for arrays whose tokens are split over `devices`.

    Before attention, each device sends its tokens' queries of other heads away and receives all other tokens' queries
    of its own heads; afterwards the reverse (DeepSpeed-Ulysses, arXiv:2309.14509). Every device computes equally many
    heads of the same whole rows, so the work is balanced however tokens are split; ring attention would need a causal
    split for that.

    Call the result inside `shard_map`: arguments and result are one device's part, [B, T/devices, ...].

    Args:
        attention: attention over whole rows with a device's heads.
        devices: number of devices that a row is split over; must divide the query heads.
        axes: the mesh axes of these devices.
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, sinks: jax.Array | None) -> jax.Array:
        whole = jax.tree.map(lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True), visibility)
        k, v = (_keys(x, q.shape[2], devices, axes) for x in (k, v))
        if sinks is not None:
            own = len(sinks) // devices
            sinks = jax.lax.dynamic_slice_in_dim(sinks, jax.lax.axis_index(axes) * own, own)
        q = jax.lax.all_to_all(q, axes, split_axis=2, concat_axis=1, tiled=True)  # [B, T, H/devices, Q]
        return jax.lax.all_to_all(attention(q, k, v, whole, sinks), axes, split_axis=1, concat_axis=2, tiled=True)

    return attend


def _keys(x: jax.Array, heads: int, devices: int, axes: tuple[str, ...]) -> jax.Array:
    """Keys or values [B, T/devices, K, Q] of all tokens, for the device's share of the H query heads.

    If `devices` does not divide the K heads, all are gathered, and each device selects those it needs.
    """
    kv_heads = x.shape[2]
    if kv_heads % devices == 0:
        return jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)
    x = jax.lax.all_gather(x, axes, axis=1, tiled=True)  # [B, T, K, Q]
    own, queries = heads // devices, heads // kv_heads  # query heads per device, and per key head
    needed = (jax.lax.axis_index(axes) * own + jnp.arange(own)) // queries  # key head of each query head
    return jnp.take(x, needed[:1] if queries % own == 0 else needed, axis=2)


@jax.named_scope("scores")
def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, sinks: jax.Array | None = None
) -> jax.Array:
    """Scaled dot-product attention with grouped heads; all scores at once, softmax in float32.

    Args:
        q: [B, T, H, Q].
        k: [B, S, K, Q], K divides H.
        v: [B, S, K, Q].
        mask: [B, T, S] bool, True if a query attends to a key. Where it is False for all keys, the output is finite but
            meaningless.
        sinks: [H], score of each head with a key that has no value (`At.sinks`); None: no such key.

    Returns:
        [B, T, H, Q].
    """
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
        if sinks is not None:
            return _with_sinks(q, k, v, mask, sinks)
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])


def _with_sinks(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, sinks: jax.Array) -> jax.Array:
    (B, T, H, Q), K = q.shape, k.shape[2]
    queries = q.reshape(B, T, K, H // K, Q)
    scores = jnp.einsum("btkgq,bskq->bkgts", queries, k, preferred_element_type=jnp.float32) * Q**-0.5
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    column = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, K, H // K, 1, 1), (*scores.shape[:-1], 1))
    shares = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1].astype(v.dtype)
    return jnp.einsum("bkgts,bskq->btkgq", shares, v).reshape(B, T, H, Q)
