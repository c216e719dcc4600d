"""What agents' clients send with every request: it is honoured, or listed in a header, or refused by name."""

import dataclasses
import json

import pytest
from chat_formats import FORMATS, TOOLS, backend_of, stop_tokens_of
from models.tiny_models import needs_demo
from test_replies import completion_of
from test_server import CHAT, JSON, QUESTION, post

from podium.models.text.tokenizer import Tokenizer
from podium.observe.run_dir import Fork
from podium.rollout.request import SamplingParams
from podium.run.answering import Answering
from podium.sampling.conversations.dialogue import Dialogue, ToolFormat
from podium.serve.bodies import ChatBody, RequestError, read_body
from podium.serve.command import model_id
from podium.serve.documents import IGNORED
from podium.serve.engine_thread import Piece
from podium.serve.prepare_requests import Model
from podium.tasks.conversations.tool_calls import read_calls

USER = {"role": "user", "content": QUESTION}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Reads",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
OTHER = {"type": "function", "function": {"name": "python", "parameters": {"type": "object", "properties": {}}}}
SDK = {
    "model": "tiny",
    "messages": [USER],
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": False},
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "store": False,
    "metadata": {},
    "service_tier": "auto",
    "user": "me",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "verbosity": "low",
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "top_logprobs": None,
    "seed": None,
    "n": 1,
    "max_completion_tokens": 4,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
}
"""A body with the fields that clients fill in."""
WITH_TOOLS = [name for name, shape in FORMATS.items() if shape.tools]


def served_by(name: str) -> Model:
    """What a server knows of a model with this chat format."""
    tokenizer = Tokenizer(
        backend_of(name), eos_tokens=tuple(stop_tokens_of(name)), template_options=FORMATS[name].options
    )
    return Model(
        name="m",
        tokenizer=tokenizer,
        answering=Answering(system_prompt=None, sampling=SamplingParams(max_new_tokens=4096)),
        tools=ToolFormat("test", tokenizer),
        vocab=len(tokenizer._backend),
        longest=8192,
        most=8,
    )


def prepared(model: Model, *messages, **fields):
    body = {"messages": list(messages) or [USER], "tools": [TOOL, OTHER], **fields}
    return model.chat(read_body(ChatBody, json.dumps(body).encode()))


def test_what_clients_always_send_is_answered_and_what_changes_nothing_is_listed(served):
    status, document, answer = post(served, CHAT, SDK)
    assert status == 200, document
    listed = "user, service_tier, safety_identifier, prompt_cache_key, verbosity, tools.0.function.strict"
    ignored = answer.headers[IGNORED]
    assert ignored == f"{listed}, reasoning_effort, enable_thinking"
    raw = json.dumps({**SDK, "stream": True})
    status, _, answer = served.server.ask(CHAT, "POST", raw, **JSON)
    assert (status, answer.headers[IGNORED]) == (200, ignored)
    status, _, answer = post(served, "/v1/completions", {"prompt": "1", "user": "me"})
    assert (status, answer.headers[IGNORED]) == (200, "user")
    status, _, answer = post(served, CHAT, {"messages": [USER], "max_tokens": 1})
    assert status == 200 and IGNORED not in answer.headers


def test_what_clients_repeat_of_answers_is_read_or_listed(served):
    """Messages as LiteLLM, AutoGen, lm-evaluation-harness and clients of other servers send them."""
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": ""}}
    answer = {
        **{"role": "assistant", "content": None, "tool_calls": [{**call, "provider_specific_fields": {"a": 1}}]},
        **{"reasoning": "hm", "thinking_blocks": [{"thinking": "hm"}], "provider_specific_fields": {"refusal": None}},
        **{"audio": None, "annotations": []},
    }
    reply = {"role": "tool", "tool_call_id": "a", "name": "now", "content": "1"}
    messages = [{**USER, "name": "me", "type": "text"}, answer, reply]
    status, document, got = post(served, CHAT, {"messages": messages, "max_tokens": 1})
    assert status == 200, document
    listed = {"messages.name", "messages.type", "messages.thinking_blocks", "messages.provider_specific_fields"}
    assert set(got.headers[IGNORED].split(", ")) == listed
    body = read_body(ChatBody, json.dumps({"messages": messages}).encode())
    _, calling, _ = body.conversation(arguments_as_text=True)
    assert (calling["reasoning_content"], calling["tool_calls"][0]["function"]["arguments"]) == ("hm", "{}")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": [USER, {"role": "user", "content": None}]}, "messages.1.content", "is required in a message"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "set only one of them"),
        ({"tools": [TOOL, OTHER, TOOL]}, "tools", "two of them have the name 'calculator'"),
    ],
)
def test_of_two_readings_none_is_taken(served, fields, param, message):
    status, document, _ = post(served, CHAT, {"messages": [USER], **fields})
    assert (status, document["error"]["param"]) == (400, param) and message in document["error"]["message"]


