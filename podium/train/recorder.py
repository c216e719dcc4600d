"""Records and shows a run's steps and evaluations."""

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from podium.algorithms.losses import narrow_clip_warning
from podium.algorithms.recipes import Recipe
from podium.hosts.distributed import gather, local_memory
from podium.observe.alarms import CarryAlarms, GapAlarm, RewardAlarm, check_gap, length_distance
from podium.observe.metrics import (
    COMPARED_WITH_SAMPLER,
    STEP_REPORT,
    evaluation_metrics,
    step_metrics,
)
from podium.observe.records import (
    SampleRecord,
    completion_records,
    lengths_record,
    sample_record,
    sampled_groups,
)
from podium.observe.run_dir import LENGTHS, SAMPLES
from podium.observe.run_state import ShownCompletion
from podium.observe.stats import (
    BatchStats,
    CarryStats,
    CompletionStats,
    ConversationStats,
    EnvironmentStats,
    LevelStats,
    StepSeconds,
    StepStats,
    UpdateStats,
)
from podium.observe.writers import MetricWriter
from podium.rollout.request import RolloutStats
from podium.run.run_spec import RunSpec
from podium.sampling.feed import Feed
from podium.sampling.groups import Group, StepGroups
from podium.train.evaluate import Evaluation
from podium.train.surroundings import Surroundings

STEPS_AVERAGED = 10

OnStep = Callable[[int, Mapping[str, float], list[SampleRecord]], None]
"""Called after each step with the number of steps done, the metrics, and the lines of samples.jsonl."""


def unheard(step: int, metrics: Mapping[str, float], samples: list[SampleRecord]) -> None:
    """An `OnStep` that does nothing."""


class PlanCheck(Protocol):
    """Plans a run and compares its steps with the plan. The implementation (`podium.plan.report.deviation`) is passed
    in, because the planner imports the trainer.
    """

    def begin(self, spec: RunSpec, folder: Path | None) -> str | None:
        """Plan the run before its first step; returns a line to print, or None. Raises ValueError if the run is far too
        large.
        """
        ...

    def after_step(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], str | None]:
        """Compare a finished step with the plan; returns metrics to add, and a line to print or None."""
        ...


