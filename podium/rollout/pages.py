"""Which sequence has which pages and which cell of the cache: allocated, shared or copied, freed when they run out.

Plain integers, no jax.
"""

import collections

from podium.rollout.sequence import Group, Queues, Sequence, SharedPrompt

HEADROOM_PAGES = 2  # left free for each running sequence when another one is admitted


class Pages:
    """The pages and cells of all shards; those of a shard are numbered from 0."""

    def __init__(self, *, per_shard: int, cells_per_shard: int, page_tokens: int, shards: int, queues: Queues) -> None:
        """All pages and cells of every shard are free; the sequences in `queues` will have them.

        Without cells, pages hold all that there is of a sequence. With cells, each sequence and each shared prompt has
        one beside its pages.
        """
        self.per_shard = per_shard
        self.page_tokens = page_tokens
        self.queues = queues
        self.free = [list(range(per_shard)) for _ in range(shards)]
        self.has_cells = cells_per_shard > 0
        self.free_cells = [list(range(cells_per_shard)) for _ in range(shards)]

    @property
    def used(self) -> int:
        """Pages that are allocated."""
        return sum(self.per_shard - len(free) for free in self.free)

    def number(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_tokens)

    def check(self, limit: int) -> None:
        """Raises ValueError where a shard's pages do not hold one sequence of `limit` tokens."""
        if self.number(limit) + 1 > self.per_shard:  # and one for the part page of its prompt
            room = (self.per_shard - 1) * self.page_tokens
            raise ValueError(
                f"it can grow to {limit} tokens and the cache holds {room} of one sequence; raise rollout.cache_tokens"
            )

    def headroom(self, sequence: Sequence) -> int:
        """Pages left free for a running sequence."""
        return min(HEADROOM_PAGES, self.number(sequence.limit) - len(sequence.pages))

    def allocate(self, sequence: Sequence, shard: int, headroom: int) -> bool:
        """Give a sequence pages for all its tokens, and a cell; whether there were enough, with `headroom` to spare."""
        group = self.queues.groups[sequence.key.request]
        full = len(group.prompt) // self.page_tokens
        end = full * self.page_tokens if group.copied and not self.has_cells else len(group.prompt)
        shared = group.prompts.get(shard)
        freed = self.has_cells and shared is not None and shared.cell is None  # nothing to continue from
        shares = group.shares and end > 1 and sequence.shard < 0 and not freed
        new = shares and shared is None
        own = self.number(sequence.length) - (full if shares else len(sequence.pages))
        cells = self.has_cells * ((sequence.cell is None) + new)
        pages = own + (self.number(end) if new else 0)
        if not self._make_room(shard, pages, headroom, cells=cells, keep=sequence, prompt=shared if shares else None):
            return False
        if shares:
            shared = shared or self.allocate_prompt(group, sequence.key.request, shard, end)
            shared.users += 1
            sequence.shared, sequence.pages = shared, shared.pages[:full]
            sequence.filled = full * self.page_tokens
        sequence.shard = shard
        sequence.pages += self._take(shard, own)
        if sequence.cell is None:
            sequence.cell = self._take_cell(shard)
        return True

    def holds_prompt(self, tokens: int, shard: int, reserved: int) -> bool:
        """Whether a shard has free what a prompt of this many tokens takes, with `reserved` pages to spare."""
        enough = len(self.free[shard]) >= self.number(tokens) + reserved
        return enough and (not self.has_cells or bool(self.free_cells[shard]))

    def allocate_prompt(self, group: Group, request: int, shard: int, end: int) -> SharedPrompt:
        """Give a group's prompt pages for its first `end` tokens on a shard; there are enough."""
        shared = SharedPrompt(
            request=request,
            tokens=group.prompt,
            shard=shard,
            pages=self._take(shard, self.number(end)),
            end=end,
            full_pages=len(group.prompt) // self.page_tokens,
            cell=self._take_cell(shard),
            lost=group.lost,
        )
        group.prompts[shard] = shared
        return shared

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give a sequence pages for `tokens` tokens, or its limit; whether there were enough."""
        need = self.number(min(tokens, sequence.limit)) - len(sequence.pages)
        if not self._make_room(sequence.shard, need, 0, keep=sequence):
            return False
        sequence.pages += self._take(sequence.shard, need)
        return True

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's pages and cell, if it has any."""
        if sequence.shard < 0:
            return
        full = 0
        if sequence.shared is not None:
            full = sequence.shared.full_pages
            sequence.shared.users -= 1
        self.free[sequence.shard] += sequence.pages[full:]
        self._free_cell(sequence)
        sequence.attached = sequence.attached and not self.has_cells  # it will need the prompt's cell again
        sequence.lost = max(sequence.lost, sequence.filled)
        sequence.pages = []
        sequence.shared = None
        sequence.shard = -1
        sequence.filled = 0

    def release_prompt(self, group: Group, shared: SharedPrompt) -> None:
        """Free the pages and the cell of a group's prompt on one shard."""
        self.free[shared.shard] += shared.pages
        self._free_cell(shared)
        group.lost = max(group.lost, shared.filled)
        del group.prompts[shared.shard]

    def release_copied(self, group: Group) -> None:
        """Free the part page and the cell of a prompt once all its sequences have had their copies."""
        for shared in group.prompts.values() if group.copied else ():
            self.free[shared.shard] += shared.pages[shared.full_pages :]
            del shared.pages[shared.full_pages :]
            shared.end = min(shared.end, shared.full_pages * self.page_tokens)
            self._free_cell(shared)

    def _make_room(
        self,
        shard: int,
        need: int,
        headroom: int,
        *,
        keep: Sequence,
        cells: int = 0,
        prompt: SharedPrompt | None = None,
    ) -> bool:
        """Evict idle sequences and prompts until enough is free: `need` pages, `headroom` more, and `cells`.

        Returns whether that is possible. Nothing is evicted in vain, and nothing of `keep`, of the prompt that it uses
        or of `prompt`, which it is about to use.
        """
        free, free_cells = self.free[shard], self.free_cells[shard]
        wanted = need + headroom if need > 0 else 0
        if len(free) >= wanted and len(free_cells) >= cells:
            return True
        idle = [
            sequence
            for sequence in (*self.queues.parked, *reversed(self.queues.waiting))
            if sequence.shard == shard and sequence is not keep and sequence.pages
        ]
        leaving = collections.Counter(sequence.shared for sequence in idle)
        prompts = [
            (group, shared)
            for group in self.queues.groups.values()
            for shared in group.prompts.values()
            if shared.shard == shard and shared is not prompt and shared.users == leaving[shared]
        ]
        own = sum(len(each.pages) - (each.shared.full_pages if each.shared else 0) for each in idle)
        held = len(idle) + sum(shared.cell is not None for _, shared in prompts)
        if len(free) + sum(len(shared.pages) for _, shared in prompts) + own < wanted or len(free_cells) + held < cells:
            return False
        while len(free) < wanted or len(free_cells) < cells:
            if unused := next((each for each in prompts if not each[1].users), None):
                prompts.remove(unused)
                self.release_prompt(*unused)
            else:
                self.release(idle.pop(0))
                self.queues.counts.evicted += 1
        return True

    def _take(self, shard: int, count: int) -> list[int]:
        """Remove pages from a shard's free list."""
        return [self.free[shard].pop() for _ in range(count)]

    def _take_cell(self, shard: int) -> int | None:
        """Remove a cell from a shard's free list, if there are cells."""
        return self.free_cells[shard].pop() if self.has_cells else None

    def _free_cell(self, owner: Sequence | SharedPrompt) -> None:
        """Free the cell of a sequence or prompt, if it has one."""
        if owner.cell is not None:
            self.free_cells[owner.shard].append(owner.cell)
            owner.cell = None
