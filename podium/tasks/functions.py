"""Reward functions: per completion or per group, plain or async, called by parameter name.

    def short(num_tokens: int) -> float: ...
    def best(completions: list[str], answer: str) -> list[float]: ...
    @reward(timeout_s=20, retries=2, concurrency=64)
    async def judge(completion: str, row: dict) -> float: ...

A function gets the arguments that its parameters name:

    completion    the text; the function returns one number
    completions   the texts of all completions of the prompt; the function returns one number for each
    num_tokens    the completion's tokens; with `completions`, a list
    transcript    the messages of a conversation after its prompt; with `completions`, `transcripts`, a list of them
    environment   the environment of a conversation after its end
    row           the prompt's row of the data: `question`, `answer` and whatever else it has
    any other     the row's column of that name, or the parameter's default

Functions written for TRL's GRPOTrainer run unchanged. A function with `**kwargs`, `prompts` or `completion_ids` is
called as TRL calls it: once for a prompt's group, with lists that have one element for each completion.

    def matches(completions, ground_truth, **kwargs): return [float(t in c) for c, t in zip(completions, ground_truth)]

    prompts          the question, or the row's messages where its prompt is a conversation
    completions      the texts, or where the prompt is a conversation `[{"role": "assistant", "content": text}]`; of
                     conversations with tools or an environment all messages after the prompt
    completion_ids   the completions' tokens
    environments     the environments of the completions' conversations after their ends
    every column     copies of the row's value; in `**kwargs` those that no parameter names

A list of values may contain None if the function does not apply to a prompt: that completion's reward is then the
sum of its other parts.

A config names a function by import path (`rewards: {correct: 1.0, mypackage.rewards:short: 0.1}`). Functions run in the
trainer's process while other prompts are still being answered: each call in a thread, or on an event loop if it is
async. A call that exceeds its time limit counts as 0 and in `grading/timeouts`, but a plain function's thread cannot be
ended: code that may hang on a model's text belongs in a task's `grade`, which runs in its own process. Whatever else a
function raises stops the run with its traceback, also SystemExit, KeyboardInterrupt and a TimeoutError of its own.
"""

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from podium.config.imports import imported
from podium.plain import copied, number_of, traceback_of
from podium.tasks.event_loop import LoopThread
from podium.tasks.task import Graded, Prompt
from podium.terminal import harmless

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
"""Seconds before the first retry of a call; doubled for each subsequent retry."""
STUCK_S = 1.0
"""Seconds in which the loop of async functions must respond after a call was too slow."""
SHOWN_CHARS = 2_000
"""Characters of the question and of a completion shown in an error."""
CANCELLED = (
    "the call was cancelled: some code on the event loop that all async functions share cancels the tasks of others,"
    " such as those of asyncio.all_tasks()"
)

TRL_NAMES = frozenset({"prompts", "completion_ids", "environments"})
"""Parameter names that only functions for TRL's GRPOTrainer use."""
OF_ENVIRONMENT = frozenset({"environment", "environments"})
OF_TRAINER = frozenset({"trainer_state", "log_extra", "log_metric"})
"""Arguments that TRL's trainer passes and Podium does not; parameters with these names need a default."""

Function = TypeVar("Function", bound=Callable[..., object])


class CallSettings(NamedTuple):
    """How a reward function is called."""

    timeout_s: float = 60.0
    """Time limit of one call in seconds."""
    retries: int = 0
    """Maximum number of retries of a call that raised or timed out."""
    concurrency: int = 16
    """Maximum number of concurrent calls."""


class FunctionError(ValueError):
    """A reward function raised, or did not return a finite number; the message has its traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(harmless(message))  # the message may quote text written by a model


class _RaisedError(Exception):
    """Carries the traceback of what a function raised."""


class Part(NamedTuple):
    """One part of a completion's reward."""

    value: float | None
    """None: the function does not apply to the completion's prompt."""
    timed_out: bool = False


def reward(*, timeout_s: float = 60.0, retries: int = 0, concurrency: int = 16) -> Callable[[Function], Function]:
    """Decorate a reward function to set its time limit, retries and concurrency.

    Args:
        timeout_s: time limit of one call in seconds; a slower call counts as 0.
        retries: number of retries of a call that raises or times out, after 0.5 s, 1 s, 2 s, ...
        concurrency: maximum number of concurrent calls.
    """
    if not (timeout_s > 0 and retries >= 0 and concurrency >= 1):
        given = f"timeout_s={timeout_s}, retries={retries}, concurrency={concurrency}"
        raise ValueError(f"reward({given}): timeout_s must be above 0, retries 0 or more, concurrency 1 or more")

    def mark(function: Function) -> Function:
        function.__podium_reward__ = CallSettings(timeout_s, retries, concurrency)  # type: ignore[attr-defined]
        return function

    return mark


