"""The largest value of a setting that fits, found by bisection on plans; the closed form says where to begin.

A plan compiles what the setting touches; what it does not touch comes from the planner's cache.
"""

import dataclasses
from collections.abc import Callable

from podium.config.schema import Config
from podium.config.sizes import batch_sequences
from podium.plan.result import TOO_CLOSE, Plan
from podium.plan.sizes import RunSizes

MOST_PLANS = 6
"""Compiled in one search."""
WIDEST = 16
"""Times the config's value, where nothing else ends a search."""
TOKENS_TOGETHER = 64
"""Lengths are searched in steps of so many tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """The values of a setting that a search goes through: multiples of `unit`."""

    unit: int
    most: int
    why: str
    """The reason that there is no use in more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Try:
    """One value, and the plan of it."""

    value: int
    plan: Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to."""

    key: str
    range: Range
    tries: tuple[Try, ...]
    """In the order of their values."""
    proven: bool
    """Whether the next larger value was tried too, or there is none."""

    @property
    def best(self) -> Try | None:
        """The largest value whose plan fits; None: even the smallest does not."""
        return max((each for each in self.tries if each.plan.verdict == "fits"), key=_value, default=None)

    @property
    def too_large(self) -> Try | None:
        """The smallest value tried that is too large, or too close to call."""
        return min((each for each in self.tries if each.plan.verdict != "fits"), key=_value, default=None)


def search_range(key: str, config: Config, run: RunSizes) -> Range:
    """The values of a setting that are worth a search.

    Raises:
        ValueError: the key cannot be searched, or not in this config.
    """
    ranges: dict[str, Callable[[Config, RunSizes], Range]] = {
        "train.rows_per_device": _rows,
        "prompts_per_step": _prompts,
        "rollout.max_new_tokens": _new_tokens,
        "rollout.slots": _slots,
    }
    if key not in ranges:
        raise ValueError(f"--search {key}: cannot be searched; search one of {', '.join(ranges)}")
    found = ranges[key](config, run)
    if found.most < found.unit:
        raise ValueError(f"--search {key}: there is nothing to search: {found.why}, {found.most}")
    return found


def search(
    key: str, values: Range, *, closed_form: Callable[[int], int], make: Callable[[int], Plan], hbm_bytes: int
) -> Found:
    """The largest value whose plan fits, in at most six plans.

    Every next value is where the closed form, corrected by the last plan, sees the limit, or the one above, to prove
    it; after the corrected form was wrong, the middle of what is left.

    Args:
        key: of the setting.
        values: to search.
        closed_form: bytes of the phase with the least head-room, as estimated for a value; rises with it.
        make: the plan of a value.
        hbm_bytes: memory of a device.
    """
    tries: dict[int, Plan] = {}
    low, high = 0, values.most // values.unit + 1  # in units: fits, and does not; both as yet untried
    safe, correction, misled = (1 - TOO_CLOSE) * hbm_bytes, 1.0, False
    while high - low > 1 and len(tries) < MOST_PLANS:
        expected = _limit(low, high, values.unit, closed_form, safe / correction)
        units = (low + high) // 2 if misled else max(expected, low + 1)
        value = units * values.unit
        plan = tries[value] = make(value)
        fits = plan.verdict == "fits"
        misled = len(tries) > 1 and fits != (units <= expected)  # once is what the correction is for
        correction = plan.worst.bytes / closed_form(value)
        low, high = (units, high) if fits else (low, units)
    return Found(
        key=key,
        range=values,
        tries=tuple(Try(value=value, plan=tries[value]) for value in sorted(tries)),
        proven=high - low <= 1,
    )


def _limit(low: int, high: int, unit: int, closed_form: Callable[[int], int], room: float) -> int:
    """The largest number of units, from `low` to below `high`, that takes less than `room`; `low` is taken to."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if closed_form(middle * unit) < room else (low, middle)
    return low


def _rows(config: Config, run: RunSizes) -> Range:
    if config.train.tokens_per_device is not None:
        raise ValueError(
            "--search train.rows_per_device: the config sets train.tokens_per_device instead; unset it with"
            " --set train.tokens_per_device=null"
        )
    most = -(-batch_sequences(config) // (run.dp * run.fsdp))
    return Range(unit=1, most=most, why="one micro-batch then holds all completions of an optimizer step")


def _prompts(config: Config, _: RunSizes) -> Range:
    most = WIDEST * config.prompts_per_step
    return Range(unit=config.algorithm.minibatches, most=most, why=f"the search ends at {WIDEST} times the config's")


def _new_tokens(config: Config, run: RunSizes) -> Range:
    rows = config.train.row_tokens or config.train.tokens_per_device
    longest = min(run.decoder.max_positions, rows or run.decoder.max_positions)
    most = (longest - config.rollout.max_prompt_tokens) // TOKENS_TOGETHER * TOKENS_TOGETHER
    why = f"sequences of {longest} tokens are the longest that {'a row holds' if rows else 'the model knows'}"
    return Range(unit=TOKENS_TOGETHER, most=most, why=why)


def _slots(config: Config, run: RunSizes) -> Range:
    unit, sequences = run.rollout_shards, config.prompts_per_step * config.group_size
    return Range(unit=unit, most=-(-sequences // unit) * unit, why="every completion of a step then has a slot")


def _value(each: Try) -> int:
    return each.value
