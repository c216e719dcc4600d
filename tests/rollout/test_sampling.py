import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.algorithms.losses import Tokens, policy_loss
from podium.algorithms.recipes import RECIPES
from podium.models.params import GROUP_AXES
from podium.rollout import sampling
from podium.rollout.request import SamplingParams
from podium.rollout.sampling import fill_row, idle_rows, sample, sample_split
from podium.sharding import ShardingRules, make_mesh

draw = jax.jit(sample)


def rows_of(settings, *, seeds=None, completions=None):
    rows = idle_rows(len(settings))
    for row, one in enumerate(settings):
        seed = row if seeds is None else seeds[row]
        fill_row(rows, row, one, seed=seed, completion=0 if completions is None else completions[row])
    return rows


def params(**changes):
    return SamplingParams(max_new_tokens=1, **changes)


def draw_all(logits, settings, *, positions=None, **row_settings):
    """Tokens, log-probabilities and full log-probabilities, [S] each."""
    S = len(settings)
    positions = np.zeros(S, np.int32) if positions is None else np.asarray(positions, np.int32)
    rows = rows_of(settings, **row_settings)
    return jax.device_get(draw(jnp.asarray(logits, jnp.float32), rows, positions, jnp.ones(S, bool)))


def draw_rows(logits, settings, **row_settings):
    """Tokens and log-probabilities, [S] each."""
    sampled = draw_all(logits, settings, **row_settings)
    return sampled.tokens, sampled.logprobs


def naive_distribution(logits, settings):
    """The distribution of a row, by sorting, in float64."""
    scaled = logits.astype(np.float64) / settings.temperature
    order = np.argsort(-scaled, kind="stable")
    p = np.exp(scaled - scaled.max())
    keep = np.ones(len(p), bool)
    if settings.top_k:
        keep &= scaled >= scaled[order[min(settings.top_k, len(p)) - 1]]
    p = np.where(keep, p, 0.0) / p[keep].sum()
    if settings.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        last = order[np.flatnonzero(before < settings.top_p)[-1]]
        keep &= scaled >= scaled[last]
    keep &= p >= settings.min_p * p.max()
    p = np.where(keep, p, 0.0)
    return p / p.sum()


SETTINGS = [
    params(),
    params(temperature=0.7),
    params(temperature=1.7, top_k=5),
    params(top_k=1),
    params(top_k=10_000),
    params(top_p=0.5),
    params(top_p=0.9, temperature=0.5),
    params(min_p=0.2),
    params(top_k=20, top_p=0.8, min_p=0.05),
]


@pytest.mark.parametrize("vocab", [7, 128, 300])
def test_log_probabilities_are_those_of_the_distribution_drawn_from(vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 2, (50 * len(SETTINGS), vocab)).astype(np.float32)
    settings = SETTINGS * 50
    tokens, logprobs = draw_rows(logits, settings)
    for row, one in enumerate(settings):
        expected = naive_distribution(logits[row], one)
        assert expected[tokens[row]] > 0, f"row {row}: {one} drew a token outside its support"
        assert logprobs[row] == pytest.approx(math.log(expected[tokens[row]]), abs=2e-6)


@pytest.mark.parametrize("vocab", [7, 128, 300])
def test_full_log_probabilities_are_those_before_truncation(vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 2, (50 * len(SETTINGS), vocab)).astype(np.float32)
    settings = SETTINGS * 50
    sampled = draw_all(logits, settings)
    for row, each in enumerate(settings):
        full = naive_distribution(logits[row], params(temperature=each.temperature))
        assert sampled.full_logprobs[row] == pytest.approx(math.log(full[sampled.tokens[row]]), abs=2e-6)
        if (each.top_k, each.top_p, each.min_p) == (0, 1.0, 0.0):
            assert sampled.full_logprobs[row] == sampled.logprobs[row]


def test_both_log_probabilities_of_a_known_distribution_cut_to_two_tokens():
    logits = np.tile(np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32)), (100, 1))
    sampled = draw_all(logits, [params(top_k=2)] * 100)
    assert set(sampled.tokens.tolist()) == {0, 1}
    np.testing.assert_allclose(np.exp(sampled.logprobs), np.array([0.625, 0.375])[sampled.tokens], rtol=1e-5)
    np.testing.assert_allclose(np.exp(sampled.full_logprobs), np.array([0.5, 0.3])[sampled.tokens], rtol=1e-5)


