"""Tokens chosen over a whole optimizer step: which they are, and which term of the loss leaves the others out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_rows import drawn, packed

from podium.algorithms.losses import policy_loss
from podium.algorithms.recipe_options import RecipeError, make_recipe
from podium.algorithms.selection import TIE, clip_cov_tokens, covariances, kl_cov_tokens, top_entropy_tokens
from podium.config.schema import AlgorithmConfig


def test_the_most_uncertain_tokens_by_hand() -> None:
    entropy = np.array([0.1, 2.0, 0.7, 1.5, 0.3])
    np.testing.assert_array_equal(top_entropy_tokens(entropy, share=0.25), [False, True, False, True, False])
    np.testing.assert_array_equal(top_entropy_tokens(entropy, share=0.2), [False, True, False, False, False])
    assert top_entropy_tokens(entropy, share=1.0).all()
    assert top_entropy_tokens(entropy[:1], share=0.01).all()
    assert top_entropy_tokens(entropy[:0], share=0.2).shape == (0,)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("n", [2, 7, 11, 240])
def test_they_are_those_that_reach_the_quantile(share: float, n: int) -> None:
    """TRL's get_high_entropy_mask: entropy >= quantile(entropies, 1 - share), interpolated."""
    entropy = np.random.default_rng(n).permutation(np.linspace(0.1, 3.0, n)).astype(np.float32)
    expected = entropy.astype(np.float64) >= np.quantile(entropy.astype(np.float64), 1 - share) - 1e-7
    np.testing.assert_array_equal(top_entropy_tokens(entropy, share=share), expected)


def test_rounding_decides_between_no_two_equal_distributions() -> None:
    random = np.random.default_rng(0)
    equal = 1.2 + 1e-6 * random.normal(size=8)  # the first tokens of 8 completions
    chosen = top_entropy_tokens(np.concatenate([equal, [0.2, 2.0, 0.4, 2.5]]), share=0.5)
    np.testing.assert_array_equal(chosen, [True] * 8 + [False, True, False, True])
    assert 1e-6 < TIE < 1e-3


def inputs(seed: int) -> dict[str, Any]:
    batch = packed(seed)
    random = np.random.default_rng(seed)
    scores = {
        "old_logprobs": batch.pop("old_logprobs"),
        "reference_logprobs": batch["logprobs"] + random.normal(0, 0.5, batch["mask"].shape).astype(np.float32),
        "uncertain": (random.uniform(size=batch["mask"].shape) < 0.4).astype(np.float32),
    }
    return batch | {"sampled_logprobs": scores["old_logprobs"] - 0.1, "scores": scores}


