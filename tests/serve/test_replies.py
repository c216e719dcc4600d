"""Text in pieces, calls of tools, and what clients hear when the engine fails."""

import asyncio
import json
import re
import types

import numpy as np
import pytest
from models.tiny_models import needs_demo

from podium.models.files.source import resolve
from podium.models.text.tokenizer import load_tokenizer
from podium.rollout.engine import NonFiniteError
from podium.rollout.request import Completion, Finished, Key, Request, RolloutStats, SamplingParams
from podium.sampling.conversations.dialogue import ToolFormat
from podium.serve.bodies import RequestError
from podium.serve.clients import Clients
from podium.serve.engine_thread import Piece
from podium.serve.replies import ChatForm, TextStream, end_at

TEXT = 'Grüße aus 東京 👩‍👩‍👧 — naïve "quotes"\n\n  STOP and more'


def completion_of(tokens, text, reason="stop"):
    numbers = np.zeros(len(tokens), np.float32)
    return Completion(
        tokens=np.array(tokens, np.int32),
        sampled_logprobs=numbers,
        full_logprobs=numbers,
        versions=numbers.astype(np.int32),
        text=text,
        finish_reason=reason,
    )


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve("demo"))


@needs_demo
@pytest.mark.parametrize("stop", [(), ("STOP",), ("STAR", "and more!")])
def test_any_pieces_add_up_to_the_text_and_never_split_a_character(tokenizer, stop):
    tokens = [*tokenizer.encode(TEXT), tokenizer.eos_tokens[0]]
    whole = completion_of(tokens, tokenizer.decode(tokens))
    assert whole.text == TEXT
    for seed in range(20):
        rng, stream, said, begin = np.random.default_rng(seed), TextStream(tokenizer, stop), "", 0
        while begin < len(tokens):
            end = min(len(tokens), begin + int(rng.integers(1, 5)))
            if stop == ("STOP",) and "STOP" in tokenizer.decode(tokens[:end]):  # where the engine ends it
                end = len(tokens)
            last = whole if end == len(tokens) else None
            new = stream.add(Piece(0, begin == 0, tokens[begin:end], [0.0] * (end - begin), last))
            assert "\ufffd" not in new
            said, begin = said + new, end
            assert end_at(TEXT, stop).startswith(said)
        assert said == end_at(TEXT, stop)


@needs_demo
def test_calls_are_openais_tool_calls_whole_and_streamed(tokenizer):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    text = 'I look.<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    form = ChatForm(tokenizer=tokenizer, logprobs=False, tools=[tool], format=ToolFormat("test", tokenizer))
    assert form.only_whole
    tokens = tokenizer.encode(text)
    piece = Piece(1, True, tokens, [0.0] * len(tokens), completion_of(tokens, text))
    function = {"name": "weather", "arguments": '{"city": "Köln"}'}
    whole, part = form.choice(piece, text), form.delta(piece, text)
    (call,), (streamed,) = whole["message"].pop("tool_calls"), part["delta"].pop("tool_calls")
    assert whole["message"] == part["delta"] == {"role": "assistant", "content": "I look."}
    assert whole["finish_reason"] == part["finish_reason"] == "tool_calls"
    assert (call["type"], call["function"], streamed["index"]) == ("function", function, 0)
    assert re.fullmatch("[a-z0-9]{9}", call["id"]) and call["id"] != streamed["id"]
    broken = '<tool_call>{"name": "weather"'
    tokens = tokenizer.encode(broken)
    said = form.choice(Piece(0, True, tokens, [], completion_of(tokens, broken, "length")), broken)
    assert (said["message"], said["finish_reason"]) == ({"role": "assistant", "content": broken}, "length")
    assert json.dumps(said)


class FakeEngine:
    """Ends a request in its second step, unless its seed says what to raise."""

    def __init__(self):
        self.config = types.SimpleNamespace(slots=2)
        self.requests, self.ended, self.pages_used = {}, [], 0

    busy = property(lambda self: bool(self.requests))
    keys = property(lambda self: list(self.requests))

    device = property(lambda self: self)

    def extra_calls(self, request):
        return {}

    def submit(self, request):
        number = len(self.ended)
        self.requests[Key(number, 0)] = [request, 0]
        self.ended.append(None)
        return number

    def cancel(self, key):
        self.requests.pop(key, None)

    def step(self):
        for key, waiting in list(self.requests.items()):
            waiting[1] += 1
            if waiting[0].seed == 1:
                del self.requests[key]
                raise NonFiniteError("layer 3 is not finite")
            if waiting[0].seed == 2:
                raise MemoryError("no memory")

    def poll(self):
        done = [key for key, (_, steps) in self.requests.items() if steps > 1]
        for key in done:
            del self.requests[key]
        return [Finished(key, completion_of([5, 6], "five six")) for key in done]

    def drawn(self, key, begin):
        return [5][begin:], [0.0][begin:]

    def stats(self):
        return RolloutStats()


def request(seed):
    return Request(prompt=(1,), sampling=SamplingParams(max_new_tokens=2), seed=seed)


def test_a_request_that_breaks_the_model_fails_alone_and_a_broken_engine_refuses_all(capsys):
    clients = Clients(FakeEngine(), max_queue=4)

    async def pieces(ticket):
        return [piece async for piece in ticket]

    async def ask():
        good, bad = (clients.open([request(seed)], stream=True) for seed in (0, 1))
        with pytest.raises(RequestError, match="layer 3 is not finite") as failed:
            await pieces(bad)
        assert failed.value.status == 500
        assert [piece.tokens for piece in await pieces(good)] == [[5], [6]]
        assert clients.counters.in_flight == 0
        clients.check_alive()
        last = [clients.open([request(seed)], stream=False) for seed in (0, 2)]
        for ticket in last:
            with pytest.raises(RequestError, match="MemoryError: no memory"):
                await pieces(ticket)
        assert clients.counters.in_flight == 0
        with pytest.raises(RequestError, match="the engine has failed: MemoryError") as refused:
            clients.open([request(0)], stream=False)
        assert refused.value.status == 503

    asyncio.run(ask())
    clients.close()
    assert "MemoryError" in capsys.readouterr().err
