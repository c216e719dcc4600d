import contextlib
import dataclasses
import errno
import os
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from processes import state, wait_for

from podium.config.schema import GradingConfig, TaskConfig
from podium.tasks.grading import CHUNK, Grader, GradingError, Submission
from podium.tasks.mixture import TaskPrompt
from podium.tasks.task import Graded, Prompt

ECHO = TaskConfig(name="sample_tasks:Echo")


def answers(*texts: str, task: int = 0) -> list[Submission]:
    prompt = Prompt(id="a/train/7", question="Say 7", answer="7")
    return [
        (
            TaskPrompt(task=task, prompt=prompt, system_prompt=None),
            Graded(text=text, tokens=tuple(range(len(text)))),
        )
        for text in texts
    ]


def make_grader(*tasks: TaskConfig, workers: int = 1, timeout_s: float = 20.0) -> Grader:
    return Grader(tasks or (ECHO,), GradingConfig(workers=workers, timeout_s=timeout_s), max_new_tokens=64)


@pytest.fixture
def closed():
    """Makes graders and closes them."""
    graders: list[Grader] = []

    def make(*tasks: TaskConfig, **options) -> Grader:
        graders.append(make_grader(*tasks, **options))
        return graders[-1]

    yield make
    for grader in graders:
        grader.close()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_rewards_come_in_the_order_of_the_answers_for_any_number_of_workers(closed, workers):
    texts = ["7" if i % 3 == 0 else f"{i}x" for i in range(5 * CHUNK + 1)]
    rewards = closed(workers=workers).grade(answers(*texts))
    assert [reward.total for reward in rewards] == [float(text == "7") for text in texts]
    assert not any(reward.timed_out for reward in rewards)


def test_nothing_to_grade_gives_no_rewards(closed):
    assert closed().grade([]) == []


def test_each_task_of_the_mixture_grades_its_own(closed):
    grader = closed(ECHO, TaskConfig(name="arithmetic", rewards={"correct": 2.0}))
    rewards = grader.grade(answers("7") + answers("it is 7", task=1))
    assert [reward.total for reward in rewards] == [1, 2]


def test_submit_returns_before_the_answers_are_graded(closed, tmp_path):
    os.mkfifo(tmp_path / "reward")
    with open(tmp_path / "reward", "r+b", buffering=0) as waits:  # both ends, so that opening it does not wait
        grading = closed(timeout_s=60.0).submit(answers(f"read {waits.name}", "7"))
        waits.write(b"1")
        assert [reward.total for reward in grading.result()] == [1, 1]


def test_waiting_for_rewards_can_be_given_up(closed):
    """As at SIGTERM: what is still being graded does not keep the run."""
    calls: list[None] = []

    def give_up() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        closed().submit(answers("7", "sleep")).result(give_up)
    assert len(calls) == 2


def test_an_answer_past_its_limit_is_wrong_and_warned_of_once(closed, caplog):
    rewards = closed(timeout_s=1.5).grade(answers("7", "sleep", "7", "sleep", "7"))
    assert [reward.total for reward in rewards] == [1, 0, 1, 0, 1]
    assert [reward.timed_out for reward in rewards] == [False, True, False, True, False]
    assert [record.message for record in caplog.records] == [
        "grading of Echo, prompt a/train/7 was stopped: it took longer than 1.5 s;"
        " it counts as wrong, and so will later cases"
    ]


def test_a_task_that_limits_itself_has_its_own_limit(closed):
    grader = closed(TaskConfig(name="tests.tasks.sample_tasks:Patient"), ECHO, timeout_s=0.5)
    slow, right = grader.grade(answers("7")), grader.grade(answers("sleep", task=1))
    assert [(each.total, each.timed_out) for each in (*slow, *right)] == [(1.0, False), (0.0, True)]


@pytest.mark.parametrize(("text", "message"), [("crash", "ended with code 3"), ("memory", "2 GiB of memory")])
def test_an_answer_that_kills_its_process_or_fills_memory_is_wrong(closed, caplog, text, message):
    rewards = closed().grade(answers("7", text, "7"))
    assert [(reward.total, reward.timed_out) for reward in rewards] == [(1, False), (0, True), (1, False)]
    assert message in caplog.text


def test_parts_that_need_no_grader_are_kept_when_grading_is_stopped(closed):
    task = TaskConfig(name="sample_tasks:Echo", rewards={"correct": 1.0, "tags": 1.0})
    (reward,) = closed(task).grade(answers("crash"))
    assert reward.parts == {"correct": 0.0, "tags": 0.0}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bug", "KeyError: 'a bug'"),
        ("exit", "SystemExit"),
        ("cancel", "CancelledError"),
        ("leave", "GeneratorExit"),
        ("too much", "returned 2.0; it must return"),
    ],
)
def test_a_bug_in_a_grader_is_an_error_that_shows_everything(closed, workers, text, message):
    grader = closed(workers=workers)
    with pytest.raises(GradingError) as error:
        grader.grade(answers(*["7"] * 3, text, *["7"] * 3 * CHUNK))
    for part in ("Echo, prompt a/train/7", "Say 7", f"--- completion\n{text}", message, "--- reference answer\n7"):
        assert part in str(error.value)
    assert [reward.total for reward in grader.grade(answers("7", "8"))] == [1, 0]


