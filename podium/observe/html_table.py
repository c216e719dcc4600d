"""HTML tables, as notebooks show them. Imports nothing of Podium, so that whatever has a result can show it."""

import html
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table of texts, styled by the notebook. With an empty `head`, the first column is the header."""
    first = f"<thead><tr>{''.join(f'<th>{html.escape(name)}</th>' for name in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr>{_row(row, headed=not head)}</tr>" for row in rows)
    return f"<table>{first}<tbody>{body}</tbody></table>"


def _row(cells: Sequence[str], *, headed: bool) -> str:
    tags = ["th" if headed and not index else "td" for index in range(len(cells))]
    style = ' style="text-align:left"'
    return "".join(f"<{tag}{style}>{html.escape(cell)}</{tag}>" for tag, cell in zip(tags, cells, strict=True))
