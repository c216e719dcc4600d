"""Notices of a machine's end, from a metadata server that is faked."""

import contextlib
import signal
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from podium.hosts.signals import StopSignal
from podium.job.job_context import JobContext
from podium.job.job_records import ProgressReport
from podium.job.notice import Notice
from podium.job.watchdog import Watchdog


class Metadata:
    """A metadata server: values by key, and requests that wait for them to change."""

    def __init__(self) -> None:
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.changed = threading.Condition()
        self.waiting = 0

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()


@pytest.fixture
def metadata() -> Iterator[tuple[Metadata, str]]:
    fake = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            key = url.path.rpartition("/")[2]
            if self.headers["Metadata-Flavor"] != "Google" or key not in fake.values:
                return self.send_error(404)
            if "wait_for_change=true" in url.query:
                before = fake.values[key]
                with fake.changed:
                    fake.waiting += 1
                    fake.changed.wait_for(lambda: fake.values[key] != before, 20.0)
            data = fake.values[key].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield fake, f"127.0.0.1:{server.server_address[1]}"
    for key in fake.values:
        fake.set(key, "gone")
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("key", "value"), [("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")]
)
def test_a_notice_asks_the_run_to_save_and_says_so(metadata, tmp_path, capfd, key, value):
    fake, server = metadata
    report = ProgressReport(tmp_path)
    job = JobContext(
        cluster=None, report=report, watchdog=Watchdog(report), notice=Notice(server, announce=report.announce)
    )
    with StopSignal() as stop, job.notice.watching():
        deadline = time.monotonic() + 60
        while fake.waiting < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.requested is None
        fake.set(key, value)
        while stop.requested is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.requested == signal.SIGTERM
    assert job.notice.text == f"this machine is about to be taken away ({key}: {value})"
    assert f"notice: {job.notice.text}; saving" in capfd.readouterr().err


def test_a_machine_that_is_already_being_preempted_is_told_at_once(metadata):
    fake, server = metadata
    fake.set("preempted", "TRUE")
    told = threading.Event()
    with Notice(server, act=told.set).watching():
        assert told.wait(60)


def test_without_a_metadata_server_nothing_happens():
    told = threading.Event()
    before = threading.active_count()
    with Notice("127.0.0.1:9", act=told.set).watching():
        deadline = time.monotonic() + 60
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.01)
    assert threading.active_count() <= before
    assert not told.is_set()
