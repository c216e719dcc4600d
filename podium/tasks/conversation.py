"""The interface of conversations: tasks whose prompt is answered more than once.

A task with a method `open` has conversations:

    class Guess:
        def open(self, prompt: Prompt, seed: int) -> Conversation: ...

A conversation replies to each answer of the model until it ends:

    class Higher:
        def reply(self, turn: Turn) -> Reply | str | None: ...
        def grade(self) -> float: ...

It may also have `begin`, which returns a text to append to the prompt, and `close`. All methods may be async. They run
in their own process (`podium.tasks.conversations.environments`). An exception is a failure of the environment,
never a reward of 0. Without `grade`, or if it returns None, the task grades the last answer. What a conversation says
may depend on nothing but its prompt, its seed and the answers, or else a run is not determined by its seed. Nothing
here imports jax.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from podium.models.text.chat_format import Message, ToolSchema
from podium.plain import clean, number_of, plain
from podium.tasks.task import Prompt

CUT_MARK = "\n[... cut ...]\n"
LONGEST_TEXT = 1 << 22
"""Maximum characters of an environment's message. More would not fit into any model's context, so the middle of a
longer message is cut out before it is sent, tokenised and recorded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool call that the model wrote."""

    name: str
    arguments: Mapping[str, object]
    id: str = ""
    """The id by which a tool's reply refers to it (`call_id`); empty until the whole turn has been read."""


def call_id(turn: int, place: int) -> str:
    """The id of a call, from its turn's number and its place in the turn: nine characters, as some chat templates
    require.
    """
    return f"call{_in_base_36(turn, 3)}{_in_base_36(place, 2)}"


def _in_base_36(number: int, digits: int) -> str:
    found = ""
    for _ in range(digits):
        number, digit = divmod(number, 36)
        found = f"{digit:d}"[-1] * (digit < 10) + chr(87 + digit) * (digit >= 10) + found
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """An answer of the model."""

    text: str
    """The text that the model wrote, without special tokens; tool calls are still in it."""
    number: int
    """Number of earlier turns."""
    calls: tuple[ToolCall, ...] = ()
    """The tool calls in it; empty if one of them cannot be read."""
    problem: str = ""
    """Why its calls cannot be read, as a message for the model; empty if they can."""
    said: str = ""
    """For programs: the text without its calls."""
    tokens: tuple[int, ...] = ()
    """For programs: the tokens that the model drew."""
    logprobs: tuple[float, ...] = ()
    """For programs: the log-probability of each of them, under the distribution it was sampled from."""
    read: int = 0
    """For programs: the number of prompt tokens before the answer."""
    unread: tuple[str, ...] = ()
    """For programs: the variables in `Asking.options` that the model's chat template ignores."""
    cut: bool = False
    """Whether a token limit cut it off. Only programs receive such answers; other conversations end instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asking:
    """A program's request to the model (`podium.tasks.conversations.program`): messages, or token ids."""

    messages: tuple[Message, ...] = ()
    tokens: tuple[int, ...] = ()
    """Prompt token ids, used instead of messages."""
    fresh: bool = True
    """Whether this is a whole prompt; otherwise it continues the conversation after the last answer."""
    tools: tuple[ToolSchema, ...] = ()
    """Schemas of the tools that the model may call."""
    must_call: str | None = None
    """The tool that the model must call; empty: any tool; None: it may answer without a call."""
    parallel: bool = True
    """Whether the model may call several tools at once; otherwise only its first call is answered."""
    options: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    """Variables for the chat template besides the run's."""
    max_tokens: int | None = None
    """Maximum tokens of the answer; None: the run's limit."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end the answer, in addition to the model's own stop tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolRun:
    """Record of one call of a tool."""

    name: str
    seconds: float
    error: bool
    """Whether the tool raised, its arguments did not fit, or the tool does not exist."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """An environment's answer to a turn."""

    messages: tuple[Message, ...] = ()
    """The messages that the model reads next: user messages, or one message of role `tool` for each call."""
    reward: float = 0.0
    """Reward of the turn."""
    done: bool = False
    """Whether the conversation ends here; its messages are then only recorded, and no model reads them."""
    ran: tuple[ToolRun, ...] = ()
    """The tools that were called, for metrics."""
    asking: Asking | None = None
    """A program's next request, instead of messages."""


