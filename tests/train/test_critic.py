"""A critic: what it learns, its updates beside the policy's, and runs of ppo."""

import dataclasses
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny_decoder import DECODER
from tiny_runs import (
    assert_same_run,
    config_of,
    groups_of,
    host,
    make_config,
    make_params,
    make_train_settings,
    metrics_of,
    rules_of,
    spec_of,
    trained,
    weights_of,
)

from podium.algorithms.advantages import RETURNS, VALUES
from podium.certify.tiny import random_weights
from podium.models.architecture import scoring_decoder
from podium.models.params import param_specs
from podium.observe.run_dir import Fork
from podium.observe.stats import ValueStats
from podium.run.resolve import resolve_recipe
from podium.run.roles import scoring_models
from podium.sharding import Params, ShardingRules, param_shardings
from podium.train.batches.batch import Batch
from podium.train.batches.prepare import prepare_step
from podium.train.learner import DivergedError, Learner, make_learner, update_learner
from podium.train.loop import train
from podium.train.scorers import make_role_scorer
from podium.train.setup import make_run_optimizer
from podium.train.state import TrainState, init_state
from podium.train.step import CompiledTrainStep, Metrics

pytestmark = pytest.mark.usefixtures("one_device")
SCORED = scoring_decoder(DECODER)
PPO = {"recipe": "ppo", "advantage_options": {"gamma": 0.9, "lam": 0.8}}
PLAIN = {"optimizer": {"name": "sgd", "learning_rate": 0.1, "beta1": 0.0, "clip_norm": 0.0}}


def weights_on(rules: ShardingRules) -> Params:
    """Random weights of a critic, the same on any mesh."""
    shardings = param_shardings(param_specs(SCORED), rules)
    return {name: jax.device_put(x, shardings[name]) for name, x in random_weights(SCORED, seed=7).items()}


@dataclasses.dataclass(frozen=True)
class Made:
    """A critic, its first state, and what a step prepares for it."""

    critic: Learner
    state: TrainState
    batches: list[Batch[jax.Array]]
    before: ValueStats


def critic_on(devices: int, **changes) -> Made:
    """A critic on some devices before its first step, which is that of `groups_of`."""
    sizes = {"steps": 10, "rollout": {"max_prompt_tokens": 8, "max_new_tokens": 8}, "train": PLAIN}
    config = make_config(**sizes, algorithm=PPO, critic={"learning_rate": 0.1, **changes})
    spec, rules = spec_of(config, devices=devices), rules_of(devices=devices)
    role, settings = spec.roles["critic"], make_train_settings(rules, attention="reference")
    assert role.learning is not None
    optimizer = make_run_optimizer(role.learning.optimizer, role.decoder)
    critic = make_learner(role, settings, optimizer)
    params = weights_on(rules)
    batches, stats = prepare_step(
        groups_of(),
        spec.recipe,
        spec.batch,
        rules=settings.computing,
        scorers=(make_role_scorer(role, settings, params, program=critic.score),),
        policy=make_params(rules),
    )
    assert stats.values is not None
    return Made(critic, init_state(params, optimizer), batches, stats.values)


def test_values_returns_and_advantages_are_at_the_tokens_that_they_are_of():
    """Of every completion: its values by the program, then the sums of the definition, then the batch's deviation."""
    (batch,) = critic_on(1).batches
    mask = np.asarray(batch.mask) > 0
    values, returns = (np.asarray(batch.scores[name], np.float64) for name in (VALUES, RETURNS))
    rewards = iter([reward for group in groups_of() for reward in group.totals.tolist()])
    lengths = [each.num_drawn for group in groups_of() for each in group.transcripts]
    segments, advantages = np.asarray(batch.segments), np.zeros(mask.shape)
    found: list[list[float]] = []
    for index in np.ndindex(mask.shape[:2]):
        for segment in dict.fromkeys(segments[index][mask[index]].tolist()):
            places = np.flatnonzero(mask[index] & (segments[index] == segment))
            own = [*values[index][places].tolist(), 0.0]
            found.append([len(places), returns[index][places[-1]]])
            paid = [0.0] * (len(places) - 1) + [found[-1][1]]
            errors = [paid[t] + 0.9 * own[t + 1] - own[t] for t in range(len(places))]
            for t, place in enumerate(places):
                total = sum(0.72 ** (k - t) * errors[k] for k in range(t, len(places)))
                advantages[index][place] = total
                assert returns[index][place] == pytest.approx(total + own[t], abs=1e-5)
    expected = sorted(map(list, zip(lengths, rewards, strict=True)))
    np.testing.assert_allclose(sorted(found), expected, atol=1e-6)
    drawn = advantages[mask]
    expected = np.where(mask, (advantages - drawn.mean()) / drawn.std(ddof=1), 0)
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-5)


