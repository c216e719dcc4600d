"""How many rows of an update fit on a chip? The update compiled for TPUs that are not here, by the planner's own means.

    python -m benches.rows [CASE ...]

Each case is a model, a machine and settings; what is said of it is the compiler's: its peak, the operations of its text
over those of the closed form (beyond 1.05 it recomputes to make room, and the program does not count as fitting), and
which transfers it waits for. Seconds are the roofline's, of one micro-batch. Minutes of two cores for each case;
without names all of them.
"""

import dataclasses
import tempfile
from pathlib import Path

from benches.record import arguments, record
from podium.accelerators import GIB, find_accelerator
from podium.config.load import load
from podium.hlo.cost import roofline
from podium.models.presets import find_architecture
from podium.plan.calibration import load_chip
from podium.plan.closed_form.estimate import update_phase
from podium.plan.compiled.compile import cache_folder, compile_phases
from podium.plan.compiled.compile_worker import Job
from podium.plan.request.phase_sizes import Planned

ONCE = 1  # micro-batch of a call: the closed form's work is of one
RECOMPUTED = 1.05
LEAN = ("train.remat=offload",)
SHORT = ("train.row_tokens=2560", "train.rows_per_device=8")
MANY = ("train.row_tokens=2560", "train.rows_per_device=36")
MOMENTS = "train.offload_optimizer=true"
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # name: the config, the machine, settings beside it
    "3b-v6e-8-2560": (
        "configs/gsm8k.yaml",
        "v6e-8",
        (*LEAN, "train.row_tokens=2560", "train.rows_per_device=64", "train.layer_chunk_tokens=10240"),
    ),
    "3b-v6e-8-2560-short": ("configs/gsm8k.yaml", "v6e-8", SHORT),
    "3b-v6e-8-2560-short-moments": ("configs/gsm8k.yaml", "v6e-8", (*SHORT, MOMENTS)),
    "3b-v6e-8-2560-many": ("configs/gsm8k.yaml", "v6e-8", MANY),
    "3b-v6e-8-2560-many-moments": ("configs/gsm8k.yaml", "v6e-8", (*MANY, MOMENTS)),
    "7b-v4-16-2176": (
        "configs/gsm8k.yaml",
        "v4-16",
        (
            *LEAN,
            "model=Qwen/Qwen2.5-7B-Instruct",
            "train.row_tokens=2176",
            "train.rows_per_device=24",
            "train.layer_chunk_tokens=4352",
        ),
    ),
    "3b-v6e-8-65536": (
        "configs/gsm8k.yaml",
        "v6e-8",
        (*LEAN, "train.row_tokens=65536", "train.rows_per_device=1"),
    ),
    "3b-v6e-8-sp8-262144": (
        "configs/gsm8k.yaml",
        "v6e-8",
        (*LEAN, "mesh=sp:8", "train.row_tokens=262144", "train.rows_per_device=1"),
    ),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=", ".join(CASES))
    args = parser.parse_args()
    rows = [planned(name) for name in args.cases or CASES]
    path = record("rows-planned", {"rows": rows}, args.results, packages=["libtpu"])
    print(path.read_text())


def planned(name: str) -> dict[str, object]:
    """What the compiler says of a case."""
    path, machine, settings = CASES[name]
    accelerator = find_accelerator(machine)
    config = load([path], list(settings), {}).config
    decoder = find_architecture(config.model)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            phase="update",
            config=config,
            decoder=decoder,
            accelerator=accelerator,
            programs=cache_folder() / "programs",
        )
        compiled = compile_phases([job], folder=Path(folder))["update"]
    form = update_phase(Planned.of(config, accelerator, decoder).sizes)
    chip = load_chip(accelerator.generation)
    cost = compiled.cost(ONCE)
    seconds = roofline(cost, chip.peaks, links=chip.links)
    recomputed = cost.flops / form.flops
    fits = compiled.device_bytes + compiled.memory.code <= accelerator.hbm_bytes
    return {
        "case": name,
        "settings": list(settings),
        "rows_per_chip": config.train.rows_per_device,
        "peak_gib": round(compiled.device_bytes / GIB, 2),
        "hbm_gib": round(accelerator.hbm_bytes / GIB, 2),
        "closed_form_gib": round(form.total / GIB, 2),
        "operations_over_closed_form": round(recomputed, 3),
        "seconds": {name: round(value, 3) for name, value in seconds.parts.items()},
        "sent_gb": [
            [each.kind, "beside products" if each.overlaps else "waited for", round(each.sent / 1e9, 2)]
            for each in cost.collectives
        ],
        "fits": bool(fits and recomputed <= RECOMPUTED),
        "parts_gib": {part: round(size / GIB, 2) for part, size in compiled.parts.items()},
        "largest": [dataclasses.asdict(each) for each in compiled.largest[:6]],
    }


if __name__ == "__main__":
    main()
