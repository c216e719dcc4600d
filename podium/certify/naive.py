"""Naive implementation of model and objective, as papers write them: each sequence alone, without packing or chunks.

The naive update takes five files, in the order in which it happens: `naive_rules.py` (what an algorithm is),
`naive_step.py` (from episodes to advantages, weights and minibatches), this one (from weights and episodes to the loss,
which jax differentiates), `naive_optimizer.py` (from the gradient to new weights) and `naive_run.py` (what one step
changes for the next). They import nothing from `podium.algorithms`, `podium.train` and `podium.rollout`, which are
compared with them. Within `in_float64` they compute in float64.

Shapes: S episodes of a step, each after its prompt, padded on the right to T tokens; at most n tokens follow a prompt.
V: vocabulary.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from podium.certify.naive_rules import (
    COVARIANT,
    DRAWN_LOGPROBS,
    KL_POINT,
    KL_TO,
    OLD_LOGPROBS,
    RETURNS,
    UNCERTAIN,
    VALUES,
    Rules,
)
from podium.models.architecture import DecoderConfig
from podium.models.blocks.activation import Activation, Clamped
from podium.models.blocks.attention import Attention
from podium.models.blocks.delta import DeltaNet
from podium.models.blocks.experts import Experts
from podium.models.blocks.kind import Block
from podium.models.blocks.mlp import Mlp
from podium.models.blocks.rope import LinearScaling, Rope, RopeScaling, YarnScaling

Weights = dict[str, jax.Array]
Array = TypeVar("Array", jax.Array, np.ndarray)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences(Generic[Array]):
    """The episodes of an optimizer step, and the constants of its loss."""

    tokens: Array  # [S, T] int32, the prompt and what follows it
    starts: Array  # [S] int32, length of the prompt
    valid: Array  # [S, n] bool, which tokens after the prompt are trained on
    weights: Array  # [S, n], what each token's loss is multiplied by
    advantages: Array  # [S, n]
    sampled_logprobs: Array  # [S, n]
    scores: Mapping[str, Array]
    """By the names in `naive_rules`, those that the algorithm reads: [S, n], or [S, n, V] of a whole vocabulary, or []
    of an optimizer step."""
    kl_coef: Array  # [], weight of the KL in the loss
    entropy_bonus: Array  # []


class Scores(NamedTuple, Generic[Array]):
    """Statistics of the model's distributions at the tokens after each prompt, in nats."""

    logprobs: Array  # [S, n], of the actual tokens
    entropy: Array  # [S, n], of the distribution that each token is drawn from: the mean of -logprob


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Compute in float64 inside the block, on the CPU because TPUs have no float64."""
    with jax.enable_x64(True), _precise_cpu():
        yield


def wide(weights: Mapping[str, np.ndarray]) -> Weights:
    """Convert weights to float64; call it within `in_float64`."""
    return {name: jnp.asarray(np.asarray(value, np.float64)) for name, value in weights.items()}


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """Compute in float32 inside the block, on the CPU."""
    with jax.enable_x64(False), _precise_cpu():
        yield


@contextlib.contextmanager
def _precise_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        yield


def logits(weights: Weights, tokens: jax.Array, decoder: DecoderConfig, places: jax.Array | None = None) -> jax.Array:
    """Logits [n, V] of the tokens that follow those at `places` [n] of a sequence [T]; None: that follow each token."""
    states = hidden_states(weights, tokens, decoder)
    return (states if places is None else states[places]) @ weights["embed" if decoder.tied else "head"].T


def values(weights: Weights, tokens: jax.Array, decoder: DecoderConfig) -> jax.Array:
    """The score [T] of each token of one sequence [T], by a decoder whose head gives scores."""
    found = hidden_states(weights, tokens, decoder) @ weights["score"][0]
    return found + weights["score_bias"][0] if decoder.scores == "biased" else found


def hidden_states(weights: Weights, tokens: jax.Array, decoder: DecoderConfig) -> jax.Array:
    """The states [T, D] after the last norm, for one sequence [T]."""
    return _passed(weights, tokens, decoder)[0]


def router_shares(weights: Weights, tokens: jax.Array, decoder: DecoderConfig) -> jax.Array:
    """The shares [T, K, E] that the routers of K layers give the E experts, for each token of one sequence [T]."""
    return jnp.stack(_passed(weights, tokens, decoder)[1], axis=1)


def _passed(weights: Weights, tokens: jax.Array, decoder: DecoderConfig) -> tuple[jax.Array, list[jax.Array]]:
    """The states after the last norm, [T, D], and the shares [T, E] of each layer with experts, layer after layer."""
    x = weights["embed"][tokens] * decoder.embed_scale
    first, routed = 0, list[jax.Array]()
    for stack in decoder.stacks:
        places = decoder.places[first : first + len(stack.pattern)]
        first += len(places)

        def period(x: jax.Array, each: list[Weights], pattern: tuple[Block, ...] = stack.pattern) -> tuple:
            shares: list[jax.Array] = []
            for block, w in zip(pattern, each, strict=True):
                x, own = _layer(x, w, block, decoder)
                shares += [] if own is None else [own]
            return x, shares

        x, shares = jax.lax.scan(period, x, [_of_place(weights, place.prefix, decoder) for place in places])
        routed += [own[repeat] for repeat in range(stack.repeats) for own in shares]
    return _norm(x, weights["final_norm"], decoder), routed


def _of_place(weights: Weights, prefix: str, decoder: DecoderConfig) -> Weights:
    """The stacked weights whose names begin with `prefix`, with adapters merged: W + alpha / rank AB."""
    layers = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    for name in [name.removesuffix(".lora_a") for name in layers if name.endswith(".lora_a")]:
        a, b = layers[f"{name}.lora_a"], layers[f"{name}.lora_b"]
        lora = decoder.lora
        if name.startswith("expert_"):
            outer = jnp.einsum("lexr,lery->lexy", a, b)
        else:
            outer = jnp.einsum("l...r,lrm->l...m", a, b.reshape(*b.shape[:2], -1)).reshape(layers[name].shape)
        layers[name] += lora.alpha / lora.rank * outer if lora else 0.0
    return layers


def _norm(x: jax.Array, scale: jax.Array, decoder: DecoderConfig) -> jax.Array:
    """RMS norm of [..., D]."""
    y = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + decoder.norm_eps)
    return y * jnp.expand_dims(decoder.norm_offset + scale, range(x.ndim - 1))


def _layer(x: jax.Array, w: Weights, block: Block, decoder: DecoderConfig) -> tuple[jax.Array, jax.Array | None]:
    """The output of a layer, [T, D], and the shares that its router gives the experts, [T, E] (None: no experts)."""
    shares = None
    mixer, after = block.kinds
    y = _norm(x, w["attention_norm"], decoder)
    if isinstance(mixer, DeltaNet):
        found = _recurred(y, w, mixer, decoder)
    else:
        assert isinstance(mixer, Attention), "tiny_clone refuses other kinds"
        found = _attended(y, w, mixer, decoder)
    x = x + (_norm(found, w["attention_out_norm"], decoder) if block.norms_behind else found)
    y = _norm(x, w["mlp_norm"], decoder)
    if isinstance(after, Experts):
        logits = y @ w["router"] + (w["router_bias"][None] if after.bias else 0.0)
        shares = jax.nn.softmax(logits, axis=-1)
        found = _of_experts(y, w, after, shares)
    else:
        assert isinstance(after, Mlp), "tiny_clone refuses other kinds"
        found = _gated(y, w["gate"], w["up"], w["down"], after.activation)
    return x + (_norm(found, w["mlp_out_norm"], decoder) if block.norms_behind else found), shares


def _gated(
    y: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    activation: Activation,
    biases: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """The output [T, D] of a gated linear unit for `y` [T, D]; `biases` are those of gate, up and down."""
    shut, passed = y @ gate, y @ up
    if biases:
        shut, passed = shut + biases[0][None], passed + biases[1][None]
    if isinstance(activation, Clamped):
        shut = jnp.where(shut > activation.limit, activation.limit, shut)
        passed = jnp.where(jnp.abs(passed) > activation.limit, jnp.sign(passed) * activation.limit, passed) + 1
        opened = shut / (1 + jnp.exp(-activation.alpha * shut))
    elif activation == "silu":
        opened = shut / (1 + jnp.exp(-shut))
    else:
        opened = shut * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (shut + 0.044715 * shut**3))) / 2
    made = (opened * passed) @ down
    return made + biases[2][None] if biases else made


def _of_experts(y: jax.Array, w: Weights, experts: Experts, shares: jax.Array) -> jax.Array:
    """The output [T, D] of a mixture of experts for `y` [T, D]: all compute every token, most with a share of 0.

    `shares` [T, E] are the router's.
    """
    least = jnp.sort(shares, axis=-1)[:, -experts.top, None]
    shares = jnp.where(shares >= least, shares, 0.0)
    if experts.normalized:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    found = jnp.zeros_like(y)
    names = ("expert_gate", "expert_up", "expert_down")
    for each in range(experts.count):
        gate, up, down = (w[name][each] for name in names)
        biases = tuple(w[f"{name}_bias"][each] for name in names) if experts.bias else ()
        found = found + shares[:, each, None] * _gated(
            y, gate, up=up, down=down, activation=experts.activation, biases=biases
        )
    if experts.shared:  # every token goes to it
        always = _gated(y, w["gate"], w["up"], w["down"], experts.activation)
        found = found + always / (1 + jnp.exp(-(y @ w["shared_router"])))
    return found


def _attended(y: jax.Array, w: Weights, attention: Attention, decoder: DecoderConfig) -> jax.Array:
    """The output of attention, projected to the width, [T, D]."""
    positions = jnp.arange(len(y))
    angles = positions[:, None] * jnp.asarray(_frequencies(attention.rope))[None]  # [T, Q/2]
    behind = positions[:, None] - positions[None]  # query by key
    seen = (behind >= 0) & (behind < (len(y) if attention.window is None else attention.window))

    def rotated(x: jax.Array) -> jax.Array:  # [T, H, Q]
        half = attention.rope.dims // 2
        pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * attention.rope.length * jnp.exp(1j * angles)[:, None]
        return jnp.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)

    q, k, v = (jnp.einsum("td,dhq->thq", y, w[name]) for name in "qkv")
    if attention.bias:
        q, k, v = (z + w[f"{name}_bias"][None] for name, z in (("q", q), ("k", k), ("v", v)))
    if attention.norm:
        q, k = _norm(q, w["q_norm"], decoder), _norm(k, w["k_norm"], decoder)
    q, k = rotated(q), rotated(k)
    if (sharpening := attention.sharpening) is not None:
        q = q * (1 + sharpening.beta * jnp.log(1 + positions // sharpening.period))[:, None, None]
    k, v = (jnp.repeat(z, attention.heads // attention.kv_heads, axis=1) for z in (k, v))
    scores = jnp.einsum("thq,shq->hts", q, k) / np.sqrt(attention.scale_dims or attention.head_dim)
    scores = jnp.where(seen[None], scores, -jnp.inf)
    if attention.sinks:  # one more key, without a value
        extra = jnp.broadcast_to(w["sinks"][:, None, None], (attention.heads, len(y), 1))
        scores = jnp.concatenate([scores, extra], axis=-1)
    shares = jax.nn.softmax(scores, axis=-1)[..., : len(y)]
    found = jnp.einsum("hts,shq->thq", shares, v)
    if attention.gated:
        found = found / (1 + jnp.exp(-jnp.einsum("td,dhq->thq", y, w["q_gate"])))
    found = jnp.einsum("thq,hqd->td", found, w["o"])
    return found + w["o_bias"][None] if attention.out_bias else found


def _recurred(y: jax.Array, w: Weights, net: DeltaNet, decoder: DecoderConfig) -> jax.Array:
    """The output of a gated delta net, projected to the width, [T, D]: token after token (arXiv:2412.06464)."""

    def convolved(name: str) -> jax.Array:
        x = jnp.einsum("td,dhn->thn", y, w[name])
        before = jnp.concatenate([jnp.zeros((net.taps - 1, *x.shape[1:]), x.dtype), x])
        total = sum(before[j : j + len(y)] * w[f"{name}_taps"][j][None] for j in range(net.taps))
        return total / (1 + jnp.exp(-total))

    q, k, v = (convolved(name) for name in "qkv")
    q, k = (x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (jnp.repeat(x, net.value_heads // net.key_heads, axis=1) for x in (q / np.sqrt(net.key_dim), k))
    decay = jnp.exp(-jnp.exp(w["log_decay"])[None] * jnp.logaddexp(y @ w["a"] + w["decay_bias"][None], 0.0))  # [T, V]
    beta = 1 / (1 + jnp.exp(-(y @ w["b"])))

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:  # [V, N, P]
        q, k, v, decay, beta = token
        state = state * decay[:, None, None]
        state = state + jnp.einsum("v,vn,vp->vnp", beta, k, v - jnp.einsum("vn,vnp->vp", k, state))
        return state, jnp.einsum("vn,vnp->vp", q, state)

    nothing = jnp.zeros((net.value_heads, net.key_dim, net.value_dim), y.dtype)
    _, found = jax.lax.scan(step, nothing, (q, k, v, decay, beta))
    found = found / jnp.sqrt(jnp.mean(found * found, axis=-1, keepdims=True) + decoder.norm_eps)
    z = jnp.einsum("td,dvp->tvp", y, w["z"])
    return jnp.einsum("tvp,vpd->td", found * w["out_scale"][None, None] * z / (1 + jnp.exp(-z)), w["o"])


def distributions(
    weights: Weights,
    tokens: jax.Array,
    starts: jax.Array,
    decoder: DecoderConfig,
    temperature: float,
    penalty: float,
    n: int,
) -> jax.Array:
    """Log-probabilities [S, n, V] of all tokens at the n places after each prompt: of softmax(logits / temperature).

    With a repetition penalty other than 1, logits of all earlier tokens of the sequence are first divided by it if they
    are positive, and multiplied by it otherwise.

    Args:
        weights: by parameter name.
        tokens: [S, T] int32, prompts with what follows them.
        starts: [S] int32, lengths of the prompts.
        decoder: the model's architecture.
        temperature: of the softmax.
        penalty: the repetition penalty; 1 has no effect.
        n: number of places after each prompt.
    """

    def of_one(tokens: jax.Array, start: jax.Array) -> jax.Array:
        places = _before(start, len(tokens), n)
        every = logits(weights, tokens, decoder, places)  # [n, V]
        first = jnp.full(every.shape[1], len(tokens)).at[tokens].min(jnp.arange(len(tokens)))  # place of each token [V]
        said = first[None] <= places[:, None]
        every = jnp.where(said & (every > 0), every / penalty, jnp.where(said, every * penalty, every)) / temperature
        return every - jax.nn.logsumexp(every, axis=-1, keepdims=True)

    return jax.vmap(of_one)(tokens, starts)


def scores(table: jax.Array, tokens: jax.Array, starts: jax.Array) -> Scores[jax.Array]:
    """Scores [S, n] of the tokens after each prompt; `table` [S, n, V] holds the `distributions` after the prompts."""

    def of_one(own: jax.Array, tokens: jax.Array, start: jax.Array) -> Scores[jax.Array]:
        entropy = -jnp.sum(jnp.exp(own) * own, axis=-1)
        targets = tokens[_before(start, len(tokens), len(own)) + 1]
        logprobs = jnp.take_along_axis(own, targets[:, None], axis=1)[:, 0]
        return Scores(logprobs, entropy)

    return jax.vmap(of_one)(table, tokens, starts)


def _before(start: jax.Array, length: int, n: int) -> jax.Array:
    """The positions [n] that predict the n tokens after a prompt of `start` tokens, in a sequence of this length."""
    return jnp.minimum(start - 1 + jnp.arange(n), length - 2)


def divergences(reverse: float, table: jax.Array, theirs: jax.Array) -> jax.Array:
    """The divergence [S, n] of the policy's distributions from another model's, log-probabilities [S, n, V] each.

    It is `reverse` KL(policy || other) + (1 - `reverse`) KL(other || policy), in nats.
    """
    backward = jnp.sum(jnp.exp(table) * (table - theirs), axis=-1)
    forward = jnp.sum(jnp.exp(theirs) * (theirs - table), axis=-1)
    return reverse * backward + (1 - reverse) * forward


def objective(
    rules: Rules, found: Scores[jax.Array], sequences: Sequences[jax.Array], table: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The loss of one optimizer step, [], and the sum of its terms' absolute values, [].

    `table` [S, n, V] holds the policy's distributions, which the loss reads if it compares whole ones; None leaves that
    term out.

    An error of the loss is judged relative to that sum, since its terms may cancel. A KL is a difference of
    log-probabilities that are nearly equal, so it counts by their size. So does the value of the hinge, which is 1
    minus such a difference and may be nearly 0; its gradient has no such cancellation.
    """
    losses = policy_losses(rules, found.logprobs, sequences) + kl_losses(rules, found.logprobs, sequences)
    if table is not None and rules.distilled is not None and rules.compared is not None:
        theirs = sequences.scores[rules.compared]
        losses += rules.distilled.weight * divergences(rules.distilled.reverse, table, theirs)
    compared = sequences.kl_coef if rules.kl not in ("none", "k1_reward") else 0.0
    terms = jnp.where(sequences.valid, losses * sequences.weights, 0.0)
    sizes = jnp.where(sequences.valid, compared * found.logprobs * sequences.weights, 0.0)
    if rules.loss == "dpo_hinge":
        of_rows = jnp.sum(jnp.where(sequences.valid, found.logprobs, 0.0), axis=1, keepdims=True)
        beta = rules.loss_options.get("beta", 0.1)
        sizes += stop_gradient(jnp.where(sequences.valid, beta * of_rows * sequences.weights, 0.0))
    entropy = jnp.sum(found.entropy * sequences.valid) / jnp.sum(sequences.valid)
    bonus = sequences.entropy_bonus * entropy
    return jnp.sum(terms) - bonus, jnp.sum(jnp.abs(terms) + jnp.abs(sizes)) + bonus


