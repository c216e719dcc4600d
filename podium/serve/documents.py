"""The documents with which OpenAI's clients are answered, by `podium serve` and in training. No jax."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence

Document = dict[str, object]
IGNORED = "X-Podium-Ignored"
"""The header of an answer that lists the fields of its request which changed nothing."""
LAST_EVENT = "data: [DONE]\n\n"


def head_of(prefix: str, kind: str, model: str) -> Document:
    """The beginning of an answer: its id, its kind, and the model's name."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage_of(read: int, drawn: int) -> Document:
    """Numbers of tokens."""
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def call_of(call: str, name: str, arguments: Mapping[str, object]) -> Document:
    """A call of a tool with this id; its arguments become JSON text."""
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
    """A piece of a message; `first`: the first of its answer."""
    delta: Document = {"role": "assistant", "content": content} if first else {}
    delta |= {"content": content} if content else {}
    delta |= {"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]} if calls else {}
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def tokens_choice(index: int, tokens: Sequence[int], logprobs: Sequence[float], reason: str | None) -> Document:
    """An answer of `/inference/v1/generate`."""
    content = [
        {"token": f"token_id:{token}", "logprob": logprob} for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    return {"index": index, "token_ids": list(tokens), "logprobs": {"content": content}, "finish_reason": reason}


def event_of(document: Document) -> str:
    """A document as a server-sent event."""
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"


def headers_of(ignored: Sequence[str]) -> dict[str, str]:
    """The headers of an answer to a request of which these fields changed nothing."""
    return {IGNORED: ", ".join(ignored)} if ignored else {}
