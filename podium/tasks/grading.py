"""Grades completions in separate processes, in parallel with the training step, with a hard time limit for each answer.

Nothing that a model writes can stop a run: a worker that times out or dies on an answer is replaced, and the answer
counts as wrong. A bug in a grader does stop the run, with an error that contains everything needed to reproduce it.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from podium.config.schema import GradingConfig, TaskConfig
from podium.plain import without_middle
from podium.rollout.request import JudgeCounts
from podium.tasks.conversations.environment_forms import machine_checks, scores_itself
from podium.tasks.functions import FunctionGrader, Part
from podium.tasks.grading_worker import Item, Outcome, grade_item
from podium.tasks.judges import Judge, ReplyStore
from podium.tasks.mixture import TaskPrompt
from podium.tasks.registry import make_task, task_labels
from podium.tasks.rewards import RewardOptions, make_reward, named_parts, own_functions
from podium.tasks.task import Graded, Reward
from podium.tasks.workers import Answer, Lost, UnsendableError, WorkerPool
from podium.terminal import harmless

logger = logging.getLogger(__name__)

POLL_S = 0.2
"""Seconds between two calls of `on_poll` while rewards are awaited."""
CHUNK = 16
"""Maximum number of items sent to a worker at a time."""
SHOWN_CHARS = 4_000
"""Most characters of the question, and of the completion, that an error shows."""


Submission = tuple[TaskPrompt, Graded]
"""A completion to grade, with its prompt."""


NOT_ASKED = Outcome("graded")
"""The outcome for an answer that the task itself does not grade."""


class GradingError(ValueError):
    """A task's grader has a bug; the message has the task, the prompt, the completion and the traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(harmless(message))  # the message may quote text written by a model


class Grading:
    """Completions that are being graded; `result` waits for their rewards."""

    def __init__(
        self,
        chunks: Sequence[Future[list[Outcome]]],
        own: Sequence[Future[list[dict[str, Part]]]],
        rewards: Callable[[list[Outcome], list[dict[str, Part]]], list[Reward]],
    ) -> None:
        """Take pending grades, pending values of the user's functions, and a function that combines them."""
        self._chunks = chunks
        self._own = own
        self._rewards = rewards

    def result(self, on_poll: Callable[[], None] = lambda: None) -> list[Reward]:
        """Wait for the rewards, in the order of the items; `on_poll` is called meanwhile and may raise to stop waiting.

        Raises GradingError if a grader has a bug.
        """
        try:
            graded: list[Future[Any]] = [*self._chunks, *self._own]
            found = wait(graded, POLL_S, FIRST_EXCEPTION)
            while found.not_done and all(future.exception() is None for future in found.done):
                on_poll()
                found = wait(found.not_done, POLL_S, FIRST_EXCEPTION)
            for future in found.done:
                future.result()  # raises the first error, even while other items are still being graded
            outcomes = [outcome for chunk in self._chunks for outcome in chunk.result()]
            return self._rewards(outcomes, [parts for group in self._own for parts in group.result()])
        finally:
            for future in (*self._chunks, *self._own):
                future.cancel()  # items queued after the one with the bug


