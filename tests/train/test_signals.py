import signal
import subprocess
import sys
import threading

import pytest

from podium.hosts import distributed
from podium.hosts.distributed import AgreedStop, HostFailedError
from podium.hosts.signals import StopSignal


def run(code: str) -> subprocess.CompletedProcess[str]:
    """The code in its own process, where it may send signals to itself."""
    header = "import os, signal, sys\nfrom podium.hosts.signals import StopSignal\n"
    return subprocess.run([sys.executable, "-c", header + code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_a_request_and_the_step_is_finished(number, code):
    done = run(
        f"""
with StopSignal() as stop:
    for step in range(5):
        before = stop.requested
        if step == 2:
            os.kill(os.getpid(), {int(number)})
        print(step, before, stop.requested)
        if stop.requested:
            break
sys.exit(128 + stop.requested)
"""
    )
    assert done.returncode == code
    assert done.stdout.splitlines() == ["0 None None", "1 None None", f"2 None {int(number)}"]
    assert done.stderr == ""


def test_a_closed_terminal_is_a_request_as_sigterm_unless_it_is_ignored():
    """As for `nohup`, and for a shell that is left with running jobs."""
    done = run(
        """
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with StopSignal() as stop:
    os.kill(os.getpid(), signal.SIGHUP)
    print(stop.requested == signal.SIGTERM)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with StopSignal() as stop:
    os.kill(os.getpid(), signal.SIGHUP)
    print(stop.requested)
"""
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["True", "None"]), done.stderr


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM"])
def test_a_ctrl_c_after_a_request_stops_at_once(first):
    done = run(
        f"""
with StopSignal() as stop:
    os.kill(os.getpid(), signal.{first})
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("never reached", flush=True)
"""
    )
    assert done.returncode != 0
    assert done.stdout == "still here\n"
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_a_second_ctrl_c_ends_a_process_that_is_inside_one_long_instruction():
    """As an update is: Python's own handlers wait for its end. A thread sends the signals, as a terminal would."""
    done = run(
        """
import hashlib, threading, time
def type_ctrl_c():
    for _ in range(2):
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(50)
    print("still here", flush=True)
    os._exit(1)
with StopSignal() as stop:
    threading.Thread(target=type_ctrl_c, daemon=True).start()
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2_000_000_000)  # hours
"""
    )
    assert (done.returncode, done.stdout) == (130, "")


def test_leaving_the_block_in_time_is_not_cut_short():
    done = run(
        """
import time
try:
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
except KeyboardInterrupt:
    time.sleep(2)
    print("closed")
"""
    )
    assert (done.returncode, done.stdout) == (0, "closed\n")


def test_a_second_sigterm_leaves_the_step_its_time():
    done = run(
        """
with StopSignal() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    print("saved")
sys.exit(128 + stop.requested)
"""
    )
    assert (done.returncode, done.stdout) == (143, "saved\n")


def test_handlers_are_what_they_were_after_leaving():
    def mine(number, frame):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with pytest.raises(RuntimeError, match="of the loop"), StopSignal():
            assert signal.getsignal(signal.SIGTERM) is not mine
            raise RuntimeError("an error of the loop")
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_nothing_requested_exits_with_0():
    with StopSignal() as stop:
        pass
    assert AgreedStop(stop).exit_code == 0


def test_in_another_thread_than_the_main_one_nothing_is_heard():
    during = []

    def enter():
        with StopSignal() as stop:
            during.append((signal.getsignal(signal.SIGINT), stop.requested))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert during == [(before, None)]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_of_one_process_ends_all_at_the_same_place(monkeypatch):
    """The one with the error raises it, the others learn whose it is; then all may save a step together."""
    broken = KeyError("mine")
    for own, others, expected in (
        (None, ["KeyError: 'mine'"], (HostFailedError, "worker 1 failed: KeyError: 'mine'")),
        (broken, [None], (KeyError, "mine")),
    ):
        stop = AgreedStop(StopSignal())
        monkeypatch.setattr(
            distributed, "gather", lambda value, o=others: [value, *(("theirs", None, each) for each in o)]
        )
        with pytest.raises(expected[0], match=expected[1]):
            stop.exchange("ours", own)
        assert stop._together
    stop = AgreedStop(StopSignal())
    monkeypatch.setattr(distributed, "gather", lambda value: [value, ("theirs", signal.SIGTERM, None)])
    assert stop.exchange("ours") == (["ours", "theirs"], [None, signal.SIGTERM])
    assert not stop._together
