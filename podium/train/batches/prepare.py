"""Turns graded groups into the batches of a step's optimizer steps.

    groups -> samples -> rows of batches -> scores -> advantages

Advantages come last, because they may depend on scores.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from podium.algorithms.advantages import (
    RETURNS,
    VALUES,
    RewardParts,
    TokenScores,
    equal_reward_groups,
    penalised_rewards,
    taught_advantages,
    token_weights,
    turn_advantages,
    turn_returns,
    value_returns,
)
from podium.algorithms.recipes import (
    COVARIANT,
    DRAWN_LOGPROBS,
    ENTROPY,
    LIKELIHOOD,
    LOSSES,
    OLD_LOGPROBS,
    RECIPES,
    REFERENCE_LOGPROBS,
    REFERENCE_POINT,
    TAUGHT_LOGPROBS,
    UNCERTAIN,
    Recipe,
)
from podium.algorithms.selection import covariant_tokens, top_entropy_tokens
from podium.hosts.distributed import on_host
from podium.observe.stats import BatchSeconds, BatchStats, RewardPenalty, TokenCounts, ValueStats
from podium.sampling.groups import Group
from podium.sharding import Params, ShardingRules, to_devices
from podium.train.batches.balance import Lengths
from podium.train.batches.batch import Batch, BatchSizes, TokenSpan, make_batch, put, take
from podium.train.batches.samples import Sample, imitated, transcript_sample, with_advantage, with_weight
from podium.train.scorers import Scorer, behind_own_prompts, with_scores
from podium.train.step import batch_sharding, shard_batch

MOST_SEGMENTS = 2**20  # of a group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Minibatch:
    """The packed samples of one optimizer step; advantages are still 0.

    The batch may also hold demonstrations, which are not in `samples` or `spans`.
    """

    places: list[tuple[int, int]]
    """For each sample, the index of its group among the kept groups, and of its episode in the group."""
    samples: list[Sample]
    batch: Batch[np.ndarray]
    spans: list[TokenSpan]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedStep:
    """A step's samples, in the minibatches of its optimizer steps; contains only groups that the recipe keeps."""

    rewards: np.ndarray  # [N, G], all groups
    parts: RewardParts | None  # [n, G, P], of the kept groups; None unless the recipe reads them
    baselines: np.ndarray | None  # [n], rewards of the kept groups' greedy completions; None if not needed
    returns: np.ndarray | None  # [N, G, K], of each turn with `credit: turn`; NaN if failed or not reached
    equal: np.ndarray  # [N] bool, groups of equal rewards (`Group.equal_rewards`), or all turns of equal returns
    kept: np.ndarray  # [n], indices of the kept groups within the step
    lengths: np.ndarray  # [n, G], drawn tokens of each episode; 0 if the recipe masks it
    minibatches: list[Minibatch]
    """The minibatches that have at least one token to train on or imitate."""


