"""The plan of a run: every phase's memory and seconds, and a step made of them.

Memory is the compiler's for each program, plus what is alive beside it. A step is as many calls of each program as the
engine's scheduler and the trainer's packing make for a draw of lengths; a call takes the roofline's time, divided by
the shares of it that chips were seen to reach. Without a compiler both come from the closed form. No jax here.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from podium import __version__
from podium.accelerators import Accelerator
from podium.config.schema import Config
from podium.hlo.cost import Cost, Roofline
from podium.hlo.cost import estimate as roofline_of
from podium.models.architecture import DecoderConfig
from podium.models.presets import find_architecture
from podium.plan.calibration import Chip, Factor, load_chip
from podium.plan.compile import LIMIT_S, OnProgress, compile_phases
from podium.plan.compiled import CompiledPhase
from podium.plan.estimate import (
    PhaseEstimate,
    checkpoint_phase,
    decode_phase,
    place_phase,
    prefill_phase,
    score_phase,
    sync_phase,
    update_phase,
)
from podium.plan.lengths import Composition, compose, draw_lengths, packed_micro_batches
from podium.plan.notes import notes_of
from podium.plan.result import NO_TIME, BoundBy, Collective, LargeArray, Phase, Plan, Seconds, judge, total
from podium.plan.sizes import F32, RunSizes, make_sizes
from podium.plan.store import cache_folder, compiler_versions
from podium.plan.worker import Job

KINDS: Mapping[str, str] = {"prefill": "prefill", "score": "update", "update": "update"}
"""Whose calibration a phase has; what is not named streams memory, as decoding does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One program's part in a step."""

    phase: str
    program: str
    """As `podium.plan.phases` names it."""
    calls: float
    rounds: float
    """Of its loop, in each call: decode steps, micro-batches, prompts placed on a device."""
    closed_form: PhaseEstimate | None = None
    repeats: float = 0.0
    """How often a step does what `closed_form` describes."""

    @property
    def closed_form_flops(self) -> float:
        """Of a step."""
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
    limit_s: float = LIMIT_S,
) -> Plan:
    """Whether a run fits an accelerator, what binds it, and how long its steps take.

    Args:
        config: of the run.
        accelerator: from `find_accelerator`.
        fast: the closed form alone; GPUs have nothing else.
        lengths: where the lengths of prompts and completions come from, as `draw_lengths` takes them.
        progress: told when a phase's compilation begins, goes on and ends.
        decoder: the model's numbers; unset: those of the config's model.
        chip: constants of a device; unset: those of the accelerator's generation. A CPU has none of its own: without
            them the plan has no seconds.
        limit_s: seconds that one compilation may take.

    Raises:
        ValueError: the model, the mesh or the lengths cannot be used.
        CompilerError: a program could not be compiled.
    """
    decoder = decoder or find_architecture(config.model)
    run = make_sizes(config, decoder, accelerator)
    is_cpu = accelerator.generation == "cpu"
    device = _Device(accelerator, chip or (None if is_cpu else load_chip(accelerator.generation)))
    drawn = draw_lengths(lengths, config)
    composition = compose(drawn, config, shards=run.rollout_shards)
    micro_batches = packed_micro_batches(drawn, config, rows=run.rows * run.dp * run.fsdp)
    calls = step_calls(run, composition, micro_batches)
    compiled: dict[str, CompiledPhase] = {}
    if not fast and (accelerator.compiles or is_cpu):
        names = list(dict.fromkeys(call.program for call in sorted(calls, key=_longest_first)))
        compiled = compile_phases(make_jobs(config, decoder, accelerator, names), progress=progress, limit_s=limit_s)
    phases = tuple(device.phases(calls, compiled, run))
    host = device.host(sum(call.calls for call in calls))
    step = total([*(phase.seconds for phase in phases if phase.seconds), host]) if host else None
    return Plan(
        config=config.name or config.model,
        accelerator=accelerator.name,
        devices=accelerator.devices,
        hbm_bytes=accelerator.hbm_bytes,
        verdict=judge((phase.bytes for phase in phases), accelerator.hbm_bytes),
        spare_bytes=accelerator.hbm_bytes - max(phase.bytes for phase in phases),
        phases=phases,
        host=host,
        step=step,
        tokens_per_s_per_device=step.rate(composition.completion_tokens / accelerator.devices) if step else None,
        composition=composition,
        micro_batches=micro_batches,
        notes=notes_of(run, accelerator, phases, composition),
        estimate_only=not compiled,
        versions={"podium": __version__} | (compiler_versions(accelerator) if compiled else {}),
    )


