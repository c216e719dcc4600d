"""What is waited for, for how long, and what ends at once: the one table for all that is outside."""

import asyncio
import sys
import types
from typing import Any

import pytest

from podium import buckets
from podium.buckets import wait_in_requests
from podium.files import disk_advice, is_file
from podium.observe.run_dir import run_of
from podium.patience import PATIENCE_S, BucketError, Patience, fault_of, patiently, telling
from podium.train.checkpoints.step_files import refusal


class HttpError(Exception):
    """As gcsfs raises it."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(f"{text}, {code}")


class ClientError(Exception):
    """As botocore raises it."""

    def __init__(self, code: str, status: int) -> None:
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        super().__init__(f"An error occurred ({code}) when calling the PutObject operation")


class RefreshError(Exception):
    """As google.auth raises it."""


class NoCredentialsError(Exception):
    """As botocore raises it."""


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


OUTAGES = {
    "503": HttpError(503, "Service Unavailable"),
    "429": HttpError(429, "Too Many Requests"),
    "S3 busy": OSError(16, "Please reduce your request rate."),
    "S3 internal": caused(OSError(121, "We encountered an internal error"), ClientError("InternalError", 500)),
    "no answer": TimeoutError(),
    "refused": ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 443)"),
    "no name": OSError("Cannot connect to host storage.googleapis.com:443 ssl:default [Name or service not known]"),
    "no token without a network": RefreshError("HTTPSConnectionPool: Max retries exceeded with url: /token"),
}
LASTING = {
    "expired token of S3": (
        caused(PermissionError("The provided token has expired."), ClientError("ExpiredToken", 400)),
        "s3",
    ),
    "the same, asked without a body": (OSError(22, "Bad Request"), "s3"),
    "no keys": (NoCredentialsError("Unable to locate credentials"), "s3"),
    "expired login of Google": (RefreshError("('invalid_grant: Token has been expired or revoked.')"), "gs"),
    "401": (HttpError(401, "Invalid Credentials"), "gs"),
    "403": (OSError("Forbidden: b/o\nada does not have storage.objects.create access"), "gs"),
    "no such bucket": (
        caused(FileNotFoundError("The specified bucket does not exist"), ClientError("NoSuchBucket", 404)),
        "s3",
    ),
}
RENEWS = {
    "s3": "aws sso login, or aws configure, or set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "gs": "gcloud auth application-default login",
}


class Bucket(str):
    """A path in a bucket, as far as advice needs it."""


class Clock:
    """A clock that passes when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.time = self.monotonic = lambda: self.now

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds


@pytest.mark.parametrize("error", OUTAGES.values(), ids=OUTAGES)
def test_an_outage_may_pass(error):
    assert fault_of(error) == "outage"


@pytest.mark.parametrize(("error", "kind"), LASTING.values(), ids=LASTING)
def test_what_cannot_pass_names_what_puts_it_right(error, kind):
    advice = disk_advice(error, Bucket(f"{kind}://b/runs"))
    assert fault_of(error) != "outage"
    assert "\n" not in advice
    assert RENEWS[kind] in advice or advice == "create the bucket, or check its name"


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("b/o"), FileExistsError("b/o"), ValueError("no"), HttpError(404, "no object"), KeyError("a")],
)
def test_an_answer_is_no_fault(error):
    assert fault_of(error) == "other"


class Store:
    """The class of a package for buckets, all of whose requests fail for a while."""

    clock: Clock
    error: Exception
    until_s: float

    async def _call_s3(self, what: str) -> str:
        if self.clock.now < self.until_s:
            raise self.error
        return f"{what} done"


@pytest.fixture
def store(monkeypatch) -> Any:
    """A package s3fs that is asked as epath asks it, in simulated time."""
    fsspec = pytest.importorskip("fsspec")
    given, registered = type("S3FileSystem", (Store,), {"clock": Clock()}), []
    monkeypatch.setitem(sys.modules, "s3fs", types.SimpleNamespace(S3FileSystem=given))
    monkeypatch.setattr(fsspec, "register_implementation", lambda name, of, clobber: registered.append(of))

    async def sleep(seconds: float) -> None:
        given.clock.now += seconds

    own = types.SimpleNamespace(**{**vars(asyncio), "sleep": sleep})  # threads that other tests left wait as ever
    monkeypatch.setattr(buckets, "asyncio", own)
    wait_in_requests.__wrapped__("s3")
    return registered[0]()


