"""Runs by the scripts for clusters: two processes, three steps, and whether their losses are equal.

    python -m benches.clusters        (Linux, as root, with slurm-wlm and munge; three minutes)

`podium pod slurm` writes a script that a real Slurm on this machine takes: munged, slurmctld and two slurmd.
`podium pod k8s` writes a JobSet whose containers' own commands and variables run as two processes. Both train a tiny
random model over jax.distributed on CPU.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benches.record import arguments, record
from tests.pods.cluster_runs import free_port, jobset_losses, slurm_losses
from tests.pods.slurm_cluster import slurm_cluster, why_no_slurm


def by_slurm(folder: Path) -> list[list[float]]:
    """Loss and reward of the last step, by process."""
    with slurm_cluster(folder, (free_port(), free_port(), free_port())) as slurm:
        return slurm_losses(slurm, folder)


WAYS: dict[str, Callable[[Path], list[list[float]]]] = {"slurm": by_slurm, "jobset": jobset_losses}


def measured(way: str) -> dict[str, Any]:
    """What a way gave, and in how many seconds."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        losses = WAYS[way](Path(folder))
    row = {"way": way, "seconds": round(time.perf_counter() - start, 1), "loss_and_reward": losses}
    return row | {"equal": losses[0] == losses[1] and all(losses[0])}


def main() -> None:
    """Prints and writes a row per way; exit status 1 where losses differ."""
    args = arguments(__doc__).parse_args()
    if (why := why_no_slurm()) is not None:
        sys.exit(f"no bench of clusters here: {why}")
    rows = []
    for way in WAYS:
        rows.append(measured(way))
        print(rows[-1], flush=True)
    record("clusters-cpu", {"rows": rows}, args.results)
    sys.exit(not all(row["equal"] for row in rows))


if __name__ == "__main__":
    main()
