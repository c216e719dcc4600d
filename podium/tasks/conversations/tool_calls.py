"""Parses the tool calls that a model wrote, in the forms of `FORMS`, and describes tools to models whose template does
not. What cannot be parsed is reported to the model, and never raises an error.

tags        `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, among other text (Qwen2.5, Qwen3,
            SmolLM, Hermes)
parameters  `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` (Qwen3-Coder, Qwen3.5,
            Nemotron 3)
keys        `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` (GLM 4.5)
harmony     a message `to=functions.NAME` with the arguments as JSON (gpt-oss)
mistral     `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]NAME[ARGS]{...}`
deepseek    the name and a block of JSON between marks (DeepSeek V3)
braces      `<|tool_call>call:NAME{KEY:VALUE}<tool_call|>`, texts between `<|"|>` (Gemma 4)
python      `<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>`, values as Python writes them (LFM2)
invoke      `<atem:invoke name="NAME"><atem:parameter name="KEY">VALUE</atem:parameter></atem:invoke>` (Muse Glimmer)
object      the whole answer is `{"name": ..., "parameters": {...}}` (Llama 3)
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from podium.models.text.chat_format import ToolSchema
from podium.plain import clean, once, plain
from podium.tasks.conversation import ToolCall

CallForm = Literal[
    "tags", "parameters", "keys", "harmony", "mistral", "deepseek", "braces", "python", "invoke", "object"
]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGGED = re.compile(f"{OPEN}(.*?)(?:{CLOSE}|(?={OPEN})|$)", re.DOTALL)
EXAMPLE = '{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}'
BAR = "\uff5c"  # DeepSeek's upright bar
BEGIN, SEPARATOR, END = (f"<{BAR}tool▁{name}{BAR}>" for name in ("call▁begin", "sep", "call▁end"))
BLOCK = re.compile(f"(?:function)?{SEPARATOR}([^\n]*)\n```json\n(.*?)\n```", re.DOTALL)
FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
KEY = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
MESSAGE = re.compile(
    r"(?:\A|<\|start\|>)((?:(?!<\|(?:start|end|message)\|>).)*<\|message\|>.*?)"
    r"(?:<\|(?:call|end|return)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
QUOTE = '<|"|>'
IN_BRACES = re.compile(
    rf"{re.escape(QUOTE)}(.*?){re.escape(QUOTE)}|\"?([^\s{{}}\[\],:<\"]+)\"?\s*:|([^\s{{}}\[\],:<\"]+)", re.DOTALL
)
"""Matches a text, a key, or another value."""
LIST_OPEN, LIST_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
STRING = re.compile(r"'(?:[^'\\]|\\.?)*(?:'|\Z)|\"(?:[^\"\\]|\\.?)*(?:\"|\Z)", re.DOTALL)
"""Matches a text in Python; an unclosed text extends to the end, so that the search takes linear time."""
INVOKED = re.compile(r"\s*<atem:invoke name=\"([^\">]+)\">(.*?)(?:</atem:invoke>\s*)?", re.DOTALL)
ATEM_PARAMETER = re.compile(r"<atem:parameter name=\"([^\">]+)\">(.*?)</atem:parameter>", re.DOTALL)
SPACES = re.compile(r"\s*")
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
MOST_DIGITS = 4_000
"""Most digits of an integer in a call; Python parses up to 4,300."""
IN_PYTHON = {"True": True, "False": False, "None": None}

THOUGHTS = (("<think>", "</think>"), ("<|channel>thought", "<channel|>"), ("[THINK]", "[/THINK]"))
"""The marks around a model's thinking before its answer (Qwen and others, Gemma 4, Magistral)."""
THOUGHT_MARKS = ("<think>", "</think>", "<|channel>", "<channel|>", "[THINK]", "[/THINK]")
"""Marks in THOUGHTS that may be special tokens."""

Types = Mapping[str, Mapping[str, object]]
"""The schemas of arguments, by tool and argument name joined by a line break."""


class Calls(NamedTuple):
    """The calls in an answer."""

    calls: tuple[ToolCall, ...] = ()
    problem: str = ""
    """What is wrong with the first call that cannot be parsed; then `calls` is empty."""
    said: str = ""
    """The rest of the answer, without calls."""