def pack_step(
    groups: Sequence[Group], recipe: Recipe, sizes: BatchSizes, demonstrations: Sequence[Group] = ()
) -> PackedStep:
    """Make samples from a step's groups and pack them, together with the demonstrations to mix in.

    Groups that the recipe drops are removed here, so they do not affect the mean or standard deviation of advantages.
    """
    rewards = np.stack([group.totals for group in groups])  # [N, G]
    if np.isnan(rewards).all() and any(reward.parts for group in groups for reward in group.rewards):
        raise ValueError(
            "no answer of the step could be graded: each reward function returned None for all of them, or they were "
            "too long for a reward model; let a reward function grade them, or add to tasks.rewards a part that "
            "grades every answer, such as correct"
        )
    equal, returns = _equal_groups(groups, recipe)
    kept = np.flatnonzero(~equal if recipe.zero_variance != "keep" else np.ones_like(equal))
    samples = [group_samples(groups[n], n, recipe) for n in kept.tolist()]
    lengths = np.zeros((len(kept), rewards.shape[1]), np.int64)
    for n, group in enumerate(samples):
        for sample in group:
            lengths[n, sample.episode] += sample.num_drawn
    parts = np.array_split(np.arange(len(kept)), recipe.minibatches)
    failed = np.isnan(rewards[kept])
    mixed_in = np.array_split(np.arange(len(demonstrations)), recipe.minibatches)
    minibatches = [
        _minibatch(
            part.tolist(),
            samples,
            lengths=lengths,
            recipe=recipe,
            sizes=sizes,
            failed=int(failed[part].sum()),
            demonstrated=_demonstrated({len(groups) + n: demonstrations[n] for n in own.tolist()}, recipe, sizes),
        )
        for part, own in zip(parts, mixed_in, strict=True)
    ]
    return PackedStep(
        rewards=rewards,
        baselines=_baselines([groups[n] for n in kept.tolist()]) if "baselines" in recipe.reads else None,
        parts=reward_parts([groups[n] for n in kept.tolist()]) if "parts" in recipe.reads else None,
        returns=returns,
        equal=equal,
        kept=kept,
        lengths=lengths,
        minibatches=[each for each in minibatches if each.batch.num_micro_batches],
    )


def _equal_groups(groups: Sequence[Group], recipe: Recipe) -> tuple[np.ndarray, np.ndarray | None]:
    """`equal` and `returns` of `PackedStep`."""
    if recipe.credit != "turn":
        return equal_reward_groups(np.stack([group.judged(recipe.zero_variance_metric) for group in groups])), None
    turns = [[reward.turns or (reward.total,) for reward in group.rewards] for group in groups]
    returns = turn_returns(turns, recipe.gamma)
    return np.all([equal_reward_groups(returns[:, :, k]) for k in range(returns.shape[2])], axis=0), returns


def group_lengths(groups: Sequence[Group], recipe: Recipe, demonstrations: Sequence[Group] = ()) -> list[list[Lengths]]:
    """The lengths of what a step trains on, by group; those of a dropped group are empty."""
    equal, _ = _equal_groups(groups, recipe)
    dropped = equal & (recipe.zero_variance != "keep")
    samples = [
        [] if out else group_samples(group, n, recipe)
        for n, (group, out) in enumerate(zip(groups, dropped, strict=True))
    ]
    samples += [group_samples(group, len(groups) + n, RECIPES["sft"]()) for n, group in enumerate(demonstrations)]
    return [[sample.lengths for sample in each if sample.num_drawn] for each in samples]


def _demonstrated(groups: Mapping[int, Group], recipe: Recipe, sizes: BatchSizes) -> list[Sample]:
    """Make the samples of an optimizer step's demonstrations, given by group index, weighted as in recipe sft."""
    if not groups:
        return []
    sft = RECIPES["sft"]()
    samples = [sample for index, group in groups.items() for sample in group_samples(group, index, sft)]
    lengths = np.array([sample.num_drawn for sample in samples])
    weights = token_weights(sft.mean, lengths, num_sequences=len(samples), max_new_tokens=sizes.max_new_tokens)
    factor = recipe.loss_parts.get(LIKELIHOOD, 0.0)
    return [imitated(sample, factor * float(weight)) for sample, weight in zip(samples, weights, strict=True)]


def _baselines(groups: Sequence[Group]) -> np.ndarray:
    """The reward of each group's greedy completion, [N]; NaN if it failed."""
    return np.array([np.nan if group.greedy is None else group.greedy.reward.total for group in groups], np.float32)


def reward_parts(groups: Sequence[Group]) -> RewardParts:
    """Collect the parts of each reward and their weights, for every part that counts in at least one total."""
    rewards = [group.rewards for group in groups]
    names = sorted({name for group in rewards for reward in group for name in reward.weights})
    shape = (len(rewards), len(rewards[0]) if rewards else 0, len(names))
    values, weights = np.full(shape, np.nan), np.zeros(shape)
    for n, group in enumerate(rewards):
        for g, reward in enumerate(group):
            for p, name in enumerate(names):
                if name in reward.weights:
                    values[n, g, p], weights[n, g, p] = reward.parts[name], reward.weights[name]
    return RewardParts(values, weights)


