"""Holds conversations: submits turns to the engine, passes them to environments, and takes their replies. No jax."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from podium.models.text.chat_format import Message
from podium.observe.stats import EnvironmentStats
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Completion, Key, SamplingParams, StopReason
from podium.rollout.transcript import Transcript, transcript_of
from podium.sampling.conversations.environment_client import EnvironmentClient
from podium.sampling.conversations.episode import Episode
from podium.sampling.conversations.live import Live
from podium.sampling.conversations.replay import turn_of
from podium.sampling.conversations.turns import AskingError, Turns
from podium.tasks.conversation import Asking, Reply, ToolRun, call_id
from podium.tasks.conversations.conversing import Answered
from podium.tasks.conversations.tool_calls import Calls

OnEpisodes = Callable[[int, list[Episode]], None]
"""Called with a prompt's index and its episodes as soon as all of them have ended."""


class Made:
    """Collects the episodes of prompts as they end."""

    def __init__(self, prompts: int, completions: int, on_episodes: OnEpisodes) -> None:
        """Start empty; `completions` episodes are expected for each prompt."""
        self.ended: list[dict[int, Episode]] = [{} for _ in range(prompts)]
        """Ended episodes of each prompt, by index within the prompt."""
        self.left: list[dict[int, Episode]] = [{} for _ in range(prompts)]
        """Unfinished episodes of each prompt that are left for the next call."""
        self._completions, self._on_episodes = completions, on_episodes

    @property
    def complete(self) -> list[bool]:
        """Whether all episodes of each prompt have ended."""
        return [self.has_all(index) for index in range(len(self.ended))]

    @property
    def episodes(self) -> list[list[Episode]]:
        """All episodes of each prompt, in order."""
        found = [ended | left for ended, left in zip(self.ended, self.left, strict=True)]
        return [[each[sample] for sample in sorted(each)] for each in found]

    def has_all(self, index: int) -> bool:
        """Whether all episodes of a prompt have ended."""
        return len(self.ended[index]) == self._completions

    def add(self, index: int, sample: int, episode: Episode) -> None:
        """Add an episode that has ended."""
        self.ended[index][sample] = episode
        if self.has_all(index):
            self._on_episodes(index, self.episodes[index])


@dataclasses.dataclass(kw_only=True)
class Counted:
    """What a call of `Episodes.hold` counts."""

    failures: list[tuple[int, int, int, str]] = dataclasses.field(default_factory=list)
    """For each failure: prompt, index of the conversation within the prompt, attempt, and reason."""
    reply_s: list[float] = dataclasses.field(default_factory=list)
    begin_s: list[float] = dataclasses.field(default_factory=list)
    ran: list[ToolRun] = dataclasses.field(default_factory=list)
    unread_calls: int = 0
    extend_tokens: int = 0
    changed: int = 0
    moved: int = 0

    def stats(self, *, idle_s: float) -> EnvironmentStats:
        """Convert the counts to statistics of a step, with failures in the order of prompts."""
        return EnvironmentStats(
            failures=tuple(text for *_, text in sorted(self.failures)),
            changed=self.changed,
            moved=self.moved,
            reply_s=tuple(self.reply_s),
            begin_s=tuple(self.begin_s),
            ran=tuple(self.ran),
            unread_calls=self.unread_calls,
            extend_tokens=self.extend_tokens,
            idle_s=idle_s,
        )


