"""Evaluates on held-out questions, by greedy and sampled answers, with confidence intervals."""

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from podium.config.schema import Config
from podium.files import to_json, write_atomically
from podium.observe.metrics import evaluation_metrics
from podium.observe.records import SampleRecord, completion_records, sample_record
from podium.observe.run_dir import Fork, saved_steps
from podium.observe.stats import EvaluationStats, TaskScores
from podium.observe.text import shown
from podium.rollout.request import RolloutStats
from podium.run.answering import evaluation_sampling
from podium.run.resolve import resolve_recipe, resolve_rollout, resolve_update
from podium.run.run_spec import AnswerSettings
from podium.sampling.feed import request_seed
from podium.sampling.groups import Group
from podium.sampling.prompt_lengths import check_prompt_lengths, with_prompt_tokens
from podium.sampling.sampler import FailingEnvironmentError, Sampler
from podium.tasks.mixture import TaskPrompt
from podium.train.grading_models import load_grading_models
from podium.train.setup import Model, load_parts, make_model

Z_95 = 1.959963984540054
SHOWN_CHARACTERS = 400
SHOWN_QUESTIONS = 8
"""Questions per task whose answers go to samples.jsonl."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results of one evaluation."""

    stats: EvaluationStats
    groups: dict[str, list[Group]]
    """The answers by task: greedy answers if there are any, otherwise sampled ones."""

    def records(self, step: int, *, questions: int | None = SHOWN_QUESTIONS) -> list[SampleRecord]:
        """Lines of samples.jsonl for the first `questions` questions of each task (None: all), which are the same in
        every evaluation.
        """
        return [
            sample_record(
                step,
                "eval",
                task=task,
                prompt=group.prompt.prompt,
                completions=completion_records(group.transcripts, group.rewards),
            )
            for task, groups in self.groups.items()
            for group in groups[:questions]
        ]


def evaluate(rollouts: Sampler) -> Evaluation:
    """Answer the evaluation questions of every task with the loaded weights, as set in `eval`.

    Seeds depend only on the question's index, so two evaluations of the same weights are equal.
    """
    start, config = time.perf_counter(), rollouts.spec.evaluation
    tasks: dict[str, TaskScores] = {}
    answers: dict[str, list[Group]] = {}
    rolled = RolloutStats()
    for task, prompts in rollouts.feed.tasks.eval_prompts(config.questions).items():
        greedy, took = _answers(rollouts, task, prompts, greedy=True, completions=int(config.greedy))
        sampled, took_sampled = _answers(rollouts, task, prompts, greedy=False, completions=config.samples)
        rolled = rolled.then(took).then(took_sampled)
        tasks[task] = task_scores(greedy, sampled, questions=len(prompts))
        answers[task] = greedy or sampled
    stats = EvaluationStats(
        tasks=tasks,
        rollout_s=rolled.answer_s - rolled.grading.reward_s - rolled.grading.scored_s,
        reward_s=rolled.grading.reward_s + rolled.grading.scored_s,
        step_s=time.perf_counter() - start,
    )
    return Evaluation(stats=stats, groups=answers)


def task_scores(greedy: Sequence[Group], sampled: Sequence[Group], *, questions: int) -> TaskScores:
    """Accuracy of greedy answers (or else of sampled ones), avg@k and pass@k, with 95 % intervals.

    Args:
        greedy: one answer to each question that fits; may be empty.
        sampled: k answers to each question that fits; may be empty.
        questions: number of all questions; those without answers were too long to ask, and count as wrong.
    """
    answered = greedy or sampled
    answers = [answer for group in answered for answer in group.transcripts]
    correct = _correct(answered)  # [n, k]
    ended = np.array([[each.finish_reason == "stop" for each in group.transcripts] for group in answered])  # [n, k]
    accuracy = float(correct.mean(axis=1).sum()) / questions
    avg_at_k = pass_at_k = pass_at_k_interval = None
    passes: dict[str, float] = {}
    if sampled:
        found = _correct(sampled)
        passes = {str(j): float(share.sum()) / questions for j, share in enumerate(pass_rates(found), start=1)}
        avg_at_k = float(found.mean(axis=1).sum()) / questions
        pass_at_k = float(np.any(found >= 1.0, axis=1).sum()) / questions
        pass_at_k_interval = wilson_interval(pass_at_k, questions)
    return TaskScores(
        accuracy=accuracy,
        accuracy_interval=wilson_interval(accuracy, questions),
        completed_accuracy=float((correct * ended).mean(axis=1).sum()) / questions,
        avg_at_k=avg_at_k,
        pass_at_k=pass_at_k,
        pass_at_k_interval=pass_at_k_interval,
        passes=passes,
        scores=_scores(answered),
        questions=questions,
        too_long=questions - len(answered),
        completion_tokens=float(np.mean([answer.num_drawn for answer in answers])),
        truncated_fraction=float(np.mean([answer.finish_reason != "stop" for answer in answers])),
    )


