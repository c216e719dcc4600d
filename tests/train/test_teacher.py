"""A teacher beside or instead of rewards: what it adds to advantages, and runs with one."""

import dataclasses
import gc
import json
import shutil
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_decoder import DECODER, tiny
from tiny_runs import (
    REWARDS,
    assert_same_run,
    config_of,
    groups_of,
    make_config,
    make_samples,
    make_trainer,
    merged,
    sgd,
    spec_of,
    teacher_role,
    trained,
)

from podium.algorithms.advantages import taught_advantages
from podium.algorithms.recipes import OLD_LOGPROBS, TAUGHT_HIDDEN, TAUGHT_LOGPROBS, Teaching
from podium.certify.tiny import random_weights
from podium.models.architecture import DecoderConfig, ModelError, frozen_decoder
from podium.models.files.source import resolve
from podium.models.text.tokenizer import load_tokenizer
from podium.observe.stats import BatchStats
from podium.run.resolve import resolve_recipe
from podium.sharding import Params
from podium.train.batches.batch import Batch, make_batch
from podium.train.batches.prepare import prepare_step
from podium.train.batches.run_shapes import RunShapes
from podium.train.loop import train
from podium.train.scorers import LoadedRole, make_role_program, make_role_scorer, make_scorers
from podium.train.setup import (
    StoredWeights,
    load_frozen,
    load_trained,
    make_model,
    make_role_model,
    make_run_optimizer,
    run_spec,
)
from podium.train.state import init_state
from podium.train.step import TAUGHT_HEAD, TrainSettings, make_hidden, make_score, make_train_step, shard_batch
from podium.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_device")


def of_bfloat16(params: Params) -> Params:
    """The weights rounded to bfloat16, still in float32: a teacher can have the same."""
    return {name: x.astype(jnp.bfloat16).astype(jnp.float32) for name, x in params.items()}


def prepared(
    trainer: Trainer,
    params: Params,
    decoder: DecoderConfig,
    teacher: Params,
    *,
    weight: float,
    loss: Literal["sampled", "full"] = "sampled",
) -> tuple[Batch, BatchStats]:
    """The batch of a step with this teacher, whose weights are stored in bfloat16."""
    recipe = dataclasses.replace(trainer.recipe, teaching=Teaching(weight=weight, loss=loss))
    stored = {name: x.astype(jnp.bfloat16) for name, x in teacher.items()}
    role = teacher_role(frozen_decoder(decoder, "bfloat16"), loss)
    scorer = make_role_scorer(role, trainer.settings, stored)
    scorers = make_scorers(recipe, trainer.settings, trainer.score, [scorer])
    rules = trainer.settings.computing
    (batch,), stats = prepare_step(groups_of(), recipe, trainer.sizes, rules=rules, scorers=scorers, policy=params)
    return batch, stats


def test_a_teacher_equal_to_the_policy_gives_advantages_and_a_gradient_of_exactly_0():
    trainer, state = make_trainer(algorithm={"recipe": "distill"})
    params = of_bfloat16(state.params)
    batch, stats = prepared(trainer, params, DECODER, params, weight=3.0)
    assert np.asarray(batch.mask).sum() > 16
    assert not np.asarray(batch.advantages).any()
    assert stats.taught_kl == 0
    before = {name: np.array(x) for name, x in params.items()}
    after, metrics = trainer.train_step(dataclasses.replace(state, params=params), batch)
    assert float(metrics["gradient_norm"]) == 0
    for name, x in after.params.items():
        np.testing.assert_array_equal(x, before[name])


def test_another_teacher_moves_each_token_s_advantage_by_the_difference_of_log_probabilities():
    """With GRPO's own advantage beside it; the teacher has another width and other layers."""
    trainer, state = make_trainer(algorithm={"recipe": "grpo"})
    decoder = tiny(width=16, layers=1, heads=2, kv_heads=1)
    teacher = {name: jnp.asarray(x) for name, x in random_weights(decoder, seed=5).items()}
    batch, stats = prepared(trainer, state.params, decoder, teacher, weight=0.5)
    plain, _ = trainer.prepare(state, groups_of())
    unscored = dataclasses.replace(batch, scores={})
    mine = np.asarray(trainer.score(state.params, unscored), np.float64)
    program = make_score(trainer.settings._replace(decoder=decoder))
    theirs = np.asarray(program(of_bfloat16(teacher), unscored), np.float64)
    mask = np.asarray(batch.mask)
    expected = (np.asarray(plain[0].advantages, np.float64) + 0.5 * (theirs - mine)) * mask
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-5)
    assert np.abs(theirs - mine)[mask > 0].min() > 1e-4
    assert stats.taught_kl == pytest.approx(np.sum((mine - theirs) * mask) / mask.sum(), rel=1e-4)
    assert set(batch.scores) == set(), "the ratio stays relative to the sampler"


