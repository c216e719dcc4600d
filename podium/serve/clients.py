"""Keeps track of clients' requests in the engine from the event loop: how many, how long, and when to refuse more."""

import asyncio
import dataclasses
import math
import time
from collections.abc import Sequence

from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request
from podium.serve.bodies import RequestError
from podium.serve.engine_thread import Delivery, EngineThread, Ticket

MAX_RETRY_S = 60
RETRY_AFTER_END_S = 5
"""Seconds after which clients of a server that shuts down should try again."""


@dataclasses.dataclass(kw_only=True)
class Counters:
    """Counters for `/metrics`; updated in the event loop."""

    in_flight: int = 0
    """Answers requested that have not ended."""
    tokens: int = 0
    """Tokens generated in answers."""
    finished: int = 0
    left: int = 0
    """Answers whose client disconnected before the end."""
    refused: int = 0
    """Requests refused because of the queue's limit."""
    first_s: float = 0.0
    """Sum, over streamed answers, of the seconds from the request to the first token."""
    firsts: int = 0
    answer_s: float = 0.0
    """Sum, over answers, of the seconds from the request to the end."""


class Clients:
    """All clients' requests in an engine; used in the event loop, while the engine runs in a thread."""

    def __init__(self, engine: RolloutEngine, *, max_queue: int) -> None:
        """Start the engine's thread; nothing else may call the engine until `close`.

        `max_queue` is the number of answers that may wait for a slot.
        """
        self.limit = engine.config.slots + max_queue
        """Most answers in flight."""
        self.counters = Counters()
        self.ending = False
        """Whether the server is shutting down."""
        self._open: set[Ticket] = set()
        """Requests with answers that have not ended."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread = EngineThread(engine, self._deliver)

    def close(self) -> None:
        """End the engine's thread after the current step, and drop all requests."""
        self.thread.close()

    def open(self, requests: Sequence[Request], *, stream: bool) -> Ticket:
        """Submit requests to the engine. Raises RequestError if too many are in flight, or the engine has failed."""
        self._loop = asyncio.get_running_loop()
        ticket = Ticket(requests, stream=stream, drop=self._drop)
        self._check_room(ticket.remaining)
        self.counters.in_flight += ticket.remaining
        self._open.add(ticket)
        self.thread.submit(ticket)
        return ticket

    def refuse_new(self) -> None:
        """Refuse requests from now on, because the server is shutting down."""
        self.ending = True

    def give_up(self) -> None:
        """End requests in progress with an error that tells clients to try again."""
        for ticket in list(self._open):
            ticket.pieces.put_nowait(_ending())
            self._drop(ticket)

    def check_alive(self) -> None:
        """Raise RequestError if the engine has failed or the server is shutting down."""
        if self.ending:
            raise _ending()
        self.thread.check_alive()

    def metrics(self) -> str:
        """All counters in Prometheus's text format."""
        counters, thread, stats = self.counters, self.thread, self.thread.stats
        lines: list[str] = []
        for name, kind, value, about in (
            ("answers_in_flight", "gauge", counters.in_flight, "answers requested that have not ended"),
            ("answers_limit", "gauge", self.limit, "most answers in flight"),
            ("slots", "gauge", thread.engine.config.slots, "answers that can be generated at the same time"),
            ("cache_pages_used", "gauge", thread.pages_used, "pages of the cache in use"),
            ("answers_finished_total", "counter", counters.finished, "answers that have ended"),
            ("answers_left_total", "counter", counters.left, "answers whose client disconnected before the end"),
            ("requests_refused_total", "counter", counters.refused, "requests refused because the queue was full"),
            ("prompt_tokens_total", "counter", stats.prompt_tokens, "tokens of prompts"),
            ("answer_tokens_total", "counter", counters.tokens, "tokens of answers"),
            (
                "prefilled_tokens_total",
                "counter",
                stats.scheduled.prefill_tokens,
                ("tokens prefilled, including repetitions after evictions"),
            ),
            ("decode_steps_total", "counter", stats.calls.decode_steps, "decode steps"),
            ("engine_seconds_total", "counter", stats.calls.generate_s, "seconds in which the engine worked"),
            ("preempted_total", "counter", stats.scheduled.preempted, "answers that lost their slot for a while"),
            ("first_token_seconds_sum", "counter", counters.first_s, "seconds to the first token of a stream, summed"),
            ("first_token_seconds_count", "counter", counters.firsts, "answers counted in these seconds"),
            ("answer_seconds_sum", "counter", counters.answer_s, "seconds to the end of an answer, summed"),
            ("engine_alive", "gauge", int(not thread.failure), "1 unless the engine has failed"),
        ):
            lines += [f"# HELP podium_{name} {about}", f"# TYPE podium_{name} {kind}", f"podium_{name} {value}"]
        return "\n".join(lines) + "\n"

    def _check_room(self, answers: int) -> None:
        self.check_alive()
        in_flight = self.counters.in_flight
        if in_flight + answers > self.limit:
            self.counters.refused += 1
            raise RequestError(
                f"{in_flight} answers are in flight, and at most {self.limit} may be; try again later",
                status=429,
                code="queue_full",
                retry_after_s=self._retry_after_s(),
            )

    def _drop(self, ticket: Ticket) -> None:
        """Drop a request's answers that have not ended."""
        self._open.discard(ticket)
        if ticket.remaining:
            self.counters.in_flight -= ticket.remaining
            self.counters.left += ticket.remaining
            ticket.remaining = 0
            self.thread.cancel(ticket)

    def _retry_after_s(self) -> int:
        """Estimated seconds until a slot is free, if answers take as long as so far."""
        counters = self.counters
        each_s = counters.answer_s / counters.finished if counters.finished else 1.0
        return min(MAX_RETRY_S, max(1, math.ceil(each_s * counters.in_flight / self.limit)))

    def _deliver(self, pieces: Delivery) -> None:
        """Pass on the engine's pieces to the event loop; called in the engine's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, pieces)

    def _receive(self, pieces: Delivery) -> None:
        """Pass the engine's pieces to their tickets, and count them."""
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


def _ending() -> RequestError:
    """The reply to requests during shutdown."""
    return RequestError(
        "the server is shutting down; try again", status=503, code="ending", retry_after_s=RETRY_AFTER_END_S
    )
