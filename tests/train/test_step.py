import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import (
    DECODER,
    host,
    make_config,
    make_params,
    make_samples,
    make_train_settings,
    recipe_of,
    rules_of,
    sgd,
    sizes,
)

import podium.sharding as sharding
from podium.models.attention.packed_attention import causal_attention
from podium.models.decoder import PassSettings, forward, head_weights
from podium.models.logprobs import logits_at
from podium.run.resolve import resolve_recipe
from podium.run.token_sizes import row_groups
from podium.train.batches.batch import Sample, make_batch, take
from podium.train.state import init_state
from podium.train.step import TrainSettings, make_score, make_train_step, shard_batch

GRADIENT_TOLERANCE = 1e-5  # of a gradient's norm, float32
BF16_TOLERANCE = 0.05  # of a gradient's norm, and nat of a log-probability: bfloat16 has 8 bits
SCALE_TOLERANCE = 1e-5  # of the largest log-probability
SAMPLES = make_samples(groups=4, completions=4)
ROW_TOKENS = 24
MESHES = {
    1: ("dp:1",),
    2: ("fsdp:2", "dp:2", "tp:2", "sp:2"),
    8: ("1,8,1", "2,4,1", "2,2,2", "8,1,1", "fsdp:2,sp:4", "fsdp:2,sp:2,tp:2", "dp:2,fsdp:2,sp:2"),
}
SHORTLY = ("dp:1", "fsdp:2,sp:2,tp:2")
"""Those of the short suite; that of settings of memory splits dp."""


def batch_of(samples=SAMPLES, *, rows=8, packing="shared_prompts", row_tokens=ROW_TOKENS):
    return make_batch(samples, sizes(row_tokens=row_tokens, rows=rows, max_rows=16, packing=packing))


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """SAMPLES with log-probabilities near those of the model: ratios about 1, some of them clipped."""
    random = np.random.default_rng(1)
    return [
        dataclasses.replace(each, sampled_logprobs=(x + random.normal(0, 0.15, x.shape)).astype(np.float32))
        for each, x in zip(SAMPLES, naive_logprobs(), strict=True)
    ]


@functools.cache
def compiled(mesh: str, devices: int, algorithm: str, changes: tuple) -> tuple[TrainSettings, Callable]:
    """Settings and the update by plain descent at rate 1, made once: packing and contents compile nothing anew."""
    settings = make_train_settings(rules_of(mesh, devices), **dict(changes))
    return settings, make_train_step(settings, recipe_of(make_config(algorithm=json.loads(algorithm))), sgd(1.0))


def update(state, batch, *, mesh="dp:1", devices=1, algorithm=None, **changes):
    settings, step = compiled(mesh, devices, json.dumps(algorithm or {}), tuple(changes.items()))
    state, metrics = step(state, shard_batch(batch, settings.computing))
    return state, {name: float(value) for name, value in metrics.items()}


def gradient(samples, *, rows=8, packing="shared_prompts", mesh="dp:1", devices=1, batch=None, **changes):
    """One update by plain descent at rate 1: the gradient by parameter, and the metrics."""
    params = make_params(rules_of(mesh, devices))
    before = host(params)
    batch = batch or batch_of(samples, rows=rows, packing=packing)[0]
    state, metrics = update(init_state(params, sgd()), batch, mesh=mesh, devices=devices, **changes)
    after = host(state.params)
    return {name: before[name] - after[name] for name in before}, metrics


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Norm of the difference over the norm, of the worst parameter."""
    return max(float(np.linalg.norm(found[name] - x) / np.linalg.norm(x)) for name, x in expected.items())


def total_distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Norm of the difference of all parameters together."""
    return math.sqrt(sum(float(np.sum(np.square(found[name] - x))) for name, x in expected.items()))


