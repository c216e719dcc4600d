"""The plan of a run: every phase's memory and seconds, and a step made of them.

Memory is the compiler's for each program, plus what is alive beside it. A step is as many calls of each program as the
engine's scheduler and the trainer's packing make for a draw of lengths; a call takes the roofline's time, divided by
the shares of it that chips were seen to reach. Without a compiler both come from the closed form. No jax here.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import podium.plan.estimate as closed_form
from podium import __version__
from podium.accelerators import Accelerator
from podium.config.schema import Config
from podium.hlo.cost import Peaks, Roofline, roofline, sum_collectives
from podium.models.architecture import DecoderConfig
from podium.models.flops import step_work, update_flops
from podium.models.presets import find_architecture
from podium.plan.calibration import Chip, Factor, load_chip
from podium.plan.compile import OnProgress, cache_folder, compile_phases
from podium.plan.estimate import PhaseEstimate
from podium.plan.explain import explain
from podium.plan.result import NO_TIME, BoundBy, LargeArray, Phase, Plan, Seconds, Verdict, judge, total
from podium.plan.sizes import F32, RunSizes, make_sizes
from podium.plan.topology import compiler_versions
from podium.plan.worker import CompiledPhase, Job
from podium.plan.workload import SequenceLengths, Workload, draw_lengths, packed_micro_batches, simulate_rollout

KINDS: Mapping[str, str] = {"prefill": "prefill", "score": "update", "update": "update"}
"""The kind of calibration of a phase; phases that are not named stream memory, as decoding does."""
SLOWEST_FIRST = ("update", "decode", "score", "prefill", "sync", "insert", "init")  # by how long they take to compile


Line = tuple[float, Roofline]
"""How often something is done in a step, and its least time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One program's part in a step."""

    phase: str
    program: str  # as `podium.plan.phases` names it
    calls: float
    rounds: float  # of its loop, in each call: decode steps, micro-batches, prompts that enter slots of a device
    closed_form: PhaseEstimate | None = None
    repeats: float = 0.0  # how often a step does what `closed_form` describes

    @property
    def closed_form_flops(self) -> float:
        """Operations of a step by the closed form."""
        return self.repeats * self.closed_form.flops if self.closed_form else 0.0


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
    """Whether a run fits an accelerator, what limits it, and how long its steps take.

    Args:
        config: of the run.
        accelerator: from `find_accelerator`.
        fast: the closed form alone.
        lengths: where the lengths of prompts and completions come from, as `draw_lengths` takes them.
        progress: called when a phase's compilation begins, goes on and ends.
        decoder: the model's numbers; unset: those of the config's model.
        chip: constants of a device; unset: those of its generation. A CPU has none: its plan then has no seconds.
        whole: names of programs whose code is generated too: minutes each, for what is known of a TPU without.

    Raises:
        ValueError: the model, the mesh or the lengths cannot be used.
        CompilerError: a program could not be compiled.
    """
    decoder = decoder or find_architecture(config.model)
    run = make_sizes(config, decoder, accelerator)
    device = _Device(accelerator, chip or _own_chip(accelerator))
    drawn = draw_lengths(lengths, config)
    workload = simulate_rollout(drawn, config, shards=run.rollout_shards)
    micro_batches = packed_micro_batches(drawn, config, rows=run.rows * run.dp * run.fsdp)
    calls = step_calls(run, workload, micro_batches)
    jobs = [] if fast else make_jobs(config, decoder, accelerator, _slowest_first(calls), whole)
    compiled = compile_phases(jobs, progress=progress) if jobs else {}
    phases = tuple(device.phases(calls, compiled, run))
    host = device.host(sum(call.calls for call in calls))
    step = total([*(phase.seconds for phase in phases if phase.seconds), host]) if host else None
    return Plan(
        config=config.name or config.model,
        accelerator=accelerator.name,
        devices=accelerator.devices,
        hbm_bytes=accelerator.hbm_bytes,
        verdict=_verdict(phases, accelerator.hbm_bytes),
        spare_bytes=accelerator.hbm_bytes - max(phase.bytes for phase in phases),
        phases=phases,
        host=host,
        step=step,
        tokens_per_s_per_device=step.rate(workload.completion_tokens / accelerator.devices) if step else None,
        workload=workload,
        micro_batches=micro_batches,
        notes=explain(run, accelerator, phases, workload),
        estimate_only=not compiled,
        slots=config.rollout.slots,
        versions={"podium": __version__} | (compiler_versions(accelerator) if compiled else {}),
        mfu=device.mfu(run, drawn, phases),
    )


