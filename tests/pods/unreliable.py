"""A task whose grader fails, hangs, or takes its time, on one worker, as soon as a file says so."""

import os
import time
from pathlib import Path

from podium.tasks.arithmetic import Arithmetic
from podium.tasks.task import Prompt

SIGNS = "UNRELIABLE_SIGNS"
"""Names a folder; the file `N` in it says what happens on worker N."""


class Unreliable(Arithmetic):
    """Arithmetic, until told otherwise."""

    def grade(self, prompt: Prompt, completion: str) -> float:
        """As arithmetic does, or not at all."""
        sign = Path(os.environ[SIGNS], os.environ["PODRUN_WORKER"])
        what = sign.read_text() if sign.exists() else ""
        if what == "raise":
            raise RuntimeError("a bug that one host alone meets")
        if what == "hang":
            time.sleep(1e6)
        return super().grade(prompt, completion)