@functools.cache
def naive_logits() -> list[np.ndarray]:
    """Logits [n, V] float64 from which each sample's tokens are predicted: one sequence per row, no packing."""
    rules = rules_of()
    tokens = np.zeros((len(SAMPLES), ROW_TOKENS), np.int32)
    for row, each in zip(tokens, SAMPLES, strict=True):
        row[: len(each.prompt) + len(each.tokens)] = (*each.prompt, *each.tokens)
    mask = jnp.tri(ROW_TOKENS, dtype=bool)[None]

    def attend(kv, layer, q, k, v):
        return kv, causal_attention(q, k, v, mask)

    @jax.jit
    def compute(params):
        positions, dtype = jnp.broadcast_to(jnp.arange(ROW_TOKENS)[None], tokens.shape), jnp.dtype("float32")
        hidden, _, _ = forward(
            params,
            jnp.array(tokens),
            positions,
            attend,
            settings=PassSettings(config=DECODER, rules=rules, dtype=dtype),
        )
        return logits_at(hidden, head_weights(params, rules, dtype), 1.0)

    logits = np.asarray(compute(make_params(rules)), np.float64)
    starts = [len(each.prompt) - 1 for each in SAMPLES]
    return [x[start : start + len(each.tokens)] for x, start, each in zip(logits, starts, SAMPLES, strict=True)]


def naive_softmax(temperature: float = 1.0) -> list[np.ndarray]:
    """The logarithm of the full softmax of each sample's logits, [n, V]."""
    shifted = [(x - x.max(axis=-1, keepdims=True)) / temperature for x in naive_logits()]
    return [x - np.log(np.exp(x).sum(axis=-1, keepdims=True)) for x in shifted]


def naive_logprobs(temperature: float = 1.0) -> list[np.ndarray]:
    """The log-probabilities of each sample's tokens, [n]."""
    tables = naive_softmax(temperature)
    return [table[np.arange(len(each.tokens)), each.tokens] for table, each in zip(tables, SAMPLES, strict=True)]


@pytest.fixture(scope="module")
def expected(samples):
    """The gradient on one device, one row per sample, everything at once."""
    return gradient(samples, rows=16, packing="none")


@pytest.mark.parametrize("packing", ["none", "sequences", "shared_prompts"])
@pytest.mark.parametrize(
    ("devices", "mesh"),
    [
        pytest.param(n, mesh, marks=[] if mesh in SHORTLY else [pytest.mark.long])
        for n, meshes in MESHES.items()
        for mesh in meshes
    ],
)
def test_gradients_do_not_depend_on_devices_and_packing(samples, expected, devices, mesh, packing):
    found, metrics = gradient(samples, mesh=mesh, devices=devices, packing=packing)
    assert distance(found, expected[0]) <= GRADIENT_TOLERANCE
    for name, value in expected[1].items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("packing", ["none", "shared_prompts"])
@pytest.mark.parametrize(("rows", "micro_batches"), [(16, 1), (8, 2), (4, 4)])
def test_gradients_do_not_depend_on_how_many_micro_batches_there_are(samples, expected, rows, micro_batches, packing):
    batch, _ = batch_of(samples, rows=rows, packing=packing)
    assert batch.tokens.shape[0] == micro_batches
    assert packing != "none" or int(batch.num_micro_batches) == micro_batches
    found, metrics = gradient(samples, batch=batch)
    assert distance(found, expected[0]) <= GRADIENT_TOLERANCE
    assert metrics["gradient_norm"] == pytest.approx(expected[1]["gradient_norm"], rel=1e-5)
    assert metrics["logprob_gap_max"] == pytest.approx(expected[1]["logprob_gap_max"], rel=1e-5)


def test_a_lone_micro_batch_has_no_second_tree_of_gradients():
    """Where there are several, their sum lives beside the gradient that is added to it."""
    settings, step = compiled("dp:1", 1, "{}", ())
    state = init_state(make_params(settings.computing), sgd())
    several, _ = batch_of(rows=1, row_tokens=ROW_TOKENS, packing="none")
    alone = jax.tree.map(lambda x: x[:1] if x.ndim == 3 else x, several)
    taken = [
        step.lower(state, shard_batch(batch, settings.computing)).compile().memory_analysis().temp_size_in_bytes
        for batch in (several, alone)
    ]
    assert taken[0] - taken[1] >= 0.9 * sum(x.nbytes for x in state.params.values())


