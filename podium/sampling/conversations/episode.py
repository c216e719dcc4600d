"""A conversation or a single answer: what one step hands on to the next, and at last to grading. No jax."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from podium.files import to_json
from podium.rollout.request import Completion, StopReason
from podium.rollout.transcript import Transcript
from podium.tasks.conversation import Asking

State = Literal["beginning", "drawing", "replying", "ending", "ended"]
"""What an episode waits for: for its environment to begin (and for the others of its prompt, which begin together), for
a turn of the model, for a reply, for the final reward; or for nothing."""


class Opening(NamedTuple):
    """The messages from which a conversation goes on: of its prompt, or of the last whole prompt of a program."""

    messages: tuple[Mapping[str, object], ...] = ()
    since: int = 0
    """How many messages of the transcript came before these."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """A conversation or a single answer, as far as it has come. Immutable: methods return what it becomes."""

    transcript: Transcript = dataclasses.field(default_factory=Transcript)
    """Whole turns and replies, and their messages; of a single answer nothing until it has ended."""
    turn_rewards: tuple[float, ...] = ()
    """What the environment paid for each turn; empty for a single answer."""
    final_reward: float | None = None
    """What the environment paid at the end; None: the task grades the last answer."""
    environment: object = None
    """The environment after its end, if a reward function asks for it; not part of a checkpoint."""
    state: State = "ended"
    drawing: Completion | None = None
    """What has been drawn of a turn that has not ended."""
    first: str | None = None
    """What the environment added to the prompt."""
    asking: Asking | None = None
    """What its program asked last. Not part of a checkpoint, since a program is not replayed; nor is the next."""
    opening: Opening = dataclasses.field(default_factory=Opening)
    replies: int = 0
    """Number of turns that the environment has replied to."""
    attempt: int = 0
    """How often it has begun again because its environment failed."""
    seconds: float = 0.0
    """How long it has lasted so far, for `rollout.limits.episode_timeout_s`; 0 without that limit."""

    @property
    def ended(self) -> bool:
        """Whether it has ended, its final reward included."""
        return self.state == "ended"

    @property
    def failed(self) -> bool:
        """Whether it failed through no fault of the model; it then says nothing about the model."""
        return self.transcript.finish_reason == "failed"

    @property
    def first_version(self) -> int | None:
        """Weight version that drew its first token; None: no token yet."""
        drawn = [span.versions for span in self.transcript.drawn]
        drawn += [] if self.drawing is None else [self.drawing.versions]
        return next((int(versions[0]) for versions in drawn if len(versions)), None)

    @property
    def calls(self) -> int:
        """Number of calls of tools in its answers."""
        called = [each.get("tool_calls") for each in self.transcript.messages]
        return sum(len(calls) for calls in called if isinstance(calls, Sequence))

    @property
    def history(self) -> list[Mapping[str, object]]:
        """The messages so far, from the last whole prompt on."""
        return [*self.opening.messages, *self.transcript.messages[self.opening.since :]]

    def saying(self, messages: Sequence[Mapping[str, object]]) -> "Episode":
        """With these messages at its end."""
        said = (*self.transcript.messages, *messages)
        return dataclasses.replace(self, transcript=dataclasses.replace(self.transcript, messages=said))

    def answered(self, completion: Completion, message: Mapping[str, object]) -> "Episode":
        """With a turn of the model, which waits for a reply; `message` is the answer in it."""
        said = (*self.transcript.messages, message)
        return dataclasses.replace(
            self,
            transcript=dataclasses.replace(self.transcript.add_completion(completion), messages=said),
            turn_rewards=(*self.turn_rewards, 0.0),
            state="replying",
        )

    def paid(self, reward: float) -> "Episode":
        """With the reward of its last turn, to which its environment has replied."""
        *earlier, last = self.turn_rewards
        return dataclasses.replace(self, turn_rewards=(*earlier, last + reward), replies=self.replies + 1)

    def ending(self, reason: StopReason) -> "Episode":
        """Without further turns: it waits for its final reward."""
        stopped = dataclasses.replace(self.transcript, finish_reason=reason)
        return dataclasses.replace(self, transcript=stopped, state="ending")

    def over(self, final_reward: float | None = None, environment: object = None) -> "Episode":
        """At its end, without what only a conversation in progress needs."""
        return dataclasses.replace(
            self,
            state="ended",
            final_reward=final_reward,
            environment=environment,
            asking=None,
            opening=Opening(),
            seconds=0.0,
        )

    def replied(self, turn: int, messages: Sequence[Mapping[str, object]], reward: float) -> bool:
        """Whether this is what the environment replied to a turn."""
        said = self.transcript.messages
        answers = [place for place, each in enumerate(said) if each["role"] == "assistant"]
        given = said[answers[turn] + 1 : (*answers, len(said))[turn + 1]]
        return to_json({"": given}) == to_json({"": messages}) and self.turn_rewards[turn] == reward
