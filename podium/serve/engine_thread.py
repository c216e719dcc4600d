"""The thread in which the engine runs, and the requests that clients have in it.

Handlers live in the event loop, the engine in its own thread. What handlers want of it comes over a queue, on
which the thread sleeps while the engine has no work; after each step, what was drawn goes back to the loop at once.
"""

import asyncio
import contextlib
import dataclasses
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from podium.compile_ahead import Call
from podium.rollout.engine import NonFiniteError, RolloutEngine
from podium.rollout.request import Completion, Key, Request, RolloutStats
from podium.serve.bodies import RequestError

MAX_RETRY_S = 60
RETRY_AFTER_END_S = 5
"""Seconds after which clients of a server that ends may find another in its place."""


class Piece(NamedTuple):
    """Tokens of an answer that are new."""

    number: int
    """Of the answer among those of its client's request."""
    first: bool
    """Whether it is the first of its answer."""
    tokens: list[int]
    logprobs: list[float]
    completion: Completion | None
    """The whole of it, once it has ended."""


class Ticket:
    """A client's request in the engine; iterate over its pieces, and close it whatever happens."""

    def __init__(self, owner: "EngineThread", requests: Sequence[Request], *, stream: bool) -> None:
        """Belongs to the running event loop."""
        self.requests = requests
        self.stream = stream
        """Whether pieces are wanted before an answer has ended."""
        self.remaining = sum(request.completions for request in requests)
        """Answers that have not ended."""
        self.pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self.began = time.monotonic()
        self._owner = owner

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces until all answers have ended. Raises RequestError if the engine fails."""
        left = sum(request.completions for request in self.requests)
        while left:
            piece = await self.pieces.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece.completion is not None
            yield piece

    def close(self) -> None:
        """Drop what has not ended, and free its slots; again: nothing."""
        self._owner.drop(self)


@dataclasses.dataclass(kw_only=True)
class Counters:
    """What has happened so far, for `/metrics`; counted in the event loop."""

    in_flight: int = 0
    """Answers asked for that have not ended."""
    tokens: int = 0
    """Tokens of answers that were drawn."""
    finished: int = 0
    left: int = 0
    """Answers that a client did not wait for."""
    refused: int = 0
    """Requests refused because of the queue's limit."""
    first_s: float = 0.0
    """Seconds from a request to the first token of each of its answers, summed; of those that are streamed."""
    firsts: int = 0
    answer_s: float = 0.0
    """Seconds from a request to the end of each of its answers, summed."""


class _Live(NamedTuple):
    """An answer that the engine draws."""

    ticket: Ticket
    number: int
    sent: int


