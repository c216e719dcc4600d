"""The plan in the terminal: verdict, memory by phase, the step's course, cost, changes that help; comparisons too.

Colours tell parts of the memory where there are colours; elsewhere letters do.
"""

import string
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from podium.plan.check import Row
from podium.plan.compare import LIMITS, LITTLE, Answer, Refused, by_price
from podium.plan.prices import Cost
from podium.plan.result import Phase, Plan, Seconds
from podium.plan.search import Found
from podium.plan.suggest import Suggestion
from podium.plan.words import (
    duration,
    gib,
    in_range,
    largest_part,
    limit_gib,
    made_by,
    number,
    spoken,
    told_parts,
    transferred,
    verdict_line,
)

WIDTH = 110
NARROW = 100
"""Columns of a terminal under which a comparison leaves some out."""
SHORTEST = 12
"""Cells of a bar."""
BLOCK, LIMIT = "\u2588", "\u2503"
STYLES = {"fits": "bold green", "too_close": "bold yellow", "does_not_fit": "bold red"}
SAYS = {"fits": "fits", "too_close": "too close to call", "does_not_fit": "does not fit"}
COLOURS = ("blue", "cyan", "green", "yellow", "magenta", "red", "bright_blue", "bright_green", "bright_magenta")
REST = "others"
"""Parts of the memory beyond the colours that there are."""


def print_plan(answer: Answer, console: Console, *, suggestions: Sequence[Suggestion] | None, hint: str = "") -> None:
    """Print all that there is to say about one plan, the verdict first.

    Args:
        answer: the plan and its cost.
        console: where to.
        suggestions: changes that help; None: not looked for.
        hint: how to have them looked for.
    """
    plan = answer.plan
    _print_line(console, Text(verdict_line(plan), style=STYLES[plan.verdict]))
    rows: list[RenderableType] = [_title(f"memory of a device, by phase, in GiB of {limit_gib(plan.hbm_bytes)}")]
    rows.append(memory_bars(plan.phases, plan.hbm_bytes, console))
    if plan.step is not None:
        rows += [_title("a step"), timeline(plan, _width(console))]
    if answer.cost is not None:
        rows += [_title("cost"), Text(cost_text(answer.cost, plan))]
    if suggestions is not None:
        rows += [_title("changes that help most"), _suggestions(suggestions)]
    elif hint:
        rows += [_title("changes that may help"), Text(hint)]
    rows += [_title("notes"), _list([made_by(plan), *plan.notes, _versions(plan)])]
    console.print(Padding(Group(*rows), (0, 0, 0, 2)), width=_width(console))


def print_comparison(answers: Sequence[Answer], refused: Sequence[Refused], console: Console) -> None:
    """Print several plans in a table, best first, each with its reason; then what could not be planned."""
    if answers:
        rule = "the least dollars per step" if by_price(answers) else "the least chip-seconds per step"
        best = Text.assemble((answers[0].label, "bold"), f" is best ({rule}): {verdict_line(answers[0].plan)}")
        _print_line(console, best)
        console.print(_comparison(answers, narrow=console.width < NARROW))
        for each in (answer for answer in answers if answer.reason):
            _print_line(console, Text.assemble((f"  {each.label}: ", "bold"), each.reason))
        _print_line(console, Text(f"  {made_by(answers[0].plan)}", style="dim"))
    for each in refused:
        _print_line(console, Text.assemble((f"  {each.label}: ", "bold"), ("cannot be planned: ", "red"), each.error))


def print_search(found: Found, console: Console) -> None:
    """Print what a search came to, and what it tried."""
    _print_line(console, Text(search_line(found), style="bold"))
    table = Table.grid(padding=(0, 2))
    for each in found.tries:
        verdict = Text(SAYS[each.plan.verdict], style=STYLES[each.plan.verdict])
        worst = each.plan.worst
        how = "closed form" if each.plan.estimate_only else "compiled"
        table.add_row(f"  {each.value:,}", verdict, f"{worst.name} {gib(worst.bytes)} GiB", Text(how, style="dim"))
    console.print(table)


def search_line(found: Found) -> str:
    """The result of a search in a line."""
    best, over, values = found.best, found.too_large, found.range
    if best is None:
        smallest = found.tries[0]
        return f"{found.key}: even {smallest.value} does not fit ({gib(smallest.plan.worst.bytes)} GiB)"
    if over is None:
        return f"{found.key}: {best.value:,} fits, and there is no use in more: {values.why}"
    gap = f"{over.value:,} {'is too close to call' if over.plan.verdict == 'too_close' else 'does not'}"
    if found.proven:
        return f"{found.key}: {best.value:,} is the largest that fits; {gap}"
    return f"{found.key}: {best.value:,} fits, {gap}; what lies between was not tried"


