"""What a report of `podium plan` says, in sections of lines, bars and tables: once, for the terminal and for the page.

`podium.plan.report` prints sections, `podium.plan.page` writes them as HTML.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import podium.plan.formatting as text
from podium.accelerators import GIB
from podium.plan.advice import advice_line, effect
from podium.plan.check import CheckRow
from podium.plan.compare import PlanEntry, Refused, RunCost, by_price
from podium.plan.result import Phase, Plan, Verdict, margin
from podium.plan.search import SearchResult, Trial
from podium.plan.tune import TuneResult

MOST_PARTS = 9  # parts of the memory that a bar shows by themselves
ESTIMATED = "estimated by the closed form, not compiled: "
REST = "others"  # the remaining parts of the memory, together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A sentence, perhaps behind a label."""

    text: str
    label: str = ""
    verdict: Verdict | None = None  # what the text says, for its colour
    note: str = ""  # more, on a line of its own
    bullet: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """One row of a chart: segments in a row, with figures beside them."""

    name: str
    figure: str
    segments: tuple[tuple[str, float, float], ...]  # name of the part, where it begins and where it ends
    note: str
    bad: bool = False
    range: tuple[float, float] | None = None  # between which its end may be


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """Horizontal bars on one scale."""

    bars: tuple[Bar, ...]
    end: float  # the largest value of the scale
    parts: tuple[str, ...] = ()
    """What segments are called, in the order of their colours; none: bars of a single colour."""
    limit: float | None = None
    limit_text: str = ""

    @property
    def reach(self) -> float:
        """The end of the scale where ranges are drawn too."""
        return max([self.end, *(bar.range[1] for bar in self.bars if bar.range)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: frozenset[int] = frozenset({0})  # columns that are no numbers
    spare: frozenset[int] = frozenset()  # columns that can be left out where there is little room


Content = Line | Chart | Table


@dataclasses.dataclass(frozen=True)
class ReportSection:
    """A part of a report."""

    title: str
    content: tuple[Content, ...]
    details: bool = False  # whether it is for the page alone, which has room


def plan_sections(
    entry: PlanEntry, suggestions: Sequence[Trial] | None = None, longest: Plan | None = None
) -> list[ReportSection]:
    """All that there is to say about one plan, what to do about it first.

    `suggestions` are changes that help, None where they were not looked for; `longest` is the plan with completions as
    long as they can be, where their lengths were only assumed.
    """
    plan = entry.plan
    memory = f"memory per device by phase, in GiB of {text.exact_gib(plan.hbm_bytes)}"
    found = [ReportSection("", (Line(text=advice_line(plan, suggestions), verdict=plan.verdict),))]
    found.append(ReportSection(memory, (Line(text=text.peak_and_step(plan)), _memory(plan))))
    if plan.step is not None:
        speed = Line(label=f"step  {text.duration(plan.step)}", text=_speed(plan))
        lengths = (_rollout_speed(plan), _lengths(plan, longest)) if longest else (_rollout_speed(plan),)
        found.append(ReportSection("a step", (_timeline(plan), speed, *lengths)))
    phases = _table(PHASES, ((phase,) for phase in plan.phases), 0, 5, 8)
    found.append(ReportSection("phases", (phases,), details=True))
    for phase in sorted(plan.phases, key=lambda phase: -phase.bytes):
        arrays = _table(ARRAYS, ((array,) for array in phase.largest), 0, 1)
        found.append(ReportSection(f"largest arrays of {phase.name}", (arrays,), details=True))
    if transfers := [(phase, each) for phase in plan.phases for each in phase.collectives]:
        table = _table(TRANSFERS, transfers, 0, 1, 2)
        found.append(ReportSection("transfers between devices, in a step", (table,), details=True))
    if entry.cost is not None:
        found.append(ReportSection("cost", (Line(text=_cost(entry.cost, plan)),)))
    if suggestions is not None:
        nothing = Line(text="None of the changes tried helps.")
        found.append(ReportSection("changes that help most", tuple(map(_suggestion, suggestions)) or (nothing,)))
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    notes = (text.method_line(plan), *plan.notes, versions)
    return [*found, ReportSection("notes", tuple(Line(text=note, bullet=True) for note in notes))]


def comparison_sections(entries: Sequence[PlanEntry], refused: Sequence[Refused]) -> list[ReportSection]:
    """Several plans in a table, best first, each with its reason; then what could not be planned."""
    failed = [Line(label=each.label, text=f"cannot be planned: {each.error}") for each in refused]
    if not entries:
        return [ReportSection("", tuple(failed))]
    best, rule = entries[0], f"fewest {'dollars' if by_price(entries) else 'chip-seconds'} per step"
    first = Line(text=f"{best.label} is best ({rule}): {text.verdict_line(best.plan)}", verdict=best.plan.verdict)
    reasons = [Line(label=each.label, text=each.reason) for each in entries if each.reason]
    lines = (*reasons, Line(text=text.method_line(best.plan)), *failed)
    found = [ReportSection("", (first, _comparison(entries), *lines))]
    timed = [entry for entry in entries if entry.plan.step is not None]
    return [*found, ReportSection("seconds per step", (_steps(timed),), details=True)] if timed else found


def auto_sections(
    first: str, heads: tuple[str, ...], rows: tuple[tuple[str, ...], ...], notes: Sequence[str]
) -> list[ReportSection]:
    """Machines by what a run costs there."""
    table = (Table(heads=heads, rows=rows, text=frozenset({0, 4, 6})),) if rows else ()
    return [ReportSection("", (Line(text=first), *table, *(Line(text=note) for note in notes)))]


def search_section(found: SearchResult) -> ReportSection:
    """The result of a search, and what was tried."""
    table = _table(TRIED, ((probe, found) for probe in found.probes), 1, 2, 3)
    return ReportSection("", (Line(text=search_line(found)), table))


def tune_section(found: TuneResult) -> ReportSection:
    """The best of several settings, and what was tried."""
    best, before = found.best, found.before
    steps = [text.number(each.plan.step.value) for each in (best, before) if each.plan.step is not None]
    looked = f"{found.estimated} combinations estimated"
    if not best.plan.estimate_only:
        looked += f", {len(found.tried)} of at most {found.budget} compiled"
    if best.plan.verdict == "does_not_fit":
        first = f"nothing fits ({looked})"
    elif best.settings == before.settings:
        first = f"the settings as they are are the best ({looked})"
    else:
        now = f", a step {steps[0]} s instead of {steps[1]}" if len(steps) > 1 else ""
        first = f"{' '.join(f'--set {each}' for each in best.changes(before))}{now} ({looked})"
    if best.plan.estimate_only:
        first = f"{ESTIMATED}{first}"
    rows = (
        (
            ", ".join(map(str, each.changes(before))) or "as it is",
            text.VERDICTS[each.plan.verdict],
            f"{each.plan.worst.name} {text.gib(each.plan.worst.bytes)} GiB",
            text.with_range(each.plan.step) if each.plan.step else "-",
        )
        for each in found.tried
    )
    table = Table(heads=("settings", "", "needs", "s per step"), rows=tuple(rows), text=frozenset({0, 1, 2}))
    return ReportSection("", (Line(text=first), table))


def search_line(found: SearchResult) -> str:
    """The result of a search in a line."""
    best, over, values = found.best, found.too_large, found.range
    made = "" if found.compiled else ESTIMATED
    if best is None:
        smallest = found.probes[0]
        return f"{made}{found.key}: even {smallest.value} does not fit ({text.gib(smallest.bytes)} GiB)"
    if over is None:
        return f"{made}{found.key}: {best.value:,} fits, and more would not help: {values.why}"
    gap = f"{over.value:,} does not" + ("" if found.proven else "; values in between were not tried")
    room = ""
    if found.roomy is None or found.roomy.value != best.value:
        roomy = f"; {found.roomy.value:,} leaves more" if found.roomy else ""
        room = f", but it is within {margin(found.compiled):.0%} of the memory, too close to call{roomy}"
    last = found.probes[-1].value
    beyond = f" (tried up to {last:,})" if last > over.value else ""
    return f"{made}{found.key}: {best.value:,} is the largest that fits{room}; {gap}{beyond}"


def check_section(rows: Sequence[CheckRow]) -> ReportSection:
    """Planned and measured figures side by side, with the plan's error."""
    found = []
    for row in rows:
        unit = f" {row.unit}".rstrip()
        exact = row.planned.low == row.planned.high
        planned = text.number(row.planned.value) if exact else text.with_range(row.planned)
        measured = f"{text.number(row.measured)}{unit}" if row.measured is not None else "-"
        error = f"{row.error:+.1%}" if row.error is not None else "-"
        found.append((row.name, f"{planned}{unit}", measured, error))
    return ReportSection("", (Table(heads=("", "planned", "measured", "plan's error"), rows=tuple(found)),))


def _memory(plan: Plan) -> Chart:
    """A bar of each phase's memory in its parts, with a mark where the memory ends."""
    parts = text.main_parts(plan.phases, MOST_PARTS)
    bars = []
    for phase in plan.phases:
        sizes = {part: phase.parts.get(part, 0) / GIB for part in parts}
        sizes[REST] = sum(size for part, size in phase.parts.items() if part not in sizes) / GIB
        part, size = text.largest_part(phase)
        note = f"{text.readable(part)} {text.gib(size)}"
        figure, bad = text.gib(phase.bytes), not phase.fits
        bars.append(Bar(name=phase.name, figure=figure, segments=_stacked(sizes), note=note, bad=bad))
    return Chart(
        bars=tuple(bars),
        end=max(plan.hbm_bytes, plan.worst.bytes) / GIB,
        parts=(*parts, REST),
        limit=plan.hbm_bytes / GIB,
        limit_text=f"{text.exact_gib(plan.hbm_bytes)} GiB, the memory limit",
    )


def _timeline(plan: Plan) -> Chart:
    """The phases of a step, each beginning where the one before ends."""
    rows = [(phase.name, phase.seconds, _work(phase)) for phase in plan.phases if phase.seconds is not None]
    rows += [("host", plan.host, "between programs, and grading")] if plan.host is not None else []
    segments = _stacked({name: time.value for name, time, _ in rows})
    bars = (
        Bar(
            name=name,
            figure=text.duration(time),
            segments=(segment,),
            note=work,
            range=(segment[1] + time.low, segment[1] + time.high),
        )
        for (name, time, work), segment in zip(rows, segments, strict=True)
    )
    return Chart(bars=tuple(bars), end=sum(time.value for _, time, _ in rows) or 1.0)


def _steps(entries: Sequence[PlanEntry]) -> Chart:
    """A bar of each plan's step in its parts."""
    times = [{name: time.value for name, time in text.step_parts(entry.plan)} for entry in entries]
    figures = [text.number(sum(each.values())) for each in times]
    ranges = [(step.low, step.high) if (step := entry.plan.step) else None for entry in entries]
    bars = (
        Bar(name=entry.label, figure=f"{figure} s", segments=_stacked(each), note="", range=reach)
        for entry, each, figure, reach in zip(entries, times, figures, ranges, strict=True)
    )
    parts = tuple(dict.fromkeys(part for each in times for part in each))
    return Chart(bars=tuple(bars), end=max(sum(each.values()) for each in times) or 1.0, parts=parts)


def _stacked(sizes: Mapping[str, float]) -> tuple[tuple[str, float, float], ...]:
    """Segments of these sizes, one after the other."""
    ends = list(itertools.accumulate(sizes.values(), initial=0.0))
    return tuple(zip(sizes, ends[:-1], ends[1:], strict=True))


def _work(phase: Phase) -> str:
    """Calls of a phase's program, what they wait for, and what they send."""
    sent = sum(each.sent for each in phase.collectives)
    found = [f"{phase.calls:,.0f} call{'s' * (phase.calls != 1)}"]
    found += [f"bound by {text.LIMITS[phase.bound_by]}"] if phase.bound_by else []
    found += [f"{text.data_size(sent)} between devices"] if sent >= text.LITTLE else []
    return ", ".join(found)


def _speed(plan: Plan) -> str:
    """The tokens of a step, and their rate."""
    speed, tokens = plan.tokens_per_s_per_device, plan.workload.completion_tokens
    rate = f", {text.with_range(speed)} per second per chip" if speed is not None else ""
    share = f"; updates at {text.share(plan.mfu)} of the peak" if plan.mfu is not None else ""
    return f"{tokens:,} completion tokens{rate}{share}"


def _rollout_speed(plan: Plan) -> Line:
    """How close a rollout comes to decoding with all slots busy."""
    whole, full = plan.rollout_rate, plan.full_slots_rate
    if whole is None or full is None:
        return Line(label="rollout", text="unknown")
    share = f"{whole.value / full.value:.0%} of the {text.number(full.value)} with all slots busy"
    return Line(label="rollout", text=f"{text.with_range(whole)} completion tokens per second per chip, {share}")


def _lengths(plan: Plan, longest: Plan) -> Line:
    """What the lengths that no config says would make of a step."""
    assumed = plan.workload.completion_tokens / plan.workload.completions
    step = f"{text.number(longest.step.value)} s" if longest.step else "unknown"
    return Line(
        label="lengths",
        text=f"assumed to be GSM8K's, {assumed:,.0f} tokens on average; with every completion as long as allowed, a"
        f" step takes {step}. --lengths RUN takes an earlier run's, --lengths fixed:N one length",
    )


Columns = Sequence[tuple[str, Callable[..., str]]]
PHASES: Columns = (
    ("phase", lambda phase: phase.name),
    ("GiB", lambda phase: f"{phase.bytes / GIB:.2f}"),
    ("fits", lambda phase: "yes" if phase.fits else "no"),
    ("time", lambda phase: text.duration(phase.seconds) if phase.seconds else "-"),
    ("calls", lambda phase: f"{phase.calls:,.0f}"),
    ("time bound by", lambda phase: text.LIMITS.get(phase.bound_by, "-")),
    ("TFLOP", lambda phase: text.number(phase.flops / 1e12)),
    ("of closed form", lambda phase: f"{phase.flops / base:.2f}" if (base := phase.closed_form_flops) else "-"),
    ("made by", lambda phase: "compiler" if phase.compiled else "closed form"),
    ("compiled in", lambda phase: "-" if phase.compile_s is None else f"{phase.compile_s:.0f} s"),
)
ARRAYS: Columns = (
    ("array", lambda array: text.readable(array.name)),
    ("shape", lambda array: array.shape),
    ("GiB", lambda array: f"{array.bytes / GIB:.2f}"),
)
TRANSFERS: Columns = (
    ("phase", lambda phase, each: phase.name),
    ("kind", lambda phase, each: each.kind),
    ("mesh axes", lambda phase, each: " x ".join(each.axes) or "-"),
    ("devices", lambda phase, each: str(each.group)),
    ("calls", lambda phase, each: f"{each.calls:,.0f}"),
    ("sent per device", lambda phase, each: text.data_size(each.sent)),
    ("while computing", lambda phase, each: "yes" if each.overlaps else "no"),
)
TRIED: Columns = (
    ("tried", lambda probe, found: f"{probe.value:,}"),
    ("", lambda probe, found: "fits" if probe.accepted(found.hbm_bytes) else "does not fit"),
    ("needs", lambda probe, found: f"{probe.phase} {probe.bytes / GIB:.2f} GiB"),
    ("by", lambda probe, found: ("its refusal" if probe.refused else "compiler") if probe.compiled else "closed form"),
)


def _table(columns: Columns, values: Iterable[tuple[Any, ...]], *text: int) -> Table:
    """A row of cells for each of some values; `text` are the columns that are no numbers."""
    rows = tuple(tuple(cell(*each) for _, cell in columns) for each in values)
    return Table(heads=tuple(head for head, _ in columns), rows=rows, text=frozenset(text))


def _cost(cost: RunCost, plan: Plan) -> str:
    """Chip-hours, and dollars where there is a price."""
    line = f"{cost.steps:,} steps: {text.with_range(cost.chip_hours)} chip-hours"
    if cost.usd is None:
        return f"{line}; the price of {plan.accelerator} is unknown: set one with --prices FILE"
    price = f"{cost.usd_per_chip_hour:.2f} per chip-hour ({cost.price_source}, {cost.price_date})"
    return (
        f"{line}, {text.with_range(cost.usd)} US dollars at {price}; excluding compilation, evaluations and checkpoints"
    )


def _suggestion(trial: Trial) -> Line:
    """A change with what it makes of memory and step, and why."""
    room = "" if trial.before.verdict != "fits" else f", {text.spare(trial.plan)}"
    return Line(
        label=f"{trial.change} instead of {trial.change.old}",
        text=f"{effect(trial)}{room}",
        verdict=trial.plan.verdict,
        note=trial.reason,
    )


def _comparison(entries: Sequence[PlanEntry]) -> Table:
    """A row for each plan."""
    keys = dict.fromkeys(entry.setting.partition("=")[0] for entry in entries if entry.setting)
    names = [key.rpartition(".")[2] for key in keys]
    heads = ("machine", *names, "verdict", "GiB", "s per step", "tokens/s/chip", "chip-hours", "dollars")
    rows = []
    for entry in entries:
        plan, cost = entry.plan, entry.cost
        known = (plan.tokens_per_s_per_device, cost and cost.chip_hours, cost and cost.usd)
        figures = (text.number(each.value) if each is not None else "-" for each in known)
        settings = [entry.setting.partition("=")[2]] if keys else []
        memory = f"{text.gib(plan.worst.bytes)}/{text.exact_gib(plan.hbm_bytes)}"
        step = text.with_range(plan.step) if plan.step is not None else "-"
        rows.append((plan.accelerator, *settings, text.VERDICTS[plan.verdict], memory, step, *figures))
    columns = frozenset({heads.index("tokens/s/chip"), heads.index("chip-hours")})
    return Table(heads=heads, rows=tuple(rows), text=frozenset(range(len(names) + 2)), spare=columns)
