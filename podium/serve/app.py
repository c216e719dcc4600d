"""The routes of the server, and the requests that they refuse.

    GET  /health                 200 while the engine runs; needs no token
    GET  /metrics                counters, in the text format of Prometheus
    GET  /v1/models              the model, and its longest sequence
    POST /v1/completions         text or token ids in, text out
    POST /v1/chat/completions    messages in, a message or tool calls out
    POST /inference/v1/generate  token ids in and out

Handlers read and encode requests in threads, submit them to the engine (`Clients`), and drop them if the client
disconnects. Every refusal is a JSON error in OpenAI's format that names the field.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from podium.observe.access import is_token, knows_host
from podium.serve.bodies import ChatBody, CompletionBody, GenerateBody, RequestError, read_body, too_large
from podium.serve.clients import Clients
from podium.serve.documents import (
    Document,
    event_of,
    head_of,
    headers_of,
    last_events,
    list_document,
    model_document,
    piece_event,
    tokens_answer,
    whole_answer,
)
from podium.serve.engine_thread import Piece, Ticket
from podium.serve.prepare_requests import Model, Prepared
from podium.serve.replies import token_choice

if TYPE_CHECKING:  # an extra
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

MAX_BODY = 4 << 20
"""Largest request body in bytes."""
BODY_S = 30.0
"""Seconds within which a request body must arrive."""
GONE = 499
"""Status of a request whose client has disconnected, as nginx has it; it cannot be sent to anyone."""
ROUTES = (
    *("/health", "/metrics", "/v1/models"),
    *("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"),
)
"""The routes to list in the error for an unknown route."""
GRACE_S = 20.0
"""Seconds that answers in progress may take to finish on shutdown; orchestrators typically kill a process after 30."""


class Stream(NamedTuple):
    """A reply of server-sent events."""

    ticket: Ticket
    events: AsyncIterator[str]
    headers: dict[str, str]


class Answer(NamedTuple):
    """A reply of a JSON object with headers."""

    document: Document
    headers: dict[str, str]


Reply = Document | str | Stream | Answer
"""A reply: a JSON object with or without headers, a text, or a stream."""
Handler = Callable[["Request"], Awaitable[Reply]]


class Server:
    """The handlers of a server's routes."""

    def __init__(self, model: Model, clients: Clients) -> None:
        """Answer with this model; `clients` must use its engine."""
        self._model = model
        self._clients = clients
        self._created = int(time.time())
        self._reading: set[asyncio.Timeout] = set()
        """The deadlines of request bodies that are being read."""

    async def end(self, insists: Callable[[], bool]) -> None:
        """Refuse new requests, and wait up to GRACE_S for those in progress; then tell their clients to try again.

        Stops waiting as soon as `insists` returns true.
        """
        self._clients.refuse_new()
        for deadline in list(self._reading):
            deadline.reschedule(asyncio.get_running_loop().time())
        until = time.monotonic() + GRACE_S
        while self._clients.counters.in_flight and time.monotonic() < until and not insists():
            await asyncio.sleep(0.05)
        self._clients.give_up()

    async def completions(self, request: "Request") -> Reply:
        """Complete prompts with text."""
        raw = await self._read(request)
        return await self._answer(request, lambda: self._model.completions(read_body(CompletionBody, raw)))

    async def chat(self, request: "Request") -> Reply:
        """Answer a conversation with its next message."""
        raw = await self._read(request)
        return await self._answer(request, lambda: self._model.chat(read_body(ChatBody, raw)))

    async def generate(self, request: "Request") -> Reply:
        """Complete token ids with token ids."""
        raw = await self._read(request)
        requests = await asyncio.to_thread(lambda: self._model.generate(read_body(GenerateBody, raw)))
        pieces = await _until_gone(request, self._clients.open(requests, stream=False))
        return tokens_answer([token_choice(piece) for piece in pieces])

    async def models(self, request: "Request") -> Reply:
        """Describe the only model, alone or as a list."""
        model = model_document(self._model.name, self._created, max_model_len=self._model.longest)
        named = request.path_params.get("name")
        self._model.check_name(named)
        return model if named else list_document([model])

    async def health(self, request: "Request") -> Reply:
        """Report whether the engine is running."""
        self._clients.check_alive()
        return {"status": "ok"}

    async def metrics(self, request: "Request") -> Reply:
        """Return counters in Prometheus's text format."""
        return self._clients.metrics()

    async def _read(self, request: "Request") -> bytes:
        """Read a request's body. Raises RequestError if its content type is not JSON, or if it is too large or too
        slow.
        """
        from starlette.requests import ClientDisconnect

        self._clients.check_alive()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # so that browsers refuse to send other sites' requests
            raise RequestError("send the header Content-Type: application/json", status=415)
        raw = bytearray()
        deadline = asyncio.timeout(BODY_S)
        self._reading.add(deadline)
        try:
            async with deadline:
                async for part in request.stream():
                    raw += part
                    if len(raw) > MAX_BODY:
                        raise too_large(MAX_BODY)
        except TimeoutError:
            self._clients.check_alive()
            raise RequestError(f"the body did not arrive within {BODY_S:g} s", status=408) from None
        except ClientDisconnect:
            raise RequestError("the client has disconnected", status=GONE) from None
        finally:
            self._reading.discard(deadline)
        return bytes(raw)

    async def _answer(self, request: "Request", prepare: Callable[[], Prepared]) -> Reply:
        """Submit prepared requests and return the answer, streamed or whole."""
        asked = await asyncio.to_thread(prepare)
        form = asked.form
        head = head_of(form.kind, self._model.name, stream=asked.stream)
        headers = headers_of(asked.ignored)
        ticket = self._clients.open(asked.requests, stream=asked.stream and not form.only_whole)
        if asked.stream:
            return Stream(ticket, _events(ticket, asked, head), headers)
        pieces = await _until_gone(request, ticket)
        choices = [form.choice(piece, asked.texts[piece.number].add(piece)) for piece in pieces]
        usage = asked.usage(sum(len(each.tokens) for each in pieces))
        return Answer(whole_answer(head, choices, usage), headers)


