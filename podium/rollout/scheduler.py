"""Which completion sits in which slot, and which prompts are prefilled together: plain integers, no arrays, no jax.

A group is a request: one prompt and its completions. Groups enter slots in the order they came, and so do the
completions of a group. A prompt is prefilled once, together with the next waiting prompts of its bucket (prompts of a
bucket share one compiled shape), and its keys and values are held until its last completion has a slot. At most one
batch of prompts per bucket is held at a time: prompts of a bucket are prefilled in order, so when the first in the
queue needs a prefill, every earlier prompt of its bucket has all its completions in slots.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """A completion that enters a slot now."""

    slot: int
    group: int
    completion: int
    """Its index in the group."""
    row: int
    """The row of its prompt in its bucket's last prefill."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """Prompts to prefill, then completions that enter slots; all of one bucket."""

    bucket: int
    prefill: tuple[int, ...]
    """Groups by row; empty where the prompts of the last prefill of this bucket are used further."""
    placements: tuple[Placement, ...]
    crosses: bool
    """Whether a prompt goes to slots of another device than the one that has prefilled it."""


@dataclasses.dataclass(kw_only=True)
class _QueuedGroup:
    id: int
    bucket: int
    completions: int
    placed: int = 0
    row: int = -1  # -1: not prefilled yet


class Scheduler:
    """Queue and slots of one `generate`."""

    def __init__(self, *, num_slots: int, prefill_rows: int, shards: int = 1) -> None:
        """Nothing waits and all slots are free; `shards` devices have as many slots and rows each, in order."""
        self.prefill_rows = prefill_rows
        self._slots_each, self._rows_each = num_slots // shards, prefill_rows // shards
        self._free = [list(range(i, i + self._slots_each)) for i in range(0, num_slots, self._slots_each)]
        self.running: dict[int, tuple[int, int]] = {}  # slot -> (group, completion)
        self._waiting: collections.deque[_QueuedGroup] = collections.deque()

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._waiting or self.running)

    def submit(self, group: int, *, bucket: int, completions: int) -> None:
        """Queue the completions of a group, whose prompt is prefilled in the shape of `bucket`."""
        self._waiting.append(_QueuedGroup(id=group, bucket=bucket, completions=completions))

    def admit(self) -> Admission | None:
        """What enters slots now, of the first group's bucket; None where nothing can. Call it until it says so."""
        if not (self._waiting and any(self._free)):
            return None
        first = self._waiting[0]
        prefill = [] if first.row >= 0 else self._next_prompts(first.bucket)
        for row, group in enumerate(prefill):
            group.row = row
        placements = []
        while any(self._free) and self._waiting:
            group = self._waiting[0]
            if group.bucket != first.bucket or group.row < 0:
                break
            placements.append(self._assign_slot(group))
        return Admission(
            bucket=first.bucket,
            prefill=tuple(group.id for group in prefill),
            placements=tuple(placements),
            crosses=any(self._shard(each.slot) != each.row // self._rows_each for each in placements),
        )

    def retire(self, slot: int) -> None:
        """The completion in `slot` has ended."""
        del self.running[slot]
        self._free[self._shard(slot)].append(slot)

    def _shard(self, slot: int) -> int:
        return slot // self._slots_each

    def _next_prompts(self, bucket: int) -> list[_QueuedGroup]:
        same_shape = (group for group in self._waiting if group.bucket == bucket)
        return list(itertools.islice(same_shape, self.prefill_rows))

    def _assign_slot(self, group: _QueuedGroup) -> Placement:
        own = self._free[group.row // self._rows_each] or max(self._free, key=len)  # its prompt's device, if it can be
        placement = Placement(slot=own.pop(), group=group.id, completion=group.placed, row=group.row)
        self.running[placement.slot] = (group.id, group.placed)
        group.placed += 1
        if group.placed == group.completions:
            self._waiting.popleft()
        return placement


def rounds(scheduler: Scheduler, on_round: Callable[[], None] | None = None) -> Iterator[Admission | None]:
    """What to do next, until nothing waits or runs: an admission, or None, to decode what runs.

    The engine does it with a model, the planner without; whoever does it retires the completions that end. `on_round`
    is called before each round of admissions and decoding.
    """
    while scheduler.busy:
        if on_round is not None:
            on_round()
        while (admission := scheduler.admit()) is not None:
            yield admission
        if scheduler.running:
            yield None