def test_a_whole_distribution_equal_to_the_policy_s_moves_nothing():
    """Up to rounding: the update and the teacher's program are two programs."""
    trainer, state = make_trainer(algorithm={"recipe": "distill"})
    params = of_bfloat16(state.params)
    before = {name: np.array(x) for name, x in params.items()}
    after, metrics = taught_step(trainer, dataclasses.replace(state, params=params), DECODER, params, reverse=0.4)
    assert float(metrics["kl_teacher"]) == pytest.approx(0, abs=1e-7)
    assert float(metrics["gradient_norm"]) < 1e-6
    for name, x in after.params.items():
        np.testing.assert_allclose(x, before[name], atol=1e-7)


def taught_step(trainer, state, decoder, teacher, *, reverse):
    """An update with the teacher's whole distribution, on the groups of `groups_of`."""
    batch, _ = prepared(trainer, state.params, decoder, teacher, weight=2.0, loss="full")
    recipe = dataclasses.replace(trainer.recipe, teaching=Teaching(weight=2.0, loss="full", reverse=reverse))
    step = make_train_step(trainer.settings, recipe, sgd())
    head = {TAUGHT_HEAD: jnp.array(teacher["embed"])}
    return step(init_state(state.params, sgd()), batch, head)


def test_the_whole_distribution_of_another_teacher_draws_the_policy_to_it():
    """The loss is the divergence of the two models' own softmaxes, computed in numpy, and an update lowers it."""
    trainer, state = make_trainer(algorithm={"recipe": "distill"})
    decoder = tiny(width=16, layers=1, heads=2, kv_heads=1)
    teacher = of_bfloat16({name: jnp.asarray(x) for name, x in random_weights(decoder, seed=5).items()})
    batch, stats = prepared(trainer, state.params, decoder, teacher, weight=2.0, loss="full")
    assert stats.taught_kl is None
    assert batch.scores[TAUGHT_HIDDEN].shape == (*batch.tokens.shape, 16)
    assert not np.asarray(batch.advantages).any()
    program = make_hidden(trainer.settings)
    hidden = np.asarray(program(state.params, dataclasses.replace(batch, scores={})), np.float64)
    theirs = np.asarray(batch.scores[TAUGHT_HIDDEN], np.float64)
    p = log_softmax(hidden @ np.asarray(state.params["embed"], np.float64).T)
    q = log_softmax(theirs @ np.asarray(teacher["embed"], np.float64).T)
    expected = np.sum(np.sum(np.exp(p) * (p - q), axis=-1) * np.asarray(batch.mask)) / float(batch.num_tokens)
    late = np.sum(np.sum(np.exp(p) * (p - np.roll(q, 1, axis=2)), axis=-1) * np.asarray(batch.mask))
    found = []
    for _ in range(3):
        state, metrics = taught_step(trainer, state, decoder, teacher, reverse=1.0)
        found.append(float(metrics["kl_teacher"]))
        assert float(metrics["loss"]) == pytest.approx(2 * found[-1], rel=1e-5)
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert abs(found[0] - late / float(batch.num_tokens)) > 0.01, "one token late is another loss"
    assert found[2] < found[1] < found[0]


