"""Turns Python arguments into settings: rows become files, functions become names, keywords become overrides."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from podium.api.rows import TRAIN_SPLITS, Data, data_file, hub_id, is_task
from podium.config.document import Plain
from podium.config.imports import SESSION, is_path, name_of
from podium.config.load import Override
from podium.config.schema import TaskConfig
from podium.tasks.conversations.environment_forms import conversing
from podium.tasks.known_sets import ANSWER, CODE_SETS
from podium.tasks.question_files import holds_code
from podium.tasks.question_sets import math_equal, text_equal

Reward = Callable[..., object] | str
"""A function (see `podium.tasks.functions` for its arguments), or the name of a built-in reward part."""
Rewards = Reward | Sequence[Reward | tuple[Reward, float]]
"""One or several reward parts, each alone or as `(part, weight)`."""

GRADES: Mapping[Callable[..., object], str] = {math_equal: "math", text_equal: "text"}
"""Functions that the built-in task uses as its grader, in a separate process with a time limit."""


def overrides(settings: Mapping[str, object], prefix: str = "") -> Iterator[Override]:
    """Convert keyword arguments to settings; a section is a dict, or written with double underscores.

    Objects (a recipe, a loss, an optimizer) are registered under a session name.
    """
    for key, value in settings.items():
        path = f"{prefix}{key}".replace("__", ".")
        if isinstance(value, Mapping):
            yield from overrides({str(name): each for name, each in value.items()}, f"{path}.")
        else:
            yield Override(path, _plain(value), f"argument {path}")


def _plain(value: object) -> Plain:
    """Convert a value to a form that YAML can hold."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Path):
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else name_of(value)


class Questions(NamedTuple):
    """The questions of a task, as arguments of `podium.grpo`."""

    data: Data | None
    eval_data: Data | None = None
    subset: str | None = None
    question: str | None = None
    answer: str = ANSWER


def task_settings(
    questions: Questions,
    rewards: Rewards,
    *,
    folder: Path,
    system_prompt: str | None = None,
    tools: Sequence[Callable[..., object] | str] = (),
    environment: Callable[..., object] | str | None = None,
) -> list[Override]:
    """The settings of a task made of questions, rewards, tools and an environment.

    Rows are written to files below `folder`. Raises ValueError for arguments that cannot be combined.
    """
    _check(questions, environment)
    data, eval_data, subset, question, answer = questions
    parts, match = reward_parts(rewards)
    if environment is not None and match is None and _pays(environment):
        parts, match = {"correct": 1.0, **parts}, "math"
    correct = "correct" if match else next(iter(parts))
    task: dict[str, Plain] = {"system_prompt": system_prompt, "rewards": parts, "correct": correct}
    task |= _held(tools, environment)
    names = [task.get("tools"), task.get("environment"), name_of(data) if is_task(data) and _converses(data) else None]
    in_session = f"{SESSION}:" in str(names)
    threads = [Override("environments.workers", 0, "a tool or environment of this session")] if in_session else []
    if data is None:
        return [Override("tasks", [task | {"name": "environment"}], "argument environment"), *threads]
    if is_task(data):
        name = name_of(data)
        named = [Override("tasks", [task | {"name": name}], "argument data"), *threads]
        in_session = name.startswith(f"{SESSION}:")
        return [*named, Override("grading.workers", 0, "a task of this session")] if in_session else named
    dataset = hub_id(data)
    path = None if dataset else data_file(data, folder, "data", TRAIN_SPLITS)
    of_answers = match == "math" and question is None and answer == ANSWER
    options: dict[str, Plain] = {} if question is None else {"question": question}
    if environment is not None:
        name = "environment"
    elif of_answers and (dataset in CODE_SETS if path is None else holds_code(path)):
        name = "code"
    else:
        name = "jsonl"
        options |= {"answer": answer if match else None, "match": match or "math"}
    task |= {"name": name, "options": options | ({"dataset": dataset, "subset": subset} if dataset else {})}
    if path is not None:
        task["path"] = path
    if eval_data is not None:
        of_both = subset if hub_id(eval_data) == dataset else None  # another data set has other configurations
        task["eval_path"] = data_file(eval_data, folder, "eval_data", subset=of_both)
    return [Override("tasks", [task], "argument data"), *threads]


def _check(questions: Questions, environment: object) -> None:
    """Raise ValueError for arguments that cannot be combined."""
    data, subset = questions.data, questions.subset
    if data is None and environment is None:
        raise ValueError("data: none given; pass data, which may be missing only with an environment")
    if data is not None and is_task(data):
        if questions.eval_data is not None:
            raise ValueError("eval_data: a task has its own evaluation questions; leave it out")
    elif data is not None and subset is not None and hub_id(data) is None:
        raise ValueError(
            f"subset: {subset!r} selects a part of a data set on the hub, and data is not one; leave it out"
        )


def _held(
    tools: Sequence[Callable[..., object] | str], environment: Callable[..., object] | str | None
) -> dict[str, Plain]:
    """The settings of a task for these tools and this environment."""
    held: dict[str, Plain] = {}
    if environment is not None:
        held["environment"] = environment if isinstance(environment, str) else name_of(environment)
    if tools:
        held["tools"] = [each if isinstance(each, str) else name_of(each) for each in tools]
    return held


def _converses(task: object) -> bool:
    """Whether a task's class itself defines conversations or tools."""
    return hasattr(task, "open") or hasattr(task, "tools")


def _pays(environment: Callable[..., object] | str) -> bool:
    """Whether an environment gives a reward."""
    name = environment if isinstance(environment, str) else name_of(environment)
    held = conversing(TaskConfig(name="environment", environment=name))
    return held is not None and held.rewards


def reward_parts(rewards: Rewards) -> tuple[dict[str, float], str | None]:
    """The weight of each part by name, and how the built-in task compares answers (None: it does not)."""
    parts: dict[str, float] = {}
    match = None
    for each in [rewards] if callable(rewards) or isinstance(rewards, str) else rewards:
        function, weight = each if isinstance(each, tuple) else (each, 1.0)
        if callable(function) and function in GRADES:
            if match is not None:
                raise ValueError("rewards: math_equal and text_equal are two ways to compare the same answer; keep one")
            name, match = "correct", GRADES[function]
        else:
            name = function if isinstance(function, str) else name_of(function)
        if name == "correct" and match is None:
            match = "math"
        if name in parts:
            raise ValueError(f"rewards: {name} is listed twice; keep one")
        parts[name] = float(weight)
    if not parts:
        raise ValueError("rewards: none given; pass podium.math_equal, or your own function")
    if match is None and not any(is_path(name) for name in parts):
        raise ValueError(f"rewards: {', '.join(parts)} do not define when an answer is correct; add podium.math_equal")
    return parts, match
