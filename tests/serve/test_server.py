"""A real server of a tiny model on loopback: what each route answers, and that answers are the engine's."""

import concurrent.futures
import http.client
import json
import socket
import time

import numpy as np
import pytest
from in_thread import Server
from processes import wait_for
from serving import CONTEXT, QUEUE

from benches.recipes import write_tiny_model
from podium.config.errors import UsageError
from podium.observe.access import Address
from podium.rollout.request import Request, SamplingParams
from podium.serve.app import MAX_BODY, make_app
from podium.serve.app import Server as Routes
from podium.serve.command import longest_sequence

JSON = {"Content-Type": "application/json"}
QUESTION = "What is 3 + 4 ?"
ROUNDING = 1e-5
"""Of log-probabilities, between calls of different sizes; what docs/design.md promises."""


def post(served, path, body, **headers):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, text, answer = served.server.ask(path, "POST", raw, **{**JSON, **headers})
    return status, json.loads(text), answer


def answered(served, path, **body):
    status, document, _ = post(served, path, body)
    assert status == 200, document
    return document


def streamed(served, path, **body):
    """The documents of a stream, without its end, which is there."""
    raw = json.dumps({**body, "stream": True})
    status, text, answer = served.server.ask(path, "POST", raw, **JSON)
    assert status == 200 and answer.headers["content-type"].startswith("text/event-stream"), text
    *events, end, rest = text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def encode(served, text=QUESTION):
    return tuple(served.model.tokenizer.encode(text))


def by_engine(served, prompt, completions=1, seed=0, **settings):
    """What the engine answers by itself; the server must have nothing to do meanwhile."""
    assert idle(served)
    request = Request(prompt=prompt, sampling=SamplingParams(**settings), seed=seed, completions=completions)
    return served.engine.generate([request])[0][0]