@pytest.mark.parametrize(
    "form", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}]
)
def test_json_without_a_grammar_is_refused_by_name(served, form):
    status, document, _ = post(served, CHAT, {**SDK, "response_format": form})
    assert (status, document["error"]["param"]) == (400, "response_format")


def test_a_model_has_the_name_of_its_run_s_folder_and_the_typed_one(served, monkeypatch, tmp_path):
    forks = {"runs/demo": Fork("runs/demo", None), "runs/demo/": Fork("runs/demo/", None), "r/a@20": Fork("r/a", 20)}
    monkeypatch.setattr("podium.serve.command.run_of", forks.get)
    assert [model_id(each) for each in (*forks, "owner/model", str(tmp_path))] == [
        *("demo", "demo", "a@20", "owner/model", tmp_path.name)
    ]
    known = served_named(served, "demo", "runs/demo")
    for name in ("demo", "runs/demo", None):
        known.check_name(name)
    with pytest.raises(RequestError, match="unknown model 'other'; this server has 'demo'"):
        known.check_name("other")


def served_named(served, name, *aliases):
    return dataclasses.replace(served.model, name=name, aliases=aliases)


# Tools that must be called.


@needs_demo
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_named_tool_is_begun_as_the_template_writes_it(name):
    """What the model would write behind it, by the template, is a call of that tool."""
    model = served_by(name)
    asked = prepared(model, tool_choice={"type": "function", "function": {"name": "calculator"}})
    free = prepared(model)
    begun = asked.form.begun
    (request,), (plain,) = asked.requests, free.requests
    assert request.prompt == (*plain.prompt, *model.tokenizer.encode(begun))
    written = by_template(model, {"x": "12"})
    rest = written[written.index(tail_of(begun)) + len(tail_of(begun)) :]
    tokens = model.tokenizer.encode(rest)
    text = model.tokenizer.decode(tokens)
    choice = asked.form.choice(Piece(0, True, tokens, [0.0] * len(tokens), completion_of(tokens, text)), text)
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("calculator", {"x": "12"})
    assert choice["finish_reason"] == "tool_calls"


def tail_of(begun):
    """The part of a beginning from its last mark on, which the template writes too."""
    return begun[begun.index("calculator") :]