def group_samples(group: Group, index: int, recipe: Recipe) -> list[Sample]:
    """Make samples from a group's episodes, one for each segment; masked ones have no tokens.

    Completions without a reward are masked, and with `mask_truncated` also completions that a limit ended. Segments
    that begin differently share no prompt, so they get different group numbers for packing.
    """
    segments = [(g, each) for g, transcript in enumerate(group.transcripts) for each in transcript.segments]
    prompts = [segment.prompt.tobytes() for _, segment in segments]
    starts, made = dict[int, int](), list[Sample]()
    for (g, segment), prompt in zip(segments, prompts, strict=True):
        sample = transcript_sample(
            segment,
            group=index if (first := prompts.index(prompt)) == 0 else -(index * MOST_SEGMENTS + first),
            version=group.version,
            masked=group.rewards[g].failed or (recipe.mask_truncated and segment.finish_reason not in ("stop", None)),
            episode=g,
            start=starts.get(g, 0),
        )
        starts[g] = sample.start + len(sample.tokens)
        made.append(sample)
    return made


def _minibatch(
    part: list[int],
    samples: list[list[Sample]],
    lengths: np.ndarray,
    recipe: Recipe,
    sizes: BatchSizes,
    failed: int,
    demonstrated: list[Sample],
) -> Minibatch:
    """Weight and pack the samples of some groups. Masked samples count in the mean, but are not packed.

    `lengths` [n, G] are the drawn tokens of episodes. `failed` episodes, which failed through no fault of the model, do
    not count in the mean. `demonstrated` samples are packed with the others.
    """
    places = [(n, sample.episode) for n in part for sample in samples[n]]
    flat = [sample for n in part for sample in samples[n]]
    own = lengths[part]  # [m, G]
    weights = np.zeros(lengths.shape, np.float32)
    weights[part] = token_weights(
        recipe.mean, own.ravel(), num_sequences=own.size - failed, max_new_tokens=sizes.max_new_tokens
    ).reshape(own.shape)
    weighted = [with_weight(sample, weights[place]) for place, sample in zip(places, flat, strict=True)]
    trained = [sample for sample in weighted if sample.num_drawn]
    batch, spans = make_batch([*trained, *demonstrated], sizes)
    return Minibatch(
        places=[place for place, sample in zip(places, flat, strict=True) if sample.num_drawn],
        samples=trained,
        batch=batch,
        spans=spans[: len(trained)],
    )


def prepare_step(
    groups: Sequence[Group],
    recipe: Recipe,
    sizes: BatchSizes,
    *,
    rules: ShardingRules,
    scorers: Sequence[Scorer],
    policy: Params,
    demonstrations: Sequence[Group] = (),
) -> tuple[list[Batch[jax.Array]], BatchStats]:
    """Make the batches of a step's optimizer steps on the devices, with scores and advantages.

    Args:
        groups: graded episodes of the step.
        recipe: decides which groups are kept, and computes advantages and weights.
        sizes: shapes of the batches.
        rules: how a batch's arrays are sharded.
        scorers: score each batch before its advantages are computed.
        policy: all weights of the policy before the first update.
        demonstrations: the demonstrations to mix into the step.
    """
    start = time.perf_counter()
    packed = pack_step(groups, recipe, sizes, demonstrations)
    placed = jax.block_until_ready([shard_batch(each.batch, rules) for each in packed.minibatches])
    placed_at = time.perf_counter()
    scored = _scored(packed, groups, placed=placed, scorers=scorers, policy=policy, rules=rules)
    points = None
    if recipe.data_form == "label":
        points = [reference_point(each.samples, sizes, rules, scorers, policy) for each in packed.minibatches]
    scored_at = time.perf_counter()
    advantages, penalty = step_advantages(packed, recipe, scored)
    taught_kl = None
    if recipe.teaching is not None and recipe.teaching.loss == "sampled" and packed.minibatches:
        tokens = _token_scores(packed, scored)
        taught, own = tokens.scores[TAUGHT_LOGPROBS], tokens.scores[OLD_LOGPROBS]
        advantages = taught_advantages(advantages, taught, own, tokens.mask, weight=recipe.teaching.weight)
        taught_kl = float(np.mean((own - taught)[tokens.mask], dtype=np.float64)) if tokens.mask.any() else None
    returns, criticised = _value_targets(packed, recipe, scored, penalty)
    batches = [
        _finish(batch, minibatch, advantages=advantages, returns=returns, recipe=recipe, rules=rules)
        for batch, minibatch in zip(scored, packed.minibatches, strict=True)
    ]
    if points is not None:
        batches = [_with_point(batch, point, rules) for batch, point in zip(batches, points, strict=True)]
    stats = _batch_stats(packed, advantages, penalty)
    return batches, dataclasses.replace(
        stats,
        taught_kl=taught_kl,
        values=criticised,
        seconds=BatchSeconds(
            batch_s=placed_at - start,
            score_s=scored_at - placed_at,
            advantages_s=time.perf_counter() - scored_at,
        ),
    )


