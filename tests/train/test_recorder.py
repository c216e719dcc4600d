import dataclasses
import types
from typing import Any, cast

import numpy as np
import pytest
from tiny_runs import make_config, make_group, spec_of

from podium.job.job_records import ProgressReport
from podium.observe.alarms import RewardAlarm
from podium.observe.stats import BatchSeconds, BatchStats, StepStats, TokenCounts, UpdateStats
from podium.rollout.request import GradingCounts, RolloutStats
from podium.sampling.groups import StepGroups
from podium.train import recorder as recorder_module
from podium.train.recorder import Recorder

BATCHED = BatchStats(
    groups=2,
    equal_groups=0,
    dropped_groups=0,
    sequences=4,
    tokens=TokenCounts(trained=20, prompt=10, padding=2),
    kept=np.array([0, 1]),
    advantages=np.array([1.0, -1.0, 0.5, -0.5]),
    penalty=None,
    seconds=BatchSeconds(advantages_s=0.1, batch_s=0.5),
)
UPDATED = UpdateStats(
    updates=1,
    tokens=20.0,
    logprob_gap=0.01,
    logprob_gap_max=0.1,
    token_means={"clip_low": 0.0, "clip_high": 0.0},
    update_s=2.0,
)


class Kept:
    """Stands for the run's folder, its metric writer and its progress: keeps what each is given."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.records: list[str] = []
        self.lines: list[dict[str, Any]] = []
        self.messages: list[str] = []

    def append(self, name: str, record: dict[str, Any]) -> None:
        self.records.append(name)
        self.lines.append(record)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics.append(metrics)

    def write_samples(self, step: int, records: Any) -> None: ...

    def message(self, text: str) -> None:
        self.messages.append(text)

    def step(self, *arguments: Any) -> None: ...


def record_steps(count: int, *, checkpoint_s: float | None = None, equal_groups: int = 0, **algorithm: Any) -> Kept:
    """What is recorded of so many steps, of 1 s, 2 s, ..."""
    kept: Any = Kept()
    config = make_config(algorithm=algorithm, prompts_per_step=2, metrics={"samples_every": 1})
    feed: Any = types.SimpleNamespace(
        tasks=types.SimpleNamespace(labels=["sums"]),
        tokenizer=types.SimpleNamespace(pieces=lambda tokens: [str(token) for token in tokens]),
    )
    around: Any = types.SimpleNamespace(
        run_dir=kept, progress=kept, say=kept.messages.append, job=types.SimpleNamespace(report=ProgressReport(None))
    )
    recorder = Recorder(spec_of(config), around, kept, feed, check=None)
    groups = [make_group([1.0, 0.0]), make_group([0.5, 0.0], seed=1)]
    batched = dataclasses.replace(BATCHED, equal_groups=equal_groups)
    for step in range(1, count + 1):
        with pytest.MonkeyPatch.context() as patch:
            ticks = iter((0.0, float(step)))
            patch.setattr(recorder_module.time, "perf_counter", lambda ticks=ticks: next(ticks))
            recorder.begin_step(checkpoint_s)
            made = StepGroups(groups, RolloutStats(answer_s=0.5, grading=GradingCounts(reward_s=0.2)))
            recorder.write(step, made, batched, UPDATED, sync_s=0.1)
    return kept


def test_rounding_that_clips_by_itself_is_said_once():
    messages = record_steps(3, recipe="gspo", old_logprobs="sampler").messages
    assert len(messages) == 1
    assert "set algorithm.old_logprobs to trainer" in messages[0]
    assert record_steps(1, recipe="grpo").messages == []


def test_seconds_of_a_step_are_named_by_what_they_were_spent_on():
    first = record_steps(1).metrics[0]
    assert first["time/train/rollout_s"] == pytest.approx(0.3)  # waiting for grades has its own name
    assert first["time/train/reward_s"] == 0.2
    assert first["time/train/batch_s"] == 0.5
    assert (first["time/train/score_s"], first["time/train/update_s"], first["time/train/sync_s"]) == (0.0, 2.0, 0.1)
    assert first["throughput/train/valid_tokens_per_s_update"] == 10.0
    assert first["time/train/step_s"] == 1.0
    assert "time/train/checkpoint_s" not in first
    assert record_steps(1, checkpoint_s=0.7).metrics[0]["time/train/checkpoint_s"] == 0.7


def test_memory_and_cores_of_the_trainer_are_measured():
    first = record_steps(1).metrics[0]
    assert 0.05 < first["memory/train/host_max_gib"] <= first["memory/train/host_peak_max_gib"] < 1000
    assert first["throughput/train/busy_cores"] == first["time/train/step_cpu_s"] / first["time/train/step_s"]


def test_the_mean_of_ten_steps_is_there_from_the_tenth_on():
    kept = record_steps(11)
    assert ["time/train/step_avg_last10_s" in each for each in kept.metrics] == [False] * 9 + [True] * 2
    assert [each["time/train/step_avg_last10_s"] for each in kept.metrics[9:]] == [5.5, 6.5]


def test_samples_and_lengths_of_every_step_are_written():
    assert record_steps(1).records == ["samples.jsonl", "samples.jsonl", "lengths.jsonl"]


def test_samples_have_their_advantages_and_the_first_of_a_step_its_tokens():
    first, second, _ = record_steps(1).lines
    assert [each["advantage"] for each in first["completions"]] == [1.0, -1.0]
    assert [each["advantage"] for each in second["completions"]] == [0.5, -0.5]
    for each in first["completions"]:
        assert len(each["pieces"]) == len(each["logprobs"]) == each["tokens"]
    assert "pieces" not in second["completions"][0]


def test_rewards_that_took_too_long_are_named_as_the_cause():
    stats = types.SimpleNamespace(batched=types.SimpleNamespace(groups=2, equal_groups=2))
    metrics = {"train-reward/total/mean": 0.0, "rollout/truncated_fraction": 0.5, "grading/timeouts": 16.0}
    (said,) = RewardAlarm(make_config().rollout).after_step(cast(StepStats, stats), metrics)
    assert "the rewards of 16 completions took too long and count as 0" in said
    assert "max_new_tokens" not in said


def test_a_step_that_teaches_nothing_is_said_once_with_the_way_out():
    (said,) = record_steps(3, equal_groups=2).messages
    assert said.startswith("all groups earned the same (mean reward 0.38), so nothing was learned; ")
    assert "choose easier questions" in said
    assert record_steps(3, equal_groups=1).messages == []
