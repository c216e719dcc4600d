"""The sampler's choices of experts: recorded with each token, the same on any devices, and repeated by the update."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import make_config, make_train_settings, recipe_of, sizes, spec_of

from podium.certify.naive import in_float64, logits
from podium.certify.tiny import random_weights, tiny_clone
from podium.config.optimizer import OptimizerConfig
from podium.config.schema import RolloutConfig
from podium.models.attention.mask import Visibility
from podium.models.attention.packed_attention import row_attention
from podium.models.blocks.choices import unknown_choice
from podium.models.blocks.kind import Stack
from podium.models.decoder import PassSettings, forward
from podium.models.layouts import Layout
from podium.models.params import TRAIN_AXES, param_specs
from podium.models.presets import preset_decoder
from podium.models.recorded_experts import joined_choices, recorded_choices
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.recorded_routes import Routes, unknown
from podium.rollout.request import Completion, Request, SamplingParams
from podium.rollout.transcript import Transcript, transcript_of
from podium.sampling.conversations.episode_json import completion_record, read_completion
from podium.sampling.sampler import rollout_rules
from podium.sharding import ShardingRules, make_mesh, param_shardings
from podium.train.batches.batch import make_batch
from podium.train.batches.samples import transcript_sample, with_advantage, with_weight
from podium.train.optimizer.transforms import make_optimizer
from podium.train.state import init_state
from podium.train.step import make_train_step, shard_batch

DECODER = tiny_clone(preset_decoder("Qwen/Qwen3-30B-A3B"))
C = DECODER.choices
WEIGHTS = random_weights(DECODER, seed=0)
CONFIG = RolloutConfig(max_prompt_tokens=24, max_new_tokens=8, slots=8, refill_steps=3, prefill_rows=8, page_tokens=2)
PROMPTS = [tuple(np.random.default_rng(n).integers(0, DECODER.vocab, n).tolist()) for n in (1, 4, 11, 23)]
TOLERANCE = 1e-5
UNKNOWN = unknown_choice(np.uint8)
DESCENT = make_optimizer(
    OptimizerConfig(name="sgd", learning_rate=1.0, beta1=0.0, clip_norm=0.0), 10, param_specs(DECODER)
)


class Letters:
    """Every token is a letter."""

    eos_tokens, special_tokens = (), {}

    def decode(self, tokens):
        return "".join(chr(97 + token % 26) for token in tokens)


def engine_on(layout: Layout, devices: int, decoder=DECODER, weights=WEIGHTS) -> RolloutEngine:
    mesh = make_mesh("auto", jax.devices()[:devices])
    rules = rollout_rules(layout, decoder, mesh)
    engine = RolloutEngine(Device(CONFIG, decoder, rules, dtype=jnp.dtype("float32")), Letters())
    shardings = param_shardings(param_specs(decoder), ShardingRules(mesh, TRAIN_AXES))
    engine.load({name: jax.device_put(value, shardings[name]) for name, value in weights.items()})
    return engine


def answers_of(engine, **settings):
    sampling = SamplingParams(max_new_tokens=8, **settings)
    requests = [Request(prompt=prompt, sampling=sampling, seed=1, completions=2) for prompt in PROMPTS]
    return engine.generate(requests)[0]


@functools.cache
def answers():
    return answers_of(engine_on(Layout(name="replicated"), 1))


def flat(groups):
    return [completion for group in groups for completion in group]


def each_answer():
    return [(prompt, each) for prompt, group in zip(PROMPTS, answers(), strict=True) for each in group]


def test_log_probabilities_are_those_of_plain_float64_and_choices_have_the_shape_of_the_tokens():
    """Prompts in shared pages, decoded with all experts, prefilled with sorted ones."""
    with in_float64():
        wide = {name: jnp.asarray(value, jnp.float64) for name, value in WEIGHTS.items()}
        compute = jax.jit(lambda tokens: jax.nn.log_softmax(logits(wide, tokens, DECODER), axis=-1))
        for prompt, completion in each_answer():
            drawn = completion.tokens
            tokens = np.zeros(32, np.int32)
            tokens[: len(prompt) + len(drawn)] = [*prompt, *drawn]
            found = np.asarray(compute(tokens))[np.arange(len(drawn)) + len(prompt) - 1, drawn]
            assert np.abs(completion.full_logprobs - found).max() <= TOLERANCE * np.abs(found).max()
            assert completion.choices.shape == (len(drawn), C)
            assert completion.context_choices.shape == (len(prompt), C)
            assert np.all(completion.context_choices[:1] == UNKNOWN)  # no token comes before the first
            assert np.all(completion.context_choices[1:] < 8)
            assert np.all(completion.choices < 8)


@pytest.mark.parametrize(
    ("layout", "devices"),
    [
        (Layout(name="hybrid", group=4), 8),
        pytest.param(Layout(name="tensor", group=8), 8, marks=pytest.mark.long),
        pytest.param(Layout(name="replicated"), 8, marks=pytest.mark.long),
    ],
)
def test_tokens_and_choices_are_those_of_one_device(layout, devices):
    found = answers_of(engine_on(layout, devices))
    for one, other in zip(flat(found), flat(answers()), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.choices, other.choices)
        np.testing.assert_array_equal(one.context_choices, other.context_choices)
        np.testing.assert_allclose(one.full_logprobs, other.full_logprobs, rtol=0, atol=TOLERANCE)


def test_choices_are_cut_with_the_tokens_saved_with_them_and_continued():
    (_, whole), *_ = [pair for pair in each_answer() if len(pair[1].tokens) == 8]
    letters = Letters().decode(whole.tokens.tolist())
    engine = engine_on(Layout(name="replicated"), 1)
    stopped = flat(answers_of(engine, stop=(letters[2:4],)))
    cut = [each for each in stopped if each.finish_reason == "stop"]
    assert cut
    assert all(len(each.choices) == len(each.tokens) for each in stopped)
    record = completion_record(whole)
    np.testing.assert_array_equal(read_completion(record).choices, whole.choices)
    np.testing.assert_array_equal(read_completion(record).context_choices, whole.context_choices)
    begun = [
        [dataclasses.replace(each, **_first(each, 3), finish_reason=None) for each in group] for group in answers()
    ]
    sampling = SamplingParams(max_new_tokens=8)
    requests = [
        Request(prompt=prompt, sampling=sampling, seed=1, completions=2, begun=dict(enumerate(group)))
        for prompt, group in zip(PROMPTS, begun, strict=True)
    ]
    for one, other in zip(flat(engine.generate(requests)[0]), flat(answers()), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.choices, other.choices)
        np.testing.assert_array_equal(one.context_choices, other.context_choices)


@pytest.mark.parametrize("width", [0, 6])
def test_a_completion_without_tokens_keeps_the_width_of_its_choices(width):
    empty = np.zeros(0, np.int32)
    logprobs = np.zeros(0, np.float32)
    choices, context = np.zeros((0, width), np.uint16), np.ones((3, 6), np.uint16) if width else None
    given = Completion(
        tokens=empty,
        sampled_logprobs=logprobs,
        full_logprobs=logprobs,
        versions=empty,
        text="",
        finish_reason=None,
        choices=choices,
        context_choices=context,
    )
    found = read_completion(completion_record(given))
    assert found.choices is not None and found.choices.shape == (0, width) and found.choices.dtype == np.uint16
    assert (found.context_choices is None) if context is None else np.array_equal(found.context_choices, context)


def _first(completion, count):
    names = ("tokens", "sampled_logprobs", "full_logprobs", "versions", "choices")
    return {name: getattr(completion, name)[:count] for name in names}


def batch_of(packing="shared_prompts"):
    samples = []
    for number, (prompt, completion) in enumerate(each_answer()):
        sample = transcript_sample(transcript_of(prompt, completion), group=number // 2, version=0)
        samples.append(with_weight(with_advantage(sample, 1.0 - number), 1 / 64))
    return make_batch(samples, sizes(row_tokens=40, rows=8, max_rows=8, packing=packing, choices=C))


@functools.cache
def step_on(mesh: str, devices: int, router_loss_coef: float | None, **changes: Any):
    """A compiled update and its settings; the rate makes a weight's change its gradient."""
    rules = ShardingRules(make_mesh(mesh, jax.devices()[:devices]), TRAIN_AXES)
    settings = make_train_settings(rules, decoder=DECODER, **changes)
    recipe = recipe_of(make_config(algorithm={"router_loss_coef": router_loss_coef}))
    return make_train_step(settings, recipe, DESCENT), settings


