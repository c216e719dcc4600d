"""How far traced programs are from compiled ones, beside the closed form: memory of recorded plans, and operations.

    python -m benches.traced               (four minutes of CPU; nothing is compiled)
    python -m benches.traced --count 4     (of each file)
    python -m benches.traced --blind 5901 --count 30     (twenty minutes of CPU: each update is compiled)

The compiled figures are recorded ones: the plans of tests/golden, and the random configurations of
`benches.closed_form`, those of 23 November with models of one kind of layer, and the last twelve, with all models. The
programs are those of today, so a row whose program has changed since shows that change too. Where closed form and trace
are more than 8 % apart, one is wrong: `apart` names these rows, with the one that is further off. A compiler that runs
short of memory computes arrays again instead of keeping them, so figures are also given for the programs whose trace
fits. Writes benches/results/traced-planned.json.

With --blind SEED updates are drawn instead whose trace needs nine tenths to eleven tenths of a TPU's memory: all
presets (one in eight with layers of several kinds), every mesh, adapters on each base, each remat, row groups, moments
on the host, attention as a kernel and without, up to 16k tokens. Each is compiled, and its figures are written to
benches/results/traced-blind-SEED-planned.json before the next is drawn. Use a seed for which no figures have been seen
yet. --again repeats the traces for the recorded updates of a seed, and compiles nothing.
"""

import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benches.closed_form import (
    BASES,
    LENGTH_OF_QUADRATIC,
    LIMIT_CHOICES,
    LIMIT_MACHINES,
    LIMIT_ROWS,
    PLANS,
    RANKS,
    gsm8k,
    has_pattern,
)
from benches.record import MEASUREMENTS, RESULTS, ROOT, arguments, record, recorded, write_section
from podium.accelerators import GIB, find_accelerator
from podium.config.schema import Config
from podium.models.presets import PRESETS
from podium.plan.closed_form.estimate import estimate
from podium.plan.compiled.compile import CompilerError, compile_phases
from podium.plan.compiled.phases import PhaseProgram, device_bytes
from podium.plan.planner import make_jobs
from podium.plan.request.phase_sizes import Planned
from podium.plan.traced.absent_devices import absent_programs, trace_memory
from podium.plan.traced.lifetimes import TracedMemory
from podium.run.divisible import check_divisible
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.run.roles import find_decoder
from podium.settings import load_settings

APART = 0.08
REPEATED = 1.02
"""Ratio of compiled to traced operations from which on a program is named."""
BLIND = "traced-blind"
BLIND_COUNT, BLIND_NEAR = 30, (0.9, 1.1)
BLIND_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
MOST_ROWS = 256
EACH_PATTERN = 8
"""Models with layers of several kinds take a minute to compile, so only one update in eight is of such a model."""


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
        config = gsm8k(settings)
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


class Drawn(NamedTuple):
    """An update near the limit of a machine's memory."""

    settings: Mapping[str, Any]
    config: Config
    machine: str
    traced: TracedMemory
    share: float
    """Of the memory that its trace needs."""


def blind_draws(count: int, seed: int) -> Iterator[Drawn]:
    """Updates whose trace needs about a TPU's memory."""
    source, left = random.Random(seed), count
    while left:
        machine, settings = _draw(source, patterns=left % EACH_PATTERN == 0)
        try:
            found = _with_rows(settings, machine, source.uniform(*BLIND_NEAR))
        except ValueError:  # settings that exclude each other, or heads that do not divide over tp
            continue
        if found is not None and BLIND_NEAR[0] <= found.share <= BLIND_NEAR[1]:
            yield found
            left -= 1


