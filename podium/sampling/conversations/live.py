"""A conversation in progress, while the engine and its environment take turns. No jax."""

import dataclasses
import time

from podium.rollout.request import Key
from podium.sampling.conversations.episode import Episode
from podium.sampling.conversations.replay import Replay


@dataclasses.dataclass(kw_only=True, eq=False)
class Live:
    """A conversation in progress."""

    index: int
    """Index of its prompt among those that are answered."""
    sample: int
    """Index among the prompt's conversations."""
    episode: Episode = dataclasses.field(default_factory=lambda: Episode(state="beginning"))
    """What there is of it; replaced as it goes on."""
    apart: bool = False
    """Whether its environment is held by a process with one call at a time, because it may have ended another one."""
    number: int = -1
    """Its number in `Environments`; another one for each environment that is opened."""
    due: int | None = None
    """The step in which the answer of its environment is taken, if clocks must not decide; None: it was not asked."""
    replay: Replay | None = None
    """Its earlier answers, which its new environment is still told."""
    key: Key | None = None
    tokens: tuple[int, ...] | None = None
    """Tokens of the prompt, once the environment has begun."""
    began: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.monotonic() - self.episode.seconds

    @property
    def place(self) -> tuple[int, int]:
        """Sorts conversations by prompt, and by their index among the prompt's."""
        return self.index, self.sample