def test_the_critics_mean_and_explained_variance_are_by_hand():
    made = critic_on(1)
    (batch,) = made.batches
    drawn = np.asarray(batch.mask) > 0
    values, returns = (np.asarray(batch.scores[name], np.float64)[drawn] for name in (VALUES, RETURNS))
    assert made.before.value == pytest.approx(np.sum(values) / len(values), abs=1e-6)
    assert made.before.returned == pytest.approx(np.sum(returns) / len(returns), abs=1e-6)
    unexplained, spread = (np.mean((each - np.mean(each)) ** 2) for each in (returns - values, returns))
    assert made.before.explained_variance == pytest.approx(1 - unexplained / spread, abs=1e-5)


def test_a_critic_learns_the_rewards_and_its_loss_is_by_hand():
    made = critic_on(1, clip=None)
    (batch,), state = made.batches, made.state
    error = np.asarray(batch.scores[VALUES] - batch.scores[RETURNS], np.float64) * np.asarray(batch.mask)
    losses = []
    for step in range(8):
        state, stats = update_learner(made.critic, state, made.batches, step, minibatches=1)
        assert stats is not None
        losses.append(stats.loss)
        assert stats.clip_fraction == 0
    assert losses[0] == pytest.approx(0.5 * np.sum(error**2) / float(batch.num_tokens), rel=1e-5)
    assert losses[-1] < 0.5 * losses[0]


def test_an_update_is_the_same_on_four_devices_and_a_tight_clip_holds_what_has_moved():
    made = []
    for devices in (1, 4):
        before = critic_on(devices, updates=2, clip=0.01)
        state, stats = update_learner(before.critic, before.state, before.batches, 0, minibatches=1)
        assert stats is not None
        assert 0 < stats.clip_fraction < 1
        made.append((host(state.params), stats.loss))
    (one, loss), (several, other) = made
    assert loss == pytest.approx(other, rel=1e-5)
    for name, x in one.items():
        np.testing.assert_allclose(several[name], x, rtol=2e-5, atol=1e-5, err_msg=name)


def counted(made: Made, seen: list[tuple[float, int]]) -> Learner:
    """The critic with a program that writes down its batch and its place in the schedule, and adds 1 to its weights."""

    def step(state: TrainState, batch: Batch[jax.Array], frozen: Params | None = None, /) -> tuple[TrainState, Metrics]:
        links = state.opt_state
        assert isinstance(links, tuple)
        seen.append((float(batch.num_tokens), int(links[-1].count)))
        metrics = {name: jnp.float32(1) for name in ("loss", "clipped", "gradient_norm")}
        return dataclasses.replace(
            state, params={n: x + 1 for n, x in state.params.items()}, step=state.step + 1
        ), metrics

    return made.critic._replace(step=cast(CompiledTrainStep, step))


def test_a_critic_learns_from_each_minibatch_in_turn_and_keeps_what_it_has_learned():
    made, seen = critic_on(1, updates=2), []
    (batch,) = made.batches
    both = [dataclasses.replace(batch, num_tokens=jnp.float32(tokens)) for tokens in (7, 9)]
    state, _ = update_learner(counted(made, seen), made.state, both, 3, minibatches=2)
    assert seen == [(7.0, 12), (9.0, 13), (7.0, 14), (9.0, 15)]
    assert int(state.step) == 4
    for name, value in weights_on(rules_of(devices=1)).items():
        np.testing.assert_allclose(state.params[name], value + 4, rtol=1e-6)


def test_the_updates_of_a_critic_are_gradient_steps_of_the_squared_error():
    """The difference that two updates make, beside a difference quotient of the loss along it."""
    made = critic_on(1, clip=None)
    (batch,) = made.batches
    mask, returns = np.asarray(batch.mask) > 0, np.asarray(batch.scores[RETURNS], np.float64)

    def loss(params: Params) -> float:
        values = np.asarray(made.critic.score(params, batch), np.float64)
        return float(0.5 * np.sum((values - returns)[mask] ** 2) / mask.sum())

    before = host(made.state.params)
    state, _ = update_learner(made.critic, made.state, made.batches, 0, minibatches=1)
    moved = {name: np.asarray(x) - before[name] for name, x in state.params.items()}
    size = sum(float(np.sum(np.square(x, dtype=np.float64))) for x in moved.values())
    near = [{name: jnp.asarray(before[name] + side * x) for name, x in moved.items()} for side in (0.005, -0.005)]
    slope = (loss(near[0]) - loss(near[1])) / 0.01
    assert slope == pytest.approx(-size / 0.1, rel=2e-2)  # the move is -0.1 times the gradient


def test_a_critic_that_diverges_ends_the_run_with_the_way_out():
    made = critic_on(1)
    (batch,) = made.batches
    batch = dataclasses.replace(batch, scores={**batch.scores, RETURNS: jnp.full_like(batch.scores[RETURNS], jnp.inf)})
    with pytest.raises(DivergedError, match=r"update 1 of the critic diverged: .* lower critic\.learning_rate"):
        update_learner(made.critic, made.state, [batch], 0, minibatches=1)


