"""Naive form of preparing a step: from graded episodes to kept groups, advantages, token weights and minibatches.

Plain numpy in float64. Shapes: N prompts with G episodes each; at most n tokens follow a prompt. The reward of an
episode that failed for a reason that is not the model's is NaN, and enters no mean.
"""

import dataclasses
import inspect
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from podium.certify.naive import Sequences
from podium.certify.naive_rules import (
    COVARIANT,
    DRAWN_LOGPROBS,
    ENTROPY,
    KL_POINT,
    KL_TO,
    OLD_LOGPROBS,
    RETURNS,
    UNCERTAIN,
    VALUES,
    Rules,
)

Scored = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A model: maps tokens [S, T] and prompt lengths [S] to a score of each token after the prompts, [S, n], or to
log-probabilities of the whole vocabulary at their places, [S, n, V]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """A prompt, the tokens after it, and their reward."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """All tokens after the prompt, up to the last one that the model drew."""
    drawn: tuple[bool, ...]
    """Whether the model drew each of `tokens`; the others came from an environment."""
    logprobs: tuple[float, ...]
    """The sampler's log-probability of each token, before penalty, top-k, top-p and min-p; 0 for tokens it did not
    draw."""
    drawn_logprobs: tuple[float, ...]
    """The log-probability with which each token was drawn, after penalties and truncation; 0 for tokens that were not
    drawn."""
    turns: tuple[int, ...]
    """The turn of each of `tokens`: how often the model had answered before."""
    truncated: bool
    """Whether a limit ended it."""
    reward: float
    turn_rewards: tuple[float, ...] = ()
    """What each turn earned, in a conversation; empty: it has one turn, which earned `reward`."""
    parts: tuple[tuple[str, float, float | None], ...] = ()
    """Name, value and weight of each part of the reward; the weight is None if the part is recorded alone."""
    baseline: float = np.nan
    """The reward of its prompt's greedy completion; NaN without one, or if it failed."""
    privileged: tuple[int, ...] = ()
    """The prompt of a model that reads its own prompts, in place of the sampler's."""

    @property
    def weighted(self) -> dict[str, tuple[float, float]]:
        """Value and weight of each part that counts, by its name."""
        return {name: (value, weight) for name, value, weight in self.parts if weight is not None}

    @property
    def failed(self) -> bool:
        """Whether it failed for a reason that is not the model's."""
        return bool(np.isnan(self.reward))


class Parts(NamedTuple):
    """The parts of rewards, as a user's own advantage reads them; NaN and 0 where a part does not apply."""

    values: np.ndarray  # [N, G, P]
    weights: np.ndarray  # [N, G, P]


class Room(NamedTuple):
    """Sizes of the padded arrays: the same in every step, so that programs compile once."""

    episodes: int  # S
    prompt: int  # tokens of the longest prompt
    continuation: int  # n
    hint: int = 0  # tokens by which the longest `Episode.privileged` is longer


def optimizer_steps(
    rules: Rules,
    groups: Sequence[Sequence[Episode]],
    room: Room,
    models: Mapping[str, Scored],
    *,
    max_new_tokens: int,
) -> list[Sequences[np.ndarray]]:
    """The optimizer steps of one pass over a step's groups, in order, without those that have no token to train on.

    Arguments as for `minibatch_steps`.
    """
    made = minibatch_steps(rules, groups, room, models, max_new_tokens=max_new_tokens)
    return [each for each in made if each is not None]


