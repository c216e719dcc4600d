"""Plans candidates of one run: every search is built on this. No jax.

A case is a machine plus changes to the run's settings. A study plans cases, by the closed form, by traces or with the
compiler, and returns an outcome for each; of some programs it finds only the peak memory. The searches decide which
cases to try, in which order, and what to report: an order of machines, values or single changes (`ranking`), the
largest value that fits (`largest`), or the fastest settings that fit (`fit`).
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from podium.accelerators import Accelerator, find_accelerator
from podium.config.load import Override
from podium.plan.calibration import find_chip
from podium.plan.compiled.compile import CompileProgress, OnProgress, compile_jobs
from podium.plan.compiled.compile_worker import CompiledPhase, Job
from podium.plan.planner import compiling_rank, is_compiled, make_jobs, make_plan
from podium.plan.report.formatting import probe_text, verdict_line
from podium.plan.request.candidate import Case
from podium.plan.request.phase_sizes import Planned
from podium.plan.request.plan_subject import Subject, given
from podium.plan.request.step_calls import Call, largest_calls, step_calls
from podium.plan.request.workload import simulate_rollout
from podium.plan.result import By, Peak, Plan, Seconds
from podium.plan.traced.fast_answer import fast_programs
from podium.plan.traced.trust import trust
from podium.prices import HOUR_S, Price
from podium.run.divisible import check_divisible


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCost:
    """The cost of some steps of a run, excluding compilation, evaluations and checkpoints."""

    steps: int
    chip_hours: Seconds  # hours times chips
    usd: Seconds | None = None  # US dollars; None: the price list has no such chip
    usd_per_chip_hour: float | None = None
    price_source: str | None = None
    price_date: str | None = None


def cost_of(plan: Plan, steps: int, prices: Mapping[str, Price]) -> RunCost | None:
    """The cost of `steps` steps; None if the plan has no seconds."""
    if plan.step is None:
        return None
    on_cpu = plan.accelerator.startswith("cpu-")  # which has no price
    machine = None if on_cpu else find_accelerator(plan.accelerator)
    chip_hours = plan.step * (steps * (machine.chips if machine else plan.devices) / HOUR_S)
    price = prices.get(machine.generation) if machine else None
    if price is None:
        return RunCost(steps=steps, chip_hours=chip_hours)
    return RunCost(
        steps=steps,
        chip_hours=chip_hours,
        usd=chip_hours * price.usd_per_chip_hour,
        usd_per_chip_hour=price.usd_per_chip_hour,
        price_source=price.source,
        price_date=price.date,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The plan of a case, or the reason why it could not be planned."""

    case: Case
    known: Plan | None = None  # None: it cannot be planned
    error: str = ""
    cost: RunCost | None = None
    before: Plan | None = None  # the plan without the changes, made by the same method
    reason: str = ""  # why it has its place in a ranking, or what the changes improve

    @property
    def plan(self) -> Plan:
        """The plan of a case; must not be used if planning failed."""
        assert self.known is not None, self.error
        return self.known

    @property
    def setting(self) -> str:
        """The changes in the form of `--set`, such as `rollout.layout=legacy`."""
        return " ".join(map(str, self.case.changes))

    @property
    def label(self) -> str:
        """The machine and the changes, as text."""
        return f"{self.case.machine.name} {self.setting}".strip()