def test_top_p_is_of_the_tokens_that_top_k_keeps():
    """Of 0.4, 0.3, 0.2 and 0.1 top-k keeps two, of which the first has 4/7: top-p 0.55 needs no other."""
    logits = np.tile(np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32)), (100, 1))
    sampled = draw_all(logits, [params(top_k=2, top_p=0.55)] * 100)
    assert set(sampled.tokens.tolist()) == {0}
    np.testing.assert_allclose(np.exp(sampled.full_logprobs), 0.4, rtol=1e-5)


def test_a_negative_token_of_an_unchanged_policy_has_its_gradient_under_truncation():
    """To the truncated log-probability the ratio would be the share kept, below 1 - clip_low: clipped for good."""
    logits = jnp.tile(jnp.linspace(0.0, 0.1, 50), (20, 1))
    sampled = draw_all(logits, [params(top_p=0.5)] * 20)
    tokens, segments, mask = sampled.tokens[None], np.ones((1, 20), np.int32), np.ones((1, 20), bool)

    def stopped(sampled_logprobs):
        def loss(logits):
            logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits)[None], tokens[..., None], axis=2)[..., 0]
            batch = {"advantages": jnp.full((1, 20), -1.0), "segments": segments, "mask": mask}
            values, stats = policy_loss(RECIPES["grpo"](), Tokens(logprobs, sampled_logprobs[None], **batch))
            return jnp.sum(values), (values, stats["clip_low"])

        (_, (values, clipped)), gradient = jax.value_and_grad(loss, has_aux=True)(logits)
        return np.asarray(values), np.asarray(clipped), np.all(np.asarray(gradient) == 0, axis=1)

    values, clipped, no_gradient = stopped(sampled.full_logprobs)
    np.testing.assert_allclose(values, 1.0, rtol=1e-5)  # -ratio x advantage
    assert not clipped.any() and not no_gradient.any()
    assert stopped(sampled.logprobs)[2].all()


@functools.cache
def chi_square_bound(freedom, normal=4.27):
    """About the 1 - 1e-5 quantile (Wilson-Hilferty): seeds are fixed, so this only says how good is good enough."""
    return freedom * (1 - 2 / (9 * freedom) + normal * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square_of(tokens, expected):
    """The statistic of draws, and its number of cells."""
    counts = np.bincount(tokens, minlength=len(expected))
    assert not counts[expected == 0].any()
    large = expected >= 5
    rest = expected[~large].sum(), counts[~large].sum()  # what is rare, as one cell
    observed, wanted = np.append(counts[large], rest[1]), np.append(expected[large], max(rest[0], 1e-9))
    return float(np.sum((observed - wanted) ** 2 / wanted)), len(wanted)


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[1], SETTINGS[2], SETTINGS[5], SETTINGS[7], SETTINGS[8]])
def test_tokens_are_distributed_as_they_should_be(settings):
    draws, vocab = 20_000, 150  # two blocks, the second one not full
    logits = np.random.default_rng(1).normal(0, 1.5, vocab).astype(np.float32)
    tokens, _ = draw_rows(np.tile(logits, (draws, 1)), [settings] * draws)
    expected = draws * naive_distribution(logits, settings)
    chi_square, cells = chi_square_of(tokens, expected)
    assert chi_square < chi_square_bound(cells)


def test_positions_and_completions_draw_anew():
    draws, logits = 4000, np.zeros((4000, 10), np.float32)
    by_position, _ = draw_rows(logits, [params()] * draws, seeds=[5] * draws, positions=np.arange(draws))
    by_completion, _ = draw_rows(logits, [params()] * draws, seeds=[5] * draws, completions=np.arange(draws))
    for tokens in (by_position, by_completion):
        counts = np.bincount(tokens, minlength=10)
        assert np.sum((counts - 400) ** 2 / 400) < chi_square_bound(9)
    assert np.mean(by_position == by_completion) < 0.2


@pytest.mark.parametrize("apart", [1, 2, 3])
def test_neighbouring_positions_draw_independently(apart):
    """Each pair of tokens is as frequent as any other, at even and at odd positions."""
    draws, vocab = 8000, 6
    tokens, _ = draw_rows(
        np.zeros((draws, vocab), np.float32), [params()] * draws, positions=np.arange(draws), seeds=[3] * draws
    )
    for parity in (0, 1):
        assert_independent(tokens[parity:-apart:2], tokens[parity + apart :: 2], vocab)


def test_completions_of_a_prompt_draw_independently_at_every_position():
    draws, vocab = 8000, 6
    logits = np.zeros((draws, vocab), np.float32)
    places = {"positions": np.arange(draws), "seeds": [3] * draws}
    one, other, last = (
        draw_rows(logits, [params()] * draws, completions=[each] * draws, **places)[0] for each in range(3)
    )
    for parity in (0, 1):
        assert_independent(one[parity::2], other[parity::2], vocab)
        assert_independent(other[parity::2], last[parity::2], vocab)


