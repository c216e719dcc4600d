"""A loop on a thread that runs users' coroutines: how it ends while calls wait."""

import inspect
import threading
from concurrent.futures import CancelledError, wait

import pytest

from podium.tasks.event_loop import LoopThread


async def said() -> str:
    return "said"


def test_it_runs_coroutines_and_other_awaitables_and_returns_plain_values():
    class Awaited:
        def __await__(self):
            return (yield from said().__await__())

    loop = LoopThread("test")
    assert [loop.resolve(each) for each in (said(), Awaited(), "plain")] == ["said", "said", "plain"]
    loop.end()


def test_a_coroutine_that_has_not_started_when_the_loop_ends_is_closed():
    loop, waiting = LoopThread("test"), said()
    blocking, goes_on, submitted = threading.Event(), threading.Event(), threading.Event()

    async def block() -> None:
        blocking.set()
        goes_on.wait(60)

    loop.submit(block())
    assert blocking.wait(60)
    outcome: list[BaseException] = []

    def call() -> None:
        try:
            loop.resolve(waiting)
        except BaseException as error:
            outcome.append(error)

    caller = threading.Thread(target=call, daemon=True)
    submit, loop.submit = loop.submit, lambda coroutine: (submit(coroutine), submitted.set())[0]
    caller.start()
    assert submitted.wait(60)
    loop.end()
    goes_on.set()
    caller.join(60)
    assert [type(each) for each in outcome] == [CancelledError]
    assert inspect.getcoroutinestate(waiting) == inspect.CORO_CLOSED


def test_nothing_runs_after_its_end():
    loop, late = LoopThread("test"), said()
    loop.resolve(said())
    loop.end()
    with pytest.raises(CancelledError):
        loop.resolve(late)
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED
    later = loop.submit(said())
    assert wait([later], 60).done == {later}
