"""What stands between two answers of a conversation, in tokens, by the model's own chat template. No jax.

The tokens of a conversation are only ever appended to: what the model drew is never decoded and encoded again, because
templates and tokenizers do not reproduce it. So only the text between the end of an answer and the place of the next
one is taken from the template: rendered behind a made-up answer, whose last word is found again in the result.

Rule `tails` renders the new messages behind a short made-up conversation; what templates change before the answer,
such as thinking that they drop, does not matter. Rule `history` renders them behind the real one, for templates that
write a reply otherwise after an earlier one. Which of the two holds is tried once, on made-up conversations.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from podium.models.chat_format import ChatFormat, Message, ToolSchema, any_of
from podium.models.template import TemplateError

Rule = Literal["tails", "history"]
RULES: tuple[Rule, ...] = ("tails", "history")
ANCHOR = "qzANCHORzq"
TOOL = "probe"
USER: Message = {"role": "user", "content": "What next?"}
REPLY: Message = {"role": "tool", "name": TOOL, "content": "12"}
MADE_UP = (USER,)
"""The conversation behind which rule `tails` renders."""
TALK: tuple[tuple[Message, ...], ...] = (({"role": "system", "content": "Be brief."}, USER), (USER,), (USER,))
"""A conversation to try: the messages before each answer."""
CALLS = ((USER,), (REPLY,), (REPLY,), (USER,), (REPLY,), (USER,))
PARALLEL_CALLS = ((USER,), (REPLY, REPLY), (USER,))


class TurnFormatError(ValueError):
    """A chat template cannot be continued answer by answer; the message says where it fails, and the way out."""


class Seam(NamedTuple):
    """The text behind an answer's last word, up to where the next answer begins."""

    own: str
    """What the answer itself still writes, such as the brackets that close a call."""
    end: str
    """The token that ends the answer, as the template writes it in the middle of a conversation; perhaps empty."""
    closes: bool
    """Whether `end` is part of the answer; otherwise it opens the next message."""
    rest: str
    """The new messages, up to where the assistant answers."""


class TurnFormat:
    """Makes the tokens that follow an answer: its end where it was cut, new messages, the head of the next answer."""

    def __init__(self, chat: ChatFormat, *, stop_tokens: Sequence[int], tools: Sequence[ToolSchema] = ()) -> None:
        """Try which rule holds.

        Args:
            chat: the model's format.
            stop_tokens: tokens that end an answer.
            tools: schemas of the tools that conversations may call; none: all messages behind answers are the user's.

        Raises:
            TurnFormatError: neither rule holds.
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
        """The tokens of a conversation's first messages, up to where the assistant answers."""
        return self._chat.encode(self._chat.render(messages, tools=self._tools, answer=True))

    def reply(self, messages: Sequence[Message], *, history: Sequence[Message], drawn_end: int | None) -> list[int]:
        """The tokens that follow an answer.

        Args:
            messages: the user's next ones, or the replies of the tools that the answer called, in the calls' order.
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
        """Where new messages meet an answer. Raises ValueError where the template changes what stood before."""
        anchor = ANCHOR
        while any(anchor in str(message.get("content")) for message in (*past, *new)):
            anchor += "q"
        answer = self._answer(past, new, anchor)
        alone = self._behind(anchor, [*past, answer], answer=False)
        followed = self._behind(anchor, [*past, answer, *new], answer=True)
        end = None if self._ends is None else self._ends.search(alone)
        own = alone.rstrip() if end is None else alone[: end.start()]
        if not followed.startswith(own):
            raise TurnFormatError(f"it writes {own!r} behind an answer, but not where a message follows")
        rest = followed[len(own) :]
        ending = None if self._ends is None else self._ends.match(rest)
        width = 0 if ending is None else ending.end()
        return Seam(own=own, end=rest[:width], closes=end is not None, rest=rest[width:])

    def _behind(self, anchor: str, messages: Sequence[Message], *, answer: bool) -> str:
        """What a template writes behind a text. Raises ValueError where it leaves that text out."""
        text = self._chat.render(messages, tools=self._tools, answer=answer)
        _, found, behind = text.rpartition(anchor)
        if not found:
            raise TurnFormatError("it leaves out an answer's text")
        return behind

    def _answer(self, past: Sequence[Message], new: Sequence[Message], text: str) -> Message:
        """A made-up answer whose last word is `text`, with as many calls as `new` has replies of tools."""
        replies = [message for message in new if message.get("role") == "tool"]
        for arguments in ({"x": text}, json.dumps({"x": text})) if replies else ():
            calling = {"role": "assistant", "content": "", "tool_calls": _calls(replies, arguments)}
            with contextlib.suppress(TemplateError):  # it wants arguments in the other form
                if text in self._chat.render([*past, calling], tools=self._tools, answer=False):
                    return calling
        return {"role": "assistant", "content": text}  # in templates without calls an answer is its text

    def _ends_of_answers(self, named: re.Pattern[str] | None) -> list[str]:
        """The tokens, of those that text names whole, right behind an answer: as the last word, and before a message.

        Raises TurnFormatError where the template refuses a conversation of two questions.
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
        """None if between all answers of a conversation stands what the template writes there; else the reason."""
        past: list[Message] = []
        try:
            for place, (before, new) in enumerate(itertools.pairwise(conversation)):
                past += before
                said = f"{place}{ANCHOR}"
                answer = self._answer(past, new, said)
                seam = self._seam(past if rule == "history" else MADE_UP, new)
                whole = self._chat.render([*past, answer, *new], tools=self._tools, answer=True)
                if not whole.endswith(f"{said}{seam.own}{seam.end}{seam.rest}"):
                    return f"what follows answer {place + 1} depends on the messages before it"
                past.append(answer)
        except ValueError as error:
            return str(error)
        return None


def _calls(replies: Sequence[Message], arguments: Mapping[str, str] | str) -> list[dict[str, object]]:
    """Calls that these replies answer, all with the same arguments."""
    return [
        {
            "id": str(reply.get("tool_call_id", f"call{place:05d}")),
            "type": "function",
            "function": {"name": str(reply.get("name", TOOL)), "arguments": arguments},
        }
        for place, reply in enumerate(replies)
    ]
