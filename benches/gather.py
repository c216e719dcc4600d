"""What a mesh does to memory: an array split over fsdp, or gathered on every device; `podium bench gather` over modes.

    python -m benches.gather --target-bytes-gib 5.6        (a TPU or GPU, or CPU with a smaller target)
    python -m benches.gather --tpu v6e-16                  (a TPU that is not there)

Prints a line per mesh and mode, and writes benches/results/gather-BACKEND.json. On v6e-16 the seed system saw 0.350
and 5.600 GiB per chip for `auto`, 1.400 and 5.600 for `host_local`.
"""

import os
from collections.abc import Sequence
from typing import Any

import jax

from benches.record import arguments, record
from podium.accelerators import find_accelerator
from podium.hosts.platform import prepare_platform
from podium.plan.request.topology import compiler_environment, topology_devices
from podium.sharding import make_mesh
from podium.train.optimizer.gather_memory import DTYPES, GIB, measure, planned

MODES = ("sharded", "gather")


def shown(size: object) -> str:
    """Bytes in GiB, or the word that stands where a device does not report them."""
    return f"{size / GIB:.3f} GiB" if isinstance(size, int) else str(size)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mesh", action="append", help="as in a config, repeatable; unset: auto and host_local")
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    parser.add_argument("--target-bytes-gib", type=float, default=5.6)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--tpu", metavar="NAME", help="as v6e-16: plan it, instead of measuring here")
    args = parser.parse_args()
    meshes, size = args.mesh or ["auto", "host_local"], {"target_bytes_gib": args.target_bytes_gib, "cols": args.cols}
    if args.tpu:
        rows = plan(args.tpu, meshes, args.dtype, **size)
        record(f"gather-{args.tpu}-planned", {"target_bytes_gib": args.target_bytes_gib, "rows": rows}, args.results)
        return
    prepare_platform()
    rows = []
    for mesh in meshes:
        for mode in MODES:
            row = measure(make_mesh(mesh), mode, args.dtype, **size)
            rows.append({"mesh": mesh, **row})
            array = shown(row["per_device_array_bytes_all_processes_max"])
            in_use = shown(row["device_bytes_in_use_all_processes_max"])
            print(f"{mesh:12} {mode:8} {array} per device, in use {in_use}")
    record(f"gather-{jax.default_backend()}", {"rows": rows}, args.results)


def plan(tpu: str, meshes: Sequence[str], dtype: str, *, target_bytes_gib: float, cols: int) -> list[dict[str, Any]]:
    """A row for each mesh and mode, printed as it comes."""
    accelerator, rows = find_accelerator(tpu), []
    os.environ.update(compiler_environment(accelerator))
    jax.config.update("jax_platforms", "cpu")  # read before the environment was set
    devices = topology_devices(accelerator)
    for name in meshes:
        for mode in MODES:
            size = planned(make_mesh(name, devices), mode, dtype, target_bytes_gib=target_bytes_gib, cols=cols)
            rows.append({"mesh": name, "mode": mode, "bytes": size, "gib": round(size / GIB, 3)})
            print(f"{name:12} {mode:8} {size / GIB:.3f} GiB per device", flush=True)
    return rows


if __name__ == "__main__":
    main()
