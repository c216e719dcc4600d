import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.rollout.request import Key, SamplingParams
from podium.rollout.scheduler import Scheduler
from podium.rollout.sequence import Sequence, SharedPrompt

PAGE, CHUNKS, STEPS = 4, (4, 16, 32), 3


def make(*, slots=8, pages=64, rows=4, shards=1, cells=0, longest=None):
    sizes = tuple(dict.fromkeys(shards * -(-slots // part) for part in (1, 2, 4)))
    return Scheduler(
        slots=sizes,
        num_pages=shards * pages,
        num_cells=shards * cells,
        page_tokens=PAGE,
        rows=shards * rows,
        chunks=CHUNKS,
        shards=shards,
        longest=longest,
    )


def submit(scheduler, request, *, prompt, completions, limit, keep=False):
    tokens = (0,) * prompt
    sampling = SamplingParams(max_new_tokens=limit - prompt)
    sequences = [
        Sequence(key=Key(request, index), context=tokens, sampling=sampling, seed=0, keep=keep)
        for index in range(completions)
    ]
    scheduler.submit(tokens, sequences)
    return sequences


def extend(scheduler, sequence, *, tokens, limit):
    sampling = SamplingParams(max_new_tokens=limit - sequence.length - tokens)
    sequence.begin_turn([0] * tokens, sampling, seed=0, keep=sequence.keep)
    scheduler.resume(sequence)


class World:
    """A cache and a device without numbers: what each page holds, checked after every plan.

    Every position of a page remembers which sequence's token is there; a sequence may decode only where all tokens
    before its last are in its pages, made by the current weights.
    """

    def __init__(self, scheduler, seed):
        self.scheduler, self.rng = scheduler, random.Random(seed)
        self.content = {}  # (shard, page, offset) -> (request, index, position); index -1: of the prompt
        self.states = {}  # (shard, page) -> the same, of the last token that was prefilled there
        self.cells = {}  # (shard, cell) -> the tokens that a layer with a state has read, in their order
        self.prompts = {}  # request -> tokens of its prompt
        self.goal = {}  # sequence -> length at which its turn ends
        self.turns = {}  # sequence -> turns to come
        self.all_cells = list(scheduler.pages.free_cells[0])
        self.known, self.order, self.done = [], [], []
        self.decoded = self.rebuilt = 0

    def submit(self, request, prompt, completions, limit, keep=False):
        sequences = submit(self.scheduler, request, prompt=prompt, completions=completions, limit=limit, keep=keep)
        self.prompts[request] = prompt
        for sequence in sequences:
            self.goal[sequence] = self.rng.randint(prompt + 1, limit)
            self.turns[sequence] = self.rng.choice((0, 0, 1, 2))
        self.known += sequences
        return sequences

    def token(self, owner, position):
        if isinstance(owner, SharedPrompt):
            return owner.request, -1, position
        request, index = owner.key
        return request, (-1 if position < self.prompts[request] else index), position

    def step(self):
        scheduler = self.scheduler
        if scheduler.wants_size():
            scheduler.resize()
        before = set(scheduler.queues.running)
        plan = scheduler.plan(STEPS)
        self.order += [sequence for sequence in scheduler.queues.running if sequence not in before]
        for call in plan.prefills:
            assert call.chunk in CHUNKS
            rows = [fill.row for fill in call.fills]
            assert len(set(rows)) == len(rows)
            for fill in call.fills:
                assert 0 < fill.count <= call.chunk
                self.rebuilt += isinstance(fill.owner, Sequence) and fill.start < fill.owner.lost
                for position in range(fill.start, fill.start + fill.count):
                    what = self.token(fill.owner, position)
                    self.content[fill.owner.shard, fill.pages[position // PAGE], position % PAGE] = what
                self.states[fill.owner.shard, fill.pages[position // PAGE]] = what
                if fill.cell is not None and fill.owner.shard >= 0:  # else it was preempted in the same plan
                    self.enter(fill.owner, fill.cell, fill.start, fill.start + fill.count)
        for copy in plan.copies:
            for offset in range(PAGE):
                self.content[copy.shard, copy.target, offset] = self.content.get((copy.shard, copy.source, offset))
            self.states[copy.shard, copy.target] = self.states.get((copy.shard, copy.source))
        for copy in plan.cell_copies:
            self.cells[copy.shard, copy.target] = list(self.cells[copy.shard, copy.source])
        rows = [row.row for row in plan.rows]
        assert len(set(rows)) == len(rows), "slot owned twice"
        assert all(0 <= row < scheduler.size for row in rows)
        for row in plan.rows:
            self.decode(row.sequence, row.first)
        self.check()
        return plan

    def enter(self, owner, cell, start, end):
        """Let a state read tokens `start` to `end` of its owner; a first token makes a new one."""
        state = self.cells[owner.shard, cell] if start else []
        assert state == [self.token(owner, position) for position in range(start)], "a state of other tokens"
        state += [self.token(owner, position) for position in range(start, end)]
        self.cells[owner.shard, cell] = state

    def decode(self, sequence, first):
        there = sequence.length - (not first)
        for position in range(there):
            at = sequence.shard, sequence.pages[position // PAGE], position % PAGE
            assert self.content.get(at) == self.token(sequence, position), "reads what is not its own"
        if first:
            last = sequence.length - 1
            at = sequence.shard, sequence.pages[last // PAGE]
            assert self.states.get(at) == self.token(sequence, last), "another's state"
        made = min(STEPS + first, self.goal[sequence] - sequence.length)
        for position in range(there, there + made - first):
            at = sequence.shard, sequence.pages[position // PAGE], position % PAGE
            self.content[at] = self.token(sequence, position)
        if sequence.cell is not None:
            self.enter(sequence, sequence.cell, there, there + made - first)
        self.decoded += made
        sequence.drawn += [0] * made
        self.scheduler.advance(sequence, most=STEPS + first)
        if sequence.length == self.goal[sequence]:
            self.end_turn(sequence)

    def end_turn(self, sequence):
        if self.turns[sequence]:
            self.turns[sequence] -= 1
            self.scheduler.park(sequence)
        else:
            self.retire(sequence)

    def retire(self, sequence):
        self.scheduler.retire(sequence)
        self.done.append(sequence)

    def reply(self, sequence, room):
        """Extend a parked sequence by an environment's answer, if there is room."""
        tokens = self.rng.randint(0, 5)
        limit = min(room, sequence.length + tokens + 6)
        if sequence.length + tokens >= limit:
            self.retire(sequence)
            return
        extend(self.scheduler, sequence, tokens=tokens, limit=limit)
        self.goal[sequence] = self.rng.randint(sequence.length + 1, limit)

    def check(self):
        """Every slot and page has the owners that it should have, counted again from the sequences."""
        scheduler = self.scheduler
        queues, pages = scheduler.queues, scheduler.pages
        for shard, free in enumerate(pages.free):
            owned = list(free)
            for group in queues.groups.values():
                owned += [page for each in group.prompts.values() if each.shard == shard for page in each.pages]
                for sequence in group.sequences.values():
                    if sequence.shard == shard:
                        owned += sequence.pages[sequence.shared.full_pages if sequence.shared else 0 :]
            assert sorted(owned) == list(range(pages.per_shard)), "page leaked or owned twice"
        for shard, free in enumerate(pages.free_cells):
            owners = [each for group in queues.groups.values() for each in group.prompts.values()]
            owners += [each for group in queues.groups.values() for each in group.sequences.values()]
            held = [each.cell for each in owners if each.shard == shard and each.cell is not None]
            assert sorted([*free, *held]) == self.all_cells, "cell leaked or owned twice"
        for group in queues.groups.values():
            for shared in group.prompts.values():
                users = [sequence for sequence in group.sequences.values() if sequence.shared is shared]
                assert shared.users == len(users), "reference count differs from the owners"
                assert all(each.pages[: shared.full_pages] == shared.pages[: shared.full_pages] for each in users)
        occupied = scheduler.slots.occupied
        assert len(occupied) == len(set(occupied)) == len(queues.running), "slot lost or owned twice"
        assert all(sequence.state == "running" for sequence in occupied)
        assert all(sequence.shard < 0 for sequence in self.known if sequence.state == "gone")


def converse(world, *, room, parks, cancels, restarts=0.0, most=10_000):
    """Run all sequences to their end, with random parks, replies, cancels and new weights."""
    scheduler, rng = world.scheduler, world.rng
    for _ in range(most):
        for sequence in list(scheduler.queues.parked):
            if rng.random() < 0.5 or not scheduler.busy:
                world.reply(sequence, room)
        live = [sequence for sequence in world.known if sequence.state in ("running", "waiting", "parked")]
        if live and rng.random() < parks:
            sequence = rng.choice(live)
            if sequence.state != "parked":
                scheduler.park(sequence)
        if live and rng.random() < cancels:
            world.retire(rng.choice(live))
        if rng.random() < restarts:
            scheduler.restart()
            world.content.clear()
            world.states.clear()
            world.cells.clear()
        if scheduler.busy:
            world.step()
        elif not scheduler.queues.groups:
            break
    assert not scheduler.queues.groups, "no progress"
    assert all(len(free) == scheduler.pages.per_shard for free in scheduler.pages.free), "page leaked at the end"
    assert sorted(map(id, world.done)) == sorted(map(id, world.known)), "a sequence is missing or came twice"


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
    cells=st.sampled_from([0, 2, 3, 8]),
)
def test_nothing_is_lost_nor_owned_twice(groups, slots, pages, rows, shards, seed, parks, cancels, restarts, cells):
    world = World(make(slots=slots, pages=pages, rows=rows, shards=shards, cells=cells), seed)
    for group, (prompt, completions) in enumerate(groups):
        world.submit(group, prompt, completions, prompt + 12)
    converse(world, room=44, parks=parks, cancels=cancels, restarts=restarts)


@pytest.mark.parametrize(("pages", "shards", "cells"), [(2000, 1, 0), (70, 1, 0), (40, 4, 0), (70, 1, 20), (40, 4, 3)])
def test_two_thousand_random_conversations_leak_nothing(pages, shards, cells):
    world = World(make(slots=16, pages=pages, shards=shards, cells=cells), 1)
    for group in range(500):
        prompt = world.rng.randint(1, 30)
        world.submit(group, prompt, 4, prompt + world.rng.randint(1, 14))
    converse(world, room=44, parks=0.1, cancels=0.1)
    if pages == 70:
        assert world.scheduler.queues.counts.preempted + world.scheduler.queues.counts.evicted > 0


@pytest.mark.parametrize(("pages", "shards", "cells"), [(70, 1, 0), (40, 4, 0), (13, 2, 0), (70, 1, 20), (40, 4, 3)])
def test_conversations_with_reserved_pages_are_never_rebuilt(pages, shards, cells):
    """However few the pages: 13 hold one of 44 tokens, with its prompt's partial page. Prompts may be, as one row."""
    world = World(make(slots=16, pages=pages, shards=shards, cells=cells, longest=44), 1)
    for group in range(30):
        prompt = world.rng.randint(1, 30)
        world.submit(group, prompt, 4, prompt + world.rng.randint(1, 14), keep=True)
    converse(world, room=44, parks=0.1, cancels=0.1)
    counts = world.scheduler.queues.counts
    assert (counts.preempted, counts.evicted, world.rebuilt) == (0, 0, 0)


def test_sequences_enter_slots_in_the_order_they_came():
    world = World(make(slots=6, pages=400), 0)
    sequences = [sequence for group in range(40) for sequence in world.submit(group, 1 + group % 20, 3, 40)]
    for sequence in sequences:
        world.turns[sequence] = 0
    converse(world, room=44, parks=0.0, cancels=0.0)
    assert world.order == sequences


def test_what_was_preempted_comes_back_first_and_loses_nothing():
    world = World(make(slots=4, pages=14), 0)
    sequences = [world.submit(group, 5, 1, 33)[0] for group in range(4)]
    for sequence in sequences:
        world.turns[sequence], world.goal[sequence] = 0, 33
    converse(world, room=44, parks=0.0, cancels=0.0)
    counts = world.scheduler.queues.counts
    assert counts.preempted > 0
    assert counts.rebuilt_tokens > 0
    assert world.decoded == 4 * 28
    assert world.done[0] is sequences[0]


def test_headroom_keeps_sequences_from_being_preempted():
    """Admitted one by one as pages come free; with all at once, half of them would be thrown out again."""
    world = World(make(slots=8, pages=24), 0)
    for group in range(30):
        (sequence,) = world.submit(group, 5, 1, 13)
        world.turns[sequence], world.goal[sequence] = 0, 13
    converse(world, room=44, parks=0.0, cancels=0.0)
    assert world.scheduler.queues.counts.preempted == 0


def plan_of(scheduler, *requests):
    for group, (prompt, completions) in enumerate(requests):
        submit(scheduler, group, prompt=prompt, completions=completions, limit=prompt + 8)
    scheduler.resize()
    return scheduler.plan(STEPS)


def test_a_prompt_is_prefilled_once_and_its_part_page_copied_for_each_completion():
    plan = plan_of(make(), (11, 4))
    (call,) = plan.prefills
    (fill,) = call.fills
    assert isinstance(fill.owner, SharedPrompt)
    assert (call.chunk, fill.start, fill.count) == (16, 0, 11)
    assert all(row.first for row in plan.rows)
    assert [copy.source for copy in plan.copies] == [fill.pages[2]] * 4
    sequences = [row.sequence for row in plan.rows]
    assert len(sequences) == 4
    assert all(sequence.pages[:2] == list(fill.pages[:2]) for sequence in sequences)
    assert len({sequence.pages[2] for sequence in sequences}) == 4


def test_a_single_completion_needs_no_copy():
    plan = plan_of(make(), (11, 1))
    assert isinstance(plan.prefills[0].fills[0].owner, Sequence)
    assert not plan.copies


def test_a_prompt_of_one_token_needs_no_prefill():
    plan = plan_of(make(), (1, 3))
    assert (plan.prefills, plan.copies, len(plan.rows)) == ((), (), 3)


def test_prompts_that_wait_fill_the_rows_that_are_left():
    scheduler = make(slots=2, pages=100, rows=4)
    plan = plan_of(scheduler, *[(9, 2)] * 5)
    assert [fill.owner.request for fill in plan.prefills[0].fills] == [0, 1, 2, 3]
    assert [row.sequence.key.request for row in plan.rows] == [0, 0]


def test_a_long_prompt_is_prefilled_in_chunks_between_decode_calls():
    scheduler = make(slots=4, pages=100, rows=2)
    plan_of(scheduler, (3, 1), (3, 1))
    submit(scheduler, 9, prompt=80, completions=1, limit=90)
    chunks, decoding = [], []
    for _ in range(4):
        if scheduler.wants_size():
            scheduler.resize()
        plan = scheduler.plan(1)
        chunks += [(fill.start, fill.count) for call in plan.prefills for fill in call.fills]
        decoding.append(len(plan.rows))
    assert chunks == [(0, 32), (32, 32), (64, 16)]
    assert decoding == [2, 2, 3, 3]


def test_completions_stay_on_the_shard_that_has_their_prompt():
    scheduler = make(slots=4, pages=60, rows=2, shards=4)
    plan = plan_of(scheduler, *[(9, 4)] * 4)
    assert scheduler.queues.counts.prefill_tokens == 4 * 9  # each prompt once, over all shards
    homes = {row.sequence.key.request: row.sequence.shard for row in plan.rows}
    assert sorted(homes.values()) == [0, 1, 2, 3]
    assert all(row.sequence.shard == homes[row.sequence.key.request] for row in plan.rows)


def test_a_slot_that_no_other_sequence_wants_is_worth_a_second_prefill():
    scheduler = make(slots=2, pages=60, rows=2, shards=2)
    plan = plan_of(scheduler, (9, 4))
    assert len(plan.rows) == 4
    assert scheduler.queues.counts.prefill_tokens == 2 * 9


@pytest.mark.parametrize(("running", "size"), [(16, 16), (9, 16), (8, 8), (5, 8), (4, 4), (1, 4)])
def test_the_smallest_program_that_holds_all_is_used(running, size):
    scheduler = make(slots=16, pages=100)
    plan_of(scheduler, *[(3, 1)] * running)
    assert scheduler.size == size


def test_programs_shrink_as_work_runs_out_and_grow_with_new_work():
    scheduler = make(slots=8, pages=100)
    plan_of(scheduler, *[(3, 1)] * 8)
    for sequence in list(scheduler.queues.running)[:5]:
        scheduler.retire(sequence)
    assert scheduler.wants_size()
    scheduler.resize()
    plan = scheduler.plan(STEPS)
    assert scheduler.size == 4
    assert sorted(row.row for row in plan.rows) == [0, 1, 2]
    assert all(row.fresh for row in plan.rows)  # they have moved
    for group in range(20, 24):
        submit(scheduler, group, prompt=2, completions=1, limit=9)
    assert scheduler.wants_size()
    scheduler.resize()
    assert scheduler.size == 8
    assert len(scheduler.plan(STEPS).rows) == 7


def test_a_sequence_that_the_cache_can_never_hold_is_refused():
    scheduler = make(pages=8)
    submit(scheduler, 0, prompt=3, completions=1, limit=28)
    with pytest.raises(ValueError, match=r"grow to 29 tokens, but the cache holds only 28 .* rollout\.cache_tokens"):
        submit(scheduler, 1, prompt=3, completions=1, limit=29)


def test_a_parked_sequence_keeps_its_pages_until_others_need_them():
    scheduler = make(slots=2, pages=9)
    (row,) = plan_of(scheduler, (11, 1)).rows
    scheduler.park(row.sequence)
    assert row.sequence.pages
    assert not scheduler.busy
    extend(scheduler, row.sequence, tokens=3, limit=19)
    scheduler.resize()
    (call,) = scheduler.plan(STEPS).prefills
    assert [(fill.start, fill.count) for fill in call.fills] == [(11, 3)]  # only what is new
    scheduler.park(row.sequence)
    submit(scheduler, 5, prompt=23, completions=1, limit=31)
    scheduler.plan(STEPS)
    assert not row.sequence.pages
    assert scheduler.queues.counts.evicted == 1
    assert scheduler.queues.counts.parked == 1  # twice, and never two
    for sequence in list(scheduler.queues.running):
        scheduler.park(sequence)
    assert scheduler.queues.counts.parked == 2
    assert scheduler.take_counts().parked == 2 and scheduler.queues.counts.parked == 0
