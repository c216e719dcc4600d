"""Drives conversations: turns are decoded by the engine while environments reply in other processes.

All conversations share the engine's slots. Replies that have come are admitted together before the engine's next step;
when all conversations wait for their environments, so does this thread. A turn's draws depend on the run's seed, the
prompt, the conversation's index, the turn and the position, never on when a reply came: delays change only the
schedule.

A step that has enough complete prompts leaves the other conversations where they are (`Episode.state`): what was drawn
is taken out of the engine and goes on in the next call of `hold`, under newer weights, while environments stay open. An
environment that no longer exists, because the run was continued or another host held it, is opened again with the same
seed, and gets the model's earlier answers again. If it replies differently, its conversation has failed and restarts.

The same is done at once for conversations whose process was lost through no fault of theirs. They have not failed: one
whose new environment replies otherwise begins again, as often as that happens.

A program that leads its conversation (`podium.tasks.program`) asks with messages or tokens. What follows the last
answer extends the conversation; any other prompt begins a segment. Since programs are not replayed, their conversations
begin again when a run is continued.

With `rollout.reproducible` the schedule of such steps does not depend on clocks: a reply is taken after the same number
of engine steps, however fast it was.

Where several hosts decode together, all of them do the same with the same conversations. Each holds the environments of
its own prompts, and they exchange what environments have answered.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

from podium.config.schema import EnvironmentsConfig, RolloutConfig
from podium.models.chat_format import Message
from podium.observe.stats import EnvironmentStats
from podium.rollout.engine import Enough, OnPoll, RolloutEngine
from podium.rollout.request import Completion, Key, Request, RolloutStats, SamplingParams, StopReason
from podium.rollout.transcript import Transcript, transcript_of
from podium.tasks.conversation import Asking, Reply, ToolRun, Turn, call_id
from podium.tasks.conversing import Answered
from podium.tasks.environments import Environments
from podium.tasks.tool_calls import Calls
from podium.train.dialogue import Dialogue
from podium.train.episode import Episode
from podium.train.feed import EncodedPrompt, request_seed
from podium.train.live import Live
from podium.train.replay import Replay, turn_of
from podium.train.turns import AskingError, Turns

POLL_S = 0.5
"""Longest wait for environments between calls of `on_poll`."""
POLL_TOGETHER_S = 0.05
"""The same where hosts decode together: each waits for the answers of the others, too."""
STEPS_TOGETHER = 4
"""Engine steps between exchanges of hosts that decode together."""
REPLY_STEPS = 2
"""Engine steps from a request to an environment until its answer is taken, where clocks must not decide."""


Exchange = Callable[[list[Answered]], list[Answered]]
"""Sends what this host's environments have answered to all hosts; returns the answers of all, in one order."""
OnEpisodes = Callable[[int, list[Episode]], None]
"""Called with a prompt's index and its episodes as soon as all of them have ended."""


