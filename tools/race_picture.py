"""The reward against the CPU seconds that it took, Podium beside TRL, as an SVG: from benches/results/trl-cpu.json."""

import itertools
import json
from pathlib import Path
from typing import TypedDict

from podium.observe.curve_svg import CARD, STYLE, card, grid, points_of

RESULTS = Path(__file__).parents[1] / "benches" / "results" / "trl-cpu.json"
FORMATS = ("float32", "bfloat16")
RACE_STYLE = """
.podium { stroke: #1a7f64 } .trl { stroke: #8250df } .bfloat16 { stroke-dasharray: 7 5 }
.race { fill: none; stroke-width: 2.5; stroke-linejoin: round; stroke-linecap: round }
@media (prefers-color-scheme: dark) { .podium { stroke: #3fb68b } .trl { stroke: #b083f0 } }
"""
LEGEND = (0, 165, 335, 580)
"""Where the entries of the legend begin."""
NAMES = {"podium": "Podium", "trl": "TRL's GRPOTrainer"}


class Side(TypedDict):
    """What one of the two did in a number format."""

    step_cpu_s: list[float]
    rewards: list[float]


def read_race(path: Path = RESULTS) -> dict[tuple[str, str], Side]:
    """Both sides in both formats, by (side, format), from the bench's results."""
    formats = json.loads(path.read_text())["formats"]
    return {(side, each): formats[each][side] for side in NAMES for each in FORMATS}


def race_svg(race: dict[tuple[str, str], Side]) -> str:
    """The SVG: for each side and format the mean reward of its steps, at the CPU seconds of all steps up to it."""
    last = max(sum(side["step_cpu_s"]) for side in race.values())
    steps = max(len(side["rewards"]) for side in race.values())
    headline = f"Mean reward of {steps} steps against the CPU seconds that they took"
    parts = card(headline, headline + ", Podium beside TRL", STYLE + RACE_STYLE)
    parts += grid(0.0, 1.0, round(last), unit="CPU seconds of all steps so far")
    for at, ((name, dtype), side) in zip(LEGEND, race.items(), strict=True):
        spent = itertools.accumulate(side["step_cpu_s"])
        corners = [CARD.place(cpu / last, reward) for cpu, reward in zip(spent, side["rewards"], strict=True)]
        parts.append(f'<polyline class="race {name} {dtype}" points="{points_of(corners)}"/>')
        left = CARD.left - 38 + at
        parts.append(f'<line class="race {name} {dtype}" x1="{left}" y1="56" x2="{left + 30}" y2="56"/>')
        parts.append(f'<text x="{left + 38}" y="60">{NAMES[name]}, {dtype}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
