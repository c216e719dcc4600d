"""One compilation in a process of its own: `python -m podium.plan.worker JOB RESULT PID`, PID being its parent's.

The compiler's environment must be there before jax is imported, and its memory is given back when the process ends.
What is compiled stays on disk by what it is: the same program for the same devices is never compiled twice, while its
text is read anew each time.
"""

import dataclasses
import gzip
import hashlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from podium.accelerators import Accelerator
from podium.config.schema import Config
from podium.files import write_atomically
from podium.hlo.cost import ProgramCost, Work, unknown_loops, walk
from podium.hlo.memory import OTHER, Memory, OutOfMemory, largest, measure, parse_out_of_memory
from podium.hlo.text import Module, parse
from podium.models.architecture import DecoderConfig
from podium.plan.array_names import names_of
from podium.plan.result import LargeArray
from podium.plan.topology import compiler_versions, topology_devices

TPU_OPTIONS = {"xla_tpu_no_crash_on_oom": "true"}  # an analysis also of what does not fit: by how much, and of what
WATCH_S = 1.0
KEPT_ARRAYS = 12  # how many of the arrays at the peak are kept, the largest, to be shown


@dataclasses.dataclass(frozen=True)
class LoopedWork:
    """Work that costs the same each time, and how often it is done."""

    work: Work  # of one time, without a name
    once: float  # times per call of the program, however often its loop runs
    each: float  # times more per round of the loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledPhase:
    """One program of a run, compiled for a device."""

    residents: Mapping[str, int]  # bytes in use beside the program's own arguments
    memory: Memory
    parts: Mapping[str, int]  # bytes at the program's peak by our names; they add up to `memory.peak`
    largest: tuple[LargeArray, ...]
    work: tuple[LoopedWork, ...]
    compile_s: float

    @property
    def device_bytes(self) -> int:
        """Bytes of a device in use while the program runs, but for code."""
        return sum(self.residents.values()) + self.memory.peak

    def cost(self, rounds: float) -> ProgramCost:
        """The cost of one call in which the loop runs so often."""
        works = ((each.work, each.once + rounds * each.each) for each in self.work)
        return ProgramCost(tuple(dataclasses.replace(work, times=times) for work, times in works if times))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One program to compile."""

    phase: str
    config: Config
    decoder: DecoderConfig
    accelerator: Accelerator
    programs: Path  # folder of compiled programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Built:
    """A compiled program as it is kept; its text lies beside it."""

    memory: Memory
    refusal: OutOfMemory | None  # where the compiler would not make it for want of memory; there is no text then
    compile_s: float


JOB, BUILT = TypeAdapter(Job), TypeAdapter(_Built)
JOB_RESULT = TypeAdapter[CompiledPhase | str](CompiledPhase | str)  # a text: why the config cannot be lowered


def main(job_file: str, result_file: str, parent: str) -> None:
    """Do one job; an error that is no refusal is a traceback on stderr, with exit status 1."""
    threading.Thread(target=_end_with_parent, args=(int(parent),), daemon=True).start()
    from podium.plan.phases import phase_programs
    from podium.sharding import make_mesh

    job = JOB.validate_json(Path(job_file).read_bytes())
    try:
        mesh = make_mesh(job.config.mesh, _devices(job.accelerator))
        program = phase_programs(job.config, job.decoder, mesh)[job.phase]
        lowered = program.lower()
    except ValueError as error:
        if not _raised_here(error):
            raise
        result = str(error)
    else:
        result = _finish(job, lowered, program.residents, dict(mesh.shape))
    write_atomically(Path(result_file), JOB_RESULT.dump_json(result))


def _finish(job: Job, lowered: Any, residents: Mapping[str, int], mesh: Mapping[str, int]) -> CompiledPhase:
    """Compile what was lowered, unless that was done before, and read what came of it."""
    built, text = _build(lowered, job)
    if built.refusal:
        parts, work = {"program": built.refusal.needed}, ()
        arrays = [LargeArray(name=each.source, shape=each.shape, bytes=each.size) for each in built.refusal.largest]
    else:
        module = parse(text)
        parts, arrays = named_memory(module, built.memory.peak)
        work = looped_work(module, mesh)
    known: dict[str, Any] = {"memory": built.memory, "compile_s": built.compile_s, "residents": residents}
    return CompiledPhase(parts=parts, largest=tuple(arrays[:KEPT_ARRAYS]), work=work, **known)


def looped_work(module: Module, mesh: Mapping[str, int]) -> tuple[LoopedWork, ...]:
    """The cost of a program, split by whether it is repeated with the program's own loop; equal work together."""
    loops = unknown_loops(module)
    one, two = (walk(module, mesh, trips=dict.fromkeys(loops, rounds)).works for rounds in (1, 2))
    times: dict[Work, tuple[float, float]] = {}
    for first, second in zip(one, two, strict=True):
        work = dataclasses.replace(first, name="", source="", times=0.0)
        once, each = times.get(work, (0.0, 0.0))
        times[work] = (once + 2 * first.times - second.times, each + second.times - first.times)
    return tuple(LoopedWork(work, once, each) for work, (once, each) in times.items())


