"""A host, by what the laptop can ask of its agent."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.pods.clock import wait_for

ROOT = Path(__file__).parents[2]


SLEEP = ("--", "sleep", "100")


class Agent:
    """A host, by what the laptop can ask of it."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def run(self, *arguments: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *python, "-m", "podium.pods.host.agent", "--home", str(self.home), *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    def ask(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Exit status and answer."""
        done = self.run(*arguments)
        assert done.stderr == ""
        (line,) = done.stdout.splitlines()
        return done.returncode, json.loads(line)

    def state(self, job: str) -> str:
        return self.ask("status", job)[1]["state"]

    def ended(self, job: str) -> dict[str, Any]:
        """The status of a job when it has ended."""
        return wait_for(lambda: (found := self.ask("status", job)[1])["state"] not in ("running", "starting") and found)

    def file(self, job: str, name: str) -> Path:
        return self.home / "jobs" / job / name


def shell(script: str) -> tuple[str, ...]:
    return ("--", "bash", "-c", script)