class Recorder:
    """Writes a run's metrics, samples and lengths, shows them, and reports progress to the job."""

    def __init__(
        self,
        spec: RunSpec,
        around: Surroundings,
        writer: MetricWriter,
        feed: Feed,
        *,
        check: PlanCheck | None,
        on_step: OnStep = unheard,
    ) -> None:
        """Does not write anything yet. `feed` provides the run's tasks; without `check`, steps are not compared with a
        plan.
        """
        self.spec = spec
        self.around = around
        self.writer = writer
        self._feed = feed
        self._check = check
        self._on_step = on_step
        self._alarms = (
            _ClipAlarm(spec.recipe),
            RewardAlarm(spec.rollout.settings),
            GapAlarm(spec.rollout.settings, update_dtype=spec.update.dtype, rollout_dtype=spec.rollout.dtype),
            *((CarryAlarms(spec.rollout.settings),) if spec.rollout.settings.in_flight > 1 else ()),
        )
        self._checkpoint_s: float | None = None
        self._start = self._cpu_start = 0.0
        self._last: collections.deque[float] = collections.deque(maxlen=STEPS_AVERAGED)

    def begin_step(self, checkpoint_s: float | None) -> None:
        """Start the clock of a step, which `write` stops; `checkpoint_s` is how long saving the previous step took."""
        self._checkpoint_s = checkpoint_s
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def write(self, step: int, made: StepGroups, batched: BatchStats, updated: UpdateStats, sync_s: float) -> None:
        """Record a finished step; `step` is the number of steps done. On several hosts, all must call this.

        `made` has the step's groups, and `sync_s` is the seconds that passing the new weights to the rollout took.
        Raises SamplerGapError, after recording the step, if its log-probability gap is above `rollout.max_logprob_gap`.
        """
        groups, rolled, held = made.groups, made.stats, made.environments
        step_s, cpu_s = time.perf_counter() - self._start, time.process_time() - self._cpu_start
        self._last.append(step_s)
        stats = StepStats(
            completions=completion_stats(groups),
            rolled=rolled,
            batched=batched,
            updated=updated,
            seconds=StepSeconds(
                step_s=step_s,
                cpu_s=cpu_s,
                sync_s=sync_s,
                checkpoint_s=self._checkpoint_s,
                mean_step_s=float(np.mean(self._last)) if len(self._last) == STEPS_AVERAGED else None,
            ),
            carried=carry_stats(groups, rolled.drawn_lengths) if self.spec.rollout.settings.in_flight > 1 else None,
            conversations=None if held is None else conversation_stats(groups, held),
            levels=self._level_stats(groups),
            memory=device_memory(),
            host_memory=host_memory(),
        )
        metrics = step_metrics(stats)
        if self.spec.recipe.demonstrations:
            metrics = {name: value for name, value in metrics.items() if not name.startswith(COMPARED_WITH_SAMPLER)}
        if self._check is not None:
            more, line = self._check.after_step(metrics)
            metrics |= more
            if line is not None:
                self.around.say(line)
        for alarm in self._alarms:
            for line in alarm.after_step(stats, metrics):
                self.around.say(line)
        self.writer.write(step, metrics)
        self.around.job.report.update(
            step=step, metrics={name: metrics[name] for name in STEP_REPORT if name in metrics}
        )
        samples = self._write_completions(step, groups, batched, rolled)
        first = groups[0]
        shown = ShownCompletion(first.prompt.prompt.question, first.transcripts[0].text, first.rewards[0].total)
        self.around.progress.step(step, metrics, shown)
        self._on_step(step, metrics, samples)
        check_gap(self.spec.rollout.settings, step, metrics)

    def _level_stats(self, groups: Sequence[Group]) -> dict[str, LevelStats]:
        """How many prompts were drawn from each curriculum level, and their success."""
        drawn = sorted({group.prompt.task for group in groups if group.prompt.level is not None})
        found: dict[str, LevelStats] = {}
        for task in drawn:
            own = [group for group in groups if group.prompt.task == task]
            correct = [each for group in own if (each := group.correct) is not None]
            found[self._feed.tasks.labels[task]] = LevelStats(
                share=len(own) / len(groups), correct=sum(correct) / len(correct) if correct else None
            )
        return found

    def _write_completions(
        self, step: int, groups: list[Group], batched: BatchStats, rolled: RolloutStats
    ) -> list[SampleRecord]:
        """Write samples of the step's groups (the first one including its tokens) and the lengths of all completions;
        returns the samples.
        """
        samples: list[SampleRecord] = []
        every = self.spec.metrics.samples_every
        sampled = sampled_groups(step, prompts_per_step=self.spec.prompts_per_step, samples_every=every)
        advantages = dict(
            zip(
                batched.kept.tolist(),
                batched.advantages.reshape(len(batched.kept), len(groups[0].transcripts)),
                strict=True,
            )
        )
        for index in sampled:
            group = groups[index]
            task = self._feed.tasks.labels[group.prompt.task]
            pieces = self._feed.tokenizer.pieces if index == sampled[0] else None
            completions = completion_records(
                group.transcripts, group.rewards, advantages=advantages.get(index), pieces=pieces
            )
            record = sample_record(step, "train", task, group.prompt.prompt, completions, greedy=group.greedy)
            self.around.run_dir.append(SAMPLES, record)
            samples.append(record)
        self.writer.write_samples(step, samples)
        prompts = [len(group.tokens) for group in groups]
        completions = [transcript.num_drawn for group in groups for transcript in group.transcripts]
        drawn = rolled.drawn_lengths if self.spec.rollout.settings.in_flight > 1 else None
        self.around.run_dir.append(LENGTHS, lengths_record(step, prompts, completions, drawn))
        return samples

    def write_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Record the evaluation of the weights after `step` steps."""
        metrics = evaluation_metrics(evaluation.stats)
        self.writer.write(step, metrics)
        records = evaluation.records(step)
        for record in records:
            self.around.run_dir.append(SAMPLES, record)
        self.writer.write_samples(step, records)
        self.around.progress.evaluated(step, metrics)


class _ClipAlarm:
    """Warns once if the clip range is so narrow that rounding alone clips tokens."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._said = False

    def after_step(self, stats: StepStats, metrics: Mapping[str, float]) -> list[str]:
        """Return the lines to print after a step."""
        if self._said or not stats.updated.updates:
            return []
        warning = narrow_clip_warning(self._recipe, stats.updated.logprob_gap)
        self._said = warning is not None
        return [] if warning is None else [warning]


