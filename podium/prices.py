"""The price of a chip for an hour, from a list that users can replace (podium/prices.yaml). Nothing is downloaded."""

import dataclasses
import datetime
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import yaml

from podium.accelerators import accelerators

HOUR_S = 3600
OLD_MONTHS = 6
"""Age in months above which a plan says how old a price is."""
KEYS = ("usd_per_chip_hour", "source", "date")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """The price of one chip for one hour."""

    usd_per_chip_hour: float
    source: str
    date: str
    """The day on which the source gave this price, ISO 8601."""


def months_old(date: str, today: datetime.date) -> int:
    """Whole months between a price's date, ISO 8601, and `today`."""
    then = datetime.date.fromisoformat(date)
    return 12 * (today.year - then.year) + today.month - then.month - (today.day < then.day)


def load_prices(path: Path | None) -> dict[str, Price]:
    """Prices by kind of chip (v6e, h100, ...), from `path` or else from `podium/prices.yaml`.

    Raises ValueError, naming the file and the expected form, if the file cannot be read or is not a price list.
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
        raise ValueError(f"prices {name}: {unknown[0]!r} is not a kind of chip; write one of {', '.join(known)}")
    return {kind: _price(entry, f"prices {name}: {kind}") for kind, entry in table.items()}


def _price(entry: Mapping[str, object], where: str) -> Price:
    if set(entry) != set(KEYS):
        raise ValueError(f"{where}: expected {', '.join(KEYS)}; found {', '.join(map(str, entry)) or 'nothing'}")
    usd, source, date = (entry[key] for key in KEYS)
    if isinstance(usd, bool) or not isinstance(usd, int | float) or not 0 < usd < 1e6:
        raise ValueError(f"{where}.usd_per_chip_hour: expected a number above 0, got {usd!r}")
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"{where}.source: expected the source of the price, got {source!r}")
    if not isinstance(date, datetime.date):
        raise ValueError(f"{where}.date: expected a date, such as 2026-08-01, got {date!r}")
    return Price(usd_per_chip_hour=float(usd), source=source.strip(), date=date.isoformat())