def _draw(source: random.Random, *, patterns: bool) -> tuple[str, dict[str, Any]]:
    """A machine, and settings without rows, of a model with layers of one kind or of several."""
    machine = source.choice(LIMIT_MACHINES["tpu"])
    devices = find_accelerator(machine).devices
    settings: dict[str, Any] = {"model": source.choice([name for name in PRESETS if has_pattern(name) == patterns])}
    settings |= {key: source.choice(of) for key, of in LIMIT_CHOICES.items()}
    settings["rollout.max_new_tokens"] = source.choice(BLIND_LENGTHS)
    settings["train.remat"] = source.choice(("layer", "products", "none", "offload"))
    if (rank := source.choice(RANKS)) is not None:
        settings |= {"lora.rank": rank, "lora.base": source.choice(BASES)}
    tp, sp = (source.choice([size for size in (1, 1, 1, 2, 4) if size <= devices]) for _ in range(2))
    settings["mesh"] = f"fsdp:{devices // (tp * sp)},sp:{sp},tp:{tp}"
    settings["rollout.slots"] = settings["rollout.prefill_rows"] = settings["prompts_per_step"] = 4 * devices
    if settings["algorithm.kl"] != "none":
        settings["algorithm.kl_coef"] = 0.01
    longest = settings["rollout.max_prompt_tokens"] + settings["rollout.max_new_tokens"]
    if settings["train.attention"] == "reference" and longest > LENGTH_OF_QUADRATIC:
        settings["train.attention"] = "blocks"
    if source.random() < 0.3:
        settings["train.layer_chunk_tokens"] = source.choice((2, 4)) * longest
    return machine, settings


def _with_rows(settings: dict[str, Any], machine: str, share: float) -> Drawn | None:
    """The settings with a number of rows for which the trace needs about `share` of the memory; None if there is none.

    Two sizes are traced, and a third is found on the line through them. Raises ValueError where settings exclude each
    other.
    """
    aim = share * find_accelerator(machine).hbm_bytes
    one = _trace_update(settings, machine, 1)
    if one is None or one.share > BLIND_NEAR[1]:
        return None
    three = _trace_update(settings, machine, 3)
    if three is None or three.share <= one.share:
        return None
    first = one.share * aim / share
    each = (three.share - one.share) * aim / share / 2
    rows = max(1, round(1 + (aim - first) / each))
    return None if rows > MOST_ROWS else _trace_update(settings, machine, rows)


def _trace_update(settings: Mapping[str, Any], machine: str, rows: int) -> Drawn | None:
    """An update with its trace; None if its arguments alone are too large. Raises ValueError as `_with_rows`."""
    accelerator = find_accelerator(machine)
    own = {**settings, "train.rows_per_device": rows}
    config = gsm8k(own)
    spec = resolve(config, find_decoder(config), Machine.planned(accelerator))
    check_divisible(spec)
    program = absent_programs(spec, accelerator)["update"]
    held = sum(program.residents.values())
    if device_bytes(program.arguments) + held > BLIND_NEAR[1] * accelerator.hbm_bytes:
        return None
    traced = trace_memory(program, accelerator)
    return Drawn(own, config, machine, traced, (traced.peak + held) / accelerator.hbm_bytes)


def ask_compiler(drawn: Drawn) -> dict[str, Any]:
    """An update by its compiler, by its trace and by the closed form; GiB without code."""
    accelerator, before = find_accelerator(drawn.machine), _children_s()
    planned = Planned.of(drawn.config, accelerator)
    found = compile_phases(make_jobs(planned, {"update": 1.0}))["update"]
    closed = _update_bytes(planned)
    traced, compiled, cost = drawn.share * accelerator.hbm_bytes, found.device_bytes, found.cost(1.0)
    return {
        "settings": drawn.settings,
        "machine": drawn.machine,
        "model": drawn.config.model,
        "program": "update",
        "compiled_gib": round(compiled / GIB, 3),
        "code_gib": round(found.memory.code / GIB, 3),
        "traced_gib": round(traced / GIB, 3),
        "closed_form_gib": round(closed / GIB, 3),
        "traced_error": round(traced / compiled - 1, 4),
        "closed_form_error": round(closed / compiled - 1, 4),
        "hbm_gib": round(accelerator.hbm_bytes / GIB, 3),
        "refused": found.refused,
        "operations": cost.flops and round(cost.flops / drawn.traced.cost.flops, 5),
        "traced_bytes": round(drawn.traced.cost.hbm_bytes / cost.hbm_bytes, 4) if cost.hbm_bytes else None,
        "at_peak": [f"{size / GIB:.2f} {array!r}" for size, array in drawn.traced.largest[:4]],
        "compile_cpu_s": round(_children_s() - before, 1),
    }


