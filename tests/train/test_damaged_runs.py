"""Each kind of damage to a run's folder once, and some random ones; `python -m benches.damage` does more."""

import pytest

from benches.damage import STEPS, make_state
from benches.damage_runs import HARMS, trials

EXPECTED = {
    "a step is a link": "continued",
    "the folder is a link": "continued",
    "strangers": "continued",
    "no digests, a bit flipped": "said",
    "read-only": "refused",
    "another seed": "refused",
    "a hole": "said",
    "shortened": "said",
    "a doubled line": "said",
}


@pytest.mark.usefixtures("one_device")
def test_a_damaged_run_folder_is_never_continued_wrongly_and_never_hangs(tmp_path):
    states = {step: make_state(step, layers=1, width=16) for step in STEPS}
    rows = list(trials(tmp_path, states, seed=0, times=1, randomly=5))
    assert len(rows) == len(HARMS) + 6
    assert [row for row in rows if row["outcome"].startswith(("WRONG", "HUNG"))] == []
    for row in rows:
        assert row["outcome"] == EXPECTED.get(row["kind"], row["outcome"]), row
