"""Environments and tools whose replies are written down, for runs with a tiny random model."""

import asyncio
import json
import os
import random
import re
import signal
import time
from typing import Any

from podium.tasks.conversation import Reply, Turn
from podium.tasks.task import Prompt, TaskSource

TEMPLATE = (
    "{% for tool in tools or () %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.content }}"
    "{{ ' <end> ' if message.role == 'assistant' else ' ' }}{% endfor %}"
)
"""A chat template by which a conversation can be continued."""
HOSTILE = "SCRIPTED_HOSTILE"
"""Environment variable with what some conversations do, by their question and seed, as JSON."""
LATEST = "SCRIPTED_LATEST_S"
"""Environment variable with the seconds of the slowest replies."""
ROOMY = {"max_prompt_tokens": 100, "max_new_tokens": 8, "max_episode_tokens": 160, "slots": 8}
"""Sizes of a rollout for environments that say more; tests with the same sizes compile their programs once."""


ROLLOUT = {"max_prompt_tokens": 24, "max_new_tokens": 8, "max_episode_tokens": 60, "page_tokens": 4, "slots": 8}
TALK: dict[str, Any] = {
    "steps": 2,
    "prompts_per_step": 4,
    "tasks": [{"name": "arithmetic", "environment": "scripted:Counting"}],
    "environments": {"workers": 0, "retries": 0},
    "rollout": ROLLOUT,
    "eval": {"questions": 2},
    "metrics": {"samples_every": 1},
}
"""Settings of a short run with conversations of up to three turns."""


class Counting:
    """Replies with a word of its seed and the answer; pays for letters, at each turn and at the end."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self.random, self.letters = random.Random(f"{prompt.question} {seed}"), 0

    def reply(self, turn: Turn) -> Reply | None:
        self.letters += len(turn.text)
        if turn.number == 2:
            return None
        text = f"What is {self.random.randint(1, 9)} + {len(turn.text) % 10} ?"
        return Reply(messages=({"role": "user", "content": text},), reward=float(len(turn.text) % 3))

    def grade(self) -> float:
        return self.letters % 5


class Slow(Counting):
    """The same, after a while that differs from answer to answer; async."""

    async def reply(self, turn: Turn) -> Reply | None:
        await asyncio.sleep(0.01 * (len(turn.text) % 5))
        return super().reply(turn)


class Late(Counting):
    """The same, after a random part of LATEST seconds; async."""

    async def reply(self, turn: Turn) -> Reply | None:
        await asyncio.sleep(random.random() * float(os.environ[LATEST]))
        return super().reply(turn)


class Reversed(Counting):
    """The same, but those that began first in this process reply last."""

    made = 0

    def __init__(self, prompt: Prompt, seed: int) -> None:
        super().__init__(prompt, seed)
        self.place = Reversed.made = Reversed.made + 1

    async def reply(self, turn: Turn) -> Reply | None:
        await asyncio.sleep(max(0.0, 1 - self.place / 64) * float(os.environ[LATEST]))
        return super().reply(turn)


class Failing(Counting):
    """The same, but it raises in about a third of the conversations; always in the same ones."""

    share = 0.3

    def reply(self, turn: Turn) -> Reply | None:
        if turn.number == 0 and random.Random(turn.text).random() < self.share:
            raise RuntimeError("the service is down")
        return super().reply(turn)


class SlowFailing(Failing, Slow):
    """Both; it raises more often, but never in an evaluation, which such a failure would stop."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        super().__init__(prompt, seed)
        self.share = 0.6 if "/train/" in prompt.id else 0.0


class Fickle(Counting):
    """The same, but what it says depends on how often one was made before."""

    made = 0

    def __init__(self, prompt: Prompt, seed: int) -> None:
        super().__init__(prompt, seed + Fickle.made)
        Fickle.made += 1


class Down(Failing):
    share = 1.0


