"""How a task's conversations are written in a model's chat format: prompts with tools, replies, calls."""

import contextlib
from collections.abc import Sequence

from podium.models.chat_format import ChatFormat, Message, ToolSchema, any_of
from podium.models.tokenizer import Tokenizer
from podium.rollout.turn_format import MADE_UP, TurnFormat
from podium.tasks.tool_calls import FORMS, CallForm, Calls, instructions, read_calls

PROBE = "qzPROBEzq"
SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": PROBE,
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
CUT_MARK = "\n[... cut ...]\n"


class Dialogue:
    """The chat format of the conversations of one task."""

    def __init__(self, label: str, tokenizer: Tokenizer, tools: Sequence[ToolSchema]) -> None:
        """Try how the model's template writes conversations and calls; `label` names the task in messages.

        Raises ValueError if it cannot be continued turn by turn, or writes calls in a form that cannot be read.
        """
        self.tokenizer = tokenizer
        self._tools = tuple(tools)
        chat = tokenizer.chat_format
        try:
            self.turns = TurnFormat(chat, stop_tokens=tokenizer.eos_tokens, tools=tools)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
        self._described = bool(tools) and not _renders_tools(chat)
        self.form: CallForm | None = _call_form(label, chat) if tools else None
        marks = () if self.form is None else FORMS[self.form].marks
        self._whole = any(mark in tokenizer.special_tokens for mark in marks)
        """Whether calls are written with special tokens, which are no part of an answer's text."""

    @property
    def line(self) -> str:
        """A line that says how conversations are written."""
        if not self._tools:
            return f"turns continued by rule {self.turns.rule}"
        where = "the system message: the chat template has no place for them" if self._described else "the template"
        return f"turns continued by rule {self.turns.rule}; tools described in {where}; calls read as {self.form}"

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a conversation's first messages, tools included, up to where the model answers."""
        return tuple(self.turns.prompt(self._with_tools(messages)))

    def reply(self, messages: Sequence[Message], *, history: Sequence[Message], drawn_end: int | None) -> list[int]:
        """The tokens that follow an answer, as `TurnFormat.reply` makes them; `history` begins with the prompt's."""
        return self.turns.reply(messages, history=self._with_tools(history), drawn_end=drawn_end)

    def read(self, text: str, tokens: Sequence[int]) -> Calls:
        """The calls in an answer, of which `text` is what it says without special tokens."""
        if self.form is None:
            return Calls(said=text)
        if not self._whole:
            return read_calls(text, self.form, self._tools)
        ended = bool(tokens) and tokens[-1] in self.tokenizer.eos_tokens
        spelled = self.tokenizer.spelled(list(tokens[: len(tokens) - ended]))
        found = read_calls(spelled, self.form, self._tools)
        special = any_of(list(self.tokenizer.special_tokens))
        assert special is not None, "the form's marks are among them"
        return found._replace(said=special.sub("", found.said).strip() if found.calls else text)

    def fitting(self, message: Message, limit: int | None) -> Message:
        """A message of at most `limit` tokens; the middle of a longer one is cut out."""
        content = message.get("content")
        if limit is None or not isinstance(content, str):
            return message
        tokens = self.tokenizer.encode(content)
        if len(tokens) <= limit:
            return message
        kept = max(0, limit - len(self.tokenizer.encode(CUT_MARK)))
        head, tail = tokens[: kept - kept // 2], tokens[len(tokens) - kept // 2 :]
        return {**message, "content": f"{self.tokenizer.decode(head)}{CUT_MARK}{self.tokenizer.decode(tail)}"}

    def _with_tools(self, messages: Sequence[Message]) -> list[Message]:
        """The messages; if the template does not show tools, with their description in the system message."""
        if not self._described:
            return list(messages)
        assert self.form is not None, "there are tools"
        text = instructions(self._tools, self.form)
        if messages and messages[0]["role"] == "system":
            return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]


def _renders_tools(chat: ChatFormat) -> bool:
    return PROBE in chat.render(MADE_UP, tools=(SCHEMA,), answer=True)


def _call_form(label: str, chat: ChatFormat) -> CallForm:
    """The form in which the template writes calls; the `tags` form, by instruction, if it writes none.

    Raises ValueError if no form reads what it writes.
    """
    question = "qzQUESTIONzq"
    user: Message = {"role": "user", "content": question}
    written = ""
    for arguments in ({"x": "12"}, '{"x": "12"}'):
        call = {"id": "call00000", "type": "function", "function": {"name": PROBE, "arguments": arguments}}
        calling: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        with contextlib.suppress(ValueError):  # the template wants arguments in the other form, or no calls
            written = chat.render([user, calling], tools=(SCHEMA,), answer=False).rpartition(question)[2]
            break
    if PROBE not in written:
        return "tags"
    begin, end = max(0, written.find("{")), written.rfind("}") + 1
    for form in FORMS:
        text = written[begin:end] if form == "object" else written
        calls = read_calls(text, form, (SCHEMA,)).calls
        if [(each.name, dict(each.arguments)) for each in calls] == [(PROBE, {"x": "12"})]:
            return form
    raise ValueError(
        f"{label}: the model's chat template writes calls as {written.strip()[:120]!r}, a form that is not read; leave"
        f" the tools out, or take a model that writes them in one of these forms: {', '.join(FORMS)}"
        " (docs/environments.md)"
    )
