"""Checks the numbers that a watched run reports: computes them from its episodes, updates and weights."""

from collections.abc import Mapping, Sequence

import numpy as np

from podium.certify.check_result import Check, largest
from podium.certify.followed import Followed
from podium.certify.naive_optimizer import gradient_norm, scheduled_rate
from podium.certify.naive_rules import OLD_LOGPROBS, Rules
from podium.certify.naive_step import is_equal
from podium.certify.subject import Subject, episodes_of
from podium.certify.training import SHORT_STEP, Step, Training
from podium.rollout.transcript import Transcript

BAR = 1e-4
"""Numbers of an update are means of what the trainer computes in float32."""


def reports_check(subject: Subject, training: Training, followed: Sequence[Followed], after: tuple[str, ...]) -> Check:
    """Compare each step's metrics with numbers of the same names; `after` are checks that explain a red one."""
    pairs = [
        (each.step.metrics.get(name, np.inf), value)
        for number, each in enumerate(followed)
        for name, value in _expected(subject, training, number, each).items()
    ]
    return Check(
        name="metrics",
        claim="rewards, lengths, ages, and the numbers of updates that a run reports are those of its steps",
        difference=largest(abs(found - value) / max(1.0, abs(value)) for found, value in pairs),
        bar=BAR,
        after=after,
    )


def _expected(subject: Subject, training: Training, number: int, own: Followed) -> dict[str, float]:
    """The metrics of a step, by name."""
    found = _of_rewards(own.step) | _of_lengths(own.step) | _of_updates(training, number, own)
    found |= _of_groups(subject.rules, own) | _of_tokens(subject, own)
    if subject.recipe.demonstrations:  # nothing is drawn
        return {name: value for name, value in found.items() if not name.startswith("rollout/")}
    if subject.converses:
        found |= _of_conversations(own.step)
    return found | _of_ages(own.step, number)


def _all(step: Step) -> list[Transcript]:
    return [each for group in step.groups for each in group.transcripts]


def _with_statistics(name: str, values: Sequence[float], statistics: Sequence[str] = ("mean",)) -> dict[str, float]:
    """Statistics of values by the names of metrics; empty if there is no value."""
    known = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    return {f"{name}/{each}": float(known[each](np.asarray(values, np.float64))) for each in statistics if len(values)}


def _of_rewards(step: Step) -> dict[str, float]:
    rewards = [each for group in step.groups for each in group.rewards if not each.failed]
    names = {name for each in rewards for name in each.parts}
    found = _with_statistics("train-reward/total", [each.total for each in rewards], ("mean", "std", "min", "max"))
    for name in names:
        own = [each.parts[name] for each in rewards if name in each.parts]
        found |= _with_statistics(f"train-reward/func/{name}", own)
    return found


def _of_lengths(step: Step) -> dict[str, float]:
    every, most = _all(step), ("mean", "max")
    drawn = [sum(len(span.tokens) for span in each.spans if span.source == "drawn") for each in every]
    logprobs = [x for each in every for span in each.spans if span.source == "drawn" for x in span.sampled_logprobs]
    ended = [each.finish_reason for each in every if each.finish_reason != "failed"]
    cut = [reason in ("length", "turns", "drawn", "calls", "timeout") for reason in ended]
    return {
        **_with_statistics("train-seq_len/completion", drawn, most),
        **_with_statistics("train-seq_len/prompt", [len(g.transcripts[0].spans[0].tokens) for g in step.groups], most),
        **_with_statistics("train-seq_len/total", [sum(len(s.tokens) for s in each.spans) for each in every], most),
        "rollout/truncated_fraction": float(np.mean(cut)),
        "rollout/entropy": -float(np.mean(logprobs, dtype=np.float64)),
    }


def _of_updates(training: Training, number: int, own: Followed) -> dict[str, float]:
    """Numbers of a step's updates; means are weighted by tokens, or by updates where weights are concerned."""
    algorithm, seen = training.config.algorithm, own.step.updates
    whole = algorithm.minibatches * algorithm.updates_per_batch
    optimizer = training.config.train.optimizer
    rate = scheduled_rate(optimizer, training.config.steps * whole, (number + 1) * whole - 1)
    found = {"optimizer/updates": float(len(seen)), "optimizer/learning_rate": rate}
    if not seen or not own.updates:
        return found
    tokens = [each.tokens for each in own.updates]
    changes = [{name: each.after[name] - x for name, x in each.before.items()} for each in seen]
    found |= {
        "train-other/loss": float(np.average([each.loss for each in seen], weights=tokens)),
        "policy/entropy": float(np.average([each.entropy for each in own.updates], weights=tokens)),
        "optimizer/gradient_norm": float(np.mean([gradient_norm(_wide(each.gradient)) for each in seen])),
        "optimizer/update_norm": float(np.mean([gradient_norm(_wide(each)) for each in changes])),
    }
    if number != SHORT_STEP:  # else a minibatch was taken away after they were counted
        found["train-other/total_valid_token_count"] = sum(tokens) / algorithm.updates_per_batch
    return found


