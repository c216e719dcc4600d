"""The sequence of prompts: a mixture of tasks by weight, each reshuffled every epoch with a seed.

The n-th prompt of a run depends only on the seed and n, so every host, and a resumed run, sees the same sequence. Where
the config says so it also depends on how earlier prompts went; those results are saved with the run.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from podium.config.data import DataConfig, FilterConfig
from podium.config.schema import TaskConfig
from podium.files import as_path
from podium.tasks.curriculum import by_progress, by_success, level_labels, leveled
from podium.tasks.pass_rates import PassRates, read_pass_rates
from podium.tasks.registry import make_task, task_labels
from podium.tasks.task import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskPrompt:
    """A prompt with its task."""

    task: int
    """Index of its task in the config; with curricula, index of its level in the list of all tasks' levels."""
    prompt: Prompt
    system_prompt: str | None
    level: int | None = None
    """Level of the prompt in the task's curriculum, from 0, or the number of its task in a mixture by progress; None
    without a curriculum."""


class LevelPrompts:
    """The prompts of each level of all tasks; data is read at its first use."""

    def __init__(self, levels: Sequence[TaskConfig], labels: Sequence[str], selection: FilterConfig | None) -> None:
        """Create the tasks. `labels` are the levels' names; `selection` filters training prompts, if set."""
        self._levels, self._labels = levels, labels
        self._filter = selection
        self._tasks = [make_task(task) for task in levels]
        self._system_prompts = [
            task.system_prompt if config.system_prompt is None else config.system_prompt or None
            for config, task in zip(levels, self._tasks, strict=True)
        ]
        self.read = functools.cache(self._read)
        """The prompts of a level, by its index, and a split; cached."""
        self._pass_rates = functools.cache(self._read_pass_rates)

    def asked(self, level: int, prompt: Prompt) -> TaskPrompt:
        """A prompt of a level, with its task."""
        return TaskPrompt(task=level, prompt=prompt, system_prompt=self._system_prompts[level])

    def asked_of(self, level: int, split: str, limit: int | None = None) -> list[TaskPrompt]:
        """The first `limit` prompts of a level and split, or all, with their task."""
        return [self.asked(level, prompt) for prompt in self.read(level, split)[:limit]]

    def check_model(self, files: Callable[[], Mapping[str, str]]) -> None:
        """Raise ValueError if the pass rates that filter prompts were measured with a model whose files differ from
        `files` (name -> fingerprint), which are read only if there is a filter.
        """
        if self._filter is not None:
            self._pass_rates().check_model(files())

    def check_answers(self, *, trains: bool, evaluates: bool) -> None:
        """Raise ValueError if a question's reference cannot be equalled by any answer; reads the data. `trains` and
        `evaluates` select the questions to check.
        """
        splits = [split for split, asked in (("train", trains), ("eval", evaluates)) if asked]
        for index, (config, task) in enumerate(zip(self._levels, self._tasks, strict=True)):
            check = getattr(task, "check_answer", None)
            if config.correct != "correct" or check is None:
                continue
            for prompt in itertools.chain.from_iterable(self.read(index, split) for split in splits):
                if prompt.answer:  # otherwise only functions grade
                    check(prompt)

    def _read(self, level: int, split: str) -> Sequence[Prompt]:
        """A level's prompts. Raises ValueError if it has none."""
        prompts = self._tasks[level].prompts(split)
        if not prompts:
            raise ValueError(f"{self._labels[level]}: it has no {split} prompts; an empty data set cannot be used")
        if self._filter is None or split != "train":
            return prompts
        return self._pass_rates().kept(self._labels[level], prompts, self._filter)

    def _read_pass_rates(self) -> PassRates:
        assert self._filter is not None, "prompts are filtered"
        return read_pass_rates(as_path(self._filter.file))


class _Turns:
    """The order in which tasks are drawn: each in proportion to its weight."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        exact = [Fraction(weight) for weight in weights]
        rest = list(itertools.accumulate(reversed(exact)))[::-1]
        self._shares = [weight / total for weight, total in zip(exact, rest, strict=True)]
        """Each task's weight as an exact fraction of its own and all later weights; 1 for the last."""
        self._phases = [Fraction(_hash(seed, "phase", index) % 2**32, 2**32) for index in range(len(weights))]

    def at(self, cursor: int) -> tuple[int, int]:
        """The task drawn at a cursor, and the number of its earlier draws.

        The first task takes each cursor at which `cursor * share + phase` crosses an integer; the second task does the
        same among the remaining cursors, with its share of the remaining weight; and so on. The last task takes the
        remainder.
        """
        for task, (share, phase) in enumerate(zip(self._shares, self._phases, strict=True)):
            before = math.floor(cursor * share + phase)
            if math.floor((cursor + 1) * share + phase) > before:
                return task, before
            cursor -= before
        raise AssertionError("the last task's share is 1")


