"""Holds conversations: the engine decodes turns while environments reply in other processes.

All conversations share the engine's slots. Replies that have arrived are admitted together before the engine's next
step; if all conversations wait for their environments, so does this thread. The tokens sampled in a turn depend on the
run's seed, the prompt, the conversation's index, the turn and the position, but never on when a reply arrived: delays
change only the schedule.

A step that has enough complete prompts interrupts the other conversations (`Episode.state`): sampled tokens are taken
out of the engine and continue in the next call of `hold`, under newer weights, while environments stay open
(`podium.sampling.conversations.conversation_carry`).

A program that leads its conversation (`podium.tasks.conversations.program`) sends messages or tokens. If these continue
the conversation after the last answer, they extend it; any other prompt begins a new segment.

If several hosts decode together, all of them do the same with the same conversations.
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
        """Does not hold any conversation yet.

        Args:
            engine: decodes the turns.
            dialogues: the chat format of each task's conversations; None if the task's prompts are answered once.
            environments: the environments of this host.
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
            prompts: the prompts of the conversations.
            sampling: settings of each turn.
            completions: number of conversations, or single answers, per prompt.
            on_episodes: called with a prompt's index and its episodes as soon as all of them have ended.
            on_poll: called before every step.
            own: the prompts whose new environments are opened on this host; open environments stay where they are.
            begun: in a call that continues where the last such call stopped, each prompt's episodes so far (may be
                empty); None in other calls, which leave set-aside episodes alone.
            enough: called before every step with a flag per prompt that says whether it is complete; returning True
                ends the call early, with unfinished episodes. Unset: continue until all have ended.

        If `on_poll`, `on_episodes` or `enough` raises, all conversations are ended first.
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
