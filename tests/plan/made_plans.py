"""Plans made by hand, as the planner would make them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from podium.accelerators import find_accelerator
from podium.hlo.cost import CollectiveTotal
from podium.plan.request.candidate import Case, Change
from podium.plan.request.phase_sizes import Planned
from podium.plan.request.plan_subject import Subject
from podium.plan.request.workload import Workload
from podium.plan.result import LargeArray, Peak, Phase, Plan, Seconds, judge, total
from podium.plan.search.study import Outcome, RunCost, Study

GIB = 2**30
HBM = int(31.25 * GIB)
RESIDENTS = {"parameters": 1.5, "optimizer": 3.0, "rollout_weights": 5.75}


def seconds(value: float, spread: float = 0.2) -> Seconds:
    return Seconds(value=value, low=value * (1 - spread), high=value * (1 + spread))


def gathers(sent: float, calls: float) -> CollectiveTotal:
    return CollectiveTotal(kind="all-gather", axes=("fsdp",), group=8, overlaps=False, calls=calls, sent=sent)


def phase(name: str, *, took: float | None = 1.0, hbm: int = HBM, compiled: bool = True, **changed: Any) -> Phase:
    """A phase whose `gib` of other parts stand beside the residents."""
    parts = {part: int(size * GIB) for part, size in (RESIDENTS | changed.pop("gib", {})).items()}
    size = sum(parts.values())
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    fields: dict[str, Any] = {
        "bytes": size,
        "parts": parts,
        "fits": size <= hbm,
        "seconds": None if took is None else seconds(took),
        "bound_by": "compute",
        "largest": tuple(LargeArray(name=part, shape="bf16[36,2048]", bytes=bytes) for part, bytes in largest),
        "calls": 4.0,
        "collectives": (),
        "flops": 1e15,
        "closed_form_flops": 0.98e15,
        "compile_s": 60.0 if compiled else None,
        "compiled": compiled,
    }
    return Phase(name=name, **{**fields, **changed})


def phases(**update: Any) -> tuple[Phase, ...]:
    """The phases of a run that fits; `update` changes its update."""
    return (
        phase("init", took=None, calls=0.0),
        phase("sync", took=0.05, calls=1.0, gib={"gathered_weights": 0.7}, bound_by="ici"),
        phase("prefill", took=0.12, gib={"kv_cache": 2.4, "logits": 1.1}, calls=3.0),
        phase("copy", took=0.01, gib={"kv_cache": 2.4}, calls=30.0, bound_by="latency"),
        phase("decode", took=1.77, gib={"kv_cache": 4.8, "logits": 0.6}, calls=150.0, bound_by="hbm"),
        phase("update", **{"took": 1.1, "gib": {"layer_activations": 12.1, "logits": 2.0, "batch": 0.01}, **update}),
        phase("checkpoint", took=None, calls=0.0, compiled=False),
    )


def plan(*, hbm: int = HBM, made: tuple[Phase, ...] | None = None, **changed: Any) -> Plan:
    """A plan of these phases; its verdict, head-room and step follow from them."""
    made = made or phases()
    worst = max(each.bytes for each in made)
    step = total(each.seconds for each in made if each.seconds is not None) + seconds(0.05)
    fields: dict[str, Any] = {
        "config": "gsm8k_qwen25_3b",
        "accelerator": "v6e-8",
        "devices": 8,
        "hbm_bytes": hbm,
        "verdict": judge([worst], hbm),
        "spare_bytes": hbm - worst,
        "phases": made,
        "host": seconds(0.05),
        "step": step,
        "tokens_per_s_per_chip": step.rate(25_600 / 8),
        "workload": workload(),
        "micro_batches": 4,
        "notes": ("Lengths are gsm8k's: 200 tokens on average.",),
        "estimate_only": not any(each.compiled for each in made),
        "versions": {"podium": "0.1.0", "libtpu": "0.0.42.1"},
        "slots": 64,
    }
    return Plan(**{**fields, **changed})


def outcome(made: Plan | None = None, *changes: Change, on: str = "v6e-8", **known: Any) -> Outcome:
    """What a study would say of a plan."""
    return Outcome(case=Case(find_accelerator(on), changes), known=made, **known)


def written(setting: str) -> Change:
    """A change as --compare takes it."""
    key, _, value = setting.partition("=")
    return Change(key=key, value=value, written=True)


def too_large() -> Plan:
    return plan(made=phases(gib={"saved_activations": 24.2, "logits": 2.0}))


def close() -> Plan:
    return plan(made=phases(gib={"layer_activations": 20.6}))


def estimated() -> Plan:
    made = tuple(dataclasses.replace(each, compiled=False, compile_s=None) for each in phases())
    return plan(made=made, versions={"podium": "0.1.0"})


def workload(**changed: Any) -> Workload:
    fields: dict[str, Any] = {
        "prefill_calls": {128: 3},
        "prefill_tokens": 1_600,
        "copy_calls": 30,
        "copied_pages": 128,
        "decodes": {128: (150, 600, 250.0)},
        "occupied_slot_steps": 25_000,
        "mean_context": 200.0,
        "prompt_tokens": 1_600,
        "completion_tokens": 25_600,
        "completions": 128,
    }
    return Workload(**{**fields, **changed})


class MadeStudy(Study):
    """A study whose plans, runs, costs and peaks are made by hand."""

    def __init__(
        self,
        make: Callable[[Case, bool], Plan],
        *,
        fast: bool = False,
        run: Callable[[Case], Planned] | None = None,
        cost: Callable[[Case, Plan], RunCost | None] = lambda case, plan: None,
        peak: Callable[[Case, str], Peak] | None = None,
    ) -> None:
        """`make(case, fast)` plans a case; `peak(case, phase)` compiles its program of this phase."""
        super().__init__(Subject(), by="closed_form" if fast else "compiler")
        self.make, self.made_run, self.made_cost, self.made_peak = make, run, cost, peak

    def plan(self, case: Case, *, closed_form: bool = False, **_: Any) -> Plan:
        return self.make(case, closed_form or self.fast)

    def run(self, case: Case) -> Planned:
        assert self.made_run is not None, "no run is asked for"
        return self.made_run(case)

    def cost(self, case: Case, plan: Plan) -> RunCost | None:
        return self.made_cost(case, plan)

    def peaks(self, asked: Sequence[tuple[Case, Sequence[str]]]) -> list[Peak]:
        assert self.made_peak is not None, "the closed form compiles nothing"
        return [self.made_peak(case, phase) for case, (phase,) in asked]

    def traced_peak(self, case: Case, phases: Sequence[str]) -> None:
        return None

    def moved(self, cases: Sequence[Case]) -> tuple[str, ...]:
        return ("update",)
