"""The interface of tasks: prompts to answer, and a grade for an answer. To add one, write a class with these methods.

    class Spelling:
        system_prompt = "Answer with one word."

        def __init__(self, source: TaskSource, *, length: int = 5) -> None: ...

        def prompts(self, split: str) -> Sequence[Prompt]: ...

        def grade(self, prompt: Prompt, completion: str) -> float: ...

and name it in the config by import path (`tasks: [{name: mypackage.tasks:Spelling, options: {length: 6}}]`) or by one
line in `podium/tasks/registry.py`. Import what `grade` needs in the constructor: grading has a time limit, making a
task has none. Nothing here imports jax.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

from pydantic import Field

Count = Annotated[int, Field(ge=1)]
"""An option of a task that counts something."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A question as its task states it, before the chat template is applied."""

    id: str
    """Unique within its task and split, and stable between runs: `gsm8k/test/17`."""
    question: str
    answer: str
    """The reference answer, as the grader reads it."""
    within: str = ""
    """The column from which the reference was extracted, such as GSM8K's solution; empty if the reference is a whole
    value."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The row that the prompt was made from, for reward functions."""
    messages: Sequence[Mapping[str, object]] | None = None
    """The conversation to continue, as messages with `role`, `content` and any further keys; None: only the
    question."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graded:
    """A completion to grade: text and tokens."""

    text: str
    tokens: tuple[int, ...]
    """Token ids, including the end-of-sequence token; for a conversation, all tokens that the model sampled."""
    transcript: tuple[Mapping[str, object], ...] = ()
    """The messages of a conversation after its prompt: answers, calls and replies; empty for a single answer."""
    paid: float | None = None
    """The reward of its environment, which is then the `correct` part; None: the task grades `text`, the last answer
    of a conversation."""
    environment: object = None
    """The environment of a conversation after its end, for functions that ask for it; else None."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
    """The reward of a completion."""

    total: float
    """The weighted sum of the parts; NaN if there is no reward (`failed`)."""
    parts: Mapping[str, float]
    """Each part before weighting: `correct`, `format`, ...; functions that do not apply to the prompt are missing."""
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """The weight of each part in the total."""
    timed_out: bool = False
    """Whether grading was stopped: it exceeded `grading.timeout_s`, or its process died (memory), and `correct` is 0;
    or the answer exceeded a limit of its task, which determines `correct`."""
    turns: tuple[float, ...] = ()
    """The reward of each turn of a conversation; their sum is `total`. Empty for a single answer."""

    @property
    def failed(self) -> bool:
        """Whether the reward is missing, because the conversation failed for a reason that is not the model's, or
        nothing could grade the answer.
        """
        return math.isnan(self.total)

    def part(self, name: str | None) -> float:
        """The total (for None), or the named part before weighting; NaN if absent."""
        if name is None or self.failed:
            return self.total
        return self.parts.get(name, math.nan)


class OutOfTime(Exception):
    """Raised by `Task.grade`: the answer is code that took too long; `correct` is its grade nonetheless."""

    def __init__(self, message: str, correct: float) -> None:
        super().__init__(message)
        self.correct = correct


FAILED = Reward(total=math.nan, parts={})
"""The missing reward of a conversation that failed through no fault of the model."""


def with_turns(reward: Reward, turn_rewards: Sequence[float], weight: float) -> Reward:
    """A conversation's reward, divided over its turns.

    Args:
        reward: with the total.
        turn_rewards: what the environment paid for each turn.
        weight: weight of the `correct` part, which holds their sum. The last turn gets the rest of the total.
    """
    paid = [weight * each for each in turn_rewards]
    if paid:
        paid[-1] += reward.total - sum(paid)
    return dataclasses.replace(reward, turns=tuple(paid))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSource:
    """The location of a task's data: the config's `path`, `eval_path` and split names."""

    path: str | None = None
    eval_path: str | None = None
    train_split: str = "train"
    eval_split: str = "test"
    dataset: str | None = None
    """The data set of the Hugging Face hub that is read if `path` is not set; `on_hub` sets it."""
    subset: str | None = None
    """Configuration of the data set; None for its only one, or for the one that Podium reads of a known set."""

    def on_hub(self, dataset: str | None, subset: str | None = None) -> "TaskSource":
        """The source with the data set of the hub that the task or its options name; None if they name none."""
        return dataclasses.replace(self, dataset=dataset, subset=subset)

    def split_name(self, split: str) -> str:
        """The data's name of the split `train` or `eval`."""
        return self.eval_split if split == "eval" else self.train_split

    def refuse(self, task: str) -> None:
        """Raise ValueError if a path is set, for a task whose questions are generated."""
        if self.path or self.eval_path:
            raise ValueError(f"{task}: path and eval_path: the questions are generated, not read; unset them")


class Task(Protocol):
    """Prompts with checkable answers."""

    system_prompt: str | None
    """First message of each conversation; overridden by the config's `system_prompt`."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of `train` or `eval`, in a fixed order. Raises ValueError if the split has no prompts."""
        ...

    def grade(self, prompt: Prompt, completion: str) -> float:
        """The `correct` part of the reward, 0 to 1; must handle anything that a model may write.

        An exception, except OutOfTime, is a bug of the grader and stops the run. Runs in a worker process with the time
        limit `grading.timeout_s`; a task that limits its own time, but may take longer, has an attribute
        `grading_limit_s`, an upper bound in seconds. A static method `check_machine() -> str` of the task, of its
        environment or of a tool, if defined, is called before a run begins: it returns a description of how code runs
        here, or raises ValueError if this machine cannot do it.
        """
        ...
