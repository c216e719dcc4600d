"""Plans a run: the memory and seconds of every phase, and of a whole step.

A program's memory is the compiler's figure plus what else is alive. A step consists of the calls that the engine's
scheduler and the trainer's packing make for a draw of lengths; the time of a call is its roofline, divided by the share
of the roofline that such programs were measured to reach. Without a compiler, the closed form gives both. No jax here.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from podium import __version__
from podium.config.sizes import slot_sizes
from podium.plan.calibration import Chip, find_chip
from podium.plan.compiled.compile import OnProgress, cache_folder, compile_phases
from podium.plan.compiled.compile_worker import WAY_OUT, CompiledPhase, Job
from podium.plan.planned_device import Device, rate
from podium.plan.report.plan_notes import explain, shapes_note
from podium.plan.request.phase_sizes import Planned, RunSizes
from podium.plan.request.step_calls import Call, largest_calls, packed_run, step_calls
from podium.plan.request.topology import compiler_versions
from podium.plan.request.workload import SequenceLengths, Workload, no_rollout, simulate_rollout
from podium.plan.result import By, Phase, Plan, Seconds, judge_phases, part_of, total
from podium.plan.traced.fast_answer import fast_programs

ROLLOUT = ("sync", "prefill", "copy", "decode")
SLOWEST_FIRST = ("update", "decode", "reward", "score", "prefill", "sync", "copy", "init")
"""Phases, or parts of a step for phases that are not listed, from the slowest to compile to the fastest."""

WITHIN_OTHERS = ("init", "copy")
"""Phases that a plan of the largest programs does not compile: what they read and write, other programs take as
arguments, the update the optimizer's state and the decode the cache."""
FEWER_OPERATIONS = 0.9
"""Ratio to the closed form's operations below which a compiled program must have been misread; TPU programs have 1.00
to 1.01."""
REPEATED = 0.02
"""Share of a program's operations that a compiler may add unnoticed: in recorded plans it adds less than 0.001."""
LEAST_GAIN = 0.05  # share of a step that must be gained for stale completions to be worth it

Compiling = Callable[[Mapping[str, float]], Mapping[str, CompiledPhase]]
"""Compiles programs, each with the number of cache blocks that its attention reads."""


def make_plan(
    planned: Planned,
    *,
    by: By = "compiler",
    lengths: str = "gsm8k",
    progress: OnProgress | None = None,
    chip: Chip | None = None,
    whole: Collection[str] = (),
    largest: bool = False,
) -> Plan:
    """Plan a run: whether it fits an accelerator, what limits it, and how long its steps take.

    Args:
        planned: the run on a machine.
        by: `compiler`: compile every program. `trace`: trace the largest program of each phase, and compile only those
            of which the trace does not tell whether they fit. `closed_form`: neither, to order candidates of a search.
        lengths: source of prompt and completion lengths, as for `draw_lengths`.
        progress: called when a phase's compilation begins, repeatedly while it runs, and when it ends.
        chip: constants of a device; unset: those of its generation. A CPU has none until `podium calibrate` wrote them,
            so its plan has no seconds.
        whole: programs to generate machine code for; takes minutes each and is not needed for a plan of a TPU.
        largest: compile only the largest program of each phase, and none for `init` and `copy`. The seconds of a
            phase's other programs are then those of the largest, scaled by the closed form.

    Raises:
        ValueError: the lengths are invalid.
        CompilerError: a program could not be compiled.
    """

    def compiling(programs: Mapping[str, float]) -> Mapping[str, CompiledPhase]:
        return compile_phases(make_jobs(planned, programs, whole), progress=progress)

    def tracing(programs: Mapping[str, float]) -> Mapping[str, CompiledPhase]:
        return fast_programs(run, make_jobs(planned, programs), may_compile=is_compiled(run), progress=progress)

    run = planned.sizes
    if by == "trace":
        return plan_run(run, lengths=lengths, chip=chip, compiling=tracing, largest=True)
    estimated = by == "closed_form" or not is_compiled(run)
    return plan_run(run, lengths=lengths, chip=chip, compiling=None if estimated else compiling, largest=largest)


