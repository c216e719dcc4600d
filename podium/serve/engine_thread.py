"""The thread in which the engine runs.

What the event loop wants of the engine comes over a queue, on which the thread sleeps while the engine has no work;
after each step, what was drawn goes back to the loop at once.
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

    def __init__(self, requests: Sequence[Request], *, stream: bool, drop: Callable[["Ticket"], None]) -> None:
        """Belongs to the running event loop; `drop` frees the slots of what has not ended."""
        self.requests = requests
        self.stream = stream
        """Whether pieces are wanted before an answer has ended."""
        self.remaining = sum(request.completions for request in requests)
        """Answers that have not ended."""
        self.pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self.began = time.monotonic()
        self._drop = drop

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
        self._drop(self)


Delivery = Sequence[tuple[Ticket, Piece | Exception]]
"""New pieces of answers, and errors that end requests."""


class _Live(NamedTuple):
    """An answer that the engine draws."""

    ticket: Ticket
    number: int
    sent: int


class EngineThread:
    """Runs an engine for any number of requests."""

    def __init__(self, engine: RolloutEngine, deliver: Callable[[Delivery], None]) -> None:
        """Start the thread, which calls `deliver` with what is new."""
        self.engine = engine
        self.stats = RolloutStats()
        """Of all steps so far."""
        self.pages_used = 0
        """Pages of the cache in use after the last step or command."""
        self.failure = ""
        """Why the thread ended, if it did by itself."""
        self._deliver_pieces = deliver
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._compiled: set[str] = set()
        """Programs for some requests alone that have been compiled."""
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[Key, _Live] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # From other threads.

    def submit(self, ticket: Ticket) -> None:
        """Have a request answered."""
        self._inbox.put(lambda: self._submit(ticket))

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request."""
        self._inbox.put(lambda: self._cancel(ticket))

    def check_alive(self) -> None:
        """Raises RequestError if the engine has failed."""
        if self.failure:
            raise RequestError(f"the engine has failed: {self.failure}; start the server again", status=503)

    def close(self) -> None:
        """End the thread after the step that it is in, and drop all requests."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._inbox.put(None)
        self._thread.join()
        for key in self.engine.keys:
            self.engine.cancel(key)

    # In the engine's thread.

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
        """Compile programs, on its own thread, before a request is submitted that needs them.

        If that fails, the engine's own call says why.
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

    def _send_new(self) -> None:
        """Deliver what is new of all answers."""
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
