"""Prints, from the records of a job's processes, how the job ended: `python -m podium.job.report FOLDER`.

No supervisor is needed. FOLDER contains one folder per worker, by number: each worker's PODRUN_JOB_DIR, as the Slurm
and Kubernetes scripts set it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from podium.job.job_records import NO_JOB, PROGRESS, RECORD, Status, first_failure, outcome, read_json


def statuses(folder: Path) -> list[Status]:
    """The status of each worker, in order, as its agent would report it; a worker without a record counts as killed."""
    found = []
    for worker in sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name)):
        record = read_json(worker / RECORD)
        ended = {"exit": record["exit"], "host": record["host"]} if record else {"host": "?"}
        state = "finished" if record else "killed"
        found.append({**NO_JOB, **ended, "state": state, "record": record, "progress": read_json(worker / PROGRESS)})
    return found


def main(arguments: Sequence[str]) -> int:
    """Print how a job ended and which worker failed first; exit status 0 if it finished or was stopped."""
    found = statuses(Path(arguments[0]))
    print(f"podium: {first_failure(found) or outcome(found)}", flush=True)
    return int(outcome(found) not in ("done", "stopped"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
