"""Which attention a run uses on its machine, and how rows and the cache are cut into blocks. No jax."""

import dataclasses
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

LANES = 128
"""Numbers in a row of a TPU's tile. Programs copy an array whose rows do not fill tiles into a padded one."""


@dataclasses.dataclass(frozen=True)
class KvLayout:
    """How a page of the cache stores the keys and values of a head."""

    width: int
    """Numbers in a stored row; it ends with zeros where the key or value is shorter."""
    joined: bool = False
    """Whether a row holds a token's key followed by its value; otherwise each has a row of its own."""
    transposed: bool = False
    """Whether the last dimension of the keys is the position in the page instead of the number in the key."""

    @property
    def numbers(self) -> int:
        """Numbers stored for one token and one head: key, value and padding."""
        return self.width if self.joined else 2 * self.width


def kv_layout(head_dim: int, platform: str) -> KvLayout:
    """The layout of the cache for heads of `head_dim` numbers on jax's platform (cpu, gpu, tpu).

    On a TPU, rows fill whole tiles: for heads of 64, a row of 128 numbers holds a key and its value; for heads of 80,
    the key and the value have a row of 128 numbers each, whose last 48 are zeros. On a CPU, keys are transposed: the
    attention of a decode step then takes 0.45 of the time.
    """
    if platform != "tpu":
        return KvLayout(head_dim, transposed=platform == "cpu")
    apart, joined = (math.ceil(numbers / LANES) * LANES for numbers in (head_dim, 2 * head_dim))
    return KvLayout(joined, joined=True) if joined < 2 * apart else KvLayout(apart)


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
