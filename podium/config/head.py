"""Chooses how update and scoring compute log-probabilities, and how the fused head tiles its arrays. No jax, for the
planner.
"""

import math
from typing import Literal

from podium.config.schema import Head

HeadKind = Literal["chunked", "fused"]
TOKENS = (1024, 512, 256, 128)
VOCAB = (512, 256, 128)
LANES = 128
"""Tokens and logits per tile of the kernels. Each tile of tokens reads the whole head; on v6e, reading takes less time
than the tile's product from 560 tokens on."""
TILE_COST = 128
"""Large tiles pad rows; each tile costs this many tokens extra."""


def head_kind(choice: Head, platform: str, vocab_parts: int) -> HeadKind:
    """Resolve `train.head` on a jax platform (cpu, gpu, tpu), with the vocabulary split into `vocab_parts` parts.

    Raises ValueError if `fused` is requested and cannot be used; only `auto` falls back.
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
    """Bytes of a core's fast memory available to the kernels; `device` is jax's device kind or a generation."""
    return (16 if device.endswith("v4") else 28) * 2**20


def head_tile(count: int, vocab: int, width: int, itemsize: int, memory: int) -> tuple[int, int]:
    """Choose a tile (tokens, logits) for `count` tokens, such that two copies of both operands and four of the logits
    fit.
    """
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
    """Cut `count` tokens into chunks of about `chunk`: returns the number of chunks and the tokens of each, in whole
    tiles.
    """
    chunks = math.ceil(count / max(chunk, tile))
    return chunks, math.ceil(math.ceil(count / chunks) / tile) * tile
