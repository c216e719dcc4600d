import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import (
    ALL_DEVICES_CONFIG,
    CONFIG,
    DECODER,
    EOS,
    ROUNDING,
    Letters,
    answers_of,
    make_engine,
    mesh_of,
    plain_logits,
    random_requests,
    same,
    tiny_params,
)
from whole_slots import whole_slots

from podium.config.sizes import cache_pages, prompt_buckets
from podium.models.linear import of_bits
from podium.models.params import ROLLOUT_AXES
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.programs import abstract_engine_cache, abstract_slots
from podium.rollout.request import CallCounts, Request, RolloutStats, SamplingParams, ScheduleCounts
from podium.sharding import ShardingRules

MIXED = [
    *random_requests(6, seed=1),
    *random_requests(3, seed=2, temperature=0.6, top_k=7),
    *random_requests(3, seed=3, top_p=0.8, min_p=0.01),
    *random_requests(2, seed=4, temperature=0.0),
    *random_requests(3, seed=5, max_new_tokens=1),
]


@functools.cache
def shared_engine():
    """One engine for the tests that do not ask for another: its programs are compiled once."""
    engine = make_engine()
    engine.tokenizer.special_tokens["</s>"] = EOS
    return engine


@functools.cache
def mixed_answers():
    return answers_of(shared_engine(), MIXED)


def test_every_request_gets_its_completions_in_order():
    answers = mixed_answers()
    assert [len(group) for group in answers] == [request.completions for request in MIXED]
    for request, group in zip(MIXED, answers, strict=True):
        for completion in group:
            assert 1 <= len(completion.tokens) <= request.sampling.max_new_tokens
            assert completion.tokens.dtype == np.int32
            assert completion.sampled_logprobs.dtype == np.float32
            assert len(completion.sampled_logprobs) == len(completion.tokens)
            assert (completion.sampled_logprobs <= 0).all()
            assert completion.text == shared_engine().tokenizer.decode(completion.tokens.tolist())
            ended = completion.tokens[-1] == EOS
            assert completion.finish_reason == ("stop" if ended else "length")
            assert ended or len(completion.tokens) == request.sampling.max_new_tokens
            assert EOS not in completion.tokens[:-1]


def test_a_request_gives_the_same_tokens_alone_and_in_company():
    together = mixed_answers()
    for index in (0, 7, 10, 13, 15):
        assert same(answers_of(shared_engine(), [MIXED[index]]), [together[index]])


def test_a_request_gives_the_same_tokens_in_any_order_and_slot():
    order = np.random.default_rng(0).permutation(len(MIXED))
    shuffled = answers_of(shared_engine(), [MIXED[i] for i in order])
    assert same(shuffled, [mixed_answers()[i] for i in order])


def test_a_request_gives_the_same_tokens_with_fewer_completions():
    fewer = answers_of(shared_engine(), [dataclasses.replace(MIXED[0], completions=1)])
    assert same(fewer, [mixed_answers()[0][:1]])


def test_completions_differ_and_follow_from_the_seed():
    request = random_requests(1, seed=9, completions=4)[0]
    once, again, other = answers_of(shared_engine(), [request, request, dataclasses.replace(request, seed=1)])
    assert same([once], [again])
    assert len({tuple(completion.tokens.tolist()) for completion in [*once, *other]}) == 8


def test_eight_devices_give_the_tokens_of_one():
    assert same(answers_of(make_engine(ALL_DEVICES_CONFIG, devices=8), MIXED), mixed_answers())


def test_the_first_requests_of_a_new_engine_may_be_few():
    """They fit its smallest program: a slot on each device, where it has two."""
    requests = random_requests(4, seed=5, completions=2)
    assert same(answers_of(make_engine(ALL_DEVICES_CONFIG, devices=8), requests), answers_of(shared_engine(), requests))


def test_another_number_of_slots_gives_the_same_tokens():
    more = CONFIG.model_copy(update={"slots": 3 * CONFIG.slots})
    expected = mixed_answers()
    with whole_slots():
        assert same(answers_of(make_engine(more), MIXED), expected)


