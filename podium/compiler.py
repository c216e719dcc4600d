"""The options that Podium's programs are compiled with, all of them, and why each is here. No jax."""

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


def compiler_options(platform: str) -> dict[str, str]:
    """Options of a program with collectives, for jax's platform (cpu, gpu, tpu)."""
    return dict(TPU_OPTIONS) if platform == "tpu" else {}
