"""Submit, step, poll, park, extend, cancel: the same tokens whatever the timing, and nothing left behind."""

import dataclasses
import functools
import random

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import CONFIG, EOS, answers_of, make_engine, random_requests, same, tiny_params
from whole_slots import whole_slots

from podium.rollout.engine import NonFiniteError
from podium.rollout.request import Key, Request, SamplingParams

SMALL = CONFIG.model_copy(update={"page_tokens": 8, "cache_tokens": 8 * 20})  # of 8 slots that can need 8 pages each
MIXED = [*random_requests(6, seed=1), *random_requests(3, seed=2, temperature=0.6, top_k=7)]


@functools.cache
def shared_engine():
    return make_engine(CONFIG.model_copy(update={"page_tokens": 8}))


@functools.cache
def expected():
    return answers_of(shared_engine(), MIXED)


def assert_clean(engine):
    """No page is in use, and nothing is known."""
    assert not engine.busy
    assert engine.poll() == []
    assert engine.keys == []
    assert engine.pages_used == 0


def close(completion, other):
    """The same tokens; their log-probabilities may differ in the last digits, where programs have other shapes."""
    assert completion.tokens.tolist() == other.tokens.tolist()
    assert completion.finish_reason == other.finish_reason
    np.testing.assert_allclose(completion.sampled_logprobs, other.sampled_logprobs, atol=1e-5)


def drain(engine, numbers):
    """Step until nothing is left; what has ended, by key."""
    found = {}
    while engine.busy:
        engine.step()
        found |= dict(engine.poll())
    return {Key(numbers.index(key.request), key.completion): each for key, each in found.items()}


def check_all(found):
    assert set(found) == {(n, i) for n, request in enumerate(MIXED) for i in range(request.completions)}
    for (request, completion), made in found.items():
        close(made, expected()[request][completion])


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_come_one_by_one_give_the_tokens_of_all_at_once(overlap):
    engine = shared_engine()
    engine.device.overlap, numbers, found = overlap, [], {}
    for request in MIXED:
        numbers.append(engine.submit(request))
        engine.step()
        found |= dict(engine.poll())
    while engine.busy:
        engine.step()
        found |= dict(engine.poll())
    engine.device.overlap = False
    check_all({Key(numbers.index(key.request), key.completion): each for key, each in found.items()})
    assert_clean(engine)


def test_preemption_loses_nothing():
    engine = make_engine(SMALL)
    answers, stats = engine.generate(MIXED)
    assert stats.scheduled.preempted > 0
    assert stats.scheduled.rebuilt_tokens > 0
    assert stats.scheduled.pages_peak <= 20
    check_all({Key(n, i): each for n, group in enumerate(answers) for i, each in enumerate(group)})
    assert_clean(engine)


def test_parking_and_resuming_changes_no_token():
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
            engine.park(key)  # which reads what was drawn: some may end by it
        found |= dict(engine.poll())
        parked |= chosen & set(engine.keys)
        times += len(chosen)
    assert times > 5
    check_all({Key(numbers.index(key.request), key.completion): each for key, each in found.items()})
    assert_clean(engine)


def test_a_conversation_prefills_only_what_is_new_and_gives_the_tokens_of_one_long_prompt():
    engine = shared_engine()
    engine.stats()
    first = dataclasses.replace(MIXED[0], prompt=MIXED[0].prompt[:20], completions=2, keep=True)
    number = engine.submit(first)
    turns = {}
    while len(turns) < 2:
        engine.step()
        turns |= dict(engine.poll())
    reply = SamplingParams(max_new_tokens=5)
    for key in turns:
        engine.extend(key, (7, 8, 9), reply, seed=5)
    later = drain(engine, [number])
    stats = engine.stats()
    for key, made in later.items():
        whole = [*first.prompt, *turns[Key(number, key.completion)].tokens.tolist(), 7, 8, 9]
        alone = Request(prompt=tuple(whole), sampling=reply, seed=5, completions=2)
        close(made, answers_of(shared_engine(), [alone])[0][key.completion])
    # the prompt once; of each turn the last drawn and what is new
    assert stats.scheduled.prefill_tokens == 20 + 2 * (1 + 3)
    assert stats.scheduled.rebuilt_tokens == 0
    assert_clean(engine)


