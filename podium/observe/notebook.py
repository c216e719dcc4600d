"""What a notebook shows: a run's progress, as a growing chart with a table of its last steps, and tables of results.

Imports no jax.
"""

import base64
import collections
import html
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from podium.observe.curve_svg import curve_svg
from podium.observe.history import Point
from podium.observe.html_table import table

INTERVAL_S = 0.5
"""Minimum seconds between updates of the output during a step."""


ROWS = 6
"""Number of steps in the table below the chart."""


class StepRow(NamedTuple):
    """A finished step in a notebook's table; NaN for numbers that the run does not have."""

    step: int
    earned: float
    length: float
    entropy: float
    seconds: float


class _Display(Protocol):
    """An output area whose content can be replaced (IPython's display handle)."""

    def update(self, obj: object, *, raw: bool) -> None: ...


def in_notebook() -> bool:
    """Whether this process is a notebook kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookView:
    """The output below a running cell: the reward curve so far, a table of the last steps, and a line of text."""

    def __init__(self, title: str) -> None:
        """Make a view, which shows nothing until the first line."""
        self._title = title
        self._curve = self._table = ""
        self._rows: collections.deque[StepRow] = collections.deque(maxlen=ROWS)
        self._drawn = 0.0
        self._display: _Display | None = None

    def curve(self, rewards: Sequence[Point], accuracies: Sequence[Point]) -> None:
        """Set the curve; it is shown with the next line, which then appears immediately."""
        if rewards:
            self._curve = curve_image(self._title, rewards, accuracies)
            self._drawn = 0.0

    def step(self, row: StepRow, earning: str) -> None:
        """Add a finished step to the table; `earning` is the column title of `row.earned`."""
        self._rows.append(row)
        head = ("step", earning, "length", "entropy", "seconds")
        self._table = table(head, [_cells(each) for each in self._rows])

    def line(self, text: str, *, last: bool = False) -> None:
        """Show the text below the curve; skip it within INTERVAL_S of the last update, unless it is the `last`."""
        now = time.monotonic()
        if now - self._drawn < INTERVAL_S and not last:
            return
        self._drawn = now
        data = {"text/html": f"{self._curve}{self._table}<div>{html.escape(text)}</div>", "text/plain": text}
        if self._display is None:
            from IPython.display import display  # already loaded, since this is a kernel

            self._display = display(data, raw=True, display_id=True)
        else:
            self._display.update(data, raw=True)


def curve_image(title: str, rewards: Sequence[Point], accuracies: Sequence[Point]) -> str:
    """The reward curve as an HTML image, so that its style sheet does not affect the notebook."""
    code = base64.b64encode(curve_svg(title, rewards, accuracies).encode()).decode()
    return (
        f'<img alt="reward of {html.escape(title, quote=True)}" style="max-width:100%" '
        f'src="data:image/svg+xml;base64,{code}">'
    )


def _cells(row: StepRow) -> tuple[str, ...]:
    numbers = (f"{row.earned:.3f}", f"{row.length:.1f}", f"{row.entropy:.3f}", f"{row.seconds:.1f}")
    return (str(row.step), *("\u2013" if number == "nan" else number for number in numbers))
