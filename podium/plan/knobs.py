"""The settings that a study varies, and the values of each that are worth trying. No jax.

Each entry defines the range of a search for the largest value, and nearby values to suggest. Suggested values never
change what the run learns.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import get_args

from podium.config.schema import Config, Remat
from podium.models.params import ROLLOUT_LAYOUTS, count, trained_specs
from podium.plan.sizes import RunSizes
from podium.plan.study import Change, Value
from podium.run.sizes import batch_sequences, row_tokens, rows_per_device

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
    """One setting that can be varied; each function takes the run's config and its sizes on the machine."""

    range: Callable[[Config, RunSizes], SearchRange] | None = None  # None: the largest value cannot be searched for
    near: Callable[[Config, RunSizes], Iterable[Value]] | None = None  # other values to suggest


def search_range(key: str, config: Config, run: RunSizes) -> SearchRange:
    """The values of a setting that a search may try.

    Raises:
        ValueError: the setting cannot be searched, or not with this config.
    """
    knob = KNOBS.get(key)
    if knob is None or knob.range is None:
        searched = ", ".join(name for name, each in KNOBS.items() if each.range)
        raise ValueError(f"--search {key}: cannot be searched; search one of {searched}")
    found = knob.range(config, run)
    if found.most < found.unit:
        raise ValueError(f"--search {key}: there is nothing to search: {found.why}, {found.most}")
    return found


def candidates(config: Config, run: RunSizes) -> Iterator[Change]:
    """Changes that may help without changing what the run learns."""
    for key, knob in KNOBS.items():
        for value in knob.near(config, run) if knob.near else ():
            yield Change(key=key, value=value, old=value_of(config, key))


def value_of(config: Config, key: str) -> Value:
    """The value of a setting, named by its dotted path."""
    if key == "train.rows_per_device":
        return rows_per_device(config)
    return functools.reduce(getattr, key.split("."), config)  # pyright: ignore[reportReturnType]


# train.rows_per_device and train.tokens_per_device


def _most_rows(config: Config, run: RunSizes) -> int:
    """Rows per device with which one micro-batch holds all completions of an optimizer step."""
    return -(-batch_sequences(config) // run.batch_shards)


def _range_of_rows(config: Config, run: RunSizes) -> SearchRange:
    if config.train.tokens_per_device is not None:
        raise ValueError(
            "--search train.rows_per_device: the config sets train.tokens_per_device instead; unset it with"
            " --set train.tokens_per_device=null"
        )
    return SearchRange(1, _most_rows(config, run), "one micro-batch then holds all completions of an optimizer step")


def _near_rows(config: Config, run: RunSizes) -> Iterator[int]:
    rows = rows_per_device(config)
    return (more for more in (rows // 2, 2 * rows) if 1 <= more <= _most_rows(config, run))


def _near_rows_alone(config: Config, run: RunSizes) -> Iterable[int]:
    return _near_rows(config, run) if config.train.tokens_per_device is None else ()


def _near_tokens(config: Config, run: RunSizes) -> Iterable[int]:
    if config.train.tokens_per_device is None:
        return ()
    return (rows * row_tokens(config) for rows in _near_rows(config, run))


# Sizes of the rollout


def _range_of_prompts(config: Config, _: RunSizes) -> SearchRange:
    most = WIDEST * config.prompts_per_step
    return SearchRange(config.algorithm.minibatches, most, f"the search ends at {WIDEST} times the config's")


def _range_of_new_tokens(config: Config, run: RunSizes) -> SearchRange:
    rows = config.train.row_tokens or config.train.tokens_per_device
    longest = min(run.decoder.max_positions, rows or run.decoder.max_positions)
    most = (longest - config.rollout.prompt_tokens) // TOKENS_TOGETHER * TOKENS_TOGETHER
    why = f"sequences of {longest} tokens are the longest that {'a row holds' if rows else 'the model knows'}"
    return SearchRange(TOKENS_TOGETHER, most, why)


def _range_of_slots(config: Config, run: RunSizes) -> SearchRange:
    unit = run.rollout_shards
    sequences = config.prompts_per_step * config.group_size
    return SearchRange(unit, -(-sequences // unit) * unit, "every completion of a step then has a slot")


def _near_slots(config: Config, run: RunSizes) -> Iterator[int]:
    sequences = config.prompts_per_step * config.group_size
    for slots in (config.rollout.slots // 2, 2 * config.rollout.slots):
        if slots % run.rollout_shards == 0 and 1 <= slots < 2 * sequences:
            yield slots


# Adapters and chunks of the head


def _range_of_rank(_: Config, run: RunSizes) -> SearchRange:
    lora = run.decoder.lora
    if lora is None:
        raise ValueError("--search lora.rank: the config trains all weights; add --set lora.rank=32")
    specs = trained_specs(run.decoder)
    factors = [count({name: spec}) // spec.shape[0] // lora.rank for name, spec in specs.items()]
    return SearchRange(min(8, min(factors)), min(factors), "a larger one is more than the smallest matrix has")


def _near_chunks(config: Config, _: RunSizes) -> list[int]:
    tokens = config.train.head_chunk_tokens
    most = rows_per_device(config) * row_tokens(config)
    return [each for each in (tokens // 4, 4 * tokens) if 1 <= each <= most]


def _near_adapters(_: Config, run: RunSizes) -> Iterable[str]:
    """One copy of the frozen weights on a GPU instead of two, or the reverse."""
    lora = run.decoder.lora
    if lora is None or lora.merged or run.platform != "gpu":
        return ()
    return ("apart",) if lora.shared else ("shared",)


KNOBS: Mapping[str, Knob] = {
    "train.rows_per_device": Knob(
        range=_range_of_rows,
        near=_near_rows_alone,
    ),
    "train.tokens_per_device": Knob(near=_near_tokens),
    "prompts_per_step": Knob(range=_range_of_prompts),
    "rollout.max_new_tokens": Knob(range=_range_of_new_tokens),
    "train.remat": Knob(
        near=lambda config, run: (remat for remat in get_args(Remat) if remat != config.train.remat),
    ),
    "train.offload_optimizer": Knob(near=lambda config, run: (not config.train.offload_optimizer,)),
    "train.head_chunk_tokens": Knob(near=_near_chunks),
    "rollout.slots": Knob(range=_range_of_slots, near=_near_slots),
    "rollout.layout": Knob(
        near=lambda config, run: (
            layout for layout in ROLLOUT_LAYOUTS if layout not in (config.rollout.layout, run.layout.name)
        ),
    ),
    "rollout.refill_steps": Knob(near=lambda config, run: (2 * config.rollout.refill_steps,)),
    "lora.rank": Knob(range=_range_of_rank),
    "lora.rollout": Knob(near=_near_adapters),
}
"""The settings that can be varied; if changes help equally, those of earlier settings are suggested first."""
