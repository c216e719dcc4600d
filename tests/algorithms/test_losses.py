"""Losses against numbers worked by hand, naive loops in float64 with finite differences, and exact expectations."""

import inspect
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import LAYOUT, Batch, packed

from podium.algorithms import recipes
from podium.algorithms.advantages import reward_advantages, token_weights
from podium.algorithms.losses import (
    POLICY_LOSSES,
    TokenLoss,
    Tokens,
    cispo_loss,
    clipped_policy_loss,
    correction_weights,
    dppo_kl_loss,
    dppo_tv_loss,
    gmpo_loss,
    gspo_loss,
    k3_estimate,
    kl_loss,
    off_policy_mask,
    reinforce_loss,
    sapo_loss,
    segment_means,
    vespo_loss,
)
from podium.algorithms.recipes import Recipe

CLIPPED = partial(clipped_policy_loss, clip_low=0.2, clip_high=0.28, dual_clip=None)
DUAL = partial(clipped_policy_loss, clip_low=0.2, clip_high=0.28, dual_clip=1.5)
GSPO = partial(gspo_loss, clip_low=0.1, clip_high=0.15)
CISPO = partial(cispo_loss, clip_low=0.3, clip_high=0.4)
SAPO = partial(sapo_loss, tau_positive=0.9, tau_negative=1.3)
VESPO = partial(vespo_loss, k_positive=2.0, lambda_positive=3.0, k_negative=1.5, lambda_negative=0.5)
DPPO_TV = partial(dppo_tv_loss, clip_low=0.03, clip_high=0.04, weight_cap=1.5)
DPPO_KL = partial(dppo_kl_loss, clip_low=0.03, clip_high=0.04, weight_cap=1.5)
GMPO = partial(gmpo_loss, clip_low=0.2, clip_high=0.3)

Loss = Callable[..., TokenLoss]
# A naive loss takes one sequence: log-probabilities, the same ones frozen, the old ones, and its advantage.
Naive = Callable[..., list[float]]


def naive_clipped(dual_clip: float | None, lp: list[float], frozen: list[float], old: list[float], A: float):
    losses = []
    for p, o in zip(lp, old, strict=True):
        ratio = math.exp(p - o)
        loss = -min(ratio * A, min(max(ratio, 0.8), 1.28) * A)
        losses.append(min(loss, -dual_clip * A) if dual_clip is not None and A < 0 else loss)
    return losses


def naive_gspo(lp: list[float], frozen: list[float], old: list[float], A: float) -> list[float]:
    ratio = math.exp(sum(p - o for p, o in zip(lp, old, strict=True)) / len(lp))
    return [-min(ratio * A, min(max(ratio, 0.9), 1.15) * A)] * len(lp)


def naive_cispo(lp: list[float], frozen: list[float], old: list[float], A: float) -> list[float]:
    weights = [min(max(math.exp(f - o), 0.7), 1.4) for f, o in zip(frozen, old, strict=True)]
    return [-weight * A * p for weight, p in zip(weights, lp, strict=True)]


def naive_sapo(lp: list[float], frozen: list[float], old: list[float], A: float) -> list[float]:
    tau = 0.9 if A > 0 else 1.3
    return [-4 / (tau * (1 + math.exp(-tau * (math.exp(p - o) - 1)))) * A for p, o in zip(lp, old, strict=True)]


def naive_vespo(lp: list[float], frozen: list[float], old: list[float], A: float) -> list[float]:
    w = math.exp(sum(f - o for f, o in zip(frozen, old, strict=True)))
    k, rate = (2.0, 3.0) if A >= 0 else (1.5, 0.5)
    return [-(w**k) * math.exp(rate * (1 - w)) * A * p for p in lp]


def naive_dppo(kl: bool, lp: list[float], frozen: list[float], old: list[float], A: float) -> list[float]:
    losses = []
    for x, f, o in zip(lp, frozen, old, strict=True):
        p, q = math.exp(f), math.exp(o)
        divergence = abs(p - q)
        if kl:
            divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        outside = (p > q and divergence > 0.04) if A > 0 else (p < q and divergence > 0.03)
        losses.append(0.0 if outside else -min(p / q, 1.5) * A * x)
    return losses


