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
    """An event loop shared by users' coroutines, on a daemon thread that starts with the first coroutine.

    In asyncio, a SystemExit or KeyboardInterrupt raised in a task also stops the loop. Here it is the exception of that
    task only, and the loop continues.
    """

    def __init__(self, name: str) -> None:
        """Create it without starting the thread, which gets this name."""
        self._name = name
        self._loop: _Loop | None = None
        self._ended = False
        self._changing = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Run a coroutine on the loop; the future has its result or the exception that it raises. After `end`, the
        coroutine is closed and the future is cancelled.
        """
        with self._changing:
            if self._ended:
                coroutine.close()
                refused: Future[Result] = Future()
                refused.cancel()
                refused.set_running_or_notify_cancel()  # done for `concurrent.futures.wait` too
                return refused
            if self._loop is None:
                self._loop = _Loop()
                threading.Thread(target=_run, args=(self._loop,), name=self._name, daemon=True).start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def resolve(self, value: object) -> object:
        """The value; if it is awaitable, run it on the loop, wait on this thread, and return its result."""
        if not inspect.isawaitable(value):
            return value
        if inspect.iscoroutine(value):  # itself, so that it is closed if it is cancelled before it starts
            return self.submit(value).result()

        async def awaited() -> object:
            return await value

        return self.submit(awaited()).result()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, so that code that blocks the loop also delays this call; without a loop, call it
        here.
        """
        with self._changing:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function)
                return
        function()

    def end(self) -> None:
        """Cancel all tasks on the loop and end it; nothing runs on it later. A thread that a coroutine blocks is
        abandoned.
        """
        with self._changing:
            loop, self._loop, self._ended = self._loop, None, True
            if loop is not None:
                loop.call_soon_threadsafe(_cancel_and_end, loop)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop shared by coroutines, any of which may call `stop`; therefore `stop` does nothing."""

    def stop(self) -> None:
        """Do nothing: other coroutines still run on this loop."""

    def end(self) -> None:
        """Stop the loop; must be called on its thread."""
        super().stop()


def _run(loop: _Loop) -> None:
    asyncio.set_event_loop(loop)
    stopped = False
    while not stopped:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):  # also the exception of the task that raised it
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
