"""Makes the task that a config names: built-in, or imported from `package.module:Class`.

A task's module is imported only when the task is made, so that listing names stays fast.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from podium.config.errors import suggestion
from podium.config.imports import imported
from podium.config.schema import TaskConfig
from podium.tasks.task import Task, TaskSource

TASKS: dict[str, str] = {
    "arithmetic": "podium.tasks.games.arithmetic:Arithmetic",
    "calculator": "podium.tasks.games.calculator_task:CalculatorTask",
    "chat": "podium.tasks.question_sets:Chat",
    "code": "podium.tasks.code.code_task:Code",
    "environment": "podium.tasks.conversations.environment_rows:EnvironmentRows",
    "frozen_lake": "podium.tasks.games.frozen_lake:FrozenLake",
    "gsm8k": "podium.tasks.question_sets:Gsm8k",
    "guess": "podium.tasks.games.guess:GuessGame",
    "jsonl": "podium.tasks.question_sets:Jsonl",
    "labelled": "podium.tasks.preferences:Labelled",
    "mastermind": "podium.tasks.games.mastermind:Mastermind",
    "math": "podium.tasks.question_sets:Math",
    "math500": "podium.tasks.question_sets:math500",
    "preferences": "podium.tasks.preferences:Preferences",
    "program": "podium.tasks.conversations.program:Program",
    "reasoning_gym": "podium.tasks.adapters.reasoning_gym:ReasoningGym",
    "sqlite": "podium.tasks.games.sqlite_task:SqliteTask",
    "wordle": "podium.tasks.games.wordle:Wordle",
}
"""Built-in tasks: config name -> path of the class or factory."""

FAMILIES: dict[str, str] = {
    "textarena": "podium.tasks.adapters.textarena:textarena_task",
    "verifiers": "podium.tasks.adapters.verifiers_task:verifiers_task",
}
"""Tasks named `FAMILY:NAME`: family -> path of a function that makes a task's class from the name."""


def make_task(config: TaskConfig) -> Task:
    """Make the task that a config names, after checking its options.

    Raises ValueError if the task or an option is unknown, an option is missing or has the wrong type, or what the name
    stands for is no task.
    """
    constructor = find_task(config.name)
    options = task_options(config.name)
    try:
        inspect.signature(constructor).bind(TaskSource(), **dict.fromkeys(options))
    except TypeError as error:
        rule = "a task is made with the place of its data, and with its options by keyword"
        raise ValueError(
            f"{config.name}: {rule}; begin its constructor `def __init__(self, source, *, ...)` ({error})"
        ) from None
    for name in config.options:
        if name not in options:
            raise ValueError(f"{config.name}: options.{name}: unknown option; {suggestion(name, options)}")
    for name, parameter in options.items():
        if parameter.default is parameter.empty and name not in config.options:
            raise ValueError(f"{config.name}: options.{name}: must be set (it has no default)")
    hints = get_type_hints(constructor.__init__ if inspect.isclass(constructor) else constructor, include_extras=True)
    for name, value in config.options.items():
        _check_type(f"{config.name}: options.{name}", value, hints.get(name, object))
    source = TaskSource(
        path=config.path, eval_path=config.eval_path, train_split=config.train_split, eval_split=config.eval_split
    )
    task = constructor(source, **config.options)
    needed = ("prompts",) if config.system_prompt is not None else ("prompts", "system_prompt")
    if missing := [name for name in needed if not hasattr(task, name)]:
        raise ValueError(f"{config.name}: {task!r:.80} is no task: it lacks {', '.join(missing)} (docs/tasks.md)")
    return task


def task_options(name: str) -> Mapping[str, inspect.Parameter]:
    """A task's options, as declared by its constructor (keyword arguments after `source`)."""
    parameters = inspect.signature(find_task(name)).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def task_labels(tasks: Sequence[TaskConfig]) -> list[str]:
    """Short unique names of a mixture's tasks, for metrics and messages: `gsm8k`; a second task of the same name is
    `gsm8k-2`.
    """
    labels: list[str] = []
    for config in tasks:
        name = (config.environment or config.name).rpartition(":")[2]
        copies = (f"{name}-{number}" for number in range(2, len(tasks) + 2))
        labels.append(next(label for label in (name, *copies) if label not in labels))
    return labels


def find_task(name: str) -> Callable[..., Task]:
    """The class or function that makes the task of this name. Raises ValueError if the name is unknown."""
    family, _, member = name.partition(":")
    if in_family(name):
        return imported(FAMILIES[family], what="a task")(member)
    return imported(TASKS.get(name, name), what="a task", known=TASKS)


def in_family(name: str) -> bool:
    """Whether a name belongs to a family, rather than being an import path."""
    return ":" in name and name.partition(":")[0] in FAMILIES


def _check_type(key: str, value: object, hint: Any) -> None:
    """Raise ValueError unless the value has the annotated type and range."""
    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        index = "".join(f"[{part!r}]" for part in first["loc"])
        raise ValueError(f"{key}{index}: {first['msg']}, got {first['input']!r}") from None