def _of_groups(rules: Rules, own: Followed) -> dict[str, float]:
    """How many groups teach nothing, and the advantages of the others where each episode has one."""
    groups = [episodes_of(group) for group in own.step.groups]
    equal = sum(is_equal(rules, group) for group in groups)
    dropped = 0 if rules.zero_variance == "keep" else equal
    found = {"group/equal_rewards_fraction": equal / len(groups), "group/dropped": float(dropped)}
    batch = next((each for each in own.batches if each is not None), None)
    if batch is not None and rules.advantage != "values" and rules.credit == "episode" and rules.distilled is None:
        each_has = batch.advantages[: (len(groups) - dropped) * len(groups[0]), 0]
        found |= _with_statistics("train-reward/advantage", each_has.tolist(), ("mean", "std", "min", "max"))
    return found


def _of_tokens(subject: Subject, own: Followed) -> dict[str, float]:
    """How far the policy is from the sampler, at first and over all updates, and which share of tokens is clipped."""
    rules, means, tokens = subject.rules, dict[str, list[float]](), list[int]()
    gaps: list[np.ndarray] = []
    for seen, batch in zip(own.step.updates, own.batches, strict=True):
        if batch is None:
            continue
        valid, weights = batch.valid, {**own.step.weights, **seen.before}
        logprobs = subject.naive_scores(batch.tokens, batch.starts, weights).logprobs[valid]
        sampled, advantages = batch.sampled_logprobs[valid], batch.advantages[valid]
        tokens.append(len(logprobs))
        gaps.append(np.abs(logprobs - sampled))
        values = {"policy/kl_sampled": np.exp(logprobs - sampled) - 1 - (logprobs - sampled)}
        if rules.loss == "clipped" and rules.dual_clip is None:
            old = sampled if rules.old_logprobs == "sampler" else batch.scores[OLD_LOGPROBS][valid]
            ratio = np.exp(logprobs - old)
            values["policy/clip_fraction/low"] = (ratio < 1 - rules.clip_low) & (advantages < 0)
            values["policy/clip_fraction/high"] = (ratio > 1 + rules.clip_high) & (advantages > 0)
        for name, each in values.items():
            means.setdefault(name, []).append(float(np.mean(each)))
    if not tokens or subject.recipe.demonstrations:
        return {}
    first = {"policy/logprob_gap/mean": float(gaps[0].mean()), "policy/logprob_gap/max": float(gaps[0].max())}
    return first | {name: float(np.average(each, weights=tokens)) for name, each in means.items()}


def _of_conversations(step: Step) -> dict[str, float]:
    every = _all(step)
    reasons = [each.finish_reason for each in every]
    turns = [sum(span.source == "drawn" for span in each.spans) for each in every]
    return {
        **_with_statistics("env/turns", turns, ("mean", "max")),
        **{f"env/stop/{reason}": reasons.count(reason) / len(reasons) for reason in reasons},
        "env/failed": float(reasons.count("failed")),
    }


def _of_ages(step: Step, number: int) -> dict[str, float]:
    """Ages of groups, whose first token counts, and of tokens, in updates; episodes without a reward do not count."""
    versions = [
        [_versions(each) for each, reward in zip(group.transcripts, group.rewards, strict=True) if not reward.failed]
        for group in step.groups
    ]
    kept = [own for own in versions if own]
    ages = [number - version for own in kept for each in own for version in each]
    return {
        **_with_statistics("async/staleness", [number - min(map(min, own)) for own in kept], ("mean", "max")),
        **_with_statistics("async/token_age", ages),
        "async/in_flight": float(len(step.position.pending)),
        "async/crossed_share": float(np.mean([each[0] != each[-1] for own in kept for each in own])),
    }


def _versions(transcript: Transcript) -> list[int]:
    return [version for span in transcript.spans if span.source == "drawn" for version in span.versions.tolist()]


def _wide(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.asarray(x, np.float64) for name, x in arrays.items()}
