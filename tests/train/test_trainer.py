import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import (
    DECODER,
    REWARDS,
    assert_same,
    changed,
    groups_of,
    host,
    lengths_of,
    make_config,
    make_params,
    make_trainer,
    rules_of,
    train_on,
    with_logprobs,
)

from podium.models.params import ROLLOUT_AXES
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request, SamplingParams
from podium.rollout.transcript import Span, Transcript, transcript_of
from podium.run.resolve import resolve_recipe
from podium.run.token_sizes import row_tokens, rows_per_device
from podium.sampling.groups import Group
from podium.sharding import ShardingRules
from podium.train.batches.batch import make_batch
from podium.train.batches.prepare import group_samples, pack_step
from podium.train.batches.samples import with_advantage, with_weight
from podium.train.step import shard_batch
from podium.train.trainer import DivergedError

GAP_TOLERANCE = 1e-5  # of the largest log-probability, float32
BF16_GAP = 0.25  # nat, the largest of some hundred tokens


def test_an_update_on_its_own_samples_has_ratio_1_and_moves_every_weight():
    trainer, state = make_trainer()
    groups = with_logprobs(trainer, state, groups_of())
    moved, metrics = changed(trainer, state, groups)
    assert all(np.abs(x).max() > 0 for x in moved.values())
    assert metrics["policy/logprob_gap/max"] < 1e-4
    assert metrics["policy/clip_fraction/low"] == metrics["policy/clip_fraction/high"] == 0
    assert metrics["optimizer/learning_rate"] == pytest.approx(0.1)
    assert metrics["optimizer/update_norm"] == pytest.approx(0.1 * metrics["optimizer/gradient_norm"], rel=1e-5)


def test_ratios_to_the_trainer_do_not_depend_on_what_the_sampler_recorded():
    algorithm = {"old_logprobs": "trainer", "updates_per_batch": 2, "minibatches": 2}
    moved = []
    for shift in (0.0, -3.0):
        trainer, state = make_trainer(algorithm=algorithm)
        groups = with_logprobs(trainer, state, groups_of(), shift)
        moved.append(changed(trainer, state, groups))
    assert_same(moved[1][0], moved[0][0], rtol=0)
    assert moved[0][1]["policy/logprob_gap/mean"] < 1e-4
    assert moved[1][1]["policy/logprob_gap/mean"] == pytest.approx(3.0, rel=1e-4)


def test_two_passes_over_two_minibatches_are_four_steps_with_ratios_to_the_first_weights():
    algorithm = {"old_logprobs": "trainer", "updates_per_batch": 2, "minibatches": 2}
    trainer, state = make_trainer(algorithm=algorithm)
    traced = trainer.score._cache_size(), trainer.train_step._cache_size()  # pyright: ignore
    groups = groups_of()
    scored, _ = trainer.prepare(state, groups)  # both halves, before either is trained on
    for half in scored:
        bare = dataclasses.replace(half, scores={})
        np.testing.assert_array_equal(half.scores["old_logprobs"], trainer.score(state.params, bare))
    expected, losses = state, []
    tokens = [float(half.num_tokens) for half in scored * 2]
    assert tokens[0] != tokens[1]
    for half in scored * 2:
        expected, metrics = trainer.train_step(expected, half, trainer.frozen)
        losses.append(float(metrics["loss"]))
    other, state = make_trainer(algorithm=algorithm)
    state, metrics = train_on(other, state, groups)
    assert int(state.step) == 4
    assert_same(host(state.params), host(expected.params), rtol=0)
    assert metrics["train-other/loss"] == pytest.approx(np.average(losses, weights=tokens), rel=1e-5)
    assert other.score._cache_size() <= traced[0] + 1  # pyright: ignore
    assert other.train_step._cache_size() <= traced[1] + 1  # pyright: ignore


