"""The candidates of `--fit`: settings of the update and of the rollout, each with its cost by the closed form. No jax.

What an update needs and how long it takes does not depend on the rollout's settings, nor the reverse, apart from a few
settings that both share. So each half of a step is costed separately, and a pair of halves is chosen.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from podium.config.schema import Remat
from podium.config.sizes import check_split, table_pages
from podium.plan.calibration import find_chip
from podium.plan.closed_form.estimate import decode_phase
from podium.plan.planned_device import Device
from podium.plan.planner import is_compiled
from podium.plan.request.candidate import Change, Changes, Value
from podium.plan.request.phase_sizes import Planned, RunSizes
from podium.plan.request.planned_rows import optimizer_steps
from podium.plan.request.step_calls import Call, packed_run, rollout_calls, update_calls
from podium.plan.request.workload import SequenceLengths, no_rollout, simulate_rollout
from podium.plan.result import Phase, Plan, margin, part_of, total
from podium.run.resolve import resolve_batch, resolve_update
from podium.train.batches.shapes import pack

APART = 1.15  # ratio between neighbouring numbers of rows that are tried
TIGHT = 0.8  # share of the memory above which smaller variants of a candidate are tried too
FAR = 1.3  # share of the memory above which a candidate's variants with more rows are not tried
CUT = 0.05  # share of a peak that an array must have for a smaller one to be tried
BELOW = (FAR, 1.0, 0.95, 0.9, 1 - margin(False))  # shares of the memory below each of which the fastest is simulated
SIMULATED = 4  # rollouts below the smallest share that are simulated, for each choice of shared settings
COARSE = 64  # decode calls that the longest completion is simulated with
ALIKE = 0.02  # share of the fastest candidate's seconds within which fewer changes are better
WORTH = 0.97  # share of the seconds of what fits above which something faster is not worth a compilation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Half:
    """Settings of one half of a step, and its cost by the closed form."""

    changes: Changes
    """The half's settings that differ from the run's."""
    peaks: Mapping[str, int]
    """Bytes on a device at the peak of each phase."""
    seconds: float
    """Seconds in a step, including the host's."""
    like: str
    """A label shared by halves whose estimates are off by similar factors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Settings that both halves share, and the candidates for the halves with them."""

    changes: Changes
    compiled: bool
    """Whether the compiler can judge them."""
    ordinary: bool
    """Whether rows are split as the run's own mesh splits them."""
    make_updates: Callable[[], Sequence[Half]]
    make_rollouts: Callable[[], Sequence[Half]]

    @functools.cached_property
    def updates(self) -> Sequence[Half]:
        """Candidates for the update."""
        return self.make_updates()

    @functools.cached_property
    def rollouts(self) -> Sequence[Half]:
        """Candidates for the rollout."""
        return self.make_rollouts()

    @property
    def simulated(self) -> Sequence[Half]:
        """The candidates for the rollout if they were asked for, else none: making them takes long."""
        return vars(self).get("rollouts", ())


class Pair(NamedTuple):
    """An update and a rollout with the same shared settings."""

    place: Place
    update: Half
    rollout: Half

    @property
    def changes(self) -> Changes:
        """All changes to the run."""
        return (*self.place.changes, *self.update.changes, *self.rollout.changes)

    @property
    def seconds(self) -> float:
        """Seconds of a step, by the closed form."""
        return self.update.seconds + self.rollout.seconds


