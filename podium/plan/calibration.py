"""Constants of a chip, and the shares of its roofline that programs were seen to reach; one file each in `chips`."""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factor:
    """A number between the roofline and the clock, with what is known of it."""

    value: float
    low: float
    high: float
    source: str
    """Where it is from, and which published rows went into it: who predicts one of them must leave it out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Constants of a generation, per device."""

    generation: str
    flops_bf16: float
    """Peak of bfloat16 products, flop/s."""
    flops_f32: float
    """Peak of float32 products at jax's default precision, flop/s."""
    hbm_bytes: int
    """Memory as sold."""
    hbm_bandwidth: float
    """Bytes/s."""
    link_bandwidth: float
    """Bytes/s of one link to another device in one direction."""
    links: int
    """Links of a device, where every one is connected."""
    sources: dict[str, str]
    """Of each constant."""
    calibration: dict[str, Factor]
    """By kind: share of the roofline that update, prefill, decode and ici reach, and host_s, seconds per call."""


@functools.cache
def load_chip(generation: str) -> Chip:
    """The constants of a generation, from its file in `podium/plan/chips`."""
    text = resources.files("podium.plan").joinpath("chips", f"{generation}.json").read_text(encoding="utf-8")
    raw: dict[str, Any] = json.loads(text)
    constants = {name: entry["value"] for name, entry in raw["constants"].items()}
    return Chip(
        generation=generation,
        **constants,
        sources={name: entry["source"] for name, entry in raw["constants"].items()},
        calibration={kind: Factor(**entry) for kind, entry in raw["calibration"].items()},
    )
