"""What to rent: as a user asks for it, and as the cloud is asked."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from podium.accelerators import Accelerator, find_accelerator
from podium.config.errors import nearest
from podium.pods.gcloud import Order
from podium.pods.inventory import LEASE, OWNER, ZONES, Slice, zones_label
from podium.pods.slices import AskedWronglyError, Slices, check_name

RUNTIMES: Mapping[str, str] = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v6e-ubuntu-2404",
}
"""Software of the machines, where none is named."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rent:
    """What a user asks for."""

    type: str | None = None
    """Accelerator type, as v6e-16."""
    zones: tuple[str, ...] = ()
    """In the order in which they are asked; empty: gcloud's own."""
    spot: bool = True
    queued: bool = True
    valid_until: str = "4h"
    """How long each zone may keep us waiting."""
    lease: str = "24h"
    """After which `podium pod reap` deletes it."""
    runtime: str | None = None
    service_account: str | None = None


def tpu(name: str | None) -> Accelerator:
    """The TPU slice of that name.

    Raises:
        AskedWronglyError: it is none that can be rented here; the message has the nearest ones.
    """
    if name is None:
        raise AskedWronglyError("which TPU? Give --type, as v6e-8 (one machine) or v6e-16 (four)")
    try:
        accelerator = find_accelerator(name)
    except ValueError as error:
        raise AskedWronglyError(f"--type {name}: {error}") from None
    if accelerator.generation not in RUNTIMES:
        raise AskedWronglyError(f"--type {name}: it is no TPU; podium pod rents {', '.join(RUNTIMES)}, as v6e-8")
    return accelerator


def seconds(text: str, option: str) -> int:
    """The seconds of `90m`, `4h`, `2d`.

    Raises:
        AskedWronglyError: it is no such text.
    """
    found = re.fullmatch(r"([1-9]\d*)([smhd])", text)
    if not found:
        raise AskedWronglyError(f"{option} {text!r}: write a whole number and s, m, h or d, as 90m or 4h")
    return int(found[1]) * _UNITS[found[2]]


def rent_slice(slices: Slices, name: str, rent: Rent, *, default_zone: str | None) -> Slice:
    """The slice of that name, ready: the one that exists, with its lease renewed, or a new one.

    Raises:
        AskedWronglyError: type, zone, time or name cannot be meant.
        SliceError: it cannot be had; nothing is rented then.
    """
    accelerator = tpu(rent.type)
    check_name(name)
    zones = rent.zones or ((default_zone,) if default_zone else ())
    if not zones:
        raise AskedWronglyError("in which zone? Give --zone, one or more in order: those in which you have quota")
    known = slices.zones()
    for zone in zones:
        if zone not in known:
            near = nearest(zone, known)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
            raise AskedWronglyError(f"--zone {zone}: no TPU zone of this project; {hint}")
    order = Order(
        name=name,
        accelerator=accelerator.name,
        runtime=rent.runtime or RUNTIMES[accelerator.generation],
        spot=rent.spot,
        queued=rent.queued,
        valid_until_s=seconds(rent.valid_until, "--valid-until"),
        labels=_labels(slices, rent, zones),
        service_account=rent.service_account,
    )
    one = slices.up(order, zones)
    lease = float(order.labels[LEASE])
    if (one.lease or 0.0) < lease:
        slices.renew(one, lease)
    return one


def rent_again(slices: Slices, old: Slice, rent: Rent) -> Slice:
    """Another slice like one that was lost, which is deleted first; in the zones that it was asked for in, unless told.

    Raises:
        SliceError: it cannot be had.
    """
    zones = rent.zones or old.zones
    order = Order(
        name=old.name,
        accelerator=old.accelerator,
        runtime=old.runtime,
        spot=old.spot,
        queued=old.from_queue,
        valid_until_s=seconds(rent.valid_until, "--valid-until"),
        labels=_labels(slices, rent, zones),
        service_account=rent.service_account or old.service_account,
    )
    slices.down(old.name)
    return slices.up(order, zones)


def _labels(slices: Slices, rent: Rent, zones: Sequence[str]) -> dict[str, str]:
    lease = int(slices.clock.time()) + seconds(rent.lease, "--lease")
    return {OWNER: slices.owner, LEASE: str(lease), ZONES: zones_label(zones)}