def assert_independent(one, other, vocab):
    """Whether the pairs of two lists of evenly drawn tokens are evenly drawn, too."""
    size = min(len(one), len(other))
    chi_square, cells = chi_square_of(one[:size] * vocab + other[:size], np.full(vocab**2, size / vocab**2))
    assert chi_square < chi_square_bound(cells)


def test_seeds_that_differ_above_32_bits_draw_differently():
    seeds = [7 + (high << 32) for high in range(64)]
    tokens, _ = draw_rows(np.zeros((64, 1000), np.float32), [params()] * 64, seeds=seeds)
    assert len(set(tokens.tolist())) > 50


def test_a_negative_seed_is_a_seed():
    tokens, _ = draw_rows(np.zeros((2, 1000), np.float32), [params()] * 2, seeds=[-1, 2**64 - 1])
    assert tokens[0] == tokens[1]


def test_a_row_draws_the_same_whatever_stands_beside_it():
    logits = np.random.default_rng(2).normal(0, 2, (len(SETTINGS), 300)).astype(np.float32)
    together = draw_all(logits, SETTINGS)
    for row, one in enumerate(SETTINGS):
        crowd = [params(temperature=0.0)] * len(SETTINGS)
        crowd[-1] = one
        others = np.zeros_like(logits)
        others[-1] = logits[row]
        alone = draw_all(others, crowd, seeds=[row] * len(crowd))
        assert [x[-1] for x in alone] == [x[row] for x in together]


def test_rows_that_are_not_live_cost_no_search_and_change_no_other_row():
    logits = np.random.default_rng(3).normal(0, 2, (2, 300)).astype(np.float32)
    rows = rows_of([params(), params(top_k=3)])
    both = draw(logits, rows, np.zeros(2, np.int32), jnp.array([True, True]))
    one = draw(logits, rows, np.zeros(2, np.int32), jnp.array([True, False]))
    assert both.tokens[0] == one.tokens[0]
    jaxpr = str(jax.make_jaxpr(sample)(logits, rows, np.zeros(2, np.int32), np.ones(2, bool)))
    assert " sort[" not in jaxpr.replace("argsort", "")
    assert jaxpr.count("cond[") == 2  # top-k and top-p are searched for only where a live row asks


def test_greedy_takes_the_first_of_the_likeliest_with_its_full_log_probability():
    logits = np.random.default_rng(4).normal(0, 2, (3, 300)).astype(np.float32)
    logits[1, [40, 41, 260]] = 9.0
    tokens, logprobs, full_logprobs, _ = draw_all(logits, [params(temperature=0.0)] * 3)
    assert full_logprobs.tolist() == logprobs.tolist()
    assert tokens.tolist() == np.argmax(logits, axis=1).tolist()
    assert tokens[1] == 40
    full = logits - np.log(np.sum(np.exp(logits.astype(np.float64)), axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs, full[np.arange(3), tokens], atol=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-3, 1.0, 1e6])
def test_extreme_logits_give_possible_tokens_and_finite_log_probabilities(temperature):
    logits = np.full((4, 300), -1e30, np.float32)
    logits[0, 299] = 0.0  # one possible token, the last
    logits[1, [3, 200]] = 1e30
    logits[2] = 5.0  # all equal
    logits[3] = -1e30  # all equally impossible: equally likely
    tokens, logprobs = draw_rows(logits, [params(temperature=temperature)] * 4)
    assert np.isfinite(logprobs).all()
    if temperature <= 1:
        assert tokens[0] == 299
        assert tokens[1] in (3, 200)
    if temperature > 0:
        np.testing.assert_allclose(logprobs[2:], -math.log(300), atol=2e-6)


def test_ties_with_the_last_token_kept_are_kept():
    logits = np.zeros((400, 6), np.float32)
    logits[:, :2] = 3.0, 1.0
    logits[:, 5] = -2.0
    tokens, _ = draw_rows(logits, [params(top_k=3)] * 400)
    assert set(tokens.tolist()) == {0, 1, 2, 3, 4}


def test_not_a_number_still_gives_a_token_of_the_vocabulary():
    tokens, _ = draw_rows(np.full((2, 130), np.nan, np.float32), [params(), params(temperature=0.0)])
    assert all(0 <= token < 130 for token in tokens)


