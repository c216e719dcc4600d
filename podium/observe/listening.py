"""Runs Podium's servers such that no client can block them, and shuts them down without cutting answers. No jax.

The port is bound first, before anything slow. A client has a limited time for the head of a request and for reading its
answer; when there are too many connections, idle ones are closed to make room. On shutdown, a server tells its clients
before it closes their connections.
"""

import errno
import functools
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from podium.config.errors import UsageError
from podium.observe.connection import Connection

if TYPE_CHECKING:  # an extra
    import uvicorn
    from starlette.types import ASGIApp

MAX_CONNECTIONS = 2048
KEPT_FILES = 128
"""Open files to reserve for purposes other than connections."""
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)
"""Error numbers for an address, or a kind of address, that this machine does not have."""
LINGER_S = 2
"""Seconds on shutdown within which remaining answers must be sent before connections are closed."""
Ending = Callable[[Callable[[], bool]], Awaitable[None]]
"""Called on shutdown, before the server stops accepting connections. Its argument returns whether the user has pressed
Ctrl-C again, after which it must not wait."""


def take_port(host: str, port: int) -> list[socket.socket]:
    """Bind sockets to an address and listen, so that no other process can take the address.

    If a name has several addresses, those that this machine lacks, such as `::1` in containers without IPv6, are left
    out. Raises UsageError if the address is in use, not this machine's, or not permitted.
    """
    taken: list[socket.socket] = []
    absent: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                taken.append(_listener(family, kind, protocol, address))
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                absent = error
        if absent is not None and not taken:
            raise absent
    except OSError as error:
        for each in taken:
            each.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"--port {port}: another process already uses it; give another --port, or end that process"
            ) from None
        raise UsageError(f"--host {host} --port {port}: cannot listen there ({error.strerror or error})") from None
    return taken


def _listener(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket:
    """A socket that listens at an address. Raises OSError if the address cannot be used."""
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(MAX_CONNECTIONS)
    except OSError:
        made.close()
        raise
    return made


def run(
    app: "ASGIApp", sockets: list[socket.socket], *, ready: Callable[[], None], ending: Ending | None = None
) -> None:
    """Serve until a signal. `ready` is called once the server answers clients, and `ending` after the signal."""
    make_server(app, ready=ready, ending=ending).run(sockets=sockets)


def make_server(app: "ASGIApp", *, ready: Callable[[], None], ending: Ending | None = None) -> "uvicorn.Server":
    """Make the server that `run` starts."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol  # limits the size of a head, unlike httptools

    class Client(Connection, H11Protocol):
        pass

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if ending is not None:
                await ending(lambda: self.force_exit)
            await super().shutdown(sockets=sockets)

    most = most_connections()
    config = uvicorn.Config(
        app,
        http=functools.partial(Client, {}, most),  # pyright: ignore[reportArgumentType]  # called like a class
        ws="none",
        log_level="warning",
        timeout_graceful_shutdown=LINGER_S,
    )
    return Server(config)


def most_connections() -> int:
    """MAX_CONNECTIONS, or fewer if this process may not open that many files; first raises that limit if possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + KEPT_FILES
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < wanted:
        soft = wanted if hard == unlimited else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MAX_CONNECTIONS if soft == unlimited else max(1, min(MAX_CONNECTIONS, soft - KEPT_FILES))