def by_template(model, arguments):
    """A call as the model's template writes it, up to the end of the answer."""
    tools = model.tools
    if tools.form == "tags" and tools.described:
        return f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': arguments})}</tool_call>"
    given = json.dumps(arguments) if tools.arguments_as_text else arguments
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "calculator", "arguments": given}}
    messages = [{"role": "user", "content": "QQQ"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = model.tokenizer.chat_format.render(messages, tools=(), answer=False).rpartition("QQQ")[2]
    end = max(text.rfind(stop) for stop in (model.tokenizer.spelled([each]) for each in model.tokenizer.eos_tokens))
    return text[:end] if end > 0 else text


@needs_demo
def test_a_required_call_leaves_the_name_to_the_model_unless_there_is_one_tool():
    model = served_by("qwen2.5")
    several = prepared(model, tool_choice="required")
    assert several.form.begun == '<tool_call>\n{"name": "'
    one = prepared(model, tools=[TOOL], tool_choice="required")
    assert one.form.begun == '<tool_call>\n{"name": "calculator", "arguments":'
    assert prepared(model, tool_choice="none").form.format is None


@needs_demo
def test_without_parallel_calls_the_first_is_answered():
    form = prepared(served_by("qwen2.5"), parallel_tool_calls=False).form
    text = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("calculator", "python")
    )
    tokens = form.tokenizer.encode(text)
    choice = form.choice(Piece(0, True, tokens, [0.0] * len(tokens), completion_of(tokens, "")), "")
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["calculator"]


@needs_demo
def test_variables_reach_the_templates_that_read_them():
    """Qwen3's published template closes the thought if `enable_thinking` is false; gpt-oss's says the effort."""
    model = served_by("qwen3")
    off = prepared(model, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert model.tokenizer.spelled(list(off.requests[0].prompt)).endswith("<think>\n\n</think>\n\n")
    assert off.ignored[-1:] == ("reasoning_effort",) and "enable_thinking" not in off.ignored
    assert not model.tokenizer.spelled(list(prepared(model).requests[0].prompt)).endswith("</think>\n\n")
    harmony = served_by("gpt-oss")
    low = prepared(harmony, reasoning_effort="low")
    assert "Reasoning: low" in harmony.tokenizer.spelled(list(low.requests[0].prompt))
    assert "reasoning_effort" not in low.ignored


# Calls and their ids.


@needs_demo
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_conversations_with_other_servers_ids_are_rendered(name):
    """Mistral's template refuses ids that have not nine letters and digits, in calls and in replies."""
    shape = FORMATS[name]
    ids = ["call_Xyz123456789012345678901", "abcdefghi"][: 2 if shape.parallel else 1]
    calls = [
        {"id": each, "type": "function", "function": {"name": "calculator", "arguments": '{"x": "1"}'}} for each in ids
    ]
    replies = [{"role": "tool", "tool_call_id": each, "content": f"reply to {place}"} for place, each in enumerate(ids)]
    calling = {"role": "assistant", "content": None, "tool_calls": calls, "annotations": [], "refusal": None}
    model = served_by(name)
    (request,) = prepared(model, USER, calling, *reversed(replies)).requests
    text = model.tokenizer.spelled(list(request.prompt))
    assert all(f"reply to {place}" in text for place in range(len(ids)))


def test_a_reply_belongs_to_the_call_of_its_id_in_the_last_answer():
    def calling(name):
        return {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": name, "arguments": "{}"}}],
        }

    reply = {"role": "tool", "tool_call_id": "1", "content": "r"}
    body = read_body(ChatBody, json.dumps({"messages": [calling("a"), reply, calling("b"), reply]}).encode())
    first, one, second, two = body.conversation(arguments_as_text=False)
    assert (one["name"], two["name"]) == ("a", "b")
    assert one["tool_call_id"] == first["tool_calls"][0]["id"] != two["tool_call_id"] == second["tool_calls"][0]["id"]


USES = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in ("call_1", "call_2")]
USING = {"role": "assistant", "tool_calls": USES}


@pytest.mark.parametrize(
    ("messages", "awaited"),
    [
        ([USING, {"role": "tool", "tool_call_id": "call_3", "content": "r"}], "'call_1', 'call_2'"),
        ([USING, *2 * [{"role": "tool", "tool_call_id": "call_1", "content": "r"}]], "'call_2'"),
        ([USING, *3 * [{"role": "tool", "content": "r"}]], "none"),
        ([{"role": "tool", "tool_call_id": "call_1", "content": "r"}], "none"),
    ],
)
def test_a_reply_to_no_call_is_refused(messages, awaited):
    body = read_body(ChatBody, json.dumps({"messages": messages}).encode())
    with pytest.raises(RequestError, match=f"without a reply: {awaited}$"):
        body.conversation(arguments_as_text=False)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (
            b'{"messages": [{"role": "user", "content": "x"}], "n": 1, "n": 2}',
            "each key of an object in the body must be unique: 'n' occurs twice",
        ),
        (b'{"messages": [{"role": "user", "content": "x", "content": "y"}]}', "'content' occurs twice"),
        (
            '{"messages": [{"role": "user", "content": "\u00e9"}]}'.encode("latin-1"),
            "JSON in UTF-8, and byte 43 is not",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"}]}',
            "messages.0.reasoning: differs from reasoning_content",
        ),
    ],
)
def test_of_two_readings_of_a_body_none_is_taken(raw, problem):
    with pytest.raises(RequestError, match=problem):
        read_body(ChatBody, raw)


def test_a_body_may_begin_with_a_byte_order_mark():
    assert (
        read_body(ChatBody, b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "x"}]}').messages[0].content == "x"
    )


