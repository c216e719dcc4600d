"""`--fit`: find the fastest settings that fit, first without changing what the run learns.

The closed form orders pairs of an update and a rollout (`podium.plan.search.fit_candidates`). The first of each kind is
traced, which corrects the estimates of all similar ones. Then the compiler judges: of the best pair only the update is
compiled, and the decode if its estimate leaves it in doubt. Its figure corrects similar estimates too, and the next
pair is tried until one fits; then the whole run is planned. No jax.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeGuard, get_args

from podium.config.errors import ConfigError
from podium.config.lora import Base, LoraConfig
from podium.config.optimizer import OPTIMIZER_COPIES
from podium.plan.compiled.compile import CompilerError
from podium.plan.request.candidate import Case, Change, Changes
from podium.plan.result import Plan
from podium.plan.search.fit_candidates import WORTH, Choice, Half, Halves, Pair
from podium.plan.search.study import Outcome, Study

MOST_PROGRAMS = 6  # programs that are compiled alone
MOST_PLANS = 2  # whole plans; a second one if a program that was not compiled alone turns out too large
IN_FLIGHT = 1.5  # prompts in flight that are offered, relative to those of a step


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
    now: Case
    """The run as it is."""
    fixed: Collection[str]
    """Settings that keep their values."""
    tried: list[Tried] = dataclasses.field(default_factory=list)
    factors: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    """Traced or compiled bytes over estimated ones, by phase and kind of half, also of settings with other changes."""

    def find(self, *, all_others: bool) -> Fitted:
        """Find the settings; with `all_others`, faster ones that change what is learned too, even if others fit.

        Raises:
            ValueError: the run contradicts itself or does not fit the machine's mesh, or the lengths are invalid.
            CompilerError: the compiler failed.
        """
        before = self.study.of(self.now, closed_form=True).plan
        choice = self._choice(self.now)
        best, estimated = self._settled(choice, self.now), choice.estimated
        others: list[Outcome] = []
        learned: Changes = ()
        for changes in self._changes_of_learning(smaller=not _fits(best)) if all_others or not _fits(best) else ():
            case = self.now.but(*changes)
            try:
                choice = self._choice(case)
                found = self._estimated(choice, case)
            except ValueError:  # the changes contradict other settings, or the model
                continue
            estimated += choice.estimated
            if found is not None and (not _fits(best) or learned or _faster(found, best)):
                others.append(found)
            if not _fits(best):
                other = self._settled(choice, case)
                if best is None or _fits(other):
                    best, learned = other, changes
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
        config = self.study.run(self.now).config
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

    def _choice(self, case: Case) -> Choice:
        """The candidates for a case. Raises ValueError if it contradicts itself."""
        halves = Halves(self.study.run(case), self.study.lengths, self.fixed)
        fast = self.study.fast
        return Choice(halves.places(), case.machine.hbm_bytes, fast=fast, factors=self.factors)

    def _estimated(self, choice: Choice, case: Case) -> Outcome | None:
        """The best settings by the closed form; None if none fit."""
        while (pair := choice.best()) is not None:
            (found,) = self.study.outcomes([case.but(*case.changes, *pair.changes)], closed_form=True)
            if found.known is None:  # the settings contradict each other
                choice.drop(pair)
            elif found.plan.verdict == "fits" or not choice.fast:
                return found
            else:
                choice.learn_plan(pair, found.plan)
        return None

    def _settled(self, choice: Choice, case: Case) -> Outcome | None:
        """The best settings, compiled unless the study is fast; None if none fit."""
        programs = plans = 0
        close: Outcome | None = None
        traces = self.study.by != "closed_form"
        while plans < MOST_PLANS and (pair := choice.best(hopeful=traces)) is not None:
            changed = case.but(*case.changes, *pair.changes)
            if traces and (unseen := choice.unseen(pair)):
                self._trace(choice, changed, unseen)
                continue
            open_phases = choice.open_phases(pair) if programs < MOST_PROGRAMS else {}
            if open_phases:
                programs += len(open_phases)
                self._compile(choice, changed, pair, open_phases)
                continue
            (found,) = self.study.outcomes([changed], largest=True)
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

    def _trace(self, choice: Choice, case: Case, halves: Mapping[str, Half]) -> None:
        """Correct the estimates of kinds of halves by the traces of these."""
        for phase, half in halves.items():
            try:
                peak = self.study.traced_peak(case, [phase])
            except (ConfigError, CompilerError):  # what is wrong with the case is told where it is planned as a whole
                peak = None
            choice.correct(half, phase, peak and peak.bytes)

    def _compile(self, choice: Choice, case: Case, pair: Pair, halves: Mapping[str, Half]) -> None:
        """Compile single programs of a pair, and record what was found."""
        try:
            peaks = self.study.peaks([(case, (phase,)) for phase in halves])
        except ConfigError:
            choice.drop(pair)
            return
        for (phase, half), peak in zip(halves.items(), peaks, strict=True):
            choice.learn(half, phase, peak.bytes, refused=peak.refused)
            fits = choice.need(half) <= choice.limit(pair.place)
            tried = Tried(case.changes, phase, bytes=peak.bytes, fits=fits, seconds=pair.seconds, made_by=peak.made_by)
            self.tried.append(tried)

    def _note(self, found: Outcome) -> None:
        """Record a whole plan among the settings that were tried."""
        plan, worst, changes = found.plan, found.plan.worst, found.case.changes
        made_by = {"estimated": "closed form", "traced": "trace", "compiled": "whole plan"}[plan.made]
        seconds = plan.step.value if plan.step else 0.0
        fits = plan.verdict == "fits"
        self.tried.append(Tried(changes, worst.name, bytes=worst.bytes, fits=fits, seconds=seconds, made_by=made_by))

    def _undone(self, best: Outcome) -> list[Outcome]:
        """For each change, the best settings without it, by the closed form; with the best ones as the plan before."""
        changes = best.case.changes
        without = [[each for each in changes if each is not undone] for undone in changes]
        (whole,) = self.study.outcomes([best.case], closed_form=True)
        found = self.study.outcomes((self.now.but(*kept) for kept in without), closed_form=True)
        return [dataclasses.replace(each, before=whole.known) for each in found]


def _fits(outcome: Outcome | None) -> TypeGuard[Outcome]:
    """Whether there are settings, and not too close to the memory to call."""
    return outcome is not None and outcome.plan.verdict == "fits"


def _faster(outcome: Outcome, other: Outcome) -> bool:
    mine, theirs = outcome.plan.step, other.plan.step
    return mine is not None and theirs is not None and mine.value < WORTH * theirs.value
