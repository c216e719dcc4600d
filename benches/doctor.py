"""What `podium doctor --full` says of this machine, kept: kernels beside references and XLA, links, a small model.

    python -m benches.doctor          (on a TPU or GPU about five minutes)

Writes benches/results/doctor-PLATFORM.json, for instance doctor-gpu.json; exit status 1 where something is wrong.
"""

import sys
import tempfile
from pathlib import Path

import jax

from benches.record import arguments, record
from podium.doctor.command import as_object, diagnose
from podium.doctor.system import ThisSystem
from podium.hosts.platform import prepare_platform


def main() -> int:
    """Prints what is wrong, and writes all that was found."""
    args = arguments(__doc__).parse_args()
    prepare_platform()
    with tempfile.TemporaryDirectory() as runs:
        found = diagnose(ThisSystem(), Path(runs), full=True)
    for section, row in found.problems:
        print(f"{section}, {row.name}: {row.problem}")
    record(f"doctor-{jax.default_backend()}", as_object(found), args.results)
    return int(bool(found.problems))


if __name__ == "__main__":
    sys.exit(main())
