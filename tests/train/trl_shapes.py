"""Environments in the shape of TRL's OpenEnv examples (echo, wordle, catch), with clients that need no server.

They are what such examples have in common: a client made in `__init__`, `reset(**kwargs)`, tools that keep the last
result, and a reward function that looks at the environments afterwards. Written for these tests.
"""

import dataclasses
import threading
from typing import Any, NamedTuple


class Action(NamedTuple):
    message: str = ""
    action_id: int = 0
    game_name: str = ""


@dataclasses.dataclass
class Observation:
    """All that one of the servers answers."""

    echoed_message: str = ""
    messages: tuple["Message", ...] = ()
    info_state: tuple[float, ...] = ()
    reward: float | None = None
    done: bool = False


class Message(NamedTuple):
    content: str


class Result(NamedTuple):
    observation: Observation
    reward: float | None
    done: bool


class Client:
    """A connection, which cannot be sent to another process."""

    def __init__(self, base_url: str) -> None:
        self.base_url, self.lock = base_url, threading.Lock()


class EchoClient(Client):
    def step(self, action: Action) -> Result:
        paid = 0.1 * len(action.message)
        return Result(Observation(echoed_message=action.message, reward=paid), paid, False)


class EchoToolEnv:
    def __init__(self):
        self.env = EchoClient(base_url="http://nowhere")
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.columns = sorted(kwargs)
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Have the environment say the message again.

        Args:
            message: What to say again

        Returns:
            The message.
        """
        answered = self.env.step(Action(message=message))
        self.reward = answered.observation.reward
        return answered.observation.echoed_message


class WordleClient(Client):
    """Answers with all that was said since the beginning."""

    def reset(self) -> Result:
        self.said, self.guesses = "Guess a word of two letters.\n", 0
        return self._answer(0.0)

    def step(self, action: Action) -> Result:
        if len(action.message) > 6:
            self.said += "You attempted an invalid move.\n"
            return self._answer(0.5)
        self.guesses += 1
        self.said += f"{action.message}: no. {self.guesses} guesses.\n"
        return self._answer(0.25 * self.guesses)

    def _answer(self, reward: float) -> Result:
        over = self.guesses == 2
        return Result(Observation(messages=(Message(self.said),)), reward, over)


class WordleEnv:
    def __init__(self):
        self.client = WordleClient(base_url="http://nowhere")

    def reset(self, **kwargs) -> str | None:
        begun = self.client.reset()
        self._heard = begun.observation.messages[0].content
        self.reward = 0.0
        self.done = False
        return self._heard

    def guess(self, guess: str) -> str:
        """
        Guess the word.

        Args:
            guess: The word

        Returns:
            What the game answers.
        """
        if self.done:
            raise ValueError("Game over.")
        answered = self.client.step(Action(message=guess))
        everything = answered.observation.messages[0].content
        new, self._heard = everything[len(self._heard) :], everything
        self.reward = 0.0 if "invalid move" in new else answered.reward
        self.done = answered.done
        return new


class CatchClient(Client):
    """A ball that falls three rows, one column to the right of the paddle."""

    def reset(self) -> Result:
        self.row, self.paddle = 0, 1
        return self._answer()

    def step(self, action: Action) -> Result:
        assert action.game_name == "catch"
        self.row += 1
        self.paddle += action.action_id - 1
        return self._answer()

    def _answer(self) -> Result:
        over = self.row == 2
        reward = (1.0 if self.paddle == 2 else -1.0) if over else None
        return Result(Observation(info_state=(self.row, self.paddle), done=over), reward, over)


class CatchEnv:
    ROWS = 3

    def __init__(self):
        self.client = CatchClient(base_url="http://nowhere")
        self.reward = 0.0
        self.done = False

    @staticmethod
    def describe(info_state: Any) -> str:
        """No tool, since it is static."""
        row, paddle = info_state
        return f"Ball: row {row + 1} of {CatchEnv.ROWS}, column 2; paddle: column {paddle}."

    def reset(self, **kwargs) -> str:
        begun = self.client.reset()
        self.reward, self.done = 0.0, begun.observation.done
        return self.describe(begun.observation.info_state)

    def _act(self, action_id: int) -> str:
        if self.done:
            raise ValueError("Episode is done.")
        answered = self.client.step(Action(action_id=action_id, game_name="catch"))
        self.reward = answered.reward or 0.0
        self.done = answered.observation.done
        return self.describe(answered.observation.info_state)

    def move(self, direction: str) -> str:
        """Move the paddle to a side.

        Args:
            direction: Where to, "left" or "right".

        Returns:
            What is seen then.
        """
        if direction not in ("left", "right"):
            raise ValueError(f"Invalid direction {direction!r}: must be 'left' or 'right'.")
        return self._act(0 if direction == "left" else 2)

    def stay(self) -> str:
        """Do nothing, while the ball falls.

        Returns:
            What is seen then.
        """
        return self._act(1)

    @property
    def caught(self) -> bool:
        return self.reward > 0


def reward_func(environments, **kwargs) -> list[float]:
    assert len(environments) == len(kwargs["completions"]) == len(kwargs["prompts"])
    return [env.reward for env in environments]


def reward_from_env(environments, **kwargs):
    return [max(env.reward, 0.0) if env.done else 0.0 for env in environments]


def only_wordle(environments, **kwargs) -> list[float | None]:
    return [env.reward if isinstance(env, WordleEnv) else None for env in environments]