def continuation_values(
    weights: Weights, tokens: jax.Array, starts: jax.Array, decoder: DecoderConfig, n: int
) -> jax.Array:
    """The values, by a model whose head gives them, before each of the n tokens after each prompt, [S, n].

    Arguments as for `distributions`.
    """

    def of_one(tokens: jax.Array, start: jax.Array) -> jax.Array:
        return values(weights, tokens, decoder)[_before(start, len(tokens), n)]

    return jax.vmap(of_one)(tokens, starts)


def value_objective(found: jax.Array, sequences: Sequences[jax.Array], clip: float | None) -> jax.Array:
    """The loss [] of estimated values [S, n]: half their mean squared error, or that of clipped ones where larger.

    `clip` bounds how far a value may move from the one before the step; None sets no bound.
    """
    errors = (found - sequences.scores[RETURNS]) ** 2
    if clip is not None:
        nearest = jnp.minimum(jnp.maximum(found, sequences.scores[VALUES] - clip), sequences.scores[VALUES] + clip)
        errors = jnp.maximum(errors, (nearest - sequences.scores[RETURNS]) ** 2)
    return 0.5 * jnp.sum(jnp.where(sequences.valid, errors, 0.0)) / jnp.sum(sequences.valid)


def policy_losses(rules: Rules, logprobs: jax.Array, sequences: Sequences[jax.Array]) -> jax.Array:
    """The policy loss of each token, [S, n], times the importance weight of `rules.correction`.

    Formulas: PPO's clipped surrogate (arXiv:1707.06347), dual clip (arXiv:1912.09729), GSPO (arXiv:2507.18071), CISPO
    (arXiv:2506.13585) and REINFORCE (Williams, 1992).
    """
    A, sampled = sequences.advantages, sequences.sampled_logprobs
    old = sampled if rules.old_logprobs == "sampler" else sequences.scores[OLD_LOGPROBS]
    lowest, highest = 1 - rules.clip_low, 1 + rules.clip_high
    if rules.loss in PREFERRED:
        losses = PREFERRED[rules.loss](rules, logprobs, sequences)
    elif rules.loss == "reinforce":
        losses = -A * logprobs
    elif rules.loss == "cispo":
        losses = -stop_gradient(jnp.clip(jnp.exp(logprobs - old), lowest, highest)) * A * logprobs
    elif rules.loss in SOFT:
        losses = SOFT[rules.loss](rules, logprobs, old, sequences)
    else:
        ratio = jnp.exp(logprobs - old)
        if rules.loss == "gspo":
            mean = jnp.sum((logprobs - old) * sequences.valid, axis=1, keepdims=True) / _lengths(sequences)
            ratio = jnp.broadcast_to(jnp.exp(mean), logprobs.shape)
        losses = -jnp.minimum(ratio * A, jnp.clip(ratio, lowest, highest) * A)
        if rules.dual_clip is not None:
            losses = jnp.where(A < 0, jnp.minimum(losses, -rules.dual_clip * A), losses)
    if rules.off_policy_threshold is not None:
        drift = jnp.sum((sampled - logprobs) * sequences.valid, axis=1, keepdims=True) / _lengths(sequences)
        losses = jnp.where((A < 0) & (drift > rules.off_policy_threshold), 0.0, losses)
    if rules.top_entropy < 1:
        losses = jnp.where(sequences.scores[UNCERTAIN], losses, 0.0)
    if rules.correction != "none":
        proposed = sequences.scores[DRAWN_LOGPROBS] if rules.penalised else sampled
        losses = losses * _correction(rules, old - proposed, sequences)
    return losses + rules.drift_coef * (logprobs - sampled) ** 2


