"""A reference that follows the policy: what becomes of its weights, and that they are saved with the run."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import (
    DECODER,
    assert_same_run,
    config_of,
    groups_of,
    host,
    make_config,
    make_params,
    make_train_settings,
    make_trainer,
    rules_of,
    spec_of,
    train_on,
    trained,
)

from podium.config.errors import ConfigError
from podium.observe.run_dir import Fork
from podium.settings import load_settings
from podium.train.batches.run_shapes import RunShapes
from podium.train.loop import train
from podium.train.scorers import LoadedRole
from podium.train.setup import make_run_optimizer
from podium.train.state import init_state, mixed
from podium.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_device")

CHANGES = {
    "algorithm": {"kl": "k3", "kl_coef": 0.1, "entropy_bonus": 1.0},  # which trains where no answer is right
    "train": {"optimizer": {"learning_rate": 1e-3}},
    "reference": {"sync_every": 2, "mixup": 1.0},
    "eval": {"at_start": False, "at_end": False},
    "checkpoint": {"every_steps": 3},
}


def test_the_reference_becomes_a_mixture_by_trl_s_formula():
    """SyncRefModelCallback's: target.mul_(1 - alpha).add_(model, alpha=alpha)."""
    random = np.random.default_rng(0)
    policy = {name: random.normal(size=(3, 4)).astype(np.float32) for name in "ab"}
    reference = {name: random.normal(size=(3, 4)).astype(np.float32) for name in "ab"}
    found = mixed({name: np.array(x) for name, x in reference.items()}, policy, 0.6)
    for name, x in found.items():
        np.testing.assert_allclose(x, reference[name] * 0.4 + policy[name] * 0.6, rtol=1e-6, atol=1e-7)


def test_it_moves_after_every_so_many_steps_and_the_loss_compares_with_it():
    config = make_config(**{**CHANGES, "reference": {"sync_every": 2, "mixup": 0.25}})
    settings = make_train_settings(rules_of(), attention="reference")
    spec = spec_of(config)
    optimizer = make_run_optimizer(spec.optimizer, DECODER)
    trainer = Trainer(
        spec.recipe,
        settings,
        optimizer,
        shapes=RunShapes(spec.batch),
        schedule=spec.optimizer,
        folder=Path(),
        roles=[LoadedRole(role=spec.roles["reference"], params={})],
    )
    first = host(make_params(rules_of()))
    state = dataclasses.replace(
        init_state(make_params(rules_of()), optimizer), models={"reference": make_params(rules_of())}
    )
    (batch,), _ = trainer.prepare(state, groups_of())
    np.testing.assert_allclose(batch.scores["reference_logprobs"], trainer.score(state.params, batch), atol=1e-6)
    state, _ = train_on(trainer, state, groups_of(), step=0)
    assert all(np.array_equal(x, first[name]) for name, x in host(state.weights("reference")).items())
    state, _ = train_on(trainer, state, groups_of(), step=1)
    after = host(state.params)
    for name, x in host(state.weights("reference")).items():
        np.testing.assert_allclose(x, 0.25 * after[name] + 0.75 * first[name], rtol=1e-5, atol=1e-7)
    assert any(np.abs(after[name] - first[name]).max() > 1e-4 for name in after)
    (batch,), _ = trainer.prepare(state, groups_of())
    np.testing.assert_allclose(
        batch.scores["reference_logprobs"], trainer.score(state.weights("reference"), batch), atol=1e-6
    )


@pytest.mark.long
def test_a_run_with_it_resumes_bit_for_bit_and_another_starts_from_it(run_of, tmp_path):
    """Between two moves: after step 2 the reference is that step's policy, so step 3 starts without a KL."""
    whole, stopped = run_of(**CHANGES, steps=5), run_of(**CHANGES, steps=3)
    assert train(config_of(stopped, steps=5), plain=True) == 0
    assert_same_run(stopped, whole)
    kls = [record["policy/kl_reference"] for record in trained(whole)]
    assert kls[0] == kls[2] == kls[4] == pytest.approx(0, abs=1e-9)
    assert min(kls[1], kls[3]) > 1e-8
    config = config_of(whole, name="next", runs_dir=str(tmp_path), steps=2)
    assert train(config, fork=Fork(str(whole), None), plain=True) == 0
    assert trained(tmp_path / "next")[0]["policy/kl_reference"] > 3 * max(kls)  # its reference is the model again
    plain = config.model_copy(update={"name": "plain", "reference": None})
    assert train(plain, fork=Fork(str(whole), None), plain=True) == 0


def test_a_fixed_reference_is_no_part_of_the_state():
    trainer, state = make_trainer(reference=True, algorithm={"kl": "k3", "kl_coef": 0.1})
    state, _ = train_on(trainer, state, groups_of())
    assert not state.models


@pytest.mark.parametrize(
    ("key", "message", "changes"),
    [
        ("reference", "compares with no reference, so nothing reads it", ["algorithm.kl=none", "algorithm.kl_coef=0"]),
        ("reference", "with adapters the reference is the frozen base", ["lora={}"]),
        ("reference.sync_every", "more than the run's 100 steps", ["reference.sync_every=101"]),
        ("reference.mixup", "expected a number above 0 and at most 1", ["reference.mixup=1.5"]),
    ],
)
def test_a_reference_that_cannot_move_is_refused(tmp_path, key, message, changes):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: none\ntasks: [{name: arithmetic}]\nalgorithm: {kl: k3, kl_coef: 0.1}\n"
        "reference: {sync_every: 50, mixup: 0.5}\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_settings([file], changes, {})
    assert key in str(raised.value)
    assert message in str(raised.value)