class Grader:
    """Grades completions of a mixture of tasks in `grading.workers` processes."""

    def __init__(
        self, tasks: Sequence[TaskConfig], config: GradingConfig, *, max_new_tokens: int, replies: Path | None = None
    ) -> None:
        """Start the processes, which import their tasks while the caller continues.

        `tasks` are in the order of `TaskPrompt.task`; `max_new_tokens` is for the rewards of length. Replies of judges
        are kept in the file `replies`, if set.

        Raises ValueError if a reward function or a judge cannot be used.
        """
        self._configs = list(tasks)
        self._labels = task_labels(tasks)
        self._reward_options = RewardOptions(max_new_tokens, config.overlong_buffer_tokens)
        self._warned = False
        self._warned_unrewarded = False
        self._scored_by_environment = [scores_itself(task) for task in tasks]
        self._own_tasks = [make_task(task) for task in tasks] if config.workers == 0 else []
        used = {name for task in tasks for name in named_parts(task)}
        asked = [judge for judge in config.judges if judge.name in used]
        self._judges: dict[str, Judge] = {}
        if asked:
            store = ReplyStore(replies)
            self._judges = {judge.name: Judge(judge, store) for judge in asked}
        self._functions = FunctionGrader(
            [[*own_functions(task), *(name for name in named_parts(task) if name in self._judges)] for task in tasks],
            [task.environment is not None for task in tasks],
            self._judges,
        )
        self._threads = ThreadPoolExecutor(config.workers or 1, thread_name_prefix="grading")  # one per worker
        self._pool = WorkerPool(
            "grading",
            "podium.tasks.grading_worker",
            setup=(self._configs, config.timeout_s),
            workers=config.workers,
            hidden=[judge.key_env for judge in config.judges if judge.key_env],
        )

    def grade(self, items: Sequence[Submission]) -> list[Reward]:
        """Grade completions; returns their rewards in order."""
        return self.submit(items).result()

    def submit(self, items: Sequence[Submission]) -> Grading:
        """Start grading completions and return at once; `.result()` of the return value waits for the rewards.

        Consecutive items with the same prompt are passed to the user's reward functions as one group.
        """
        own: list[Future[list[dict[str, Part]]]] = []
        for _, group in itertools.groupby(items, key=lambda item: (item[0].task, item[0].prompt.id)):
            (prompt, first), *others = group
            graded = [first, *(each for _, each in others)]
            own.append(self._functions.submit(prompt.task, prompt.prompt, graded))
        asked = [item for item in items if self._asks(item)]
        if self._own_tasks:
            done: Future[list[Outcome]] = Future()
            outcomes = [grade_item(self._own_tasks[item.task], item) for item in map(_item, asked)]
            done.set_result(self._without_bugs(asked, outcomes))
            chunks = [done]
        else:
            parts = [asked[start : start + CHUNK] for start in range(0, len(asked), CHUNK)]
            chunks = [self._threads.submit(self._grade_chunk, part) for part in parts]
        return Grading(chunks, own, functools.partial(self._rewards, items))

    def correct_weight(self, task: int) -> float:
        """The weight of a task's `correct` part, which holds what an environment pays."""
        config = self._configs[task]
        return config.rewards.get("correct", 0.0) if config.correct == "correct" else 0.0

    def check(self, prompts: Sequence[TaskPrompt]) -> list[str]:
        """Check that everything can be graded here; returns lines in which tasks and tools describe how code runs on
        this machine.

        Raises ValueError if a task or a tool cannot work here, or a reward function asks for a column that a prompt's
        row lacks.
        """
        for each in prompts:
            self._functions.check(each.task, each.prompt)
        asked = dict.fromkeys(each.task for each in prompts)
        checks = dict.fromkeys(check for number in asked for check in machine_checks(self._configs[number]))
        return list(dict.fromkeys(str(check()) for check in checks))

    def take_judged(self) -> JudgeCounts:
        """Counts of all judges' requests since the last call of this method."""
        return sum((judge.take_counts() for judge in self._judges.values()), JudgeCounts())

    def close(self) -> None:
        """End the processes at once and drop unfinished grades."""
        self._functions.close()
        self._pool.close()
        self._threads.shutdown(cancel_futures=True)

    def _rewards(
        self, items: Sequence[Submission], outcomes: list[Outcome], own: list[dict[str, Part]]
    ) -> list[Reward]:
        """The rewards of completions; items whose task uses only functions have no outcome."""
        graded = iter(outcomes)
        rewards = []
        for (asked, completion), parts in zip(items, own, strict=True):
            config = self._configs[asked.task]
            if self._asks((asked, completion)):
                outcome = next(graded)
            else:
                outcome = NOT_ASKED if completion.paid is None else Outcome("graded", correct=completion.paid)
            applies = completion.paid is not None or not self._scored_by_environment[asked.task]
            correct, stopped = outcome.correct if applies else None, outcome.kind == "stopped"
            reward = make_reward(
                config, completion, self._reward_options, correct=correct, own=parts, timed_out=stopped
            )
            graded_later = any(name not in self._judges for name in named_parts(config))
            if not (self._warned_unrewarded or graded_later or reward.weights):
                self._warned_unrewarded = True
                logger.warning(
                    "no reward applies to prompt %s of %s: each function returned None, or get_reward did; its answers"
                    " are left out, as others will be",
                    asked.prompt.id,
                    self._labels[asked.task],
                )
            rewards.append(reward)
        return rewards

    def _asks(self, item: Submission) -> bool:
        """Whether the task itself grades an answer, instead of a function or the environment."""
        task, paid = item[0].task, item[1].paid
        return paid is None and self._configs[task].correct == "correct" and not self._scored_by_environment[task]

    def _grade_chunk(self, submissions: Sequence[Submission]) -> list[Outcome]:
        """Grade a chunk in one of the processes. Runs in a thread."""
        try:
            found = self._pool.answers([_item(submission) for submission in submissions])
        except UnsendableError as error:
            prompt, _ = submissions[0]
            raise GradingError(
                f"{self._labels[prompt.task]}, prompt {prompt.prompt.id}: it cannot be sent to a grading process"
                f" ({error}); give its metadata plain values, or set grading.workers to 0"
            ) from error
        return self._without_bugs(submissions, [_outcome(each) for each in found])

    def _without_bugs(self, submissions: Sequence[Submission], outcomes: list[Outcome]) -> list[Outcome]:
        """Check the outcomes: raise if one is a bug, and log once if one was stopped."""
        for (asked, graded), outcome in zip(submissions, outcomes, strict=True):
            if outcome.kind == "graded":
                continue
            name = f"{self._labels[asked.task]}, prompt {asked.prompt.id}"
            if outcome.kind == "bug":
                prompt = asked.prompt
                texts = {"question": prompt.question, "reference answer": prompt.answer, "completion": graded.text}
                told = "".join(f"--- {what}\n{without_middle(text, SHOWN_CHARS)}\n" for what, text in texts.items())
                raise GradingError(
                    f"the grader of {name} failed; fix it, then continue the run.\n{told}--- {outcome.message}"
                )
            if not self._warned:
                self._warned = True
                logger.warning(
                    "grading of %s was stopped: %s; it counts as %s, and so will later cases",
                    name,
                    outcome.message,
                    f"{outcome.correct:.2g}" if outcome.correct else "wrong",
                )
        return outcomes


def _item(submission: Submission) -> Item:
    """The part of a submission that a worker needs."""
    prompt, graded = submission
    return Item(prompt.task, prompt.prompt, graded.text)


def _outcome(found: Answer | Lost) -> Outcome:
    if isinstance(found, Lost):
        return Outcome("stopped", message=found.why)
    return Outcome("bug", message=found.problem) if found.problem else found.value
