"""Changes to a config that are tried by planning them: the largest value that fits, and changes that help.

`--search` and `--suggest` share one loop, `try_changes`: a search names its next change by the last one's plan. The
closed form says what to try; what a change does not touch comes from the planner's cache.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from podium.config.schema import Config, Remat
from podium.config.sizes import batch_sequences, row_tokens, rows_per_device
from podium.models.params import ROLLOUT_LAYOUTS
from podium.plan.compare import ORDER, difference
from podium.plan.result import TOO_CLOSE, Plan
from podium.plan.sizes import RunSizes

MOST_PLANS = 6  # compiled in one search
MOST_CANDIDATES = 4  # changes that are compiled to find those that help most
SHOWN = 3  # changes that a report names
WIDEST = 16  # times the config's value, where nothing else ends a search
TOKENS_TOGETHER = 64  # lengths are searched in steps of so many tokens
BETTER = 0.99
"""Times the seconds of a step, or the memory where a run does not fit, from which on a change is worth naming."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One setting with another value."""

    key: str
    value: int | str
    old: int | str | None = None  # the value that is there now; None: not asked for

    def __str__(self) -> str:
        """The change as the command line takes it."""
        return f"{self.key}={self.value}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A change that was tried, and the plan of it."""

    change: Change
    plan: Plan
    reason: str = ""  # what it makes better, if it does


Make = Callable[[Change], Plan]


def try_changes(changes: Iterable[Change], make: Make, trials: list[Trial], *, most: int) -> None:
    """Plan one change after the other, `most` of them; each trial is added to `trials`, which `changes` may read."""
    for change in itertools.islice(changes, most):
        trials.append(Trial(change=change, plan=make(change)))


# The largest value that fits


@dataclasses.dataclass(frozen=True)
class SearchRange:
    """The values of a setting that a search goes through: multiples of `unit`."""

    unit: int
    most: int
    why: str  # the reason that there is no use in more


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    key: str
    range: SearchRange
    trials: tuple[Trial, ...]  # in the order of their values

    @property
    def best(self) -> Trial | None:
        """The largest value whose plan fits; None: even the smallest does not."""
        return next((each for each in reversed(self.trials) if each.plan.verdict == "fits"), None)

    @property
    def too_large(self) -> Trial | None:
        """The smallest value tried that is too large, or too close to call."""
        return next((each for each in self.trials if each.plan.verdict != "fits"), None)

    @property
    def proven(self) -> bool:
        """Whether the value next to the largest that fits was tried too, or there is none."""
        low, high = self.best, self.too_large
        first_unknown = (int(low.change.value) if low else 0) + self.range.unit
        return first_unknown >= (int(high.change.value) if high else self.range.most + 1)


def search(
    key: str, values: SearchRange, *, closed_form: Callable[[int], int], make: Make, hbm_bytes: int
) -> SearchResult:
    """The largest value of a setting whose plan fits, in at most six plans.

    `closed_form` gives the bytes of the phase with the least head-room, as estimated for a value; they rise with it.
    """
    trials: list[Trial] = []
    room = (1 - TOO_CLOSE) * hbm_bytes
    try_changes(_bisection(key, values, closed_form, room, trials), make, trials, most=MOST_PLANS)
    ordered = tuple(sorted(trials, key=lambda trial: int(trial.change.value)))
    return SearchResult(key=key, range=values, trials=ordered)


def _bisection(
    key: str, values: SearchRange, closed_form: Callable[[int], int], room: float, trials: Sequence[Trial]
) -> Iterator[Change]:
    """The values to try, until none is left between what fits and what does not; `trials` has the last one's plan.

    The next is where the closed form, corrected by the last plan, sees the limit, or the one above, to prove it; after
    the corrected form was wrong, it is the middle of what is left.
    """
    low, high = 0, values.most // values.unit + 1  # in units: fits, and does not; both as yet untried
    correction, misled = 1.0, False
    while high - low > 1:
        inside = range(low + 1, high)
        expected = low + bisect.bisect_left(
            inside, room / correction, key=lambda units: closed_form(units * values.unit)
        )
        units = (low + high) // 2 if misled else max(expected, low + 1)
        yield Change(key=key, value=units * values.unit)
        plan = trials[-1].plan
        fits = plan.verdict == "fits"
        misled = len(trials) > 1 and fits != (units <= expected)  # once is what the correction is for
        correction = plan.worst.bytes / closed_form(units * values.unit)
        low, high = (units, high) if fits else (low, units)


def search_range(key: str, config: Config, run: RunSizes) -> SearchRange:
    """The values of a setting that are worth a search.

    Raises:
        ValueError: the key cannot be searched, or not in this config.
    """
    if key not in SEARCHED:
        raise ValueError(f"--search {key}: cannot be searched; search one of {', '.join(SEARCHED)}")
    found = SEARCHED[key](config, run)
    if found.most < found.unit:
        raise ValueError(f"--search {key}: there is nothing to search: {found.why}, {found.most}")
    return found


