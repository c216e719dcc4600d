"""TextArena's single-player games (arXiv:2504.11442), as tasks `textarena:NAME`; needs the extra `textarena`."""

import contextlib
import functools
import importlib
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from podium.config.errors import suggestion
from podium.tasks.conversation import Reply, Turn
from podium.tasks.games.generated import PaidByEnvironment
from podium.tasks.task import Count, Prompt, TaskSource

PLAYER = 0
OWN_ANSWER = "PLAYER_ACTION"
"""Observation type of messages that repeat what a player said."""


class _Game(Protocol):
    """A game of TextArena."""

    def reset(self, *, num_players: int, seed: int) -> object: ...

    def get_observation(self) -> tuple[int, Sequence[tuple[int, object, object]]]: ...

    def step(self, *, action: str) -> tuple[bool, object]: ...

    def close(self) -> tuple[Mapping[int, object] | None, Mapping[int, Mapping[str, object]]]: ...


class TextArena(PaidByEnvironment):
    """TextArena's single-player games: `tasks: [{name: textarena:GuessTheNumber-v0}]`.

    The reward is the game's own, from 0 to 1 for most games; it is 0 if a limit ended the game. `config` holds the
    game's arguments. Each prompt has its own seed; evaluation uses different seeds from training.
    """

    game: ClassVar[str]
    """Name of the game."""
    system_prompt: str | None = None

    def __init__(
        self,
        source: TaskSource,
        *,
        episodes: Count = 1000,
        eval_episodes: Count = 100,
        config: dict[str, object] | None = None,
    ) -> None:
        source.refuse(f"textarena:{self.game}")
        self.episodes, self.eval_episodes = episodes, eval_episodes
        self._make = functools.partial(_made, self.game, config or {})
        try:
            Playing(self._make, 0).begin()
        except Exception as error:
            lines = (line.strip() for line in str(error).splitlines())
            why = next((line for line in lines if re.search(r"\w", line)), type(error).__name__)
            raise ValueError(
                f"textarena:{self.game} cannot be started with one player: {why}; some games need several players,"
                " others download words with nltk when they are first created"
            ) from error

    def prompts(self, split: str) -> Sequence[Prompt]:
        """One prompt per game; the game itself states its rules when it starts."""
        count = self.eval_episodes if split == "eval" else self.episodes
        return [Prompt(id=f"textarena/{self.game}/{split}/{number}", question="", answer="") for number in range(count)]

    def open(self, prompt: Prompt, seed: int) -> "Playing":
        """A game."""
        return Playing(self._make, random.Random(f"{prompt.id} {seed}").getrandbits(31))


def textarena_task(game: str) -> type[TextArena]:
    """TextArena's single-player games (extra `textarena`): `tasks: [{name: textarena:GuessTheNumber-v0}]`.

    Raises ValueError if TextArena is not installed, or does not have this game.
    """
    try:
        importlib.import_module("textarena")
        known = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    except ImportError as error:
        raise ValueError("textarena: the package is not installed: pip install 'podium-rl[textarena]'") from error
    if game not in known:
        raise ValueError(f"textarena: unknown game {game!r}; {suggestion(game, known)}")
    return type(TextArena.__name__, (TextArena,), {"game": game, "__doc__": TextArena.__doc__})


def _made(game: str, config: Mapping[str, object]) -> _Game:
    return importlib.import_module("textarena").make(game, **config)


_TURN = threading.Lock()


class Playing:
    """A game that is being played.

    TextArena's games draw from Python's global generator. Each conversation has its own generator state, and the
    conversations of a process take turns, so that a game depends only on its seed and the answers.
    """

    def __init__(self, make: "functools.partial[_Game]", seed: int) -> None:
        self._seed = seed
        self._random: tuple[object, ...] = random.Random(seed).getstate()
        with self._own_random():
            self._game = make()
        # keep wrappers of actions; wrappers of observations would repeat the whole conversation
        wrapper: type = importlib.import_module("textarena").Wrapper
        inner: Any = self._game
        while isinstance(inner, wrapper):
            inner = inner.env
        self._inner: _Game = inner

    def begin(self) -> str:
        """The game's first message."""
        with self._own_random():
            self._game.reset(num_players=1, seed=self._seed)
            return self._said()

    def reply(self, turn: Turn) -> Reply:
        """Pass an answer to the game and return the game's reply."""
        with self._own_random():
            done, _ = self._game.step(action=turn.text)
            said = self._said()
        if done:
            _, ended = self._inner.close()
            said = "\n".join(filter(None, (said, str(ended[PLAYER].get("reason", "")))))
        return Reply(messages=({"role": "user", "content": said or "It is your turn."},), done=bool(done))

    def grade(self) -> float:
        """The game's reward; 0 if it has not ended, or if its reward is text, as some games return after an invalid
        move.
        """
        rewards, _ = self._inner.close()
        reward = (rewards or {}).get(PLAYER)
        return float(reward) if isinstance(reward, int | float) else 0.0

    def _said(self) -> str:
        """What the game has said since it was last asked, without the player's own answers."""
        _, messages = self._inner.get_observation()
        said = (text for _, text, kind in messages if getattr(kind, "name", "") != OWN_ANSWER)
        return "\n".join(text.strip() for text in said if isinstance(text, str))  # some games swap arguments

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        with _TURN:
            others = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(others)
