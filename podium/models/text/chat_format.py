"""Renders messages with a chat template and encodes them, so that no content turns into a control token. No jax.

A question or a tool's reply may contain the text of a control token, such as `<|im_end|>`. Encoded with the rest, it
would become that token and end the message. So `render` inserts a mark, a private-use character, into each such text,
and `encode` encodes the text before and after a mark separately.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from podium.models.text.template import ChatTemplate, TemplateError

logger = logging.getLogger(__name__)

Message = Mapping[str, object]
"""A message as chat templates read it: `role`, `content`, and perhaps `name`, `tool_calls` or `tool_call_id`."""
ToolSchema = Mapping[str, object]
"""A tool as chat templates read it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

MARK = "\ue0f1"
ESCAPED = "\\ue0f1"
"""The mark as a template's `tojson` may escape it."""
PIECES = re.compile(f"{MARK}{MARK}|{MARK}")
GUARDED_ROLES = ("system", "user", "tool")
PROBES = ("one question", "another question")
"""Contents for which a template renders different text if it renders contents at all."""


class AddedToken(Protocol):
    """A token that the tokenizer matches as a whole in text, such as `<|im_end|>` or `<tool_call>`."""

    @property
    def content(self) -> str:
        """The token's text."""
        ...

    @property
    def special(self) -> bool:
        """Whether it is a control token, which is left out of decoded text."""
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
        """Combine a chat template with the parts of a tokenizer.

        Args:
            template: the model's chat template.
            named: the added tokens, by token id.
            encode: encodes a text without beginning- or end-of-sequence tokens.
            options: variables for the template, such as Qwen3's `enable_thinking`.
        """
        self._template = template
        self._encode = encode
        self._options = dict(options or {})
        self.texts: dict[int, str] = {number: str(token.content) for number, token in named.items()}
        """Texts of the added tokens, by token id."""
        self.variables = template.variables
        """The variables that the template reads."""
        self._control = any_of([str(token.content) for token in named.values() if token.special])
        self._named = any_of(list(self.texts.values()))
        self._looked = False  # whether system messages are rendered

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), answer: bool) -> str:
        """Render a conversation, with marks in contents that spell special tokens.

        Control tokens are marked in the contents of system, user and tool messages. In tool messages, other added
        tokens such as `<tool_call>` are marked too, since a program's output never means them as tokens.

        Args:
            messages: the conversation.
            tools: schemas of the tools that the model may call.
            answer: whether to append the start of the assistant's answer.

        Raises:
            TemplateError: the template rejects the conversation, fails, or exceeds its budget.
        """
        guarded = [self._guarded(message) for message in messages]
        rendered = self._template.render(guarded, tools=tools, answer=answer, options=self._options)
        if not self._looked and any(message.get("role") == "system" for message in messages):
            self._looked = True
            self._warn_if_system_is_ignored()
        return rendered

    def ignores_user(self) -> bool:
        """Whether the template leaves out what the user says. Raises TemplateError if it rejects a question."""
        return self._are_equal(*([{"role": "user", "content": text}] for text in PROBES))

    def _warn_if_system_is_ignored(self) -> None:
        question: Message = {"role": "user", "content": "question"}
        try:
            ignored = self._are_equal(*([{"role": "system", "content": text}, question] for text in PROBES))
        except TemplateError:  # the template accepts other conversations only
            return
        if ignored:
            logger.warning("%s: leaves out system messages, so the model does not read them", self._template.name)

    def _are_equal(self, one: Sequence[Message], other: Sequence[Message]) -> bool:
        first, second = (
            self._template.render(each, tools=(), answer=True, options=self._options) for each in (one, other)
        )
        return first == second

    def plain_pieces(self, text: str) -> list[str]:
        """The text in pieces, none of which spells an added token, as `encode` encodes a tool's message."""
        return _cut_within(self._named, text)

    def encode(self, text: str) -> list[int]:
        """Encode a rendered text, without beginning- or end-of-sequence tokens."""
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

    def encode_answer(self, text: str) -> list[int]:
        """Encode the text of an answer, such as one in the data: control tokens that it spells stay text."""
        return [token for piece in _cut_within(self._control, text) for token in self._encode(piece)]

    def _guarded(self, message: Message) -> Message:
        content, role = message.get("content"), message.get("role")
        if role not in GUARDED_ROLES or not isinstance(content, str):
            return message
        named = self._named if role == "tool" else self._control
        broken = content.replace(MARK, MARK + MARK)
        if named is not None:
            broken = named.sub(lambda found: found.group()[0] + MARK + found.group()[1:], broken)
        return message if broken == content else {**message, "content": broken}


def with_system_prompt(messages: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """The messages with the system prompt, if any, added in front, unless they begin with a system message already."""
    own = bool(messages) and messages[0].get("role") == "system"
    return list(messages) if own or not system_prompt else [{"role": "system", "content": system_prompt}, *messages]


def any_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Compile a pattern that matches any of these texts, preferring longer ones; None if `texts` is empty."""
    longest_first = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _cut_within(named: re.Pattern[str] | None, text: str) -> list[str]:
    """The text in pieces, none of which spells a token that `named` finds."""
    cuts = [found.start() + 1 for found in named.finditer(text)] if named else []
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
