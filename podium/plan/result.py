"""The plan of a run: a verdict, the memory and seconds of each phase, and those of a step. No jax.

`podium.plan.planner` makes it; reports, comparisons and the trainer's own check read it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from podium.accelerators import GIB
from podium.hlo.cost import CollectiveTotal
from podium.observe.html_table import table
from podium.plan.request.workload import Workload

STEP_PARTS = ("sync", "rollout", "reward", "score", "update")
"""The parts of a step that users see, in order; `host` comes last."""
_PART_OF = {
    "init": "init",
    "sync": "sync",
    "prefill": "rollout",
    "copy": "rollout",
    "decode": "rollout",
    "reward": "reward",
    "critic": "update",
    "update": "update",
    "checkpoint": "checkpoint",
}
Verdict = Literal["fits", "does_not_fit", "too_close"]
BoundBy = Literal["compute", "hbm", "ici", "latency", "host", ""]
By = Literal["compiler", "trace", "closed_form"]
"""What a plan's figures come from. With `trace`, programs that decide whether the run fits are compiled too."""
Made = Literal["compiled", "traced", "estimated"]
"""How a plan's figures were found: estimated is by the closed form alone."""
TOO_CLOSE = 0.03  # largest relative difference seen between the compiler's figure and a device's measurement
AT_REST = ("copy", "checkpoint")
"""Phases that need no memory beside what stays between programs, which is an exact sum even without a compiler."""
ESTIMATE_TOO_CLOSE = 0.2
"""Like TOO_CLOSE, for the closed form: the most by which it fell below the compiler's figure, but for attention whose
blocks are kept for the backward pass (`benches.traced`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """A time with its range, in seconds; also used for rates."""

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> "Seconds":
        """A figure without a range."""
        return cls(value=value, low=value, high=value)

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(value=self.value + other.value, low=self.low + other.low, high=self.high + other.high)

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(value=self.value * times, low=self.low * times, high=self.high * times)

    def rate(self, amount: float) -> "Seconds":
        """The rate, per second, of producing an amount in this time."""
        return Seconds(value=amount / self.value, low=amount / self.high, high=amount / self.low)


def part_of(phase: str) -> str:
    """The part of a step to which a phase belongs: `init`, `checkpoint`, or one of STEP_PARTS.

    Phases that are not listed are those in which a model of the run scores a batch.
    """
    return _PART_OF.get(phase, "score")


def calibration_kind(phase: str) -> str:
    """The calibration of a phase; those that compute no batch and no prompt stream memory, as decoding does."""
    if part_of(phase) in ("reward", "score", "update"):
        return "update"
    return "prefill" if phase == "prefill" else "decode"


NO_TIME = Seconds.exactly(0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargeArray:
    """An array alive at a phase's peak."""

    name: str
    shape: str
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """Instructions of a phase, other than products, that do the same with arrays of the same shape."""

    what: str  # such as `slice of rollout_weights bf16[1,2048,11008]`
    share: float  # of the phase's time without transfers and launches
    computes: bool  # whether it computes something, so that it is more than a copy, cast, join or slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One program of a run, or the checkpoint: the memory that a device needs for it, and its seconds."""

    name: str  # init, sync, prefill, copy, decode, score, update or checkpoint
    bytes: int  # at the peak, per device: residents, arguments, temporaries, and the code of all programs
    parts: Mapping[str, int]  # bytes by kind of array; they add up to `bytes`
    fits: bool
    refused: bool = False  # whether the compiler rejects the program because it does not fit
    seconds: Seconds | None = None  # of all its calls in a step, on the device; None: unknown, or not part of a step
    bound_by: BoundBy = ""  # what bounds most of `seconds`
    largest: tuple[LargeArray, ...] = ()  # the largest arrays, in descending order, residents included
    calls: float = 0  # calls of its program in a step
    collectives: tuple[CollectiveTotal, ...] = ()  # in a step, in descending order of bytes sent
    flops: float = 0  # of one device in a step
    closed_form_flops: float = 0  # the same by the closed form
    compile_s: float | None = None  # seconds of the original compilation; None if nothing was compiled
    compiled: bool = False  # whether `bytes` is the compiler's figure
    traced: bool = False  # whether `bytes` is of a traced program; of the closed form if it is neither
    low_bytes: int = 0  # the least that the device may need; 0: `bytes`, less its margin of error
    high_bytes: int = 0  # the most, likewise
    over_floor: float | None = None
    """Ratio of the time without transfers and launches to the minimum time, which is that of the closed form's
    operations or of the bytes that no compiler can avoid; None if the phase is not compiled or not part of a step."""
    moves: tuple[Move, ...] = ()
    """The instructions other than products that take most of that time, in descending order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of one config on one accelerator."""

    config: str  # name of the config
    accelerator: str
    devices: int
    hbm_bytes: int  # usable memory of a device
    verdict: Verdict
    spare_bytes: int  # memory left in the tightest phase; negative if it does not fit
    phases: tuple[Phase, ...]  # in order of execution
    host: Seconds | None  # host seconds in a step during which devices wait; not part of any phase's seconds
    step: Seconds | None
    tokens_per_s_per_chip: Seconds | None  # completion tokens of a step, per second and chip
    workload: Workload  # the rollout of one step
    micro_batches: float  # in all updates of a step, on average
    notes: tuple[str, ...]  # sentences about what the numbers do not show
    estimate_only: bool  # whether no phase was compiled
    versions: Mapping[str, str]  # of Podium and the compiler
    calibration: str = ""  # where the shares of the roofline come from; empty if its seconds are unknown
    doubts: tuple[str, ...] = ()  # disagreements between the reader of compiled programs and their compiler
    environments: Seconds | None = None  # time in a step while all conversations wait for replies; in no phase
    mfu: Seconds | None = None  # share of peak FLOPs that a step's updates reach (`podium.models.flops`)
    slots: int = 0  # decode slots of the rollout
    # Completion tokens per second and chip, from device time alone: of the rollout including sync and prefill, and of
    # decode steps with every slot occupied
    rollout_rate: Seconds | None = None
    full_slots_rate: Seconds | None = None

    @property
    def worst(self) -> Phase:
        """The phase with the least memory left."""
        return max(self.phases, key=lambda phase: phase.bytes)

    def phase(self, name: str) -> Phase:
        """The phase with this name, which must exist."""
        return next(phase for phase in self.phases if phase.name == name)

    def find_phase(self, name: str) -> Phase | None:
        """The phase with this name, or None."""
        return next((phase for phase in self.phases if phase.name == name), None)

    @property
    def traced(self) -> bool:
        """Whether its largest programs were traced, of which some may have been compiled too."""
        return any(phase.traced for phase in self.phases)

    @property
    def made(self) -> Made:
        """How its figures were found."""
        return "traced" if self.traced else "estimated" if self.estimate_only else "compiled"

    def _repr_html_(self) -> str:
        """Show the verdict, the memory and the seconds of a step in a notebook."""
        worst, step = self.worst, self.step
        facts = [
            ("config", self.config),
            ("machine", self.accelerator),
            ("verdict", f"{self.verdict.replace('_', ' ')} ({self.made})"),
            ("memory of a device", f"{worst.bytes / GIB:.1f} of {self.hbm_bytes / GIB:.4g} GiB, in {worst.name}"),
        ]
        if step is not None:
            facts.append(("seconds of a step", f"{step.value:.2g} ({step.low:.2g} to {step.high:.2g})"))
        return table((), facts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak memory of the largest program among those that a search compiles, traces or estimates."""

    phase: str
    bytes: int  # per device: residents, the program's allocations, and code
    refused: bool  # whether the compiler rejects the program, whatever else is on the device
    compiled: bool
    high_bytes: int = 0  # the most that a traced program may need; 0: `bytes` and the margin of error

    @property
    def made_by(self) -> str:
        """Where the figure comes from, in a word or two."""
        if self.compiled:
            return "its refusal" if self.refused else "compiler"
        return "trace" if self.high_bytes else "closed form"

    def fits(self, hbm_bytes: int) -> bool:
        """Whether the program compiles and its peak fits in a device's memory."""
        return not self.refused and self.bytes <= hbm_bytes

    def has_room(self, hbm_bytes: int) -> bool:
        """Whether it fits by more than the margin of error."""
        most = self.high_bytes or self.bytes / (1 - margin(self.compiled))
        return not self.refused and most < hbm_bytes


def margin(compiled: bool) -> float:
    """The share of memory by which a figure may be off: the compiler's, or the closed form's."""
    return TOO_CLOSE if compiled else ESTIMATE_TOO_CLOSE


def judge(phase_bytes: Iterable[int], hbm_bytes: int, *, compiled: bool = True) -> Verdict:
    """Judge phases by the largest: `too_close` if it is within its margin of error of the limit, on either side."""
    worst = max(phase_bytes)
    if abs(worst - hbm_bytes) <= margin(compiled) * hbm_bytes:
        return "too_close"
    return "fits" if worst < hbm_bytes else "does_not_fit"


def judge_phases(phases: Iterable[Phase], hbm_bytes: int) -> Verdict:
    """Judge phases, each by its range: `too_close` if that of one lies on both sides of the limit, and none above."""
    verdict: Verdict = "fits"
    for phase in phases:
        off = int(margin(phase.compiled or phase.name in AT_REST) * hbm_bytes)
        if phase.refused or (phase.low_bytes or phase.bytes - off) > hbm_bytes:
            return "does_not_fit"
        if (phase.high_bytes or phase.bytes + off) >= hbm_bytes:
            verdict = "too_close"
    return verdict


def total(times: Iterable[Seconds]) -> Seconds:
    """The sum of times on one machine; the ranges add up, because a slow or fast machine affects all times alike."""
    return sum(times, NO_TIME)