def test_the_sampler_s_log_probabilities_are_the_old_ones_where_the_recipe_says_so():
    """Twice as likely as recorded: every ratio is 2, and those of positive advantages are clipped."""
    trainer, state = make_trainer()
    groups = with_logprobs(trainer, state, groups_of(), -np.log(2).astype(np.float32))
    positive = np.concatenate(
        [
            [reward > np.mean(row)] * n
            for row, lengths in zip(REWARDS, lengths_of(groups), strict=True)
            for reward, n in zip(row, lengths, strict=True)
        ]
    )
    _, metrics = train_on(trainer, state, groups)
    assert metrics["policy/clip_fraction/high"] == pytest.approx(positive.mean(), rel=1e-5)
    assert metrics["policy/kl_sampled"] == pytest.approx(2 - 1 - np.log(2), rel=1e-3)


def test_the_correction_weighs_tokens_by_how_much_likelier_the_trainer_finds_them():
    """Four times as likely: truncated at 2, the update is twice that without a correction."""
    results = {}
    for correction in ("none", "truncate"):
        trainer, state = make_trainer(algorithm={"old_logprobs": "trainer", "correction": correction})
        groups = with_logprobs(trainer, state, groups_of(), -np.log(4).astype(np.float32))
        results[correction] = changed(trainer, state, groups)
    moved, metrics = results["truncate"]
    assert_same(moved, {key: 2.0 * x for key, x in results["none"][0].items()})
    assert metrics["policy/correction_weight"] == pytest.approx(2.0, rel=1e-3)


def test_truncated_completions_are_left_out_of_the_loss_but_not_of_the_baseline():
    """A masked completion counts as one of the batch's sequences, with no token."""
    finish = ["stop", "length", "stop", "length"]
    trainer, state = make_trainer(algorithm={"mask_truncated": True})
    groups = with_logprobs(trainer, state, groups_of())
    cut = [
        dataclasses.replace(
            group,
            transcripts=[
                dataclasses.replace(each, finish_reason=reason)
                for each, reason in zip(group.transcripts, finish, strict=True)
            ],
        )
        for group in groups
    ]
    moved, metrics = changed(trainer, state, cut)
    kept = sum(lengths[0] + lengths[2] for lengths in lengths_of(groups))
    assert metrics["train-other/total_valid_token_count"] == kept
    plain, state = make_trainer()
    rewards = np.array(REWARDS)
    standardised = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    samples = [
        with_weight(with_advantage(sample, a), 1 / (16 * sample.num_drawn))
        for n, group in enumerate(groups)
        for index, (sample, a) in enumerate(zip(group_samples(group, n, plain.recipe), standardised[n], strict=True))
        if finish[index] == "stop"
    ]
    before = host(state.params)
    batch, _ = make_batch(samples, plain.sizes)
    state, _ = plain.train_step(state, shard_batch(batch, plain.settings.computing))
    assert_same(moved, {name: np.array(x) - before[name] for name, x in state.params.items()})


@pytest.mark.parametrize("recipe", ["grpo", "dapo", "reinforce_pp"])
def test_a_step_of_truncated_completions_alone_changes_nothing(recipe):
    trainer, state = make_trainer(algorithm={"recipe": recipe, "mask_truncated": True})
    moved, metrics = changed(trainer, state, groups_of(finish="length"))
    assert all(not x.any() for x in moved.values())
    assert metrics["train-other/total_valid_token_count"] == 0
    assert "train-other/loss" not in metrics
    assert np.isfinite(list(metrics.values())).all()


def test_groups_of_equal_rewards_are_dropped_where_the_recipe_says_so():
    rewards = [REWARDS[0], [1.0] * 4, REWARDS[2], [0.0] * 4]
    algorithm = {"zero_variance": "drop"}
    trainer, state = make_trainer(algorithm=algorithm)
    groups = with_logprobs(trainer, state, groups_of(rewards))
    moved, metrics = changed(trainer, state, groups)
    assert (metrics["group/equal_rewards_fraction"], metrics["group/dropped"]) == (0.5, 2)
    other, state = make_trainer(algorithm=algorithm)
    alone, _ = changed(other, state, [groups[0], groups[2]])
    assert_same(moved, alone, rtol=0)
    kept, state = make_trainer()
    halved, metrics = changed(kept, state, groups)
    assert (metrics["group/equal_rewards_fraction"], metrics["group/dropped"]) == (0.5, 0)
    assert_same(halved, {name: x / 2 for name, x in moved.items()})  # the mean is over 16 sequences, not 8


