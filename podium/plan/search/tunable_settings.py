"""The settings that searches vary one at a time, and the values of each that are worth trying. No jax.

`search_range` gives the range of a search for the largest value, `candidates` nearby values to suggest. Suggested
values never change what the run learns.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import get_args

from podium.config.schema import Remat
from podium.models.params import ROLLOUT_LAYOUTS, count, trained_specs
from podium.plan.request.candidate import Change, Value
from podium.plan.request.phase_sizes import Planned

WIDEST = 16  # a search ends at this multiple of the run's value, if nothing else ends it
TOKENS_TOGETHER = 64  # lengths are searched in multiples of this


@dataclasses.dataclass(frozen=True)
class SearchRange:
    """The range of a search for the largest value: multiples of `unit` up to `most`."""

    unit: int
    most: int
    why: str  # why a larger value is useless


def search_range(key: str, run: Planned) -> SearchRange:
    """The values of a setting that a search may try.

    Raises:
        ValueError: the setting cannot be searched, or not with this config.
    """
    if key not in RANGES:
        raise ValueError(f"--search {key}: cannot be searched; search one of {', '.join(RANGES)}")
    found = RANGES[key](run)
    if found.most < found.unit:
        raise ValueError(f"--search {key}: no other value to try: {found.why}, {found.most}")
    return found


def candidates(run: Planned) -> Iterator[Change]:
    """Changes that may help without changing what the run learns; of equally good ones, the earlier is suggested."""
    for key, values in _nearby(run).items():
        for value in values:
            yield Change(key=key, value=value, old=run.value(key))


def _nearby(run: Planned) -> dict[str, Iterable[Value]]:
    """Other values of each setting that are worth trying."""
    train, rollout, sizes = run.config.train, run.config.rollout, run.sizes
    rows = [each for each in (sizes.rows // 2, 2 * sizes.rows) if 1 <= each <= _most_rows(run)]
    by_tokens = train.tokens_per_device is not None
    chunks = (train.head_chunk_tokens // 4, 4 * train.head_chunk_tokens)
    slots = [each for each in (rollout.slots // 2, 2 * rollout.slots) if each % sizes.rollout_shards == 0]
    return {
        "train.rows_per_device": [] if by_tokens else rows,
        "train.tokens_per_device": [each * sizes.row_tokens for each in rows] if by_tokens else [],
        "train.remat": [remat for remat in get_args(Remat) if remat != train.remat],
        "train.offload_optimizer": [not train.offload_optimizer],
        "train.head_chunk_tokens": [each for each in chunks if 1 <= each <= sizes.rows * sizes.row_tokens],
        "rollout.slots": [each for each in slots if 1 <= each < 2 * _sequences(run)],
        "rollout.layout": [each for each in ROLLOUT_LAYOUTS if each not in (rollout.layout, sizes.layout.name)],
        "rollout.refill_steps": [2 * rollout.refill_steps],
        "lora.rollout": _other_adapters(run),
    }


def _other_adapters(run: Planned) -> Iterable[str]:
    """A change from two copies of the frozen weights on a GPU to one, or the reverse."""
    lora = run.sizes.decoder.lora
    if lora is None or lora.merged or run.sizes.platform != "gpu":
        return ()
    return ("apart",) if lora.shared else ("shared",)


def _sequences(run: Planned) -> int:
    """Completions of a step."""
    return run.config.prompts_per_step * run.config.group_size


def _most_rows(run: Planned) -> int:
    """Rows per device with which one micro-batch holds all completions of an optimizer step."""
    return -(-run.sizes.spec.batch.max_rows // run.sizes.batch_shards)


def _range_of_rows(run: Planned) -> SearchRange:
    if run.config.train.tokens_per_device is not None:
        raise ValueError(
            "--search train.rows_per_device: the config sets train.tokens_per_device instead; unset it with"
            " --set train.tokens_per_device=null"
        )
    return SearchRange(1, _most_rows(run), "one micro-batch then holds all completions of an optimizer step")


def _range_of_prompts(run: Planned) -> SearchRange:
    most = WIDEST * run.config.prompts_per_step
    return SearchRange(run.config.algorithm.minibatches, most, f"the search ends at {WIDEST} times the config's")


def _range_of_new_tokens(run: Planned) -> SearchRange:
    rows = run.config.train.row_tokens or run.config.train.tokens_per_device
    longest = min(run.sizes.decoder.max_positions, rows or run.sizes.decoder.max_positions)
    most = (longest - run.config.rollout.prompt_tokens) // TOKENS_TOGETHER * TOKENS_TOGETHER
    why = f"sequences of {longest} tokens are the longest that {'a row holds' if rows else 'the model knows'}"
    return SearchRange(TOKENS_TOGETHER, most, why)


def _range_of_slots(run: Planned) -> SearchRange:
    unit = run.sizes.rollout_shards
    return SearchRange(unit, -(-_sequences(run) // unit) * unit, "every completion of a step then has a slot")


def _range_of_rank(run: Planned) -> SearchRange:
    lora = run.sizes.decoder.lora
    if lora is None:
        raise ValueError("--search lora.rank: the config trains all weights; add --set lora.rank=32")
    specs = trained_specs(run.sizes.decoder)
    factors = [count({name: spec}) // spec.shape[0] // lora.rank for name, spec in specs.items()]
    return SearchRange(min(8, min(factors)), min(factors), "a larger one is more than the smallest matrix has")


RANGES: Mapping[str, Callable[[Planned], SearchRange]] = {
    "train.rows_per_device": _range_of_rows,
    "prompts_per_step": _range_of_prompts,
    "rollout.max_new_tokens": _range_of_new_tokens,
    "rollout.slots": _range_of_slots,
    "lora.rank": _range_of_rank,
}
"""The settings whose largest value can be searched for, each with the values to try."""