def _verdict(phases: Sequence[Phase], hbm_bytes: int) -> Verdict:
    refused = any(phase.refused for phase in phases)
    return "does_not_fit" if refused else judge((phase.bytes for phase in phases), hbm_bytes)


def _own_chip(accelerator: Accelerator) -> Chip | None:
    return None if accelerator.platform == "cpu" else load_chip(accelerator.generation)


def _slowest_first(calls: Sequence[Call]) -> list[str]:
    """The programs of some calls, those first that take long to compile."""
    ordered = sorted(calls, key=lambda call: SLOWEST_FIRST.index(call.phase))
    return list(dict.fromkeys(call.program for call in ordered))


def make_jobs(
    config: Config, decoder: DecoderConfig, accelerator: Accelerator, names: Sequence[str], whole: Collection[str] = ()
) -> list[Job]:
    """A compilation for each of these programs; what is compiled is kept in the user's cache folder."""
    common: dict[str, Any] = {"config": config, "decoder": decoder, "accelerator": accelerator}
    folder = cache_folder() / "programs"
    return [Job(phase=name, programs=folder, whole=name in whole, **common) for name in names]


def step_calls(run: RunSizes, workload: Workload, micro_batches: int) -> list[Call]:
    """Every program of a run, and how often a step calls it.

    The largest bucket is among them also where a step has no prompt of its length: memory must do for it.
    """
    algorithm, recipe = run.config.algorithm, run.recipe
    sequences = run.config.prompts_per_step * run.config.group_size
    prefills, copies, across = workload.prefill_calls, workload.insert_calls, workload.insert_across_calls
    copied = sequences / sum([*copies.values(), *across.values()]) / run.rollout_shards
    buckets = sorted({*prefills, *copies, *across, max(run.buckets)})
    steps, decodes = workload.decode_steps, workload.decode_calls
    batches, own = algorithm.minibatches, micro_batches / algorithm.minibatches
    scores = batches * (recipe.scores_old_logprobs + recipe.needs_reference)
    updates = batches * algorithm.updates_per_batch

    def call(
        program: str, form: PhaseEstimate, calls: float, *, rounds: float = 0, repeats: float | None = None
    ) -> Call:
        repeats = calls if repeats is None else repeats
        return Call(phase=form.name, program=program, calls=calls, rounds=rounds, closed_form=form, repeats=repeats)

    found = [Call(phase="init", program="init", calls=0, rounds=0), call("sync", closed_form.sync_phase(run), 1)]
    found += [call(f"prefill:{T}", closed_form.prefill_phase(run, T), prefills.get(T, 0)) for T in buckets]
    for program, counts, crosses in (("insert", copies, False), ("insert_across", across, True)):
        for T in buckets:
            if T in counts or crosses == (run.rollout_shards > 1):
                form = closed_form.insert_phase(run, T, crosses=crosses)
                found.append(call(f"{program}:{T}", form, counts.get(T, 0), rounds=copied))
    rounds = steps / decodes if decodes else 0.0
    found.append(call("decode", closed_form.decode_phase(run), decodes, rounds=rounds, repeats=steps))
    if scores:
        found.append(call("score", closed_form.score_phase(run), scores, rounds=own, repeats=scores * own))
    return [*found, call("update", closed_form.update_phase(run), updates, rounds=own, repeats=updates * own)]