def updated(batch, mesh="dp:1", devices=1, weights=WEIGHTS, router_loss_coef=None, **changes):
    """Weights and metrics after one update."""
    step, settings = step_on(mesh, devices, router_loss_coef, **changes)
    shardings = param_shardings(param_specs(DECODER), settings.stored)
    params = {name: jax.device_put(x, shardings[name], may_alias=False) for name, x in weights.items()}
    state, metrics = step(init_state(params, DESCENT), shard_batch(batch, settings.computing))
    return jax.tree.map(np.asarray, state.params), {name: float(value) for name, value in metrics.items()}


def test_choices_lie_at_the_tokens_that_were_sent_to_them():
    batch, spans = batch_of()
    rows = np.concatenate(batch.choices)
    for span, (_, completion) in zip(spans, each_answer(), strict=True):
        np.testing.assert_array_equal(rows[span.row, span.start : span.start + span.length], completion.choices)
    live = np.concatenate(batch.segments) > 0
    assert np.all(rows[live] < 8)
    assert np.all(rows[~live] == UNKNOWN)
    first = PROMPTS.index(max(PROMPTS, key=len)) * 2  # of the prompt's two completions, which share it in a row
    at = spans[first]
    shown = slice(at.start - len(PROMPTS[-1]) + 1, at.start)
    np.testing.assert_array_equal(rows[at.row, shown], each_answer()[first][1].context_choices[1:])