def _scored(
    packed: PackedStep,
    groups: Sequence[Group],
    placed: Sequence[Batch[jax.Array]],
    scorers: Sequence[Scorer],
    policy: Params,
    rules: ShardingRules,
) -> list[Batch[jax.Array]]:
    """Add all scores to the step's batches; `groups` are all groups of the step, including dropped ones."""
    here = [scorer for scorer in scorers if scorer.own_prompts is None]
    found = jax.block_until_ready([with_scores(batch, here, policy) for batch in placed])
    for scorer in scorers:
        if scorer.own_prompts is None:
            continue
        for index, minibatch in enumerate(packed.minibatches):
            prompts = [groups[packed.kept[n]].prompt for n, _ in minibatch.places]
            values = behind_own_prompts(scorer, minibatch.samples, prompts, rules)
            scores = {**found[index].scores, scorer.name: _placed(values, found[index], minibatch, rules)}
            found[index] = dataclasses.replace(found[index], scores=scores)
    return found


def reference_point(
    samples: Sequence[Sample],
    sizes: BatchSizes,
    rules: ShardingRules,
    scorers: Sequence[Scorer],
    policy: Params,
) -> float:
    """KTO's estimate of the policy's KL to the reference (arXiv:2402.01306), in nats, at least 0.

    The estimate is the mean log-ratio of policy to reference over mismatched pairs: each prompt of the optimizer step
    is paired with the completion of the previous row, and the first prompt with that of the last row.
    """
    mismatched = [
        dataclasses.replace(completion, prompt=sample.prompt, group=index, choices=None, prompt_choices=None)
        for index, (sample, completion) in enumerate(zip(samples, [samples[-1], *samples[:-1]], strict=True))
    ]
    return max(0.0, float(np.mean(log_ratios(mismatched, sizes, rules, scorers, policy))))


def log_ratios(
    samples: Sequence[Sample],
    sizes: BatchSizes,
    rules: ShardingRules,
    scorers: Sequence[Scorer],
    policy: Params,
) -> np.ndarray:
    """The log-ratio of policy to reference, summed over each sample's drawn tokens, in nats, [n] float64.

    `scorers` must include the reference; its program scores the policy too.
    """
    reference = next(scorer for scorer in scorers if scorer.name == REFERENCE_LOGPROBS)
    own = dataclasses.replace(reference, name=OLD_LOGPROBS, params=None)
    batch, spans = make_batch(samples, sizes)
    scored = with_scores(shard_batch(batch, rules), (own, reference), policy).scores
    found = [take(on_host(scored[name]), spans) for name in (OLD_LOGPROBS, REFERENCE_LOGPROBS)]
    sums = [
        np.sum((ours.astype(np.float64) - theirs)[sample.mask])
        for ours, theirs, sample in zip(*found, samples, strict=True)
    ]
    return np.array(sums)


