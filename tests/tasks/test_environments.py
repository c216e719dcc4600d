"""Processes that run conversations end with the trainer, however it ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import below, runs

ROOT = Path(__file__).parents[2]
TRAINER = """
from podium.config.schema import EnvironmentsConfig, TaskConfig
from podium.tasks.conversation import Turn
from podium.tasks.environments import Environments
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
WAIT_S = 30.0


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
        assert len(processes) in (3, 4)  # both that hold conversations, and what their tools have started
        assert heard == replies
    deadline = time.monotonic() + WAIT_S
    while any(map(runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [each for each in processes if runs(each)]
