"""Tools: schemas from signatures, calls that are read and run, and what is wrong with a call said to the model."""

import asyncio
import copy
import json
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Literal

import pytest
import yaml

from podium.models.text.tokenizer import Tokenizer
from podium.sampling.conversations.dialogue import Dialogue
from podium.tasks.conversation import Reply, ToolCall, Turn, as_reply
from podium.tasks.conversations.tool_calls import BEGIN, END, FORMS, SEPARATOR, instructions, read_calls
from podium.tasks.conversations.tools import answer_calls, by_name, find_tool, tool_schema
from podium.tasks.games.calculator import calculator
from tests.chat_formats import FORMATS, TOOLS, backend_of, stop_tokens_of

ROOT = Path(__file__).parents[2]


def search(query: str, limit: int = 3, kind: Literal["text", "title"] = "text") -> list[str]:
    """Search the manual.

    Only whole words are found.

    Args:
        query: words to look for,
            in any order.
        limit (int, optional): number of results.

    Returns:
        The titles.
    """
    return [f"{kind} {query}"] * limit


async def slow(number: int) -> int:
    """Double a number."""
    await asyncio.sleep(0)
    return 2 * number


def broken() -> str:
    """Never works."""
    raise OSError("no network")


def plain(value):
    return value


def test_a_schema_is_the_signature_and_the_docstring():
    schema = tool_schema(search)
    assert schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the manual.\n\nOnly whole words are found.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "words to look for, in any order."},
                    "limit": {"type": "integer", "description": "number of results."},
                    "kind": {"enum": ["text", "title"], "type": "string"},
                },
                "required": ["query"],
            },
        },
    }


def yielding() -> Iterator[int]:
    """Yield a number."""
    yield 1


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (lambda: 1, "has no docstring"),
        (plain, "tool plain has no docstring"),
        (yielding, "tool yielding: it yields, and a model reads what a tool returns"),
        (type("Taken", (), {"__call__": lambda self, *words: 1, "__doc__": "It."})(), "cannot be passed by name"),
    ],
)
def test_a_function_that_a_model_cannot_call_is_refused(tool, message):
    with pytest.raises(ValueError, match=message):
        tool_schema(tool)


def test_a_parameter_needs_a_type_and_two_tools_different_names():
    plain.__doc__ = "Return it."
    with pytest.raises(ValueError, match="tool plain: parameter value has no type"):
        tool_schema(plain)
    with pytest.raises(ValueError, match="two tools have the name search"):
        by_name([search, search])
    with pytest.raises(ValueError, match="'calculater' is not a tool; did you mean 'calculator'"):
        find_tool("calculater")
    assert find_tool("calculator") is calculator


ONE = '{"name": "search", "arguments": {"query": "a<b"}}'
CALL = ToolCall(name="search", arguments={"query": "a<b"})


@pytest.mark.parametrize(
    ("text", "form", "calls", "said"),
    [
        (f"<tool_call>\n{ONE}\n</tool_call>", "tags", (CALL,), ""),
        (f"Look: <tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>", "tags", (CALL, CALL), "Look:"),
        (f"<tool_call>{ONE}", "tags", (CALL,), ""),
        (
            f"<think><tool_call>no</think>\n<tool_call>{ONE}</tool_call>",
            "tags",
            (CALL,),
            "<think><tool_call>no</think>",
        ),
        ("The answer is 4.", "tags", (), "The answer is 4."),
        (ONE, "tags", (), ONE),
        (f" {ONE}", "object", (CALL,), ""),
        ('{"type": "function", "name": "search", "parameters": {"query": "a<b"}}', "object", (CALL,), ""),
        (
            '{"type": "function", "function": {"name": "f", "parameters": {}}}',
            "object",
            (ToolCall(name="f", arguments={}),),
            "",
        ),
        ('{"a": 1}', "object", (), '{"a": 1}'),
        (f"I say {ONE}", "object", (), f"I say {ONE}"),
    ],
)
def test_calls_are_read_in_both_forms(text, form, calls, said):
    assert read_calls(text, form) == (calls, "", said)