class Hanging(Counting):
    def reply(self, turn: Turn) -> Reply | None:
        if "e" in turn.text:
            time.sleep(60)
        return super().reply(turn)


class Echo:
    """A class in TRL's form, as its documentation writes them."""

    def __init__(self) -> None:
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return " Echo something."

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        self.reward = float(len(message))
        return message

    async def get_reward(self) -> float:
        return self.reward


def echoed(environments: list, **columns) -> list[float]:
    """A reward function that asks for environments: the length of the last message."""
    return [environment.reward for environment in environments]


class Sparing(Echo):
    """The same, but a reward applies only where the last message had an even length."""

    async def get_reward(self) -> float | None:
        return None if self.reward % 2 else self.reward


class Doors:
    """A gym-like environment: doors are opened until one is the right one."""

    def reset(self, seed: int | None = None):
        self.right = random.Random(seed).randint(0, 3)
        return f"{self.right + 1} doors.", {}

    def step(self, action: str):
        self.right -= 1
        return "Another door.", 0.25, self.right < 0, False, {}


class Wild(Counting):
    """The same, but some raise as they begin, reply or end, hang, or end their process."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        super().__init__(prompt, seed)
        self.chance = random.Random(f"{seed} {prompt.question} chance")
        self._may_fail(0.03)

    def reply(self, turn: Turn) -> Reply | None:
        self._may_fail(0.05)
        time.sleep(0.01 * self.chance.random())
        if self.chance.random() < 0.01:
            os._exit(3)
        if self.chance.random() < 0.01:
            time.sleep(600)
        return super().reply(turn)

    def grade(self) -> float:
        self._may_fail(0.03)
        return super().grade()

    def _may_fail(self, share: float) -> None:
        if self.chance.random() < share:
            raise RuntimeError("the service is down")


class WildTools(Echo):
    """A class in TRL's form whose tool raises for some arguments, and takes its time; some do not begin or end."""

    def reset(self, seed: int = 0, **row) -> str:
        self.chance = random.Random(seed)
        self._may_fail(0.1)
        super().reset()
        return f"Echo {self.chance.randint(1, 9)}."

    async def echo(self, message: str) -> str:
        """Echo a message.

        Args:
            message: what to echo.
        """
        await asyncio.sleep(0.01 * self.chance.random())
        if len(message) % 3 == 0:
            raise ValueError("wrong arguments")
        return super().echo(message)

    async def get_reward(self) -> float:
        self._may_fail(0.1)
        return self.reward

    _may_fail = Wild._may_fail


class Hostile(Counting):
    """The same, but at their first reply those that an environment variable names do what it says."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        super().__init__(prompt, seed)
        self.act = json.loads(os.environ[HOSTILE]).get(f"{prompt.question} {seed}")

    def reply(self, turn: Turn) -> Reply | None:
        if turn.number == 0 and self.act == "surrogate":
            super().reply(turn)
            return Reply(messages=({"role": "user", "content": "What is \ud83d ?"},))
        if turn.number == 0 and self.act:
            misbehave(self.act)
        return super().reply(turn)


class NoEnd(Counting):
    """An environment that never ends."""

    def grade(self) -> float:
        raise RuntimeError("the service is down")

    def reply(self, turn: Turn) -> None:
        raise RuntimeError("the service is down")


class NoBeginning(Counting):
    """An environment that never begins."""

    def begin(self) -> str:
        raise RuntimeError("the service is down")


def misbehave(act: str) -> None:
    """What no environment should do."""
    match act:
        case "sleep":
            time.sleep(600)
        case "hold":  # the interpreter's lock: matching has no end, and no step of Python
            re.match(r"(a+)+b", "a" * 64)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


class Leaving:
    """A task whose data ends the program."""

    system_prompt = None

    def __init__(self, source: TaskSource) -> None:
        pass

    def prompts(self, split: str) -> list[Prompt]:
        raise SystemExit(0)

    def grade(self, prompt: Prompt, completion: str) -> float:
        return 0.0
