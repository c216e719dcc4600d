"""How near `podium plan --fit` comes to the fastest settings that fit, which are found by trying all.

    python -m benches.fit_exhaustive [CASE ...]     (three to six minutes of two cores a case; compilations are kept)

The cases are some of `benches.fit`. The settings that `--fit` varies are enumerated here anew, more finely, and every
combination is costed by the closed form; none of the search's code is used. The closed form orders them by seconds,
but its memory figures are not trusted: settings that it takes for up to a tenth too large are compiled too. The update
and the decode of the fastest settings are compiled in order, until both fit and so does the plan of the whole run;
settings are left out if they recompute alike and are larger, by the closed form, than some that turned out too large.
Then the settings that `--fit` found (benches/results/fit-planned.json) are planned in the same way. Writes
benches/results/fit-exhaustive-planned.json and its table in docs/planner-measurements.md; exit status 1 if the settings
of `--fit` take over 5 % longer.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import get_args

from benches.fit import CASES, cpu_s, given
from benches.fit import NAME as FOUND
from benches.record import MEASUREMENTS, arguments, record, recorded, write_section
from podium.accelerators import GIB, Accelerator, find_accelerator
from podium.config.schema import Config, Remat
from podium.config.sizes import check_split, table_pages
from podium.plan.calibration import find_chip
from podium.plan.planned_device import Device
from podium.plan.planner import make_plan
from podium.plan.request.candidate import Case, Change, Value
from podium.plan.request.phase_sizes import Planned, RunSizes
from podium.plan.request.plan_subject import Subject
from podium.plan.request.step_calls import Call, packed_run, rollout_calls, update_calls
from podium.plan.request.workload import Workload, simulate_rollout
from podium.plan.result import Plan, margin, total
from podium.plan.search.study import Study
from podium.run.divisible import check_divisible
from podium.settings import load_settings

NAME = "fit-exhaustive-planned"
TRIED = ("0.6B, v5e-1", "1.5B, v6e-1", "0.5B, v5e-1", "8B LoRA, v6e-1", "3B, v6e-4", "4B, v5e-8")
BAR = 1.05  # seconds of a step with the settings of `--fit`, over those of the fastest
OVER = 1.1  # share of the memory up to which an estimate may still turn out to fit
FAR = 1.01  # share of the memory above which what the closed form takes for larger, and recomputes alike, is left out
MOST = 40  # programs that are compiled for a case
PARTS = (1, 2, 3, 4, 6, 8, 12, 16)  # slots for a step's completions divided by each
CACHES = (1.0, 0.75, 0.5, 0.25)  # shares of the pages that all slots can take
ROOMY = 0.85  # share of the memory below which no smaller cache is tried: it could only be slower
PREFILLS = (1, 2, 4)  # divisors of the rows of a prefill
HEADS = (
    "model, machine",
    "combinations",
    "compiled",
    "fastest that fits",
    "step, s",
    "`--fit`, s",
    "ratio",
    "estimated",
)

Values = Mapping[str, Value]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What was found for a case; without `fastest`, nothing that fits."""

    given: Sequence[str]
    combinations: int
    compiled: int
    cpu_s: float
    fastest: Sequence[str] = ()
    step_s: float = 0.0
    step_s_estimated: float = 0.0
    gib: float = 0.0
    fit: Sequence[str] = ()
    fit_step_s: float = 0.0
    fit_step_s_estimated: float = 0.0

    @property
    def ratio(self) -> float:
        """Seconds of a step with the settings of `--fit` over those of the fastest; 0 if none was found."""
        return self.fit_step_s / self.step_s if self.step_s else 0.0


@dataclasses.dataclass(frozen=True)
class Combination:
    """Settings of one half of a step, with its cost by the closed form."""

    values: Values
    bytes: int
    seconds: float


@dataclasses.dataclass
class Together:
    """The halves with the same shared settings, fastest first; those that were found not to fit are taken out."""

    shared: Values
    updates: list[Combination]
    rollouts: list[Combination]

    @property
    def seconds(self) -> float:
        """Of the fastest step."""
        return self.updates[0].seconds + self.rollouts[0].seconds

    @property
    def values(self) -> Values:
        """The settings of the fastest step."""
        return {**self.shared, **self.updates[0].values, **self.rollouts[0].values}


