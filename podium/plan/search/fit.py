"""`--fit`: find the fastest settings that fit, first without changing what the run learns.

The closed form orders pairs of an update and a rollout (`podium.plan.search.fit_candidates`), and the compiler judges:
of the best pair only the update is compiled, and the decode if its estimate leaves it in doubt. The compiler's figure
for one program corrects the estimates of all similar ones, and the next pair is tried until one fits; then the whole
run is planned. No jax.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

from podium.config.errors import ConfigError
from podium.config.lora import Base, LoraConfig
from podium.config.optimizer import OPTIMIZER_COPIES
from podium.plan.request.phase_sizes import Planned
from podium.plan.result import Peak, Plan, margin, part_of
from podium.plan.search.fit_candidates import Half, Halves, Place
from podium.plan.search.study import Case, Change, Changes, Outcome, Study

MOST_PROGRAMS = 6  # programs that are compiled by themselves
MOST_PLANS = 2  # whole plans; a second one if a program that was not compiled by itself turns out too large
ALIKE = 0.02  # share of the fastest candidate's seconds within which fewer changes are better
WORTH = 0.97  # share of the seconds of what fits above which something faster is not compiled
IN_FLIGHT = 1.5  # prompts in flight that are offered, relative to those of a step

Probe = Callable[[Case, Sequence[str]], Sequence[Peak]]
"""Compiles the largest program of each of these phases, and returns their peaks."""


class Pair(NamedTuple):
    """An update and a rollout with the same shared settings."""

    place: Place
    update: Half
    rollout: Half

    @property
    def changes(self) -> Changes:
        """All changes to the run."""
        return (*self.place.changes, *self.update.changes, *self.rollout.changes)

    @property
    def seconds(self) -> float:
        """Seconds of a step, by the closed form."""
        return self.update.seconds + self.rollout.seconds


class Tried(NamedTuple):
    """Settings that were tried, and what was found."""

    changes: Changes
    phase: str
    """The phase that was compiled, or the one with the least memory left."""
    bytes: int
    fits: bool
    seconds: float
    """Seconds of a step; by the closed form if only a program was compiled."""
    made_by: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """The fastest settings that fit."""

    before: Plan
    """The run as it is, by the closed form."""
    best: Outcome | None
    """The plan of the best settings; None if nothing fits."""
    learned: Changes = ()
    """The changes among the settings that affect what the run learns."""
    undone: Sequence[Outcome] = ()
    """For each change, the best settings without it, by the closed form."""
    others: Sequence[Outcome] = ()
    """Faster settings, by the closed form, whose first changes are to what the run learns."""
    tried: Sequence[Tried] = ()
    estimated: int = 0
    """Halves of a step that the closed form has estimated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """The search for the fastest settings of one run on one machine that fit."""

    study: Study
    """Plans whole cases, by the compiler or, if it is fast, by the closed form."""
    now: Case
    """The run as it is."""
    planned: Callable[[Case], Planned]
    """The run of a case; raises ValueError if its settings contradict each other or do not fit the machine."""
    lengths: str
    """Source of prompt and completion lengths."""
    fixed: Collection[str]
    """Settings that keep their values."""
    probe: Probe
    """Unused if the study is fast."""
    tried: list[Tried] = dataclasses.field(default_factory=list)
    factors: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    """Compiled bytes over estimated ones, by phase and kind of half, also of settings with other changes."""

    def find(self, *, all_others: bool) -> Fitted:
        """Find the settings; with `all_others`, faster ones that change what is learned too, even if others fit.

        Raises:
            ValueError: the run contradicts itself or does not fit the machine's mesh, or the lengths are invalid.
            CompilerError: the compiler failed.
        """
        before = self.study.of(self.now, fast=True).plan
        choice = self._choice(self.now)
        best, estimated = self._settled(choice, self.now), choice.estimated
        others: list[Outcome] = []
        learned: Changes = ()
        for changes in self._changes_of_learning(smaller=best is None) if best is None or all_others else ():
            case = self.now.but(*changes)
            try:
                choice = self._choice(case)
                found = self._estimated(choice, case)
            except ValueError:  # the changes contradict other settings, or the model
                continue
            estimated += choice.estimated
            if found is None or (best is not None and not learned and not _faster(found, best)):
                continue
            others.append(found)
            if best is None:
                best, learned = self._settled(choice, case), changes
        return Fitted(
            before=before,
            best=best,
            learned=learned if best else (),
            undone=self._undone(best) if best and all_others else (),
            others=[each for each in others if not learned or each.case.changes[: len(learned)] != learned],
            tried=tuple(self.tried),
            estimated=estimated,
        )

    def _changes_of_learning(self, *, smaller: bool) -> Iterator[Changes]:
        """Changes to what is learned that free memory or time, mildest first; with `smaller`, a smaller batch too."""
        config = self.planned(self.now).config
        optimizer = config.train.optimizer
        found: list[Changes] = []
        if optimizer.moments == "float32" and OPTIMIZER_COPIES.get(optimizer.name, 2):
            found.append((Change(key="train.optimizer.moments", value="bfloat16", old="float32"),))
        base = "bfloat16" if config.lora is None else config.lora.base
        rank = Change(key="lora.rank", value=LoraConfig.model_fields["rank"].default, old="all weights")
        adapted = () if config.lora else (rank,)
        bases = [Change(key="lora.base", value=each, old=base) for each in get_args(Base)]
        found += [(*adapted, *([each] if each.value != base else [])) for each in bases[get_args(Base).index(base) :]]
        if config.rollout.in_flight == 1:
            found.append((Change(key="rollout.in_flight", value=IN_FLIGHT, old=1.0),))
        if config.rollout.weights == "dtype" and base != "nf4":
            found.append((Change(key="rollout.weights", value="int8", old="dtype"),))
        if smaller and config.prompts_per_step > 1:
            prompts = config.prompts_per_step
            found.append((Change(key="prompts_per_step", value=prompts // 2, old=prompts),))
        fixed = {*self.fixed, *(["lora.rank"] if "lora" in self.fixed else [])}
        return (each for each in found if each and fixed.isdisjoint(change.key for change in each))

    def _choice(self, case: Case) -> "Choice":
        """The candidates for a case. Raises ValueError if it contradicts itself."""
        halves = Halves(self.planned(case), self.lengths, self.fixed)
        fast = self.study.fast
        return Choice(halves.places(), case.machine.hbm_bytes, fast=fast, factors={} if fast else self.factors)

    def _estimated(self, choice: "Choice", case: Case) -> Outcome | None:
        """The best settings by the closed form; None if none fit."""
        while (pair := choice.best()) is not None:
            (found,) = self.study.estimate([case.but(*case.changes, *pair.changes)])
            if found.known is None:  # the settings contradict each other
                choice.drop(pair)
            elif found.plan.verdict == "fits" or not choice.fast:
                return found
            else:
                choice.learn_plan(pair, found.plan)
        return None

    def _settled(self, choice: "Choice", case: Case) -> Outcome | None:
        """The best settings, compiled unless the study is fast; None if none fit."""
        programs = plans = 0
        close: Outcome | None = None
        while plans < MOST_PLANS and (pair := choice.best()) is not None:
            changed = case.but(*case.changes, *pair.changes)
            open_phases = choice.open_phases(pair) if programs < MOST_PROGRAMS else {}
            if open_phases:
                programs += len(open_phases)
                try:
                    peaks = self.probe(changed, tuple(open_phases))
                except ConfigError:
                    choice.drop(pair)
                    continue
                for (phase, half), peak in zip(open_phases.items(), peaks, strict=True):
                    choice.learn(half, phase, peak.bytes, refused=peak.refused)
                    made_by = "its refusal" if peak.refused else "compiler" if peak.compiled else "closed form"
                    fits = choice.need(half) <= choice.limit(pair.place)
                    self.tried.append(
                        Tried(
                            changed.changes, phase, bytes=peak.bytes, fits=fits, seconds=pair.seconds, made_by=made_by
                        )
                    )
                continue
            (found,) = self.study.decide([changed])
            if found.known is None:
                choice.drop(pair)
                continue
            plans += not choice.fast
            self._note(found)
            if found.plan.verdict == "fits":
                return found
            close = found if found.plan.verdict == "too_close" else close
            choice.learn_plan(pair, found.plan)
        return close

    def _note(self, found: Outcome) -> None:
        """Record a whole plan among the settings that were tried."""
        plan = found.plan
        made_by = "closed form" if plan.estimate_only else "whole plan"
        seconds = plan.step.value if plan.step else 0.0
        fits = plan.verdict == "fits"
        self.tried.append(
            Tried(
                found.case.changes, plan.worst.name, bytes=plan.worst.bytes, fits=fits, seconds=seconds, made_by=made_by
            )
        )

    def _undone(self, best: Outcome) -> list[Outcome]:
        """For each change, the best settings without it, by the closed form; with the best ones as the plan before."""
        changes = best.case.changes
        without = [[each for each in changes if each is not undone] for undone in changes]
        (whole,) = self.study.estimate([best.case])
        found = self.study.estimate(self.now.but(*kept) for kept in without)
        return [dataclasses.replace(each, before=whole.known) for each in found]


class Choice:
    """The candidates of one search, with what the compiler said of some of them."""

    def __init__(
        self, places: Iterable[Place], hbm_bytes: int, *, fast: bool, factors: dict[tuple[str, str], float]
    ) -> None:
        """Prepare to consider places one after another, as they are needed; the first has the run's own shared
        settings.

        `factors` are compiled bytes over estimated ones, by phase and kind of half; what is learned is added.
        """
        self._waiting = list(places)
        self._places: list[Place] = []
        self._hbm_bytes = hbm_bytes
        self.fast = fast
        self._exact: dict[tuple[int, str], float] = {}
        """Bytes of halves whose phase was compiled."""
        self._beside = 0.0
        """Bytes by which a whole plan, which has the code of all programs, exceeded the largest program alone."""
        self._factors = factors

    @property
    def estimated(self) -> int:
        """Number of halves so far."""
        return sum(len(place.updates) + len(place.simulated) for place in self._places)

    def best(self) -> Pair | None:
        """The pair to try next: the fastest that fits, or a hardly slower one that is known to fit; None if no pair
        fits.
        """
        pair = self._best(ordinary=True)
        while self._waiting and (pair is None or pair.seconds > (1 + ALIKE) * self._least_seconds()):
            if pair is not None and not self._ordinary(self._waiting[0]):
                break  # other places are for runs that do not fit otherwise
            self._places.append(self._waiting.pop(0))
            pair = self._best(ordinary=True)
        pair = pair or self._best(ordinary=False)
        known = self._best(ordinary=True, known=True)
        return known if pair and known and pair.seconds > WORTH * known.seconds else pair

    def limit(self, place: Place) -> float:
        """Bytes that a device has for a program that fits by more than the margin of error."""
        return (1 - margin(place.compiled and not self.fast)) * self._hbm_bytes - self._beside

    def need(self, half: Half) -> float:
        """Bytes that a device needs for a half: the compiler's figure, or the closed form's, corrected."""
        return max(
            self._exact.get((id(half), phase), size * self._factors.get((phase, half.like), 1.0))
            for phase, size in half.peaks.items()
        )

    def open_phases(self, pair: Pair) -> dict[str, Half]:
        """The phases of a pair to compile by themselves, each with its half; empty if the compiler cannot judge the
        pair.
        """
        if self.fast or not pair.place.compiled:
            return {}
        halves = (pair.update, pair.rollout)
        return {phase: half for half in halves if (phase := self._open(half)) is not None}

    def _open(self, half: Half) -> str | None:
        """The phase of a half that should be compiled by itself; None if its memory is known, or if it is a decode sure
        to fit.

        Such a decode is compiled with the whole plan.
        """
        alone = (name for name in half.peaks if name == "decode" or part_of(name) == "update")
        phase = max(alone, key=lambda name: half.peaks[name])
        if (id(half), phase) in self._exact:
            return None
        sure = (1 - margin(False)) * self._hbm_bytes
        return None if phase == "decode" and self.need(half) <= sure else phase

    def learn(self, half: Half, phase: str, size: int, *, refused: bool) -> None:
        """Record the compiler's figure for a phase of a half."""
        self._exact[id(half), phase] = math.inf if refused else size
        self._factors[phase, half.like] = size / half.peaks[phase]

    def learn_plan(self, pair: Pair, plan: Plan) -> None:
        """Record a whole plan that does not fit."""
        alone = max(self.need(pair.update), self.need(pair.rollout))
        if not self.fast and plan.worst.bytes > alone:
            self._beside = max(self._beside, plan.worst.bytes - alone)
        for half in (pair.update, pair.rollout):
            for phase in plan.phases:
                if phase.name in half.peaks:
                    self.learn(half, phase.name, phase.bytes, refused=phase.refused)
        if max(self.need(pair.update), self.need(pair.rollout)) <= self.limit(pair.place):
            self.drop(pair)

    def drop(self, pair: Pair) -> None:
        """Never return this pair again: its settings contradict each other."""
        half = max((pair.update, pair.rollout), key=lambda half: len(half.changes))
        self._exact[id(half), next(iter(half.peaks))] = math.inf

    def _ordinary(self, place: Place) -> bool:
        return place.ordinary and (place.compiled or self.fast)

    def _least_seconds(self) -> float:
        """Seconds of the fastest halves, whatever memory they need."""
        updates = [half.seconds for place in self._places for half in place.updates]
        rollouts = [half.seconds for place in self._places for half in place.simulated]
        return min(updates) + min(rollouts)

    def _best(self, *, ordinary: bool, known: bool = False) -> Pair | None:
        """The fastest pair that fits, among `ordinary` places or among the others; of similarly fast ones, the fewest
        changes.
        """
        found: list[Pair] = []
        for place in self._places:
            if self._ordinary(place) is not ordinary:
                continue
            update = self._fastest(place, place.updates, known=known)
            if update is None:  # whatever memory the rollout needs, because simulating it takes long
                continue
            rollout = self._fastest(place, place.rollouts, known=known)
            if rollout is not None:
                found.append(Pair(place, update, rollout))
        most = (1 + ALIKE) * min((each.seconds for each in found), default=0.0)
        near = [each for each in found if each.seconds <= most]
        return min(near, key=lambda pair: len(pair.changes), default=None)

    def _fastest(self, place: Place, halves: Sequence[Half], *, known: bool) -> Half | None:
        limit = self.limit(place)
        fits = [half for half in halves if self.need(half) <= limit and (not known or self._open(half) is None)]
        most = (1 + ALIKE) * min((half.seconds for half in fits), default=0.0)
        near = [half for half in fits if half.seconds <= most]
        return min(near, key=lambda half: len(half.changes), default=None)


def fastest(halves: Halves) -> Changes | None:
    """The changes that make a run fastest among those that fit, by the closed form; None if nothing fits."""
    pair = Choice(halves.places(), halves.machine.hbm_bytes, fast=True, factors={}).best()
    return None if pair is None else pair.changes


def _faster(outcome: Outcome, other: Outcome) -> bool:
    mine, theirs = outcome.plan.step, other.plan.step
    return mine is not None and theirs is not None and mine.value < WORTH * theirs.value
