"""Builds the report of `podium plan` as sections of lines, bars and tables.

`podium.plan.report.report` prints sections; `podium.plan.report.html_page` writes the printed sections as HTML.
"""

import dataclasses
import datetime
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import podium.plan.report.formatting as text
from podium.accelerators import GIB
from podium.plan.closed_form.over_floor import copies
from podium.plan.report.advice import advice_line, effect
from podium.plan.report.deviation import CheckRow
from podium.plan.result import Phase, Plan, Verdict, margin
from podium.plan.search.fit import Fitted
from podium.plan.search.largest import Largest
from podium.plan.search.ranking import MOST_DEVICES, Ranking, by_price
from podium.plan.search.study import Outcome, RunCost
from podium.prices import HOUR_S, OLD_MONTHS, months_old

SHOWN = 12  # machines listed in a ranking
MOST_PARTS = 9  # parts of memory shown separately in a bar
NOT_COMPILED = {"trace": "traced, not compiled: ", "closed form": "estimated by the closed form, not compiled: "}
REST = "others"  # all remaining parts of memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A sentence, optionally with a label."""

    text: str
    label: str = ""
    verdict: Verdict | None = None  # decides the text's colour
    note: str = ""  # printed on the next line
    bullet: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """One row of a chart: segments, followed by figures."""

    name: str
    figure: str
    segments: tuple[tuple[str, float, float], ...]  # (part, start, end)
    note: str
    bad: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """Horizontal bars on one scale."""

    bars: tuple[Bar, ...]
    end: float  # the largest value of the scale
    parts: tuple[str, ...] = ()
    """Names of the segments, in order of colour; empty: all bars have one colour."""
    limit: float | None = None
    limit_text: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: frozenset[int] = frozenset({0})  # columns of text rather than numbers
    spare: frozenset[int] = frozenset()  # columns to leave out on narrow terminals


Content = Line | Chart | Table


@dataclasses.dataclass(frozen=True)
class ReportSection:
    """A part of a report."""

    title: str
    content: tuple[Content, ...]
    details: bool = False  # shown only on the HTML page


def plan_sections(
    entry: Outcome,
    suggestions: Sequence[Outcome] | None = None,
    longest: Plan | None = None,
    fitted: Fitted | None = None,
) -> list[ReportSection]:
    """The report of one plan, starting with advice.

    Args:
        entry: the plan.
        suggestions: changes that help; None if none were requested.
        longest: the plan in which every completion is as long as allowed, if the lengths were only assumed.
        fitted: the settings that fit, if the run does not and they were searched.
    """
    plan = entry.plan
    memory = f"memory per device by phase, in GiB of {text.exact_gib(plan.hbm_bytes)}"
    doubted = [Line(text=f"do not rely on this plan: {each}", verdict="does_not_fit") for each in plan.doubts]
    advice = Line(text=advice_line(plan, suggestions, fitted), verdict=plan.verdict)
    found = [ReportSection("", (*doubted, advice, *(Line(text=each) for each in copies(plan.phases))))]
    found.append(ReportSection(memory, (Line(text=text.peak_and_step(plan)), _memory(plan))))
    if plan.step is not None:
        speed = Line(label=f"step  {text.duration(plan.step)}", text=_speed(plan))
        lengths = (_rollout_speed(plan), *((_lengths(plan, longest),) if longest else ()))
        found.append(ReportSection("a step", (_timeline(plan), speed, *lengths)))
    phases = _table(PHASES, ((phase,) for phase in plan.phases), 0, 5, 9)
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
    shares = [f"shares of the roofline: {plan.calibration}"] if plan.calibration else []
    notes = (text.method_line(plan), *shares, *plan.notes, versions)
    return [*found, ReportSection("notes", tuple(Line(text=note, bullet=True) for note in notes))]


def comparison_sections(entries: Sequence[Outcome], refused: Sequence[Outcome]) -> list[ReportSection]:
    """A table of plans, best first, each with the reason for its place; then the cases that could not be planned."""
    failed = [Line(label=each.label, text=f"cannot be planned: {each.error}") for each in refused]
    best, rule = entries[0], f"fewest {'dollars' if by_price(entries) else 'chip-seconds'} per step"
    first = Line(text=f"{best.label} is best ({rule}): {text.verdict_line(best.plan)}", verdict=best.plan.verdict)
    reasons = [Line(label=each.label, text=each.reason) for each in entries if each.reason]
    lines = (*reasons, Line(text=text.method_line(best.plan)), *failed)
    found = [ReportSection("", (first, _comparison(entries), *lines))]
    timed = [entry for entry in entries if entry.plan.step is not None]
    return [*found, ReportSection("seconds per step", (_steps(timed),), details=True)] if timed else found


