"""Sections of a report as one HTML file that opens without a network: `page.html` with the sections put in."""

import html
import string
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from podium import __version__
from podium.files import write_atomically
from podium.plan.formatting import readable
from podium.plan.sections import REST, Chart, Content, Line, ReportSection, Table

COLOURS = ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#a463f2", "#6cc5b0", "#ff8ab7", "#9c6b4e", "#97bbf5")
REST_COLOUR = "#9498a0"
NARROW = 4  # columns that any page has room for


def check_page(path: Path) -> None:
    """Raises ValueError where the page could not be written: found out before anything is compiled."""
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
        raise ValueError(f"--html {path}: {what}; name a file, as plan.html")


def write_page(
    path: Path,
    title: str,
    sections: Sequence[ReportSection],
    folded: Mapping[str, Sequence[ReportSection]] | None = None,
) -> None:
    """Write sections as a page; those that are `folded` come below, under the label that opens them."""
    body = [_section(each) for each in sections]
    for label, inner in (folded or {}).items():
        body.append(f"<details><summary>{html.escape(label)}</summary>{''.join(map(_section, inner))}</details>")
    template = string.Template(resources.files("podium.plan").joinpath("page.html").read_text(encoding="utf-8"))
    page = template.substitute(title=html.escape(title), body="\n".join(body), version=__version__)
    write_atomically(path, page)


def _section(section: ReportSection) -> str:
    title = f"<h2>{html.escape(section.title)}</h2>" if section.title else ""
    return f"<section>{title}{''.join(map(_content, section.content))}</section>"


def _content(content: Content) -> str:
    match content:
        case Line():
            return _line(content)
        case Chart():
            return _chart(content)
        case Table():
            return _table(content)


def _line(line: Line) -> str:
    verdict = f' class="verdict {line.verdict}"' if line.verdict and not line.label else ""
    label = f"<b>{html.escape(line.label)}</b>: " if line.label else ""
    note = f'<br><span class="soft">{html.escape(line.note)}</span>' if line.note else ""
    return f"<p{verdict}>{label}{html.escape(line.text)}{note}</p>" if line.text else ""


def _chart(chart: Chart) -> str:
    """Bars as wide as the page allows; what a segment is shows when the mouse is over it."""
    colours = dict(zip(chart.parts, COLOURS, strict=False)) | {REST: REST_COLOUR}
    rows = []
    for bar in chart.bars:
        cells = [
            f'<i style="left:{_share(begin, chart)};width:{_share(end - begin, chart)};background:'
            f'{colours.get(part, COLOURS[0])}" title="{html.escape(readable(part))} {end - begin:.3g}"></i>'
            for part, begin, end in bar.segments
            if end > begin
        ]
        if bar.range is not None:
            low, high = bar.range
            cells.append(
                f'<i class="range" style="left:{_share(low, chart)};width:{_share(high - low, chart)}"'
                f' title="between {low:.3g} and {high:.3g}"></i>'
            )
        if chart.limit is not None:
            cells.append(f'<i class="limit" style="left:{_share(chart.limit, chart)}"></i>')
        bad, name = " bad" * bar.bad, html.escape(bar.name)
        rows.append(
            f'<span class="name{bad}">{name}</span><span class="figure{bad}">{html.escape(bar.figure)}</span>'
            f'<span class="bar" title="{html.escape(bar.note)}">{"".join(cells)}</span>'
        )
    key = [
        f'<span><i style="background:{colours[part]}"></i>{html.escape(readable(part))}</span>' for part in chart.parts
    ]
    key += [f'<span><i style="background:#c1121f"></i>{html.escape(chart.limit_text)}</span>'] * bool(chart.limit_text)
    if any(bar.range for bar in chart.bars):
        key.append('<span><i class="range"></i>where the end may be</span>')
    return f'<div class="chart">{"".join(rows)}</div>' + (f'<div class="key">{"".join(key)}</div>' if key else "")


def _share(value: float, chart: Chart) -> str:
    return f"{100 * value / chart.reach:.4f}%"


def _table(table: Table) -> str:
    """A table that scrolls sideways where the page is narrow, and then says so."""

    def cell(tag: str, column: int, content: str) -> str:
        return f"<{tag}{' class=text' * (column in table.text)}>{html.escape(content)}</{tag}>"

    lines = [("th", table.heads), *(("td", row) for row in table.rows)]
    body = "".join(f"<tr>{''.join(cell(tag, i, each) for i, each in enumerate(row))}</tr>" for tag, row in lines)
    hint = '<p class="scroll">This table scrolls sideways.</p>' if len(table.heads) > NARROW else ""
    return f'{hint}<div class="wide" tabindex="0"><table>{body}</table></div>'