def make_jobs(config: Config, decoder: DecoderConfig, accelerator: Accelerator, names: Sequence[str]) -> list[Job]:
    """A compilation for each of these programs; what is compiled is kept in the user's cache folder."""
    common: dict[str, Any] = {"config": config, "decoder": decoder, "accelerator": accelerator}
    return [Job(phase=name, programs=cache_folder() / "programs", **common) for name in names]


def step_calls(run: RunSizes, composition: Composition, micro_batches: int) -> list[Call]:
    """Every program of a run, and how often a step calls it.

    The largest bucket is among them also where a step has no prompt of its length: memory must do for it.
    """
    algorithm, recipe = run.config.algorithm, run.recipe
    sequences = run.config.prompts_per_step * run.config.group_size
    prefills, places, across = composition.prefill_calls, composition.place_calls, composition.place_across_calls
    placed = sequences / sum([*places.values(), *across.values()]) / run.rollout_shards
    buckets = sorted({*prefills, *places, *across, max(run.buckets)})
    looks, steps = composition.decode_calls, composition.decode_steps
    batches, own = algorithm.minibatches, micro_batches / algorithm.minibatches
    scores = batches * (recipe.scores_old_logprobs + recipe.needs_reference)
    updates = batches * algorithm.updates_per_batch

    def call(phase: str, form: PhaseEstimate, calls: float, rounds: float, repeats: float, program: str = "") -> Call:
        own = program or phase
        return Call(phase=phase, program=own, calls=calls, rounds=rounds, closed_form=form, repeats=repeats)

    def place(T: int, calls: int, *, crosses: bool) -> Call:
        program = f"place_across:{T}" if crosses else f"place:{T}"
        return call("place", place_phase(run, T, crosses=crosses), calls, placed, calls, program)

    found = [
        Call(phase="init", program="init", calls=0, rounds=0),
        call("sync", sync_phase(run), 1, 0, 1),
        *(
            call("prefill", prefill_phase(run, T), prefills.get(T, 0), 0, prefills.get(T, 0), f"prefill:{T}")
            for T in buckets
        ),
        *(place(T, n, crosses=False) for T in buckets if (n := places.get(T, 0)) or run.rollout_shards == 1),
        *(place(T, across.get(T, 0), crosses=True) for T in buckets if run.rollout_shards > 1),
        call("decode", decode_phase(run), looks, steps / looks if looks else 0.0, steps),
    ]
    if scores:
        found.append(call("score", score_phase(run), scores, own, scores * own))
    return [*found, call("update", update_phase(run), updates, own, updates * own)]


def _longest_first(call: Call) -> int:
    """Rank of how long a program takes to compile."""
    return ("update", "decode", "score", "prefill", "sync", "place", "init").index(call.phase)


