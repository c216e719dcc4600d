"""Changes to a config that make it fit, or faster, without changing what it learns; each proven by its own plan."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from podium.config.schema import Config, Remat
from podium.config.sizes import batch_sequences, row_tokens, rows_per_device
from podium.models.params import ROLLOUT_LAYOUTS
from podium.plan.compare import ORDER, difference
from podium.plan.result import Plan
from podium.plan.sizes import RunSizes

TOLD = 3
"""Changes that a report names."""
PROVEN = 4
"""Changes that are compiled to find those."""
FASTER = 0.99
"""Times the seconds of a step, from which on a change is worth naming."""
SMALLER = 0.99
"""The same of memory, where a run does not fit."""

Change = tuple[str, int | str]
"""Key and value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A change that may help."""

    key: str
    value: int | str
    old: int | str
    """What is there now."""

    def __str__(self) -> str:
        """As on the command line."""
        return f"{self.key}={self.value}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A change, and what it makes of a run."""

    change: Candidate
    plan: Plan
    reason: str


def candidates(config: Config, run: RunSizes) -> Iterator[tuple[Change, int | str]]:
    """Changes that leave what is learned as it is, with the value that is there now; some will not help."""
    train, rollout = config.train, config.rollout
    rows, most = rows_per_device(config), -(-batch_sequences(config) // (run.dp * run.fsdp))
    for more in (rows // 2, 2 * rows):
        if not 1 <= more <= most:
            continue
        if train.tokens_per_device is None:
            yield ("train.rows_per_device", more), rows
        else:
            yield ("train.tokens_per_device", more * row_tokens(config)), train.tokens_per_device
    for remat in get_args(Remat):
        if remat != train.remat:
            yield ("train.remat", remat), train.remat
    for tokens in (train.head_chunk_tokens // 4, 4 * train.head_chunk_tokens):
        if 1 <= tokens <= rows * row_tokens(config):
            yield ("train.head_chunk_tokens", tokens), train.head_chunk_tokens
    sequences = config.prompts_per_step * config.group_size
    for slots in (rollout.slots // 2, 2 * rollout.slots):
        if slots % run.rollout_shards == 0 and 1 <= slots < 2 * sequences:
            yield ("rollout.slots", slots), rollout.slots
    for layout in ROLLOUT_LAYOUTS:
        if layout != rollout.layout:
            yield ("rollout.layout", layout), rollout.layout
    yield ("rollout.refill_steps", 2 * rollout.refill_steps), rollout.refill_steps


def promising(
    config: Config, run: RunSizes, *, vary: Callable[[Change], Config], estimated: Callable[[Config], Plan]
) -> list[Candidate]:
    """The changes that help by the closed form, best first.

    Args:
        config: of the run.
        run: its numbers.
        vary: the config with one change; ValueError where it contradicts the rest.
        estimated: the closed form's plan; ValueError where the change does not fit the machine.
    """
    now, found = estimated(config), []
    for (key, value), old in candidates(config, run):
        try:
            plan = estimated(vary((key, value)))
        except ValueError:  # a slot for each device, say, is not to be had with so few
            continue
        if helps(plan, now):
            found.append((_rank(plan), Candidate(key=key, value=value, old=old)))
    return [candidate for _, candidate in sorted(found, key=lambda each: each[0])]


def proven(
    changes: Iterable[Candidate], plan: Plan, *, vary: Callable[[Change], Config], make: Callable[[Config], Plan]
) -> list[Suggestion]:
    """The changes that help most, best first, each with the plan that shows it.

    Args:
        changes: to try.
        plan: without them.
        vary: the config with one change.
        make: the plan of a config, made as `plan` was.
    """
    found = []
    for each in changes:
        better = make(vary((each.key, each.value)))
        if helps(better, plan):
            found.append(Suggestion(change=each, plan=better, reason=difference(better, plan)))
    return sorted(found, key=lambda each: _rank(each.plan))[:TOLD]


def helps(changed: Plan, plan: Plan) -> bool:
    """Whether a change is one for the better: it fits, or is nearer to that, or is faster and fits still."""
    if changed.verdict != plan.verdict:
        return ORDER.index(changed.verdict) < ORDER.index(plan.verdict)
    if plan.verdict != "fits":
        return changed.worst.bytes < SMALLER * plan.worst.bytes
    return changed.step is not None and plan.step is not None and changed.step.value < FASTER * plan.step.value


def _rank(plan: Plan) -> tuple[int, float]:
    """Best first: what fits by its seconds, what does not by its memory."""
    fits = plan.verdict == "fits" and plan.step is not None
    return ORDER.index(plan.verdict), plan.step.value if fits and plan.step else float(plan.worst.bytes)