def test_what_an_environment_says_has_choices_once_the_next_turn_was_drawn():
    """The first turn's own last token is entered with the reply."""
    engine = engine_on(Layout(name="replicated"), 1)
    sampling = SamplingParams(max_new_tokens=3)
    engine.submit(Request(prompt=PROMPTS[2], sampling=sampling, seed=1, keep=True))
    transcript, reply = Transcript().add_prompt(PROMPTS[2]), (3, 1)
    first = next(iter(_turns(engine)))
    transcript = transcript.add_completion(first.completion).add_environment(reply)
    assert transcript_sample(transcript, group=0, version=0).choices is not None
    engine.extend(first.key, reply, sampling, seed=2)
    second = next(iter(_turns(engine))).completion
    sample = transcript_sample(transcript.add_completion(second), group=0, version=0)
    assert sample.choices.shape == (8, C)
    assert np.all(sample.choices < 8)
    np.testing.assert_array_equal(sample.prompt_choices, first.completion.context_choices[1:])
    at_once = Request(prompt=(*PROMPTS[2], *sample.tokens), sampling=sampling, seed=3)
    ((whole,),), _ = engine.generate([at_once])
    np.testing.assert_array_equal(sample.choices, whole.context_choices[len(PROMPTS[2]) :])
    assert transcript_sample(Transcript().add_prompt(PROMPTS[2]), group=0, version=0).choices is None


def _turns(engine):
    while not (ended := engine.poll()):
        engine.step()
    return ended


def test_a_token_keeps_the_experts_that_were_reported_first():
    """Rows behind a prompt of three tokens are a sequence's own; a stop string cuts them with its tokens."""
    prompt = unknown(4, 2, np.uint8)
    one, other = Routes(prompt), Routes(prompt)
    one.record(1, np.array([[1, 1], [2, 2]], np.uint8))
    other.record(2, np.array([[9, 9], [3, 3], [4, 4], [5, 5]], np.uint8))
    np.testing.assert_array_equal(one.rows(0, 6)[:, 0], [UNKNOWN, 1, 2, 3, UNKNOWN, UNKNOWN])
    np.testing.assert_array_equal(other.rows(2, 6)[:, 0], [2, 3, 4, 5])
    other.cut(5)
    other.record(4, np.array([[7, 7], [8, 8]], np.uint8))
    np.testing.assert_array_equal(other.rows(0, 6)[:, 0], [UNKNOWN, 1, 2, 3, 4, 8])
    assert one.rows(0, 3).base is not None  # the prompt's rows are not copied


