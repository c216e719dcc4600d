"""Which tokens the next prefill call has in its rows, and which pages are copied then: plain integers, no jax."""

from collections.abc import Iterator, Sequence

from podium.rollout.lanes import Copy, Extend, Fill, Lane, Lanes, Shared
from podium.rollout.pages import Pages


def next_call(lanes: Lanes, pages: Pages, chunks: Sequence[int], rows: int) -> Extend | None:
    """The next prefill call: the oldest in the `rows` of each shard, and prompts of those that wait in what is left."""
    todo: list[list[Shared | Lane]] = [[] for _ in pages.free]
    for owner in _unfilled(lanes):
        if len(todo[owner.shard]) < rows:
            todo[owner.shard].append(owner)
    if not any(todo):
        return None
    longest = max(owner.missing for owners in todo for owner in owners)
    chunk = next((chunk for chunk in chunks if chunk >= longest), chunks[-1])
    _look_ahead(lanes, pages, todo, chunk, rows)
    fills = []
    for shard, owners in enumerate(todo):
        for row, owner in enumerate(owners, shard * rows):
            count = min(chunk, owner.missing)
            own = tuple(owner.pages)
            fills.append(Fill(row=row, owner=owner, pages=own, start=owner.filled, count=count))
            lanes.counts.prefill_tokens += count
            if isinstance(owner, Lane):
                lanes.counts.rebuilt_tokens += max(0, min(owner.lost, owner.filled + count) - owner.filled)
            owner.filled += count
    return Extend(chunk=chunk, fills=tuple(fills))


def _unfilled(lanes: Lanes) -> Iterator[Shared | Lane]:
    """What is to be prefilled, in the order of admission."""
    found: dict[Shared | Lane, None] = {}
    for lane in lanes.running:
        shared = lane.origin
        if shared is not None and shared.missing:
            found[shared] = None
        elif lane.missing and not lane.copies_part:
            found[lane] = None
    return iter(found)


def _look_ahead(lanes: Lanes, pages: Pages, todo: list[list[Shared | Lane]], chunk: int, rows: int) -> None:
    """Prefill also the prompts of groups that wait, in rows that cost no more, while pages are plenty."""
    for lane in lanes.waiting:
        group = lanes.groups[lane.group]
        shard = min(range(len(todo)), key=lambda shard: len(todo[shard]))
        if len(todo[shard]) == rows:
            return
        end = group.prompt
        if lane.shard >= 0 or group.shared or lane.lost or not 1 < end <= chunk or len(group.lanes) == 1:
            continue
        need = pages.number(end)
        if len(pages.free[shard]) < need + sum(pages.headroom(each) for each in lanes.running if each.shard == shard):
            return
        shared = Shared(
            group=lane.group, shard=shard, pages=pages.take(shard, need), end=end, whole=end // pages.page_tokens
        )
        group.shared[shard] = shared
        todo[shard].append(shared)


def copies(lanes: Lanes, pages: Pages) -> Iterator[Copy]:
    """The part pages of prompts, for those whose prompt is prefilled by then."""
    for lane in lanes.running:
        shared = lane.origin
        if shared is None or shared.missing:
            continue
        if lane.filled < lane.length and lane.copies_part:
            yield Copy(shard=lane.shard, source=shared.pages[shared.whole], target=lane.pages[shared.whole])
            lane.filled = lane.length
        if lane.ready and not lane.attached:
            lane.attached = True
            pages.release_copied(lanes.groups[lane.group])
