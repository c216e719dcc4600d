"""Naive form of preparing a step: from graded episodes to kept groups, advantages, token weights and minibatches.

Plain numpy in float64. Shapes: N prompts with G episodes each; at most n tokens follow a prompt.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from podium.certify.naive import Sequences
from podium.certify.naive_rules import Rules

Scored = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A model: maps tokens [S, T] and prompt lengths [S] to log-probabilities [S, n] of the tokens after the prompts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """A prompt, the tokens after it, and their reward."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """All tokens after the prompt, up to the last one that the model drew."""
    drawn: tuple[bool, ...]
    """Whether the model drew each of `tokens`; the others came from an environment."""
    logprobs: tuple[float, ...]
    """The sampler's log-probability of each token, before top-k, top-p and min-p; 0 for tokens it did not draw."""
    truncated: bool
    """Whether it was cut at the maximum length."""
    reward: float


class Room(NamedTuple):
    """Sizes of the padded arrays: the same in every step, so that programs compile once."""

    episodes: int  # S
    prompt: int  # tokens of the longest prompt
    continuation: int  # n


def optimizer_steps(
    rules: Rules,
    groups: Sequence[Sequence[Episode]],
    room: Room,
    *,
    max_new_tokens: int,
    policy: Scored,
    reference: Scored | None,
) -> list[Sequences]:
    """The optimizer steps of one pass over a step's groups, in order, without those that have no token to train on.

    Args:
        rules: the algorithm.
        groups: the episodes of each prompt, [N][G].
        room: sizes of the arrays.
        max_new_tokens: maximum length of a completion.
        policy: the policy before the step's first update.
        reference: the frozen first model; None if the algorithm has no KL.
    """
    kept = [group for group in groups if rules.zero_variance == "keep" or not _equal(group)]
    if not kept:
        return []
    flat = [episode for group in kept for episode in group]
    shape = (len(kept), len(kept[0]))  # [N, G]
    rewards = np.array([np.float32(each.reward) for each in flat], np.float64).reshape(shape)
    trained = _trained(rules, flat, room)  # [S, n]
    lengths = trained.sum(axis=1)  # [S]
    tokens, starts = padded_tokens(flat, room)
    sampled = _padded([each.logprobs for each in flat], room)  # [S, n]
    from_reference = np.zeros(trained.shape) if reference is None else reference(tokens, starts)
    if rules.kl == "k1_reward":
        charged = np.sum((sampled - from_reference) * trained, axis=1)[: len(flat)]
        rewards = rewards - rules.kl_coef * charged.reshape(shape)
    advantages = np.zeros(room.episodes)
    advantages[: len(flat)] = advantages_of(rules, rewards, lengths[: len(flat)].reshape(shape)).ravel()
    old = policy(tokens, starts) if rules.old_logprobs == "trainer" else sampled

    made = []
    for first, end in minibatch_bounds(len(kept), rules.minibatches):
        own = slice(first * shape[1], end * shape[1])
        weights = np.zeros(trained.shape)
        weights[own] = token_weights(rules, trained[own], max_new_tokens)
        if weights.any():
            made.append(
                Sequences(
                    tokens=tokens,  # pyright: ignore[reportArgumentType]  # numpy arrays until jax uses them
                    starts=starts,  # pyright: ignore[reportArgumentType]
                    valid=trained & (weights > 0),  # pyright: ignore[reportArgumentType]
                    weights=weights,  # pyright: ignore[reportArgumentType]
                    advantages=advantages,  # pyright: ignore[reportArgumentType]
                    sampled_logprobs=sampled,  # pyright: ignore[reportArgumentType]
                    old_logprobs=old,  # pyright: ignore[reportArgumentType]
                    reference_logprobs=from_reference,  # pyright: ignore[reportArgumentType]
                )
            )
    return made


