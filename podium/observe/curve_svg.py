"""The reward curve of a run as an SVG that is legible on light and dark pages."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from podium.files import write_atomically
from podium.observe.chart import value_range
from podium.observe.history import Point, read_history
from podium.observe.metrics import ACCURACY, REWARD
from podium.observe.run_dir import CURVE
from podium.observe.text import bucket_means


class Frame(NamedTuple):
    """The size of a picture, and the margins around what is drawn in it, in pixels."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    @property
    def size(self) -> str:
        """The attributes of an SVG's size."""
        return f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'

    def place(self, across: float, up: float) -> tuple[float, float]:
        """The pixel position at these fractions of the plot's width and height."""
        return (
            self.left + across * (self.width - self.left - self.right),
            self.height - self.bottom - up * (self.height - self.top - self.bottom),
        )


CARD = Frame(width=860, height=380, left=64, right=28, top=84, bottom=56)
SMALL = Frame(width=120, height=28, left=2, right=2, top=2, bottom=2)
SMALL_POINTS = 60
SMOOTHING = 5
"""Window of the running mean (the bold line), in steps."""
MOST_LABELS = 8
"""With more evaluations than this, only the first and the last are labelled with their value."""

STYLE = """
text { font-family: -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; font-size: 13px; fill: #57606a }
.title { font-size: 18px; font-weight: 600; fill: #1f2328 }
.card { fill: #ffffff; stroke: #d0d7de }
.grid { stroke: #d0d7de; stroke-opacity: 0.7 }
.raw { fill: none; stroke: #1a7f64; stroke-opacity: 0.35; stroke-width: 1.5 }
.mean { fill: none; stroke: #1a7f64; stroke-width: 3; stroke-linejoin: round; stroke-linecap: round }
.area { fill: #1a7f64; fill-opacity: 0.10 }
.eval { fill: none; stroke: #8250df; stroke-width: 1.5; stroke-dasharray: 3 4; stroke-opacity: 0.7 }
.mark { fill: #8250df; stroke: #ffffff; stroke-width: 2 }
.value { font-weight: 600; fill: #8250df; stroke: #ffffff; stroke-width: 4; paint-order: stroke }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1 } .title { fill: #f0f6fc } .card { fill: #0d1117; stroke: #3d444d } .grid { stroke: #3d444d }
  .raw, .mean { stroke: #3fb68b } .area { fill: #3fb68b } .eval { stroke: #b083f0 }
  .mark { fill: #b083f0; stroke: #0d1117 } .value { fill: #b083f0; stroke: #0d1117 }
}
"""


def save_curve(folder: Path) -> None:
    """Write the run's reward curve to curve.svg in its folder, unless it has no step yet."""
    history = read_history(folder)
    if rewards := history.points(REWARD):
        write_atomically(folder / CURVE, curve_svg(folder.resolve().name, rewards, history.points(ACCURACY)))


