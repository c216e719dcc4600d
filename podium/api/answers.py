"""`podium.generate` and `podium.evaluate`: answers of a model or of a run's weights, and how many are correct."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from podium.api.data import Rewards, overrides, rewards_of, task_settings
from podium.api.rows import Data, data_file, is_task
from podium.config.load import Override
from podium.files import as_path
from podium.malloc import giving_back_memory
from podium.observe.notebook import table
from podium.observe.records import SampleRecord
from podium.observe.run_dir import CONFIG, Fork, parse_fork, read_config
from podium.observe.stats import TaskScores
from podium.observe.text import shown
from podium.rollout.request import Completion, Request, SamplingParams
from podium.settings import load_settings
from podium.tasks.question_sets import math_equal
from podium.train.evaluate import evaluate_weights
from podium.train.feed import request_seed
from podium.train.generate import Rollouts
from podium.train.platform import prepare_platform
from podium.train.setup import load_parts, make_model, rollout_spec

Answer = Completion
"""A completion: `text`, `tokens`, `sampled_logprobs`, `finish_reason`."""
SLOTS = 16
"""Maximum number of prompts answered concurrently."""
ANSWERS_SHOWN = 5
"""Answers of an evaluation that a notebook shows; all are in `Evaluated.answers`."""
ANSWER_CHARACTERS = 200
"""Characters shown of a question or an answer."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation."""

    tasks: dict[str, TaskScores]
    """Scores by task: accuracy with its interval, avg@k, pass@k, lengths."""
    answers: list[SampleRecord]
    """Every question with its answers, in the format of samples.jsonl."""
    step: int | None
    """Step of the run's weights; None for a model."""

    @property
    def accuracy(self) -> float:
        """Mean accuracy over the tasks."""
        return sum(each.accuracy for each in self.tasks.values()) / len(self.tasks)

    def _repr_html_(self) -> str:
        """Show the scores of each task and some answers in a notebook."""
        head = ("task", "accuracy", "95 % interval", "questions", "avg@k", "pass@k")
        scores = table(head, [(name, *_score_cells(each)) for name, each in self.tasks.items()])
        answers = table(("question", "expected", "answer", "reward"), map(_answer_cells, self.answers[:ANSWERS_SHOWN]))
        return scores + (answers if self.answers else "")


def _score_cells(scores: TaskScores) -> tuple[str, ...]:
    low, high = scores.accuracy_interval
    sampled = ("" if each is None else f"{each:.3f}" for each in (scores.avg_at_k, scores.pass_at_k))
    return (f"{scores.accuracy:.3f}", f"{low:.3f} to {high:.3f}", str(scores.questions), *sampled)


def _answer_cells(record: SampleRecord) -> tuple[str, ...]:
    first = record["completions"][0]
    texts = (record["question"], record["answer"], first["text"])
    return (*(shown(text, ANSWER_CHARACTERS) for text in texts), f"{first['reward']:.2f}")


