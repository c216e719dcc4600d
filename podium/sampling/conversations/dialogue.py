"""How a task's conversations are written in a model's chat format: prompts with tools, replies, calls."""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from podium.models.text.chat_format import ChatFormat, Message, ToolSchema, any_of
from podium.models.text.tokenizer import Tokenizer
from podium.rollout.turn_format import MADE_UP, TurnFormat
from podium.tasks.conversation import CUT_MARK, call_id
from podium.tasks.conversations.tool_calls import (
    CLOSE,
    FORMS,
    OPEN,
    THOUGHT_MARKS,
    THOUGHTS,
    CallForm,
    Calls,
    instructions,
    opens_thought,
    read_calls,
)

PROBE = "qzPROBEzq"
QUESTION = "qzQUESTIONzq"
FUNCTION: Mapping[str, object] = {
    "name": PROBE,
    "description": PROBE,
    "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
}
SCHEMA: ToolSchema = {"type": "function", "function": FUNCTION}
BEGUN_ARGUMENTS = re.compile(r"(?:<|(?<=[:>\]\n])[ ]?\{)$")
"""Text that only opens a call's arguments; it is left to the model, whose tokens may join it with what follows."""
OPENING_TOKENS = 16
"""Longest opening of the model's thinking in tokens, including the spaces after it."""


