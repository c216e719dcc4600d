"""What a plan costs: chip-hours, and money by a list of prices that the user may replace. Nothing is fetched."""

import dataclasses
import datetime
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from podium.accelerators import accelerators, find_accelerator
from podium.plan.result import Plan, Seconds

HOUR_S = 3600
KEYS = ("usd_per_chip_hour", "source", "date")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """Of one chip for one hour."""

    usd_per_chip_hour: float
    source: str
    date: str
    """When the source said so."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Of the steps of a run; compiling, evaluations and checkpoints are not in it."""

    steps: int
    chip_hours: Seconds
    """Hours, times chips."""
    price: Price | None
    """None: the list has no price of this kind of chip."""

    @property
    def usd(self) -> Seconds | None:
        """In US dollars."""
        return self.chip_hours * self.price.usd_per_chip_hour if self.price else None


def load_prices(path: Path | None) -> dict[str, Price]:
    """Prices by kind of chip (v6e, h100, ...), from a file like `podium/prices.yaml`, or from that one.

    Raises:
        ValueError: the file cannot be read, or is not such a list; the message says where and what is expected.
    """
    name = str(path) if path else "prices.yaml"
    try:
        text = (path or resources.files("podium").joinpath("prices.yaml")).read_text(encoding="utf-8")
        table = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ValueError(f"prices {name}: cannot be read ({reason})") from None
    known = sorted({each.generation for each in accelerators().values()})
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise ValueError(f"prices {name}: expected entries such as `v6e: {{usd_per_chip_hour: 2.7, source: ..., ...}}`")
    if unknown := [kind for kind in table if kind not in known]:
        raise ValueError(f"prices {name}: {unknown[0]!r} is no kind of chip; write one of {', '.join(known)}")
    return {kind: _price(entry, f"prices {name}: {kind}") for kind, entry in table.items()}


def cost_of(plan: Plan, steps: int, prices: Mapping[str, Price]) -> Cost | None:
    """What so many steps cost; None where the plan has no seconds."""
    if plan.step is None:
        return None
    price = prices.get(find_accelerator(plan.accelerator).generation)
    return Cost(steps=steps, chip_hours=plan.step * (steps * plan.devices / HOUR_S), price=price)


def _price(entry: Mapping[str, Any], where: str) -> Price:
    if set(entry) != set(KEYS):
        raise ValueError(f"{where}: expected {', '.join(KEYS)}; found {', '.join(map(str, entry)) or 'nothing'}")
    usd, source, date = (entry[key] for key in KEYS)
    if isinstance(usd, bool) or not isinstance(usd, int | float) or not 0 < usd < 1e6:
        raise ValueError(f"{where}.usd_per_chip_hour: expected a number above 0, got {usd!r}")
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"{where}.source: expected where the price is from, got {source!r}")
    if not isinstance(date, datetime.date):
        raise ValueError(f"{where}.date: expected a day, as 2026-08-01, got {date!r}")
    return Price(usd_per_chip_hour=float(usd), source=source.strip(), date=date.isoformat())
