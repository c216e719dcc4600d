"""Whatever a model writes as a call, and whatever a tool or an environment replies, becomes a message that can be
encoded, recorded and sent to another process."""

import dataclasses
import decimal
import enum
import json
import pickle
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic
import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st

from podium.files import to_json
from podium.models.text.tokenizer import Tokenizer
from podium.plain import LEVELS, clean, message_of, plain
from podium.sampling.conversations.dialogue import Dialogue
from podium.serve.bodies import ChatBody, RequestError, read_body
from podium.tasks.conversation import CUT_MARK, LONGEST_TEXT, Reply, ToolCall, ToolRun, Turn, plain_first, plain_reply
from podium.tasks.conversations.tool_calls import FORMS, read_calls
from podium.tasks.conversations.tools import answer_calls, by_name, tool_schema
from podium.tasks.question_files import read_rows
from podium.tasks.task import TaskSource
from podium.tasks.try_task import play
from tests.chat_formats import TOOLS, backend_of

TEXT = st.text(st.characters(exclude_categories=()), max_size=12)  # lone surrogates included
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["search", "\ud83d", "", "f"]) | TEXT
CALLS = (
    st.fixed_dictionaries({"name": NAMES}, optional={"arguments": JSON, "parameters": JSON, "function": JSON}) | JSON
)
ARGUMENTS = st.dictionaries(TEXT, JSON, max_size=3)


def search(query: str, limit: int = 3, more: Any = None) -> list[Any]:
    """Search.

    Args:
        query: words.
        limit: number of results.
        more: anything.
    """
    return [query, more] * min(limit, 3)