def print_check(rows: Sequence[Row], console: Console) -> None:
    """Print planned beside measured, with the error of the plan."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for heading in ("planned", "measured", "plan's error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        exact = row.planned.low == row.planned.high
        planned = number(row.planned.value) if exact else in_range(row.planned)
        unit = f" {row.unit}".rstrip()
        measured = f"{number(row.measured)}{unit}" if row.measured is not None else "-"
        table.add_row(row.name, f"{planned}{unit}", measured, f"{row.error:+.1%}" if row.error is not None else "-")
    console.print(table)


def memory_bars(phases: Sequence[Phase], hbm_bytes: int, console: Console) -> RenderableType:
    """A bar of each phase's memory in its parts, with a mark where the memory ends, and the key to it."""
    marks = _marks(told_parts(phases, len(COLOURS)), coloured=console.color_system is not None)
    told = [_largest_text(phase) for phase in phases]
    room = _room(_width(console), [phase.name for phase in phases], [gib(phase.bytes) for phase in phases], told)
    scale = max(hbm_bytes, *(phase.bytes for phase in phases))
    grid = _grid(4, right=1)
    for phase, largest in zip(phases, told, strict=True):
        style = "" if phase.fits else "bold red"
        bar = _bar(phase.parts, scale, hbm_bytes, room - 1, marks)
        name, size = Text(phase.name, style=style), Text(gib(phase.bytes), style=style)
        grid.add_row(name, size, bar, Text(largest, style="dim"))
    key = Text("   ").join(Text.assemble(mark, f" {spoken(part)}") for part, mark in marks.items())
    return Group(grid, Text.assemble(key, f"   {LIMIT} {limit_gib(hbm_bytes)} GiB, where the memory ends"))


def timeline(plan: Plan, width: int) -> RenderableType:
    """The phases of a step one after the other, as bars that begin where the one before ends."""
    assert plan.step is not None
    rows = [(phase.name, phase.seconds, _work_text(phase)) for phase in plan.phases if phase.seconds is not None]
    rows += [("host", plan.host, "between programs, and grading")] if plan.host is not None else []
    whole = sum(time.value for _, time, _ in rows) or 1.0
    room = _room(width, [name for name, *_ in rows], [duration(time) for _, time, _ in rows], [row[-1] for row in rows])
    grid, begun = _grid(4), 0.0
    for name, time, work in rows:
        start = min(int(begun / whole * room), room - 1)
        end = max(start + 1, round((begun + time.value) / whole * room))
        bar = Text(" " * start + BLOCK * (end - start) + " " * (room - end), style="cyan")
        grid.add_row(name, duration(time), bar, Text(work, style="dim"))
        begun += time.value
    return Group(grid, Text.assemble((f"step  {duration(plan.step)}", "bold"), f"   {_speed(plan)}"))


def cost_text(cost: Cost, plan: Plan) -> str:
    """Chip-hours, and dollars where there is a price."""
    text = f"{cost.steps:,} steps: {in_range(cost.chip_hours)} chip-hours"
    if cost.price is None or cost.usd is None:
        return f"{text}; no price of {plan.accelerator} is known: set one with --prices FILE"
    price = f"{cost.price.usd_per_chip_hour:.2f} per chip-hour ({cost.price.source}, {cost.price.date})"
    return f"{text}, {in_range(cost.usd)} US dollars at {price}; without compiling, evaluations, checkpoints"


def _room(width: int, *columns: Sequence[str]) -> int:
    """Cells that are left for a bar beside columns of these texts."""
    return max(SHORTEST, width - 2 - sum(max(map(len, column)) + 2 for column in columns))


def _largest_text(phase: Phase) -> str:
    part, size = largest_part(phase)
    return f"{spoken(part)} {gib(size)}"


def _marks(parts: Sequence[str], *, coloured: bool) -> dict[str, Text]:
    """A cell of each part's bar: a coloured block, or a letter, of its name if it can be had."""
    if coloured:
        marks = {part: Text(BLOCK, style=style) for part, style in zip(parts, COLOURS, strict=False)}
        return marks | {REST: Text(BLOCK, style="bright_black")}
    marks, free = {}, dict.fromkeys(string.ascii_uppercase)
    for part in parts:
        letter = next(each for each in (*part.upper(), *free) if each in free)
        del free[letter]
        marks[part] = Text(letter)
    return marks | {REST: Text(".")}