class Form(NamedTuple):
    """How a family of models writes calls."""

    marks: tuple[str, ...]
    """Texts around calls, which are special tokens of some models."""
    pattern: re.Pattern[str]
    """Finds a call; its first group is the input of `read`."""
    read: Callable[[str, Types], list[ToolCall]]
    """Parses the calls. Raises ValueError, with a message for the model, if they cannot be parsed."""
    example: str
    ends: tuple[str, ...] = ()
    """Texts that end a call, for forms in which the beginning of a call parses as a call with fewer arguments;
    otherwise empty."""


def read_calls(
    text: str, form: CallForm, tools: Sequence[ToolSchema] = (), *, thinking: bool = False, cut: bool = False
) -> Calls:
    """Parse the calls in an answer; calls inside the model's thinking, closed or not, do not count.

    `tools` tell which arguments are texts, if the form does not. `thinking`: whether the answer begins inside the
    thinking, because the prompt opened it. `cut`: whether a limit ended the answer, so that its last call may lack
    arguments.
    """
    begin, end = _beyond_thoughts(text, thinking=thinking)
    answer, shape = text[begin:], FORMS[form]
    found = [match for match in shape.pattern.finditer(answer) if begin + match.start() < end]
    rest, last = "", 0
    for match in found:
        rest, last = rest + answer[last : match.start()], match.end()
    said = text[:begin] + (rest + answer[last:]).strip()
    try:
        if cut and found and shape.ends and not found[-1].group().rstrip().endswith(shape.ends):
            raise ValueError("the answer was cut within a call")
        types = _types(tools)
        calls = [call for match in found for call in shape.read(match.group(1), types)]
    except ValueError as error:
        return Calls(problem=f"{error}; write {shape.example}", said=said)
    return Calls(calls=tuple(calls), said=said if calls else text)


def opens_thought(text: str) -> bool:
    """Whether a prompt ends by opening the model's thinking, so that the answer begins inside it."""
    return text.rstrip().endswith(tuple(opening for opening, _ in THOUGHTS))


def _beyond_thoughts(text: str, *, thinking: bool) -> tuple[int, int]:
    """The positions at which the answer begins, after the last closed block of thinking, and at which an unclosed block
    begins.
    """
    begin, closed = 0, False
    for _, closing in THOUGHTS:
        place = text.rfind(closing)
        closed |= place >= 0
        begin = max(begin, place + len(closing)) if place >= 0 else begin
    if thinking and not closed:
        return len(text), len(text)
    opened = (text.find(opening, begin) for opening, _ in THOUGHTS)
    return begin, min((place for place in opened if place >= 0), default=len(text))


def instructions(tools: Sequence[ToolSchema], form: CallForm = "tags") -> str:
    """A description of tools for the system message, worded like those that models were trained with."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You may call these functions, one JSON schema a line:\n"
        f"<tools>\n{lines}\n</tools>\n"
        f"To call one, write {FORMS[form].example} and nothing else."
    )


def _json(text: str) -> object:
    try:
        return _loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the call is not valid JSON ({error})") from None


def _loads(text: str) -> object:
    """Parse JSON whose texts may contain raw line breaks, as models write them. Raises ValueError, also for NaN and
    Infinity.
    """
    return json.loads(text, strict=False, parse_constant=_refuse, parse_int=_whole, object_pairs_hook=once)


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits is too long; at most {MOST_DIGITS} are allowed")
    return int(text)


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _call(value: object) -> ToolCall:
    """Make a call from an object with its name and arguments."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("the call has no name")
    if "arguments" in value and "parameters" in value:
        raise ValueError(f"the call of {value['name']} has both arguments and parameters")
    return _named(value["name"], value.get("arguments", value.get("parameters", {})))


def _named(name: str, arguments: object) -> ToolCall:
    name = clean(name)
    if not name:
        raise ValueError("the call has no name")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} are not an object")
    try:
        made = once([(str(key), plain(value)) for key, value in arguments.items()])
        json.dumps(made, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"the arguments of {name} cannot be used: {error}") from None
    return ToolCall(name=name, arguments=made)


def _object(text: str, types: Types) -> list[ToolCall]:
    return [_call(_json(text))]


def _parameters(text: str, types: Types) -> list[ToolCall]:
    found = FUNCTION.fullmatch(text.rstrip())
    if found is None:
        raise ValueError("the call has no name")
    return [_of_texts(found[1], PARAMETER, found[2], types)]


