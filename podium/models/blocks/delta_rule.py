"""The gated delta rule (arXiv:2412.06464) and its short convolution, in pure jax: in chunks, and a token at a time.

S_t = e^{g_t} S_{t-1} + k_t u_t' with u_t = beta_t (v_t - e^{g_t} S_{t-1}' k_t), and o_t = S_t' q_t. Within a chunk, all
u follow from products: with A the strictly lower part of beta (k k') and the decay between two tokens, they are
(I + A)^{-1} beta (v - k S). Only the state goes from chunk to chunk; a loop over them has two products.

In packed rows a completion starts from the state after its prompt, and other completions may lie between the two. So
two states go from chunk to chunk: that of the last token's segment, and that after its prompt. Within a chunk the tree
of segments is a mask. A token's path is its sequence up to the token; decay is counted along it.

Shapes: B rows, T tokens, M chunks of C tokens, K key heads, R value heads per key head, N elements of a key, P of a
value, J states. All is computed in float32.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podium.models.blocks.kind import Packed

exact = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class Tokens(NamedTuple):
    """The inputs of the delta rule."""

    q: jax.Array  # [B, T, K, N], normed and scaled
    k: jax.Array  # [B, T, K, N], normed
    v: jax.Array  # [B, T, K, R, P]
    g: jax.Array  # [B, T, K, R], logarithm of the decay
    beta: jax.Array  # [B, T, K, R]


class Paths(NamedTuple):
    """Which carried states, and which tokens of its own chunk, are on each token's path; for all chunks."""

    decays: jax.Array  # [B, M, K, R, C], logarithm of the decay since the chunk began, along the token's path
    seen: jax.Array  # [B, M, C, C] bool, whether the second token is on the first one's path
    reads: jax.Array  # [B, M, C, J] bool, the state from the previous chunk in which the token's path begins
    ends: jax.Array  # [B, M, J, C] bool, the token after which each state is passed on; all False: no token
    stays: jax.Array  # [B, M, J] bool, whether the state is passed on unchanged

    @property
    def reached(self) -> jax.Array:
        """[B, M, J, C] bool, the tokens on the path of the one after which each state is passed on."""
        return jnp.any(self.ends[..., None] & self.seen[:, :, None], axis=3)