def test_the_policy_term_alone_is_of_the_uncertain_tokens() -> None:
    """Loss and gradient in numpy: uncertain x (-min(ratio A, clip(ratio) A)) x min(w, 1.05) + 0.1 d^2 / 2."""
    options = {"old_logprobs": "trainer", "correction": "truncate", "correction_high": 1.05, "kl": "k2", "kl_coef": 0.1}
    config = AlgorithmConfig.model_validate({"top_entropy": 0.4, **options})
    recipe = make_recipe(config, group_size=2, prompts_per_step=2)
    batch = inputs(3)
    lp, A = (np.asarray(batch[name], np.float64) for name in ("logprobs", "advantages"))
    scores = {name: np.asarray(x, np.float64) for name, x in batch["scores"].items()}
    weight = np.minimum(np.exp(scores["old_logprobs"] - batch["sampled_logprobs"]), 1.05) * scores["uncertain"]
    ratio = np.exp(lp - scores["old_logprobs"])
    d = lp - scores["reference_logprobs"]
    surrogate = np.minimum(ratio * A, np.clip(ratio, 0.8, 1.2) * A)
    open_ = np.where(A > 0, ratio < 1.2, ratio > 0.8)

    def total(logprobs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
        values, stats = policy_loss(recipe, drawn({**batch, "logprobs": logprobs}))
        return jnp.sum(values), (values, stats)

    (_, (values, stats)), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(batch["logprobs"]))
    np.testing.assert_allclose(values, -weight * surrogate + 0.1 * d**2 / 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, -weight * open_ * ratio * A + 0.1 * d, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(stats["top_entropy"], scores["uncertain"])
    assert 0.1 < np.mean(scores["uncertain"]) < 0.9


@pytest.mark.parametrize("value", [0.0, -0.1, 1.5])
def test_a_share_is_above_0_and_at_most_1(value: float) -> None:
    with pytest.raises(ValueError, match="top_entropy"):
        AlgorithmConfig.model_validate({"top_entropy": value})


def step_of_tokens(n: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities, advantages and ids of a step's tokens."""
    random = np.random.default_rng(5)
    return -random.exponential(1.5, n).astype(np.float32), random.normal(0, 1.2, n), random.integers(0, 99, n)


def test_covariances_are_those_of_the_paper() -> None:
    logprobs, advantages, _ = step_of_tokens()
    lp, A = logprobs.astype(np.float64).tolist(), advantages.tolist()
    mean_lp, mean_A = sum(lp) / len(lp), sum(A) / len(A)
    expected = [(p - mean_lp) * (a - mean_A) for p, a in zip(lp, A, strict=True)]
    np.testing.assert_allclose(covariances(logprobs, advantages), expected, rtol=1e-12, atol=1e-12)
    assert np.mean(expected) == pytest.approx(np.cov(lp, A, bias=True)[0, 1], rel=1e-9)


def test_clip_cov_draws_evenly_from_its_band() -> None:
    logprobs, advantages, ids = step_of_tokens()
    found = covariances(logprobs, advantages)
    band = (found > 0.5) & (found < 2.0)
    chosen = clip_cov_tokens(found, ids, share=0.02, low=0.5, high=2.0)
    assert chosen.sum() == 8 < band.sum()
    assert not (chosen & ~band).any()
    np.testing.assert_array_equal(chosen, clip_cov_tokens(found, ids, share=0.02, low=0.5, high=2.0))
    drawn = np.zeros(len(found))
    for shift in range(2000):
        drawn += clip_cov_tokens(found, ids + shift, share=0.02, low=0.5, high=2.0)
    mean = 2000 * 8 / band.sum()
    np.testing.assert_allclose(drawn[band], mean, atol=5 * np.sqrt(mean))
    np.testing.assert_array_equal(clip_cov_tokens(found, ids, share=1.0 - 1e-9, low=0.5, high=2.0), band)
    assert clip_cov_tokens(found, ids, share=1e-6, low=0.5, high=2.0).sum() == 1
    assert not clip_cov_tokens(found, ids, share=0.5, low=50.0, high=60.0).any()


def test_kl_cov_takes_the_largest() -> None:
    logprobs, advantages, _ = step_of_tokens()
    found = covariances(logprobs, advantages)
    chosen = kl_cov_tokens(found, share=0.02)
    assert chosen.sum() == 8
    assert found[chosen].min() > found[~chosen].max()
    assert kl_cov_tokens(found, share=1e-6).sum() == 1


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_the_losses_of_chosen_tokens_in_numpy(loss: str) -> None:
    """Clip-Cov: (1 - chosen) x PPO's; KL-Cov: -ratio A + 0.5 chosen (ratio - 1 - log ratio). Gradients too."""
    config = AlgorithmConfig.model_validate(
        {"loss": loss, "loss_options": {"kl_weight": 0.5} if loss == "kl_cov" else {}, "old_logprobs": "trainer"}
    )
    recipe = make_recipe(config, group_size=2, prompts_per_step=2)
    batch = inputs(4)
    batch["scores"]["covariant"] = chosen = 1 - batch["scores"]["uncertain"]
    lp, A = (np.asarray(batch[name], np.float64) for name in ("logprobs", "advantages"))
    log_ratio = lp - batch["scores"]["old_logprobs"]
    ratio = np.exp(log_ratio)
    if loss == "clip_cov":
        expected = -(1 - chosen) * np.minimum(ratio * A, np.clip(ratio, 0.8, 1.2) * A)
        slope = -(1 - chosen) * np.where(A > 0, ratio < 1.2, ratio > 0.8) * ratio * A
    else:
        expected = -ratio * A + 0.5 * chosen * (ratio - 1 - log_ratio)
        slope = -ratio * A + 0.5 * chosen * (ratio - 1)

    def total(logprobs: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, _ = policy_loss(recipe, drawn({**batch, "logprobs": logprobs}))
        return jnp.sum(values), values

    (_, values), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(batch["logprobs"]))
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-6)


def test_an_empty_band_is_refused() -> None:
    config = AlgorithmConfig.model_validate({"loss": "clip_cov", "loss_options": {"cov_low": 6.0}})
    with pytest.raises(RecipeError) as error:
        make_recipe(config, group_size=4, prompts_per_step=4)
    assert "no covariance is between cov_low 6 and cov_high 5" in dict(error.value.found)["algorithm.loss_options"]
