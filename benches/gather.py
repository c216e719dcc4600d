"""What a mesh does to memory: an array split over fsdp, or gathered on every device; `podium bench gather` over modes.

    python -m benches.gather --target-bytes-gib 5.6        (a TPU or GPU, or CPU with a smaller target)

Prints a line per mesh and mode, and writes benches/results/gather-BACKEND.json. On v6e-16 the former system saw 0.350
and 5.600 GiB per chip for `auto`, 1.400 and 5.600 for `host_local`.
"""

import jax

from benches.record import arguments, record
from podium.sharding import make_mesh
from podium.train.gather_memory import DTYPES, GIB, measure
from podium.train.setup import prepare_platform


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mesh", action="append", help="as in a config, repeatable; unset: auto and host_local")
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    parser.add_argument("--target-bytes-gib", type=float, default=5.6)
    parser.add_argument("--cols", type=int, default=4096)
    args = parser.parse_args()
    prepare_platform()
    rows = []
    for mesh in args.mesh or ["auto", "host_local"]:
        for mode in ("sharded", "gather"):
            row = measure(make_mesh(mesh), mode, args.dtype, target_bytes_gib=args.target_bytes_gib, cols=args.cols)
            rows.append({"mesh": mesh, **row})
            array, used = row["per_device_array_bytes_all_processes_max"], row["device_bytes_in_use_all_processes_max"]
            in_use = used if isinstance(used, str) else f"{used / GIB:.3f} GiB"
            print(f"{mesh:12} {mode:8} {array / GIB:.3f} GiB per device, in use {in_use}")
    record(f"gather-{jax.default_backend()}", {"rows": rows}, args.results)


if __name__ == "__main__":
    main()
