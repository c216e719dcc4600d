import dataclasses
import functools
import io
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from podium.algorithms.recipes import LOSSES, RECIPES
from podium.certify import command
from podium.certify.batch_variants import variants
from podium.certify.batches import batch_checks
from podium.certify.check_result import Certificate, Check, largest
from podium.certify.formulas import formula_cases
from podium.certify.naive import in_float32, in_float64
from podium.certify.naive_optimizer import scheduled_rate
from podium.certify.naive_rules import rules_of
from podium.certify.report import as_object, print_certificate
from podium.certify.rollout_devices import rollout_device_checks, with_room
from podium.certify.small_run import make_subject, training_settings
from podium.certify.tiny import tiny_clone
from podium.certify.training import watch_training
from podium.certify.updates import (
    NaiveUpdate,
    Sizes,
    Updates,
    gradient_difference,
    naive_update,
    weight_difference,
)
from podium.config.optimizer import OptimizerConfig
from podium.config.schema import AlgorithmConfig, Config
from podium.models.blocks.delta import DeltaNet
from podium.models.presets import PRESETS, preset_decoder
from podium.train.optimizer.transforms import learning_rate

MODELS = ("meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B")


def make_config(model=MODELS[0], **changes) -> Config:
    return Config.model_validate({"model": model, "tasks": [{"name": "arithmetic"}], "steps": 10, **changes})


def certificate(*checks: Check) -> Certificate:
    about = {"config": "run", "subject": "a tiny clone of x (llama, 10 parameters)", "device": "cpu", "seconds": 1.0}
    return Certificate(checks=checks, skipped=(), **about)


GREEN = Check(name="loss", claim="the loss is right", difference=1e-7)
RED = Check(name="mask", claim="the mask is right", difference=1.0, bar=0)
FOLLOWS = Check(name="gradient", claim="the gradient is right", difference=math.nan, after=("mask",))


def printed(found: Certificate) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    print_certificate(found, console)
    return console.export_text()


def test_a_red_check_that_follows_from_another_is_no_cause():
    found = certificate(RED, GREEN, FOLLOWS)
    assert not found.green
    assert [check.name for check in found.causes] == ["mask"]
    assert [check.name for check in certificate(GREEN, FOLLOWS).causes] == ["gradient"]


def test_the_verdict_names_the_cause_and_then_what_follows_within_80_columns():
    text = printed(certificate(RED, GREEN, FOLLOWS))
    assert "red: 2 of 3 checks" in text
    assert "mask: it is not true that the mask is right (off by 1, the bar is 0)" in text
    assert "red as a consequence: gradient" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "green: 1 checks" in printed(certificate(GREEN))


def test_the_object_has_the_names_that_scripts_read():
    found = as_object(certificate(RED, FOLLOWS))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["green"], found["causes"]) == (False, ["mask"])
    assert {"name": "mask", "difference": 1.0, "bar": 0, "ok": False}.items() <= found["checks"][0].items()
    assert found["checks"][1]["difference"] is None


def test_a_difference_that_numpy_computed_can_be_printed_as_json():
    check = dataclasses.replace(GREEN, difference=np.sqrt(np.float64(0.0)))
    assert json.loads(json.dumps(as_object(certificate(check))))["green"] is True


def test_the_bar_of_a_gradient_that_exceeds_it_is_twice_what_float32_changes(monkeypatch):
    clone = make_subject(make_config())

    def naive(error, subject, sequences, weights, *, precision=in_float64):
        exact = {"embed": np.array([3.0, 4.0])}
        gradient = {"embed": exact["embed"] + (error * 5.0 if precision is in_float32 else 0.0) * np.array([0.0, 1.0])}
        return NaiveUpdate(0.0, gradient, Sizes(1.0, {"embed": 5.0}), 0.0, 0.0, 1)

    for error, difference, bar in ((2e-5, 3e-5, 4e-5), (2e-5, 9e-6, 1e-5), (1e-6, 3e-5, 1e-5), (1e-6, math.nan, 1e-5)):
        monkeypatch.setattr("podium.certify.updates.naive_update", functools.partial(naive, error))
        found = Updates(clone).bar(difference)
        assert found == pytest.approx(bar, rel=1e-6)
        assert Check(name="gradient", claim="", difference=difference, bar=found).ok == (difference <= bar)


