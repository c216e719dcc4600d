"""The settings that searches vary one at a time, and the values of each that are worth trying. No jax.

Each entry defines the range of a search for the largest value, and nearby values to suggest. Suggested values never
change what the run learns.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knob:
    """One setting that can be varied; each function takes the run on the machine."""

    range: Callable[[Planned], SearchRange] | None = None  # None: the largest value cannot be searched for
    near: Callable[[Planned], Iterable[Value]] | None = None  # other values to suggest


def search_range(key: str, run: Planned) -> SearchRange:
    """The values of a setting that a search may try.

    Raises:
        ValueError: the setting cannot be searched, or not with this config.
    """
    knob = KNOBS.get(key)
    if knob is None or knob.range is None:
        searched = ", ".join(name for name, each in KNOBS.items() if each.range)
        raise ValueError(f"--search {key}: cannot be searched; search one of {searched}")
    found = knob.range(run)
    if found.most < found.unit:
        raise ValueError(f"--search {key}: no other value to try: {found.why}, {found.most}")
    return found


def candidates(run: Planned) -> Iterator[Change]:
    """Changes that may help without changing what the run learns."""
    for key, knob in KNOBS.items():
        for value in knob.near(run) if knob.near else ():
            yield Change(key=key, value=value, old=run.value(key))


# train.rows_per_device and train.tokens_per_device


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


def _near_rows(run: Planned) -> Iterator[int]:
    rows = run.sizes.rows
    return (more for more in (rows // 2, 2 * rows) if 1 <= more <= _most_rows(run))


def _near_rows_alone(run: Planned) -> Iterable[int]:
    return _near_rows(run) if run.config.train.tokens_per_device is None else ()


def _near_tokens(run: Planned) -> Iterable[int]:
    if run.config.train.tokens_per_device is None:
        return ()
    return (rows * run.sizes.row_tokens for rows in _near_rows(run))


# Sizes of the rollout


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
    sequences = run.config.prompts_per_step * run.config.group_size
    return SearchRange(unit, -(-sequences // unit) * unit, "every completion of a step then has a slot")


def _near_slots(run: Planned) -> Iterator[int]:
    sequences = run.config.prompts_per_step * run.config.group_size
    for slots in (run.config.rollout.slots // 2, 2 * run.config.rollout.slots):
        if slots % run.sizes.rollout_shards == 0 and 1 <= slots < 2 * sequences:
            yield slots


# Adapters and chunks of the head


def _range_of_rank(run: Planned) -> SearchRange:
    lora = run.sizes.decoder.lora
    if lora is None:
        raise ValueError("--search lora.rank: the config trains all weights; add --set lora.rank=32")
    specs = trained_specs(run.sizes.decoder)
    factors = [count({name: spec}) // spec.shape[0] // lora.rank for name, spec in specs.items()]
    return SearchRange(min(8, min(factors)), min(factors), "a larger one is more than the smallest matrix has")


def _near_chunks(run: Planned) -> list[int]:
    tokens = run.config.train.head_chunk_tokens
    most = run.sizes.rows * run.sizes.row_tokens
    return [each for each in (tokens // 4, 4 * tokens) if 1 <= each <= most]


def _near_adapters(run: Planned) -> Iterable[str]:
    """A change from two copies of the frozen weights on a GPU to one, or the reverse."""
    lora = run.sizes.decoder.lora
    if lora is None or lora.merged or run.sizes.platform != "gpu":
        return ()
    return ("apart",) if lora.shared else ("shared",)


KNOBS: Mapping[str, Knob] = {
    "train.rows_per_device": Knob(range=_range_of_rows, near=_near_rows_alone),
    "train.tokens_per_device": Knob(near=_near_tokens),
    "prompts_per_step": Knob(range=_range_of_prompts),
    "rollout.max_new_tokens": Knob(range=_range_of_new_tokens),
    "train.remat": Knob(near=lambda run: (remat for remat in get_args(Remat) if remat != run.config.train.remat)),
    "train.offload_optimizer": Knob(near=lambda run: (not run.config.train.offload_optimizer,)),
    "train.head_chunk_tokens": Knob(near=_near_chunks),
    "rollout.slots": Knob(range=_range_of_slots, near=_near_slots),
    "rollout.layout": Knob(
        near=lambda run: (
            layout for layout in ROLLOUT_LAYOUTS if layout not in (run.config.rollout.layout, run.sizes.layout.name)
        ),
    ),
    "rollout.refill_steps": Knob(near=lambda run: (2 * run.config.rollout.refill_steps,)),
    "lora.rank": Knob(range=_range_of_rank),
    "lora.rollout": Knob(near=_near_adapters),
}
"""The settings that can be varied; if changes help equally, those of earlier settings are suggested first."""