def _rows(config: Config, run: RunSizes) -> SearchRange:
    if config.train.tokens_per_device is not None:
        raise ValueError(
            "--search train.rows_per_device: the config sets train.tokens_per_device instead; unset it with"
            " --set train.tokens_per_device=null"
        )
    return SearchRange(1, _most_rows(config, run), "one micro-batch then holds all completions of an optimizer step")


def _prompts(config: Config, _: RunSizes) -> SearchRange:
    most, why = WIDEST * config.prompts_per_step, f"the search ends at {WIDEST} times the config's"
    return SearchRange(config.algorithm.minibatches, most, why)


def _new_tokens(config: Config, run: RunSizes) -> SearchRange:
    rows = config.train.row_tokens or config.train.tokens_per_device
    longest = min(run.decoder.max_positions, rows or run.decoder.max_positions)
    most = (longest - config.rollout.max_prompt_tokens) // TOKENS_TOGETHER * TOKENS_TOGETHER
    why = f"sequences of {longest} tokens are the longest that {'a row holds' if rows else 'the model knows'}"
    return SearchRange(TOKENS_TOGETHER, most, why)


def _slots(config: Config, run: RunSizes) -> SearchRange:
    unit, sequences = run.rollout_shards, config.prompts_per_step * config.group_size
    return SearchRange(unit, -(-sequences // unit) * unit, "every completion of a step then has a slot")


SEARCHED: Mapping[str, Callable[[Config, RunSizes], SearchRange]] = {
    "train.rows_per_device": _rows,
    "prompts_per_step": _prompts,
    "rollout.max_new_tokens": _new_tokens,
    "rollout.slots": _slots,
}
"""The settings that can be searched."""


def _most_rows(config: Config, run: RunSizes) -> int:
    return -(-batch_sequences(config) // (run.dp * run.fsdp))


# Changes that make a run fit, or faster, without changing what it learns


def candidates(config: Config, run: RunSizes) -> Iterator[Change]:
    """Changes that leave what is learned as it is; some will not help."""
    train, rollout, rows = config.train, config.rollout, rows_per_device(config)
    for more in (rows // 2, 2 * rows):
        if not 1 <= more <= _most_rows(config, run):
            continue
        if train.tokens_per_device is None:
            yield Change(key="train.rows_per_device", value=more, old=rows)
        else:
            tokens = more * row_tokens(config)
            yield Change(key="train.tokens_per_device", value=tokens, old=train.tokens_per_device)
    for remat in get_args(Remat):
        if remat != train.remat:
            yield Change(key="train.remat", value=remat, old=train.remat)
    for tokens in (train.head_chunk_tokens // 4, 4 * train.head_chunk_tokens):
        if 1 <= tokens <= rows * row_tokens(config):
            yield Change(key="train.head_chunk_tokens", value=tokens, old=train.head_chunk_tokens)
    sequences = config.prompts_per_step * config.group_size
    for slots in (rollout.slots // 2, 2 * rollout.slots):
        if slots % run.rollout_shards == 0 and 1 <= slots < 2 * sequences:
            yield Change(key="rollout.slots", value=slots, old=rollout.slots)
    for layout in ROLLOUT_LAYOUTS:
        if layout != rollout.layout:
            yield Change(key="rollout.layout", value=layout, old=rollout.layout)
    yield Change(key="rollout.refill_steps", value=2 * rollout.refill_steps, old=rollout.refill_steps)


def promising(changes: Iterable[Change], plan: Plan, estimated: Make) -> list[Change]:
    """The changes that help most by the closed form, best first; `plan` is the closed form's without any.

    `estimated` makes a change's; it raises ValueError where the change contradicts the config or the machine.
    """
    found = []
    for change in changes:
        try:
            changed = estimated(change)
        except ValueError:  # a slot for each device, say, is not to be had with so few
            continue
        if helps(changed, plan):
            found.append((_rank(changed), change))
    return [change for _, change in sorted(found, key=lambda each: each[0])[:MOST_CANDIDATES]]


def suggest(changes: Iterable[Change], plan: Plan, make: Make) -> list[Trial]:
    """The changes that help most, best first, each with the plan that shows it, made as `plan` was without them."""
    trials: list[Trial] = []
    try_changes(changes, make, trials, most=MOST_CANDIDATES)
    better = sorted((trial for trial in trials if helps(trial.plan, plan)), key=lambda trial: _rank(trial.plan))
    return [dataclasses.replace(each, reason=difference(each.plan, plan)) for each in better[:SHOWN]]


def helps(changed: Plan, plan: Plan) -> bool:
    """Whether a change is one for the better: it fits, or is nearer to that, or is faster and fits still."""
    if changed.verdict != plan.verdict:
        return ORDER.index(changed.verdict) < ORDER.index(plan.verdict)
    if plan.verdict != "fits":
        return changed.worst.bytes < BETTER * plan.worst.bytes
    return changed.step is not None and plan.step is not None and changed.step.value < BETTER * plan.step.value


def _rank(plan: Plan) -> tuple[int, float]:
    """Best first: what fits by its seconds, what does not by its memory."""
    fits = plan.verdict == "fits" and plan.step is not None
    return ORDER.index(plan.verdict), plan.step.value if fits and plan.step else float(plan.worst.bytes)
