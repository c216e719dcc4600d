"""The device that a plan is for: phases with memory and seconds, from compiled programs or closed forms. No jax."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import podium.plan.closed_form.estimate as closed_form
from podium.accelerators import Accelerator
from podium.hlo.cost import Peaks, Roofline, roofline, sum_collectives
from podium.models.flops import step_work, update_flops
from podium.plan.calibration import Chip, Line, calibrated
from podium.plan.closed_form.estimate import PhaseEstimate
from podium.plan.closed_form.over_floor import beyond_floor
from podium.plan.compiled.compile_worker import CompiledPhase
from podium.plan.request.phase_sizes import F32, RunSizes, network_bytes
from podium.plan.request.simulated_device import Clock
from podium.plan.request.step_calls import Call, largest_calls
from podium.plan.request.workload import SequenceLengths
from podium.plan.result import BoundBy, LargeArray, Phase, Seconds, calibration_kind, total
from podium.plan.traced.trust import trust

ESTIMATED = (0.7, 1.5)
"""Factors that widen the range of the closed form's seconds, below and above: compiled programs that take most of a
step took 0.7 to 1.5 times as long (`benches.closed_form`); small prefills down to 0.54, syncs up to 3.3."""


@dataclasses.dataclass(frozen=True)
class Device:
    """The device that a plan is for; builds phases from compiled programs and closed forms."""

    accelerator: Accelerator
    chip: Chip | None  # None: its times are unknown

    def phases(self, calls: list[Call], compiled: Mapping[str, CompiledPhase], run: RunSizes) -> Iterator[Phase]:
        """The phases of a run in order; each from its compiled programs, or from the closed form if none were
        compiled.
        """
        for name in dict.fromkeys(call.phase for call in calls):
            own = [call for call in calls if call.phase == name]
            if all(call.program in compiled for call in own):
                phase = self.compiled_phase(own, compiled, run)
            elif own[0].closed_form is not None:
                phase = self.estimated_phase(own, run)
            else:
                continue
            yield phase
        resting = closed_form.checkpoint_phase(run)
        yield self.phase(resting.name, resting.parts)

    def compiled_phase(self, calls: list[Call], compiled: Mapping[str, CompiledPhase], run: RunSizes) -> Phase:
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
        # A CPU's caches hold arrays that count as memory traffic here, so no floor is given for it; nor is one given
        # for traced programs, whose instructions are not the compiler's.
        chip = None if self.accelerator.platform == "cpu" or largest.traced else self.chip
        over_floor, moves = beyond_floor(costs, run, chip.peaks) if chip else (None, ())
        resident = [LargeArray(name=name, shape="", bytes=size) for name, size in largest.residents.items()]
        phase = self.phase(calls[0].phase, parts)
        refused, known = any(compiled[call.program].refused for call in calls), trust(run, phase.name)
        return dataclasses.replace(
            phase,
            fits=phase.fits and not refused,
            refused=refused,
            seconds=seconds,
            bound_by=bound_by,
            largest=tuple(sorted((*resident, *largest.largest), key=lambda array: -array.bytes)),
            calls=sum(call.calls for call in calls),
            collectives=sum_collectives((call.calls, each) for call, cost in costs for each in cost.collectives),
            flops=sum(
                call.closed_form_flops if compiled[call.program].stand_in else call.calls * cost.flops
                for call, cost in costs
            ),
            closed_form_flops=sum(call.closed_form_flops for call in calls),
            compile_s=None if largest.traced else sum(compiled[call.program].compile_s for call in calls),
            compiled=not largest.traced,
            traced=largest.traced,
            low_bytes=int(known.low * phase.bytes) if largest.traced else 0,
            high_bytes=int(known.high * phase.bytes) if largest.traced else 0,
            over_floor=over_floor,
            moves=moves,
        )

    def estimated_phase(self, calls: list[Call], run: RunSizes) -> Phase:
        """One phase by the closed form."""
        forms = [(call, call.closed_form) for call in calls if call.closed_form is not None]
        largest = max((form for _, form in forms), key=lambda form: form.total)
        seconds, bound_by = self.closed_form_seconds([(call.repeats, form) for call, form in forms], run)
        if seconds:
            below, above = ESTIMATED
            seconds = dataclasses.replace(seconds, low=below * seconds.low, high=above * seconds.high)
        flops = sum(call.closed_form_flops for call in calls)
        return dataclasses.replace(
            self.phase(calls[0].phase, largest.parts),
            seconds=seconds,
            bound_by=bound_by,
            calls=sum(call.calls for call in calls),
            flops=flops,
            closed_form_flops=flops,
        )

    def with_stand_ins(
        self, calls: Sequence[Call], compiled: Mapping[str, CompiledPhase], run: RunSizes
    ) -> dict[str, CompiledPhase]:
        """The compiled programs, with the largest of each phase standing in for those of the phase that were not
        compiled.

        A stand-in needs at least the memory of the program that it stands for. Its work is scaled by the closed form's
        seconds of both. Phases whose largest program was not compiled get none.
        """
        found = dict(compiled)
        for name, largest in largest_calls(calls).items():
            others = [call for call in calls if call.phase == name and call.program not in compiled]
            if largest.program in compiled:
                whole = self._closed_form_s(largest, run)
                found |= {
                    call.program: compiled[largest.program].scaled(self._closed_form_s(call, run) / whole)
                    for call in others
                }
        return found

    def _closed_form_s(self, call: Call, run: RunSizes) -> float:
        """Seconds of a call's work by the closed form, done once; 1.0 if the device's speed is unknown."""
        form = call.closed_form
        assert form is not None
        seconds, _ = self.closed_form_seconds([(1.0, form)], run)
        return seconds.value if seconds else 1.0

    def closed_form_seconds(
        self, forms: Sequence[tuple[float, PhaseEstimate]], run: RunSizes
    ) -> tuple[Seconds | None, BoundBy]:
        """Like `timed`, for closed forms of one phase, each with how often its work is done."""
        return self.timed(
            forms[0][1].name,
            lambda chip, links: [(times, closed_form_roofline(form, run, chip.peaks, links)) for times, form in forms],
        )

    def clock(self, calls: list[Call], compiled: Mapping[str, CompiledPhase], run: RunSizes) -> Clock:
        """How long prefill calls and decode steps of each size take, and the host's time per call."""
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
        """Tokens per second and chip of decode steps in which all slots are busy."""
        slots = run.rollout.slots
        full = next(call for call in calls if call.program == f"decode:{slots}")
        seconds = next(self.phases([full], compiled, run)).seconds
        return rate(seconds, full.repeats * slots / self.accelerator.chips) if seconds else None

    def phase(self, name: str, parts: Mapping[str, int]) -> Phase:
        """A phase whose memory is known, but not its seconds."""
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
        """Seconds of a phase's calls, and the resource that bounds most of them; `lines(chip, links)` gives calls and
        rooflines.

        A transfer uses the links of the worst placed chip, or all links if they go to a switch. If it is not published
        which links are connected, the lower bound assumes all of them.
        """
        if self.chip is None or name == "init":
            return None, ""
        chip, kind = self.chip, calibration_kind(name)
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
    """The roofline from a closed form's totals: the longer of its compute and memory time.

    Passes over activations are instructions of their own, so their time adds to that of products. Launches and
    transfers are added, except for what is sent while the device computes.
    """
    flops = peaks.flops_f32 if run.activation == F32 else peaks.flops_bf16
    apart = form.passes
    multiplying, moving = form.flops / flops, (form.hbm_bytes - apart) / peaks.hbm_bandwidth
    passing = apart / peaks.hbm_bandwidth
    bound_by_flops = multiplying >= moving
    compute, hbm = (multiplying if bound_by_flops else 0.0), passing + (0.0 if bound_by_flops else moving)
    work, of_links = compute + hbm, links * peaks.link_bandwidth
    ici = (form.ici_bytes - form.hidden_bytes) / of_links + max(0.0, form.hidden_bytes / of_links - work)
    if peaks.network_bandwidth:
        ici += network_bytes(run, form.name, form.ici_bytes) / peaks.network_bandwidth
    copies = [(times, each / peaks.host_bandwidth, share * work) for times, each, share in form.copies if each]
    latency = max(0.0, form.kernels * peaks.kernel_s - work)
    return Roofline(compute, hbm, ici, latency, copies=tuple(copies))


def rate(seconds: Seconds, amount: float) -> Seconds | None:
    """The rate of producing an amount in this time; None if it takes no time."""
    return seconds.rate(amount) if seconds.value else None