def plan_run(
    run: RunSizes,
    *,
    lengths: str = "gsm8k",
    chip: Chip | None = None,
    compiling: Compiling | None = None,
    largest: bool = False,
) -> Plan:
    """Plan a resolved run, by the closed form unless `compiling` compiles its programs; otherwise as `make_plan`."""
    accelerator, drawn = run.accelerator, run.draw_lengths(lengths)
    device = Device(accelerator, chip or find_chip(accelerator.generation))
    step = _Step(run, drawn, device, compiling, largest=largest)
    run, workload, compiled = step.run, step.workload, step.compiled
    phases = tuple(device.phases(step.calls, compiled, run))
    host = device.host(sum(call.calls for call in step.calls))
    timed = [*(phase.seconds for phase in phases), step.waiting, host]
    seconds = total(each for each in timed if each is not None) if host else None
    rollout = total(phase.seconds for phase in phases if phase.name in ROLLOUT and phase.seconds)
    return Plan(
        config=run.spec.name,
        accelerator=accelerator.name,
        devices=accelerator.devices,
        hbm_bytes=accelerator.hbm_bytes,
        verdict=judge_phases(phases, accelerator.hbm_bytes),
        spare_bytes=accelerator.hbm_bytes - max(phase.bytes for phase in phases),
        phases=phases,
        host=host,
        step=seconds,
        environments=step.waiting,
        tokens_per_s_per_chip=seconds.rate(workload.completion_tokens / accelerator.chips) if seconds else None,
        workload=workload,
        micro_batches=step.micro_batches,
        notes=(
            *explain(run, phases, workload, step.replies),
            *shapes_note(run, drawn),
            *carry_over(run, device, drawn, workload, step.micro_batches),
            *_stand_ins(compiled),
            *repeated_operations(compiled),
        ),
        estimate_only=not any(phase.compiled for phase in phases),
        calibration=device.chip.source if device.chip else "",
        doubts=(*_doubts(compiled), *few_operations(phases)),
        slots=run.rollout.slots,
        versions={"podium": __version__} | (compiler_versions(accelerator) if compiled else {}),
        mfu=device.mfu(run, drawn, phases),
        rollout_rate=rate(rollout, workload.completion_tokens / accelerator.chips),
        full_slots_rate=device.full_slots_rate(step.calls, compiled, run),
    )


class _Step:
    """What a step does: its calls, with their programs compiled.

    Conversations are simulated twice, because when their replies arrive depends on how long calls take.
    """

    def __init__(
        self, run: RunSizes, drawn: SequenceLengths, device: Device, compiling: Compiling | None, *, largest: bool
    ) -> None:
        simulate = functools.partial(
            simulate_rollout, drawn, run.rollout, shards=run.rollout_shards, overlap=device.chip is not None
        )
        demonstrations = run.spec.recipe.demonstrations
        self.workload = no_rollout(drawn) if demonstrations else simulate()
        self.replies = None if demonstrations else drawn.replies
        """None without conversations."""
        if self.replies is not None:
            self.workload = with_all_sizes(run, self.workload)
        self.run, self.micro_batches = packed_run(run, drawn)
        self.calls = step_calls(self.run, self.workload, self.micro_batches)
        self.compiled: Mapping[str, CompiledPhase] = {}
        """By program; empty if nothing is compiled."""
        if compiling is not None:
            judged = [call for name, call in largest_calls(self.calls).items() if name not in WITHIN_OTHERS]
            self.compiled = compiling(_slowest_first(judged if largest else self.calls))
            if largest:
                self.compiled = device.with_stand_ins(self.calls, self.compiled, self.run)
        self.waiting: Seconds | None = None
        """Time in which all conversations wait for replies; None without them, or if the device's speed is unknown."""
        if self.replies is not None and device.chip is not None:
            self.workload = simulate(clock=device.clock(self.calls, self.compiled, self.run))
            self.calls = step_calls(self.run, self.workload, self.micro_batches)
            self.waiting = Seconds.exactly(self.workload.idle_s)


def _stand_ins(compiled: Mapping[str, CompiledPhase]) -> Iterator[str]:
    """A note on the programs that were not compiled because they are smaller than others of their phase."""
    if found := [name for name, program in compiled.items() if program.stand_in and not program.traced]:
        yield (
            f"not compiled, since a larger program of the same phase was: {', '.join(found)}; their seconds are those"
            " of the larger one, scaled by the closed form"
        )


