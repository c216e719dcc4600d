"""Folders of made runs, for tests of reports: metrics given as functions of the step."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

Values = Mapping[str, Callable[[int], float]]

HEALTHY: Values = {
    "train-reward/total/mean": lambda step: min(1.0, 0.1 + step / 40),
    "group/equal_rewards_fraction": lambda step: 0.2,
    "rollout/truncated_fraction": lambda step: 0.02,
    "rollout/entropy": lambda step: 0.8,
    "policy/logprob_gap/mean": lambda step: 0.001,
    "optimizer/gradient_norm": lambda step: 0.5,
    "tokens/prompt": lambda step: 300.0,
    "tokens/completion": lambda step: 600.0,
    "tokens/padding": lambda step: 100.0,
    "time/train/rollout_s": lambda step: 4.0,
    "time/train/update_s": lambda step: 5.0,
    "time/train/step_s": lambda step: 10.0,
    "time/wall_s": lambda step: 10.0 * step,
    "rollout/slot_utilisation": lambda step: 0.6,
    "rollout/completion_tokens": lambda step: 640.0,
    "train-reward/func/correct/mean": lambda step: min(1.0, 0.1 + step / 40),
    "train-reward/func/format/mean": lambda step: 0.8,
}
CONFIG: dict[str, Any] = {
    "name": "made", "model": "demo", "steps": 40, "prompts_per_step": 8, "group_size": 8, "seed": 0,
    "rollout": {"slots": 32, "max_new_tokens": 64}, "train": {"optimizer": {"clip_norm": 1.0}},
}  # fmt: skip


def make_run(
    folder: Path,
    changes: Values | None = None,
    *,
    steps: int = 40,
    accuracies: Mapping[int, float] | None = None,
    interval: float = 0.02,
    config: Mapping[str, Any] | None = None,
    samples: list[dict[str, Any]] | None = None,
) -> Path:
    """A run's folder: HEALTHY metrics with `changes`, evaluations by step, samples; `interval` is half a width."""
    folder.mkdir(parents=True)
    found = {0: 0.1, steps: 0.9} if accuracies is None else accuracies
    lines = [
        {"step": step, **{name: f(step) for name, f in {**HEALTHY, **(changes or {})}.items()}}
        for step in range(1, steps + 1)
    ]
    for step, accuracy in found.items():
        ends = {
            "eval/sums/accuracy_interval/low": accuracy - interval,
            "eval/sums/accuracy_interval/high": accuracy + interval,
        }
        lines.append({"step": step, "eval/accuracy": accuracy, "eval/sums/accuracy": accuracy, **ends})
    lines.sort(key=lambda line: line["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **(config or {})}))
    (folder / "summary.json").write_text(json.dumps({"commit": "abc"}))
    if samples is not None:
        (folder / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    return folder


def sample(
    step: int,
    prompt: str = "p",
    *,
    rewards: tuple[float, ...] = (1.0, 0.0),
    text: str = "an answer",
    split: str = "train",
) -> dict[str, Any]:
    """A line of samples.jsonl."""
    completions = [
        {
            "text": text,
            "reward": reward,
            "parts": {"correct": reward},
            "finish_reason": "stop",
            "tokens": 2,
            "advantage": reward - 0.5,
        }
        for reward in rewards
    ]
    return {
        "step": step,
        "split": split,
        "task": "sums",
        "prompt": prompt,
        "question": f"What is {prompt}?",
        "answer": "2",
        "completions": completions,
    }