def test_an_interrupt_that_a_grader_raises_in_its_process_is_a_bug(closed):
    with pytest.raises(GradingError, match="KeyboardInterrupt"):
        closed().grade(answers("interrupt"))


@pytest.mark.parametrize("act", ["stop later", "exit later"])
@pytest.mark.parametrize("size", [1, 1_000_000])
def test_what_an_answer_leaves_behind_costs_no_other_answer(closed, act, size):
    """Also if what is sent next does not fit into the connection, which nothing reads any more."""
    grader = closed(timeout_s=1.0)
    assert [reward.total for reward in grader.grade(answers("7", act))] == [1, 0]
    pids = [member.worker.pid for member in grader._pool._members]
    wait_for(lambda: any(state(pid) in "TZ" for pid in pids))
    rewards = grader.grade(answers("7", "8" * size, "7"))
    assert [(reward.total, reward.timed_out) for reward in rewards] == [(1, False), (0, False), (1, False)]


class OfThisModule:
    """A class that grading processes can import, unless it is said to be of a module that is not there."""


def test_a_prompt_that_another_process_cannot_have_is_an_error(closed, monkeypatch):
    monkeypatch.setattr(OfThisModule, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "OfThisModule", OfThisModule, raising=False)
    prompt = Prompt(id="a/0", question="Say 7", answer="7", metadata={"held": lambda: 1})
    of_main = dataclasses.replace(prompt, metadata={"held": OfThisModule()})
    graded = Graded(text="7", tokens=(1,))
    grader = closed()
    with pytest.raises(GradingError, match=r"prompt a/0: it cannot be sent to a grading process .*plain values"):
        grader.grade([(TaskPrompt(task=0, prompt=prompt, system_prompt=None), graded)])
    with pytest.raises(GradingError, match="OfThisModule"):
        grader.grade([(TaskPrompt(task=0, prompt=of_main, system_prompt=None), graded)])
    assert [reward.total for reward in grader.grade(answers("7"))] == [1.0]


def test_a_long_completion_is_shortened_and_made_printable_in_the_error(closed):
    class Broken:
        system_prompt = None

        def prompts(self, split):
            return []

        def grade(self, prompt, completion):
            raise ValueError("broken")

    grader = closed(workers=0)
    grader._own_tasks = [Broken()]
    with pytest.raises(GradingError) as error:
        grader.grade(answers("\ud800" + "a" * 50_000 + "end"))
    assert len(str(error.value)) < 10_000
    assert "\\ud800aaa" in str(error.value)
    assert "aaaend" in str(error.value)
    assert "[... 46004 characters ...]" in str(error.value)


def test_a_task_that_cannot_be_made_in_a_worker_is_an_error(closed, capfd):
    with pytest.raises(RuntimeError, match="a grading process did not start"):
        closed(TaskConfig(name="sample_tasks:CannotStart")).grade(answers("7"))
    assert "no such device" in capfd.readouterr().err


def test_what_a_grader_prints_goes_to_stderr(closed, capfd):
    grader = closed()
    grader.grade(answers("print"))
    grader.close()
    assert capfd.readouterr().out == ""


def test_close_ends_the_processes_at_once_even_while_they_grade():
    grader = make_grader(timeout_s=60.0, workers=2)
    grader.grade(answers("7"))
    processes = [member.worker._process for member in grader._pool._members]
    grading = grader.submit(answers(*["sleep"] * 40))
    grader.close()
    assert all(process.exit_code is not None for process in processes)
    assert len(processes) == 2
    with pytest.raises(CancelledError):
        grading.result()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_process_that_cannot_be_started_again_is_an_error_and_close_returns(monkeypatch, workers):
    grader = make_grader(workers=workers)
    assert [reward.total for reward in grader.grade(answers("7"))] == [1.0]

    def refuse(*_: object, **__: object):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("podium.tasks.worker_process.subprocess.Popen", refuse)
    with pytest.raises(ValueError, match=r"could not be started \(.*\); free memory .* lower grading\.workers"):
        grader.grade(answers(*["crash", "7"] * 40))
    closing = threading.Thread(target=grader.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


def test_what_a_stopped_answer_started_ends_with_it():
    with contextlib.closing(make_grader(timeout_s=1.0)) as grader:
        assert [reward.timed_out for reward in grader.grade(answers("children", "7", "children"))] == [
            True,
            False,
            True,
        ]
    deadline = time.monotonic() + 30  # a signal takes its time on a busy machine
    while sleeping() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sleeping() == []


def sleeping() -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"sleep\0001234567" in contents(path)]


def contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""


def test_graders_do_not_get_the_runs_tokens(closed, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    assert [reward.total for reward in closed().grade(answers("secrets"))] == [1.0]


def test_a_worker_imports_no_jax(closed):
    grader = closed()
    grader.grade(answers("7"))
    (pid,) = (member.worker.pid for member in grader._pool._members)
    maps = f"/proc/{pid}/maps"
    if not os.path.exists(maps):
        pytest.skip("needs /proc")
    with open(maps) as file:
        assert "jaxlib" not in file.read()