def curve_svg(title: str, rewards: Sequence[Point], accuracies: Sequence[Point]) -> str:
    """The SVG: each step's mean reward (thin), its running mean (bold), and accuracy at each evaluation (marks)."""
    last = max(step for step, _ in [*rewards, *accuracies])
    low, high = value_range([value for _, value in [*rewards, *accuracies]])
    raw, mean, marks = (
        [CARD.place(step / max(1, last), (value - low) / (high - low)) for step, value in points]
        for points in (rewards, running_mean(rewards), accuracies)
    )
    _, ground = CARD.place(0, 0)
    area = [(mean[0][0], ground), *mean, (mean[-1][0], ground)]
    labelled = range(len(marks)) if len(marks) <= MOST_LABELS else (0, len(marks) - 1)
    parts = [
        *card(_headline(title, accuracies, last), f"Reward of {title} over {last} steps", STYLE),
        *_legend(with_accuracy=bool(accuracies)),
        *grid(low, high, last, unit="step"),
        f'<polygon class="area" points="{points_of(area)}"/>',
        f'<polyline class="raw" points="{points_of(raw)}"/>',
        f'<polyline class="mean" points="{points_of(mean)}"/>',
        f'<polyline class="eval" points="{points_of(marks)}"/>',
        *(_diamond(x, y) for x, y in marks),
        *(_value(*marks[i], accuracies[i][1]) for i in labelled),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def small_curve(rewards: Sequence[float]) -> str:
    """The rewards as an SVG line without axes, for a table; an empty text for fewer than two steps."""
    means = bucket_means(rewards, SMALL_POINTS)
    if len(means) < 2:
        return ""
    low, span = min(means), max(means) - min(means) or 1.0
    places = [SMALL.place(i / (len(means) - 1), (value - low) / span) for i, value in enumerate(means)]
    return (
        f'<svg class="curve" {SMALL.size} role="img" aria-label="reward, {means[0]:.2f} to {means[-1]:.2f}">'
        f'<polyline points="{points_of(places)}"/></svg>'
    )


def card(headline: str, label: str, style: str) -> list[str]:
    """The beginning of an SVG: its frame and headline; `label` describes the picture for screen readers."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {CARD.size} role="img" aria-label="{html.escape(label)}">',
        f"<style>{style}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{CARD.width - 1}" height="{CARD.height - 1}" rx="10"/>',
        f'<text class="title" x="{CARD.left - 38}" y="36">{html.escape(headline)}</text>',
    ]


def running_mean(points: Sequence[Point]) -> list[Point]:
    """Replace each value by the mean of the values at most SMOOTHING // 2 points away."""
    reach = SMOOTHING // 2
    windows = [points[max(0, i - reach) : i + reach + 1] for i in range(len(points))]
    return [
        (step, sum(value for _, value in window) / len(window))
        for (step, _), window in zip(points, windows, strict=True)
    ]


def _headline(title: str, accuracies: Sequence[Point], last: int) -> str:
    if len(accuracies) < 2:
        return title
    return f"{title}: accuracy {accuracies[0][1]:.2f} to {accuracies[-1][1]:.2f} in {last} steps"


def _legend(*, with_accuracy: bool) -> list[str]:
    y = 60
    entries = [
        f'<line class="mean" x1="{CARD.left - 38}" y1="{y - 4}" x2="{CARD.left - 14}" y2="{y - 4}"/>',
        f'<text x="{CARD.left - 6}" y="{y}">mean reward of a step, and its running mean</text>',
    ]
    if with_accuracy:
        x = CARD.left + 290
        entries += [_diamond(x, y - 4), f'<text x="{x + 14}" y="{y}">accuracy on held-out questions</text>']
    return entries


def grid(low: float, high: float, last: int, *, unit: str) -> list[str]:
    """Grid lines and labels from `low` to `high` on the vertical axis, and labels in `unit` from 0 to `last` on the
    horizontal axis.
    """
    lines = []
    for i in range(5):
        (_, y), value = CARD.place(0, i / 4), low + i / 4 * (high - low)
        lines.append(f'<line class="grid" x1="{CARD.left}" y1="{y:.1f}" x2="{CARD.width - CARD.right}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{CARD.left - 10}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    for step in _ticks(last):
        x, _ = CARD.place(step / max(1, last), 0)
        lines.append(f'<text x="{x:.1f}" y="{CARD.height - CARD.bottom + 22}" text-anchor="middle">{step}</text>')
    lines.append(f'<text x="{CARD.place(0.5, 0)[0]}" y="{CARD.height - 12}" text-anchor="middle">{unit}</text>')
    return lines


def _ticks(last: int) -> list[int]:
    """About five round step numbers from 0 to the last one."""
    magnitude = 10 ** max(0, len(str(last)) - 1)
    candidates = [max(1, magnitude * factor // 10) for factor in (1, 2, 5, 10, 20, 50)]
    width = next(candidate for candidate in candidates if last / candidate <= 6)
    return list(range(0, last + 1, width))


def _value(x: float, y: float, value: float) -> str:
    """The label with the value next to a mark."""
    above = y - 14 if y > CARD.top + 14 else y + 24
    anchor, shift = "middle", 0
    if x < CARD.left + 20:
        anchor, shift = "start", 8
    elif x > CARD.width - CARD.right - 20:
        anchor, shift = "end", 6
    return f'<text class="value" x="{x + shift:.1f}" y="{above:.1f}" text-anchor="{anchor}">{value:.2f}</text>'


def _diamond(x: float, y: float) -> str:
    size = 7
    corners = [(x, y - size), (x + size, y), (x, y + size), (x - size, y)]
    return f'<polygon class="mark" points="{points_of(corners)}"/>'


def points_of(corners: Sequence[tuple[float, float]]) -> str:
    """The attribute `points` of an SVG line or polygon."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
