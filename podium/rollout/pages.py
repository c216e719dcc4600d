"""Who has which pages of the cache: taken, shared by a prompt's sequences, and given back when they run out. No jax."""

import collections

from podium.rollout.lanes import Group, Lane, Lanes, Shared

HEADROOM_PAGES = 2  # that stay free for each sequence that runs when another one is admitted


class Pages:
    """The pages of all shards; those of a shard are numbered from 0."""

    def __init__(self, *, each: int, page_tokens: int, shards: int, lanes: Lanes) -> None:
        """All `each` pages of every shard are free; `lanes` are those that will have them."""
        self.each, self.page_tokens, self.lanes = each, page_tokens, lanes
        self.free = [list(range(each)) for _ in range(shards)]

    @property
    def used(self) -> int:
        """Pages that somebody has."""
        return sum(self.each - len(free) for free in self.free)

    def number(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.page_tokens)

    def check(self, limit: int) -> None:
        """Raises ValueError where a shard's pages do not hold one sequence of so many tokens."""
        if self.number(limit) + 1 > self.each:  # and one for the part page of its prompt
            room = (self.each - 1) * self.page_tokens
            raise ValueError(
                f"it can grow to {limit} tokens and the cache holds {room} of one sequence; raise rollout.cache_tokens"
            )

    def headroom(self, lane: Lane) -> int:
        """Pages that stay free for a sequence that runs."""
        return min(HEADROOM_PAGES, self.number(lane.limit) - len(lane.pages))

    def house(self, lane: Lane, shard: int, headroom: int) -> bool:
        """Give a sequence the pages of the tokens that it has; whether there were enough, and some to spare."""
        group = self.lanes.groups[lane.group]
        whole = group.prompt // self.page_tokens
        end = whole * self.page_tokens if group.copied else group.prompt
        shares = len(group.lanes) > 1 and end > 1 and lane.shard < 0
        shared = group.shared.get(shard) if shares else None
        part = self.number(end) if shares and shared is None else 0
        own = self.number(lane.length) - (whole if shares else len(lane.pages))
        if not self.obtain(shard, part + own, headroom, lane):
            return False
        if shares and shared is None:
            pages = self.take(shard, part)
            shared = Shared(group=lane.group, shard=shard, pages=pages, end=end, whole=whole)
            group.shared[shard] = shared
        if lane.shard < 0:
            lane.shard = shard
        if shared is not None:
            shared.users += 1
            lane.origin, lane.pages, lane.filled = shared, shared.pages[:whole], whole * self.page_tokens
        lane.pages += self.take(shard, own)
        return True

    def grow(self, lane: Lane, tokens: int) -> bool:
        """Give a sequence the pages of so many tokens; whether there were enough."""
        need = self.number(min(tokens, lane.limit)) - len(lane.pages)
        if not self.obtain(lane.shard, need, 0, lane):
            return False
        lane.pages += self.take(lane.shard, need)
        return True

    def obtain(self, shard: int, need: int, headroom: int, keep: Lane) -> bool:
        """Free so many pages of what does not run, and nothing of `keep`; nothing happens where that is not enough."""
        free, wanted = self.free[shard], need + headroom
        if need <= 0 or len(free) >= wanted:
            return True
        housed = [
            lane
            for lane in (*self.lanes.parked, *reversed(self.lanes.waiting))
            if lane.shard == shard and lane is not keep and lane.pages
        ]
        leaving = collections.Counter(lane.origin for lane in housed)
        prompts = [
            shared
            for group in self.lanes.groups.values()
            for shared in group.shared.values()
            if shared.shard == shard and shared.group != keep.group and shared.users == leaving[shared]
        ]
        own = sum(len(lane.pages) - (lane.origin.whole if lane.origin else 0) for lane in housed)
        if len(free) + sum(len(shared.pages) for shared in prompts) + own < wanted:
            return False
        while len(free) < wanted:
            if idle := next((shared for shared in prompts if not shared.users), None):
                prompts.remove(idle)
                self.forget(idle)
            else:
                self.drop(housed.pop(0))
                self.lanes.counts.evicted += 1
        return True

    def take(self, shard: int, count: int) -> list[int]:
        """So many free pages."""
        return [self.free[shard].pop() for _ in range(count)]

    def drop(self, lane: Lane) -> None:
        """Take a sequence's pages away."""
        if lane.shard < 0:
            return
        whole = 0
        if lane.origin is not None:
            whole = lane.origin.whole
            lane.origin.users -= 1
        self.free[lane.shard] += lane.pages[whole:]
        lane.lost = max(lane.lost, lane.filled)
        lane.pages, lane.origin, lane.shard, lane.filled = [], None, -1, 0

    def forget(self, shared: Shared) -> None:
        """Take a prompt's pages away."""
        self.free[shared.shard] += shared.pages
        del self.lanes.groups[shared.group].shared[shared.shard]

    def release_copied(self, group: Group) -> None:
        """Take the part page of a prompt away once all its sequences had their copy."""
        for shared in group.shared.values() if group.copied else ():
            self.free[shared.shard] += shared.pages[shared.whole :]
            del shared.pages[shared.whole :]
            shared.end = min(shared.end, shared.whole * self.page_tokens)
