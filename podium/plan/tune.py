"""The fastest plan that fits, over several settings at once, within a budget of plans that are compiled.

The closed form goes through the settings, one at a time and again until nothing gets better; what it likes best is
compiled, best first. None of the settings changes what a run learns.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from podium.config.schema import Config, Remat
from podium.config.sizes import row_tokens, rows_per_device
from podium.models.params import ROLLOUT_LAYOUTS
from podium.plan.result import Plan
from podium.plan.search import Change, most_rows, rank_of
from podium.plan.sizes import RunSizes

Values = Sequence[int | str]
Settings = tuple[Change, ...]  # of every key that is searched, in the order of the keys
ROUNDS = 3  # through all settings, at most: the second seldom finds anything


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """Settings and the plan of them."""

    settings: Settings
    plan: Plan

    def changes(self, before: "Tried") -> list[Change]:
        """The settings that are others than before."""
        return [each for each in self.settings if each not in before.settings]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The result of a search over several settings."""

    before: Tried  # as the config has them
    tried: tuple[Tried, ...]  # compiled, or else the closed form's best; best first
    estimated: int  # how many were looked at by the closed form
    budget: int

    @property
    def best(self) -> Tried:
        """The fastest that fits; if none does, the one that is nearest to it."""
        return self.tried[0]


def tune(
    grid: Mapping[str, Values],
    now: Settings,
    *,
    estimate: Callable[[Settings], Plan],
    make: Callable[[Settings], Plan] | None,
    budget: int,
) -> TuneResult:
    """The best of the settings of a grid.

    Args:
        grid: the values of each key that are worth trying.
        now: the settings that the config has.
        estimate: the closed form's plan; it raises ValueError where settings contradict each other.
        make: the compiled plan; None: the closed form's word is taken.
        budget: how many plans may be compiled, that of the config as it is included.
    """
    found = _descend(grid, now, estimate)
    likely = sorted(found, key=lambda settings: rank_of(found[settings]))
    if make is None:
        tried = [Tried(settings=settings, plan=found[settings]) for settings in likely[:budget]]
        before = Tried(settings=now, plan=found[now])
    else:
        before = Tried(settings=now, plan=make(now))
        tried = [before]
        for settings in likely:
            needs = found[settings].worst.bytes
            hopeless = any(each.plan.verdict != "fits" and found[each.settings].worst.bytes <= needs for each in tried)
            if len(tried) == budget or settings == now or hopeless:
                continue
            tried.append(Tried(settings=settings, plan=make(settings)))
    best_first = tuple(sorted(tried, key=lambda each: rank_of(each.plan)))
    return TuneResult(before=before, tried=best_first, estimated=len(found), budget=budget)


def _descend(grid: Mapping[str, Values], now: Settings, estimate: Callable[[Settings], Plan]) -> dict[Settings, Plan]:
    """Every settings that was looked at with its plan by the closed form: each key's best value, again and again."""
    found, best = {now: estimate(now)}, now
    for _ in range(ROUNDS):
        start = best
        for place, change in enumerate(now):
            for value in grid[change.key]:
                settings = (*best[:place], dataclasses.replace(change, value=value), *best[place + 1 :])
                if settings in found:
                    continue
                try:
                    found[settings] = estimate(settings)
                except ValueError:  # slots that do not divide over the devices of a layout, say
                    continue
            best = min(found, key=lambda settings: rank_of(found[settings]))
        if best == start:
            break
    return found


def tune_grid(keys: Sequence[str], config: Config, run: RunSizes) -> tuple[dict[str, Values], Settings]:
    """The values of keys that are worth trying, and those that the config has.

    Raises:
        ValueError: a key cannot be searched together with others.
    """
    if unknown := [key for key in keys if key not in TUNED]:
        raise ValueError(
            f"--search {','.join(keys)}: {unknown[0]} cannot be searched together with others; these can:"
            f" {', '.join(TUNED)}"
        )
    found = {key: TUNED[key](config, run) for key in keys}
    now = tuple(Change(key=key, value=_value(config, key)) for key in keys)
    return found, now


def _value(config: Config, key: str) -> int | str:
    if key == "train.rows_per_device":
        return rows_per_device(config)
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _doublings(first: int, most: int) -> list[int]:
    """From `first`, and the last one itself."""
    found = [first]
    while 2 * found[-1] < most:
        found.append(2 * found[-1])
    return [*found, most] if most > found[-1] else found


def _slots(config: Config, run: RunSizes) -> Values:
    unit, sequences = run.rollout_shards, config.prompts_per_step * config.group_size
    return _doublings(unit, -(-sequences // unit) * unit)


def _chunks(config: Config, run: RunSizes) -> Values:
    tokens, most = config.train.head_chunk_tokens, rows_per_device(config) * row_tokens(config)
    return [each for each in (tokens // 4, tokens, 4 * tokens) if 1 <= each <= max(most, tokens)]


TUNED: Mapping[str, Callable[[Config, RunSizes], Values]] = {
    "train.rows_per_device": lambda config, run: _doublings(1, most_rows(config, run)),
    "rollout.slots": _slots,
    "rollout.layout": lambda config, run: tuple(ROLLOUT_LAYOUTS),
    "train.remat": lambda config, run: get_args(Remat),
    "train.head_chunk_tokens": _chunks,
}
"""The settings that can be searched together."""
