"""How long Podium waits for external services: Google, package indexes, the hub, buckets, and metric services.

The same rule applies to all. After failures that may be temporary, it retries with growing waits for half an hour, and
prints one line that names the service. Failures that need the user (an expired login, no permission, a missing bucket,
a full disk on this machine) are raised at once, with the command that fixes them. `fault_of` distinguishes the two.
Standard library only.
"""

import contextlib
import errno
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, Protocol, TypeVar

PATIENCE_S = 1800.0
"""Seconds for which an external service may fail."""
LONGEST_GAP_S = 600.0
"""Seconds between two failures that count at most, because the service may not have been asked in between."""
WAITS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
"""Seconds before the first, second, and further attempts. The last is below `LEASE_S` of podium/observe/bucket.py."""

Fault = Literal["outage", "login", "denied", "bucket", "disk", "certificate", "other"]
"""Kinds of failure. outage: may be temporary; login: credentials are missing or have expired; denied: no permission;
bucket: the bucket does not exist; disk: this machine's disk is full; certificate: this machine does not trust the
other's; other: any other answer."""

_FAULTS: tuple[tuple[Fault, str], ...] = (
    ("disk", r"\[errno (28|122)\]|no space left on device|disk quota exceeded"),
    ("other", r"offline ?mode|hf_hub_offline"),
    ("certificate", r"certificate.?verify.?failed|certverif"),
    # without a network a token cannot be renewed either
    ("outage", r"max retries exceeded|failed to resolve|name resolution|connection (refused|reset|aborted)|timed out"),
    ("bucket", r"nosuchbucket|bucket (you tried to access )?does not exist|bucket not found"),
    (
        "login",
        r"expired.?token|token[^.]{0,40}expired|invalid_grant|invalid.?credentials|unauthorized|unauthenticated"
        r"|http 401|nocredentials|unable to locate credentials|credentials were not found|token ?refresh ?required"
        r"|refresherror|invalidaccesskeyid|invalid_token|invalid user token|anonymous caller"
        r"|\[errno 22\] bad request",  # S3 answers a HEAD with an expired token by 400 without a text
    ),
    ("denied", r"permissionerror|permission_denied|forbidden|access.?denied|http 403|does not have [\w.]+ access"),
    ("other", r"^filenotfounderror|^fileexistserror|http (400|404|405|409|412|416)"),
    (
        "outage",
        r"http (408|425|429|5\d\d)|\[errno (5|16|32|1(0[0-4]|1[0-3])|121)\]|timeout|unavailable|slow ?down"
        r"|too many requests|connection|cannot connect|disconnected|unreachable|proxyerror|clienterror|protocolerror"
        r"|incompleteread|clientpayload|chunkedencoding|transporterror|gaierror|bad gateway"
        r"|internal ?(server ?)?error|try again",
    ),
)
"""Patterns for an error and its causes in lower case; the first match applies."""

RENEW: Mapping[str, str] = {
    "gs": "gcloud auth application-default login",
    "s3": "aws sso login, or aws configure, or set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "hub": "hf auth login, or set HF_TOKEN",
    "wandb": "set WANDB_API_KEY, or wandb login",
}
"""The command that renews an expired login, by service."""

Result = TypeVar("Result")


class Clock(Protocol):
    """The functions of the module `time` for reading the time and waiting."""

    def monotonic(self) -> float:
        """Seconds that this machine has been awake, from an arbitrary start."""
        ...

    def time(self) -> float:
        """Seconds since 1970."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Wait."""
        ...


def fault_of(error: BaseException) -> Fault:
    """Classify an error of an external service, by its text and those of its causes."""
    return fault_in("\n".join(_described(each) for each in _chain(error)))


def fault_in(text: str) -> Fault:
    """Classify the failure that a text describes, such as the last lines of an installation."""
    found: list[Fault] = [fault for fault, pattern in _FAULTS if re.search(pattern, text.lower())]
    return found[0] if found else "other"


