"""The JSON of replies to OpenAI-compatible clients, in `podium serve` and in training. No jax."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Document = dict[str, object]
IGNORED = "X-Podium-Ignored"
"""Header of an answer that lists the fields of its request that had no effect."""
LAST_EVENT = "data: [DONE]\n\n"


class Kind(NamedTuple):
    """The names that a route uses in its JSON documents."""

    prefix: str
    """Prefix of an answer's id."""
    whole: str
    part: str
    """Object type of a streamed piece."""


TEXT = Kind("cmpl", "text_completion", "text_completion")
CHAT = Kind("chatcmpl", "chat.completion", "chat.completion.chunk")


def head_of(kind: Kind, model: str, *, stream: bool) -> Document:
    """The first fields of an answer or of each of its pieces: id, object type, and the model's name."""
    what = kind.part if stream else kind.whole
    return {"id": f"{kind.prefix}-{uuid.uuid4().hex}", "object": what, "created": int(time.time()), "model": model}


def whole_answer(head: Document, choices: Sequence[Document], usage: Document) -> Document:
    """A whole answer as one document."""
    return head | {"choices": list(choices), "usage": usage}


def piece_event(head: Document, choice: Document) -> str:
    """A piece of an answer as a server-sent event."""
    return event_of(head | {"choices": [choice]})


def last_events(head: Document, usage: Document | None) -> str:
    """The last events of a stream, with the usage first if the client asked for it."""
    return ("" if usage is None else event_of(head | {"choices": [], "usage": usage})) + LAST_EVENT


def model_document(name: str, created: int, **more: object) -> Document:
    """A model in the answer of `/v1/models`; `created` is in seconds since 1970."""
    return {"id": name, "object": "model", "created": created, "owned_by": "podium", **more}


def list_document(entries: Sequence[Document]) -> Document:
    """A list in the form that OpenAI's clients read."""
    return {"object": "list", "data": list(entries)}


def usage_of(read: int, drawn: int) -> Document:
    """Token counts: `read` in the prompt, `drawn` in the answer."""
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def call_of(call: str, name: str, arguments: Mapping[str, object]) -> Document:
    """A tool call with this id; its arguments become JSON text."""
    function = {"name": name, "arguments": json.dumps(dict(arguments), ensure_ascii=False)}
    return {"id": call, "type": "function", "function": function}


def message_choice(
    index: int, content: str | None, calls: Sequence[Document], reason: str | None, logprobs: Document | None = None
) -> Document:
    """A whole message, with calls if there are any."""
    message: Document = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def delta_choice(
    index: int,
    content: str | None,
    calls: Sequence[Document],
    reason: str | None,
    logprobs: Document | None = None,
    *,
    first: bool = True,
) -> Document:
    """A piece of a message; `first`: whether it is the first of its answer."""
    delta: Document = {"role": "assistant", "content": content} if first else {}
    delta |= {"content": content} if content else {}
    delta |= {"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]} if calls else {}
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def tokens_answer(choices: Sequence[Document]) -> Document:
    """The answer of `/inference/v1/generate`."""
    return {"request_id": uuid.uuid4().hex, "choices": list(choices)}


def tokens_choice(index: int, tokens: Sequence[int], logprobs: Sequence[float], reason: str | None) -> Document:
    """One choice of a `tokens_answer`."""
    content = [
        {"token": f"token_id:{token}", "logprob": logprob} for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    return {"index": index, "token_ids": list(tokens), "logprobs": {"content": content}, "finish_reason": reason}


def event_of(document: Document) -> str:
    """A document as a server-sent event."""
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"


def headers_of(ignored: Sequence[str]) -> dict[str, str]:
    """The headers of an answer, listing the fields of its request that had no effect."""
    return {IGNORED: ", ".join(ignored)} if ignored else {}