@dataclasses.dataclass(frozen=True)
class _Device:
    """The device that a plan is for; makes phases from programs and closed forms."""

    accelerator: Accelerator
    chip: Chip | None  # None: its times are not known

    def phases(self, calls: list[Call], compiled: Mapping[str, CompiledPhase], run: RunSizes) -> Iterator[Phase]:
        """The phases of a run in its order, of programs that are compiled or else of the closed form."""
        for name in dict.fromkeys(call.phase for call in calls):
            own = [call for call in calls if call.phase == name]
            if compiled:
                yield self.compiled_phase(own, compiled)
            elif own[0].closed_form is not None:
                yield self.estimated_phase(own, run)
        resting = closed_form.checkpoint_phase(run)
        yield self.phase(resting.name, resting.parts)

    def compiled_phase(self, calls: list[Call], compiled: Mapping[str, CompiledPhase]) -> Phase:
        """One phase of programs that were compiled: memory of the largest, work of all."""
        largest = max((compiled[call.program] for call in calls), key=lambda each: each.device_bytes)
        code = sum(each.memory.code for each in compiled.values())  # of all programs: it stays
        parts = dict(largest.residents)
        for name, size in (*largest.parts.items(), ("code", code)):
            parts[name] = parts.get(name, 0) + size
        costs = [(call, compiled[call.program].cost(call.rounds)) for call in calls]
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

    def phase(self, name: str, parts: Mapping[str, int]) -> Phase:
        """A phase with its memory alone."""
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
        """Seconds of a phase's calls, and what most of them wait for; `lines` makes those of chips with so many links.

        A transfer uses the links of the worst placed chip, or all that go to a switch. Where it is not published which
        are connected, all of a chip's may be: then transfers may be that much faster.
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
        """Host time for a number of calls, while the device waits."""
        if self.chip is None:
            return None
        each = self.chip.calibration["host_s"]
        return Seconds(value=each.value, low=each.low, high=each.high) * calls

    def mfu(self, run: RunSizes, lengths: SequenceLengths, phases: Sequence[Phase]) -> Seconds | None:
        """The share of the peak that a step's updates reach, counted as `podium.models.flops` does."""
        seconds = next((phase.seconds for phase in phases if phase.name == "update"), None)
        if self.chip is None or seconds is None:
            return None
        work = step_work(lengths.prompts.tolist(), lengths.completions.tolist())
        peak = self.chip.peaks.flops_f32 if run.activation == F32 else self.chip.peaks.flops_bf16
        flops = run.config.algorithm.updates_per_batch * update_flops(run.decoder, work)
        return seconds.rate(flops / self.accelerator.devices / peak)


def closed_form_roofline(form: PhaseEstimate, run: RunSizes, peaks: Peaks, links: int) -> Roofline:
    """By totals: products or memory traffic, whichever takes longer, and transfers."""
    compute = form.flops / (peaks.flops_f32 if run.activation == F32 else peaks.flops_bf16)
    hbm, ici = form.hbm_bytes / peaks.hbm_bandwidth, form.ici_bytes / (links * peaks.link_bandwidth)
    if peaks.network_bandwidth:
        ici += run.network_bytes(form.name, form.ici_bytes) / peaks.network_bandwidth
    return Roofline(compute * (compute >= hbm), hbm * (hbm > compute), ici, latency=0.0)


def calibrated(lines: list[Line], chip: Chip, kind: str) -> tuple[Seconds, BoundBy]:
    """Seconds of calls on the device, and what most of them wait for; `lines` say how often, and the roofline of each.

    The chip's calibration says what share is reached of the roofline of an update, prefill or decode, the `kind`;
    transfers have a share of their own, and hops take what they take.
    """
    work, links, hops = chip.calibration[kind], chip.calibration["ici"], Factor(value=1.0, low=1.0, high=1.0, source="")
    shares: dict[BoundBy, Factor] = {"compute": work, "hbm": work, "ici": links, "latency": hops}
    parts: dict[BoundBy, Seconds] = {}
    for part, share in shares.items():
        least = sum(times * getattr(line, part) for times, line in lines)
        parts[part] = Seconds(value=least / share.value, low=least / share.high, high=least / share.low)
    seconds = sum(parts.values(), NO_TIME)
    return seconds, max(parts, key=lambda part: parts[part].value) if seconds.value else ""
