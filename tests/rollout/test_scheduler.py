import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.rollout.scheduler import Scheduler


def run_to_the_end(groups, *, num_slots, prefill_rows, seed, shards=1):
    """Admit and retire at random until nothing is left; every rule is checked from outside, on the way.

    Args:
        groups: (bucket, completions) of each group, in the order of their coming.
        num_slots: of the scheduler.
        prefill_rows: of the scheduler.
        seed: of who ends when.
        shards: of the scheduler.

    Returns:
        The number of prefill calls.
    """
    rng = random.Random(seed)
    scheduler = Scheduler(num_slots=num_slots, prefill_rows=prefill_rows, shards=shards)
    for group, (bucket, completions) in enumerate(groups):
        scheduler.submit(group, bucket=bucket, completions=completions)
    held = {}  # bucket -> groups of its last prefill
    running, order, finished, prefilled, calls = {}, [], [], [], 0
    while scheduler.busy:
        while (admission := scheduler.admit()) is not None:
            assert len(admission.prefill) <= prefill_rows
            assert all(groups[group][0] == admission.bucket for group in admission.prefill)
            prefilled += admission.prefill
            if admission.prefill:
                held[admission.bucket], calls = admission.prefill, calls + 1
            assert admission.placements, "an admission that admits nobody would never end"
            for placement in admission.placements:
                assert placement.slot in range(num_slots), "no such slot"
                assert placement.slot not in running, "slot owned twice"
                assert held[admission.bucket][placement.row] == placement.group, "another group's prompt"
                running[placement.slot] = (placement.group, placement.completion)
                order.append((placement.group, placement.completion))
            homes = [
                (each.slot * shards // num_slots, each.row * shards // prefill_rows) for each in admission.placements
            ]
            assert admission.crosses == any(here != there for here, there in homes)
        assert scheduler.running == running
        assert running, "no progress"
        assert len(running) == num_slots or len(order) == sum(completions for _, completions in groups), (
            "slot idle or lost"
        )
        for slot in rng.sample(sorted(running), rng.randint(1, len(running))):
            finished.append(running.pop(slot))
            scheduler.retire(slot)
    everyone = [
        (group, completion) for group, (_, completions) in enumerate(groups) for completion in range(completions)
    ]
    assert order == everyone, "not first in, first out"
    assert sorted(finished) == everyone, "a completion is missing or came twice"
    assert sorted(prefilled) == list(range(len(groups))), "a prompt was prefilled twice or never"
    return calls


@settings(deadline=None, max_examples=200)
@given(
    groups=st.lists(st.tuples(st.sampled_from([32, 64, 128]), st.integers(1, 9)), max_size=40),
    num_slots=st.integers(1, 12),
    prefill_rows=st.integers(1, 6),
    seed=st.integers(0, 2**16),
    shards=st.integers(1, 4),
)
def test_slots_and_prompts_are_never_lost_nor_owned_twice(groups, num_slots, prefill_rows, seed, shards):
    rows, slots = shards * prefill_rows, shards * num_slots
    run_to_the_end(groups, num_slots=slots, prefill_rows=rows, seed=seed, shards=shards)


def test_two_thousand_random_requests_all_finish_in_order():
    rng = random.Random(0)
    groups = [(rng.choice([32, 64, 128, 256]), rng.randint(1, 16)) for _ in range(2000)]
    run_to_the_end(groups, num_slots=64, prefill_rows=8, seed=1)


@pytest.mark.parametrize(("num_slots", "expected"), [(64, 3), (3, 3)])
def test_prompts_of_a_bucket_fill_the_rows_of_a_prefill_even_when_slots_come_free_one_by_one(num_slots, expected):
    calls = run_to_the_end([(32, 4)] * 24, num_slots=num_slots, prefill_rows=8, seed=0)
    assert calls == expected


def test_completions_that_do_not_fit_at_once_use_the_same_prefill():
    scheduler = Scheduler(num_slots=2, prefill_rows=4)
    scheduler.submit(0, bucket=32, completions=3)
    first = scheduler.admit()
    assert first.prefill == (0,)
    assert [placement.completion for placement in first.placements] == [0, 1]
    assert scheduler.admit() is None
    scheduler.retire(first.placements[1].slot)
    second = scheduler.admit()
    assert second.prefill == ()
    assert [(placement.completion, placement.row) for placement in second.placements] == [(2, 0)]


def test_an_empty_scheduler_has_nothing_to_do():
    scheduler = Scheduler(num_slots=2, prefill_rows=2)
    assert not scheduler.busy
    assert scheduler.admit() is None


@pytest.mark.parametrize("module", ["podium.rollout.scheduler", "podium.rollout.request"])
def test_the_scheduler_imports_no_jax(module):
    code = f"import {module}, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
