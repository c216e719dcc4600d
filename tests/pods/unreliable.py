"""A task whose grader fails or hangs on one worker, as soon as a file says so."""

import os
import time
from pathlib import Path

from podium.tasks.arithmetic import Arithmetic
from podium.tasks.task import Prompt

SIGNS = "UNRELIABLE_SIGNS"
"""Names a folder; the file `N` in it says what happens on worker N."""
PACE_S = 0.02
"""A completion takes so long, so that a run that waits for its failure leaves the processor to others."""


class Unreliable(Arithmetic):
    """Arithmetic, until told otherwise."""

    def grade(self, prompt: Prompt, completion: str) -> float:
        """As arithmetic does, or not at all."""
        time.sleep(PACE_S)
        sign = Path(os.environ[SIGNS], os.environ["PODRUN_WORKER"])
        what = sign.read_text() if sign.exists() else ""
        if what == "raise":
            raise RuntimeError("a bug that one host alone meets")
        if what == "hang":
            time.sleep(1e6)
        return super().grade(prompt, completion)