def advantages_of(rules: Rules, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Advantages [N, G] by `rules.advantage`, from rewards and numbers of trained tokens, [N, G] each."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    match rules.advantage:
        case "reward":
            return rewards
        case "batch_mean":
            return rewards - rewards.mean()
        case "leave_one_out":
            others = rewards.shape[1] - 1
            return rewards - (rewards.sum(axis=1, keepdims=True) - rewards) / others
        case "maxrl":
            mean = rewards.mean(axis=1, keepdims=True)
            return np.where(mean > 0, centred / np.where(mean > 0, mean, 1.0), 0.0)
        case "whitened":
            return _whitened(rewards, lengths, rules.std_eps)
        case "whitened_groups":
            return _whitened(centred, lengths, rules.std_eps)
        case "group":
            return centred / _deviation(rules, rewards)
        case own:
            return np.asarray(own(rewards.astype(np.float32), lengths), np.float64)


def token_weights(rules: Rules, trained: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """The weight of each token's loss, [S, n], given which tokens an optimizer step trains, [S, n] bool.

    The weights of an optimizer step sum to 1 with `mean="token"`, and with `mean="sequence"` to the share of episodes
    that have a trained token.
    """
    episodes, lengths = len(trained), trained.sum(axis=1, keepdims=True)
    if rules.mean == "token":
        return trained / max(trained.sum(), 1)
    return trained / (episodes * (np.maximum(lengths, 1) if rules.mean == "sequence" else max_new_tokens))


def minibatch_bounds(groups: int, minibatches: int) -> list[tuple[int, int]]:
    """The range [first, end) of groups in each minibatch; if sizes differ, the first ones have one group more."""
    size, larger = divmod(groups, minibatches)
    ends = np.cumsum([size + (index < larger) for index in range(minibatches)])
    return [(int(end) - size - (index < larger), int(end)) for index, end in enumerate(ends)]


def padded_tokens(episodes: Sequence[Episode], room: Room) -> tuple[np.ndarray, np.ndarray]:
    """All tokens of each episode, [S, T] int32, and the lengths of their prompts, [S] int32.

    Rows without an episode hold zeros, with a prompt of one token.
    """
    tokens = np.zeros((room.episodes, room.prompt + room.continuation), np.int32)
    starts = np.ones(room.episodes, np.int32)
    for row, each in enumerate(episodes):
        whole = (*each.prompt, *each.tokens)
        tokens[row, : len(whole)] = whole
        starts[row] = len(each.prompt)
    return tokens, starts


def _equal(group: Sequence[Episode]) -> bool:
    """Whether all rewards of a group are equal in float32."""
    return len({float(np.float32(each.reward)) for each in group}) == 1


def _trained(rules: Rules, episodes: Sequence[Episode], room: Room) -> np.ndarray:
    """The tokens to train on, [S, n] bool: those that the model drew, except in masked episodes."""
    masked = [rules.mask_truncated and each.truncated for each in episodes]
    drawn = [() if out else each.drawn for each, out in zip(episodes, masked, strict=True)]
    return _padded(drawn, room) > 0


def _padded(values: Sequence[Sequence[float]], room: Room) -> np.ndarray:
    """Pad each episode's values, one per token after its prompt, with zeros to [S, n]."""
    found = np.zeros((room.episodes, room.continuation))
    for row, own in enumerate(values):
        found[row, : len(own)] = own
    return found


def _deviation(rules: Rules, rewards: np.ndarray) -> np.ndarray | float:
    """The divisor of GRPO's advantages: sqrt(sum (r - mean)^2 / (count - ddof)) + eps, or 1 with `std="none"`."""
    if rules.std == "none":
        return 1.0
    axis = None if rules.std == "batch" else 1
    count = rewards.size if rules.std == "batch" else rewards.shape[1]
    squares = (rewards - rewards.mean(axis=axis, keepdims=True)) ** 2
    return np.sqrt(squares.sum(axis=axis, keepdims=True) / (count - rules.std_ddof)) + rules.std_eps


def _whitened(returns: np.ndarray, lengths: np.ndarray, eps: float) -> np.ndarray:
    """Whiten returns [N, G] with mean and standard deviation over tokens, each of which has its episode's return."""
    by_token = np.repeat(returns.ravel(), lengths.ravel().astype(int))
    if not len(by_token) or by_token.max() == by_token.min():
        return np.zeros(returns.shape)
    return (returns - by_token.mean()) / (by_token.std() + eps)
