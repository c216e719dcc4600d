"""Stops a run on signals: the first Ctrl-C or SIGTERM is a request that the loop reads; a second Ctrl-C stops at once.

After Ctrl-C the current step is finished. SIGTERM means that the machine will disappear soon, perhaps in half a minute,
and so does SIGHUP, which comes when the terminal is closed or the connection to it is lost (unless `nohup` ignores it):
finished steps are saved, and a rollout in progress is abandoned (`podium.hosts.distributed.AgreedStop`) and repeated
when the run resumes.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeAlias

AT_ONCE_S = 1.5
"""Seconds after a second Ctrl-C at which a process that is still running is ended."""
SHOW_CURSOR = "\x1b[?25h"
Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
"""The handler of a signal in Python: a function, SIG_DFL or SIG_IGN; None if it was not set by Python."""


class StopSignal:
    """Inside `with StopSignal() as stop:`, `stop.requested` tells the loop to finish its step, save and leave.

    A second Ctrl-C raises KeyboardInterrupt. Python does that only between its instructions, and a compiled program
    counts as one instruction however long it runs. So a separate thread watches the signals and ends the process
    `AT_ONCE_S` seconds after the second one if it is still in the block, losing no more than a kill would. Outside the
    main thread this class does nothing, since Python delivers signals only there. Leaving the block restores the
    previous handlers. Child processes must ignore Ctrl-C themselves, because a terminal sends it to all of them.
    """

    def __init__(self, announce: Callable[[str], None] = lambda text: None) -> None:
        """`announce` is called with a line at the first signal, inside the signal handler: it must not print."""
        self._announce = announce
        self.requested: int | None = None
        """Number of the first signal, SIGINT or SIGTERM (also for SIGHUP); None until one arrives."""
        self._previous: dict[int, Handler] = {}
        self._left = threading.Event()

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        numbers, self._numbers = os.pipe()  # the interpreter writes each signal's number to this pipe on arrival
        os.set_blocking(self._numbers, False)
        self._previous_fd = signal.set_wakeup_fd(self._numbers, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(numbers,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._previous:
            return
        signal.set_wakeup_fd(self._previous_fd)
        self._left.set()
        os.close(self._numbers)  # ends the thread
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _listen(self, numbers: int) -> None:
        with os.fdopen(numbers, "rb", buffering=0) as came:
            asked = 0
            while number := came.read(1):
                if asked and number[0] == signal.SIGINT and not self._left.wait(AT_ONCE_S):
                    if sys.stderr.isatty():
                        sys.stderr.write(SHOW_CURSOR + "\n")  # the live view has hidden the cursor
                        sys.stderr.flush()
                    os._exit(128 + signal.SIGINT)
                asked += number[0] in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.SIGTERM if number == signal.SIGHUP else number
            first = "finishing and saving the step" if number == signal.SIGINT else "saving what is done"
            self._announce(f"stopping: {first}; Ctrl-C again stops at once")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
