"""Prints the sections of a report. Parts of bars differ in colour, or in letter if colours are off."""

import string
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from podium.plan.report.formatting import VERDICTS, readable
from podium.plan.report.sections import REST, Bar, Chart, Content, Line, ReportSection, Table

WIDTH = 110
NARROW = 100  # terminals with fewer columns get tables without their spare columns
SHORTEST = 12  # cells of a bar
BLOCK, LIMIT = "\u2588", "\u2503"
STYLES = {"fits": "bold green", "too_close": "bold yellow", "does_not_fit": "bold red"}
CELL_STYLES = {VERDICTS[verdict]: style for verdict, style in STYLES.items()}
COLOURS = ("blue", "cyan", "green", "yellow", "magenta", "red", "bright_blue", "bright_green", "bright_magenta")


def print_sections(sections: Sequence[ReportSection], console: Console, *, details: bool = False) -> None:
    """Print sections. With `details`, print all of them at the console's full width.

    Without `details`, lines of untitled sections are never wrapped, because scripts read them.
    """
    width = console.width if details else min(console.width, WIDTH)
    titled: list[RenderableType] = []
    for section in (each for each in sections if details or not each.details):
        if section.title:
            titled.append(Text(f"\n{section.title}", style="bold"))
            titled += [_render(each, console, width) for each in section.content]
            continue
        for each in section.content:
            indent = "  " if isinstance(each, Line) and each.label else ""
            shown = Text(indent) + _text(each) if isinstance(each, Line) else _render(each, console, width)
            console.print(shown, soft_wrap=not details)
    if titled:
        console.print(Padding(Group(*titled), (0, 0, 0, 2)), width=width)


def _render(content: Content, console: Console, width: int) -> RenderableType:
    match content:
        case Line(bullet=True):
            grid = Grid.grid(padding=(0, 1))
            grid.add_row("-", content.text)
            return grid
        case Line():
            return _text(content)
        case Chart():
            return _chart(content, width, coloured=console.color_system is not None)
        case Table():
            return _table(content, narrow=console.width < NARROW)


def _text(line: Line) -> Text:
    """A line with its label before it and its note below."""
    text = Text.assemble((f"{line.label}: " if line.label else "", "bold"))
    text.append(line.text, style=STYLES[line.verdict] if line.verdict else "")
    return text.append(f"\n    {line.note}", style="dim") if line.note else text


def _table(table: Table, *, narrow: bool) -> Grid:
    shown = [column for column in range(len(table.heads)) if not (narrow and column in table.spare)]
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in shown:
        if column in table.text and column:
            grid.add_column(table.heads[column], overflow="fold", min_width=9)
        else:
            justify = "left" if column in table.text else "right"
            grid.add_column(table.heads[column], no_wrap=True, justify=justify)
    for row in table.rows:
        grid.add_row(*(Text(row[column], style=CELL_STYLES.get(row[column], "")) for column in shown))
    return grid


def _chart(chart: Chart, width: int, *, coloured: bool) -> RenderableType:
    """Bars on one scale, with a legend of their parts."""
    columns = zip(*((bar.name, bar.figure, bar.note) for bar in chart.bars), strict=True)
    room = max(SHORTEST, width - 2 - sum(max(map(len, column)) + 2 for column in columns))
    marks = _marks(chart.parts, coloured=coloured)
    grid = Grid.grid(padding=(0, 2))
    for justify in ("left", "right" if chart.parts else "left", "left", "left"):
        grid.add_column(no_wrap=True, justify=justify)
    for bar in chart.bars:
        style = "bold red" if bar.bad else ""
        cells = _cells(bar, chart, room - (chart.limit is not None), marks)
        grid.add_row(Text(bar.name, style=style), Text(bar.figure, style=style), cells, Text(bar.note, style="dim"))
    if not chart.parts:
        return grid
    key = [Text.assemble(marks[part], f" {readable(part)}") for part in chart.parts]
    key += [Text(f"{LIMIT} {chart.limit_text}")] * (chart.limit is not None)
    return Group(grid, *_lines(key, width - 2))


def _lines(entries: Sequence[Text], width: int) -> Iterator[Text]:
    """Entries side by side; an entry is never broken across lines."""
    line = Text()
    for entry in entries:
        if line and len(line) + 3 + len(entry) > width:
            yield line
            line = Text()
        line = Text("   ").join((line, entry)) if line else entry
    yield line


def _marks(parts: Sequence[str], *, coloured: bool) -> dict[str, Text]:
    """The cell of each part: a coloured block, or a letter of the part's name if one is free."""
    own = [part for part in parts if part != REST]
    if coloured:
        marks = {part: Text(BLOCK, style=style) for part, style in zip(own, COLOURS, strict=False)}
        return marks | {REST: Text(BLOCK, style="bright_black")}
    marks, free = {}, dict.fromkeys(string.ascii_uppercase)
    for part in own:
        letter = next(each for each in (*part.upper(), *free) if each in free)
        del free[letter]
        marks[part] = Text(letter)
    return marks | {REST: Text(".")}


def _cells(bar: Bar, chart: Chart, width: int, marks: Mapping[str, Text]) -> Text:
    """A bar as a row of cells, with a mark at the limit if there is one, and at least one cell long otherwise."""
    cells = [Text(" ")] * (width + (chart.limit is not None))
    for part, begin, end in bar.segments:
        first, last = round(begin / chart.end * width), round(end / chart.end * width)
        if chart.limit is None:
            first = min(int(begin / chart.end * width), width - 1)
            last = max(first + 1, last)
        cells[first:last] = [marks.get(part, Text(BLOCK, style="cyan"))] * (last - first)
    if chart.limit is not None:
        style = "bold red" if bar.bad else "bold"
        cells[round(chart.limit / chart.end * width)] = Text(LIMIT, style=style)
    return Text().join(cells)
