"""Messages to text by a chat template, and to tokens among which no content can pose as a control token. No jax.

A question or a tool's reply may contain the text of a control token, `<|im_end|>` say. Encoded with the rest it would
become that token and end the message. So `render` puts a mark, a character for private use, into each such text, and
`encode` encodes what stands on the two sides of a mark apart.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from podium.models.template import ChatTemplate

Message = Mapping[str, object]
"""A message as chat templates read it: `role`, `content`, and perhaps `name`, `tool_calls` or `tool_call_id`."""
ToolSchema = Mapping[str, object]
"""A tool as chat templates read it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

MARK = "\ue0f1"
ESCAPED = "\\ue0f1"
"""The mark as a template's `tojson` may write it."""
PIECES = re.compile(f"{MARK}{MARK}|{MARK}")
GUARDED_ROLES = ("system", "user", "tool")


class AddedToken(Protocol):
    """A token that text names whole."""

    @property
    def content(self) -> str:
        """Its text."""
        ...

    @property
    def special(self) -> bool:
        """Whether it controls the format, so that it is left out of decoded text."""
        ...


class ChatFormat:
    """Renders and encodes conversations."""

    def __init__(
        self,
        template: ChatTemplate,
        *,
        named: Mapping[int, AddedToken],
        encode: Callable[[str], list[int]],
        options: Mapping[str, object] | None = None,
    ) -> None:
        """Take the parts of a tokenizer.

        Args:
            template: the model's.
            named: the tokens that text names whole, by number.
            encode: turns a text into tokens, and adds none before or behind.
            options: variables that the template reads, such as `enable_thinking` of Qwen3's.
        """
        self._template = template
        self._encode = encode
        self._options = dict(options or {})
        self.texts: dict[int, str] = {number: str(token.content) for number, token in named.items()}
        """Texts of the tokens that text names whole, by number."""
        self._control = any_of([str(token.content) for token in named.values() if token.special])
        self._named = any_of(list(self.texts.values()))

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), answer: bool) -> str:
        """The text of a conversation, with marks in what contents have of special tokens.

        Control tokens are marked in the contents of system, user and tool messages. In a tool's reply the other tokens
        that text names whole, such as `<tool_call>`, are marked too: a program wrote it, and meant no token.

        Args:
            messages: the conversation.
            tools: schemas of the tools that it may call.
            answer: whether to end where the assistant answers.

        Raises:
            TemplateError: the template refuses the conversation, fails, or takes more than its budget.
        """
        guarded = [self._guarded(message) for message in messages]
        return self._template.render(guarded, tools=tools, answer=answer, options=self._options)

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered text; none is added before or behind."""
        pieces = [""]
        begin = 0
        text = text.replace(ESCAPED, MARK)
        for found in PIECES.finditer(text):
            pieces[-1] += text[begin : found.start()]
            if found.group() == MARK:
                pieces.append("")
            else:
                pieces[-1] += MARK
            begin = found.end()
        pieces[-1] += text[begin:]
        return [token for piece in pieces for token in self._encode(piece)]

    def _guarded(self, message: Message) -> Message:
        content, role = message.get("content"), message.get("role")
        if role not in GUARDED_ROLES or not isinstance(content, str):
            return message
        named = self._named if role == "tool" else self._control
        broken = content.replace(MARK, MARK + MARK)
        if named is not None:
            broken = named.sub(lambda found: found.group()[0] + MARK + found.group()[1:], broken)
        return message if broken == content else {**message, "content": broken}


def any_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    """A pattern that finds these texts, the longest first; None where there are none."""
    longest_first = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
