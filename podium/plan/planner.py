"""Plans a run: the memory and seconds of every phase, and of a whole step.

A program's memory is the compiler's figure plus what else is alive. A step consists of the calls that the engine's
scheduler and the trainer's packing make for a draw of lengths; the time of a call is its roofline, divided by the share
of the roofline that such programs were measured to reach. Without a compiler, the closed form gives both. No jax here.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import podium.plan.estimate as closed_form
from podium import __version__
from podium.accelerators import Accelerator
from podium.config.schema import Config
from podium.config.sizes import slot_sizes, steps_at_once
from podium.hlo.cost import Peaks, Roofline, roofline, sum_collectives
from podium.models.architecture import DecoderConfig
from podium.models.flops import step_work, update_flops
from podium.models.presets import find_decoder
from podium.plan.calibration import Chip, Line, calibrated, load_chip
from podium.plan.compile import OnProgress, cache_folder, compile_phases
from podium.plan.estimate import PhaseEstimate
from podium.plan.explain import explain
from podium.plan.formatting import number
from podium.plan.result import BoundBy, LargeArray, Phase, Plan, Seconds, Verdict, judge, total
from podium.plan.sizes import F32, RunSizes, make_sizes, network_bytes
from podium.plan.topology import compiler_versions
from podium.plan.worker import CompiledPhase, Job
from podium.plan.workload import Clock, SequenceLengths, Workload, no_rollout, packed, simulate_rollout

KINDS: Mapping[str, str] = {
    "prefill": "prefill",
    "reward": "update",
    "score": "update",
    "teacher": "update",
    "values": "update",
    "critic": "update",
    "update": "update",
}
"""The calibration of each phase; phases that are not listed stream memory, as decoding does."""
ROLLOUT = ("sync", "prefill", "copy", "decode")
SLOWEST_FIRST = (
    "update",
    "critic",
    "decode",
    "teacher",
    "reward",
    "values",
    "score",
    "prefill",
    "sync",
    "copy",
    "init",
)  # by how long they take to compile

LEAST_GAIN = 0.05  # share of a step that must be gained for stale completions to be worth it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The calls of one program in a step."""

    phase: str
    program: str  # as `podium.plan.phases` names it
    calls: float
    rounds: float  # of its loop per call: groups of decode steps, micro-batches, or pages copied per device
    blocks: float = 1.0  # of the cache, read by attention
    closed_form: PhaseEstimate | None = None
    repeats: float = 0.0  # how often a step does the work of `closed_form`
    once_flops: int = 0  # operations per call before its rounds
    attended: float = 1.0  # share of the blocks that attention computes

    @property
    def closed_form_flops(self) -> float:
        """Operations in a step, by the closed form."""
        each = self.closed_form.flops if self.closed_form else 0
        return self.repeats * each + self.calls * self.once_flops


