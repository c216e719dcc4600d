"""How long commands that rent machines or keep a run alive wait out errors of gcloud."""

from collections.abc import Callable

from podium.pods.gcloud import GcloudError
from podium.pods.world import Clock

PATIENCE_S = 1800.0
"""Seconds that an error may last if neither this machine nor its network is at fault."""
RETRY_S = 30.0


class Patience:
    """Waits while gcloud fails: without a network, indefinitely; after other errors, up to half an hour."""

    def __init__(self, clock: Clock, say: Callable[[str], None], meanwhile: str) -> None:
        """`meanwhile` describes the state during the wait, such as `the run continues`."""
        self._clock = clock
        self._say = say
        self._meanwhile = meanwhile
        self._since: float | None = None  # start of errors that are not due to the network
        self._said = ""

    def wait(self, error: GcloudError) -> None:
        """Report an error once and wait; raise it if waiting cannot help, or has not helped for half an hour."""
        now = self._clock.monotonic()
        if error.lasting:
            raise error
        if error.transient:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= PATIENCE_S:
            raise error
        if error.kind != self._said:
            shown = error.text if error.transient else str(error)
            limit = "" if error.transient else f" for {PATIENCE_S / 60:.0f} minutes"
            self._say(f"{shown}; {self._meanwhile}; retrying{limit}")
        self._said = error.kind
        self._clock.sleep(RETRY_S)

    def reset(self) -> None:
        """Start over: gcloud has answered."""
        self._since = None
        self._said = ""