def idle(served, seconds=60.0):
    """Whether the engine comes to have nothing to do, with nothing left of any request."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        counters, engine = served.clients.counters, served.engine
        if not (counters.in_flight or engine.busy or engine.keys or engine.pages_used):
            return True
        time.sleep(0.01)
    return False


# What is answered.


def test_greedy_completions_are_the_engines_tokens_and_logprobs(served):
    (expected,) = by_engine(served, encode(served), max_new_tokens=20, temperature=0.0)
    found = answered(served, "/v1/completions", prompt=QUESTION, max_tokens=20, temperature=0, logprobs=1)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    assert choice["logprobs"]["tokens"] == served.model.tokenizer.pieces(expected.tokens.tolist())
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected.sampled_logprobs, rtol=0, atol=ROUNDING)
    assert found["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": len(expected.tokens),
        "total_tokens": 6 + len(expected.tokens),
    }
    by_ids = answered(served, "/v1/completions", prompt=list(encode(served)), max_tokens=20, temperature=0, top_p=0.5)
    assert by_ids["choices"][0]["text"] == choice["text"]
    chatted = answered(
        served,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=20,
        temperature=0,
        logprobs=True,
    )
    (said,) = chatted["choices"]
    assert said["message"] == {"role": "assistant", "content": expected.text}
    assert [each["logprob"] for each in said["logprobs"]["content"]] == choice["logprobs"]["token_logprobs"]


def test_an_echo_has_the_log_probabilities_of_the_prompt(served):
    """What lm-evaluation-harness reads of prompts of token ids to compare the likelihoods of answers."""
    prompts = [list(encode(served)), list(encode(served, "1 + 1"))]
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
    found = answered(served, "/v1/completions", **body)
    for choice, prompt in zip(found["choices"], prompts, strict=True):
        (drawn,) = by_engine(served, tuple(prompt), max_new_tokens=1, temperature=0.0)
        logprobs, tokens = choice["logprobs"], [*prompt, *drawn.tokens.tolist()]
        assert choice["text"].startswith(served.model.tokenizer.spelled(prompt))
        assert logprobs["tokens"] == served.model.tokenizer.pieces(tokens)
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        for place in range(1, len(tokens)):  # each place by a prompt that ends before it
            (after,) = by_engine(served, tuple(tokens[:place]), max_new_tokens=1, temperature=0.0)
            (likeliest,) = logprobs["top_logprobs"][place].items()
            assert likeliest[0] == served.model.tokenizer.pieces(after.tokens.tolist())[0]
            assert likeliest[1] == pytest.approx(after.sampled_logprobs[0], abs=ROUNDING)
            greedy = tokens[place] == after.tokens[0]
            assert (logprobs["token_logprobs"][place] == likeliest[1]) == greedy
            assert logprobs["token_logprobs"][place] <= likeliest[1]
    assert found["usage"]["completion_tokens"] == 2


def test_a_penalty_holds_for_prompt_and_answer(served):
    settings = {"temperature": 0.0, "repetition_penalty": 50.0, "max_tokens": 12}
    (choice,) = answered(served, "/v1/completions", prompt=QUESTION, logprobs=0, **settings)["choices"]
    sampling = {"temperature": 0.0, "repetition_penalty": 50.0, "max_new_tokens": 12}
    (expected,) = by_engine(served, encode(served), **sampling)
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected.sampled_logprobs, rtol=0, atol=ROUNDING)
    tokens = expected.tokens.tolist()
    assert len(set(tokens)) == len(tokens) or len(tokens) > 1


def test_an_echo_alone_answers_nothing(served):
    body = {"prompt": QUESTION, "echo": True, "temperature": 0}
    found = answered(served, "/v1/completions", **body, max_tokens=0, logprobs=0)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (QUESTION, "length")
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["text_offset"]) == 6
    assert choice["logprobs"]["top_logprobs"] is None
    assert found["usage"]["completion_tokens"] == 0
    without = answered(served, "/v1/completions", **body, max_tokens=3)
    assert without["choices"][0]["logprobs"] is None
    assert without["choices"][0]["text"].startswith(QUESTION)


def test_tokens_come_in_and_out(served):
    prompt = encode(served)
    expected = by_engine(served, prompt, 3, seed=7, max_new_tokens=12, temperature=0.9, top_p=0.8)
    params = {"n": 3, "max_tokens": 12, "temperature": 0.9, "top_p": 0.8, "seed": 7, "logprobs": 1}
    body = {"model": "tiny", "token_ids": list(prompt), "sampling_params": {**params, "skip_special_tokens": False}}
    found = answered(served, "/inference/v1/generate", **body)
    assert found["request_id"]
    for choice, completion in zip(found["choices"], expected, strict=True):
        tokens = completion.tokens.tolist()
        assert (choice["token_ids"], choice["finish_reason"]) == (tokens, completion.finish_reason)
        content = choice["logprobs"]["content"]
        assert [each["token"] for each in content] == [f"token_id:{token}" for token in tokens]
        np.testing.assert_allclose(
            [each["logprob"] for each in content], completion.sampled_logprobs, rtol=0, atol=ROUNDING
        )


def test_a_seed_gives_the_same_draws_whatever_the_load(served):
    body = {"prompt": QUESTION, "max_tokens": 30, "seed": 11, "n": 3}
    alone = [each["text"] for each in answered(served, "/v1/completions", **body)["choices"]]
    assert len(set(alone)) == 3
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        noise = [
            pool.submit(answered, served, "/v1/completions", prompt=f"{n} + 1", max_tokens=3 + 5 * n) for n in range(8)
        ]
        loaded = list(pool.map(lambda _: answered(served, "/v1/completions", **body), range(4)))
        assert all(each.result()["choices"] for each in noise)
    assert [[each["text"] for each in found["choices"]] for found in loaded] == [alone] * 4
    other = answered(served, "/v1/completions", **{**body, "seed": 12})
    assert [each["text"] for each in other["choices"]] != alone


def test_without_a_seed_answers_differ(served):
    texts = {answered(served, "/v1/completions", prompt=QUESTION)["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1


def test_several_prompts_are_answered_in_order(served):
    prompts = ["1 + 1", "What is 7", QUESTION]
    body = {"max_tokens": 8, "temperature": 0, "n": 2}
    together = answered(served, "/v1/completions", prompt=prompts, **body)["choices"]
    assert [choice["index"] for choice in together] == list(range(6))
    alone = [answered(served, "/v1/completions", prompt=prompt, **body)["choices"] for prompt in prompts]
    assert [each["text"] for each in together] == [each["text"] for choices in alone for each in choices]


@pytest.mark.parametrize("stop", [None, "+", ["nowhere", "7 15"]])
def test_a_stream_adds_up_to_the_whole(served, stop):
    body = {"prompt": QUESTION, "max_tokens": 40, "seed": 3, "n": 3, "logprobs": 0}
    body |= {"stop": stop} if stop else {}
    whole = answered(served, "/v1/completions", **body)
    parts = streamed(served, "/v1/completions", **body, stream_options={"include_usage": True})
    assert parts.pop()["usage"] == whole["usage"]
    assert len(parts) > len(whole["choices"])
    for choice in whole["choices"]:
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert [each["finish_reason"] for each in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        for key in ("tokens", "token_logprobs", "text_offset"):
            found = [value for each in own for value in each["logprobs"][key]]
            assert found == (
                pytest.approx(choice["logprobs"][key], abs=ROUNDING)
                if key == "token_logprobs"
                else choice["logprobs"][key]
            )


def test_a_chat_streams_its_role_first_and_then_what_it_says(served):
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20, "seed": 3}
    (whole,) = answered(served, "/v1/chat/completions", **body)["choices"]
    parts = streamed(served, "/v1/chat/completions", **body)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.get("content", "") for delta in deltas) == whole["message"]["content"]
    assert parts[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_a_stop_string_across_tokens_ends_the_text_before_it(served):
    (free,) = answered(served, "/v1/completions", prompt=QUESTION, max_tokens=40, seed=3)["choices"]
    words = free["text"].split()
    stop = f"{words[4][-1]} {words[5]} {words[6][:1]}"  # begins and ends within tokens
    before = free["text"][: free["text"].index(stop)]
    body = {"prompt": QUESTION, "max_tokens": 40, "seed": 3, "stop": stop}
    (cut,) = answered(served, "/v1/completions", **body)["choices"]
    assert (cut["text"], cut["finish_reason"]) == (before, "stop")
    texts = [part["choices"][0]["text"] for part in streamed(served, "/v1/completions", **body)]
    assert "".join(texts) == before
    by_token = answered(served, "/v1/completions", prompt=QUESTION, max_tokens=40, seed=3, stop="<end>")
    assert by_token["choices"][0]["finish_reason"] in ("stop", "length")


def test_without_max_tokens_a_chat_has_all_the_room_there_is(served):
    content = " ".join(["3 +"] * 40)
    found = answered(served, "/v1/chat/completions", messages=[{"role": "user", "content": content}], seed=1, n=4)
    lengths = CONTEXT - found["usage"]["prompt_tokens"]
    assert found["usage"]["prompt_tokens"] == 80
    assert all(
        choice["finish_reason"] == "stop" or len(choice["message"]["content"].split()) <= lengths
        for choice in found["choices"]
    )


def test_messages_reach_the_template_in_its_own_terms(served):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "3"}'}}
    messages = [
        {"role": "developer", "content": "What"},
        {"role": "user", "content": [{"type": "text", "text": "is"}, {"type": "text", "text": " 4"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    tool = {"type": "function", "function": {"name": "weather", "description": "Reads"}}
    found = answered(served, "/v1/chat/completions", messages=messages, tools=[tool], max_tokens=1)
    expected = served.model.tokenizer.chat_format.render(
        [
            {"role": "system", "content": "What"},
            {"role": "user", "content": "is 4"},
            {"role": "assistant", "content": ""},
            {"role": "tool", "content": "7"},
        ],
        tools=[tool],
        answer=True,
    )
    assert expected.startswith("weather What is 4")
    assert found["usage"]["prompt_tokens"] == len(served.model.tokenizer.encode(expected))
    hidden = answered(served, "/v1/chat/completions", messages=messages, tools=[tool], tool_choice="none", max_tokens=1)
    assert hidden["usage"]["prompt_tokens"] == found["usage"]["prompt_tokens"] - 1


def test_there_is_one_model_and_another_is_not_found(served):
    status, text, _ = served.server.ask("/v1/models")
    (model,) = json.loads(text)["data"]
    assert (status, model["id"], model["max_model_len"]) == (200, "tiny", CONTEXT)
    assert json.loads(served.server.ask("/v1/models/tiny")[1])["id"] == "tiny"
    assert served.server.ask("/v1/models/gpt-4/x")[0] == 404
    status, document, _ = post(served, "/v1/completions", {"model": "gpt-4", "prompt": "1"})
    assert (status, document["error"]["param"], document["error"]["code"]) == (404, "model", "model_not_found")


def test_counters_are_shown_for_prometheus(served):
    def counters():
        lines = served.server.ask("/metrics")[1].splitlines()
        return {name: float(value) for name, value in (line.split() for line in lines if line[0] != "#")}

    before = counters()
    found = answered(served, "/v1/completions", prompt=QUESTION, max_tokens=9, n=2)
    assert idle(served)
    after = counters()
    grown = {name.removeprefix("podium_"): after[name] - before[name] for name in after}
    assert grown["answers_finished_total"] == 2 and grown["prompt_tokens_total"] == 6
    assert grown["answer_tokens_total"] == found["usage"]["completion_tokens"]
    assert after["podium_answers_in_flight"] == after["podium_cache_pages_used"] == 0


# Clients that leave, many at a time, or too many.


def open_connection(served, path, body):
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", served.server.port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return connection


LONG = {"prompt": QUESTION, "max_tokens": 100, "logit_bias": None, "n": 4, "temperature": 1e6}
"""Answers that take a while: almost all draws are of other tokens than the one that ends them."""


DRAWN = {name: value for name, value in LONG.items() if name != "prompt"}
CHATTED = {"messages": [{"role": "user", "content": QUESTION}], **DRAWN}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG),
        ("/v1/completions", {**LONG, "stream": True}),
        ("/v1/chat/completions", CHATTED),
        ("/v1/chat/completions", {**CHATTED, "stream": True}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": DRAWN}),
    ],
)
def test_a_client_that_leaves_frees_its_slots_and_pages(served, slow, path, body):
    assert idle(served)
    for _ in range(3):
        left = served.clients.counters.left
        connection = open_connection(served, path, body)
        if body.get("stream"):
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        wait_for(lambda: served.engine.pages_used)
        connection.close()
        assert idle(served)
        assert served.clients.counters.left > left, "all answers came to their end"
    assert answered(served, "/v1/completions", prompt=QUESTION)["choices"]


def test_fifty_clients_are_answered_at_once(served):
    prompts = [f"What is {1 + n % 19} + {1 + n % 7} ?" for n in range(50)]
    body = {"max_tokens": 24, "temperature": 0}
    alone = {
        prompt: answered(served, "/v1/completions", prompt=prompt, **body)["choices"][0] for prompt in set(prompts)
    }

    def ask(n):
        if n % 2:
            return answered(served, "/v1/completions", prompt=prompts[n], **body)["choices"][0]["text"]
        parts = streamed(served, "/v1/completions", prompt=prompts[n], **body)
        return "".join(part["choices"][0]["text"] for part in parts)

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        texts = list(pool.map(ask, range(50)))
    assert texts == [alone[prompt]["text"] for prompt in prompts]
    assert idle(served)


def test_more_than_the_queue_holds_is_refused_until_there_is_room(served, slow):
    assert idle(served)
    limit = served.engine.config.slots + QUEUE
    assert served.clients.limit == limit
    connections = [open_connection(served, "/v1/completions", LONG) for _ in range(limit // 4)]  # 17 of 4
    wait_for(lambda: served.clients.counters.in_flight >= limit - 3)
    status, document, answer = post(served, "/v1/completions", {"prompt": ["1"] * limit})
    assert (status, document["error"]["type"], document["error"]["code"]) == (429, "rate_limit_error", "queue_full")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    for connection in connections:
        connection.close()
    assert idle(served)
    assert answered(served, "/v1/completions", prompt="1")["choices"]
    status, document, _ = post(served, "/v1/completions", {"prompt": ["1"] * limit, "n": 2})
    assert (status, document["error"]["param"]) == (400, "n")


# What is refused.

CHAT, TEXT, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
HELLO = [{"role": "user", "content": "1"}]
BAD = [
    (TEXT, {}, "prompt", "is required"),
    (TEXT, {"prompt": ""}, "prompt", "prompt is empty"),
    (TEXT, {"prompt": []}, "prompt", "give a text, a list of token ids"),
    (TEXT, {"prompt": [1, "a"]}, "prompt", "give a text, a list of token ids"),
    (TEXT, {"prompt": [True]}, "prompt", "give a text, a list of token ids"),
    (TEXT, {"prompt": [[1], []]}, "prompt", "prompt is empty"),
    (TEXT, {"prompt": [1, 35]}, "prompt", "has token 35, outside the model's vocabulary of 35"),
    (TEXT, {"prompt": [1] * 128}, "prompt", "has 128 tokens, and a prompt with its answer may have at most 128"),
    (TEXT, {"prompt": "1", "max_tokens": 128}, "max_tokens", "ask for at most 127"),
    (TEXT, {"prompt": "1", "max_tokens": 2.5}, "max_tokens", "integer"),
    (TEXT, {"prompt": "1", "n": 0}, "n", "greater than or equal to 1"),
    (TEXT, {"prompt": "1", "n": 129}, "n", "less than or equal to 128"),
    (TEXT, {"prompt": "1", "temperature": "hot"}, "temperature", "valid number"),
    (TEXT, {"prompt": "1", "top_p": 0}, "top_p", "greater than 0"),
    (TEXT, {"prompt": "1", "seed": 2**63}, "seed", "less than"),
    (TEXT, {"prompt": "1", "stop": ""}, "stop.0", "at least 1 character"),
    (TEXT, {"prompt": "1", "stop": ["a"] * 9}, "stop", "at most 8"),
    (TEXT, {"prompt": "1", "stop": 3}, "stop", "valid array; found 3"),
    (TEXT, {"prompt": "1", "stop": "a<end>"}, "stop", "contains the special token"),
    (TEXT, {"prompt": "1", "logprobs": 1}, "logprobs", "only for greedy answers"),
    (TEXT, {"prompt": "1", "logprobs": 5}, "logprobs", "less than or equal to 1"),
    (TEXT, {"prompt": "1", "max_tokens": 0}, "max_tokens", "0 returns only the prompt, which needs echo"),
    (TEXT, {"prompt": "1", "echo": True, "stream": True}, "echo", "only possible for one whole answer"),
    (TEXT, {"prompt": "1", "echo": True, "n": 2}, "echo", "only possible for one whole answer"),
    (TEXT, {"prompt": "1", "best_of": 2}, "best_of", "only 1 is supported"),
    (
        TEXT,
        {"prompt": "1", "frequency_penalty": 0.5},
        "frequency_penalty",
        "only 0 is supported; leave the field out; found 0.5",
    ),
    (TEXT, {"prompt": "1", "beam_width": 4}, "beam_width", "unknown field"),
    (TEXT, {"prompt": "1", "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
    (CHAT, {"messages": []}, "messages", "at least 1 item"),
    (CHAT, {"messages": "hi"}, "messages", "valid array"),
    (CHAT, {"messages": [{"role": "robot", "content": "1"}]}, "messages.0.role", "'system', 'developer'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "type text"),
    (CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "only 0"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format", '"type": "text"'),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice", "needs tools, and the request has none"),
    (CHAT, {"messages": HELLO, "tool_choice": "any"}, "tool_choice", "must be 'auto', 'none', 'required'"),
    (
        CHAT,
        {"messages": HELLO, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "'f' is not one of the tools, which are none",
    ),
    (
        CHAT,
        {"messages": HELLO, "chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs.messages",
        "is set by other fields",
    ),
    (
        CHAT,
        {"messages": HELLO, "chat_template_kwargs": {"a\r\nX-B: c": 1}},
        "chat_template_kwargs",
        "is not a valid variable name",
    ),
    (TEXT, {"prompt": "1", "temperature": 1e-40}, "temperature", "at least 1e-06"),
    (TEXT, {"prompt": "1", "top_p": 1e-40}, "top_p", "at least 1e-06"),
    (TEXT, {"prompt": "1", "repetition_penalty": 1e-40}, "repetition_penalty", "greater than or equal to"),
    (CHAT, {"messages": HELLO, "tools": [{"function": {}}]}, "tools.0.function.name", "is required"),
    (CHAT, {"messages": HELLO, "tools": [{"function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
    (
        CHAT,
        {"messages": HELLO, "tools": [{"function": {"name": "a", "parameters": {"properties": {"x": 1}}}}]},
        "tools.0.function.parameters",
        "properties must be an object that contains schemas",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "3"}}]}]},
        "messages",
        "must be a JSON object",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "3 " * 200}]}, "messages", "has 200 tokens"),
    (TOKENS, {"token_ids": []}, "token_ids", "at least 1 item"),
    (TOKENS, {"token_ids": [1], "stream": True}, "stream", "only false"),
    (TOKENS, {"token_ids": [1.5]}, "token_ids.0", "integer"),
    (TOKENS, {"token_ids": [-1]}, "token_ids", "outside the model's vocabulary"),
    (TOKENS, {"token_ids": [1], "sampling_params": {"temprature": 1}}, "sampling_params.temprature", "unknown field"),
    (TOKENS, {"token_ids": [1], "sampling_params": {"max_tokens": 999}}, "sampling_params.max_tokens", "at most 127"),
    (
        TOKENS,
        {"token_ids": [1], "sampling_params": {"stop_token_ids": list(range(10, 18))}},
        "sampling_params.stop_token_ids",
        "9 stop",
    ),
    (
        TOKENS,
        {"token_ids": [1], "sampling_params": {"stop_token_ids": [3, 35]}},
        "sampling_params.stop_token_ids",
        "stop token 35 is outside the model's vocabulary of 35",
    ),
    (TEXT, {"prompt": "1", "stop": "a", "stop_token_ids": [999]}, "stop_token_ids", "stop token 999 is outside"),
    (CHAT, {"messages": HELLO, "stop_token_ids": [35]}, "stop_token_ids", "stop token 35 is outside"),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), BAD, ids=lambda each: None)
def test_a_bad_field_is_named(served, path, body, param, message):
    status, document, _ = post(served, path, body)
    error = document["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]


def test_what_is_no_request_is_refused_in_the_same_form(served):
    long = b'{"prompt": "' + b"1 " * (MAX_BODY // 2) + b'"}'
    asks = [
        (415, "/v1/completions", "POST", b"{}", {"Content-Type": "text/plain"}, "send the header"),
        (404, "/chat/completions", "POST", b"{}", JSON, "use one of /health, /metrics, /v1/models, /v1/completions, "),
        (405, "/v1/completions", "GET", None, {}, "Method Not Allowed"),
        (421, "/v1/models", "GET", None, {"Host": "evil.example"}, "'evil.example': without a token this server"),
        (413, "/v1/completions", "POST", long, JSON, "larger than"),
    ]
    for expected, path, method, raw, headers, message in asks:
        status, text, _ = served.server.ask(path, method, raw, **headers)
        error = json.loads(text)["error"]
        assert (status, error["type"]) == (expected, "invalid_request_error") and message in error["message"], text


def test_elsewhere_than_on_loopback_a_token_is_needed(served, tmp_path):
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0 accepts connections from other machines"):
        Address("0.0.0.0", 8000).hosts(Address("0.0.0.0", 8000, "").secret(), "client")
    (tmp_path / "token").write_text("s3cret\n")
    address = Address("0.0.0.0", 8000, "another", tmp_path / "token")
    token = address.secret()
    guarded = Server(make_app(Routes(served.model, served.clients), token=token, hosts=address.hosts(token, "client")))
    try:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer s3cret2"}):
            for path in ("/v1/models", "/metrics"):
                status, text, _ = guarded.ask(path, Host="pod.example", **headers)
                assert (status, json.loads(text)["error"]["type"]) == (401, "authentication_error")
        right = {"Authorization": "Bearer s3cret", "Host": "pod.example"}
        assert guarded.ask("/v1/models", **right)[0] == 200
        assert guarded.ask("/v1/completions", "POST", b'{"prompt": "1"}', **right, **JSON)[0] == 200
        assert guarded.ask("/health", Host="pod.example")[0] == 200
    finally:
        guarded.close()


def fuzzed(rng):
    """A hostile body."""
    good = json.dumps({"prompt": QUESTION, "max_tokens": 8, "n": 2, "stop": ["7"], "seed": 1}).encode()
    kind = rng.integers(8)
    if kind == 0:  # bytes changed
        raw = bytearray(good)
        for place in rng.integers(0, len(raw), 3):
            raw[place] = rng.integers(256)
        return bytes(raw)
    if kind == 1:
        return good[: rng.integers(len(good))]
    if kind == 2:
        return rng.bytes(rng.integers(2000))
    if kind == 3:
        return b"[" * rng.integers(1, 100_000)
    if kind == 4:
        return b'{"a":' * rng.integers(1, 20_000)
    odd = [
        None,
        True,
        -1,
        1e308,
        2**70,
        "x",
        "",
        [],
        {},
        [[]],
        {"a": {}},
        "\ud83d\ude00",
        "\x00",
        [1, [2]],
        "1 " * 10_000,
    ]
    if kind == 5:
        keys = [
            "prompt",
            "max_tokens",
            "n",
            "stop",
            "seed",
            "temperature",
            "model",
            "stream",
            "logprobs",
            "stream_options",
        ]
        return json.dumps({key: odd[rng.integers(len(odd))] for key in rng.permutation(keys)[:5]}).encode()
    if kind == 6:
        body = {
            "messages": [{"role": "user", "content": odd[rng.integers(len(odd))]}],
            "tools": odd[rng.integers(len(odd))],
        }
        return json.dumps(body).encode()
    return json.dumps({f"k{n}": n for n in range(rng.integers(1, 50_000))}).encode()


def attack(served, rng):
    """One hostile request; its status, or None where the client did not wait for it."""
    path = [TEXT, CHAT, TOKENS][rng.integers(3)]
    way = int(rng.integers(10))
    if way == 0:  # leaves in the middle of its body
        connection = socket.create_connection(("127.0.0.1", served.server.port), timeout=60)
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n".encode())
        connection.sendall(b"Content-Type: application/json\r\n\r\n{")
    elif way in (1, 2):  # leaves in the middle of its answer, or before, without having read it
        connection = open_connection(served, TEXT, {**LONG, "stream": way == 1})
        time.sleep(0.02 * rng.random())
    elif way == 3:  # is no HTTP
        connection = socket.create_connection(("127.0.0.1", served.server.port), timeout=60)
        connection.sendall(rng.bytes(200))
    else:
        status, text, _ = served.server.ask(path, "POST", fuzzed(rng), **JSON)
        assert status < 500 and (status == 200 or json.loads(text)["error"]["message"])
        return status
    connection.close()
    return None


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.long)])
def test_hostile_requests_leave_nothing_behind(served, count):
    rng = np.random.default_rng(count)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        statuses = list(
            pool.map(lambda seed: attack(served, np.random.default_rng(seed)), rng.integers(2**31, size=count))
        )
    assert {400, None} <= set(statuses) <= {200, 400, 413, 429, None}
    assert idle(served)
    until = time.monotonic() + 20
    while served.server.clients and time.monotonic() < until:
        time.sleep(0.01)
    assert served.server.clients == 0
    assert answered(served, "/v1/completions", prompt=QUESTION)["choices"]


def test_a_body_that_does_not_arrive_is_not_waited_for(served, monkeypatch):
    monkeypatch.setattr("podium.serve.app.BODY_S", 0.2)
    connection = socket.create_connection(("127.0.0.1", served.server.port), timeout=60)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    connection.sendall(b"Content-Length: 10\r\n\r\n{")
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    assert answer.status == 408 and "did not arrive within 0.2 s" in answer.read().decode()
    connection.close()


def test_a_context_beyond_the_models_positions_is_an_error(tmp_path):
    write_tiny_model(tmp_path, longest=64)
    assert longest_sequence(str(tmp_path), None) == longest_sequence(str(tmp_path), 64) == 64
    with pytest.raises(UsageError, match=r"^--context 65 is more than the 64 positions of .*; give 64 or less$"):
        longest_sequence(str(tmp_path), 65)
