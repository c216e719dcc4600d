"""Which attention a run uses on its machine, and how it cuts rows into blocks. No jax: the planner asks too."""

import math
from typing import Literal

from podium.config.schema import Attention

Backend = Literal["tpu_kernel", "gpu_kernel", "blocks", "reference"]
KERNELS: dict[str, Backend] = {"tpu": "tpu_kernel", "gpu": "gpu_kernel"}
"""By jax's platform."""
BLOCK = 64
"""Tokens of a block in XLA, at most: the scores of a block stay in a CPU's cache."""
GPU_BLOCK = 64
"""Tokens of a block of the GPU's kernel: what registers and shared memory hold."""
TPU_BLOCKS = (512, 384, 256, 128)
"""Tokens of a block of the TPU's kernel. Large ones pad rows, each costs as much as so many tokens more."""
TPU_BLOCK_COST = 64


def attention_backend(choice: Attention, platform: str) -> Backend:
    """The attention that `train.attention` means on jax's platform (cpu, gpu, tpu).

    Raises ValueError where it is named and the platform lacks it: only `auto` chooses another.
    """
    if choice == "kernel" and platform not in KERNELS:
        raise ValueError(
            f"train.attention: kernel is for {' and '.join(KERNELS)}, and this run's devices are {platform};"
            " set it to blocks, which runs everywhere, or to auto"
        )
    return KERNELS.get(platform, "blocks") if choice in ("auto", "kernel") else choice


def cut(backend: Backend, length: int) -> tuple[int, int]:
    """Into how many blocks a row of this length is cut, and of how many tokens each; the last may be padded."""
    if backend == "reference":
        return 1, length
    if backend == "blocks":
        n = math.ceil(length / BLOCK)
        return n, math.ceil(length / n)
    t = GPU_BLOCK
    if backend == "tpu_kernel":
        t = min(TPU_BLOCKS, key=lambda t: math.ceil(length / t) * (t + TPU_BLOCK_COST))
    return math.ceil(length / t), t


def attended_pairs(backend: Backend, length: int) -> int:
    """Pairs of query and key that are multiplied for a row that is one sequence: the most that a row can take."""
    n, t = cut(backend, length)
    return t * t * n * (n + 1) // 2
