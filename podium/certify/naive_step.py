"""From the graded episodes of a step to its optimizer steps: groups kept, rewards, advantages, weights, minibatches.

Plain numpy in float64, one formula after another. N prompts with G episodes each; n tokens may follow a prompt.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from podium.certify.naive import Sequences
from podium.certify.naive_rules import Rules

Scored = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A model: tokens [S, T] and lengths of prompts [S] to log-probabilities [S, n] of the tokens behind the prompts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """A prompt, what followed it, and what that earned."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """All that follows the prompt, up to the last token that the model drew."""
    drawn: tuple[bool, ...]
    """Which of `tokens` the model drew; an environment gave the others."""
    logprobs: tuple[float, ...]
    """The sampler's of each of `tokens`, before top-k, top-p and min-p; 0 where it did not draw it."""
    truncated: bool
    """Whether it ended because it was as long as allowed."""
    reward: float


class Room(NamedTuple):
    """Sizes of the arrays, which no step changes, so that nothing is compiled twice."""

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
    """The optimizer steps of one pass over a step's groups, in order; those without a token to train on left out.

    Args:
        rules: the algorithm.
        groups: the episodes of each prompt, [N][G].
        room: sizes of the arrays.
        max_new_tokens: the longest that a completion may be.
        policy: the policy before the step's first update.
        reference: the first model; needed where there is a KL.
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
                    tokens=tokens,  # pyright: ignore[reportArgumentType]  # numpy's arrays, until jax computes
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
    """Advantages [N, G] from rewards and numbers of trained tokens, [N, G] each."""
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
    """What the loss of each token is multiplied by, [S, n], from which tokens an optimizer step trains, [S, n] bool.

    Its sum over an optimizer step is 1 by token, the share of episodes with a token by sequence.
    """
    episodes, lengths = len(trained), trained.sum(axis=1, keepdims=True)
    if rules.mean == "token":
        return trained / max(trained.sum(), 1)
    return trained / (episodes * (np.maximum(lengths, 1) if rules.mean == "sequence" else max_new_tokens))


def minibatch_bounds(groups: int, minibatches: int) -> list[tuple[int, int]]:
    """First group and end of each minibatch: consecutive groups, the first minibatches one larger if they differ."""
    size, larger = divmod(groups, minibatches)
    ends = np.cumsum([size + (index < larger) for index in range(minibatches)])
    return [(int(end) - size - (index < larger), int(end)) for index, end in enumerate(ends)]


def padded_tokens(episodes: Sequence[Episode], room: Room) -> tuple[np.ndarray, np.ndarray]:
    """All tokens of each episode, [S, T], and the lengths of their prompts, [S]; what is empty has a prompt of one."""
    tokens = np.zeros((room.episodes, room.prompt + room.continuation), np.int32)
    starts = np.ones(room.episodes, np.int32)
    for row, each in enumerate(episodes):
        whole = (*each.prompt, *each.tokens)
        tokens[row, : len(whole)] = whole
        starts[row] = len(each.prompt)
    return tokens, starts


def _equal(group: Sequence[Episode]) -> bool:
    """Whether all episodes of a prompt earned the same, in float32."""
    return len({float(np.float32(each.reward)) for each in group}) == 1


def _trained(rules: Rules, episodes: Sequence[Episode], room: Room) -> np.ndarray:
    """The tokens that are trained, [S, n] bool: those that the model drew, but for episodes that are masked."""
    masked = [rules.mask_truncated and each.truncated for each in episodes]
    drawn = [() if out else each.drawn for each, out in zip(episodes, masked, strict=True)]
    return _padded(drawn, room) > 0


def _padded(values: Sequence[Sequence[float]], room: Room) -> np.ndarray:
    """Values of tokens behind each prompt, [S, n]."""
    found = np.zeros((room.episodes, room.continuation))
    for row, own in enumerate(values):
        found[row, : len(own)] = own
    return found


def _deviation(rules: Rules, rewards: np.ndarray) -> np.ndarray | float:
    """What GRPO's advantages are divided by: sqrt(sum (r - mean)^2 / (count - ddof)) + eps, or 1."""
    if rules.std == "none":
        return 1.0
    axis = None if rules.std == "batch" else 1
    count = rewards.size if rules.std == "batch" else rewards.shape[1]
    squares = (rewards - rewards.mean(axis=axis, keepdims=True)) ** 2
    return np.sqrt(squares.sum(axis=axis, keepdims=True) / (count - rules.std_ddof)) + rules.std_eps


def _whitened(returns: np.ndarray, lengths: np.ndarray, eps: float) -> np.ndarray:
    """Each token's return is its episode's; less the mean over tokens, over the deviation over tokens."""
    by_token = np.repeat(returns.ravel(), lengths.ravel().astype(int))
    if not len(by_token) or by_token.max() == by_token.min():
        return np.zeros(returns.shape)
    return (returns - by_token.mean()) / (by_token.std() + eps)
