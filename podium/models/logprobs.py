"""Computes log-probabilities from hidden states, a chunk of tokens at a time, so that [B, T, V] never exists."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podium.config.head import HeadKind, fast_memory
from podium.kernels.tpu_head import HeadOptions, tpu_head
from podium.models.blocks.weights import AnyWeight, Weight
from podium.models.linear import full_precision, product
from podium.sharding import ShardingRules

FLOAT32_BYTES = 4


class TokenLogprobs(NamedTuple):
    """Log-probability and entropy at each target token, under the softmax at the sampling temperature."""

    logprobs: jax.Array  # [B, T] float32
    entropy: jax.Array  # [B, T] float32, nats
    divergence: jax.Array | None = None  # [B, T] float32, nats, to another model's distribution; None if absent


class Taught(NamedTuple):
    """The hidden states of a model to learn from, for the same targets, and its head."""

    hidden: jax.Array  # [B, T, D'], where D' is that model's width
    head: jax.Array  # [V, D'], as stored


@jax.named_scope("logits")
def logits_at(hidden: jax.Array, head: AnyWeight, temperature: float, *, on_cpu: bool = False) -> jax.Array:
    """Float32 logits divided by the temperature, [..., V], from hidden states [T, D] or [B, T, D] and a head [V, D].

    `on_cpu` selects the backward pass's products (`podium.models.linear.product`).
    """
    outer = "bt"[: hidden.ndim - 1]
    logits = product(f"{outer}d,vd->{outer}v", jnp.dtype(jnp.float32), on_cpu, hidden, head)
    return logits / temperature if temperature != 1.0 else logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """How log-probabilities are computed; static."""

    temperature: float
    """Temperature of the softmax; must equal the sampler's for the log-probabilities to agree."""
    chunk: int
    """Tokens per device whose logits exist at a time."""
    rules: ShardingRules
    """How the batch is split."""
    remat: bool = True
    """False keeps the logits for the backward pass: faster, with [B, T, V] float32 of memory."""
    kind: HeadKind = "chunked"
    """"fused" computes no logits in the forward pass, and in the backward pass the logits' gradient for as many tokens
    as fit in a chunk's memory; `remat` then has no effect, and `taught` must be None."""
    reverse: float = 1.0
    """Share of KL(policy || taught) in the divergence; the rest is KL(taught || policy)."""


