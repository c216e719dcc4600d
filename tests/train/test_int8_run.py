"""Runs whose rollouts have rounded weights."""

import pytest
from tiny_runs import SHORT, assert_same_run, config_of, trained

from podium.train.loop import train

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.long
@pytest.mark.parametrize("how", ["int8", "w8a8"])
def test_a_run_corrects_for_its_sampler_and_resumes_bit_for_bit(run_of, how, capsys):
    short = {**SHORT, "checkpoint": {"every_steps": 1}, "eval": {"at_end": False}}
    rounded = {**short, "rollout": {"weights": how}}
    whole = run_of(**rounded, steps=3)
    said = capsys.readouterr().err
    assert f"rollout weights: {how}, so sampler and trainer are different policies;" in said
    assert "algorithm.correction mask, importance weights 0.5 to 2" in said
    for record in trained(whole):
        assert record["policy/logprob_gap/mean"] > 1e-5 and record["optimizer/gradient_norm"] > 0
        assert record["policy/correction_weight"] == pytest.approx(1, abs=0.1)
    stopped = run_of(**rounded, steps=1)
    assert train(config_of(stopped, steps=3), plain=True) == 0
    assert_same_run(stopped, whole)
    assert all(record["policy/logprob_gap/mean"] < 1e-5 for record in trained(run_of(**short, steps=1)))
