"""What a task is: prompts to answer, and a grade for an answer. To add one, write a class with these two methods.

    class Spelling:
        system_prompt = "Answer with one word."

        def __init__(self, source: TaskSource, *, length: int = 5) -> None: ...

        def prompts(self, split: str) -> Sequence[Prompt]: ...

        def grade(self, prompt: Prompt, completion: str) -> float: ...

and name it in the config by import path (`tasks: [{name: mypackage.tasks:Spelling, options: {length: 6}}]`) or by
one line in `podium/tasks/registry.py`. Import what `grade` needs in the constructor: grading has a time limit, making a
task has none. Nothing here imports jax.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A question as its task states it, before any chat template."""

    id: str
    """Unique in its task and split, stable over runs: `gsm8k/test/17`."""
    question: str
    answer: str
    """The reference answer, as the grader reads it."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The row that it was made of, for reward functions."""
    messages: Sequence[Mapping[str, str]] | None = None
    """The conversation to continue, each message with `role` and `content`; None: the question is all there is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graded:
    """A completion to grade."""

    text: str
    tokens: tuple[int, ...]
    """Ids of its tokens, the end-of-sequence token included."""

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return len(self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
    """The reward of a completion."""

    total: float
    """The weighted sum of the parts."""
    parts: Mapping[str, float]
    """Each part before its weight: `correct`, `format`, ...; without the functions that do not apply to its prompt."""
    timed_out: bool = False
    """Grading was stopped: it took longer than `grading.timeout_s`, or its process died (memory); `correct` is 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSource:
    """Where a task finds its data: the config's `path`, `eval_path` and split names."""

    path: str | None = None
    eval_path: str | None = None
    train_split: str = "train"
    eval_split: str = "test"


class Task(Protocol):
    """Prompts with checkable answers."""

    system_prompt: str | None
    """First message of each conversation; the config's `system_prompt` replaces it."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of `train` or `eval`, in an order that does not change. Empty is a ValueError."""
        ...

    def grade(self, prompt: Prompt, completion: str) -> float:
        """The `correct` part of the reward, 0 to 1, whatever a model may have written.

        An exception is a bug of the grader and stops the run. Runs in a worker process, under a time limit.
        """
        ...