def log_softmax(x: np.ndarray) -> np.ndarray:
    """In float64."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))


def test_taught_advantages_by_hand():
    mask = np.array([[[True, True, False]]])
    own, teacher, policy = np.array([[2.0]], np.float32), np.array([[[-1.0, -3.0, 9.0]]]), np.array([[[-2.0, -1.0, 0]]])
    found = taught_advantages(own, teacher, policy, mask, weight=0.5)
    np.testing.assert_array_equal(found, [[[2.5, 1.0, 0.0]]])
    found = taught_advantages(np.array([[[1.0, -1.0, 4.0]]]), teacher, policy, mask, weight=0.5)
    np.testing.assert_array_equal(found, [[[1.5, -2.0, 0.0]]])


def test_the_policy_is_scored_for_its_teacher_and_the_ratio_needs_no_score():
    recipe = resolve_recipe(make_config(algorithm={"recipe": "distill"}, teacher={"model": "none", "weight": 2.0}))
    assert recipe.teaching == Teaching(weight=2.0)
    assert (recipe.scorers, recipe.loss_scores) == ((OLD_LOGPROBS,), ())
    whole = resolve_recipe(
        make_config(algorithm={"recipe": "distill"}, teacher={"model": "none", "loss": "full", "reverse": 0.5})
    )
    assert whole.teaching == Teaching(weight=1.0, loss="full", reverse=0.5)
    assert (whole.scorers, whole.loss_scores) == ((), (TAUGHT_HIDDEN,))
    several = resolve_recipe(
        make_config(
            algorithm={"recipe": "distill", "old_logprobs": "trainer", "minibatches": 2}, teacher={"model": "none"}
        )
    )
    assert several.loss_scores == (OLD_LOGPROBS,)
    assert TAUGHT_LOGPROBS not in several.loss_scores


@pytest.fixture(scope="module")
def teacher_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights."""
    folder = tmp_path_factory.mktemp("teacher") / "tiny"
    shutil.copytree(tiny_model, folder)
    random = np.random.default_rng(9)
    tensors = load_file(folder / "model.safetensors")
    moved = {name: x + 0.2 * random.standard_normal(x.shape).astype(np.float32) for name, x in tensors.items()}
    save_file(moved, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("loss", ["sampled", pytest.param("full", marks=pytest.mark.long)])
def test_a_teacher_that_is_the_base_of_the_adapters_has_no_copy_and_scores_as_one(tiny_model, loss):
    config = make_config(
        tiny_model,
        lora={"rank": 2},
        algorithm={"recipe": "distill"},
        teacher={"model": str(tiny_model), "loss": loss},
    )
    model = make_model(config)
    spec = run_spec(config, model.decoder, model.mesh)
    role, said = spec.roles["teacher"], []
    weights = StoredWeights(model, {"teacher": make_role_model(role, model)}, said.append)
    frozen = weights.frozen

    def held():
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays())

    before = held()
    shared = LoadedRole(role=role, params=weights.of(role))
    assert held() == before
    assert shared.params is frozen
    apart = dataclasses.replace(role, weights="frozen")
    own = LoadedRole(role=apart, params=weights.of(apart))
    assert held() - before == sum(x.nbytes for x in frozen.values())
    assert said[0].endswith(", the frozen weights beside the adapters") and ", weights " in said[1]
    settings = TrainSettings(model.decoder, model.mesh, spec.update)
    samples = make_samples(longest_prompt=8, longest=3, vocab=model.decoder.vocab)
    batch = shard_batch(make_batch(samples, spec.batch)[0], settings.computing)
    scores = [make_role_program(role, settings)(each.params, batch) for each in (shared, own)]
    assert np.asarray(scores[0]).any()
    np.testing.assert_array_equal(*scores)
    if loss == "sampled":
        return
    optimizer, found = make_run_optimizer(spec.optimizer, model.decoder), []
    batch = dataclasses.replace(batch, scores={TAUGHT_HIDDEN: scores[0]})
    for teacher, kept_head in ((shared, set()), (own, {TAUGHT_HEAD})):
        trainer = Trainer(
            spec.recipe,
            settings,
            optimizer,
            shapes=RunShapes(spec.batch),
            schedule=spec.optimizer,
            folder=Path(),
            frozen=frozen,
            roles=[teacher],
        )
        assert trainer.fixed.keys() - frozen.keys() == kept_head
        adapters = {name: x + 0.1 for name, x in load_trained(model, None, frozen).items()}
        state, metrics = trainer.train_step(init_state(adapters, optimizer), batch, trainer.fixed)
        found.append((state.params, float(metrics["kl_teacher"])))
    assert found[0][1] == found[1][1] > 0
    for name, x in found[0][0].items():
        np.testing.assert_array_equal(x, found[1][0][name])


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({}, True),
        ({"teacher": {"base": "int8"}}, False),
        ({"teacher": {"base": "int8"}, "lora": {"base": "int8"}}, True),
        ({"teacher": {"model": "Qwen/Qwen3-1.7B"}}, False),
        ({"lora": None}, False),
    ],
)
def test_only_the_frozen_model_in_its_own_format_is_shared(changes, shared):
    same = {"lora": {"rank": 2}, "algorithm": {"recipe": "distill"}, "teacher": {"model": "Qwen/Qwen3-0.6B"}}
    teacher = spec_of(make_config("Qwen/Qwen3-0.6B", **merged(same, changes))).roles["teacher"]
    assert teacher.weights == ("policy_base" if shared else "frozen")