def make_app(server: Server, *, token: str | None, hosts: tuple[str, ...]) -> "Starlette":
    """Make the ASGI application. With a token, it answers only clients that send the token. `hosts` are the accepted
    Host headers.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    def guarded(handler: Handler) -> Callable[["Request"], Awaitable["Response"]]:
        async def checked(request: "Request") -> "Response":
            if not knows_host(request.headers.get("host", ""), hosts):
                host = request.headers.get("host", "")
                raise RequestError(
                    f"Host {host!r:.80}: without a token this server only answers to {', '.join(hosts)}; for other "
                    "names start it with --host and --token-file",
                    status=421,
                )
            given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
            if token is not None and handler != server.health and not is_token(given, token):
                raise RequestError("send the server's token: Authorization: Bearer TOKEN", status=401)
            return _response(await handler(request))

        return checked

    posts: dict[str, Handler] = {
        "/v1/completions": server.completions,
        "/v1/chat/completions": server.chat,
        "/inference/v1/generate": server.generate,
    }
    gets: dict[str, Handler] = {
        "/health": server.health,
        "/metrics": server.metrics,
        "/v1/models": server.models,
        "/v1/models/{name:path}": server.models,
    }
    routes = [Route(path, guarded(handler), methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, guarded(handler), methods=["GET"]) for path, handler in gets.items()]
    return Starlette(
        routes=routes,
        exception_handlers={RequestError: _refused, HTTPException: _refused, Exception: _refused},
    )


def _response(reply: Reply) -> "Response":
    from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

    if isinstance(reply, dict):
        return JSONResponse(reply)
    if isinstance(reply, Answer):
        return JSONResponse(reply.document, headers=reply.headers)
    if isinstance(reply, str):
        return PlainTextResponse(reply, headers={"Content-Type": "text/plain; version=0.0.4"})

    class Closing(StreamingResponse):
        """A streaming response that drops its request when the stream ends, even before the stream has begun."""

        async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                reply.ticket.close()

    headers = {"Cache-Control": "no-cache", **reply.headers}
    return Closing(reply.events, media_type="text/event-stream", headers=headers)


def _refused(request: "Request", error: Exception) -> "Response":
    """Convert an error to a response in OpenAI's format."""
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    if isinstance(error, HTTPException):
        missing = f"unknown route; use one of {', '.join(ROUTES)}" if error.status_code == 404 else error.detail
        error = RequestError(f"{request.method} {request.url.path:.80}: {missing}", status=error.status_code)
    if not isinstance(error, RequestError):
        error = RequestError("the server failed; see its log for the reason", status=500)
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return JSONResponse(error.document, status_code=error.status, headers=headers)


async def _until_gone(request: "Request", ticket: Ticket) -> list[Piece]:
    """Collect all answers, in order. If the client disconnects first, cancel them and raise RequestError."""

    async def collect() -> list[Piece]:
        return sorted([piece async for piece in ticket], key=lambda piece: piece.number)

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collected, left = asyncio.ensure_future(collect()), asyncio.ensure_future(leave())
    try:
        await asyncio.wait((collected, left), return_when=asyncio.FIRST_COMPLETED)
        if not collected.done():
            raise RequestError("the client has disconnected", status=GONE)
        return collected.result()
    finally:
        ticket.close()
        collected.cancel()
        left.cancel()


async def _events(ticket: Ticket, asked: Prepared, head: dict[str, object]) -> AsyncIterator[str]:
    """Yield the server-sent events of a stream."""
    drawn = 0
    try:
        async for piece in ticket:
            drawn += len(piece.tokens)
            choice = asked.form.delta(piece, asked.texts[piece.number].add(piece))
            if choice is not None:
                yield piece_event(head, choice)
        yield last_events(head, asked.usage(drawn) if asked.include_usage else None)
    except RequestError as error:
        yield event_of(error.document)
