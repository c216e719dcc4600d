"""Makes the tokens between two answers of a conversation, using the model's chat template. No jax.

Tokens are only ever appended to a conversation: the model's tokens are never decoded and encoded again, because
templates and tokenizers do not reproduce them. So the template supplies only the text from the end of an answer to the
start of the next one. This text is rendered after a made-up answer, whose last word marks the place in the result.

Rule `tails` renders the new messages after a short made-up conversation, so that it does not matter whether the
template changes earlier messages, for example by dropping thinking. Rule `history` renders them after the real
conversation, for templates that render a message differently depending on earlier ones. The constructor tests which
rule works, on made-up conversations.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from podium.models.text.chat_format import ChatFormat, Message, ToolSchema, any_of
from podium.models.text.template import TemplateError

Rule = Literal["tails", "history"]
RULES: tuple[Rule, ...] = ("tails", "history")
ANCHOR = "qzANCHORzq"
TOOL = "probe"
USER: Message = {"role": "user", "content": "What next?"}
REPLIES: tuple[Message, ...] = tuple(
    {"role": "tool", "name": TOOL, "tool_call_id": f"call0000{place}", "content": "12"} for place in range(2)
)
"""Replies to calls; some templates need ids of nine characters."""
MADE_UP = (USER,)
"""The made-up conversation after which rule `tails` renders new messages."""
TALK: tuple[tuple[Message, ...], ...] = (({"role": "system", "content": "Be brief."}, USER), (USER,), (USER,))
"""A conversation for testing a rule: the messages before each answer."""
CALLS = ((USER,), REPLIES[:1], REPLIES[:1], (USER,), REPLIES[:1], (USER,))
PARALLEL_CALLS = ((USER,), REPLIES, (USER,))


class TurnFormatError(ValueError):
    """A chat template cannot be continued answer by answer; the message says where it fails and what to do about it."""


class Seam(NamedTuple):
    """The text from an answer's last word to the start of the next answer."""

    own: str
    """Text after the last word that belongs to the answer, such as the brackets that close a call."""
    end: str
    """The token that ends the answer in the middle of a conversation, as text; may be empty."""
    closes: bool
    """Whether `end` is part of the answer; otherwise it opens the next message."""
    rest: str
    """The new messages, up to the start of the assistant's answer."""


