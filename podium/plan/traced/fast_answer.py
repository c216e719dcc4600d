"""The fast answer: a run's programs as traced, and compiled where their trace leaves a doubt. No jax."""

from collections.abc import Mapping, Sequence

from podium.config.attention_blocks import cache_block_pages
from podium.plan.compiled.compile import OnProgress, compile_phases
from podium.plan.compiled.compile_worker import CompiledPhase, Job
from podium.plan.request.phase_sizes import RunSizes
from podium.plan.request.topology import check_compiler
from podium.plan.traced.trace_process import as_compiled, trace_phases
from podium.plan.traced.trust import trust


def fast_programs(
    run: RunSizes, jobs: Sequence[Job], *, may_compile: bool, progress: OnProgress | None = None
) -> dict[str, CompiledPhase]:
    """Programs by name, in the form of compiled ones; those that could not be read are left out.

    Args:
        run: the sizes of the run.
        jobs: its programs.
        may_compile: whether programs for this machine can be compiled where there is none; then those are that decide
            whether the run fits, if a compiler is installed.
        progress: as for `compile_phases`.

    Raises:
        CompilerError: a program could not be traced or compiled.
    """
    pages = cache_block_pages(run.rollout.page_tokens, run.platform)
    pairs = zip(jobs, trace_phases(jobs), strict=True)
    found = {job.phase: as_compiled(each, job.blocks, pages) for job, each in pairs if not isinstance(each, str)}
    open_jobs = [job for job in jobs if job.phase in _open(run, found)]
    if may_compile and open_jobs and _has_compiler(run):
        found |= compile_phases(open_jobs, progress=progress)
    return found


def _open(run: RunSizes, traced: Mapping[str, CompiledPhase]) -> set[str]:
    """The programs whose trace does not tell whether they fit, and whose kind is near enough to the compiler's figure
    for the answer to matter; none if another program certainly does not fit.
    """
    limit, found = run.accelerator.hbm_bytes, set[str]()
    for name, program in traced.items():
        known = trust(run, name.partition(":")[0])
        if known.low * program.device_bytes > limit:
            return set()
        if known.near and known.high * program.device_bytes >= limit:
            found.add(name)
    return found


def _has_compiler(run: RunSizes) -> bool:
    try:
        check_compiler(run.accelerator)
    except ValueError:
        return False
    return True