def lowered_decode(engine):
    """The decode program of all slots, lowered."""
    config, rules = engine.config, engine.device.form.rules
    cache = abstract_engine_cache(config, DECODER, rules, engine.device.form.dtype)
    return engine.device.programs.decode.lower(
        engine.device.params, cache, *abstract_slots(config, DECODER, config.slots, rules, penalised=False)
    )


def test_programs_on_eight_devices_move_no_keys_between_slots():
    engine = make_engine(ALL_DEVICES_CONFIG, devices=8)
    text = lowered_decode(engine).compile().as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text
    assert "collective-permute" not in text


def gaps(requests, answers, params, dtype):
    """How far sampled log-probabilities are from those of a plain pass over the whole sequence."""
    found = []
    for request, group in zip(requests, answers, strict=True):
        sampling = request.sampling
        if sampling.top_p < 1:
            continue  # where rounding decides whether one more token is kept, the two differ by more than rounding
        for completion in group:
            logits = plain_logits(params, [*request.prompt, *completion.tokens.tolist()], dtype)
            logits = logits[len(request.prompt) - 1 : -1] / (sampling.temperature or 1.0)
            if sampling.top_k:
                logits[logits < np.sort(logits, axis=1)[:, [-sampling.top_k]]] = -np.inf
            logprobs = jax.nn.log_softmax(jnp.asarray(logits), axis=-1)
            expected = np.take_along_axis(np.asarray(logprobs), completion.tokens[:, None], axis=1)[:, 0]
            found.append(np.max(np.abs(expected - completion.sampled_logprobs)) / max(1.0, np.max(np.abs(expected))))
    return found


def test_sampled_log_probabilities_are_those_of_a_plain_pass():
    assert max(gaps(MIXED, mixed_answers(), tiny_params(), jnp.float32)) <= ROUNDING


def test_sampled_log_probabilities_are_near_those_of_a_plain_pass_in_bfloat16():
    free = [request for request in MIXED if not request.sampling.top_k]
    with whole_slots():
        answers = answers_of(make_engine(dtype=jnp.bfloat16), free)
    assert max(gaps(free, answers, tiny_params(), jnp.bfloat16)) <= 2e-3


def test_greedy_is_the_argmax_of_a_plain_pass():
    requests = random_requests(2, seed=4, temperature=0.0, completions=2)
    for request, group in zip(requests, answers_of(shared_engine(), requests), strict=True):
        for completion in group:
            logits = plain_logits(tiny_params(), [*request.prompt, *completion.tokens.tolist()])
            assert completion.tokens.tolist() == logits[len(request.prompt) - 1 : -1].argmax(axis=1).tolist()


@pytest.mark.parametrize("devices", [1, 8])
def test_a_prompts_own_tokens_are_scored_as_a_plain_pass_scores_them(devices):
    engine = shared_engine() if devices == 1 else make_engine(ALL_DEVICES_CONFIG, devices=8)
    random, sampling = np.random.default_rng(8), SamplingParams(max_new_tokens=2, temperature=0.0)
    prompts = [tuple(random.integers(1, DECODER.vocab, length).tolist()) for length in (1, 2, 7, 16, 33, 48)]
    scored = [Request(prompt=prompt, sampling=sampling, seed=0, score_prompt=True) for prompt in prompts]
    answers = answers_of(engine, [*scored, *MIXED[:4]])
    assert same(answers[len(scored) :], mixed_answers()[:4])
    for prompt, (completion,) in zip(prompts, answers, strict=False):
        found = completion.prompt_scores
        logits = plain_logits(tiny_params(), list(prompt))[:-1]
        expected = np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))
        own = np.take_along_axis(expected, np.array(prompt[1:], int)[:, None], axis=1)[:, 0]
        assert found.best_tokens.tolist() == [-1, *logits.argmax(axis=1).tolist()]
        np.testing.assert_allclose(found.logprobs, [np.nan, *own], rtol=0, atol=ROUNDING)
        np.testing.assert_allclose(found.best_logprobs, [np.nan, *expected.max(axis=1)], rtol=0, atol=ROUNDING)
        likeliest = np.flatnonzero(found.best_tokens[1:] == np.array(prompt[1:])) + 1
        assert (found.logprobs[likeliest] == found.best_logprobs[likeliest]).all()
    assert all(completion.prompt_scores is None for group in answers[len(scored) :] for completion in group)