@pytest.mark.parametrize("loss", ["sampled", pytest.param("full", marks=pytest.mark.long)])
def test_a_distilled_run_comes_closer_to_its_teacher_and_resumes_bit_for_bit(run_of, teacher_model, loss):
    changes = {
        "algorithm": {"recipe": "distill"},
        "teacher": {"model": str(teacher_model), "loss": loss},
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"every_steps": 2},
        "train": {"optimizer": {"learning_rate": 3e-2}},
    }
    whole = run_of(**changes, steps=6)
    distances = [record["policy/kl_teacher"] for record in trained(whole)]
    assert distances[0] > 0.05
    assert np.mean(distances[-2:]) < 0.8 * distances[0]
    stopped = run_of(**changes, steps=2)
    assert train(config_of(stopped, steps=6), plain=True) == 0
    assert_same_run(stopped, whole)


def test_an_int8_teacher_is_close_to_one_in_bfloat16(tiny_model, teacher_model):
    found = []
    trainer, state = make_trainer(algorithm={"recipe": "distill"})
    (batch,), _ = trainer.prepare(state, groups_of())
    batch = dataclasses.replace(batch, tokens=batch.tokens % 20, targets=batch.targets % 20, scores={})
    for base in ("bfloat16", "int8"):
        config = make_config(tiny_model, teacher={"model": str(teacher_model), "base": base})
        model = make_model(config)
        made = make_role_model(run_spec(config, model.decoder, model.mesh).roles["teacher"], model)
        weights = load_frozen(made)
        program = make_score(trainer.settings._replace(decoder=made.decoder))
        found.append(np.asarray(program(weights, batch)) * np.asarray(batch.mask))
    assert weights["layers.q"].dtype == jnp.int8
    assert 1e-4 < np.median(np.abs(found[0] - found[1])[np.asarray(batch.mask) > 0]) < 0.1


def test_a_teacher_with_another_tokenizer_is_refused_with_the_first_difference(tiny_model, teacher_model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(teacher_model, other)
    path = other / "tokenizer.json"
    text = path.read_text()
    assert '"+": ' in text
    path.write_text(text.replace('"+": ', '"plus": '))
    config = make_config(tiny_model, teacher={"model": str(other)})
    model = make_model(config)
    number = model.tokenizer.encode("+")[0]
    with pytest.raises(
        ValueError, match=rf"tokenizer of .* differs from that of .*: token {number} is '\+' and 'plus'; its scores"
    ):
        make_role_model(run_spec(config, model.decoder, model.mesh).roles["teacher"], model)


def test_a_teacher_without_a_chat_template_teaches_and_one_with_too_few_positions_does_not(
    tiny_model, teacher_model, tmp_path
):
    base = tmp_path / "base"
    shutil.copytree(teacher_model, base)
    for path in (base / "chat_template.jinja", base / "tokenizer_config.json"):
        if path.name == "chat_template.jinja":
            path.unlink(missing_ok=True)
        else:
            settings = json.loads(path.read_text())
            settings.pop("chat_template", None)
            path.write_text(json.dumps(settings))
    config = make_config(tiny_model, teacher={"model": str(base)})
    model = make_model(config)
    make_role_model(run_spec(config, model.decoder, model.mesh).roles["teacher"], model)
    with pytest.raises(ModelError, match="has no chat template"):
        load_tokenizer(resolve(str(base)))
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 8}))
    with pytest.raises(ValueError, match=r"^rollout.max_new_tokens: .*base has 8 positions; "):
        run_spec(config, model.decoder, model.mesh)


def test_rewards_alone_train_nothing_with_distill():
    trainer, state = make_trainer(algorithm={"recipe": "distill"})
    (batch,), stats = trainer.prepare(state, groups_of(REWARDS))
    assert not np.asarray(batch.advantages).any()
    assert stats.taught_kl is None
