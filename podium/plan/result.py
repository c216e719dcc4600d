"""The plan of a run: a verdict, the memory and seconds of each phase, and the step that they make. No jax.

`podium.plan.planner` makes it; reports, comparisons and the trainer's own check read it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from podium.hlo.cost import CollectiveTotal
from podium.plan.workload import Workload

Verdict = Literal["fits", "does_not_fit", "too_close"]
BoundBy = Literal["compute", "hbm", "ici", "latency", "host", ""]
TOO_CLOSE = 0.03  # share of the memory by which the compiler's figure and a device's own were seen to differ
ESTIMATE_TOO_CLOSE = 0.08  # share by which the closed form was seen to be below the compiler's figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """A time with its range; also used for rates."""

    value: float
    low: float
    high: float

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(value=self.value + other.value, low=self.low + other.low, high=self.high + other.high)

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(value=self.value * times, low=self.low * times, high=self.high * times)

    def rate(self, amount: float) -> "Seconds":
        """The rate at which this time produces an amount, per second."""
        return Seconds(value=amount / self.value, low=amount / self.high, high=amount / self.low)


NO_TIME = Seconds(value=0.0, low=0.0, high=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargeArray:
    """An array that is alive at a phase's peak."""

    name: str
    shape: str
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One program of a run, or the state at rest: the memory that a device needs for it, and how long it takes."""

    name: str  # init, sync, prefill, copy, decode, score, update or checkpoint
    bytes: int  # at the peak, per device: residents, arguments, temporaries, and the code of all programs
    parts: Mapping[str, int]  # bytes by our names; they add up to `bytes`
    fits: bool
    refused: bool = False  # whether the compiler refuses the program because it does not fit
    seconds: Seconds | None = None  # of all its calls in a step, on the device; None: unknown, or not part of a step
    bound_by: BoundBy = ""  # what most of `seconds` waits for
    largest: tuple[LargeArray, ...] = ()  # the largest arrays first, residents among them
    calls: float = 0  # of its program in a step of the run
    collectives: tuple[CollectiveTotal, ...] = ()  # in a step; the one that sends most first
    flops: float = 0  # of one device in a step of the run
    closed_form_flops: float = 0  # by the closed form
    compile_s: float | None = None  # how long compiling took when it was done; None if nothing was compiled
    compiled: bool = False  # whether `bytes` is the compiler's figure rather than the closed form's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer for one config on one accelerator."""

    config: str  # name of the config
    accelerator: str
    devices: int
    hbm_bytes: int  # usable memory of a device
    verdict: Verdict
    spare_bytes: int  # of the phase with the least head-room; negative if it does not fit
    phases: tuple[Phase, ...]  # in the order of a run
    host: Seconds | None  # of the host in a step while devices wait; in no phase's seconds
    step: Seconds | None
    tokens_per_s_per_device: Seconds | None  # completion tokens of a step, per second and device
    workload: Workload  # of the rollout
    micro_batches: int  # of all updates of a step
    notes: tuple[str, ...]  # sentences about what the numbers do not show
    estimate_only: bool  # whether no phase was compiled
    versions: Mapping[str, str]  # of Podium and the compiler
    mfu: Seconds | None = None  # share of the peak that a step's updates reach (`podium.models.flops`), not a time
    slots: int = 0  # of the rollout
    # Completion tokens per second and device, by the devices' time alone: of a rollout, with its sync and prefill, and
    # of its decode steps in which every slot may have a sequence
    rollout_rate: Seconds | None = None
    full_slots_rate: Seconds | None = None

    @property
    def worst(self) -> Phase:
        """The phase with the least head-room."""
        return max(self.phases, key=lambda phase: phase.bytes)

    def phase(self, name: str) -> Phase:
        """The phase of that name, which must exist."""
        return next(phase for phase in self.phases if phase.name == name)

    def find_phase(self, name: str) -> Phase | None:
        """The phase of that name, if there is one."""
        return next((phase for phase in self.phases if phase.name == name), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """The memory of the program that needs most among those that a search compiles."""

    phase: str
    bytes: int  # of a device: what stays beside the program, all that it allocates, its code
    refused: bool  # whether the compiler refuses the program, whatever else is on the device
    compiled: bool

    def fits(self, hbm_bytes: int) -> bool:
        """Whether the program compiles and its peak fits in a device."""
        return not self.refused and self.bytes <= hbm_bytes

    def has_room(self, hbm_bytes: int) -> bool:
        """Whether it fits and is not too close to the limit to tell."""
        return not self.refused and self.bytes < (1 - margin(self.compiled)) * hbm_bytes


def margin(compiled: bool) -> float:
    """The share of the memory by which a figure of the compiler, or of the closed form, may be wrong."""
    return TOO_CLOSE if compiled else ESTIMATE_TOO_CLOSE


def judge(phase_bytes: Iterable[int], hbm_bytes: int, *, compiled: bool = True) -> Verdict:
    """Whether phases fit; too close if the largest is within its own error of the limit, on either side."""
    worst = max(phase_bytes)
    if abs(worst - hbm_bytes) <= margin(compiled) * hbm_bytes:
        return "too_close"
    return "fits" if worst < hbm_bytes else "does_not_fit"


def total(times: Iterable[Seconds]) -> Seconds:
    """The sum of times of one machine; ranges add up, because a slow or quick machine affects all of them alike."""
    return sum(times, NO_TIME)
