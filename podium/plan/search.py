"""Changes to a config that are tried: the largest value of a setting that fits, and changes that help.

The closed form says what to try, the compiler what comes of it; what a change does not touch comes from the planner's
cache.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from podium.config.lora import LoraConfig
from podium.config.schema import Config, Remat
from podium.config.sizes import batch_sequences, row_tokens, rows_per_device
from podium.models.params import ROLLOUT_LAYOUTS, count, trained_specs
from podium.plan.compare import ORDER, difference
from podium.plan.result import Plan, Probe, margin
from podium.plan.sizes import RunSizes

MOST_PROBES = 16  # of one search: values whose memory is looked up
FAR = 0.05  # over the memory: the compiler has been seen to need 2 % less for one more row, never so much
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
    before: Plan  # without the change, made in the same way
    reason: str = ""  # what it makes better, if it does


Make = Callable[[Change], Plan]


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
    probes: tuple[Probe, ...]  # in the order of their values
    hbm_bytes: int

    @property
    def best(self) -> Probe | None:
        """The largest value tried that is accepted; None: even the smallest is not."""
        return next((each for each in reversed(self.probes) if each.accepted(self.hbm_bytes)), None)

    @property
    def roomy(self) -> Probe | None:
        """The largest value tried that is not too close to the limit either."""
        room = (1 - margin(self.compiled)) * self.hbm_bytes
        return next((each for each in reversed(self.probes) if not each.refused and each.bytes < room), None)

    @property
    def too_large(self) -> Probe | None:
        """The smallest value tried above the best."""
        best = self.best.value if self.best else 0
        return next((each for each in self.probes if each.value > best), None)

    @property
    def proven(self) -> bool:
        """Whether the value next to the largest that fits was tried too, or there is none."""
        first_unknown = (self.best.value if self.best else 0) + self.range.unit
        return first_unknown >= (self.too_large.value if self.too_large else self.range.most + 1)

    @property
    def compiled(self) -> bool:
        """Whether the compiler was asked."""
        return all(each.compiled for each in self.probes)


def search(
    key: str,
    values: SearchRange,
    *,
    closed_form: Callable[[int], int],
    probe: Callable[[Sequence[int]], list[Probe]],
    hbm_bytes: int,
) -> SearchResult:
    """The largest value of a setting that fits, in at most 16 probes; two at a time, as they are compiled.

    First a value that fits next to one that does not, where the closed form, corrected by what was probed, sees the
    limit. Memory need not rise with the value, for near its limit the compiler computes some things twice: so values
    above are probed too, until they are 5 % too large. Then values below, until one has room to spare.

    Args:
        key: of the setting.
        values: that are worth trying.
        closed_form: bytes of a value, as estimated.
        probe: bytes of some values.
        hbm_bytes: usable memory of a device.
    """
    return _Search(key, values, closed_form, probe, hbm_bytes).run()


class _Search:
    def __init__(
        self,
        key: str,
        values: SearchRange,
        closed_form: Callable[[int], int],
        probe: Callable[[Sequence[int]], list[Probe]],
        hbm_bytes: int,
    ) -> None:
        self.key, self.values, self.closed_form, self.probe, self.hbm_bytes = key, values, closed_form, probe, hbm_bytes
        self.end = values.most // values.unit  # in units, as all values here
        self.found: dict[int, Probe] = {}

    def run(self) -> SearchResult:
        self._bracket()
        self._look_above()
        self._look_for_room()
        probes = tuple(self.found[units] for units in sorted(self.found))
        return SearchResult(key=self.key, range=self.values, probes=probes, hbm_bytes=self.hbm_bytes)

    def _ask(self, *wanted: int) -> bool:
        """Probe those that were not; False: there is none, or no probe is left."""
        new = [units for units in dict.fromkeys(wanted) if 1 <= units <= self.end and units not in self.found]
        new = new[: MOST_PROBES - len(self.found)]
        if new:
            self.found |= zip(new, self.probe([units * self.values.unit for units in new]), strict=True)
        return bool(new)

    def _accepted(self, units: int) -> bool:
        return self.found[units].accepted(self.hbm_bytes)

    def _roomy(self, probe: Probe) -> bool:
        return probe.bytes < (1 - margin(probe.compiled)) * self.hbm_bytes

    @property
    def _best(self) -> int:
        return max((units for units in self.found if self._accepted(units)), default=0)

    def _bracket(self) -> None:
        """Find a value that is accepted beside one that is not."""
        low, high, misled = 0, self.end + 1, False
        while high - low > 1:
            expected = min(max(self._expected(low, high), low + 1), high - 1)
            pair = (expected, min(expected + 1, high - 1))
            if not self._ask(*(((low + high) // 2,) if misled else pair)):
                return
            width = high - low
            low = self._best
            high = min((units for units in self.found if units > low), default=self.end + 1)
            misled = high - low > width // 2

    def _expected(self, low: int, high: int) -> int:
        """The last value between two that the closed form, corrected by the nearest probe, sees fit."""
        inside = range(low + 1, high)
        near = min(self.found, key=lambda units: abs(self.found[units].bytes - self.hbm_bytes), default=None)
        correction = self.found[near].bytes / self._estimate(near) if near else 1.0
        return low + bisect.bisect_right(inside, self.hbm_bytes / correction, key=self._estimate)

    def _estimate(self, units: int) -> int:
        return self.closed_form(units * self.values.unit)

    def _look_above(self) -> None:
        """Two values in a row that are far too large end it."""
        units, far = self._best + 1, 0
        while units <= self.end and far < 2:
            if units not in self.found and not self._ask(units, units + 1):
                return
            far = far + 1 if self.found[units].bytes > (1 + FAR) * self.hbm_bytes else 0
            units += 1

    def _look_for_room(self) -> None:
        units = self._best
        while units >= 1 and (units in self.found or self._ask(units, units - 1)):
            if self._accepted(units) and self._roomy(self.found[units]):
                return
            units -= 1


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
    return SearchRange(1, most_rows(config, run), "one micro-batch then holds all completions of an optimizer step")


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


def _rank(config: Config, run: RunSizes) -> SearchRange:
    lora, specs = run.decoder.lora, trained_specs(run.decoder)
    if lora is None:
        raise ValueError("--search lora.rank: the config trains all weights; add --set lora.rank=32")
    factors = [count({name: spec}) // spec.shape[0] // lora.rank for name, spec in specs.items()]
    return SearchRange(min(8, min(factors)), min(factors), "a larger one is more than the smallest matrix has")


SEARCHED: Mapping[str, Callable[[Config, RunSizes], SearchRange]] = {
    "train.rows_per_device": _rows,
    "prompts_per_step": _prompts,
    "rollout.max_new_tokens": _new_tokens,
    "rollout.slots": _slots,
    "lora.rank": _rank,
}
"""The settings that can be searched."""


def most_rows(config: Config, run: RunSizes) -> int:
    """Rows of a device with which one micro-batch holds all completions of an optimizer step."""
    return -(-batch_sequences(config) // (run.dp * run.fsdp))


# Changes that make a run fit, or faster, without changing what it learns


def candidates(config: Config, run: RunSizes) -> Iterator[Change]:
    """Changes that leave what is learned as it is; some will not help."""
    train, rollout, rows = config.train, config.rollout, rows_per_device(config)
    for more in (rows // 2, 2 * rows):
        if not 1 <= more <= most_rows(config, run):
            continue
        if train.tokens_per_device is None:
            yield Change(key="train.rows_per_device", value=more, old=rows)
        else:
            tokens = more * row_tokens(config)
            yield Change(key="train.tokens_per_device", value=tokens, old=train.tokens_per_device)
    for remat in get_args(Remat):
        if remat != train.remat:
            yield Change(key="train.remat", value=remat, old=train.remat)
    yield Change(key="train.offload_optimizer", value=not train.offload_optimizer, old=train.offload_optimizer)
    for tokens in (train.head_chunk_tokens // 4, 4 * train.head_chunk_tokens):
        if 1 <= tokens <= rows * row_tokens(config):
            yield Change(key="train.head_chunk_tokens", value=tokens, old=train.head_chunk_tokens)
    sequences = config.prompts_per_step * config.group_size
    for slots in (rollout.slots // 2, 2 * rollout.slots):
        if slots % run.rollout_shards == 0 and 1 <= slots < 2 * sequences:
            yield Change(key="rollout.slots", value=slots, old=rollout.slots)
    for layout in ROLLOUT_LAYOUTS:
        if layout not in (rollout.layout, run.layout.name):
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
            found.append((rank_of(changed), change))
    return [change for _, change in sorted(found, key=lambda each: each[0])[:MOST_CANDIDATES]]


def or_adapters(changes: list[Change], config: Config, plan: Plan, estimated: Make) -> list[Change]:
    """The changes, and before them LoRA where a run does not fit and none of them makes it: it learns otherwise."""
    if plan.verdict == "fits" or config.lora is not None:
        return changes
    if any(estimated(change).verdict == "fits" for change in changes):
        return changes
    rank = LoraConfig.model_fields["rank"].default
    return [*promising([Change(key="lora.rank", value=rank, old="all weights")], plan, estimated), *changes]


def suggest(changes: Iterable[Change], plan: Plan, make: Make) -> list[Trial]:
    """The changes that help most, best first, each with the plan that shows it, made as `plan` was without them."""
    trials = [
        Trial(change=change, plan=make(change), before=plan) for change in itertools.islice(changes, MOST_CANDIDATES)
    ]
    better = sorted((trial for trial in trials if helps(trial.plan, plan)), key=lambda trial: rank_of(trial.plan))
    return [dataclasses.replace(each, reason=difference(each.plan, plan)) for each in better[:SHOWN]]


def helps(changed: Plan, plan: Plan) -> bool:
    """Whether a change is one for the better: it fits, or is nearer to that, or is faster and fits still."""
    if changed.verdict != plan.verdict:
        return ORDER.index(changed.verdict) < ORDER.index(plan.verdict)
    if plan.verdict != "fits":
        return changed.worst.bytes < BETTER * plan.worst.bytes
    return changed.step is not None and plan.step is not None and changed.step.value < BETTER * plan.step.value


def rank_of(plan: Plan) -> tuple[int, float]:
    """For sorting, best first: what fits by its seconds, what does not by its memory."""
    fits = plan.verdict == "fits" and plan.step is not None
    return ORDER.index(plan.verdict), plan.step.value if fits and plan.step else float(plan.worst.bytes)