@dataclasses.dataclass(frozen=True)
class _Device:
    """What a plan's phases are measured by."""

    accelerator: Accelerator
    chip: Chip | None
    """None: its times are not known."""

    def phases(self, calls: list[Call], compiled: Mapping[str, CompiledPhase], run: RunSizes) -> Iterator[Phase]:
        """The phases of a run in its order, of programs that are compiled or else of the closed form."""
        for name in dict.fromkeys(call.phase for call in calls):
            own = [call for call in calls if call.phase == name]
            if compiled:
                yield self.compiled_phase(own, compiled)
            elif own[0].closed_form is not None:
                yield self.estimated_phase(own, float32=run.activation == F32)
        resting = checkpoint_phase(run)
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
            calls[0].phase, [(call.calls, self.roofline(cost)) for call, cost in costs] if self.chip else []
        )
        resident = [LargeArray(name=name, shape="", bytes=size) for name, size in largest.residents.items()]
        return dataclasses.replace(
            self.phase(calls[0].phase, parts),
            seconds=seconds,
            bound_by=bound_by,
            largest=tuple(sorted((*resident, *largest.largest), key=lambda array: -array.bytes)),
            calls=sum(call.calls for call in calls),
            collectives=tuple(_collectives([(call.calls, cost) for call, cost in costs])),
            flops=sum(call.calls * cost.flops for call, cost in costs),
            closed_form_flops=sum(call.closed_form_flops for call in calls),
            compile_s=sum(compiled[call.program].compile_s for call in calls),
            compiled=True,
        )

    def estimated_phase(self, calls: list[Call], *, float32: bool) -> Phase:
        """One phase by the closed form."""
        forms = [(call, call.closed_form) for call in calls if call.closed_form is not None]
        largest = max((form for _, form in forms), key=lambda form: form.total)
        lines = [(call.repeats, self.closed_form_roofline(form, float32)) for call, form in forms] if self.chip else []
        seconds, bound_by = self.timed(calls[0].phase, lines)
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
            seconds=None,
            bound_by="",
            largest=tuple(LargeArray(name=part, shape="", bytes=size) for part, size in held.items()),
            calls=0,
            collectives=(),
            flops=0,
            closed_form_flops=0,
            compile_s=None,
            compiled=False,
        )

    def timed(self, name: str, lines: list[tuple[float, Roofline]]) -> tuple[Seconds | None, BoundBy]:
        """Seconds of a phase's calls, each with how often it is made, and what most of them wait for."""
        if self.chip is None or name == "init":
            return None, ""
        return calibrated(lines, self.chip, KINDS.get(name, "decode"))

    def roofline(self, cost: Cost) -> Roofline:
        """Of one call of a compiled program."""
        assert self.chip is not None
        return roofline_of(cost, self.chip, links=self.links)

    def closed_form_roofline(self, form: PhaseEstimate, float32: bool) -> Roofline:
        """By totals: products or memory traffic, whichever takes longer, and transfers."""
        assert self.chip is not None
        compute = form.flops / (self.chip.flops_f32 if float32 else self.chip.flops_bf16)
        hbm, ici = form.hbm_bytes / self.chip.hbm_bandwidth, form.ici_bytes / (self.links * self.chip.link_bandwidth)
        return Roofline(compute * (compute >= hbm), hbm * (hbm > compute), ici, latency=0.0)

    @property
    def links(self) -> int:
        """Wires that a transfer uses at once: those of the worst placed chip, or all that go to a switch."""
        assert self.chip is not None
        return max(1, self.accelerator.ici_links if self.accelerator.torus else self.chip.links)

    def host(self, calls: float) -> Seconds | None:
        """What the host does between so many calls, while the device waits."""
        if self.chip is None:
            return None
        each = self.chip.calibration["host_s"]
        return Seconds(value=each.value, low=each.low, high=each.high) * calls


def calibrated(lines: list[tuple[float, Roofline]], chip: Chip, kind: str) -> tuple[Seconds, BoundBy]:
    """Seconds of calls on the device, and what most of them wait for.

    Args:
        lines: how often, and the roofline of each time.
        chip: whose calibration says what share of the roofline is reached.
        kind: which share: update, prefill or decode; transfers have their own, and hops take what they take.
    """
    work, wires, hops = chip.calibration[kind], chip.calibration["ici"], Factor(value=1.0, low=1.0, high=1.0, source="")
    shares: dict[BoundBy, Factor] = {"compute": work, "hbm": work, "ici": wires, "latency": hops}
    parts: dict[BoundBy, Seconds] = {}
    for part, share in shares.items():
        least = sum(times * getattr(line, part) for times, line in lines)
        parts[part] = Seconds(value=least / share.value, low=least / share.high, high=least / share.low)
    seconds = sum(parts.values(), NO_TIME)
    return seconds, max(parts, key=lambda part: parts[part].value) if seconds.value else ""


def _collectives(costs: list[tuple[float, Cost]]) -> Iterator[Collective]:
    """All transfers of a phase in a step, those together that are alike."""
    sums: dict[tuple, tuple[float, float]] = {}
    for times, cost in costs:
        for each in cost.collectives:
            key = (each.kind, each.axes, each.group, each.overlaps)
            calls, sent = sums.get(key, (0.0, 0.0))
            sums[key] = (calls + times * each.calls, sent + times * each.sent)
    for (kind, axes, group, overlaps), (calls, sent) in sorted(sums.items(), key=lambda item: -item[1][1]):
        yield Collective(kind=kind, axes=axes, group=group, overlaps=overlaps, calls=calls, sent=sent)
