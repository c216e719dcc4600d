"""`podium.generate` and `podium.evaluate`: answers from a model or a run's weights, and how many are correct."""

import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from podium.api.given_data import Questions, Rewards, overrides, task_settings
from podium.api.rows import Data, data_file, is_task
from podium.config.document import Plain
from podium.config.load import Override, load
from podium.config.schema import WITHOUT_MODELS
from podium.files import as_path
from podium.hosts.platform import prepare_platform
from podium.malloc import giving_back_memory
from podium.models.files.source import read_architecture, resolve
from podium.models.text.tokenizer import Tokenizer
from podium.observe.html_table import table
from podium.observe.records import SampleRecord
from podium.observe.run_dir import CONFIG, read_config, run_of
from podium.observe.stats import TaskScores
from podium.observe.text import shown
from podium.rollout.request import Completion, Request
from podium.run.answering import Answering, Asked, resolve_answering
from podium.run.resolve import resolve_rollout
from podium.sampling.feed import request_seed
from podium.sampling.prompt_lengths import rounded_up
from podium.sampling.sampler import Sampler
from podium.settings import check_read_by_evaluations, load_settings
from podium.sharding import find_devices
from podium.tasks.question_sets import math_equal
from podium.train.evaluate import evaluate_weights
from podium.train.setup import load_parts, make_model

