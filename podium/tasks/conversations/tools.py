"""Tools: Python functions that a model may call.

A tool's JSON schema is derived from its signature, types and docstring: the summary describes the tool, and the section
`Args:` its parameters (docs/environments.md has an example).

If a call's arguments do not fit, or the call raises, the model gets the error as the result, so that it can correct the
call.
"""

import inspect
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from podium.config.errors import suggestion
from podium.config.imports import imported, is_path
from podium.models.text.chat_format import Message, ToolSchema
from podium.plain import message_of, plain
from podium.tasks.conversation import Reply, ToolCall, ToolRun, Turn, call_id

Tool = Callable[..., object]
Resolve = Callable[[object], object]
"""Waits for a value that may be awaitable, and returns it."""

TOOLS: dict[str, str] = {
    "calculator": "podium.tasks.games.calculator:calculator",
    "python": "podium.tasks.code.python_tool:python",
}
"""Built-in tools: name -> path of the function."""
SECTION = re.compile(r"\n\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?)\s*:\s*\n")
ARGUMENT = re.compile(r"(\s*)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def find_tool(name: str) -> Tool:
    """Find the built-in tool of this name, or the function at an import path. Raises ValueError if it is not a tool."""
    if not is_path(name) and name not in TOOLS:
        own = "for your own: `package.module:function`"
        raise ValueError(f"{name!r} is not a tool; {suggestion(name, TOOLS)} ({own})")
    tool = imported(TOOLS.get(name, name), what="a tool")
    if not callable(tool) or inspect.isclass(tool):
        raise ValueError(f"{name!r} is {tool!r:.80}, not a function; a tool is a function, a class is an environment")
    return tool


def tool_schema(tool: Tool) -> ToolSchema:
    """The JSON schema of a tool in the form that chat templates read.

    Raises ValueError if the tool has no docstring, or a parameter without a type that JSON can represent.
    """
    name = tool_name(tool)
    text = inspect.cleandoc(tool.__doc__ or "")
    if not text:
        raise ValueError(
            f"tool {name} has no docstring; write one, because the model reads it to learn what the tool does"
        )
    if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
        raise ValueError(f"tool {name}: it yields, and a model reads what a tool returns; return the whole reply")
    described = _descriptions(text)
    properties: dict[str, object] = {}
    required: list[str] = []
    definitions: dict[str, object] = {}
    for parameter, hint in _parameters(tool):
        schema = _schema_of(f"tool {name}: parameter {parameter.name}", hint)
        definitions |= schema.pop("$defs", {})  # references in a schema are relative to the root of the whole schema
        properties[parameter.name] = {**schema, **_described(described.get(parameter.name))}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    summary = SECTION.split(f"\n{text}\n")[0].strip()
    parameters = {"type": "object", "properties": properties, "required": required}
    parameters |= {"$defs": definitions} if definitions else {}
    function = {"name": name, "description": summary, "parameters": parameters}
    return {"type": "function", "function": function}


def tool_name(tool: Tool) -> str:
    """The name by which a model calls a tool."""
    return str(getattr(tool, "__name__", type(tool).__name__))


def by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """The tools by name. Raises ValueError if two have the same name."""
    found = {tool_name(tool): tool for tool in tools}
    if len(found) < len(tools):
        names = [tool_name(tool) for tool in tools]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"tools: two tools have the name {twice}; rename one")
    return found


def answer_calls(tools: Mapping[str, Tool], turn: Turn, resolve: Resolve) -> Reply | None:
    """Run a turn's calls in order, and reply with their results. None if it has no calls, which ends a conversation
    that only has tools.
    """
    if turn.problem:
        return Reply(messages=(_message("tool", f"Error: {turn.problem}", call_id(turn.number, 0)),))
    if not turn.calls:
        return None
    messages: list[Message] = []
    ran: list[ToolRun] = []
    for call in turn.calls:
        start = time.perf_counter()
        content, error = run_call(tools, call, resolve)
        messages.append(_message(call.name, content, call.id))
        known = call.name if call.name in tools else "unknown"
        ran.append(ToolRun(name=known, seconds=time.perf_counter() - start, error=error))
    return Reply(messages=tuple(messages), ran=tuple(ran))