def test_choices_among_more_experts_than_a_byte_can_number_are_kept_whole():
    """In engine, record and batch; the router leaves only experts 250 to 299 to the tokens."""
    (block,) = {place.block for place in DECODER.places}
    many = dataclasses.replace(block.feed_forward, count=300, top=2, width=8, bias=True)
    stack = Stack(pattern=(dataclasses.replace(block, feed_forward=many),), repeats=1)
    decoder = dataclasses.replace(DECODER, stacks=(stack,))
    weights = random_weights(decoder, seed=0)
    weights["layers.router_bias"][:, :250] = -100
    answers = flat(answers_of(engine_on(Layout(name="replicated"), 1, decoder, weights)))
    found = np.concatenate([each.choices for each in answers])
    assert found.dtype == np.uint16 and 250 <= found.min() < 256 <= found.max() < 300
    record = read_completion(completion_record(answers[-1]))
    np.testing.assert_array_equal(record.choices, answers[-1].choices)
    np.testing.assert_array_equal(record.context_choices, answers[-1].context_choices)
    sample = with_weight(
        with_advantage(transcript_sample(transcript_of(PROMPTS[-1], record), group=0, version=0), 1), 1
    )
    batch, (span,) = make_batch(
        [sample], sizes(row_tokens=40, rows=1, max_rows=1, packing="none", choices=2, choice_format="uint16")
    )
    row = np.concatenate(batch.choices)[span.row]
    np.testing.assert_array_equal(row[span.start : span.start + span.length], record.choices)
    assert np.all(row[span.start + span.length :] == unknown_choice(np.uint16))


def test_repeating_its_own_choices_changes_no_bit_of_an_update():
    batch, _ = batch_of()
    repeated, metrics = updated(batch)
    free, others = updated(batch, replay_routing=False)
    for name, value in repeated.items():
        np.testing.assert_array_equal(value, free[name], err_msg=name)
    assert metrics["loss"] == others["loss"]
    assert metrics["routing_disagreement"] == others["routing_disagreement"] == 0
    assert metrics["logprob_gap_max"] <= TOLERANCE * 10
    assert metrics["router_load_max"] > 1
    unknown = dataclasses.replace(batch, choices=np.full_like(batch.choices, UNKNOWN))
    np.testing.assert_array_equal(updated(unknown)[0]["embed"], free["embed"])


def test_other_choices_are_repeated_too_and_the_disagreement_tells_them():
    batch, _ = batch_of()
    known = batch.choices[..., :3] != UNKNOWN  # of the first layer
    turned = batch.choices.copy()
    turned[..., :3] = np.where(known, (batch.choices[..., :3] + 1) % 8, UNKNOWN)
    other = dataclasses.replace(batch, choices=turned)
    _, metrics = updated(other)
    _, free = updated(other, replay_routing=False)
    assert free["routing_disagreement"] >= 0.4  # of the two layers, one was turned
    assert metrics["routing_disagreement"] >= free["routing_disagreement"]
    assert metrics["logprob_gap"] > 100 * free["logprob_gap"]
    assert np.abs(updated(other)[0]["layers.router"] - WEIGHTS["layers.router"]).max() > 0


def test_a_trainer_of_other_numbers_would_choose_others_and_repeats_the_sampler_s():
    """As rounding makes them others, and here noise: random routers of eight experts have few near ties."""
    random = np.random.default_rng(2)
    noisy = {
        name: (value * (1 + 0.03 * random.standard_normal(value.shape))).astype(np.float32)
        for name, value in WEIGHTS.items()
    }
    batch, _ = batch_of()
    _, metrics = updated(batch, weights=noisy)
    _, free = updated(batch, weights=noisy, replay_routing=False)
    assert 0 < metrics["routing_disagreement"] < 0.3
    assert 0 < free["routing_disagreement"] < 0.3
    assert metrics["loss"] != free["loss"]


