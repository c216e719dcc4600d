"""The compiler options of Podium's programs, with the reason for each. No jax."""

import importlib.metadata
import logging
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from podium.accelerators import SPARSE_CORES, TPUS

if TYPE_CHECKING:
    import jax


class Lowerable(Protocol):
    """A jitted function, which can be compiled without being called."""

    def lower(self, *arguments: object) -> "jax.stages.Lowered":
        """Trace and lower the function for these arguments, which may be abstract."""
        ...

    def trace(self, *arguments: object) -> "jax.stages.Traced":
        """Trace the function for these arguments, which may be abstract."""
        ...


# Gathers overlap products: in an update of Qwen2.5-3B on v6e-8 with 8 rows a chip, 8.2 of 10.3 GB are gathered
# meanwhile, and the update takes 0.80 s by the roofline. Without either of the two options no gather overlaps a
# product: 0.84 s, with 0.84 GiB less memory. Three options that are often set with them change nothing there:
# async_collective_fusion, its multiple_steps, and overlap_compute_collective_tc.
TPU_OPTIONS = {
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_enable_async_all_gather": "true",
}
# When the compiler decides what to recompute, it counts arrays in host memory as if they were on the device. An update
# of Qwen2.5-7B on v6e-4 with its moments on the host takes 26.5 of 31.25 GiB either way; at the default limit it does
# 43 % more operations, with this option none. A program that exceeds the real limit then fails to fit, instead of being
# slow.
OFFLOADED_OPTIONS = {"xla_jf_rematerialization_percent_shared_memory_limit": "200"}
# With many tokens a chip, a product whose weights arrive in pieces, chip by chip, reads and writes its results once for
# each piece. With whole weights gathered first, the update of Qwen2.5-3B on v6e takes by the roofline, at 65,536 tokens
# a chip, 2.37 s instead of 2.60; at 20,480, 0.78 instead of 0.80; at 6,144, 0.30 instead of 0.25, because less of the
# transfers is hidden. That of 7B at 32,768 takes 2.53 instead of 2.51, and 1.8 GiB less. If groups of rows share a
# layer's weights, it gains nothing (7B on v4-16: a tenth slower). These figures, and those of the gathers above, are
# for a v6e that does not use its SparseCore (see below).
WHOLE_GATHERS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
WHOLE_GATHERS_FROM = 32_768
# A v6e's SparseCore gathers weights and scatters gradients while its TensorCore multiplies, so weights can always be
# gathered whole. Updates on v6e-8 by the roofline, with and without: Qwen2.5-3B with 20,480 tokens a chip 0.66 and
# 0.75 s, with 5,120 0.20 and 0.21, with 163,840 in groups of rows 5.36 and 5.96; 7B with 40,960 2.81 and 2.90. Measured
# by others on v6e-8: 59,350 tokens/s of Qwen3-8B instead of 58,300 (LOG.md). For v4, v5e and v5p they change nothing.
SPARSE_CORE = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_disable_megacore_partitioning": "true",
    "xla_sc_enable_instruction_fusion": "false",
}
# The exchanges that gather a mixture's experts, and scatter their gradients, begin on a v6e only after the layer's
# other work, unless the layers are scheduled by the first option, which needs the second. The third keeps a float32
# stack of weights, which only its layers cast, from being cast as a whole, which would take half as much memory again.
# Updates of 4 rows of 4,096 tokens a chip, as planned with and without: Qwen3-30B-A3B on v6e-64 1.87 and 2.14 s, 17.4
# and 18.0 GiB; with gradients in bfloat16 1.56 and 1.84 s, 16.2 and 17.4 GiB; with adapters on v6e-8 1.28 and 1.36 s
# (benches/mixtures_planned.py).
EXPERTS_OPTIONS = {
    "xla_tpu_enable_latency_hiding_layer_scheduler": "true",
    "xla_tpu_enable_sparse_core_collective_aggregator": "true",
    "xla_jf_bf16_propagation": "false",
}
# TPU7x's compiler lays bfloat16 out in tiles of 16 rows, and jax stores it in tiles of 8, so each program would first
# copy all weights. With tiles of 8 inside too, it reads them in place: on tpu7x-8 a prefill of 512 tokens of
# Qwen2.5-0.5B takes 0.42 instead of 1.19 ms by the roofline, a decode step of 128 slots a fifth less time, and its
# update, which casts weights, 61.8 instead of 62.3 ms.
# libtpu 0.0.52 moves a scatter of each prefill to TPU7x's SparseCore, where it then lacks one word of memory (131,072
# of 131,071), and fails; 0.0.42 leaves it on the TensorCore.
TPU7X_OPTIONS = {
    "xla_tpu_control_large_2nd_minor_layout_for_x16": "false",
    "xla_tpu_enable_offloading_scatter_to_sparsecore": "false",
}
TPU7X = ("tpu7x", *TPUS["tpu7x"].names)
"""The generation's names, here and in jax."""
# Schedule for little memory rather than much concurrency: one micro-batch of 8 rows of Qwen2.5-0.5B takes 8.9 GB
# instead of 10.8, because logits are freed before gradients begin (benches/results/memory-cpu.json); the CPU time of an
# update is the same.
CPU_OPTIONS: Mapping[str, str] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
# Without this option, an update sums the embedding's gradient in arbitrary order, with atomic additions, and each
# product uses the kernel that was fastest when it was compiled: a resumed run would differ from an uninterrupted one
# (LOG.md). On an H100 it costs an update of Qwen2.5-3B with adapters 0.8 % of its time, and one of SmolLM2-135M 13 %.
GPU_OPTIONS: Mapping[str, str] = {"xla_gpu_deterministic_ops": "True"}
# XLA for GPUs merges products with the same left operand, such as those with gate and up, or with a matrix and its
# adapter, by copying their weights side by side in every call: a decode step of Qwen2.5-3B on an H100 would write every
# weight once (benches/results/gpu-decode-planned.json).
GPU_ENGINE_OPTIONS: Mapping[str, str] = {**GPU_OPTIONS, "xla_gpu_dot_merger_threshold_mb": "0"}
FUSED_GATHERS = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
FUSED_GATHERS_UNTIL = (0, 0, 43)
"""The first libtpu version for which FUSED_GATHERS is left out. libtpu 0.0.42 accepts the option on every TPU, 0.0.50
only on v5e. Versions in between were not tried."""