def test_scores_survive_the_loss_of_a_sequences_pages():
    few = CONFIG.model_copy(update={"page_tokens": 4, "cache_tokens": 124})
    random, sampling = np.random.default_rng(8), SamplingParams(max_new_tokens=12, temperature=0.0)
    prompts = [tuple(random.integers(1, DECODER.vocab, length).tolist()) for length in (40, 30, 30, 30)]
    requests = [Request(prompt=prompt, sampling=sampling, seed=0, score_prompt=True) for prompt in prompts]
    with whole_slots():
        engine = make_engine(few)
    answers, stats = engine.generate(requests)
    assert stats.scheduled.preempted and stats.scheduled.rebuilt_tokens
    for one, other in zip(answers, answers_of(shared_engine(), requests), strict=True):
        for own, alone in zip(one[0].prompt_scores.arrays, other[0].prompt_scores.arrays, strict=True):
            np.testing.assert_allclose(own, alone, rtol=0, atol=ROUNDING)


def test_only_one_completion_that_starts_anew_is_scored():
    request = dataclasses.replace(MIXED[0], completions=2, score_prompt=True)
    with pytest.raises(ValueError, match="needs a single completion without begun or ledgers"):
        shared_engine().submit(request)


def test_an_immediate_end_of_sequence_is_a_completion_of_one_token():
    greedy = random_requests(1, seed=6, temperature=0.0, completions=2)
    first = int(answers_of(shared_engine(), greedy)[0][0].tokens[0])
    request = dataclasses.replace(greedy[0], sampling=dataclasses.replace(greedy[0].sampling, stop_tokens=(first,)))
    for completion in answers_of(shared_engine(), [request])[0]:
        assert completion.tokens.tolist() == [first]
        assert completion.finish_reason == "stop"


def test_the_tokenizers_end_of_sequence_tokens_all_end():
    request = random_requests(1, seed=6, temperature=0.0, completions=1)[0]
    tokens = answers_of(shared_engine(), [request])[0][0].tokens.tolist()
    end = next(i for i in range(1, len(tokens)) if tokens[i] not in tokens[:i])
    engine = make_engine(eos_tokens=(EOS, tokens[end]))
    completion = answers_of(engine, [request])[0][0]
    assert completion.tokens.tolist() == tokens[: end + 1]
    assert completion.text == Letters(tokens[end]).decode(tokens[: end + 1])


@pytest.mark.parametrize(("begin", "length"), [(0, 1), (0, 3), (2, 3), (4, 5), (9, 2)])
def test_a_stop_string_ends_with_the_token_that_completes_it(begin, length):
    free = random_requests(1, seed=8, completions=1)[0]
    whole = answers_of(shared_engine(), [free])[0][0]
    stop = whole.text[begin : begin + length]
    end = whole.text.index(stop) + length  # it may come up earlier than where it was taken from
    request = dataclasses.replace(free, sampling=dataclasses.replace(free.sampling, stop=("not there", stop)))
    completion = answers_of(shared_engine(), [request])[0][0]
    assert completion.tokens.tolist() == whole.tokens[:end].tolist()
    np.testing.assert_allclose(completion.sampled_logprobs, whole.sampled_logprobs[:end], rtol=0, atol=ROUNDING)
    assert completion.text.endswith(stop)
    assert completion.finish_reason == "stop"


def test_a_stop_string_frees_the_slot_without_disturbing_others():
    stops = [dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, stop=("a", "b"))) for one in MIXED[:4]]
    answers = answers_of(shared_engine(), [*stops, *MIXED])
    assert same(answers[4:], mixed_answers())
    assert all(
        "a" in one.text or "b" in one.text or one.tokens[-1] == EOS or len(one.tokens) == 12 for one in answers[0]
    )


def test_a_stop_string_in_the_prompt_does_not_count():
    letter = 3
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0, stop=(Letters().decode([letter]),))
    request = Request(prompt=(letter,) * 5, sampling=sampling, seed=0)
    free = dataclasses.replace(request, sampling=dataclasses.replace(sampling, stop=()))
    with_stop, without = answers_of(shared_engine(), [request, free])
    expected = next((i + 1 for i, token in enumerate(without[0].tokens) if token % 52 == letter), 4)
    assert len(with_stop[0].tokens) == expected