class Halves:
    """The candidates for one run on one machine; settings in `fixed` keep their values."""

    def __init__(self, run: Planned, lengths: str, fixed: Collection[str] = ()) -> None:
        """Draw the lengths of a step. Raises ValueError if their source is invalid."""
        self.own = run
        self.machine = run.sizes.accelerator
        self.fixed = frozenset(fixed)
        self.drawn: SequenceLengths = run.sizes.draw_lengths(lengths)
        self.device = Device(self.machine, find_chip(self.machine.generation))

    def places(self) -> Iterator[Place]:
        """The values of the shared settings, the run's own first, with the candidates for both halves."""
        choices: dict[str, list[Value]] = {"mesh": self._values("mesh", self._meshes())}
        if adapters := self._adapters():
            choices["lora.rollout"] = self._values("lora.rollout", adapters)
        choices["train.offload_optimizer"] = self._values("train.offload_optimizer", (False, True))
        for values in itertools.product(*choices.values()):
            changes = self._changes(dict(zip(choices, values, strict=True)))
            try:
                run = self.own.changed(changes)
            except ValueError:  # a mesh over which the settings do not divide
                continue
            yield Place(
                changes=changes,
                compiled=is_compiled(run.sizes),
                ordinary=run.config.mesh == self.own.config.mesh,
                make_updates=functools.partial(self._updates, run),
                make_rollouts=functools.partial(self._rollouts, run),
            )

    def _values(self, key: str, values: Iterable[Value]) -> list[Value]:
        """The values of a setting to try, the run's own first."""
        own = self.own.value(key)
        if key in self.fixed:
            return [own]
        return list(dict.fromkeys((own, *values)))

    def _changes(self, values: Mapping[str, Value]) -> Changes:
        """The values that differ from the run's, as changes."""
        old = {key: self.own.value(key) for key in values}
        return tuple(Change(key=key, value=value, old=old[key]) for key, value in values.items() if value != old[key])

    def _adapters(self) -> Sequence[Value]:
        """Ways of the rollout to apply adapters: on a GPU, with one copy of the frozen weights or with two."""
        lora = self.own.config.lora
        return (
            () if lora is None or lora.rollout == "merged" or self.own.sizes.platform != "gpu" else ("apart", "shared")
        )

    def _meshes(self) -> Iterator[Value]:
        """Meshes that split each row over 2, 4, ... devices that the run's mesh splits weights over."""
        mesh = self.own.sizes.mesh
        if mesh["sp"] > 1:
            return
        parts = 2
        while mesh["fsdp"] % parts == 0 and parts <= self.machine.devices_per_host:
            axes = {**mesh, "fsdp": mesh["fsdp"] // parts, "sp": parts}
            yield ",".join(f"{axis}:{size}" for axis, size in axes.items() if size > 1)
            parts *= 2

    # The update

    def _updates(self, run: Planned) -> list[Half]:
        """Candidates for the update: for each way to recompute, fewest rows first, up to far too many."""
        key, unit = "train.rows_per_device", 1
        if run.config.train.tokens_per_device is not None:
            key, unit = "train.tokens_per_device", run.sizes.row_tokens
        numbers = sorted(
            {max(1, int(each or 0) // unit) for each in self._values(key, [unit * n for n in self._rows(run.sizes)])}
        )
        halves: list[Half] = []
        for remat in self._values("train.remat", get_args(Remat)):
            for rows in numbers:
                found = list(self._chunked(run, {"train.remat": remat, key: unit * rows}, rows))
                halves += found
                if min(max(half.peaks.values()) for half in found) > FAR * self.machine.hbm_bytes:
                    break
        return halves

    def _rows(self, run: RunSizes) -> list[int]:
        """Rows per device with which as few as possible of a micro-batch are padding, for each number of them."""
        batch, minibatches = run.spec.batch, run.spec.recipe.minibatches
        packs = [len(pack(samples, batch).rows) for samples in optimizer_steps(self.drawn, minibatches)]
        most = -(-max(packs) // run.batch_shards)
        found: list[int] = []
        for rows in (-(-most // count) for count in range(1, most + 1)):
            if not found or rows * APART <= found[-1]:
                found.append(rows)
        return found

    def _chunked(self, run: Planned, values: Mapping[str, Value], rows: int) -> Iterator[Half]:
        """A candidate for the update and, where memory is short, variants that compute fewer tokens at once."""
        chunks, head = ("train.layer_chunk_tokens", "train.head_chunk_tokens")
        whole, phase = self._update(run, values)
        yield whole
        if phase.bytes < TIGHT * self.machine.hbm_bytes:
            return
        own = run.config.train.head_chunk_tokens
        heads = [own // 4] if phase.parts.get("logits", 0) > CUT * phase.bytes and own >= 4 else []
        layers: list[Value] = []
        if phase.parts.get("layer_activations", 0) > CUT * phase.bytes and values["train.remat"] != "none":
            layers = [run.sizes.row_tokens * size for size in range(rows // 2, 0, -1) if not rows % size]
        of_head, of_layers = self._values(head, heads), self._values(chunks, layers)
        for tokens, size in itertools.product(of_head, of_layers):
            if tokens != own or size != run.config.train.layer_chunk_tokens:
                yield self._update(run, {**values, head: tokens, chunks: size})[0]

    def _update(self, planned: Planned, values: Mapping[str, Value]) -> tuple[Half, Phase]:
        """The cost of an update with these values, and its largest phase."""
        changes = self._changes(values)
        changed, run = planned.changed_settings(changes), planned.sizes
        spec = run.spec
        update = resolve_update(changed, spec.recipe, spec.machine, run.mesh)
        batch = resolve_batch(changed, spec.recipe, run.decoder, machine=spec.machine, mesh=run.mesh, update=update)
        spec = dataclasses.replace(spec, batch=batch, update=update)
        sized, count = packed_run(RunSizes(spec=spec), self.drawn)
        phases, seconds = self._cost(update_calls(sized, count), sized)
        remat, grouped = values["train.remat"], spec.update.row_groups > 1
        half = Half(
            changes=changes,
            peaks={phase.name: phase.bytes for phase in phases},
            seconds=seconds,
            like=f"{remat}{' in groups' if grouped else ''}",
        )
        return half, max(phases, key=lambda phase: phase.bytes)

    # The rollout

    def _rollouts(self, run: Planned) -> list[Half]:
        """Candidates for the rollout, simulated: the fastest by a rough estimate for several shares of the memory, the
        run's own, and the smallest.
        """
        found: list[_Rough] = []
        for layout, slots in itertools.product(self._layouts(), self._slots()):
            found += self._cached(run, {**layout, "rollout.slots": slots})
        found.sort(key=lambda each: (each.seconds, len(each.changes)))
        below = {share: [each for each in found if each.peak <= share * self.machine.hbm_bytes] for share in BELOW}
        near = [each for share in BELOW for each in below[share][:1]]
        own = [each for each in found if not each.changes]
        smallest = [min(found, key=lambda each: each.peak)] if found else []
        kept = [*below[min(BELOW)][:SIMULATED], *near, *own, *smallest]
        return [self._rollout(each) for each in {id(each): each for each in kept}.values()]

    def _slots(self) -> list[Value]:
        """Slots for all completions of a step, or for a half, a quarter, ... of them, over all devices."""
        sequences = self.own.config.prompts_per_step * self.own.config.group_size
        each = -(-sequences // self.machine.devices)
        return self._values("rollout.slots", [-(-each // part) * self.machine.devices for part in (1, 2, 4, 8, 16)])

    def _layouts(self) -> Iterator[Mapping[str, Value]]:
        """The run's layout, and all others in which each host decodes independently."""
        chips = self.machine.devices_per_host
        yield {}
        if not self.fixed.isdisjoint(("rollout.layout", "rollout.group_chips")):
            return
        for layout in ("replicated", "tensor") if chips > 1 else ():
            yield {"rollout.layout": layout, "rollout.group_chips": None}
        for size in range(2, chips):
            if chips % size == 0:
                yield {"rollout.layout": "hybrid", "rollout.group_chips": size}

    def _cached(self, run: Planned, values: Mapping[str, Value]) -> Iterator["_Rough"]:
        """A candidate for the rollout and, where memory is short, variants with a smaller cache or fewer prefill rows.

        Nothing if the values do not divide over the devices.
        """
        if (whole := self._rough(run, values)) is None:
            return
        yield whole
        if whole.peak < TIGHT * self.machine.hbm_bytes:
            return
        rollout, shards = whole.run.rollout, whole.run.rollout_shards
        least, each = table_pages(rollout), rollout.slots * table_pages(rollout) // shards
        unit = shards * rollout.page_tokens
        smaller = [max(each // share, least + 1) * unit for share in (2, 4)] if rollout.slots > shards else []
        fewer = [max(rollout.prefill_rows // shards // 4, 1) * shards] if whole.phase == "prefill" else []
        for tokens, rows in itertools.product(
            self._values("rollout.cache_tokens", smaller), self._values("rollout.prefill_rows", fewer)
        ):
            if tokens != rollout.cache_tokens or rows != rollout.prefill_rows:
                changed = self._rough(run, {**values, "rollout.cache_tokens": tokens, "rollout.prefill_rows": rows})
                if changed is not None:
                    yield changed

    def _rough(self, planned: Planned, values: Mapping[str, Value]) -> "_Rough | None":
        """A candidate for the rollout before it is simulated; None if the values do not divide over the devices."""
        changes = self._changes(values)
        try:
            run = planned.changed(changes).sizes
            check_split(run.rollout, run.rollout_shards)
            calls = rollout_calls(run, no_rollout(self.drawn))
        except ValueError:
            return None
        drawn = self.drawn.drawn
        prompt, tokens = float(self.drawn.prompts.mean()), float(drawn.mean())
        held = run.cache_tokens * run.rollout_shards / (prompt + tokens)
        steps = max(float(drawn.max()), float(drawn.sum()) / min(run.rollout.slots, held))
        form = decode_phase(run, run.rollout.slots, prompt + tokens / 2)
        step, _ = self.device.closed_form_seconds([(1.0, form)], run)
        peak, phase = max((call.closed_form.total, call.phase) for call in calls if call.closed_form is not None)
        return _Rough(changes, run, peak, phase, step.value * steps if step else 0.0)

    def _rollout(self, rough: "_Rough") -> Half:
        """The cost of a rollout, simulated."""
        run = rough.run
        if run.spec.recipe.demonstrations:
            workload = no_rollout(self.drawn)
        else:
            overlap = self.device.chip is not None
            workload = simulate_rollout(
                self.drawn, run.rollout, shards=run.rollout_shards, overlap=overlap, most_calls=COARSE
            )
        phases, seconds = self._cost(rollout_calls(run, workload), run)
        peaks = {phase.name: phase.bytes for phase in phases}
        return Half(changes=rough.changes, peaks=peaks, seconds=seconds, like="rollout")

    def _cost(self, calls: list[Call], run: RunSizes) -> tuple[list[Phase], float]:
        """The phases of some calls, and their seconds in a step with the host's."""
        names = {call.phase for call in calls}
        phases = [phase for phase in self.device.phases(calls, {}, run) if phase.name in names]
        host = self.device.host(sum(call.calls for call in calls))
        times = [*(phase.seconds for phase in phases), host]
        return phases, total(each for each in times if each is not None).value


class _Rough(NamedTuple):
    """A candidate for the rollout before it is simulated."""

    changes: Changes
    run: RunSizes
    peak: int
    """Bytes that the phase with the highest peak takes on a device."""
    phase: str
    """The phase with this peak."""
    seconds: float
    """A rough estimate of its seconds."""


class Choice:
    """The candidates of one search, with what the compiler said of some of them."""

    def __init__(
        self, places: Iterable[Place], hbm_bytes: int, *, fast: bool, factors: dict[tuple[str, str], float]
    ) -> None:
        """Prepare to consider places one after another, as they are needed; the first has the run's own shared
        settings.

        `factors` are traced or compiled bytes over estimated ones, by phase and kind of half; what is learned is added.
        """
        self._waiting = list(places)
        self._places: list[Place] = []
        self._hbm_bytes = hbm_bytes
        self.fast = fast
        self._exact: dict[tuple[int, str], float] = {}
        """Bytes of halves whose phase was compiled."""
        self._hopeful = False
        """Whether the pair to try next may have kinds that were not seen yet; set by `best`."""
        self._beside = 0.0
        """Bytes by which a whole plan, which has the code of all programs, exceeded the largest program alone."""
        self._factors = factors

    @property
    def estimated(self) -> int:
        """Number of halves so far."""
        return sum(len(place.updates) + len(place.simulated) for place in self._places)

    def best(self, *, hopeful: bool = False) -> Pair | None:
        """The pair to try next: the fastest that fits, or a hardly slower one that is known to fit; None if no pair
        fits.

        If `hopeful`, programs of kinds that were not seen yet fit if they do by the closed form's margin of error: for
        searches that trace one of each kind.
        """
        self._hopeful = hopeful
        pair = self._best(ordinary=True)
        while self._waiting and (pair is None or pair.seconds > (1 + ALIKE) * self._least_seconds()):
            if pair is not None and not self._ordinary(self._waiting[0]):
                break  # other places are for runs that do not fit otherwise
            self._places.append(self._waiting.pop(0))
            pair = self._best(ordinary=True)
        pair = pair or self._best(ordinary=False)
        known = self._best(ordinary=True, known=True)
        return known if pair and known and pair.seconds > WORTH * known.seconds else pair

    def limit(self, place: Place) -> float:
        """Bytes that a device has for a program that fits by more than the margin of error."""
        return (1 - margin(place.compiled and not self.fast)) * self._hbm_bytes - self._beside

    def need(self, half: Half) -> float:
        """Bytes that a device needs for a half: the compiler's figure, or else the corrected closed-form estimate; of a
        kind that was not seen yet the least that it may need, where the search is hopeful.
        """
        unseen = {(self._alone(half), half.like): 1 - margin(False)} if self._hopeful else {}
        factors = unseen | self._factors
        return max(
            self._exact.get((id(half), phase), size * factors.get((phase, half.like), 1.0))
            for phase, size in half.peaks.items()
        )

    def open_phases(self, pair: Pair) -> dict[str, Half]:
        """The phases of a pair to compile separately, each with its half; empty if the compiler cannot judge
        the pair.
        """
        if self.fast or not pair.place.compiled:
            return {}
        halves = (pair.update, pair.rollout)
        return {phase: half for half in halves if (phase := self._open(half)) is not None}

    def unseen(self, pair: Pair) -> dict[str, Half]:
        """The update's and the decode's phase of a pair, each with its half, if no program of their kind was seen."""
        halves = (pair.update, pair.rollout)
        largest = {self._alone(half): half for half in halves}
        return {phase: half for phase, half in largest.items() if (phase, half.like) not in self._factors}

    def correct(self, half: Half, phase: str, size: int | None) -> None:
        """Correct the estimates of halves of a kind by the trace of one; None: it could not be traced."""
        self._factors[phase, half.like] = 1.0 if size is None else size / half.peaks[phase]

    @staticmethod
    def _alone(half: Half) -> str:
        """The phase of a half whose program is traced or compiled alone."""
        alone = (name for name in half.peaks if name == "decode" or part_of(name) == "update")
        return max(alone, key=lambda name: half.peaks[name])

    def _open(self, half: Half) -> str | None:
        """The phase of a half that should be compiled separately; None if the half's memory is known, or if it is a
        decode sure to fit.

        Such a decode is compiled with the whole plan.
        """
        phase = self._alone(half)
        if (id(half), phase) in self._exact:
            return None
        sure = (1 - margin(False)) * self._hbm_bytes
        return None if phase == "decode" and self.need(half) <= sure else phase

    def learn(self, half: Half, phase: str, size: int, *, refused: bool) -> None:
        """Record the compiler's figure for a phase of a half."""
        self._exact[id(half), phase] = math.inf if refused else size
        self._factors[phase, half.like] = size / half.peaks[phase]

    def learn_plan(self, pair: Pair, plan: Plan) -> None:
        """Record a whole plan that does not fit."""
        alone = max(self.need(pair.update), self.need(pair.rollout))
        if not self.fast and plan.worst.bytes > alone:
            self._beside = max(self._beside, plan.worst.bytes - alone)
        for half in (pair.update, pair.rollout):
            for phase in plan.phases:
                if phase.name in half.peaks:
                    self.learn(half, phase.name, phase.bytes, refused=phase.refused)
        if max(self.need(pair.update), self.need(pair.rollout)) <= self.limit(pair.place):
            self.drop(pair)

    def drop(self, pair: Pair) -> None:
        """Never return this pair again: its settings contradict each other."""
        half = max((pair.update, pair.rollout), key=lambda half: len(half.changes))
        self._exact[id(half), next(iter(half.peaks))] = math.inf

    def _ordinary(self, place: Place) -> bool:
        return place.ordinary and (place.compiled or self.fast)

    def _least_seconds(self) -> float:
        """Seconds of the fastest halves, whatever memory they need."""
        updates = [half.seconds for place in self._places for half in place.updates]
        rollouts = [half.seconds for place in self._places for half in place.simulated]
        return min(updates) + min(rollouts)

    def _best(self, *, ordinary: bool, known: bool = False) -> Pair | None:
        """The fastest pair that fits, among `ordinary` places or among the others; of similarly fast ones, the fewest
        changes.
        """
        found: list[Pair] = []
        for place in self._places:
            if self._ordinary(place) is not ordinary:
                continue
            update = self._fastest(place, place.updates, known=known)
            if update is None:  # whatever memory the rollout needs, because simulating it takes long
                continue
            rollout = self._fastest(place, place.rollouts, known=known)
            if rollout is not None:
                found.append(Pair(place, update, rollout))
        most = (1 + ALIKE) * min((each.seconds for each in found), default=0.0)
        near = [each for each in found if each.seconds <= most]
        return min(near, key=lambda pair: len(pair.changes), default=None)

    def _fastest(self, place: Place, halves: Sequence[Half], *, known: bool) -> Half | None:
        limit = self.limit(place)
        fits = [half for half in halves if self.need(half) <= limit and (not known or self._open(half) is None)]
        most = (1 + ALIKE) * min((half.seconds for half in fits), default=0.0)
        near = [half for half in fits if half.seconds <= most]
        return min(near, key=lambda half: len(half.changes), default=None)


def fastest(halves: Halves) -> Changes | None:
    """The changes that make a run fastest among those that fit, by the closed form; None if nothing fits."""
    pair = Choice(halves.places(), halves.machine.hbm_bytes, fast=True, factors={}).best()
    return None if pair is None else pair.changes