def _correction(rules: Rules, log_ratio: jax.Array, sequences: Sequences[jax.Array]) -> jax.Array:
    """The importance weight of each token, [S, n], from its log-ratio of trainer to sampler."""
    weight = jnp.exp(log_ratio)
    judged = weight
    if rules.correction_level != "token":
        total = jnp.sum(log_ratio * sequences.valid, axis=1, keepdims=True)
        judged = jnp.exp(total if rules.correction_level == "sequence" else total / _lengths(sequences))
    if rules.correction == "truncate":
        return jnp.minimum(judged, rules.correction_high)
    inside = (judged >= rules.correction_low) & (judged <= rules.correction_high)
    return jnp.where(inside, weight if rules.correction == "reject" else judged, 0.0)


def _lengths(sequences: Sequences[jax.Array]) -> jax.Array:
    """The number of trained tokens of each sequence, [S, 1], at least 1."""
    return jnp.maximum(jnp.sum(sequences.valid, axis=1, keepdims=True), 1)


def _sapo(rules: Rules, logprobs: jax.Array, old: jax.Array, sequences: Sequences[jax.Array]) -> jax.Array:
    """SAPO (arXiv:2511.20347): the gate f(r) = sigmoid(tau (r - 1)) 4 / tau."""
    positive, negative = (
        rules.loss_options.get(f"tau_{sign}", tau) for sign, tau in (("positive", 1.0), ("negative", 1.05))
    )
    A = sequences.advantages
    tau = jnp.where(A > 0, positive, negative)
    return -4 / tau / (1 + jnp.exp(-tau * (jnp.exp(logprobs - old) - 1))) * A