def _with_point(batch: Batch[jax.Array], point: float, rules: ShardingRules) -> Batch[jax.Array]:
    """Add the `reference_point` to the batch at every token, for KTO's loss."""
    everywhere = np.full(batch.tokens.shape, point, np.float32)
    placed = to_devices(everywhere, batch_sharding(everywhere, rules))
    return dataclasses.replace(batch, scores={**batch.scores, REFERENCE_POINT: placed})


def _value_targets(
    packed: PackedStep, recipe: Recipe, scored: Sequence[Batch[jax.Array]], penalty: RewardPenalty | None
) -> tuple[np.ndarray | None, ValueStats | None]:
    """The targets of estimated values for the kept groups, [n, G, T], with statistics; None for both if the recipe has
    no values.
    """
    if not recipe.learns_values or not packed.minibatches:
        return None, None
    tokens = _token_scores(packed, scored)
    bound = recipe.advantage.keywords
    rewards = (packed.rewards if penalty is None else penalty.rewards)[packed.kept]
    returns = value_returns(rewards, tokens, gamma=bound["gamma"], lam=bound["lam"])
    found = returns[tokens.mask].astype(np.float64)
    values = tokens.scores[VALUES][tokens.mask].astype(np.float64)
    if not found.size:
        return returns, None
    spread = found.var()
    stats = ValueStats(
        value=float(values.mean()),
        returned=float(found.mean()),
        explained_variance=float(1 - (found - values).var() / spread) if spread else None,
    )
    return returns, stats


def step_advantages(
    packed: PackedStep, recipe: Recipe, scored: Sequence[Batch[jax.Array]]
) -> tuple[np.ndarray, RewardPenalty | None]:
    """Advantages of the kept groups, [n, G] or per token [n, G, T], and the KL penalty that was subtracted from
    rewards, if any.

    `scored` are the step's batches with their scores.
    """
    penalty = _reward_penalty(packed, recipe, scored) if recipe.kl == "k1_reward" else None
    rewards = (packed.rewards if penalty is None else penalty.rewards)[packed.kept]
    if not len(packed.kept):
        return np.zeros(packed.lengths.shape, np.float32), penalty
    if packed.returns is not None:
        return _turn_advantages(packed, packed.returns[packed.kept], recipe), penalty
    advantage = recipe.advantage
    if packed.parts is not None:
        advantage = functools.partial(advantage, parts=packed.parts)
    if packed.baselines is not None:
        advantage = functools.partial(advantage, baselines=packed.baselines)
    if "tokens" not in recipe.reads:
        return _checked(advantage(rewards, packed.lengths), packed), penalty
    if not packed.minibatches:  # no batch has scores
        return np.zeros(packed.lengths.shape, np.float32), penalty
    tokens = _token_scores(packed, scored)
    found = advantage(rewards, packed.lengths, tokens=tokens)
    return (found if found.ndim == 2 else np.where(tokens.mask, found, np.float32(0))), penalty


def _turn_advantages(packed: PackedStep, returns: np.ndarray, recipe: Recipe) -> np.ndarray:
    """The advantage of each token, which is that of its turn, [n, G, T]. `returns` [n, G, K] are those of the kept
    groups.
    """
    placed = [pair for each in packed.minibatches for pair in zip(each.places, each.samples, strict=True)]
    lengths = np.zeros(returns.shape, np.int64)
    for place, sample in placed:
        lengths[place] += np.bincount(sample.turns[sample.mask], minlength=returns.shape[2])
    advantages = turn_advantages(recipe.advantage, returns, lengths)
    longest = max((sample.start + len(sample.tokens) for _, sample in placed), default=0)
    spread = np.zeros((*returns.shape[:2], longest), np.float32)
    for place, sample in placed:
        own = slice(sample.start, sample.start + len(sample.tokens))
        spread[place][own] = np.where(sample.mask, advantages[place][np.minimum(sample.turns, returns.shape[2] - 1)], 0)
    return spread


