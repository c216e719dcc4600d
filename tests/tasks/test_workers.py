"""Worker processes: whatever a request does, it alone is lost, nobody waits beyond its limit, and nothing is left."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import expression_worker
import pytest
from expression_worker import Search, make_pool, matches
from processes import runs, state, wait_for

from podium.tasks import workers
from podium.tasks.workers import Answer, Lost, UnsendableError, WorkerPool

ROOT = Path(__file__).parents[2]


def sample_pool(*, setup: object = 20.0, workers: int = 1) -> WorkerPool:
    return WorkerPool("samples", "sample_worker", setup=setup, workers=workers)


def pids(pool: WorkerPool) -> list[int]:
    return [member.worker.pid for member in pool._members]


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    """One process, whose requests may take 2 s."""
    with contextlib.closing(sample_pool(setup=2.0)) as made:
        yield made


def test_a_third_kind_of_worker_takes_at_most_40_lines():
    with contextlib.closing(make_pool()) as pool:
        slow = Search("(a+)+b", "a" * 64)
        found = matches(pool, Search("B+", "abbc"), slow, Search("(", ""), Search("x", "abc"), Search("c", "abc"))
    assert found == ["bb", None, None, None, "c"]
    assert Path(expression_worker.__file__).read_text().count("\n") <= 40


@pytest.mark.parametrize("act", ["exit", "hold", "stop"])
def test_a_request_that_hangs_stops_or_ends_its_process_is_lost_alone(pool, act):
    (pid,) = pids(pool)
    found = pool.answers(["a", act, "b", "pid"])
    assert found[0] == Answer(0, "a") and found[2] == Answer(2, "b")
    why = "its process ended with code 3" if act == "exit" else "it took longer than 2 s"
    assert found[1] == Lost(why)
    assert isinstance(found[3], Answer) and [found[3].value] == pids(pool) != [pid]
    assert not runs(pid)


@pytest.mark.parametrize(
    ("act", "said"), [("raise", "KeyError: 'a bug'"), ("leave", "SystemExit: 3"), ("lambda", "lambda")]
)
def test_what_a_request_raises_is_the_traceback_in_its_answer_and_the_process_stays(pool, act, said):
    before = pids(pool)
    first, second = pool.answers([act, "a"])
    assert isinstance(first, Answer) and first.value is None and said in first.problem
    assert "Traceback" in first.problem
    assert second == Answer(1, "a") and pids(pool) == before


def test_texts_that_no_encoding_holds_come_back_as_they_were(pool):
    assert pool.answers(["\ud800 \0"]) == [Answer(0, "\ud800 \0")]


def test_a_request_that_cannot_be_pickled_is_an_error_and_others_are_answered(pool):
    with pytest.raises(UnsendableError, match="lambda"):
        pool.answers(["a", lambda: 1])
    assert pool.answers(["a"]) == [Answer(0, "a")]


def test_a_process_that_stops_between_two_requests_costs_neither_and_its_full_pipe_blocks_nobody(monkeypatch):
    monkeypatch.setattr(workers, "BEGIN_LIMIT_S", 1.0)
    with contextlib.closing(sample_pool()) as pool:
        (pid,) = pids(pool)
        assert pool.answers(["later"]) == [Answer(0, "later")]
        wait_for(lambda: state(pid) == "T")
        large = b"x" * 10_000_000
        assert pool.answers(["a", large]) == [Answer(0, "a"), Answer(1, large)]
        assert not runs(pid)


def test_what_a_lost_request_has_started_ends_with_its_process(pool, tmp_path):
    assert pool.answers([f"start {tmp_path / 'pid'}"]) == [Lost("it took longer than 2 s")]
    child = int((tmp_path / "pid").read_text())
    wait_for(lambda: not runs(child))


def test_requests_of_several_threads_are_answered_by_as_many_processes():
    with contextlib.closing(sample_pool(workers=2)) as pool:
        found: list[Answer | Lost] = []
        threads = [threading.Thread(target=lambda: found.extend(pool.answers(["pid"] * 20))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 80
        assert {each.value for each in found if isinstance(each, Answer)} <= set(pids(pool))


def test_processes_have_the_trainer_s_variables_but_no_keys_and_nothing_hidden(monkeypatch):
    for name in ("HF_TOKEN", "JUDGE_KEY", "OTHER"):
        monkeypatch.setenv(name, "0123456789")
    pool = WorkerPool("samples", "sample_worker", setup=20.0, workers=1, hidden=["JUDGE_KEY"])
    with contextlib.closing(pool):
        found = pool.answers(["variable HF_TOKEN", "variable JUDGE_KEY", "variable OTHER"])
    assert found == [Answer(0, None), Answer(1, None), Answer(2, "0123456789")]


def test_a_process_that_fails_as_it_starts_is_an_error(capfd):
    with contextlib.closing(sample_pool(setup="fail")) as pool, pytest.raises(RuntimeError, match="did not start"):
        pool.answers(["a"])
    assert "no such dictionary" in capfd.readouterr().err


def test_those_who_wait_for_a_pool_that_is_closed_are_told_at_once():
    pool = sample_pool(setup=600.0)
    assert pool.answers(["a"]) == [Answer(0, "a")]
    (pid,) = pids(pool)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            pool.answers(["stop"])
        except CancelledError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    wait_for(lambda: state(pid) == "T")
    pool.close()
    waiting.join(60)
    assert len(errors) == 1 and not runs(pid)


TRAINER = """
import sys, threading, time
sys.path[:0] = {tests!r}
from test_workers import pids, sample_pool

pool = sample_pool(setup=600.0)
pool.answers(["a"])
print(*pids(pool), flush=True)
threading.Thread(target=pool.answers, args=([{act!r}],), daemon=True).start()
time.sleep(600)
"""


@pytest.mark.parametrize("act", ["hold", "stop"])
def test_a_process_ends_with_its_trainer_whatever_it_does(act):
    code = TRAINER.format(tests=[str(Path(__file__).parent), str(ROOT / "tests")], act=act)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        wait_for(lambda: state(pid) == "T" if act == "stop" else state(pid) == "R")
        trainer.kill()
    wait_for(lambda: not runs(pid))
