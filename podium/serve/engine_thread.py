"""The thread in which the engine runs.

The event loop sends commands through a queue, on which the thread waits while the engine has no work. After each step,
new tokens are sent back to the loop at once.
"""

import asyncio
import contextlib
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


class Piece(NamedTuple):
    """New tokens of an answer."""

    number: int
    """Index of the answer among those of its request."""
    first: bool
    """Whether this is the first piece of its answer."""
    tokens: list[int]
    logprobs: list[float]
    completion: Completion | None
    """The whole answer, once it has ended; None before."""


class Ticket:
    """A client's request in the engine. Iterate over its pieces, and always close it."""

    def __init__(self, requests: Sequence[Request], *, stream: bool, drop: Callable[["Ticket"], None]) -> None:
        """Create it in the event loop that will read it; `drop` frees the slots of answers that have not ended."""
        self.requests = requests
        self.stream = stream
        """Whether to deliver pieces before an answer has ended."""
        self.remaining = sum(request.completions for request in requests)
        """Answers that have not ended."""
        self.pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self.began = time.monotonic()
        self._drop = drop

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Yield pieces until all answers have ended. Raises RequestError if the engine fails."""
        left = sum(request.completions for request in self.requests)
        while left:
            piece = await self.pieces.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece.completion is not None
            yield piece

    def close(self) -> None:
        """Drop answers that have not ended, and free their slots; a second call does nothing."""
        self._drop(self)


Delivery = Sequence[tuple[Ticket, Piece | Exception]]
"""New pieces of answers, and errors that end requests."""


class _Live(NamedTuple):
    """An answer that the engine is generating."""

    ticket: Ticket
    number: int
    sent: int


class EngineThread:
    """Runs an engine for any number of requests."""

    def __init__(self, engine: RolloutEngine, deliver: Callable[[Delivery], None]) -> None:
        """Start the thread, which calls `deliver` with new pieces."""
        self.engine = engine
        self.stats = RolloutStats()
        """Statistics of all steps so far."""
        self.pages_used = 0
        """Pages of the cache in use after the last step or command."""
        self.failure = ""
        """Why the thread ended, if an error ended it; otherwise empty."""
        self._deliver_pieces = deliver
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._compiled: set[str] = set()
        """Programs that only some requests need and that have been compiled."""
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[Key, _Live] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # Called from other threads.

    def submit(self, ticket: Ticket) -> None:
        """Submit a request to the engine."""
        self._inbox.put(lambda: self._submit(ticket))

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request."""
        self._inbox.put(lambda: self._cancel(ticket))

    def check_alive(self) -> None:
        """Raise RequestError if the engine has failed."""
        if self.failure:
            raise RequestError(f"the engine has failed: {self.failure}; restart the server", status=503)

    def close(self) -> None:
        """End the thread after the current step, and drop all requests."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._inbox.put(None)
        self._thread.join()
        for key in self.engine.keys:
            self.engine.cancel(key)

    # Called in the engine's thread.

    def _run(self) -> None:
        try:
            while self._obey():
                if self.engine.busy:
                    self._step()
                self._send_new()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.failure = f"{type(error).__name__}: {error}"[:300]
            self._fail([live.ticket for live in self._live.values()], self.failure)
            while (command := self._inbox.get()) is not None:  # refuse requests that have arrived meanwhile
                command()

    def _obey(self) -> bool:
        """Execute pending commands, waiting for one if the engine has no work. Returns False if the thread
        should end.
        """
        while not (self.engine.busy and self._inbox.empty()):
            command = self._inbox.get()
            if command is None:
                return False
            command()
        return True

    def _submit(self, ticket: Ticket) -> None:
        if not ticket.remaining:  # the client has disconnected while programs were compiled
            return
        calls = {name: call for each in ticket.requests for name, call in self.engine.device.extra_calls(each).items()}
        missing = {name: call for name, call in calls.items() if name not in self._compiled}
        if missing and not self.failure:
            self._compiler.submit(self._compile, missing, ticket)
            return
        index = 0
        try:
            self.check_alive()
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
        """Compile programs in a separate thread, then submit the request that needs them.

        If compilation fails, the engine's call of the program raises the error.
        """
        for name, call in calls.items():
            if name not in self._compiled and ticket.remaining:
                with contextlib.suppress(Exception):
                    call.lower().compile()
                self._compiled.add(name)
        self.submit(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        for key in [key for key, live in self._live.items() if live.ticket is ticket]:
            self.engine.cancel(key)
            del self._live[key]

    def _step(self) -> None:
        """Run one step. If the model's logits are not finite, the request that caused them fails, and the others
        continue.
        """
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

    def _send_new(self) -> None:
        """Deliver the new tokens of all answers."""
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

    def _send(self, pieces: Delivery) -> None:
        if pieces:
            self._deliver_pieces(pieces)