def test_a_step_of_equal_rewards_alone_changes_nothing_where_they_are_dropped():
    trainer, state = make_trainer(algorithm={"zero_variance": "drop"})
    step = int(state.step)
    moved, metrics = changed(trainer, state, groups_of([[1.0] * 4] * 4))
    assert all(not x.any() for x in moved.values())
    assert (metrics["group/dropped"], metrics["group/equal_rewards_fraction"], step) == (4, 1.0, 0)
    assert np.isfinite(list(metrics.values())).all()


def test_a_step_with_fewer_minibatches_has_the_last_learning_rates_of_its_share():
    trainer, state = make_trainer(algorithm={"minibatches": 4, "updates_per_batch": 2, "zero_variance": "drop"})
    update, seen = trainer.train_step, []

    def watched(state, batch, frozen=None, /):
        seen.append(int(state.opt_state[-1].count))
        return update(state, batch, frozen)

    trainer.train_step = watched
    batches, _ = trainer.prepare(state, groups_of([REWARDS[0], [1.0] * 4, REWARDS[2], [0.0] * 4]))
    state, _ = trainer.update(state, batches, 1)  # the second step owns 8 to 15
    assert seen == [12, 13, 14, 15]
    assert int(state.opt_state[-1].count) == 16


def test_numbers_that_are_not_finite_stop_the_run_and_their_batch_is_saved(tmp_path, monkeypatch):
    trainer, state = make_trainer()
    monkeypatch.setattr(trainer, "folder", tmp_path)
    broken = state.params["layers.up"].at[0, 0, 0].set(jnp.nan)
    state = dataclasses.replace(state, params={**state.params, "layers.up": broken})
    groups = groups_of()
    path = tmp_path / "diverged-update-1.npz"
    with pytest.raises(
        DivergedError,
        match=r"update 1 diverged: loss nan, .* row 0 of micro-batch 0, although .* lower train.optimizer",
    ) as error:
        train_on(trainer, state, groups)
    assert str(path) in str(error.value)
    with np.load(path) as saved:
        assert saved["mask"].sum() == sum(map(sum, lengths_of(groups)))
        assert {"tokens", "targets", "advantages", "sampled_logprobs"} <= set(saved)


@pytest.mark.parametrize("micro_batch", [0, 1])
def test_a_row_that_is_not_finite_is_named(tmp_path, monkeypatch, micro_batch):
    trainer, state = make_trainer(train={"rows_per_device": 2})
    monkeypatch.setattr(trainer, "folder", tmp_path)
    (batch,), _ = trainer.prepare(state, groups_of())
    assert batch.num_micro_batches > 1
    at = (micro_batch, 1, np.flatnonzero(batch.mask[micro_batch, 1])[0])
    batch = dataclasses.replace(batch, sampled_logprobs=batch.sampled_logprobs.at[at].set(np.nan))
    named = rf"is row 1 of micro-batch {micro_batch}, whose sampled_logprobs are not finite; its batch is in"
    with pytest.raises(DivergedError, match=named):
        trainer.update(state, [batch], 0)


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"rows_per_device": 3}, (19, 3)),
        ({"rows_per_device": None, "tokens_per_device": 60}, (19, 3)),
        ({"row_tokens": 30, "rows_per_device": None, "tokens_per_device": 60}, (30, 2)),
        ({"row_tokens": 30, "rows_per_device": None}, (30, 4)),
    ],
)
def test_rows_are_as_long_as_the_longest_sequence_and_as_many_as_tokens_allow(train, expected):
    config = make_config(train=train)
    recipe = resolve_recipe(config)
    assert (row_tokens(config, recipe), rows_per_device(config, recipe)) == expected