def _vespo(rules: Rules, logprobs: jax.Array, old: jax.Array, sequences: Sequences[jax.Array]) -> jax.Array:
    """VESPO (arXiv:2602.10693): the weight w^k exp(lambda (1 - w)) of a whole sequence has no gradient."""
    A, given = sequences.advantages, rules.loss_options
    w = jnp.exp(jnp.sum((logprobs - old) * sequences.valid, axis=1, keepdims=True))
    good = w ** given.get("k_positive", 2.0) * jnp.exp(given.get("lambda_positive", 3.0) * (1 - w))
    bad = w ** given.get("k_negative", 3.0) * jnp.exp(given.get("lambda_negative", 2.0) * (1 - w))
    return -stop_gradient(jnp.where(A >= 0, good, bad)) * A * logprobs


def _dppo(rules: Rules, logprobs: jax.Array, old: jax.Array, sequences: Sequences[jax.Array]) -> jax.Array:
    """DPPO (arXiv:2602.04879): tokens whose binary divergence is too large and still growing have no loss."""
    A, p, q = sequences.advantages, jnp.exp(logprobs), jnp.exp(old)
    divergence = jnp.abs(p - q)
    if rules.loss == "dppo_kl":
        rest = [jnp.log(1e-8 + jnp.where(each < 1, 1 - each, 0.0)) for each in (q, p)]
        divergence = q * jnp.log(q / p) + (1 - q) * (rest[0] - rest[1])
    bound = jnp.where(A > 0, rules.clip_high, rules.clip_low)
    growing = jnp.where(A > 0, p > q, p < q)
    weight = jnp.minimum(p / q, rules.loss_options.get("weight_cap", 20.0))
    return -stop_gradient(jnp.where(growing & (divergence > bound), 0.0, weight)) * A * logprobs


