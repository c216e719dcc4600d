"""A run's reward over its steps as a small chart of block characters, with its evaluations as marks."""

from collections.abc import Sequence

from rich.text import Text

from podium.observe.history import Point
from podium.observe.text import BARS

MARK = "\u25c6"
VERTICAL, CORNER, HORIZONTAL = "\u2502", "\u2514", "\u2500"
LABEL_WIDTH = 6


def reward_curve(
    rewards: Sequence[Point], accuracies: Sequence[Point] = (), *, width: int = 72, height: int = 8
) -> Text:
    """Draw the chart: bars are rewards (at least one), marks are accuracies, with one vertical axis at the left.

    The chart has `width` columns, including the axis, and `height` rows of bars; the step axis takes two more rows.
    """
    columns = max(1, width - LABEL_WIDTH - 1)
    last = max(step for step, _ in [*rewards, *accuracies])
    low, high = value_range([value for _, value in [*rewards, *accuracies]])
    bars = _columns(rewards, columns, last)
    marks = {
        (_place(step, last, columns), min(height - 1, int((value - low) / (high - low) * height)))
        for step, value in accuracies
    }
    chart = Text(no_wrap=True)
    for row in reversed(range(height)):
        label = {height - 1: f"{high:.2f}", 0: f"{low:.2f}"}.get(row, "")
        chart.append(f"{label:>{LABEL_WIDTH}}{VERTICAL}", style="dim")
        for column, value in enumerate(bars):
            if (column, row) in marks:
                chart.append(MARK, style="bold magenta")
            else:
                chart.append(_cell(value, row, low, high, height), style="green")
        chart.append("\n")
    chart.append(f"{'':>{LABEL_WIDTH}}{CORNER}{HORIZONTAL * columns}\n", style="dim")
    ending = f"step {last}"
    chart.append(f"{'':>{LABEL_WIDTH}} 0{ending:>{max(len(ending) + 1, columns - 1)}}", style="dim")
    return chart


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis that includes 0 and all values: 0 to 1 if all values fit, otherwise as wide as needed."""
    low, high = min(0.0, *values), max(0.0, *values)
    return low, 1.0 if low == 0 and high <= 1 else high


def _place(step: int, last: int, columns: int) -> int:
    return min(columns - 1, step * columns // max(1, last))


def _columns(points: Sequence[Point], columns: int, last: int) -> list[float | None]:
    """The mean of the points in each column; a column without points repeats the previous one."""
    buckets: list[list[float]] = [[] for _ in range(columns)]
    for step, value in points:
        buckets[_place(max(0, step - 1), last, columns)].append(value)
    means: list[float | None] = []
    for bucket in buckets:
        means.append(sum(bucket) / len(bucket) if bucket else (means[-1] if means else None))
    return means


def _cell(value: float | None, row: int, low: float, high: float, height: int) -> str:
    """The character of a bar in one row: full, empty, or partly filled in eighths."""
    if value is None:
        return " "
    eighths = round((value - low) / (high - low) * height * 8)
    return BARS[min(8, max(0, eighths - 8 * row))]