def naive_gmpo(lp: list[float], frozen: list[float], old: list[float], A: float) -> list[float]:
    logs = [min(p - o, 0.3) if A > 0 else max(p - o, -0.2) for p, o in zip(lp, old, strict=True)]
    return [-math.exp(sum(logs) / len(logs)) * A] * len(lp)


def naive_reinforce(lp: list[float], frozen: list[float], old: list[float], A: float) -> list[float]:
    return [-A * p for p in lp]


LOSSES = [
    pytest.param(CLIPPED, partial(naive_clipped, None), id="clipped"),
    pytest.param(DUAL, partial(naive_clipped, 1.5), id="dual"),
    pytest.param(GSPO, naive_gspo, id="gspo"),
    pytest.param(CISPO, naive_cispo, id="cispo"),
    pytest.param(SAPO, naive_sapo, id="sapo"),
    pytest.param(VESPO, naive_vespo, id="vespo"),
    pytest.param(DPPO_TV, partial(naive_dppo, False), id="dppo_tv"),
    pytest.param(DPPO_KL, partial(naive_dppo, True), id="dppo_kl"),
    pytest.param(GMPO, naive_gmpo, id="gmpo"),
    pytest.param(reinforce_loss, naive_reinforce, id="reinforce"),
]


def sequences(batch: Batch) -> list[tuple[int, np.ndarray]]:
    """(row, columns of its trained tokens) of each sequence."""
    found = []
    for row in range(len(LAYOUT)):
        for number in range(1, len(LAYOUT[row]) + 1):
            found.append((row, np.flatnonzero((batch["segments"][row] == number) & batch["mask"][row])))
    return found


def naive_values(naive: Naive, batch: Batch, lp: np.ndarray) -> np.ndarray:
    values = np.zeros(lp.shape)
    for row, columns in sequences(batch):
        sequence = [array[row, columns].astype(float).tolist() for array in (lp, batch["logprobs"])]
        old = batch["old_logprobs"][row, columns].astype(float).tolist()
        values[row, columns] = naive(*sequence, old, float(batch["advantages"][row, columns[0]]))
    return values


def naive_gradient(naive: Naive, batch: Batch, weights: np.ndarray) -> np.ndarray:
    gradient = np.zeros(weights.shape)
    for index in np.ndindex(weights.shape):
        step = np.zeros(weights.shape)
        step[index] = 1e-6
        lp = batch["logprobs"].astype(float)
        ends = [(weights * naive_values(naive, batch, lp + sign * step)).sum() for sign in (1, -1)]
        gradient[index] = (ends[0] - ends[1]) / 2e-6
    return gradient


def weighted(loss: Loss, weights: np.ndarray, batch: Batch, logprobs: jax.Array) -> jax.Array:
    return jnp.sum(weights * loss(Tokens(**{**batch, "logprobs": logprobs})).values)


