"""Environments and tools whose replies are written down, for runs with a tiny random model."""

import asyncio
import random
import time

from podium.tasks.conversation import Reply, Turn
from podium.tasks.task import Prompt


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


class Failing(Counting):
    """The same, but it raises in about a third of the conversations; always in the same ones."""

    share = 0.3

    def reply(self, turn: Turn) -> Reply | None:
        if turn.number == 0 and random.Random(turn.text).random() < self.share:
            raise RuntimeError("the service is down")
        return super().reply(turn)


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


class Doors:
    """A gym-like environment: doors are opened until one is the right one."""

    def reset(self, seed: int | None = None):
        self.right = random.Random(seed).randint(0, 3)
        return f"{self.right + 1} doors.", {}

    def step(self, action: str):
        self.right -= 1
        return "Another door.", 0.25, self.right < 0, False, {}