def _keys(text: str, types: Types) -> list[ToolCall]:
    name, mark, rest = text.partition("<arg_key>")
    if len(name.split()) != 1:
        raise ValueError("the call has no name")
    return [_of_texts(name.strip(), KEY, mark + rest, types)]


def _of_texts(name: str, pattern: re.Pattern[str], text: str, types: Types) -> ToolCall:
    """Make a call whose arguments are written as texts; values that are not strings are JSON. Takes linear time."""
    arguments: dict[str, object] = {}
    place = _behind_spaces(text, 0)
    while place < len(text):
        found = pattern.match(text, place)
        if found is None:
            raise ValueError(f"the arguments of {name} cannot be parsed from {text[place : place + 40]!r} on")
        key, value = found.groups()
        if key in arguments:
            raise ValueError(f"the argument {key} of {name} is given twice")
        arguments[key] = value if _is_text(types.get(f"{name}\n{key}", {})) else _value(value)
        place = _behind_spaces(text, found.end())
    return _named(name, arguments)


def _behind_spaces(text: str, place: int) -> int:
    found = SPACES.match(text, place)
    assert found is not None, "the pattern also matches an empty text"
    return found.end()


def _value(text: str) -> object:
    """Parse a value as JSON or Python (as some templates write it); otherwise return the text."""
    try:
        return _loads(text)
    except (ValueError, RecursionError):
        return IN_PYTHON.get(text, text)


def _is_text(schema: Mapping[str, object]) -> bool:
    options = schema.get("anyOf")
    kinds = [schema, *(options if isinstance(options, list) else ())]
    return any(each.get("type") == "string" for each in kinds)


def _types(tools: Sequence[ToolSchema]) -> Types:
    found: dict[str, Mapping[str, object]] = {}
    for tool in tools:
        function: Any = tool["function"]
        for key, schema in function["parameters"].get("properties", {}).items():
            found[f"{function['name']}\n{key}"] = schema
    return found


def _harmony(text: str, types: Types) -> list[ToolCall]:
    """Parse the call of a message, if its header names a recipient."""
    header, _, body = text.partition("<|message|>")
    recipient = RECIPIENT.search(header)
    return [] if recipient is None else [_named(recipient[1], _json(body))]


def _mistral(text: str, types: Types) -> list[ToolCall]:
    name, mark, arguments = text.partition("[ARGS]")
    if mark:
        return [_named(name.partition("[CALL_ID]")[0].strip(), _json(arguments))]
    calls = _json(text)
    return [_call(each) for each in (calls if isinstance(calls, list) else [calls])]


def _deepseek(text: str, types: Types) -> list[ToolCall]:
    found = BLOCK.fullmatch(text.strip())
    if found is None:
        raise ValueError("the call cannot be parsed")
    return [_named(found[1].strip(), _json(found[2]))]


def _braces(text: str, types: Types) -> list[ToolCall]:
    name, brace, rest = text.strip().removeprefix("call:").partition("{")
    return [_named(name.strip(), _json(IN_BRACES.sub(_in_json, brace + rest)))]


def _in_json(found: re.Match[str]) -> str:
    """Convert a text, key or value of the form `braces` to JSON."""
    text, key, value = found.groups()
    if key is not None:
        return f"{json.dumps(key)}:"
    if value is not None:
        return json.dumps(IN_PYTHON[value]) if value in IN_PYTHON else value
    return json.dumps(text)


def _python(text: str, types: Types) -> list[ToolCall]:
    """Parse calls in Python, as a list or a single call; values are literals, or `true`, `false` and `null`."""
    lines = STRING.sub(lambda found: found[0].replace("\n", "\\n"), text.strip())  # LFM2.5 does not escape them
    try:
        found = ast.parse(lines, mode="eval").body
        return [_of_node(each, types) for each in (found.elts if isinstance(found, ast.List) else [found])]
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"the calls are not valid Python ({error})") from None


