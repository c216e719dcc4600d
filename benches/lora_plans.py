"""Which models train with LoRA on which machines, by the compiler: full training beside it, by the closed form.

    python -m benches.lora_plans [CASE ...]      (ten minutes of two cores a case; of GPUs with podium-rl[plan-gpu])

Of each case the update, the largest prefill and the decode of all slots are compiled: one of them is the largest.
Settings are those that `podium plan MODEL` takes, the most rows and slots that fit by the closed form, unless the case
says otherwise. Cases that the results have already, from the same commit or another, stay there.
"""

import json
from typing import Any

from benches.record import arguments, record, recorded
from podium.accelerators import GIB, find_accelerator
from podium.config.document import dump_value
from podium.plan.closed_form.estimate import estimate
from podium.plan.compiled.compile import compile_jobs
from podium.plan.planner import make_jobs
from podium.plan.request.candidate import Case
from podium.plan.request.plan_subject import Subject
from podium.plan.result import judge
from podium.plan.search.study import Study

CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # name: model, machine, settings
    "qwen3-8b-v6e-1": ("Qwen/Qwen3-8B", "v6e-1", ("lora.rank=32",)),
    "qwen3-32b-v6e-8": ("Qwen/Qwen3-32B", "v6e-8", ("lora.rank=32",)),
    "qwen2.5-7b-h100-1": ("Qwen/Qwen2.5-7B-Instruct", "h100-1", ("lora.rank=32",)),
    "qwen2.5-7b-l4-1": ("Qwen/Qwen2.5-7B-Instruct", "l4-1", ("lora.rank=32", "lora.base=int8")),
    "qwen3-8b-rtx4090-1": ("Qwen/Qwen3-8B", "rtx4090-1", ("lora.rank=32", "lora.base=nf4")),
    "qwen3-8b-v5e-1": ("Qwen/Qwen3-8B", "v5e-1", ("lora.rank=32", "lora.base=nf4")),
}
PHASES = ("update", "decode", "prefill")
NAME = "lora-planned"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=", ".join(CASES))
    args = parser.parse_args()
    known = {row["case"]: row for row in recorded(NAME, "rows", args.results) or []}
    for name in args.cases or CASES:
        known[name] = planned(name)
        print(json.dumps(known[name], indent=2), flush=True)
        record(NAME, {"rows": [known[case] for case in CASES if case in known]}, args.results)


def planned(name: str) -> dict[str, Any]:
    """What compiler and closed form say of a case."""
    model, machine, settings = CASES[name]
    accelerator = find_accelerator(machine)

    study, case = Study(Subject(model=model, settings=settings)), Case(accelerator)
    run, defaults = study.run(case), study.defaults(accelerator)
    names = study.programs(case, PHASES)
    compiled = compile_jobs(make_jobs(run, names))
    code = sum(each.memory.code for each in compiled)
    estimated = {each.name: each for each in estimate(run.sizes)}
    plan = study.plan(case, closed_form=True)
    worst_full = Study(Subject(model=model)).plan(case, closed_form=True).worst
    assert plan.step is not None
    verdict = judge((each.device_bytes + code for each in compiled), accelerator.hbm_bytes)
    return {
        "case": name,
        "settings": [*(f"{each.key}={dump_value(each.value)}" for each in defaults), *settings],
        "usable_gib": round(accelerator.hbm_bytes / GIB, 2),
        "verdict": "does_not_fit" if any(each.refused for each in compiled) else verdict,
        "full_training_gib": round(worst_full.bytes / GIB, 1),
        "step_s_estimated": [round(each, 1) for each in (plan.step.value, plan.step.low, plan.step.high)],
        "phases": [
            {
                "program": program,
                "gib": round((each.device_bytes + code) / GIB, 2),
                "closed_form_gib": round(estimated[program.partition(":")[0]].total / GIB, 2),
                "compile_s": round(each.compile_s, 1),
                "parts_gib": {part: round(size / GIB, 2) for part, size in each.parts.items()},
                "beside_gib": {part: round(size / GIB, 2) for part, size in each.residents.items()},
            }
            for program, each in zip(names, compiled, strict=True)
        ],
    }


if __name__ == "__main__":
    main()
