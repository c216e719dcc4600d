"""How long errors of gcloud are waited out by a command that rents machines or keeps a run alive."""

from collections.abc import Callable

from podium.pods.gcloud import GcloudError
from podium.pods.world import Clock

PATIENCE_S = 1800.0
"""Seconds for which an error may last that is neither this machine's fault nor that of its network."""
RETRY_S = 30.0


class Patience:
    """Waits while gcloud fails: without a network for as long as it takes, after any other error for half an hour."""

    def __init__(self, clock: Clock, say: Callable[[str], None], meanwhile: str) -> None:
        """`meanwhile` says what holds while this waits, such as `the run continues`."""
        self._clock = clock
        self._say = say
        self._meanwhile = meanwhile
        self._since: float | None = None  # when errors began that are not the network's
        self._said = ""

    def wait(self, error: GcloudError) -> None:
        """Say an error, once, and wait; raise it if waiting does not help, or has not helped for half an hour."""
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
        """Begin anew: gcloud has answered."""
        self._since = None
        self._said = ""
