"""Traces a run's programs for a plan, and keeps what was found on disk. No jax.

The key of what is kept covers everything that can change it, as that of compiled programs: the same plan again needs no
jax. The cost of a program depends on how many blocks of the cache its attention reads, which only a step's lengths
tell, so what is kept counts loops, and `as_compiled` gives them their rounds.
"""

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from podium.files import write_atomically
from podium.hlo.cost import Work
from podium.hlo.memory import Memory
from podium.plan.compiled.compile import CompilerError, answer_key, cache_folder, worker_environment
from podium.plan.compiled.compile_worker import (
    ATTENTION,
    ONE_ROUND,
    CompiledPhase,
    Job,
    LoopedWork,
    attention_rounds,
    without_place,
)
from podium.plan.traced.trace_worker import JOBS, RESULTS
from podium.plan.traced.traced_phase import TracedPhase

TRACED = TypeAdapter[TracedPhase | str](TracedPhase | str)


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
        whole=False,
        traced=True,
    )
