"""Where a decode step and an update on a GPU spend their time: kernels, gaps between them, or the host.

    python -m benches.gpu_steps --record                      on a machine with a GPU, ten minutes at most
    JAX_PLATFORMS=cpu python -m benches.gpu_steps --tiny      on the CPU, one small layer: does this script work?

Each variant runs in a process of its own, because XLA reads its flags once; the most informative come first, and after
--minutes no further one begins. Each result is in build/results/gpu-steps-PLATFORM.json as soon as it is there, and a
second call runs only the variants that the file lacks. docs/profile.md says what the figures mean.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from benches.record import ROOT, arguments, record, recorded

MODEL = "Qwen/Qwen2.5-3B-Instruct"
UPDATES = ("demo", "gsm8k_qwen25_3b_lora")
SHAPES = ("2x1536", "4x1152", "3x1536")
"""Rows and tokens of a micro-batch, tried with the last of UPDATES."""
BUFFERS = "--xla_gpu_enable_command_buffer"
CALL = "8"
"""Decode steps of a call, as `rollout.refill_steps` has them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One measurement: what a process runs, and XLA's flags in it."""

    name: str
    given: Sequence[str]
    flags: str = ""


def variants(model: str, shapes: Sequence[str]) -> Iterator[Variant]:
    """Yield what is measured, the most informative first."""
    decode, (demo, large) = f"decode:{model}", (f"update:{each}" for each in UPDATES)
    yield Variant(name="decode", given=[decode])
    yield Variant(name="decode, no command buffers", given=[decode], flags=f"{BUFFERS}=")
    yield Variant(name="decode, one look a call", given=[decode, "--looks", CALL])
    yield Variant(name="update, demo", given=[demo])
    yield Variant(name="update, 3B", given=[large])
    yield Variant(name="decode, loops in command buffers", given=[decode], flags=f"{BUFFERS}=+WHILE,+CONDITIONAL")
    yield Variant(name="decode, four steps unrolled", given=[decode, "--looks", "4", "--unrolled"])
    yield Variant(name="decode, graphs from 1 kernel on", given=[decode], flags="--xla_gpu_graph_min_graph_size=1")
    yield Variant(name="decode, 32 steps a call", given=[decode, "--set", "refill_steps=32"])
    for shape in shapes:
        rows, _, tokens = shape.partition("x")
        sizes = (f"train.rows_per_device={rows}", f"train.row_tokens={tokens}")
        yield Variant(name=f"update, 3B, {shape}", given=[large, *(part for size in sizes for part in ("--set", size))])
    yield Variant(name="decode, demo", given=["decode:demo"])


def measure(variant: Variant, limit_s: float, environment: Mapping[str, str], *, tiny: bool) -> dict[str, object]:
    """Run one variant; a failure is part of the result: an XLA that lacks a flag ends the process."""
    flags = " ".join(filter(None, [environment.get("XLA_FLAGS"), variant.flags]))
    command = [sys.executable, "-m", "benches.children.gpu_step", *variant.given, *(["--tiny"] if tiny else [])]
    begun = time.perf_counter()
    row: dict[str, object] = {"name": variant.name, "flags": variant.flags, "given": list(variant.given)}
    try:
        own = {**environment, "XLA_FLAGS": flags}
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return row | {"failed": f"not done after {limit_s:.0f} s"}
    row["process_s"] = round(time.perf_counter() - begun, 1)
    if done.returncode:
        return row | {"failed": done.stderr[-1000:]}
    return row | json.loads(done.stdout.splitlines()[-1])


def line(row: dict[str, object]) -> str:
    """One line of the table that is printed."""
    if "failed" in row:
        return f"{row['name']}: {str(row['failed']).strip().splitlines()[-1]}"
    whole = row.get("call_ms") or 1e3 * float(str(row["wall_s"]))
    names = ("traced_ms", "busy_ms", "gap_ms", "long_gap_ms", "outside_ms", "kernels", "median_kernel_us")
    return f"{row['name']}: {whole:.4g} ms; " + ", ".join(f"{name} {row[name]:.4g}" for name in names)


def options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", default=MODEL, help="whose shape is decoded")
    parser.add_argument("--shapes", nargs="*", default=SHAPES, metavar="ROWSxTOKENS", help="of the update of 3B")
    parser.add_argument("--minutes", type=float, default=9.5, help="of all variants")
    parser.add_argument("--limit-s", type=float, default=120, help="of one variant")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="variants to run; default: all")
    parser.add_argument("--tiny", action="store_true", help="one small layer, a second or two of work each")
    return parser.parse_args()


def main() -> int:
    """Measure and record; the exit status is 1 if a variant failed or had no time."""
    args, begun = options(), time.perf_counter()
    chosen = [each for each in variants(args.model, args.shapes) if args.only is None or each.name in args.only]
    name = f"gpu-steps-{'cpu' if args.tiny else 'gpu'}"
    rows = {row["name"]: row for row in recorded(name, "rows", args.results) or ()}
    about = {key: recorded(name, key, args.results) for key in ("machine", "versions") if rows}
    children = dict(os.environ)
    os.environ["JAX_PLATFORMS"] = "cpu"  # `record` asks jax for this machine's devices, which the variants need
    for variant in chosen:
        left = 60 * args.minutes - (time.perf_counter() - begun)
        if left < 10 or "failed" not in rows.get(variant.name, {"failed": ""}):
            continue
        row = measure(variant, min(args.limit_s, left), children, tiny=args.tiny)
        print(line(row), flush=True)
        about |= {key: row.pop(key) for key in ("machine", "versions") if key in row}
        rows[variant.name] = row
        record(name, {**about, "rows": list(rows.values())}, args.results)
    return int(any("failed" in rows.get(variant.name, {"failed": ""}) for variant in chosen))


if __name__ == "__main__":
    sys.exit(main())
