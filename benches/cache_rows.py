"""What does the layout of the cache cost on a TPU? Plans of models with small heads, compiled beside the closed form.

    python -m benches.cache_rows

For each case the seconds of a step, by the compiled programs and by the closed form, the memory of the programs that
hold the cache: no program needs room for another cache. Nothing here runs on a TPU. About half a minute of two cores for
each case.
"""

from benches.record import arguments, record
from podium.accelerators import GIB, find_accelerator
from podium.models.presets import find_architecture
from podium.plan.planner import make_plan
from podium.plan.result import Plan
from podium.settings import load_settings

CASES = (
    ("meta-llama/Llama-3.2-1B-Instruct", "v6e-1", ()),
    ("meta-llama/Llama-3.2-1B-Instruct", "v6e-1", ("rollout.slots=32",)),
    ("meta-llama/Llama-3.2-1B-Instruct", "v5p-8", ()),
    ("Qwen/Qwen2.5-0.5B-Instruct", "v6e-1", ()),
    ("Qwen/Qwen2.5-0.5B-Instruct", "v6e-8", ()),
)
TASK = "tasks=[{name: gsm8k}]"


def main() -> None:
    args = arguments(__doc__).parse_args()
    rows: list[dict[str, object]] = []
    for model, machine, settings in CASES:
        config = load_settings([], [f"model={model}", "name=cache-rows", TASK, *settings], {}).config
        accelerator = find_accelerator(machine)
        plans = {fast: make_plan(config, accelerator, fast=fast) for fast in (False, True)}
        decode = plans[False].phase("decode")
        cache = decode.parts["kv_cache"]
        rows.append(
            {
                "model": model,
                "machine": machine,
                "settings": list(settings),
                "head_dim": find_architecture(config.model).head_dim,
                "step_s": round(seconds(plans[False]), 2),
                "closed_form_step_s": round(seconds(plans[True]), 2),
                "cache_gib": round(cache / GIB, 2),
                "decode_gib": round(decode.bytes / GIB, 2),
                "closed_form_decode_gib": round(plans[True].phase("decode").bytes / GIB, 2),
            }
        )
        print(rows[-1], flush=True)
    record("cache-rows-planned", {"rows": rows}, args.results, packages=["libtpu"])


def seconds(plan: Plan) -> float:
    """Of a step; all cases fit."""
    assert plan.step is not None
    return plan.step.value


if __name__ == "__main__":
    main()
