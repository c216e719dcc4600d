"""What the cache stores for the layers at each place of a decoder, as declared by their kinds. No jax.

Most layers store keys and values of every token, in the sequence's pages. Data of a fixed size per sequence is stored
in its cell: the states of a recurrent layer, and the keys and values within a window, in a ring of the cell's own
pages. The scheduler allocates pages and cells; `make_scheduler` makes an engine's scheduler.
"""

from typing import NamedTuple

from podium.config.schema import RolloutConfig
from podium.config.sizes import cache_pages, prompt_buckets, ring_pages, slot_sizes
from podium.models.architecture import DecoderConfig
from podium.models.blocks.kind import StateSpec
from podium.rollout.scheduler import Scheduler


class Kept(NamedTuple):
    """What the cache stores for each layer at one place: the layers with the same position in the decoder's pattern."""

    layers: int
    """Number of layers at this place."""
    kv_heads: int
    """Number of key/value heads; 0 without keys and values."""
    head_dim: int
    window: int | None
    """Number of keys that a query sees, including its own; None for all previous keys."""
    ring: int | None
    """Pages per cell for the keys and values; None if these are stored in the sequence's pages."""
    states: tuple[StateSpec, ...]
    """Arrays stored in a cell."""


def kept_places(decoder: DecoderConfig, rollout: RolloutConfig) -> tuple[Kept, ...]:
    """What is stored for the layers at each of `decoder.places`."""
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
    """Number of cells over all shards: one per slot, and one per prompt that a prefill call can compute.

    The number is 0 if no layer stores data of a fixed size.
    """
    fixed = any(each.ring is not None or each.states for each in kept_places(decoder, rollout))
    return rollout.slots + rollout.prefill_rows if fixed else 0


def kv_pages(kept: Kept, decoder: DecoderConfig, rollout: RolloutConfig, shards: int) -> int:
    """Number of pages in the arrays of keys and values of `kept`'s layers, over all shards."""
    return cache_pages(rollout, shards) if kept.ring is None else kept.ring * num_cells(decoder, rollout)


def make_scheduler(config: RolloutConfig, shards: int, num_cells: int = 0) -> Scheduler:
    """Make the scheduler of an engine with this config.

    Raises ValueError if the cache cannot hold one sequence.
    """
    return Scheduler(
        slots=slot_sizes(config, shards),
        num_pages=cache_pages(config, shards),
        num_cells=num_cells,
        page_tokens=config.page_tokens,
        rows=config.prefill_rows,
        chunks=prompt_buckets(config),
        shards=shards,
        longest=config.longest if config.reproducible else None,
    )