@pytest.mark.parametrize("uniform", [0.0, 2.0**-24, 0.5, 1 - 2.0**-24])
def test_the_inverse_never_lands_on_a_weight_of_zero(uniform):
    rng = np.random.default_rng(5)
    weights = np.where(rng.random((500, 97)) < 0.7, 0.0, rng.random((500, 97))).astype(np.float32)
    weights[:, 96] = 0.0
    weights[np.arange(500), rng.integers(0, 96, 500)] = 1e-30  # at least one, perhaps a tiny one, in each row
    uniforms, nothing = jnp.full(500, uniform, jnp.float32), jnp.zeros(500)
    index, _, possible = jax.device_get(jax.jit(sampling._invert)(weights, uniforms, nothing, weights.sum(axis=1)))
    assert possible.all()
    assert (weights[np.arange(500), index] > 0).all()


def test_the_threshold_is_the_kth_largest_value():
    values = np.random.default_rng(6).normal(0, 3, (20, 513)).astype(np.float32)
    wanted = np.arange(1, 21, dtype=np.float32) * 25
    found = np.asarray(jax.jit(sampling._threshold)(values, np.ones_like(values), wanted))
    expected = [np.sort(row)[::-1][int(k) - 1] for row, k in zip(values, wanted, strict=True)]
    assert found.tolist() == expected
    everything = jax.jit(sampling._threshold)(values, np.ones_like(values), np.full(20, 514, np.float32))
    assert np.isneginf(everything).all()


# Over a vocabulary that 8 devices share, in one group or in two.


@functools.cache
def split_draw(mesh):
    rules = ShardingRules(make_mesh(mesh), GROUP_AXES)
    return rules, jax.jit(functools.partial(sample_split, rules=rules))


def draw_split(mesh, logits, settings, *, positions=None, **row_settings):
    """As `draw_all`, of logits [S, V] that devices share."""
    S = len(settings)
    rules, draw = split_draw(mesh)
    positions = np.zeros(S, np.int32) if positions is None else np.asarray(positions, np.int32)
    placed = jax.device_put(logits.astype(np.float32), rules.sharding("rows", "logits"))
    return jax.device_get(draw(placed, rows_of(settings, **row_settings), positions, jnp.ones(S, bool)))


def padded_logits(S, vocab, spread):
    """[S, 1024] with nothing behind the vocabulary."""
    logits = np.random.default_rng(5).normal(0, spread, (S, 1024)).astype(np.float32)
    logits[:, vocab:] = -np.inf
    return logits


@pytest.mark.parametrize("mesh", ["fsdp:4,tp:2", "dp:2,fsdp:2,tp:2"])
def test_a_shared_vocabulary_draws_what_one_device_draws(mesh):
    settings = [*SETTINGS, params(temperature=0.0)] * 8
    logits, positions = padded_logits(len(settings), 1000, 2.0), np.arange(len(settings))
    whole = draw_all(logits[:, :1000], settings, positions=positions)
    found = draw_split(mesh, logits, settings, positions=positions)
    assert found.tokens.tolist() == whole.tokens.tolist()
    np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=1e-5)
    np.testing.assert_allclose(found.full_logprobs, whole.full_logprobs, atol=1e-5)


def test_the_first_of_equals_is_greedy_over_a_shared_vocabulary():
    logits = np.zeros((2, 1024), np.float32)
    logits[0, [300, 700]] = 3.0
    logits[1, 1000] = 5.0
    assert draw_split("fsdp:4,tp:2", logits, [params(temperature=0.0)] * 2).tokens.tolist() == [300, 1000]


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[1], SETTINGS[2], SETTINGS[5], SETTINGS[7], SETTINGS[8]])
def test_a_shared_vocabulary_is_drawn_from_exactly(settings):
    """512 draws of each of 20 seeds; none is further off than one in a thousand is by chance."""
    draws, seeds, vocab = 512, 20, 1000
    one = padded_logits(1, vocab, 3.0)
    rows = {"seeds": np.repeat(range(seeds), draws).tolist(), "completions": [*range(draws)] * seeds}
    found = draw_split("fsdp:4,tp:2", np.repeat(one, draws * seeds, axis=0), [settings] * draws * seeds, **rows)
    expected = naive_distribution(one[0, :vocab], settings)
    np.testing.assert_allclose(found.logprobs, np.log(expected[found.tokens]), atol=2e-5)
    for tokens in found.tokens.reshape(seeds, draws):
        chi_square, cells = chi_square_of(tokens, draws * expected)
        assert chi_square < chi_square_bound(cells, 3.09)