@pytest.mark.parametrize("error", OUTAGES.values(), ids=OUTAGES)
def test_a_request_to_a_bucket_waits_for_ten_minutes_and_says_so_in_one_line(store, error, capsys):
    type(store).error, type(store).until_s = error, 600.0
    assert asyncio.run(store._call_s3("write")) == "write done"
    assert 600.0 <= store.clock.now < 640.0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("waiting for the bucket (s3://), for 30 minutes: ")


@pytest.mark.parametrize("error", [error for error, _ in LASTING.values()], ids=LASTING)
def test_a_request_that_cannot_succeed_is_not_repeated(store, error):
    type(store).error, type(store).until_s = error, 600.0
    with pytest.raises(BucketError if fault_of(error) == "login" else type(error)) as caught:
        asyncio.run(store._call_s3("write"))
    assert store.clock.now == 0.0
    if fault_of(error) == "login":
        assert str(caught.value).endswith(f"; renew the login: {RENEWS['s3']}")


class Unreadable(str):
    """An object of a bucket whose requests fail."""

    error: Exception

    def stat(self) -> None:
        raise self.error

    def __truediv__(self, name: str) -> "Unreadable":
        return self


@pytest.mark.parametrize(("error", "kind"), LASTING.values(), ids=LASTING)
def test_a_bucket_that_refuses_is_not_taken_for_one_without_the_run(error, kind, monkeypatch):
    found = Unreadable(f"{kind}://b/runs/demo")
    found.error = error
    monkeypatch.setattr("podium.observe.run_dir.as_path", lambda text: found)
    with pytest.raises(BucketError) as caught:
        run_of(found)
    assert str(caught.value).startswith(f"{found} cannot be read: ") and "\n" not in str(caught.value)
    assert RENEWS[kind] in str(caught.value) or str(caught.value).endswith("create the bucket, or check its name")
    assert str(refusal(found, error)) == str(caught.value)


def test_a_bucket_without_the_run_says_that_it_has_none():
    found = Unreadable("gs://b/runs/demo")
    found.error = FileNotFoundError("b/runs/demo")
    assert not is_file(found)
    assert refusal(found, found.error) is None


def test_patience_ends_after_half_an_hour_and_begins_again_with_an_answer():
    clock, said, beats = Clock(), [], []
    patience = Patience("the hub", clock=clock, say=said.append)
    error = ConnectionError("no route to host")
    with telling(lambda: beats.append(clock.now)), pytest.raises(ConnectionError):
        while True:
            patience.wait(error)
    assert PATIENCE_S <= clock.now < PATIENCE_S + 31
    assert said == ["waiting for the hub, for 30 minutes: no route to host"]
    assert beats[:7] == [0.0, 1.0, 3.0, 8.0, 18.0, 38.0, 68.0]
    patience.reset()
    patience.wait(error)
    patience.wait(TimeoutError())
    assert len(said) == 2, "one line for an outage"
    patience.wait(error, limited=False)
    clock.sleep(1e6)
    patience.wait(error, limited=False)


def test_time_in_which_a_service_was_not_asked_counts_little():
    """As when something else was waited for in between."""
    clock = Clock()
    patience = Patience("it", clock=clock, say=lambda line: None)
    for _ in range(3):
        patience.wait(TimeoutError())
        clock.sleep(6000.0)
    with pytest.raises(TimeoutError):
        for _ in range(2):
            patience.wait(TimeoutError())
            clock.sleep(6000.0)


def test_an_action_is_repeated_for_errors_that_may_pass_alone():
    clock, left = Clock(), [ConnectionError("no"), ConnectionError("no"), ValueError("wrong")]

    def act() -> int:
        if left:
            raise left.pop(0)
        return 3

    with pytest.raises(ValueError, match="wrong"):
        patiently(act, "it", clock=clock, say=lambda line: None)
    assert clock.now == 3.0
    assert patiently(act, "it", may_pass=lambda error: False, clock=clock) == 3
