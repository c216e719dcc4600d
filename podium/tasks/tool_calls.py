"""Reads the calls of tools that a model wrote, in two forms, and describes tools to models whose template does not.

`tags`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, among other text (Qwen2.5, Qwen3,
SmolLM, Hermes). `object`: the whole answer is `{"name": ..., "parameters": {...}}` (Llama 3). What cannot be read is a
problem for the model to mend, never an error.
"""

import json
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from podium.models.chat_format import ToolSchema
from podium.tasks.conversation import ToolCall

CallForm = Literal["tags", "object"]
FORMS: tuple[CallForm, ...] = ("tags", "object")
OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGGED = re.compile(f"{OPEN}(.*?)(?:{CLOSE}|(?={OPEN})|$)", re.DOTALL)
EXAMPLE = '{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}'


class Calls(NamedTuple):
    """The calls in an answer."""

    calls: tuple[ToolCall, ...] = ()
    problem: str = ""
    """What is wrong with the first that cannot be read; there are then no `calls`."""
    said: str = ""
    """The rest of the answer."""


def read_calls(text: str, form: CallForm) -> Calls:
    """The calls in an answer; what the model thought before it, up to `</think>`, is not looked at."""
    thought, end, answer = text.rpartition("</think>")
    before = thought + end
    if form == "tags":
        found = [match.group(1) for match in TAGGED.finditer(answer)]
        said = before + TAGGED.sub("", answer).strip()
    else:
        is_call = re.match(r"\s*\{\s*\"(name|type|function|parameters)\"", answer)
        found, said = ([answer], before) if is_call else ([], text)
    calls: list[ToolCall] = []
    for each in found:
        call = _call(each)
        if isinstance(call, str):
            return Calls(problem=call, said=said)
        calls.append(call)
    return Calls(calls=tuple(calls), said=said if calls else text)


def _call(text: str) -> ToolCall | str:
    """A call, or what is wrong with it."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        return f"the call is not valid JSON ({error}); write {EXAMPLE}"
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return f"the call has no name; write {EXAMPLE}"
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return f"the arguments of {value['name']} are no object; write {EXAMPLE}"
    return ToolCall(name=value["name"], arguments=arguments)


def instructions(tools: Sequence[ToolSchema]) -> str:
    """A description of tools for the system message, in the words of models that were trained with one."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You may call these functions, one JSON schema a line:\n"
        f"<tools>\n{lines}\n</tools>\n"
        f"To call one, write {OPEN}{EXAMPLE}{CLOSE} and nothing else."
    )
