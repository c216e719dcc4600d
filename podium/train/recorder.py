"""Records and shows a run's steps and evaluations."""

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from podium.algorithms.losses import narrow_clip_warning
from podium.algorithms.recipes import Recipe
from podium.config.schema import Config
from podium.job.records import ProgressReport
from podium.models.architecture import DecoderConfig
from podium.observe.alarms import CarryAlarms, length_distance
from podium.observe.metrics import (
    COMPARED_WITH_SAMPLER,
    REWARD,
    STEP_REPORT,
    TRUNCATED,
    evaluation_metrics,
    step_metrics,
)
from podium.observe.progress import Progress, ShownCompletion
from podium.observe.records import lengths_record, sample_record, sampled_groups
from podium.observe.report.findings import MOSTLY_CUT, SOLVED
from podium.observe.run_dir import LENGTHS, SAMPLES, RunDir
from podium.observe.stats import BatchStats, CarryStats, CompletionStats, StepStats, UpdateStats
from podium.observe.writers import MetricWriter
from podium.rollout.request import RolloutStats
from podium.train.distributed import gather, local_memory
from podium.train.evaluate import Evaluation
from podium.train.generate import Group

STEPS_AVERAGED = 10

OnStep = Callable[[int, Mapping[str, float], list[dict[str, Any]]], None]
"""Hears of each step that is done: how many are, its metrics, and its lines of samples.jsonl."""


def unheard(step: int, metrics: Mapping[str, float], samples: list[dict[str, Any]]) -> None:
    """An `OnStep` that does nothing."""


class PlanCheck(Protocol):
    """Plans a run and measures the plan: `podium.plan.check`, passed down, since the planner imports the trainer."""

    def begin(self, config: Config, decoder: DecoderConfig, folder: Path | None) -> str | None:
        """Before the first step: a line to print. Raises ValueError where the run is far too large."""
        ...

    def after_step(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], str | None]:
        """After each step: metrics to add, and a line to print."""
        ...