def token_logprobs(
    hidden: jax.Array, head: AnyWeight, targets: jax.Array, settings: HeadSettings, taught: Taught | None = None
) -> TokenLogprobs:
    """Log-probability of each target and entropy of its distribution. All of training's log-probabilities come from
    here.

    Logits of at most `settings.chunk` tokens per device exist at a time: the backward pass recomputes them from the
    hidden states, unless `settings.remat` is False.

    Args:
        hidden: [B, T, D], states from which the targets are predicted.
        head: [V, D], as stored; its gradient is summed over chunks in its own format, or in float32 for a `Weight`.
        targets: [B, T] int32.
        settings: how they are computed.
        taught: a model whose distributions are compared with those of the policy.
    """
    rules = settings.rules
    B, T, _ = hidden.shape
    parts, cuts = rules.num_shards("batch"), rules.num_shards("tokens")  # of the rows, and of each row's tokens
    columns = max(1, min(T // cuts, settings.chunk * parts // B))  # positions of all rows per chunk
    of_device = functools.partial(_in_chunks, columns=columns, settings=settings)
    if settings.kind == "fused":
        assert taught is None, "a fused head computes no logits to compare with another model's"
        of_device = functools.partial(_fused, settings=settings)
    if parts * cuts == 1:  # with an extra dimension of 1, XLA on CPU would copy the head to another layout
        return of_device(hidden, head, targets, taught)
    with jax.named_scope("weights"):
        heads = _copies(head, rules)  # [n, V, D]
        others = None if taught is None else _copies(taught.head, rules)

    def pieces(x: jax.Array) -> jax.Array:  # [B, T, ...] to [n, B/parts, T/cuts, ...]
        x = x.reshape(parts, B // parts, cuts, T // cuts, *x.shape[2:])
        return jnp.swapaxes(x, 1, 2).reshape(parts * cuts, B // parts, T // cuts, *x.shape[4:])

    both = None if taught is None or not isinstance(others, jax.Array) else Taught(pieces(taught.hidden), others)
    given = (pieces(hidden), heads, pieces(targets), both)
    if settings.kind == "fused":
        spec = rules.spec(("pieces",))
        device = lambda *own: jax.tree.map(lambda x: x[None], of_device(*jax.tree.map(lambda x: x[0], own)))  # noqa: E731
        found = jax.shard_map(device, mesh=rules.mesh, in_specs=spec, out_specs=spec, check_vma=False)(*given)
    else:
        found = jax.vmap(of_device, spmd_axis_name=rules.axes["pieces"])(*given)

    def whole(x: jax.Array) -> jax.Array:  # [n, B/parts, T/cuts] to [B, T]
        return jnp.swapaxes(x.reshape(parts, cuts, B // parts, T // cuts), 1, 2).reshape(B, T)

    return jax.tree.map(whole, found)


def _copies(head: AnyWeight, rules: ShardingRules) -> AnyWeight:
    """One copy of the head per piece of the batch, [n, V, D]."""
    if not isinstance(head, Weight):
        return rules.weight_copies(head, "vocab", "width")
    assert head.sums is not None  # a caller that needs no gradient passes a plain array
    value = rules.weight_copies(head.value, "vocab", "width")
    return Weight(value, rules.sums_of_copies(head.sums, "vocab", "width"))


@jax.named_scope("logits")
def _fused(
    hidden: jax.Array, head: AnyWeight, targets: jax.Array, taught: Taught | None, *, settings: HeadSettings
) -> TokenLogprobs:
    """`token_logprobs` for one device's rows by the kernels, without a divergence; the kernels are interpreted
    on CPU.
    """
    rules = settings.rules
    value, sums = (head.value, head.sums) if isinstance(head, Weight) else (head, None)
    options = HeadOptions(
        scale=1 / settings.temperature,
        chunk=settings.chunk * FLOAT32_BYTES // value.dtype.itemsize,
        memory=fast_memory(rules.device_kind),
        precision=full_precision(value.dtype),
        interpret=rules.on_cpu,
    )
    return TokenLogprobs(*tpu_head(hidden, value, sums, targets, options))


@jax.named_scope("logits")
def _in_chunks(
    hidden: jax.Array,
    head: AnyWeight,
    targets: jax.Array,
    taught: Taught | None,
    *,
    columns: int,
    settings: HeadSettings,
) -> TokenLogprobs:
    """`token_logprobs` for one device's rows, hidden [b, T, D] and targets [b, T], in chunks of `columns` positions."""
    (b, T, _), rules = hidden.shape, settings.rules
    padding = -T % columns

    def logits_of(h: jax.Array, head: AnyWeight) -> jax.Array:  # [b, c, V]
        return rules.constrain(logits_at(h, head, settings.temperature, on_cpu=rules.on_cpu), None, None, "vocab")

    def chunk(h: jax.Array, target: jax.Array, theirs: jax.Array | None) -> TokenLogprobs:  # [b, c, D], [b, c]
        logits = logits_of(h, head)
        scored = _score(logits, target)
        if taught is None or theirs is None:
            return scored
        return scored._replace(divergence=_divergence(settings.reverse, logits, logits_of(theirs, taught.head)))

    def pieces(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, -1, columns, *x.shape[2:]), 1, 0)  # [chunks, b, c, ...]

    body = jax.checkpoint(chunk) if settings.remat else chunk
    theirs = None if taught is None else pieces(taught.hidden)
    _, chunks = jax.lax.scan(lambda _, xs: (None, body(*xs)), None, (pieces(hidden), pieces(targets), theirs))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(b, -1)[:, :T], chunks)


@jax.custom_vjp
def _score(logits: jax.Array, targets: jax.Array) -> TokenLogprobs:
    """Log-probability of targets [...] and entropy from float32 logits [..., V].

    The backward pass is explicit: one elementwise pass over the logits, fused with the product after it. The default
    would make a second array of that size and scatter into a third.
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
    of_logprob, of_entropy = gradient.logprobs[..., None], gradient.entropy[..., None]
    table = logits - total
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    share = jnp.exp(table) * (of_logprob + of_entropy * (table + entropy[..., None]))
    return jnp.where(is_target, of_logprob, 0.0) - share, None


_score.defvjp(_score_forward, _score_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(reverse: float, logits: jax.Array, others: jax.Array) -> jax.Array:
    """`reverse` KL(p || q) + (1 - reverse) KL(q || p), [...], of the distributions of logits [..., V], p and q.

    The gradient is that of p's logits, and explicit: equal logits give exactly 0, which the default would round.
    """
    return _divergence_forward(reverse, logits, others)[0]


def _divergence_forward(
    reverse: float, logits: jax.Array, others: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(others)
    value = jnp.sum((reverse * jnp.exp(p) - (1 - reverse) * jnp.exp(q)) * (p - q), axis=-1)
    return value, (logits, others)


def _divergence_backward(
    reverse: float, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logits, others = saved
    p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(others)
    from_mean = p - q - jnp.sum(jnp.exp(p) * (p - q), axis=-1, keepdims=True)
    slope = reverse * jnp.exp(p) * from_mean + (1 - reverse) * (jnp.exp(p) - jnp.exp(q))
    return gradient[..., None] * slope, jnp.zeros_like(others)


_divergence.defvjp(_divergence_forward, _divergence_backward)