def auto_sections(found: Ranking, notes: Sequence[str]) -> list[ReportSection]:
    """The cheapest machines, and the fastest if it is not one of them."""
    if not found.outcomes:
        first = f"the run fits none of the {found.unsuitable} machines that its settings divide over"
        return [ReportSection("", (Line(text=first), *(Line(text=note) for note in notes)))]
    best, quick = found.outcomes[0], found.fastest
    others = [f"{found.unsuitable} others do not fit"] * bool(found.unsuitable)
    others += [f"settings do not divide over {found.refused}"] * bool(found.refused)
    first = (
        f"cheapest: {best.label}, {_price(best)}; fastest: {quick.label}, {_price(quick)} (fits {len(found.outcomes)}"
        f" machines of up to {MOST_DEVICES} devices{''.join(f'; {each}' for each in others)})"
    )
    shown = [*found.outcomes[:SHOWN], *([quick] if quick not in found.outcomes[:SHOWN] else [])]
    table = _table(MACHINES, ((each, each.plan, each.cost) for each in shown), 0, 4, 6)
    return [ReportSection("", (Line(text=first), table, *(Line(text=note) for note in notes)))]


def _price(outcome: Outcome) -> str:
    cost = outcome.cost
    if cost is None:
        return "seconds unknown"
    usd = f"{text.number(cost.usd.value)} dollars" if cost.usd else "price unknown"
    return f"{usd} and {text.number(_hours(outcome.plan, cost))} hours for {cost.steps} steps"


def _hours(plan: Plan, cost: RunCost) -> float:
    """The duration of a run in hours."""
    return plan.step.value * cost.steps / HOUR_S if plan.step else 0.0


def search_section(found: Largest) -> ReportSection:
    """The result of a search, with the values tried."""
    table = _table(TRIED, ((value, peak, found.hbm_bytes) for value, peak in found.tried.items()), 1, 2, 3)
    return ReportSection("", (Line(text=search_line(found)), table))


def search_line(found: Largest) -> str:
    """The result of a search in one line."""
    best, over = found.best, found.too_large
    by = next(iter(found.tried.values())).made_by
    made = NOT_COMPILED.get(by, "")
    if best is None:
        smallest, peak = next(iter(found.tried.items()))
        return f"{made}{found.key}: even {smallest} does not fit ({text.gib(peak.bytes)} GiB)"
    if over is None:
        return f"{made}{found.key}: {best:,} fits, and more would not help: {found.range.why}"
    gap = f"{over:,} does not" + ("" if found.proven else "; values in between were not tried")
    room = ""
    if found.with_room != best:
        roomy = f"; {found.with_room:,} leaves more" if found.with_room else ""
        near = "its trace is" if by == "trace" else f"it is within {margin(found.compiled):.0%} of the memory,"
        room = f", but {near} too close to call{roomy}"
    last = max(found.tried)
    beyond = f" (tried up to {last:,})" if last > over else ""
    return f"{made}{found.key}: {best:,} is the largest that fits{room}; {gap}{beyond}"


def check_section(rows: Sequence[CheckRow]) -> ReportSection:
    """Planned and measured figures side by side, with the plan's errors."""
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
    """Each phase's memory as a bar of its parts, with a mark at the device's limit."""
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
    """The phases of a step as bars; each starts where the previous one ends."""
    rows = [(phase.name, phase.seconds, _work(phase)) for phase in plan.phases if phase.seconds and phase.calls]
    if plan.environments is not None:
        rows.append(("environments", plan.environments, "all conversations wait for replies"))
    rows += [("host", plan.host, "between programs, and grading")] if plan.host is not None else []
    segments = _stacked({name: time.value for name, time, _ in rows})
    bars = (
        Bar(name=name, figure=text.duration(time), segments=(segment,), note=work)
        for (name, time, work), segment in zip(rows, segments, strict=True)
    )
    return Chart(bars=tuple(bars), end=sum(time.value for _, time, _ in rows) or 1.0)


def _steps(entries: Sequence[Outcome]) -> Chart:
    """The seconds of each plan's step as a bar of its parts."""
    times = [{name: time.value for name, time in text.step_parts(entry.plan)} for entry in entries]
    bars = (
        Bar(name=entry.label, figure=text.duration(step), segments=_stacked(each), note="")
        for entry, each in zip(entries, times, strict=True)
        if (step := entry.plan.step)
    )
    parts = tuple(dict.fromkeys(part for each in times for part in each))
    return Chart(bars=tuple(bars), end=max(sum(each.values()) for each in times) or 1.0, parts=parts)


def _stacked(sizes: Mapping[str, float]) -> tuple[tuple[str, float, float], ...]:
    """Segments with these sizes, end to end."""
    ends = list(itertools.accumulate(sizes.values(), initial=0.0))
    return tuple(zip(sizes, ends[:-1], ends[1:], strict=True))


def _work(phase: Phase) -> str:
    """The calls of a phase's program, what bounds them, and the bytes they send."""
    sent = sum(each.sent for each in phase.collectives)
    found = [f"{phase.calls:,.0f} call{'s' * (phase.calls != 1)}"]
    found += [f"bound by {text.LIMITS[phase.bound_by]}"] if phase.bound_by else []
    found += [f"{text.data_size(sent)} between devices"] if sent >= text.LITTLE else []
    return ", ".join(found)


