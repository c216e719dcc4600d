"""Model and objective once more, as papers write them: each sequence alone, nothing packed, chunked, split or masked.

The whole update is in four files, in the order in which it happens: `naive_rules.py` (what an algorithm is),
`naive_step.py` (from episodes to advantages, weights and minibatches), this one (from weights and episodes to the loss,
whose gradient jax takes) and `naive_optimizer.py` (from the gradient to new weights). They import nothing of
`podium.algorithms`, `podium.train` and `podium.rollout`, which they are compared with; float64 within `in_float64`.

S episodes of a step, each with its prompt before it, padded on the right to T tokens; n tokens may follow a prompt.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from podium.certify.naive_rules import Rules
from podium.models.architecture import DecoderConfig
from podium.models.blocks.rope import Rope

Weights = dict[str, jax.Array]
Array = TypeVar("Array", jax.Array, np.ndarray)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """The episodes of an optimizer step, and the values that its loss takes as given."""

    tokens: jax.Array  # [S, T] int32, the prompt and what follows it
    starts: jax.Array  # [S] int32, length of the prompt
    valid: jax.Array  # [S, n] bool, which tokens behind the prompt are trained on
    weights: jax.Array  # [S, n], what each token's loss is multiplied by
    advantages: jax.Array  # [S]
    sampled_logprobs: jax.Array  # [S, n]
    old_logprobs: jax.Array  # [S, n], of the trainer before the step's first update
    reference_logprobs: jax.Array  # [S, n], of the first model; 0 without a KL


class Scores(NamedTuple, Generic[Array]):
    """What the model gives the tokens behind each prompt."""

    logprobs: Array  # [S, n], of the tokens that are there
    entropy: Array  # [S, n], of the distribution that each is drawn from: the mean of -logprob
    variance: Array  # [S, n], of that -logprob


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Inside, jax computes in float64, on the CPU: TPUs have no such numbers."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        yield


def logits(weights: Weights, tokens: jax.Array, decoder: DecoderConfig) -> jax.Array:
    """Logits [T, V] behind each token of one sequence [T]."""
    (T,) = tokens.shape
    attention, _ = decoder.dense_layer
    angles = jnp.arange(T)[:, None] * jnp.asarray(_frequencies(attention.rope))[None]  # [T, Q/2]
    causal = jnp.arange(T)[:, None] >= jnp.arange(T)[None]  # query by key

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:  # [..., D]
        y = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + decoder.norm_eps)
        return y * jnp.expand_dims(scale, range(x.ndim - 1))

    def rotated(x: jax.Array) -> jax.Array:  # [T, H, Q]
        half = attention.head_dim // 2
        pairs = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angles)[:, None]
        return jnp.concatenate([pairs.real, pairs.imag], axis=-1)

    def layer(x: jax.Array, w: Weights) -> tuple[jax.Array, None]:
        y = norm(x, w["attention_norm"])
        q, k, v = (jnp.einsum("td,dhq->thq", y, w[name]) for name in "qkv")
        if attention.bias:
            q, k, v = (z + w[f"{name}_bias"][None] for name, z in (("q", q), ("k", k), ("v", v)))
        if attention.norm:
            q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
        q, k = rotated(q), rotated(k)
        k, v = (jnp.repeat(z, attention.heads // attention.kv_heads, axis=1) for z in (k, v))
        scores = jnp.einsum("thq,shq->hts", q, k) / np.sqrt(attention.head_dim)
        shares = jax.nn.softmax(jnp.where(causal[None], scores, -jnp.inf), axis=-1)
        x = x + jnp.einsum("hts,shq,hqd->td", shares, v, w["o"])
        y = norm(x, w["mlp_norm"])
        gate = y @ w["gate"]
        return x + (gate / (1 + jnp.exp(-gate)) * (y @ w["up"])) @ w["down"], None

    layers = {name.removeprefix("layers."): value for name, value in weights.items() if name.startswith("layers.")}
    for name in [name.removesuffix(".lora_a") for name in layers if name.endswith(".lora_a")]:
        a, b = layers[f"{name}.lora_a"], layers[f"{name}.lora_b"]
        lora = decoder.lora
        outer = jnp.einsum("l...r,lrm->l...m", a, b.reshape(*b.shape[:2], -1)).reshape(layers[name].shape)
        layers[name] += lora.alpha / lora.rank * outer if lora else 0.0
    x, _ = jax.lax.scan(layer, weights["embed"][tokens], layers)
    return norm(x, weights["final_norm"]) @ weights["embed" if decoder.tied else "head"].T


def scores(
    weights: Weights, tokens: jax.Array, starts: jax.Array, decoder: DecoderConfig, temperature: float, n: int
) -> Scores[jax.Array]:
    """Scores of the n tokens behind each prompt, [S, n], under the softmax of logits over temperature."""

    def of_one(tokens: jax.Array, start: jax.Array) -> Scores[jax.Array]:
        every = logits(weights, tokens, decoder) / temperature  # [T, V]
        table = every - jax.nn.logsumexp(every, axis=-1, keepdims=True)
        at = jnp.minimum(start - 1 + jnp.arange(n), len(tokens) - 2)  # whence each token of the completion is predicted
        own = table[at]  # [n, V]
        entropy = -jnp.sum(jnp.exp(own) * own, axis=-1)
        variance = jnp.sum(jnp.exp(own) * own * own, axis=-1) - entropy**2
        return Scores(jnp.take_along_axis(own, tokens[at + 1][:, None], axis=1)[:, 0], entropy, variance)

    return jax.vmap(of_one)(tokens, starts)


def objective(rules: Rules, found: Scores[jax.Array], sequences: Sequences) -> tuple[jax.Array, jax.Array]:
    """The loss of one optimizer step on these episodes, [], and the sum of its terms' sizes, which may cancel."""
    losses = policy_losses(rules, found.logprobs, sequences) + kl_losses(rules, found.logprobs, sequences)
    terms = jnp.where(sequences.valid, losses * sequences.weights, 0.0)
    entropy = jnp.sum(found.entropy * sequences.valid) / jnp.sum(sequences.valid)
    bonus = rules.entropy_bonus * entropy
    return jnp.sum(terms) - bonus, jnp.sum(jnp.abs(terms)) + bonus