def _checked(advantages: np.ndarray, packed: PackedStep) -> np.ndarray:
    """The advantages. Raises ValueError if the advantage of a trained episode is NaN because another episode of its
    group failed.
    """
    if np.isnan(packed.rewards).any() and not np.isfinite(advantages[packed.lengths > 0]).all():
        raise ValueError(
            "the recipe's advantage is NaN because a conversation failed, whose reward is NaN and length 0: ignore "
            "such rewards in means (numpy.nanmean), or set environments.max_failed to 0"
        )
    return np.nan_to_num(advantages)


def _reward_penalty(packed: PackedStep, recipe: Recipe, scored: Sequence[Batch[jax.Array]]) -> RewardPenalty:
    """The KL penalty of each episode; recipes with a penalty keep all groups."""
    sums = np.zeros(packed.rewards.shape)
    for minibatch, batch in zip(packed.minibatches, scored, strict=True):
        found = take(on_host(batch.scores[REFERENCE_LOGPROBS]), minibatch.spans)
        for (n, g), sample, reference in zip(minibatch.places, minibatch.samples, found, strict=True):
            sums[n, g] += np.sum((sample.sampled_logprobs - reference)[sample.mask])
    return RewardPenalty(
        kl=sums,
        penalties=recipe.kl_coef * sums,
        rewards=penalised_rewards(packed.rewards, sums, recipe.kl_coef),
        num_tokens=int(packed.lengths.sum()),
    )


def _token_scores(packed: PackedStep, scored: Sequence[Batch[jax.Array]]) -> TokenScores:
    """All scores of each token, padded to the longest sample."""
    ends = (sample.start + len(sample.tokens) for each in packed.minibatches for sample in each.samples)
    longest = max(ends, default=0)
    shape = (*packed.lengths.shape, longest)
    names = sorted({name for batch in scored for name in batch.scores})
    mask = np.zeros(shape, bool)
    sampled_logprobs = np.zeros(shape, np.float32)
    scores = {name: np.zeros(shape, np.float32) for name in names}
    for minibatch, batch in zip(packed.minibatches, scored, strict=True):
        found = {name: take(on_host(batch.scores[name]), minibatch.spans) for name in names}
        for index, ((n, g), sample) in enumerate(zip(minibatch.places, minibatch.samples, strict=True)):
            own = slice(sample.start, sample.start + len(sample.tokens))
            mask[n, g, own] = sample.mask
            sampled_logprobs[n, g, own] = sample.sampled_logprobs
            for name in names:
                scores[name][n, g, own] = found[name][index]
    return TokenScores(mask=mask, sampled_logprobs=sampled_logprobs, scores=scores)


def _finish(
    batch: Batch[jax.Array],
    minibatch: Minibatch,
    advantages: np.ndarray,
    returns: np.ndarray | None,
    recipe: Recipe,
    rules: ShardingRules,
) -> Batch[jax.Array]:
    """Add advantages to a batch on the devices, and keep only the scores that losses read."""
    host = np.zeros(batch.tokens.shape, np.float32)
    own = [
        with_advantage(sample, advantages[place] if advantages.ndim == 2 else _of_sample(advantages[place], sample))
        for place, sample in zip(minibatch.places, minibatch.samples, strict=True)
    ]
    put(host, minibatch.spans, [sample.advantages for sample in own])
    scores = {name: batch.scores[name] for name in recipe.loss_scores if name in batch.scores}
    if returns is not None:
        pairs = zip(minibatch.places, minibatch.samples, strict=True)
        learned = [_of_sample(returns[place], sample) for place, sample in pairs]
        scores[RETURNS] = _placed(learned, batch, minibatch, rules)
    if recipe.top_entropy < 1:
        chosen = _uncertain(batch, minibatch, recipe.top_entropy)
        scores[UNCERTAIN] = _placed(chosen, batch, minibatch, rules)
    if recipe.corrects_penalty:
        drawn = [sample.drawn_logprobs for sample in own]
        scores[DRAWN_LOGPROBS] = _placed(drawn, batch, minibatch, rules)
    if recipe.chooses:
        scores[COVARIANT] = _placed(_covariant(own, recipe), batch, minibatch, rules)
    return dataclasses.replace(batch, advantages=to_devices(host, batch_sharding(host, rules)), scores=scores)


