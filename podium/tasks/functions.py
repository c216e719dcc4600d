"""Parts of the reward that are functions: of one completion or of a prompt's whole group, plain or async.

    def short(num_tokens: int) -> float: ...
    def best(completions: list[str], answer: str) -> list[float]: ...
    @reward(timeout_s=20, retries=2, concurrency=64)
    async def judge(completion: str, row: dict) -> float: ...

A function is given what its parameters are named after:

    completion    the text; the function returns one number
    completions   the texts of all completions of the prompt; the function returns one number for each
    num_tokens    the completion's tokens; beside `completions`, a list
    row           the prompt's row of the data: `question`, `answer` and whatever else it has
    any other     the row's column of that name, or the parameter's default

A config names it by import path (`rewards: {correct: 1.0, mypackage.rewards:short: 0.1}`). Functions run in the
trainer's process, each call in a thread or, if it is async, on one event loop, while other prompts are still answered.
A call that takes longer than its limit counts as 0 and is counted in `grading/timeouts`, but a plain function's thread
cannot be ended: what may hang on a model's text belongs in a task's `grade`, which has a process of its own.
"""

import asyncio
import contextlib
import inspect
import logging
import math
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from podium.config.imports import imported
from podium.tasks.task import Graded, Prompt

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
"""Seconds before the first repetition of a call; each later pause is twice as long."""
SHOWN_CHARS = 2_000
"""Characters of a question and of a completion that an error shows."""

Function = TypeVar("Function", bound=Callable[..., Any])


class CallSettings(NamedTuple):
    """How a reward function is called."""

    timeout_s: float = 60.0
    """Time limit of one call in seconds."""
    retries: int = 0
    """How often a call that raised or took too long is repeated."""
    concurrency: int = 16
    """The most calls at the same time."""


class FunctionError(ValueError):
    """A reward function raised, or did not return a finite number; the message has its traceback."""


class Part(NamedTuple):
    """The value of one part of a completion's reward."""

    value: float
    timed_out: bool = False


def reward(*, timeout_s: float = 60.0, retries: int = 0, concurrency: int = 16) -> Callable[[Function], Function]:
    """Decorate a reward function to set how it is called.

    Args:
        timeout_s: seconds of one call; a slower one counts as 0.
        retries: how often a call that raises or takes too long is repeated, after 0.5 s, 1 s, 2 s, ...
        concurrency: calls at once.
    """
    if not (timeout_s > 0 and retries >= 0 and concurrency >= 1):
        given = f"timeout_s={timeout_s}, retries={retries}, concurrency={concurrency}"
        raise ValueError(f"reward({given}): timeout_s must be above 0, retries 0 or more, concurrency 1 or more")

    def mark(function: Function) -> Function:
        function.__podium_reward__ = CallSettings(timeout_s, retries, concurrency)  # type: ignore[attr-defined]
        return function

    return mark


class RewardFunction:
    """A reward function and the arguments that its signature asks for."""

    def __init__(self, name: str) -> None:
        """Import the function of that name. Raises ValueError if there is none, or its signature does not fit."""
        self.name = name
        self.call = imported(name, what="a part of the reward")
        if not callable(self.call):
            raise ValueError(f"{name!r} is {self.call!r}, not a function")
        self.parameters = inspect.signature(self.call).parameters
        kinds = {each.kind for each in self.parameters.values()}
        if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} or not self.parameters:
            rule = "name what it reads: completion, completions, num_tokens, row, or columns of the data"
            raise ValueError(f"{name!r}: its parameters say what it is given; {rule}")
        self.of_group = "completions" in self.parameters
        if self.of_group and "completion" in self.parameters:
            raise ValueError(f"{name!r} has both completion and completions; keep one")
        call = getattr(self.call, "__call__", self.call)  # noqa: B004 - an object's method may be async
        self.is_async = inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(call)
        self.settings: CallSettings = getattr(self.call, "__podium_reward__", CallSettings())

    def check(self, prompt: Prompt) -> None:
        """Raise ValueError if the prompt's row lacks a column that the function asks for."""
        self._arguments(prompt, [Graded(text="", num_tokens=0)])

    def arguments(self, prompt: Prompt, group: Sequence[Graded]) -> list[dict[str, object]]:
        """The arguments of each call: one call for the group, or one for each of its completions."""
        calls = [group] if self.of_group else [[graded] for graded in group]
        return [self._arguments(prompt, each) for each in calls]

    def _arguments(self, prompt: Prompt, group: Sequence[Graded]) -> dict[str, object]:
        texts, counts = [each.text for each in group], [each.num_tokens for each in group]
        row = {"question": prompt.question, "answer": prompt.answer, **prompt.metadata}
        known = {"row": row, "completions": texts, "completion": texts[0]}
        known["num_tokens"] = counts if self.of_group else counts[0]
        found = {}
        for name, parameter in self.parameters.items():
            if name in known or name in row:
                found[name] = known[name] if name in known else row[name]
            elif parameter.default is parameter.empty:
                raise ValueError(
                    f"reward {self.name} asks for {name!r}, and the row of prompt {prompt.id} has {', '.join(row)};"
                    " rename the parameter or the column"
                )
        return found


