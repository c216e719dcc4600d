"""Holds conversations: turns are decoded by the engine while environments reply in other processes.

All conversations share the engine's slots. Replies that have come are admitted together before the engine's next step;
when all conversations wait for their environments, so does this thread. A turn's draws depend on the run's seed, the
prompt, the conversation's index, the turn and the position, never on when a reply came: delays change only the
schedule.

A step that has enough complete prompts leaves the other conversations where they are (`Episode.state`): what was drawn
is taken out of the engine and goes on in the next call of `hold`, under newer weights, while environments stay open
(`podium.sampling.conversations.conversation_carry`).

A program that leads its conversation (`podium.tasks.conversations.program`) asks with messages or tokens. What follows
the last answer extends the conversation; any other prompt begins a segment.

Where several hosts decode together, all of them do the same with the same conversations.
"""

from collections.abc import Sequence

from podium.config.schema import EnvironmentsConfig, RolloutConfig
from podium.observe.stats import EnvironmentStats
from podium.rollout.engine import Enough, OnPoll, RolloutEngine
from podium.rollout.request import RolloutStats, SamplingParams
from podium.sampling.conversations.conversation_carry import Carry
from podium.sampling.conversations.conversations import Conversations, Made, OnEpisodes
from podium.sampling.conversations.dialogue import Dialogue
from podium.sampling.conversations.environment_client import EnvironmentClient, Exchange
from podium.sampling.conversations.episode import Episode
from podium.sampling.conversations.turns import Turns
from podium.sampling.feed import EncodedPrompt
from podium.tasks.conversations.environments import Environments


class Episodes:
    """Holds the conversations of a host's prompts."""

    def __init__(
        self,
        engine: RolloutEngine,
        dialogues: Sequence[Dialogue | None],
        environments: Environments,
        rollout: RolloutConfig,
        config: EnvironmentsConfig,
        exchange: Exchange | None = None,
    ) -> None:
        """Hold nothing yet.

        Args:
            engine: decodes.
            dialogues: each task's chat format of conversations; None: its prompts are answered once.
            environments: of this host.
            rollout: limits of conversations.
            config: what happens if environments fail.
            exchange: set if hosts decode together; all hosts must then make the same calls.
        """
        self._engine, self._dialogues, self._rollout = engine, list(dialogues), rollout
        self._retries = config.retries
        self.client = EnvironmentClient(environments, own_seeds=config.group_seed == "own", exchange=exchange)

    def hold(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling: SamplingParams,
        completions: int,
        on_episodes: OnEpisodes,
        on_poll: OnPoll,
        own: slice = slice(None),
        *,
        begun: Sequence[Sequence[Episode]] | None = None,
        enough: Enough | None = None,
    ) -> tuple[list[list[Episode]], RolloutStats, EnvironmentStats]:
        """Hold `completions` conversations about each prompt; returns all episodes in order, and statistics.

        Args:
            prompts: what to talk about.
            sampling: settings of each turn.
            completions: conversations, or single answers, of each prompt.
            on_episodes: called with a prompt's index and its episodes as soon as all of them have ended.
            on_poll: called before every step.
            own: the prompts whose new environments are opened on this host; one that is open stays where it is.
            begun: each prompt's episodes so far, or none, in a call that goes on where the last such call stopped; None
                in other calls, between which those are left alone.
            enough: called before every step with a flag per prompt that says whether it is complete; True returns
                early, with episodes that have not ended. Unset: until all have ended.

        Raises what `on_poll`, `on_episodes` and `enough` raise, after ending all conversations.
        """
        engine, client = self._engine, self.client
        engine.stats()
        made = Made(len(prompts), completions, on_episodes)
        turns = Turns(engine, prompts, self._dialogues, self._rollout, sampling, completions=completions)
        here = range(len(prompts))[own]
        talks = Conversations(engine, client, turns, made, own=here, retries=self._retries)
        carry = Carry(talks)
        paced = enough is not None and self._rollout.reproducible
        try:
            carry.begin(begun, on_poll)
            while not (all(made.complete) if enough is None else enough(made.complete)):
                on_poll()
                for live, answered in client.take(busy=engine.busy, paced=paced, on_poll=on_poll):
                    carry.take(live, answered)
                if engine.busy:
                    engine.step()
                    for key, completion in engine.poll():
                        talks.take_turn(key, completion)
                client.steps += 1
            carry.put_aside()
        except BaseException:
            carry.abandon()
            raise
        return made.episodes, engine.stats(), talks.counted.stats(idle_s=client.idle_s)

    def forget(self) -> None:
        """End the environments of conversations that go on in the next carrying call, which then opens them again."""
        self.client.forget()
