"""Decides which samples share a row of a batch. Uses only lengths, so the planner counts rows with it, without jax.

A row consists of segments. With `shared_prompts`, a group's prompt without its last token is one segment. Each
completion is another segment, which attends to the prompt's: the prompt's last token, from which the completion's first
token is predicted, followed by the completion without its last token. So a prompt takes up its length only once per
group.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from podium.run.run_spec import Packing
from podium.train.batches.balance import Lengths, balance

Chunk = list[int]
"""Indices of samples of one group that share a row and one copy of their prompt."""


def pack_rows(samples: Sequence[Lengths], *, row_tokens: int, packing: Packing) -> list[list[Chunk]]:
    """Pack samples into rows; returns the chunks of sample indices in each row.

    Raises:
        ValueError: a prompt with its completion is longer than a row.
    """
    chunks = _chunks(samples, row_tokens, packing == "shared_prompts")
    return [[chunk] for chunk in chunks] if packing == "none" else _first_fit(chunks, samples, row_tokens)


def balanced_rows(
    samples: Sequence[Lengths], *, row_tokens: int, packing: Packing, rows: int, pair_cost: float
) -> list[list[Chunk]]:
    """Pack samples into balanced rows: as many micro-batches of `rows` as `pack_rows` needs, with rows of nearly equal
    work.

    Without packing, each row is one sample. `pair_cost` is as in `podium.train.batches.balance.balance`.

    Raises:
        ValueError: a prompt with its completion is longer than a row.
    """
    packed = pack_rows(samples, row_tokens=row_tokens, packing=packing)
    if packing == "none":
        return packed
    shared = packing == "shared_prompts"
    lengths = {
        index: sample if shared else dataclasses.replace(sample, group=index) for index, sample in enumerate(samples)
    }
    together = [[index for chunk in row for index in chunk] for row in packed]
    count = -(-len(packed) // rows) * rows
    found = balance(together, lengths, rows=count, row_tokens=row_tokens, pair_cost=pair_cost)
    return [[list(chunk) for _, chunk in itertools.groupby(row, lambda index: lengths[index].group)] for row in found]


def chunk_tokens(chunk: Chunk, samples: Sequence[Lengths]) -> int:
    """Tokens that a chunk takes in a row."""
    return samples[chunk[0]].shown + sum(samples[index].own for index in chunk)


def _chunks(samples: Sequence[Lengths], row_tokens: int, shared: bool) -> list[Chunk]:
    """Split each group, in order, into as few chunks as possible that fit in a row; if not `shared`, each sample is a
    chunk.
    """
    chunks: list[Chunk] = []
    for index, sample in enumerate(samples):
        if sample.shown + sample.own > row_tokens:
            raise ValueError(
                f"a prompt of {sample.shown + 1} tokens with a completion of {sample.own} does not fit in a row of "
                f"{row_tokens} tokens; set train.row_tokens to rollout.max_prompt_tokens + rollout.max_new_tokens"
            )
        same = shared and chunks and samples[chunks[-1][0]].group == sample.group
        if same and chunk_tokens(chunks[-1], samples) + sample.own <= row_tokens:
            chunks[-1].append(index)
        else:
            chunks.append([index])
    return chunks


def _first_fit(chunks: list[Chunk], samples: Sequence[Lengths], row_tokens: int) -> list[list[Chunk]]:
    """First-fit packing of chunks: longest first, each into the first row with room."""
    rows: list[list[Chunk]] = []
    free: list[int] = []
    for chunk in sorted(chunks, key=lambda chunk: -chunk_tokens(chunk, samples)):
        length = chunk_tokens(chunk, samples)
        row = next((row for row, room in enumerate(free) if room >= length), None)
        if row is None:
            rows.append([chunk])
            free.append(row_tokens - length)
        else:
            rows[row].append(chunk)
            free[row] -= length
    return rows
