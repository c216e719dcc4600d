"""Losses of preferences against TRL's DPOTrainer and KTOTrainer: as record_preferences.py recorded, and live."""

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
from podium.algorithms.losses import Tokens, policy_loss
from podium.algorithms.recipe_options import make_recipe
from podium.config.schema import AlgorithmConfig

SCRIPT = Path(__file__).parents[1] / "golden" / "record_preferences.py"
_spec = importlib.util.spec_from_file_location("record_preferences", SCRIPT)
assert _spec is not None and _spec.loader is not None
recorder = importlib.util.module_from_spec(_spec)
sys.modules["record_preferences"] = recorder
_spec.loader.exec_module(recorder)

GOLDEN = json.loads(recorder.GOLDEN.read_text())["cases"]
BAR = 1e-5
SIDES = 2


def side_by_side(x: np.ndarray) -> np.ndarray:
    """[8, 7] -> [4, 14]: a pair's two completions in a row; TRL has the chosen ones of all pairs first."""
    return np.concatenate(np.split(x, SIDES), axis=1)


def one_below_the_other(x: np.ndarray) -> np.ndarray:
    """[4, 14] -> [8, 7]."""
    return np.concatenate(np.split(x, SIDES, axis=1))


def podium_output(case: Any, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """What Podium gives for the numbers of the recorder's `trl_output`."""
    labels = case.loss == "kto"
    recipe = make_recipe(
        AlgorithmConfig(recipe="dpo", loss=case.loss, loss_options=case.options or None),
        group_size=1 if labels else 2,
        prompts_per_step=8 if labels else 4,
    )
    mask = inputs["mask"]
    weights = token_weights(recipe.mean, mask.sum(axis=1), num_sequences=len(mask), max_new_tokens=7)[:, None] * mask
    sign = np.where(recorder.LABELS, 1, -1) if labels else np.repeat([1, -1], 4)
    advantages, segments = np.broadcast_to(sign[:, None], mask.shape), np.ones(mask.shape, np.int32)
    scores = {"reference_logprobs": inputs["reference_logprobs"]}
    point = None
    if labels:
        ratios = inputs["mismatched_logprobs"].astype(np.float64) - inputs["mismatched_reference_logprobs"]
        point = max(0.0, float((ratios * mask).sum(axis=1).mean()))
        scores["reference_point"] = np.full(mask.shape, point, np.float32)
    else:
        segments[4:] = 2
    lay = (lambda x: x) if labels else side_by_side
    back = (lambda x: x) if labels else one_below_the_other
    rows = {name: jnp.asarray(lay(x)) for name, x in scores.items()}

    def loss(logprobs: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        tokens = Tokens(
            logprobs,
            old_logprobs=jnp.zeros_like(logprobs),
            advantages=jnp.asarray(lay(advantages), jnp.float32),
            segments=jnp.asarray(lay(segments)) + 1,
            mask=jnp.asarray(lay(mask)),
            scores=rows,
            prompts=jnp.ones(logprobs.shape, jnp.int32),
        )
        values, stats = policy_loss(recipe, tokens)
        return jnp.sum(jnp.asarray(lay(weights), jnp.float32) * values), stats

    (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(lay(inputs["logprobs"])))
    sums = {name: float(jnp.sum(x * lay(mask))) for name, x in stats.items()}
    chosen = sums["pairs_chosen"] / sums.get("chosen", sums.get("pairs"))
    rejected = sums["pairs_rejected"] / sums.get("rejected", sums.get("pairs"))
    rewards = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
    if not labels:
        rewards["rewards/accuracies"] = sums["pairs_right"] / sums["pairs"]
    return {"loss": float(value), "gradient": back(np.asarray(gradient)), "rewards": rewards, "kl": point}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=BAR)
    gradient = np.array(theirs["gradient"])
    assert np.abs(gradient).max() > 0
    np.testing.assert_allclose(ours["gradient"], gradient, rtol=0, atol=BAR * np.abs(gradient).max())
    assert ours["rewards"].keys() == theirs["rewards"].keys()
    for name, value in theirs["rewards"].items():
        assert ours["rewards"][name] == pytest.approx(value, rel=BAR, abs=1e-6), name
    assert ours["kl"] == (theirs["kl"] if theirs["kl"] is None else pytest.approx(theirs["kl"], rel=BAR))


def test_every_case_is_recorded() -> None:
    assert set(GOLDEN) == set(recorder.CASES)
    assert GOLDEN["kto"]["outputs"]["kl"] > 0 == GOLDEN["kto_negative_kl"]["outputs"]["kl"]


@pytest.mark.parametrize("name", recorder.CASES)
def test_loss_gradient_and_rewards_equal_those_trl_recorded(name: str) -> None:
    inputs = {key: np.array(values, np.float32) for key, values in GOLDEN[name]["inputs"].items()}
    assert_same(podium_output(recorder.CASES[name], inputs), GOLDEN[name]["outputs"])


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")  # whatever TRL's own imports warn of
def test_losses_gradients_and_rewards_equal_those_of_trl_itself() -> None:
    others_code("torch")
    others_code("trl")
    for case in recorder.CASES.values():
        for seed in (2000, 2001, 2002):
            inputs = recorder.random_inputs(case, seed)
            assert_same(podium_output(case, inputs), recorder.trl_output(case, inputs))