@pytest.mark.parametrize(("loss", "naive"), LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients_equal_naive_loops(loss: Loss, naive: Naive, seed: int) -> None:
    batch = packed(seed)
    weights = np.random.default_rng(seed).uniform(0.5, 1.5, batch["mask"].shape).astype(np.float32) * batch["mask"]
    values = np.asarray(jax.jit(loss)(Tokens(**batch)).values) * batch["mask"]
    np.testing.assert_allclose(values, naive_values(naive, batch, batch["logprobs"]), rtol=2e-6, atol=2e-6)
    gradient = jax.jit(jax.grad(partial(weighted, loss, weights, batch)))(batch["logprobs"])
    np.testing.assert_allclose(gradient, naive_gradient(naive, batch, weights), rtol=1e-4, atol=1e-6)


def one_token(loss: Loss, ratio: float, advantage: float, logprob: float = -2.0) -> tuple[float, float, float, float]:
    """Loss, its derivative by the log-probability, and whether it was clipped low and high."""

    def value(lp: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        old, A = jnp.full((1, 1), logprob - math.log(ratio)), jnp.full((1, 1), advantage)
        result = loss(Tokens(lp, old, A, jnp.ones((1, 1), jnp.int32), jnp.ones((1, 1), bool)))
        return result.values[0, 0], (result.clipped_low[0, 0], result.clipped_high[0, 0])

    (value_, clips), gradient = jax.value_and_grad(value, has_aux=True)(jnp.full((1, 1), logprob))
    return (float(value_), float(gradient[0, 0]), float(clips[0]), float(clips[1]))


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "expected"),
    [
        (CLIPPED, 1.0, 2.0, (-2.0, -2.0, 0, 0)),
        (CLIPPED, 1.5, 1.0, (-1.28, 0.0, 0, 1)),  # likelier by more than 28 %: enough
        (CLIPPED, 0.5, 1.0, (-0.5, -0.5, 0, 0)),
        (CLIPPED, 1.5, -1.0, (1.5, 1.5, 0, 0)),  # a bad token that became likelier is always corrected
        (CLIPPED, 0.5, -1.0, (0.8, 0.0, 1, 0)),
        (CLIPPED, 5.0, -1.0, (5.0, 5.0, 0, 0)),
        (DUAL, 5.0, -1.0, (1.5, 0.0, 0, 0)),  # neither low nor high
        (DUAL, 1.4, -1.0, (1.4, 1.4, 0, 0)),
        (DUAL, 5.0, 1.0, (-1.28, 0.0, 0, 1)),
        (GSPO, 1.2, 1.0, (-1.15, 0.0, 0, 1)),
        (GSPO, 0.8, -1.0, (0.9, 0.0, 1, 0)),
        (CISPO, 1.0, 1.0, (2.0, -1.0, 0, 0)),  # the weight has no gradient: not -(1 + logprob)
        (CISPO, 2.0, 1.0, (2.8, -1.4, 0, 1)),  # clipped, and still learned from
        (CISPO, 0.5, -1.0, (-1.4, 0.7, 1, 0)),
        (reinforce_loss, 3.0, 0.5, (1.0, -0.5, 0, 0)),
        (SAPO, 1.0, 1.0, (-2 / 0.9, -1.0, 0, 0)),  # the gradient of the surrogate at ratio 1
        (SAPO, 1.0, -1.0, (2 / 1.3, 1.0, 0, 0)),
        (VESPO, 1.0, 1.0, (2.0, -1.0, 0, 0)),
        (VESPO, 2.0, 1.0, (8 * math.exp(-3), -4 * math.exp(-3), 0, 0)),
        (VESPO, 2.0, -1.0, (-2 * 2**1.5 * math.exp(-0.5), 2**1.5 * math.exp(-0.5), 0, 0)),
        (DPPO_TV, 1.2, 1.0, (2.4, -1.2, 0, 0)),  # from e^-2 / 1.2 to e^-2: 0.0226
        (DPPO_TV, 1.5, 1.0, (0.0, 0.0, 0, 1)),  # 0.045
        (DPPO_TV, 4.0, -1.0, (-3.0, 1.5, 0, 0)),  # a bad token that became likelier is corrected, with a capped weight
        (DPPO_TV, 0.8, -1.0, (0.0, 0.0, 1, 0)),  # -0.034
        (DPPO_KL, 1.5, 1.0, (3.0, -1.5, 0, 0)),  # a KL of 0.010
        (DPPO_KL, 3.0, 1.0, (0.0, 0.0, 0, 1)),  # 0.045
        (GMPO, 1.5, 1.0, (-math.exp(0.3), 0.0, 0, 1)),
        (GMPO, 1.2, 1.0, (-1.2, -1.2, 0, 0)),
        (GMPO, 0.5, -1.0, (math.exp(-0.2), 0.0, 1, 0)),
    ],
)
def test_one_token_by_hand(loss: Loss, ratio: float, advantage: float, expected: tuple[float, ...]) -> None:
    np.testing.assert_allclose(one_token(loss, ratio, advantage), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [CLIPPED, DUAL, GSPO, CISPO, SAPO, VESPO, DPPO_TV, DPPO_KL, GMPO])
@pytest.mark.parametrize("ratio", [1e-200, 1e200])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_ratios_stay_finite(loss: Loss, ratio: float, advantage: float) -> None:
    assert np.isfinite(one_token(loss, ratio, advantage)).all()


@cache
def jitted(loss: Loss) -> Loss:
    """The loss as one program for all examples of a test."""
    return jax.jit(loss)


