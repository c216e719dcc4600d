"""Peak rates of each generation of chips, and the share that programs reach; read from `podium/chips`."""

import dataclasses
import functools

from podium.chips import chip_constants, read_chip
from podium.hlo.cost import Peaks, Roofline
from podium.plan.result import NO_TIME, BoundBy, Seconds

PEAKS = {field.name for field in dataclasses.fields(Peaks)}
Line = tuple[float, Roofline]
"""How many times a step does some work, and the roofline of doing it once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factor:
    """The measured share of the roofline, with its range and source."""

    value: float
    low: float
    high: float
    source: str  # names the published rows it was fitted to; to predict one of those rows, leave that row out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Constants of one device of a generation."""

    peaks: Peaks
    links: int  # links of a device, if all of them are connected
    calibration: dict[str, Factor]
    """Share of the roofline that update, prefill, decode, ici, host and, on GPUs, latency reach; `host_s` is seconds of
    the host per call."""


@functools.cache
def load_chip(generation: str) -> Chip:
    """The constants of a generation and the shares that its programs reach, from its file in `podium/chips`.

    Raises:
        ValueError: there is no such file.
    """
    read, constants = read_chip(generation), chip_constants(generation)
    if read is None or constants is None:
        raise ValueError(f"there are no constants of {generation}: podium/chips has no {generation}.json")
    return Chip(
        peaks=Peaks(**{name: value for name, value in constants.items() if name in PEAKS}),
        links=int(constants["links"]),
        calibration={kind: Factor(**entry) for kind, entry in read["calibration"].items()},
    )


def calibrated(lines: list[Line], chip: Chip, kind: str) -> tuple[Seconds, BoundBy]:
    """Device seconds of some calls, and the resource that bounds most of that time.

    Divides compute and memory time by the calibrated share of update, prefill or decode, and transfers between devices
    and to and from the host by shares of their own. Latency is scaled on GPUs alone.

    Args:
        lines: how often each call is made, and its roofline.
        chip: constants of the device.
        kind: which calibration to use: update, prefill or decode.
    """
    work, links = chip.calibration[kind], chip.calibration["ici"]
    hops = Factor(value=1.0, low=1.0, high=1.0, source="")
    launches = chip.calibration.get("latency", hops)
    shares: dict[BoundBy, Factor] = {"compute": work, "hbm": work, "ici": links, "latency": launches}
    parts: dict[BoundBy, Seconds] = {}
    for part, share in shares.items():
        least = sum(times * getattr(line, part) for times, line in lines)
        parts[part] = Seconds(value=least / share.value, low=least / share.high, high=least / share.low)
    parts["host"] = _waits(lines, chip.calibration["host"], work)
    seconds = sum(parts.values(), NO_TIME)
    return seconds, max(parts, key=lambda part: parts[part].value) if seconds.value else ""


def _waits(lines: list[Line], link: Factor, work: Factor) -> Seconds:
    """Seconds of host copies that are not overlapped by other work."""
    copies = [(times * each, copied, doing) for times, line in lines for each, copied, doing in line.copies]
    expected, least, most = (
        sum(times * max(0.0, copied / of_link - doing / of_work) for times, copied, doing in copies)
        for of_link, of_work in ((link.value, work.value), (link.high, work.high), (link.low, work.low))
    )
    return Seconds(value=expected, low=least, high=most)
