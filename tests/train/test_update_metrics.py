"""What a step says about itself, by hand."""

import numpy as np
import pytest
from tiny_runs import REWARDS, groups_of, make_group, make_trainer, shifted, train_on

from podium.observe.metrics import find_metric


def test_every_metric_of_an_update_is_documented():
    algorithm = {"old_logprobs": "trainer", "correction": "truncate", "kl": "k3", "kl_coef": 0.1}
    trainer, state = make_trainer(reference=True, algorithm=algorithm)
    groups = groups_of()
    names = {*train_on(trainer, state, groups)[1]}
    assert [name for name in sorted(names) if find_metric(name) is None] == []


def test_tokens_are_counted_by_kind():
    """Groups of 2 with a prompt of 6: 5 + 3 + 2 and 5 + 8 + 1 tokens, each in a row of 16 of a micro-batch of 2."""
    trainer, state = make_trainer(prompts_per_step=2, group_size=2)
    groups = [make_group([0.0, 1.0], lengths=[3, 2]), make_group([0.0, 1.0], seed=1, lengths=[8, 1])]
    _, metrics = train_on(trainer, state, groups)
    assert metrics["train-other/total_valid_token_count"] == metrics["tokens/completion"] == 14
    assert metrics["tokens/prompt"] == 10
    assert metrics["tokens/padding"] == 32 - 24


def test_rewards_and_lengths_of_a_step_by_hand():
    groups = [
        make_group([1.0, 0.0], lengths=[2, 4], finish=["stop", "length"]),
        make_group([0.5, 0.5], seed=1, lengths=[6, 8]),
    ]
    trainer, state = make_trainer(prompts_per_step=2, group_size=2)
    _, metrics = train_on(trainer, state, groups)
    assert metrics["train-reward/total/mean"] == metrics["train-reward/func/correct/mean"] == 0.5
    assert metrics["train-reward/total/std"] == pytest.approx(np.sqrt(0.125))
    assert (metrics["train-reward/total/min"], metrics["train-reward/total/max"]) == (0.0, 1.0)
    assert (metrics["train-seq_len/prompt/mean"], metrics["train-seq_len/completion/mean"]) == (6.0, 5.0)
    assert (metrics["train-seq_len/total/mean"], metrics["train-seq_len/total/max"]) == (11.0, 14.0)
    assert metrics["rollout/truncated_fraction"] == 0.25
    assert metrics["grading/timeouts"] == 0


def test_the_sampler_s_entropy_is_of_all_tokens_also_where_nothing_is_trained_on():
    groups = [make_group([1.0] * 4, seed=seed, finish="length") for seed in range(4)]
    trainer, state = make_trainer(algorithm={"zero_variance": "drop"})
    _, metrics = train_on(trainer, state, groups)
    assert metrics["rollout/entropy"] == pytest.approx(4.0)  # each token has -4 nat under its distribution
    assert metrics["optimizer/updates"] == 0
    assert "policy/entropy" not in metrics


def test_statistics_of_minibatches_are_weighted_by_their_tokens():
    """One minibatch of 24 tokens, 1 nat off, another of 4 that is exact."""
    algorithm, train = {"minibatches": 2}, {"optimizer": {"learning_rate": 1e-12}}
    whole, state = make_trainer(prompts_per_step=2, train=train)
    groups = [make_group(REWARDS[0], lengths=[6] * 4), make_group(REWARDS[1], seed=1, lengths=[1] * 4)]
    groups = shifted(whole, state, groups, np.array([[1.0] * 4, [0.0] * 4]))
    trainer, state = make_trainer(prompts_per_step=2, algorithm=algorithm, train=train)
    _, metrics = train_on(trainer, state, groups)
    assert metrics["policy/kl_sampled"] == pytest.approx(24 * np.exp(-1) / 28, rel=1e-3)


@pytest.mark.parametrize(
    "algorithm", [{"recipe": "reinforce_pp_baseline"}, {"recipe": "grpo", "std": "batch", "std_ddof": 0}]
)
def test_dropped_groups_are_no_part_of_the_batch_s_standard_deviation(algorithm):
    trainer, state = make_trainer(algorithm={**algorithm, "zero_variance": "drop"})
    groups = [
        make_group(rewards, seed=seed, lengths=[5] * 4)
        for seed, rewards in enumerate([[1.0, 0.0, 0.0, 1.0], [1.0] * 4, [0.0, 1.0, 1.0, 0.0], [1.0] * 4])
    ]
    _, metrics = train_on(trainer, state, groups)
    assert metrics["group/dropped"] == 2
    assert metrics["train-reward/advantage/std"] == pytest.approx(1.0, rel=1e-4)


def test_the_learning_rate_follows_the_run_and_not_the_updates():
    """Steps 0 and 2 of 5 make no update, step 3 one of its two: its rate is the last of the step's share."""
    optimizer = {"optimizer": {"learning_rate": 0.9, "schedule": "linear"}}
    algorithm = {"zero_variance": "drop", "minibatches": 2}
    trainer, state = make_trainer(steps=5, prompts_per_step=2, algorithm=algorithm, train=optimizer)
    nothing, half, full = [[1.0] * 4] * 2, [REWARDS[0], [1.0] * 4], REWARDS[:2]
    seen = []
    for step, rewards in enumerate((nothing, full, nothing, half, full)):
        state, metrics = train_on(trainer, state, groups_of(rewards), step=step)
        seen.append((metrics["optimizer/updates"], metrics["optimizer/learning_rate"]))
    rates = np.linspace(0.9, 0.0, 10)[1::2]  # of the second update of each step
    assert [updates for updates, _ in seen] == [0, 2, 0, 1, 2]
    assert [rate for _, rate in seen] == pytest.approx(rates, abs=1e-6)
    assert int(state.step) == 5
    assert metrics["optimizer/update_norm"] < metrics["optimizer/gradient_norm"] * 0.9 / 9  # rates 0.1 and 0
    assert int(state.opt_state[-1].count) == 10
