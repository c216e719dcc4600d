"""Whole runs on several laptops while everything around them fails; `python -m benches.pods --bar soak` makes 300."""

import pytest

from tests.pods.soak import Laptop, story
from tests.pods.soak_judge import one_run
from tests.pods.timeline import Timeline

STORIES = 50
"""How many stories a long test tells."""


@pytest.mark.parametrize("seed", [*range(1000, 1024), 3646])
def test_no_run_is_lost_nothing_is_deleted_wrongly_or_left_without_a_word(seed):
    found = one_run(seed)
    assert found["problems"] == [], (found["events"], found["statuses"], found["said"][-40:])


@pytest.mark.long
@pytest.mark.parametrize("first", range(2000, 4000, STORIES))
def test_two_thousand_stories_end_well(first):
    told = [one_run(seed) for seed in range(first, first + STORIES)]
    assert {each["seed"]: each["problems"] for each in told if each["problems"]} == {}


def test_a_story_is_the_same_whenever_it_is_told():
    told = [one_run(1003) for _ in range(2)]
    assert told[0] == told[1]


def test_the_judge_sees_what_is_deleted_while_a_run_is_going_on():
    """What is deleted, and what ran there at that moment, is recorded."""
    soak = story(1000)
    assert soak.deletions, "every run that ends deletes its slice"
    assert all(each.owner == "ada" and each.healthy is None for each in soak.deletions)


def test_time_with_a_closed_lid_is_no_waiting_time():
    timeline = Timeline()
    laptop = Laptop(timeline, "ada's")
    seen = []

    def work() -> None:
        laptop.sleep(100.0)
        seen.append((timeline.now - 1e9, laptop.monotonic() - 1e9))

    timeline.after(40.0, lambda: laptop.close_lid(1000.0))
    laptop.begin(work)
    timeline.run(lambda: False)
    assert seen == [(1100.0, 100.0)]