class RewardFunction:
    """A reward function, and the arguments that its signature names."""

    def __init__(self, name: str) -> None:
        """Import the function with this name. Raises ValueError if it does not exist, or its signature is
        unsuitable.
        """
        self.name = name
        self.call = imported(name, what="a part of the reward")
        if not callable(self.call):
            raise ValueError(f"{name!r} is {self.call!r}, not a function")
        parameters = inspect.signature(self.call).parameters
        self.takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        unnamed = [each.name for each in parameters.values() if each.kind is inspect.Parameter.VAR_POSITIONAL]
        if (unnamed or not parameters) and not self.takes_all:
            problem = f"*{unnamed[0]} does not" if unnamed else "it has none"
            rule = "completion, completions, num_tokens, row, columns of the data, or TRL's with **kwargs"
            raise ValueError(
                f"{name!r}: its parameter names determine its arguments, and {problem}; name its parameters: {rule}"
            )
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.parameters = {key: each for key, each in parameters.items() if each.kind in named}
        self.like_trl = self.takes_all or not TRL_NAMES.isdisjoint(self.parameters)
        self.of_environment = not OF_ENVIRONMENT.isdisjoint(self.parameters)
        """Whether a parameter requests environments."""
        self.of_group: bool = self.like_trl or "completions" in self.parameters
        if self.of_group and "completion" in self.parameters:
            beside = "completions" if "completions" in self.parameters else "TRL's prompts, completion_ids or **kwargs"
            raise ValueError(f"{name!r} has both completion and {beside}; keep one")
        call = getattr(self.call, "__call__", self.call)  # noqa: B004 - an object's method may be async
        self.is_async: bool = inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(call)
        self.settings: CallSettings = getattr(self.call, "__podium_reward__", CallSettings())

    def check(self, prompt: Prompt, *, environment: bool = False) -> None:
        """Raise ValueError if the prompt's row lacks a column that the function needs.

        `environment`: whether the task has an environment.
        """
        self._arguments(prompt, [Graded(text="", tokens=(), environment=object() if environment else None)])

    def arguments(self, prompt: Prompt, group: Sequence[Graded]) -> list[dict[str, object]]:
        """The arguments of each call: one call for the group, or one per completion."""
        calls = [group] if self.of_group else [[graded] for graded in group]
        return [self._arguments(prompt, each) for each in calls]

    def _arguments(self, prompt: Prompt, group: Sequence[Graded]) -> dict[str, object]:
        known = _known_to_trl(prompt, group) if self.like_trl else _known(prompt, group, of_group=self.of_group)
        for name, parameter in self.parameters.items():
            if name in known or parameter.default is not parameter.empty:
                continue
            if name in OF_ENVIRONMENT:
                raise ValueError(f"reward {self.name} asks for {name!r}, and its task has no `environment`; set one")
            if name in OF_TRAINER:
                raise ValueError(
                    f"reward {self.name} asks for {name!r}, which exists only in TRL; give the parameter a default"
                )
            raise ValueError(
                f"reward {self.name} asks for {name!r}, and the row of prompt {prompt.id} has"
                f" {', '.join(_row(prompt))}; rename the parameter or the column"
            )
        return {name: value for name, value in known.items() if self.takes_all or name in self.parameters}


def _row(prompt: Prompt) -> dict[str, object]:
    """The prompt's row of the data, including its question and answer under these names."""
    return {"question": prompt.question, "answer": prompt.answer, **prompt.metadata}


def _known(prompt: Prompt, group: Sequence[Graded], *, of_group: bool) -> dict[str, object]:
    """The values that parameters can name: the prompt's columns, and its completions or the single completion."""
    row = copied(_row(prompt))
    texts = [each.text for each in group]
    counts = [each.num_tokens for each in group]
    transcripts = [copied(list(each.transcript)) for each in group]
    of_each: dict[str, object] = {"completion": texts[0], "num_tokens": counts[0], "transcript": transcripts[0]}
    if group[0].environment is not None:
        of_each["environment"] = group[0].environment
    of_all = {"completions": texts, "num_tokens": counts, "transcripts": transcripts} if of_group else {}
    return row | {"row": row} | of_each | of_all


def _known_to_trl(prompt: Prompt, group: Sequence[Graded]) -> Mapping[str, object]:
    """The arguments that TRL's trainer would pass: lists with one element per completion."""
    row = _row(prompt)
    messages = None if prompt.messages is None else [dict(each) for each in prompt.messages]
    columns = {"row": row} | {name: value for name, value in row.items() if name != "prompt"}
    environments = [each.environment for each in group]
    of_environments = {} if environments[0] is None else {"environments": environments}
    return (
        {name: [copied(value) for _ in group] for name, value in columns.items()}
        | of_environments
        | {
            "num_tokens": [each.num_tokens for each in group],
            "prompts": [prompt.question if messages is None else copied(messages) for _ in group],
            "completions": [
                copied(list(each.transcript))
                or (each.text if messages is None else [{"role": "assistant", "content": each.text}])
                for each in group
            ],
            "completion_ids": [list(each.tokens) for each in group],
        }
    )