def test_a_gradient_or_a_weight_that_is_not_a_number_is_no_small_difference():
    right = {name: np.ones(2) for name in ("embed", "head")}
    for name in right:
        wrong = right | {name: np.array([1.0, np.nan])}
        assert math.isnan(gradient_difference(wrong, right, Sizes(1.0, dict.fromkeys(right, 1.0))))
        assert math.isnan(weight_difference(wrong, dict.fromkeys(right, np.zeros(2)), right))
    assert math.isnan(largest((1.0, math.nan, 2.0)))
    assert largest(()) == 0.0
    assert largest((-1.0, 2.0)) == 2.0


def test_float32_changes_the_naive_gradient_of_a_small_clone_less_than_the_bar():
    subject = make_subject(make_config())
    exact = naive_update(subject, subject.sequences, subject.weights)
    rounded = naive_update(subject, subject.sequences, subject.weights, precision=in_float32)
    assert {value.dtype for value in rounded.gradient.values()} == {np.dtype(np.float32)}
    assert 0 < gradient_difference(rounded.gradient, exact.gradient, exact.sizes) < 1e-5


@pytest.mark.parametrize(("green", "status"), [(True, 0), (False, 1)])
def test_the_status_is_the_verdict(monkeypatch, capsys, green, status):
    monkeypatch.setattr(command, "prepare_platform", lambda: None)
    monkeypatch.setattr(command, "split_the_cpu", lambda: None)
    monkeypatch.setattr(command, "make_certificate", lambda *_, **__: certificate(GREEN if green else RED))
    assert command.certify(make_config(), full=False, as_json=True) == status
    assert json.loads(capsys.readouterr().out)["green"] is green


def switches(layer):
    """What is no size of a layer."""
    attention, after = layer
    if isinstance(attention, DeltaNet):
        return attention.taps, attention.value_heads // attention.key_heads, after.activation
    rope = attention.rope
    scaled = attention.scale_dims is not None
    return (
        attention.bias,
        attention.norm,
        attention.out_bias,
        attention.sinks,
        attention.gated,
        bool(attention.window),
        scaled,
        rope.theta,
        rope.scaling,
        after.activation,
        getattr(after, "normalized", None),
        getattr(after, "bias", None),
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_clone_keeps_every_switch_and_the_ratio_of_heads(name):
    model, clone = preset_decoder(name), tiny_clone(preset_decoder(name))
    for field in ("model_type", "tied", "norm_eps", "norm_offset", "wide_norms"):
        assert getattr(clone, field) == getattr(model, field)
    assert {place.block.norms_behind for place in clone.places} == {place.block.norms_behind for place in model.places}
    assert {switches(block.kinds) for block in clone.blocks} == {switches(block.kinds) for block in model.blocks}
    assert clone.heads // clone.kv_heads == model.heads // model.kv_heads
    assert clone.heads % clone.kv_heads == 0


@pytest.fixture(scope="module")
def sampled():
    """The completions of a clone, whatever is made of them later."""
    return make_subject(make_config()).sampled


@pytest.mark.long
@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if not recipe().preferences])
def test_batches_of_every_recipe_are_right(recipe, sampled):
    subject = make_subject(make_config(algorithm={"recipe": recipe}))
    subject.__dict__["sampled"] = sampled
    found = list(batch_checks(Updates(subject)))
    assert [(check.name, check.difference) for check in found if not check.ok] == []


BY_REWARD = [each for each in variants() if each.rules.advantage not in ("none", "decoupled", "values", "greedy")]


@pytest.mark.parametrize("variant", BY_REWARD, ids=lambda each: each.rules.advantage)
def test_a_variant_has_advantages_to_compare(variant):
    assert variant.recipe.advantage(np.array([[0.1, 0.4, 0.2, 0.9]]), np.array([[1, 2, 3, 4]])).any()


def test_a_certificate_has_more_completions_than_a_set_of_pass_at_k():
    options = {"recipe": "pass_at_k", "advantage_options": {"k": 6}}
    assert make_subject(make_config(algorithm=options, group_size=8)).config.group_size == 7


