"""Runs by the scripts for clusters: two processes, three steps, and whether their losses are equal.

    python -m benches.clusters        (Linux, as root, with slurm-wlm and munge; three minutes)

`podium pod slurm` writes a script that a real Slurm on this machine takes: munged, slurmctld and two slurmd.
`podium pod k8s` writes a JobSet whose containers' own commands and variables run as two processes, and another whose
two processes are slices of four devices. All train a tiny random model over jax.distributed on CPU, with a reward whose
losses are not 0, and are compared with one process that has all devices: the same losses to 1e-6, and the same rewards.
"""

import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benches.record import arguments, record
from tests.pods.cluster_runs import (
    LEAST_LOSS,
    SLICE_DEVICES,
    STEPS,
    Figures,
    free_port,
    run_alone,
    run_by_jobset,
    run_by_slices,
    run_by_slurm,
)
from tests.pods.slurm_cluster import slurm_cluster, why_no_slurm

FURTHEST = 1e-6


def by_slurm(folder: Path) -> tuple[Figures, Figures]:
    """Loss and reward by step, and of the last step by process."""
    with slurm_cluster(folder, (free_port(), free_port(), free_port())) as slurm:
        return run_by_slurm(slurm, folder)


WAYS: dict[str, tuple[Callable[[Path], tuple[Figures, Figures]], int]] = {
    "slurm": (by_slurm, 2),
    "jobset": (run_by_jobset, 2),
    "slices": (run_by_slices, 2 * SLICE_DEVICES),
}
"""How each trains, and with how many devices."""


def measured(way: str, alone: Figures) -> dict[str, Any]:
    """What a way gave, in how many seconds, and how far that is from one process."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        steps, processes = WAYS[way][0](Path(folder))
    furthest = max(abs(a - b) for a, b in zip(itertools.chain(*steps), itertools.chain(*alone), strict=True))
    trained = len(steps) == STEPS and all(abs(loss) >= LEAST_LOSS for loss, _ in steps)
    return {
        "way": way,
        "seconds": round(time.perf_counter() - start, 1),
        "loss_and_reward": steps,
        "last_of_each_process": processes,
        "furthest_from_one_process": furthest,
        "equal": trained and processes == [steps[-1]] * 2 and furthest <= FURTHEST,
    }


def main() -> None:
    """Prints and writes a row per way; exit status 1 where losses differ."""
    args = arguments(__doc__).parse_args()
    if (why := why_no_slurm()) is not None:
        sys.exit(f"no bench of clusters here: {why}")
    alone: dict[int, Figures] = {}
    rows = []
    for way, (_, devices) in WAYS.items():
        if devices not in alone:
            with tempfile.TemporaryDirectory() as folder:
                alone[devices] = run_alone(Path(folder), devices)
            print(f"one process with {devices} devices: {alone[devices]}", flush=True)
        rows.append(measured(way, alone[devices]))
        print(rows[-1], flush=True)
    record("clusters-cpu", {"loss_and_reward_of_one_process": alone, "rows": rows}, args.results)
    sys.exit(not all(row["equal"] for row in rows))


if __name__ == "__main__":
    main()
