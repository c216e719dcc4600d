"""Turns the user's options into an order for Google Cloud, and rents the slice."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from podium.accelerators import Accelerator, find_accelerator
from podium.config.errors import nearest
from podium.pods.gcloud import Order
from podium.pods.inventory import BUCKET, IDLE_S, OWNER, RUN, ZONES, Slice, zones_label
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
TITLE = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def tpu(name: str | None) -> Accelerator:
    """Find the TPU with this name. Raises BadRequestError, which suggests similar names, if it is unknown."""
    if name is None:
        raise BadRequestError("which TPU? Give --type, such as v6e-8 (one machine) or v6e-16 (four)")
    try:
        accelerator = find_accelerator(name)
    except ValueError as error:
        raise BadRequestError(f"--type {name}: {error}") from None
    if accelerator.platform == "tpu" and accelerator.generation not in RUNTIMES:
        raise BadRequestError(
            f"--type {name}: Google rents {accelerator.generation} on GKE and Compute Engine, not as Cloud TPU VMs;"
            " podium pod k8s writes its job for GKE"
        )
    if accelerator.generation not in RUNTIMES:
        raise BadRequestError(
            f"--type {name}: this is not a TPU; podium pod rents {', '.join(RUNTIMES)}, for example v6e-8"
        )
    if accelerator.slices > 1:
        raise BadRequestError(f"--type {name}: several slices run as one job on GKE; podium pod k8s writes it")
    return accelerator


def seconds(text: str, option: str) -> int:
    """Parse `90m`, `4h`, `2d` to seconds. Raises BadRequestError for other text."""
    found = re.fullmatch(r"([1-9]\d*)([smhd])", text)
    if not found:
        raise BadRequestError(f"{option} {text!r}: write a whole number and s, m, h or d, as 90m or 4h")
    return int(found[1]) * _UNITS[found[2]]


def rent_slice(slices: Slices, order: Order, zones: Sequence[str]) -> Slice:
    """Rent a slice and wait until it is ready, or use the existing slice of that title.

    Raises SliceError if it cannot be rented; then no request or machine remains unless the message says so.
    """
    try:
        return slices.up(order, zones)
    except KeyboardInterrupt:
        raise InterruptedRentalError(
            f"interrupted; the request stays, and may be granted and cost money later: "
            f"podium pod down {order.name} withdraws it; the same command continues to wait"
        ) from None


def zones_of(rent: Rent, slices: Slices, default_zone: str | None) -> Sequence[str]:
    """The zones to ask, in order. Raises BadRequestError if no zone is given, or a zone has no TPUs."""
    zones = rent.zones or ([default_zone] if default_zone else [])
    if not zones:
        raise BadRequestError("which zone? Give --zone: one or more zones in which you have quota, tried in order")
    for zone in zones:
        if zone not in slices.zones and ZONE not in slices.zones:
            near = nearest(zone, slices.zones)
            hint = f"did you mean {near}?" if near else f"zones: {', '.join(slices.zones)}"
            raise BadRequestError(f"--zone {zone}: not a TPU zone of this project; {hint}")
    return zones


def new_order(
    title: str, rent: Rent, slices: Slices, zones: Sequence[str], run: str | None = None, *, bucket: str | None = None
) -> Order:
    """Make the order for a slice; with `run`, for that run, and with `bucket` too, for that run alone.

    Raises BadRequestError if type, time or name is invalid.
    """
    accelerator = tpu(rent.type)
    if not TITLE.fullmatch(title):
        raise BadRequestError(
            f"name {title!r}: use up to 40 lower-case letters, digits and '-', starting with a letter, as my-run"
        )
    own = {} if run is None or bucket is None else {RUN: run, **({BUCKET: bucket} if bucket else {})}
    return Order(
        name=title,
        accelerator=accelerator.name,
        runtime=rent.runtime or RUNTIMES[accelerator.generation],
        spot=rent.spot,
        queued=rent.queued,
        valid_until_s=seconds(rent.valid_until, "--valid-until"),
        labels={
            OWNER: slices.owner,
            IDLE_S: str(seconds(rent.lease or DEFAULT_LEASE, "--lease")),
            ZONES: zones_label(zones),
            **own,
        },
        service_account=rent.service_account,
        run=run,
    )


def same_again(old: Slice, rent: Rent) -> Rent:
    """What to rent to replace a slice: the same type, in the same zones unless `rent` names others."""
    return dataclasses.replace(
        rent,
        type=old.accelerator,
        zones=rent.zones or list(old.zones),
        runtime=old.runtime,
        spot=old.spot,
        queued=old.from_queue,
        service_account=rent.service_account or old.service_account,
        lease=rent.lease or (f"{old.idle_s:.0f}s" if old.idle_s else None),
    )
