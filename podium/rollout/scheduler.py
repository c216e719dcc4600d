"""Which sequence sits in which slot, and which pages of the cache it has: plain integers, no arrays, no jax.

A group is a request: one prompt and its completions, each of which is a sequence. Sequences enter slots in the order
they came. A prompt's keys and values are made once on a shard (a device, or a few that split heads) and shared by the
sequences that sit there: whole pages by reference, the last part page as a copy for each. Sequences of a group go where
their prompt is; only a slot that would idle otherwise makes another shard prefill it again.

When pages run out, prompts that nobody uses go first, then what is parked, then the youngest sequence that runs: it
waits again, at the head of the queue, and its tokens are prefilled when it comes back. Nothing is lost.
"""

from collections.abc import Mapping, Sequence

from podium.rollout import prefill
from podium.rollout.lanes import Counts, Group, Lane, Lanes, Look, Row, Shared
from podium.rollout.pages import Pages


class Seats:
    """The slots of all shards, as many in each as the decode program in use has."""

    def __init__(self, sizes: Sequence[int], shards: int) -> None:
        """All are free; `sizes` of the program are over all shards, largest first, and the smallest is in use."""
        self._sizes = tuple(size // shards for size in sizes)
        self._slots: list[list[Lane | None]] = [[None] * self._sizes[-1] for _ in range(shards)]

    @property
    def each(self) -> int:
        """Slots of a shard."""
        return len(self._slots[0])

    def free(self) -> list[int]:
        """How many of each shard's slots are."""
        return [slots.count(None) for slots in self._slots]

    def fitting(self, wanted: int) -> int:
        """The smallest program, by its slots of a shard, that holds those who sit and so many in each shard."""
        most = max(wanted, self.each - min(self.free()))
        return next((size for size in reversed(self._sizes) if size >= most), self._sizes[0])

    def resize(self, each: int) -> None:
        """Use the program of so many slots of a shard; sequences move to the first ones."""
        for shard, slots in enumerate(self._slots):
            lanes = [lane for lane in slots if lane is not None]
            self._slots[shard] = [*lanes, *[None] * (each - len(lanes))]
            for slot, lane in enumerate(lanes):
                lane.slot, lane.fresh = slot, True

    def give(self, lane: Lane) -> None:
        """Let a sequence sit down in its shard."""
        slots = self._slots[lane.shard]
        lane.slot, lane.state, lane.fresh = slots.index(None), "running", True
        slots[lane.slot] = lane

    def leave(self, lane: Lane) -> None:
        """Let a sequence stand up."""
        self._slots[lane.shard][lane.slot] = None
        lane.slot, lane.ahead, lane.stay = -1, 0, lane.stay + 1

    def taken(self) -> list[Lane]:
        """Those who sit."""
        return [lane for slots in self._slots for lane in slots if lane is not None]


class Scheduler:
    """Queue, slots and pages of an engine."""

    def __init__(
        self,
        *,
        slots: Sequence[int],
        num_pages: int,
        page_tokens: int,
        rows: int,
        chunks: Sequence[int],
        shards: int = 1,
    ) -> None:
        """Nothing waits; all slots and pages are free.

        Args:
            slots: sizes of the decode program, largest first.
            num_pages: of all shards together.
            page_tokens: of a page.
            rows: of a prefill call.
            chunks: lengths of prefill calls, shortest first.
            shards: devices, or groups of devices, that have as many slots, pages and rows each.
        """
        self.sizes, self.chunks, self.shards = tuple(slots), tuple(chunks), shards
        self.lanes = Lanes()
        self.pages = Pages(each=num_pages // shards, page_tokens=page_tokens, shards=shards, lanes=self.lanes)
        self.seats = Seats(slots, shards)
        self._rows_each = rows // shards

    # What users of the engine ask for.

    def submit(
        self, group: int, *, prompt: int, completions: int, limit: int, begun: Mapping[int, int] | None = None
    ) -> list[Lane]:
        """Queue the sequences of a group, of `prompt` tokens now and at most `limit`.

        `begun` are those to be made, by index, with the tokens of each behind the prompt; unset: all `completions`.
        Raises ValueError where not even one would fit in a shard's pages.
        """
        self.pages.check(limit)
        made = dict.fromkeys(range(completions), 0) if begun is None else begun
        lanes = [_lane(group, index, prompt, own, limit) for index, own in made.items()]
        self.lanes.groups[group] = Group(prompt=prompt, lanes={lane.index: lane for lane in lanes})
        self.lanes.waiting.extend(lanes)
        return lanes

    def resume(self, lane: Lane, *, tokens: int, limit: int) -> None:
        """Queue a parked sequence again, with so many new tokens behind its own. Raises ValueError as `submit`."""
        self.pages.check(limit)
        lane.length, lane.limit, lane.state = lane.length + tokens, limit, "waiting"
        del self.lanes.parked[lane]
        self.lanes.waiting.append(lane)

    def park(self, lane: Lane) -> None:
        """Take a sequence out of its slot or the queue; it keeps its pages while there are enough."""
        _leave(self.lanes, self.seats, lane)
        lane.state = "parked"
        self.lanes.parked[lane] = None

    def retire(self, lane: Lane) -> None:
        """Forget a sequence, whatever it does; its group goes with the last one."""
        _leave(self.lanes, self.seats, lane)
        self.pages.drop(lane)
        lane.state = "gone"
        group = self.lanes.groups[lane.group]
        self.pages.release_copied(group)
        if all(each.state == "gone" for each in group.lanes.values()):
            for shared in list(group.shared.values()):
                self.pages.forget(shared)
            del self.lanes.groups[lane.group]

    def restart(self) -> None:
        """Nothing in the cache counts any more: what runs waits again, first, and everything is prefilled anew."""
        running = list(self.lanes.running)
        for lane in running:
            _leave(self.lanes, self.seats, lane)
            lane.state = "waiting"
        self.lanes.waiting.extendleft(reversed(running))
        for lane in (*self.lanes.waiting, *self.lanes.parked):
            self.pages.drop(lane)
        for group in self.lanes.groups.values():
            for shared in list(group.shared.values()):
                self.pages.forget(shared)

    def advance(self, lane: Lane, *, tokens: int, most: int) -> None:
        """A call that could make `most` tokens of a sequence has made so many, and the sequence is still there."""
        lane.ahead -= most
        lane.length += tokens
        lane.filled = lane.length - 1

    # What the engine does next.

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.lanes.waiting or self.lanes.running)

    @property
    def size(self) -> int:
        """Slots of the decode program that is in use."""
        return self.shards * self.seats.each

    def member(self, shared: Shared) -> int:
        """A completion of a prompt's group that has not been let go."""
        lanes = self.lanes.groups[shared.group].lanes
        return next(index for index, lane in lanes.items() if lane.state != "gone")

    def take_counts(self) -> Counts:
        """What was counted since the last time that this was asked; the pages' peak begins anew at what is in use."""
        counts, self.lanes.counts = self.lanes.counts, Counts()
        return counts

    def wants_size(self) -> bool:
        """Whether another size of the decode program would do better; `resize` needs to know all that was made."""
        return self._fitting() != self.seats.each

    def resize(self) -> None:
        """Use the smallest decode program that holds what runs and waits; sequences move to its first slots."""
        self.seats.resize(self._fitting())

    def plan(self, steps: int) -> Look:
        """What to do next; decode calls make at most `steps` tokens of each sequence, and its first one."""
        _admit(self.lanes, self.pages, self.seats)
        extends = []
        while (extend := prefill.next_call(self.lanes, self.pages, self.chunks, self._rows_each)) is not None:
            extends.append(extend)
            if 2 * sum(lane.ready for lane in self.lanes.running) >= len(self.lanes.running):
                break  # the longer prompts of the rest are prefilled between decode calls
        copies = tuple(prefill.copies(self.lanes, self.pages))
        _reserve(self.lanes, self.pages, self.seats, steps)
        rows = tuple(
            Row(
                row=lane.shard * self.seats.each + lane.slot,
                lane=lane,
                fresh=lane.fresh,
                first=lane.fresh and lane.filled == lane.length,
            )
            for lane in self.lanes.running
            if lane.ready
        )
        for row in rows:
            row.lane.fresh = False
            row.lane.ahead += steps + row.first
        counts = self.lanes.counts
        counts.pages_peak = max(counts.pages_peak, self.pages.used)
        return Look(extends=tuple(extends), copies=copies, rows=rows)

    def _fitting(self) -> int:
        return self.seats.fitting(-(-(len(self.lanes.running) + len(self.lanes.waiting)) // self.shards))


def _lane(group: int, index: int, prompt: int, own: int, limit: int) -> Lane:
    """A sequence of a prompt and so many tokens of its own, all of which but the last had been in a cache."""
    return Lane(group=group, index=index, length=prompt + own, limit=limit, lost=prompt + own - 1 if own else 0)


def _admit(lanes: Lanes, pages: Pages, seats: Seats) -> None:
    """Give slots and pages to what waits, in its order."""
    free = seats.free()
    headroom = [0] * len(free)
    for lane in lanes.running:
        headroom[lane.shard] += pages.headroom(lane)
    for idle in (False, True):  # what waits for slots where its prompt is leaves the others' slots to the next
        for lane in list(lanes.waiting):
            if not any(free):
                return
            shard = _choose(lanes, lane, free, idle)
            if shard is None:
                continue
            if not pages.house(lane, shard, headroom[shard]):
                return  # nobody overtakes it
            seats.give(lane)
            lanes.waiting.remove(lane)
            lanes.running[lane] = None
            free[shard] -= 1
            headroom[shard] += pages.headroom(lane)


def _choose(lanes: Lanes, lane: Lane, free: list[int], idle: bool) -> int | None:
    """The shard in which a sequence gets a slot now; None: it waits for one. `idle`: nobody else wants a slot."""
    if lane.shard >= 0:
        return lane.shard if free[lane.shard] else None
    homes = lanes.groups[lane.group].shared
    if found := [shard for shard in homes if free[shard]]:
        return found[0]
    return None if homes and not idle else free.index(max(free))


def _leave(lanes: Lanes, seats: Seats, lane: Lane) -> None:
    """Out of the slot, the queue, or the parked ones."""
    if lane.state == "running":
        seats.leave(lane)
        del lanes.running[lane]
    elif lane.state == "waiting":
        lanes.waiting.remove(lane)
    elif lane.state == "parked":
        del lanes.parked[lane]


def _reserve(lanes: Lanes, pages: Pages, seats: Seats, steps: int) -> None:
    """Give what decodes the pages of its next tokens, the oldest first; preempt the youngest where there are none.

    A sequence that waits for its prompt keeps the pages that it has.
    """
    running = lanes.running
    for lane in [lane for lane in running if lane.ready]:
        while lane.state == "running" and not pages.grow(lane, lane.length + lane.ahead + steps):
            youngest = next(each for each in reversed(running) if each.shard == lane.shard)
            _leave(lanes, seats, youngest)
            pages.drop(youngest)
            youngest.state = "waiting"
            lanes.waiting.appendleft(youngest)
            lanes.counts.preempted += 1
