"""A teacher of 8B and a critic of 3B, planned: every program of both runs compiled for eight v6e chips.

    python -m benches.signals_planned [CASE ...]      (minutes of two cores a case; compilations are kept)

teacher: Qwen3-8B teaches Qwen3-1.7B by the sampled tokens, 32 prompts with 8 completions of up to 1,024 tokens. critic:
configs/gsm8k_qwen25_3b_ppo.yaml, whose critic is as large as the policy. Of each, memory and seconds by phase,
and the step without the teacher or the critic by the same plan's closed form, since nothing of it is compiled. Writes
benches/results/signals-planned.json; exit status 1 where a bar is missed: both fit, and the teacher takes at most 40 %
of the update.
"""

import sys
from collections.abc import Mapping
from typing import Any

from benches.record import ROOT, arguments, record, recorded, show_progress
from podium.accelerators import GIB, find_accelerator
from podium.config.schema import Config
from podium.plan.planner import make_plan
from podium.plan.request.phase_sizes import Planned
from podium.plan.result import Phase, Plan
from podium.settings import load_settings

NAME, TPU = "signals-planned", "v6e-8"
PPO = ROOT / "configs" / "gsm8k_qwen25_3b_ppo.yaml"
TASK = ["model=Qwen/Qwen3-1.7B", "tasks=[{name: gsm8k}]", "prompts_per_step=32", "rollout.slots=256"]
TAUGHT = [*TASK, "algorithm.recipe=distill", "teacher.model=Qwen/Qwen3-8B"]
TEACHER_BAR = 0.4
"""Largest share of the teacher's seconds in the update's."""


def configs(case: str) -> tuple[Config, Config]:
    """The config of a case, and the same without its teacher or critic."""
    if case == "teacher":
        plain = [*TASK, "algorithm.recipe=grpo"]
        return load_settings([], TAUGHT, {}).config, load_settings([], plain, {}).config
    plain = ["algorithm.recipe=grpo", "critic=null"]
    return load_settings([PPO], [], {}).config, load_settings([PPO], plain, {}).config


def planned(case: str) -> dict[str, Any]:
    """What the plan of a case says, compiled."""
    config, without = configs(case)
    accelerator = find_accelerator(TPU)
    plan = make_plan(Planned.of(config, accelerator), progress=show_progress)
    alone, fast = (make_plan(Planned.of(each, accelerator), by="closed_form") for each in (without, config))
    return {
        "tpu": TPU,
        "verdict": plan.verdict,
        "usable_gib": round(plan.hbm_bytes / GIB, 2),
        "worst": {"phase": plan.worst.name, "gib": round(plan.worst.bytes / GIB, 2)},
        "step_s": seconds(plan),
        "closed_form": {"step_s": seconds(fast), "without": {"step_s": seconds(alone), "gib": gib(alone.worst)}},
        "phases": {each.name: {"gib": gib(each), "s": of(each)} for each in plan.phases if each.calls},
        "closed_form_phases": {each.name: {"gib": gib(each), "s": of(each)} for each in fast.phases if each.calls},
        "compile_s": round(sum(each.compile_s or 0.0 for each in plan.phases), 1),
    }


def seconds(plan: Plan) -> float | None:
    return plan.step and round(plan.step.value, 3)


def of(phase: Phase) -> float | None:
    return phase.seconds and round(phase.seconds.value, 4)


def gib(phase: Phase) -> float:
    return round(phase.bytes / GIB, 2)


def result(known: Mapping[str, Any]) -> dict[str, Any]:
    """What is written of the cases that were compiled."""
    met = {f"{case} fits": row["verdict"] == "fits" for case, row in known.items()}
    if (row := known.get("teacher")) is not None:
        share = row["phases"]["teacher"]["s"] / row["phases"]["update"]["s"]
        met["teacher's share"] = share <= TEACHER_BAR
    return {"cases": dict(known), "bars": {"teacher_of_update": TEACHER_BAR}, "met": met}


def main() -> None:
    """Prints and writes the plans; exit status 1 where a bar is missed."""
    parser = arguments(__doc__)
    cases = ["teacher", "critic"]
    parser.add_argument("cases", nargs="*", choices=[*cases, []], metavar="CASE", help=", ".join(cases))
    args = parser.parse_args()
    known = dict(recorded(NAME, "cases", args.results) or {})
    for case in args.cases or cases:
        known[case] = planned(case)
        print(f"{case}: {known[case]}", flush=True)
        record(NAME, result(known), args.results, packages=["libtpu"])
    sys.exit(not all(result(known)["met"].values()))


if __name__ == "__main__":
    main()