class Study:
    """Plans cases of one run; shows the compiler's progress on stderr."""

    def __init__(
        self,
        subject: Subject,
        *,
        lengths: str = "gsm8k",
        by: By = "compiler",
        steps: int | None = None,
        prices: Mapping[str, Price] | None = None,
    ) -> None:
        """Prepare without planning anything.

        Args:
            subject: the run.
            lengths: source of prompt and completion lengths, as for `draw_lengths`.
            by: as for `make_plan`; searches order their candidates by the closed form.
            steps: steps to price; None: the run's own number.
            prices: prices by generation of chips; None: outcomes have no cost.
        """
        self.subject, self.lengths = subject, lengths
        self.by: By = by
        self.steps, self.prices = steps, prices
        self._stderr = Console(stderr=True)
        self._defaults: dict[Accelerator, tuple[Override, ...]] = {}
        self._runs: dict[Case, Planned] = {}
        self._largest: dict[Case, dict[str, Call]] = {}

    def defaults(self, machine: Accelerator) -> tuple[Override, ...]:
        """The settings assumed for a machine if the run is a model without a config; otherwise none."""
        if machine not in self._defaults:
            self._defaults[machine] = self.subject.defaults(machine, self.lengths)
        return self._defaults[machine]

    @property
    def fast(self) -> bool:
        """Whether no programs are compiled but those that decide whether a run fits."""
        return self.by != "compiler"

    def given(self, machine: Accelerator) -> frozenset[str]:
        """The settings that the user gave in addition to the configs; searches do not change these."""
        return given(self.subject.load(base=self.defaults(machine)))

    def run(self, case: Case) -> Planned:
        """The run of a case.

        Raises ConfigError if its settings contradict each other, ValueError if they do not fit the machine.
        """
        if case not in self._runs:
            changes = [change.override for change in case.changes]
            found = self.subject.load(changes, base=self.defaults(case.machine))
            self._runs[case] = Planned.of(found.config, case.machine, recipe=found.recipe)
        return self._runs[case]

    def outcomes(self, cases: Iterable[Case], *, closed_form: bool = False, largest: bool = False) -> list[Outcome]:
        """The outcome of each case, as from `of`; an invalid case gets its error."""
        found: list[Outcome] = []
        for case in cases:
            try:
                found.append(self.of(case, closed_form=closed_form, largest=largest))
            except ValueError as error:  # a ConfigError, or slots, heads or a mesh that do not divide over the devices
                text = "; ".join(line.strip() for line in str(error).splitlines()) or repr(error)
                found.append(Outcome(case=case, error=text))
        return found

    def of(self, case: Case, *, closed_form: bool = False, largest: bool = False, whole: Sequence[str] = ()) -> Outcome:
        """The plan of a case with its cost; arguments are those of `plan`.

        Raises:
            ValueError: the case contradicts itself or does not fit its machine.
        """
        plan = self.plan(case, closed_form=closed_form, largest=largest, whole=whole)
        return Outcome(case=case, known=plan, cost=self.cost(case, plan))

    def cost(self, case: Case, plan: Plan) -> RunCost | None:
        """The cost of the requested steps; None if the plan has no seconds or there are no prices."""
        return None if self.prices is None else cost_of(plan, self.steps or self.run(case).config.steps, self.prices)

    def plan(
        self,
        case: Case,
        *,
        closed_form: bool = False,
        largest: bool = False,
        whole: Sequence[str] = (),
        lengths: str | None = None,
    ) -> Plan:
        """Plan a case.

        Args:
            case: what to plan.
            closed_form: use only the closed form, even if the study traces or compiles.
            largest: compile only the largest program of each phase.
            whole: programs to generate machine code for.
            lengths: lengths to plan with instead of the study's; the programs compiled for those are reused.

        Raises:
            ValueError: the settings contradict each other or do not fit the machine's mesh.
        """
        run, drawn = self.run(case), lengths or self.lengths
        check_divisible(run.sizes.spec)
        if closed_form or self.by == "closed_form":
            return make_plan(run, by="closed_form", lengths=drawn)
        traces = self.by == "trace"
        estimated = None if traces or lengths else lambda: self.plan(case, closed_form=True)
        with self._following("tracing" if traces else "planning", case.machine, estimated) as progress:
            return make_plan(run, by=self.by, lengths=drawn, progress=progress, whole=whole, largest=largest)

    # The memory of single programs

    def largest(self, case: Case) -> dict[str, Call]:
        """For each phase, the call that needs most memory by the closed form; `init` is left out, as it has none."""
        if case not in self._largest:
            run = self.run(case).sizes
            overlap = find_chip(run.accelerator.generation) is not None  # as in a plan, whose programs these then are
            drawn = run.draw_lengths(self.lengths)
            workload = simulate_rollout(drawn, run.rollout, shards=run.rollout_shards, overlap=overlap)
            self._largest[case] = largest_calls(step_calls(run, workload, micro_batches=1))
        return self._largest[case]

    def moved(self, cases: Sequence[Case]) -> tuple[str, ...]:
        """The phases whose memory differs between cases, slowest to compile first; all phases if none differs."""
        kept = [
            {name: call.closed_form and call.closed_form.parts for name, call in self.largest(case).items()}
            for case in cases
        ]
        moved = [phase for phase in kept[0] if any(each.get(phase) != kept[0][phase] for each in kept)]
        return tuple(sorted(moved or kept[0], key=compiling_rank))

    def programs(self, case: Case, phases: Iterable[str]) -> dict[str, float]:
        """The largest program of each phase, with the cache blocks that its attention reads."""
        found = self.largest(case)
        return {found[phase].program: found[phase].blocks for phase in phases if phase in found}

    def estimated_peak(self, case: Case, phases: Sequence[str]) -> Peak:
        """The peak memory of a case in these phases, by the closed form."""
        forms = [call.closed_form for name, call in self.largest(case).items() if name in phases and call.closed_form]
        largest = max(forms, key=lambda form: form.total)
        return Peak(phase=largest.name, bytes=largest.total, refused=False, compiled=False)

    def traced_peak(self, case: Case, phases: Sequence[str]) -> Peak | None:
        """The peak memory of a case in these phases as they are traced; None if none of them can be read."""
        planned = self.run(case)
        with self._following("tracing", case.machine) as progress:
            jobs = make_jobs(planned, self.programs(case, phases))
            found = fast_programs(planned.sizes, jobs, may_compile=False, progress=progress)
        peaks = [(each.device_bytes, name.partition(":")[0]) for name, each in found.items()]
        if not peaks:
            return None
        size, phase = max(peaks)
        high = int(trust(planned.sizes, phase).high * size)
        return Peak(phase=phase, bytes=size, refused=False, compiled=False, high_bytes=high)

    def peaks(self, asked: Sequence[tuple[Case, Sequence[str]]]) -> list[Peak]:
        """The peak memory of each case in its phases, each printed; where they are compiled, two programs at a time.

        All cases are of one machine.
        """
        machine = asked[0][0].machine
        if self.by == "trace":
            found = [self.traced_peak(case, phases) or self.estimated_peak(case, phases) for case, phases in asked]
        elif self.by == "closed_form" or not all(is_compiled(self.run(case).sizes) for case, _ in asked):
            found = [self.estimated_peak(case, phases) for case, phases in asked]
        else:
            jobs = [make_jobs(self.run(case), self.programs(case, phases)) for case, phases in asked]
            with self._following("compiling", machine) as progress:
                compiled = iter(compile_jobs(list(itertools.chain(*jobs)), progress=progress))
            found = [_peak(own, list(itertools.islice(compiled, len(own)))) for own in jobs]
        for (case, _), peak in zip(asked, found, strict=True):
            self.say(f"{' '.join(map(str, case.changes)) or 'unchanged'}: {probe_text(peak, machine.hbm_bytes)}")
        return found

    # What the user sees meanwhile

    def say(self, text: str, style: str = "dim") -> None:
        """Print a line on stderr."""
        self._stderr.print(Text(text, style=style), soft_wrap=True)

    @contextlib.contextmanager
    def _following(
        self, verb: str, machine: Accelerator, estimated: Callable[[], Plan] | None = None
    ) -> Iterator[OnProgress]:
        """A callback that shows compilations as they proceed.

        `estimated` makes the closed-form plan to print while the first program compiles; None: print no estimate.
        """
        running: dict[str, float] = {}
        said = estimated is None

        def tell(progress: CompileProgress) -> None:
            nonlocal said
            counts = f"{progress.done} of {progress.total}"
            if progress.state == "compiling":
                if estimated and not said:
                    said = True
                    self.say(f"estimate while compiling: {verdict_line(estimated())}")
                running[progress.phase] = progress.seconds
            elif progress.state == "compiled":
                running.pop(progress.phase, None)
                said = True
                if estimated:
                    self.say(f"compiled {progress.phase} for {machine.name} in {progress.seconds:.0f} s ({counts})")
            phases = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in running.items())
            status.update(f"compiling for {machine.name}: {phases} ({counts} done)")

        with self._stderr.status(f"{verb} for {machine.name}") as status:
            yield tell


def _peak(jobs: Sequence[Job], compiled: Sequence[CompiledPhase]) -> Peak:
    """The peak of the largest program, plus the code of all of them."""
    job, largest = max(zip(jobs, compiled, strict=True), key=lambda pair: pair[1].device_bytes)
    return Peak(
        phase=job.phase.partition(":")[0],
        bytes=largest.device_bytes + sum(each.memory.code for each in compiled),
        refused=any(each.refused for each in compiled),
        compiled=True,
    )