def generate(
    model: str | Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    system_prompt: str | None = None,
    seed: int = 0,
    **settings: object,
) -> list[Answer]:
    """Answer prompts with a model or a run's weights: one answer per prompt, in order.

    Args:
        model: a run's folder (`runs/demo`, `runs/demo@20`), or a model as in a config.
        prompts: questions, each formatted with the model's chat template. Repeat a prompt to get several answers.
        max_new_tokens: maximum length of an answer in tokens.
        temperature: sampling temperature; 0 is greedy.
        system_prompt: first message of every conversation.
        seed: determines sampling, together with the prompt's index.
        settings: settings of the config, as for `podium.grpo`.

    Raises:
        ValueError: an argument or a setting is invalid.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts: expected a list of questions, got one; write [question]")
    if not prompts:
        return []
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
    with open_model(model, max_new_tokens=max_new_tokens, slots=min(SLOTS, len(prompts)), **settings) as rollouts:
        tokenizer = rollouts.feed.tokenizer
        tokens = [tuple(tokenizer.encode_chat(prompt, system_prompt)) for prompt in prompts]
        seeds = [request_seed(seed, "generate", index) for index in range(len(prompts))]
        requests = [Request(prompt=p, sampling=sampling, seed=s) for p, s in zip(tokens, seeds, strict=True)]
        completed, _ = rollouts.engine.generate(requests)
    return [answer for (answer,) in completed]


@contextlib.contextmanager
def open_model(
    model: str | Path, *more: str, max_new_tokens: int, slots: int, **settings: object
) -> Iterator[Rollouts]:
    """Open an engine with the weights of a model or a run, for answers of at most `max_new_tokens` tokens.

    `more` are settings of a command line, KEY=VALUE, which come last.
    """
    fork = run_of(model)
    prepare_platform()
    devices = jax.local_device_count()  # slots and rows are split over all of them
    rounded = {"slots": slots, "prefill_rows": min(4, slots)}
    sizes = {"max_new_tokens": max_new_tokens, **{key: -(-n // devices) * devices for key, n in rounded.items()}}
    config = load_settings(
        [] if fork is None else [as_path(fork.run) / CONFIG],
        [
            *([Override("model", str(model), "argument model")] if fork is None else []),
            Override("tasks", [{"name": "arithmetic"}], "podium.generate"),
            *(Override(f"grading.{key}", 0, "podium.generate") for key in ("workers", "overlong_buffer_tokens")),
            *(Override(f"rollout.{key}", value, f"argument {key}") for key, value in sizes.items()),
            *(Override(f"train.{key}", None, "podium.generate") for key in ("row_tokens", "tokens_per_device")),
            *overrides(settings),
            *more,
        ],
        os.environ,
    ).config
    opened = make_model(config)
    rollouts = Rollouts(rollout_spec(config, opened), opened.decoder, opened.tokenizer, opened.mesh)
    with giving_back_memory(), contextlib.closing(rollouts):
        rollouts.compile_ahead()
        rollouts.load(*load_parts(opened, fork))
        yield rollouts


def evaluate(
    model: str | Path,
    data: Data | None = None,
    *,
    rewards: Rewards | None = None,
    subset: str | None = None,
    question: str | None = None,
    answer: str = "answer",
    system_prompt: str | None = None,
    **settings: object,
) -> Evaluated:
    """Evaluate a model or a run's weights: how many questions it answers correctly.

    Args:
        model: a run's folder (`runs/demo`, `runs/demo@20`), or a model as in a config.
        data: as `eval_data` of `podium.grpo`, or a task's class; unset: the run's held-out questions.
        rewards: the first one decides what is correct; unset: the run's, or `podium.math_equal`.
        subset: configuration of a hub data set.
        question: column of the question; unset: `question`, or else `prompt`.
        answer: column of the answer.
        system_prompt: first message of every conversation; unset: the run's.
        settings: settings of the config, such as `eval={"samples": 8, "greedy": False, "questions": 100}`.

    Raises:
        ValueError: an argument or a setting is invalid.
    """
    fork = run_of(model)
    given = [] if fork else [Override("model", str(model), "argument model")]
    known = read_config(as_path(fork.run)) if fork else None
    if data is None and known is None:
        raise ValueError(f"evaluate: {model} is a model, not a run, so it has no dataset; pass data=")
    with tempfile.TemporaryDirectory() as folder:
        if data is not None:
            parts = rewards or (list(rewards_of(known)) if known else [math_equal])
            prompt = known.tasks[0].system_prompt if known and system_prompt is None else system_prompt
            asked = data if is_task(data) else data_file(data, Path(folder), "data", subset=subset)
            given += task_settings(
                asked,
                None if is_task(data) else asked,
                parts,
                folder=Path(folder),
                subset=None,
                question=question,
                answer=answer,
                system_prompt=prompt,
            )
        elif rewards is not None:
            raise ValueError("evaluate: rewards go with data; a run's own data is graded as in the run")
        given.append(Override("grading.overlong_buffer_tokens", 0, "podium.evaluate"))
        if known is not None and data is None:
            tasks = [each.model_dump() | {"rewards": {each.correct: 1.0}} for each in known.tasks]
            given.append(Override("tasks", tasks, "podium.evaluate"))
        files = [as_path(fork.run) / CONFIG] if fork else []
        config = load_settings(files, [*given, *overrides(settings)], os.environ).config
        with giving_back_memory():
            evaluation, step = evaluate_weights(config, fork)
        return Evaluated(dict(evaluation.stats.tasks), evaluation.records(step or 0, questions=None), step)


def run_of(model: str | Path) -> Fork | None:
    """The run that `model` names; None if it names a model."""
    try:
        return parse_fork(str(model))
    except ValueError:
        return None
