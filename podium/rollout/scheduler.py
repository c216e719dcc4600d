"""Decides which sequence runs in which slot and what each engine step does: plain integers, no arrays, no jax.

A group is a request: one prompt with its completions, each of which is a sequence. Sequences get slots in order of
arrival. A prompt is prefilled once per shard (a device, or a few that split heads) for all of the group's sequences
there: they share its full pages, and each gets a copy of the partial last page. Sequences go to the shard that has
their prompt; another shard prefills it again only if one of its slots would otherwise be idle.

When pages run out, unused prompts are evicted first, then parked sequences; then the youngest running sequence is
preempted: it returns to the head of the queue, and its tokens are prefilled again when it is admitted. No token is
lost. With `longest`, nothing is evicted or preempted: a sequence gets a slot only when enough pages for its longest
length are free, in addition to those that others, parked ones included, may still need.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from podium.rollout.pages import Pages
from podium.rollout.request import ScheduleCounts
from podium.rollout.sequence import Group, Queues, Sequence, SharedPrompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fill:
    """A row of a prefill call: `count` tokens of a prompt or a sequence, starting at token `start`."""

    row: int
    owner: SharedPrompt | Sequence
    pages: tuple[int, ...]
    cell: int | None
    start: int
    count: int

    @property
    def scored(self) -> bool:
        """Whether scores of the row's tokens are requested (`Request.score_prompt`)."""
        return isinstance(self.owner, Sequence) and self.owner.prompt_scores is not None


class PrefillCall(NamedTuple):
    """A prefill call with rows of `chunk` tokens."""

    chunk: int
    fills: tuple[Fill, ...]


class Copy(NamedTuple):
    """A page or a cell to copy within a shard."""

    shard: int
    source: int
    target: int


class DecodeRow(NamedTuple):
    """A sequence's row in a decode call."""

    row: int
    sequence: Sequence
    releases: int
    """The value of the sequence's `releases` when the call was planned."""
    fresh: bool
    """Whether the row's state comes from the host instead of the previous call."""
    first: bool
    """Whether to draw a token before the steps, from the hidden state that prefill kept."""


class StepPlan(NamedTuple):
    """The device's work in one engine step, in this order."""

    prefills: tuple[PrefillCall, ...]
    copies: tuple[Copy, ...]
    """Copies of pages."""
    cell_copies: tuple[Copy, ...]
    rows: tuple[DecodeRow, ...]
    """Rows of the decode call; empty if there is no decode call."""


