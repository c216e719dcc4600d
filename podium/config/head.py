"""Which head a run's update and scoring use, and how the fused one cuts its arrays. No jax: the planner asks too."""

import math
from typing import Literal

from podium.config.schema import Head

HeadKind = Literal["chunked", "fused"]
TOKENS, VOCAB, LANES = (1024, 512, 256, 128), (512, 256, 128), 128
"""Tokens and logits of a tile of the kernels. The head is read once for each tile of tokens: on v6e in less time than
its product takes, from 560 tokens on."""
TILE_COST = 128
"""Large tiles pad; each costs as much as so many tokens more."""


def head_kind(choice: Head, platform: str, vocab_parts: int) -> HeadKind:
    """The head that `train.head` means on jax's platform (cpu, gpu, tpu), its vocabulary split into so many parts.

    Raises ValueError where the fused one is named and cannot be used: only `auto` chooses another.
    """
    if choice == "fused" and platform != "tpu":
        raise ValueError(
            f"train.head: fused is for tpu, and this run's devices are {platform}; set it to chunked, which runs"
            " everywhere, or to auto"
        )
    if choice == "fused" and vocab_parts > 1:
        raise ValueError(
            f"train.head: fused takes a whole vocabulary, and tp splits it into {vocab_parts}; set it to chunked or"
            " auto, or leave tp out of mesh"
        )
    return "fused" if platform == "tpu" and vocab_parts == 1 and choice != "chunked" else "chunked"


def fast_memory(device: str) -> int:
    """Bytes of a core's fast memory that the kernels may take, on a kind of device as jax names it, or a generation."""
    return (16 if device.endswith("v4") else 28) * 2**20


def head_tile(count: int, vocab: int, width: int, itemsize: int, memory: int) -> tuple[int, int]:
    """Tokens and logits of a tile, of so many tokens; twice both operands and four times the logits fit the memory."""
    fitting = [
        (tokens, logits)
        for tokens in TOKENS
        for logits in VOCAB
        if 10 * (2 * (tokens + logits) * width * itemsize + 16 * tokens * logits) <= 9 * memory
    ]
    cost = lambda tile: math.ceil(count / tile[0]) * (tile[0] + TILE_COST)  # noqa: E731
    tokens, logits = min(fitting or [(LANES, LANES)], key=cost)
    return tokens, min(logits, vocab)


def head_chunks(count: int, chunk: int, tile: int) -> tuple[int, int]:
    """Into how many chunks of at most about `chunk` tokens so many are cut, and the tokens of each, whole tiles."""
    chunks = math.ceil(count / max(chunk, tile))
    return chunks, math.ceil(math.ceil(count / chunks) / tile) * tile