def is_sendable(value: object) -> bool:
    """Whether a value can be written as UTF-8 and strict JSON, as one line, and survives another process."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return bool(text.encode()) and pickle.loads(pickle.dumps(value)) == value


def check(text: str, form: Any) -> None:
    """Read an answer, run its calls, and encode what comes of it."""
    read = read_calls(text, form, (tool_schema(search),))
    for call in read.calls:
        assert is_sendable([call.name, call.arguments])
    turn = Turn(text=text, number=0, calls=read.calls, problem=read.problem, said=read.said)
    reply = answer_calls(by_name([search]), turn, lambda value: value)
    if reply is not None:
        sent = plain_reply(reply)
        assert is_sendable(list(sent.messages)) and all(run.name.encode() for run in sent.ran)


@given(CALLS, st.sampled_from(["tags", "object", "mistral", "harmony", "deepseek"]), st.booleans())
def test_any_json_text_is_a_call_or_a_problem(value, form, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    named = json.dumps(value if isinstance(value, dict) else {"query": value}, ensure_ascii=ascii_only)
    check(
        {
            "tags": f"<tool_call>{text}</tool_call>",
            "object": text,
            "mistral": f"[TOOL_CALLS] {text}",
            "harmony": f"<|channel|>commentary to=functions.search<|message|>{named}<|call|>",
            "deepseek": FORMS["deepseek"].example.replace("{ARGUMENT: VALUE}", named).replace("NAME", "search"),
        }[form],
        form,
    )


@given(ARGUMENTS, st.sampled_from(["parameters", "keys", "braces", "python", "invoke"]), st.booleans())
def test_any_arguments_in_other_forms_are_a_call_or_a_problem(arguments, form, as_python):
    written = {key: repr(value) if as_python else json.dumps(value) for key, value in arguments.items()}
    texts = {
        "parameters": "".join(f"<parameter={key}>{value}</parameter>" for key, value in written.items()),
        "keys": "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in written.items()),
        "braces": ",".join(f"{key}:{value}" for key, value in written.items()),
        "python": ",".join(f"more={value}" for value in written.values()),
        "invoke": "".join(f'<atem:parameter name="{key}">{value}</atem:parameter>' for key, value in written.items()),
    }
    frames = {
        "parameters": "<tool_call><function=search>{}</function></tool_call>",
        "keys": "<tool_call>search{}</tool_call>",
        "braces": "<|tool_call>call:search{{{}}}<tool_call|>",
        "python": "<|tool_call_start|>[search({})]<|tool_call_end|>",
        "invoke": '<atem:function_calls><atem:invoke name="search">{}</atem:invoke></atem:function_calls>',
    }
    check(frames[form].format(texts[form]), form)


@given(TEXT, st.sampled_from(sorted(FORMS)))
def test_any_text_between_marks_is_a_call_or_a_problem(text, form):
    open_mark, close_mark = (*FORMS[form].marks, "", "")[:2]
    check(f"{open_mark}{text}{close_mark}", form)


NUMBER = "0x" + "f" * 4_000


@pytest.mark.parametrize(
    ("text", "form", "problem"),
    [
        ('<tool_call>{"name": "search", "arguments": {"more": NaN}}</tool_call>', "tags", "NaN is not a JSON number"),
        ('<tool_call>{"name": "search", "arguments": {"more": 1e999}}</tool_call>', "tags", "cannot be used"),
        (f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 70}{"]" * 70}}}}}</tool_call>', "tags", "64 levels"),
        (f"<|tool_call_start|>[search(more={NUMBER})]<|tool_call_end|>", "python", "more than 4,300 digits"),
        ("<|tool_call_start|>[search(more={[1]})]<|tool_call_end|>", "python", "not valid Python"),
    ],
)
def test_what_no_message_can_hold_is_said_to_the_model(text, form, problem):
    read = read_calls(text, form, (tool_schema(search),))
    assert problem in read.problem and not read.calls
    check(text, form)


def test_a_half_of_a_character_in_a_call_is_replaced():
    (call,) = read_calls(r'<tool_call>{"name": "\ud83d", "arguments": {"\ude00": "a\ud83d\ude00\ud83d"}}', "tags").calls
    assert (call.name, call.arguments) == ("\ufffd", {"\ufffd": "a\U0001f600\ufffd"})


@pytest.fixture(scope="module")
def dialogue() -> Dialogue:
    tokenizer = Tokenizer(backend_of("qwen3"), eos_tokens=())
    return Dialogue("a task", tokenizer, TOOLS)


@given(st.text(st.characters(exclude_categories=()), max_size=40), st.sampled_from(["user", "tool"]))
def test_any_text_as_a_reply_becomes_tokens(dialogue, text, role):
    sent = plain_reply(Reply(messages=({"role": role, "content": text},)))
    asked = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Well"}]
    tokens = dialogue.reply(sent.messages, history=asked, drawn_end=None)
    assert tokens
    plain_text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert sent.messages[0]["content"] == plain_text
    assert dialogue.tokenizer.encode(text) == dialogue.tokenizer.encode(plain_text)


@given(TEXT, JSON)
def test_any_text_is_recorded_on_one_line(text, value):
    line = to_json({"text": text, text: value})
    assert line.encode() and "\n" not in line and isinstance(json.loads(line), dict)


@given(TEXT)
def test_any_text_of_a_client_is_read_with_whole_characters(text):
    raw = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    content = read_body(ChatBody, raw).messages[0].content
    assert content == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_a_body_with_half_a_character_and_an_error_is_refused_by_name():
    for raw in (rb'{"messages": "\ud83d"}', rb'{"messages": [{"role": "user", "content": "\ud83d"}'):
        with pytest.raises(RequestError):
            read_body(ChatBody, raw)


def test_rows_of_data_have_whole_characters(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"question": "a\ud83d?", "answer": ["\ud83d\ude00", {"k\ud83d": 1}]})
    )
    ((_, row),) = read_rows("own", TaskSource(path=str(tmp_path / "rows.jsonl")), "train")
    assert row == {"question": "a\ufffd?", "answer": ["\U0001f600", {"k\ufffd": 1}]}


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int


@dataclasses.dataclass
class Place:
    name: str
    at: tuple[int, int]


class Model(pydantic.BaseModel):
    name: str


class Rude:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ({(1, 2): "a", None: 1, True: 2, 1.5: 3}, '{"(1, 2)": "a", "null": 1, "true": 2, "1.5": 3}'),
        ({"x": float("nan"), "y": float("inf")}, '{"x": NaN, "y": Infinity}'),
        (b"caf\xc3\xa9 \xff", "caf\u00e9 \\xff"),
        ({"b", "a", "c"}, '["a", "b", "c"]'),
        (frozenset({3, 1}), "[1, 3]"),
        (Place("a\ud83d", (1, 2)), '{"name": "a\ufffd", "at": [1, 2]}'),
        (Model(name="m"), '{"name": "m"}'),
        (Point(3), "[3]"),
        (np.arange(3), "[0, 1, 2]"),
        (np.float32(0.5), "0.5"),
        (decimal.Decimal("1.10"), "1.10"),
        (Colour.RED, "Colour.RED"),
        (None, "null"),
        ("a\ud83d", "a\ufffd"),
        (10**5000, "Error: the value contains an integer of more than 4,300 digits, which cannot be written"),
        (Rude(), "Error: no"),
        (Rude, str(Rude)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_a_tool_returns_is_a_text(value, content):
    def give() -> Any:
        """Give it."""
        return value

    reply = answer_calls(
        {"give": give}, Turn(text="", number=0, calls=(ToolCall(name="give", arguments={}),)), lambda v: v
    )
    assert reply is not None
    assert plain_reply(reply).messages[0]["content"] == content


def test_what_refers_to_itself_is_an_error_of_the_tool_and_a_huge_text_is_cut():
    around: list[Any] = []
    around.append(around)
    with pytest.raises(ValueError, match=f"more than {LEVELS} levels"):
        plain(around)
    with pytest.raises(ValueError, match="a range of 1,000,000,000,000 items"):
        plain({"all": range(10**12)})
    content = plain_reply(Reply(messages=({"role": "user", "content": "a" * LONGEST_TEXT + "end"},))).messages[0][
        "content"
    ]
    assert isinstance(content, str)
    assert len(content) <= LONGEST_TEXT and CUT_MARK in content and content.endswith("end")


@pytest.mark.parametrize(
    ("error", "content"),
    [
        (AssertionError(), "Error: AssertionError"),
        (AssertionError("  "), "Error: AssertionError"),
        (ValueError("no such row"), "Error: no such row"),
        (KeyError("row"), "Error: KeyError: 'row'"),
        (SystemExit(0), "Error: SystemExit: 0"),
        (GeneratorExit(), "Error: GeneratorExit"),
        (TimeoutError(), "Error: TimeoutError"),
        (OSError("a\ud83d"), "Error: a\ufffd"),
    ],
    ids=repr,
)
def test_what_a_tool_raises_is_an_observation_that_says_something(error, content):
    def fail() -> str:
        """Fail."""
        raise error

    reply = answer_calls(
        {"fail": fail}, Turn(text="", number=0, calls=(ToolCall(name="fail", arguments={}),)), lambda v: v
    )
    assert reply is not None and reply.messages[0]["content"] == content and reply.ran[0].error


def test_an_error_that_cannot_describe_itself_has_its_type():
    class Rough(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert message_of(Rough()) == "Rough"


class Typed(typing_extensions.TypedDict):
    """An argument with keys."""

    name: str
    inner: "Inner"


class Inner(typing_extensions.TypedDict, total=False):
    """Within it."""

    size: int


def test_a_typed_dict_is_described_with_its_keys_and_read():
    def give(place: Typed, near: list[Inner] | None = None) -> str:
        """Give it."""
        return f"{place['name']} {place['inner'].get('size')}"

    function: Any = tool_schema(give)["function"]
    parameters = function["parameters"]
    assert parameters["properties"]["place"]["properties"]["inner"] == {"$ref": "#/$defs/Inner"}
    assert parameters["$defs"]["Inner"]["properties"]["size"]["type"] == "integer"
    call = ToolCall(name="give", arguments={"place": {"name": "a", "inner": {"size": "3"}}})
    reply = answer_calls({"give": give}, Turn(text="", number=0, calls=(call,)), lambda v: v)
    assert reply is not None and reply.messages[0]["content"] == "a 3"


class Unknown:
    pass


def of_unknown(value: Unknown) -> str:
    """Take it."""
    return ""


def of_a_missing_name(value: "Missing") -> str:  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    """Take it."""
    return ""


def of_a_wrong_literal(value: Literal[Unknown]) -> str:  # pyright: ignore[reportInvalidTypeForm]
    """Take it."""
    return ""


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (of_unknown, r"tool of_unknown: parameter value has the type .*Unknown.*no JSON schema can be made.*use str"),
        (
            of_a_missing_name,
            r"tool of_a_missing_name: the types of its parameters cannot be read \(NameError: .*Missing",
        ),
        (of_a_wrong_literal, "tool of_a_wrong_literal: parameter value has the type .*no JSON schema"),
    ],
)
def test_a_type_that_json_cannot_hold_is_named(tool, message):
    with pytest.raises(ValueError, match=message):
        tool_schema(tool)


def as_given(value: Any) -> Any:
    """What a user's code gives, whatever the types say."""
    return value


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(messages=({"content": "a"},)), "needs a role"),
        (Reply(messages=as_given(("a",))), "must be a dict"),
        (Reply(messages=as_given("ab")), "must be a tuple of messages"),
        (Reply(done=True, reward=float("nan")), "the reward of a reply is nan; it must be a finite number"),
        (Reply(done=True, reward=as_given("1")), "the reward of a reply is '1'"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_reply_that_cannot_be_trained_on_is_the_environments_error(reply, message):
    with pytest.raises(TypeError, match=message):
        plain_reply(reply)


def test_a_reply_crosses_to_another_process_whatever_its_messages_hold():
    strange = {"role": "user", "content": "a", "extra": lambda: 1, "when": decimal.Decimal("1")}
    sent = plain_reply(Reply(messages=(strange,), ran=(ToolRun(name="a\ud83d", seconds=0.0, error=False),)))
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert plain_first("a\ud83d") == "a\ufffd" == clean("a\ud83d")
    with pytest.raises(TypeError, match="begin"):
        plain_first(3)


class Halves:
    """Replies with half a character."""

    def reset(self, **row: object) -> str:
        return "a\ud83d"

    def half(self) -> str:
        """Give half a character."""
        return "\ude00"


def test_trying_an_environment_shows_whole_characters(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    said: list[str] = []
    play("test_any_text:Halves", ["half {}", ""], said.append)
    assert "\n".join(said).encode() and any("\ufffd" in line for line in said)