OF_OTHERS = {
    "clip": ("correction", "off_policy_threshold", "drift_coef", "top_entropy", "kl", "kl_by_ratio"),
    "correction": ("off_policy_threshold", "drift_coef", "top_entropy", "dual_clip", "kl"),
    "drift": ("correction", "top_entropy", "dual_clip", "kl"),
    "uncertain tokens": ("correction_high", "off_policy_threshold", "drift_coef", "dual_clip", "kl"),
    "kl": ("correction", "off_policy_threshold", "drift_coef", "top_entropy", "dual_clip"),
    "covariance": ("correction", "off_policy_threshold", "drift_coef", "top_entropy", "dual_clip", "kl"),
}


def test_no_formula_is_checked_with_the_config_s_own_values_of_another():
    """Else a wrong correction would make the clip red, which would explain it."""
    algorithm = AlgorithmConfig(
        old_logprobs="trainer",
        correction="truncate",
        correction_high=1.7,
        off_policy_threshold=0.6,
        drift_coef=0.7,
        top_entropy=0.8,
        dual_clip=2.9,
        kl="k2",
        kl_coef=0.3,
        kl_by_ratio=True,
    )
    for name, changes in formula_cases(rules_of(algorithm)).items():
        for each in changes:
            others = {other: getattr(algorithm, other) for other in OF_OTHERS[name]}
            kept = [other for other, value in others.items() if each.get(other, value) == value]
            assert (name, kept) == (name, [])


def test_an_error_after_a_red_check_ends_the_checks_and_one_without_is_raised(monkeypatch):
    def ending(*checks):
        yield from checks
        raise IndexError("index 16 is out of bounds")

    monkeypatch.setattr(command, "STAGES", (lambda updates: ending(GREEN, RED), lambda updates: iter([FOLLOWS])))
    found = command.make_certificate(make_subject(make_config()))
    assert found.checks == (GREEN, RED)
    assert found.causes == (RED,)
    assert "all checks after mask: IndexError (index 16 is out of bounds); fix the red ones first" in found.skipped
    monkeypatch.setattr(command, "STAGES", (lambda updates: ending(GREEN),))
    with pytest.raises(IndexError, match="out of bounds"):
        command.make_certificate(make_subject(make_config()))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_naive_schedule_is_the_trainer_s(schedule):
    config = OptimizerConfig(schedule=schedule, warmup_steps=3, final_fraction=0.1, learning_rate=1e-3)
    rates = [float(jnp.asarray(learning_rate(config, 10)(step))) for step in range(10)]
    np.testing.assert_allclose(rates, [scheduled_rate(config, 10, step) for step in range(10)], rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_a_model_s_certificate_is_green(model):
    found = command.make_certificate(make_subject(make_config(model)))
    assert [(check.name, check.difference) for check in found.checks if not check.ok] == []


@pytest.mark.long
@pytest.mark.parametrize("kl", ["none", "k3"])
def test_the_certificate_of_adapters_is_green(kl):
    algorithm = {"kl": kl, "kl_coef": 0.1} if kl != "none" else {}
    found = command.make_certificate(make_subject(make_config(lora={"rank": 8}, algorithm=algorithm)))
    assert [(check.name, check.difference) for check in found.checks if not check.ok] == []


@pytest.mark.long
def test_the_certificate_of_a_repetition_penalty_is_green():
    algorithm = {"old_logprobs": "trainer", "correction": "truncate", "correction_high": 1.5}
    config = make_config(algorithm=algorithm, rollout={"repetition_penalty": 1.4})
    found = command.make_certificate(make_subject(config))
    assert [(check.name, check.difference) for check in found.checks if not check.ok] == []
    assert "repetition penalty" in [check.name for check in found.checks]


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe", [name for name, recipe in RECIPES.items() if name != "grpo" and not recipe().preferences]
)
def test_every_recipe_s_certificate_is_green(recipe):
    kl = {} if recipe == "maxrl" else {"kl": "k3", "kl_coef": 0.1, "entropy_bonus": 0.01}
    teacher = {"teacher": {"model": MODELS[0]}} if recipe == "distill" else {}
    found = command.make_certificate(make_subject(make_config(algorithm={"recipe": recipe, **kl}, **teacher)))
    assert [(check.name, check.difference) for check in found.checks if not check.ok] == []