def chunked(tokens: Tokens, first: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, K, R, P] of rows of one sequence each, and the states after them, given the states before.

    `chunk` is C, a power of 2; shorter rows are one chunk. States are [B, K, R, N, P] float32. A token with a
    `beta` and a `g` of 0 changes no state.
    """
    T = tokens.k.shape[1]
    tokens = _in_chunks(tokens, chunk)
    C = tokens.k.shape[2]
    causal = jnp.tril(jnp.ones((C, C), bool))[None, None]
    paths = Paths(
        decays=_heads_first(jnp.cumsum(tokens.g, axis=2)),
        seen=causal,
        reads=jnp.ones((1, 1, C, 1), bool),
        ends=(jnp.arange(C) == C - 1)[None, None, None],
        stays=jnp.zeros((1, 1, 1), bool),
    )
    y, states = _over_chunks(tokens, paths, first[:, :, :, None])
    return y[:, :T], states[:, :, :, 0]


def packed(tokens: Tokens, rows: Packed, chunk: int) -> jax.Array:
    """Outputs [B, T, K, R, P] of packed rows of whole sequences; `chunk` is as for `chunked`."""
    (B, T, K, R, P), N = tokens.v.shape, tokens.k.shape[-1]
    tokens = _in_chunks(tokens, chunk)
    M, C = tokens.k.shape[1:3]
    segments, prompts = (
        jnp.pad(x, ((0, 0), (0, M * C - T)), mode="edge").reshape(B, M, C) for x in (rows.segments, rows.prompts)
    )
    paths = packed_paths(tokens.g, segments, prompts)
    y, _ = _over_chunks(tokens, paths, jnp.zeros((B, K, R, 2, N, P), jnp.float32))
    return y[:, :T]


def packed_paths(g: jax.Array, segments: jax.Array, prompts: jax.Array) -> Paths:
    """The paths of packed rows: g [B, M, C, K, R], segments and prompts [B, M, C]."""
    C = segments.shape[2]
    at = jnp.arange(C)
    before = [jnp.pad(x[:, :-1, -1], ((0, 0), (1, 0)), constant_values=-1)[:, :, None] for x in (segments, prompts)]
    last_segment, last_prompt = before  # [B, M, 1], of the previous chunk's last token
    same = segments[:, :, :, None] == segments[:, :, None]  # [B, M, C, C]
    of_prompt = prompts[:, :, :, None] == segments[:, :, None]
    own = segments == last_segment
    begins = ~own & (prompts != segments)  # its segment begins in this chunk, after a prompt
    start = _one_hot(jnp.argmax(same, axis=3), C)  # first token of its segment in the chunk
    end = _one_hot(C - 1 - jnp.argmax(of_prompt[..., ::-1], axis=3), C) & of_prompt.any(axis=3, keepdims=True)
    along = jnp.cumsum(g, axis=2)
    picked = functools.partial(exact, "bmcd,bmdkr->bmckr")
    skipped = picked(start.astype(jnp.float32), along - g) - picked(end.astype(jnp.float32), along)
    decays = along - jnp.where(begins[..., None, None], skipped, 0.0)
    of_last = segments == prompts[:, :, -1:]  # [B, M, C], tokens of the last token's prompt
    behind = _one_hot(C - 1 - jnp.argmax(of_last[..., ::-1], axis=2), C) & of_last.any(axis=2, keepdims=True)
    stays = ~of_last.any(axis=2) & (prompts[:, :, -1] == last_prompt[:, :, 0])
    return Paths(
        decays=_heads_first(decays),
        seen=(same | of_prompt) & (at[:, None] >= at[None])[None, None],
        reads=jnp.stack([own, (prompts == last_prompt) & ~own], axis=3),
        ends=jnp.stack([jnp.broadcast_to((at == C - 1)[None, None], behind.shape), behind], axis=2),
        stays=jnp.stack([jnp.zeros_like(stays), stays], axis=2),
    )


def _one_hot(index: jax.Array, size: int) -> jax.Array:
    """[..., size] bool, True at the index."""
    return index[..., None] == jnp.expand_dims(jnp.arange(size), range(index.ndim))


def _in_chunks(tokens: Tokens, chunk: int) -> Tokens:
    """The tokens in float32 as [B, M, C, ...], padded with some that change no state."""
    T = tokens.k.shape[1]
    C = min(chunk, 1 << (T - 1).bit_length())
    M = -(-T // C)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, M * C - T)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], M, C, *x.shape[2:])

    return Tokens(*map(cut, tokens))


def _heads_first(x: jax.Array) -> jax.Array:
    """[B, M, C, K, R] as [B, M, K, R, C]."""
    return jnp.moveaxis(x, 2, -1)


def _over_chunks(tokens: Tokens, paths: Paths, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, M C, K, R, P], and the last states; `first` are those before, [B, K, R, J, N, P].

    What needs no state is computed for all chunks at once. The states' dimensions J and N are one, [J N], in products,
    and no array has more than 6 dimensions: with more, XLA's fused operations on CPU crash.
    """
    beta = _heads_first(tokens.beta)
    decays = paths.decays
    J = first.shape[3]
    C = decays.shape[-1]
    q, k = (jnp.moveaxis(x, 2, 3) for x in (tokens.q, tokens.k))  # [B, M, K, C, N]
    between = decays[..., :, None] - decays[..., None, :]
    decay = jnp.exp(jnp.where(paths.seen[:, :, None, None], between, -jnp.inf))  # [B, M, K, R, C, C]
    alike = exact("bmkcn,bmkdn->bmkcd", k, k)[:, :, :, None]
    earlier = jnp.tril(jnp.ones((C, C), bool), -1)
    system = jnp.where(earlier[None, None, None, None], beta[..., None] * alike * decay, 0.0)
    solved = unit_lower_inverse(system) * beta[..., None, :]  # [B, M, K, R, C, C]
    reading = jnp.where(paths.reads[:, :, None, None], jnp.exp(decays)[..., None], 0.0)  # [B, M, K, R, C, J]

    def for_states(weights: jax.Array, x: jax.Array) -> jax.Array:
        """Each of x [B, M, K, C, N] times its weight [B, M, K, R, C, J] for each state, [B, M, K, R, C, J N]."""
        return jnp.concatenate([weights[..., j, None] * x[:, :, :, None] for j in range(J)], axis=-1)

    values = exact("bmkrcd,bmdkrp->bmkrcp", solved, tokens.v)
    keys = exact("bmkrcd,bmkrds->bmkrcs", solved, for_states(reading, k))
    ends = paths.ends[:, :, None, None]  # [B, M, 1, 1, J, C]
    at_end = jnp.sum(jnp.where(ends, decays[..., None, :], 0.0), axis=-1)  # [B, M, K, R, J]
    reached = paths.reached[:, :, None, None]  # [B, M, 1, 1, J, C]
    left = jnp.exp(jnp.where(reached, at_end[..., None] - decays[..., None, :], -jnp.inf))  # [B, M, K, R, J, C]
    reads_at_end = jnp.any(paths.ends[..., None] & paths.reads[:, :, None], axis=3)[:, :, None, None]
    kept = jnp.where(reads_at_end, jnp.exp(at_end)[..., None], 0.0)  # [B, M, K, R, J, J], new by old
    kept = kept + (paths.stays[..., None] & jnp.eye(J, dtype=bool)[None, None])[:, :, None, None]
    added = for_states(jnp.moveaxis(left, -2, -1), k)

    def chunk(states: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        values, keys, kept, added = xs
        u = values - exact("bkrcs,bkrsp->bkrcp", keys, states)
        apart = states.reshape(*states.shape[:3], J, -1)  # [B, K, R, J, N P]
        carried = kept[..., 0, None] * apart[:, :, :, :1]
        for j in range(1, J):
            carried = carried + kept[..., j, None] * apart[:, :, :, j, None]
        return carried.reshape(states.shape) + exact("bkrds,bkrdp->bkrsp", added, u), (states, u)

    given = tuple(jnp.moveaxis(x, 1, 0) for x in (values, keys, kept, added))
    last, (states, u) = jax.lax.scan(chunk, first.reshape(*first.shape[:3], -1, first.shape[-1]), given)
    scores = exact("bmkcn,bmkdn->bmkcd", q, k)[:, :, :, None] * decay
    y = exact("bmkrcs,mbkrsp->bmckrp", for_states(reading, q), states) + exact("bmkrcd,mbkrdp->bmckrp", scores, u)
    B, M, C = y.shape[:3]
    return y.reshape(B, M * C, *y.shape[3:]), last.reshape(first.shape)


def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """The inverse of I + a, with a [B, M, ..., C, C] strictly lower and C a power of 2.

    Computed by recursive halving with matrix products, all blocks of one size at once; forward substitution would go
    row by row on a TPU.
    """
    half = a.shape[-1] // 2
    if not half:
        return jnp.ones_like(a)
    halves = jnp.concatenate([a[..., :half, :half], a[..., half:, half:]], axis=1)
    first, last = jnp.split(unit_lower_inverse(halves), 2, axis=1)
    below = -exact("...ij,...jk->...ik", exact("...ij,...jk->...ik", last, a[..., half:, :half]), first)
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, last], axis=-1)], axis=-2)


