"""Conversations that hang, stop or end the process that holds them: they alone fail, and nothing waits or is left."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import runs, state, wait_for

from podium.config.schema import EnvironmentsConfig, TaskConfig
from podium.tasks import worker_process
from podium.tasks.conversation import Reply, Turn
from podium.tasks.conversations import conversation_processes, program
from podium.tasks.conversations.conversing import Answered
from podium.tasks.conversations.environments import Environments
from podium.tasks.conversations.loopback import Line
from podium.tasks.task import Prompt

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
"""Far above what anything here takes on a busy machine."""


class Blocks:
    """Its copies block as they are made."""

    def __getstate__(self) -> dict[str, int]:
        return {"any": 1}

    def __setstate__(self, state: object) -> None:
        time.sleep(600)


class Talk:
    """Says how often it was answered; an answer may say what it is to do, and a file to create as that begins."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self.count = 0

    async def _wait(self) -> None:
        await asyncio.sleep(600)

    def reply(self, turn: Turn) -> Any:
        self.count += 1
        act, _, mark = turn.text.partition(" > ")
        if mark:
            Path(mark).touch()
        match act.split():
            case ["hold"]:
                re.match(r"(a+)+b", "a" * 64)
            case ["stop"]:
                os.kill(os.getpid(), signal.SIGSTOP)  # another thread may take it, a moment later
                time.sleep(600)
            case ["exit"]:
                os._exit(3)
            case ["fork"]:
                time.sleep(0.0 if os.fork() else 0.2)
            case ["nap"]:
                time.sleep(0.8)
            case ["sleep"]:
                time.sleep(600)
            case ["await"]:
                return self._wait()
            case ["block"]:
                return self._block()
            case ["lambda"]:
                return Reply(messages=({"role": "user", "content": "x", "more": lambda: 1},))
            case ["leave"]:
                raise SystemExit(0)
            case ["stop", "loop"]:
                return self._stop_loop()
            case ["terminate"]:
                with subprocess.Popen(["sleep", "600"]) as child:
                    child.terminate()
                    return f"ended with {child.wait()}"
            case ["copy"]:
                self.held = Blocks()
            case ["task"]:
                return self._leave_in_a_task()
        return f"{self.count} of {os.getpid()}"

    async def _block(self) -> str:
        time.sleep(600)
        return ""

    async def _stop_loop(self) -> str:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        return "goes on"

    async def _leave_in_a_task(self) -> str:
        async def leave() -> None:
            raise SystemExit(0)

        await asyncio.gather(asyncio.create_task(leave()))
        return ""

    def close(self) -> None:
        if self.count > 100:
            raise SystemExit(0)


@pytest.fixture
def talks(monkeypatch) -> Iterator[Environments]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    task = TaskConfig(name="arithmetic", environment="test_lost_processes:Talk")
    environments = Environments([task], EnvironmentsConfig(workers=1, timeout_s=1.5))
    yield environments
    environments.close()


def begin(environments: Environments, *numbers: int, apart: bool = False) -> None:
    for number in numbers:
        environments.open(number, 0, Prompt(id="", question="", answer=""), number, apart=apart)
    found = answers(environments, len(numbers))
    assert {each.kind for each in found.values()} == {"opened"}, found


def say(environments: Environments, number: int, text: str = "") -> None:
    environments.say(number, Turn(text=text, number=0))


def answers(environments: Environments, count: int) -> dict[int, Answered]:
    """The first answers of so many conversations."""
    found: dict[int, Answered] = {}
    end = time.monotonic() + PATIENCE_S
    while len(found) < count:
        answered = environments.next(1.0)
        if answered is not None:
            found.setdefault(answered.number, answered)
        assert time.monotonic() < end, found
    return found


def shared(environments: Environments) -> list[int]:
    return [each.worker.pid for each in environments._pool._shared if isinstance(each, conversation_processes.Process)]


@pytest.mark.parametrize(
    ("act", "why"), [("hold", "does not respond"), ("stop", "does not respond"), ("exit", "code 3")]
)
def test_what_takes_the_process_with_it_fails_alone_and_the_others_are_lost(talks, act, why):
    begin(talks, *range(6))
    (pid,) = shared(talks)
    say(talks, 3, act)
    found = answers(talks, 6)
    assert {number: each.kind for number, each in found.items()} == {
        number: "failed" if number == 3 else "lost" for number in range(6)
    }
    assert why in str(found[3].value) and found[3].apart and not any(talks.holds(number) for number in range(6))
    assert [each.apart for number, each in found.items() if number != 3] == [False] * 5
    begin(talks, 10, 11)
    say(talks, 10)
    (replied,) = answers(talks, 1).values()
    assert replied.kind == "replied" and str(pid) not in str(replied.value)
    assert not runs(pid)


def test_a_call_that_forks_is_answered_once_whatever_its_child_goes_on_to_say(talks):
    """The child answers while the next request is open."""
    begin(talks, 0)
    (pid,) = shared(talks)
    for count, text in enumerate(("fork", "nap", "fork", "nap"), start=1):
        say(talks, 0, text)
        (replied,) = answers(talks, 1).values()
        assert replied.kind == "replied" and isinstance(replied.value, Reply)
        assert replied.value.messages[0]["content"] == f"{count} of {pid}"


