"""Where a log-probability is computed: from hidden states, some tokens at a time, so that no [B, T, V] exists."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podium.models.linear import product
from podium.sharding import ShardingRules


class TokenLogprobs(NamedTuple):
    """Log-probability and entropy at each target token, under the model's softmax at the sampling temperature."""

    logprobs: jax.Array  # [B, T] float32
    entropy: jax.Array  # [B, T] float32, nats


@jax.named_scope("logits")
def logits_at(hidden: jax.Array, head: jax.Array, temperature: float) -> jax.Array:
    """Float32 logits over the temperature, [..., V], of hidden states [T, D] or [B, T, D] and a head [V, D]."""
    outer = "bt"[: hidden.ndim - 1]
    logits = product(f"{outer}d,vd->{outer}v", jnp.dtype(jnp.float32), False, hidden, head)
    return logits / temperature if temperature != 1.0 else logits


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    temperature: float,
    chunk: int,
    rules: ShardingRules,
    remat: bool = True,
) -> TokenLogprobs:
    """Log-probability of each target and entropy of its distribution; the only place where training computes them.

    The logits of at most `chunk` tokens per device exist at once, forward and backward: the backward pass makes them
    again from the hidden states, unless `remat` is off.

    Args:
        hidden: [B, T, D], states from which the targets are predicted.
        head: [V, D], as it is stored.
        targets: [B, T] int32.
        temperature: of the softmax; must be the sampler's for the two to agree.
        chunk: tokens per device whose logits exist at once.
        rules: where the batch is split.
        remat: off keeps the logits for the backward pass: faster, [B, T, V] float32 of memory.
    """
    B, T, D = hidden.shape
    devices = rules.num_shards("batch")  # n
    columns = max(1, min(T, chunk * devices // B))  # positions of all rows at once
    of_device = functools.partial(_in_chunks, temperature=temperature, columns=columns, rules=rules, remat=remat)
    if devices == 1:  # for the sake of a dimension of 1, XLA on CPU would lay the head out anew
        return of_device(hidden, head, targets)
    with jax.named_scope("weights"):
        heads = rules.weight_copies(head, "vocab", "width")  # [n, V, D]
    found = jax.vmap(of_device, spmd_axis_name=rules.axes["batch"])(
        hidden.reshape(devices, -1, T, D), heads, targets.reshape(devices, -1, T)
    )
    return TokenLogprobs(*(x.reshape(B, T) for x in found))


@jax.named_scope("logits")
def _in_chunks(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    temperature: float,
    columns: int,
    rules: ShardingRules,
    remat: bool,
) -> TokenLogprobs:
    """`token_logprobs` of one device's rows, hidden [b, T, D] and targets [b, T], so many columns at once."""
    b, T, _ = hidden.shape
    padding = -T % columns

    def chunk(h: jax.Array, target: jax.Array) -> TokenLogprobs:  # [b, c, D], [b, c]
        logits = rules.constrain(logits_at(h, head, temperature), None, None, "vocab")  # [b, c, V]
        return _score(logits, target)

    def pieces(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, -1, columns, *x.shape[2:]), 1, 0)  # [chunks, b, c, ...]

    body = jax.checkpoint(chunk) if remat else chunk
    _, chunks = jax.lax.scan(lambda _, xs: (None, body(*xs)), None, (pieces(hidden), pieces(targets)))
    return TokenLogprobs(*(jnp.moveaxis(x, 0, 1).reshape(b, -1)[:, :T] for x in chunks))


@jax.custom_vjp
def _score(logits: jax.Array, targets: jax.Array) -> Any:
    """Log-probability of targets [...] and entropy under float32 logits [..., V].

    The backward pass is written out: one elementwise pass over the logits that fuses with the product behind it, where
    jax's own makes a second array of their size and scatters into a third.
    """
    return _score_forward(logits, targets)[0]


def _score_forward(logits: jax.Array, targets: jax.Array) -> tuple[TokenLogprobs, tuple[jax.Array, ...]]:
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)  # [..., 1]
    table = logits - total
    entropy = -jnp.sum(jnp.exp(table) * table, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    return TokenLogprobs((chosen - total)[..., 0], entropy), (logits, targets, total, entropy)


def _score_backward(saved: tuple[jax.Array, ...], gradient: TokenLogprobs) -> tuple[jax.Array, None]:
    logits, targets, total, entropy = saved
    of_logprob, of_entropy = (x[..., None] for x in gradient)
    table = logits - total
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    share = jnp.exp(table) * (of_logprob + of_entropy * (table + entropy[..., None]))
    return jnp.where(is_target, of_logprob, 0.0) - share, None


_score.defvjp(_score_forward, _score_backward)
