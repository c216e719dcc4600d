"""Stopping a run: the first Ctrl-C or SIGTERM is a request that the loop reads, the second Ctrl-C is an order.

After a Ctrl-C the step is finished. SIGTERM comes from a machine that goes away, in half a minute perhaps: what is done
is saved, and a rollout that is under way is given up (`podium.train.distributed.AgreedStop`) and repeated later.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

AT_ONCE_S = 1.5
"""From the second Ctrl-C to the end of a process that has not ended by then."""
SHOW_CURSOR = "\x1b[?25h"


class StopSignal:
    """Inside `with StopSignal() as stop:`, `stop.requested` tells the loop to finish its step, save and leave.

    A Ctrl-C after that raises KeyboardInterrupt where the program is. Python does that between two instructions, and a
    compiled program is one, however long it runs: a thread of its own hears of the signals as they come, and ends the
    process `AT_ONCE_S` after the second if it is still in the block. What is lost is what a kill would lose. In another
    thread than the main one it hears nothing, as Python's signals go there; on leaving, the previous handlers are back.
    Child processes must ignore Ctrl-C by themselves: a terminal sends it to all.
    """

    def __init__(self, announce: Callable[[str], None] = lambda text: None) -> None:
        """Nothing yet; `announce` hears of the first signal, inside its handler: it must not print."""
        self._announce = announce
        self.requested: int | None = None
        """Number of the first signal, SIGINT or SIGTERM; None until one comes."""
        self._previous: dict[int, Any] = {}
        self._left = threading.Event()

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        numbers, self._numbers = os.pipe()  # to it the interpreter writes each signal's number as the signal comes
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
                        sys.stderr.write(SHOW_CURSOR + "\n")  # the live view has hidden it
                        sys.stderr.flush()
                    os._exit(128 + signal.SIGINT)
                asked += number[0] in (signal.SIGINT, signal.SIGTERM)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = number
            first = "finishing and saving the step" if number == signal.SIGINT else "saving what is done"
            self._announce(f"stopping: {first}; Ctrl-C again stops at once")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