@pytest.mark.parametrize(
    ("devices", "mesh", "program"),
    [
        (2, "fsdp:2", {"remat": "products", "row_groups": 2, "attention": "reference"}),
        (4, "fsdp:2,sp:2", {"remat": "offload", "row_groups": 2, "head_chunk_tokens": 16}),
        (1, "dp:1", {"head": "fused", "head_chunk_tokens": 128}),
        (8, "2,2,2", {"remat": "layer", "head_chunk_tokens": 56}),  # 28 of 24 columns: the last chunk is padded
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                (1, "dp:1", {"remat": "offload", "row_groups": 4}),
                (2, "fsdp:2", {"remat": "products", "row_groups": 2}),
                (8, "1,8,1", {"attention": "reference"}),
                (1, "dp:1", {"remat": "layer"}),
                (1, "dp:1", {"remat": "offload"}),
                (8, "2,2,2", {"remat": "layer", "row_groups": 2}),
                (4, "sp:4", {"attention": "reference", "remat": "layer"}),
                (1, "dp:1", {"remat": "none", "row_groups": 8}),
                (1, "dp:1", {"head_chunk_tokens": 8}),
                (4, "fsdp:2,sp:2", {"head": "fused", "remat": "layer"}),
            )
        ),
    ],
)
def test_memory_settings_do_not_change_gradients(samples, expected, devices, mesh, program):
    found, _ = gradient(samples, mesh=mesh, devices=devices, rows=8, **program)
    assert distance(found, expected[0]) <= GRADIENT_TOLERANCE


def test_gradients_are_the_same_where_devices_exchange_them_in_several_steps(samples, expected, monkeypatch):
    """As on wide slices; the layers compute some rows at a time."""
    monkeypatch.setattr(sharding, "MOST_AT_ONCE", 2)
    monkeypatch.setattr(sharding, "MOST_GATHERED", 2)
    monkeypatch.setattr(sharding.ShardingRules, "most_parts", 2)
    found, _ = gradient(samples, mesh="fsdp:4,sp:2", devices=8, rows=16, row_groups=2, remat="layer")
    assert distance(found, expected[0]) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    ("limit", "groups"), [(None, 1), (1000, 1), (120, 1), (119, 2), (60, 2), (40, 3), (20, 6), (1, 6)]
)
def test_groups_of_rows_are_equal_and_as_few_as_hold_no_more_tokens_than_asked(limit, groups):
    config = make_config(train={"row_tokens": 20, "rows_per_device": 6, "layer_chunk_tokens": limit})
    assert row_groups(config, resolve_recipe(config)) == groups


@pytest.mark.parametrize(
    "algorithm",
    [
        {"recipe": "gspo", "clip_high": 0.05, "clip_low": 0.05},
        pytest.param({"entropy_bonus": 0.1}, marks=pytest.mark.long),
    ],
)
def test_gradients_of_sequence_ratios_and_entropy_do_not_depend_on_the_packing(samples, algorithm):
    same_advantages = samples
    alone, _ = gradient(same_advantages, rows=16, packing="none", algorithm=algorithm)
    found, _ = gradient(same_advantages, mesh="2,2,2", devices=8, rows=8, algorithm=algorithm)
    assert distance(found, alone) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("rows", [2, pytest.param(16, marks=pytest.mark.long)])
def test_the_entropy_bonus_is_a_mean_over_tokens_whatever_the_weights_and_the_micro_batches(samples, rows):
    without, plain = gradient(samples, rows=rows)
    found, metrics = gradient(samples, rows=rows, algorithm={"entropy_bonus": 0.5})
    assert metrics["loss"] - plain["loss"] == pytest.approx(-0.5 * plain["entropy"], rel=1e-4)
    heavier = [dataclasses.replace(each, weights=2 * each.weights) for each in samples]
    other = [gradient(heavier, rows=rows, algorithm=algorithm)[0] for algorithm in ({"entropy_bonus": 0.5}, {})]
    bonus = {name: found[name] - without[name] for name in found}
    assert distance({name: other[0][name] - other[1][name] for name in found}, bonus) <= 1e-3


def test_bfloat16_gradients_are_near_those_of_float32(samples):
    """The loss has no clip: there a rounding decides whether a token has a gradient at all."""
    settings = {"rows": 8, "algorithm": {"recipe": "reinforce"}}
    expected, exact = gradient(samples, **settings)
    found, metrics = gradient(samples, **settings, dtype="bfloat16")
    error = np.sqrt(sum(np.sum(np.square(found[name] - x)) for name, x in expected.items()))
    assert 1e-4 < error / exact["gradient_norm"] <= BF16_TOLERANCE
    assert metrics["entropy"] == pytest.approx(exact["entropy"], abs=BF16_TOLERANCE)


