"""The task `mastermind`: the model guesses a code, and each reply says how much of the guess is right."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from podium.tasks.conversation import Turn
from podium.tasks.games.generated import PaidByEnvironment, distinct, earned, held_out
from podium.tasks.math_answers.final_answer import answer_text
from podium.tasks.task import Count, Prompt, TaskSource

Pegs = Annotated[int, Field(ge=1, le=8)]
Colours = Annotated[int, Field(ge=2, le=9)]
DIGITS = re.compile(r"[0-9](?:[\s,;-]{0,3}[0-9])*")
CLOSEST = 0.4
"""Maximum reward of a game in which the code is not found."""


class Mastermind(PaidByEnvironment):
    """Guess a code of `pegs` digits from 1 to `colours`; replies count right digits in and out of their place.

    The reward is 1 for the code at the first guess, and falls linearly to 0.5 at guess `turns`. If it is not found, the
    best guess pays 0.4 times its share of right digits, of which those in another place count half. Evaluation codes
    never occur in training. An answer without a code uses up a guess.
    """

    system_prompt: str | None = None

    def __init__(
        self,
        source: TaskSource,
        *,
        pegs: Pegs = 4,
        colours: Colours = 6,
        turns: Count = 10,
        size: Count = 2000,
        eval_size: Count = 100,
    ) -> None:
        source.refuse("mastermind")
        self.pegs = pegs
        self.colours = colours
        self.turns = turns
        self.size = size
        self.eval_size = eval_size

    def prompts(self, split: str) -> Sequence[Prompt]:
        """One game per code."""
        generator = random.Random(f"mastermind/{self.pegs}/{self.colours}")
        digits = "123456789"[: self.colours]
        codes = distinct(lambda: "".join(generator.choices(digits, k=self.pegs)), self.size + self.eval_size)
        question = (
            f"I think of a code of {self.pegs} digits, each from 1 to {self.colours}; a digit may occur more than once."
            f" Guess it: answer with {self.pegs} digits. I say how many of them are right and in their place, and how"
            f" many others are in the code but in another place. You have {self.turns} guesses."
        )
        return [
            Prompt(id=f"mastermind/{split}/{code}", question=question, answer=code)
            for code in held_out("mastermind", codes, split, self.eval_size)
        ]

    def open(self, prompt: Prompt, seed: int) -> "Game":
        """Start a game with the prompt's code; the seed is not used."""
        return Game(prompt.answer, self.turns)


class Marks(NamedTuple):
    """How much of a guess is right."""

    placed: int
    """Number of digits that are right and in their place."""
    elsewhere: int
    """Number of other guessed digits that occur elsewhere in the code; each digit of the code counts at most once."""


def marks(code: str, guess: str) -> Marks:
    """Compare a guess with a code of the same length."""
    placed = sum(map(str.__eq__, code, guess))
    return Marks(placed, (Counter(code) & Counter(guess)).total() - placed)


class Game:
    """One game."""

    def __init__(self, code: str, turns: int) -> None:
        self.code = code
        self.turns = turns
        self.guesses = 0
        self.best = 0.0
        """Correctness of the best guess so far, 0 to 1."""

    def reply(self, turn: Turn) -> str | None:
        """Compare the last code in an answer."""
        self.guesses += 1
        guess = self._guess(turn.text)
        found = marks(self.code, guess) if guess else Marks(0, 0)
        self.best = max(self.best, (found.placed + 0.5 * found.elsewhere) / len(self.code))
        if found.placed == len(self.code) or self.guesses == self.turns:
            return None
        if not guess:
            return f"Answer with {len(self.code)} digits."
        return f"{found.placed} in place, {found.elsewhere} elsewhere"

    def grade(self) -> float:
        """1 for the first guess, 0.5 for the last, up to 0.4 for a code that was not found."""
        return earned(self.guesses, self.turns) if self.best == 1.0 else CLOSEST * self.best

    def _guess(self, text: str) -> str:
        """The last run of digits as long as the code; empty if there is none."""
        runs = (re.sub(r"\D", "", run) for run in DIGITS.findall(answer_text(text)))
        return next(iter([run for run in runs if len(run) == len(self.code)][-1:]), "")