class Recorder:
    """Writes metrics, samples and lengths of a run, shows them, and reports to who waits for the job."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        writer: MetricWriter,
        progress: Progress,
        *,
        recipe: Recipe,
        report: ProgressReport,
        task_labels: list[str],
        pieces: Callable[[Sequence[int]], list[str]],
        check: PlanCheck | None,
        on_step: OnStep = unheard,
    ) -> None:
        """Nothing is written yet; `pieces` splits tokens into texts; without `check` nothing is planned."""
        self.config, self.run_dir, self.writer, self.progress = config, run_dir, writer, progress
        self._recipe, self._report, self._labels, self._check = recipe, report, task_labels, check
        self._pieces, self._on_step = pieces, on_step
        self._warned = self._taught_nothing = False
        self._alarms = CarryAlarms(config.rollout)
        self._step_seconds: collections.deque[float] = collections.deque(maxlen=STEPS_AVERAGED)
        self._checkpoint_s: float | None = None
        self._start = self._cpu_start = 0.0

    def begin_step(self, checkpoint_s: float | None) -> None:
        """A step's time runs from here to `write`; `checkpoint_s` is what the step before took to save, if it did."""
        self._checkpoint_s = checkpoint_s
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def write(
        self,
        step: int,
        groups: list[Group],
        rolled: RolloutStats,
        batched: BatchStats,
        updated: UpdateStats,
        sync_s: float,
    ) -> None:
        """Record that `step` steps are done, and what the last of them did; on several hosts all must call it."""
        step_s, cpu_s = time.perf_counter() - self._start, time.process_time() - self._cpu_start
        self._step_seconds.append(step_s)
        averaged = len(self._step_seconds) == STEPS_AVERAGED
        stats = StepStats(
            completions=completion_stats(groups),
            rolled=rolled,
            batched=batched,
            updated=updated,
            step_s=step_s,
            cpu_s=cpu_s,
            sync_s=sync_s,
            checkpoint_s=self._checkpoint_s,
            mean_step_s=float(np.mean(self._step_seconds)) if averaged else None,
            carried=carry_stats(groups, rolled.drawn_lengths) if self.config.rollout.in_flight > 1 else None,
            memory=device_memory(),
        )
        metrics = step_metrics(stats)
        if self._recipe.demonstrations:
            metrics = {name: value for name, value in metrics.items() if not name.startswith(COMPARED_WITH_SAMPLER)}
        if self._check is not None:
            more, line = self._check.after_step(metrics)
            metrics |= more
            if line is not None:
                self.progress.message(line)
        self._warn_of_narrow_clip(updated)
        self._warn_of_equal_rewards(batched, metrics)
        for line in self._alarms.after_step(stats, metrics):
            self.progress.message(line)
        self.writer.write(step, metrics)
        self._report.update(step=step, metrics={name: metrics[name] for name in STEP_REPORT if name in metrics})
        samples = self._write_completions(step, groups, batched, rolled)
        first = groups[0]
        shown = ShownCompletion(first.prompt.prompt.question, first.transcripts[0].text, first.rewards[0].total)
        self.progress.step(step, metrics, shown)
        self._on_step(step, metrics, samples)

    def _warn_of_narrow_clip(self, updated: UpdateStats) -> None:
        """Say once that rounding alone clips tokens, where it does."""
        warning = narrow_clip_warning(self._recipe, updated.logprob_gap) if updated.updates else None
        if warning is not None and not self._warned:
            self._warned = True
            self.progress.message(warning)

    def _warn_of_equal_rewards(self, batched: BatchStats, metrics: Mapping[str, float]) -> None:
        """Say once that a step taught nothing, where all groups earned the same and it was not the most."""
        reward, cut = metrics[REWARD], metrics[TRUNCATED]
        if self._taught_nothing or batched.equal_groups < batched.groups or reward >= SOLVED:
            return
        self._taught_nothing, rollout = True, self.config.rollout
        advice = "take easier questions, a reward with more levels, or a larger group_size"
        if cut > MOSTLY_CUT:
            advice = f"{cut:.0%} hit rollout.max_new_tokens ({rollout.max_new_tokens}): raise it, or {advice}"
        self.progress.message(f"all groups earned the same (mean reward {reward:.2f}): nothing was learned; {advice}")

    def _write_completions(
        self, step: int, groups: list[Group], batched: BatchStats, rolled: RolloutStats
    ) -> list[dict[str, Any]]:
        """Record samples of the step's groups, the first with its tokens, and the lengths of all; the samples."""
        samples = []
        every = self.config.metrics.samples_every
        sampled = sampled_groups(step, prompts_per_step=self.config.prompts_per_step, samples_every=every)
        advantages = dict(
            zip(
                batched.kept.tolist(),
                batched.advantages.reshape(len(batched.kept), len(groups[0].transcripts)),
                strict=True,
            )
        )
        for index in sampled:
            group = groups[index]
            task = self._labels[group.prompt.task]
            record = sample_record(
                step,
                "train",
                task,
                group.prompt.prompt,
                group.transcripts,
                group.rewards,
                advantages=advantages.get(index),
                pieces=self._pieces if index == sampled[0] else None,
            )
            self.run_dir.append(SAMPLES, record)
            samples.append(record)
        self.writer.write_samples(step, samples)
        prompts = [len(group.tokens) for group in groups]
        completions = [transcript.num_drawn for group in groups for transcript in group.transcripts]
        drawn = rolled.drawn_lengths if self.config.rollout.in_flight > 1 else None
        self.run_dir.append(LENGTHS, lengths_record(step, prompts, completions, drawn))
        return samples

    def write_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Record the evaluation of the weights after `step` steps."""
        metrics = evaluation_metrics(evaluation.stats)
        self.writer.write(step, metrics)
        records = evaluation.records(step)
        for record in records:
            self.run_dir.append(SAMPLES, record)
        self.writer.write_samples(step, records)
        self.progress.evaluated(step, metrics)


def completion_stats(groups: Sequence[Group]) -> CompletionStats:
    """Rewards and lengths of a step's completions."""
    rewards = [reward for group in groups for reward in group.rewards]
    transcripts = [transcript for group in groups for transcript in group.transcripts]
    lengths = np.array([transcript.num_drawn for transcript in transcripts])
    drawn = np.concatenate([transcript.sampled_logprobs for transcript in transcripts])
    prompts = np.array([len(group.tokens) for group in groups])
    names = dict.fromkeys(part for reward in rewards for part in reward.parts)
    return CompletionStats(
        rewards=np.array([reward.total for reward in rewards]),
        parts={name: np.array([each.parts[name] for each in rewards if name in each.parts]) for name in names},
        prompt_tokens=prompts,
        completion_tokens=lengths,
        total_tokens=np.array([transcript.num_tokens for transcript in transcripts]),
        truncated=sum(transcript.finish_reason == "length" for transcript in transcripts),
        timeouts=sum(reward.timed_out for reward in rewards),
        entropy=-float(np.mean(drawn, dtype=np.float64)),
    )


def carry_stats(groups: Sequence[Group], drawn_lengths: Sequence[int]) -> CarryStats:
    """How old a step's completions are, and how far their lengths are from those of what ended in the step."""
    versions = [[transcript.versions for transcript in group.transcripts] for group in groups]
    ages = [group.version - np.concatenate(own) for group, own in zip(groups, versions, strict=True)]
    staleness = np.array([np.max(own) for own in ages])
    totals = np.array([np.mean(group.totals) for group in groups])
    return CarryStats(
        staleness=staleness,
        token_ages=np.concatenate(ages),
        crossed=float(np.mean([each[0] != each[-1] for own in versions for each in own])),
        rewards={str(age): float(np.mean(totals[staleness == age])) for age in np.unique(staleness)},
        length_distance=length_distance([len(each) for own in versions for each in own], drawn_lengths),
    )


def device_memory() -> tuple[int, int] | None:
    """Bytes in use, and at most, on the device with most, of all hosts; None where devices do not say (CPU)."""
    used, peak = local_memory("bytes_in_use"), local_memory("peak_bytes_in_use")
    if used is None or peak is None:
        return None
    all_used, all_peak = zip(*gather((used, peak)), strict=True)
    return max(all_used), max(all_peak)
