"""Attention over packed rows, with several implementations that agree up to rounding.

`podium.models.attention.blockwise` and the kernels never store all scores of a row. The reference here does, and tests
compare the others with it.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from podium.config.attention_blocks import Backend
from podium.kernels.gpu_attention import gpu_attention, options_for
from podium.kernels.tpu_attention import tpu_attention
from podium.models.attention.blockwise import MASKED, blockwise_attention
from podium.models.attention.mask import Visibility
from podium.models.attention.sequence_parallel import over_tokens
from podium.models.params import mesh_axis_names
from podium.sharding import ShardingRules


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
        return gpu_attention(q, k, v, visibility, sinks, options_for(q, device))

    of_rows = {"tpu_kernel": tpu_attention, "gpu_kernel": on_gpu, "blocks": blockwise_attention}[backend]
    attention = jax.shard_map(
        over_tokens(of_rows, rules.num_shards("tokens"), tokens),
        mesh=rules.mesh,
        in_specs=(rows, rows, rows, ids, rules.spec((heads,))),
        out_specs=rows,
        check_vma=False,
    )
    scoped = jax.named_scope("scores")(attention)
    return lambda q, k, v, sinks=None: scoped(q, k, v, visibility, sinks)


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
