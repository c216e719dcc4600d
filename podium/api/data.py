"""Turns Python arguments into settings: rows become files, functions become names, keywords become overrides."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from podium.api.rows import TRAIN_SPLITS, Data, data_file, hub_id, is_task
from podium.config.document import Plain
from podium.config.imports import SESSION, is_path, name_of
from podium.config.load import Override
from podium.config.schema import Config
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
    """Convert a value to one that YAML can hold."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Path):
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else name_of(value)


def task_settings(
    data: Data,
    eval_data: Data | None,
    rewards: Rewards,
    *,
    folder: Path,
    subset: str | None,
    question: str | None,
    answer: str,
    system_prompt: str | None,
) -> list[Override]:
    """The settings of a task made of data and rewards; rows are written to files below `folder`."""
    parts, match = reward_parts(rewards)
    correct = "correct" if match else next(iter(parts))
    task: dict[str, Plain] = {"system_prompt": system_prompt, "rewards": parts, "correct": correct}
    if is_task(data):
        if eval_data is not None:
            raise ValueError("eval_data: a task has its own evaluation questions; leave it out")
        name = name_of(data)
        named = [Override("tasks", [task | {"name": name}], "argument data")]
        in_session = name.startswith(f"{SESSION}:")
        return [*named, Override("grading.workers", 0, "a task of this session")] if in_session else named
    dataset = hub_id(data)
    if dataset is None and subset is not None:
        raise ValueError(f"subset: {subset!r} names a part of a data set of the hub, and data is none; leave it out")
    options = {"question": question, "answer": answer if match else None, "match": match or "math"}
    task |= {"name": "jsonl", "options": options | ({"dataset": dataset, "subset": subset} if dataset else {})}
    if dataset is None:
        task["path"] = data_file(data, folder, "data", TRAIN_SPLITS)
    if eval_data is not None:
        task["eval_path"] = data_file(eval_data, folder, "eval_data", subset=subset)
    return [Override("tasks", [task], "argument data")]


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
        raise ValueError("rewards: none given; pass podium.math_equal, or a function of yours")
    if match is None and not any(is_path(name) for name in parts):
        raise ValueError(f"rewards: {', '.join(parts)} alone do not define a correct answer; add podium.math_equal")
    return parts, match


def rewards_of(config: Config) -> dict[str, float]:
    """The rewards for an evaluation: only the part that counts as correctness."""
    return {config.tasks[0].correct: 1.0}
