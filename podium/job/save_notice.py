"""Prints how many seconds before a time limit a run should be asked to save: `python -m podium.job.save_notice RUN`.

RUN is the run's folder or bucket. The Slurm script asks at the start of each attempt.
"""

import contextlib
import json
import math
import sys
from pathlib import Path

from podium.files import as_path

LEAST_S = 120
TIMES = 2
TIMES_OF_SAVE = "_CHECKPOINT_METADATA"
"""The file in which orbax records when it began a checkpoint, and when that was complete, in ns."""


def save_notice(run: Path) -> int:
    """Twice the seconds from the beginning of the run's newest save until it was complete, and at least 120."""
    seconds = 0.0
    with contextlib.suppress(OSError, ValueError, KeyError):  # no save yet, or one that is being deleted
        step = max(int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdecimal())
        times = json.loads((run / "checkpoints" / str(step) / TIMES_OF_SAVE).read_text())
        seconds = (times["commit_timestamp_nsecs"] - times["init_timestamp_nsecs"]) / 1e9
    return max(LEAST_S, math.ceil(TIMES * seconds))


if __name__ == "__main__":
    print(save_notice(as_path(sys.argv[1])))