def _gmpo(rules: Rules, logprobs: jax.Array, old: jax.Array, sequences: Sequences[jax.Array]) -> jax.Array:
    """GMPO (arXiv:2507.20673): the product of a sequence's clipped ratios to the power of 1 / its length."""
    sign = jnp.where(sequences.advantages > 0, 1.0, -1.0)
    ratio = logprobs - old
    ratio = sign * jnp.minimum(sign * ratio, sign * jnp.clip(ratio, -rules.clip_low, rules.clip_high))
    product = jnp.sum(ratio * sequences.valid, axis=1, keepdims=True)
    return -jnp.exp(product / _lengths(sequences)) * sequences.advantages


def _cov(rules: Rules, logprobs: jax.Array, old: jax.Array, sequences: Sequences[jax.Array]) -> jax.Array:
    """Clip-Cov and KL-Cov (arXiv:2505.22617): no loss, or a KL to the old policy, at the chosen tokens."""
    A, ratio = sequences.advantages, jnp.exp(logprobs - old)
    if rules.loss == "kl_cov":
        kl = rules.loss_options.get("kl_weight", 1.0) * (ratio - 1 - (logprobs - old))
        return jnp.where(sequences.scores[COVARIANT], kl, 0.0) - ratio * A
    surrogate = jnp.minimum(ratio * A, jnp.clip(ratio, 1 - rules.clip_low, 1 + rules.clip_high) * A)
    return jnp.where(sequences.scores[COVARIANT], 0.0, -surrogate)


