"""Coefficients that a run adapts: what the loss has of them, and that they are saved with the run."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import (
    assert_same,
    assert_same_run,
    changed,
    config_of,
    groups_of,
    host,
    make_trainer,
    metrics_of,
    train_on,
    trained,
)

from podium.algorithms.controllers import first_coefs
from podium.observe.run_dir import Fork
from podium.train.loop import train
from podium.train.state import with_coefs

pytestmark = pytest.mark.usefixtures("one_device")

CHANGES = {
    "algorithm": {
        "kl": "k3",
        "kl_coef": 0.1,
        "kl_target": 1e-3,
        "kl_gain": 0.5,
        "entropy_bonus": 0.01,
        "entropy_target": 100.0,
        "minibatches": 2,
    },
    "eval": {"at_start": False, "at_end": False},
    "checkpoint": {"every_steps": 2},
}


def test_an_update_has_the_coefficients_of_the_state_as_if_they_were_the_config_s():
    options = {"kl": "k3", "kl_coef": 0.1, "kl_target": 0.02, "entropy_target": 100.0}
    trainer, state = make_trainer(reference=True, algorithm=options)
    state = dataclasses.replace(state, params={name: 1.01 * x for name, x in state.params.items()})
    before, start = host(state.params), dataclasses.replace(state)
    state = with_coefs(start, {"kl_coef": 0.3, "entropy_bonus": 0.25, "last_entropy": 1.0})
    found, metrics = train_on(trainer, state, groups_of())
    fixed, state = make_trainer(reference=True, algorithm={"kl": "k3", "kl_coef": 0.3, "entropy_bonus": 0.25})
    state = dataclasses.replace(state, params={name: 1.01 * x for name, x in state.params.items()})
    expected, fixed_metrics = train_on(fixed, state, groups_of())
    assert_same(host(found.params), host(expected.params))
    assert any(np.abs(x - before[name]).max() > 0 for name, x in host(found.params).items())
    assert (metrics["policy/kl_coef"], metrics["policy/entropy_bonus"]) == pytest.approx((0.3, 0.25))
    error = np.clip(fixed_metrics["policy/kl_reference"] / 0.02 - 1, -0.2, 0.2)
    assert found.coefs["kl_coef"] == pytest.approx(0.3 * (1 + 0.1 * error), rel=1e-6)
    assert found.coefs["entropy_bonus"] == pytest.approx(0.255, rel=1e-6)
    assert found.coefs["last_entropy"] == pytest.approx(fixed_metrics["policy/entropy"], rel=1e-5)


def test_a_kl_in_the_reward_is_charged_by_the_state_s_coefficient():
    options = {"kl": "k1_reward", "kl_coef": 0.1}
    adapting, state = make_trainer(reference=True, algorithm={**options, "kl_target": 0.02})
    assert first_coefs(adapting.recipe) == {"kl_coef": 0.1}
    _, stats = adapting.prepare(with_coefs(state, {"kl_coef": 0.4}), groups_of())
    fixed, state = make_trainer(reference=True, algorithm={**options, "kl_coef": 0.4})
    _, expected = fixed.prepare(state, groups_of())
    assert stats.penalty is not None and expected.penalty is not None
    penalties = stats.penalty.penalties
    np.testing.assert_allclose(penalties, expected.penalty.penalties, rtol=1e-6)  # the state's is a float32
    assert np.abs(penalties).max() > 0


def test_a_step_without_an_update_adapts_nothing():
    trainer, state = make_trainer(algorithm={"zero_variance": "drop", "entropy_target": 100.0, "entropy_bonus": 0.01})
    state = with_coefs(state, first_coefs(trainer.recipe))
    (group, *_) = groups_of()
    equal = [dataclasses.replace(group, rewards=[group.rewards[0]] * len(group.rewards))] * 4
    found, _ = train_on(trainer, state, equal)
    assert {name: float(x) for name, x in found.coefs.items()} == pytest.approx(first_coefs(trainer.recipe))
    assert changed(trainer, found, groups_of())[1]["policy/entropy_bonus"] == 0.0


@pytest.mark.long
def test_a_run_that_adapts_resumes_bit_for_bit(run_of, tmp_path):
    whole, stopped = run_of(**CHANGES, steps=4), run_of(**CHANGES, steps=2)
    assert train(config_of(stopped, steps=4), plain=True) == 0
    assert_same_run(stopped, whole)
    records = trained(whole)
    assert [record["policy/entropy_bonus"] for record in records] == pytest.approx(
        [0.0075, 0.0225, 0.0325, 0.0425], abs=2e-3
    )
    assert len({record["policy/kl_coef"] for record in records}) == 4
    config = config_of(whole, name="next", runs_dir=str(tmp_path), steps=1)
    assert train(config, fork=Fork(str(whole), None), plain=True) == 0
    (record,) = trained(Path(config.runs_dir) / "next")  # its own run begins with the config's
    assert record["policy/kl_coef"] == pytest.approx(0.1)
    assert metrics_of(whole)[-1] != metrics_of(Path(config.runs_dir) / "next")[-1]