Place = tuple[int, int, int]
"""A conversation of a run: the number of its prompt, its index among the prompt's, and its attempt."""


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
        self.open = dict[Place, int]()
        """Numbers of conversations that go on in the next carrying call, with their environments."""
        self.kept = dict[Place, object]()
        """Environments, for reward functions, of conversations that have ended before others of their prompt."""
        self.early = dict[int, Answered]()
        """Answers of environments that have not been taken yet, by conversation."""

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
        self.engine.stats()
        rollout = _Rollout(self, prompts, sampling, completions, on_episodes, on_poll, own, carries=enough is not None)
        try:
            rollout.begin(begun)
            rollout.run(enough)
        except BaseException:
            rollout.abandon()
            raise
        return rollout.episodes, self.engine.stats(), rollout.stats

    def forget(self) -> None:
        """End the environments of conversations that go on in the next carrying call, which then opens them anew."""
        for number in self.open.values():
            self.environments.drop(number)
        self.open, self.kept, self.early = {}, {}, {}

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
        on_poll: OnPoll,
        own: slice,
        *,
        carries: bool,
    ) -> None:
        self._own = range(len(prompts))[own]
        self._steps = 0
        self._owner, self._engine, self._environments = owner, owner.engine, owner.environments
        self._limits = owner._rollout.limits
        self._prompts, self._sampling, self._completions = list(prompts), sampling, completions
        self._turns = Turns(owner.engine, self._prompts, owner.dialogues, owner._rollout, sampling)
        self._on_episodes, self._on_poll = on_episodes, on_poll
        self._paced = carries and owner._rollout.reproducible
        """Whether answers are taken after a number of steps, and not when they come."""
        self._open, self._kept = dict[Place, int](), dict[Place, object]()
        self._live: dict[int, Live] = {}
        """Conversations by their number in `Environments`."""
        self._replays: dict[int, Replay] = {}
        self._keys: dict[Key, Live] = {}
        self._single: dict[int, int] = {}
        """Index of the prompt of each request that is answered once."""
        self._beginning: dict[int, dict[int, Live]] = {}
        """Conversations that have begun, of prompts of which others have not."""
        self._made: list[dict[int, Episode]] = [{} for _ in prompts]
        """Episodes that have ended."""
        self._left: list[dict[int, Episode]] = [{} for _ in prompts]
        """Episodes that have not ended when the call returns early."""
        self._failures: list[tuple[int, int, int, str]] = []
        self._reply_s: list[float] = []
        self._begin_s: list[float] = []
        self._ran: list[ToolRun] = []
        self._unread_calls = self._extend_tokens = self._changed = self._moved = 0
        self._idle_s = 0.0

    @property
    def episodes(self) -> list[list[Episode]]:
        """The episodes of each prompt, by index."""
        found = [made | left for made, left in zip(self._made, self._left, strict=True)]
        return [[each[sample] for sample in sorted(each)] for each in found]

    @property
    def stats(self) -> EnvironmentStats:
        """What was counted."""
        return EnvironmentStats(
            failures=tuple(text for *_, text in sorted(self._failures)),
            changed=self._changed,
            moved=self._moved,
            reply_s=tuple(self._reply_s),
            begin_s=tuple(self._begin_s),
            ran=tuple(self._ran),
            unread_calls=self._unread_calls,
            extend_tokens=self._extend_tokens,
            idle_s=self._idle_s,
        )

    def begin(self, begun: Sequence[Sequence[Episode]] | None) -> None:
        """Begin all conversations, or let them go on."""
        owner = self._owner
        if begun is not None:
            self._open, owner.open = owner.open, {}
            self._kept, owner.kept = owner.kept, {}
        for index in range(len(self._prompts)):
            self._begin_prompt(index, [] if begun is None else begun[index])
        for number in self._open.values():  # held by another host from now on
            owner.early.pop(number, None)
            self._environments.drop(number)
        self._open = {}
        while self._replays:
            self._on_poll()
            self._receive(self._patience)
        self._submit_drawing()

    def run(self, enough: Enough | None) -> None:
        """Hold all conversations to their ends, or until there is `enough`."""
        while True:
            complete = [len(made) == self._completions for made in self._made]
            if all(complete) if enough is None else enough(complete):
                break
            self._on_poll()
            self._take_answers()
            if self._engine.busy:
                self._engine.step()
                for key, completion in self._engine.poll():
                    self._take_turn(key, completion)
            self._steps += 1
        self._put_down()

    def abandon(self) -> None:
        """End all conversations and requests."""
        for number in {*self._live, *self._open.values()}:
            self._owner.early.pop(number, None)
            self._environments.drop(number)
        requests = {*self._single, *(key.request for key in self._keys)}
        for key in [key for key in self._engine.keys if key.request in requests]:
            self._engine.cancel(key)
        self._live.clear()

    # From step to step.

    def _begin_prompt(self, index: int, episodes: Sequence[Episode]) -> None:
        """Begin the episodes of a prompt, or let them go on."""
        ended = {sample: each for sample, each in enumerate(episodes) if each.ended}
        self._made[index] = ended
        if len(ended) == self._completions:  # they are graded, and wait for a step
            return
        if self._turns.dialogue(index) is None:
            self._ask(index, {sample: each.drawing for sample, each in enumerate(episodes) if each.drawing is not None})
            return
        if all(each.state == "beginning" or each.failed for each in episodes):
            self._beginning[index] = {}
        for sample in range(self._completions):
            if not episodes:
                self._begin(Live(index=index, sample=sample))
            elif not episodes[sample].ended:
                self._go_on(index, sample, episodes[sample])
            elif self._environments.keeps(self._prompts[index].prompt.task) and not (
                episodes[sample].failed or self._is_led(index)
            ):
                self._find_environment(index, sample, episodes[sample])

    def _ask(self, index: int, begun: dict[int, Completion]) -> None:
        """Submit a prompt that is answered once."""
        prompt = self._prompts[index]
        request = Request(
            prompt=prompt.tokens,
            sampling=self._sampling,
            seed=prompt.seed,
            completions=self._completions,
            begun=begun,
        )
        self._single[self._engine.submit(request)] = index

    def _go_on(self, index: int, sample: int, episode: Episode) -> None:
        """Continue a conversation, with its environment if that is still open."""
        live = Live.of(episode, index, sample)
        number = self._open.pop(self._place(live), None)
        if number is None and (episode.state == "beginning" or self._is_led(index)):
            self._begin(Live(index=index, sample=sample, attempt=episode.attempt, apart=live.apart))
            return
        if episode.asking is not None:
            live.tokens = tuple(episode.transcript.prompt.tolist())
        elif episode.state != "beginning":
            self._turns.set_prompt(live, episode.first)
        if number is None:
            self._reopen(live, episode)
            return
        live.number = number
        self._live[number] = live
        if live.state != "drawing":
            self._asked(live)
        early = self._owner.early.get(number)
        if early is not None and early.kind == "lost":
            self._lost(live, early)

    def _find_environment(self, index: int, sample: int, episode: Episode) -> None:
        """Give a conversation that has ended its environment again, for reward functions."""
        live = Live.of(episode, index, sample)
        if (place := self._place(live)) in self._kept:
            self._made[index][sample] = dataclasses.replace(episode, environment=self._kept[place])
            return
        del self._made[index][sample]
        self._turns.set_prompt(live, episode.first)
        self._reopen(live, episode)

    def _reopen(self, live: Live, episode: Episode, *, moved: bool = False) -> None:
        """Open an environment anew, to tell it what it was told before."""
        live.number = self._owner.new_number()
        self._live[live.number] = live
        dialogue = self._turns.dialogue(live.index)
        assert dialogue is not None, "single answers have no environment"
        self._replays[live.number] = Replay(live=live, episode=episode, dialogue=dialogue, moved=moved)
        self._open_environment(live)

    def _lost(self, live: Live, answered: Answered) -> None:
        """Go on with a conversation whose process was lost through no fault that is known."""
        self._moved += 1
        live.apart = live.apart or answered.apart
        replay = self._replays.pop(live.number, None)
        self._owner.early.pop(live.number, None)
        if self._is_led(live.index):
            self._restart(live, live.attempt)
            return
        del self._live[live.number]
        due = live.due
        if replay is not None:
            self._reopen(live, replay.episode, moved=replay.moved)
        elif live.tokens is None:  # it has not begun
            self._begin(live)
        else:
            self._reopen(live, live.episode(live.stop), moved=True)
        live.due = due

    def _take_replay(self, replay: Replay, answered: Answered) -> None:
        """Compare what an environment answers with what it answered before, and tell it the next turn."""
        live, episode = replay.live, replay.episode
        due, live.due = live.due, None
        if answered.kind == "failed":
            del self._replays[live.number]
            self._failed(live, str(answered.value), apart=answered.apart)
            return
        reply = answered.value
        messages = self._turns.fitting(replay.dialogue, reply.messages) if isinstance(reply, Reply) else []
        change = replay.change(answered, messages)
        if change is not None:
            del self._replays[live.number]
            if replay.moved:
                self._restart(live, live.attempt)
            else:
                self._changed += 1
                self._failed(live, change)
        elif answered.kind == "graded":
            del self._replays[live.number], self._live[live.number]
            self._made[live.index][live.sample] = dataclasses.replace(episode, environment=answered.environment)
        elif (turn := replay.next_turn()) is not None:
            self._say(live, turn)
        elif episode.ended:
            self._grade(live)
        else:
            del self._replays[live.number]
            self._wait_again(replay)
        if replay.moved:  # its answer is due when it would have been
            live.due = due

    def _wait_again(self, replay: Replay) -> None:
        """Ask an environment again what it was asked when the run stopped."""
        live = replay.live
        if live.state == "replying":
            self._say(live, replay.turn(live.replies))
        elif live.state == "ending":
            self._grade(live)

    def _submit_drawing(self) -> None:
        """Submit the turns that the last step left, those of a prompt that go on alike together."""
        alike: dict[tuple[int, tuple[int, ...], int, SamplingParams], list[Live]] = {}
        for live in sorted(self._live.values(), key=_in_order):
            if live.state == "drawing":
                tokens, whole = live.tokens, tuple(live.transcript.segments[-1].tokens.tolist())
                assert tokens is not None, "its environment has begun"
                prompt = tokens if len(live.transcript.segments) == 1 else whole[:1]
                group = live.index, prompt, len(live.rewards), self._turns.sampling_of(live, len(whole))
                alike.setdefault(group, []).append(live)
        for (index, prompt, turn, sampling), lives in alike.items():
            request = Request(
                prompt=prompt,
                sampling=sampling,
                seed=self._turns.seed(index, turn),
                completions=self._completions,
                keep=True,
                begun={live.sample: live.drawing for live in lives if live.drawing is not None},
                ledgers={live.sample: tuple(live.transcript.segments[-1].tokens.tolist()) for live in lives},
            )
            number = self._engine.submit(request)
            for live in lives:
                live.key, live.drawing = Key(number, live.sample), None
                self._keys[live.key] = live

    def _put_down(self) -> None:
        """Take what has been drawn out of the engine, and note what goes on in the next step."""
        keys = [live.key for live in self._live.values() if live.state == "drawing" and live.key is not None]
        for request, index in self._single.items():
            keys += [Key(request, sample) for sample in range(self._completions) if sample not in self._made[index]]
        for key, completion in self._engine.withdraw(keys).items():
            if completion.finish_reason is not None:
                self._take_turn(key, completion)
            elif key in self._keys:
                self._keys[key].drawing = completion
            else:
                self._left[self._single[key.request]][key.completion] = Episode(state="drawing", drawing=completion)
        for live in self._live.values():
            self._left[live.index][live.sample] = self._put_aside(live)
        for index, made in enumerate(self._made):
            for sample, episode in made.items():
                if episode.environment is not None and len(made) < self._completions:
                    self._owner.kept[self._prompts[index].number, sample, episode.attempt] = episode.environment
                made[sample] = dataclasses.replace(episode, environment=None)

    def _put_aside(self, live: Live) -> Episode:
        """What there is of a conversation; its environment stays open."""
        self._drop_key(live)
        if self._replays.pop(live.number, None) is None:
            self._owner.open[self._place(live)] = live.number
        else:  # the next call begins with its replay
            self._environments.drop(live.number)
        if live.state != "beginning":
            reason = live.stop if live.state == "ending" else live.transcript.finish_reason
            return live.episode(reason, timed=self._limits.episode_timeout_s is not None)
        if live.tokens is not None:  # it has begun, and waits for the others of its prompt
            self._owner.early[live.number] = Answered(live.number, "opened", live.asking or live.first)
        return Episode(state="beginning", attempt=live.attempt)

    def _place(self, live: Live) -> Place:
        return self._prompts[live.index].number, live.sample, live.attempt

    # Environments.

    def _begin(self, live: Live) -> None:
        live.number = self._owner.new_number()
        live.began = time.monotonic()
        self._live[live.number] = live
        self._open_environment(live)

    def _open_environment(self, live: Live) -> None:
        prompt, own = self._prompts[live.index], self._owner._config.group_seed == "own"
        seed = request_seed(prompt.seed, "environment", live.sample if own else 0)
        if live.index in self._own:
            self._environments.open(live.number, prompt.prompt.task, prompt.prompt.prompt, seed, apart=live.apart)
        self._asked(live)

    def _say(self, live: Live, turn: Turn) -> None:
        if self._environments.holds(live.number):
            self._environments.say(live.number, turn)
        self._asked(live)

    def _grade(self, live: Live) -> None:
        if self._environments.holds(live.number):
            self._environments.grade(live.number)
        self._asked(live)

    def _is_replayed(self, live: Live) -> bool:
        """Whether its new environment is still told what the lost one was; the end of that asks what is due."""
        return live.number in self._replays

    def _asked(self, live: Live) -> None:
        live.due = self._steps + REPLY_STEPS

    @property
    def _patience(self) -> float:
        """Seconds to wait for an answer between calls of `on_poll`."""
        return POLL_S if self._owner.exchange is None else POLL_TOGETHER_S

    def _receive(self, wait_s: float) -> None:
        """Wait for an answer of the environments, and add all that have arrived to `early`; the same on all hosts that
        decode together.

        Losses of processes, and answers during a replay, are handled at once instead.
        """
        found: list[Answered] = []
        while (answered := self._environments.next(wait_s)) is not None:
            wait_s = 0.0
            found.append(answered)
        if self._owner.exchange is not None:
            found = self._owner.exchange(found)
        for answered in found:
            live = self._live.get(answered.number)
            if live is not None and answered.kind == "lost":
                self._lost(live, answered)
            elif live is not None and (replay := self._replays.get(answered.number)) is not None:
                self._take_replay(replay, answered)
            else:
                self._owner.early[answered.number] = answered

    def _take_answers(self) -> None:
        """Take what environments have answered; waits for it if the engine has nothing to do, or it is due."""
        early, idle = self._owner.early, not self._engine.busy
        start = time.perf_counter()
        if self._paced:
            while any(live.number not in early for live in self._due):
                self._on_poll()
                self._receive(self._patience)
            ready = sorted(self._due, key=_in_order)
            idle = True
        elif self._owner.exchange is not None and not idle and self._steps % STEPS_TOGETHER:
            return
        else:
            waits = idle and bool(self._live) and not any(number in early for number in self._live)
            self._receive(self._patience if waits else 0.0)
            ready = [self._live[number] for number in early if number in self._live]
        if idle:
            self._idle_s += time.perf_counter() - start
        for live in ready:
            self._take_answer(live, early.pop(live.number))

    @property
    def _due(self) -> list[Live]:
        """Conversations whose answer is to be taken now, where clocks must not decide."""
        return [live for live in self._live.values() if live.due is not None and live.due <= self._steps]

    def _take_answer(self, live: Live, answered: Answered) -> None:
        live.due = None
        match answered.kind:
            case "opened":
                self._begin_s.append(answered.seconds)
                assert answered.value is None or isinstance(answered.value, str | Asking)
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
                self._failed(live, str(answered.value), apart=answered.apart)
            case "lost":
                raise AssertionError("it is dealt with as it is received")

    def _opened(self, live: Live, first: str | Asking | None) -> None:
        """Submit a conversation whose environment has begun, together with the others of its prompt."""
        try:
            self._turns.set_prompt(live, first)
        except AskingError as error:
            self._failed(live, str(error))
            return
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
        alike: dict[tuple[tuple[int, ...], SamplingParams], list[Live]] = {}
        for _, live in sorted(waiting.items()):
            assert live.tokens is not None
            alike.setdefault((live.tokens, self._turns.sampling_of(live, len(live.tokens))), []).append(live)
        for lives in alike.values():
            self._submit(index, lives)

    def _submit(self, index: int, lives: list[Live]) -> None:
        """Submit conversations that begin with the same tokens."""
        tokens = lives[0].tokens
        assert tokens is not None
        every = len(lives) == self._completions
        request = Request(
            prompt=tokens,
            sampling=self._turns.sampling_of(lives[0], len(tokens)),
            seed=self._turns.seed(index, 0),
            completions=self._completions,
            keep=True,
            ledgers={} if every else {live.sample: tokens for live in lives},
        )
        number = self._engine.submit(request)
        for live in lives:
            live.transcript = Transcript().add_prompt(tokens)
            live.key, live.state = Key(number, live.sample), "drawing"
            self._keys[live.key] = live

    def _replied(self, live: Live, reply: Reply) -> None:
        """Begin the next turn, unless the conversation ends."""
        live.rewards[-1] += reply.reward
        live.replies += 1
        if reply.done:
            live.messages += self._turns.fitting(self._turns.dialogue_of(live), reply.messages)
            self._finish(live, live.transcript.finish_reason or "stop")
            return
        try:
            following = self._turns.following(live, reply)
        except ValueError as error:  # messages of a kind that the template refuses, or tokens that there are not
            self._failed(live, str(error))
            return
        new, whole = following.tokens, following.whole
        tokens = (*live.transcript.segments[-1].tokens.tolist(), *new)
        reason = self._turns.why_none(live, len(tokens if whole is None else whole))
        if reason is not None:
            self._finish(live, reason)
            return
        live.state = "drawing"
        if whole is not None and whole != tokens:
            self._drop_key(live)
            live.transcript = live.transcript.add_segment(whole)
            self._extend_tokens += len(whole)
            self._submit_turn(live, whole)
            return
        live.transcript = live.transcript.add_environment(tuple(new), text=_text_of(live.messages[-1:]))
        self._extend_tokens += len(new)
        if live.key is None:  # the last step ended before the reply came
            self._submit_turn(live, tokens)
            return
        sampling, seed = self._turns.sampling_of(live, len(tokens)), self._turns.seed(live.index, len(live.rewards))
        self._engine.extend(live.key, new, sampling, seed=seed, keep=True)

    def _submit_turn(self, live: Live, tokens: tuple[int, ...]) -> None:
        """Submit a turn after these tokens, of which the engine knows nothing."""
        request = Request(
            prompt=tokens[:1],
            sampling=self._turns.sampling_of(live, len(tokens)),
            seed=self._turns.seed(live.index, len(live.rewards)),
            completions=self._completions,
            keep=True,
            ledgers={live.sample: tokens},
        )
        live.key = Key(self._engine.submit(request), live.sample)
        self._keys[live.key] = live

    def _failed(self, live: Live, why: str, *, apart: bool = False) -> None:
        """Begin a conversation again that failed through no fault of the model, or give it up.

        `apart`: it has ended a process, and begins again in one with one call at a time.
        """
        self._failures.append((live.index, live.sample, live.attempt, why))
        live.apart = live.apart or apart
        if live.attempt < self._owner._config.retries:
            self._restart(live, live.attempt + 1)
            return
        self._give_up(live)
        if not live.transcript.spans:
            live.transcript = live.transcript.add_prompt(live.tokens or self._prompts[live.index].tokens)
        self._add(live, live.episode("failed", ended=True))

    def _restart(self, live: Live, attempt: int) -> None:
        """Begin a conversation again."""
        self._give_up(live)
        self._begin(Live(index=live.index, sample=live.sample, attempt=attempt, apart=live.apart))

    def _give_up(self, live: Live) -> None:
        """End a conversation as far as it has come."""
        self._environments.drop(live.number)
        del self._live[live.number]
        self._drop_key(live)
        self._beginning.get(live.index, {}).pop(live.sample, None)

    def _finish(self, live: Live, reason: StopReason) -> None:
        """End the turns of a conversation and ask for its grade."""
        live.stop, live.state = reason, "ending"
        self._drop_key(live)
        self._asked(live) if self._is_replayed(live) else self._grade(live)

    def _end(self, live: Live, final: float | None, environment: object) -> None:
        """Take a conversation's grade."""
        del self._live[live.number]
        episode = live.episode(live.stop, ended=True)
        self._add(live, dataclasses.replace(episode, final_reward=final, environment=environment))

    def _add(self, live: Live, episode: Episode) -> None:
        """Add an episode that has ended."""
        self._made[live.index][live.sample] = episode
        if live.index in self._beginning:
            self._submit_begun(live.index)
        if len(self._made[live.index]) == self._completions:
            self._on_episodes(live.index, self.episodes[live.index])

    def _drop_key(self, live: Live) -> None:
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
        before = live.transcript.spans[-1].tokens.tolist()
        live.transcript = live.transcript.add_completion(completion)
        number = len(live.rewards)
        live.rewards.append(0.0)
        live.state = "replying"
        begun, tokens = self._turns.begun(live), completion.tokens.tolist()
        cut = completion.finish_reason == "length"
        read = self._turns.dialogue_of(live).read(completion.text, tokens, before=before, begun=begun, cut=cut)
        if live.asking is not None and not live.asking.parallel:
            read = read._replace(calls=read.calls[:1])
        live.messages.append(_answer(number, completion.text, read))
        self._unread_calls += bool(read.problem)
        if cut and live.asking is None:
            self._finish(live, self._turns.why_cut(live))
            return
        live.calls += len(read.calls)
        if self._limits.max_tool_calls is not None and live.calls > self._limits.max_tool_calls:
            self._finish(live, "calls")
            return
        turn = turn_of(number, completion.text, read)
        if live.asking is not None:
            turn = dataclasses.replace(
                turn,
                tokens=tuple(completion.tokens.tolist()),
                logprobs=tuple(completion.sampled_logprobs.tolist()),
                unread=self._turns.dialogue_of(live).unread(live.asking.options),
                cut=cut,
                read=live.transcript.segments[-1].num_tokens - len(completion.tokens),
            )
        self._asked(live) if self._is_replayed(live) else self._say(live, turn)

    def _take_single(self, key: Key, index: int, completion: Completion) -> None:
        made = self._made[index]
        made[key.completion] = Episode(transcript=transcript_of(self._prompts[index].tokens, completion))
        if len(made) == self._completions:
            del self._single[key.request]
            self._on_episodes(index, self.episodes[index])

    def _is_led(self, index: int) -> bool:
        return self._environments.led(self._prompts[index].prompt.task)


def _in_order(live: Live) -> tuple[int, int]:
    """Sorts conversations by prompt, and by their index among the prompt's."""
    return live.index, live.sample


def _answer(number: int, text: str, read: Calls) -> Message:
    """The model's answer as a message; calls that could be read are not part of its content."""
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