def test_no_requests_give_no_completions():
    assert answers_of(shared_engine(), []) == []
    assert shared_engine().generate([])[1].completion_tokens == 0


def test_new_parameters_change_the_answers():
    engine = shared_engine()
    old = answers_of(engine, MIXED[:3])
    engine.load(tiny_params(seed=1))
    new = answers_of(engine, MIXED[:3])
    assert not same(old, new)
    engine.load(tiny_params(seed=0))
    assert same(answers_of(engine, MIXED[:3]), old)


def test_loaded_parameters_survive_the_donation_of_the_trainers():
    engine, params = shared_engine(), tiny_params()
    engine.load(params)
    for value in params.values():
        value.delete()
    assert same(answers_of(engine, MIXED[:2]), mixed_answers()[:2])


def test_nothing_is_compiled_after_the_first_time():
    engine = make_engine(CONFIG.model_copy(update={"refill_steps": 5}))  # programs that no other test has called
    assert engine.generate(MIXED)[1].calls.compilations > 0
    engine.load(tiny_params(seed=1))
    assert engine.generate(random_requests(20, seed=11, completions=5, top_k=3))[1].calls.compilations == 0


def test_stats_count_what_was_done():
    answers, stats = shared_engine().generate(MIXED)
    tokens = sum(len(completion.tokens) for group in answers for completion in group)
    assert stats.completion_tokens == tokens
    assert stats.prompt_tokens == sum(len(request.prompt) for request in MIXED)
    decoded = tokens - sum(map(len, answers))  # each first one comes of what prefill has left
    assert stats.calls.decoded_tokens == decoded
    assert stats.scheduled.prefill_tokens == stats.prompt_tokens
    assert stats.slots_busy == pytest.approx(decoded / (stats.calls.decode_steps * CONFIG.slots))
    # fewer slots, as work runs out
    assert stats.slots_busy <= stats.slot_utilisation == decoded / stats.calls.slot_steps
    assert (stats.scheduled.preempted, stats.scheduled.evicted, stats.scheduled.rebuilt_tokens) == (0, 0, 0)
    assert 0 < stats.scheduled.pages_peak <= cache_pages(CONFIG, 1)
    assert stats.calls.prefill_s > 0
    assert stats.calls.decode_s > 0
    assert stats.tokens_per_s > 0


def test_stats_of_calls_one_after_the_other_add_up():
    one = RolloutStats(
        completion_tokens=8,
        calls=CallCounts(decoded_tokens=6, decode_steps=3, slots=4, slot_steps=12, generate_s=2.0),
    )
    other = RolloutStats(
        completion_tokens=2,
        calls=CallCounts(decoded_tokens=2, decode_steps=1, slots=4, slot_steps=4, generate_s=3.0),
    )
    first, second = (
        dataclasses.replace(each, scheduled=ScheduleCounts(parked=n)) for each, n in ((one, 3), (other, 2))
    )
    assert (first.then(second).scheduled.parked, first.beside(second).scheduled.parked) == (3, 5)
    both = one.then(other)
    assert (both.calls.decode_steps, both.calls.slots, both.slot_utilisation, both.tokens_per_s) == (4, 4, 0.5, 2.0)
    assert RolloutStats().then(one) == one.then(RolloutStats()) == one


def test_stats_of_hosts_side_by_side_are_those_of_one_engine_with_all_their_slots():
    one = RolloutStats(
        prompt_tokens=7,
        completion_tokens=80,
        calls=CallCounts(
            prefill_s=1.0, decode_s=3.0, decode_steps=10, slots=4, slot_steps=40, decoded_tokens=20, generate_s=4.0,
            compilations=1,
        ),
    )  # fmt: skip
    slower = dataclasses.replace(one.calls, decode_steps=20, slot_steps=80, decoded_tokens=60, generate_s=8.0)
    other = dataclasses.replace(one, calls=slower)
    assert one.beside(RolloutStats()) == RolloutStats().beside(one) == one  # a host without a prompt
    both = one.beside(other)
    assert both == other.beside(one)
    assert both.calls.decode_steps == 20
    assert both.slots_busy == 80 / (20 * 8)  # of both hosts' slots, as long as the slower one ran
    assert both.slot_utilisation == 80 / 120
    assert (both.completion_tokens, both.tokens_per_s) == (160, 160 / 8.0)
    assert (both.calls.decode_s, both.calls.compilations, both.prompt_tokens) == (3.0, 1, 14)


