"""Whole runs while everything around them fails; `python -m benches.pods --bar soak` makes two hundred of them."""

import pytest

from podium.pods.inventory import RUN
from podium.pods.options import Rent
from podium.pods.rental import rent_slice
from podium.pods.session import Session
from tests.pods.soak import ZONES, Soak, one_run


@pytest.mark.parametrize("seed", range(1000, 1030))
def test_a_run_is_neither_lost_nor_left_rented_and_a_stop_wins(seed):
    found = one_run(seed)
    assert found["problems"] == [], (found["events"], found["said"][-20:])


@pytest.mark.parametrize("preempted", [False, True])
def test_a_laptop_that_wakes_deletes_nothing_that_another_laptop_uses(tmp_path, preempted):
    """While it slept its run ended or its slice was lost, and another laptop started a run under the same name."""
    (tmp_path / "code.bundle").write_text("code")
    soak = Soak(0, tmp_path / "code.bundle")
    project = soak.project(soak.gcloud)
    rent = Rent(type="v4-16", zones=list(ZONES))
    session = Session(project, rent_slice(project.slices, "demo", rent, default_zone=None), rent, soak.spec)
    if preempted:
        soak.fake.preempt("demo")
        project.slices.down("demo")
    theirs = rent_slice(project.slices, "demo", rent, default_zone=None)
    project.slices.label(theirs, {RUN: "other-0a1b2c-1"})
    machines = [node["id"] for node in soak.fake.nodes.values()]
    session.replace() if preempted else session.give_back()
    assert not session.give_back()
    assert [node["id"] for node in soak.fake.nodes.values()] == machines
