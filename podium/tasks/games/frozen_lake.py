"""The task `frozen_lake`: the model walks over ice to a goal, past holes, one step an answer."""

import random
import re
from collections import deque
from collections.abc import Sequence
from typing import Annotated, TypeAlias

from pydantic import Field

from podium.tasks.conversation import Turn
from podium.tasks.games.generated import PaidByEnvironment, distinct, held_out
from podium.tasks.math_answers.final_answer import answer_text
from podium.tasks.task import Count, Prompt, TaskSource

Side = Annotated[int, Field(ge=2, le=12)]
Share = Annotated[float, Field(ge=0.0, le=0.3)]
MOVE = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)
STEPS = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
"""Rows and columns of each move; neighbours in the list are at right angles."""
PLAYER = "P"
ICE = "."
HOLE = "H"
GOAL = "G"
START = (0, 0)
Cell: TypeAlias = tuple[int, int]
"""A row and a column."""
ON_THE_WAY = 0.5
"""Maximum reward of a walk that does not reach the goal."""


class FrozenLake(PaidByEnvironment):
    """Walk over a lake of `side` x `side` cells from its upper left to its lower right corner, without falling in.

    The reward is 1 at the goal and 0 in a hole. A player still on the ice after `turns` moves earns half the share of
    the shortest path that was covered. With `slippery`, one move in three goes in the direction named, and the others
    go to its left or right, as the environment's seed decides. A move against the edge, or an answer without a move,
    leaves the player in place and counts as a move. A cell is a hole with probability `holes`; every lake has a path to
    the goal. Lakes used for evaluation do not occur in training.
    """

    system_prompt: str | None = None

    def __init__(
        self,
        source: TaskSource,
        *,
        side: Side = 4,
        holes: Share = 0.2,
        slippery: bool = False,
        turns: Count = 12,
        size: Count = 2000,
        eval_size: Count = 100,
    ) -> None:
        source.refuse("frozen_lake")
        least = 2 * (side - 1)
        if turns < least:
            raise ValueError(
                f"frozen_lake: options.turns: the goal is {least} moves away, and {turns} moves cannot reach it"
            )
        self.side = side
        self.holes = holes
        self.slippery = slippery
        self.turns = turns
        self.size, self.eval_size = size, eval_size

    def prompts(self, split: str) -> Sequence[Prompt]:
        """One walk per lake; `metadata` has the lake."""
        generator = random.Random(f"frozen_lake/{self.side}/{self.holes}")
        lakes = distinct(lambda: self._lake(generator), self.size + self.eval_size)
        slips = " The ice is slippery: one move in three goes as you say, the others to its left or its right."
        asked = (
            f"You ({PLAYER}) stand on a frozen lake: {ICE} is ice, {HOLE} a hole, {GOAL} the goal. Walk to the goal:"
            f" answer with one move: up, down, left or right.{slips * self.slippery} You have {self.turns} moves."
        )
        return [
            Prompt(
                id=f"frozen_lake/{split}/{number}",
                question=f"{asked}\n{picture(lake, START)}",
                answer="",
                metadata={"lake": lake},
            )
            for number, lake in enumerate(held_out("frozen_lake", lakes, split, self.eval_size))
        ]

    def open(self, prompt: Prompt, seed: int) -> "Walk":
        """A walk over the prompt's lake; the seed decides where it slips."""
        slips = random.Random(f"{prompt.id} {seed}") if self.slippery else None
        return Walk(prompt.metadata["lake"], self.turns, slips)

    def _lake(self, generator: random.Random) -> tuple[str, ...]:
        """The rows of a lake whose goal can be reached."""
        while True:
            cells = [HOLE if generator.random() < self.holes else ICE for _ in range(self.side**2)]
            cells[0], cells[-1] = ICE, GOAL
            lake = tuple("".join(cells[row * self.side :][: self.side]) for row in range(self.side))
            if START in distances(lake):
                return lake


def distances(lake: Sequence[str]) -> dict[Cell, int]:
    """Number of safe moves from each cell to the goal in the lower right corner, for cells from which it can be
    reached.
    """
    side = len(lake)
    found = {(side - 1, side - 1): 0}
    waiting = deque(found)
    while waiting:
        cell = waiting.popleft()
        for down, right in STEPS.values():
            row, column = cell[0] + down, cell[1] + right
            if 0 <= row < side and 0 <= column < side and lake[row][column] != HOLE:
                other = (row, column)
                if other not in found:
                    found[other] = found[cell] + 1
                    waiting.append(other)
    return found


def picture(lake: Sequence[str], player: Cell) -> str:
    """The lake as text, with the player on it."""
    rows = [list(row) for row in lake]
    rows[player[0]][player[1]] = PLAYER
    return "\n".join(" ".join(row) for row in rows)


class Walk:
    """One walk over the ice."""

    def __init__(self, lake: Sequence[str], turns: int, slips: random.Random | None) -> None:
        """`slips` decides where moves go on slippery ice; None: the ice is not slippery."""
        self.lake = lake
        self.turns = turns
        self.moves = 0
        self.player = START
        self._slips = slips

    def reply(self, turn: Turn) -> str | None:
        """Make the last move named in an answer."""
        self.moves += 1
        said = MOVE.findall(answer_text(turn.text))
        if said:
            self._go(said[-1].lower())
        if self._under() in (HOLE, GOAL) or self.moves == self.turns:
            return None
        if not said:
            return "Answer with up, down, left or right."
        return picture(self.lake, self.player)

    def grade(self) -> float:
        """1 at the goal, 0 in a hole, else up to 0.5 for the share of the path that was covered."""
        if self._under() == GOAL:
            return 1.0
        left = distances(self.lake)
        if self.player not in left:
            return 0.0
        return ON_THE_WAY * max(0.0, 1 - left[self.player] / left[START])

    def _under(self) -> str:
        row, column = self.player
        return self.lake[row][column]

    def _go(self, move: str) -> None:
        moves = list(STEPS)
        turned = 0 if self._slips is None else self._slips.choice((-1, 0, 1))
        down, right = STEPS[moves[(moves.index(move) + turned) % len(moves)]]
        last = len(self.lake) - 1
        row, column = self.player
        self.player = (min(max(row + down, 0), last), min(max(column + right, 0), last))