def _update_bytes(planned: Planned) -> int:
    """Bytes of an update by the closed form."""
    return next(each.total for each in estimate(planned.sizes) if each.name == "update")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def judge_blind(seed: int, found: Iterable[dict[str, Any]], results: Path) -> None:
    """Write the figures after each update."""
    rows: list[dict[str, Any]] = []
    for row in found:
        rows.append(row)
        print(row["machine"], row["model"], row["traced_error"], row["closed_form_error"], flush=True)
        record(f"{BLIND}-{seed}-planned", {"seed": seed, "figures": by_kind(rows), "rows": rows}, results)
    paths = sorted(results.glob(f"{BLIND}-*-planned.json"))
    every = [row for path in paths for row in json.loads(path.read_text())["rows"]]
    write_section(MEASUREMENTS, BLIND, list(table(by_kind(every))), results)


def compiled_rows(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Updates that a seed draws, each compiled."""
    for drawn in blind_draws(count, seed):
        try:
            yield ask_compiler(drawn)
        except CompilerError as error:
            print(drawn.machine, drawn.settings, error, flush=True)


def rows_again(seed: int, results: Path) -> Iterator[dict[str, Any]]:
    """What a seed drew before, with its compiled figures, as it is traced and estimated now."""
    for row in recorded(f"{BLIND}-{seed}-planned", "rows", results):
        settings = row["settings"]
        drawn = _trace_update(settings, row["machine"], settings["train.rows_per_device"])
        if drawn is not None:
            planned = Planned.of(drawn.config, find_accelerator(row["machine"]))
            by = {"traced": drawn.share * row["hbm_gib"], "closed_form": _update_bytes(planned) / GIB}
            again = {f"{form}_gib": round(gib, 3) for form, gib in by.items()}
            again |= {f"{form}_error": round(gib / row["compiled_gib"] - 1, 4) for form, gib in by.items()}
            again["traced_bytes"] = None
            yield row | again | {"at_peak": [f"{size / GIB:.2f} {array!r}" for size, array in drawn.traced.largest[:4]]}


def by_kind(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The figures of each kind of program, traced and by the closed form."""
    groups = {name: [row for row in rows if kind(row) == name] for name in sorted({kind(row) for row in rows})}
    return {name: {by: figures(each, by) for by in ("traced", "closed_form")} for name, each in groups.items()}


def kind(row: Mapping[str, Any]) -> str:
    """The group of a row in the figures."""
    if row["program"] != "update":
        return "other programs"
    layers = "patterns" if has_pattern(row["model"]) else "one kind of layer"
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
    parser.add_argument("--count", type=int, help=f"rows of each file; unset: all. Of a seed; unset: {BLIND_COUNT}")
    parser.add_argument("--blind", type=int, metavar="SEED", help="compile updates that this seed draws")
    parser.add_argument("--again", action="store_true", help="with --blind: only trace what the seed drew before")
    chosen = parser.parse_args()
    if (seed := chosen.blind) is not None:
        again = rows_again(seed, chosen.results) if chosen.again else None
        judge_blind(seed, again or compiled_rows(seed, chosen.count or BLIND_COUNT), chosen.results)
        return 0
    cases = [*golden_cases(), *(case for name in LIMIT_ROWS for case in limit_cases(name, chosen.count))]
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