QUICK_FLAGS = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
QUICK_FLAGS_UNTIL_0_11 = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
"""XLA flags for jaxlib before 0.11. jaxlib 0.12 lacks the first flag and aborts if it is set; 0.11 was not tried."""


def compiler_options(
    platform: str,
    libtpu: str | None = None,
    *,
    kind: str = "",
    offloaded: bool = False,
    tokens: int = 0,
    experts: bool = False,
) -> dict[str, str]:
    """Compiler options of the trainer's programs.

    Options that this libtpu refuses are left out, and so are options that LIBTPU_INIT_ARGS (for a GPU, XLA_FLAGS) sets.

    Args:
        platform: the jax platform: cpu, gpu or tpu.
        libtpu: version of libtpu; None: the installed one.
        kind: jax's `device_kind`, or a generation as the planner names it.
        offloaded: whether the program also has arguments in the host's memory.
        tokens: tokens of an update, as `tokens_per_gather` counts them.
        experts: whether layers have a mixture of experts.
    """
    if platform != "tpu":
        return dict(CPU_OPTIONS) if platform == "cpu" else _unset(GPU_OPTIONS, "XLA_FLAGS")
    options = TPU_OPTIONS | (OFFLOADED_OPTIONS if offloaded else {})
    if kind in SPARSE_CORES:
        options |= SPARSE_CORE | (EXPERTS_OPTIONS if experts else {})
    options |= TPU7X_OPTIONS if kind in TPU7X else {}
    options |= WHOLE_GATHERS if kind in SPARSE_CORES or tokens >= WHOLE_GATHERS_FROM else {}
    if kind in SPARSE_CORES or _numbers(libtpu or installed_libtpu()) >= FUSED_GATHERS_UNTIL:
        del options[FUSED_GATHERS]
    return _unset(options, "LIBTPU_INIT_ARGS")


def engine_options(platform: str, kind: str = "") -> dict[str, str]:
    """Compiler options of the engine's programs that read the model's weights, except options that XLA_FLAGS or, on a
    TPU, LIBTPU_INIT_ARGS sets; `kind` as for `compiler_options`.
    """
    if platform == "gpu":
        return _unset(GPU_ENGINE_OPTIONS, "XLA_FLAGS")
    return _unset(TPU7X_OPTIONS, "LIBTPU_INIT_ARGS") if kind in TPU7X else {}


def _unset(options: Mapping[str, str], variable: str) -> dict[str, str]:
    """The options that environment variable `variable` does not set."""
    already_set = re.findall(r"--(\w+)", os.environ.get(variable, ""))
    return {name: value for name, value in options.items() if name not in already_set}


def quick_flags(jaxlib: str | None = None) -> tuple[str, ...]:
    """XLA flags for a process that compiles many small programs for the CPU and runs each a few times.

    For such programs, some of XLA's defaults cost more than they save: LLVM's optimizations and XLA's fusion emitters,
    which double a gradient's compile time, and compiling each program in 32 parallel parts (a fifth of the CPU time).
    """
    version = _numbers(jaxlib or importlib.metadata.version("jaxlib"))
    return *QUICK_FLAGS, *(QUICK_FLAGS_UNTIL_0_11 if version < (0, 11) else ())


def add_xla_flags(*flags: str) -> None:
    """Append those of `flags`, each `--name=value`, to XLA_FLAGS whose names it does not contain yet; call this before
    jax starts.
    """
    already_set = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in already_set}
    os.environ["XLA_FLAGS"] = " ".join([*already_set, *(flag for flag in flags if flag.partition("=")[0] not in names)])


def hide_plugin_errors() -> None:
    """Suppress jax's log of plugins that fail to start.

    jax starts every installed plugin, even if told to use another platform, and logs a traceback if one fails. CUDA's
    plugin fails on a machine without a GPU (cuFFT is missing); the extra plan-gpu installs the plugin only for its
    compiler. Calling this again has no effect.
    """
    logging.getLogger("jax._src.xla_bridge").addFilter(_is_no_plugin_error)


def _is_no_plugin_error(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Jax plugin configuration error")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())


def installed_libtpu() -> str:
    """The version of the installed TPU compiler; the oldest known version if the compiler is not installed as a
    package.
    """
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.42"