def test_decoding_stops_when_no_slot_is_live():
    request = random_requests(1, seed=12, completions=1, max_new_tokens=3, temperature=0.0)[0]
    engine = make_engine(CONFIG.model_copy(update={"refill_steps": 50}))
    answers, stats = engine.generate([request])
    assert stats.calls.decode_steps == len(answers[0][0].tokens) - 1


def test_a_sequence_of_the_greatest_length_fits():
    sampling = SamplingParams(max_new_tokens=12, temperature=0.0)
    request = Request(prompt=tuple(range(100, 148)), sampling=sampling, seed=0)
    completion = answers_of(shared_engine(), [request])[0][0]
    logits = plain_logits(tiny_params(), [*request.prompt, *completion.tokens.tolist()])
    assert completion.tokens.tolist() == logits[47:-1].argmax(axis=1).tolist()
    assert len(completion.tokens) == 12


@pytest.mark.parametrize(
    ("longest", "buckets"), [(1, [1]), (32, [32]), (33, [32, 33]), (100, [32, 64, 100]), (256, [32, 64, 128, 256])]
)
def test_buckets_reach_the_longest_prompt_and_no_further(longest, buckets):
    assert prompt_buckets(CONFIG.model_copy(update={"max_prompt_tokens": longest})) == buckets


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ()}, "prompt is empty"),
        ({"prompt": (1,) * 49}, "prompt has 49 tokens, and rollout.max_prompt_tokens is 48"),
        ({"prompt": (300,)}, "prompt has token 300, outside the model's vocabulary of 300"),
        ({"completions": 0}, "completions is 0"),
        ({"sampling": SamplingParams(max_new_tokens=60)}, "max_new_tokens is 60; it must be 1 to 59"),
        (
            {"prompt": (1,) * 48, "sampling": SamplingParams(max_new_tokens=13)},
            "max_new_tokens is 13: together more than",
        ),
        ({"sampling": SamplingParams(max_new_tokens=0)}, "max_new_tokens is 0; it must be 1 to"),
        ({"sampling": SamplingParams(max_new_tokens=1, temperature=-1.0)}, "temperature is -1.0"),
        ({"sampling": SamplingParams(max_new_tokens=1, stop_tokens=tuple(range(8)))}, "there are 9 stop tokens"),
        (
            {"sampling": SamplingParams(max_new_tokens=1, stop_tokens=(3, 300))},
            "stop token 300 is outside the model's vocabulary of 300",
        ),
        ({"sampling": SamplingParams(max_new_tokens=1, temperature=float("nan"))}, "temperature is nan"),
        ({"sampling": SamplingParams(max_new_tokens=1, temperature=0.0, top_p=0.9)}, "ignores top_p 0.9"),
        ({"sampling": SamplingParams(max_new_tokens=1, top_p=0.0)}, "top_p 0.0: top_k must be .* top_p 1e-06 to 1"),
        ({"sampling": SamplingParams(max_new_tokens=1, top_p=1e-50)}, "top_p 1e-50: top_k must be .* top_p 1e-06"),
        ({"sampling": SamplingParams(max_new_tokens=1, top_k=2**31)}, "top_k 2147483648: top_k must be 0 .all. to"),
        ({"sampling": SamplingParams(max_new_tokens=1, temperature=1e-50)}, "temperature is 1e-50; it must be 0 "),
        ({"sampling": SamplingParams(max_new_tokens=1, stop=("",))}, "a stop string is empty"),
        ({"sampling": SamplingParams(max_new_tokens=1, stop=("a</s>",))}, "contains the special token '</s>'"),
    ],
)
def test_a_request_that_does_not_fit_is_an_error_that_says_why(changes, message):
    good = Request(prompt=(1,), sampling=SamplingParams(max_new_tokens=1), seed=0)
    with pytest.raises(ValueError, match=rf"request 1: .*{message}"):
        answers_of(shared_engine(), [good, dataclasses.replace(good, **changes)])
    assert not shared_engine().busy  # the first one is forgotten