def completion_stats(groups: Sequence[Group]) -> CompletionStats:
    """Rewards and lengths of a step's completions."""
    rewards = [reward for group in groups for reward in group.rewards if not reward.failed]
    transcripts = [transcript for group in groups for transcript in group.transcripts]
    lengths = np.array([transcript.num_drawn for transcript in transcripts])
    drawn = np.concatenate([transcript.sampled_logprobs for transcript in transcripts])
    prompts = np.array([len(group.tokens) for group in groups])
    names = dict.fromkeys(part for reward in rewards for part in reward.parts)
    greedy = [group.greedy.reward.total for group in groups if group.greedy and not group.greedy.reward.failed]
    return CompletionStats(
        rewards=np.array([reward.total for reward in rewards]),
        parts={name: np.array([each.parts[name] for each in rewards if name in each.parts]) for name in names},
        prompt_tokens=prompts,
        completion_tokens=lengths,
        total_tokens=np.array([transcript.num_tokens for transcript in transcripts]),
        truncated=sum(transcript.finish_reason not in ("stop", "failed") for transcript in transcripts),
        timeouts=sum(reward.timed_out for reward in rewards),
        ungraded=sum(reward.failed and bool(reward.parts) for group in groups for reward in group.rewards),
        greedy=np.array(greedy) if greedy else None,
        entropy=-float(np.mean(drawn, dtype=np.float64)) if drawn.size else None,
    )


def conversation_stats(groups: Sequence[Group], held: EnvironmentStats) -> ConversationStats:
    """Lengths and finish reasons of a step's conversations."""
    transcripts = [transcript for group in groups for transcript in group.transcripts]
    reasons = [str(transcript.finish_reason) for transcript in transcripts]
    segments = [segment for transcript in transcripts for segment in transcript.segments]
    given = sum(len(span.tokens) for segment in segments for span in segment.continuation)
    return ConversationStats(
        turns=np.array([transcript.num_turns for transcript in transcripts]),
        segments=len(segments) / max(1, len(transcripts)),
        stops={reason: reasons.count(reason) / len(reasons) for reason in sorted(set(reasons))},
        failed=reasons.count("failed"),
        drawn_share=sum(transcript.num_drawn for transcript in transcripts) / max(1, given),
        environments=held,
    )


def carry_stats(groups: Sequence[Group], drawn_lengths: Sequence[int]) -> CarryStats | None:
    """Ages of a step's completions, and how their lengths differ from those of completions sampled in the step.

    Completions without a reward are left out; None if none remain.
    """
    groups = [group for group in groups if not all(reward.failed for reward in group.rewards)]
    versions = [
        [each.versions for each, reward in zip(group.transcripts, group.rewards, strict=True) if not reward.failed]
        for group in groups
    ]
    if not groups:
        return None
    ages = [group.version - np.concatenate(own) for group, own in zip(groups, versions, strict=True)]
    staleness = np.array([np.max(own) for own in ages])
    totals = np.array([np.nanmean(group.totals) for group in groups])
    return CarryStats(
        staleness=staleness,
        token_ages=np.concatenate(ages),
        crossed=float(np.mean([each[0] != each[-1] for own in versions for each in own])),
        rewards={str(age): float(np.mean(totals[staleness == age])) for age in np.unique(staleness)},
        length_distance=length_distance([len(each) for own in versions for each in own], drawn_lengths),
    )


def device_memory() -> tuple[int, int] | None:
    """Bytes in use and at peak on the fullest device of all hosts; None if devices do not report them (CPU)."""
    used, peak = local_memory("bytes_in_use"), local_memory("peak_bytes_in_use")
    if used is None or peak is None:
        return None
    all_used, all_peak = zip(*gather((used, peak)), strict=True)
    return max(all_used), max(all_peak)


def host_memory() -> tuple[int, int] | None:
    """Resident bytes of the trainer's process, now and at peak, on the fullest host; None on systems without /proc."""
    all_used, all_peak = zip(*gather(_resident()), strict=True)
    return (max(all_used), max(all_peak)) if max(all_peak) else None


def _resident() -> tuple[int, int]:
    """Resident bytes of this process, now and at peak; zeros on systems without /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    return int(sizes["VmRSS"].split()[0]) * 1024, int(sizes["VmHWM"].split()[0]) * 1024  # written in kB
