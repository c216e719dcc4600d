"""Whole runs while everything around them fails; `python -m benches.pods --bar soak` makes two hundred of them."""

import pytest

from tests.pods.soak import one_run


@pytest.mark.parametrize("seed", range(1000, 1030))
def test_a_run_is_neither_lost_nor_left_rented_and_a_stop_wins(seed):
    found = one_run(seed)
    assert found["problems"] == [], (found["events"], found["said"][-20:])