class Slots:
    """The slots of all shards; each shard has as many as the current decode program."""

    def __init__(self, sizes: Iterable[int], shards: int) -> None:
        """Start with all slots free. `sizes` of the programs are over all shards, largest first; uses the smallest."""
        self._sizes = tuple(size // shards for size in sizes)
        self._slots: list[list[Sequence | None]] = [[None] * self._sizes[-1] for _ in range(shards)]

    @property
    def per_shard(self) -> int:
        """Number of slots per shard."""
        return len(self._slots[0])

    @property
    def occupied(self) -> list[Sequence]:
        """The sequences that occupy slots."""
        return [sequence for slots in self._slots for sequence in slots if sequence is not None]

    def count_free(self) -> list[int]:
        """Number of free slots of each shard."""
        return [slots.count(None) for slots in self._slots]

    def fitting(self, wanted: int) -> int:
        """Slots per shard of the smallest program that has room for the running sequences and at least `wanted` per
        shard.
        """
        most = max(wanted, self.per_shard - min(self.count_free()))
        return next((size for size in reversed(self._sizes) if size >= most), self._sizes[0])

    def resize(self, per_shard: int) -> None:
        """Switch to another program; running sequences move to the first slots."""
        for shard, slots in enumerate(self._slots):
            running = [sequence for sequence in slots if sequence is not None]
            self._slots[shard] = [*running, *[None] * (per_shard - len(running))]
            for slot, sequence in enumerate(running):
                sequence.slot, sequence.fresh = slot, True

    def allocate(self, sequence: Sequence) -> None:
        """Assign a free slot of the sequence's shard to it."""
        slots = self._slots[sequence.shard]
        sequence.slot, sequence.fresh = slots.index(None), True
        slots[sequence.slot] = sequence

    def free(self, sequence: Sequence) -> None:
        """Free a sequence's slot, if it has one."""
        if sequence.slot >= 0:
            self._slots[sequence.shard][sequence.slot] = None
            sequence.slot, sequence.ahead = -1, 0
            sequence.releases += 1


class Scheduler:
    """An engine's queues, slots and pages."""

    def __init__(
        self,
        *,
        slots: Iterable[int],
        num_pages: int,
        num_cells: int = 0,
        page_tokens: int,
        rows: int,
        chunks: Iterable[int],
        shards: int = 1,
        longest: int | None = None,
    ) -> None:
        """Start with empty queues and with all slots and pages free.

        Args:
            slots: sizes of the decode programs, largest first.
            num_pages: pages of all shards together.
            num_cells: cells of all shards together; 0 if sequences are stored only in pages.
            page_tokens: tokens per page.
            rows: rows of a prefill call.
            chunks: lengths of prefill calls, shortest first.
            shards: number of devices, or groups of devices; each has the same number of slots, pages and rows.
            longest: length of the longest conversation in tokens, for which to reserve pages; None: allocate pages as
                they are needed.
        """
        self.sizes = tuple(slots)
        self.chunks = tuple(chunks)
        self.shards = shards
        self.queues = Queues()
        self.pages = Pages(
            per_shard=num_pages // shards,
            cells_per_shard=num_cells // shards,
            page_tokens=page_tokens,
            shards=shards,
            queues=self.queues,
            longest=longest,
        )
        self.slots = Slots(self.sizes, shards)
        self._rows_per_shard = rows // shards

    # Requests of the engine's user.

    def submit(self, prompt: tuple[int, ...], sequences: list[Sequence]) -> None:
        """Queue the sequences of a request, which all start with its prompt.

        Raises ValueError if a shard's pages cannot hold the longest sequence.
        """
        if not sequences:
            return
        self.pages.check(max(sequence.limit for sequence in sequences))
        for sequence in sequences:
            sequence.lost = sequence.length - 1 if sequence.length > len(prompt) else 0
        self.queues.groups[sequences[0].key.request] = Group(
            prompt=prompt,
            sequences={sequence.key.completion: sequence for sequence in sequences},
            shares=len(sequences) > 1,
            lost=len(prompt) if any(sequence.lost for sequence in sequences) else 0,
        )
        self.queues.waiting.extend(sequences)

    def resume(self, sequence: Sequence) -> None:
        """Queue a parked sequence again."""
        self.queues.remove(sequence)
        sequence.state = "waiting"
        self.queues.waiting.append(sequence)

    def park(self, sequence: Sequence) -> None:
        """Take a sequence out of its slot or the queue; the sequence keeps its pages until they are needed
        elsewhere.
        """
        self._take_out(sequence)
        sequence.state = "parked"
        self.queues.parked[sequence] = None
        self.queues.counts.parked = max(self.queues.counts.parked, len(self.queues.parked))
        if sequence.cut and self.pages.has_cells:
            self.pages.release(sequence)  # the cell's state includes tokens that were cut off

    def retire(self, sequence: Sequence) -> None:
        """Remove a sequence in any state; its group is removed with its last sequence."""
        if sequence.state in ("finished", "gone"):
            return
        self._take_out(sequence)
        self.pages.release(sequence)
        sequence.state = "gone"
        group = self.queues.groups[sequence.key.request]
        del group.sequences[sequence.key.completion]
        self.pages.release_copied(group)
        if not group.sequences:
            self._release_prompts(group)
            del self.queues.groups[sequence.key.request]

    def restart(self) -> None:
        """Discard the cache's content: running sequences return to the head of the queue to be prefilled again."""
        for sequence in reversed(list(self.queues.running)):
            self._wait_again(sequence)
        for sequence in (*self.queues.waiting, *self.queues.parked):
            self.pages.release(sequence)
        for group in self.queues.groups.values():
            self._release_prompts(group)

    def advance(self, sequence: Sequence, *, most: int) -> None:
        """Record that a running sequence's tokens were read from a call that could draw up to `most` tokens."""
        sequence.ahead -= most
        sequence.filled = sequence.length - 1

    # What the engine does next.

    @property
    def busy(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.queues.waiting or self.queues.running)

    @property
    def size(self) -> int:
        """Number of slots of the current decode program."""
        return self.shards * self.slots.per_shard

    def take_counts(self) -> ScheduleCounts:
        """The counts since the last call; the peak of pages restarts at those now in use."""
        counts, self.queues.counts = self.queues.counts, ScheduleCounts()
        return counts

    def wants_size(self) -> bool:
        """Whether another decode program size fits better; read all drawn tokens before calling `resize`."""
        return self._fitting() != self.slots.per_shard

    def resize(self) -> None:
        """Switch to the smallest program for all running and waiting sequences; sequences move to its first slots."""
        self.slots.resize(self._fitting())

    def plan(self, steps: int) -> StepPlan:
        """Plan one engine step; its decode call draws up to `steps` tokens per sequence, plus a first token."""
        self._admit()
        prefills: list[PrefillCall] = []
        running, filling = self.queues.running, self.queues.filling
        while (call := self._next_prefill()) is not None:
            prefills.append(call)
            if 2 * sum(not sequence.ready for sequence in filling) <= len(running):
                break  # the rest of longer prompts is prefilled between decode calls
        copies, cell_copies = self._copies()
        for sequence in [sequence for sequence in filling if sequence.ready]:
            del filling[sequence]
        ready = [sequence for sequence in running if sequence not in filling]
        self._reserve(ready, steps)
        rows = tuple(self._decode_row(sequence, steps) for sequence in ready if sequence.state == "running")
        counts = self.queues.counts
        counts.pages_peak = max(counts.pages_peak, self.pages.used)
        return StepPlan(prefills=tuple(prefills), copies=tuple(copies), cell_copies=tuple(cell_copies), rows=rows)

    def _decode_row(self, sequence: Sequence, steps: int) -> DecodeRow:
        first = sequence.fresh and sequence.filled == sequence.length
        place = sequence.shard * self.slots.per_shard + sequence.slot
        row = DecodeRow(place, sequence, sequence.releases, sequence.fresh, first)
        sequence.fresh = False
        sequence.ahead += steps + first
        return row

    def _fitting(self) -> int:
        wanted = len(self.queues.running) + len(self.queues.waiting)
        return self.slots.fitting(-(-wanted // self.shards))

    def _take_out(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue and its slot."""
        self.queues.remove(sequence)
        self.slots.free(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        """Return a running sequence to the head of the queue, without pages."""
        self._take_out(sequence)
        self.pages.release(sequence)
        sequence.state = "waiting"
        self.queues.waiting.appendleft(sequence)

    def _release_prompts(self, group: Group) -> None:
        for shared in list(group.prompts.values()):
            self.pages.release_prompt(group, shared)

    # Admission.

    def _admit(self) -> None:
        """Assign slots and pages to waiting sequences, in order."""
        queues, free = self.queues, self.slots.count_free()
        if not (queues.waiting and any(free)):
            return
        headroom = [self.pages.reserved(shard) for shard in range(self.shards)]
        for anywhere in (False, True):  # shards with the prompt first, so that later sequences find slots elsewhere
            for sequence in list(queues.waiting):
                if not any(free):
                    return
                shard = self._choose_shard(sequence, free, anywhere)
                if shard is None:
                    continue
                held = self.pages.headroom(sequence) if self.pages.reserves and sequence.shard >= 0 else 0
                if not self.pages.allocate(sequence, shard, headroom[shard] - held):
                    if self.pages.reserves:
                        continue  # later sequences may need no new pages, and free pages when they end
                    return  # later sequences must not overtake this one
                self.slots.allocate(sequence)
                queues.waiting.remove(sequence)
                sequence.state = "running"
                queues.running[sequence] = queues.filling[sequence] = None
                free[shard] -= 1
                headroom[shard] += self.pages.headroom(sequence) - held

    def _choose_shard(self, sequence: Sequence, free: list[int], anywhere: bool) -> int | None:
        """The shard on which to admit a sequence now; None if it should wait for a slot on the shard that has its
        prompt.
        """
        if sequence.shard >= 0:
            return sequence.shard if free[sequence.shard] else None
        homes = self.queues.groups[sequence.key.request].prompts
        if found := [shard for shard in homes if free[shard]]:
            return found[0]
        return None if homes and not anywhere else free.index(max(free))

    def _reserve(self, ready: Iterable[Sequence], steps: int) -> None:
        """Allocate pages for the next tokens of `ready` sequences, oldest first; preempt the youngest if pages run out.

        A sequence still waiting for its prompt keeps the pages it has.
        """
        running = self.queues.running
        for sequence in ready:
            goal = sequence.length + sequence.ahead + steps
            while sequence.state == "running" and not self.pages.grow(sequence, goal):
                youngest = next(each for each in reversed(running) if each.shard == sequence.shard)
                self._wait_again(youngest)
                self.queues.counts.preempted += 1

    # Prefill.

    def _next_prefill(self) -> PrefillCall | None:
        """The next prefill call: on each shard, the oldest sequences that need prefill, and waiting prompts in spare
        rows.
        """
        todo: list[list[SharedPrompt | Sequence]] = [[] for _ in range(self.shards)]
        for owner in self._unfilled():
            if len(todo[owner.shard]) < self._rows_per_shard:
                todo[owner.shard].append(owner)
        if not any(todo):
            return None
        longest = max(owner.missing for owners in todo for owner in owners)
        chunk = next((chunk for chunk in self.chunks if chunk >= longest), self.chunks[-1])
        self._add_waiting_prompts(todo, chunk)
        fills: list[Fill] = []
        for shard, owners in enumerate(todo):
            for row, owner in enumerate(owners, shard * self._rows_per_shard):
                count = min(chunk, owner.missing)
                fills.append(
                    Fill(
                        row=row,
                        owner=owner,
                        pages=tuple(owner.pages),
                        cell=owner.cell,
                        start=owner.filled,
                        count=count,
                    )
                )
                self.queues.counts.prefill_tokens += count
                self.queues.counts.rebuilt_tokens += max(0, min(owner.lost - owner.filled, count))
                owner.filled += count
        return PrefillCall(chunk=chunk, fills=tuple(fills))

    def _unfilled(self) -> Iterable[SharedPrompt | Sequence]:
        """Prompts and sequences to prefill, in order of admission."""
        found: dict[SharedPrompt | Sequence, None] = {}
        for sequence in self.queues.filling:
            if sequence.shared is not None and sequence.shared.missing:
                found[sequence.shared] = None
            elif sequence.missing and not sequence.copies:
                found[sequence] = None
        return found

    def _add_waiting_prompts(self, todo: list[list[SharedPrompt | Sequence]], chunk: int) -> None:
        """Use spare rows for the prompts of waiting groups, as long as many pages are free."""
        pages = self.pages
        for sequence in self.queues.waiting:
            request = sequence.key.request
            group, end = self.queues.groups[request], len(self.queues.groups[request].prompt)
            shard = min(range(len(todo)), key=lambda shard: len(todo[shard]))
            if len(todo[shard]) == self._rows_per_shard:
                return
            if sequence.shard >= 0 or sequence.lost or group.prompts or not group.shares or not 1 < end <= chunk:
                continue
            if not pages.holds_prompt(end, shard, pages.reserved(shard)):
                return
            todo[shard].append(pages.allocate_prompt(group, request, shard, end))

    def _copies(self) -> tuple[list[Copy], list[Copy]]:
        """Copies of prefilled prompts' partial pages and cells, for the sequences that still need them."""
        pages: list[Copy] = []
        cells: list[Copy] = []
        for sequence in self.queues.filling:
            shared = sequence.shared
            if shared is None or shared.missing:
                continue
            copies = sequence.copies
            if copies:
                part = shared.full_pages
                if len(shared.pages) > part:
                    pages.append(Copy(shard=shared.shard, source=shared.pages[part], target=sequence.pages[part]))
                if shared.cell is not None and sequence.cell is not None:
                    cells.append(Copy(shard=shared.shard, source=shared.cell, target=sequence.cell))
                sequence.filled = shared.end
            if (copies or sequence.ready) and not sequence.attached:
                sequence.attached = True
                self.pages.release_copied(self.queues.groups[sequence.key.request])
        return pages, cells
