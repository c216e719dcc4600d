"""Replays a conversation to a newly opened environment by sending the model's earlier answers again. No jax.

An environment is lost if the run was resumed, if another host held it, or if its process ended. Its conversation
continues only if the new environment gives the same answers.
"""

import dataclasses
from collections.abc import Sequence

from podium.models.text.chat_format import Message
from podium.rollout.transcript import Transcript
from podium.sampling.conversations.dialogue import Dialogue
from podium.sampling.conversations.episode import Episode
from podium.tasks.conversation import Reply, Turn, call_id
from podium.tasks.conversations.conversing import Answered
from podium.tasks.conversations.tool_calls import Calls

CHANGED = (
    "an environment must depend only on its prompt, its seed and the answers (docs/carry-over.md); if that is "
    "impossible, set rollout.in_flight to 1"
)


@dataclasses.dataclass(kw_only=True, eq=False)
class Replay:
    """A resumed conversation whose earlier answers are sent again to a newly opened environment."""

    episode: Episode
    """The conversation before the replay."""
    dialogue: Dialogue
    moved: bool = False
    """Whether the process was lost during the run. Then the conversation may be waiting for a turn of the model, and if
    the new environment answers differently, it restarts without counting as failed."""
    told: int = 0
    """Number of answers sent so far."""

    def change(self, answered: Answered, messages: Sequence[Message]) -> str | None:
        """Describe how the environment's answer differs from its earlier one; None if they are equal.

        `messages` are the reply's messages, cut to the limit.
        """
        if isinstance(answered.value, Reply):
            same = self.episode.replied(self.told - 1, messages, answered.value.reward)
            what = f"its reply to answer {self.told}"
        elif answered.kind == "opened":
            same = answered.value == self.episode.first
            what = "its first message"
        else:
            same = answered.value == self.episode.final_reward
            what = "its final reward"
        return None if same else f"{what} differs from before the run was resumed: {CHANGED}"

    def next_turn(self) -> Turn | None:
        """The next answer to send; None if the environment has replied to all."""
        if self.told == self.episode.replies:
            return None
        self.told += 1
        return self.turn(self.told - 1, self.episode.transcript)

    def turn(self, number: int, transcript: Transcript) -> Turn:
        """The model's answer number `number` in a transcript, as it was sent to the environment."""
        spans = transcript.spans
        place = [place for place, span in enumerate(spans) if span.drawn][number]
        span, before = spans[place], spans[place - 1].tokens.tolist()
        return turn_of(number, span.text, self.dialogue.read(span.text, span.tokens.tolist(), before=before))


def turn_of(number: int, text: str, read: Calls) -> Turn:
    """An answer of the model in the form that environments receive."""
    calls = tuple(dataclasses.replace(each, id=call_id(number, place)) for place, each in enumerate(read.calls))
    return Turn(text=text, number=number, calls=calls, problem=read.problem, said=read.said)
