"""A conversation or a single answer, as it is passed from step to step and finally to grading. No jax."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from podium.files import to_json
from podium.rollout.request import Completion, StopReason
from podium.rollout.transcript import Transcript
from podium.tasks.conversation import Asking

State = Literal["beginning", "drawing", "replying", "ending", "ended"]
"""What an episode is waiting for: its environment to begin (and the others of its prompt, because all begin together),
a turn of the model, a reply, the final reward, or nothing."""


class Opening(NamedTuple):
    """The messages that a conversation continues from: its prompt, or a program's last whole prompt."""

    messages: tuple[Mapping[str, object], ...] = ()
    since: int = 0
    """Number of messages in the transcript before these."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """A conversation or a single answer so far. Immutable: methods return the changed episode."""

    transcript: Transcript = dataclasses.field(default_factory=Transcript)
    """Whole turns and replies with their messages; for a single answer, empty until it has ended."""
    turn_rewards: tuple[float, ...] = ()
    """The environment's reward for each turn; empty for a single answer."""
    final_reward: float | None = None
    """The environment's reward at the end; None if the task grades the last answer."""
    environment: object = None
    """The environment after its end, if a reward function asks for it; not part of a checkpoint."""
    state: State = "ended"
    drawing: Completion | None = None
    """The tokens sampled so far of an unfinished turn; None if no turn is in progress."""
    first: str | None = None
    """The text that the environment added to the prompt; None if it added none."""
    asking: Asking | None = None
    """The program's last request. Like the next field, not part of a checkpoint, because programs are not replayed."""
    opening: Opening = dataclasses.field(default_factory=Opening)
    replies: int = 0
    """Number of turns that the environment has replied to."""
    attempt: int = 0
    """Number of restarts because the environment failed."""
    seconds: float = 0.0
    """Duration so far in seconds, for `rollout.limits.episode_timeout_s`; 0 without that limit."""

    @property
    def ended(self) -> bool:
        """Whether the episode has ended and has its final reward."""
        return self.state == "ended"

    @property
    def failed(self) -> bool:
        """Whether the episode failed through no fault of the model; such an episode is not trained on."""
        return self.transcript.finish_reason == "failed"

    @property
    def first_version(self) -> int | None:
        """Weight version that sampled the first token; None if there is no token yet."""
        drawn = [span.versions for span in self.transcript.drawn]
        drawn += [] if self.drawing is None else [self.drawing.versions]
        return next((int(versions[0]) for versions in drawn if len(versions)), None)

    @property
    def calls(self) -> int:
        """Number of tool calls in the answers."""
        called = [each.get("tool_calls") for each in self.transcript.messages]
        return sum(len(calls) for calls in called if isinstance(calls, Sequence))

    @property
    def history(self) -> list[Mapping[str, object]]:
        """The messages so far, starting with the last whole prompt."""
        return [*self.opening.messages, *self.transcript.messages[self.opening.since :]]

    def saying(self, messages: Sequence[Mapping[str, object]]) -> "Episode":
        """Append messages."""
        said = (*self.transcript.messages, *messages)
        return dataclasses.replace(self, transcript=dataclasses.replace(self.transcript, messages=said))

    def answered(self, completion: Completion, message: Mapping[str, object]) -> "Episode":
        """Add a turn of the model and wait for a reply; `message` is the answer in the turn."""
        said = (*self.transcript.messages, message)
        return dataclasses.replace(
            self,
            transcript=dataclasses.replace(self.transcript.add_completion(completion), messages=said),
            turn_rewards=(*self.turn_rewards, 0.0),
            state="replying",
        )

    def paid(self, reward: float) -> "Episode":
        """Add the reward of the last turn, to which the environment has replied."""
        *earlier, last = self.turn_rewards
        return dataclasses.replace(self, turn_rewards=(*earlier, last + reward), replies=self.replies + 1)

    def ending(self, reason: StopReason) -> "Episode":
        """End the turns for this reason, and wait for the final reward."""
        stopped = dataclasses.replace(self.transcript, finish_reason=reason)
        return dataclasses.replace(self, transcript=stopped, state="ending")

    def over(self, final_reward: float | None = None, environment: object = None) -> "Episode":
        """End the episode, and drop what only a conversation in progress needs."""
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
        """Whether the environment's recorded reply to this turn equals these messages and this reward."""
        said = self.transcript.messages
        answers = [place for place, each in enumerate(said) if each["role"] == "assistant"]
        given = said[answers[turn] + 1 : (*answers, len(said))[turn + 1]]
        return to_json({"": given}) == to_json({"": messages}) and self.turn_rewards[turn] == reward
