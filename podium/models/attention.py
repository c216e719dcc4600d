"""Which tokens see which, and the attention of rows that training and prefill use, in one of several ways.

All give the same numbers but for rounding. `podium.models.blockwise` and the kernels make no array of all scores; the
reference here does, and is what the others are compared with.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from podium.config.attention import Backend
from podium.models.blockwise import blockwise_attention
from podium.models.gpu_attention import gpu_attention
from podium.models.params import mesh_axis_names
from podium.models.sequence import over_tokens
from podium.models.tpu_attention import tpu_attention
from podium.sharding import ShardingRules

RowAttention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""`(q [B, T, H, Q], k [B, T, K, Q], v [B, T, K, Q]) -> attended [B, T, H, Q]`."""


def row_attention(backend: Backend, segments: jax.Array, prompts: jax.Array, rules: ShardingRules) -> RowAttention:
    """The attention of packed rows: a token sees the earlier ones of its own segment and of its prompt's.

    Every device attends for its own rows and heads: where the tokens of a row are split, they change places with the
    heads before, and after. Padding gives numbers without meaning, but finite ones.

    Args:
        backend: how it is computed.
        segments: [B, T] int32, the segment of each token; 0 is padding.
        prompts: [B, T] int32, the segment that is the token's prompt; its own where it has none apart.
        rules: where rows and heads are.
    """
    if backend == "reference":
        mask = rules.constrain(packed_mask(segments, prompts), "batch", None, None)  # [B, T, T]
        return lambda q, k, v: causal_attention(q, k, v, mask)
    batch, tokens = rules.axes.get("batch"), mesh_axis_names(rules.axes.get("tokens"))
    heads = None if set(mesh_axis_names(rules.axes.get("heads"))) & set(mesh_axis_names(batch)) else "heads"
    rows, ids = rules.spec(("batch", "tokens", heads, None)), rules.spec(("batch", "tokens"))
    of_rows = {"tpu_kernel": tpu_attention, "gpu_kernel": gpu_attention, "blocks": blockwise_attention}[backend]
    attention = jax.shard_map(
        over_tokens(of_rows, rules.num_shards("tokens"), tokens),
        mesh=rules.mesh,
        in_specs=(rows, rows, rows, ids, ids),
        out_specs=rows,
        check_vma=False,
    )
    scoped = jax.named_scope("scores")(attention)
    return lambda q, k, v: scoped(q, k, v, segments, prompts)


def packed_mask(segments: jax.Array, prompts: jax.Array) -> jax.Array:
    """What each token of a packed row may see: earlier tokens of its own segment and of its prompt's.

    Args:
        segments: [B, T] int32, the segment of each token; 0 is padding.
        prompts: [B, T] int32, the segment that is the token's prompt; its own where it has none apart.

    Returns:
        [B, T, T] bool, query by key.
    """
    T = segments.shape[1]
    causal = jax.numpy.tri(T, dtype=bool)[None]
    key = segments[:, None, :]
    return causal & ((key == segments[:, :, None]) | (key == prompts[:, :, None]))


@jax.named_scope("scores")
def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Scaled dot-product attention with grouped heads; scores and softmax in float32, all of them at once.

    Args:
        q: [B, T, H, Q].
        k: [B, S, K, Q], K divides H.
        v: [B, S, K, Q].
        mask: [B, T, S] bool, true where a query sees a key. A row of none gives finite numbers without meaning.

    Returns:
        [B, T, H, Q].
    """
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
