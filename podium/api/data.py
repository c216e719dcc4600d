"""Turns Python arguments into settings: rows become files, functions become names, keywords become overrides."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.config.imports import SESSION, is_path, name_of
from podium.config.load import Override
from podium.config.schema import Config
from podium.files import write_atomically
from podium.tasks.question_sets import math_equal, text_equal

Reward = Callable[..., Any] | str
"""A function (its arguments: `podium.tasks.functions`), or the name of a built-in part of the reward."""
Rewards = Sequence[Reward | tuple[Reward, float]]
"""Parts of the reward, each alone or as `(part, weight)`."""
Rows = Iterable[Mapping[str, Any]]
"""Dicts, or a datasets.Dataset."""
Data = Rows | str | Path | Callable[..., Any]
"""Rows, a .jsonl or .parquet file, or a task's class."""

GRADES: Mapping[Callable[..., Any], str] = {math_equal: "math", text_equal: "text"}
"""Functions that the built-in task uses as its grader, in a separate process with a time limit."""


def overrides(settings: Mapping[str, Any], prefix: str = "") -> Iterator[Override]:
    """Yield keyword arguments as settings; a section is a dict, or written with double underscores.

    Objects (a recipe, a loss, an optimizer) are registered under a name of this session.
    """
    for key, value in settings.items():
        path = f"{prefix}{key}".replace("__", ".")
        if isinstance(value, Mapping):
            yield from overrides(value, f"{path}.")
        else:
            yield Override(path, _plain(value), f"argument {path}")


def _plain(value: Any) -> Any:
    """A setting as a value that YAML can hold."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, Path):
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else name_of(value)


def task_settings(
    data: Data,
    eval_data: Data | None,
    rewards: Rewards,
    *,
    folder: Path,
    question: str,
    answer: str,
    system_prompt: str | None,
) -> list[Override]:
    """The settings of a task made of data and rewards; rows are written to files below `folder`."""
    parts, match = reward_parts(rewards)
    correct = "correct" if match else next(iter(parts))
    task: dict[str, Any] = {"system_prompt": system_prompt, "rewards": parts, "correct": correct}
    if isinstance(data, type) or (callable(data) and not isinstance(data, Iterable)):
        if eval_data is not None:
            raise ValueError("eval_data: a task has its own evaluation questions; leave it out")
        named = [Override("tasks", [task | {"name": name_of(data)}], "argument data")]
        in_session = named[0].value[0]["name"].startswith(f"{SESSION}:")
        return [*named, Override("grading.workers", 0, "a task of this session")] if in_session else named
    options = {"question": question, "answer": answer if match else None, "match": match or "math"}
    task |= {"name": "jsonl", "path": data_file(data, folder, "data"), "options": options}
    if eval_data is not None:
        task["eval_path"] = data_file(eval_data, folder, "eval_data")
    return [Override("tasks", [task], "argument data")]


def reward_parts(rewards: Rewards) -> tuple[dict[str, float], str | None]:
    """The weight of each part by name, and how the built-in task compares answers (None: it does not grade)."""
    parts: dict[str, float] = {}
    match = None
    for each in rewards:
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
        raise ValueError("rewards: none given; pass podium.math_equal, or a function of yours")
    if match is None and not any(is_path(name) for name in parts):
        raise ValueError(f"rewards: {', '.join(parts)} alone do not define a correct answer; add podium.math_equal")
    return parts, match


def data_file(data: Any, folder: Path, what: str) -> str:
    """Return the path of the data; rows are first written to a file named after a hash of their content.

    Raises ValueError if an item is not a row, or holds a value that JSON cannot represent.
    """
    if isinstance(data, str | Path):
        return str(data)
    lines = []
    for index, row in enumerate(data):
        if not isinstance(row, Mapping):
            expected = "a dict, such as {'question': ..., 'answer': ...}"
            raise ValueError(f"{what}: row {index} is {row!r:.80}; expected {expected}")
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, default=_scalar) + "\n")
        except TypeError as error:
            raise ValueError(f"{what}: row {index} cannot be written as JSON ({error}); drop that column") from None
    if not lines:
        raise ValueError(f"{what}: it has no rows")
    text = "".join(lines)
    path = folder / f"{what}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return str(path)


def _scalar(value: Any) -> Any:
    """Convert numpy values to Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r:.40}")


def rewards_of(config: Config) -> dict[str, float]:
    """The rewards for an evaluation: only the part that counts as correct."""
    return {config.tasks[0].correct: 1.0}