class FunctionGrader:
    """Calls the reward functions of a mixture's tasks, on a thread with an event loop of its own."""

    def __init__(self, rewards: Sequence[Sequence[str]]) -> None:
        """Start nothing yet. `rewards` maps names to functions, per task. Raises ValueError for a wrong name."""
        self._functions = [[RewardFunction(name) for name in names] for names in rewards]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limits: dict[str, asyncio.Semaphore] = {}
        self._warned: set[str] = set()

    def check(self, task: int, prompt: Prompt) -> None:
        """Raise ValueError if a function of the task asks for a column that the prompt's row lacks."""
        for function in self._functions[task]:
            function.check(prompt)

    def submit(self, task: int, prompt: Prompt, group: Sequence[Graded]) -> "Future[list[dict[str, Part]]]":
        """Begin to grade a prompt's completions; the future has the parts of each, by function.

        It raises FunctionError where a function has a bug.
        """
        if not self._functions[task]:
            done: Future[list[dict[str, Part]]] = Future()
            done.set_result([{} for _ in group])
            return done
        return asyncio.run_coroutine_threadsafe(self._group(task, prompt, group), self._started())

    def close(self) -> None:
        """Cancel running calls and end the thread."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(_cancel_and_stop)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name="rewards", daemon=True).start()
        return self._loop

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

    async def _values(self, function: RewardFunction, prompt: Prompt, group: Sequence[Graded]) -> list[Part]:
        """The function's value for each completion of a group."""
        limit = self._limits.setdefault(function.name, asyncio.Semaphore(function.settings.concurrency))

        async def called(arguments: Mapping[str, object]) -> Any:
            async with limit:
                return await self._called(function, arguments)

        found = await asyncio.gather(*(called(each) for each in function.arguments(prompt, group)))
        if function.of_group:
            (values,) = found
            if values is None:
                return [Part(0.0, timed_out=True)] * len(group)
            values = list(values)
            if len(values) != len(group):
                raise FunctionError(
                    f"reward {function.name} returned {len(values)} numbers for {len(group)} completions"
                )
            return [_part(function, value) for value in values]
        return [Part(0.0, timed_out=True) if value is None else _part(function, value[0]) for value in found]

    async def _called(self, function: RewardFunction, arguments: Mapping[str, object]) -> Any:
        """The function's result, as a list; None if it took too long. Raises FunctionError."""
        settings, problem = function.settings, None
        for attempt in range(settings.retries + 1):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                begun = function.call(**arguments) if function.is_async else _in_thread(function.call, arguments)
                value = await asyncio.wait_for(begun, settings.timeout_s)
                return value if function.of_group else [value]
            except TimeoutError:
                problem = None
            except Exception:
                problem = traceback.format_exc()
        if problem is not None:
            raise FunctionError(f"reward {function.name} failed:\n{problem}")
        if function.name not in self._warned:
            self._warned.add(function.name)
            logger.warning(
                "reward %s took longer than %g s; it counts as 0, and so will others", function.name, settings.timeout_s
            )
        return None


def _part(function: RewardFunction, value: Any) -> Part:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise FunctionError(f"reward {function.name} returned {value!r}; a reward is a finite number")
    return Part(number)


def _in_thread(call: Callable[..., object], arguments: Mapping[str, object]) -> "asyncio.Future[object]":
    """Run the call in a thread that does not keep the process alive, as ThreadPoolExecutor's threads do."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()

    def set_result(value: object, error: BaseException | None) -> None:
        if not future.done():  # otherwise it took too long
            future.set_result(value) if error is None else future.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = call(**arguments)
        except StopIteration as stopped:  # futures do not accept it
            error = RuntimeError(f"it raised {stopped!r}")
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(set_result, value, error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return future


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _cancel_and_stop() -> None:
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    ended = asyncio.gather(*tasks, return_exceptions=True)
    ended.add_done_callback(lambda _: loop.stop())
    if not tasks:
        loop.stop()
