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
"""Characters of a message of an environment; more fit into no model's context, so the middle of a longer one is cut
out before it is sent, tokenised and recorded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that the model wrote."""

    name: str
    arguments: Mapping[str, object]
    id: str = ""
    """By which a tool's reply names it (`call_id`); empty while it is read."""


def call_id(turn: int, place: int) -> str:
    """The id of a call by its answer's number and its place there: nine characters, which some chat templates need."""
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
    """The text that it wrote, without special tokens; its calls are still in it."""
    number: int
    """Turns before this one."""
    calls: tuple[ToolCall, ...] = ()
    """The calls of tools in it; empty if one of them cannot be read."""
    problem: str = ""
    """Why its calls cannot be read, for the model; empty: they can."""
    said: str = ""
    """For programs: the text without its calls."""
    tokens: tuple[int, ...] = ()
    """For programs: the tokens that the model drew."""
    logprobs: tuple[float, ...] = ()
    """For programs: the log-probability of each of them, under the distribution it was sampled from."""
    read: int = 0
    """For programs: how many tokens the model read before."""
    unread: tuple[str, ...] = ()
    """For programs: the variables they gave (`Asking.options`) that the model's chat template does not read."""
    cut: bool = False
    """Whether it was cut at a limit of tokens. Only programs get answers that were cut: other conversations end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asking:
    """What a program asks the model to answer (`podium.tasks.conversations.program`): messages, or tokens as they
    are.
    """

    messages: tuple[Message, ...] = ()
    tokens: tuple[int, ...] = ()
    """Instead of messages."""
    fresh: bool = True
    """Whether this is a whole prompt; else it is what follows the last answer."""
    tools: tuple[ToolSchema, ...] = ()
    """What the model may call."""
    must_call: str | None = None
    """The tool that it must call, empty for any of them; None: it may answer without."""
    parallel: bool = True
    """Whether it may call several tools at once; otherwise only its first call is answered."""
    options: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    """Variables for the chat template besides the run's."""
    max_tokens: int | None = None
    """Tokens of the answer; None: as many as the run allows."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the answer, besides the model's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolRun:
    """Record of one call of a tool."""

    name: str
    seconds: float
    error: bool
    """Whether the tool raised, its arguments did not fit, or there is no such tool."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """An environment's answer to a turn."""

    messages: tuple[Message, ...] = ()
    """The messages that the model reads next: messages of the user, or one of role `tool` for each call."""
    reward: float = 0.0
    """Reward of the turn."""
    done: bool = False
    """Whether the conversation ends here; its messages are then for readers alone."""
    ran: tuple[ToolRun, ...] = ()
    """The tools that were called, for metrics."""
    asking: Asking | None = None
    """What a program asks next, instead of messages."""


Replied: TypeAlias = Reply | str | None
"""A reply; a text is the user's next message; None ends the conversation."""


class Conversation(Protocol):
    """One conversation about a prompt; `podium.tasks.conversations.environment_forms` makes them of tools and other
    people's classes.

    Optional beside `reply`: `begin() -> str | Asking | None`, `grade() -> float | None` and `close() -> None`.
    """

    def reply(self, turn: Turn) -> "Replied | Awaitable[Replied]":
        """Answer the model's turn."""
        ...


Opener: TypeAlias = Callable[[Prompt, int], Conversation]
"""Makes the conversation of a prompt and a seed."""


def as_reply(replied: object) -> Reply:
    """Convert the return value of `reply` to a `Reply`. Raises TypeError if it is none of the allowed kinds."""
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
    """What `begin` returned, with clean texts and plain messages, as another process and JSON can hold it.

    Raises:
        TypeError: it is none of what `begin` may return.
        ValueError: a message cannot be written as JSON.
    """
    if isinstance(value, Asking):
        tools = tuple(_plain_object("a tool", each) for each in value.tools)
        return dataclasses.replace(value, messages=_plain_messages(value.messages), tools=tools)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"begin() returned {value!r:.80}; it must return a text, or None")
    return None if value is None else _shortened(value)


def plain_reply(reply: Reply) -> Reply:
    """A reply with clean texts, plain messages and a finite reward, as another process and JSON can hold it.

    Raises:
        TypeError: a message has no role, or the reward is no number.
        ValueError: a message cannot be written as JSON.
    """
    asking = plain_first(reply.asking)
    assert asking is None or isinstance(asking, Asking), "it stays what it is"
    return Reply(
        messages=_plain_messages(reply.messages),
        reward=finite(reply.reward, "the reward of a reply"),
        done=bool(reply.done),
        ran=tuple(dataclasses.replace(each, name=clean(each.name)) for each in reply.ran),
        asking=asking,
    )


def finite(value: object, what: str) -> float:
    """A reward as a float. Raises TypeError, which begins with `what`, if it is no finite number."""
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
