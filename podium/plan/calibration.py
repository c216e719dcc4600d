"""Peak rates of each kind of chip, and the share of them that programs reach: Podium's figures and the user's own.

Figures in the file that `podium calibrate` wrote for a kind of machine override those in the package, one by one.
"""

import dataclasses

from pydantic import TypeAdapter, ValidationError

from podium.accelerators import Accelerator, find_accelerator, this_cpu
from podium.chips import chip_constants, read_chip, user_file
from podium.hlo.cost import Peaks, Roofline
from podium.plan.result import NO_TIME, BoundBy, Seconds

PEAKS = {field.name for field in dataclasses.fields(Peaks)}
Line = tuple[float, Roofline]
"""How many times a step does a piece of work, and the roofline of doing it once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factor:
    """The measured share of the roofline, with its range and source."""

    value: float
    low: float
    high: float
    source: str  # names the published rows it was fitted to; to predict one of those rows, leave that row out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """A peak rate, in SI units or bytes, and its source."""

    value: float
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserFile:
    """The file that `podium calibrate` writes: in the form of a file in `podium/chips`, with the source of its
    figures.
    """

    about: str
    constants: dict[str, Constant]
    calibration: dict[str, Factor]


USER_FILE = TypeAdapter(UserFile)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Constants of one device of a generation."""

    peaks: Peaks
    links: int  # links of a device, if all of them are connected
    calibration: dict[str, Factor]
    """Share of the roofline that update, prefill, decode, ici, host and, on GPUs, latency reach; `host_s` is seconds of
    the host per call."""
    source: str = ""
    """What the calibration is: a file of the package, or the user's runs."""


def load_chip(generation: str) -> Chip:
    """The constants of a generation and the shares that its programs reach.

    Raises:
        ValueError: the generation is unknown, or the user's file is invalid.
    """
    if (found := find_chip(generation)) is None:
        raise ValueError(f"no constants are known for {generation}: podium/chips has no {generation}.json")
    return found


def find_chip(generation: str) -> Chip | None:
    """Like `load_chip`, but None if nothing is known, as for a CPU without a calibration."""
    packaged, own = read_chip(generation), read_user_file(generation)
    if packaged is None and own is None:
        return None
    constants = chip_constants(generation) or {}
    shares = {} if packaged is None else {kind: Factor(**each) for kind, each in packaged["calibration"].items()}
    if own is not None:
        constants |= {name: each.value for name, each in own.constants.items()}
        shares |= own.calibration
    return Chip(
        peaks=Peaks(**{name: value for name, value in constants.items() if name in PEAKS}),
        links=int(constants["links"]),
        calibration=shares,
        source=f"podium/chips/{generation}.json" if own is None else own.about,
    )


def find_machine(name: str) -> Accelerator:
    """Like `find_accelerator`; `cpu` is this machine, once `podium calibrate` has written its figures.

    Raises AcceleratorError if the name is unknown.
    """
    if name.strip().lower() == "cpu" and read_user_file("cpu") is not None:
        return this_cpu()
    return find_accelerator(name)


def read_user_file(generation: str) -> UserFile | None:
    """The user's own figures for a kind of machine; None if absent. Raises ValueError if the file is invalid."""
    path = user_file(generation)
    if not path.is_file():
        return None
    try:
        return USER_FILE.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path} is not a calibration ({where}: {first['msg']}); move it away, or delete it") from None


EXACT = Factor(value=1.0, low=1.0, high=1.0, source="")


def uncalibrated(peaks: Peaks) -> Chip:
    """A device whose programs reach the roofline, with a host that takes no time, to find a plan's minimum seconds."""
    shares: dict[str, Factor] = dict.fromkeys(("update", "prefill", "decode", "ici", "host", "latency"), EXACT)
    shares["host_s"] = Factor(value=0.0, low=0.0, high=0.0, source="")
    return Chip(peaks=peaks, links=1, calibration=shares, source="the roofline alone")


def calibrated(lines: list[Line], chip: Chip, kind: str) -> tuple[Seconds, BoundBy]:
    """Device seconds of some calls, and the resource that bounds most of that time.

    Divides compute and memory time by the calibrated share of update, prefill or decode, and transfers between devices
    and to and from the host by their own shares. Latency is scaled on GPUs alone.

    Args:
        lines: how often each call is made, and its roofline.
        chip: constants of the device.
        kind: which calibration to use: update, prefill or decode.
    """
    work, links = chip.calibration[kind], chip.calibration["ici"]
    launches = chip.calibration.get("latency", EXACT)
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