SENT = {"to": "bob", "n": 12}
SENT_IN_JSON = '{"to": "bob", "n": 12}'
SEND = {
    "type": "function",
    "function": {"name": "send", "parameters": {"properties": {"to": {"type": "string"}, "n": {"type": "integer"}}}},
}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("tags", f'<tool_call>{{"name": "send", "arguments": {SENT_IN_JSON}}}</tool_call>'),
        (
            "parameters",
            "<tool_call>\n<function=send>\n<parameter=to>\nbob\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (
            "keys",
            "<tool_call>send\n<arg_key>to</arg_key>\n<arg_value>bob</arg_value>\n<arg_key>n</arg_key>\n"
            "<arg_value>12</arg_value>\n</tool_call>",
        ),
        ("harmony", f"<|channel|>commentary to=functions.send <|constrain|>json<|message|>{SENT_IN_JSON}<|call|>"),
        ("mistral", f'[TOOL_CALLS] [{{"name": "send", "arguments": {SENT_IN_JSON}}}]'),
        ("mistral", f"[TOOL_CALLS]send[ARGS]{SENT_IN_JSON}"),
        ("deepseek", f"{BEGIN}function{SEPARATOR}send\n```json\n{SENT_IN_JSON}\n```{END}"),
        ("braces", '<|tool_call>call:send{n:12,to:<|"|>bob<|"|>}<tool_call|>'),
        ("python", "<|tool_call_start|>[send(to='bob', n=12)]<|tool_call_end|>"),
        (
            "invoke",
            '<atem:function_calls>\n<atem:invoke name="send">\n<atem:parameter name="to">bob</atem:parameter>\n'
            '<atem:parameter name="n">12</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        ),
        ("object", f'{{"name": "send", "parameters": {SENT_IN_JSON}}}'),
    ],
)
def test_a_cut_answer_has_its_whole_call_or_none(form, text):
    """Never one with a part of its name or its arguments."""
    found = [read_calls(text[:end], form, [SEND], cut=True).calls for end in range(len(text) + 1)]
    whole = (ToolCall(name="send", arguments=SENT),)
    assert found[-1] == whole and set(map(len, found)) == {0, 1}
    assert all(calls in ((), whole) for calls in found)


QUERY = "<parameter=query>\na<b\n</parameter>"
TYPED = (tool_schema(search),)


@pytest.mark.parametrize(
    ("text", "form", "said"),
    [
        (f"Look.\n<tool_call>\n<function=search>\n{QUERY}\n</function>\n</tool_call>", "parameters", "Look."),
        (f"<tool_call><function=search>{QUERY}", "parameters", ""),
        (
            "<think>no</think><tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a<b</arg_value></tool_call>",
            "keys",
            "<think>no</think>",
        ),
        (' to=functions.search<|channel|>commentary json<|message|>{"query": "a<b"}', "harmony", ""),
        (
            "<|channel|>analysis<|message|>I search to=functions.no<|end|><|start|>assistant<|channel|>commentary"
            ' to=functions.search <|constrain|>json<|message|>{"query": "a<b"}<|call|>',
            "harmony",
            "",
        ),
        (f"[TOOL_CALLS] [{ONE}]", "mistral", ""),
        ('Look: [TOOL_CALLS]search[CALL_ID]a1[ARGS]{"query": "a<b"}', "mistral", "Look:"),
        ('Look: <|tool_call>call:search{query:<|"|>a<b<|"|>}<tool_call|>', "braces", "Look:"),
        ('<|tool_call>call:search{"query": <|"|>a<b<|"|>}', "braces", ""),
        ("<|tool_call_start|>[search(query='a<b')]<|tool_call_end|> I look.", "python", "I look."),
        ('<|tool_call_start|>search(query="a<b")', "python", ""),
        ('<|tool_call_start|>[search("a<b")]<|tool_call_end|>', "python", ""),
        (
            " to=search<|message|><atem:function_calls>\n"
            '<atem:invoke name="search">\n<atem:parameter name="query">a<b</atem:parameter>\n</atem:invoke>\n'
            "</atem:function_calls>",
            "invoke",
            "",
        ),
    ],
)
def test_calls_are_read_in_the_forms_of_other_families(text, form, said):
    assert read_calls(text, form, TYPED) == ((CALL,), "", said)


def test_arguments_that_are_written_as_texts_have_the_types_of_the_schema():
    text = "<tool_call>search<arg_key>query</arg_key><arg_value>12</arg_value>"
    text += "<arg_key>limit</arg_key><arg_value>12</arg_value><arg_key>kind</arg_key><arg_value>text</arg_value>"
    (call,) = read_calls(text, "keys", TYPED).calls
    assert call.arguments == {"query": "12", "limit": 12, "kind": "text"}


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("tags", "object")])
def test_an_answer_without_a_call_is_what_it_says(form):
    for text in ("The answer is 4.", "<|channel|>final<|message|>4<|return|>", '{"name": "f"}', ""):
        assert read_calls(text, form, TYPED) == ((), "", text)