def _placed(
    values: Sequence[np.ndarray], batch: Batch[jax.Array], minibatch: Minibatch, rules: ShardingRules
) -> jax.Array:
    """Place each sample's values [n] at its tokens in an array [K, B, T] float32 on the devices; 0 elsewhere."""
    host = np.zeros(batch.tokens.shape, np.float32)
    put(host, minibatch.spans, values)
    return to_devices(host, batch_sharding(host, rules))


def _uncertain(batch: Batch[jax.Array], minibatch: Minibatch, share: float) -> list[np.ndarray]:
    """For each sample, a mask [n] of drawn tokens that are among the optimizer step's most uncertain."""
    if not minibatch.samples:
        return []
    entropies = take(on_host(batch.scores[ENTROPY]), minibatch.spans)
    drawn = np.concatenate([sample.mask for sample in minibatch.samples])
    chosen = drawn.copy()
    chosen[drawn] = top_entropy_tokens(np.concatenate(entropies)[drawn], share=share)
    return np.split(chosen, np.cumsum([len(sample.tokens) for sample in minibatch.samples])[:-1])


def _covariant(samples: Sequence[Sample], recipe: Recipe) -> list[np.ndarray]:
    """For each sample, a mask [n] of the tokens that the recipe's loss selects by the covariance with advantages."""
    if not samples:
        return []
    drawn = np.concatenate([sample.mask for sample in samples])
    logprobs = np.concatenate([sample.sampled_logprobs for sample in samples])
    advantages = np.concatenate([sample.advantages for sample in samples])
    tokens = np.concatenate([sample.tokens for sample in samples])
    options = {**LOSSES[recipe.loss].options, **recipe.loss_options}
    chosen = drawn.copy()
    chosen[drawn] = covariant_tokens(recipe.loss, options, logprobs[drawn], advantages[drawn], tokens[drawn])
    return np.split(chosen, np.cumsum([len(sample.tokens) for sample in samples])[:-1])


def _of_sample(advantages: np.ndarray, sample: Sample) -> np.ndarray:
    """The part of an episode's per-token advantages that belongs to a sample."""
    return advantages[sample.start : sample.start + len(sample.tokens)]


def _batch_stats(packed: PackedStep, advantages: np.ndarray, penalty: RewardPenalty | None) -> BatchStats:
    batches = [each.batch for each in packed.minibatches]
    trained = int(packed.lengths.sum())
    filled = sum(int(np.sum(np.asarray(batch.segments) > 0)) for batch in batches)
    demonstrated = sum(int(np.count_nonzero(x)) for batch in batches if (x := batch.likelihoods) is not None)
    cells = sum(int(batch.num_micro_batches) * int(np.prod(batch.tokens.shape[1:])) for batch in batches)
    by_episode = advantages if advantages.ndim == 2 else advantages.sum(axis=2) / np.maximum(packed.lengths, 1)
    return BatchStats(
        groups=len(packed.rewards),
        equal_groups=int(packed.equal.sum()),
        dropped_groups=len(packed.rewards) - len(packed.kept),
        sequences=int(np.count_nonzero(packed.lengths)),
        tokens=TokenCounts(
            trained=trained,
            prompt=filled - trained - demonstrated,
            padding=cells - filled,
            demonstrated=demonstrated,
        ),
        kept=packed.kept,
        advantages=by_episode.ravel(),
        penalty=penalty,
    )
