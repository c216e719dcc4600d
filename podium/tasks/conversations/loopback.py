"""A server with OpenAI's routes, on loopback, through which programs talk to the model that a run trains.

    POST /KEY/v1/chat/completions    messages in, a message or calls of tools out; streamed in one piece
    POST /KEY/inference/v1/generate  token ids in and out, with log-probabilities
    GET  /KEY/v1/models              the model; requests may use any model name

The key identifies the conversation of a request; with the key `sessions`, the header `X-Session-ID` does. Requests of a
conversation are answered one by one. The run's sampling settings apply: of a request's sampling fields only
`max_tokens` and `stop_token_ids` are used; the response header X-Podium-Ignored lists the ignored ones.
"""

import functools
import json
import queue
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import NamedTuple

from podium.models.text.chat_format import Message
from podium.serve.bodies import ChatBody, GenerateBody, RequestError, Sampling, drawing_fields, read_body, too_large
from podium.serve.documents import (
    CHAT,
    call_of,
    delta_choice,
    head_of,
    headers_of,
    last_events,
    list_document,
    message_choice,
    model_document,
    piece_event,
    tokens_answer,
    tokens_choice,
    usage_of,
    whole_answer,
)
from podium.tasks.conversation import Asking, Turn

MAX_BODY = 64 << 20
"""Largest request body in bytes."""
SESSIONS = "sessions"
SESSION_HEADER = "X-Session-ID"
POSTS = {"v1/chat/completions": ChatBody, "inference/v1/generate": GenerateBody}
MODEL = "policy"
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Call(NamedTuple):
    """A program's request that is waiting for an answer."""

    body: ChatBody | GenerateBody
    answer: "Future[Turn]"


class Line:
    """The requests of one conversation's program, one by one."""

    def __init__(self) -> None:
        """Start without requests."""
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._waiting: list[Call] = []
        self._refusal: RequestError | None = None
        self._lock = threading.Lock()

    def ask(self, body: ChatBody | GenerateBody) -> Turn:
        """Wait for the model's answer. Raises RequestError if the conversation ends first."""
        call = Call(body, Future())
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            self._waiting.append(call)
        self._calls.put(call)
        return call.answer.result()

    def next(self) -> Call | None:
        """Wait for the next request; None if the program has ended."""
        return self._calls.get()

    def end(self) -> None:
        """Signal that the program has ended."""
        self._calls.put(None)

    def refuse(self, error: RequestError) -> None:
        """Refuse all waiting and future requests."""
        with self._lock:
            self._refusal = error
            waiting, self._waiting = self._waiting, []
        for call in waiting:
            if not call.answer.done():
                call.answer.set_exception(error)


class Prompts:
    """Interprets a program's requests as continuations of the conversation so far, or as whole new prompts."""

    def __init__(self) -> None:
        """Start without earlier requests."""
        self._messages: list[Message] = []
        self._tokens: tuple[int, ...] = ()

    def read(self, body: ChatBody | GenerateBody) -> Asking:
        """The content of a request. Raises RequestError if it is not supported in training."""
        if isinstance(body, GenerateBody):
            _check(body.sampling_params, "sampling_params.")
            return self._of_tokens(body)
        _check(body, "")
        if body.logprobs:
            raise RequestError("logprobs: request them from /inference/v1/generate", "logprobs")
        known = self._messages
        self._messages = body.conversation(arguments_as_text=False)
        self._tokens = ()
        new = self._messages[len(known) :]
        follows = (
            bool(known and new)
            and list(map(_content, known)) == list(map(_content, self._messages[: len(known)]))
            and {message["role"] for message in new} <= {"user", "tool"}
        )
        return Asking(
            messages=tuple(new if follows else self._messages),
            fresh=not follows,
            tools=tuple(body.schemas),
            must_call=body.must_call,
            parallel=body.parallel_tool_calls,
            options=body.wanted,
            max_tokens=body.most_tokens,
            stop_tokens=body.stop_token_ids or (),
        )

    def _of_tokens(self, body: GenerateBody) -> Asking:
        tokens, before = tuple(body.token_ids), self._tokens
        self._tokens, self._messages = tokens, []
        follows = 0 < len(before) < len(tokens) and tokens[: len(before)] == before
        return Asking(
            tokens=tokens[len(before) :] if follows else tokens,
            fresh=not follows,
            max_tokens=body.sampling_params.max_tokens,
            stop_tokens=body.sampling_params.stop_token_ids or (),
        )

    def answered(self, turn: Turn) -> None:
        """Record the answer to the last request."""
        if self._messages:
            calls = [{"function": {"name": call.name, "arguments": dict(call.arguments)}} for call in turn.calls]
            self._messages.append({"role": "assistant", "content": _said(turn), "tool_calls": calls})
        else:
            self._tokens += turn.tokens


def _check(body: Sampling, prefix: str) -> None:
    if body.n > 1 or body.stop:
        name = "stop" if body.stop else "n"
        raise RequestError(f"{prefix}{name}: not supported while a run trains; leave it out", f"{prefix}{name}")


