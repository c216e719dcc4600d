"""Reads conversations from rows of data, in the published formats, without losing any part of them."""

import json
from collections.abc import Mapping

Message = dict[str, object]
ROLES = ("system", "user", "assistant", "tool")


def read_messages(what: str, value: object) -> list[Message]:
    """Validate a conversation and return its messages as chat templates read them.

    Every key of a message is kept, except those without a value. A content in parts becomes their text, and the
    arguments of calls become objects where they are JSON text.

    Args:
        what: begins error messages: the location and the column.
        value: a list of `{role, content}`; an assistant's message may have `tool_calls` instead of content.

    Raises:
        ValueError: the value is not a conversation, or has content that is not text.
    """
    if not isinstance(value, list) or not value:
        rule = "a list of {role: system, user, assistant or tool, content: text}"
        raise ValueError(f"{what} is {value!r:.200}; expected {rule}")
    return [_message(f"{what}: message {number}", each) for number, each in enumerate(value, 1)]


def text_of(message: Mapping[str, object]) -> str:
    """The content of a message that `read_messages` returned."""
    return str(message["content"])


def said_by_assistant(what: str, message: Mapping[str, object]) -> str:
    """The text of an assistant's message that is to be learned. Raises ValueError if the message has calls, which are
    not text.

    `what` begins the error.
    """
    if message.get("tool_calls"):
        raise ValueError(
            f"{what} has an assistant's message with tool_calls, and only text is learned; write the calls into its"
            " content, as the model writes them"
        )
    return text_of(message)


def refuse_tools(location: str, row: Mapping[str, object]) -> None:
    """Raise ValueError if a row has its own tool schemas, because conversations from data do not pass them to the
    model.

    `location` begins the error.
    """
    if row.get("tools"):
        raise ValueError(
            f"{location}: column 'tools' gives the row its own tools, but the model is shown only those of"
            " `tasks.tools`; describe them in the system message, or drop the column to train without them"
        )


def _message(what: str, value: object) -> Message:
    if not isinstance(value, Mapping) or value.get("role") not in ROLES:
        rule = f"expected a list of {{role: {', '.join(ROLES[:-1])} or tool, content: text}}"
        raise ValueError(f"{what} is {value!r:.200}; {rule}")
    message: Message = {str(key): each for key, each in value.items() if each is not None}
    calls = message.get("tool_calls")
    if calls is not None:
        message["tool_calls"] = _calls(what, calls)
    message["content"] = _content(what, message.get("content", "" if calls else None))
    if calls == []:  # tables have an empty value for messages without calls
        del message["tool_calls"]
    return message


def _content(what: str, content: object) -> str:
    """A content's text, which may be in parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if not parts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        rule = "expected {role, content: text}, or parts {type: text, text}; Podium's models read text only"
        raise ValueError(f"{what}: its content is {content!r:.200}; {rule}")
    return "".join(map(str, texts))


def _calls(what: str, calls: object) -> list[Message]:
    """The calls of a message, with arguments as objects."""
    if not isinstance(calls, list):
        raise ValueError(f"{what}: tool_calls is {calls!r:.200}; expected a list of {{function: {{name, arguments}}}}")
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{what}: a call is {call!r:.200}; expected {{function: {{name, arguments}}}}")
        named = {**function, "arguments": _arguments(what, function.get("arguments"))}
        kept = {} if function is call else {str(key): each for key, each in call.items() if each is not None}
        found.append({"type": "function", **kept, "function": named})
    return found


def _arguments(what: str, arguments: object) -> dict[str, object]:
    """A call's arguments as an object. OpenAI's format has them as JSON text; tables fill absent arguments with
    null.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ValueError(f"{what}: a call's arguments are {arguments!r:.200}, not a JSON object") from None
    elif isinstance(arguments, Mapping):
        arguments = {str(name): each for name, each in arguments.items() if each is not None}
    if arguments is not None and not isinstance(arguments, dict):
        raise ValueError(f"{what}: a call's arguments are {arguments!r:.200}, not an object")
    return arguments or {}