LOSSES_OF_PREFERENCES = [name for name, kind in LOSSES.items() if kind.data_form != "text"]


def of_preferences(loss: str, **changes):
    size = 1 if LOSSES[loss].data_form == "label" else 2
    return make_config(algorithm={"recipe": "dpo", "loss": loss}, group_size=size, **changes)


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_batches_of_preferences_are_right(loss, sampled):
    config = of_preferences(loss)
    subject = make_subject(config)
    subject.__dict__["sampled"] = [group[: config.group_size] for group in sampled]
    found = list(batch_checks(Updates(subject)))
    assert [(check.name, check.difference) for check in found if not check.ok] == []
    point = float(subject.sequences.scores.get("reference_point", 0.0))
    assert ("reference point" in [check.name for check in found]) == (loss == "kto") == (point > 0)


@pytest.mark.long
def test_an_engine_on_several_devices_answers_labelled_prompts():
    found = list(rollout_device_checks(Updates(make_subject(of_preferences("kto")))))
    assert [(check.name, check.ok) for check in found] == [("rollout devices", True)]


def test_each_of_several_devices_has_room_for_a_sequence_of_labelled_completions():
    settings = make_subject(of_preferences("kto")).config.rollout
    assert (settings.longest, settings.page_tokens) == (31, 4)
    assert settings.cache_tokens < 4 * (32 + 4) == with_room(settings).cache_tokens  # with a page of a shared prompt


def test_adapters_that_learn_from_preferences_are_evaluated_with_their_last_weights():
    watched = watch_training(make_subject(of_preferences("dpo", lora={"rank": 8})))
    assert watched.evaluation is not None
    last = watched.resumed.updates[-1].after
    assert last and all(".lora_" in name for name in last)


@pytest.mark.long
@pytest.mark.parametrize("lora", [None, {"rank": 8}])
@pytest.mark.parametrize("loss", LOSSES_OF_PREFERENCES)
def test_the_certificate_of_a_loss_of_preferences_is_green(loss, lora):
    found = command.make_certificate(make_subject(of_preferences(loss, lora=lora)))
    assert [(check.name, check.difference) for check in found.checks if not check.ok] == []


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"recipe": "distill"}, "teacher": {"model": MODELS[0], "loss": "full", "reverse": 0.6}},
        {"algorithm": {"recipe": "gspo"}, "teacher": {"model": MODELS[0], "loss": "full"}, "lora": {"rank": 8}},
        {"teacher": {"model": MODELS[0], "prompt": "privileged", "template": "{answer} {question}"}},
        {"algorithm": {"kl": "k1_reward", "kl_coef": 0.05, "kl_target": 0.01}},
        {"algorithm": {"kl": "k3", "kl_coef": 0.05, "kl_target": 0.01, "kl_by_ratio": True, "entropy_target": 0.5}},
        {"algorithm": {"recipe": "dpo"}, "group_size": 2, "reference": {"sync_every": 2}},
    ],
)
def test_the_certificate_of_a_run_that_changes_what_it_compares_with_is_green(changes):
    found = command.make_certificate(make_subject(make_config(**changes)))
    assert [(check.name, check.difference) for check in found.checks if not check.ok] == []


def test_a_run_s_targets_are_what_the_clone_has_so_that_its_coefficients_move():
    algorithm = {"kl": "k2", "kl_coef": 0.1, "kl_target": 7.0, "entropy_target": 90.0, "entropy_step": 0.1}
    subject = make_subject(make_config(algorithm=algorithm, reference={"sync_every": 9}))
    config = training_settings(subject).config
    assert 0 < config.algorithm.kl_target < 1 < config.algorithm.entropy_target < 6
    assert (config.algorithm.kl_gain, config.algorithm.entropy_bonus_max) == (2.0, 0.05)
    assert (config.steps, config.reference.sync_every) == (5, 2)