@pytest.mark.parametrize(("loss", "naive"), LOSSES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=20)
def test_packed_rows_equal_sequences_alone(loss: Loss, naive: Naive, seed: int) -> None:
    batch, compute = packed(seed), jitted(loss)
    together = jax.device_get(compute(Tokens(**batch)))
    for row, columns in sequences(batch):
        T = 10  # padded with noise to the same length
        alone = {name: np.full((1, T), 3, array.dtype) for name, array in batch.items()}
        alone["segments"], alone["mask"] = np.zeros((1, T), np.int32), np.zeros((1, T), bool)
        for name, array in batch.items():
            alone[name][0, 2 : 2 + len(columns)] = array[row, columns]
        found = jax.device_get(compute(Tokens(**alone)))
        assert found.stats.keys() == together.stats.keys()
        for result, expected in zip(jax.tree.leaves(found), jax.tree.leaves(together), strict=True):
            np.testing.assert_allclose(result[0, 2 : 2 + len(columns)], expected[row, columns], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("loss", "naive"), LOSSES)
def test_rows_and_padding_may_change_places(loss: Loss, naive: Naive) -> None:
    batch = packed(1)
    order = np.array([2, 0, 3, 1])
    values = np.asarray(loss(Tokens(**batch)).values)
    moved = loss(Tokens(**{name: np.pad(x[order], ((0, 0), (0, 3))) for name, x in batch.items()})).values
    np.testing.assert_allclose(moved[:, :-3], values[order], rtol=1e-6)


def test_rows_split_over_devices_give_the_same_gradient() -> None:
    batch = {name: np.tile(array, (2, 1)) for name, array in packed(2).items()}
    weights = batch["mask"].astype(np.float32)
    one = jax.grad(partial(weighted, GSPO, weights, batch))(batch["logprobs"])
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    spread = {name: jax.device_put(array, split) for name, array in batch.items()}

    @jax.jit
    def gradient(batch: dict[str, jax.Array], logprobs: jax.Array) -> jax.Array:
        return jax.grad(lambda lp: jnp.sum(weights * GSPO(Tokens(**{**batch, "logprobs": lp})).values))(logprobs)

    np.testing.assert_allclose(gradient(spread, spread["logprobs"]), one, rtol=1e-6)
    assert "all-gather" not in str(gradient.lower(spread, spread["logprobs"]).compile().as_text())


def test_a_loss_has_the_options_of_its_line_and_those_of_the_clip() -> None:
    assert POLICY_LOSSES.keys() == recipes.LOSSES.keys()
    for name, kind in recipes.LOSSES.items():
        parameters = inspect.signature(POLICY_LOSSES[name]).parameters.values()
        own = {each.name for each in parameters if each.kind == each.KEYWORD_ONLY} - {"dual_clip"}
        of_choice = {option for option in kind.options if kind.covariant and option.startswith("cov_")}
        assert own == {*kind.options, *(("clip_low", "clip_high") if kind.clips else ())} - of_choice


def test_luspo_is_gspo_with_a_constant_divisor() -> None:
    """LUSPO (arXiv:2602.05261) is mean_i L_i l_i with GSPO's loss l_i of sequence i; ours is that / max_new_tokens."""
    batch, longest = packed(3), 16

    def luspo(logprobs: jax.Array) -> jax.Array:
        losses = []
        for row, columns in sequences(batch):
            ratio = jnp.exp(jnp.mean(logprobs[row, columns] - batch["old_logprobs"][row, columns]))
            A = batch["advantages"][row, columns[0]]
            losses.append(-jnp.minimum(ratio * A, jnp.clip(ratio, 0.9, 1.15) * A) * float(len(columns)))
        return jnp.mean(jnp.stack(losses))

    lengths = np.array([len(columns) for _, columns in sequences(batch)])
    weights = token_weights("constant", lengths, num_sequences=len(lengths), max_new_tokens=longest)
    assert len(set(weights.tolist())) == 1
    ours = jax.jit(
        jax.grad(lambda lp: jnp.sum(weights[0] * batch["mask"] * GSPO(Tokens(**{**batch, "logprobs": lp})).values))
    )
    theirs = jax.jit(jax.grad(luspo))(batch["logprobs"])
    np.testing.assert_allclose(longest * ours(batch["logprobs"]), theirs, rtol=1e-5, atol=1e-7)