class EngineThread:
    """Runs an engine for any number of clients."""

    def __init__(self, engine: RolloutEngine, *, max_queue: int) -> None:
        """Start the thread; nothing else may call the engine until `close`.

        `max_queue` is the number of answers that may wait for a slot.
        """
        self.engine = engine
        self.limit = engine.config.slots + max_queue
        """Most answers in flight."""
        self.counters = Counters()
        self.stats = RolloutStats()
        """Of all steps so far; the engine's thread adds to it."""
        self.pages_used = 0
        """Pages of the cache in use after the last step or command."""
        self.failure = ""
        """Why the thread ended, if it did by itself."""
        self._ending = False
        """Whether the server is shutting down."""
        self._open: set[Ticket] = set()
        """Requests with answers that have not ended; of the event loop."""
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._compiled: set[str] = set()
        """Programs for some requests alone that have been compiled; the engine's thread adds to them."""
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[Key, _Live] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread after the step that it is in, and drop all requests."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._inbox.put(None)
        self._thread.join()
        for key in self.engine.keys:
            self.engine.cancel(key)

    # In the event loop.

    def open(self, requests: Sequence[Request], *, stream: bool) -> Ticket:
        """Have requests answered. Raises RequestError if there are too many, or the engine has failed."""
        self._loop = asyncio.get_running_loop()
        ticket = Ticket(self, requests, stream=stream)
        self._check_room(ticket.remaining)
        self.counters.in_flight += ticket.remaining
        self._open.add(ticket)
        self._inbox.put(lambda: self._submit(ticket))
        return ticket

    def refuse_new(self) -> None:
        """Refuse requests from now on, since the server ends."""
        self._ending = True

    def give_up(self) -> None:
        """End the requests that are in progress with an error that says to ask again."""
        for ticket in list(self._open):
            ticket.pieces.put_nowait(_ending())
            self.drop(ticket)

    def _check_room(self, answers: int) -> None:
        self.check_alive()
        in_flight = self.counters.in_flight
        if in_flight + answers > self.limit:
            self.counters.refused += 1
            raise RequestError(
                f"{in_flight} answers are in flight, and {self.limit} may be; try again later",
                status=429,
                code="queue_full",
                retry_after_s=self._retry_after_s(),
            )

    def drop(self, ticket: Ticket) -> None:
        """Drop a request's answers that have not ended."""
        self._open.discard(ticket)
        if ticket.remaining:
            self.counters.in_flight -= ticket.remaining
            self.counters.left += ticket.remaining
            ticket.remaining = 0
            self._inbox.put(lambda: self._cancel(ticket))

    def check_alive(self) -> None:
        """Raises RequestError if the engine has failed, or the server is shutting down."""
        if self._ending:
            raise _ending()
        self._check_engine()

    def _check_engine(self) -> None:
        if self.failure:
            raise RequestError(f"the engine has failed: {self.failure}; start the server again", status=503)

    def metrics(self) -> str:
        """All counters in the text format of Prometheus."""
        counters, stats = self.counters, self.stats
        lines: list[str] = []
        for name, kind, value, about in (
            ("answers_in_flight", "gauge", counters.in_flight, "answers asked for that have not ended"),
            ("answers_limit", "gauge", self.limit, "most answers in flight"),
            ("slots", "gauge", self.engine.config.slots, "answers that are drawn at a time"),
            ("cache_pages_used", "gauge", self.pages_used, "pages of the cache in use"),
            ("answers_finished_total", "counter", counters.finished, "answers that have ended"),
            ("answers_left_total", "counter", counters.left, "answers whose client left before the end"),
            ("requests_refused_total", "counter", counters.refused, "requests refused because the queue was full"),
            ("prompt_tokens_total", "counter", stats.prompt_tokens, "tokens of prompts"),
            ("answer_tokens_total", "counter", counters.tokens, "tokens of answers"),
            ("prefilled_tokens_total", "counter", stats.prefill_tokens, "tokens prefilled, again after evictions"),
            ("decode_steps_total", "counter", stats.decode_steps, "decode steps"),
            ("engine_seconds_total", "counter", stats.generate_s, "seconds in which the engine worked"),
            ("preempted_total", "counter", stats.preempted, "answers that lost their slot for a while"),
            ("first_token_seconds_sum", "counter", counters.first_s, "seconds to the first token of a stream, summed"),
            ("first_token_seconds_count", "counter", counters.firsts, "answers in these seconds"),
            ("answer_seconds_sum", "counter", counters.answer_s, "seconds to the end of an answer, summed"),
            ("engine_alive", "gauge", int(not self.failure), "1 unless the engine has failed"),
        ):
            lines += [f"# HELP podium_{name} {about}", f"# TYPE podium_{name} {kind}", f"podium_{name} {value}"]
        return "\n".join(lines) + "\n"

    def _retry_after_s(self) -> int:
        """Seconds until a slot is free, if answers take as long as they did so far."""
        counters = self.counters
        each_s = counters.answer_s / counters.finished if counters.finished else 1.0
        return min(MAX_RETRY_S, max(1, math.ceil(each_s * counters.in_flight / self.limit)))

    def _receive(self, pieces: Sequence[tuple[Ticket, Piece | Exception]]) -> None:
        """Hand out what came from the engine."""
        now, counters = time.monotonic(), self.counters
        for ticket, piece in pieces:
            ticket.pieces.put_nowait(piece)
            if isinstance(piece, Exception):
                counters.in_flight -= ticket.remaining
                ticket.remaining = 0
                continue
            counters.tokens += len(piece.tokens)
            if ticket.stream and piece.first:
                counters.firsts += 1
                counters.first_s += now - ticket.began
            if piece.completion is not None and ticket.remaining:
                ticket.remaining -= 1
                counters.in_flight -= 1
                counters.finished += 1
                counters.answer_s += now - ticket.began

    # In the engine's thread.

    def _run(self) -> None:
        try:
            while self._obey():
                if self.engine.busy:
                    self._step()
                self._deliver()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.failure = f"{type(error).__name__}: {error}"[:300]
            self._fail([live.ticket for live in self._live.values()], self.failure)
            while (command := self._inbox.get()) is not None:  # what came meanwhile is refused
                command()

    def _obey(self) -> bool:
        """Carry out what handlers want; sleeps until there is something, if the engine has no work. False: to end."""
        while not (self.engine.busy and self._inbox.empty()):
            command = self._inbox.get()
            if command is None:
                return False
            command()
        return True

    def _submit(self, ticket: Ticket) -> None:
        if not ticket.remaining:  # its client has left while programs were compiled for it
            return
        calls = {name: call for each in ticket.requests for name, call in self.engine.device.extra_calls(each).items()}
        missing = {name: call for name, call in calls.items() if name not in self._compiled}
        if missing and not self.failure:
            self._compiler.submit(self._compile, missing, ticket)
            return
        index = 0
        try:
            self._check_engine()
            for request in ticket.requests:
                number = self.engine.submit(request)
                for completion in range(request.completions):
                    self._live[Key(number, completion)] = _Live(ticket, index, 0)
                    index += 1
        except RequestError as error:
            self._send([(ticket, error)])
        except ValueError as error:
            self._cancel(ticket)
            self._send([(ticket, RequestError(str(error)))])

    def _compile(self, calls: Mapping[str, Call], ticket: Ticket) -> None:
        """Compile programs, on its own thread, before a request is submitted that needs them.

        If that fails, the engine's own call says why.
        """
        for name, call in calls.items():
            if name not in self._compiled and ticket.remaining:
                with contextlib.suppress(Exception):
                    call.lower().compile()
                self._compiled.add(name)
        self._inbox.put(lambda: self._submit(ticket))

    def _cancel(self, ticket: Ticket) -> None:
        for key in [key for key, live in self._live.items() if live.ticket is ticket]:
            self.engine.cancel(key)
            del self._live[key]

    def _step(self) -> None:
        """Run one step. If the model's logits are not finite, the request that had them fails, and the others go on."""
        try:
            self.engine.step()
        except NonFiniteError as error:
            known = set(self.engine.keys)
            self._fail([live.ticket for key, live in self._live.items() if key not in known], str(error))
        self.stats = self.stats.then(self.engine.stats())

    def _fail(self, tickets: Sequence[Ticket], why: str) -> None:
        distinct = list(dict.fromkeys(tickets))
        for ticket in distinct:
            self._cancel(ticket)
        self._send([(ticket, RequestError(why, status=500)) for ticket in distinct])

    def _deliver(self) -> None:
        """Send what is new of all answers to the event loop."""
        finished = dict(self.engine.poll())
        pieces: list[tuple[Ticket, Piece | Exception]] = []
        for key, live in list(self._live.items()):
            completion = finished.get(key)
            if completion is not None:
                tokens = completion.tokens[live.sent :].tolist()
                logprobs = completion.sampled_logprobs[live.sent :].tolist()
                del self._live[key]
            elif live.ticket.stream:
                tokens, logprobs = self.engine.drawn(key, live.sent)
                self._live[key] = live._replace(sent=live.sent + len(tokens))
            else:
                continue
            if tokens:
                pieces.append((live.ticket, Piece(live.number, live.sent == 0, tokens, logprobs, completion)))
        self.pages_used = self.engine.pages_used
        self._send(pieces)

    def _send(self, pieces: Sequence[tuple[Ticket, Piece | Exception]]) -> None:
        if pieces and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, pieces)


def _ending() -> RequestError:
    """The reply to requests during shutdown."""
    return RequestError("the server is ending; ask again", status=503, code="ending", retry_after_s=RETRY_AFTER_END_S)