SOFT = {
    "clip_cov": _cov,
    "kl_cov": _cov,
    "sapo": _sapo,
    "vespo": _vespo,
    "dppo_tv": _dppo,
    "dppo_kl": _dppo,
    "gmpo": _gmpo,
}
"""The losses of single completions that are neither PPO's nor a log-likelihood's."""


def _of_pairs(rules: Rules, logprobs: jax.Array, sequences: Sequences[jax.Array]) -> jax.Array:
    """The loss of each token's pair: DPO (arXiv:2305.18290), IPO (arXiv:2310.12036) or the hinge (arXiv:2309.06657).

    A pair is two rows: the chosen completion and, below it, the rejected one.
    """
    beta, smoothing = rules.loss_options.get("beta", 0.1), rules.loss_options.get("label_smoothing", 0.0)
    ratios = jnp.where(sequences.valid, logprobs - sequences.scores[KL_TO], 0.0)
    if rules.loss == "ipo":
        ratios = ratios / _lengths(sequences)
    of_row = jnp.sum(ratios, axis=1)
    margin = of_row[0::2] - of_row[1::2]
    if rules.loss == "ipo":
        found = (margin - 1 / (2 * beta)) ** 2
    elif rules.loss == "dpo_hinge":
        found = jnp.where(beta * margin < 1, 1 - beta * margin, 0.0)
    else:
        right, wrong = jnp.log1p(jnp.exp(-beta * margin)), jnp.log1p(jnp.exp(beta * margin))
        found = (1 - smoothing) * right + smoothing * wrong
    return jnp.broadcast_to(jnp.repeat(found, 2)[:, None], logprobs.shape)


