"""What a generation of chips can do at most, and what share of it programs reach; one file each in `chips`."""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

from podium.hlo.cost import Peaks, Roofline
from podium.plan.result import NO_TIME, BoundBy, Seconds

Line = tuple[float, Roofline]
"""How often something is done in a step, and its least time."""


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
    """By kind: share of the roofline that update, prefill, decode, ici and host reach, and host_s, seconds per call."""


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


def calibrated(lines: list[Line], chip: Chip, kind: str) -> tuple[Seconds, BoundBy]:
    """Seconds of calls on the device, and what most of them wait for; `lines` say how often, and the roofline of each.

    The chip's calibration says what share is reached of the roofline of an update, prefill or decode, the `kind`;
    transfers have a share of their own, as copies to and from the host, and hops take what they take.
    """
    work, links, hops = chip.calibration[kind], chip.calibration["ici"], Factor(value=1.0, low=1.0, high=1.0, source="")
    shares: dict[BoundBy, Factor] = {"compute": work, "hbm": work, "ici": links, "latency": hops}
    parts: dict[BoundBy, Seconds] = {}
    for part, share in shares.items():
        least = sum(times * getattr(line, part) for times, line in lines)
        parts[part] = Seconds(value=least / share.value, low=least / share.high, high=least / share.low)
    parts["host"] = _waits(lines, chip.calibration["host"], work)
    seconds = sum(parts.values(), NO_TIME)
    return seconds, max(parts, key=lambda part: parts[part].value) if seconds.value else ""


def _waits(lines: list[Line], link: Factor, work: Factor) -> Seconds:
    """What copies between device and host take beyond the work beside them, by the shares that both reach."""
    copies = [(times * each, copied, doing) for times, line in lines for each, copied, doing in line.copies]
    expected, least, most = (
        sum(times * max(0.0, copied / of_link - doing / of_work) for times, copied, doing in copies)
        for of_link, of_work in ((link.value, work.value), (link.high, work.high), (link.low, work.low))
    )
    return Seconds(value=expected, low=least, high=most)
