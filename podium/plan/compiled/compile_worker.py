"""Compiles one program in its own process: `python -m podium.plan.compiled.compile_worker JOB RESULT PARENT_PID`.

The compiler's environment must be set before jax is imported, and its memory is released when the process ends.
Compiled programs are cached by content: the same program for the same devices is compiled only once, while its text is
analysed again each time.
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
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

import podium.hlo
from podium.accelerators import Accelerator
from podium.compiler import compiler_options, engine_options, hide_plugin_errors
from podium.config.attention_blocks import cache_block_pages, window_blocks, window_reach
from podium.config.errors import raised_here
from podium.config.mesh import COPIES, MeshSizes, mesh_text
from podium.config.schema import Config, RolloutConfig
from podium.files import write_atomically
from podium.hlo.cost import ProgramCost, Work, unknown_loops, walk
from podium.hlo.doubts import doubts
from podium.hlo.hlo_text import Module, parse
from podium.hlo.memory import BETWEEN, Memory, largest, measure
from podium.hlo.moves import moves
from podium.models.files.decoder_json import StoredDecoder
from podium.plan.compiled.array_names import names_of
from podium.plan.compiled.tpu_compile import TpuProgram, compile_tpu, counted_by_compiler
from podium.plan.request.step_calls import unshaped
from podium.plan.request.topology import compiler_versions, target_of, topology_devices
from podium.plan.result import LargeArray, calibration_kind
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.run.run_spec import RunSpec

if TYPE_CHECKING:  # the compiler's environment must be set before jax is imported
    import jax

    from podium.sharding import Device

WATCH_S = 1.0
NO_TILES = "Couldn't find output tile sizes"  # XLA's error for a product that none of its own kernels suits
ATTENTION = "/scores/"  # occurs in the source of attention's loop over cache blocks
ONE_ROUND = ("/optimizer/", "/windows/")
"""Parts of the source paths of loops that run once: those that fetch a parameter's moments, and those over windows of
experts' rows, as long as no device's experts get twice as many rows as others'."""
HLO = Path(podium.hlo.__file__).parent
UNREADABLE = (ValueError, LookupError, AssertionError, AttributeError, TypeError, StopIteration)
"""The exceptions that reading a text of unknown grammar raises."""
WAY_OUT = "take the versions of jax and libtpu in constraints.txt, or plan with --fast"
"""The way out where a text is not of the grammar that `podium.hlo` knows."""
KEPT_ARRAYS = 12  # number of largest arrays at the peak to keep for display


