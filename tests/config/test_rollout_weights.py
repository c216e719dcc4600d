"""The format of the rollout's weights: the correction that it brings, and where it is refused."""

import dataclasses
from pathlib import Path

import pytest
from tiny_decoder import DECODER

from podium.certify.small_run import make_subject
from podium.config.errors import ConfigError
from podium.config.lora import LoraConfig
from podium.models.architecture import rollout_decoder
from podium.run.resolve import resolve_recipe
from podium.run.roles import decoder_of_run
from podium.settings import load_settings

BASE = "model: demo\ntasks: [{name: arithmetic}]\n"


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """The settings of a file that begins with a model and a task, with others behind it."""
    monkeypatch.chdir(tmp_path)

    def settings(*overrides: str):
        Path("a.yaml").write_text(BASE)
        return load_settings(["a.yaml"], overrides, {}).config

    return settings


def correction(config):
    recipe = resolve_recipe(config)
    return recipe.old_logprobs, recipe.correction, recipe.correction_low, recipe.correction_high


@pytest.mark.parametrize("how", ["int8", "w8a8"])
def test_rounded_weights_bring_a_mask_that_a_config_overrides(settings, how):
    rounded = f"rollout.weights={how}"
    assert correction(settings())[:2] == ("sampler", "none")
    assert correction(settings(rounded)) == ("trainer", "mask", 0.5, 2.0)
    assert correction(settings(rounded, "algorithm.correction_high=5.0")) == ("trainer", "mask", 0.5, 5.0)
    given = settings(rounded, "algorithm.old_logprobs=sampler")
    assert correction(given)[:2] == ("sampler", "none")
    given = settings(rounded, "algorithm.old_logprobs=trainer", "algorithm.correction=truncate")
    assert correction(given)[1:] == ("truncate", 0.0, 2.0)
    given = settings(rounded, "algorithm.old_logprobs=trainer", "algorithm.correction=none")
    assert correction(given)[:2] == ("trainer", "none")


def test_recipes_that_correct_in_their_own_way_keep_it(settings):
    assert correction(settings("rollout.weights=int8", "algorithm.recipe=vespo"))[:2] == ("sampler", "none")
    for recipe in ("gspo", "ppo", "reinforce_pp", "cispo", "dapo"):
        assert correction(settings("rollout.weights=int8", f"algorithm.recipe={recipe}"))[1] != "none"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.weights=int4"], "rollout.weights: expected one of dtype, int8, w8a8, got 'int4'"),
        (
            ["rollout.weights=int8", "algorithm.recipe=sft", "group_size=1"],
            "rollout.weights: recipe sft samples nothing, so int8 would only change what is evaluated; leave it out",
        ),
        (
            ["rollout.max_logprob_gap=0.05", "algorithm.recipe=sft", "group_size=1"],
            "rollout.max_logprob_gap: 0.05 has no effect: recipe sft samples nothing; leave it out",
        ),
        (
            ["rollout.weights=w8a8", "lora.base=nf4"],
            "rollout.weights: w8a8 would need a second copy of the weights, larger than lora.base nf4 and rounded once"
            " more; leave it out, or set lora.base to int8 or bfloat16",
        ),
        (
            ["rollout.weights=int8", "lora.rollout=shared"],
            "lora.rollout: shared reads the trainer's frozen weights as they are, in bfloat16, and rollout.weights"
            " int8 is a copy; set lora.rollout to auto, or lora.base to int8",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(settings, overrides, message):
    with pytest.raises(ConfigError) as error:
        settings(*overrides)
    assert any(str(problem).startswith(message) for problem in error.value.problems)


def test_an_int8_base_is_read_as_it_is(settings):
    decoder = decoder_of_run(DECODER, LoraConfig(base="int8"), "w8a8")
    own = rollout_decoder(decoder)
    assert own.lora == decoder.lora
    assert (own.int8_products, decoder.int8_products) == (True, False)
    plain = rollout_decoder(decoder_of_run(DECODER, LoraConfig(base="int8"), "dtype"))
    assert plain == dataclasses.replace(own, int8_products=False)


def test_a_certificate_is_of_the_corrected_recipe_without_rounding(settings):
    subject = make_subject(settings("rollout.weights=int8"), full=False)
    assert subject.decoder.rollout_weights == subject.config.rollout.weights == "dtype"
    assert (subject.recipe.correction, subject.rules.correction) == ("mask", "mask")
    assert (subject.rules.correction_low, subject.rules.correction_high) == (0.5, 2.0)