class Conversations:
    """The conversations and single answers about some prompts, from their first turn to their end."""

    def __init__(
        self, engine: RolloutEngine, client: EnvironmentClient, turns: Turns, made: Made, *, own: range, retries: int
    ) -> None:
        """Does not begin any conversation yet.

        Args:
            engine: decodes the turns.
            client: talks to the environments.
            turns: makes the turns of these prompts.
            made: receives the episodes that have ended.
            own: the prompts whose new environments are opened on this host.
            retries: how often a failed conversation is restarted.
        """
        self.engine, self.client, self.turns, self.made = engine, client, turns, made
        self._own, self._retries = own, retries
        self.keys: dict[Key, Live] = {}
        """Conversations that are in the engine, by key."""
        self.single: dict[int, int] = {}
        """Index of the prompt of each request that is answered once."""
        self.beginning: dict[int, dict[int, Live]] = {}
        """Conversations that have begun and are waiting for others of their prompt to begin, by prompt."""
        self.counted = Counted()

    def led(self, index: int) -> bool:
        """Whether programs lead the conversations about a prompt."""
        return self.client.environments.led(self.turns.prompts[index].prompt.task)

    # Submit.

    def ask_once(self, index: int, begun: Mapping[int, Completion]) -> None:
        """Submit a prompt that is answered once, with the tokens sampled so far."""
        self.single[self.engine.submit(self.turns.single_request(index, begun))] = index

    def begin(self, live: Live) -> None:
        """Begin a conversation with a new environment."""
        live.began = time.monotonic()
        self.open(live)

    def open(self, live: Live) -> None:
        """Open a new environment for a conversation."""
        self.client.open(live, self.turns.prompts[live.index], here=live.index in self._own)

    def submit(
        self,
        lives: Sequence[Live],
        prompt: tuple[int, ...],
        ledgers: Mapping[int, tuple[int, ...]],
        begun: Mapping[int, Completion] | None = None,
    ) -> None:
        """Submit turns of a prompt's conversations that are not in the engine; arguments as in `Request`."""
        request = self.turns.request(lives[0], prompt, ledgers, begun or {})
        number = self.engine.submit(request)
        for live in lives:
            live.key = Key(number, live.sample)
            self.keys[live.key] = live

    def submit_turn(self, live: Live, tokens: tuple[int, ...]) -> None:
        """Submit a turn after these tokens, none of which are in the engine."""
        self.submit([live], tokens[:1], {live.sample: tokens})

    def _submit_begun(self, index: int) -> None:
        """Submit a prompt's conversations once all have begun; those that begin with the same tokens are submitted
        together.
        """
        waiting = self.beginning[index]
        if len(waiting) + len(self.made.ended[index]) < self.turns.completions:
            return
        del self.beginning[index]
        alike: dict[tuple[tuple[int, ...], SamplingParams], list[Live]] = {}
        for _, live in sorted(waiting.items()):
            assert live.tokens is not None
            alike.setdefault((live.tokens, self.turns.sampling_of(live, len(live.tokens))), []).append(live)
        for lives in alike.values():
            self._submit_first(lives)

    def _submit_first(self, lives: Sequence[Live]) -> None:
        """Submit conversations that begin with the same tokens."""
        tokens = lives[0].tokens
        assert tokens is not None
        for live in lives:
            transcript = Transcript().add_prompt(tokens)
            live.episode = dataclasses.replace(live.episode, transcript=transcript, state="drawing")
        every = len(lives) == self.turns.completions
        self.submit(lives, tokens, {} if every else {live.sample: tokens for live in lives})

    # Reply.

    def take_turn(self, key: Key, completion: Completion) -> None:
        """Pass a turn that has ended to its environment."""
        index = self.single.get(key.request)
        if index is not None:
            self._take_single(key, index, completion)
            return
        live = self.keys[key]
        asking, number = live.episode.asking, len(live.episode.turn_rewards)
        cut = completion.finish_reason == "length"
        read = self.turns.dialogue_of(live).read(
            completion.text,
            completion.tokens.tolist(),
            before=live.episode.transcript.spans[-1].tokens.tolist(),
            begun=self.turns.begun(live),
            cut=cut,
        )
        if asking is not None and not asking.parallel:
            read = read._replace(calls=read.calls[:1])
        live.episode = live.episode.answered(completion, _answer(number, completion.text, read))
        self.counted.unread_calls += bool(read.problem)
        if cut and asking is None:
            self._finish(live, self.turns.why_cut(live))
            return
        most = self.turns.limits.max_tool_calls
        if most is not None and live.episode.calls > most:
            self._finish(live, "calls")
            return
        turn = turn_of(number, completion.text, read)
        if asking is not None:
            turn = dataclasses.replace(
                turn,
                tokens=tuple(completion.tokens.tolist()),
                logprobs=tuple(completion.sampled_logprobs.tolist()),
                unread=self.turns.dialogue_of(live).unread(asking.options),
                cut=cut,
                read=live.episode.transcript.segments[-1].num_tokens - len(completion.tokens),
            )
        if live.replay is None:
            self.client.say(live, turn)
        else:  # the end of the replay reports it
            self.client.asked(live)

    def take_answer(self, live: Live, answered: Answered) -> None:
        """Continue a conversation whose environment has answered."""
        live.due = None
        match answered.kind:
            case "opened":
                self.counted.begin_s.append(answered.seconds)
                assert answered.value is None or isinstance(answered.value, str | Asking)
                self._opened(live, answered.value)
            case "replied":
                assert isinstance(answered.value, Reply)
                self.counted.reply_s.append(answered.seconds)
                self.counted.ran += answered.value.ran
                self._replied(live, answered.value)
            case "graded":
                assert answered.value is None or isinstance(answered.value, float)
                del self.client.live[live.number]
                self._add(live, live.episode.over(answered.value, answered.environment))
            case "failed":
                self.failed(live, str(answered.value), apart=answered.apart)
            case "lost":
                raise AssertionError("a lost process is handled when the message is received")

    def _opened(self, live: Live, first: str | Asking | None) -> None:
        """Handle that a conversation's environment has begun; submit the conversation with the others of its prompt."""
        try:
            self.turns.set_prompt(live, first)
        except AskingError as error:
            self.failed(live, str(error))
            return
        waiting = self.beginning.get(live.index)
        if waiting is None:  # a second attempt
            self._submit_first([live])
            return
        waiting[live.sample] = live
        self._submit_begun(live.index)

    def _replied(self, live: Live, reply: Reply) -> None:
        """Begin the next turn, unless the conversation ends."""
        live.episode = live.episode.paid(reply.reward)
        if reply.done:
            live.episode = live.episode.saying(self.turns.fitting(self.turns.dialogue_of(live), reply.messages))
            self._finish(live, live.episode.transcript.finish_reason or "stop")
            return
        try:
            following = self.turns.following(live, reply)
        except ValueError as error:  # the template rejects the messages, or token ids do not exist
            self.failed(live, str(error))
            return
        new, whole = following.tokens, following.whole
        transcript = live.episode.transcript
        tokens = (*transcript.segments[-1].tokens.tolist(), *new)
        reason = self.turns.why_none(live, len(tokens if whole is None else whole))
        if reason is not None:
            self._finish(live, reason)
        elif whole is not None and whole != tokens:
            self.forget_key(live)
            live.episode = dataclasses.replace(live.episode, transcript=transcript.add_segment(whole), state="drawing")
            self.counted.extend_tokens += len(whole)
            self.submit_turn(live, whole)
        else:
            transcript = transcript.add_environment(tuple(new), text=_text_of(transcript.messages[-1:]))
            live.episode = dataclasses.replace(live.episode, transcript=transcript, state="drawing")
            self.counted.extend_tokens += len(new)
            if live.key is None:  # the last step ended before the reply arrived
                self.submit_turn(live, tokens)
            else:
                sampling, seed = self.turns.sampling_of(live, len(tokens)), self.turns.seed(live)
                self.engine.extend(live.key, new, sampling, seed=seed, keep=True)

    # End.

    def _finish(self, live: Live, reason: StopReason) -> None:
        """End the turns of a conversation and ask for its grade."""
        live.episode = live.episode.ending(reason)
        self.forget_key(live)
        if live.replay is None:
            self.client.grade(live)
        else:  # the end of the replay does so
            self.client.asked(live)

    def failed(self, live: Live, why: str, *, apart: bool = False) -> None:
        """Restart a conversation that failed through no fault of the model, or give it up after too many attempts.

        `apart`: it has ended its process, and restarts in a process that runs one call at a time.
        """
        attempt = live.episode.attempt
        self.counted.failures.append((live.index, live.sample, attempt, why))
        live.apart = live.apart or apart
        if attempt < self._retries:
            self.restart(live, attempt + 1)
            return
        self._give_up(live)
        episode = live.episode
        if not episode.transcript.spans:
            given = episode.transcript.add_prompt(live.tokens or self.turns.prompts[live.index].tokens)
            episode = dataclasses.replace(episode, transcript=given)
        self._add(live, episode.ending("failed").over())

    def restart(self, live: Live, attempt: int) -> None:
        """Restart a conversation with a new environment."""
        self._give_up(live)
        again = Episode(state="beginning", attempt=attempt)
        self.begin(Live(index=live.index, sample=live.sample, episode=again, apart=live.apart))

    def forget_key(self, live: Live) -> None:
        """Remove a conversation from the engine."""
        if live.key is not None:
            self.keys.pop(live.key, None)
            self.engine.cancel(live.key)
            live.key = None

    def abandon(self) -> None:
        """End all conversations and requests."""
        for number in self.client.live:
            self.client.drop(number)
        self.client.live.clear()
        requests = {*self.single, *(key.request for key in self.keys)}
        for key in [key for key in self.engine.keys if key.request in requests]:
            self.engine.cancel(key)

    def _give_up(self, live: Live) -> None:
        """Count a conversation as failed, and end it."""
        self.client.drop(live.number)
        del self.client.live[live.number]
        self.forget_key(live)
        self.beginning.get(live.index, {}).pop(live.sample, None)

    def _add(self, live: Live, episode: Episode) -> None:
        """Add an ended episode, and submit the others of its prompt if they were waiting for it."""
        self.made.add(live.index, live.sample, episode)
        if live.index in self.beginning:
            self._submit_begun(live.index)

    def _take_single(self, key: Key, index: int, completion: Completion) -> None:
        transcript = transcript_of(self.turns.prompts[index].tokens, completion)
        self.made.add(index, key.completion, Episode(transcript=transcript))
        if self.made.has_all(index):
            del self.single[key.request]


def _answer(number: int, text: str, read: Calls) -> Message:
    """The model's answer as a message; calls that could be parsed are not part of its content."""
    message: dict[str, object] = {"role": "assistant", "content": read.said if read.calls else text}
    if read.calls:
        message["tool_calls"] = [
            {
                "id": call_id(number, place),
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for place, call in enumerate(read.calls)
        ]
    return message


def _text_of(messages: Sequence[Message]) -> str:
    return "\n".join(str(message.get("content", "")) for message in messages)
