"""The distance to the reference model, in the reward and in the loss."""

import dataclasses

import numpy as np
import pytest
from tiny_runs import (
    REWARDS,
    groups_of,
    lengths_of,
    make_trainer,
    shifted,
    train_on,
    with_logprobs,
)

from podium.algorithms.losses import K3_PLUS_BOUND


def test_kl_in_the_reward_is_subtracted_before_the_advantage():
    algorithm = {"recipe": "dr_grpo", "kl": "k1_reward", "kl_coef": 0.5}
    trainer, state = make_trainer(reference=True, algorithm=algorithm)
    shifts = np.array([[0.1, 0.2, 0.3, 0.4]] * 4)  # nat per token above the reference
    groups = shifted(trainer, state, groups_of(), shifts)
    lengths = np.array([[each.num_drawn for each in group.transcripts] for group in groups])
    penalised = np.array(REWARDS) - 0.5 * shifts * lengths
    expected = penalised - penalised.mean(axis=1, keepdims=True)
    _, metrics = train_on(trainer, state, groups)
    assert metrics["train-reward/advantage/min"] == pytest.approx(expected.min(), abs=1e-4)
    assert metrics["train-reward/advantage/max"] == pytest.approx(expected.max(), abs=1e-4)
    assert metrics["train-reward/advantage/std"] == pytest.approx(expected.std(), abs=1e-4)
    assert metrics["time/train/score_s"] > 0


@pytest.mark.parametrize("kl", ["k3", *(pytest.param(kl, marks=pytest.mark.long) for kl in ("k2", "k3+"))])
def test_kl_to_the_reference_is_0_at_first_and_grows_with_the_updates(kl):
    algorithm, train = {"kl": kl, "kl_coef": 0.01}, {"optimizer": {"learning_rate": 1e-3}}
    trainer, state = make_trainer(reference=True, algorithm=algorithm, train=train)
    groups = with_logprobs(trainer, state, groups_of())
    seen = []
    for _ in range(4):
        state, metrics = train_on(trainer, state, groups)
        seen.append(metrics["policy/kl_reference"])
    assert seen[0] == pytest.approx(0, abs=1e-7)
    assert seen[3] > seen[1] > 1e-5
    assert {name: bool(x.is_deleted()) for name, x in trainer.scorers[0].params.items() if x.is_deleted()} == {}


def test_a_strong_kl_holds_the_policy_at_the_reference():
    def distance(kl_coef: float) -> float:
        algorithm = {"kl": "k2", "kl_coef": kl_coef}
        train = {"optimizer": {"learning_rate": 1e-2}}
        trainer, state = make_trainer(reference=True, algorithm=algorithm, train=train)
        groups = with_logprobs(trainer, state, groups_of())
        for _ in range(8):
            state, metrics = train_on(trainer, state, groups)
        return metrics["policy/kl_reference"]

    assert distance(5.0) < distance(1e-6) / 2


def test_a_kl_in_the_reward_is_reported_and_leaves_the_task_s_rewards_as_they_are():
    """Two groups earn the same; only the penalty makes their completions differ."""
    rewards = [REWARDS[0], [1.0] * 4, REWARDS[2], [0.0] * 4]
    trainer, state = make_trainer(reference=True, algorithm={"recipe": "dr_grpo", "kl": "k1_reward", "kl_coef": 0.5})
    shifts = np.array([[0.1, 0.2, 0.3, 0.4]] * 4)
    groups = shifted(trainer, state, groups_of(rewards), shifts)
    sums = shifts * np.array(lengths_of(groups))
    _, metrics = train_on(trainer, state, groups)
    assert metrics["policy/kl_reference"] == pytest.approx(sums.sum() / np.sum(lengths_of(groups)), rel=1e-4)
    assert metrics["train-reward/total/mean"] == pytest.approx(np.mean(rewards))
    assert metrics["train-reward/penalised/mean"] == pytest.approx(np.mean(rewards - 0.5 * sums), rel=1e-5)
    assert metrics["train-reward/kl_penalty/max"] == pytest.approx(0.5 * sums.max(), rel=1e-4)
    assert metrics["group/equal_rewards_fraction"] == 0.5


@pytest.mark.parametrize(
    ("kl", "value"),
    [
        ("k2", lambda d: d**2 / 2),
        ("k3", lambda d: np.expm1(-d) + d),
        ("k3+", lambda d: np.minimum(np.expm1(-d) + d, K3_PLUS_BOUND)),
    ],
)
def test_the_reported_kl_is_the_estimator_of_the_loss(kl, value):
    """After steps away from the reference: the mean of k2 or k3 over the tokens, by hand from log-probabilities."""
    trainer, state = make_trainer(reference=True, algorithm={"kl": kl, "kl_coef": 1e-6})
    groups = with_logprobs(trainer, state, groups_of())
    for _ in range(2):
        state, _ = train_on(trainer, state, groups)
    ours, reference = (
        np.concatenate(
            [each.full_logprobs for group in with_logprobs(trainer, by, groups) for each in group.transcripts]
        )
        for by in (state, dataclasses.replace(state, params=trainer.scorers[0].params))
    )
    _, metrics = train_on(trainer, state, groups)
    assert np.abs(ours - reference).max() > 0.05
    assert metrics["policy/kl_reference"] == pytest.approx(np.mean(value(ours - reference)), rel=1e-3)
