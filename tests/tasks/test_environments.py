"""Processes that run conversations end with the trainer, however it ends."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import below, runs

from podium.config.judge import JudgeConfig
from podium.config.schema import EnvironmentsConfig, TaskConfig
from podium.tasks.conversation import Reply, Turn
from podium.tasks.conversations.environments import Environments
from podium.tasks.task import Prompt

ROOT = Path(__file__).parents[2]
TRAINER = """
from podium.config.schema import EnvironmentsConfig, TaskConfig
from podium.tasks.conversation import Turn
from podium.tasks.conversations.environments import Environments
from podium.tasks.task import Prompt

task = TaskConfig(name="arithmetic", environment="benches.children.talking:Talking")
environments = Environments([task], EnvironmentsConfig(workers=2))
for number in range(8):
    environments.open(number, 0, Prompt(id="", question="", answer=""), number)
turns = dict.fromkeys(range(8), 0)
while True:
    answered = environments.next(60.0)
    number = answered.number
    print(answered.kind, flush=True)
    if turns[number] == 2:
        environments.drop(number)
        number = len(turns)
        turns[number] = 0
        environments.open(number, 0, Prompt(id="", question="", answer=""), number)
        continue
    environments.say(number, Turn(text="", number=turns[number]))
    turns[number] += 1
"""
WAIT_S = 60.0


@pytest.mark.parametrize("replies", [0, 1, 20])
def test_nothing_is_left_of_a_trainer_that_is_killed_while_tools_run(tmp_path: Path, replies: int):
    environ = {**os.environ, "PODRUN_JOB_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True, env=environ) as trainer:
        assert trainer.stdout is not None
        heard = 0
        while heard < replies:
            line = trainer.stdout.readline()
            assert line, "the trainer has ended"
            heard += line == "replied\n"
        processes = below(trainer.pid)
        trainer.kill()
    if replies:
        assert len(processes) >= 2  # one that holds conversations, and what its tools have started
        assert heard == replies
    deadline = time.monotonic() + WAIT_S
    while any(map(runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [each for each in processes if runs(each)]


class Open:
    """Holds files open, as an environment with a process or its own connection does."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self.files = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]

    def reply(self, turn: Turn) -> None:
        """End the conversation."""

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            os.close(file)


@pytest.fixture
def few_files() -> Iterator[None]:
    """A low limit on open files, as that of most shells, which processes inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_open_environments_may_hold_more_files_than_a_shell_allows(few_files, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    task = TaskConfig(name="arithmetic", environment="test_environments:Open")
    environments = Environments([task], EnvironmentsConfig(workers=1))
    try:
        for number in range(100):
            environments.open(number, 0, Prompt(id="", question="", answer=""), number)
        answers = [environments.next(60.0) for _ in range(100)]
    finally:
        environments.close()
    assert {answer and answer.kind for answer in answers} == {"opened"}, answers[-1]


class Reading:
    """Pays a conversation's process for each variable that it sees."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self.names = prompt.question.split()

    def reply(self, turn: Turn) -> Reply:
        """End the conversation."""
        return Reply(reward=float(sum(name in os.environ for name in self.names)), done=True)


def test_environments_do_not_get_the_run_s_keys(monkeypatch):
    """The key of a judge, and that of the hub; others are the user's own."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for name in ("HF_TOKEN", "JUDGE_KEY", "SIMULATOR_KEY"):
        monkeypatch.setenv(name, "0123456789")
    task = TaskConfig(name="arithmetic", environment="test_environments:Reading")
    judge = JudgeConfig(name="j", url="http://127.0.0.1:9/v1", model="m", rubric="r", key_env="JUDGE_KEY")
    environments = Environments([task], EnvironmentsConfig(workers=1), judges=[judge])
    try:
        environments.open(0, 0, Prompt(id="", question="HF_TOKEN JUDGE_KEY SIMULATOR_KEY", answer=""), 0)
        assert environments.next(60.0).kind == "opened"
        environments.say(0, Turn(text="", number=0))
        replied = environments.next(60.0)
    finally:
        environments.close()
    assert (replied.kind, replied.value.reward) == ("replied", 1.0)
