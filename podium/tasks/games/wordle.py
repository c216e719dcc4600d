"""The task `wordle`: the model guesses a word of five letters, and each reply marks the letters of the guess."""

import random
import re
from collections import Counter
from collections.abc import Sequence

from podium.tasks.conversation import Turn
from podium.tasks.games.five_letter_words import WORDS
from podium.tasks.games.generated import PaidByEnvironment, earned, held_out
from podium.tasks.math_answers.final_answer import answer_text
from podium.tasks.task import Count, Prompt, TaskSource

WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]{5}(?![A-Za-z])")
PLACED = "G"
ELSEWHERE = "Y"
ABSENT = "X"
WORTH = {PLACED: 0.1, ELSEWHERE: 0.05, ABSENT: 0.0}
"""Reward of a letter of the best guess, by its mark, if the word is not found."""


class Wordle(PaidByEnvironment):
    """Guess a word of five letters; replies mark each letter: G in its place, Y in another one, X not in the word.

    The reward is 1 for the word at the first guess, and falls linearly to 0.5 at guess `turns`. If it is not found, the
    best guess pays 0.1 for each G and 0.05 for each Y. Any five letters are a guess; the last word of five letters in
    an answer counts, and an answer without one uses up a guess. The words are from Podium's own list, and evaluation
    words never occur in training.
    """

    system_prompt: str | None = None

    def __init__(self, source: TaskSource, *, turns: Count = 6, eval_size: Count = 100) -> None:
        source.refuse("wordle")
        self.turns, self.eval_size = turns, eval_size

    def prompts(self, split: str) -> Sequence[Prompt]:
        """One game per word."""
        words = random.Random("wordle").sample(WORDS, len(WORDS))
        question = (
            "I think of an English word of five letters. Guess it: answer with one word. I mark each letter of your"
            f" guess: {PLACED} if it is right and in its place, {ELSEWHERE} if it is in another place, {ABSENT} if it"
            f" is not in the word. You have {self.turns} guesses."
        )
        return [
            Prompt(id=f"wordle/{split}/{word}", question=question, answer=word)
            for word in held_out("wordle", words, split, self.eval_size)
        ]

    def open(self, prompt: Prompt, seed: int) -> "Game":
        """Start a game with the prompt's word; the seed is not used."""
        return Game(prompt.answer, self.turns)


def marks(word: str, guess: str) -> str:
    """A mark for each letter of a guess; a letter is marked at most as often as the word contains it, correct places
    first.
    """
    left = Counter(word) - Counter(letter for letter, right in zip(guess, word, strict=True) if letter == right)
    found = ""
    for letter, right in zip(guess, word, strict=True):
        if letter == right:
            found += PLACED
        elif left[letter]:
            left[letter] -= 1
            found += ELSEWHERE
        else:
            found += ABSENT
    return found


class Game:
    """One game."""

    def __init__(self, word: str, turns: int) -> None:
        self.word = word
        self.turns = turns
        self.guesses = 0
        self.found = False
        self.best = 0.0
        """Reward for the best guess if the word is not found."""

    def reply(self, turn: Turn) -> str | None:
        """Mark the last word of five letters in an answer."""
        self.guesses += 1
        guess = next(iter(WORD.findall(answer_text(turn.text))[-1:]), "").lower()
        self.found = guess == self.word
        marked = marks(self.word, guess) if guess else ""
        self.best = max(self.best, sum(WORTH[mark] for mark in marked))
        if self.found or self.guesses == self.turns:
            return None
        if not guess:
            return "Answer with one word of five letters."
        return f"{' '.join(guess.upper())}\n{' '.join(marked)}"

    def grade(self) -> float:
        """1 for the first guess, 0.5 for the last, up to 0.4 for a word that was not found."""
        return earned(self.guesses, self.turns) if self.found else self.best
