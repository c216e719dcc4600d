"""Tasks that tests name by import path, some of them broken on purpose."""

import asyncio
import os
import signal
import subprocess
import threading
import time
from typing import Annotated, Literal

from pydantic import Field

from podium.tasks.task import Prompt, TaskSource


class Echo:
    """Correct where the completion is the answer; does what a completion like `sleep` or `crash` says."""

    system_prompt = "Repeat."

    def __init__(self, source: TaskSource, *, count: Annotated[int, Field(ge=0)] = 5, kind: Literal["a", "b"] = "a"):
        self.count = count
        self.kind = kind

    def prompts(self, split: str) -> list[Prompt]:
        return [Prompt(id=f"{self.kind}/{split}/{i}", question=f"Say {i}", answer=str(i)) for i in range(self.count)]

    def grade(self, prompt: Prompt, completion: str) -> float:
        match completion:
            case "sleep":
                time.sleep(60)
            case "children":
                subprocess.Popen(["sleep", "1234567"])
                time.sleep(60)
            case "secrets":
                return float(not any(name in os.environ for name in ("HF_TOKEN", "WANDB_API_KEY")))
            case text if text.startswith("read "):
                with open(text.removeprefix("read "), "rb", buffering=0) as file:
                    return float(file.read(1))
            case "crash":
                os._exit(3)
            case "memory":
                return float(len(bytearray(1 << 36)))
            case "bug":
                raise KeyError("a bug")
            case "exit":
                raise SystemExit(1)
            case "interrupt":
                raise KeyboardInterrupt
            case "cancel":
                raise asyncio.CancelledError
            case "leave":
                raise GeneratorExit
            case "stop later":
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
            case "exit later":
                threading.Timer(0.2, os._exit, (3,)).start()
            case "too much":
                return 2.0
            case "pid":
                return float(os.getpid() % 2 == 0) / 2
            case "print":
                print("printed by a grader")
        return float(completion == prompt.answer)


class Patient(Echo):
    """Ends by itself, but may take longer than other tasks."""

    grading_limit_s = 60.0

    def grade(self, prompt: Prompt, completion: str) -> float:
        time.sleep(1.0)
        return super().grade(prompt, completion)


class NeedsOption:
    system_prompt = None

    def __init__(self, source: TaskSource, *, size: int):
        self.size = size

    def prompts(self, split: str) -> list[Prompt]:
        return []

    def grade(self, prompt: Prompt, completion: str) -> float:
        return 0.0


class CannotStart:
    system_prompt = None

    def __init__(self, source: TaskSource):
        raise OSError("no such device")


class Unmade:
    """A task without a constructor."""

    system_prompt = None

    def prompts(self, split: str) -> list[Prompt]:
        return []


class TwoPlaces(Unmade):
    def __init__(self, source: TaskSource, folder: str) -> None:
        pass


def number(source: TaskSource) -> int:
    return 3
