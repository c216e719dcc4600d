"""The delta rule over packed rows on a TPU: each device runs the kernel for its own rows and heads."""

import jax
import jax.numpy as jnp

from podium.config.recurrence import whole_tiles
from podium.kernels.tpu_delta_rows import Paths, Tokens, delta_rows
from podium.models.attention.mask import pad_to
from podium.models.blocks.delta import CHUNK
from podium.models.blocks.delta_rule import packed_paths
from podium.models.blocks.kind import DeltaRows, Packed
from podium.sharding import ShardingRules


def row_recurrence(rules: ShardingRules, state: tuple[int, ...]) -> DeltaRows | None:
    """The kernel for packed rows with states [V, N, P] of these sizes; None if the rule is computed without a kernel.

    The kernel needs a TPU and whole tiles. If tp or sp split heads, each device has all tokens of its rows.
    """
    if rules.platform != "tpu" or not whole_tiles(state):
        return None
    heads, by_head = rules.spec(("batch", None, "state_heads", None)), rules.spec(("batch", None, "state_heads"))
    return jax.named_scope("delta_rows")(
        jax.shard_map(
            by_kernel,
            mesh=rules.mesh,
            in_specs=(heads, heads, heads, by_head, by_head, rules.spec(("batch", None))),
            out_specs=heads,
            check_vma=False,
        )
    )


def by_kernel(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, rows: Packed, *, interpret: bool = False
) -> jax.Array:
    """Implements `podium.models.blocks.kind.DeltaRows` on one device; `interpret` emulates it without a TPU, slowly."""
    (B, T, K, _), V = q.shape, v.shape[2]
    M = -(-T // CHUNK)

    def heads_first(x: jax.Array) -> jax.Array:  # [B, T, H, N] to [B, H, M C, N]
        return jnp.swapaxes(pad_to(x, M * CHUNK), 1, 2)

    def in_chunks(x: jax.Array) -> jax.Array:  # [B, T, V] to [B, M, C, K, R]
        return pad_to(x, M * CHUNK).reshape(B, M, CHUNK, K, V // K)

    def ids(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, M * CHUNK - T)), mode="edge").reshape(B, M, CHUNK)

    paths = packed_paths(in_chunks(g), ids(rows.segments), ids(rows.prompts))
    stays = jnp.broadcast_to(paths.stays[..., None], paths.ends.shape)
    steps = [jnp.swapaxes(paths.reads, 2, 3), paths.ends, paths.reached, stays]
    y: jax.Array = delta_rows(
        Tokens(
            q=heads_first(q),
            k=heads_first(k),
            v=heads_first(v),
            decays=paths.decays,
            beta=jnp.moveaxis(in_chunks(beta), 2, -1),
        ),
        Paths(seen=paths.seen.astype(jnp.float32), steps=jnp.concatenate(steps, axis=2).astype(jnp.float32)),
        interpret,
    )
    return jnp.swapaxes(y, 1, 2)[:, :T]
