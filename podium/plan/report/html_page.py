"""Writes a report as one self-contained HTML file: the terminal's output with more details."""

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from podium import __version__
from podium.files import write_atomically
from podium.observe.out_files import page_mark
from podium.plan.report.report import print_sections
from podium.plan.report.sections import ReportSection

COLUMNS = 130
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
{mark}
<title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1b1f2a; max-width: 75rem; margin: 0 auto; padding: 1.5rem 1rem; }}
h1 {{ font-size: 1.3rem; }} summary {{ cursor: pointer; font-weight: 600; }} footer {{ color: #5a6070; }}
pre {{ font: 13px/1.3 ui-monospace, Menlo, "DejaVu Sans Mono", Consolas, monospace; overflow-x: auto; }}
</style></head>
<body><h1>{title}</h1>
{body}
<footer>Podium {version}</footer></body></html>
"""


def write_page(
    path: Path,
    title: str,
    sections: Sequence[ReportSection],
    folded: Mapping[str, Sequence[ReportSection]] | None = None,
    *,
    mark: str,
) -> None:
    """Write sections as a page, with each group of folded sections below them under its label.

    `mark` identifies the plan in the page, so that `check_page` can recognise it.
    """
    body = [_printed(sections)]
    for label, inner in (folded or {}).items():
        body.append(f"<details><summary>{html.escape(label)}</summary>{_printed(inner)}</details>")
    page = PAGE.format(mark=page_mark(mark), title=html.escape(title), body="\n".join(body), version=__version__)
    write_atomically(path, page)


def _printed(sections: Sequence[ReportSection]) -> str:
    """Render sections as HTML in the terminal's style and colours, details included."""
    console = Console(
        file=io.StringIO(),
        record=True,
        width=COLUMNS,
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    print_sections(sections, console, details=True)
    return console.export_html(code_format="<pre>{code}</pre>", inline_styles=True)