def _kto(rules: Rules, logprobs: jax.Array, sequences: Sequences[jax.Array]) -> jax.Array:
    """KTO (arXiv:2402.01306): 1 minus the sigmoid of how far a log-ratio lies on its side of KL_POINT."""
    given = rules.loss_options
    ratio = jnp.sum(jnp.where(sequences.valid, logprobs - sequences.scores[KL_TO], 0.0), axis=1, keepdims=True)
    side = jnp.sign(sequences.advantages)
    weight = jnp.where(side > 0, given.get("desirable_weight", 1.0), given.get("undesirable_weight", 1.0))
    return weight * (1 - 1 / (1 + jnp.exp(-given.get("beta", 0.1) * side * (ratio - sequences.scores[KL_POINT]))))


PREFERRED = {"dpo": _of_pairs, "ipo": _of_pairs, "dpo_hinge": _of_pairs, "kto": _kto}
"""The losses of preferences: functions of log-ratios to the scores KL_TO."""


def kl_losses(rules: Rules, logprobs: jax.Array, sequences: Sequences[jax.Array]) -> jax.Array:
    """The KL term of each token, [S, n], times its weight, and with `kl_by_ratio` times the ratio; 0 without a KL."""
    kl = kl_values(rules, logprobs, sequences)
    if rules.kl_by_ratio:
        old = sequences.sampled_logprobs if rules.old_logprobs == "sampler" else sequences.scores[OLD_LOGPROBS]
        moved = logprobs - old
        if rules.loss == "gspo":  # the ratio of the sequence
            tokens = jnp.maximum(jnp.sum(sequences.valid, axis=1, keepdims=True), 1)
            moved = jnp.sum(jnp.where(sequences.valid, moved, 0.0), axis=1, keepdims=True) / tokens
        kl = kl * jnp.exp(moved)
    return sequences.kl_coef * kl


