"""The requests that clients have in the engine, as the event loop sees them: how many, how long, and when to refuse."""

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
"""Seconds after which clients of a server that ends may find another in its place."""


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


class Clients:
    """All clients' requests in an engine; used in the event loop, which runs beside the engine's thread."""

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
        """End the engine's thread after the step that it is in, and drop all requests."""
        self.thread.close()

    def open(self, requests: Sequence[Request], *, stream: bool) -> Ticket:
        """Have requests answered. Raises RequestError if there are too many, or the engine has failed."""
        self._loop = asyncio.get_running_loop()
        ticket = Ticket(requests, stream=stream, drop=self._drop)
        self._check_room(ticket.remaining)
        self.counters.in_flight += ticket.remaining
        self._open.add(ticket)
        self.thread.submit(ticket)
        return ticket

    def refuse_new(self) -> None:
        """Refuse requests from now on, since the server ends."""
        self.ending = True

    def give_up(self) -> None:
        """End the requests that are in progress with an error that says to ask again."""
        for ticket in list(self._open):
            ticket.pieces.put_nowait(_ending())
            self._drop(ticket)

    def check_alive(self) -> None:
        """Raises RequestError if the engine has failed, or the server is shutting down."""
        if self.ending:
            raise _ending()
        self.thread.check_alive()

    def metrics(self) -> str:
        """All counters in the text format of Prometheus."""
        counters, thread, stats = self.counters, self.thread, self.thread.stats
        lines: list[str] = []
        for name, kind, value, about in (
            ("answers_in_flight", "gauge", counters.in_flight, "answers asked for that have not ended"),
            ("answers_limit", "gauge", self.limit, "most answers in flight"),
            ("slots", "gauge", thread.engine.config.slots, "answers that are drawn at a time"),
            ("cache_pages_used", "gauge", thread.pages_used, "pages of the cache in use"),
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
                f"{in_flight} answers are in flight, and {self.limit} may be; try again later",
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
        """Seconds until a slot is free, if answers take as long as they did so far."""
        counters = self.counters
        each_s = counters.answer_s / counters.finished if counters.finished else 1.0
        return min(MAX_RETRY_S, max(1, math.ceil(each_s * counters.in_flight / self.limit)))

    def _deliver(self, pieces: Delivery) -> None:
        """Hand over what comes from the engine, in whose thread this is called."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, pieces)

    def _receive(self, pieces: Delivery) -> None:
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


def _ending() -> RequestError:
    """The reply to requests during shutdown."""
    return RequestError("the server is ending; ask again", status=503, code="ending", retry_after_s=RETRY_AFTER_END_S)