class ToolFormat:
    """How a model's chat template describes tools and writes calls."""

    def __init__(self, label: str, tokenizer: Tokenizer) -> None:
        """Test the template with a made-up tool; `label` begins error messages.

        Raises ValueError if the template writes calls in an unsupported form.
        """
        self.tokenizer = tokenizer
        self.described = not _renders_tools(tokenizer.chat_format)
        """Whether tools are described in the system message, because the template does not show tools."""
        written = _written_call(tokenizer.chat_format)
        self.arguments_as_text = isinstance(written.arguments, str)
        """Whether the template takes a call's arguments as JSON text instead of an object."""
        self._writes_calls = bool(written.text)
        self.form: CallForm = _call_form(label, written.text)
        marks = (*FORMS[self.form].marks, *THOUGHT_MARKS)
        self._whole = any(mark in tokenizer.special_tokens for mark in marks)
        """Whether calls or thinking are marked by special tokens, which are not part of an answer's text."""

    def with_tools(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
        """Add a description of the tools to the system message, if the template does not show tools."""
        if not (tools and self.described):
            return list(messages)
        text = instructions(tools, self.form)
        if messages and messages[0]["role"] == "system":
            return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    def begun(self, name: str | None) -> str:
        """The beginning of an answer that must call the tool of this name (None: any tool), up to the call's
        arguments.
        """
        chat, called = self.tokenizer.chat_format, name or PROBE
        user: Message = {"role": "user", "content": QUESTION}
        tool = {"type": "function", "function": {**FUNCTION, "name": called}}

        def written(messages: Sequence[Message], *, answer: bool) -> str:
            return chat.render(messages, tools=(tool,), answer=answer).rpartition(QUESTION)[2]

        def body(arguments: dict[str, str]) -> str:
            given = json.dumps(arguments) if self.arguments_as_text else arguments
            if not self._writes_calls:
                return f"{OPEN}{json.dumps({'name': called, 'arguments': arguments})}{CLOSE}"
            return _behind(opening, written([user, _calling(called, given)], answer=False))

        opening = written([user], answer=True)
        one, none = body({"x": "12"}), body({})
        if name is None:
            return one[: one.index(called)]
        return BEGUN_ARGUMENTS.sub("", one[: _alike(one, none)])

    def read(
        self,
        text: str,
        tokens: Sequence[int],
        tools: Sequence[ToolSchema],
        *,
        begun: str = "",
        thinking: bool = False,
        cut: bool = False,
    ) -> Calls:
        """Parse the calls in an answer; `text` is its text without special tokens.

        `begun` is the given beginning of the answer, if any. `thinking`: whether the prompt has opened the model's
        thinking. `cut`: whether a limit ended the answer.
        """
        if not self._whole:
            return read_calls(begun + text, self.form, tools, thinking=thinking, cut=cut)
        ended = bool(tokens) and tokens[-1] in self.tokenizer.eos_tokens
        spelled = begun + self.tokenizer.spelled(list(tokens[: len(tokens) - ended]))
        found = read_calls(spelled, self.form, tools, thinking=thinking, cut=cut)
        special = any_of(list(self.tokenizer.special_tokens))
        assert special is not None, "the special tokens include the form's marks"
        return found._replace(said=special.sub("", found.said).strip() if found.calls else text)


class Dialogue:
    """The chat format of the conversations of one task."""

    def __init__(
        self,
        label: str,
        tokenizer: Tokenizer,
        tools: Sequence[ToolSchema],
    ) -> None:
        """Test how the model's template writes conversations and calls; `label` names the task in error messages.

        Raises ValueError if the template's conversations cannot be continued turn by turn, or if it writes calls in an
        unsupported form.
        """
        self.tokenizer = tokenizer
        self._label = label
        self._tools = tuple(tools)
        self._offering = dict[str, Dialogue]()
        try:
            self.turns = TurnFormat(tokenizer.chat_format, stop_tokens=tokenizer.eos_tokens, tools=tools)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
        self._format = ToolFormat(label, tokenizer) if tools else None

    def offering(self, tools: Sequence[ToolSchema], options: Mapping[str, object]) -> "Dialogue":
        """A copy with these tools and template variables; cached for equal arguments. Raises ValueError like
        `Dialogue`.
        """
        unread = self.unread(options)
        read = {name: value for name, value in options.items() if name not in unread}
        if not (tools or read):
            return self
        name = json.dumps((tools, read), sort_keys=True)
        if name not in self._offering:
            tokenizer = self.tokenizer.with_options(read) if read else self.tokenizer
            self._offering[name] = Dialogue(self._label, tokenizer, tools)
        return self._offering[name]

    def unread(self, options: Mapping[str, object]) -> tuple[str, ...]:
        """The variables in `options` that the chat template does not read."""
        return tuple(name for name in options if name not in self.tokenizer.chat_format.variables)

    def begun(self, name: str | None) -> str:
        """The beginning of an answer that must call the tool of this name, or any; empty without tools."""
        return "" if self._format is None else self._format.begun(name)

    @property
    def form(self) -> CallForm | None:
        """The form in which the model writes calls; None without tools."""
        return None if self._format is None else self._format.form

    @property
    def line(self) -> str:
        """A line about how conversations are written."""
        if self._format is None:
            return f"turns continued by rule {self.turns.rule}"
        described = self._format.described
        where = "the system message (the chat template does not show tools)" if described else "the template"
        return f"turns continued by rule {self.turns.rule}; tools described in {where}; calls parsed as {self.form}"

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a conversation's first messages, tools included, up to the beginning of the answer."""
        return tuple(self.turns.prompt(self._with_tools(messages)))

    def reply(self, messages: Sequence[Message], *, history: Sequence[Message], drawn_end: int | None) -> list[int]:
        """The tokens that follow an answer, as from `TurnFormat.reply`; `history` begins with the prompt's messages."""
        return self.turns.reply(messages, history=self._with_tools(history), drawn_end=drawn_end)

    def read(
        self, text: str, tokens: Sequence[int], *, before: Sequence[int] = (), begun: str = "", cut: bool = False
    ) -> Calls:
        """Parse the calls in an answer; `text` is its text without special tokens.

        `before` are the tokens before the answer, which may open the model's thinking; `begun` is the given beginning
        of the answer among them, if any. `cut`: whether a limit ended the answer.
        """
        if self._format is None:
            return Calls(said=text)
        thinking = opens_thought(self.tokenizer.spelled(list(before[-OPENING_TOKENS:])))
        return self._format.read(text, tokens, self._tools, begun=begun, thinking=thinking, cut=cut)

    def fitting(self, message: Message, limit: int | None) -> Message:
        """Shorten a message to at most `limit` tokens by cutting out the middle."""
        content = message.get("content")
        if limit is None or not isinstance(content, str):
            return message
        places = self.tokenizer.ends(content)
        if len(places) <= limit:
            return message
        kept = max(0, limit - len(self.tokenizer.encode(CUT_MARK)))
        first, last = kept - kept // 2, kept // 2
        head = content[: places[first - 1][1]] if first else ""
        tail = content[places[-last][0] :] if last else ""
        return {**message, "content": f"{head}{CUT_MARK}{tail}"}

    def _with_tools(self, messages: Sequence[Message]) -> list[Message]:
        return list(messages) if self._format is None else self._format.with_tools(messages, self._tools)


def with_calls(chat: ChatFormat, messages: Sequence[Message]) -> list[Message]:
    """Convert the arguments of tool calls in a prompt's messages to the form that the chat template reads.

    Raises ValueError if there are calls and the template leaves them out.
    """
    if not any(message.get("tool_calls") for message in messages):
        return list(messages)
    written = _written_call(chat)
    if not written.text:
        raise ValueError(
            "a message has tool_calls, and the model's chat template does not write them, so the model would not see "
            "them; write the calls into the message's content, or set chat_template to a template that writes them"
        )
    if isinstance(written.arguments, dict):
        return list(messages)
    return [_with_text_arguments(message) for message in messages]


def _with_text_arguments(message: Message) -> Message:
    """The message with the arguments of its calls as JSON text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    functions = [dict(call["function"]) for call in calls]
    texts = [
        each["arguments"] if isinstance(each["arguments"], str) else json.dumps(each["arguments"], ensure_ascii=False)
        for each in functions
    ]
    written = [
        {**call, "function": {**function, "arguments": text}}
        for call, function, text in zip(calls, functions, texts, strict=True)
    ]
    return {**message, "tool_calls": written}


def _renders_tools(chat: ChatFormat) -> bool:
    return PROBE in chat.render(MADE_UP, tools=(SCHEMA,), answer=True)


class _Written(NamedTuple):
    """A made-up call as written by a template."""

    text: str
    """The call as text; empty if the template writes no calls."""
    arguments: dict[str, str] | str
    """The arguments in the form that the template takes."""


@functools.lru_cache(maxsize=8)
def _written_call(chat: ChatFormat) -> _Written:
    """What the template writes for a call, with arguments as an object if the template accepts one, or else as JSON
    text.
    """
    user: Message = {"role": "user", "content": QUESTION}
    tried: tuple[dict[str, str] | str, ...] = ({"x": "12"}, '{"x": "12"}')
    for arguments in tried:
        calling = _calling(PROBE, arguments)
        with contextlib.suppress(ValueError):  # the template wants the other form of arguments, or no calls
            text = chat.render([user, calling], tools=(SCHEMA,), answer=False).rpartition(QUESTION)[2]
            return _Written(text if PROBE in text else "", arguments)
    return _Written("", tried[0])


def _calling(name: str, arguments: Mapping[str, str] | str) -> Message:
    call = {"id": call_id(0, 0), "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _alike(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _behind(opening: str, written: str) -> str:
    """The part of an answer with a call after the `opening` that all answers share."""
    if written.startswith(opening):
        return written[len(opening) :]
    same = _alike(opening, written)  # the opening has thinking, the answer has not
    same -= written[:same].endswith("<")  # which begins two different marks
    closing = next((f"\n{mark}\n\n" for begin, mark in THOUGHTS if opening.rstrip().endswith(begin)), "")
    return closing + written[same:]


def _call_form(label: str, written: str) -> CallForm:
    """Find the form of a call that the template has written; the `tags` form, by instruction, if it writes none.

    Raises ValueError if no form parses what it writes.
    """
    if not written:
        return "tags"
    begin, end = max(0, written.find("{")), written.rfind("}") + 1
    for form in FORMS:
        text = written[begin:end] if form == "object" else written
        calls = read_calls(text, form, (SCHEMA,)).calls
        if [(each.name, dict(each.arguments)) for each in calls] == [(PROBE, {"x": "12"})]:
            return form
    raise ValueError(
        f"{label}: the model's chat template writes calls as {written.strip()[:120]!r}, which is not a supported "
        f"form; leave the tools out, or take a model that writes them in one of these forms: {', '.join(FORMS)} "
        "(docs/environments.md)"
    )
