"""One virtual time for several laptops, each of which runs a command in its own thread; one runs at a time."""

import heapq
import itertools
import threading
from collections.abc import Callable


class StoryOver(BaseException):
    """Ends what still runs on a laptop when its story is over; a command does not catch it."""


class Timeline:
    """What is due, in order; time passes only when everybody waits."""

    def __init__(self) -> None:
        self.now = 1_000_000_000.0
        self.running: Laptop | None = None
        self.over = False
        self.laptops: list[Laptop] = []
        self.error: Exception | None = None
        """What a command raised that no command may raise."""
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._back = threading.Semaphore(0)

    def time(self) -> float:
        """Seconds since 1970."""
        return self.now

    def at(self, moment: float, event: Callable[[], None]) -> None:
        """Have something happen then."""
        heapq.heappush(self._due, (moment, next(self._count), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Have something happen later."""
        self.at(self.now + seconds, event)

    def run(self, over: Callable[[], bool]) -> None:
        """Have all happen that is due, until it is `over`."""
        while self._due and not over() and self.error is None:
            moment, _, event = heapq.heappop(self._due)
            self.now = max(self.now, moment)
            event()
        self.over = True
        if self.error is not None:
            raise self.error
        for laptop in self.laptops:
            laptop.end()

    def resume(self, laptop: "Laptop") -> None:
        """Let a laptop go on until it waits again or has ended."""
        self.running = laptop
        laptop.go.release()
        self._back.acquire()
        self.running = None

    def yield_back(self) -> None:
        """Let what is due happen; a laptop calls this before it waits for `go`."""
        self._back.release()


class Laptop:
    """A machine with a lid and a clock, as the module `time`; it runs one command."""

    def __init__(self, timeline: Timeline, name: str, skew_s: float = 0.0) -> None:
        self.timeline, self.name, self.skew_s = timeline, name, skew_s
        self.go = threading.Semaphore(0)
        self.ended: float | None = None
        self.closed: list[tuple[float, float]] = []
        """From when to when the lid was closed."""
        self._asleep_s = 0.0
        self._wake = 0.0
        self._thread: threading.Thread | None = None
        timeline.laptops.append(self)

    def time(self) -> float:
        """Seconds since 1970, as it believes."""
        return self.timeline.now + self.skew_s

    def monotonic(self) -> float:
        """Seconds for which it was awake."""
        return self.timeline.now - self._asleep_s

    def sleep(self, seconds: float, /) -> None:
        """Wait; time with a closed lid does not count."""
        self._end_if_over()
        self._wake = self.timeline.now + seconds
        self.timeline.at(self._wake, self._look)
        self.timeline.yield_back()
        self.go.acquire()
        self._end_if_over()

    def close_lid(self, seconds: float) -> None:
        """Put it to sleep."""
        self.closed.append((self.timeline.now, self.timeline.now + seconds))
        self._asleep_s += seconds
        self._wake += seconds

    def begin(self, command: Callable[[], None]) -> None:
        """Run a command from now on."""

        def work() -> None:
            self.go.acquire()
            try:
                command()
            except StoryOver:
                pass
            except Exception as error:
                self.timeline.error = error
            if not self.timeline.over:
                self.ended = self.timeline.now
                self.timeline.yield_back()

        self._thread = threading.Thread(target=work, name=self.name, daemon=True)
        self._thread.start()
        self.timeline.resume(self)

    def end(self) -> None:
        """End the command, which may wait in its own thread; the interpreter would wait for that thread."""
        if self._thread is not None and self.ended is None:
            self.go.release()
            self._thread.join(timeout=60)
            assert not self._thread.is_alive(), f"the command on {self.name} goes on after its story"

    def _end_if_over(self) -> None:
        if self.timeline.over:
            raise StoryOver

    def _look(self) -> None:
        if self.timeline.now < self._wake:
            self.timeline.at(self._wake, self._look)
        else:
            self.timeline.resume(self)
