"""Which attention a run uses on its machine, and how rows and the cache are cut into blocks. No jax."""

import math
from typing import Literal

from podium.config.schema import Attention

Backend = Literal["tpu_kernel", "gpu_kernel", "blocks", "reference"]
KERNELS: dict[str, Backend] = {"tpu": "tpu_kernel", "gpu": "gpu_kernel"}
"""The attention kernel of each jax platform."""
BLOCK = 64
"""The most tokens of a block in XLA: the scores of a block stay in a CPU's cache."""
GPU_BLOCK = 64
"""Tokens of a block in the GPU's kernel: as many as fit registers and shared memory."""
TPU_BLOCKS = (512, 384, 256, 128)
"""Tokens of a block in the TPU's kernel. Large blocks pad rows; each block costs `TPU_BLOCK_COST` tokens extra."""
TPU_BLOCK_COST = 64
CACHE_BLOCK = 256
"""Tokens of the cache that attention reads at once, but whole pages; on CPU one page, as larger arrays are slower."""


def attention_backend(choice: Attention, platform: str) -> Backend:
    """The attention that `train.attention` means on jax's platform (cpu, gpu, tpu).

    Raises ValueError if `choice` is `kernel` and the platform has none; only `auto` falls back.
    """
    if choice == "kernel" and platform not in KERNELS:
        raise ValueError(
            f"train.attention: kernel is for {' and '.join(KERNELS)}, and this run's devices are {platform};"
            " set it to blocks, which runs everywhere, or to auto"
        )
    return KERNELS.get(platform, "blocks") if choice in ("auto", "kernel") else choice


def cut(backend: Backend, length: int) -> tuple[int, int]:
    """The number of blocks into which a row is cut, and the tokens of each; the last one may be padded."""
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


def cache_block_pages(page_tokens: int, platform: str) -> int:
    """Pages of the cache that attention reads at once on jax's platform (cpu, gpu, tpu)."""
    return 1 if platform == "cpu" else max(1, CACHE_BLOCK // page_tokens)