def policy_losses(rules: Rules, logprobs: jax.Array, sequences: Sequences) -> jax.Array:
    """The algorithm's policy term of each token, [S, n], with its correction."""
    A, sampled = sequences.advantages[:, None], sequences.sampled_logprobs
    old = sampled if rules.old_logprobs == "sampler" else sequences.old_logprobs
    lowest, highest = 1 - rules.clip_low, 1 + rules.clip_high
    if rules.loss == "reinforce":
        losses = -A * logprobs
    elif rules.loss == "cispo":
        losses = -stop_gradient(jnp.clip(jnp.exp(logprobs - old), lowest, highest)) * A * logprobs
    else:
        ratio = jnp.exp(logprobs - old)
        if rules.loss == "gspo":
            lengths = jnp.maximum(jnp.sum(sequences.valid, axis=1, keepdims=True), 1)
            mean = jnp.sum((logprobs - old) * sequences.valid, axis=1, keepdims=True) / lengths
            ratio = jnp.broadcast_to(jnp.exp(mean), logprobs.shape)
        losses = -jnp.minimum(ratio * A, jnp.clip(ratio, lowest, highest) * A)
        if rules.dual_clip is not None:
            losses = jnp.where(A < 0, jnp.minimum(losses, -rules.dual_clip * A), losses)
    if rules.correction == "none":
        return losses
    weight = jnp.exp(old - sampled)
    if rules.correction == "truncate":
        return losses * jnp.minimum(weight, rules.correction_high)
    inside = (weight >= rules.correction_low) & (weight <= rules.correction_high)
    return losses * jnp.where(inside, weight, 0.0)


def kl_losses(rules: Rules, logprobs: jax.Array, sequences: Sequences) -> jax.Array:
    """The KL term of each token, [S, n]: with d = logprob - reference, d^2/2 (k2) or exp(-d) + d - 1 (k3)."""
    if rules.kl in ("none", "k1_reward"):
        return jnp.zeros_like(logprobs)
    d = logprobs - sequences.reference_logprobs
    k2, k3 = d * d / 2, jnp.exp(-d) + d - 1
    if rules.kl == "k3+":  # the value of k3, at most 10, and the gradient of k2
        return rules.kl_coef * (k2 + stop_gradient(jnp.minimum(k3, 10.0) - k2))
    return rules.kl_coef * (k2 if rules.kl == "k2" else k3)


def _frequencies(rope: Rope) -> np.ndarray:
    """Radians per position of each pair of a head, [Q/2], one by one as Llama 3.1's code has them."""
    found = []
    for pair in range(rope.dims // 2):
        frequency = rope.theta ** (-2 * pair / rope.dims)
        if (scaling := rope.scaling) is not None:
            wavelength = 2 * np.pi / frequency
            original = scaling.original_max_positions
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            if wavelength > original / low:
                frequency /= scaling.factor
            elif wavelength > original / high:
                kept = (original / wavelength - low) / (high - low)
                frequency = (1 - kept) * frequency / scaling.factor + kept * frequency
        found.append(frequency)
    return np.array(found)