def named_memory(module: Module, peak: int) -> tuple[dict[str, int], list[LargeArray]]:
    """The bytes at a program's peak by our names, and its arrays, largest first.

    What lives at the peak is found again from the program's text; where the compiler's own figure is another, the
    difference goes to `other`, or is taken from all in proportion.
    """
    found = largest(module, names_of(module.name))
    parts = dict(found.by_name)
    if (beyond := peak - found.size) > 0:
        parts[OTHER] = parts.get(OTHER, 0) + beyond
    elif beyond < 0:
        parts = {name: size * peak // found.size for name, size in parts.items()}
        parts[OTHER] = parts.get(OTHER, 0) + peak - sum(parts.values())
    arrays = [LargeArray(name=each.name, shape=each.shape, bytes=each.size) for each in found.buffers]
    return {name: size for name, size in parts.items() if size}, arrays


def _raised_here(error: Exception) -> bool:
    """Whether Podium raised it, as it does for errors in a config."""
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(innermost).is_relative_to(Path(__file__).parents[1])


def _devices(accelerator: Accelerator) -> list[Any]:
    """What to compile for; a CPU's devices are this machine's."""
    if accelerator.generation != "cpu":
        return topology_devices(accelerator)
    import jax

    jax.config.update("jax_num_cpu_devices", accelerator.devices)
    return jax.devices()


def _build(lowered: Any, job: Job) -> tuple[_Built, str]:
    """The compiled program and its text, from disk if the same was compiled before."""
    on_cpu = job.accelerator.generation == "cpu"
    options = {} if on_cpu else TPU_OPTIONS
    target = [job.accelerator.topology, job.accelerator.topology_options, job.accelerator.devices]
    key = key_of([lowered.as_text(), options, target], job.accelerator)
    record, module = job.programs / f"{key}.json", job.programs / f"{key}.hlo.gz"
    if record.exists():
        return BUILT.validate_json(record.read_bytes()), gzip.decompress(module.read_bytes()).decode()
    start = time.perf_counter()
    memory, refusal, text = _compile(lowered, options, on_cpu)
    built = _Built(memory=memory, refusal=refusal, compile_s=time.perf_counter() - start)
    job.programs.mkdir(parents=True, exist_ok=True)
    write_atomically(module, gzip.compress(text.encode(), 6))
    write_atomically(record, BUILT.dump_json(built))  # last: what has it is whole
    return built, text


def _compile(lowered: Any, options: dict[str, str], on_cpu: bool) -> tuple[Memory, OutOfMemory | None, str]:
    """The program's memory, the compiler's refusal of it, if any, and its text."""
    import jax

    try:
        compiled = lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        refusal = parse_out_of_memory(str(error))
        if refusal is None and options:  # with ours the compiler fails at programs far too large for a v4
            return _compile(lowered, {}, on_cpu)
        if refusal is None:
            raise
        return Memory(peak=refusal.needed, code=0), refusal, ""
    return measure(compiled, on_cpu=on_cpu), None, compiled.as_text()


def key_of(decisive: Sequence[Any], accelerator: Accelerator) -> str:
    """The name under which something is kept: a hash of what decides it, the compiler's versions and flags included."""
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    text = json.dumps([*decisive, compiler_versions(accelerator), flags], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _end_with_parent(parent: int) -> None:
    """End with the process that wants the result: a compiler cannot be asked to stop."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