@pytest.mark.parametrize(("devices", "mesh"), [(1, "dp:1"), pytest.param(8, "2,2,2", marks=pytest.mark.long)])
def test_the_heads_gradient_is_summed_over_chunks_in_the_format_that_is_asked_for(samples, devices, mesh):
    """One token at a time, and all of a device's at once: the same products, with sums of 24 shares or of one."""
    settings = {"rows": 8, "algorithm": {"recipe": "reinforce"}, "dtype": "bfloat16"}
    off = {}
    for dtype in ("float32", "bfloat16"):
        settings["reduce_dtype"] = dtype
        (one, _), (many, _) = (
            gradient(samples, mesh=mesh, devices=devices, head_chunk_tokens=chunk, **settings) for chunk in (1024, 1)
        )
        off[dtype] = float(np.linalg.norm(many["embed"] - one["embed"]) / np.linalg.norm(one["embed"]))
    assert off["float32"] < 1e-6
    assert off["bfloat16"] > 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"row_groups": 2, "remat": "layer"},
        *(pytest.param(each, marks=pytest.mark.long) for each in ({}, {"remat": "products"})),
    ],
)
def test_float32_shares_change_nothing_but_the_rounding_of_sums(samples, changes):
    settings = {"rows": 8, "algorithm": {"recipe": "reinforce"}, "dtype": "bfloat16", **changes}
    wide, _ = gradient(samples, **settings)
    narrow, _ = gradient(samples, **settings, reduce_dtype="bfloat16")
    exact, _ = gradient(samples, rows=8, algorithm={"recipe": "reinforce"})
    assert distance(wide, narrow) <= 2**-7  # of single numbers: the least step of bfloat16 is 2^-8
    assert total_distance(wide, exact) <= total_distance(narrow, exact) * 1.01


