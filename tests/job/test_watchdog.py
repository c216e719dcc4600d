"""Signs of life, records of ends, and who failed first."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from podium.job.cluster import ClusterError
from podium.job.guard import MissingError
from podium.job.job_context import join_job
from podium.job.job_records import ProgressReport, exit_status, first_failure, outcome, read_json, write_record
from podium.job.watchdog import Watchdog


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_watchdog(folder: Path | None, **settings: Any) -> tuple[Watchdog, FakeClock, list[int]]:
    ended: list[int] = []
    clock = FakeClock()
    settings = {"hang_s": 50.0, "compile_s": 100.0, "clock": clock, "end": ended.append, **settings}
    return Watchdog(ProgressReport(folder, worker=2), **settings), clock, ended


def test_silence_longer_than_the_allowance_ends_the_process_with_a_record(tmp_path, capfd):
    watchdog, clock, ended = make_watchdog(tmp_path)
    watchdog.phase("update")
    clock.sleep(100.0)
    assert (watchdog.check(), ended) == (0.0, [])
    clock.sleep(1.0)
    assert (watchdog.check(), ended) == (-1.0, [124])
    record = read_json(tmp_path / "record.json")
    assert record is not None
    assert (record["kind"], record["exit"], record["worker"], record["phase"]) == ("hang", 124, 2, "update")
    assert record["message"] == "no sign of life in update for 101 s"
    error = capfd.readouterr().err
    assert "all stacks follow" in error
    assert "test_silence_longer_than_the_allowance" in error  # where the loop stands


def test_a_thread_checks_the_loop_while_it_is_watched(tmp_path, capfd):
    hung = threading.Event()
    watchdog, clock, _ = make_watchdog(tmp_path, poll_s=0.001, end=lambda status: hung.set())
    with watchdog.watching():
        assert not hung.wait(0.02)
        clock.sleep(101.0)
        assert hung.wait(60)
    assert "watchdog: no sign of life in start for 101 s" in capfd.readouterr().err


def test_signs_of_life_keep_a_long_phase_alive(tmp_path):
    watchdog, clock, ended = make_watchdog(tmp_path)
    watchdog.phase("rollout")
    for _ in range(20):
        clock.sleep(99.0)
        watchdog.check()
        watchdog.beat()
    assert ended == []
    assert not (tmp_path / "record.json").exists()


def test_the_first_of_a_kind_may_compile_and_later_ones_may_take_five_times_the_median():
    watchdog, clock, _ = make_watchdog(None)
    watchdog.phase("update")
    assert watchdog.allowance() == 100.0
    for duration in (90.0, 20.0, 30.0):
        clock.sleep(duration)
        watchdog.phase("update")
    assert watchdog.allowance() == 150.0
    watchdog.phase("rollout")
    assert watchdog.allowance() == 100.0
    quick, _, _ = make_watchdog(None)
    quick.phase("update")
    quick.phase("update")
    assert quick.allowance() == 50.0


def test_who_waits_for_others_is_more_patient_than_they_are():
    watchdog, _, _ = make_watchdog(None)
    for _ in range(2):
        watchdog.phase("rollout")
        with watchdog.waiting():
            patience = watchdog.allowance()
    assert patience == 150.0
    assert watchdog.allowance() == 50.0  # of the rollout, which goes on


def test_progress_is_written_while_it_is_watched(tmp_path):
    watchdog, clock, _ = make_watchdog(tmp_path)
    report = watchdog._report
    report.update(steps=3, run_dir="/runs/a")
    with watchdog.watching():
        watchdog.phase("rollout")
        report.update(step=1, metrics={"train-reward/total/mean": 0.5})
        clock.sleep(7.0)
    progress = read_json(tmp_path / "progress.json")
    assert progress is not None
    assert (progress["phase"], progress["step"], progress["steps"], progress["position"]) == ("rollout", 1, 3, 1)
    assert progress["metrics"] == {"train-reward/total/mean": 0.5}
    assert progress["time"] - progress["beat"] == pytest.approx(7.0, abs=1.0)


def test_a_process_that_lets_no_thread_run_is_ended_all_the_same(tmp_path):
    """A regular expression that backtracks for ages holds the interpreter: only faulthandler's own thread is left."""
    code = (
        "import pathlib, re, threading, podium.job.watchdog as w\n"
        "from podium.job.job_records import ProgressReport\n"
        "w.BACKUP_S = 0.2\n"
        f"dog = w.Watchdog(ProgressReport(pathlib.Path({str(tmp_path)!r})), hang_s=0.3, compile_s=0.3, poll_s=0.05)\n"
        "armed, arm = threading.Event(), w.faulthandler.dump_traceback_later\n"
        "w.faulthandler.dump_traceback_later = lambda *a, **k: (arm(*a, **k), armed.set())\n"
        "with dog.watching():\n"
        "    while not armed.wait(0.01): dog.beat()\n"
        "    re.match('(a+)+$', 'a' * 40 + 'b')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Timeout (" in done.stderr
    assert "<module>" in done.stderr


def test_an_exception_is_recorded_with_where_it_was(tmp_path):
    environ = {"PODRUN_JOB_DIR": str(tmp_path), "PODRUN_WORKER": "1", "TPU_SKIP_MDS_QUERY": "1"}
    with pytest.raises(ZeroDivisionError), join_job(environ) as job:
        job.report.update(step=7)
        job.report.phase("update")
        raise ZeroDivisionError("division by zero")
    record = read_json(tmp_path / "record.json")
    assert record is not None
    assert (record["kind"], record["message"]) == ("exception", "ZeroDivisionError: division by zero")
    assert (record["step"], record["phase"], record["position"], record["exit"]) == (7, "update", 1, 1)


def test_the_first_record_stays(tmp_path):
    report = ProgressReport(tmp_path)
    report.end("exception", "the cause", 1)
    report.end("signal", "what followed", 134)
    assert (read_json(tmp_path / "record.json") or {})["message"] == "the cause"
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_message_is_one_line_of_bounded_length(tmp_path):
    ProgressReport(tmp_path).end("exception", "first\nsecond " + "x" * 1000 + " last", 1)
    message = (read_json(tmp_path / "record.json") or {})["message"]
    assert message.startswith("first second xxx")
    assert message.endswith("xxx last")
    assert len(message) == 300


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ValueError("wrong"), 1, "exception"),
        (KeyboardInterrupt(), 130, "exception"),
        (SystemExit(3), 3, "exception"),
        (SystemExit("text"), 1, "exception"),
        (ClusterError("alone"), 78, "guard"),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer"), 134, "lost"),
        (RuntimeError("UNAVAILABLE: tasks are unhealthy (stopped sending heartbeats)"), 134, "lost"),
        (RuntimeError("DEADLINE_EXCEEDED: Barrier timed out"), 134, "lost"),
        (MissingError("worker 1 is missing"), 75, "missing"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 3 bytes"), 1, "exception"),
        (ValueError("a preempted barrier of mine"), 1, "exception"),
    ],
)
def test_errors_are_told_apart_by_whose_they_are(tmp_path, error, status, kind):
    assert exit_status(error) == (1 if kind == "lost" else status)
    assert ProgressReport(tmp_path).failed(error) == status
    assert (read_json(tmp_path / "record.json") or {})["kind"] == kind


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    watchdog, _, _ = make_watchdog(None)
    with watchdog.watching():
        watchdog.phase("rollout")
        watchdog.check()
    ProgressReport(None).end("done", "done", 0)
    assert list(tmp_path.iterdir()) == []


