"""What `make docs` changes in the pages of the site: mkdocs.yml names this file. Imports nothing of Podium."""

import html
import re
from collections.abc import Iterator

STACKED = 3
"""Columns from which a table's rows are cards on a phone (docs/site/site.css)."""
LONG = 12
"""Characters from which a name in a table may be broken behind its dots and underscores."""


def on_page_content(content: str, **_: object) -> str:
    """Label the cells of tables, let long names in them break, and let pictures be opened by themselves."""
    content = re.sub(r"<table>.*?</table>", lambda found: _table(found[0]), content, flags=re.DOTALL)
    return re.sub(r'(<img [^>]*src="([^"]+)"[^>]*/?>)', r'<a href="\2">\1</a>', content)


def _table(table: str) -> str:
    table = re.sub(r"<code>([^<]+)</code>", lambda found: f"<code>{_breakable(found[1])}</code>", table)
    heads = [re.sub(r"<[^>]+>", "", head) for head in re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)]
    if len(heads) < STACKED:
        return table
    rows = re.sub(r"<tr>(?:\s*<td.*?</td>)+\s*</tr>", lambda found: _row(found[0], iter(heads)), table, flags=re.DOTALL)
    return rows.replace("<table>", "<table data-stack>", 1)


def _row(row: str, heads: Iterator[str]) -> str:
    def cell(found: re.Match[str]) -> str:
        label = html.escape(html.unescape(next(heads)), quote=True)
        return f'<td data-label="{label}"{found[1]}>{f"<span>{found[2]}</span>" if found[2] else ""}</td>'

    return re.sub(r"<td([^>]*)>(.*?)</td>", cell, row, flags=re.DOTALL)


def _breakable(name: str) -> str:
    return re.sub(r"([._/=,])(?=\w)", r"\1<wbr>", name) if len(name) >= LONG else name