def test_tokens_that_the_dual_clip_bounds_are_counted_apart() -> None:
    ratios, advantages = jnp.array([[5.0, 5.0, 1.4, 0.5]]), jnp.array([[-1.0, 1.0, -1.0, -1.0]])
    found = DUAL(
        Tokens(jnp.log(ratios), jnp.zeros((1, 4)), advantages, jnp.ones((1, 4), jnp.int32), jnp.ones((1, 4), bool))
    )
    np.testing.assert_array_equal(found.stats["dual_clipped"], [[1, 0, 0, 0]])
    np.testing.assert_array_equal((found.clipped_low, found.clipped_high), [[[0, 0, 0, 1]], [[0, 1, 0, 0]]])


def test_gspo_counts_sequences_and_not_their_tokens() -> None:
    ratios = jnp.array([[1.2, 1.2, 1.2, 1.0, 0.8, 0.5]])
    segments, mask = jnp.array([[1, 1, 1, 2, 3, 0]], jnp.int32), jnp.array([[True] * 5 + [False]])
    advantages = jnp.array([[1.0, 1.0, 1.0, 1.0, -1.0, -1.0]])
    found = GSPO(Tokens(jnp.log(ratios), jnp.zeros((1, 6)), advantages, segments, mask))
    counts = {name: float(np.sum(np.asarray(values) * np.asarray(mask))) for name, values in found.stats.items()}
    expected = {"sequences": 3, "sequences_clipped_low": 1, "sequences_clipped_high": 1}
    assert counts == pytest.approx(expected)


def test_segment_means_by_hand() -> None:
    x = jnp.array([[1.0, 3.0, 5.0, 100.0, 7.0, 9.0]])
    segments = jnp.array([[2, 2, 6, 6, 0, 1]], jnp.int32)
    mask = jnp.array([[True, True, True, False, False, False]])
    np.testing.assert_allclose(segment_means(x, segments, mask), [[2.0, 2.0, 5.0, 5.0, 0.0, 0.0]])


# Exact expectations over a vocabulary of 8: the gradient by the logits of E_{a ~ policy}[loss(a)], sampling fixed.


def softmax_pair(seed: int) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(seed)
    logits, reference = random.normal(size=(2, 8)).astype(np.float32)
    return jnp.asarray(logits), jax.nn.log_softmax(reference)


def expected_gradient(token_loss: Callable[[jax.Array], jax.Array], logits: jax.Array) -> np.ndarray:
    """token_loss maps the log-probabilities of all 8 tokens [1, 8] to their losses [1, 8]."""
    probabilities = jax.nn.softmax(logits)[None]
    return np.asarray(jax.grad(lambda z: jnp.sum(probabilities * token_loss(jax.nn.log_softmax(z)[None])))(logits))


def kl_gradient(logits: jax.Array, reference: jax.Array, *, reverse: bool) -> np.ndarray:
    def kl(z: jax.Array) -> jax.Array:
        lp = jax.nn.log_softmax(z)
        return jnp.sum(jnp.exp(reference) * (reference - lp)) if reverse else jnp.sum(jnp.exp(lp) * (lp - reference))

    return np.asarray(jax.grad(kl)(logits))


@pytest.mark.parametrize(("kl", "reverse"), [("k2", False), ("k3+", False), ("k3", True)])
@pytest.mark.parametrize("seed", range(3))
def test_expected_gradient_of_a_kl_loss(kl: Literal["k2", "k3", "k3+"], reverse: bool, seed: int) -> None:
    logits, reference = softmax_pair(seed)
    gradient = expected_gradient(lambda lp: kl_loss(kl, lp, reference[None]), logits)
    np.testing.assert_allclose(gradient, kl_gradient(logits, reference, reverse=reverse), atol=1e-6)
    assert np.abs(gradient).max() > 1e-2


def test_k1_as_a_loss_would_teach_nothing() -> None:
    logits, reference = softmax_pair(0)
    np.testing.assert_allclose(expected_gradient(lambda lp: lp - reference[None], logits), np.zeros(8), atol=1e-6)