@pytest.mark.parametrize(
    ("text", "form", "problem"),
    [
        ("<tool_call>search</tool_call>", "parameters", "the call has no name; write <tool_call>\n<function=NAME>"),
        (
            "<tool_call><function=f>query=3</function></tool_call>",
            "parameters",
            "of f cannot be parsed from 'query=3' on",
        ),
        ("<tool_call><function=f><parameter=a>3", "parameters", "of f cannot be parsed from '<parameter=a>3' on"),
        ("<tool_call><arg_key>a</arg_key>", "keys", "the call has no name; write <tool_call>NAME"),
        (
            "<tool_call>f <arg_key>a</arg_key></tool_call>",
            "keys",
            "of f cannot be parsed from '<arg_key>a</arg_key>' on",
        ),
        (
            "to=functions.f<|message|>3<|call|>",
            "harmony",
            "the arguments of f are not an object; write <|channel|>commentary",
        ),
        ("to=functions.f<|message|>{<|call|>", "harmony", "not valid JSON"),
        ("[TOOL_CALLS] f(3)", "mistral", "not valid JSON"),
        ("[TOOL_CALLS][ARGS]{}", "mistral", "the call has no name; write [TOOL_CALLS] [{"),
        (f"{BEGIN}f", "deepseek", f"the call cannot be parsed; write {BEGIN}function"),
        (f"<tool_call><function=f><parameter=a>{'[' * 100_000}</parameter>", "parameters", ""),
        ("<|tool_call>call:f(3)<tool_call|>", "braces", "not valid JSON"),
        ("<|tool_call>call:{}", "braces", "the call has no name; write <|tool_call>call:NAME{"),
        ('<|tool_call>call:f{a:<|"|>never closed}', "braces", "not valid JSON"),
        (f"<|tool_call>call:f{{a:{'[' * 100_000}", "braces", "not valid JSON"),
        ("<|tool_call_start|>[f(3)]", "python", "each argument of f needs its name before it; write"),
        ("<|tool_call_start|>[f(**a)]", "python", "each argument of f needs its name before it"),
        ("<|tool_call_start|>[f(a=g())]", "python", "malformed node"),
        ("<|tool_call_start|>[f(a=1j)]", "python", "1j cannot be represented in JSON"),
        ("<|tool_call_start|>[f(a={1})]", "python", "{1} cannot be represented in JSON"),
        ("<|tool_call_start|>[f(a=1, a=2)]", "python", "the argument a of f is given twice"),
        ("<|tool_call_start|>[f(a={'b': 1, 'b': 2})]", "python", "'b' occurs twice"),
        (
            "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
            "parameters",
            "the argument a of f is given twice",
        ),
        ("<|tool_call_start|>[3]", "python", "the call has no name"),
        ("<|tool_call_start|>[f(a='b]", "python", "the calls are not valid Python"),
        ("<|tool_call_start|>\x00", "python", "write <|tool_call_start|>"),
        (f"<|tool_call_start|>f(a={'[' * 100_000})", "python", "the calls are not valid Python"),
        (f"<|tool_call_start|>f(a={'-' * 100_000}1)", "python", "the calls are not valid Python"),
        (f"<|tool_call_start|>f(a={'+'.join(['1'] * 100_000)})", "python", "write"),
        (f"<|tool_call_start|>{'g.' * 100_000}f(a=1)", "python", "the calls are not valid Python"),
        ("<atem:function_calls>f</atem:function_calls>", "invoke", "the call has no name"),
        ("<atem:function_calls>", "invoke", "the call has no name; write <atem:function_calls>"),
        ('<atem:function_calls><atem:invoke name="f">3</atem:invoke>', "invoke", "of f cannot be parsed from '3' on"),
    ],
)
def test_a_call_of_another_form_that_cannot_be_read_is_an_observation(text, form, problem):
    read = read_calls(text, form, TYPED)
    assert problem in read.problem and bool(read.calls) == (not problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>search(a)</tool_call>", "not valid JSON"),
        (f"<tool_call>{ONE}</tool_call><tool_call>{{</tool_call>", "not valid JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "no name"),
        ("<tool_call>[1]</tool_call>", "no name"),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "arguments of f are not an object"),
        (f"<tool_call>{'[' * 100_000}", "not valid JSON"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "'a' occurs twice"),
        ('<tool_call>{"name": "f", "arguments": {"\\ud83d": 1, "\\ude00": 2}}</tool_call>', "occurs twice"),
        ('<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>', "both arguments and parameters"),
        (f'<tool_call>{{"name": "f", "arguments": {{"a": {"1" * 5000}}}}}</tool_call>', "5000 digits is too long"),
        ("<tool_call>", "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_an_observation(text, problem):
    read = read_calls(text, "tags")
    assert problem in read.problem and not read.calls
    reply = answer_calls({}, Turn(text=text, number=0, problem=read.problem), lambda value: value)
    assert reply is not None and not reply.done
    assert problem in str(reply.messages[0]["content"])


@pytest.mark.parametrize(
    ("name", "arguments", "content", "error"),
    [
        ("search", {"query": "x", "limit": "2"}, '["text x", "text x"]', False),
        ("slow", {"number": 21}, "42", False),
        ("search", {}, "Error: argument query is missing", True),
        ("search", {"query": "x", "limit": "many"}, "Error: argument limit: Input should be a valid integer", True),
        ("search", {"query": "x", "kind": "sound"}, "Error: argument kind: Input should be 'text' or 'title'", True),
        ("search", {"word": "x"}, "Error: search has no argument 'word'; its arguments are query, limit, kind", True),
        ("find", {}, "Error: unknown tool 'find'; the tools are search, slow, broken", True),
        ("broken", {}, "Error: no network", True),
    ],
)
def test_a_call_is_answered_whatever_its_arguments_are(name, arguments, content, error):
    tools = by_name([search, slow, broken])
    turn = Turn(text="", number=0, calls=(ToolCall(name=name, arguments=arguments),))
    reply = answer_calls(tools, turn, lambda value: asyncio.run(value) if asyncio.iscoroutine(value) else value)
    assert reply is not None and not reply.done
    assert str(reply.messages[0]["content"]).startswith(content) and reply.messages[0]["role"] == "tool"
    assert [(each.name, each.error) for each in reply.ran] == [(name if name in tools else "unknown", error)]


def test_replies_of_other_kinds_are_texts_or_the_end():
    assert as_reply(None).done
    assert as_reply("more").messages == ({"role": "user", "content": "more"},)
    for wrong in (3, Reply()):
        with pytest.raises(TypeError):
            as_reply(wrong)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("4821 * 377", str(4821 * 377)),
        ("2 ** 10 - 7 // 2 % 3", str(2**10 - 7 // 2 % 3)),
        ("-(3 + 4) * 2", "-14"),
        ("1 / 8", "0.125"),
        ("2^3 × 6 ÷ 4", "12"),  # noqa: RUF001
        ("2 ** -1", "0.5"),
        ("1_000 + 0x10", "1016"),
        ("(-1) ** 1000001", "-1"),
    ],
)
def test_the_calculator_calculates(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9", "9**(9**9)", "(10**50)*(10**50)", "2.0**5000", "1e308*10", "(-8)**0.5", "1/0", "0 ** -1",
        "__import__('os')", "().__class__", "a + 1", "'a' * 3", "True + 1", "[1]", "lambda: 1", "1 if 1 else 2",
        "f'{1}'", "1 +", "", "(" * 190, "1" * 201, "3 < 4", "max(1, 2)", "9" * 199, "1j * 2",
    ],
)  # fmt: skip
def test_the_calculator_knows_numbers_and_operators_alone(expression):
    with pytest.raises(ValueError, match=r".+") as error:
        calculator(expression)
    assert len(str(error.value)) < 400


READ = {
    "qwen2.5": "tags",
    "qwen3": "tags",
    "qwen3-2507": "tags",
    "smollm2": "tags",
    "llama3.2": "object",
    "qwen3.5": "parameters",
    "qwen3.8": "parameters",
    "glm4.5": "keys",
    "gpt-oss": "harmony",
    "mistral-v3": "mistral",
    "deepseek-v3": "deepseek",
    "gemma4": "braces",
    "lfm2": "python",
    "lfm2.5": "python",
    "muse": "invoke",
}
ARGUMENTS = {"x": '12 "<b>" é \n</parameter ', "n": 2.5, "list": [1, {"a": None}], "more": True}


@pytest.mark.parametrize("name", READ)
def test_the_form_of_calls_is_found_in_the_template(name):
    dialogue = Dialogue("a task", Tokenizer(backend_of(name), eos_tokens=()), TOOLS)
    assert dialogue.form == READ[name]
    shown = "".join(dialogue.tokenizer.pieces(dialogue.prompt([{"role": "user", "content": "Hello"}])))
    assert all(str(tool["function"]["name"]) in shown for tool in TOOLS)  # whether the template shows them or not
    assert ("system message" in dialogue.line) == (name in ("smollm2", "deepseek-v3"))


@pytest.mark.parametrize("name", [name for name in READ if name != "smollm2"])
def test_what_a_template_writes_as_a_call_is_read_as_that_call(name):
    """From the tokens that the model would have drawn, up to the one that ends its answer."""
    tokenizer = Tokenizer(backend_of(name), eos_tokens=tuple(stop_tokens_of(name)))
    dialogue = Dialogue("a task", tokenizer, TOOLS)
    arguments = json.dumps(ARGUMENTS) if FORMATS[name].text_arguments else ARGUMENTS
    count = 2 if FORMATS[name].parallel else 1
    calls = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": "python", "arguments": arguments}}
        for n in range(count)
    ]
    chat, asked = tokenizer.chat_format, {"role": "user", "content": "Hello"}
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    prompt, whole = (chat.render(said, tools=TOOLS, answer=said == [asked]) for said in ([asked], [asked, answer]))
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))))
    drawn = chat.encode(whole[shared:])
    ends = [place for place, token in enumerate(drawn) if token in tokenizer.eos_tokens]
    drawn = drawn[: ends[0] + 1] if ends else drawn
    found = dialogue.read(tokenizer.decode(drawn), drawn)
    assert [(call.name, call.arguments) for call in found.calls] == [("python", ARGUMENTS)] * count
    assert not found.problem


