"""Reinforcement learning of language models in JAX.

    import podium

    run = podium.grpo("Qwen/Qwen2.5-0.5B-Instruct", rows, eval_data=held_out, rewards=[podium.math_equal], steps=100)
    run.metrics, run.samples, run.evaluate(held_out), run.generate(["What is 3 + 4?"]), run.export("out")

Every name below is imported when it is first used: `import podium` is quick and imports no jax (docs/python.md).
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podium.algorithms.losses import TokenLoss, Tokens
    from podium.algorithms.recipes import Recipe
    from podium.api.answers import Answer, evaluate, generate
    from podium.api.run_handle import Run, load_run
    from podium.api.train import grpo, train
    from podium.plan import plan
    from podium.tasks.functions import reward
    from podium.tasks.question_sets import math_equal, text_equal
    from podium.tasks.task import Prompt, TaskSource

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "Prompt",
    "Recipe",
    "Run",
    "TaskSource",
    "TokenLoss",
    "Tokens",
    "evaluate",
    "generate",
    "grpo",
    "load_run",
    "math_equal",
    "plan",
    "reward",
    "text_equal",
    "train",
]

_HOMES = {
    "podium.algorithms.losses": ("TokenLoss", "Tokens"),
    "podium.algorithms.recipes": ("Recipe",),
    "podium.api.answers": ("Answer", "evaluate", "generate"),
    "podium.api.run_handle": ("Run", "load_run"),
    "podium.api.train": ("grpo",),
    "podium.tasks.functions": ("reward",),
    "podium.tasks.question_sets": ("math_equal", "text_equal"),
    "podium.tasks.task": ("Prompt", "TaskSource"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}
_VERBS = {"podium.train": "podium.api.train:train", "podium.plan": "podium.plan:plan"}


class _Verb(types.ModuleType):
    """A subpackage that can be called like its main function: `podium.train(...)`, `podium.plan(...)`."""

    def __call__(self, *arguments: object, **options: object) -> object:
        module, _, name = _VERBS[self.__name__].partition(":")
        return getattr(importlib.import_module(module), name)(*arguments, **options)


def make_verb(module: str) -> None:
    """Make a subpackage callable. The subpackage calls this while it is being imported."""
    sys.modules[module].__class__ = _Verb


def __getattr__(name: str) -> object:
    if f"podium.{name}" in _VERBS:
        return importlib.import_module(f"podium.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'podium' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