def _of_node(node: ast.expr, types: Types) -> ToolCall:
    """Convert a Python call; positional arguments are assigned by the tool's schema."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("the call has no name")
    name = ast.unparse(node.func)
    known = [key for tool, _, key in (each.partition("\n") for each in types) if tool == name]
    if len(node.args) > len(known) or any(each.arg is None for each in node.keywords):
        raise ValueError(f"each argument of {name} needs its name before it")
    given = [*zip(known, node.args, strict=False), *((str(each.arg), each.value) for each in node.keywords)]
    names = [key for key, _ in given]
    if twice := [key for key in names if names.count(key) > 1]:
        raise ValueError(f"the argument {twice[0]} of {name} is given twice")
    return _named(name, {key: _literal(value) for key, value in given})


def _literal(node: ast.expr) -> object:
    """The value of a literal. Raises ValueError for other expressions."""
    match node:
        case ast.Name(id="true" | "false" | "null"):
            return json.loads(node.id)
        case ast.List() | ast.Tuple():
            return [_literal(each) for each in node.elts]
        case ast.Dict():
            keys = [None if each is None else _literal(each) for each in node.keys]
            return once([(str(key), _literal(value)) for key, value in zip(keys, node.values, strict=True)])
        case _:
            value = ast.literal_eval(node)
            if not isinstance(value, str | int | float | bool | None):
                raise ValueError(f"{value!r} cannot be represented in JSON")
            return value


def _invoke(text: str, types: Types) -> list[ToolCall]:
    parts = [each + "</atem:invoke>" for each in text.split("</atem:invoke>") if each.strip()]
    calls = []
    for part in parts:
        found = INVOKED.fullmatch(part)
        if found is None:
            raise ValueError("the call has no name")
        calls.append(_of_texts(found[1], ATEM_PARAMETER, found[2], types))
    if not calls:
        raise ValueError("the call has no name")
    return calls


FORMS: dict[CallForm, Form] = {
    "tags": Form((OPEN, CLOSE), TAGGED, _object, f"{OPEN}{EXAMPLE}{CLOSE}"),
    "parameters": Form(
        (OPEN, CLOSE),
        TAGGED,
        _parameters,
        f"{OPEN}\n<function=NAME>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>\n{CLOSE}",
        ends=("</function>", CLOSE),
    ),
    "keys": Form(
        (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        TAGGED,
        _keys,
        f"{OPEN}NAME\n<arg_key>ARGUMENT</arg_key>\n<arg_value>VALUE</arg_value>\n{CLOSE}",
        ends=(CLOSE,),
    ),
    "harmony": Form(
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>", "<|return|>"),
        MESSAGE,
        _harmony,
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{ARGUMENT: VALUE}<|call|>",
    ),
    "mistral": Form(
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        re.compile(r"\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|</s>|$)", re.DOTALL),
        _mistral,
        f"[TOOL_CALLS] [{EXAMPLE}]",
    ),
    "deepseek": Form(
        (BEGIN, SEPARATOR, END),
        re.compile(f"{BEGIN}(.*?)(?:{END}|(?={BEGIN})|$)", re.DOTALL),
        _deepseek,
        f"{BEGIN}function{SEPARATOR}NAME\n```json\n{{ARGUMENT: VALUE}}\n```{END}",
    ),
    "braces": Form(
        ("<|tool_call>", "<tool_call|>", QUOTE),
        re.compile(r"<\|tool_call>(.*?)(?:<tool_call\|>|(?=<\|tool_call>)|$)", re.DOTALL),
        _braces,
        f"<|tool_call>call:NAME{{ARGUMENT:{QUOTE}TEXT{QUOTE}}}<tool_call|>",
    ),
    "python": Form(
        (LIST_OPEN, LIST_CLOSE),
        re.compile(rf"{re.escape(LIST_OPEN)}(.*?)(?:{re.escape(LIST_CLOSE)}|$)", re.DOTALL),
        _python,
        f"{LIST_OPEN}[NAME(ARGUMENT=VALUE)]{LIST_CLOSE}",
    ),
    "invoke": Form(
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        re.compile(
            r"(?:(?:<\|eom\|>)?<\|start\|>assistant)?(?: to=[^\s<=]+<\|message\|>)?"
            r"<atem:function_calls>(.*?)(?:</atem:function_calls>|(?=<atem:function_calls>)|$)",
            re.DOTALL,
        ),
        _invoke,
        '<atem:function_calls>\n<atem:invoke name="NAME">\n<atem:parameter name="ARGUMENT">VALUE</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>",
        ends=("</atem:invoke>", "</atem:function_calls>"),
    ),
    "object": Form(
        (),
        re.compile(r"\A\s*(\{\s*\"(?:name|type|function|parameters)\".*)\Z", re.DOTALL),
        _object,
        EXAMPLE,
    ),
}
"""The forms by name, in the order in which they are tried on a chat template's calls."""