def _speed(plan: Plan) -> str:
    """The completion tokens of a step, and their rate."""
    speed, tokens = plan.tokens_per_s_per_chip, plan.workload.completion_tokens
    rate = f", {text.with_range(speed)} per second per chip" if speed is not None else ""
    share = f"; updates at {text.share(plan.mfu)} of the peak" if plan.mfu is not None else ""
    return f"{tokens:,} completion tokens{rate}{share}"


def _rollout_speed(plan: Plan) -> Line:
    """The rate of a rollout's tokens as a share of the rate with all slots busy."""
    whole, full = plan.rollout_rate, plan.full_slots_rate
    if not plan.workload.prefill_tokens:
        return Line(label="rollout", text="none: completions are in the data; prefill and decode are for evaluations")
    if whole is None or full is None:
        return Line(label="rollout", text="unknown")
    share = f"{whole.value / full.value:.0%} of the {text.number(full.value)} with all slots busy"
    return Line(label="rollout", text=f"{text.with_range(whole)} completion tokens per second per chip, {share}")


def _lengths(plan: Plan, longest: Plan) -> Line:
    """The assumed lengths, and the step time if every completion were as long as allowed."""
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
    ("over floor", lambda phase: f"{phase.over_floor:.2f}" if phase.over_floor else "-"),
    ("made by", lambda phase: "compiler" if phase.compiled else "trace" if phase.traced else "closed form"),
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
    ("tried", lambda value, peak, limit: f"{value:,}"),
    ("", lambda value, peak, limit: "fits" if peak.fits(limit) else "does not fit"),
    ("needs", lambda value, peak, limit: f"{peak.phase} {peak.bytes / GIB:.2f} GiB"),
    ("by", lambda value, peak, limit: peak.made_by),
)
MACHINES: Columns = (
    ("machine", lambda each, plan, cost: each.label),
    ("dollars", lambda each, plan, cost: text.number(cost.usd.value) if cost and cost.usd else "no price"),
    ("hours", lambda each, plan, cost: text.number(_hours(plan, cost)) if cost else "-"),
    ("s per step", lambda each, plan, cost: text.number(plan.step.value) if plan.step else "-"),
    ("peak in", lambda each, plan, cost: plan.worst.name),
    ("GiB spare", lambda each, plan, cost: text.number(plan.spare_bytes / GIB)),
    ("", lambda each, plan, cost: plan.made),
)


def _table(columns: Columns, values: Iterable[tuple[object, ...]], *text: int) -> Table:
    """Make a table with one row per tuple of values; `text` lists the columns of text."""
    rows = tuple(tuple(cell(*each) for _, cell in columns) for each in values)
    return Table(heads=tuple(head for head, _ in columns), rows=rows, text=frozenset(text))


def _cost(cost: RunCost, plan: Plan) -> str:
    """Chip-hours, and dollars if the price is known."""
    line = f"{cost.steps:,} steps: {text.with_range(cost.chip_hours)} chip-hours"
    if cost.usd is None:
        return f"{line}; the price of {plan.accelerator} is unknown: set one with --prices FILE"
    price = f"{cost.usd_per_chip_hour:.2f} per chip-hour ({cost.price_source}, {cost.price_date})"
    months = months_old(cost.price_date, datetime.date.today()) if cost.price_date else 0
    old = f". That price is {months} months old: set today's with --prices FILE" if months >= OLD_MONTHS else ""
    return (
        f"{line}, {text.with_range(cost.usd)} US dollars at {price}; excluding compilation, evaluations and checkpoints"
        f"{old}"
    )


def _suggestion(outcome: Outcome) -> Line:
    """A change with its effect on memory and step time, and the reason."""
    (change,) = outcome.case.changes
    room = f", {text.spare(outcome.plan)}" if outcome.before and outcome.before.verdict == "fits" else ""
    return Line(
        label=f"{change} instead of {change.old}",
        text=f"{effect(outcome)}{room}",
        verdict=outcome.plan.verdict,
        note=outcome.reason,
    )


def _comparison(entries: Sequence[Outcome]) -> Table:
    """A table with one row per plan."""
    keys = dict.fromkeys(change.key for entry in entries for change in entry.case.changes)
    names = [key.rpartition(".")[2] for key in keys]
    heads = ("machine", *names, "verdict", "GiB", "s per step", "tokens/s/chip", "chip-hours", "dollars")
    rows = []
    for entry in entries:
        plan, cost = entry.plan, entry.cost
        known = (plan.tokens_per_s_per_chip, cost and cost.chip_hours, cost and cost.usd)
        figures = (text.number(each.value) if each is not None else "-" for each in known)
        settings = [str(change.value) for change in entry.case.changes]
        memory = f"{text.gib(plan.worst.bytes)}/{text.exact_gib(plan.hbm_bytes)}"
        step = text.with_range(plan.step) if plan.step is not None else "-"
        rows.append((plan.accelerator, *settings, text.VERDICTS[plan.verdict], memory, step, *figures))
    columns = frozenset({heads.index("tokens/s/chip"), heads.index("chip-hours")})
    return Table(heads=heads, rows=tuple(rows), text=frozenset(range(len(names) + 2)), spare=columns)
