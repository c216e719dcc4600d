"""The output of `podium tasks`: each task with its options."""

import inspect
from typing import cast

from pydantic import TypeAdapter

from podium.config.document import dump_value
from podium.config.explain import Schema, rule_text
from podium.config.imports import imported
from podium.config.schema import TaskConfig
from podium.tasks.registry import FAMILIES, find_task, task_options


def task_page(name: str) -> str:
    """A task's description, its options with types and defaults, and its splits. Raises ValueError if unknown."""
    options = task_options(name)
    splits = {key: TaskConfig.model_fields[key].default for key in ("train_split", "eval_split")}
    return "\n".join(
        (
            f"{name}: {task_doc(name)}",
            "\noptions:" if options else "\noptions: none",
            *(f"  {_option_line(option)}" for option in options.values()),
            "\nsplits: " + ", ".join(f"{key}: {split}" for key, split in splits.items()),
        )
    )


def task_doc(name: str) -> str:
    """The docstring of a task."""
    return inspect.getdoc(find_task(name)) or "(no description)"


def family_doc(family: str) -> str:
    """The docstring of a family's function, whose libraries need not be installed."""
    return inspect.getdoc(imported(FAMILIES[family], what="a task")) or "(no description)"


def _option_line(option: inspect.Parameter) -> str:
    default = list(option.default) if isinstance(option.default, tuple) else option.default
    use = "required" if default is option.empty else f"default {dump_value(default)}"
    if option.annotation is option.empty or isinstance(option.annotation, str):
        return f"{option.name}: {use}"
    schema = cast(Schema, TypeAdapter(option.annotation).json_schema())
    return f"{option.name}: {rule_text(schema, schema)}, {use}"
