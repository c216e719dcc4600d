"""The attention of packed rows, computed in one of several ways that agree up to rounding.

`podium.models.blockwise` and the kernels never hold all scores of a row; the reference here does, and the others are
compared with it.
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
from podium.models.visibility import Visibility
from podium.sharding import ShardingRules

RowAttention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""`(q [B, T, H, Q], k [B, T, K, Q], v [B, T, K, Q]) -> attended [B, T, H, Q]`."""


def row_attention(backend: Backend, visibility: Visibility, rules: ShardingRules) -> RowAttention:
    """The attention of packed rows.

    Every device attends for its own rows and heads; if the tokens of a row are split over devices, they are exchanged
    for heads before, and back after. Outputs of padding are finite but meaningless.

    Args:
        backend: how it is computed.
        visibility: of tokens [B, T].
        rules: how rows and heads are split over devices.
    """
    if backend == "reference":
        mask = rules.constrain(visibility.mask(), "batch", None, None)  # [B, T, T]
        return lambda q, k, v: causal_attention(q, k, v, mask)
    batch, tokens = rules.axes.get("batch"), mesh_axis_names(rules.axes.get("tokens"))
    heads = None if set(mesh_axis_names(rules.axes.get("heads"))) & set(mesh_axis_names(batch)) else "heads"
    rows, ids = rules.spec(("batch", "tokens", heads, None)), rules.spec(("batch", "tokens"))
    of_rows = {"tpu_kernel": tpu_attention, "gpu_kernel": gpu_attention, "blocks": blockwise_attention}[backend]
    attention = jax.shard_map(
        over_tokens(of_rows, rules.num_shards("tokens"), tokens),
        mesh=rules.mesh,
        in_specs=(rows, rows, rows, ids),
        out_specs=rows,
        check_vma=False,
    )
    scoped = jax.named_scope("scores")(attention)
    return lambda q, k, v: scoped(q, k, v, visibility)


@jax.named_scope("scores")
def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Scaled dot-product attention with grouped heads; scores and softmax in float32, all of them at once.

    Args:
        q: [B, T, H, Q].
        k: [B, S, K, Q], K divides H.
        v: [B, S, K, Q].
        mask: [B, T, S] bool, true where a query attends to a key. If it is false for all keys, the output is finite
            but meaningless.

    Returns:
        [B, T, H, Q].
    """
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
