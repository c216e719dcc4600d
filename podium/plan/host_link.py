"""What an update's copies between a device and its host's memory take. No jax."""

from podium.plan.calibration import Factor
from podium.plan.result import Seconds
from podium.plan.sizes import RunSizes, offloaded_bytes

HOST_LINK = Factor(value=10e9, low=5e9, high=30e9, source="assumed: PCIe of TPU hosts is not published, nor measured")
"""Bytes per second of one device, in either direction."""


def copying(run: RunSizes) -> Seconds:
    """Of one update: the optimizer's moments come from the host and go back, and nothing is computed meanwhile."""
    copied = 2 * offloaded_bytes(run)
    return Seconds(value=copied / HOST_LINK.value, low=copied / HOST_LINK.high, high=copied / HOST_LINK.low)