@dataclasses.dataclass(frozen=True)
class LoopedWork:
    """A piece of work with fixed cost, and how often it is done."""

    work: Work  # one execution; named by the description of `podium.hlo.moves`, if any
    once: float  # executions per call of the program, whatever its loop count
    each: float  # further executions per round of the loop
    attends: bool = False  # whether it is an attention kernel, which skips blocks without visible pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledPhase:
    """One program of a run, compiled for a device."""

    residents: Mapping[str, int]  # bytes in use beside the program's own arguments
    memory: Memory
    parts: Mapping[str, int]  # bytes at the program's peak by kind of array; they add up to `memory.peak`
    largest: tuple[LargeArray, ...]
    work: tuple[LoopedWork, ...]
    compile_s: float
    refused: bool = False  # whether the compiler rejects it even with nothing beside it
    doubts: tuple[str, ...] = ()  # disagreements between the reader of its text and the compiler
    traced_flops: float = 0.0  # operations of the program as traced; 0 if they were not counted
    traced: bool = False  # whether it was only traced, not compiled
    stand_in: bool = False  # whether it is a larger program of its phase, with its work scaled

    @property
    def device_bytes(self) -> int:
        """Bytes of a device in use while the program runs, excluding code."""
        return sum(self.residents.values()) + self.memory.peak

    def cost(self, rounds: float, attended: float = 1.0) -> ProgramCost:
        """The cost of a call with `rounds` iterations of its loop, if attention kernels do the share `attended` of
        their work.
        """
        shares = {True: attended, False: 1.0}
        works = ((each.work, (each.once + rounds * each.each) * shares[each.attends]) for each in self.work)
        return ProgramCost(tuple(dataclasses.replace(work, times=times) for work, times in works if times))

    def scaled(self, share: float) -> "CompiledPhase":
        """A stand-in for a smaller program of the same phase, which takes this share of the seconds."""
        work = (dataclasses.replace(each, once=share * each.once, each=share * each.each) for each in self.work)
        return dataclasses.replace(self, work=tuple(work), compile_s=0.0, doubts=(), stand_in=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One program to compile."""

    phase: str
    config: Config
    decoder: StoredDecoder
    accelerator: Accelerator
    programs: Path  # folder of compiled programs
    blocks: float = 1.0  # cache blocks that attention reads, in the rollout's programs
    whole: bool = False  # whether to generate machine code for a TPU; everything else is known long before


JOB, BUILT = TypeAdapter(Job), TypeAdapter(TpuProgram)
JOB_RESULT = TypeAdapter[CompiledPhase | str](CompiledPhase | str)  # a str says why the config cannot be lowered


def main(job_file: str, result_file: str, parent: str) -> None:
    """Do one job; unexpected errors end with a traceback on stderr and exit status 1."""
    hide_plugin_errors()
    threading.Thread(target=_end_with_parent, args=(int(parent),), daemon=True).start()
    from podium.plan.compiled.phases import phase_programs
    from podium.sharding import make_mesh

    job = JOB.validate_json(Path(job_file).read_bytes())
    try:
        spec = resolve(job.config, job.decoder, Machine.planned(job.accelerator))
        mesh = make_mesh(mesh_text(spec.mesh), _devices(job.accelerator))
        name, shape = unshaped(job.phase)
        program = phase_programs(spec if shape is None else spec.in_shape(shape), mesh)[name]
        lowered = program.lower()
    except ValueError as error:
        if not raised_here(error):
            raise
        result = str(error)
    else:
        result = _finished(job, spec, lowered, program.residents)
    write_atomically(Path(result_file), JOB_RESULT.dump_json(result))
    os._exit(0)  # the compiler may still be generating machine code that is not needed


def _finished(
    job: Job, spec: RunSpec, lowered: "jax.stages.Lowered", residents: Mapping[str, int]
) -> CompiledPhase | str:
    """The compiled program; or an error message if its text cannot be read, as with a new version of the compiler."""
    try:
        return _finish(job, spec, lowered, residents)
    except UNREADABLE as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if Path(last.filename).parent != HLO:
            raise
        return (
            f"the compiler's text of {job.phase} for {job.accelerator.name} cannot be read ({type(error).__name__}:"
            f" {str(error)[:120]}, {Path(last.filename).name}:{last.lineno}); {WAY_OUT}"
        )


def _finish(job: Job, spec: RunSpec, lowered: "jax.stages.Lowered", residents: Mapping[str, int]) -> CompiledPhase:
    """Compile a lowered program, or take it from the cache, and compute its memory and cost."""
    built = _build(lowered, job, spec)
    if built.refusal and not built.text:
        parts, work = {"program": built.refusal.needed}, ()
        doubted, traced_flops = [], 0.0
        arrays = [LargeArray(name=each.source, shape=each.shape, bytes=each.size) for each in built.refusal.largest]
    else:
        module = parse(built.text)
        parts, arrays = named_memory(module, built.memory.peak)
        skipped, per_machine = skipped_scopes(spec.rollout.settings), job.accelerator.per_machine
        pages = cache_block_pages(spec.rollout.settings.page_tokens, job.accelerator.platform)
        mesh = _mesh_of_program(spec.mesh, job.accelerator)
        work = looped_work(module, mesh, job.blocks, block_pages=pages, skipped=skipped, per_machine=per_machine)
        once = walk(module, mesh, once=True)
        size = sum(array.bytes for array in arrays)
        doubted = doubts(built.text, module, once=once, counted=built.counted, arrays=size, peak=built.memory.peak)
        traced_flops = _traced_flops(job, lowered)
    return CompiledPhase(
        memory=built.memory,
        parts=parts,
        largest=tuple(arrays[:KEPT_ARRAYS]),
        work=work,
        compile_s=built.compile_s,
        residents=residents,
        refused=built.refusal is not None,
        doubts=tuple(doubted),
        traced_flops=traced_flops,
    )


def _traced_flops(job: Job, lowered: "jax.stages.Lowered") -> float:
    """Operations of a program that computes a batch as it was traced, each loop of unknown length once.

    0 for other programs, and if the program holds something that only a compiler understands.
    """
    from podium.plan.traced.absent_devices import lowered_flops

    if calibration_kind(job.phase) != "update":
        return 0.0
    try:
        return lowered_flops(lowered)
    except UNREADABLE:
        return 0.0


def looped_work(
    module: Module,
    mesh: Mapping[str, int],
    blocks: float = 1.0,
    *,
    block_pages: int = 1,
    skipped: Sequence[str] = (),
    per_machine: int = 0,
) -> tuple[LoopedWork, ...]:
    """The cost of a program, split into work outside and inside the program's own loop; equal pieces are merged.

    Work other than products is named by what it moves. Attention's inner loop over the cache reads `blocks` blocks of
    `block_pages` pages, or those that its window reaches. `skipped` and `per_machine` are passed to `walk`.
    """
    trips = {loop: attention_rounds(loop, blocks, block_pages) for loop in unknown_loops(module) if ATTENTION in loop}
    trips |= {loop: 1.0 for loop in unknown_loops(module) if any(scope in loop for scope in ONE_ROUND)}
    loops = [loop for loop in unknown_loops(module) if loop not in trips]
    if len(loops) > 1:
        raise ValueError(
            f"the compiler's text of {module.name} does not say how often its loops run: {loops}; {WAY_OUT}"
        )
    one, two = (
        walk(module, mesh, trips=trips | dict.fromkeys(loops, rounds), skipped=skipped, per_machine=per_machine).works
        for rounds in (1, 2)
    )
    moved = moves(module, names_of(module.name))
    times: dict[tuple[Work, bool], tuple[float, float]] = {}
    for first, second in zip(one, two, strict=True):
        key = without_place(first, moved.get(first.name, ""), blocks, block_pages)
        once, each = times.get(key, (0.0, 0.0))
        times[key] = (once + 2 * first.times - second.times, each + second.times - first.times)
    return tuple(LoopedWork(work, once, each, attends) for (work, attends), (once, each) in times.items())


def without_place(work: Work, name: str, blocks: float, block_pages: int) -> tuple[Work, bool]:
    """A piece of work without its source and number of times, and whether it is an attention kernel.

    A kernel that declares the work on one block reads `blocks` blocks of `block_pages` pages, or those of its window.
    """
    rounds = 1.0
    if work.of_block:
        reach = window_reach(work.source)
        rounds = blocks if reach is None else min(blocks, reach / block_pages)
    own = dataclasses.replace(
        work,
        name=name,
        source="",
        times=0.0,
        flops=rounds * work.flops,  # a kernel is launched once for all blocks
        hbm_bytes=rounds * work.hbm_bytes,
        of_block=False,
    )
    return own, ATTENTION in work.source and work.kernel


def attention_rounds(source: str, blocks: float, block_pages: int) -> float:
    """The number of iterations of attention's loop; a layer with a window reads only the blocks of its window."""
    reach = window_reach(source)
    if reach is None:
        return blocks
    own = window_blocks(reach, block_pages)
    return min(blocks * block_pages / own.pages, own.most)


def skipped_scopes(rollout: RolloutConfig) -> list[str]:
    """Scopes of branches that a run never takes: the search for a cut-off, if sampling uses all tokens."""
    return ["sample"] if rollout.top_k == 0 and rollout.top_p == 1 else []


def _mesh_of_program(mesh: MeshSizes, accelerator: Accelerator) -> MeshSizes:
    """The part of a mesh that a program's text covers: each TPU slice runs a separate program."""
    slices = accelerator.slices if accelerator.platform == "tpu" else 1
    return {**mesh, COPIES: mesh[COPIES] // slices}


def named_memory(module: Module, peak: int) -> tuple[dict[str, int], list[LargeArray]]:
    """The bytes that a program takes by kind of array, and its arrays, largest first.

    Arrays alive at the peak are reconstructed from the program's text. The compiler's figure also includes gaps between
    arrays, which get their own name. If the compiler's figure is the smaller one, the difference is
    taken from everything but the arguments, whose sizes are exact, in proportion.
    """
    found = largest(module, names_of(module.name))
    parts = dict(found.by_name)
    beyond = peak - found.size
    if beyond < 0:
        exact = found.arguments_by_name
        loose = {name: size - exact.get(name, 0) for name, size in parts.items()}
        share = max(0.0, 1 + beyond / sum(loose.values())) if any(loose.values()) else 0.0
        parts = {name: exact.get(name, 0) + int(size * share) for name, size in loose.items()}
    parts[BETWEEN] = peak - sum(parts.values())
    arrays = [LargeArray(name=each.name, shape=each.shape, bytes=each.size) for each in found.buffers]
    return {name: size for name, size in parts.items() if size}, arrays


def _devices(accelerator: Accelerator) -> "Sequence[Device]":
    """The devices to compile for; for CPU, those of this machine."""
    if accelerator.platform != "cpu":
        return topology_devices(accelerator)
    import jax

    jax.config.update("jax_num_cpu_devices", accelerator.devices)
    return jax.devices()


def _build(lowered: "jax.stages.Lowered", job: Job, spec: RunSpec) -> TpuProgram:
    """The compiled program; from the cache if it was already compiled as far as the job needs.

    The cache has its text in a file of its own.
    """
    machine = job.accelerator
    options = engine_options(machine.platform, machine.generation) | compiler_options(  # not in the program's text
        machine.platform,
        kind=machine.generation,
        offloaded=spec.optimizer.offload,
        tokens=spec.update.tokens_per_gather,
        experts=bool(job.decoder.routed),
    )
    key = key_of([lowered.as_text(), options, target_of(machine)], machine)
    record, module = job.programs / f"{key}.json", job.programs / f"{key}.hlo.gz"
    if record.exists():
        built = BUILT.validate_json(record.read_bytes())
        if built.whole or built.refusal or not job.whole:
            return dataclasses.replace(built, text=gzip.decompress(module.read_bytes()).decode())
    start = time.perf_counter()
    built = _compile(lowered, job)
    built = dataclasses.replace(built, compile_s=time.perf_counter() - start)
    job.programs.mkdir(parents=True, exist_ok=True)
    write_atomically(module, gzip.compress(built.text.encode(), 6))
    write_atomically(record, BUILT.dump_json(built, exclude={"text"}))  # last: if it exists, both files are complete
    return built


def _compile(lowered: "jax.stages.Lowered", job: Job) -> TpuProgram:
    if job.accelerator.platform == "tpu":
        return compile_tpu(lowered, whole=job.whole)
    compiled = _compile_kernels(lowered)
    # jax says that there may be no memory analysis; the compilers of CPU and GPU make one.
    memory = measure(compiled)  # pyright: ignore[reportArgumentType]
    text, counted = compiled.as_text() or "", counted_by_compiler(compiled)
    return TpuProgram(memory=memory, refusal=None, text=text, whole=True, counted=counted)


def _compile_kernels(lowered: "jax.stages.Lowered") -> "jax.stages.Compiled":
    """Compile for a CPU or GPU.

    On a real GPU, XLA chooses its matrix kernels by timing them; without one it guesses. If it has no kernel for its
    guess, compile again with cuBLAS.
    """
    import jax

    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if NO_TILES not in str(error):
            raise
        return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def key_of(decisive: Sequence[object], accelerator: Accelerator) -> str:
    """A cache key: a hash of `decisive` values and of the compiler's versions and flags."""
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    text = json.dumps([*decisive, compiler_versions(accelerator), flags], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _end_with_parent(parent: int) -> None:
    """Exit when the parent process has ended: a running compiler cannot be interrupted."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
