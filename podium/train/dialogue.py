"""How a task's conversations are written in a model's chat format: prompts with tools, replies, calls."""

import contextlib
from collections.abc import Sequence

from podium.models.chat_format import ChatFormat, Message, ToolSchema
from podium.models.tokenizer import Tokenizer
from podium.rollout.turn_format import MADE_UP, TurnFormat
from podium.tasks.tool_calls import FORMS, CallForm, Calls, instructions, read_calls

PROBE = "qzPROBEzq"
SCHEMA: ToolSchema = {
    "type": "function",
    "function": {"name": PROBE, "description": PROBE, "parameters": {"type": "object", "properties": {}}},
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

    def read(self, text: str) -> Calls:
        """The calls in an answer."""
        return Calls(said=text) if self.form is None else read_calls(text, self.form)

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
        text = instructions(self._tools)
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
    begin = min(found for found in (written.find("<tool_call>"), written.find("{"), len(written)) if found >= 0)
    end = written.rfind("}") + 1
    for form in FORMS:
        text = written if form == "tags" else written[begin:end]
        if [(each.name, dict(each.arguments)) for each in read_calls(text, form).calls] == [(PROBE, {"x": "12"})]:
            return form
    raise ValueError(
        f"{label}: the model's chat template writes calls as {written.strip()[:120]!r}, a form that is not read; leave"
        " the tools out, or take a model with <tool_call> JSON (Qwen2.5, Qwen3, SmolLM) or Llama 3's form"
    )