def run_call(tools: Mapping[str, Tool], call: ToolCall, resolve: Resolve) -> tuple[str, bool]:
    """Run a call; returns its result as text, and whether it is an error."""
    tool = tools.get(call.name)
    if tool is None:
        return f"Error: unknown tool {call.name!r}; the tools are {', '.join(tools)}", True
    try:
        result = plain(resolve(tool(**_checked(tool, call.arguments))))
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False), False
    except BaseException as error:  # the model sees any error that its arguments cause, SystemExit included
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # from `podium tasks try`
        return f"Error: {message_of(error)}", True


def _message(name: str, content: str, call: str) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": call, "content": content}


def _parameters(tool: Tool) -> list[tuple[inspect.Parameter, Any]]:
    """The parameters of a tool with their types."""
    name = tool_name(tool)
    try:
        hints = get_type_hints(tool if inspect.isroutine(tool) else type(tool).__call__)
        signature = inspect.signature(tool)
    except Exception as error:  # annotations that are strings are evaluated
        raise ValueError(
            f"tool {name}: the types of its parameters cannot be read ({type(error).__name__}: {error}); import them in"
            " the module of the function, not only for type checking"
        ) from None
    found: list[tuple[inspect.Parameter, Any]] = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"tool {name}: {parameter} cannot be passed by name; a model passes arguments by name")
        if parameter.name not in hints:
            raise ValueError(f"tool {name}: parameter {parameter.name} has no type; write `{parameter.name}: str`")
        found.append((parameter, hints[parameter.name]))
    return found


def _schema_of(what: str, hint: Any) -> dict[str, Any]:
    """The JSON schema of a type. Raises ValueError, whose message begins with `what`, if it has no schema."""
    try:
        return TypeAdapter(hint).json_schema()
    except Exception as error:  # pydantic's errors, and errors of a type's own hooks
        reason = message_of(error).splitlines()[0]
        raise ValueError(
            f"{what} has the type {hint!r:.80}, of which no JSON schema can be made ({reason}); use str, int, float,"
            " bool, Literal, lists and dicts of these, a data class, pydantic's BaseModel, or TypedDict of"
            " typing_extensions"
        ) from None


def _checked(tool: Tool, arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments, converted to their types. Raises ValueError, with a message for the model, if they do not fit."""
    parameters = {parameter.name: (parameter, hint) for parameter, hint in _parameters(tool)}
    if unknown := [name for name in arguments if name not in parameters]:
        known = ", ".join(parameters) or "none"
        raise ValueError(f"{tool_name(tool)} has no argument {unknown[0]!r}; its arguments are {known}")
    checked: dict[str, object] = {}
    for name, (parameter, hint) in parameters.items():
        if name in arguments:
            try:
                checked[name] = TypeAdapter(hint).validate_python(arguments[name])
            except ValidationError as error:
                raise ValueError(f"argument {name}: {error.errors()[0]['msg']}") from None
        elif parameter.default is parameter.empty:
            raise ValueError(f"argument {name} is missing")
    return checked


def _descriptions(text: str) -> dict[str, str]:
    """The descriptions of arguments in the section `Args:` of a docstring."""
    parts = SECTION.split(f"\n{text}\n")
    section = next((body for head, body in zip(parts[1::2], parts[2::2], strict=False) if head != "Returns"), "")
    found: dict[str, str] = {}
    name, margin = "", None
    for line in section.splitlines():
        match = ARGUMENT.fullmatch(line)
        if match and (margin is None or len(match[1]) <= margin):
            margin, name = len(match[1]), match[2]
            found[name] = match[3].strip()
        elif name and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _described(text: str | None) -> dict[str, str]:
    return {"description": text} if text else {}