def pass_rates(correct: np.ndarray) -> np.ndarray:
    """For each j from 1 to k, the probability that at least one of j answers is right, [k, n].

    The unbiased estimate 1 - C(k - c, j) / C(k, j) of pass@j, for a question with c right answers out of k
    (arXiv:2107.03374). `correct` is [n, k]; an answer is right if its value is at least 1.
    """
    _, k = correct.shape
    wrong = np.sum(correct < 1.0, axis=1).tolist()
    return np.array([[1 - math.comb(each, j) / math.comb(k, j) for each in wrong] for j in range(1, k + 1)])


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share observed in n trials (Wilson, 1927)."""
    z2 = Z_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


@contextlib.contextmanager
def opened_rollouts(
    config: Config, announce: Callable[[str], None], *, trains: bool, evaluates: bool
) -> Iterator[tuple[Model, Sampler]]:
    """Open the sampling and grading of a config without a trainer; its weights are not loaded yet.

    It answers training prompts if `trains`, and evaluation questions if `evaluates`. `announce` is called with a line
    about their lengths.
    """
    recipe = resolve_recipe(config)
    config, line = with_prompt_tokens(config, recipe, trains=trains, evaluates=evaluates)
    if line is not None:
        announce(line)
    model = make_model(config)
    update = resolve_update(config, recipe, model.machine, model.mesh.shape)
    spec = resolve_rollout(config, recipe, model.decoder, model.machine)
    models = load_grading_models(spec, update, model.mesh)
    with contextlib.closing(Sampler(spec, model.decoder, model.tokenizer, model.mesh, scorers=models)) as rollouts:
        yield model, rollouts


def evaluate_weights(config: Config, run: Fork | None) -> tuple[Evaluation, int | None]:
    """Evaluate a run's weights (None: the config's model) on the config's tasks; also returns the weights' step."""
    say = partial(print, file=sys.stderr)
    if run is not None and run.step is None:
        run = run._replace(step=max(saved_steps(run.checkpoints), default=None))
    with opened_rollouts(config, say, trains=False, evaluates=True) as (model, rollouts):
        rollouts.check([prompts[0] for prompts in rollouts.feed.tasks.eval_prompts(1).values()])
        rollouts.feed.tasks.data.check_answers(trains=False, evaluates=True)
        questions = rollouts.feed.tasks.eval_prompts(rollouts.spec.evaluation.questions)
        for line in check_prompt_lengths(rollouts.feed, questions, "questions", "count as wrong"):
            say(line)
        rollouts.compile_ahead()
        rollouts.load(*load_parts(model, run))
        return evaluate(rollouts), None if run is None else run.step


def evaluate_command(config: Config, *, run: Fork | None, as_json: bool, show: int = 0, out: Path | None = None) -> int:
    """Run `podium eval`: evaluate a run's weights, or the config's model, on the config's tasks. Returns the exit
    status.

    Prints a table or one JSON object, and the first `show` answers of each task to stderr; writes all answers to `out`,
    in the format of samples.jsonl.
    """
    evaluation, step = evaluate_weights(config, run)
    if out is not None:
        records = evaluation.records(step or 0, questions=None)
        write_atomically(out, "".join(to_json(record) + "\n" for record in records))
    for record in evaluation.records(step or 0, questions=show):
        _print_answer(record)
    target = config.model if run is None else f"{run.run}@{step}"
    result = {"target": target, "step": step, **evaluation_metrics(evaluation.stats)}
    if as_json:
        print(json.dumps(result))
        return 0
    for name, value in result.items():
        print(f"{name:<40} {value:.4f}" if isinstance(value, float) else f"{name:<40} {value}")
    return 0


def _print_answer(record: SampleRecord) -> None:
    """Print a question with its first answer to stderr."""
    first = record["completions"][0]
    rows = [("question", record["question"]), ("expected", record["answer"])]
    for message in first.get("messages", ()):
        calls = message.get("tool_calls")
        text = str(message.get("content") or "") + (f" {json.dumps(calls, ensure_ascii=False)}" if calls else "")
        rows.append(("answer" if message.get("role") == "assistant" else str(message.get("role")), text))
    if "messages" not in first:
        rows.append(("answer", first["text"]))
    for name, text in rows:
        print(f"{name:<9} {shown(text, SHOWN_CHARACTERS)}", file=sys.stderr)
    print(f"correct   {first['parts']['correct']:g}, {first['finish_reason']}\n", file=sys.stderr)


def _correct(groups: Sequence[Group]) -> np.ndarray:
    """The `correct` part of each answer, [n, k], clipped to 0..1, because an environment's reward can be any number."""
    return np.clip([[reward.parts["correct"] for reward in group.rewards] for group in groups], 0.0, 1.0)


def _scores(groups: Sequence[Group]) -> dict[str, float]:
    """The mean of each part of the reward except `correct`, over the answers that have the part."""
    rewards = [reward for group in groups for reward in group.rewards]
    names = dict.fromkeys(name for reward in rewards for name in reward.parts if name != "correct")
    return {name: float(np.mean([each.parts[name] for each in rewards if name in each.parts])) for name in names}


def _answers(
    rollouts: Sampler, task: str, prompts: Sequence[TaskPrompt], *, greedy: bool, completions: int
) -> tuple[list[Group], RolloutStats]:
    """The graded answers to the questions that fit. Raises ValueError if none fits."""
    if not completions:
        return [], RolloutStats()
    seeds = [request_seed(rollouts.spec.prompts.seed, f"eval {task}", index) for index in range(len(prompts))]
    encoded = [rollouts.feed.encode(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    asked = [each for each in encoded if each is not None]
    if not asked:
        raise ValueError(f"{task}: no evaluation question fits in rollout.max_prompt_tokens; raise it")
    sampling = evaluation_sampling(rollouts.spec.training.sampling, rollouts.spec.evaluation, greedy=greedy)
    groups, stats = rollouts.answer(asked, AnswerSettings(sampling=sampling, completions=completions))
    if any(transcript.finish_reason == "failed" for group in groups for transcript in group.transcripts):
        raise FailingEnvironmentError(
            f"{task}: a conversation failed during an evaluation, which cannot be completed without "
            f"it:\n{rollouts.held.failures[0].rstrip()}\nFix the environment, then continue the run"
        )
    return groups, stats
