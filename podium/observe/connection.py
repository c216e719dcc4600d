"""A client's connection to one of Podium's servers, which is closed if the client takes too long. No jax."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # uvicorn comes with an extra
    from uvicorn.protocols.http.h11_impl import H11Protocol
else:
    H11Protocol = object

HEAD_S = 10.0
"""Seconds within which the head of a request must arrive, counted from the connection or the previous answer."""
UNREAD_S = 60.0
"""Seconds within which a client must read some of the answer that is waiting for it."""
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 20\r\n\r\ntoo many connections"
)
"""The answer to a connection beyond the limit."""


class Connection(H11Protocol):
    """A connection that is closed if its client takes too long; a mixin for uvicorn's H11Protocol."""

    def __init__(self, silent: "dict[Connection, None]", most: int, *arguments: object, **named: object) -> None:
        """`silent` are all connections without a request in progress, longest silent first."""
        super().__init__(*arguments, **named)  # pyright: ignore[reportArgumentType]
        self._silent, self._most = silent, most
        self._patience: asyncio.TimerHandle | None = None
        self._left = 0
        """Unread bytes when the timer was started."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for a request. If there are too many connections, the longest silent one is closed."""
        super().connection_made(transport)
        self._be_silent()
        oldest = next(iter(self._silent))
        if len(self.connections) <= self._most:
            return
        if oldest is self:  # all others have a request in progress
            transport.write(REFUSAL)
            transport.close()
            return
        oldest._be_busy()
        oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop timing the connection."""
        self._be_busy()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received bytes; a request begins once its head is complete."""
        super().data_received(data)
        if self._asked():
            self._be_busy()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if not self._asked():
            self._be_silent()

    def pause_writing(self) -> None:
        """Start a timer that closes the connection if the client does not continue reading."""
        super().pause_writing()
        self._wait(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the timer, because the client continues reading."""
        super().resume_writing()
        if self not in self._silent:
            self._stop_waiting()

    def _asked(self) -> bool:
        """Whether a request is in progress."""
        return self.cycle is not None and not self.cycle.response_complete

    def _be_silent(self) -> None:
        self._silent[self] = None
        self._left = self.transport.get_write_buffer_size()
        self._wait(UNREAD_S if self._left else HEAD_S, self._too_late)

    def _be_busy(self) -> None:
        self._silent.pop(self, None)
        self._stop_waiting()

    def _too_late(self) -> None:
        if self._left and self.transport.get_write_buffer_size() < self._left:  # the client is still reading
            self._be_silent()
        else:
            self.transport.abort()

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(seconds, then)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