def products(jaxpr) -> Iterator[Any]:
    """The equations of all matrix products in a jaxpr, those of inner ones too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            yield from products(inner) if hasattr(inner, "eqns") else ()


def products_of_an_update(**changes) -> list[Any]:
    _, step = compiled("dp:1", 1, "{}", tuple(changes.items()))
    state = init_state(make_params(rules_of()), sgd())
    return list(products(step.trace(state, batch_of()[0]).jaxpr.jaxpr))


@pytest.mark.parametrize(("head_dtype", "expected"), [(None, "bfloat16"), ("float32", "float32")])
def test_the_heads_operands_are_in_the_format_that_is_asked_for(head_dtype, expected):
    changes = {"dtype": "bfloat16", "head_dtype": head_dtype}
    found = products_of_an_update(**changes)
    heads = [each for each in found if any(DECODER.vocab in x.aval.shape for x in (*each.invars, *each.outvars))]
    assert len(heads) >= 3  # forward, and two backward
    assert {str(x.aval.dtype) for each in heads for x in each.invars} == {expected}


def test_every_product_of_float32_operands_is_made_in_full():
    """Else a TPU makes it of bfloat16, and a GPU of TF32."""
    found = products_of_an_update()
    assert len(found) > 8
    assert all(each.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2 for each in found)


def test_the_gradient_is_that_of_a_loss_written_down_naively(samples):
    """REINFORCE: sum of weight x advantage x log-probability, by finite differences along the gradient."""
    algorithm = {"recipe": "reinforce"}
    found, metrics = gradient(samples, rows=8, algorithm=algorithm)
    loss = -sum(
        float((each.weights * each.advantages * logprobs).sum())
        for each, logprobs in zip(samples, naive_logprobs(), strict=True)
    )
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in found.values()))
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["update_norm"] == pytest.approx(norm, rel=1e-4)
    moved = loss_after(samples, found, 1e-2 / norm, algorithm) - loss_after(samples, found, -1e-2 / norm, algorithm)
    assert moved / 2e-2 == pytest.approx(-norm, rel=1e-2)


def loss_after(samples, direction, size, algorithm) -> float:
    """The loss at the parameters moved by `-size * direction`."""
    params = {name: value - size * direction[name] for name, value in make_params(rules_of()).items()}
    _, metrics = update(init_state(params, sgd()), batch_of(samples)[0], algorithm=algorithm)
    return metrics["loss"]


@functools.cache
def scorer(mesh: str, devices: int, chunk: int) -> tuple[TrainSettings, Callable]:
    settings = make_train_settings(rules_of(mesh, devices), head_chunk_tokens=chunk)
    return settings, make_score(settings)


@pytest.mark.parametrize("packing", ["none", "sequences", "shared_prompts"])
@pytest.mark.parametrize(("devices", "mesh", "chunk"), [(1, "dp:1", 1024), (8, "2,2,2", 8)])
def test_scores_are_those_of_a_full_softmax_of_every_sequence_alone(packing, devices, mesh, chunk):
    settings, score = scorer(mesh, devices, chunk)
    batch, places = batch_of(packing=packing)
    scored = score(make_params(rules_of(mesh, devices)), shard_batch(batch, settings.computing))
    for found, expected in zip(take(np.asarray(scored), places), naive_logprobs(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=SCALE_TOLERANCE * np.abs(expected).max())


def test_scores_are_under_the_sampling_temperature():
    rules = rules_of()
    batch, places = batch_of(packing="sequences")
    settings = make_train_settings(rules, temperature=0.5)
    scored = make_score(settings)(make_params(rules), shard_batch(batch, settings.computing))
    for found, expected in zip(take(np.asarray(scored), places), naive_logprobs(0.5), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=SCALE_TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize(("rows", "loops"), [(2, True), (16, False)])
def test_a_single_micro_batch_is_scored_without_a_loop_that_xla_would_run_half_of_twice(rows, loops):
    _, score = scorer("dp:1", 1, 1024)
    batch, _ = batch_of(rows=rows, packing="none")
    assert (len(batch.tokens) > 1) is loops
    assert ("while" in str(score.trace(make_params(rules_of()), batch).jaxpr)) is loops


def test_entropy_and_gap_are_means_over_the_trained_tokens(samples):
    _, metrics = gradient(samples, rows=4)
    entropy = np.concatenate([-np.sum(np.exp(table) * table, axis=-1) for table in naive_softmax()])
    pairs = zip(naive_logprobs(), samples, strict=True)
    gaps = np.concatenate([np.abs(logprobs - each.sampled_logprobs) for logprobs, each in pairs])
    assert metrics["entropy"] == pytest.approx(entropy.mean(), rel=1e-5)
    assert metrics["logprob_gap"] == pytest.approx(gaps.mean(), rel=1e-4)
    assert metrics["logprob_gap_max"] == pytest.approx(gaps.max(), rel=1e-4)


def test_padding_contributes_nothing(samples, expected):
    """Twice the room, and padding tokens that would be far from their targets if anything read them."""
    batch, _ = make_batch(samples, sizes(row_tokens=2 * ROW_TOKENS, rows=16, max_rows=32, packing="none"))
    padding = np.asarray(batch.segments) == 0
    changes = {"tokens": 7, "targets": 9, "positions": 3, "sampled_logprobs": -1e3, "advantages": 1e3}
    fields = {name: np.asarray(getattr(batch, name)) for name in changes}
    filled = {name: np.where(padding, x.dtype.type(changes[name]), x) for name, x in fields.items()}
    found, metrics = gradient(samples, batch=dataclasses.replace(batch, **filled))
    assert distance(found, expected[0]) <= GRADIENT_TOLERANCE
    assert metrics == pytest.approx(expected[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("devices", "mesh"), [(1, "dp:1"), (8, "2,2,2"), pytest.param(8, "1,8,1", marks=pytest.mark.long)]
)
def test_programs_are_traced_once_whatever_the_batch_holds(devices, mesh):
    settings, step = compiled.__wrapped__(mesh, devices, "{}", ())  # one that no other test has called
    score = make_score(settings)
    state = init_state(make_params(rules_of(mesh, devices)), sgd())
    shardings = {name: value.sharding for name, value in state.params.items()}
    for count in (16, 5, 1):
        batch = shard_batch(batch_of(SAMPLES[:count], rows=8)[0], settings.computing)
        score(state.params, batch)
        state, _ = step(state, batch)
    assert (score._cache_size(), step._cache_size()) == (1, 1)
    assert int(state.step) == 3
    assert {name: value.sharding for name, value in state.params.items()} == shardings


def test_a_step_donates_its_state():
    state = init_state(make_params(rules_of()), sgd())
    update(state, batch_of()[0])
    assert all(value.is_deleted() for value in state.params.values())


def test_a_batch_s_rows_are_split_over_the_devices_and_its_counts_are_everywhere():
    rules = rules_of("2,2,2", 8)
    placed = shard_batch(batch_of(rows=8)[0], make_train_settings(rules).computing)
    assert placed.tokens.sharding.spec == jax.sharding.PartitionSpec(None, ("dp", "fsdp"), "sp")
    assert placed.tokens.addressable_shards[0].data.shape == (2, 2, ROW_TOKENS)
    assert placed.num_tokens.sharding.is_fully_replicated
    assert placed.scores == {}