def sampled_groups(params, dtype: str, **settings: float) -> list[Group]:
    """What the engine makes of four prompts with these weights, a group of 4 each."""
    config = make_config(rollout={"max_prompt_tokens": 8, "max_new_tokens": 8}).rollout
    engine = RolloutEngine(
        Device(config, DECODER, ShardingRules(rules_of().mesh, ROLLOUT_AXES), dtype=jnp.dtype(dtype)), None
    )
    engine.load(params)
    groups = groups_of()
    sampling = SamplingParams(max_new_tokens=8, stop_tokens=(299,), **settings)
    requests = [
        Request(prompt=group.tokens, sampling=sampling, seed=n, completions=4) for n, group in enumerate(groups)
    ]
    answers, _ = engine.generate(requests)
    return [
        dataclasses.replace(group, transcripts=[transcript_of(group.tokens, each) for each in answer])
        for group, answer in zip(groups, answers, strict=True)
    ]


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.6}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}, {"repetition_penalty": 1.7}]
)
def test_the_sampler_s_log_probabilities_are_the_trainer_s(settings):
    trainer, state = make_trainer(temperature=settings.get("temperature", 1.0))
    groups = sampled_groups(make_params(rules_of()), "float32", **settings)
    scale = max(float(np.abs(each.full_logprobs).max()) for group in groups for each in group.transcripts)
    _, metrics = train_on(trainer, state, groups)
    assert metrics["policy/logprob_gap/max"] <= GAP_TOLERANCE * scale
    assert metrics["policy/kl_sampled"] == pytest.approx(0, abs=1e-6)
    assert metrics["policy/clip_fraction/low"] == metrics["policy/clip_fraction/high"] == 0


def test_a_correction_weighs_by_the_distribution_that_a_penalty_makes():
    correction = {"old_logprobs": "trainer", "correction": "truncate", "correction_high": 1.1}
    penalty = {"rollout": {"repetition_penalty": 1.7}}
    trainer, state = make_trainer(algorithm=correction, **penalty)
    groups = sampled_groups(make_params(rules_of()), "float32", repetition_penalty=1.7)
    spans = [span for group in groups for each in group.transcripts for span in each.spans if span.drawn]
    weights = np.concatenate([np.exp(span.full_logprobs - span.sampled_logprobs) for span in spans])
    assert (weights > 1.1).any() and (weights < 0.95).any()
    _, metrics = train_on(trainer, state, groups)
    assert metrics["policy/correction_weight"] == pytest.approx(np.minimum(weights, 1.1).mean(), rel=1e-4)
    assert metrics["policy/logprob_gap/max"] < 1e-4
    plain, state = make_trainer(algorithm=correction)
    _, metrics = train_on(plain, state, groups)
    assert metrics["policy/correction_weight"] == pytest.approx(1.0, abs=1e-4)


def test_groups_are_left_out_by_a_part_of_the_reward():
    """All right with other totals: dropped; the same total of other parts: kept. Missing parts do not count."""
    parts = [[1.0] * 4, [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, None, None], [1.0, None, None, None]]
    groups = [
        dataclasses.replace(
            group,
            rewards=[
                dataclasses.replace(reward, parts={} if part is None else {"right": part})
                for reward, part in zip(group.rewards, own, strict=True)
            ],
        )
        for group, own in zip(groups_of([REWARDS[0], [0.5] * 4, REWARDS[2], REWARDS[3]]), parts, strict=True)
    ]
    trainer, _ = make_trainer(algorithm={"zero_variance": "drop", "zero_variance_metric": "right"})
    packed = pack_step(groups, trainer.recipe, trainer.sizes)
    assert packed.kept.tolist() == [1, 2] and packed.equal.tolist() == [True, False, False, True]
    assert [group.equal_rewards("right") for group in groups] == packed.equal.tolist()
    assert [group.equal_rewards(None) for group in groups] == [False, True, False, False]


