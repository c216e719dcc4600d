"""Decides which samples share a row of a batch. Uses only lengths, so the planner counts rows with it, without jax.

A row consists of segments. With `shared_prompts`, a group's prompt without its last token is one segment. Each
completion is another segment, which attends to the prompt's: the prompt's last token, from which the completion's first
token is predicted, followed by the completion without its last token. So a prompt takes up its length only once per
group.
"""

import bisect
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
    packed: list[list[Chunk]],
    samples: Sequence[Lengths],
    *,
    row_tokens: int,
    packing: Packing,
    rows: int,
    pair_cost: float,
) -> list[list[Chunk]]:
    """Balance packed rows: as many micro-batches of `rows` as before, with rows of nearly equal work.

    Without packing, each row is one sample. `pair_cost` is as in `podium.train.batches.balance.balance`.
    """
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


def divide_rows(samples: Sequence[Lengths], *, row_tokens: int) -> list[list[Chunk]]:
    """Pack samples into rows that share prompts, where a group may continue in another row, behind its prompt again.

    Groups are placed from the longest to the shortest, and the longest completions of each first: behind the prompt in
    a row that has it, or else in the fullest row with room for both.

    Raises:
        ValueError: a prompt with its completion is longer than a row.
    """
    groups: dict[int, list[int]] = {}
    for (index,) in _chunks(samples, row_tokens, False):
        groups.setdefault(samples[index].group, []).append(index)
    rows: list[list[Chunk]] = []
    room: list[tuple[int, int]] = []  # tokens left and row, in order
    for group in sorted(groups.values(), key=lambda group: -chunk_tokens(group, samples)):
        held: list[tuple[int, int]] = []  # the same, of rows that have the prompt; these are not in `room`
        for index in sorted(group, key=lambda index: -samples[index].own):
            needed, found = samples[index].own, held
            place = bisect.bisect_left(held, (needed, 0))
            if place == len(held):
                needed, found = needed + samples[index].shown, room
                place = bisect.bisect_left(room, (needed, 0))
                new = [] if place < len(room) else [(row_tokens, len(rows))]
                rows += [[] for _ in new]
                room += new
                rows[room[place][1]].append([])
            left, row = found.pop(place)
            rows[row][-1].append(index)
            bisect.insort(held, (left - needed, row))
        for each in held:
            bisect.insort(room, each)
    return rows


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
