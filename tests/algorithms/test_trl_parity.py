"""Losses against TRL's GRPOTrainer: as tests/golden/record_losses.py recorded it, and live where TRL is installed."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from others_code import others_code

from podium.algorithms.advantages import token_weights
from podium.algorithms.losses import Tokens, entropy_loss, policy_loss
from podium.algorithms.recipe_options import make_recipe
from podium.algorithms.selection import top_entropy_tokens
from podium.config.schema import AlgorithmConfig
from podium.observe.metric_table import clip_fractions

SCRIPT = Path(__file__).parents[1] / "golden" / "record_losses.py"
_spec = importlib.util.spec_from_file_location("record_losses", SCRIPT)
assert _spec is not None and _spec.loader is not None
recorder = importlib.util.module_from_spec(_spec)
sys.modules["record_losses"] = recorder
_spec.loader.exec_module(recorder)

GOLDEN = json.loads(recorder.GOLDEN.read_text())["cases"]
TOLERANCE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}  # both are float32


def podium_output(case: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What a recipe gives for the numbers of the recorder's `trl_output`: loss, gradient, clip fractions."""
    recipe = make_recipe(AlgorithmConfig(**case.podium), group_size=2, prompts_per_step=2)
    mask = inputs["mask"]
    lengths = mask.sum(axis=1)
    weights = token_weights(recipe.mean, lengths, num_sequences=len(lengths), max_new_tokens=recorder.MAX_NEW_TOKENS)
    scores = ("old_logprobs", "reference_logprobs") if case.spread else ("reference_logprobs",)
    given = {name: inputs[name] for name in scores}
    if recipe.top_entropy < 1:
        chosen = np.zeros(mask.shape, np.float32)
        chosen[mask > 0] = top_entropy_tokens(inputs["entropy"][mask > 0], share=recipe.top_entropy)
        given["uncertain"] = chosen
    batch = {
        "old_logprobs": inputs["sampled_logprobs" if case.trl.get("use_vllm") else "old_logprobs"],
        "advantages": np.broadcast_to(inputs["advantages"][:, None], mask.shape),
        "segments": mask.astype(np.int32),
        "mask": mask,
        "scores": given,
    }

    def loss(logprobs: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        values, stats = policy_loss(recipe, Tokens(logprobs, **batch))
        bonus = {"num_tokens": mask.sum(), "entropy_bonus": recipe.entropy_bonus}
        return jnp.sum(weights[:, None] * mask * values) + entropy_loss(inputs["entropy"], mask, **bonus), stats

    (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(inputs["logprobs"])
    means = {name: float((values * mask).sum() / mask.sum()) for name, values in stats.items()}
    return {"loss": float(value), "gradient": np.asarray(gradient), "clip": clip_fractions(means)}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    np.testing.assert_allclose(ours["loss"], theirs["loss"], **TOLERANCE)
    np.testing.assert_allclose(ours["gradient"], theirs["gradient"], **TOLERANCE)


def golden_inputs(name: str) -> dict[str, Any]:
    return {key: np.array(values, np.float32) for key, values in GOLDEN[name]["inputs"].items()}


def test_every_case_is_recorded() -> None:
    assert set(GOLDEN) == set(recorder.CASES)


@pytest.mark.parametrize("name", recorder.CASES)
def test_loss_and_gradient_equal_those_trl_recorded(name: str) -> None:
    assert_same(podium_output(recorder.CASES[name], golden_inputs(name)), GOLDEN[name]["outputs"])


@pytest.mark.parametrize("name", [name for name in GOLDEN if "low_mean" in GOLDEN[name]["outputs"]["clip"]])
def test_clip_fractions_equal_those_trl_recorded(name: str) -> None:
    ours, theirs = podium_output(recorder.CASES[name], golden_inputs(name))["clip"], GOLDEN[name]["outputs"]["clip"]
    np.testing.assert_allclose(ours, [theirs["low_mean"], theirs["high_mean"]], atol=1e-6)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")  # whatever TRL's own imports warn of
def test_losses_and_gradients_equal_those_of_trl_itself() -> None:
    others_code("torch")
    others_code("trl")
    for case in recorder.CASES.values():
        for seed in (1000, 1001, 1002):
            inputs = recorder.random_inputs(case.spread, seed)
            assert_same(podium_output(case, inputs), recorder.trl_output(case, inputs))
