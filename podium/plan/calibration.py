"""What a generation of chips can do at most, and what share of it programs reach; one file each in `chips`."""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

from podium.hlo.cost import Peaks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factor:
    """A number between the roofline and the clock, with what is known of it."""

    value: float
    low: float
    high: float
    source: str  # where it is from, and which published rows went into it: who predicts one of them must leave it out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Constants of a generation, per device."""

    peaks: Peaks
    links: int  # links of a device, where every one is connected
    calibration: dict[str, Factor]
    """By kind: share of the roofline that update, prefill, decode and ici reach, and host_s, seconds per call."""


@functools.cache
def load_chip(generation: str) -> Chip:
    """The constants of a generation, from its file in `podium/plan/chips`, which has their sources too."""
    text = resources.files("podium.plan").joinpath("chips", f"{generation}.json").read_text(encoding="utf-8")
    raw: dict[str, Any] = json.loads(text)
    constants = {name: entry["value"] for name, entry in raw["constants"].items()}
    return Chip(
        peaks=Peaks(
            **{each.name: constants[each.name] for each in dataclasses.fields(Peaks) if each.name in constants}
        ),
        links=constants["links"],
        calibration={kind: Factor(**entry) for kind, entry in raw["calibration"].items()},
    )
