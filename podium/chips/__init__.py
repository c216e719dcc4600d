"""Figures of each kind of chip, with sources: the published peaks, and the share of them that programs reach. No jax.

`KIND.json` has two parts. `constants` are published by the maker: operations and bytes per second, memory, links.
`calibration` is the share of the peaks that Podium's programs should reach; `podium.plan.calibration` reads it.
`podium calibrate` writes a file of the same form for the machine of a user's runs, outside the package.
"""

import functools
import json
import os
from importlib import resources
from pathlib import Path
from typing import TypedDict


class Constant(TypedDict):
    """A published figure of a device, in SI units or bytes, and where it is published."""

    value: float
    source: str


class Share(TypedDict):
    """The share of the roofline that a kind of work reaches, 0 to 1, with its range and the measurements that it comes
    from.
    """

    value: float
    low: float
    high: float
    source: str


class ChipFile(TypedDict):
    """The contents of `KIND.json`."""

    constants: dict[str, Constant]
    calibration: dict[str, Share]


@functools.cache
def read_chip(kind: str) -> ChipFile | None:
    """Read the file of a kind of chip, such as `v6e` or `h100`; None if it does not exist."""
    path = resources.files(__name__).joinpath(f"{kind}.json")
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def user_file(kind: str) -> Path:
    """Where the user's own figures of a kind of chip are: `$XDG_CONFIG_HOME/podium/chips`, or below `~/.config`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "podium" / "chips" / f"{kind}.json"


def chip_constants(kind: str) -> dict[str, float] | None:
    """Published figures of this kind of device, by name, in SI units and bytes; None if its kind has no file."""
    read = read_chip(kind)
    return None if read is None else {name: constant["value"] for name, constant in read["constants"].items()}