def make_plan(
    config: Config,
    accelerator: Accelerator,
    *,
    fast: bool = False,
    lengths: str = "gsm8k",
    progress: OnProgress | None = None,
    decoder: DecoderConfig | None = None,
    chip: Chip | None = None,
    whole: Collection[str] = (),
) -> Plan:
    """Plan a run: whether it fits an accelerator, what limits it, and how long its steps take.

    Args:
        config: the run's settings.
        accelerator: the machine, from `find_accelerator`.
        fast: use only the closed form.
        lengths: source of prompt and completion lengths, as for `draw_lengths`.
        progress: called when a phase's compilation begins, repeatedly while it runs, and when it ends.
        decoder: the model's architecture; unset: that of the config's model.
        chip: constants of a device; unset: those of its generation. A CPU has none, so its plan has no seconds.
        whole: programs to generate machine code for; takes minutes each and is not needed for a plan of a TPU.

    Raises:
        ValueError: the model, the mesh or the lengths are invalid.
        CompilerError: a program could not be compiled.
    """
    decoder = decoder or find_decoder(config)
    run = make_sizes(config, decoder, accelerator)
    spec = run.spec
    drawn = run.draw_lengths(lengths)
    device = _Device(accelerator, chip or (load_chip(accelerator.generation) if run.platform != "cpu" else None))
    if spec.recipe.demonstrations:
        workload = no_rollout(drawn)
    else:
        workload = simulate_rollout(drawn, run.rollout, shards=run.rollout_shards, overlap=device.chip is not None)
    replies = None if spec.recipe.demonstrations else drawn.replies
    if replies is not None:
        workload = with_all_sizes(run, workload)
    micro_batches, attended = packed(
        drawn, spec.batch, minibatches=spec.recipe.minibatches, attention=run.update.attention
    )
    run = dataclasses.replace(run, attended=attended)
    calls = step_calls(run, workload, micro_batches)
    names = {} if fast or not is_compiled(config, accelerator) else _slowest_first(calls)
    compiled = compile_phases(make_jobs(config, decoder, accelerator, names, whole), progress=progress) if names else {}
    waiting = None
    if replies is not None and device.chip is not None:
        clock = device.clock(calls, compiled, run)
        workload = simulate_rollout(drawn, run.rollout, shards=run.rollout_shards, overlap=True, clock=clock)
        calls = step_calls(run, workload, micro_batches)
        waiting = Seconds(value=workload.idle_s, low=workload.idle_s, high=workload.idle_s)
    phases = tuple(device.phases(calls, compiled, run))
    host = device.host(sum(call.calls for call in calls))
    seconds = [*(phase.seconds for phase in phases if phase.seconds), *([waiting] if waiting else [])]
    step = total([*seconds, host]) if host else None
    return Plan(
        config=config.name or config.model,
        accelerator=accelerator.name,
        devices=accelerator.devices,
        hbm_bytes=accelerator.hbm_bytes,
        verdict=_verdict(phases, accelerator.hbm_bytes, bool(compiled)),
        spare_bytes=accelerator.hbm_bytes - max(phase.bytes for phase in phases),
        phases=phases,
        host=host,
        step=step,
        environments=waiting,
        tokens_per_s_per_device=step.rate(workload.completion_tokens / accelerator.devices) if step else None,
        workload=workload,
        micro_batches=micro_batches,
        notes=(
            *explain(run, accelerator, phases, workload, replies),
            *carry_over(run, device, drawn, workload, micro_batches),
        ),
        estimate_only=not compiled,
        slots=run.rollout.slots,
        versions={"podium": __version__} | (compiler_versions(accelerator) if compiled else {}),
        mfu=device.mfu(run, drawn, phases),
        rollout_rate=_rate(_rollout_s(phases), workload.completion_tokens / accelerator.devices),
        full_slots_rate=device.full_slots_rate(calls, compiled, run),
    )


def with_all_sizes(run: RunSizes, workload: Workload) -> Workload:
    """The workload with every size of the engine's programs: those without calls may get some when replies are late."""
    sizes = slot_sizes(run.rollout, run.rollout_shards)
    return dataclasses.replace(
        workload,
        decodes=dict.fromkeys(sizes, (0, 0, 0.0)) | workload.decodes,
        prefill_calls=dict.fromkeys(run.buckets, 0) | workload.prefill_calls,
    )


def _rollout_s(phases: Sequence[Phase]) -> Seconds:
    return total(phase.seconds for phase in phases if phase.name in ROLLOUT and phase.seconds)


def _rate(seconds: Seconds, amount: float) -> Seconds | None:
    return seconds.rate(amount) if seconds.value else None