def way_out(fault: Fault, service: str) -> str:
    """What to do about a failure that is not temporary; `service` is a key of `RENEW`."""
    return {
        "login": f"renew the login: {RENEW[service]}",
        "denied": f"check the name, and that your account may read and write there ({RENEW[service]})",
        "bucket": "create the bucket, or check its name",
        "disk": "delete something on this machine's disk",
        "certificate": "check this machine's clock, its certificates and its proxy",
    }.get(fault, "check the network")


class BucketError(PermissionError):
    """A bucket, or an object in it, cannot be read; the message says what to do about it."""

    def __init__(self, what: str, error: Exception) -> None:
        """`what` is the bucket or the object, beginning with gs:// or s3://; `error` is that of the library."""
        strerror = error.strerror if isinstance(error, OSError) else None
        reason = strerror or (str(error).splitlines() or [type(error).__name__])[0].partition(" [tensorstore_spec")[0]
        super().__init__(errno.EACCES, reason)
        self._message = f"{what} cannot be read: {reason}; {way_out(fault_of(error), what[:2])}"

    def __str__(self) -> str:
        return self._message


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _described(error: BaseException) -> str:
    """An error's type, HTTP status and text."""
    response = getattr(error, "response", None)
    code = getattr(error, "code", None) or getattr(error, "status", None) or getattr(response, "status_code", None)
    if isinstance(response, Mapping):  # of botocore
        code = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return f"{type(error).__name__} http {code}: {error}"


_listeners: list[Callable[[], None]] = []


@contextlib.contextmanager
def telling(beat: Callable[[], None]) -> Iterator[None]:
    """Inside the block, call `beat` before each wait, in any thread, so that waiting does not count as being stuck."""
    _listeners.append(beat)
    try:
        yield
    finally:
        _listeners.remove(beat)


def to_stderr(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


class Patience:
    """Waits for one external service while it fails."""

    def __init__(self, what: str, *, clock: Clock = time, say: Callable[[str], None] = to_stderr) -> None:
        """`what` names the service, such as `the bucket gs://b`; `say` prints the line that names it."""
        self._what = what
        self._clock = clock
        self._say = say
        self.reset()

    def reset(self) -> None:
        """Restart the time limit, because the service has answered."""
        self._failed: float | None = None  # when it failed last
        self._used_s = 0.0
        self._attempts = 0
        self._said = ""

    def next_s(self, error: Exception, why: str | None = None, *, limited: bool = True) -> float:
        """Handle a failure, and report it if it is the first of an outage; returns the seconds to wait before the next
        attempt.

        `why` is the reason; None: the error's text. Raises the error if the outage has lasted for too long and is
        `limited`.
        """
        now = self._clock.monotonic()
        gap_s = 0.0 if self._failed is None else min(now - self._failed, LONGEST_GAP_S)
        self._failed, self._used_s = now, self._used_s + gap_s if limited else 0.0
        if self._used_s >= PATIENCE_S:
            raise error
        how_long = f"for {PATIENCE_S / 60:.0f} minutes" if limited else "for as long as it takes"
        if how_long != self._said:
            why = why or (str(error).splitlines() or [""])[0] or type(error).__name__
            self._say(f"waiting for {self._what}, {how_long}: {why}")
        self._said = how_long
        for beat in list(_listeners):
            beat()
        self._attempts += 1
        return WAITS_S[min(self._attempts, len(WAITS_S)) - 1]

    def wait(self, error: Exception, why: str | None = None, *, limited: bool = True) -> None:
        """Handle a failure like `next_s`, and wait."""
        self._clock.sleep(self.next_s(error, why, limited=limited))


def patiently(
    action: Callable[[], Result],
    what: str,
    *,
    may_pass: Callable[[Exception], bool] = lambda error: fault_of(error) == "outage",
    clock: Clock = time,
    say: Callable[[str], None] = to_stderr,
) -> Result:
    """Repeat an action until it succeeds, waiting after temporary errors; returns its result. The action must be safe
    to repeat.
    """
    patience = Patience(what, clock=clock, say=say)
    while True:
        try:
            return action()
        except Exception as error:
            if not may_pass(error):
                raise
            patience.wait(error)