def _content(message: Message) -> tuple[object, ...]:
    """Key for comparing messages: everything except outer whitespace and the ids of calls."""
    calls = message.get("tool_calls")
    functions = [_function(call) for call in calls] if isinstance(calls, list) else []
    return message["role"], str(message["content"] or "").strip(), functions


def _function(call: Mapping[str, object]) -> object:
    return call["function"]


def _said(turn: Turn) -> str:
    return turn.said if turn.calls else turn.text


class Server:
    """The loopback server of this process, and its conversations."""

    def __init__(self) -> None:
        """Listen on a free port."""
        self._lines: dict[str, Line] = {}
        self._http = _Http(("127.0.0.1", 0), functools.partial(_Handler, self._lines))
        threading.Thread(target=self._http.serve_forever, name="loopback", daemon=True).start()

    def open(self, line: Line) -> str:
        """The base URL of a conversation for OpenAI's clients."""
        key = secrets.token_hex(16)
        self._lines[key] = line
        return self._address(key)

    def open_session(self, line: Line, session: str) -> None:
        """Assign requests at `sessions_address` whose header names this session to a conversation."""
        self._lines[session] = line

    @property
    def sessions_address(self) -> str:
        """The base URL shared by all sessions."""
        return self._address(SESSIONS)

    def _address(self, key: str) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/{key}/v1"

    def drop(self, line: Line) -> None:
        """Remove a conversation, and refuse its pending requests."""
        for key in [key for key, each in list(self._lines.items()) if each is line]:
            del self._lines[key]
        line.refuse(RequestError("this conversation has ended", status=410))


@functools.cache
def server() -> Server:
    """The server of this process."""
    return Server()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, lines: Mapping[str, Line], *arguments: object) -> None:
        self._lines = lines
        super().__init__(*arguments)  # pyright: ignore[reportArgumentType]

    def log_message(self, format: str, *args: object) -> None:
        """Suppress logging."""

    def do_GET(self) -> None:
        """Answer with the list of models, which has one entry."""
        if self.path.partition("/v1/")[2] == "models":
            self._send(200, list_document([model_document(MODEL, 0)]))
            return
        missing = RequestError(f"GET {self.path:.80}: unknown route; use KEY/v1/models", status=404)
        self._send(missing.status, missing.document)

    def do_POST(self) -> None:
        """Answer a request."""
        try:
            key, _, route = self.path.removeprefix("/").partition("/")
            line = self._lines.get(self.headers.get(SESSION_HEADER, "") if key == SESSIONS else key)
            raw = self.rfile.read(self._length())
            if line is None or route not in POSTS:
                raise RequestError(f"POST {self.path}: unknown conversation or route", status=404)
            body = read_body(POSTS[route], raw)
            self._answer(body, line.ask(body))
        except RequestError as error:
            self._send(error.status, error.document)

    def _length(self) -> int:
        """The body's size in bytes. Raises RequestError, and closes the connection, if it is unknown or too large."""
        said = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise RequestError("Transfer-Encoding: chunked bodies are not supported; send Content-Length", status=411)
        if said.isdecimal() and int(said) <= MAX_BODY:
            return int(said)
        self.close_connection = True  # the unread body would be parsed as the next request
        if said.isdecimal():
            raise too_large(MAX_BODY)
        raise RequestError(f"Content-Length: expected a number of bytes, got {said!r}")

    def _answer(self, body: ChatBody | GenerateBody, turn: Turn) -> None:
        reason = "tool_calls" if turn.calls else "length" if turn.cut else "stop"
        headers = headers_of(_ignored(body, turn))
        if isinstance(body, GenerateBody):
            choice = tokens_choice(0, turn.tokens, turn.logprobs, "length" if turn.cut else "stop")
            self._send(200, tokens_answer([choice]), headers)
            return
        head = head_of(CHAT, body.model or MODEL, stream=body.stream)
        usage = usage_of(turn.read, len(turn.tokens))
        calls = [call_of(call.id, call.name, call.arguments) for call in turn.calls]
        content = _said(turn) or (None if calls else "")
        if not body.stream:
            self._send(200, whole_answer(head, [message_choice(0, content, calls, reason)], usage), headers)
            return
        said = piece_event(head, delta_choice(0, content, calls, reason))
        said += last_events(head, usage if body.stream_options.include_usage else None)
        self._write(200, "text/event-stream", said.encode(), headers)

    def _send(self, status: int, document: Mapping[str, object], headers: Mapping[str, str] = NO_HEADERS) -> None:
        self._write(status, "application/json", json.dumps(document).encode(), headers)

    def _write(self, status: int, kind: str, raw: bytes, headers: Mapping[str, str]) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(raw)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(raw)
        except OSError:  # the program has closed the connection
            self.close_connection = True


def _ignored(body: ChatBody | GenerateBody, turn: Turn) -> list[str]:
    """The fields of a request that were ignored, because the run's sampling settings apply during training."""
    if isinstance(body, GenerateBody):
        return [f"sampling_params.{name}" for name in drawing_fields(body.sampling_params)]
    return [*drawing_fields(body), *body.hints, *turn.unread]
