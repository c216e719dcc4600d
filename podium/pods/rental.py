"""Turns the user's options into an order for Google Cloud, and rents the slice."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from podium.accelerators import Accelerator, find_accelerator
from podium.config.errors import nearest
from podium.pods.gcloud import Order
from podium.pods.inventory import ID, LEASE, LEASE_S, OWNER, RUN, ZONES, Slice, label_text, zones_label
from podium.pods.options import Rent
from podium.pods.rehearsal import ZONE
from podium.pods.slices import BadRequestError, InterruptedRentalError, Slices

RUNTIMES: Mapping[str, str] = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v6e-ubuntu-2404",
}
"""Default TPU software version by generation."""
DEFAULT_LEASE = "24h"
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def tpu(name: str | None) -> Accelerator:
    """The TPU with this name. Raises BadRequestError if there is none, suggesting similar names."""
    if name is None:
        raise BadRequestError("which TPU? Give --type, such as v6e-8 (one machine) or v6e-16 (four)")
    try:
        accelerator = find_accelerator(name)
    except ValueError as error:
        raise BadRequestError(f"--type {name}: {error}") from None
    if accelerator.generation not in RUNTIMES:
        raise BadRequestError(f"--type {name}: this is not a TPU; podium pod rents {', '.join(RUNTIMES)}, as v6e-8")
    return accelerator


def seconds(text: str, option: str) -> int:
    """Parse `90m`, `4h`, `2d` to seconds. Raises BadRequestError for other text."""
    found = re.fullmatch(r"([1-9]\d*)([smhd])", text)
    if not found:
        raise BadRequestError(f"{option} {text!r}: write a whole number and s, m, h or d, as 90m or 4h")
    return int(found[1]) * _UNITS[found[2]]


def rent_slice(slices: Slices, name: str, rent: Rent, *, default_zone: str | None, run: str | None = None) -> Slice:
    """Rent a slice and wait until it is ready, or renew the lease of an existing slice of that name.

    Args:
        slices: access to the project's slices.
        name: name of the slice.
        rent: what to rent.
        default_zone: used if `rent` names no zone.
        run: start of the names of the jobs that the slice is rented for; None: any.

    Raises:
        BadRequestError: type, zone, time or name is invalid.
        SliceError: it cannot be rented; no request or machine remains.
    """
    zones = rent.zones or ([default_zone] if default_zone else [])
    if not zones:
        raise BadRequestError("which zone? Give --zone: one or more zones in which you have quota, tried in order")
    order = new_order(name, rent, slices, zones, run)
    for zone in zones:
        if zone not in slices.zones and ZONE not in slices.zones:
            near = nearest(zone, slices.zones)
            hint = f"did you mean {near}?" if near else f"zones: {', '.join(slices.zones)}"
            raise BadRequestError(f"--zone {zone}: not a TPU zone of this project; {hint}")
    try:
        tpu_slice = slices.up(order, zones)
    except KeyboardInterrupt:
        raise InterruptedRentalError(
            f"interrupted; the request stays, and may be granted and cost money later: "
            f"podium pod down {name} withdraws it; the same command continues to wait"
        ) from None
    slices.gcloud.note(f"if {name} was rented before and its lease ends earlier:")
    if (tpu_slice.lease or 0.0) < float(order.labels[LEASE]):
        slices.label(tpu_slice, {each: order.labels[each] for each in (LEASE, LEASE_S)})
    slices.gcloud.note("")
    return tpu_slice


def new_order(name: str, rent: Rent, slices: Slices, zones: Sequence[str], run: str | None = None) -> Order:
    """The order for a new slice, for one run or any. Raises BadRequestError if type, time or name is invalid."""
    accelerator = tpu(rent.type)
    lease_s = seconds(rent.lease or DEFAULT_LEASE, "--lease")
    if not NAME.fullmatch(name):
        raise BadRequestError(
            f"name {name!r}: use up to 40 lower-case letters, digits and '-', starting with a letter, as my-run"
        )
    return Order(
        name=name,
        accelerator=accelerator.name,
        runtime=rent.runtime or RUNTIMES[accelerator.generation],
        spot=rent.spot,
        queued=rent.queued,
        valid_until_s=seconds(rent.valid_until, "--valid-until"),
        labels={
            OWNER: slices.owner,
            ID: slices.random_word("ID"),
            LEASE: str(int(slices.clock.time()) + lease_s),
            LEASE_S: str(lease_s),
            ZONES: zones_label(zones),
            **({RUN: label_text(f"{run}0")} if run else {}),
        },
        service_account=rent.service_account,
    )


def same_again(slices: Slices, old: Slice, rent: Rent, run: str) -> tuple[Order, Sequence[str]]:
    """The order for a slice like a lost one, and its zones: those of the lost one unless `rent` names others."""
    same = dataclasses.replace(
        rent,
        type=old.accelerator,
        runtime=old.runtime,
        spot=old.spot,
        queued=old.from_queue,
        service_account=rent.service_account or old.service_account,
        lease=rent.lease or (f"{old.lease_s:.0f}s" if old.lease_s else None),
    )
    zones = rent.zones or old.zones
    return new_order(old.name, same, slices, zones, run), zones


def renew_lease(slices: Slices, tpu_slice: Slice, rent: Rent) -> float:
    """Renew the lease of a followed run's slice once half of it has passed; returns its end in Unix seconds."""
    length = seconds(rent.lease, "--lease") if rent.lease else tpu_slice.lease_s or seconds(DEFAULT_LEASE, "--lease")
    now, lease = slices.clock.time(), tpu_slice.lease or 0.0
    if lease - now > length / 2:
        return lease
    slices.label(tpu_slice, {LEASE: str(int(now + length)), LEASE_S: str(int(length))})
    return now + length