def test_a_critic_starts_from_the_policy_without_its_adapters_and_has_its_own_schedule():
    changes = {"algorithm": {"recipe": "ppo", "minibatches": 2, "updates_per_batch": 3}, "steps": 5}
    config = make_config(**changes, critic={"updates": 4, "learning_rate": 3e-4})
    *_, role = scoring_models(config, resolve_recipe(config), DECODER)
    assert role.learning is not None
    assert (role.name, role.decoder, role.learning.optimizer.steps) == ("critic", SCORED, 5 * 2 * 4)
    assert role.learning.optimizer.settings == config.train.optimizer.model_copy(update={"learning_rate": 3e-4})
    others = scoring_models(make_config(), resolve_recipe(make_config()), DECODER)
    assert "critic" not in [each.name for each in others]
    assert resolve_recipe(config).loss_scores[-2:] == (VALUES, RETURNS)


def critic_of(run: Path, step: int) -> dict[str, np.ndarray]:
    """The critic's weights that a run saved at a step."""
    saved = ocp.StandardCheckpointer().restore(run / "checkpoints" / str(step) / "optimizer")
    return {name: np.asarray(x) for name, x in saved.items() if name.startswith("critic.params")}


CHANGES = {
    "algorithm": {"recipe": "ppo", "minibatches": 2, "updates_per_batch": 2, "kl": "k3", "kl_coef": 0.1},
    "critic": {"learning_rate": 1e-2, "updates": 2},
    "reference": {"sync_every": 2, "mixup": 0.5},
    "eval": {"at_start": False, "at_end": False},
    "checkpoint": {"every_steps": 2},
}
CRITIC_METRICS = ("loss", "value", "return", "clip_fraction", "gradient_norm", "learning_rate")


@pytest.fixture(scope="module")
def whole(run_of) -> Path:
    """A run of ppo of four steps, with a reference that moves."""
    return run_of(**CHANGES, steps=4)


def test_a_run_of_ppo_resumes_bit_for_bit_with_its_critic(run_of, whole):
    """Losses of critic and policy after the checkpoint show their weights and moments, and the reference's."""
    stopped = run_of(**CHANGES, steps=2)
    assert train(config_of(stopped, steps=4), plain=True) == 0
    assert_same_run(stopped, whole)
    records = trained(whole)
    one, other = (critic_of(whole, step) for step in (2, 4))
    assert [name for name, value in one.items() if np.array_equal(other[name], value)] == []
    assert {f"critic/{name}" for name in CRITIC_METRICS} <= set(records[-1])
    assert len({record["critic/loss"] for record in records}) == 4
    assert all(record["optimizer/updates"] == 4 for record in records)


def test_models_that_change_are_saved_under_the_names_of_their_roles(whole):
    """The layout of every release: runs that were saved with it must resume."""
    saved = ocp.StandardCheckpointer().restore(whole / "checkpoints" / "2" / "optimizer")
    policy = list(ocp.StandardCheckpointer().restore(whole / "checkpoints" / "2" / "params"))
    critic = [*(name for name in policy if name != "head"), "score"]
    assert {name for name in saved if not name.startswith("opt_state.")} == {
        "step",
        "critic.step",
        *(f"critic.params.{name}" for name in critic),
        *(name for name in saved if name.startswith("critic.opt_state.")),
        *(f"reference.{name}" for name in policy),
    }
    moments = {name.removeprefix("critic.opt_state.") for name in saved if name.startswith("critic.opt_state.")}
    assert {f"1.mu.{name}" for name in critic} <= moments


@pytest.mark.long
def test_the_policy_waits_while_the_critic_warms_up(run_of, whole):
    run = run_of(**{**CHANGES, "critic": {"learning_rate": 1e-2, "warmup_steps": 2}}, steps=3)
    assert [record["optimizer/updates"] for record in trained(run)] == [0, 0, 4]
    assert all("critic/loss" in record for record in trained(run))
    first, second, third = (record["train-reward/total/mean"] for record in metrics_of(run)[:3])
    assert weights_of(run, 2) != weights_of(run, 3)
    assert weights_of(run, 2) == weights_of(run_of(**{**CHANGES, "critic": {"warmup_steps": 2}}, steps=3), 2)
    assert None not in (first, second, third)


@pytest.mark.long
def test_ppo_starts_from_a_run_that_had_no_critic_and_from_one_that_had(run_of, whole, tmp_path):
    before = run_of(steps=2, checkpoint={"every_steps": 2}, eval={"at_start": False, "at_end": False})
    for start in (before, whole):
        config = config_of(whole, name="next", runs_dir=str(tmp_path / start.parent.name), steps=1)
        assert train(config, fork=Fork(str(start), None), plain=True) == 0
        (record,) = trained(Path(config.runs_dir) / "next")
        assert np.isfinite(record["critic/loss"])
