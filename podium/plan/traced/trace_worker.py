"""Traces programs of a run in a process of its own: `python -m podium.plan.traced.trace_worker JOBS RESULT`.

jax is imported here, for the CPU alone; the process that plans needs none. One process traces all programs of a plan.
"""

import collections
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from podium.config.errors import raised_here
from podium.files import write_atomically
from podium.hlo.memory import OTHER
from podium.plan.compiled.array_names import SCOPES
from podium.plan.compiled.compile_worker import KEPT_ARRAYS, Job, skipped_scopes
from podium.plan.result import LargeArray
from podium.plan.traced.traced_phase import TracedPhase
from podium.run.machine import Machine
from podium.run.resolve import resolve

if TYPE_CHECKING:  # the environment must be set before jax is imported
    from podium.plan.compiled.phases import PhaseProgram
    from podium.plan.traced.lifetimes import TracedMemory
    from podium.plan.traced.lowered_program import Array

JOBS = TypeAdapter[list[Job]](list[Job])
RESULTS = TypeAdapter[list[TracedPhase | str]](list[TracedPhase | str])
"""In the order of the jobs; a str says why a program cannot be traced or read."""


def main(jobs_file: str, result_file: str) -> None:
    """Trace the programs of one run; unexpected errors end with a traceback on stderr and exit status 1."""
    jobs = JOBS.validate_json(Path(jobs_file).read_bytes())
    write_atomically(Path(result_file), RESULTS.dump_json(trace_programs(jobs)))


def trace_programs(jobs: list[Job]) -> list[TracedPhase | str]:
    """Trace programs of one run on one machine, in the order of the jobs."""
    from podium.plan.traced.absent_devices import absent_programs, trace_memory

    job = jobs[0]
    try:
        spec = resolve(job.config, job.decoder, Machine.planned(job.accelerator))
        programs = absent_programs(spec, job.accelerator)
    except ValueError as error:
        if not raised_here(error):
            raise
        return [str(error)] * len(jobs)
    found: list[TracedPhase | str] = []
    for each in jobs:
        program = programs[each.phase]
        try:
            memory = trace_memory(program, job.accelerator, skipped=skipped_scopes(spec.rollout.settings))
        except ValueError as error:
            if not raised_here(error):
                raise
            found.append(str(error))
        else:
            found.append(_phase(program, memory))
    return found


def _phase(program: "PhaseProgram", memory: "TracedMemory") -> TracedPhase:
    """A traced program with names for what takes its memory."""
    named = collections.Counter(program.own)
    named["batch"] += memory.arguments - named.total()
    arrays = [LargeArray(name=name, shape="", bytes=size) for name, size in named.items() if size]
    arrays += [LargeArray(name=_name(array), shape=repr(array), bytes=size) for size, array in memory.largest]
    temporary: collections.Counter[str] = collections.Counter()
    for size, array in memory.largest:
        temporary[_name(array)] += size
    # What is written over what dies counts once, so the arrays alive may add up to more than the bytes in use.
    share = min(1.0, memory.temporary / max(1, temporary.total()))
    named.update({name: int(share * size) for name, size in temporary.items()})
    named[OTHER] += memory.peak - named.total()
    parts = {name: size for name, size in named.items() if size > 0}
    largest = sorted(arrays, key=lambda array: -array.bytes)[:KEPT_ARRAYS]
    return TracedPhase(residents=program.residents, parts=parts, largest=tuple(largest), works=memory.works)


def _name(array: "Array") -> str:
    """The name of an array by the innermost scope in which it is computed, as for those of compiled programs."""
    scopes = re.findall(r"\w+", array.maker.source) if array.maker else ()
    return next((SCOPES[scope] for scope in reversed(scopes) if scope in SCOPES), OTHER)


if __name__ == "__main__":
    main(*sys.argv[1:])
