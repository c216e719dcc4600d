"""Copies a log into a bucket, for the supervisor; it runs with the job's Python, which has the libraries for buckets.

    python -m podium.pods.host.copy_log LOG OBJECT FROM

Objects cannot grow, so the log is copied in parts (OBJECT.log, OBJECT.1.log, ...); only parts that have changed since
the log had FROM bytes are written again.
"""

import itertools
import sys
from pathlib import Path

from podium.files import as_path

PART_BYTES = 1 << 23


def main() -> None:
    """Copy the new parts."""
    log, target, start = sys.argv[1:]
    with Path(log).open("rb") as source:
        for part in itertools.count(int(start) // PART_BYTES):
            source.seek(part * PART_BYTES)
            if not (data := source.read(PART_BYTES)):
                return
            as_path(f"{target}.{part}.log" if part else f"{target}.log").write_bytes(data)


if __name__ == "__main__":
    main()