def _doubts(compiled: Mapping[str, CompiledPhase]) -> Iterator[str]:
    """Disagreements between the reader of compiled programs and their compiler, with advice on what to do."""
    for name, program in compiled.items():
        for each in program.doubts:
            yield f"{name}: {each}; {WAY_OUT}"


def few_operations(phases: Sequence[Phase]) -> Iterator[str]:
    """Compiled phases in which fewer operations were found than the model needs."""
    for phase in phases:
        if phase.compiled and phase.flops < FEWER_OPERATIONS * phase.closed_form_flops:
            share = phase.flops / phase.closed_form_flops
            said = f"compiled programs seem to do {share:.0%} of the operations that the model needs"
            yield f"{phase.name}: {said}; {WAY_OUT}"


def repeated_operations(compiled: Mapping[str, CompiledPhase]) -> Iterator[str]:
    """A note on each compiled program that does more operations than were traced: a compiler that runs short of memory
    computes arrays again instead of keeping them.
    """
    for name, program in compiled.items():
        beyond = program.cost(1.0).flops / program.traced_flops - 1 if program.traced_flops else 0.0
        if beyond > REPEATED:
            yield f"{name}: the compiler computes {beyond:.1%} of its operations a second time"


def with_all_sizes(run: RunSizes, workload: Workload) -> Workload:
    """The workload with all sizes of the engine's programs, because unused sizes may be called when replies come
    late.
    """
    sizes = slot_sizes(run.rollout, run.rollout_shards)
    return dataclasses.replace(
        workload,
        decodes=dict.fromkeys(sizes, (0, 0, 0.0)) | workload.decodes,
        prefill_calls=dict.fromkeys(run.buckets, 0) | workload.prefill_calls,
    )


def carry_over(
    run: RunSizes, device: Device, drawn: SequenceLengths, workload: Workload, micro_batches: float
) -> Iterator[str]:
    """A note on how `rollout.in_flight` changes a step, by the closed form for both; none if it is 1."""
    rollout = run.rollout
    if rollout.in_flight == 1.0 or device.chip is None:
        return
    waits = rollout.model_copy(update={"in_flight": 1.0})
    alone = simulate_rollout(drawn, waits, shards=run.rollout_shards, overlap=True)
    with_it, without = (
        total(phase.seconds for phase in device.phases(step_calls(run, work, micro_batches), {}, run) if phase.seconds)
        for work in (workload, alone)
    )
    gain = 1 - with_it.value / without.value
    text = f"rollout.in_flight {rollout.in_flight:g} makes a step {gain:.0%} shorter (estimated), with completions"
    text += f" {workload.staleness:.1f} updates old on average"
    yield text if gain >= LEAST_GAIN else f"{text}: not worth it, set rollout.in_flight to 1"


def compiling_rank(phase: str) -> int:
    """Place of a phase by how long it takes to compile; 0 is the slowest."""
    return SLOWEST_FIRST.index(phase if phase in SLOWEST_FIRST else part_of(phase))


def _slowest_first(calls: Sequence[Call]) -> dict[str, float]:
    """Programs, slowest to compile first, each with the number of cache blocks that its attention reads."""
    ordered = sorted(calls, key=lambda call: compiling_rank(call.phase))
    return {call.program: call.blocks for call in ordered}


def is_compiled(run: RunSizes) -> bool:
    """Whether programs can be compiled without the device: jax cannot use the host memory of absent GPUs."""
    return run.accelerator.compiled and (run.platform != "gpu" or not run.spec.optimizer.offload)


def make_jobs(planned: Planned, programs: Mapping[str, float], whole: Collection[str] = ()) -> list[Job]:
    """Make one compilation job per program; `programs` maps names to the cache blocks that attention reads.

    Compiled programs are kept in the user's cache folder.
    """
    folder = cache_folder() / "programs"
    return [
        Job(
            phase=name,
            config=planned.config,
            decoder=planned.sizes.decoder,
            accelerator=planned.sizes.accelerator,
            programs=folder,
            blocks=blocks,
            whole=name in whole,
        )
        for name, blocks in programs.items()
    ]
