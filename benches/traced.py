"""How far traced programs are from compiled ones, beside the closed form: memory of recorded plans, and operations.

    python -m benches.traced               (four minutes of CPU; nothing is compiled)
    python -m benches.traced --count 4     (of each file)

The compiled figures are recorded ones: the plans of tests/golden, and the rows of `benches.closed_form --at-limit`,
those of 23 November with models of one kind of layer, and the last twelve, with all models. The programs are those of
today, so a row whose program has changed since shows that change too. Where closed form and trace are more than 8 %
apart, one is wrong: `apart` names these rows, with the one that is further off. A compiler that runs short of memory
computes arrays again instead of keeping them, so figures are also given for the programs whose trace fits. Writes
benches/results/traced-planned.json.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benches.record import MEASUREMENTS, RESULTS, ROOT, arguments, record, write_section
from podium.accelerators import GIB, find_accelerator
from podium.config.schema import Config
from podium.plan.compiled.phases import PhaseProgram
from podium.plan.request.phase_sizes import Planned
from podium.plan.traced.absent_devices import absent_programs, trace_memory
from podium.plan.traced.estimate import estimate
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.run.roles import find_decoder
from podium.settings import load_settings

ROWS = ("closed-form-limit-planned", "closed-form-limit-some-planned")
PLANS = ROOT / "tests" / "golden" / "behaviour" / "plans.json"
PATTERNS = ("gemma-3", "Qwen3.5", "gpt-oss")
"""Parts of the names of models whose layers are of several kinds."""
APART = 0.08
REPEATED = 1.02
"""Ratio of compiled to traced operations from which on a program is named."""


class Case(NamedTuple):
    """A recorded program."""

    machine: str
    config: Config
    phase: str
    compiled_gib: float
    """Without code: all else on a device while it runs."""
    flops: float | None
    """Operations of all its calls in a step; None if they were not recorded."""
    about: Mapping[str, Any]


def limit_cases(name: str, count: int | None) -> Iterator[Case]:
    """The programs of a file of rows."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    for row in rows[:count]:
        settings = {key: value for key, value in row["settings"].items() if key != "lengths"}
        texts = [f"{key}={value}" for key, value in settings.items()]
        config = load_settings([ROOT / "configs" / "gsm8k.yaml"], texts, {}).config
        for phase, compiled in row["compiled_gib"].items():
            yield Case(row["tpu"], config, phase, compiled, None, {"file": name, "settings": settings})


def golden_cases() -> Iterator[Case]:
    """The programs of the recorded plans."""
    for name, plan in json.loads(PLANS.read_text()).items():
        path, machine = name.split()
        config = load_settings([ROOT / path], [], {}).config
        for phase in plan["phases"]:
            if phase["compiled"] and phase["name"] != "copy":
                own = phase["gib"] - phase["parts_gib"]["code"]
                flops = phase["flops"] / plan["micro_batches"] if phase["name"] == "update" else None
                yield Case(machine, config, phase["name"], own, flops, {"file": "plans", "config": path})


def largest_program(phase: str, programs: Mapping[str, PhaseProgram]) -> str:
    """The name of a phase's largest program."""
    if phase in programs:
        return phase
    return max((each for each in programs if each.split(":")[0] == phase), key=lambda each: int(each.split(":")[1]))