def minibatch_steps(
    rules: Rules,
    groups: Sequence[Sequence[Episode]],
    room: Room,
    models: Mapping[str, Scored],
    *,
    max_new_tokens: int,
) -> list[Sequences[np.ndarray] | None]:
    """An optimizer step for each minibatch of one pass over a step's groups; None if it has no token to train on.

    Args:
        rules: the algorithm.
        groups: the episodes of each prompt, [N][G].
        room: sizes of the arrays.
        models: as before the step's first update, by the name of their scores: at least `rules.read_scores`.
        max_new_tokens: maximum length of a completion.
    """
    kept = [group for group in groups if rules.zero_variance == "keep" or not is_equal(rules, group)]
    if not kept:
        return [None] * rules.minibatches
    rules = _with_arguments(rules, kept)
    flat = [episode for group in kept for episode in group]
    trained = _trained(rules, flat, room)  # [S, n]
    tokens, starts = padded_tokens(flat, room)
    sampled = _padded([each.logprobs for each in flat], room)  # [S, n]
    read = {name: models[name](*_as_read(rules, name, flat, room)) for name in rules.read_scores}
    read[DRAWN_LOGPROBS] = _padded([each.drawn_logprobs for each in flat], room)
    advantages, read[RETURNS] = _of_tokens(rules, kept, trained, sampled, read)
    made: list[Sequences[np.ndarray] | None] = []
    for first, end in minibatch_bounds(len(kept), rules.minibatches):
        own = slice(first * len(kept[0]), end * len(kept[0]))
        weights = np.zeros(trained.shape)
        failed = sum(episode.failed for episode in flat[own])
        weights[own] = token_weights(rules, trained[own], max_new_tokens, failed=failed)
        if not weights.any():
            made.append(None)
            continue
        step = Sequences(
            tokens=tokens,
            starts=starts,
            valid=trained & (weights > 0),
            weights=weights,
            advantages=advantages,
            sampled_logprobs=sampled,
            scores=read,
            kl_coef=np.asarray(rules.kl_coef),
            entropy_bonus=np.asarray(rules.entropy_bonus),
        )
        chosen = _of_step(rules, step, flat[own], room, models)
        made.append(dataclasses.replace(step, scores={**read, **chosen}))
    return made


def imitated_steps(
    demonstrations: Sequence[Episode], room: Room, *, minibatches: int, weight: float
) -> list[Sequences[np.ndarray] | None]:
    """The demonstrations of each minibatch of one pass, whose loss is `weight` times the mean of -logprob over their
    tokens; None where a minibatch has none.

    It is written as REINFORCE's loss with advantages of 1.
    """
    made: list[Sequences[np.ndarray] | None] = []
    for first, end in minibatch_bounds(len(demonstrations), minibatches):
        own = demonstrations[first:end]
        tokens, starts = padded_tokens(own, room)
        valid = _padded([each.drawn for each in own], room) > 0
        step = Sequences(
            tokens=tokens,
            starts=starts,
            valid=valid,
            weights=weight * valid / max(valid.sum(), 1),
            advantages=np.ones(valid.shape),
            sampled_logprobs=np.zeros(valid.shape),
            scores={},
            kl_coef=np.asarray(0.0),
            entropy_bonus=np.asarray(0.0),
        )
        made.append(step if own else None)
    return made


def _as_read(rules: Rules, name: str, episodes: Sequence[Episode], room: Room) -> tuple[np.ndarray, np.ndarray]:
    """The tokens, and lengths of prompts, from which a model computes the scores of this name."""
    distilled = rules.distilled
    if distilled is None or name != distilled.score or not distilled.own_prompts:
        return padded_tokens(episodes, room)
    own = [dataclasses.replace(each, prompt=each.privileged) for each in episodes]
    return padded_tokens(own, room._replace(prompt=room.prompt + room.hint))