Answer = Completion
"""A completion: `text`, `tokens`, `sampled_logprobs`, `finish_reason`."""
SLOTS = 16
"""Maximum number of prompts answered concurrently."""
NEW_TOKENS = 512
"""Longest answer of a model that no run configures."""
OPENED = "opening a model to answer"
"""Origin, in error messages, of settings that neither a run nor the user sets."""
ANSWERS_ALONE: Mapping[str, Plain] = {
    "train.row_tokens": None,
    "train.tokens_per_device": None,
    "rollout.max_episode_tokens": None,
}
"""Length settings of a run's training that do not limit its answers."""
UNUSED: Mapping[str, Plain] = {
    "tasks": [{"name": "arithmetic"}],
    "algorithm": {},
    "group_size": 2,
    **WITHOUT_MODELS,
    "grading": {"workers": 0},
    "environments": {},
    "eval": {},
    "data": {},
    "train.optimizer.warmup_steps": 0,
}
"""Replacements for parts of a run that an engine does not use, and that might not fit the engine's sizes."""
ANSWERS_SHOWN = 5
"""How many answers of an evaluation a notebook shows; all are in `Evaluated.answers`."""
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
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    system_prompt: str | None = None,
    seed: int = 0,
    **settings: object,
) -> list[Answer]:
    """Answer prompts with a model or a run's weights: one answer per prompt, in order.

    A run's answers are sampled as in its training, with all settings of its `rollout`, unless arguments override them.

    Args:
        model: a run's folder (`runs/demo`, `runs/demo@20`), or a model as in a config.
        prompts: questions, each formatted with the model's chat template. Repeat a prompt to get several answers.
        max_new_tokens: maximum length of an answer in tokens; unset: the run's, or 512 for a model.
        temperature: sampling temperature, 0 for greedy; unset: the run's, or 1 for a model.
        system_prompt: system message of every conversation, empty for none; unset: the run's.
        seed: determines sampling, together with the prompt's index.
        settings: settings of the config, as for `podium.grpo`, such as `rollout={"top_k": 20, "stop": ["###"]}`.

    Raises:
        ValueError: an argument or a setting is invalid, or one is given twice.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts: expected a list of questions, got one; write [question]")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise ValueError(
                f"prompts: expected texts, got {prompt!r:.80} at {index}; conversations go to podium serve"
            )
    if not isinstance(seed, int):
        raise ValueError(f"seed: expected a whole number, got {seed!r:.80}")
    asked = Asked(max_new_tokens=max_new_tokens, temperature=temperature, system_prompt=system_prompt)
    if not prompts:
        return []
    slots = min(SLOTS, len(prompts))
    with open_model(model, asked=asked, slots=slots, prompts=prompts, settings=settings) as (rollouts, answering):
        tokens, sampling = _encoded(prompts, rollouts.feed.tokenizer, answering), answering.sampling
        seeds = [request_seed(seed, "generate", index) for index in range(len(prompts))]
        requests = [Request(prompt=p, sampling=sampling, seed=s) for p, s in zip(tokens, seeds, strict=True)]
        completed, _ = rollouts.engine.generate(requests)
    return [answer for (answer,) in completed]


def _encoded(prompts: Sequence[str], tokenizer: Tokenizer, answering: Answering) -> list[tuple[int, ...]]:
    """The tokens of each prompt: the system prompt and the question."""
    questions = [answering.messages([{"role": "user", "content": prompt}]) for prompt in prompts]
    return [tuple(tokenizer.encode_messages(each)) for each in questions]


class Opened(NamedTuple):
    """An engine with weights, and how it answers by default."""

    rollouts: Sampler
    answering: Answering


@contextlib.contextmanager
def open_model(
    model: str | Path,
    *more: str,
    asked: Asked,
    slots: int,
    context: int | None = None,
    new_tokens: int = NEW_TOKENS,
    prompts: Sequence[str] = (),
    settings: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[Opened]:
    """Open an engine with the weights of a model or a run.

    Args:
        model: as in `generate`.
        more: settings from a command line, KEY=VALUE, which override `settings`.
        asked: what the caller sets about the answers.
        slots: minimum number of prompts answered at the same time.
        context: longest prompt plus answer in tokens, divided in any way; unset: the sum of the limits in `rollout`.
        new_tokens: longest answer in tokens if neither the caller nor a run sets it.
        prompts: all questions, if known; the longest one then sets `rollout.max_prompt_tokens`, unless that is set.
        settings: settings of the config, as keyword arguments of `generate`.

    Raises:
        ValueError: an argument or a setting is invalid.
    """
    fork = run_of(model)
    prepare_platform()
    files = [] if fork is None else [as_path(fork.run) / CONFIG]
    devices = len(find_devices())  # slots and rows are split over all devices
    rounded = {"slots": slots, "prefill_rows": min(4, slots)}
    sizes: dict[str, Plain] = {f"rollout.{key}": -(-n // devices) * devices for key, n in rounded.items()}
    bare: dict[str, Plain] = {"model": str(model), "tasks": [{"name": "arithmetic"}]}
    before = _overrides({**({} if fork else bare), **ANSWERS_ALONE, **sizes})
    given = [*overrides(settings), *more]
    keys = {each.key for each in overrides(settings)} | {text.partition("=")[0].strip() for text in more}
    _check_given_once(asked, keys, shared=context is not None)
    loaded = load(files, [*before, *given], os.environ)
    if fork is None and asked.max_new_tokens is None and "rollout.max_new_tokens" not in loaded.provenance:
        asked = dataclasses.replace(asked, max_new_tokens=new_tokens)
    answering = _noticed(resolve_answering(loaded.config, asked))
    sampling = answering.sampling
    lengths: dict[str, Plain] = {"rollout.max_new_tokens": sampling.max_new_tokens}
    if context is not None:
        lengths = {"rollout.max_prompt_tokens": context - 1, "rollout.max_new_tokens": 1}
    lengths["rollout.repetition_penalty"] = sampling.repetition_penalty  # the first decode program depends on it
    checked = load_settings(files, [*before, *given, *_overrides({**UNUSED, **lengths})], os.environ)
    config, opened = checked.config, make_model(checked.config)
    if prompts and config.rollout.max_prompt_tokens is None:
        longest = max(map(len, _encoded(prompts, opened.tokenizer, answering)))
        room = opened.decoder.max_positions - sampling.max_new_tokens
        fitting = {"max_prompt_tokens": max(longest, min(rounded_up(longest), room))}
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update=fitting)})
    spec = resolve_rollout(config, checked.recipe, opened.decoder, opened.machine)
    rollouts = Sampler(spec, opened.decoder, opened.tokenizer, opened.mesh)
    with giving_back_memory(), contextlib.closing(rollouts):
        rollouts.compile_ahead()
        rollouts.load(*load_parts(opened, fork))
        yield Opened(rollouts, answering)


def _noticed(answering: Answering) -> Answering:
    """Return `answering`, and print its notice, if any."""
    if answering.notice:
        print(answering.notice, file=sys.stderr)
    return answering


def _overrides(settings: Mapping[str, Plain]) -> list[Override]:
    return [Override(key, value, OPENED) for key, value in settings.items()]


def _check_given_once(asked: Asked, keys: Container[str], *, shared: bool) -> None:
    """Raise ValueError if an argument is also set in `keys`, or if `keys` sets lengths that follow from the context.

    `shared`: whether prompts and answers share a context.
    """
    for name in ("max_new_tokens", "temperature", "repetition_penalty"):
        if getattr(asked, name) is not None and f"rollout.{name}" in keys:
            raise ValueError(f"{name}: given as an argument and as rollout.{name}; keep one")
    for name in ("rollout.max_prompt_tokens", "rollout.max_episode_tokens"):
        if shared and name in keys:
            raise ValueError(f"{name}: prompts and answers share the context here; leave it out, and set --context")


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
        data: like `eval_data` of `podium.grpo`, or a task's class; unset: the run's held-out questions.
        rewards: the first one decides what is correct; unset: the run's, or `podium.math_equal`.
        subset: configuration of a hub data set.
        question: column of the question; unset: whichever of `question`, `prompt` and `problem` exists.
        answer: column of the answer.
        system_prompt: system message of every conversation; unset: the run's.
        settings: settings of the config, such as `eval={"samples": 8, "greedy": False, "questions": 100}`.

    Raises:
        ValueError: an argument or a setting is invalid.
    """
    fork = run_of(model)
    check_read_by_evaluations(each.key for each in overrides(settings))
    given = [Override("grading.overlong_buffer_tokens", 0, "podium.evaluate")]
    given += [] if fork else [Override("model", str(model), "argument model")]
    known = read_config(as_path(fork.run)) if fork else None
    with tempfile.TemporaryDirectory() as folder:
        if data is not None:
            correct = rewards or ([known.tasks[0].correct] if known else [math_equal])
            if known is not None:
                answering = _noticed(resolve_answering(known, Asked(system_prompt=system_prompt)))
                system_prompt = answering.system_prompt or ""
            asked = data if is_task(data) else data_file(data, Path(folder), "data", subset=subset)
            questions = Questions(asked, None if is_task(data) else asked, None, question, answer)
            given += task_settings(questions, correct, folder=Path(folder), system_prompt=system_prompt)
        elif known is None:
            raise ValueError(f"evaluate: {model} is a model, not a run, so it has no data; pass data=")
        elif rewards is not None or subset is not None or question is not None:
            raise ValueError(
                "evaluate: rewards, subset and question need data; without data, the run's own questions and rewards "
                "are used"
            )
        else:
            own = {} if system_prompt is None else {"system_prompt": system_prompt}
            tasks = [each.model_dump() | {"rewards": {each.correct: 1.0}} | own for each in known.tasks]
            given.append(Override("tasks", tasks, "podium.evaluate"))
        files = [as_path(fork.run) / CONFIG] if fork else []
        config = load_settings(files, [*given, *overrides(settings)], os.environ).config
        with giving_back_memory():
            evaluation, step = evaluate_weights(config, fork)
        return Evaluated(dict(evaluation.stats.tasks), evaluation.records(step or 0, questions=None), step)


def max_positions(model: str) -> int:
    """The longest sequence that a run's model, or a model, can read, in tokens."""
    run = run_of(model)
    named = read_config(as_path(run.run)).model if run else model
    return read_architecture(resolve(named, waits=True)).max_positions