def test_a_bfloat16_sampler_is_near_the_float32_trainer():
    trainer, state = make_trainer()
    groups = sampled_groups(make_params(rules_of()), "bfloat16")
    _, metrics = train_on(trainer, state, groups)
    assert 1e-4 < metrics["policy/logprob_gap/max"] <= BF16_GAP


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.long), 8])
def test_an_update_on_several_devices_is_that_of_one(devices):
    algorithm = {"kl": "k3", "kl_coef": 0.1, "old_logprobs": "trainer", "minibatches": 2}
    results = []
    for count in (1, devices):
        trainer, state = make_trainer(devices=count, reference=True, algorithm=algorithm)
        results.append(changed(trainer, state, groups_of()))
    assert_same(results[1][0], results[0][0])
    for name in ("train-other/loss", "policy/entropy", "policy/kl_reference", "optimizer/gradient_norm"):
        assert results[1][1][name] == pytest.approx(results[0][1][name], rel=1e-3, abs=1e-6)
    assert len(jax.tree.leaves(trainer.scorers[-1].params)[0].devices()) == devices


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.long)])
def test_the_most_uncertain_tokens_are_those_of_the_whole_step_however_it_is_cut(devices):
    """One row after another, one device or eight: the same tokens, by entropies whose mean the update reports too."""
    algorithm = {"top_entropy": 0.3}
    whole, state = make_trainer(algorithm=algorithm)
    (batch,), _ = whole.prepare(state, groups_of())
    drawn = np.asarray(batch.mask) > 0
    entropies = np.asarray(whole.scorers[0].program(state.params, batch))[drawn]
    chosen = np.asarray(batch.scores["uncertain"])[drawn] > 0
    assert 0.25 < chosen.mean() < 0.4
    assert entropies[chosen].min() >= entropies[~chosen].max() - 1e-4
    expected, metrics = changed(whole, state, groups_of())
    assert metrics["policy/entropy"] == pytest.approx(entropies.mean(), rel=1e-4)
    assert metrics["policy/top_entropy"] == pytest.approx(chosen.mean(), rel=1e-5)
    for cut in ({"rows_per_device": 1}, {"packing": "none"}):
        trainer, state = make_trainer(devices=devices, algorithm=algorithm, train=cut)
        found, cut_metrics = changed(trainer, state, groups_of())
        assert_same(found, expected)
        assert cut_metrics["policy/top_entropy"] == metrics["policy/top_entropy"]


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_tokens_of_large_covariance_are_those_of_the_whole_step_however_it_is_cut(loss):
    """One row after another, or one completion to a row: the same tokens, and so the same new weights."""
    options = {"cov_share": 0.1, **({"cov_low": 0.01} if loss == "clip_cov" else {})}
    algorithm = {"loss": loss, "loss_options": options}
    groups = [dataclasses.replace(group, transcripts=noisy(group, n)) for n, group in enumerate(groups_of())]
    trainer, state = make_trainer(algorithm=algorithm)
    expected, metrics = changed(trainer, state, groups)
    assert 0.05 < metrics["policy/covariant"] <= 0.1
    for cut in ({"rows_per_device": 1}, {"packing": "none"}):
        trainer, state = make_trainer(algorithm=algorithm, train=cut)
        found, cut_metrics = changed(trainer, state, groups)
        assert_same(found, expected)
        assert cut_metrics["policy/covariant"] == pytest.approx(metrics["policy/covariant"])


def noisy(group: Group, seed: int) -> list[Transcript]:
    """The group's transcripts with other sampled log-probabilities for each token."""
    random = np.random.default_rng(seed)

    def changed_span(span: Span) -> Span:
        logprobs = span.full_logprobs + random.normal(0, 0.5, len(span.full_logprobs)).astype(np.float32)
        return dataclasses.replace(span, full_logprobs=logprobs)

    def of_one(each: Transcript) -> Transcript:
        prompt, *spans = each.spans
        return dataclasses.replace(each, spans=(prompt, *map(changed_span, spans)))

    return [of_one(each) for each in group.transcripts]
