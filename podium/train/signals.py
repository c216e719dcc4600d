"""Stopping a run: the first Ctrl-C or SIGTERM is a request that the loop reads, the second Ctrl-C is an order.

After a Ctrl-C the step is finished. SIGTERM comes from a machine that goes away, in half a minute perhaps: what is done
is saved, and a rollout that is under way is given up (`podium.train.distributed.AgreedStop`) and repeated later.
"""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopSignal:
    """Inside `with StopSignal() as stop:`, `stop.requested` tells the loop to finish its step, save and leave.

    A Ctrl-C after that raises KeyboardInterrupt where the program is. Works in the main thread only, as Python's
    signals do; on leaving, the previous handlers are back. Child processes must ignore Ctrl-C by themselves: a terminal
    sends it to all.
    """

    def __init__(self, announce: Callable[[str], None] = lambda text: None) -> None:
        """Nothing yet; `announce` hears of the first signal, inside its handler: it must not print."""
        self._announce = announce
        self.requested: int | None = None
        """Number of the first signal, SIGINT or SIGTERM; None until one comes."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = number
            first = "finishing and saving the step" if number == signal.SIGINT else "saving what is done"
            self._announce(f"stopping: {first}; Ctrl-C again stops at once")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
