"""A conversation in progress, while the engine and its environment take turns. No jax."""

import dataclasses
import time

from podium.models.chat_format import Message
from podium.rollout.request import Completion, Key, StopReason
from podium.rollout.transcript import Transcript
from podium.tasks.conversation import Asking
from podium.train.episode import Episode, State


@dataclasses.dataclass(kw_only=True, eq=False)
class Live:
    """A conversation in progress."""

    index: int
    """Index of its prompt among those that are answered."""
    sample: int
    """Index among the prompt's conversations."""
    attempt: int = 0
    apart: bool = False
    """Whether its environment is held by a process with one call at a time, because it may have ended another one."""
    state: State = "beginning"
    number: int = -1
    """Its number in `Environments`; another one for each attempt."""
    due: int | None = None
    """The step in which the answer of its environment is taken, if clocks must not decide; None: it was not asked."""
    key: Key | None = None
    first: str | None = None
    """What the environment added to the prompt."""
    asking: Asking | None = None
    """What its program asked last; None: no program leads it."""
    tokens: tuple[int, ...] | None = None
    """Tokens of the prompt, once the environment has begun."""
    before: list[Message] = dataclasses.field(default_factory=list)
    """The messages of the prompt, or of the last whole prompt of a program."""
    messages: list[Message] = dataclasses.field(default_factory=list)
    """Those after the first prompt."""
    since: int = 0
    """How many of these came before `before`."""
    transcript: Transcript = dataclasses.field(default_factory=Transcript)
    drawing: Completion | None = None
    """What had been drawn of its turn when the last step ended."""
    rewards: list[float] = dataclasses.field(default_factory=list)
    replies: int = 0
    calls: int = 0
    began: float = 0.0
    stop: StopReason | None = None

    @classmethod
    def of(cls, episode: Episode, index: int, sample: int) -> "Live":
        """A conversation that goes on."""
        return cls(
            index=index,
            sample=sample,
            attempt=episode.attempt,
            state="ending" if episode.ended else episode.state,
            asking=episode.asking,
            before=list(episode.before),
            since=episode.since,
            messages=list(episode.transcript.messages),
            transcript=episode.transcript,
            drawing=episode.drawing,
            rewards=list(episode.turn_rewards),
            replies=episode.replies,
            calls=episode.calls,
            began=time.monotonic() - episode.seconds,
            stop=episode.transcript.finish_reason,
        )

    @property
    def history(self) -> list[Message]:
        """The conversation so far, from the last whole prompt on."""
        return [*self.before, *self.messages[self.since :]]

    def episode(self, reason: StopReason | None, *, ended: bool = False, timed: bool = False) -> Episode:
        """What there is of it so far; its seconds count only if it is `timed`."""
        return Episode(
            transcript=dataclasses.replace(self.transcript, finish_reason=reason, messages=tuple(self.messages)),
            turn_rewards=tuple(self.rewards),
            state="ended" if ended else self.state,
            drawing=self.drawing,
            first=self.first,
            asking=None if ended else self.asking,
            before=() if ended or self.asking is None else tuple(self.before),
            since=self.since,
            replies=self.replies,
            attempt=self.attempt,
            seconds=time.monotonic() - self.began if timed and not ended else 0.0,
        )
