"""Held-out questions: how many are answered correctly, greedily and by sampling, and with what certainty."""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from podium.config.schema import Config
from podium.observe.records import sample_record
from podium.tasks.mixture import TaskPrompt
from podium.train.generate import Group, Rollouts, request_seed, sampling_params

if TYPE_CHECKING:
    from podium.observe.run_dir import Fork

Z_95 = 1.959963984540054
SHOWN_QUESTIONS = 8
"""Of each task, so many evaluated questions go to samples.jsonl."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What one evaluation found."""

    metrics: dict[str, float]
    """By the names of docs/metrics.md."""
    groups: dict[str, list[Group]]
    """The answers by task: greedy ones where there are, else the sampled."""

    @property
    def accuracy(self) -> float:
        """The mean over tasks, 0 to 1."""
        return self.metrics["eval/accuracy"]

    def records(self, step: int) -> list[dict[str, Any]]:
        """Lines of samples.jsonl: the first questions of each task, the same ones every time."""
        return [
            sample_record(step, "eval", task, group.prompt.prompt, group.completions, group.rewards)
            for task, groups in self.groups.items()
            for group in groups[:SHOWN_QUESTIONS]
        ]


def evaluate(rollouts: Rollouts) -> Evaluation:
    """Ask the evaluation questions of every task, as `eval` in the config says, with the loaded weights.

    Seeds depend on the question's place alone, so two evaluations of the same weights are equal.
    """
    start, rollout_s, reward_s = time.perf_counter(), rollouts.rollout_s, rollouts.reward_s
    config = rollouts.config.eval
    metrics: dict[str, float] = {}
    shown: dict[str, list[Group]] = {}
    for task, prompts in rollouts.tasks.eval_prompts(config.questions).items():
        greedy = _answers(rollouts, task, prompts, temperature=0.0, completions=1) if config.greedy else []
        sampled = _answers(rollouts, task, prompts, temperature=config.temperature, completions=config.samples)
        metrics |= task_metrics(task, greedy, sampled)
        shown[task] = greedy or sampled
    metrics["eval/accuracy"] = float(np.mean([metrics[f"eval/{task}/accuracy"] for task in shown]))
    metrics["time/eval/rollout_s"] = rollouts.rollout_s - rollout_s
    metrics["time/eval/reward_s"] = rollouts.reward_s - reward_s
    metrics["time/eval/step_s"] = time.perf_counter() - start
    return Evaluation(metrics=metrics, groups=shown)


def task_metrics(task: str, greedy: Sequence[Group], sampled: Sequence[Group]) -> dict[str, float]:
    """Accuracy of greedy answers (of sampled ones where there are none), avg@k and pass@k, with 95 % intervals."""
    metrics: dict[str, float] = {}
    if sampled:
        correct = np.array([[reward.parts["correct"] for reward in group.rewards] for group in sampled])  # [n, k]
        passed = np.any(correct >= 1.0, axis=1)  # [n]
        low, high = wilson_interval(float(passed.mean()), len(sampled))
        metrics = {
            f"eval/{task}/avg_at_k": float(correct.mean()),
            f"eval/{task}/pass_at_k": float(passed.mean()),
            f"eval/{task}/pass_at_k_interval/low": low,
            f"eval/{task}/pass_at_k_interval/high": high,
        }
    answered = greedy or sampled
    scores = [float(np.mean([reward.parts["correct"] for reward in group.rewards])) for group in answered]
    completions = [completion for group in answered for completion in group.completions]
    low, high = wilson_interval(float(np.mean(scores)), len(scores))
    return metrics | {
        f"eval/{task}/accuracy": float(np.mean(scores)),
        f"eval/{task}/accuracy_interval/low": low,
        f"eval/{task}/accuracy_interval/high": high,
        f"eval/{task}/questions": len(scores),
        f"eval/{task}/completion_tokens": float(np.mean([len(completion.tokens) for completion in completions])),
        f"eval/{task}/truncated_fraction": float(np.mean([each.finish_reason == "length" for each in completions])),
    }


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share that was seen in n trials (Wilson, 1927)."""
    z2 = Z_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluate_command(config: Config, *, run: "Fork | None", as_json: bool) -> int:
    """`podium eval`: evaluate a run's weights, or the config's model, and print what came of it.

    Args:
        config: with the task to ask.
        run: the run and step whose weights answer; None: the config's model.
        as_json: one JSON object on stdout instead of a table.
    """
    from podium.train.setup import load_weights, make_model

    model = make_model(config)
    rollouts = Rollouts(config, model.decoder, model.tokenizer, model.mesh)
    try:
        rollouts.load(load_weights(model, run))
        evaluation = evaluate(rollouts)
    finally:
        rollouts.close()
    target = config.model if run is None else f"{run.run}@{'newest' if run.step is None else run.step}"
    result = {"target": target, **evaluation.metrics}
    if as_json:
        print(json.dumps(result))
        return 0
    for name, value in result.items():
        print(f"{name:<40} {value:.4f}" if isinstance(value, float) else f"{name:<40} {value}")
    return 0


def _answers(
    rollouts: Rollouts, task: str, prompts: Sequence[TaskPrompt], *, temperature: float, completions: int
) -> list[Group]:
    """The graded answers to the questions that fit; raises ValueError where none does."""
    if not completions:
        return []
    seeds = (request_seed(rollouts.config.seed, f"eval {task}", index) for index in range(len(prompts)))
    encoded = [rollouts.encode(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=False)]
    drawn = [each for each in encoded if each is not None]
    if not drawn:
        raise ValueError(f"{task}: no evaluation question fits in rollout.max_prompt_tokens; raise it")
    sampling = dataclasses.replace(
        sampling_params(rollouts.config), temperature=temperature, top_k=0, top_p=1.0, min_p=0.0
    )
    return rollouts.answer(drawn, sampling, completions=completions)