@pytest.mark.parametrize("act", ["hold", "stop"])
def test_a_full_pipe_to_a_process_that_does_not_read_blocks_nobody(talks, act, tmp_path):
    """More than any pipe or socket holds. The process is killed by `next`, so who waited for it would wait for ever."""
    begin(talks, *range(40))
    (pid,) = shared(talks)
    say(talks, 7, f"{act} > {tmp_path / 'begun'}")
    wait_for((tmp_path / "begun").exists)
    wait_for(lambda: act == "hold" or state(pid) == "T")

    def say_much() -> None:
        for number in range(40):
            if number != 7:
                say(talks, number, "x" * 200_000)

    saying = threading.Thread(target=say_much, daemon=True)
    saying.start()
    saying.join(PATIENCE_S)
    assert not saying.is_alive(), "it waits for the pipe"
    found = answers(talks, 40)
    assert found.pop(7).kind == "failed"
    assert {each.kind for each in found.values()} == {"lost"}
    assert not any(each.apart for each in found.values())  # their requests were never taken


def test_of_several_calls_in_progress_the_culprit_is_found_by_one_call_at_a_time(talks, tmp_path):
    begin(talks, *range(4))
    for number in range(3):
        say(talks, number, f"await > {tmp_path / str(number)}")
    wait_for(lambda: len([*tmp_path.iterdir()]) == 3)
    say(talks, 3, "exit")
    found = answers(talks, 4)
    assert {(each.kind, each.apart) for each in found.values()} == {("lost", True)}
    begin(talks, 10, 11, 12, 13, apart=True)
    for number, text in ((10, ""), (11, "exit"), (12, ""), (13, "")):
        say(talks, number, text)
    found = answers(talks, 4)
    assert found[10].kind == "replied"
    assert (found[11].kind, found[11].apart) == ("failed", True)
    assert [(found[number].kind, found[number].apart) for number in (12, 13)] == [("lost", False)] * 2
    assert not any(talks.holds(number) for number in (11, 12, 13))


def test_one_that_hangs_in_a_thread_of_its_own_fails_alone_and_the_others_stay(talks):
    begin(talks, *range(3))
    (pid,) = shared(talks)
    say(talks, 0, "sleep")
    found = answers(talks, 1)
    assert found[0].kind == "failed" and "environments.timeout_s, 1.5 s" in str(found[0].value)
    say(talks, 1)
    assert f"1 of {pid}" in str(answers(talks, 1)[1].value)
    begin(talks, 10)
    assert len(shared(talks)) == 1 and shared(talks) != [pid]
    talks.drop(1)
    talks.drop(2)
    assert not runs(pid)


def test_what_blocks_the_loop_that_others_share_is_found(talks, tmp_path):
    begin(talks, *range(3))
    say(talks, 0, f"block > {tmp_path / 'begun'}")
    wait_for((tmp_path / "begun").exists)
    say(talks, 1, "await")
    found = answers(talks, 3)
    assert {number: each.kind for number, each in found.items()} == dict.fromkeys(range(3), "lost")
    assert [found[number].apart for number in range(3)] == [True, True, False]


@pytest.mark.parametrize("act", ["leave", "task"])
def test_a_conversation_that_exits_has_failed_and_its_process_goes_on(talks, act):
    begin(talks, 0, 1)
    (pid,) = shared(talks)
    say(talks, 0, act)
    found = answers(talks, 1)
    assert found[0].kind == "failed" and "SystemExit" in str(found[0].value)
    say(talks, 1)
    assert f"1 of {pid}" in str(answers(talks, 1)[1].value)


def test_a_conversation_that_stops_the_loop_stops_it_for_nobody(talks):
    begin(talks, 0, 1)
    for number in range(2):
        say(talks, number, "stop loop")
        assert "goes on" in str(answers(talks, 1)[number].value)


def test_what_a_conversation_starts_is_ended_by_terminate(talks):
    """Ignored signals are inherited by programs."""
    begin(talks, 0)
    say(talks, 0, "terminate")
    (replied,) = answers(talks, 1).values()
    assert replied.kind == "replied" and f"ended with {-signal.SIGTERM}" in str(replied.value)


def test_an_environment_whose_copy_blocks_fails_alone_and_others_go_on(talks, monkeypatch):
    """A reward function asks for it, so that it is unpickled in the trainer, on the thread that reads all answers."""
    monkeypatch.setattr(talks, "keeps", lambda task: True)
    begin(talks, 0, 1)
    say(talks, 0, "copy")
    assert answers(talks, 1)[0].kind == "replied"
    talks.grade(0)
    found = answers(talks, 2)
    assert (found[0].kind, found[1].kind) == ("failed", "lost")
    assert "or unpickling an object that it sent does not end" in str(found[0].value)
    begin(talks, 2)
    talks.grade(2)
    assert answers(talks, 1)[2].kind == "graded"