def test_active_completions_continue_under_new_weights():
    engine = shared_engine()
    request = dataclasses.replace(MIXED[0], completions=2)
    number = engine.submit(request)
    engine.step()
    before = [engine.ledger(Key(number, i)) for i in range(2)]
    engine.load(tiny_params(seed=1))
    engine.stats()
    found = drain(engine, [number])
    assert engine.stats().scheduled.rebuilt_tokens > 0
    other = make_engine(CONFIG.model_copy(update={"page_tokens": 8}), seed=1)
    for i, ledger in enumerate(before):
        assert tuple(found[Key(0, i)].tokens[: len(ledger) - len(request.prompt)]) == ledger[len(request.prompt) :]
        left = len(request.prompt) + 12 - len(ledger)
        rest = Request(
            prompt=ledger, sampling=SamplingParams(max_new_tokens=left), seed=request.seed, completions=i + 1
        )
        if len(ledger) <= CONFIG.max_prompt_tokens:  # all that came later is the new weights' alone
            expected_rest = answers_of(other, [rest])[0][i].tokens.tolist()
            assert found[Key(0, i)].tokens.tolist()[len(ledger) - len(request.prompt) :] == expected_rest
    engine.load(tiny_params(seed=0))
    assert_clean(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_what_is_taken_out_and_submitted_again_gives_the_same_tokens(steps):
    engine, asked = shared_engine(), []
    engine.stats()
    made, first = engine.generate(MIXED, enough=lambda complete: (asked.append(complete), len(asked) > steps)[1])
    assert_clean(engine)
    assert (asked[0], len(asked)) == ([False] * len(MIXED), steps + 1)
    unfinished = [each for group in made for each in group if each.finish_reason is None]
    assert unfinished
    assert {each.text for each in unfinished} == {""}
    again = [
        dataclasses.replace(request, begun=dict(enumerate(begun))) for request, begun in zip(MIXED, made, strict=True)
    ]
    engine.load(tiny_params(), version=1)
    answers, second = engine.generate(again)
    check_all({Key(n, i): each for n, group in enumerate(answers) for i, each in enumerate(group)})
    drawn = [len(each.tokens) for group in made for each in group]
    versions = [np.sum(each.versions == 0) for group in answers for each in group]
    assert (first.completion_tokens, versions) == (sum(drawn), drawn)
    assert second.completion_tokens == sum(len(each.tokens) for group in answers for each in group) - sum(drawn)
    assert (second.scheduled.rebuilt_tokens > 0) == (steps > 0)
    engine.load(tiny_params())
    assert_clean(engine)


@pytest.mark.parametrize("when", [0, 1, 3])
def test_cancelling_leaves_the_others_as_they_are(when):
    """At once, in prefill or after the first call, and later; of one request all, of another one completion."""
    with whole_slots():
        engine = make_engine(SMALL.model_copy(update={"prefill_rows": 1})) if when == 0 else None
    engine = engine or shared_engine()
    numbers = [engine.submit(request) for request in MIXED]
    for _ in range(when):
        engine.step()
    gone = [Key(numbers[0], i) for i in range(3)] + [Key(numbers[4], 1)]
    ended = dict(engine.poll())
    for key in gone:
        engine.cancel(key)
        engine.cancel(key)  # twice is once
    found = drain(engine, numbers) | {Key(numbers.index(k.request), k.completion): each for k, each in ended.items()}
    for (request, completion), made in found.items():
        close(made, expected()[request][completion])
    everyone = {
        Key(number, i) for number, request in zip(numbers, MIXED, strict=True) for i in range(request.completions)
    }
    assert {Key(numbers[n], i) for n, i in found} == everyone - set(gone) | (set(ended) & set(gone))
    assert_clean(engine)


@pytest.mark.parametrize("keep", [False, True])
def test_a_completion_that_has_ended_and_was_not_polled_can_be_parked_and_cancelled(keep):
    engine = shared_engine()
    number = engine.submit(dataclasses.replace(MIXED[0], keep=keep))
    ended, cancelled, other = (Key(number, i) for i in range(3))
    while engine.busy:
        engine.step()
    engine.park(ended)  # nothing happens
    assert engine.ledger(ended) == (*MIXED[0].prompt, *expected()[0][0].tokens.tolist())
    engine.cancel(cancelled)
    polled = dict(engine.poll())
    assert list(polled) == [ended, other]
    close(polled[ended], expected()[0][0])
    if keep:
        with pytest.raises(ValueError, match="has ended; extend it"):
            engine.resume(ended)
        engine.cancel(ended)
        engine.cancel(other)
    for key in (ended, cancelled):
        with pytest.raises(ValueError, match=r"is unknown: it was cancelled, or has ended"):
            engine.park(key)
    assert_clean(engine)


def test_a_generation_leaves_other_completions_alone():
    engine = shared_engine()
    (parked,) = (Key(engine.submit(dataclasses.replace(MIXED[0], completions=1)), 0),)
    engine.step()
    engine.park(parked)
    before = engine.ledger(parked)
    active = engine.submit(dataclasses.replace(MIXED[1], completions=1, keep=True))
    assert same(answers_of(engine, MIXED[2:]), expected()[2:])
    with pytest.raises(KeyboardInterrupt):
        engine.generate(MIXED[2:], on_poll=raiser(KeyboardInterrupt))
    assert engine.ledger(parked) == before
    engine.resume(parked)
    while engine.busy:
        engine.step()
    found = dict(engine.poll())
    close(found[parked], expected()[0][0])
    close(found[Key(active, 0)], expected()[1][0])
    engine.cancel(Key(active, 0))
    assert_clean(engine)


def cut(completion, length):
    """The first tokens of a completion, as if it had been interrupted behind them."""
    names = ("tokens", "sampled_logprobs", "full_logprobs", "versions")
    arrays = {name: getattr(completion, name)[:length] for name in names}
    return dataclasses.replace(completion, **arrays, text="", finish_reason=None)


def raiser(error):
    def raise_it():
        raise error

    return raise_it


def test_a_restored_conversation_draws_as_if_it_had_not_been_interrupted():
    """Restored between turns and within one, by the index of its completion."""
    engine, reply = shared_engine(), SamplingParams(max_new_tokens=6)
    first = dataclasses.replace(MIXED[0], prompt=MIXED[0].prompt[:20], completions=3, keep=True)
    number = engine.submit(first)
    while engine.busy:
        engine.step()
    keys = sorted(key for key, _ in engine.poll())
    ledgers = {key.completion: (*engine.ledger(key), 7, 8) for key in keys[1:]}
    for key in keys:
        engine.extend(key, (7, 8), reply, seed=5)
    whole = drain(engine, [number])
    restored = Request(prompt=first.prompt, sampling=reply, seed=5, completions=3, ledgers=ledgers)
    engine.stats()
    found = drain(engine, [engine.submit(restored)])
    stats = engine.stats()
    assert set(found) == {Key(0, 1), Key(0, 2)}
    own = sum(len(ledger) - 1 - 16 for ledger in ledgers.values())  # two pages are shared
    assert stats.scheduled.rebuilt_tokens == 20 + own
    middle = dataclasses.replace(
        restored, begun={i: cut(whole[Key(0, i)], i) if i else whole[Key(0, i)] for i in range(3)}
    )
    answers = answers_of(engine, [middle])[0]
    for i in (1, 2):
        close(found[Key(0, i)], whole[Key(0, i)])
        close(answers[i], whole[Key(0, i)])
    with pytest.raises(ValueError, match=r"ledger of completion 3 of 3 must begin with the prompt's 20 tokens"):
        engine.submit(dataclasses.replace(restored, ledgers={3: ledgers[1]}))
    assert_clean(engine)


def test_only_what_was_evicted_counts_as_rebuilt():
    """A parked conversation loses its pages to a longer prompt; its next turn prefills old and new tokens together."""
    with whole_slots():
        engine = make_engine(SMALL.model_copy(update={"cache_tokens": 8 * 9}))
    (key,) = (Key(engine.submit(dataclasses.replace(MIXED[0], prompt=(5,) * 21, completions=1, keep=True)), 0),)
    while engine.busy:
        engine.step()
    (turn,) = (completion for _, completion in engine.poll())
    answers_of(engine, [dataclasses.replace(MIXED[1], prompt=(6,) * 48, completions=1)])
    assert engine.stats().scheduled.evicted == 0  # `generate` has taken them
    engine.extend(key, (7, 8, 9), SamplingParams(max_new_tokens=2), seed=0)
    while engine.busy:
        engine.step()
    stats = engine.stats()
    made_before = 21 + len(turn.tokens) - 1  # the last one drawn had not entered the cache
    assert (stats.scheduled.rebuilt_tokens, stats.scheduled.prefill_tokens) == (made_before, made_before + 1 + 3)


def test_what_ends_a_generation_leaves_nothing_behind():
    engine, polls = shared_engine(), []

    def stop():
        polls.append(1)
        if len(polls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(MIXED, on_poll=stop)
    assert_clean(engine)
    assert same(answers_of(engine, MIXED), expected())


def test_completions_that_are_not_known_or_not_parked_are_errors_by_name():
    engine = shared_engine()
    number = engine.submit(MIXED[0])
    with pytest.raises(ValueError, match=rf"completion 0 of request {number} is waiting, not parked"):
        engine.extend(Key(number, 0), (1,), SamplingParams(max_new_tokens=1), seed=0)
    engine.park(Key(number, 0))
    with pytest.raises(ValueError, match=r"max_new_tokens\) leaves for the next turn is 48"):
        engine.extend(Key(number, 0), (1,) * 60, SamplingParams(max_new_tokens=12), seed=0)
    for i in range(3):
        engine.cancel(Key(number, i))
    with pytest.raises(ValueError, match=rf"completion 0 of request {number} is unknown"):
        engine.park(Key(number, 0))
    assert_clean(engine)


def test_a_stop_string_that_is_a_special_token_ends_at_that_token():
    engine = make_engine(eos_tokens=())
    engine.tokenizer.special_tokens["<end>"] = EOS
    free = random_requests(1, seed=3, temperature=1.5, completions=3)[0]
    ends = [answers.tokens.tolist() for answers in answers_of(engine, [free])[0]]
    token = ends[0][4]
    engine.tokenizer.special_tokens["<end>"] = token
    sampling = dataclasses.replace(free.sampling, stop=("<end>",))
    made = answers_of(engine, [dataclasses.replace(free, sampling=sampling)])[0][0]
    assert made.tokens.tolist() == ends[0][: ends[0].index(token) + 1]
    assert made.finish_reason == "stop"


def test_a_stop_string_that_never_comes_ends_nothing():
    sampling = dataclasses.replace(MIXED[0].sampling, stop=("no such text",))
    made = answers_of(shared_engine(), [dataclasses.replace(MIXED[0], sampling=sampling)])[0]
    for completion, other in zip(made, expected()[0], strict=True):
        close(completion, other)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.down", r"weight layers\.down of layer 1 is not finite"),
        ("embed", r"weight embed is not finite"),
    ],
)
def test_logits_that_are_not_numbers_are_an_error_that_names_request_and_layer(name, message):
    engine, params = shared_engine(), tiny_params()
    bad = params[name].at[(1, 2, 3) if name.startswith("layers.") else (MIXED[1].prompt[0], 0)].set(jnp.nan)
    engine.load({**params, name: bad})
    with pytest.raises(NonFiniteError, match=rf"request \d+, completion \d+, .* logits are NaN or infinite; {message}"):
        engine.generate(MIXED)
    assert_clean(engine)
    engine.load(params)
    assert same(answers_of(engine, MIXED), expected())


def test_nothing_is_compiled_after_warm_up_over_two_hundred_mixed_requests():
    engine = shared_engine()
    engine.warm_up()
    rng = random.Random(1)
    requests = [
        random_requests(
            1,
            seed=100 + n,
            completions=rng.randint(1, 4),
            max_new_tokens=rng.randint(1, 12),
            temperature=rng.choice((0.5, 1.0)),
            top_k=rng.choice((0, 5)),
            top_p=rng.choice((1.0, 0.9)),
        )[0]
        for n in range(200)
    ]
    assert engine.generate(requests)[1].calls.compilations == 0
