"""Grades completions in separate processes, in parallel with the training step, with a hard time limit for each answer.

Nothing that a model writes can stop a run: a worker that times out or dies on an answer is replaced, and the answer
counts as wrong. A bug in a grader does stop the run, with an error that contains everything needed to reproduce it.
"""

import contextlib
import functools
import itertools
import logging
import pickle
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from podium.config.schema import GradingConfig, TaskConfig
from podium.plain import message_of
from podium.tasks.child_environment import child_environment
from podium.tasks.conversations.environment_forms import machine_checks
from podium.tasks.functions import FunctionGrader, Part
from podium.tasks.grading_worker import BEGUN, Item, Outcome, grade_item
from podium.tasks.judges import Judge, JudgeCounts, ReplyStore
from podium.tasks.mixture import TaskPrompt
from podium.tasks.registry import make_task, task_labels
from podium.tasks.rewards import LengthLimits, label, make_reward, named_parts, own_functions
from podium.tasks.task import Graded, Reward
from podium.tasks.worker_process import START_LIMIT_S, WorkerProcess
from podium.terminal import harmless

logger = logging.getLogger(__name__)

POLL_S = 0.2
"""Seconds between two calls of `on_poll` while rewards are awaited."""
BEGIN_LIMIT_S = 5.0
"""Seconds within which an idle process must accept an item and begin to grade it."""
MOST_LOST = 3
"""Maximum number of consecutive processes that end between two answers."""
CHUNK = 16
"""Maximum number of items sent to a worker at a time."""
SHOWN_CHARS = 2_000
"""Characters of the question and the completion shown in an error, from each end."""


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

        `tasks` are in the order of `TaskPrompt.task`; `max_new_tokens` is for the `length` reward. Replies of judges
        are kept in the file `replies`, if set.

        Raises ValueError if a reward function or a judge cannot be used.
        """
        self._configs = list(tasks)
        self._labels = task_labels(tasks)
        self._limits = LengthLimits(max_new_tokens, config.overlong_buffer_tokens)
        self._timeout_s = config.timeout_s
        self._variables = child_environment(config.judges)
        self._warned = False
        self._warned_unrewarded = False
        self._closed = False
        self._not_started: OSError | None = None
        """Why a process could not be restarted; if set, nothing can be graded any more."""
        self._own_tasks = [make_task(task) for task in tasks] if config.workers == 0 else []
        used = {name for task in tasks for name in named_parts(task)}
        asked = [judge for judge in config.judges if judge.name in used]
        store = ReplyStore(replies if asked else None)
        self._judges = {judge.name: Judge(judge, store) for judge in asked}
        self._functions = FunctionGrader(
            [[*own_functions(task), *(name for name in named_parts(task) if name in self._judges)] for task in tasks],
            [task.environment is not None for task in tasks],
            self._judges,
        )
        self._threads = ThreadPoolExecutor(config.workers or 1, thread_name_prefix="grading")  # one thread per worker
        self._workers = {_Worker(self._configs, self._timeout_s, self._variables) for _ in range(config.workers)}
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def grade(self, items: Sequence[Submission]) -> list[Reward]:
        """Grade completions; returns their rewards in order."""
        return self.submit(items).result()

    def submit(self, items: Sequence[Submission]) -> Grading:
        """Start grading completions and return at once; `.result()` of the return value waits for the rewards.

        Consecutive items with the same prompt are passed to the user's reward functions as one group.
        """
        groups = [list(group) for _, group in itertools.groupby(items, key=_prompt_key)]
        own = [self._submit_own(group) for group in groups]
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
        self._closed = True
        self._functions.close()
        for worker in list(self._workers):
            worker.stop()
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().discard()

    def _submit_own(self, group: Sequence[Submission]) -> "Future[list[dict[str, Part]]]":
        prompt = group[0][0]
        return self._functions.submit(prompt.task, prompt.prompt, [graded for _, graded in group])

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
            correct, stopped = outcome.correct, outcome.kind == "stopped"
            reward = make_reward(config, completion, self._limits, correct=correct, own=parts, timed_out=stopped)
            graded_later = any(name not in self._judges for name in named_parts(config))
            if not (
                self._warned_unrewarded or graded_later or any(label(name) in reward.parts for name in config.rewards)
            ):
                self._warned_unrewarded = True
                logger.warning(
                    "no reward applies to prompt %s of %s: each function returned None; its answers are left out, as"
                    " others will be",
                    asked.prompt.id,
                    self._labels[asked.task],
                )
            rewards.append(reward)
        return rewards

    def _asks(self, item: Submission) -> bool:
        """Whether the task itself grades an answer, instead of a function or the environment."""
        prompt, graded = item
        return graded.paid is None and self._configs[prompt.task].correct == "correct"

    def _grade_chunk(self, submissions: Sequence[Submission]) -> list[Outcome]:
        """Grade a chunk; continue on another worker if one is lost. Runs in a thread."""
        outcomes: list[Outcome] = []
        lost = 0
        while len(outcomes) < len(submissions) and not self._closed:
            left = submissions[len(outcomes) :]
            worker = self._idle.get()
            try:
                self._check_started()
                found = worker.grade(self._pickled(left), [prompt.task for prompt, _ in left])
                outcomes += found
                lost = 0 if found else lost + 1
                if lost == MOST_LOST:
                    raise GradingError(
                        f"{lost} grading processes in a row ended or stopped before they began to grade: code that"
                        " runs when the tasks are created ends them"
                    )
            except BaseException:
                worker.stop()  # this worker's remaining answers would not be read
                if self._closed:  # `close` ended the worker, perhaps before it was ready
                    break
                raise
            finally:
                self._idle.put(self._living(worker))
        if self._closed:
            raise CancelledError("the grader was closed before all answers were graded")
        return self._without_bugs(submissions, outcomes)

    def _pickled(self, submissions: Sequence[Submission]) -> bytes:
        """The pickled parts of submissions that a worker needs. Raises GradingError if they cannot be pickled."""
        try:
            return pickle.dumps([_item(submission) for submission in submissions])
        except Exception as error:  # a row of a user's task may hold objects that cannot be pickled
            prompt, _ = submissions[0]
            raise GradingError(
                f"{self._labels[prompt.task]}, prompt {prompt.prompt.id}: it cannot be sent to a grading process"
                f" ({message_of(error)}); give its metadata plain values, or set grading.workers to 0"
            ) from error

    def _check_started(self) -> None:
        """Raise GradingError if a process could not be started."""
        if self._not_started is not None:
            raise GradingError(
                f"a grading process ended and another could not be started ({self._not_started.strerror}); free memory"
                " or processes on this machine, or lower grading.workers, then continue the run"
            )

    def _living(self, worker: "_Worker") -> "_Worker":
        """The worker, or its replacement if it has died; if no process can be started, the dead worker, so that no
        thread waits.
        """
        if worker.alive() or self._closed or self._not_started is not None:
            return worker
        try:
            return self._replaced(worker)
        except OSError as error:
            self._not_started = error
            return worker

    def _replaced(self, worker: "_Worker") -> "_Worker":
        """Start a new process in place of one that has ended."""
        worker.discard()
        self._workers.discard(worker)
        replacement = _Worker(self._configs, self._timeout_s, self._variables)
        self._workers.add(replacement)
        return replacement

    def _without_bugs(self, submissions: Sequence[Submission], outcomes: list[Outcome]) -> list[Outcome]:
        """Check the outcomes: raise if one is a bug, and log once if one was stopped."""
        for (asked, graded), outcome in zip(submissions, outcomes, strict=True):
            if outcome.kind == "graded":
                continue
            name = f"{self._labels[asked.task]}, prompt {asked.prompt.id}"
            if outcome.kind == "bug":
                message = (
                    f"the grader of {name} failed; fix it, then continue the run.\n"
                    f"--- question\n{_cut(asked.prompt.question)}\n"
                    f"--- reference answer\n{_cut(asked.prompt.answer)}\n--- completion\n{_cut(graded.text)}\n"
                    f"--- {outcome.message}"
                )
                raise GradingError(message)
            if not self._warned:
                self._warned = True
                logger.warning(
                    "grading of %s was stopped: %s; it counts as %s, and so will later cases",
                    name,
                    outcome.message,
                    f"{outcome.correct:.2g}" if outcome.correct else "wrong",
                )
        return outcomes


class _Worker:
    """A grading process."""

    def __init__(self, configs: list[TaskConfig], timeout_s: float, variables: Mapping[str, str]) -> None:
        self._limits_s: list[float] = []
        """Time limit of an answer of each task in seconds; the process reports it once it is ready."""
        self._process = WorkerProcess("podium.tasks.grading_worker", variables)
        with contextlib.suppress(EOFError, TimeoutError):  # `grade` reports it
            self._process.channel.send(pickle.dumps((configs, timeout_s)), START_LIMIT_S)

    def grade(self, items: bytes, tasks: Sequence[int]) -> list[Outcome]:
        """One outcome per item of a pickled list, whose tasks are given; fewer if the process was lost. If it was lost
        while grading an item, rather than between two items, the last outcome is `stopped`.
        """
        self._wait_until_ready()
        channel, outcomes, begun, limit_s = self._process.channel, list[Outcome](), False, 0.0
        try:
            channel.send(pickle.dumps((len(tasks), items)), BEGIN_LIMIT_S)
            for task in tasks:
                limit_s = self._limits_s[task]
                begun = channel.receive(BEGIN_LIMIT_S) == BEGUN
                outcomes.append(pickle.loads(channel.receive(limit_s)))
                begun = False
        except (TimeoutError, EOFError) as error:
            late = isinstance(error, TimeoutError)
            self.stop()
            if begun:
                ended = f"its process ended with code {self._process.exit_code}"
                message = f"it took longer than {limit_s:g} s" if late else ended
                outcomes.append(Outcome("stopped", message=message))
        return outcomes

    def alive(self) -> bool:
        """Whether it can still grade."""
        return self._process.exit_code is None

    def stop(self) -> None:
        """End the process and its children; can be called from any thread."""
        self._process.stop()

    def discard(self) -> None:
        """End the process and close this end of the connection."""
        self._process.close()

    def _wait_until_ready(self) -> None:
        if self._limits_s:
            return
        try:
            self._limits_s = pickle.loads(self._process.channel.receive(START_LIMIT_S))
        except (EOFError, TimeoutError):
            self.stop()
            raise RuntimeError(
                f"a grading process did not create its tasks: it ended (see above), or took {START_LIMIT_S:g} s"
            ) from None


def _prompt_key(submission: Submission) -> tuple[int, str]:
    prompt, _ = submission
    return prompt.task, prompt.prompt.id


def _item(submission: Submission) -> Item:
    """The part of a submission that a worker needs."""
    prompt, graded = submission
    return Item(prompt.task, prompt.prompt, graded.text)


def _cut(text: str) -> str:
    """A text for an error message: without its middle if it is very long."""
    if len(text) > 2 * SHOWN_CHARS:
        text = f"{text[:SHOWN_CHARS]}\n[... {len(text) - 2 * SHOWN_CHARS} characters ...]\n{text[-SHOWN_CHARS:]}"
    return text
