"""Access rules of Podium's servers: clients need a token unless the server listens on loopback. No jax."""

import hmac
from pathlib import Path
from typing import NamedTuple

from podium.config.errors import UsageError

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""This machine's names in a request's Host header."""


def check_installed(command: str) -> None:
    """Raise UsageError if starlette or uvicorn, which an extra installs, are missing."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise UsageError(
            f"{command} serves with starlette and uvicorn, which are not installed; pip install 'podium-rl[report]'"
        ) from None


class Address(NamedTuple):
    """Where a server listens, and the token that its clients need, as given on the command line."""

    host: str
    port: int
    token: str | None = None
    token_file: Path | None = None
    """A file with the token; takes precedence over `token`."""

    @property
    def local(self) -> bool:
        """Whether the server can be reached from this machine only."""
        return self.host in ("127.0.0.1", "localhost", "::1")

    def secret(self) -> str | None:
        """The token; None if it is empty or not given. Raises UsageError if the file cannot be read or is empty."""
        return (self.token or None) if self.token_file is None else _read_token(self.token_file)

    def hosts(self, secret: str | None, client: str) -> tuple[str, ...]:
        """The Host headers that the server accepts; empty: any. `client` is the word for clients in error messages.

        On loopback only this machine's names are accepted, so that pages of other sites cannot reach the server through
        DNS rebinding. Raises UsageError for other addresses without a token.
        """
        if self.local:
            return LOOPBACK
        if secret is None:
            raise UsageError(
                f"--host {self.host} accepts connections from other machines: add --token-file, or leave --host out "
                f"and use `ssh -L {self.port}:localhost:{self.port}` on the machine of the {client}"
            )
        return ()


def knows_host(header: str, hosts: tuple[str, ...]) -> bool:
    """Whether a Host header, with or without a port, is one of `hosts`; true if `hosts` is empty."""
    name = header.lower()
    return not hosts or name in hosts or name.rpartition(":")[0] in hosts


def is_token(given: str, token: str) -> bool:
    """Whether a client's token is right, compared in constant time."""
    return hmac.compare_digest(given.encode(), token.encode())


def _read_token(path: Path) -> str:
    try:
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {path} cannot be read: {error}") from None
    if not token:
        raise UsageError(f"--token-file {path} is empty; write a token into it, such as that of `openssl rand -hex 16`")
    return token