def kl_values(rules: Rules, logprobs: jax.Array, sequences: Sequences[jax.Array]) -> jax.Array:
    """The KL of each token, [S, n]: with d = logprob - KL_TO, d^2/2 (k2) or exp(-d) + d - 1 (k3)."""
    if rules.kl in ("none", "k1_reward"):
        return jnp.zeros_like(logprobs)
    d = logprobs - sequences.scores[KL_TO]
    k2, k3 = d * d / 2, jnp.exp(-d) + d - 1
    plus = k2 + stop_gradient(jnp.minimum(k3, 10.0) - k2)  # the value of k3, at most 10, and the gradient of k2
    return {"k2": k2, "k3": k3, "k3+": plus}[rules.kl]


def _frequencies(rope: Rope) -> np.ndarray:
    """Rotary frequency of each pair of a head's elements, [Q/2], in radians per position."""
    return np.array([_stretched(rope, pair) for pair in range(rope.dims // 2)])


def _stretched(rope: Rope, pair: int) -> float:
    frequency = rope.theta ** (-2 * pair / rope.dims)
    match rope.scaling:
        case LinearScaling(factor=factor):
            return frequency / factor
        case RopeScaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_positions=original):
            wavelength = 2 * np.pi / frequency
            if wavelength > original / low:
                return frequency / factor
            if wavelength > original / high:
                kept = (original / wavelength - low) / (high - low)
                return (1 - kept) * frequency / factor + kept * frequency
        case YarnScaling(factor=factor, original_max_positions=original) as yarn:

            def edge(turns: float) -> float:  # the pair that makes this many turns within the original context
                return rope.dims * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(rope.theta))

            low, high = edge(yarn.beta_fast), edge(yarn.beta_slow)
            if yarn.truncate:
                low, high = np.floor(low), np.ceil(high)
            low, high = max(low, 0), min(high, rope.dims - 1)
            stretched = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
            return frequency / factor * stretched + frequency * (1 - stretched)
    return frequency
