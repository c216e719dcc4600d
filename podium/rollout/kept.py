"""What the cache keeps of the layers at each place of a decoder, as their kinds declare. No jax.

Most layers keep keys and values of every token, in the sequence's pages. What has a fixed size lies in the sequence's
cell: the arrays of a recurrent layer, and the keys and values that a window reaches, in a ring of the cell's own pages.
The scheduler hands out pages and cells; `make_scheduler` makes the one of an engine.
"""

from typing import NamedTuple

from podium.config.schema import RolloutConfig
from podium.config.sizes import cache_pages, prompt_buckets, ring_pages, slot_sizes
from podium.models.architecture import DecoderConfig
from podium.models.blocks.kind import StateSpec
from podium.rollout.scheduler import Scheduler


class Kept(NamedTuple):
    """What is kept of each layer at a place."""

    layers: int
    """How many layers stand there."""
    kv_heads: int
    """0: no keys and values."""
    head_dim: int
    window: int | None
    """The most keys that a query sees, its own included; None: all before it."""
    ring: int | None
    """Pages of a cell that keep the keys and values; None: the sequence's pages do."""
    states: tuple[StateSpec, ...]
    """Arrays of a cell."""


def kept_places(decoder: DecoderConfig, rollout: RolloutConfig) -> tuple[Kept, ...]:
    """What is kept at each of `decoder.places`."""
    works = [(len(place.layers), place.block.work(decoder.width)) for place in decoder.places]
    return tuple(
        Kept(
            layers=layers,
            kv_heads=work.kv_heads,
            head_dim=work.head_dim,
            window=work.window,
            ring=ring_pages(work.window, rollout) if work.kv_heads else None,
            states=work.states,
        )
        for layers, work in works
    )


def num_cells(decoder: DecoderConfig, rollout: RolloutConfig) -> int:
    """Cells over all shards: one for each slot, and one for each prompt that a prefill call can make.

    0: the decoder's layers keep nothing of a fixed size.
    """
    fixed = any(each.ring is not None or each.states for each in kept_places(decoder, rollout))
    return rollout.slots + rollout.prefill_rows if fixed else 0


def kv_pages(kept: Kept, decoder: DecoderConfig, rollout: RolloutConfig, shards: int) -> int:
    """Pages of the keys and values at a place, over all shards."""
    return cache_pages(rollout, shards) if kept.ring is None else kept.ring * num_cells(decoder, rollout)


def make_scheduler(config: RolloutConfig, shards: int, num_cells: int = 0) -> Scheduler:
    """The scheduler of the engine that a config describes.

    Raises ValueError where the cache is too small for one sequence.
    """
    return Scheduler(
        slots=slot_sizes(config, shards),
        num_pages=cache_pages(config, shards),
        num_cells=num_cells,
        page_tokens=config.page_tokens,
        rows=config.prefill_rows,
        chunks=prompt_buckets(config.max_prompt_tokens),
        shards=shards,
    )