@pytest.mark.parametrize(("name", "value"), [("slots", 12), ("prefill_rows", 4)])
def test_what_does_not_divide_over_the_devices_is_an_error_by_name(name, value):
    config = ALL_DEVICES_CONFIG.model_copy(update={name: value})
    rules = ShardingRules(mesh_of(8), ROLLOUT_AXES)
    with pytest.raises(ValueError, match=rf"rollout\.{name} is {value} and is split over 8 devices; .* multiple of 8"):
        RolloutEngine(Device(config, DECODER, rules, dtype=jnp.float32), Letters(EOS))


def test_an_engine_without_parameters_says_so():
    engine = make_engine()
    engine.unload()
    with pytest.raises(RuntimeError, match=r"call load\(params\) first"):
        answers_of(engine, MIXED)


def test_an_engine_without_a_tokenizer_gives_tokens_without_text():
    engine = RolloutEngine(Device(CONFIG, DECODER, ShardingRules(mesh_of(1), ROLLOUT_AXES), dtype=jnp.float32), None)
    engine.load(tiny_params())
    sampling = dataclasses.replace(MIXED[0].sampling, stop_tokens=(EOS,))
    (made,) = answers_of(engine, [dataclasses.replace(MIXED[0], sampling=sampling)])
    for completion, other in zip(made, mixed_answers()[0], strict=True):
        assert (completion.tokens.tolist(), completion.text) == (other.tokens.tolist(), "")
    with pytest.raises(ValueError, match="stop string 'a' needs a tokenizer, and this engine has none"):
        answers_of(engine, [dataclasses.replace(MIXED[0], sampling=dataclasses.replace(sampling, stop=("a",)))])


def test_a_call_under_way_does_not_read_what_the_host_writes_for_the_next():
    """Memory that is aligned so is what jax would take as it is, instead of a copy."""
    memory = np.zeros(256, np.uint8)
    start = -memory.ctypes.data % 64
    mine = memory[start : start + 64].view(np.int32)
    given = make_engine().device._put(mine)
    mine[:] = 7
    assert not np.any(given)


def test_on_cpu_bfloat16_weights_are_taken_out_of_their_stacks_as_they_are():
    """Of bfloat16 itself XLA would make float32 of all layers in every call; the answers are the same bits."""
    with whole_slots():
        engine = make_engine(dtype=jnp.bfloat16)
    bits = engine.device.params
    assert bits is not None and {value.dtype for value in bits.values()} == {jnp.dtype(jnp.uint16)}
    stack = re.escape(str(list(bits["layers.up"].shape)).replace(" ", ""))
    assert not re.search(rf"f32{stack}", lowered_decode(engine).compile().as_text())
    found = answers_of(engine, MIXED)
    engine.device.params = {name: of_bits(value) for name, value in bits.items()}
    assert re.search(rf"f32{stack}", lowered_decode(engine).compile().as_text()), "XLA has learned it: bits can go"
    assert same(answers_of(engine, MIXED), found)


def test_decoding_keeps_one_copy_of_the_cache():
    config = CONFIG.model_copy(update={"max_prompt_tokens": 4096})
    engine = make_engine(config)
    cache = abstract_engine_cache(config, DECODER, engine.device.form.rules, engine.device.form.dtype)
    memory = lowered_decode(engine).compile().memory_analysis()
    nbytes = 2 * cache.places[0].kv.keys.size * 4
    assert memory.alias_size_in_bytes >= nbytes, "the cache is not donated"
    assert memory.temp_size_in_bytes < 0.2 * nbytes  # a page of each slot is read at a time


def test_a_cache_that_does_not_hold_the_longest_sequence_is_an_error_by_name():
    config = CONFIG.model_copy(update={"page_tokens": 16, "cache_tokens": 64})
    with pytest.raises(ValueError, match=r"rollout\.cache_tokens is 64, 4 pages on each of 1 .* set it to at least 80"):
        make_engine(config)
