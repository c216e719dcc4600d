"""What a slice costs by the list prices that Podium comes with (podium/prices.yaml); nothing is fetched."""

from podium.accelerators import find_accelerator
from podium.pods.inventory import Slice
from podium.prices import HOUR_S, load_prices


def usd_per_hour(one: Slice) -> float | None:
    """List price of a slice for an hour, on demand; None if the list has none. Spot costs less."""
    try:
        accelerator = find_accelerator(one.accelerator)
    except ValueError:
        return None
    price = load_prices(None).get(accelerator.generation)
    return price.usd_per_chip_hour * accelerator.chips if price else None


def hours(one: Slice, now: float) -> float:
    """Since its machines, or the request for them, were made."""
    return max(0.0, now - one.created.timestamp()) / HOUR_S if one.created else 0.0


def cost_text(one: Slice, now: float) -> str:
    """Hours so far and their list price, as `3.2 h, < $138.24 (spot)`; without machines nothing is charged."""
    if not one.billed:
        return "not charged"
    price = usd_per_hour(one)
    spent = f"{hours(one, now):.1f} h"
    if price is None:
        return spent
    return f"{spent}, {'< ' if one.spot else ''}${hours(one, now) * price:.2f}{' (spot)' if one.spot else ''}"
