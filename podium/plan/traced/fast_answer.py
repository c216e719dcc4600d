"""The fast answer: a run's programs as traced, and compiled where their trace leaves a doubt. No jax.

Traces are made in another process and kept on disk. The key of what is kept covers everything that can change it, as
that of compiled programs: the same plan again needs no jax. The cost of a program depends on how many blocks of the
cache its attention reads, which only a step's lengths tell, so what is kept counts loops, and `as_compiled` gives them
their rounds.
"""

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from podium.config.attention_blocks import cache_block_pages
from podium.files import write_atomically
from podium.hlo.cost import Work
from podium.hlo.memory import Memory
from podium.plan.compiled.compile import (
    CompilerError,
    OnProgress,
    answer_key,
    cache_folder,
    compile_phases,
    worker_environment,
)
from podium.plan.compiled.compile_worker import (
    ATTENTION,
    ONE_ROUND,
    CompiledPhase,
    Job,
    LoopedWork,
    attention_rounds,
    without_place,
)
from podium.plan.request.phase_sizes import RunSizes
from podium.plan.request.topology import check_compiler
from podium.plan.traced.trace_worker import JOBS, RESULTS
from podium.plan.traced.traced_phase import TracedPhase
from podium.plan.traced.trust import trust

TRACED = TypeAdapter[TracedPhase | str](TracedPhase | str)


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


def trace_phases(jobs: Sequence[Job], *, folder: Path | None = None) -> list[TracedPhase | str]:
    """Trace programs of one run on one machine; a str says why a program could not be read.

    Args:
        jobs: the programs; `blocks` changes nothing.
        folder: where what was found is kept; unset: the user's cache folder.

    Raises:
        CompilerError: a program could not be traced.
    """
    folder = (folder or cache_folder()) / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    same = [dataclasses.replace(job, blocks=1.0, whole=False) for job in jobs]
    paths = [folder / f"{answer_key(job)}.json" for job in same]
    missing = [job for job, path in zip(same, paths, strict=True) if not path.exists()]
    if missing:
        found = iter(_trace(missing))
        for path in paths:
            if not path.exists():
                write_atomically(path, TRACED.dump_json(next(found)))
    return [TRACED.validate_json(path.read_bytes()) for path in paths]


def _trace(jobs: list[Job]) -> list[TracedPhase | str]:
    """Trace programs in another process, which jax is imported in."""
    with tempfile.TemporaryDirectory(prefix="podium-trace-") as files:
        given, result = Path(files, "jobs.json"), Path(files, "result.json")
        given.write_bytes(JOBS.dump_json(jobs))
        command = [sys.executable, "-m", "podium.plan.traced.trace_worker", given, result]
        ran = subprocess.run(
            command, env=worker_environment(jobs[0].accelerator), stdin=subprocess.DEVNULL, capture_output=True
        )
        if ran.returncode:
            last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
            names = ", ".join(job.phase for job in jobs)
            raise CompilerError(f"tracing {names} for {jobs[0].accelerator.name} failed: {last[0][:300]}")
        return RESULTS.validate_json(result.read_bytes())


def as_compiled(traced: TracedPhase, blocks: float, block_pages: int) -> CompiledPhase:
    """A traced program in the form of a compiled one; attention reads `blocks` blocks of `block_pages` pages."""
    times: dict[tuple[Work, bool], tuple[float, float]] = {}
    for each in traced.works:
        count, repeated = each.times, False
        for loop in each.loops:
            if ATTENTION in f"{loop}/":
                count *= attention_rounds(loop, blocks, block_pages)
            elif not any(scope in loop for scope in ONE_ROUND):
                repeated = True
        key = without_place(each.work, "", blocks, block_pages)
        once, again = times.get(key, (0.0, 0.0))
        times[key] = (once, again + count) if repeated else (once + count, again)
    return CompiledPhase(
        residents=traced.residents,
        memory=Memory(peak=sum(traced.parts.values()), code=0),
        parts=traced.parts,
        largest=traced.largest,
        work=tuple(LoopedWork(work, once, again, attends) for (work, attends), (once, again) in times.items()),
        compile_s=0.0,
        traced=True,
    )
