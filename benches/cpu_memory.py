"""How much memory does a GRPO step of a 0.5B model take on a CPU? Every program compiled, beside the closed form.

    python -m benches.cpu_memory          (some minutes; no weights are made)

Qwen2.5-0.5B in float32, 8 completions of 256 tokens to 2 prompts of up to 256, AdamW, in one micro-batch of 8 rows and
in two of 4. Of each program its own memory and what stays beside it, by XLA's account: the step takes the most of them.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from benches.record import arguments, record
from podium.accelerators import Accelerator
from podium.config.schema import Config
from podium.models.presets import find_architecture
from podium.plan.closed_form.estimate import estimate
from podium.plan.compiled.compile import compile_phases
from podium.plan.planner import make_jobs
from podium.plan.request.phase_sizes import Planned

BAR_GB = 9.0
CPU = Accelerator(name="cpu-1", generation="cpu", devices=1, hosts=1, hbm_bytes=16 * 10**9)
PROGRAMS = ("init", "sync", "prefill:256", "copy", "decode:8", "update")
GB = 1e9


def step(rows: int) -> Config:
    """Make the config of a step whose update takes `rows` rows at once."""
    settings: dict[str, Any] = {
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "tasks": [{"name": "arithmetic"}],
        "prompts_per_step": 2,
        "group_size": 4,
        "rollout": {
            "max_prompt_tokens": 256,
            "max_new_tokens": 256,
            "slots": 8,
            "prefill_rows": 2,
            "dtype": "float32",
        },
        "train": {"rows_per_device": rows, "dtype": "float32"},
    }
    return Config.model_validate(settings)


def measured(rows: int) -> dict[str, Any]:
    """What each program of the step takes, in GB."""
    config = step(rows)
    decoder = find_architecture(config.model)
    jobs = make_jobs(Planned.of(config, CPU, decoder), dict.fromkeys(PROGRAMS, 1.0))
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_phases(jobs, folder=Path(folder), at_once=1)
    forms = {form.name: form.total for form in estimate(Planned.of(config, CPU, decoder).sizes)}
    programs = {
        name: {
            "compiled_gb": round(each.device_bytes / GB, 2),
            "closed_form_gb": round(forms[kind] / GB, 2) if (kind := name.partition(":")[0]) in forms else None,
            "parts_gb": {part: round(size / GB, 2) for part, size in each.parts.items() if size > GB / 100},
            "beside_gb": {part: round(size / GB, 2) for part, size in each.residents.items()},
        }
        for name, each in compiled.items()
    }
    return {"rows": rows, "peak_gb": max(each["compiled_gb"] for each in programs.values()), "programs": programs}


def main() -> None:
    args = arguments(__doc__).parse_args()
    cases = [measured(rows) for rows in (8, 4)]
    print(record("memory-cpu", {"bar_gb": BAR_GB, "cases": cases}, args.results).read_text())
    sys.exit(cases[0]["peak_gb"] > BAR_GB)


if __name__ == "__main__":
    main()