def compare(case: Case) -> dict[str, Any]:
    """One program by the closed form and by its trace."""
    accelerator, decoder = find_accelerator(case.machine), find_decoder(case.config)
    start = time.process_time()
    programs = absent_programs(resolve(case.config, decoder, Machine.planned(accelerator)), accelerator)
    name = largest_program(case.phase, programs)
    found = trace_memory(programs[name], accelerator)
    took = time.process_time() - start
    traced = (found.peak + sum(programs[name].residents.values())) / GIB
    forms = {each.name: each.total / GIB for each in estimate(Planned.of(case.config, accelerator, decoder).sizes)}
    closed = forms.get(case.phase)
    return {
        **case.about,
        "machine": case.machine,
        "model": case.config.model,
        "program": name,
        "compiled_gib": round(case.compiled_gib, 3),
        "traced_gib": round(traced, 3),
        "closed_form_gib": None if closed is None else round(closed, 3),
        "traced_error": round(traced / case.compiled_gib - 1, 4),
        "closed_form_error": None if closed is None else round(closed / case.compiled_gib - 1, 4),
        "hbm_gib": round(accelerator.hbm_bytes / GIB, 3),
        "operations": case.flops and round(case.flops / found.cost.flops, 5),
        "at_peak": [f"{size / GIB:.2f} {array!r}" for size, array in found.largest[:4]],
        "cpu_s": round(took, 2),
    }


def kind(row: Mapping[str, Any]) -> str:
    """The group of a row in the figures."""
    if row["program"] != "update":
        return "other programs"
    layers = "patterns" if any(part in row["model"] for part in PATTERNS) else "one kind of layer"
    return f"updates, {'TPU' if row['machine'][0] == 'v' else 'GPU'}, {layers}"


def figures(rows: Sequence[Mapping[str, Any]], by: str) -> dict[str, Any]:
    """The errors of some rows by `traced` or `closed_form`."""
    both = [row for row in rows if row["closed_form_error"] is not None]
    errors = [row[f"{by}_error"] for row in both]
    return {
        "programs": len(both),
        "mean": round(statistics.mean(map(abs, errors)), 4),
        "bias": round(statistics.mean(errors), 4),
        "lowest": min(errors),
        "highest": max(errors),
        "false_fits": sum(row[f"{by}_gib"] <= row["hbm_gib"] < row["compiled_gib"] for row in both),
    }


def apart(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each program of which closed form and trace say different things."""
    for row in rows:
        traced, closed = row["traced_error"], row["closed_form_error"]
        if closed is not None and abs(row["traced_gib"] - row["closed_form_gib"]) > APART * row["compiled_gib"]:
            wrong = "closed form" if abs(closed) > abs(traced) else "trace"
            where = f"{row['model'].split('/')[-1]} {row['program']} on {row['machine']}"
            yield f"{where}: traced {traced:+.1%}, closed form {closed:+.1%}; the {wrong} is further off"


def table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[str]:
    """The figures for docs/planner-measurements.md."""
    yield "| programs | | number | mean error | lowest | highest | false fits |"
    yield "|---|---|---|---|---|---|---|"
    for name, forms in found.items():
        for form, each in forms.items():
            errors = f"{each['mean']:.1%} | {each['lowest']:+.1%} | {each['highest']:+.1%}"
            yield f"| {name} | {form.replace('_', ' ')} | {each['programs']} | {errors} | {each['false_fits']} |"


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, help="rows of each file; unset: all")
    chosen = parser.parse_args()
    cases = [*golden_cases(), *(case for name in ROWS for case in limit_cases(name, chosen.count))]
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows.append(row := compare(case))
        print(row["machine"], row["model"], row["program"], row["traced_error"], row["closed_form_error"], flush=True)
    groups = {name: [row for row in rows if kind(row) == name] for name in sorted({kind(row) for row in rows})}
    for name in [name for name in groups if name.startswith("updates")]:
        if fitting := [row for row in groups[name] if row["traced_gib"] <= row["hbm_gib"]]:
            groups[f"{name}, whose trace fits"] = fitting
    found = {name: {by: figures(each, by) for by in ("traced", "closed_form")} for name, each in groups.items()}
    repeated = [f"{row['machine']} {row['model']}" for row in rows if (row["operations"] or 0) > REPEATED]
    result = {"figures": found, "apart": list(apart(rows)), "computed_twice": repeated, "rows": rows}
    record("traced-planned" if chosen.count is None else "traced-some-planned", result, chosen.results)
    if chosen.count is None:
        write_section(MEASUREMENTS, "traced", list(table(found)), chosen.results)
    print(*result["apart"], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
