"""How long Podium waits for what is outside: Google, package indexes, the hub, buckets, services of metrics.

There is one rule for all. What may pass is tried again after growing waits, for half an hour, and one line names what
is waited for. What cannot pass by itself (an expired login, no permission, no such bucket, this machine's own disk)
ends at once, with the command that puts it right. `fault_of` tells them apart. Standard library only.
"""

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, Protocol, TypeVar

PATIENCE_S = 1800.0
"""Seconds for which something outside may fail."""
WAITS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
"""Seconds before the first, second and further attempts. The last is below `LEASE_S` of podium/observe/bucket.py."""

Fault = Literal["outage", "login", "denied", "bucket", "disk", "certificate", "other"]
"""outage: it may pass; login: credentials are missing or have expired; denied: no permission; bucket: there is no such
bucket; disk: this machine's disk is full; certificate: this machine does not trust the other's; other: an answer."""

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
"""The command that renews an expired login, by what it is for."""

Result = TypeVar("Result")


class Clock(Protocol):
    """Time and waiting, as the module `time` has them."""

    def monotonic(self) -> float:
        """Seconds for which this machine has been awake, from any beginning."""
        ...

    def time(self) -> float:
        """Seconds since 1970."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Wait."""
        ...


def fault_of(error: BaseException) -> Fault:
    """What kind of failure an error of something outside is, by its text and those of its causes."""
    return fault_in("\n".join(_described(each) for each in _chain(error)))


def fault_in(text: str) -> Fault:
    """What kind of failure a text tells, such as the last lines of an installation."""
    found: list[Fault] = [fault for fault, pattern in _FAULTS if re.search(pattern, text.lower())]
    return found[0] if found else "other"


def way_out(fault: Fault, service: str) -> str:
    """What to do about a failure that does not pass by itself; `service` is a key of `RENEW`."""
    return {
        "login": f"renew the login: {RENEW[service]}",
        "denied": f"check the name, and that your account may read and write there ({RENEW[service]})",
        "bucket": "create the bucket, or check its name",
        "disk": "delete something on this machine's disk",
        "certificate": "check this machine's clock, its certificates and its proxy",
    }.get(fault, "check the network")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _described(error: BaseException) -> str:
    """An error's type, status of HTTP and text."""
    response = getattr(error, "response", None)
    code = getattr(error, "code", None) or getattr(error, "status", None) or getattr(response, "status_code", None)
    if isinstance(response, Mapping):  # of botocore
        code = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return f"{type(error).__name__} http {code}: {error}"


_listeners: list[Callable[[], None]] = []


@contextlib.contextmanager
def telling(beat: Callable[[], None]) -> Iterator[None]:
    """Inside the block, call `beat` before each wait, in whichever thread that is: who waits is not stuck."""
    _listeners.append(beat)
    try:
        yield
    finally:
        _listeners.remove(beat)


def to_stderr(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


class Patience:
    """Waits for one thing outside while it fails."""

    def __init__(
        self,
        what: str,
        *,
        clock: Clock = time,
        say: Callable[[str], None] = to_stderr,
        limit_s: float = PATIENCE_S,
    ) -> None:
        """`what` is waited for, as `the bucket gs://b`; `say` prints the line that names it."""
        self._what = what
        self._clock = clock
        self._say = say
        self._limit_s = limit_s
        self.reset()

    def reset(self) -> None:
        """Start over: it has answered."""
        self._since: float | None = None
        self._attempts = 0
        self._said = ""

    def next_s(self, error: Exception, why: str | None = None, *, limited: bool = True) -> float:
        """Report a failure, the first of an outage alone; returns the seconds to wait before the next attempt.

        `why` is the reason; None: the error's text. Raises the error if it has lasted for too long, unless it is not
        `limited`.
        """
        now = self._clock.monotonic()
        self._since = now if self._since is None or not limited else self._since
        if now - self._since >= self._limit_s:
            raise error
        how_long = f"for {self._limit_s / 60:.0f} minutes" if limited else "for as long as it takes"
        if how_long != self._said:
            why = why or (str(error).splitlines() or [""])[0] or type(error).__name__
            self._say(f"waiting for {self._what}, {how_long}: {why}")
        self._said = how_long
        for beat in list(_listeners):
            beat()
        self._attempts += 1
        return WAITS_S[min(self._attempts, len(WAITS_S)) - 1]

    def wait(self, error: Exception, why: str | None = None, *, limited: bool = True) -> None:
        """Report a failure and wait, as `next_s` says."""
        self._clock.sleep(self.next_s(error, why, limited=limited))


def patiently(
    action: Callable[[], Result],
    what: str,
    *,
    may_pass: Callable[[Exception], bool] = lambda error: fault_of(error) == "outage",
    clock: Clock = time,
    say: Callable[[str], None] = to_stderr,
) -> Result:
    """The result of an action that may be repeated, once it succeeds; errors that may pass are waited out."""
    patience = Patience(what, clock=clock, say=say)
    while True:
        try:
            return action()
        except Exception as error:
            if not may_pass(error):
                raise
            patience.wait(error)