@needs_demo
def test_an_environment_s_conversation_with_mistral_has_ids():
    tokenizer = Tokenizer(backend_of("mistral-v3"), eos_tokens=tuple(stop_tokens_of("mistral-v3")))
    dialogue = Dialogue("test", tokenizer, TOOLS)
    assert dialogue.turns.parallel_calls and dialogue.form == "mistral"


# Thoughts.

CALL = '<tool_call>{"name": "calculator", "arguments": {"x": "1"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "thinking", "names"),
    [
        (f"<think>I could {CALL} now", False, []),
        (f"I could {CALL} now", True, []),
        (f"I could {CALL} now</think>{CALL}", True, ["calculator"]),
        (f"<think>a {CALL}</think>b <think> {CALL}", False, []),
        (f"{CALL}<think>Now {CALL}", False, ["calculator"]),
        (f"<think>{CALL}</think>", False, []),
        (CALL, False, ["calculator"]),
        (f"[THINK]{CALL}", False, []),
        (f"<|channel>thought\n{CALL}", False, []),
    ],
)
def test_a_call_inside_a_thought_is_none(text, thinking, names):
    found = read_calls(text, "tags", TOOLS, thinking=thinking)
    assert [call.name for call in found.calls] == names
    assert "<tool_call>" in found.said or names


@needs_demo
@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "qwen3.8", "gemma4", "lfm2.5"])
def test_a_thought_that_a_published_template_opens_or_the_model_holds_no_calls(name):
    model = served_by(name)
    form = prepared(model).form
    call = by_template(model, {"x": "12"})
    call = call[call.index("<tool_call>" if "<tool_call>" in call else "<|tool_call") :]
    opening = "" if form.thinking else "<|channel>thought\n" if name == "gemma4" else "<think>"
    tokens = model.tokenizer.encode(f"{opening}Perhaps {call}")
    text = model.tokenizer.decode(tokens)
    choice = form.choice(Piece(0, True, tokens, [0.0] * len(tokens), completion_of(tokens, text, "length")), text)
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "length"


# Answers and replies that are cut.


@needs_demo
@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if name not in ("llama3.2", "deepseek-v3")])
def test_an_answer_that_is_cut_within_a_call_has_no_part_of_it(name):
    """Of a call with two arguments: never one with the first alone."""
    model = served_by(name)
    form = prepared(model).form
    tokens = model.tokenizer.encode(by_template(model, {"x": "12", "y": "34"}))
    sizes = set()
    for end in range(1, len(tokens) + 1):
        text = model.tokenizer.decode(tokens[:end])
        cut = completion_of(tokens[:end], text, "length")
        message = form.choice(Piece(0, True, tokens[:end], [0.0] * end, cut), text)["message"]
        for call in message.get("tool_calls", ()):
            found = json.loads(call["function"]["arguments"])
            assert (call["function"]["name"], set(found)) == ("calculator", {"x", "y"}), text
            sizes.add(len(found))
    assert sizes == {2}


@needs_demo
@pytest.mark.parametrize("name", ["qwen2.5", "llama3.2", "gpt-oss"])
def test_what_is_left_of_a_cut_reply_is_as_it_was(name):
    mark = FORMATS[name].tokens[1]
    tokenizer = Tokenizer(backend_of(name), eos_tokens=tuple(stop_tokens_of(name)))
    dialogue = Dialogue("test", tokenizer, ())
    content = f"{mark} é漢🙂 begins {mark}" + " word" * 100 + f" {mark} ends 漢🙂 {mark}"
    cut = str(dialogue.fitting({"role": "tool", "content": content}, 60)["content"])
    head, tail = cut.split("\n[... cut ...]\n")
    assert content.startswith(head) and content.endswith(tail) and mark in head and mark in tail
    guarded = tokenizer.chat_format.render([{"role": "user", "content": cut}], answer=False)
    empty = tokenizer.chat_format.render([{"role": "user", "content": ""}], answer=False)
    spent = len(tokenizer.chat_format.encode(guarded)) - len(tokenizer.chat_format.encode(empty))
    assert 40 < spent <= 64
    short = {"role": "tool", "content": mark}
    assert dialogue.fitting(short, 60) is short
