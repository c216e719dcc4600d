"""Conversations whose replies take time, for benches.

`Talking`, which `benches.kill_resume --tools` kills, has tools that use a process of their own; while one runs, it has
a file in the folder `tools` of the job. `Waiting`, which `benches.turns` times, only waits.
"""

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from podium.tasks.conversation import Reply, Turn
from podium.tasks.task import Prompt

TURNS = 3
WAITING = "TALKING_WAITS"
"""Environment variable with the turns of `Waiting`, and the least and the most seconds of a reply."""
HOLDS = "TALKING_HOLDS"
"""Environment variable with a file: once that has any content, a tool of `Talking` that runs does not end."""
STARTING = threading.Lock()
SERVICES: list[subprocess.Popen[bytes]] = []
"""The process that tools of this process use, once one has run."""


class Talking:
    """Asks for another sum after each answer; pays for answers with a 1, and for the text of all."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self.random, self.letters = random.Random(f"{prompt.question} {seed}"), 0

    def reply(self, turn: Turn) -> Reply | None:
        """The next sum, after a tool has run; none after the last turn."""
        self.letters += len(turn.text)
        if turn.number + 1 == TURNS:
            return None
        use_tool(self.random.uniform(0.002, 0.03))
        text = f"What is {self.random.randint(1, 9)} + {len(turn.text) % 10} ?"
        return Reply(messages=({"role": "user", "content": text},), reward=float("1" in turn.text))

    def grade(self) -> float:
        """What the text of all answers is worth."""
        return self.letters % 3 / 2


class Waiting:
    """Asks for something else after each answer; replies after a time drawn from the range in the environment."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self.random = random.Random(f"{prompt.question} {seed}")
        self.turns, self.low, self.high = (float(each) for each in os.environ[WAITING].split(","))

    def begin(self) -> str:
        """The first request."""
        thing = self.random.choice(("fruit", "animal", "city", "colour", "river", "tool"))
        return f"Say something about a {thing}, in one short sentence."

    async def reply(self, turn: Turn) -> Reply | None:
        """The next request; none after the last turn, at once."""
        if turn.number + 1 >= self.turns:
            return None
        await asyncio.sleep(self.random.uniform(self.low, self.high))
        return Reply(messages=({"role": "user", "content": self.begin()},))

    def grade(self) -> float:
        """Nothing is paid."""
        return 0.0


def use_tool(seconds: float) -> None:
    """Take `seconds`, with a service that is started by the first."""
    with STARTING:
        if not SERVICES:
            SERVICES.append(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1e6)"]))
    tools = Path(os.environ["PODRUN_JOB_DIR"]) / "tools"
    tools.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=tools):
        time.sleep(seconds)
        while os.environ.get(HOLDS) and Path(os.environ[HOLDS]).exists() and Path(os.environ[HOLDS]).stat().st_size:
            time.sleep(0.01)