@functools.cache
def choosing(replay: bool):
    """The experts to which a trainer in bfloat16 sends the tokens of micro-batches, [K, B, T, C]."""
    rules = ShardingRules(make_mesh("auto", jax.devices()[:1]), TRAIN_AXES)

    @jax.jit
    def choose(params, batch):
        def of_rows(rows):
            attention = row_attention("reference", Visibility(rows.segments, rows.prompts), rules)
            recorded = recorded_choices(rows.choices, rows.segments > 0, DECODER)
            _, _, told = forward(
                params,
                rows.tokens,
                rows.positions,
                lambda kv, at, q, k, v: (kv, attention(q, k, v)),
                recorded=recorded,
                settings=PassSettings(replay=replay, config=DECODER, rules=rules, dtype=jnp.bfloat16),
            )
            return joined_choices(told, DECODER)

        whole = dataclasses.replace(batch, num_micro_batches=None, num_tokens=None)
        return jax.lax.map(of_rows, whole)

    return choose


def test_in_bfloat16_every_token_goes_to_the_experts_that_the_sampler_chose():
    """Prompts too. Without replay some go elsewhere: noise adds to rounding, as few experts have few near ties."""
    random = np.random.default_rng(3)
    noisy = {name: x * (1 + 0.02 * random.standard_normal(x.shape).astype(np.float32)) for name, x in WEIGHTS.items()}
    batch, _ = batch_of()
    live = batch.segments > 0
    assert np.all(batch.choices[live] != UNKNOWN)
    repeated = np.asarray(choosing(True)(noisy, batch))
    np.testing.assert_array_equal(repeated[live], batch.choices[live])
    free = np.sort(np.asarray(choosing(False)(noisy, batch))[live].reshape(-1, 3), axis=-1)
    differing = np.any(free != np.sort(batch.choices[live].reshape(-1, 3), axis=-1), axis=-1)
    assert 0 < differing.mean() < 0.3


@pytest.mark.parametrize(
    ("mesh", "packing"),
    [
        ("fsdp:2,tp:2,sp:2", "shared_prompts"),
        *(pytest.param(mesh, "none", marks=pytest.mark.long) for mesh in ("fsdp:8", "fsdp:4,tp:2", "dp:2,fsdp:4")),
    ],
)
def test_an_update_does_not_depend_on_devices_or_packing(mesh, packing):
    expected, wanted = updated(batch_of()[0])
    found, metrics = updated(batch_of(packing=packing)[0], mesh=mesh, devices=8)
    assert metrics["loss"] == pytest.approx(wanted["loss"], rel=TOLERANCE, abs=TOLERANCE)
    for name, value in found.items():
        change, other = value - WEIGHTS[name], expected[name] - WEIGHTS[name]
        assert np.abs(change - other).max() <= 2 * TOLERANCE * max(1e-3, np.abs(other).max()), name


@pytest.mark.long
def test_row_groups_compute_what_all_rows_do():
    batch, _ = batch_of()
    expected, wanted = updated(batch, remat="layer")
    found, metrics = updated(batch, remat="layer", row_groups=4)
    assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    for name, value in found.items():
        assert np.abs(value - expected[name]).max() <= TOLERANCE, name


def test_a_balance_loss_without_routers_is_refused():
    with pytest.raises(ValueError, match=r"algorithm.router_loss_coef is 0.1, which .* none has no routers"):
        spec_of(make_config(algorithm={"router_loss_coef": 0.1}))


def test_the_balance_loss_pulls_routers_and_nothing_without_a_weight():
    batch, _ = batch_of()
    still = dataclasses.replace(batch, weights=np.zeros_like(batch.weights))
    plain, _ = updated(still)
    np.testing.assert_array_equal(plain["layers.router"], WEIGHTS["layers.router"])
    pulled, metrics = updated(still, router_loss_coef=0.5)
    assert metrics["loss"] == pytest.approx(0.5 * metrics["router_balance"], rel=1e-5)
    moved = pulled["layers.router"] - WEIGHTS["layers.router"]
    assert np.abs(moved).max() > 0
    wished = {**WEIGHTS, "layers.router": WEIGHTS["layers.router"] + 0.05 * moved / np.abs(moved).max()}
    assert updated(still, weights=wished)[1]["router_balance"] < metrics["router_balance"]
