"""The memory of runs that differ in one setting; compiles only the programs that the setting changes.

The closed form tells which programs these are; the search then makes a full plan of its result.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from podium.plan.calibration import find_chip
from podium.plan.compiled.compile import OnProgress, compile_jobs
from podium.plan.compiled.compile_worker import CompiledPhase, Job
from podium.plan.planner import compiling_rank, is_compiled, make_jobs
from podium.plan.request.phase_sizes import Planned
from podium.plan.request.step_calls import Call, largest_calls, step_calls
from podium.plan.request.workload import simulate_rollout
from podium.plan.result import Peak


@dataclasses.dataclass(frozen=True)
class Prober:
    """Finds the peak memory of runs."""

    lengths: str
    fast: bool  # use only the closed form
    progress: OnProgress | None = None

    def phases(self, runs: Sequence[Planned]) -> tuple[str, ...]:
        """The phases whose memory differs between runs, slowest to compile first; all phases if none differs."""
        kept = [{call.phase: call.closed_form and call.closed_form.parts for call in self.largest(run)} for run in runs]
        moved = [phase for phase in kept[0] if any(each.get(phase) != kept[0][phase] for each in kept)]
        return tuple(sorted(moved or kept[0], key=compiling_rank))

    def programs(self, run: Planned, phases: Iterable[str]) -> dict[str, float]:
        """The largest program of each phase, with the cache blocks that its attention reads."""
        largest = {call.phase: call for call in self.largest(run)}
        return {largest[phase].program: largest[phase].blocks for phase in phases if phase in largest}

    def __call__(self, runs: Sequence[Planned], phases: Sequence[str]) -> list[Peak]:
        """The peak memory of each run in these phases; compiles two programs at a time."""
        if self.fast or not all(is_compiled(run.sizes) for run in runs):
            return [self.estimated(run, phases) for run in runs]
        jobs = [make_jobs(run, self.programs(run, phases)) for run in runs]
        compiled = iter(compile_jobs(list(itertools.chain(*jobs)), progress=self.progress))
        return [_peak(own, list(itertools.islice(compiled, len(own)))) for own in jobs]

    def each(self, run: Planned, phases: Sequence[str]) -> list[Peak]:
        """The peak memory of each of these phases; compiles two programs at a time."""
        jobs = make_jobs(run, self.programs(run, phases))
        return [
            _peak([job], [found]) for job, found in zip(jobs, compile_jobs(jobs, progress=self.progress), strict=True)
        ]

    def estimated(self, run: Planned, phases: Sequence[str]) -> Peak:
        """The peak memory of a run in these phases, by the closed form."""
        forms = [call.closed_form for call in self.largest(run) if call.phase in phases and call.closed_form]
        largest = max(forms, key=lambda form: form.total)
        return Peak(phase=largest.name, bytes=largest.total, refused=False, compiled=False)

    def largest(self, planned: Planned) -> list[Call]:
        """The call of each phase that needs most memory by the closed form; `init` is left out, as it has none."""
        run = planned.sizes
        overlap = find_chip(run.accelerator.generation) is not None  # as in a plan, whose programs these then are
        drawn = run.draw_lengths(self.lengths)
        workload = simulate_rollout(drawn, run.rollout, shards=run.rollout_shards, overlap=overlap)
        return list(largest_calls(step_calls(run, workload, micro_batches=1)).values())


def _peak(jobs: Sequence[Job], compiled: Sequence[CompiledPhase]) -> Peak:
    """The peak of the largest program, plus the code of all of them."""
    job, largest = max(zip(jobs, compiled, strict=True), key=lambda pair: pair[1].device_bytes)
    return Peak(
        phase=job.phase.partition(":")[0],
        bytes=largest.device_bytes + sum(each.memory.code for each in compiled),
        refused=any(each.refused for each in compiled),
        compiled=True,
    )