def _bar(parts: Mapping[str, int], scale: int, limit: int, width: int, marks: Mapping[str, Text]) -> Text:
    """Parts as cells side by side, with a line through the cell where the memory ends."""
    sizes = {part: parts.get(part, 0) for part in marks if part != REST}
    sizes[REST] = sum(parts.values()) - sum(sizes.values())
    cells, begun = [Text(" ")] * (width + 1), 0
    for part, size in sizes.items():
        start, end = round(begun / scale * width), round((begun + size) / scale * width)
        cells[start:end] = [marks[part]] * (end - start)
        begun += size
    cells[round(limit / scale * width)] = Text(LIMIT, style="bold red" if sum(parts.values()) > limit else "bold")
    return Text().join(cells)


def _work_text(phase: Phase) -> str:
    """Calls of a phase's program, what they wait for, and what they send."""
    sent = sum(each.sent for each in phase.collectives)
    told = [f"{phase.calls:,.0f} call{'s' * (phase.calls != 1)}"]
    told += [f"bound by {LIMITS[phase.bound_by]}"] if phase.bound_by else []
    told += [f"{transferred(sent)} over ICI"] if sent >= LITTLE else []
    return ", ".join(told)


def _speed(plan: Plan) -> str:
    """Of the whole step."""
    speed, tokens = plan.tokens_per_s_per_device, plan.composition.completion_tokens
    rate = f", {in_range(speed)} per second and chip" if speed is not None else ""
    return f"{tokens:,} completion tokens{rate}"


def _suggestions(suggestions: Sequence[Suggestion]) -> RenderableType:
    """Changes with what they make of memory and step, each with its reason below."""
    if not suggestions:
        return Text("None of the changes that were tried helps.")
    lines = []
    for each in suggestions:
        verdict, spare, step = each.plan.verdict, each.plan.spare_bytes, each.plan.step
        room = f"{gib(abs(spare))} GiB {'to spare' if spare >= 0 else 'too many'}"
        result = f"{SAYS[verdict]}, {room}{f', {in_range(step)} s per step' if step is not None else ''}"
        how = "closed form" if each.plan.estimate_only else "compiled"
        change = Text.assemble((str(each.change), "bold"), f" instead of {each.change.old}: ")
        lines += [Text.assemble(change, (result, STYLES[verdict]), (f" ({how})\n    {each.reason}", "dim"))]
    return Group(*lines)


def _comparison(answers: Sequence[Answer], *, narrow: bool) -> Table:
    """A row for each; where there is little room, without what follows from the rest."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("machine", no_wrap=True)
    keys = dict.fromkeys(answer.setting.partition("=")[0] for answer in answers if answer.setting)
    for heading in (*(key.rpartition(".")[2] for key in keys), "verdict"):
        table.add_column(heading, overflow="fold", min_width=9)
    spread = () if narrow else ("tokens/s/chip", "chip-hours")
    for heading in ("GiB", "s per step", *spread, "dollars"):
        table.add_column(heading, justify="right", no_wrap=True)
    for answer in answers:
        plan, cost = answer.plan, answer.cost
        others = () if narrow else (plan.tokens_per_s_per_device, cost and cost.chip_hours)
        table.add_row(
            plan.accelerator,
            *([answer.setting.partition("=")[2]] if keys else []),
            Text(SAYS[plan.verdict], style=STYLES[plan.verdict]),
            f"{gib(plan.worst.bytes)}/{limit_gib(plan.hbm_bytes)}",
            in_range(plan.step) if plan.step is not None else "-",
            *(_value(each) for each in (*others, cost and cost.usd)),
        )
    return table


def _value(time: Seconds | None) -> str:
    return number(time.value) if time is not None else "-"


def _versions(plan: Plan) -> str:
    return ", ".join(f"{name} {version}" for name, version in plan.versions.items())


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _grid(columns: int, *, right: int | None = None) -> Table:
    """A table without lines, none of whose cells is broken."""
    grid = Table.grid(padding=(0, 2))
    for column in range(columns):
        grid.add_column(no_wrap=True, justify="right" if column == right else "left")
    return grid


def _list(lines: Sequence[str]) -> Table:
    grid = Table.grid(padding=(0, 1))
    for line in lines:
        grid.add_row("-", line)
    return grid


def _print_line(console: Console, text: Text) -> None:
    """A line that no terminal's width breaks: scripts read it."""
    console.print(text, soft_wrap=True)


def _width(console: Console) -> int:
    return min(console.width, WIDTH)
