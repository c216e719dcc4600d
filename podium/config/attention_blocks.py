"""Chooses a run's attention for its machine, and how rows and the cache are cut into blocks. No jax."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from podium.config.schema import Attention

Backend = Literal["tpu_kernel", "gpu_kernel", "blocks", "reference"]
KERNELS: Mapping[str, Backend] = {"tpu": "tpu_kernel", "gpu": "gpu_kernel"}
"""The attention kernel for each kind of kernels that a device runs (`podium.accelerators.Kernels`)."""
BLOCK = 64
"""Most tokens per block in XLA; a block's scores then fit a CPU's cache."""
GPU_BLOCKS = (64, 32, 16)
"""Tokens per block of the GPU kernel: chosen as the largest that fit registers and shared memory (`gpu_block`)."""
GPU_TILES = 4.5
"""Blocks of queries, keys or values that the GPU kernel's largest program keeps in shared memory, rounded up: compiled
programs need 3.1 to 4.3."""
GPU_SMALLEST = 16
"""Rows and columns of Triton's smallest product."""
TPU_BLOCKS = (512, 384, 256, 128)
"""Tokens per block of the TPU kernel. Large blocks pad rows; each block costs `TPU_BLOCK_COST` tokens extra."""
TPU_BLOCK_COST = 64
CACHE_BLOCK = 256
"""Tokens of the cache that attention reads per block, in whole pages; on CPU one page, as larger blocks are slower."""

LANES = 128
"""Elements per row of a TPU tile. Arrays whose rows do not fill tiles are copied into padded ones."""


@dataclasses.dataclass(frozen=True)
class KvLayout:
    """How a page of the cache stores the keys and values of one head."""

    width: int
    """Elements of a stored row; shorter keys and values are zero-padded."""
    joined: bool = False
    """Whether a row holds a token's key followed by its value, instead of only a key or a value."""
    transposed: bool = False
    """Whether keys are stored with positions as the last dimension, instead of the elements of a key."""

    @property
    def numbers(self) -> int:
        """Elements stored for one token and one head: key, value and padding."""
        return self.width if self.joined else 2 * self.width


def kv_layout(head_dim: int, platform: str) -> KvLayout:
    """The cache layout for heads of `head_dim` elements on a jax platform (cpu, gpu, tpu).

    On a TPU, rows fill whole tiles: for heads of 64, a row of 128 elements holds a key and its value; for heads of 80,
    key and value each have a row of 128 elements, of which the last 48 are zeros. On a CPU, keys are transposed, so
    that attention in a decode step takes 0.45 of the time.
    """
    if platform != "tpu":
        return KvLayout(head_dim, transposed=platform == "cpu")
    apart, joined = (math.ceil(numbers / LANES) * LANES for numbers in (head_dim, 2 * head_dim))
    return KvLayout(joined, joined=True) if joined < 2 * apart else KvLayout(apart)


def attention_backend(choice: Attention, kernels: str) -> Backend:
    """Resolve `train.attention` for devices that run this kind of kernels (tpu, gpu, none).

    Raises ValueError if `choice` is `kernel` and the devices run none; only `auto` falls back.
    """
    if choice == "kernel" and kernels not in KERNELS:
        raise ValueError(
            "train.attention: kernel needs a TPU, or a GPU of compute capability 8.0 or newer, and this machine has"
            " neither; set it to blocks, which runs everywhere, or to auto"
        )
    return KERNELS.get(kernels, "blocks") if choice in ("auto", "kernel") else choice


def gpu_kernel_decodes(page_tokens: int, head_dim: int) -> bool:
    """Whether a GPU's kernel takes pages and heads of these sizes: powers of two that Triton can multiply."""
    return all(size >= GPU_SMALLEST and size & (size - 1) == 0 for size in (page_tokens, head_dim))


def slower_decode(kernels: str, page_tokens: int, head_dim: int) -> str:
    """A line that says why XLA reads the cache's pages on devices that run this kind of kernels, where a GPU's kernel
    would be faster; empty if it does not.
    """
    if kernels != "gpu" or gpu_kernel_decodes(page_tokens, head_dim):
        return ""
    rule = "XLA reads the cache, slower than the GPU's kernel, which takes sizes that are powers of two and at least 16"
    if not gpu_kernel_decodes(GPU_SMALLEST, head_dim):
        return f"decode: {rule}: the model's heads have {head_dim} elements"
    return f"decode: {rule}: rollout.page_tokens is {page_tokens}; set it to 64"


def cut(backend: Backend, length: int) -> tuple[int, int]:
    """Cut a row of `length` tokens into blocks: returns the number of blocks and the tokens of each; the last block may
    be padded.
    """
    if backend == "reference":
        return 1, length
    if backend == "blocks":
        n = math.ceil(length / BLOCK)
        return n, math.ceil(length / n)
    t = GPU_BLOCKS[0]
    if backend == "tpu_kernel":
        t = min(TPU_BLOCKS, key=lambda t: math.ceil(length / t) * (t + TPU_BLOCK_COST))
    return math.ceil(length / t), t


def row_tile(backend: Backend) -> int:
    """The number of tokens of which rows should be a multiple: that of the smallest block that needs no padding."""
    return {"tpu_kernel": TPU_BLOCKS[-1], "gpu_kernel": GPU_BLOCKS[0]}.get(backend, BLOCK // 4)


def gpu_block(head_dim: int, itemsize: int, shared_memory: int | None) -> int:
    """Tokens per block of the GPU kernel for heads of `head_dim` elements of `itemsize` bytes.

    `shared_memory` is the shared memory of a program in bytes: 101,376 on an L4, 232,448 on an H100; None if the device
    does not report it or emulates the kernel.
    """
    if shared_memory is None:
        return GPU_BLOCKS[0]
    fit = [t for t in GPU_BLOCKS if GPU_TILES * t * head_dim * itemsize <= shared_memory]
    return fit[0] if fit else GPU_BLOCKS[-1]


def attended_pairs(backend: Backend, length: int) -> int:
    """Query-key pairs that attention computes for a row of `length` tokens that holds one sequence, which needs the
    most.
    """
    n, t = cut(backend, length)
    return t * t * n * (n + 1) // 2


def cache_block_pages(page_tokens: int, platform: str) -> int:
    """Pages of the cache that attention reads per block on a jax platform (cpu, gpu, tpu)."""
    return 1 if platform == "cpu" else max(1, CACHE_BLOCK // page_tokens)


class WindowBlocks(NamedTuple):
    """The blocks of a layer with a window; a row's blocks begin at the page of the oldest token in its window."""

    pages: int
    """Pages per block."""
    most: int
    """Blocks per row, however long its sequence is."""


def window_blocks(reach: int, block_pages: int) -> WindowBlocks:
    """Cut the `reach` pages that a window touches into blocks of between half of `block_pages` and all, such that the
    fewest pages are read.
    """
    sizes = [WindowBlocks(pages, -(-reach // pages)) for pages in range(-(-block_pages // 2), block_pages + 1)]
    return min(sizes, key=lambda each: (each.pages * each.most, each.most))


def window_scope(reach: int) -> str:
    """The name of the jax scope of attention that reads at most `reach` pages of a sequence; the planner reads it."""
    return f"window_of_{reach}_pages"


def window_reach(source: str) -> int | None:
    """The pages that a `window_scope` name in `source` gives; None if absent. `source` is the scope path of an
    instruction.
    """
    found = re.search(r"/window_of_(\d+)_pages(/|$)", source)
    return int(found[1]) if found else None
