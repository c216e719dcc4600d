"""What each kind of chip can do, and how far programs get towards it: one file for each, with sources. No jax.

`KIND.json` has two parts. `constants` are what the maker publishes: operations and bytes per second, memory, links.
`calibration` is the share of them that Podium's programs are taken to reach; `podium.plan.calibration` reads it.
"""

import functools
import json
from importlib import resources
from typing import TypedDict


class Constant(TypedDict):
    """A published figure of a device."""

    value: float
    source: str


class Share(TypedDict):
    """The share of the roofline that a kind of work reaches, its range, and the measurements behind it."""

    value: float
    low: float
    high: float
    source: str


class ChipFile(TypedDict):
    """The file of a kind of chip."""

    constants: dict[str, Constant]
    calibration: dict[str, Share]


@functools.cache
def read_chip(kind: str) -> ChipFile | None:
    """The file of a kind of chip, such as `v6e` or `h100`; None where Podium has no constants of it."""
    path = resources.files(__name__).joinpath(f"{kind}.json")
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def chip_constants(kind: str) -> dict[str, float] | None:
    """The published figures of a device of this kind by name, in SI units and bytes; None where there are none."""
    read = read_chip(kind)
    return None if read is None else {name: constant["value"] for name, constant in read["constants"].items()}