@pytest.mark.parametrize("loss", [CLIPPED, DUAL, CISPO, GSPO, SAPO, VESPO, DPPO_TV, DPPO_KL, GMPO, reinforce_loss])
@pytest.mark.parametrize("seed", range(3))
def test_on_policy_the_expected_gradient_is_that_of_the_expected_reward(loss: Loss, seed: int) -> None:
    logits, _ = softmax_pair(seed)
    advantages = jnp.asarray(np.random.default_rng(seed).normal(size=(1, 8)).astype(np.float32))
    segments, mask = jnp.arange(1, 9, dtype=jnp.int32)[None], jnp.ones((1, 8), bool)  # 8 sequences of one token
    gradient = expected_gradient(
        lambda lp: loss(Tokens(lp, jax.lax.stop_gradient(lp), advantages, segments, mask)).values, logits
    )
    truth = jax.grad(lambda z: -jnp.sum(jax.nn.softmax(z)[None] * advantages))(logits)
    np.testing.assert_allclose(gradient, truth, atol=1e-6)


def test_kl_values_by_hand() -> None:
    logprobs, reference = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.5, -0.5]])
    np.testing.assert_allclose(kl_loss("k2", logprobs, reference), [[0.125, 0.125]], rtol=1e-6)
    k3 = [[math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5]]
    np.testing.assert_allclose(kl_loss("k3", logprobs, reference), k3, rtol=1e-5)
    np.testing.assert_allclose(kl_loss("k3+", logprobs, reference), k3, rtol=1e-5)
    np.testing.assert_allclose(k3_estimate(logprobs, reference), k3, rtol=1e-5)


def test_k3_plus_reports_at_most_10_and_keeps_its_gradient() -> None:
    value, gradient = jax.value_and_grad(lambda lp: kl_loss("k3+", lp, jnp.zeros((1, 1)))[0, 0])(jnp.array([[-30.0]]))
    assert float(value) == pytest.approx(10.0)
    assert float(gradient[0, 0]) == pytest.approx(-30.0)


def test_the_mean_of_k3_is_the_exact_kl() -> None:
    logits, reference = softmax_pair(5)
    lp = jax.nn.log_softmax(logits)
    exact = jnp.sum(jnp.exp(lp) * (lp - reference))
    np.testing.assert_allclose(jnp.sum(jnp.exp(lp) * k3_estimate(lp, reference)), exact, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"correction": "truncate", "correction_high": 2.0}, [1.0, 0.2, 2.0, 3.0]),
        ({"correction": "mask", "correction_low": 0.5, "correction_high": 2.0}, [1.0, 0.0, 0.0, 3.0]),
        ({"correction": "mask", "correction_low": 0.1, "correction_high": 4.0}, [1.0, 0.2, 3.0, 3.0]),
        # Products: 1 x 0.2 = 0.2 and 3; geometric means: 0.447 and 3.
        ({"correction": "mask", "correction_level": "sequence", "correction_high": 2.0}, [0.2, 0.2, 0.0, 0.0]),
        ({"correction": "truncate", "correction_level": "mean", "correction_high": 2.0}, [0.447, 0.447, 2.0, 2.0]),
        ({"correction": "reject", "correction_level": "mean", "correction_low": 0.4}, [1.0, 0.2, 0.0, 0.0]),
        ({"correction": "reject", "correction_level": "mean", "correction_low": 0.5}, [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_correction_weights_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    """Two sequences, of tokens with weights 1 and 0.2, and 3; the last token is not trained."""
    old, sampled = jnp.log(jnp.array([[0.4, 0.1, 0.9, 0.3]])), jnp.log(jnp.array([[0.4, 0.5, 0.3, 0.1]]))
    recipe = Recipe(advantage=partial(reward_advantages), mean="token", **options)
    segments, mask = jnp.array([[1, 1, 2, 2]], jnp.int32), jnp.array([[True, True, True, False]])
    weights = correction_weights(recipe, old, sampled, segments, mask)
    np.testing.assert_allclose(weights[:, :3], [expected[:3]], rtol=1e-3)


def test_only_stale_sequences_of_negative_advantage_are_left_out() -> None:
    """Four sequences of two tokens; the mean log-probability of the first and third fell by 0.3."""
    fell = jnp.array([[0.5, 0.1, 0.1, 0.1, 0.5, 0.1, -2.0, 0.1]])
    segments = jnp.array([[1, 1, 2, 2, 3, 3, 4, 4]], jnp.int32)
    advantages = jnp.array([[-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0]])
    mask = jnp.ones((1, 8), bool)
    kept = off_policy_mask(Tokens(jnp.zeros((1, 8)), fell, advantages, segments, mask), threshold=0.2)
    np.testing.assert_array_equal(kept, [[0, 0, 1, 1, 1, 1, 1, 1]])