class Exhaustive:
    """All combinations of one case."""

    def __init__(self, name: str) -> None:
        _, machine, self.lengths, _ = CASES[name]
        self.given = given(name)
        self.accelerator: Accelerator = find_accelerator(machine)
        self.device = Device(self.accelerator, find_chip(self.accelerator.generation))
        self.own = self.config({})
        self.limit = (1 - margin(True)) * self.accelerator.hbm_bytes
        self.study = Study(Subject(settings=self.given), lengths=self.lengths)
        self.costed = self.compiled = 0
        self.fits: set[int] = set()  # combinations whose largest program fits, by identity
        self.works: dict[str, Workload] = {}

    def config(self, values: Values) -> Config:
        """The case's settings with these ones. ValueError if they contradict each other or do not divide."""
        changes = [Change(key=key, value=value).override for key, value in values.items()]
        config = load_settings([], [*self.given, *changes], {}).config
        check_divisible(Planned.of(config, self.accelerator).sizes.spec)
        return config

    def sized(self, values: Values) -> RunSizes:
        """The sizes of a run with these settings; ValueError as for `config`."""
        config = self.config(values)
        run = Planned.of(config, self.accelerator).sizes
        check_split(run.rollout, run.rollout_shards)
        return run

    def shared(self) -> Iterator[Values]:
        """Meshes that split rows or do not, with the optimizer's state on the device or on the host."""
        mesh = Planned.of(self.own, self.accelerator).sizes.mesh
        parts = [part for part in range(2, self.accelerator.devices_per_host + 1) if mesh["fsdp"] % part == 0]
        split = [f"fsdp:{mesh['fsdp'] // part},sp:{part}" for part in parts]
        for each in ({}, *({"mesh": value} for value in split)):
            for offloaded in (False, True):
                yield {**each, "train.offload_optimizer": offloaded}

    def updates(self, shared: Values) -> Iterator[Combination]:
        """Every way to recompute, every number of rows, and chunks of the layers and of the head.

        Of numbers of rows that need equally many micro-batches only the least is tried: the others add padding alone.
        """
        try:
            one = self.sized({**shared, "train.rows_per_device": 1})
        except ValueError:  # the mesh does not divide
            return
        row, head = one.row_tokens, self.own.train.head_chunk_tokens
        _, found = packed_run(one, one.draw_lengths(self.lengths))
        most = math.ceil(found)
        numbers = sorted({-(-most // count) for count in range(1, most + 1)})
        for remat, rows in itertools.product(get_args(Remat), numbers):
            sizes = {size for size in (rows // 2, rows // 4, 1) if size and size < rows and rows % size == 0}
            chunks = [None, *(row * size for size in sizes if remat != "none")]
            for size, tokens in itertools.product(chunks, (head, head // 4)):
                values = {
                    "train.remat": remat,
                    "train.rows_per_device": rows,
                    "train.layer_chunk_tokens": size,
                    "train.head_chunk_tokens": tokens,
                }
                run = self.sized({**shared, **values})
                run, number = packed_run(run, run.draw_lengths(self.lengths))
                yield self.cost(values, update_calls(run, number), run)

    def rollouts(self, shared: Values) -> Iterator[Combination]:
        """Every layout, and numbers of slots, sizes of the cache and rows of a prefill.

        A cache that does not hold all slots' sequences is tried where the whole one leaves little memory.
        """
        each = -(-self.own.prompts_per_step * self.own.group_size // self.accelerator.devices)
        slots = dict.fromkeys(-(-each // part) * self.accelerator.devices for part in PARTS)
        for layout, number, part in itertools.product(self.layouts(), slots, PREFILLS):
            try:
                run = self.sized({**shared, **layout, "rollout.slots": number})
            except ValueError:
                continue
            shards, page = run.rollout_shards, run.rollout.page_tokens
            pages = number * table_pages(run.rollout)
            values = {
                **layout,
                "rollout.slots": number,
                "rollout.prefill_rows": max(run.rollout.prefill_rows // shards // part, 1) * shards,
            }
            for share in CACHES:
                if share < 1:
                    values = {**values, "rollout.cache_tokens": int(share * pages / shards) * shards * page}
                try:
                    run = self.sized({**shared, **values})
                    work = self.simulated(run)
                except ValueError:  # the cache does not hold one sequence
                    break
                found = self.cost(values, rollout_calls(run, work), run)
                yield found
                if found.bytes <= ROOMY * self.limit:
                    break

    def layouts(self) -> Iterator[Values]:
        """The run's own layout of the rollout, and all others in which each host decodes by itself."""
        chips = self.accelerator.devices_per_host
        yield {}
        for layout in ("replicated", "tensor") if chips > 1 else ():
            yield {"rollout.layout": layout}
        for size in range(2, chips):
            if chips % size == 0:
                yield {"rollout.layout": "hybrid", "rollout.group_chips": size}

    def simulated(self, run: RunSizes) -> Workload:
        """The engine's work. ValueError if the cache does not hold one sequence."""
        key = f"{run.rollout.model_dump_json()} {run.rollout_shards}"
        if key not in self.works:
            drawn = run.draw_lengths(self.lengths)
            self.works[key] = simulate_rollout(drawn, run.rollout, shards=run.rollout_shards, overlap=True)
        return self.works[key]

    def cost(self, values: Values, calls: list[Call], run: RunSizes) -> Combination:
        """A half's memory and seconds by the closed form."""
        self.costed += 1
        phases = list(self.device.phases(calls, {}, run))
        seconds = [*(phase.seconds for phase in phases), self.device.host(sum(call.calls for call in calls))]
        taken = total(each for each in seconds if each is not None).value
        return Combination(values, max(phase.bytes for phase in phases), taken)

    def possible(self, combinations: Iterable[Combination]) -> list[Combination]:
        """Those that may fit, fastest first; of equal ones, the smallest first."""
        fits = [each for each in combinations if each.bytes <= OVER * self.limit]
        return sorted(fits, key=lambda each: (round(each.seconds, 6), each.bytes))

    def fastest(self) -> tuple[Values, Plan] | None:
        """The fastest settings that fit, compiled, with their plan; None if none was found."""
        all_shared = list(self.shared())
        rest = [
            Together(each, self.possible(self.updates(each)), self.possible(self.rollouts(each))) for each in all_shared
        ]
        while self.compiled < MOST and (rest := [each for each in rest if each.updates and each.rollouts]):
            best = min(rest, key=lambda each: each.seconds)
            if self.judge(best):
                plan = self.plan(self.config(best.values))
                if plan.verdict == "fits":
                    return best.values, plan
                (best.updates if plan.worst.name == "update" else best.rollouts).pop(0)
        return None

    def judge(self, best: Together) -> bool:
        """Compile what is not known of the fastest halves, and take out those that do not fit; whether both fit."""
        halves = {"update": best.updates, "decode": best.rollouts}
        unknown = [phase for phase, half in halves.items() if id(half[0]) not in self.fits]
        case = Case(self.accelerator, tuple(Change(key=key, value=value) for key, value in best.values.items()))
        peaks = self.study.peaks([(case, (phase,)) for phase in unknown])
        self.compiled += len(unknown)
        for phase, peak in zip(unknown, peaks, strict=True):
            if not peak.refused and peak.bytes <= self.limit:
                self.fits.add(id(halves[phase][0]))
                continue
            found = halves[phase].pop(0)
            if peak.bytes > FAR * self.limit:
                halves[phase][:] = [each for each in halves[phase] if not surely_larger(each, found)]
        return all(not peak.refused and peak.bytes <= self.limit for peak in peaks)

    def plan(self, config: Config, *, fast: bool = False) -> Plan:
        """The plan of the run with these settings, compiled or by the closed form."""
        return make_plan(
            Planned.of(config, self.accelerator),
            lengths=self.lengths,
            by="closed_form" if fast else "compiler",
            largest=not fast,
        )

    def seconds(self, plan: Plan) -> float:
        """Of a step."""
        assert plan.step is not None
        return plan.step.value


def surely_larger(one: Combination, other: Combination) -> bool:
    """Whether the closed form takes the first for as large as the other or larger, of two that recompute alike."""
    alike = one.values.get("train.remat") == other.values.get("train.remat")
    return alike and one.bytes >= other.bytes


def measure(name: str) -> Row:
    """One line of the table."""
    cpu, every = cpu_s(), Exhaustive(name)
    best = every.fastest()
    row = Row(given=every.given, combinations=every.costed, compiled=every.compiled, cpu_s=cpu_s() - cpu)
    if best is None:
        return row
    values, plan = best
    settings: Sequence[str] = recorded(FOUND, "cases")[name]["settings"]
    config = load_settings([], [*every.given, *settings], {}).config
    return dataclasses.replace(
        row,
        fastest=[str(Change(key=key, value=value)) for key, value in values.items()],
        step_s=every.seconds(plan),
        step_s_estimated=every.seconds(every.plan(every.config(values), fast=True)),
        gib=plan.worst.bytes / GIB,
        fit=settings,
        fit_step_s=every.seconds(every.plan(config)),
        fit_step_s_estimated=every.seconds(every.plan(config, fast=True)),
    )


def table(found: Mapping[str, Row]) -> list[str]:
    """Markdown."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for name, row in found.items():
        fastest = ", ".join(f"`{each}`" for each in row.fastest) or "none was found"
        estimated = f"{row.fit_step_s_estimated / row.step_s_estimated:.3f}" if row.fastest else ""
        cells = [name, f"{row.combinations:,}", str(row.compiled), fastest]
        cells += [f"{row.step_s:.2f}", f"{row.fit_step_s:.2f}", f"{row.ratio:.3f}", estimated]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("cases", nargs="*", choices=[*TRIED, []], metavar="CASE", help="; ".join(TRIED))
    args = parser.parse_args()
    known = {name: Row(**row) for name, row in (recorded(NAME, "cases", args.results) or {}).items()}
    for name in args.cases or TRIED:
        known[name] = measure(name)
        print(f"{name}: {known[name]}", flush=True)
        rows = {name: dataclasses.asdict(known[name]) for name in TRIED if name in known}
        ratios = {name: known[name].ratio for name in rows}
        record(NAME, {"cases": rows, "ratios": ratios, "bar": BAR}, args.results, packages=["libtpu"])
    found = {name: known[name] for name in TRIED if name in known}
    write_section(MEASUREMENTS, "fit-exhaustive", table(found), args.results)
    print(*table(found), sep="\n")
    sys.exit(not all(0 < row.ratio <= BAR for row in found.values()))


if __name__ == "__main__":
    main()