class TurnFormat:
    """Makes the tokens that follow an answer: its end if it was cut, new messages, and the start of the next answer."""

    def __init__(self, chat: ChatFormat, *, stop_tokens: Sequence[int], tools: Sequence[ToolSchema] = ()) -> None:
        """Test which rule works with the chat template.

        Args:
            chat: the model's chat format.
            stop_tokens: tokens that end an answer.
            tools: schemas of the tools that conversations may call; empty: only user messages follow answers.

        Raises:
            TurnFormatError: neither rule works.
        """
        self._chat = chat
        self._tools = tuple(tools)
        self._stop_texts = {token: chat.texts[token] for token in stop_tokens if token in chat.texts}
        named = any_of(list(chat.texts.values()))
        self._ends = any_of([*self._stop_texts.values(), *self._ends_of_answers(named)])
        self.rule: Rule = self._find_rule()
        self.parallel_calls = bool(tools) and self._why_not(self.rule, PARALLEL_CALLS) is None
        """Whether an answer may have several calls."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Encode the first messages of a conversation, up to the start of the assistant's answer."""
        return self._chat.encode(self._chat.render(messages, tools=self._tools, answer=True))

    def reply(self, messages: Sequence[Message], *, history: Sequence[Message], drawn_end: int | None) -> list[int]:
        """Encode what follows an answer, up to the start of the next answer.

        Args:
            messages: the user's next messages, or the replies of the tools that the answer called, in call order.
            history: the conversation before the answer.
            drawn_end: the stop token that ended the answer; None: it was cut, so its end is added here.

        Raises:
            TurnFormatError: the template does not append these messages to the conversation.
        """
        seam = self._seam(history if self.rule == "history" else MADE_UP, messages)
        text = seam.end + seam.rest
        if drawn_end is not None:
            drawn = seam.end if seam.closes else self._stop_texts.get(drawn_end, "")
            text = text.removeprefix(drawn)
        return self._chat.encode(text)

    def _seam(self, past: Sequence[Message], new: Sequence[Message]) -> Seam:
        """The text between a made-up answer and the next one, with the messages `new` between them.

        Raises ValueError if the template changes the answer when messages follow it.
        """
        anchor = ANCHOR
        while any(anchor in str(message.get("content")) for message in (*past, *new)):
            anchor += "q"
        answer = self._answer(past, new, anchor)
        alone = self._behind(anchor, [*past, answer], answer=False)
        followed = self._behind(anchor, [*past, answer, *new], answer=True)
        end = None if self._ends is None else self._ends.search(alone)
        own = alone.rstrip() if end is None else alone[: end.start()]
        if not followed.startswith(own):
            raise TurnFormatError(f"the template writes {own!r} after an answer, but not if a message follows")
        rest = followed[len(own) :]
        ending = None if self._ends is None else self._ends.match(rest)
        width = 0 if ending is None else ending.end()
        return Seam(own=own, end=rest[:width], closes=end is not None, rest=rest[width:])

    def _behind(self, anchor: str, messages: Sequence[Message], *, answer: bool) -> str:
        """The rendered text after the last occurrence of `anchor`. Raises ValueError if the rendered text lacks it."""
        text = self._chat.render(messages, tools=self._tools, answer=answer)
        _, found, behind = text.rpartition(anchor)
        if not found:
            raise TurnFormatError("the template leaves out an answer's text")
        return behind

    def _answer(self, past: Sequence[Message], new: Sequence[Message], text: str) -> Message:
        """Make an answer whose last word is `text`, with one call for each tool reply in `new`."""
        replies = [message for message in new if message.get("role") == "tool"]
        for arguments in ({"x": text}, json.dumps({"x": text})) if replies else ():
            calling = {"role": "assistant", "content": "", "tool_calls": _calls(replies, arguments)}
            with contextlib.suppress(TemplateError):  # the template expects the other form of arguments
                if text in self._chat.render([*past, calling], tools=self._tools, answer=False):
                    return calling
        return {"role": "assistant", "content": text}  # templates without calls have only the answer's text

    def _ends_of_answers(self, named: re.Pattern[str] | None) -> list[str]:
        """The added tokens right after an answer, at the end of a conversation and before another message.

        Raises TurnFormatError if the template rejects a conversation of two questions.
        """
        answer = {"role": "assistant", "content": ANCHOR}
        found: list[str] = []
        for new in ((), MADE_UP):
            try:
                behind = self._behind(ANCHOR, [*MADE_UP, answer, *new], answer=False)
            except ValueError as error:
                raise self._refusal(str(error)) from error
            match = None if named is None else named.match(behind.lstrip())
            found += [] if match is None else [match.group()]
        return found

    def _find_rule(self) -> Rule:
        reason = ""
        for rule in RULES:
            reasons = (self._why_not(rule, each) for each in (TALK, *([CALLS] if self._tools else [])))
            reason = next((each for each in reasons if each is not None), None)
            if reason is None:
                return rule
        raise self._refusal(reason)

    def _refusal(self, reason: str) -> TurnFormatError:
        return TurnFormatError(
            f"the model's chat template cannot be continued {'with tools' if self._tools else 'by another message'}"
            f" ({reason}); {'leave out the tools, or ' if self._tools else ''}set chat_template to a template that"
            " only appends"
        )

    def _why_not(self, rule: Rule, conversation: Sequence[Sequence[Message]]) -> str | None:
        """Why a rule does not reproduce the template's text between the answers of a conversation; None if it does."""
        past: list[Message] = []
        try:
            for place, (before, new) in enumerate(itertools.pairwise(conversation)):
                past += before
                said = f"{place}{ANCHOR}"
                answer = self._answer(past, new, said)
                seam = self._seam(past if rule == "history" else MADE_UP, new)
                whole = self._chat.render([*past, answer, *new], tools=self._tools, answer=True)
                if not whole.endswith(f"{said}{seam.own}{seam.end}{seam.rest}"):
                    return f"the text after answer {place + 1} depends on the messages before it"
                past.append(answer)
        except ValueError as error:
            return str(error)
        return None


def _calls(replies: Sequence[Message], arguments: Mapping[str, str] | str) -> list[dict[str, object]]:
    """Make the tool calls that these replies answer, all with the same arguments."""
    return [
        {
            "id": str(reply.get("tool_call_id", f"call{place:05d}")),
            "type": "function",
            "function": {"name": str(reply.get("name", TOOL)), "arguments": arguments},
        }
        for place, reply in enumerate(replies)
    ]