def test_what_a_killed_process_does_not_end_by_is_not_waited_for(monkeypatch):
    """The kernel holds a process whose disk does not respond."""
    monkeypatch.setattr(worker_process, "END_LIMIT_S", 0.1)
    process = worker_process.WorkerProcess("no_such_module")
    held, waited = process._process.wait, []

    def wait(timeout: float | None = None) -> int:
        waited.append(timeout)
        raise subprocess.TimeoutExpired("it", timeout or 0)

    monkeypatch.setattr(process._process, "wait", wait)
    process.stop()
    process.stop()
    assert waited == [0.1, 0.1]
    monkeypatch.setattr(process._process, "wait", held)
    process.close()
    assert process.exit_code is not None


def test_a_process_that_has_ended_is_killed_once(monkeypatch):
    """Its number may be another group's later."""
    process = worker_process.WorkerProcess("no_such_module")
    killed = []
    monkeypatch.setattr(os, "killpg", lambda *group: killed.append(group))
    process._process.wait()
    for _ in range(3):
        process.stop()
    process.close()
    assert killed == [(process.pid, signal.SIGKILL)]


def test_a_reply_that_cannot_be_sent_is_sent_as_far_as_it_can(talks):
    begin(talks, 0)
    say(talks, 0, "lambda")
    (replied,) = answers(talks, 1).values()
    assert isinstance(replied.value, Reply)
    assert str(replied.value.messages[0]["more"]).startswith("<function")


def test_a_prompt_that_cannot_be_sent_is_named(talks):
    talks.open(0, 0, Prompt(id="", question="", answer="", metadata={"f": lambda: 1}), 0)
    (failed,) = answers(talks, 1).values()
    assert failed.kind == "failed" and "cannot be sent to another process" in str(failed.value)


def test_a_process_that_dies_again_and_again_without_a_call_is_given_up(talks):
    for round_number in range(conversation_processes.MOST_ENDS + 1):
        begin(talks, round_number)
        os.kill(shared(talks)[0], signal.SIGKILL)
        (found,) = answers(talks, 1).values()
        assert found.kind == ("lost" if round_number < conversation_processes.MOST_ENDS else "failed")
        assert "code -9" in str(found.value)


def test_a_child_that_holds_the_connection_open_does_not_hide_the_end_of_its_process(talks, tmp_path):
    begin(talks, 0, 1)
    (pid,) = shared(talks)
    descriptors = [each for each in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(each).startswith("socket:")]
    copies = [os.pidfd_open(pid)]
    try:
        held = _copied(copies[0], [int(each.name) for each in descriptors])
        os.kill(pid, signal.SIGKILL)
        assert {each.kind for each in answers(talks, 2).values()} == {"lost"}
        for each in held:
            os.close(each)
    finally:
        os.close(copies[0])


def _copied(handle: int, descriptors: list[int]) -> list[int]:
    """This process's copies of another one's files, as a child that it has forked would hold them."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    found = [libc.syscall(438, handle, descriptor, 0) for descriptor in descriptors]  # pidfd_getfd
    if any(each < 0 for each in found):
        pytest.skip("this system permits no pidfd_getfd")
    return found


TRAINER = """
import sys, time
sys.path[:0] = {tests!r}
from podium.config.schema import EnvironmentsConfig, GradingConfig, TaskConfig
from podium.tasks.conversation import Turn
from podium.tasks.conversations.environments import Environments
from podium.tasks.conversations.loopback import Line
from podium.tasks.task import Prompt

task = TaskConfig(name="arithmetic", environment="test_lost_processes:Talk")
environments = Environments([task], EnvironmentsConfig(workers=1))
environments.open(0, 0, Prompt(id="", question="", answer=""), 0)
assert environments.next(60.0).kind == "opened"
print(environments._pool._shared[0].worker.pid, flush=True)
environments.say(0, Turn(text={act!r} + " > " + {begun!r}, number=0))
time.sleep(600)
"""


@pytest.mark.parametrize("act", ["hold", "stop", "sleep"])
def test_a_process_that_holds_its_own_lock_or_is_stopped_ends_with_its_trainer(act, tmp_path):
    begun = tmp_path / "begun"
    code = TRAINER.format(tests=[str(Path(__file__).parent), str(ROOT / "tests")], act=act, begun=str(begun))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        wait_for(begun.exists)
        assert runs(pid)
        trainer.kill()
    wait_for(lambda: not runs(pid))


def test_a_program_that_leaves_a_process_behind_ends_when_it_ends(tmp_path):
    """What it leaves would hold a pipe to it open."""
    line, left = Line(), tmp_path / "left"
    code = f"import pathlib, subprocess; left = subprocess.Popen(['sleep', '600']); pathlib.Path({str(left)!r})"
    playing = program.Process(
        [sys.executable, "-c", f"{code}.write_text(str(left.pid)); print('words'); print(0.5)"], {}, line
    )
    assert line.next() is None and playing.reward() == 0.5
    assert runs(int(left.read_text()))
    os.kill(int(left.read_text()), signal.SIGKILL)
    playing.stop()
    failing = program.Process([sys.executable, "-c", "import sys; sys.exit('no service')"], {}, Line())
    with pytest.raises(RuntimeError, match="code 1: no service"):
        failing.reward()
    failing.stop()
