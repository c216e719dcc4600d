"""An event loop on its own thread, which runs coroutines that users have written."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """An event loop that users' coroutines share, on a daemon thread that starts with the first of them.

    SystemExit and KeyboardInterrupt, which end asyncio's loops, are errors of the coroutine that raises them alone.
    """

    def __init__(self, name: str) -> None:
        """Start nothing yet; `name` is the thread's."""
        self._name = name
        self._loop: _Loop | None = None
        self._starting = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Run a coroutine on the loop; the future has its result, or whatever it raises."""
        with self._starting:
            if self._loop is None:
                self._loop = _Loop()
                threading.Thread(target=_run, args=(self._loop,), name=self._name, daemon=True).start()
            loop = self._loop
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def resolve(self, value: object) -> object:
        """The value, or if it is awaitable its result, for which the calling thread waits."""
        if not inspect.isawaitable(value):
            return value

        async def awaited() -> object:
            return await value

        return self.submit(awaited()).result()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, where a coroutine that blocks delays it; on this thread if no loop runs."""
        if (loop := self._loop) is None:
            function()
        else:
            loop.call_soon_threadsafe(function)

    def end(self) -> None:
        """Cancel all that runs on the loop, and end it; a coroutine that blocks keeps its thread."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(_cancel_and_end, loop)


class _Loop(asyncio.SelectorEventLoop):
    """A loop whose `stop`, which one of its coroutines may call, does nothing."""

    def stop(self) -> None:
        """Go on: others' coroutines run here too."""

    def end(self) -> None:
        """Stop; called on the loop's thread."""
        super().stop()


def _run(loop: _Loop) -> None:
    asyncio.set_event_loop(loop)
    stopped = False
    while not stopped:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):  # the task that raised it has it as its exception
            loop.run_forever()
            stopped = True
    loop.close()


def _cancel_and_end(loop: _Loop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    ended = asyncio.gather(*tasks, return_exceptions=True)
    ended.add_done_callback(lambda _: loop.end())
    if not tasks:
        loop.end()
