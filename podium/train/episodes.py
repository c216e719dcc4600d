"""Drives conversations: turns are decoded by the engine while environments reply in other processes.

All conversations share the engine's slots. Replies that have come are admitted together before the engine's next step;
when all conversations wait for their environments, so does this thread. A turn's draws depend on the run's seed, the
prompt, the conversation's index, the turn and the position, never on when a reply came: delays change only the
schedule.

Where several hosts decode together, all of them do the same with the same conversations. Each holds the environments of
its own prompts, and they exchange what environments have answered.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

from podium.config.schema import EnvironmentsConfig, RolloutConfig
from podium.models.chat_format import Message
from podium.observe.stats import EnvironmentStats
from podium.rollout.engine import OnPoll, RolloutEngine
from podium.rollout.request import Completion, Key, Request, RolloutStats, SamplingParams, StopReason
from podium.rollout.transcript import Transcript, transcript_of
from podium.tasks.conversation import Reply, ToolRun, Turn
from podium.tasks.conversing import Answered
from podium.tasks.environments import Environments
from podium.tasks.tool_calls import Calls
from podium.train.dialogue import Dialogue
from podium.train.feed import EncodedPrompt, prompt_messages, request_seed

POLL_S = 0.5
"""Longest wait for environments between calls of `on_poll`."""
POLL_TOGETHER_S = 0.05
"""The same where hosts decode together: each waits for the answers of the others, too."""
STEPS_TOGETHER = 4
"""Engine steps between exchanges of hosts that decode together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """A conversation that has ended, or a single answer."""

    transcript: Transcript
    turn_rewards: tuple[float, ...] = ()
    """What the environment paid for each turn; empty for a single answer."""
    final_reward: float | None = None
    """What the environment paid at the end; None: the task grades the last answer."""
    environment: object = None
    """The environment after its end, if a reward function asks for it."""

    @property
    def failed(self) -> bool:
        """Whether it failed through no fault of the model; it then says nothing about the model."""
        return self.transcript.finish_reason == "failed"


Exchange = Callable[[list[Answered]], list[Answered]]
"""Sends what this host's environments have answered to all hosts; returns the answers of all, in one order."""
OnEpisodes = Callable[[int, list[Episode]], None]
"""Called with a prompt's index and its episodes as soon as all of them have ended."""


@dataclasses.dataclass(kw_only=True, eq=False)
class _Live:
    """A conversation in progress."""

    index: int
    """Index of its prompt among those that are answered."""
    sample: int
    """Index among the prompt's conversations."""
    attempt: int = 0
    number: int = -1
    """Its number in `Environments`; another one for each attempt."""
    key: Key | None = None
    tokens: tuple[int, ...] | None = None
    """Tokens of the prompt, once the environment has begun."""
    before: list[Message] = dataclasses.field(default_factory=list)
    """The prompt's messages."""
    messages: list[Message] = dataclasses.field(default_factory=list)
    """Those after it."""
    transcript: Transcript = dataclasses.field(default_factory=Transcript)
    rewards: list[float] = dataclasses.field(default_factory=list)
    calls: int = 0
    began: float = 0.0
    last: Completion | None = None
    stop: StopReason | None = None


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
        self.engine = engine
        self.exchange = exchange
        self.dialogues = list(dialogues)
        self.environments = environments
        self._rollout = rollout
        self._config = config
        self._numbers = 0

    def hold(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling: SamplingParams,
        completions: int,
        on_episodes: OnEpisodes,
        on_poll: OnPoll,
        own: slice = slice(None),
    ) -> tuple[list[list[Episode]], RolloutStats, EnvironmentStats]:
        """Hold `completions` conversations about each prompt; returns all episodes in order, and statistics.

        `own` are the prompts whose environments are on this host.

        Raises what `on_poll` and `on_episodes` raise, after ending all conversations.
        """
        self.engine.stats()
        rollout = _Rollout(self, prompts, sampling, completions, on_episodes, own)
        try:
            rollout.run(on_poll)
        except BaseException:
            rollout.abandon()
            raise
        return rollout.episodes, self.engine.stats(), rollout.stats

    def new_number(self) -> int:
        """A number that no conversation has had."""
        self._numbers += 1
        return self._numbers


