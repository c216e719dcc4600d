"""Allocates the cache's pages and cells to sequences and shared prompts, and evicts idle ones when pages run out.

Plain integers, no jax.
"""

import collections

from podium.rollout.sequence import Group, Queues, Sequence, SharedPrompt

HEADROOM_PAGES = 2  # pages kept free for each running sequence when another one is admitted


class Pages:
    """The pages and cells of all shards; each shard numbers its own from 0."""

    def __init__(
        self,
        *,
        per_shard: int,
        cells_per_shard: int,
        page_tokens: int,
        shards: int,
        queues: Queues,
        longest: int | None = None,
    ) -> None:
        """Start with all pages and cells free, to be allocated to the sequences in `queues`.

        Without cells, a sequence is stored in its pages alone. With cells, each sequence and each shared prompt also
        has one cell. With `longest` (in tokens), pages up to that length are reserved for each conversation that has
        begun, and no sequence is evicted.
        """
        self.per_shard = per_shard
        self._longest = longest
        self.page_tokens = page_tokens
        self.queues = queues
        self.free = [list(range(per_shard)) for _ in range(shards)]
        self.has_cells = cells_per_shard > 0
        self.free_cells = [list(range(cells_per_shard)) for _ in range(shards)]

    @property
    def used(self) -> int:
        """Number of allocated pages."""
        return sum(self.per_shard - len(free) for free in self.free)

    def number(self, tokens: int) -> int:
        """Number of pages that `tokens` tokens need."""
        return -(-tokens // self.page_tokens)

    def check(self, limit: int) -> None:
        """Raise ValueError if a shard's pages cannot hold one sequence of `limit` tokens."""
        if self.number(limit) + 1 > self.per_shard:  # plus the partial page of its prompt
            room = (self.per_shard - 1) * self.page_tokens
            raise ValueError(
                f"a sequence can grow to {limit} tokens, but the cache holds only {room} tokens of one sequence; "
                "raise rollout.cache_tokens"
            )

    @property
    def reserves(self) -> bool:
        """Whether pages are reserved for each sequence that has begun."""
        return self._longest is not None

    def headroom(self, sequence: Sequence) -> int:
        """Pages to keep free for a sequence that already has pages: if pages are reserved, all that the sequence may
        still need.
        """
        if self._longest is None:
            return min(HEADROOM_PAGES, self.number(sequence.limit) - len(sequence.pages))
        return self.number(self._longest if sequence.keep else sequence.limit) - len(sequence.pages)

    def reserved(self, shard: int) -> int:
        """Pages of a shard to keep free for the sequences that already have pages."""
        queues = self.queues
        others = (*queues.waiting, *queues.parked) if self.reserves else ()
        return sum(self.headroom(each) for each in (*queues.running, *others) if each.shard == shard)

    def allocate(self, sequence: Sequence, shard: int, headroom: int) -> bool:
        """Allocate pages for all tokens of a sequence, and a cell; returns False unless `headroom` pages stay free."""
        group = self.queues.groups[sequence.key.request]
        full = len(group.prompt) // self.page_tokens
        end = full * self.page_tokens if group.copied and not self.has_cells else len(group.prompt)
        shared = group.prompts.get(shard)
        freed = self.has_cells and shared is not None and shared.cell is None  # nothing to continue from
        begun = self.reserves and sequence.length > len(group.prompt)  # whether or not the prompt is cached
        shares = group.shares and end > 1 and sequence.shard < 0 and not freed and not begun
        new = shares and shared is None
        own = self.number(sequence.length) - (full if shares else len(sequence.pages))
        if self._longest is not None and sequence.shard < 0:
            headroom += self.number(self._longest if sequence.keep else sequence.limit) - self.number(sequence.length)
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
        """Whether a shard has free pages for a prompt of `tokens` tokens, with `reserved` pages to spare."""
        enough = len(self.free[shard]) >= self.number(tokens) + reserved
        return enough and (not self.has_cells or bool(self.free_cells[shard]))

    def allocate_prompt(self, group: Group, request: int, shard: int, end: int) -> SharedPrompt:
        """Allocate pages for the first `end` tokens of a group's prompt on a shard, which must have enough."""
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
        """Allocate pages up to `tokens` tokens or the sequence's limit; returns False if there are too few."""
        need = self.number(min(tokens, sequence.limit)) - len(sequence.pages)
        if need <= 0:
            return True
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
        sequence.attached = sequence.attached and not self.has_cells  # the sequence will need the prompt's cell again
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
        """Free a prompt's partial page and cell once all its sequences have their copies."""
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
        """Evict idle sequences and prompts until `need` + `headroom` pages and `cells` cells are free.

        Returns whether that is possible; otherwise nothing is evicted. Never evicts `keep`, the prompt that `keep`
        uses, or `prompt`.
        """
        free, free_cells = self.free[shard], self.free_cells[shard]
        wanted = need + headroom if need > 0 or self.reserves else 0
        if len(free) >= wanted and len(free_cells) >= cells:
            return True
        idle = [
            sequence
            for sequence in (*self.queues.parked, *reversed(self.queues.waiting))
            if sequence.shard == shard and sequence is not keep and sequence.pages and not self.reserves
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
        """Take pages from a shard's free list."""
        return [self.free[shard].pop() for _ in range(count)]

    def _take_cell(self, shard: int) -> int | None:
        """Take a cell from a shard's free list; None if the cache has no cells."""
        return self.free_cells[shard].pop() if self.has_cells else None

    def _free_cell(self, owner: Sequence | SharedPrompt) -> None:
        """Free the cell of a sequence or prompt, if it has one."""
        if owner.cell is not None:
            self.free_cells[owner.shard].append(owner.cell)
            owner.cell = None
