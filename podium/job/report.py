"""What the processes of a job say of themselves, where no supervisor is asked: `python -m podium.job.report FOLDER`.

FOLDER has a folder for each worker, by number: PODRUN_JOB_DIR of each, as the scripts for Slurm and Kubernetes set it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium.job.records import NO_JOB, PROGRESS, RECORD, first_failure, outcome, read_json


def statuses(folder: Path) -> list[dict[str, Any]]:
    """As each worker's agent would answer, in order; one without a record was killed, or runs yet."""
    found = []
    for worker in sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)):
        record = read_json(worker / RECORD)
        ended = {"exit": record["exit"], "host": record["host"]} if record else {"host": "?"}
        state = "finished" if record else "killed"
        found.append({**NO_JOB, **ended, "state": state, "record": record, "progress": read_json(worker / PROGRESS)})
    return found


def main(arguments: Sequence[str]) -> int:
    """Print how a job ended, and who was first; the exit status is 0 where it is done or stopped."""
    found = statuses(Path(arguments[0]))
    print(f"podium: {first_failure(found) or outcome(found)}", flush=True)
    return int(outcome(found) not in ("done", "stopped"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