def one_step(tokens: Tokens, states: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, 1, K, R, P] of one token for each row, and the states [B, K, R, N, P] after it."""
    q, k, v, g, beta = (x[:, 0].astype(jnp.float32) for x in tokens)
    states = states * jnp.exp(g)[..., None, None]
    u = beta[..., None] * (v - exact("bkn,bkrnp->bkrp", k, states))
    states = states + k[:, :, None, :, None] * u[..., None, :]
    return exact("bkn,bkrnp->bkrp", q, states)[:, None], states


def short_conv(x: jax.Array, taps: jax.Array, previous: jax.Array) -> jax.Array:
    """A causal depthwise convolution followed by silu, in packed rows: sums over a token and those before it in its
    sequence.

    Args:
        x: [B, T, H, N].
        taps: [n, H, N], the last one for the token itself.
        previous: [B, T], as in `Packed`.
    """
    padded = jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0)))  # index T: no token
    before = jnp.pad(previous, ((0, 0), (0, 1)), constant_values=x.shape[1])
    wide = taps.astype(jnp.float32)
    total, at = x.astype(jnp.float32) * wide[-1][None, None], previous
    for tap in wide[-2::-1]:
        found = jnp.take_along_axis(padded, at[:, :, None, None], axis=1)
        total = total + found.astype(jnp.float32) * tap[None, None]
        at = jnp.take_along_axis(before, at, axis=1)
    return jax.nn.silu(total).astype(x.dtype)


def next_conv(x: jax.Array, taps: jax.Array, tail: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`short_conv` for rows of one sequence each that continue earlier calls; also returns the tail for the next call.

    Args:
        x: [B, T, H, N].
        taps: [n, H, N], the last one for the token itself.
        tail: [B, n - 1, H, N], x of the last tokens before; zeros at the beginning of a sequence.
        counts: [B] int32, how many of a row's tokens are real: the new tail ends with the last of these.
    """
    T, n = x.shape[1], len(taps)
    recent = jnp.concatenate([tail.astype(x.dtype), x], axis=1)  # [B, n - 1 + T, H, N]
    wide = taps.astype(jnp.float32)
    total = sum(recent[:, j : j + T].astype(jnp.float32) * wide[j][None, None] for j in range(n))
    if T == 1:
        tail = jnp.where((counts > 0)[:, None, None, None], recent[:, 1:], recent[:, :-1])
    else:
        index = counts[:, None] + jnp.arange(n - 1)[None]
        tail = jnp.take_along_axis(recent, index[:, :, None, None], axis=1)
    return jax.nn.silu(total).astype(x.dtype), tail


def unit(x: jax.Array) -> jax.Array:
    """Vectors along the last dimension divided by their length, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
