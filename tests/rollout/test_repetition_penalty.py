"""The repetition penalty: transformers' formula, on all ways that a sequence takes through the engine."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import CONFIG, EOS, answers_of, make_engine, plain_logits, random_requests, same, tiny_params
from whole_slots import whole_slots

from podium.models.params import GROUP_AXES
from podium.rollout.request import Key, SamplingParams
from podium.rollout.sampling import fill_row, idle_rows, num_words, sample, sample_split, with_tokens, words_of
from podium.sharding import ShardingRules, make_mesh

SMALL = CONFIG.model_copy(update={"page_tokens": 8, "cache_tokens": 8 * 20})
MIXED = [
    *random_requests(4, seed=1, repetition_penalty=1.5),
    *random_requests(2, seed=2, temperature=0.7, repetition_penalty=3.0),
    *random_requests(2, seed=3, temperature=0.0, repetition_penalty=0.7),
    *random_requests(2, seed=4),
]


def processed(scores, input_ids, penalty):
    """What transformers' RepetitionPenaltyLogitsProcessor makes of one row's scores."""
    scores = scores.copy()
    score = scores[input_ids]
    scores[input_ids] = np.where(score < 0, score * penalty, score / penalty)
    return scores


def logprobs_of(scores, temperature):
    scaled = scores.astype(np.float64) / (temperature or 1.0)
    return scaled - scaled.max() - np.log(np.sum(np.exp(scaled - scaled.max())))


@functools.cache
def shared_engine():
    return make_engine(CONFIG.model_copy(update={"page_tokens": 8}))


@functools.cache
def expected():
    return answers_of(shared_engine(), MIXED)


def rows_of(settings):
    rows = idle_rows(len(settings))
    for row, each in enumerate(settings):
        fill_row(rows, row, each, seed=row, completion=0)
    return rows


def held_sets(vocab, count):
    rng = np.random.default_rng(vocab)
    return [rng.integers(0, vocab, rng.integers(0, 2 * vocab)) for _ in range(count)]


SETTINGS = [
    SamplingParams(max_new_tokens=1, temperature=temperature, repetition_penalty=penalty, top_k=top_k)
    for temperature, top_k in ((1.0, 0), (0.6, 0), (0.0, 0), (1.0, 3))
    for penalty in (1.0, 1.3, 4.0, 0.5)
] * 6


def drawn_by(program, logits, held, settings, width):
    sets = np.stack([words_of(each, num_words(width)) for each in held])
    S = len(settings)
    return jax.device_get(program(logits, rows_of(settings), np.zeros(S, np.int32), np.ones(S, bool), seen=sets))


def check(found, logits, held, settings):
    for row, each in enumerate(settings):
        after = processed(logits[row], held[row], each.repetition_penalty)
        token = int(found.tokens[row])
        whole = logprobs_of(after, each.temperature)
        if each.top_k:
            kept = after >= np.sort(after)[-each.top_k]
            whole = np.where(kept, whole - np.log(np.sum(np.exp(whole[kept]))), -np.inf)
        assert found.logprobs[row] == pytest.approx(whole[token], abs=3e-6)
        assert found.full_logprobs[row] == pytest.approx(logprobs_of(logits[row], each.temperature)[token], abs=3e-6)
        if not each.temperature:
            assert token == np.argmax(after)
        if each.repetition_penalty == 1 and not each.top_k:
            assert found.logprobs[row] == found.full_logprobs[row]


@pytest.mark.parametrize("vocab", [7, 300])
def test_a_token_is_drawn_after_transformers_penalty_and_its_full_log_probability_is_that_before(vocab):
    logits = np.random.default_rng(0).normal(0, 2, (len(SETTINGS), vocab)).astype(np.float32)
    held = held_sets(vocab, len(SETTINGS))
    check(drawn_by(jax.jit(sample), logits, held, SETTINGS, vocab), logits, held, SETTINGS)


@pytest.mark.parametrize("mesh", ["fsdp:4,tp:2", "dp:2,fsdp:2,tp:2"])
def test_devices_that_share_a_vocabulary_penalise_their_own_tokens(mesh):
    rules = ShardingRules(make_mesh(mesh), GROUP_AXES)
    logits = np.random.default_rng(1).normal(0, 2, (len(SETTINGS), 1024)).astype(np.float32)
    logits[:, 1000:] = -np.inf
    held = held_sets(1000, len(SETTINGS))
    placed = jax.device_put(logits, rules.sharding("rows", "logits"))
    found = drawn_by(jax.jit(functools.partial(sample_split, rules=rules)), placed, held, SETTINGS, 1024)
    check(found, logits[:, :1000], held, SETTINGS)


def test_a_set_of_tokens_grows_by_what_is_drawn():
    sets = np.stack([words_of([0, 31, 32], 3), words_of([], 3)])
    found = with_tokens(jnp.asarray(sets), jnp.array([95, 64]), jnp.array([True, False]))
    assert np.array_equal(found, np.stack([words_of([95, 32, 31, 0, 0], 3), words_of([], 3)]))


def test_the_engine_penalises_prompt_and_drawn_tokens():
    params = tiny_params()
    moved = 0
    for request, group in zip(MIXED, expected(), strict=True):
        sampling = request.sampling
        for completion in group:
            whole = [*request.prompt, *completion.tokens.tolist()]
            every = plain_logits(params, whole)
            for place, token in enumerate(completion.tokens.tolist(), start=len(request.prompt)):
                own = place - len(request.prompt)
                raw = every[place - 1][:300]
                after = processed(raw, whole[:place], sampling.repetition_penalty)
                drawn, full = (logprobs_of(x, sampling.temperature)[token] for x in (after, raw))
                assert completion.sampled_logprobs[own] == pytest.approx(drawn, abs=1e-4)
                assert completion.full_logprobs[own] == pytest.approx(full, abs=1e-4)
                assert sampling.temperature or token == np.argmax(after)
                moved += abs(drawn - full) > 0.01
            if sampling.repetition_penalty == 1:
                assert np.array_equal(completion.sampled_logprobs, completion.full_logprobs)
    assert moved > 50


def test_requests_without_a_penalty_are_as_in_an_engine_that_never_had_one():
    assert same(answers_of(make_engine(), MIXED[-2:]), expected()[-2:])


def test_an_engine_that_expects_a_penalty_gives_the_same_tokens():
    always = make_engine(CONFIG.model_copy(update={"repetition_penalty": 1.5}))
    always.warm_up()
    compiled = always.device.num_compiled()
    assert same(answers_of(always, MIXED), expected())
    assert always.device.num_compiled() == compiled


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.long), True])
def test_requests_that_come_one_by_one_or_are_preempted_give_the_same(overlap):
    with whole_slots():
        engine = make_engine(SMALL)
    engine.device.overlap = overlap
    answers, stats = engine.generate(MIXED)
    assert stats.scheduled.preempted > 0
    assert same(answers, expected())
    engine, found, numbers = shared_engine(), {}, []
    for request in reversed(MIXED):  # the first has no penalty: the sets are made while it runs
        numbers.append(engine.submit(request))
        engine.step()
        found |= dict(engine.poll())
    while engine.busy:
        engine.step()
        found |= dict(engine.poll())
    again = [[found[Key(number, i)] for i in range(3)] for number in reversed(numbers)]
    assert same(again, expected())


def test_parked_and_continued_completions_know_what_they_hold():
    engine, rng = shared_engine(), random.Random(0)
    numbers = [engine.submit(request) for request in MIXED]
    parked, found, times = set(), {}, 0
    while engine.busy or parked:
        engine.step()
        found |= dict(engine.poll())
        for key in list(parked):
            if rng.random() < 0.5:
                engine.resume(key)
                parked.remove(key)
        chosen = {key for key in engine.keys if key not in parked and rng.random() < 0.2}
        for key in chosen:
            engine.park(key)
        found |= dict(engine.poll())
        parked |= chosen & set(engine.keys)
        times += len(chosen)
    assert times > 5
    assert same([[found[Key(number, i)] for i in range(3)] for number in numbers], expected())


def test_a_completion_that_is_carried_over_goes_on_as_if_it_had_never_stopped():
    engine, request = shared_engine(), MIXED[0]
    (group,) = answers_of(engine, [request])
    cut = {
        index: dataclasses.replace(
            each,
            tokens=each.tokens[:3],
            sampled_logprobs=each.sampled_logprobs[:3],
            full_logprobs=each.full_logprobs[:3],
            versions=each.versions[:3],
            finish_reason=None,
        )
        for index, each in enumerate(group)
        if len(each.tokens) > 3
    }
    assert cut
    (again,) = answers_of(engine, [dataclasses.replace(request, begun={**dict(enumerate(group)), **cut})])
    assert same([again], [group])


def test_a_later_turn_is_penalised_for_the_whole_conversation():
    engine, reply = shared_engine(), SamplingParams(max_new_tokens=5, temperature=0.0, repetition_penalty=2.0)
    number = engine.submit(dataclasses.replace(MIXED[0], prompt=MIXED[0].prompt[:9], completions=1, keep=True))
    while engine.busy:
        engine.step()
    engine.poll()
    key = Key(number, 0)
    engine.extend(key, (7, 8, 9), reply, seed=0)
    before = list(engine.ledger(key))
    while engine.busy:
        engine.step()
    ((_, turn),) = engine.poll()
    whole = [*before, *turn.tokens.tolist()]
    every = plain_logits(tiny_params(), whole)
    for place, token in enumerate(turn.tokens.tolist(), start=len(before)):
        assert token == np.argmax(processed(every[place - 1][:300], whole[:place], 2.0)) or token == EOS


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_penalty_that_is_none_is_an_error(value):
    request = dataclasses.replace(MIXED[0], sampling=dataclasses.replace(MIXED[0].sampling, repetition_penalty=value))
    with pytest.raises(ValueError, match=r"repetition_penalty is .* must be 1e-06 to 1e\+06 \(1: no penalty"):
        shared_engine().submit(request)
