"""The end of a job by its processes' own records, without a supervisor: `python -m podium.job.report FOLDER`.

FOLDER has a folder for each worker, by number: PODRUN_JOB_DIR of each, as the scripts for Slurm and Kubernetes set it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from podium.job.records import NO_JOB, PROGRESS, RECORD, Status, first_failure, outcome, read_json


def statuses(folder: Path) -> list[Status]:
    """The status of each worker, in order, as its agent would give it; without a record, a worker counts as killed."""
    found = []
    for worker in sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name)):
        record = read_json(worker / RECORD)
        ended = {"exit": record["exit"], "host": record["host"]} if record else {"host": "?"}
        state = "finished" if record else "killed"
        found.append({**NO_JOB, **ended, "state": state, "record": record, "progress": read_json(worker / PROGRESS)})
    return found


def main(arguments: Sequence[str]) -> int:
    """Print how a job ended and which worker failed first; the exit status is 0 if it is done or stopped."""
    found = statuses(Path(arguments[0]))
    print(f"podium: {first_failure(found) or outcome(found)}", flush=True)
    return int(outcome(found) not in ("done", "stopped"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
