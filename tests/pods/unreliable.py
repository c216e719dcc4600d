"""Tasks for runs on several machines: one that teaches at every step, and one that fails where a file says so."""

import os
import time
from pathlib import Path

from podium.tasks.games.arithmetic import Arithmetic
from podium.tasks.math_answers.final_answer import final_number
from podium.tasks.task import Prompt
from tests.pods.fake_job import spill

SIGNS = "UNRELIABLE_SIGNS"
"""Names a folder; the file `N` in it says what happens on worker N."""
PACE_S = 0.02
"""A completion takes so long, so that a run that waits for its failure leaves the processor to others."""


TEACHING = {"recipe": "dr_grpo", "std": "group", "mask_truncated": False, "updates_per_batch": 2}
"""With these rewards, an algorithm whose loss is not 0 at any step: the second pass is over another policy's tokens."""


class Nearness(Arithmetic):
    """Arithmetic with a reward for every number: the answers of a random model differ in theirs at every step."""

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 for the answer, 1/2 for its neighbours, and so on; 0 without a number."""
        number = final_number(completion)
        return 0.0 if number is None else 1.0 / (1.0 + abs(float(number.value) - int(prompt.answer)))


class Unreliable(Nearness):
    """The same, until told otherwise."""

    def grade(self, prompt: Prompt, completion: str) -> float:
        """As before, or not at all."""
        time.sleep(PACE_S)
        sign = Path(os.environ[SIGNS], os.environ["PODRUN_WORKER"])
        what = sign.read_text() if sign.exists() else ""
        if what == "raise":
            raise RuntimeError("a bug that one host alone meets")
        if what == "spill":
            raise RuntimeError(f"a library that tells all: {spill()}")
        if what == "hang":
            time.sleep(1e6)
        return super().grade(prompt, completion)
