import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.rollout.lanes import Lane, Shared
from podium.rollout.scheduler import Scheduler

PAGE, CHUNKS, STEPS = 4, (4, 16, 32), 3


def make(*, slots=8, pages=64, rows=4, shards=1):
    sizes = tuple(dict.fromkeys(shards * -(-slots // part) for part in (1, 2, 4)))
    return Scheduler(
        slots=sizes, num_pages=shards * pages, page_tokens=PAGE, rows=shards * rows, chunks=CHUNKS, shards=shards
    )


class World:
    """A cache and a device without numbers: what each page holds, checked whenever something is planned.

    Every position of a page remembers which sequence's token stands there; a sequence may decode only where all tokens
    before its last are in its pages, made by the weights of now.
    """

    def __init__(self, scheduler, seed):
        self.scheduler, self.rng = scheduler, random.Random(seed)
        self.content = {}  # (shard, page, offset) -> (group, index, position); index -1: of the prompt
        self.states = {}  # (shard, page) -> the same, of the last token that was prefilled there
        self.goal = {}  # lane -> length at which its turn ends
        self.turns = {}  # lane -> turns to come
        self.known, self.order, self.done = [], [], []
        self.decoded = 0

    def submit(self, group, prompt, completions, limit):
        lanes = self.scheduler.submit(group, prompt=prompt, completions=completions, limit=limit)
        for lane in lanes:
            self.goal[lane] = self.rng.randint(prompt + 1, limit)
            self.turns[lane] = self.rng.choice((0, 0, 1, 2))
        self.known += lanes
        return lanes

    def token(self, lane, position):
        group = self.scheduler.lanes.groups[lane.group]
        return lane.group, (-1 if position < group.prompt else lane.index), position

    def look(self):
        scheduler = self.scheduler
        if scheduler.wants_size():
            scheduler.resize()
        before = set(scheduler.lanes.running)
        look = scheduler.plan(STEPS)
        self.order += [lane for lane in scheduler.lanes.running if lane not in before]
        for extend in look.extends:
            assert extend.chunk in CHUNKS
            rows = [fill.row for fill in extend.fills]
            assert len(set(rows)) == len(rows)
            for fill in extend.fills:
                assert 0 < fill.count <= extend.chunk
                for position in range(fill.start, fill.start + fill.count):
                    if isinstance(fill.owner, Shared):
                        what = fill.owner.group, -1, position
                    else:
                        what = self.token(fill.owner, position)
                    self.content[fill.owner.shard, fill.pages[position // PAGE], position % PAGE] = what
                self.states[fill.owner.shard, fill.pages[position // PAGE]] = what
        for copy in look.copies:
            for offset in range(PAGE):
                self.content[copy.shard, copy.target, offset] = self.content.get((copy.shard, copy.source, offset))
            self.states[copy.shard, copy.target] = self.states.get((copy.shard, copy.source))
        rows = [row.row for row in look.rows]
        assert len(set(rows)) == len(rows), "slot owned twice"
        assert all(0 <= row < scheduler.size for row in rows)
        for row in look.rows:
            self.decode(row.lane, row.first)
        self.check()
        return look

    def decode(self, lane, first):
        there = lane.length - (not first)
        for position in range(there):
            at = lane.shard, lane.pages[position // PAGE], position % PAGE
            assert self.content.get(at) == self.token(lane, position), "reads what is not its own"
        if first:
            last = lane.length - 1
            assert self.states.get((lane.shard, lane.pages[last // PAGE])) == self.token(lane, last), "another's state"
        made = min(STEPS + first, self.goal[lane] - lane.length)
        for position in range(there, there + made - first):
            self.content[lane.shard, lane.pages[position // PAGE], position % PAGE] = self.token(lane, position)
        self.decoded += made
        self.scheduler.advance(lane, tokens=made, most=STEPS + first)
        if lane.length == self.goal[lane]:
            self.end_turn(lane)

    def end_turn(self, lane):
        if self.turns[lane]:
            self.turns[lane] -= 1
            self.scheduler.park(lane)
        else:
            self.scheduler.retire(lane)
            self.done.append(lane)

    def reply(self, lane, room):
        """An environment's answer to a parked sequence, or none."""
        tokens = self.rng.randint(0, 5)
        limit = min(room, lane.length + tokens + 6)
        if lane.length + tokens >= limit:
            self.scheduler.retire(lane)
            self.done.append(lane)
            return
        self.scheduler.resume(lane, tokens=tokens, limit=limit)
        self.goal[lane] = self.rng.randint(lane.length + 1, limit)

    def check(self):
        """Every slot and page has the owners that it should have, counted again from the sequences."""
        scheduler = self.scheduler
        lanes, pages = scheduler.lanes, scheduler.pages
        for shard, free in enumerate(pages.free):
            owned = list(free)
            for group in lanes.groups.values():
                owned += [page for each in group.shared.values() if each.shard == shard for page in each.pages]
                for lane in group.lanes.values():
                    if lane.shard == shard:
                        owned += lane.pages[lane.origin.whole if lane.origin else 0 :]
            assert sorted(owned) == list(range(pages.each)), "page leaked or owned twice"
        for group in lanes.groups.values():
            for shared in group.shared.values():
                users = [lane for lane in group.lanes.values() if lane.origin is shared]
                assert shared.users == len(users), "reference count differs from the owners"
                assert all(lane.pages[: shared.whole] == shared.pages[: shared.whole] for lane in users)
        seated = scheduler.seats.taken()
        assert len(seated) == len(set(seated)) == len(lanes.running), "slot lost or owned twice"
        assert all(lane.state == "running" for lane in seated)
        assert all(lane.shard < 0 for lane in self.known if lane.state == "gone")


def converse(world, *, room, parks, cancels, restarts=0.0, most=10_000):
    """Let all that was submitted come to its end, with random parks, replies, cancels and new weights."""
    scheduler, rng = world.scheduler, world.rng
    for _ in range(most):
        for lane in list(scheduler.lanes.parked):
            if rng.random() < 0.5 or not scheduler.busy:
                world.reply(lane, room)
        live = [lane for lane in world.known if lane.state in ("running", "waiting", "parked")]
        if live and rng.random() < parks:
            lane = rng.choice(live)
            if lane.state != "parked":
                scheduler.park(lane)
        if live and rng.random() < cancels:
            lane = rng.choice(live)
            scheduler.retire(lane)
            world.done.append(lane)
        if rng.random() < restarts:
            scheduler.restart()
            world.content.clear()
            world.states.clear()
        if scheduler.busy:
            world.look()
        elif not scheduler.lanes.groups:
            break
    assert not scheduler.lanes.groups, "no progress"
    assert all(len(free) == scheduler.pages.each for free in scheduler.pages.free), "page leaked at the end"
    assert sorted(map(id, world.done)) == sorted(map(id, world.known)), "a sequence is missing or came twice"


@settings(deadline=None, max_examples=150)
@given(
    groups=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), max_size=12),
    slots=st.integers(1, 6),
    pages=st.integers(12, 60),
    rows=st.integers(1, 3),
    shards=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    parks=st.sampled_from([0.0, 0.2]),
    cancels=st.sampled_from([0.0, 0.1]),
    restarts=st.sampled_from([0.0, 0.05]),
)
def test_nothing_is_lost_nor_owned_twice(groups, slots, pages, rows, shards, seed, parks, cancels, restarts):
    world = World(make(slots=slots, pages=pages, rows=rows, shards=shards), seed)
    for group, (prompt, completions) in enumerate(groups):
        world.submit(group, prompt, completions, prompt + 12)
    converse(world, room=44, parks=parks, cancels=cancels, restarts=restarts)


@pytest.mark.parametrize(("pages", "shards"), [(2000, 1), (70, 1), (40, 4)])
def test_two_thousand_random_conversations_leak_nothing(pages, shards):
    world = World(make(slots=16, pages=pages, shards=shards), 1)
    for group in range(500):
        prompt = world.rng.randint(1, 30)
        world.submit(group, prompt, 4, prompt + world.rng.randint(1, 14))
    converse(world, room=44, parks=0.1, cancels=0.1)
    if pages == 70:
        assert world.scheduler.lanes.counts.preempted + world.scheduler.lanes.counts.evicted > 0


def test_sequences_enter_slots_in_the_order_they_came():
    world = World(make(slots=6, pages=400), 0)
    lanes = [lane for group in range(40) for lane in world.submit(group, 1 + group % 20, 3, 40)]
    for lane in lanes:
        world.turns[lane] = 0
    converse(world, room=44, parks=0.0, cancels=0.0)
    assert world.order == lanes


def test_what_was_preempted_comes_back_first_and_loses_nothing():
    world = World(make(slots=4, pages=14), 0)
    lanes = [world.submit(group, 5, 1, 33)[0] for group in range(4)]
    for lane in lanes:
        world.turns[lane], world.goal[lane] = 0, 33
    converse(world, room=44, parks=0.0, cancels=0.0)
    counts = world.scheduler.lanes.counts
    assert counts.preempted > 0
    assert counts.rebuilt_tokens > 0
    assert world.decoded == 4 * 28
    assert world.done[0] is lanes[0]


def test_headroom_keeps_sequences_from_being_preempted():
    """Admitted one by one as pages come free; with all at once, half of them would be thrown out again."""
    world = World(make(slots=8, pages=24), 0)
    for group in range(30):
        (lane,) = world.submit(group, 5, 1, 13)
        world.turns[lane], world.goal[lane] = 0, 13
    converse(world, room=44, parks=0.0, cancels=0.0)
    assert world.scheduler.lanes.counts.preempted == 0


def plan_of(scheduler, *requests):
    for group, (prompt, completions) in enumerate(requests):
        scheduler.submit(group, prompt=prompt, completions=completions, limit=prompt + 8)
    scheduler.resize()
    return scheduler.plan(STEPS)


def test_a_prompt_is_prefilled_once_and_its_part_page_copied_for_each_completion():
    look = plan_of(make(), (11, 4))
    (extend,) = look.extends
    (fill,) = extend.fills
    assert isinstance(fill.owner, Shared)
    assert (extend.chunk, fill.start, fill.count) == (16, 0, 11)
    assert all(row.first for row in look.rows)
    assert [copy.source for copy in look.copies] == [fill.pages[2]] * 4
    lanes = [row.lane for row in look.rows]
    assert len(lanes) == 4
    assert all(lane.pages[:2] == list(fill.pages[:2]) for lane in lanes)
    assert len({lane.pages[2] for lane in lanes}) == 4


def test_a_single_completion_needs_no_copy():
    look = plan_of(make(), (11, 1))
    assert isinstance(look.extends[0].fills[0].owner, Lane)
    assert not look.copies


def test_a_prompt_of_one_token_needs_no_prefill():
    look = plan_of(make(), (1, 3))
    assert (look.extends, look.copies, len(look.rows)) == ((), (), 3)


def test_prompts_that_wait_fill_the_rows_that_are_left():
    scheduler = make(slots=2, pages=100, rows=4)
    look = plan_of(scheduler, *[(9, 2)] * 5)
    assert [fill.owner.group for fill in look.extends[0].fills] == [0, 1, 2, 3]
    assert [row.lane.group for row in look.rows] == [0, 0]


def test_a_long_prompt_is_prefilled_in_chunks_between_decode_calls():
    scheduler = make(slots=4, pages=100, rows=2)
    plan_of(scheduler, (3, 1), (3, 1))
    scheduler.submit(9, prompt=80, completions=1, limit=90)
    chunks, decoding = [], []
    for _ in range(4):
        if scheduler.wants_size():
            scheduler.resize()
        look = scheduler.plan(1)
        chunks += [(fill.start, fill.count) for extend in look.extends for fill in extend.fills]
        decoding.append(len(look.rows))
    assert chunks == [(0, 32), (32, 32), (64, 16)]
    assert decoding == [2, 2, 3, 3]


def test_completions_stay_on_the_shard_that_has_their_prompt():
    scheduler = make(slots=4, pages=60, rows=2, shards=4)
    look = plan_of(scheduler, *[(9, 4)] * 4)
    assert scheduler.lanes.counts.prefill_tokens == 4 * 9  # each prompt once, over all shards
    homes = {row.lane.group: row.lane.shard for row in look.rows}
    assert sorted(homes.values()) == [0, 1, 2, 3]
    assert all(row.lane.shard == homes[row.lane.group] for row in look.rows)


def test_a_slot_that_nobody_else_wants_is_worth_a_second_prefill():
    scheduler = make(slots=2, pages=60, rows=2, shards=2)
    look = plan_of(scheduler, (9, 4))
    assert len(look.rows) == 4
    assert scheduler.lanes.counts.prefill_tokens == 2 * 9


@pytest.mark.parametrize(("running", "size"), [(16, 16), (9, 16), (8, 8), (5, 8), (4, 4), (1, 4)])
def test_the_smallest_program_that_holds_all_is_used(running, size):
    scheduler = make(slots=16, pages=100)
    plan_of(scheduler, *[(3, 1)] * running)
    assert scheduler.size == size


def test_programs_shrink_as_work_runs_out_and_grow_with_new_work():
    scheduler = make(slots=8, pages=100)
    plan_of(scheduler, *[(3, 1)] * 8)
    for lane in list(scheduler.lanes.running)[:5]:
        scheduler.retire(lane)
    assert scheduler.wants_size()
    scheduler.resize()
    look = scheduler.plan(STEPS)
    assert scheduler.size == 4
    assert sorted(row.row for row in look.rows) == [0, 1, 2]
    assert all(row.fresh for row in look.rows)  # they have moved
    for group in range(20, 24):
        scheduler.submit(group, prompt=2, completions=1, limit=9)
    assert scheduler.wants_size()
    scheduler.resize()
    assert scheduler.size == 8
    assert len(scheduler.plan(STEPS).rows) == 7


def test_a_sequence_that_the_cache_can_never_hold_is_refused():
    scheduler = make(pages=8)
    scheduler.submit(0, prompt=3, completions=1, limit=28)
    with pytest.raises(ValueError, match=r"grow to 29 tokens and the cache holds 28 .* rollout\.cache_tokens"):
        scheduler.submit(1, prompt=3, completions=1, limit=29)


def test_a_parked_sequence_keeps_its_pages_until_others_need_them():
    scheduler = make(slots=2, pages=9)
    (row,) = plan_of(scheduler, (11, 1)).rows
    scheduler.park(row.lane)
    assert row.lane.pages
    assert not scheduler.busy
    scheduler.resume(row.lane, tokens=3, limit=19)
    scheduler.resize()
    (extend,) = scheduler.plan(STEPS).extends
    assert [(fill.start, fill.count) for fill in extend.fills] == [(11, 3)]  # what is new, behind what stays
    scheduler.park(row.lane)
    scheduler.submit(5, prompt=23, completions=1, limit=31)
    scheduler.plan(STEPS)
    assert not row.lane.pages
    assert scheduler.lanes.counts.evicted == 1


@pytest.mark.parametrize("module", ["podium.rollout.scheduler", "podium.rollout.request"])
def test_the_scheduler_imports_no_jax(module):
    code = f"import {module}, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