Replied: TypeAlias = Reply | str | None
"""A reply; a text is the user's next message; None ends the conversation."""


class Conversation(Protocol):
    """One conversation about a prompt; `podium.tasks.conversations.environment_forms` makes them from tools and from
    classes of other libraries.

    Optional methods, in addition to `reply`: `begin() -> str | Asking | None`, `grade() -> float | None` and `close()
    -> None`.
    """

    def reply(self, turn: Turn) -> "Replied | Awaitable[Replied]":
        """Answer the model's turn."""
        ...


Opener: TypeAlias = Callable[[Prompt, int], Conversation]
"""Opens the conversation for a prompt and a seed."""


def as_reply(replied: object) -> Reply:
    """Convert the return value of `reply` to a `Reply`. Raises TypeError if its type is not allowed."""
    if replied is None:
        return Reply(done=True)
    if isinstance(replied, str):
        return Reply(messages=({"role": "user", "content": replied},))
    if not isinstance(replied, Reply):
        raise TypeError(f"reply() returned {replied!r:.80}; it must return a Reply, a text, or None to end")
    if not replied.messages and not replied.done and replied.asking is None:
        raise TypeError("reply() returned a Reply without messages that does not end; set done, or give a message")
    return replied


def plain_first(value: object) -> "str | Asking | None":
    """What `begin` returned, with valid Unicode and plain messages, so that it can be pickled and written as JSON.

    Raises:
        TypeError: `begin` must not return this type.
        ValueError: a message cannot be written as JSON.
    """
    if isinstance(value, Asking):
        tools = tuple(_plain_object("a tool", each) for each in value.tools)
        return dataclasses.replace(value, messages=_plain_messages(value.messages), tools=tools)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"begin() returned {value!r:.80}; it must return a text, or None")
    return None if value is None else _shortened(value)


def plain_reply(reply: Reply) -> Reply:
    """A reply with valid Unicode, plain messages and a finite reward, so that it can be pickled and written as JSON.

    Raises:
        TypeError: a message has no role, or the reward is not a number.
        ValueError: a message cannot be written as JSON.
    """
    asking = plain_first(reply.asking)
    assert asking is None or isinstance(asking, Asking), "a Reply stays a Reply"
    return Reply(
        messages=_plain_messages(reply.messages),
        reward=finite(reply.reward, "the reward of a reply"),
        done=bool(reply.done),
        ran=tuple(dataclasses.replace(each, name=clean(each.name)) for each in reply.ran),
        asking=asking,
    )


def finite(value: object, what: str) -> float:
    """A reward as a float. Raises TypeError, whose message begins with `what`, if it is not a finite number."""
    number = number_of(value)
    if number is None:
        raise TypeError(f"{what} is {value!r:.80}; it must be a finite number, within float32")
    return number


def _plain_messages(messages: object) -> tuple[Message, ...]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TypeError(f"the messages of a reply are {messages!r:.80}; they must be a tuple of messages")
    found: list[Message] = []
    for message in messages:
        made = _plain_object("a message", message)
        if not isinstance(made.get("role"), str):
            raise TypeError(f"a message of a reply is {message!r:.80}; it needs a role, such as user or tool")
        content = made.get("content")
        found.append({**made, "content": _shortened(content)} if isinstance(content, str) else made)
    return tuple(found)


def _plain_object(what: str, value: object) -> dict[str, object]:
    made = plain(value)
    if not isinstance(made, dict):
        raise TypeError(f"{what} of a reply is {value!r:.80}; it must be a dict")
    return made


def _shortened(text: str) -> str:
    text = clean(text)
    if len(text) <= LONGEST_TEXT:
        return text
    half = (LONGEST_TEXT - len(CUT_MARK)) // 2
    return f"{text[:half]}{CUT_MARK}{text[-half:]}"
