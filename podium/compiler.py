"""The options that Podium's programs are compiled with, all of them, and why each is here. No jax."""

import importlib.metadata
from collections.abc import Mapping

# Gathers beside products: of an update of Qwen2.5-3B on v6e-8 with 8 rows a chip, 8.2 of 10.3 GB of them, and transfers
# that nothing hides take 1 % of its planned seconds (benches/results/rows-planned.json); without them no gather
# runs beside anything. The effect of each alone has not been measured.
TPU_OPTIONS: Mapping[str, str] = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
}
FUSED_GATHERS = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
FUSED_GATHERS_UNTIL = (0, 0, 43)
"""libtpu 0.0.42 takes that option on every TPU; 0.0.50 refuses it on all but v5e. Those between were not tried."""


def compiler_options(platform: str, libtpu: str | None = None) -> dict[str, str]:
    """Options of a program with collectives, for jax's platform (cpu, gpu, tpu) and a libtpu: by default, the one here.

    A libtpu that refuses gathers beside products makes the program without them.
    """
    if platform != "tpu":
        return {}
    numbers = tuple(int(part) for part in (libtpu or installed_libtpu()).split(".")[:3] if part.isdecimal())
    refused = {FUSED_GATHERS} if numbers >= FUSED_GATHERS_UNTIL else set()
    return {name: value for name, value in TPU_OPTIONS.items() if name not in refused}


def installed_libtpu() -> str:
    """The version of the TPU's compiler; that of the oldest that we know where it is no package."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.42"