def carry_over(
    run: RunSizes, device: "_Device", drawn: SequenceLengths, workload: Workload, micro_batches: int
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
    text = f"rollout.in_flight {rollout.in_flight:g} makes a step {number(with_it.value)} s instead of"
    text += f" {number(without.value)} (estimated), with completions {workload.staleness:.1f} updates old on average"
    yield text if gain >= LEAST_GAIN else f"{text}: not worth it, set rollout.in_flight to 1"


def _verdict(phases: Sequence[Phase], hbm_bytes: int, compiled: bool) -> Verdict:
    refused = any(phase.refused for phase in phases)
    return "does_not_fit" if refused else judge((phase.bytes for phase in phases), hbm_bytes, compiled=compiled)


def _slowest_first(calls: Sequence[Call]) -> dict[str, float]:
    """Programs, slowest to compile first, each with the number of cache blocks that its attention reads."""
    ordered = sorted(calls, key=lambda call: SLOWEST_FIRST.index(call.phase))
    return {call.program: call.blocks for call in ordered}


def is_compiled(config: Config, accelerator: Accelerator) -> bool:
    """Whether programs can be compiled without the device: jax cannot use the host memory of absent GPUs."""
    return accelerator.platform != "gpu" or not config.train.offload_optimizer


def make_jobs(
    config: Config,
    decoder: DecoderConfig,
    accelerator: Accelerator,
    programs: Mapping[str, float],
    whole: Collection[str] = (),
) -> list[Job]:
    """Make one compilation job per program; `programs` maps names to the cache blocks that attention reads.

    Compiled programs are kept in the user's cache folder.
    """
    folder = cache_folder() / "programs"
    return [
        Job(
            phase=name,
            config=config,
            decoder=decoder,
            accelerator=accelerator,
            programs=folder,
            blocks=blocks,
            whole=name in whole,
        )
        for name, blocks in programs.items()
    ]


def step_calls(run: RunSizes, workload: Workload, micro_batches: int) -> list[Call]:
    """Every program of a run, with its calls in a step.

    Includes the longest prefill chunk and the decode of all slots even if this step has none: they must fit in memory,
    for evaluation too.
    """
    recipe = run.spec.recipe
    prefills, copies = workload.prefill_calls, workload.copy_calls
    chunks = sorted({*prefills, max(run.buckets)})
    at_once = steps_at_once(run.rollout.refill_steps, run.rollout_shards)
    sizes = sorted({*workload.decodes, run.rollout.slots}, reverse=True)
    batches, own = recipe.minibatches, micro_batches / recipe.minibatches
    mismatched = 2 if recipe.data_form == "label" else 0  # policy and reference score other rows' completions
    scores = batches * (len(recipe.scorers) + mismatched)
    updates = batches * recipe.updates_per_batch

    def call(
        program: str,
        form: PhaseEstimate,
        calls: float,
        *,
        rounds: float = 0,
        repeats: float | None = None,
        tokens: float = 0,
    ) -> Call:
        """A call of a program; `tokens` is the longest cached context that attention reads."""
        return Call(
            phase=form.name,
            program=program,
            calls=calls,
            rounds=rounds,
            blocks=max(1, run.in_blocks(tokens) / run.block),
            closed_form=form,
            repeats=calls if repeats is None else repeats,
        )

    found = [
        Call(phase="init", program="init", calls=0, rounds=0),
        call("sync", closed_form.sync_phase(run), not recipe.demonstrations),
    ]
    found += [call(f"prefill:{T}", closed_form.prefill_phase(run, T), prefills.get(T, 0), tokens=T) for T in chunks]
    pages = workload.copied_pages / copies / run.rollout_shards if copies else 0.0
    found.append(call("copy", closed_form.copy_phase(run, pages), copies, rounds=pages))
    for size in sizes:
        calls, steps, tokens = workload.decodes.get(size, (0, 0, 0.0))
        form = closed_form.decode_phase(run, size, tokens)
        rounds = steps / calls / at_once if calls else 0.0
        decode = call(f"decode:{size}", form, calls, rounds=rounds, repeats=steps, tokens=tokens)
        found.append(dataclasses.replace(decode, once_flops=closed_form.first_flops(run, size)))
    for name, model in run.of_reward_models.items():
        read = workload.completion_tokens + run.spec.rollout.completions * workload.prompt_tokens
        calls = max(1, math.ceil(read / (model.spec.batch.rows * model.row_tokens)))  # rows are nearly full
        found.append(call(f"reward:{name}", closed_form.reward_phase(run, name), calls))
    trained = [("update", closed_form.update_phase(run, own), updates)]
    if run.spec.teacher is not None:
        trained.insert(0, ("teacher", closed_form.teacher_phase(run), batches))
    if run.spec.critic is not None:
        learned = closed_form.critic_phase(run, own)
        trained.insert(0, ("critic", learned, batches * run.spec.critic.updates))
        trained.insert(0, ("values", closed_form.values_phase(run), batches))
    if scores:
        trained.insert(0, ("score", closed_form.score_phase(run), scores))
    made = [call(name, form, times, rounds=own, repeats=times * own) for name, form, times in trained]
    return [*found, *(dataclasses.replace(each, attended=run.attended) for each in made)]


@dataclasses.dataclass(frozen=True)
class _Device:
    """The device that a plan is for; builds phases from compiled programs and closed forms."""

    accelerator: Accelerator
    chip: Chip | None  # None: its times are unknown

    def phases(self, calls: list[Call], compiled: Mapping[str, CompiledPhase], run: RunSizes) -> Iterator[Phase]:
        """The phases of a run in order; each from compiled programs, or from the closed form if there are none."""
        for name in dict.fromkeys(call.phase for call in calls):
            own = [call for call in calls if call.phase == name]
            if compiled:
                phase = self.compiled_phase(own, compiled)
            elif own[0].closed_form is not None:
                phase = self.estimated_phase(own, run)
            else:
                continue
            yield phase
        resting = closed_form.checkpoint_phase(run)
        yield self.phase(resting.name, resting.parts)

    def compiled_phase(self, calls: list[Call], compiled: Mapping[str, CompiledPhase]) -> Phase:
        """One phase from its compiled programs: the memory of the largest, the work of all."""
        largest = max((compiled[call.program] for call in calls), key=lambda each: each.device_bytes)
        code = sum(each.memory.code for each in compiled.values())  # code of all programs stays loaded
        parts = dict(largest.residents)
        for name, size in (*largest.parts.items(), ("code", code)):
            parts[name] = parts.get(name, 0) + size
        costs = [(call, compiled[call.program].cost(call.rounds, call.attended)) for call in calls]
        seconds, bound_by = self.timed(
            calls[0].phase,
            lambda chip, links: [(call.calls, roofline(cost, chip.peaks, links=links)) for call, cost in costs],
        )
        resident = [LargeArray(name=name, shape="", bytes=size) for name, size in largest.residents.items()]
        phase = self.phase(calls[0].phase, parts)
        refused = any(compiled[call.program].refused for call in calls)
        return dataclasses.replace(
            phase,
            fits=phase.fits and not refused,
            refused=refused,
            seconds=seconds,
            bound_by=bound_by,
            largest=tuple(sorted((*resident, *largest.largest), key=lambda array: -array.bytes)),
            calls=sum(call.calls for call in calls),
            collectives=sum_collectives((call.calls, each) for call, cost in costs for each in cost.collectives),
            flops=sum(call.calls * cost.flops for call, cost in costs),
            closed_form_flops=sum(call.closed_form_flops for call in calls),
            compile_s=sum(compiled[call.program].compile_s for call in calls),
            compiled=True,
        )

    def estimated_phase(self, calls: list[Call], run: RunSizes) -> Phase:
        """One phase by the closed form."""
        forms = [(call, call.closed_form) for call in calls if call.closed_form is not None]
        largest = max((form for _, form in forms), key=lambda form: form.total)
        seconds, bound_by = self.timed(
            calls[0].phase,
            lambda chip, links: [
                (call.repeats, closed_form_roofline(form, run, chip.peaks, links)) for call, form in forms
            ],
        )
        flops = sum(call.closed_form_flops for call in calls)
        return dataclasses.replace(
            self.phase(calls[0].phase, largest.parts),
            seconds=seconds,
            bound_by=bound_by,
            calls=sum(call.calls for call in calls),
            flops=flops,
            closed_form_flops=flops,
        )

    def clock(self, calls: list[Call], compiled: Mapping[str, CompiledPhase], run: RunSizes) -> Clock:
        """How long a prefill call and a decode step of each size takes, with the host's time for a call."""
        seconds: dict[str, dict[int, float]] = {"prefill": {}, "decode": {}}
        for call in calls:
            kind, _, size = call.program.partition(":")
            if kind in seconds and call.calls:
                both = [next(self.phases([call], compiled, run)).seconds, self.host(call.calls)]
                seconds[kind][int(size)] = total(each for each in both if each).value / call.repeats
        return Clock(prefill_s=seconds["prefill"], decode_s=seconds["decode"])

    def full_slots_rate(
        self, calls: list[Call], compiled: Mapping[str, CompiledPhase], run: RunSizes
    ) -> Seconds | None:
        """Tokens per second and device of decode steps that have as many slots as there are."""
        slots = run.rollout.slots
        full = next(call for call in calls if call.program == f"decode:{slots}")
        seconds = next(self.phases([full], compiled, run)).seconds
        return _rate(seconds, full.repeats * slots / self.accelerator.devices) if seconds else None

    def phase(self, name: str, parts: Mapping[str, int]) -> Phase:
        """A phase with only its memory."""
        held = dict(sorted(((part, size) for part, size in parts.items() if size), key=lambda part: -part[1]))
        size = sum(held.values())
        return Phase(
            name=name,
            bytes=size,
            parts=held,
            fits=size <= self.accelerator.hbm_bytes,
            largest=tuple(LargeArray(name=part, shape="", bytes=size) for part, size in held.items()),
        )

    def timed(self, name: str, lines: Callable[[Chip, int], list[Line]]) -> tuple[Seconds | None, BoundBy]:
        """Seconds of a phase's calls, and what bounds most of them; `lines(chip, links)` gives calls and rooflines.

        A transfer uses the links of the worst placed chip, or all links if they go to a switch. If it is not published
        which links are connected, the lower bound assumes all of them.
        """
        if self.chip is None or name == "init":
            return None, ""
        chip, kind = self.chip, KINDS.get(name, "decode")
        links = max(1, self.accelerator.ici_links if self.accelerator.torus else chip.links)
        seconds, bound_by = calibrated(lines(chip, links), chip, kind)
        if self.accelerator.wiring_known:
            return seconds, bound_by
        best, _ = calibrated(lines(chip, chip.links), chip, kind)
        return dataclasses.replace(seconds, low=best.low), bound_by

    def host(self, calls: float) -> Seconds | None:
        """Host seconds for a number of calls during which the device waits."""
        if self.chip is None:
            return None
        each = self.chip.calibration["host_s"]
        return Seconds(value=each.value, low=each.low, high=each.high) * calls

    def mfu(self, run: RunSizes, lengths: SequenceLengths, phases: Sequence[Phase]) -> Seconds | None:
        """Model FLOPs utilization of a step's updates, with FLOPs counted as in `podium.models.flops`."""
        seconds = next((phase.seconds for phase in phases if phase.name == "update"), None)
        if self.chip is None or seconds is None:
            return None
        work = step_work(lengths.prompts.tolist(), lengths.completions.tolist(), run.decoder.windows)
        peak = self.chip.peaks.flops_f32 if run.activation == F32 else self.chip.peaks.flops_bf16
        flops = run.spec.recipe.updates_per_batch * update_flops(run.decoder, work)
        return seconds.rate(flops / self.accelerator.devices / peak)


def closed_form_roofline(form: PhaseEstimate, run: RunSizes, peaks: Peaks, links: int) -> Roofline:
    """The roofline from a closed form's totals: the longer of compute and memory time, launches, and transfers."""
    compute = form.flops / (peaks.flops_f32 if run.activation == F32 else peaks.flops_bf16)
    hbm, ici = form.hbm_bytes / peaks.hbm_bandwidth, form.ici_bytes / (links * peaks.link_bandwidth)
    if peaks.network_bandwidth:
        ici += network_bytes(run, form.name, form.ici_bytes) / peaks.network_bandwidth
    work = max(compute, hbm)
    copies = [(times, each / peaks.host_bandwidth, share * work) for times, each, share in form.copies if each]
    small, large = (number * peaks.kernel_s for number in form.kernels)
    latency = small + max(0.0, large - work)
    return Roofline(compute * (compute >= hbm), hbm * (hbm > compute), ici, latency, copies=tuple(copies))