class TaskMixture:
    """The prompts of a run, in order.

    After n prompts, a task with share p of the total weight has been drawn n * p times, give or take one draw per task
    before it. A task's draws cover all its prompts before any is repeated.
    """

    def __init__(self, tasks: Sequence[TaskConfig], *, seed: int, data: DataConfig | None = None) -> None:
        """Make the tasks; their data is read on first use."""
        data = data or DataConfig()
        levels = leveled(tasks)
        self.levels = list(itertools.chain.from_iterable(levels))
        """All tasks, where a task with a curriculum is replaced by its levels."""
        self.labels = level_labels(tasks)
        """A distinct short name for each task or level."""
        self.cursor = 0
        """The number of prompts drawn so far; saved with the run, and restored when it is resumed."""
        self._seed = seed
        ends = list(itertools.accumulate(map(len, levels)))
        self._evaluated = {label: end - 1 for label, end in zip(task_labels(tasks), ends, strict=True)}
        """Index of the level of each task that is used for evaluation."""
        weights = [config.weight for config in tasks]
        if data.progress is None:
            self._first = [0, *ends]
            """Index of the first level of each task, or of the whole mixture if tasks are drawn by progress; ends with
            the total."""
            self._curricula = [
                None if task.curriculum is None else by_success(task.curriculum, self.labels[first : first + len(own)])
                for task, own, first in zip(tasks, levels, self._first, strict=False)
            ]
        else:  # the tasks of the mixture are drawn like the levels of one task
            self._first = [0, len(tasks)]
            self._curricula = [by_progress(data.progress, self.labels, weights)]
            weights = [1.0]
        self._retire = data.retire
        self._retired: dict[str, set[str]] = {label: set() for label in self.labels}
        self.data = LevelPrompts(self.levels, self.labels, data.filter)
        self._turns = _Turns(weights, seed)
        self._order = functools.lru_cache(maxsize=2 * len(self.levels))(self._epoch_order)

    def num_prompts(self) -> dict[str, int]:
        """The number of training prompts of each task, by label; reads the data if it has not been read."""
        return {label: len(self.data.read(task, "train")) for task, label in enumerate(self.labels)}

    def first_prompts(self) -> list[TaskPrompt]:
        """The first training prompt of each task; reads the data if it has not been read."""
        return [self.data.asked(task, self.data.read(task, "train")[0]) for task in range(len(self.labels))]

    def train_prompts(self) -> dict[str, list[TaskPrompt]]:
        """All training prompts of each task, by label, in the order of the data."""
        return {label: self.data.asked_of(task, "train") for task, label in enumerate(self.labels)}

    def next(self, n: int) -> list[TaskPrompt]:
        """Return the next n prompts and move the cursor past them."""
        prompts = [self.prompt_at(self.cursor + offset) for offset in range(n)]
        self.cursor += n
        return prompts

    def prompt_at(self, cursor: int, level: int | None = None) -> TaskPrompt:
        """The prompt at an index (counted from 0) of the run's sequence.

        For a task with a curriculum, it is drawn from this `level`, or if that is None, from the level due now.
        """
        task, draw = self._turns.at(cursor)
        curriculum = self._curricula[task]
        if curriculum is not None and level is None:
            level = curriculum.level(_hash(self._seed, "level", task, draw) / 2**64)
        index = self._first[task] + (level or 0)
        prompts = self.data.read(index, "train")
        epoch, place = divmod(draw, len(prompts))
        prompt = self.data.asked(index, prompts[self._order(index, epoch)[place]])
        return prompt if curriculum is None else dataclasses.replace(prompt, level=level)

    @property
    def means(self) -> dict[str, tuple[float, ...]]:
        """The means of the last groups of each level of curricula, by label; they determine the levels to draw."""
        return {label: last for each in self._curricula if each for label, last in each.means.items()}

    @means.setter
    def means(self, means: Mapping[str, Sequence[float]]) -> None:
        for each in self._curricula:
            if each is not None:
                each.means = means

    @property
    def retired(self) -> dict[str, tuple[str, ...]]:
        """The ids of prompts that are no longer drawn, by label."""
        return {label: tuple(sorted(ids)) for label, ids in self._retired.items() if ids}

    @retired.setter
    def retired(self, retired: Mapping[str, Sequence[str]]) -> None:
        self._retired = {label: set(retired.get(label, ())) for label in self.labels}

    def is_retired(self, prompt: TaskPrompt) -> bool:
        """Whether a prompt is no longer drawn."""
        return prompt.prompt.id in self._retired[self.labels[prompt.task]]

    def learn(self, prompt: TaskPrompt, mean: float) -> None:
        """Record the share of right answers to a prompt, which influences later draws."""
        label = self.labels[prompt.task]
        curriculum = self._curricula[bisect.bisect_right(self._first, prompt.task) - 1]
        if curriculum is not None:
            curriculum.add(label, mean)
        if self._retire is None or mean < self._retire.pass_rate:
            return
        left = len(self.data.read(prompt.task, "train")) - len(self._retired[label])
        if left > self._retire.keep:
            self._retired[label].add(prompt.prompt.id)

    def eval_prompts(self, limit: int | None = None) -> dict[str, list[TaskPrompt]]:
        """The evaluation prompts of each task, by label: the first `limit`, or all; for a curriculum, those of its last
        level.
        """
        return {label: self.data.asked_of(task, "eval", limit) for label, task in self._evaluated.items()}

    def _epoch_order(self, task: int, epoch: int) -> np.ndarray:
        """The order of a task's prompts in an epoch: a permutation, by sorting hashes. [prompts] int64."""
        key = np.uint64(_hash(self._seed, "order", task, epoch))
        indices = np.arange(len(self.data.read(task, "train")), dtype=np.uint64)
        return np.argsort(_mixed(_mixed(indices) ^ key), kind="stable")


def _hash(*values: int | str) -> int:
    """A 64-bit hash of all values, the same on every machine and in every version of Python and numpy."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little")


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer on each of [n] uint64: a bijection that looks random."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
