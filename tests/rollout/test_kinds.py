"""An engine over layers of several kinds: a window whose pages are a ring, a state of fixed size, and whole sequences.

Every expectation is `naive`, which computes one sequence after the other in float64 numpy, or another engine's tokens.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from mixed_decoder import MIXED, Decay, naive, weights
from tiny_engine import ROUNDING, Letters, answers_of, mesh_of, same
from whole_slots import whole_slots

from podium.config.schema import RolloutConfig
from podium.models.params import ROLLOUT_AXES
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.programs import abstract_engine_cache
from podium.rollout.request import Key, Request, SamplingParams
from podium.sharding import ShardingRules

CONFIG = RolloutConfig(max_prompt_tokens=40, max_new_tokens=12, slots=4, refill_steps=3, prefill_rows=2, page_tokens=4)
SMALL = CONFIG.model_copy(update={"cache_tokens": 4 * 24})


def make_engine(config=CONFIG, *, devices=1, overlap=False, version=0):
    rules = ShardingRules(mesh_of(devices), ROLLOUT_AXES)
    engine = RolloutEngine(Device(config, MIXED, rules, dtype=jnp.dtype("float32"), overlap=overlap), Letters())
    engine.load(weights(rules), version)
    return engine


@functools.cache
def shared_engine():
    return make_engine()


def requests_of(*shapes, **sampling):
    """Requests of (tokens of the prompt, completions)."""
    random = np.random.default_rng(sum(length for length, _ in shapes))
    return [
        Request(
            prompt=tuple(random.integers(0, 64, length).tolist()),
            sampling=SamplingParams(max_new_tokens=12, **sampling),
            seed=number,
            completions=completions,
        )
        for number, (length, completions) in enumerate(shapes)
    ]


# Prompts that end with a page and within one; of a token; longer than a chunk; groups larger than the slots.
SHAPES = ((1, 2), (2, 3), (8, 3), (13, 5), (33, 3), (40, 2), (7, 1), (38, 1))
REQUESTS = [*requests_of(*SHAPES), *requests_of((5, 2), (36, 2), temperature=0.0)]


@functools.cache
def answers():
    return answers_of(shared_engine(), REQUESTS)


def logprobs_of(tokens):
    """Log-probabilities [T, V] behind each token of a sequence."""
    params = {name: np.asarray(value, np.float64) for name, value in shared_engine().device.params.items()}
    logits = naive(params, np.array(tokens))[0] @ params["embed"].T
    return (
        logits
        - np.log(np.sum(np.exp(logits - logits.max(-1, keepdims=True)), -1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


def check(context, completion, temperature=1.0):
    """Whether tokens and log-probabilities are those of one pass over the whole sequence."""
    drawn = completion.tokens.tolist()
    found = logprobs_of([*context, *drawn])[len(context) - 1 : -1]
    if not temperature:
        assert found.argmax(-1).tolist() == drawn
    expected = np.take_along_axis(found, completion.tokens[:, None], axis=1)[:, 0]
    scale = np.maximum(1.0, np.abs(expected))
    if temperature:
        assert np.max(np.abs(expected - completion.sampled_logprobs) / scale) <= ROUNDING
    np.testing.assert_array_less(np.abs(expected - completion.full_logprobs) / scale, ROUNDING)


def test_the_kinds_of_this_decoder_keep_what_they_declare():
    engine = shared_engine()
    cache = abstract_engine_cache(CONFIG, MIXED, engine.device.form.rules, engine.device.form.dtype)
    near, decay, far, last = cache.places
    cells, tokens = 4 + 2, 4 * 13 * 4 + 2 * 10 * 4
    assert near.kv.values.shape == (2, cells * 3, 2, 4, 8)  # 3 pages hold 2 tokens behind and 4 new ones anywhere
    assert last.kv.values.shape == (1, cells * 3, 2, 4, 8)
    assert far.kv.values.shape == (2, tokens // 4, 2, 4, 8)
    assert (decay.kv, [x.shape for x in decay.states]) == (None, [(2, cells, 32)])
    assert isinstance(MIXED.places[1].block.mixer, Decay)


def test_tokens_and_log_probabilities_are_those_of_a_plain_pass():
    for request, group in zip(REQUESTS, answers(), strict=True):
        assert len(group) == request.completions
        for completion in group:
            check(request.prompt, completion, request.sampling.temperature)


@pytest.mark.long
def test_the_tokens_do_not_depend_on_devices_slots_or_overlap():
    wide = CONFIG.model_copy(update={"slots": 16, "prefill_rows": 8})
    for engine in (make_engine(wide, devices=8), make_engine(wide, overlap=True)):
        assert same(answers_of(engine, REQUESTS), answers())


def test_preemption_loses_nothing():
    with whole_slots():
        engine = make_engine(SMALL)
    found, stats = engine.generate(REQUESTS)
    assert stats.scheduled.preempted > 0
    assert stats.scheduled.rebuilt_tokens > 0
    assert same(found, answers())
    pages = engine._scheduler.pages
    assert [len(free) for free in pages.free_cells] == [6]
    assert engine.pages_used == 0


def test_completions_continue_where_an_earlier_step_left_them():
    """Carried over to other engines: their cells and rings are made again from the tokens."""
    steps = iter(range(7))
    begun, _ = shared_engine().generate(REQUESTS, enough=lambda _: next(steps) == 6)
    assert any(0 < len(each.tokens) < 12 and each.finish_reason is None for group in begun for each in group)
    rest = [
        Request(
            prompt=request.prompt,
            sampling=request.sampling,
            seed=request.seed,
            completions=request.completions,
            begun=dict(enumerate(group)),
        )
        for request, group in zip(REQUESTS, begun, strict=True)
    ]
    assert same(answers_of(shared_engine(), rest), answers())


def test_new_weights_in_the_middle_make_all_anew():
    engine = make_engine()
    numbers = [engine.submit(request) for request in REQUESTS]
    found = {}
    while engine.busy:
        engine.step()
        found |= dict(engine.poll())
        if len(found) == 6:
            engine.load(weights(engine.device.form.rules), 1)
    assert same(
        [[found[Key(n, i)] for i in range(r.completions)] for n, r in zip(numbers, REQUESTS, strict=True)], answers()
    )


@pytest.mark.parametrize("stop", [(), ("e", "q", "E")])
@pytest.mark.parametrize("overlap", [False, True])
def test_turns_continue_from_what_was_kept(stop, overlap):
    """Parked with their cells; a stop string cuts off tokens that the device has drawn on, which it must forget."""
    engine = make_engine(overlap=overlap)
    sampling = SamplingParams(max_new_tokens=6, stop=stop)
    contexts = {}
    for number, request in enumerate(requests_of((6, 3), (21, 2), (1, 1))):
        kept = Request(
            prompt=request.prompt, sampling=sampling, seed=number, completions=request.completions, keep=True
        )
        assert engine.submit(kept) == number
        contexts |= {Key(number, i): request.prompt for i in range(request.completions)}
    turns = dict.fromkeys(contexts, 0)
    reasons = set()
    while contexts:
        engine.step()
        for key, completion in engine.poll():
            check(contexts[key], completion)
            reasons.add(completion.finish_reason)
            if turns[key] == 2:
                engine.cancel(key)
                del contexts[key]
                continue
            turns[key] += 1
            reply = [3, 1, 4][: turns[key]]
            contexts[key] = (*contexts[key], *completion.tokens.tolist(), *reply)
            engine.extend(key, reply, sampling, seed=turns[key], keep=True)
        for key in list(contexts)[:1]:
            engine.park(key)
            if all(each.key != key for each in engine._finished):  # `park` has read the tokens that were on their way
                engine.resume(key)
    assert ("stop" in reasons) == bool(stop)
    assert engine.pages_used == 0
    assert math.prod(len(free) for free in engine._scheduler.pages.free_cells) == 6
