"""What does the layout of the cache cost on a TPU? Plans of models with heads of 64, compiled beside the closed form.

    python -m benches.cache_rows

For each case, which `podium plan MODEL --on MACHINE` plans with default settings, the seconds of a step and the memory
of the decode program. Nothing here runs on a TPU. Half a minute of two cores for each case whose programs are not
cached.
"""

import json
import subprocess
import sys
from typing import Any

from benches.record import arguments, record

CASES = (
    ("meta-llama/Llama-3.2-1B-Instruct", "v6e-1", ()),
    ("meta-llama/Llama-3.2-1B-Instruct", "v6e-1", ("--set", "rollout.slots=32")),
    ("meta-llama/Llama-3.2-1B-Instruct", "v5p-8", ()),
    ("Qwen/Qwen2.5-0.5B-Instruct", "v6e-1", ()),
    ("Qwen/Qwen2.5-0.5B-Instruct", "v6e-8", ()),
)


def main() -> None:
    args = arguments(__doc__).parse_args()
    rows: list[dict[str, object]] = []
    for model, machine, settings in CASES:
        # Without a config and --compile, `podium plan` answers by the closed form.
        compiled, estimated = (plan(model, "--on", machine, *settings, *how) for how in (("--compile",), ()))
        rows.append(
            {
                "model": model,
                "machine": machine,
                "settings": list(settings),
                "step_s": round(compiled["step_seconds"]["value"], 2),
                "closed_form_step_s": round(estimated["step_seconds"]["value"], 2),
                "decode_gib": round(decode(compiled)["gib"], 2),
                "closed_form_decode_gib": round(decode(estimated)["gib"], 2),
                "cache_gib": round(decode(compiled)["parts_gib"]["kv_cache"], 2),
            }
        )
        print(rows[-1], flush=True)
    record("cache-rows-planned", {"rows": rows}, args.results, packages=["libtpu"])


def plan(*arguments: str) -> dict[str, Any]:
    """What `podium plan` says."""
    command = [sys.executable, "-m", "podium.cli", "plan", *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def decode(plan: dict[str, Any]) -> dict[str, Any]:
    """The phase that decodes."""
    return next(phase for phase in plan["phases"] if phase["name"] == "decode")


if __name__ == "__main__":
    main()