def test_calls_in_a_form_that_is_not_read_are_an_error_at_the_start():
    backend = copy.copy(backend_of("smollm2"))
    backend.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.content }}{% for call in message.tool_calls or () %}"
        "call {{ call.function.name }} with {{ call.function.arguments.x }}{% endfor %}<|im_end|>{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"a task: the model's chat template writes calls as .*leave"):
        Dialogue("a task", Tokenizer(backend, eos_tokens=()), TOOLS)
    Dialogue("a task", Tokenizer(backend, eos_tokens=()), ())


def test_the_middle_of_a_long_reply_is_cut_out():
    dialogue = Dialogue("a task", Tokenizer(backend_of("smollm2"), eos_tokens=()), TOOLS)
    message = {"role": "tool", "content": " ".join(f"word{n}" for n in range(200))}
    cut = dialogue.fitting(message, 60)
    text = str(cut["content"])
    assert text.startswith("word0 word1") and text.endswith("word199") and "[... cut ...]" in text
    assert len(dialogue.tokenizer.encode(text)) <= 62
    assert dialogue.fitting(message, None) is message and dialogue.fitting(message, 5000) is message


def test_the_warm_start_of_the_demo_imitates_what_the_demo_s_conversations_write():
    """Its system message describes the calculator as the conversation will, and its calls and results are right."""
    sft, demo = (
        yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))["tasks"][0]
        for name in ("tools_sft", "tools")
    )
    assert demo["name"] == "calculator"
    assert sft["system_prompt"] == instructions([tool_schema(calculator)])
    lines = (ROOT / sft["path"]).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
    for line in lines:
        question, called, result, answer = json.loads(line)["messages"]
        (call,) = read_calls(called["content"], "tags").calls
        assert question["content"] == f"What is {call.arguments['expression']}?"
        assert result["content"] == calculator(**call.arguments) and result["role"] == "tool"
        assert answer["content"] == f"{call.arguments['expression']} = {result['content']}"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("parameters", "<tool_call>\n<function=f>\n" + "<parameter=a>" * 20_000),
        ("keys", "<tool_call>f" + "<arg_key>a</arg_key>" * 20_000),
        ("keys", "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 20_000),
        ("braces", "<|tool_call>call:f{" + '<|"|>a' * 50_001),
        ("braces", "<|tool_call>call:f{" + "a " * 50_000),
        ("braces", "<|tool_call>call:f{" + "a" * 100_000 + " " * 100_000),
        ("python", "<|tool_call_start|>f(a=" + "'\\" * 50_000),
        ("python", "<|tool_call_start|>f(a=" + "\"'" * 50_001),
        ("invoke", " to=a" * 50_000 + "<atem:function_calls>f"),
        ("invoke", '<atem:function_calls><atem:invoke name="f">' + '<atem:parameter name="a">' * 20_000),
        ("invoke", "<atem:function_calls>" + '<atem:invoke name="f">' * 20_000),
    ],
    ids=lambda each: each[:24],
)
def test_marks_that_are_never_closed_are_read_in_linear_time(form, text):
    """Models repeat themselves, and calls are read by the thread that decodes: 53 and 17 s when it was quadratic."""
    start = time.process_time()
    found = read_calls(text, form)
    assert time.process_time() - start < 5.0
    assert found.calls == () and found.problem