class GroupFunction(Protocol):
    """What grades completions of a prompt: a `RewardFunction`, or a judge (`podium.tasks.judges`)."""

    name: str
    """Name of its part of the reward."""
    settings: CallSettings
    """Time limit, retries and concurrency of calls."""
    is_async: bool
    """Whether `call` is a coroutine function; otherwise it is called in a thread."""
    of_group: bool
    """Whether `call` returns a list of numbers or None instead of one number."""

    @property
    def call(self) -> Callable[..., Any]:
        """The function."""
        ...

    def check(self, prompt: Prompt, *, environment: bool = False) -> None:
        """Raise ValueError if the prompt lacks what the function needs."""
        ...

    def arguments(self, prompt: Prompt, group: Sequence[Graded]) -> list[dict[str, object]]:
        """The arguments of each call; every call is for the same number of the group's completions."""
        ...


class FunctionGrader:
    """Calls the reward functions of a mixture's tasks, on a thread with its own event loop."""

    def __init__(
        self,
        rewards: Sequence[Sequence[str]],
        environments: Sequence[bool],
        judges: Mapping[str, GroupFunction] = MappingProxyType({}),
    ) -> None:
        """Create it without starting the thread. Args:
            rewards: names of each task's functions and judges.
            environments: whether each task has an environment.
            judges: settings of the judges, by name.

        Raises:
            ValueError: a name is invalid.
        """
        self._environments = list(environments)
        self._functions: Sequence[Sequence[GroupFunction]] = [
            [judges.get(name) or RewardFunction(name) for name in names] for names in rewards
        ]
        self._loop = LoopThread("rewards")
        self._users_loop = LoopThread("async rewards")
        """Runs async functions; a function that blocks this loop does not delay the time limits on `_loop`."""
        self._limits: dict[str, asyncio.Semaphore] = {}
        self._warned: set[str] = set()
        self._folder = _working_directory()
        self._running = 0
        """Calls in progress; one of them may have changed the working directory for a while."""

    def check(self, task: int, prompt: Prompt) -> None:
        """Raise ValueError if a function of the task asks for a column that the prompt's row lacks."""
        for function in self._functions[task]:
            function.check(prompt, environment=self._environments[task])

    def submit(self, task: int, prompt: Prompt, group: Sequence[Graded]) -> "Future[list[dict[str, Part]]]":
        """Start grading a prompt's completions; the future returns the parts of each completion, by function name.

        The future raises FunctionError if a function has a bug.
        """
        if not self._functions[task]:
            done: Future[list[dict[str, Part]]] = Future()
            done.set_result([{} for _ in group])
            return done
        return self._loop.submit(self._group(task, prompt, group))

    def close(self) -> None:
        """Cancel running calls and end the threads."""
        self._loop.end()
        self._users_loop.end()

    def _begun(
        self, function: GroupFunction, arguments: Mapping[str, object], completions: int
    ) -> "asyncio.Future[list[Part]]":
        """Begin a call; the future's result is its values. No code of the user runs on the grader's own loop."""
        if not function.is_async:
            # results are converted to numbers there too: a generator, or a number's own conversion, is also the user's
            # code
            return _in_thread(lambda: _parts(function, function.call(**arguments), completions))

        async def awaited() -> list[Part]:
            with _named_errors():
                try:
                    return _parts(function, await function.call(**arguments), completions)
                except asyncio.CancelledError as error:
                    error.add_note(CANCELLED)
                    raise

        return asyncio.wrap_future(self._users_loop.submit(awaited()))

    async def _replace_stuck_loop(self) -> None:
        """Use a new loop for later calls if an async function blocks the loop instead of awaiting."""
        loop = self._users_loop
        alive = asyncio.wrap_future(loop.submit(asyncio.sleep(0)))
        await asyncio.wait((alive,), timeout=STUCK_S)
        if not alive.done() and self._users_loop is loop:
            self._users_loop = LoopThread("async rewards")

    async def _group(self, task: int, prompt: Prompt, group: Sequence[Graded]) -> list[dict[str, Part]]:
        functions = self._functions[task]
        try:
            columns = await asyncio.gather(*(self._values(function, prompt, group) for function in functions))
        except FunctionError as error:
            texts = "".join(f"\n--- a completion of it: {graded.text[:SHOWN_CHARS]!r}" for graded in group[:1])
            asked = f"--- prompt {prompt.id}: {prompt.question[:SHOWN_CHARS]!r}{texts}"
            raise FunctionError(f"{error}\n{asked}\nfix it, then continue the run") from None
        return [
            {function.name: column[index] for function, column in zip(functions, columns, strict=True)}
            for index in range(len(group))
        ]

    async def _values(self, function: GroupFunction, prompt: Prompt, group: Sequence[Graded]) -> list[Part]:
        """The function's value for each completion of a group."""
        limit = self._limits.setdefault(function.name, asyncio.Semaphore(function.settings.concurrency))

        async def called(arguments: Mapping[str, object], completions: int) -> list[Part]:
            async with limit:
                self._running += 1
                try:
                    parts = await self._called(function, arguments, completions)
                finally:
                    self._running -= 1
                self._restore_folder(function)
                return parts

        calls = function.arguments(prompt, group)
        found = await asyncio.gather(*(called(each, len(group) // len(calls)) for each in calls))
        return [part for parts in found for part in parts]

    def _restore_folder(self, function: GroupFunction) -> None:
        """Change the working directory back if it is another one after the last running call, and warn once: the run
        would write its files elsewhere. Not an error, because `contextlib.chdir` on several threads may do this too.
        """
        now = _working_directory()
        if self._running or not self._folder or now == self._folder:
            return
        os.chdir(self._folder)
        if "chdir" not in self._warned:
            self._warned.add("chdir")
            logger.warning(
                "reward %s, or one that ran at the same time, left the working directory at %s; it is changed back to "
                "%s, where the run's paths start; use absolute paths instead",
                function.name,
                now or "a deleted one",
                self._folder,
            )

    async def _called(self, function: GroupFunction, arguments: Mapping[str, object], completions: int) -> list[Part]:
        """The values that one call returns for its completions; 0 if it timed out. Raises FunctionError."""
        settings, problem = function.settings, None
        for attempt in range(settings.retries + 1):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            begun = self._begun(function, arguments, completions)
            begun.add_done_callback(_ignore_late_errors)
            await asyncio.wait((begun,), timeout=settings.timeout_s)
            if begun.cancelled():
                problem = CANCELLED
            elif begun.done():
                try:
                    return begun.result()
                except _RaisedError as raised:
                    problem = str(raised)
            else:
                problem = None
                begun.cancel()
                if function.is_async:
                    await self._replace_stuck_loop()
        if problem is not None:
            raise FunctionError(f"reward {function.name} failed:\n{problem}")
        if function.name not in self._warned:
            self._warned.add(function.name)
            logger.warning(
                "reward %s took longer than %g s; it counts as 0, and so will later cases",
                function.name,
                settings.timeout_s,
            )
        return [Part(0.0, timed_out=True)] * completions


def _working_directory() -> str:
    """The process's working directory; empty if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _parts(function: GroupFunction, result: object, completions: int) -> list[Part]:
    """Convert a call's result to one value per completion. Raises FunctionError if it is not a number for each."""
    if not function.of_group:
        return [Part(_number(function, result))]
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping):
        raise FunctionError(
            f"reward {function.name} returned {result!r:.80} for {completions} completions; return a list with a"
            " number, or None, for each"
        )
    values = list(itertools.islice(result, completions + 1))
    if len(values) != completions:
        count = f"more than {completions}" if len(values) > completions else len(values)
        raise FunctionError(f"reward {function.name} returned {count} numbers for {completions} completions")
    return [Part(None if value is None else _number(function, value)) for value in values]


def _number(function: GroupFunction, value: object) -> float:
    """Convert a value to a finite float. Raises FunctionError for anything else, including numbers as text."""
    number = number_of(value)
    if number is None:
        raise FunctionError(
            f"reward {function.name} returned {value!r:.80}; a reward is a finite number, within float32"
        )
    return number


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Turn whatever a user's function raises into an error that threads and loops pass on; FunctionErrors stay."""
    try:
        yield
    except FunctionError:
        raise
    except (
        BaseException
    ) as error:  # SystemExit, KeyboardInterrupt, StopIteration, and a CancelledError that it raises itself
        raise _RaisedError(traceback_of(error)) from None


def _in_thread(call: Callable[[], list[Part]]) -> "asyncio.Future[list[Part]]":
    """Run the call in a daemon thread (ThreadPoolExecutor's threads would keep the process alive)."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[Part]] = loop.create_future()

    def give(pass_on: Callable[[], None]) -> None:
        if not future.done():  # otherwise the call has timed out
            pass_on()

    def run() -> None:
        try:
            with _named_errors():
                pass_on = functools.partial(future.set_result, call())
        except Exception as error:
            pass_on = functools.partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(give, pass_on)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return future


def _ignore_late_errors(call: "asyncio.Future[list[Part]]") -> None:
    """Keep asyncio from logging an exception that a call raises after its time limit."""
    if not call.cancelled():
        call.exception()