def test_writers_at_once_leave_one_record(tmp_path):
    def write(index: int) -> None:
        write_record(tmp_path, "exit", f"{index}", 1, worker=0, progress={})

    threads = [threading.Thread(target=write, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (read_json(tmp_path / "record.json") or {})["message"] in map(str, range(8))
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def status(
    worker: int, state: str = "running", kind: str | None = None, exit: int | None = None, **changes: Any
) -> dict[str, Any]:
    """What a worker's agent would print."""
    record = None
    if kind is not None:
        record = {"kind": kind, "message": f"the end of {worker}", "exit": exit, "time": 100.0 + worker, "step": 7}
        record |= {"phase": "update", "position": 20, **changes.pop("record", {})}
    return {
        "host": f"h{worker}",
        "state": state,
        "exit": exit,
        "created": 1.0,
        "record": record,
        "progress": None,
    } | changes


def ended(worker: int, kind: str, exit: int, **changes: Any) -> dict[str, Any]:
    return status(worker, "finished", kind, exit, **changes)


@pytest.mark.parametrize(
    ("statuses", "what", "line"),
    [
        ([status(0), status(1)], "running", None),
        ([status(0, "none"), status(1, "none")], "none", None),
        ([status(0), None], "running", None),  # a network between us and them
        ([None, None], "failed", "no worker answers"),
        ([ended(0, "done", 0), status(1)], "running", None),
        ([ended(0, "done", 0), ended(1, "done", 0)], "done", None),
        ([ended(0, "stopped", 143), ended(1, "stopped", 143)], "stopped", None),
        ([ended(0, "stopped", 143), ended(1, "done", 0)], "stopped", None),
        (
            [ended(0, "guard", 78), ended(1, "guard", 78)],
            "guard",
            "worker 0 (h0) did not begin: the end of 0",
        ),
        (
            [ended(0, "guard", 78), ended(1, "exception", 2, record={"phase": None, "step": None})],
            "failed",
            "worker 1 (h1) failed first: the end of 1; worker 0 ended after it",
        ),
        (
            [ended(0, "signal", 134), ended(1, "signal", 137), ended(2, "signal", 134)],
            "failed",
            "worker 1 (h1) was ended in update after step 7: the end of 1; workers 0, 2 ended after it",
        ),
        (
            [ended(0, "lost", 1, record={"time": 50.0}), ended(1, "exception", 1), status(2)],
            "failed",
            "worker 1 (h1) failed first in update after step 7: the end of 1; worker 0 ended after it",
        ),
        (
            [ended(0, "signal", 134), None, ended(2, "signal", 134)],
            "failed",
            "worker 1 does not answer; workers 0, 2 ended after it",
        ),
        (
            [ended(0, "signal", 134), status(1, "killed"), ended(2, "lost", 1)],
            "failed",
            "worker 1 (h1) was killed with all its processes, or its host was restarted; workers 0, 2 ended after it",
        ),
        (
            [ended(0, "exception", 1, record={"time": 90.0}), ended(1, "exception", 1, record={"time": 80.0})],
            "failed",
            "worker 1 (h1) failed first in update after step 7: the end of 1; worker 0 ended after it",
        ),
        (
            [
                ended(0, "hang", 124, record={"position": 21, "time": 10.0}),
                ended(1, "hang", 124, record={"position": 20, "time": 90.0}),
            ],
            "failed",
            "worker 1 (h1) was stuck in update after step 7: the end of 1; worker 0 ended after it",
        ),
    ],
)
def test_the_first_failure_is_the_cause_and_not_what_followed(statuses, what, line):
    assert first_failure(statuses) == line
    assert outcome(statuses) == what


def test_a_worker_that_is_behind_is_named_where_another_only_waited_for_it():
    """It had not ended yet when jax took it down with the one that had waited too long."""
    behind = {"position": 19, "phase": "rollout", "time": 500.0, "beat": 200.0}
    waiting = {"position": 20, "phase": "waiting", "time": 500.0, "beat": 210.0}
    statuses = [
        ended(0, "hang", 124, progress=waiting),
        ended(1, "signal", 134, progress=behind),
    ]
    assert first_failure(statuses) == (
        "worker 0 (h0) was stuck in update after step 7: the end of 0;"
        " worker 1 is behind: in rollout without a sign of life for 300 s; worker 1 ended after it"
    )
