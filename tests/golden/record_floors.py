"""Record how far programs of some presets are from their floors -> floors.json; `make test-long` compares.

    python tests/golden/record_floors.py             (minutes of two cores; needs libtpu and 'podium-rl[plan-gpu]')

A few of the cases of `benches.floors`, which has all: heads of 64, 128 and 256, windows, tied and untied heads, one
device and several, a TPU and a GPU. What it has recorded already stays; delete the file to record all anew.
"""

import json
from pathlib import Path

from benches.floors import phases

GOLDEN = Path(__file__).parent / "floors.json"
CASES = (
    ("meta-llama/Llama-3.2-1B-Instruct", "v6e-1", ("prefill", "decode", "update")),
    ("Qwen/Qwen2.5-0.5B-Instruct", "v5litepod-1", ("decode",)),
    ("google/gemma-3-1b-it", "v6e-8", ("decode",)),
    ("Qwen/Qwen3-8B", "v6e-8", ("sync", "decode")),
    ("Qwen/Qwen3-30B-A3B", "v6e-8", ("prefill",)),
    ("Qwen/Qwen2.5-3B-Instruct", "h100-1", ("decode",)),
)


def ratios(model: str, machine: str, names: tuple[str, ...]) -> dict[str, float]:
    """The ratio of each phase's time to its floor."""
    found = {phase.name: phase.over_floor for phase in phases(model, machine, names)}
    return {name: round(ratio, 3) for name, ratio in found.items() if ratio is not None}


if __name__ == "__main__":
    recorded = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for model, machine, names in CASES:
        if f"{model} {machine}" not in recorded:
            recorded[f"{model} {machine}"] = ratios(model, machine, names)
            GOLDEN.write_text(json.dumps(recorded, indent=1) + "\n")
