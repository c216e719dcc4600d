"""The task `guess`: the model guesses a number, and each reply says whether the number is larger or smaller."""

import random
import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from podium.tasks.conversation import Reply, Turn
from podium.tasks.games.generated import PaidByEnvironment, earned
from podium.tasks.task import Count, Prompt, TaskSource

Largest = Annotated[int, Field(ge=2)]
NUMBER = re.compile(r"[0-9]{1,9}")


class GuessGame(PaidByEnvironment):
    """Guess a number from 1 to `largest`; each answer is a guess, and the reply is `larger` or `smaller`.

    The reward is 1 for the number at the first guess, and falls linearly to 0.5 at guess `turns`; without the number in
    `turns` guesses it is 0. An answer without a number uses up a guess.
    """

    system_prompt: str | None = None

    def __init__(
        self, source: TaskSource, *, largest: Largest = 64, turns: Count = 8, size: Count = 2000, eval_size: Count = 100
    ) -> None:
        source.refuse("guess")
        self.largest = largest
        self.turns = turns
        self.size = size
        self.eval_size = eval_size

    def prompts(self, split: str) -> Sequence[Prompt]:
        """One game per prompt; the number depends on the split and the game."""
        count = self.eval_size if split == "eval" else self.size
        question = (
            f"I think of a whole number from 1 to {self.largest}. Guess it: answer with one number. I say larger or"
            f" smaller; you have {self.turns} guesses."
        )
        return [Prompt(id=f"guess/{split}/{game}", question=question, answer="") for game in range(count)]

    def open(self, prompt: Prompt, seed: int) -> "Game":
        """Start a game with its own number."""
        number = random.Random(f"{prompt.id} {seed}").randint(1, self.largest)
        return Game(number, self.turns)


class Game:
    """One game."""

    def __init__(self, number: int, turns: int) -> None:
        self.number = number
        self.turns = turns
        self.guesses = 0
        self.found = False

    def reply(self, turn: Turn) -> Reply | str | None:
        """Compare the last number of an answer."""
        self.guesses += 1
        guesses = NUMBER.findall(turn.text)
        self.found = bool(guesses) and int(guesses[-1]) == self.number
        if self.found or self.guesses == self.turns:
            return None
        if not guesses:
            return "Answer with one number."
        return "larger" if int(guesses[-1]) < self.number else "smaller"

    def grade(self) -> float:
        """1 for the first guess, 0.5 for the last, 0 if it was not found."""
        if not self.found:
            return 0.0
        return earned(self.guesses, self.turns)
