"""Carries conversations over calls of `Episodes.hold`: sets them aside, continues them, and replays them. No jax.

If an environment no longer exists, because the run was resumed or another host held it, a new one is opened with the
same seed, and is sent the model's earlier answers. If it replies differently, the conversation has failed and restarts.
The same happens at once to conversations whose process was lost through no fault of theirs; they do not count as
failed, so if the new environment replies differently they restart as often as necessary. Programs are not replayed:
their conversations restart.
"""

import dataclasses
import time
from collections.abc import Sequence

from podium.rollout.engine import OnPoll
from podium.rollout.request import Key, SamplingParams
from podium.sampling.conversations.conversations import Conversations
from podium.sampling.conversations.environment_client import Place
from podium.sampling.conversations.episode import Episode
from podium.sampling.conversations.live import Live
from podium.sampling.conversations.replay import Replay
from podium.tasks.conversation import Reply
from podium.tasks.conversations.conversing import Answered


class Carry:
    """The conversations of one call that began in earlier calls, or that continue in the next one."""

    def __init__(self, talks: Conversations) -> None:
        """`talks` must not have begun."""
        self._talks, self._client, self._turns, self._made = talks, talks.client, talks.turns, talks.made
        self._open, self._kept = dict[Place, int](), dict[Place, object]()
        """Values of `EnvironmentClient.aside` and `kept` from the last call that carried conversations."""

    # Continue.

    def begin(self, begun: Sequence[Sequence[Episode]] | None, on_poll: OnPoll) -> None:
        """Begin or continue all conversations; arguments as in `Episodes.hold`."""
        client = self._client
        client.begin()
        if begun is not None:
            self._open, client.aside = client.aside, {}
            self._kept, client.kept = client.kept, {}
        for index in range(len(self._turns.prompts)):
            self._begin_prompt(index, [] if begun is None else begun[index])
        for number in self._open.values():  # another host holds these from now on
            client.drop(number)
        self._open = {}
        while any(live.replay is not None for live in client.live.values()):
            on_poll()
            for live, answered in client.receive(client.patience):
                self.take(live, answered)
        self._submit_drawing()

    def _begin_prompt(self, index: int, episodes: Sequence[Episode]) -> None:
        """Begin or continue the episodes of a prompt."""
        completions = self._turns.completions
        self._made.ended[index] = {sample: each for sample, each in enumerate(episodes) if each.ended}
        if self._made.has_all(index):  # graded already, waiting for a step
            return
        if self._turns.dialogue(index) is None:
            drawings = {sample: each.drawing for sample, each in enumerate(episodes) if each.drawing is not None}
            self._talks.ask_once(index, drawings)
            return
        if all(each.state == "beginning" or each.failed for each in episodes):
            self._talks.beginning[index] = {}
        for sample in range(completions):
            if not episodes:
                self._talks.begin(Live(index=index, sample=sample))
            elif not episodes[sample].ended:
                self._go_on(Live(index=index, sample=sample, episode=episodes[sample]))
            elif not (episodes[sample].failed or self._talks.led(index)):
                self._find_environment(Live(index=index, sample=sample, episode=episodes[sample]))

    def _go_on(self, live: Live) -> None:
        """Continue a conversation, with its environment if it is still open."""
        client, episode = self._client, live.episode
        number = self._open.pop(self._place(live), None)
        if number is None and (episode.state == "beginning" or self._talks.led(live.index)):
            live.episode = Episode(state="beginning", attempt=episode.attempt)
            self._talks.begin(live)
            return
        if episode.asking is not None:
            live.tokens = tuple(episode.transcript.prompt.tolist())
        elif episode.state != "beginning":
            self._turns.set_prompt(live, episode.first)
        if number is None:
            self._reopen(live, episode)
            return
        live.number = number
        client.live[number] = live
        if episode.state != "drawing":
            client.asked(live)
        early = client.early.get(number)
        if early is not None and early.kind == "lost":
            self._lost(live, early)

    def _find_environment(self, live: Live) -> None:
        """Restore the environment of an ended conversation, if a reward function needs it."""
        if not self._client.environments.keeps(self._turns.prompts[live.index].prompt.task):
            return
        ended = self._made.ended[live.index]
        if (place := self._place(live)) in self._kept:
            ended[live.sample] = dataclasses.replace(live.episode, environment=self._kept[place])
            return
        del ended[live.sample]
        self._turns.set_prompt(live, live.episode.first)
        self._reopen(live, live.episode)

    def _submit_drawing(self) -> None:
        """Submit the turns that the last step left unfinished; a prompt's turns with equal continuations are submitted
        together.
        """
        alike: dict[tuple[int, tuple[int, ...], int, SamplingParams], list[Live]] = {}
        for live in sorted(self._client.live.values(), key=lambda live: live.place):
            if live.episode.state == "drawing":
                segments = live.episode.transcript.segments
                tokens, whole = live.tokens, tuple(segments[-1].tokens.tolist())
                assert tokens is not None, "the conversation's environment has begun"
                prompt = tokens if len(segments) == 1 else whole[:1]
                turn, sampling = len(live.episode.turn_rewards), self._turns.sampling_of(live, len(whole))
                alike.setdefault((live.index, prompt, turn, sampling), []).append(live)
        for (_, prompt, _, _), lives in alike.items():
            ledgers = {live.sample: tuple(live.episode.transcript.segments[-1].tokens.tolist()) for live in lives}
            drawings = {live.sample: each for live in lives if (each := live.episode.drawing) is not None}
            self._talks.submit(lives, prompt, ledgers, drawings)
            for live in lives:
                live.episode = dataclasses.replace(live.episode, drawing=None)

    # Put aside.

    def put_aside(self) -> None:
        """Take sampled tokens out of the engine, and record what continues in the next call."""
        talks, client, made = self._talks, self._client, self._made
        drawing = [live for live in client.live.values() if live.episode.state == "drawing"]
        keys = [live.key for live in drawing if live.key is not None]
        for request, index in talks.single.items():
            samples = range(self._turns.completions)
            keys += [Key(request, sample) for sample in samples if sample not in made.ended[index]]
        for key, completion in talks.engine.withdraw(keys).items():
            if completion.finish_reason is not None:
                talks.take_turn(key, completion)
            elif (live := talks.keys.get(key)) is not None:
                live.episode = dataclasses.replace(live.episode, drawing=completion)
            else:
                single = Episode(state="drawing", drawing=completion)
                made.left[talks.single[key.request]][key.completion] = single
        for live in client.live.values():
            made.left[live.index][live.sample] = self._left(live)
        client.live.clear()
        for index, ended in enumerate(made.ended):
            for sample, episode in ended.items():
                if episode.environment is not None and not made.has_all(index):
                    place = self._turns.prompts[index].number, sample, episode.attempt
                    client.kept[place] = episode.environment
                ended[sample] = dataclasses.replace(episode, environment=None)

    def _left(self, live: Live) -> Episode:
        """The episode of an unfinished conversation; its environment stays open."""
        self._talks.forget_key(live)
        if live.replay is None:
            self._client.aside[self._place(live)] = live.number
        else:  # the next call replays it first
            self._client.drop(live.number)
        episode = live.episode
        if episode.state != "beginning":
            timed = self._turns.limits.episode_timeout_s is not None
            return dataclasses.replace(episode, seconds=time.monotonic() - live.began if timed else 0.0)
        if live.tokens is not None:  # begun, and waiting for the prompt's other conversations
            self._client.early[live.number] = Answered(live.number, "opened", episode.asking or episode.first)
        return Episode(state="beginning", attempt=episode.attempt)

    def abandon(self) -> None:
        """End all conversations and requests."""
        self._talks.abandon()
        for number in self._open.values():
            self._client.drop(number)

    def _place(self, live: Live) -> Place:
        return self._turns.prompts[live.index].number, live.sample, live.episode.attempt

    # Replay.

    def take(self, live: Live, answered: Answered) -> None:
        """Continue a conversation whose environment has answered or was lost."""
        if answered.kind == "lost":
            self._lost(live, answered)
        elif live.replay is not None:
            self._take_replay(live, live.replay, answered)
        else:
            self._talks.take_answer(live, answered)

    def _reopen(self, live: Live, episode: Episode, *, moved: bool = False) -> None:
        """Open a new environment for a conversation, and replay the earlier answers to it."""
        dialogue = self._turns.dialogue(live.index)
        assert dialogue is not None, "single answers have no environment"
        live.replay = Replay(episode=episode, dialogue=dialogue, moved=moved)
        self._talks.open(live)

    def _lost(self, live: Live, answered: Answered) -> None:
        """Continue a conversation whose process was lost, without evidence that the conversation caused it."""
        self._talks.counted.moved += 1
        live.apart = live.apart or answered.apart
        replay, live.replay = live.replay, None
        self._client.early.pop(live.number, None)
        if self._talks.led(live.index):
            self._talks.restart(live, live.episode.attempt)
            return
        del self._client.live[live.number]
        due = live.due
        if replay is not None:
            self._reopen(live, replay.episode, moved=replay.moved)
        elif live.tokens is None:  # it has not begun
            self._talks.begin(live)
        else:
            self._reopen(live, live.episode, moved=True)
        live.due = due

    def _take_replay(self, live: Live, replay: Replay, answered: Answered) -> None:
        """Compare an environment's answer with its earlier one, and send it the next turn."""
        due, live.due = live.due, None
        if answered.kind == "failed":
            live.replay = None
            self._talks.failed(live, str(answered.value), apart=answered.apart)
            return
        reply = answered.value
        messages = self._turns.fitting(replay.dialogue, reply.messages) if isinstance(reply, Reply) else []
        change = replay.change(answered, messages)
        if change is not None:
            live.replay = None
            if replay.moved:
                self._talks.restart(live, live.episode.attempt)
            else:
                self._talks.counted.changed += 1
                self._talks.failed(live, change)
        elif answered.kind == "graded":
            del self._client.live[live.number]
            found = dataclasses.replace(replay.episode, environment=answered.environment)
            self._made.add(live.index, live.sample, found)
        elif (turn := replay.next_turn()) is not None:
            self._client.say(live, turn)
        elif replay.episode.ended:
            self._client.grade(live)
        else:
            live.replay = None
            self._wait_again(live, replay)
        if replay.moved:  # the answer is due when it would have been
            live.due = due

    def _wait_again(self, live: Live, replay: Replay) -> None:
        """Repeat the request that the environment had not answered when the run stopped."""
        if live.episode.state == "replying":
            self._client.say(live, replay.turn(live.episode.replies, live.episode.transcript))
        elif live.episode.state == "ending":
            self._client.grade(live)
