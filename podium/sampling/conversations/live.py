"""A conversation in progress between the engine and its environment. No jax."""

import dataclasses
import time

from podium.rollout.request import Key
from podium.sampling.conversations.episode import Episode
from podium.sampling.conversations.replay import Replay


@dataclasses.dataclass(kw_only=True, eq=False)
class Live:
    """A conversation in progress."""

    index: int
    """Index of the prompt among those that are being answered."""
    sample: int
    """Index of the conversation within its prompt."""
    episode: Episode = dataclasses.field(default_factory=lambda: Episode(state="beginning"))
    """The conversation so far; replaced as it continues."""
    apart: bool = False
    """Whether its environment runs in a process with one call at a time, because it may have ended another process."""
    number: int = -1
    """Number of its environment in `Environments`; each new environment gets a new one."""
    due: int | None = None
    """With `rollout.reproducible`, the engine step in which its environment's answer is accepted; None if no answer is
    awaited."""
    replay: Replay | None = None
    """The replay of its earlier answers to a new environment, while that lasts."""
    key: Key | None = None
    tokens: tuple[int, ...] | None = None
    """Tokens of the prompt, once the environment has begun."""
    began: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.monotonic() - self.episode.seconds

    @property
    def place(self) -> tuple[int, int]:
        """Sort key: prompt, then index within the prompt."""
        return self.index, self.sample