class _Rollout:
    """One call of `Episodes.hold`."""

    def __init__(
        self,
        owner: Episodes,
        prompts: Sequence[EncodedPrompt],
        sampling: SamplingParams,
        completions: int,
        on_episodes: OnEpisodes,
        own: slice,
    ) -> None:
        self._own = range(len(prompts))[own]
        self._steps = 0
        self._owner, self._engine, self._environments = owner, owner.engine, owner.environments
        self._limits, self._longest = owner._rollout.limits, owner._rollout.longest
        self._prompts, self._sampling, self._completions = list(prompts), sampling, completions
        self._on_episodes = on_episodes
        self._live: dict[int, _Live] = {}
        """Conversations by their number in `Environments`."""
        self._keys: dict[Key, _Live] = {}
        self._single: dict[int, int] = {}
        """Index of the prompt of each request that is answered once."""
        self._beginning: dict[int, dict[int, _Live]] = {}
        """Conversations that have begun, of prompts of which others have not."""
        self._made: list[dict[int, Episode]] = [{} for _ in prompts]
        self._failures: list[tuple[int, int, int, str]] = []
        self._reply_s: list[float] = []
        self._begin_s: list[float] = []
        self._ran: list[ToolRun] = []
        self._unread_calls = self._extend_tokens = 0
        self._idle_s = 0.0

    @property
    def episodes(self) -> list[list[Episode]]:
        """The episodes of each prompt, by index."""
        return [[made[sample] for sample in sorted(made)] for made in self._made]

    @property
    def stats(self) -> EnvironmentStats:
        """What was counted."""
        return EnvironmentStats(
            failures=tuple(text for *_, text in sorted(self._failures)),
            reply_s=tuple(self._reply_s),
            begin_s=tuple(self._begin_s),
            ran=tuple(self._ran),
            unread_calls=self._unread_calls,
            extend_tokens=self._extend_tokens,
            idle_s=self._idle_s,
        )

    def run(self, on_poll: OnPoll) -> None:
        """Hold all conversations to their ends."""
        for index, prompt in enumerate(self._prompts):
            if self._dialogue(index) is None:
                request = Request(
                    prompt=prompt.tokens, sampling=self._sampling, seed=prompt.seed, completions=self._completions
                )
                self._single[self._engine.submit(request)] = index
                continue
            self._beginning[index] = {}
            for sample in range(self._completions):
                self._begin(_Live(index=index, sample=sample))
        while self._live or self._single:
            on_poll()
            self._take_answers()
            if self._engine.busy:
                self._steps += 1
                self._engine.step()
                for key, completion in self._engine.poll():
                    self._take_turn(key, completion)

    def abandon(self) -> None:
        """End all conversations and requests."""
        for live in self._live.values():
            self._environments.drop(live.number)
        requests = {*self._single, *(key.request for key in self._keys)}
        for key in [key for key in self._engine.keys if key.request in requests]:
            self._engine.cancel(key)
        self._live.clear()

    # Environments.

    def _begin(self, live: _Live) -> None:
        prompt, own = self._prompts[live.index], self._owner._config.group_seed == "own"
        live.number = self._owner.new_number()
        live.began = time.monotonic()
        self._live[live.number] = live
        seed = request_seed(prompt.seed, "environment", live.sample if own else 0)
        if live.index in self._own:
            self._environments.open(live.number, prompt.prompt.task, prompt.prompt.prompt, seed)

    def _take_answers(self) -> None:
        """Take what environments have answered; waits for one if the engine has nothing to do."""
        exchange, idle = self._owner.exchange, not self._engine.busy
        if exchange is not None and not idle and self._steps % STEPS_TOGETHER:
            return
        wait_s = 0.0 if not idle else POLL_S if exchange is None else POLL_TOGETHER_S
        start = time.perf_counter()
        found: list[Answered] = []
        while (answered := self._environments.next(wait_s)) is not None:
            wait_s = 0.0
            found.append(answered)
        if exchange is not None:
            found = exchange(found)
        if idle:
            self._idle_s += time.perf_counter() - start
        for answered in found:
            live = self._live.get(answered.number)
            if live is not None:
                self._take_answer(live, answered)

    def _take_answer(self, live: _Live, answered: Answered) -> None:
        match answered.kind:
            case "opened":
                self._begin_s.append(answered.seconds)
                assert answered.value is None or isinstance(answered.value, str)
                self._opened(live, answered.value)
            case "replied":
                assert isinstance(answered.value, Reply)
                self._reply_s.append(answered.seconds)
                self._ran += answered.value.ran
                self._replied(live, answered.value)
            case "graded":
                assert answered.value is None or isinstance(answered.value, float)
                self._end(live, answered.value, answered.environment)
            case "failed":
                self._failed(live, str(answered.value))

    def _opened(self, live: _Live, first: str | None) -> None:
        """Submit a conversation whose environment has begun, together with the others of its prompt."""
        prompt, dialogue = self._prompts[live.index], self._dialogue(live.index)
        assert dialogue is not None, "single answers have no environment"
        live.before = list(prompt_messages(prompt.prompt))
        live.tokens = prompt.tokens
        if first is not None:
            if live.before and live.before[-1].get("role") == "user":
                last = live.before[-1]
                live.before[-1] = {**last, "content": f"{last['content']}{first}"}
            else:
                live.before.append({"role": "user", "content": first})
            live.tokens = dialogue.prompt(live.before)
        limit = self._owner._rollout.max_prompt_tokens
        if len(live.tokens) > limit or not live.before:
            what = f"has {len(live.tokens)} tokens and rollout.max_prompt_tokens is {limit}; raise it"
            what = what if live.before else "is empty: reset() must return its first message, or rows hold a prompt"
            raise ValueError(f"prompt {prompt.prompt.prompt.id} with its environment's first message {what}")
        waiting = self._beginning.get(live.index)
        if waiting is None:  # a second attempt
            self._submit(live.index, [live])
            return
        waiting[live.sample] = live
        self._submit_begun(live.index)

    def _submit_begun(self, index: int) -> None:
        """Submit the conversations of a prompt if none of them is still beginning."""
        waiting = self._beginning[index]
        if len(waiting) + len(self._made[index]) < self._completions:
            return
        del self._beginning[index]
        alike: dict[tuple[int, ...], list[_Live]] = {}
        for _, live in sorted(waiting.items()):
            assert live.tokens is not None
            alike.setdefault(live.tokens, []).append(live)
        for lives in alike.values():
            self._submit(index, lives)

    def _submit(self, index: int, lives: list[_Live]) -> None:
        """Submit conversations that begin with the same tokens."""
        tokens = lives[0].tokens
        assert tokens is not None
        every = len(lives) == self._completions
        request = Request(
            prompt=tokens,
            sampling=dataclasses.replace(self._sampling, max_new_tokens=self._first_turn()),
            seed=self._prompts[index].seed,
            completions=self._completions,
            keep=True,
            ledgers={} if every else {live.sample: tokens for live in lives},
        )
        number = self._engine.submit(request)
        for live in lives:
            live.transcript = Transcript().add_prompt(tokens)
            live.key = Key(number, live.sample)
            self._keys[live.key] = live

    def _first_turn(self) -> int:
        """Tokens of a conversation's first turn; a prompt with a whole turn always fits."""
        most = self._limits.max_drawn_tokens
        return self._sampling.max_new_tokens if most is None else min(most, self._sampling.max_new_tokens)

    def _replied(self, live: _Live, reply: Reply) -> None:
        """Begin the next turn, unless the conversation ends."""
        dialogue = self._dialogue(live.index)
        assert dialogue is not None and live.key is not None and live.last is not None
        live.rewards[-1] += reply.reward
        history = [*live.before, *live.messages[:-1]]
        messages = [dialogue.fitting(message, self._limits.max_reply_tokens) for message in reply.messages]
        live.messages += messages
        if reply.done:
            self._finish(live, "stop")
            return
        ended = int(live.last.tokens[-1])
        try:
            new = dialogue.reply(
                messages, history=history, drawn_end=ended if ended in dialogue.tokenizer.eos_tokens else None
            )
            again = self._rendered(live, dialogue, messages)
        except ValueError as error:  # messages of a kind that the template refuses
            self._failed(live, str(error))
            return
        tokens = (*live.transcript.segments[-1].tokens.tolist(), *new)
        room, reason = self._room(live, len(tokens if again is None else again))
        if reason is not None:
            self._finish(live, reason)
            return
        sampling = dataclasses.replace(self._sampling, max_new_tokens=room)
        seed = request_seed(self._prompts[live.index].seed, "turn", len(live.rewards))
        if again is not None and again != tokens:
            self._go_on_from(live, again, sampling, seed)
            return
        live.transcript = live.transcript.add_environment(tuple(new), text=_text_of(messages))
        self._extend_tokens += len(new)
        self._engine.extend(live.key, new, sampling, seed=seed, keep=True)

    def _rendered(self, live: _Live, dialogue: Dialogue, new: Sequence[Message]) -> tuple[int, ...] | None:
        """The conversation as the chat template renders it, where it goes on from that: at the user's messages."""
        segments = self._owner._rollout.thinking == "segment"
        if not segments or not any(message.get("role") == "user" for message in new):
            return None
        return dialogue.prompt([*live.before, *live.messages])

    def _go_on_from(self, live: _Live, tokens: tuple[int, ...], sampling: SamplingParams, seed: int) -> None:
        """Begin a segment with these tokens and the next turn in it."""
        self._drop_key(live)
        live.transcript = live.transcript.add_segment(tokens)
        self._extend_tokens += len(tokens)
        request = Request(
            prompt=tokens[:1],
            sampling=sampling,
            seed=seed,
            completions=self._completions,
            keep=True,
            ledgers={live.sample: tokens},
        )
        live.key = Key(self._engine.submit(request), live.sample)
        self._keys[live.key] = live

    def _room(self, live: _Live, tokens: int) -> tuple[int, StopReason | None]:
        """The next turn's limit of tokens after `tokens` of them, or the reason why there is no next turn."""
        limits = self._limits
        if len(live.rewards) >= limits.max_turns:
            return 0, "turns"
        if limits.episode_timeout_s is not None and time.monotonic() - live.began > limits.episode_timeout_s:
            return 0, "timeout"
        budget = self._sampling.max_new_tokens
        if limits.max_drawn_tokens is not None:
            budget = min(budget, limits.max_drawn_tokens - live.transcript.num_drawn)
        if budget < 1:
            return 0, "drawn"
        room = min(budget, self._longest - tokens)
        return room, "length" if room < 1 else None

    def _failed(self, live: _Live, why: str) -> None:
        """Begin a conversation again that failed through no fault of the model, or give it up."""
        self._failures.append((live.index, live.sample, live.attempt, why))
        self._environments.drop(live.number)
        del self._live[live.number]
        self._drop_key(live)
        if live.attempt < self._owner._config.retries:
            self._begin(_Live(index=live.index, sample=live.sample, attempt=live.attempt + 1))
            return
        transcript = live.transcript
        if not transcript.spans:
            transcript = transcript.add_prompt(live.tokens or self._prompts[live.index].tokens)
        self._add(live, dataclasses.replace(transcript, finish_reason="failed", messages=tuple(live.messages)), None)

    def _finish(self, live: _Live, reason: StopReason) -> None:
        """End the turns of a conversation and ask for its grade."""
        live.stop = reason
        self._drop_key(live)
        if live.index in self._own:
            self._environments.grade(live.number)

    def _end(self, live: _Live, final: float | None, environment: object) -> None:
        """Take a conversation's grade."""
        del self._live[live.number]
        messages = tuple(live.messages)
        transcript = dataclasses.replace(live.transcript, finish_reason=live.stop, messages=messages)
        self._add(live, transcript, final, environment)

    def _add(self, live: _Live, transcript: Transcript, final: float | None, environment: object = None) -> None:
        self._made[live.index][live.sample] = Episode(
            transcript=transcript, turn_rewards=tuple(live.rewards), final_reward=final, environment=environment
        )
        if live.index in self._beginning:
            self._submit_begun(live.index)
        if len(self._made[live.index]) == self._completions:
            self._on_episodes(live.index, self.episodes[live.index])

    def _drop_key(self, live: _Live) -> None:
        if live.key is not None:
            self._keys.pop(live.key, None)
            self._engine.cancel(live.key)
            live.key = None

    # The engine.

    def _take_turn(self, key: Key, completion: Completion) -> None:
        """Pass a turn that has ended to its environment."""
        index = self._single.get(key.request)
        if index is not None:
            self._take_single(key, index, completion)
            return
        live = self._keys[key]
        dialogue = self._dialogue(live.index)
        assert dialogue is not None
        live.transcript = live.transcript.add_completion(completion)
        live.last = completion
        number = len(live.rewards)
        live.rewards.append(0.0)
        read = dialogue.read(completion.text)
        live.messages.append(_answer(number, completion.text, read))
        self._unread_calls += bool(read.problem)
        if completion.finish_reason == "length":
            self._finish(live, self._why_cut(live))
            return
        live.calls += len(read.calls)
        if self._limits.max_tool_calls is not None and live.calls > self._limits.max_tool_calls:
            self._finish(live, "calls")
            return
        turn = Turn(text=completion.text, number=number, calls=read.calls, problem=read.problem)
        if live.index in self._own:
            self._environments.say(live.number, turn)

    def _why_cut(self, live: _Live) -> StopReason:
        """Which limit cut a turn."""
        most = self._limits.max_drawn_tokens
        return "drawn" if most is not None and live.transcript.num_drawn >= most else "length"

    def _take_single(self, key: Key, index: int, completion: Completion) -> None:
        made = self._made[index]
        made[key.completion] = Episode(transcript=transcript_of(self._prompts[index].tokens, completion))
        if len(made) == self._completions:
            del self._single[key.request]
            self._on_episodes(index, self.episodes[index])

    def _dialogue(self, index: int) -> Dialogue | None:
        return self._owner.dialogues[self._prompts[index].prompt.task]


def _answer(number: int, text: str, read: Calls) -> Message:
    """The model's answer as a message; calls that could be read are not part of its content."""
    message: dict[str, object] = {"role": "assistant", "content": read.said if read.calls else text}
    if read.calls:
        message["tool_calls"] = [
            {
                "id": f"call{number:03d}{place:02d}",
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for place, call in enumerate(read.calls)
        ]
    return message


def _text_of(messages: Sequence[Message]) -> str:
    return "\n".join(str(message.get("content", "")) for message in messages)