def _of_tokens(
    rules: Rules,
    groups: Sequence[Sequence[Episode]],
    trained: np.ndarray,
    sampled: np.ndarray,
    read: Mapping[str, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages, and what estimated values are trained to be (0 without any), [S, n] each, from the scores `read`."""
    flat, shape = [episode for group in groups for episode in group], (len(groups), len(groups[0]))
    rewards = np.array([np.float32(each.reward) for each in flat], np.float64).reshape(shape)
    if rules.kl == "k1_reward":
        charged = np.sum((sampled - read[KL_TO]) * trained, axis=1)[: len(flat)]
        rewards = rewards - rules.kl_coef * charged.reshape(shape)
    advantages, returns = np.zeros(trained.shape), np.zeros(trained.shape)
    if rules.advantage == "values":
        advantages, returns = _of_values(rules, rewards.ravel(), read[VALUES], trained)
    elif rules.credit == "turn":
        advantages[: len(flat)] = _of_turns(rules, groups, trained[: len(flat)])
    elif rules.advantage == "greedy":
        greedy = np.array([np.float32(each.baseline) for each in flat], np.float64)
        advantages[: len(flat)] = np.nan_to_num(rewards.reshape(-1, 1) - greedy.reshape(-1, 1))
    elif rules.advantage == "decoupled":
        advantages[: len(flat)] = _decoupled(rules, groups).reshape(-1, 1)
    else:
        found = advantages_of(rules, rewards, trained.sum(axis=1)[: len(flat)].reshape(shape))
        advantages[: len(flat)] = found.reshape(-1, 1)
    if rules.distilled is not None and rules.distilled.loss == "sampled":
        advantages = advantages + rules.distilled.weight * (read[rules.distilled.score] - read[OLD_LOGPROBS])
    return advantages, returns


def _of_step(
    rules: Rules, step: Sequences[np.ndarray], episodes: Sequence[Episode], room: Room, models: Mapping[str, Scored]
) -> dict[str, np.ndarray]:
    """The scores that depend on the whole optimizer step, whose episodes these are: tokens that it chooses, a KL."""
    found: dict[str, np.ndarray] = {}
    if rules.top_entropy < 1:
        found[UNCERTAIN] = uncertain_tokens(step.scores[ENTROPY], step.valid, rules.top_entropy)
    if rules.loss in ("clip_cov", "kl_cov"):
        found[COVARIANT] = covariant_tokens(rules, step)
    if rules.loss == "kto":
        found[KL_POINT] = _kl_point(rules, episodes, room, models)
    return found


def _kl_point(rules: Rules, episodes: Sequence[Episode], room: Room, models: Mapping[str, Scored]) -> np.ndarray:
    """KTO's estimate of the KL, []: the mean log-ratio of completions that follow the next row's prompt, at least 0."""
    moved = [dataclasses.replace(episodes[row - 1], prompt=each.prompt) for row, each in enumerate(episodes)]
    now, before = (models[name](*padded_tokens(moved, room)) for name in (OLD_LOGPROBS, KL_TO))
    ratios = np.where(_trained(rules, moved, room), now - before, 0.0)
    return np.maximum(ratios.sum() / len(moved), 0.0)


def advantages_of(rules: Rules, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Advantages [N, G] by `rules.advantage`, from rewards and numbers of trained tokens; 0 where a reward is NaN."""
    count = np.maximum(np.sum(~np.isnan(rewards), axis=1, keepdims=True), 1)  # [N, 1]
    total = np.nansum(rewards, axis=1, keepdims=True)
    centred = rewards - total / count
    match rules.advantage:
        case "none":
            found = np.zeros(rewards.shape)
        case "reward":
            found = rewards
        case "batch_mean":
            found = rewards - np.nanmean(rewards)
        case "leave_one_out":
            found = rewards - (total - rewards) / np.maximum(count - 1, 1)
            found /= _others_deviation(rules, rewards) if rules.std == "group" else _deviation(rules, rewards)
        case "maxrl":
            found = np.where(total > 0, centred / np.where(total > 0, total / count, 1.0), 0.0)
        case "whitened":
            found = _whitened(rewards, lengths, rules.std_eps)
        case "whitened_groups":
            found = _whitened(centred, lengths, rules.std_eps)
        case "group":
            found = centred / _deviation(rules, rewards)
        case "length_weighted" | "rescaled" | "pass_at_k" as name:
            found = LISTED[name](rules, rewards, lengths)
        case own:
            assert callable(own), "decoupled advantages are of parts: `_decoupled`"
            found = np.asarray(own(rewards.astype(np.float32), lengths), np.float64)
    return np.nan_to_num(found)


def _with_arguments(rules: Rules, groups: Sequence[Sequence[Episode]]) -> Rules:
    """The rules, with a user's own advantage bound to the parts and greedy rewards of these groups, if it reads any."""
    own = rules.advantage
    if not callable(own):
        return rules
    wanted = inspect.signature(own).parameters
    if "baselines" in wanted:
        own = partial(own, baselines=np.array([np.float32(group[0].baseline) for group in groups]))
    if "parts" not in wanted:
        return dataclasses.replace(rules, advantage=own)
    given = [[episode.weighted for episode in group] for group in groups]
    names = sorted({name for group in given for each in group for name in each})
    missing = (np.nan, 0.0)
    table = np.array([[[each.get(name, missing) for name in names] for each in group] for group in given], np.float64)
    parts = Parts(values=table[..., 0], weights=table[..., 1])
    return dataclasses.replace(rules, advantage=partial(own, parts=parts))


def _of_values(
    rules: Rules, rewards: np.ndarray, values: np.ndarray, trained: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and what values are trained to be, [S, n] each, by the sums in arXiv:1506.02438.

    An episode earns its reward, of `rewards` [S], with its last trained token. Only trained tokens are its steps; what
    an environment writes lies within one.
    """
    gamma, weight = rules.advantage_options["gamma"], rules.advantage_options["gamma"] * rules.advantage_options["lam"]
    advantages, returns = np.zeros(trained.shape), np.zeros(trained.shape)
    for row, reward in enumerate(rewards.tolist()):
        places = np.flatnonzero(trained[row]).tolist()
        known = [*values[row, places].tolist(), 0.0]
        paid = [0.0] * (len(places) - 1) + [reward]
        errors = [paid[t] + gamma * known[t + 1] - known[t] for t in range(len(places))]
        for t, place in enumerate(places):
            advantages[row, place] = sum(weight ** (k - t) * errors[k] for k in range(t, len(places)))
            returns[row, place] = advantages[row, place] + known[t]
    drawn = advantages[trained]
    if rules.std == "batch" and len(drawn):
        deviation = np.std(drawn, ddof=min(rules.std_ddof, len(drawn) - 1)) + rules.std_eps
        advantages = np.where(trained, (advantages - drawn.mean()) / deviation, 0.0)
    return advantages, returns


def _of_turns(rules: Rules, groups: Sequence[Sequence[Episode]], trained: np.ndarray) -> np.ndarray:
    """The advantage of each token, [N * G, n]: that of the return from its turn on, among episodes that had that turn.

    `trained` [N * G, n] says which tokens are trained. A turn that only one episode of its group reached has 0.
    """
    flat = [episode for group in groups for episode in group]
    returns = [_returns(rules, episode) for episode in flat]
    found = np.zeros(trained.shape)
    for turn in range(max(map(len, returns))):
        own = np.array([each[turn] if turn < len(each) else np.nan for each in returns])  # [N * G]
        cells = np.zeros(trained.shape, bool)
        for row, episode in enumerate(flat):
            cells[row, : len(episode.turns)] = np.array(episode.turns) == turn
        shape = (len(groups), len(groups[0]))
        rewards = own.astype(np.float32).astype(np.float64).reshape(shape)
        of_turn = advantages_of(rules, rewards, (cells & trained).sum(axis=1).reshape(shape))
        compared = np.sum(~np.isnan(rewards), axis=1, keepdims=True) > 1
        found += np.where(compared, of_turn, 0.0).reshape(-1, 1) * cells
    return found


def _returns(rules: Rules, episode: Episode) -> list[float]:
    """The discounted sum of the rewards from each turn on."""
    earned = episode.turn_rewards or (episode.reward,)
    return [
        sum(rules.gamma ** (later - turn) * earned[later] for later in range(turn, len(earned)))
        for turn in range(len(earned))
    ]


def token_weights(rules: Rules, trained: np.ndarray, max_new_tokens: int, *, failed: int = 0) -> np.ndarray:
    """The weight of each token's loss, [S, n], given which tokens an optimizer step trains, [S, n] bool.

    The weights of an optimizer step sum to 1 with `mean="token"`, and with `mean="sequence"` to the share of episodes
    that have a trained token. Episodes that `failed` do not count.
    """
    episodes, lengths = max(len(trained) - failed, 1), trained.sum(axis=1, keepdims=True)
    if rules.mean == "token":
        return trained / max(trained.sum(), 1)
    return trained / (episodes * (np.maximum(lengths, 1) if rules.mean == "sequence" else max_new_tokens))


def uncertain_tokens(entropies: np.ndarray, valid: np.ndarray, share: float) -> np.ndarray:
    """Which tokens [S, n] are among this share of the step's highest entropies (arXiv:2506.01939), within 1e-4 nats."""
    least = np.quantile(entropies[valid], 1 - share, method="higher")
    return valid & (entropies > least - 1e-4)


def covariant_tokens(rules: Rules, step: Sequences[np.ndarray]) -> np.ndarray:
    """Which tokens [S, n] Clip-Cov or KL-Cov chooses (arXiv:2505.22617) among the step's trained tokens.

    Clip-Cov draws evenly among those in its band, by numpy's generator, seeded with the CRC-32 of their int32 ids.
    """
    valid, logprobs, advantages = step.valid, step.sampled_logprobs, step.advantages
    found = (logprobs - logprobs[valid].mean()) * (advantages - advantages[valid].mean())
    rows, places = np.nonzero(valid)
    given = rules.loss_options
    count = max(1, int(given.get("cov_share", 2e-4 if rules.loss == "clip_cov" else 2e-3) * len(rows)))
    own = found[valid]
    if rules.loss == "kl_cov":
        which = np.array(sorted(range(len(rows)), key=lambda each: -own[each])[:count])
    else:
        ids = step.tokens[rows, step.starts[rows] + places].astype(np.int32)
        inside = np.flatnonzero((own > given.get("cov_low", 1.0)) & (own < given.get("cov_high", 5.0)))
        which = np.random.default_rng(zlib.crc32(ids.tobytes())).permutation(inside)[:count]
    chosen = np.zeros(valid.shape, bool)
    chosen[rows[which], places[which]] = True
    return chosen


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


def is_equal(rules: Rules, group: Sequence[Episode]) -> bool:
    """Whether all rewards of a group, or all returns of each turn, are equal in float32, or only one is left.

    With `zero_variance_metric`, whether all values of that part are.
    """
    known = [episode for episode in group if not episode.failed]
    if (metric := rules.zero_variance_metric) is not None:
        return len({np.float32(value) for each in known for name, value, _ in each.parts if name == metric}) <= 1
    if rules.credit == "episode":
        return len({float(np.float32(each.reward)) for each in known}) <= 1
    returns = [_returns(rules, episode) for episode in known]
    turns = max(map(len, returns), default=0)
    return all(len({float(np.float32(own[turn])) for own in returns if turn < len(own)}) <= 1 for turn in range(turns))


def _trained(rules: Rules, episodes: Sequence[Episode], room: Room) -> np.ndarray:
    """The tokens to train on, [S, n] bool: those that the model drew, except in masked and failed episodes."""
    masked = [each.failed or (rules.mask_truncated and each.truncated) for each in episodes]
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
    count = np.maximum(np.sum(~np.isnan(rewards), axis=axis, keepdims=True), 1)
    squares = (rewards - np.nansum(rewards, axis=axis, keepdims=True) / count) ** 2
    freedom = np.maximum(count - rules.std_ddof, 1)
    return np.sqrt(np.nansum(squares, axis=axis, keepdims=True) / freedom) + rules.std_eps


def _others_deviation(rules: Rules, rewards: np.ndarray) -> np.ndarray:
    """For each reward [N, G] the standard deviation of its group's others, plus eps; 1 where they are equal."""
    found = np.ones(rewards.shape)
    for (row, column), reward in np.ndenumerate(rewards):
        others = [each for place, each in enumerate(rewards[row].tolist()) if place != column and each == each]
        if reward == reward and len(set(others)) > 1:
            found[row, column] = np.std(others, ddof=rules.std_ddof) + rules.std_eps
    return found


def _decoupled(rules: Rules, groups: Sequence[Sequence[Episode]]) -> np.ndarray:
    """GDPO (arXiv:2601.05242): the advantages [N, G] of parts standardised one by one, 0 for failed episodes."""
    found = np.array([[np.nan if episode.failed else 0.0 for episode in group] for group in groups])
    for n, group in enumerate(groups):
        parts = [episode.weighted for episode in group]
        for name in {name for each in parts for name in each}:
            own = {g: each[name] for g, each in enumerate(parts) if name in each}
            values = [float(np.float32(value)) for value, _ in own.values()]
            for g, (value, weight) in own.items() if len(values) > 1 else ():
                deviation = np.std(values, ddof=rules.std_ddof) + rules.std_eps
                found[n, g] += weight * (float(np.float32(value)) - np.mean(values)) / deviation
    known = found[~np.isnan(found)]
    freedom = max(len(known) - rules.std_ddof, 1)
    deviation = np.sqrt(np.sum((known - known.mean()) ** 2) / freedom) if len(known) else 0.0
    return np.nan_to_num((found - (known.mean() if len(known) else 0.0)) / (deviation + rules.std_eps))


def _length_weighted(rules: Rules, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """OPO (arXiv:2505.23585): the baseline is the mean reward of a group's tokens."""
    total = np.maximum(lengths.sum(axis=1, keepdims=True), 1)
    mean = np.nansum(rewards, axis=1, keepdims=True) / np.maximum(np.sum(~np.isnan(rewards), axis=1, keepdims=True), 1)
    by_token = np.nansum(rewards * lengths, axis=1, keepdims=True) / total
    return rewards - np.where(lengths.sum(axis=1, keepdims=True) > 0, by_token, mean)


def _rescaled(rules: Rules, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """GPG (arXiv:2504.02546): as if the batch consisted only of the groups whose rewards differ."""
    known = [row[~np.isnan(row)].tolist() for row in rewards]
    taught = sum(len(row) for row in known if len(set(row)) > 1)
    means = [np.mean(row) if row else 0.0 for row in known]
    return (rewards - np.reshape(means, (-1, 1))) * sum(map(len, known)) / max(taught, 1)


def _pass_at_k(rules: Rules, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Pass@k training (arXiv:2508.10751), by listing all sets of k completions, each paid its best reward."""
    found = np.zeros(rewards.shape)
    for own, paid in zip(found, rewards.tolist(), strict=True):
        known = [place for place, reward in enumerate(paid) if reward == reward]
        sets = list(itertools.combinations(known, min(int(rules.advantage_options["k"]), len(known))))
        best = [max((paid[place] for place in each), default=0.0) for each in sets]
        for place in known:
            mine = [pay for each, pay in zip(sets, best, strict=True) if place in each]
            own[place] = (np.mean(mine) - np.mean(best)) / (np.std(best) + 1e-6)
    return found


LISTED = {"length_weighted": _length_weighted, "rescaled": _rescaled, "pass_at_k": _pass_at_k}
"""Advantages that are more than a baseline and a deviation."""


def _whitened(returns: np.ndarray, lengths: np.ndarray, eps: float) -> np.ndarray:
    """Whiten returns [N, G] with mean and standard deviation over tokens, each of which has its episode's return."""
    by_token = np.repeat(returns.ravel(), lengths.ravel().astype(int))  # failed episodes have no token
    if not len(by_token) or by_token.max() == by_token.min():
        return np.zeros(returns.shape)
    return (returns - by_token.mean()) / (by_token.std() + eps)
