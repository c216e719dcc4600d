"""The clock of all tests of pods, and waiting for what really happens."""

import threading
import time
from collections.abc import Callable
from typing import Any


class Clock:
    """Time that passes when somebody waits, with events that are due at a time. Sleep of a laptop is not monotonic.

    With `longest_s` it shows the real time plus what was skipped: a wait really takes up to `longest_s` seconds.
    """

    def __init__(self, longest_s: float | None = None) -> None:
        self._longest_s = longest_s
        self._passed = 1_000_000_000.0 if longest_s is None else time.time() - time.monotonic()
        self._asleep = 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    @property
    def now(self) -> float:
        """Seconds since 1970."""
        return self._passed + (0.0 if self._longest_s is None else time.monotonic())

    def time(self) -> float:
        """Seconds since 1970."""
        return self.now

    def monotonic(self) -> float:
        """Seconds for which the laptop was awake."""
        return self.now - self._asleep

    def sleep(self, seconds: float, /) -> None:
        """Wait; then the main thread has happen what is due."""
        real = 0.0 if self._longest_s is None else min(seconds, self._longest_s)
        time.sleep(real)
        self._passed += seconds - real
        if threading.current_thread() is threading.main_thread():
            while self._due and min(self._due, key=lambda each: each[0])[0] <= self.now:
                first = min(self._due, key=lambda each: each[0])
                self._due.remove(first)
                first[1]()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Have something happen later."""
        self._due.append((self.now + seconds, event))

    def close_lid(self, seconds: float) -> None:
        """Put the laptop to sleep."""
        self._asleep += seconds
        self._passed += seconds


def wait_for(condition: Callable[[], Any], limit_s: float = 300.0) -> Any:
    """What the condition returns as soon as that is true."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)
    return found
