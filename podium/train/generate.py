"""Answers prompts with graded completions: the half of a step that training and evaluation share."""

import contextlib
import dataclasses
import functools
import math
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from podium.ahead import CompileAhead, threads_for
from podium.algorithms.advantages import equal_reward_groups
from podium.job.context import alone
from podium.job.watchdog import Watchdog
from podium.models.architecture import DecoderConfig
from podium.models.layouts import Layout
from podium.models.params import ROLLOUT_LAYOUTS
from podium.models.tokenizer import Tokenizer
from podium.observe.stats import EnvironmentStats
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Completion, Request, RolloutStats, SamplingParams
from podium.rollout.transcript import Transcript, transcript_of
from podium.run.resolve import host_share
from podium.run.spec import RolloutSpec
from podium.sharding import Params, ShardingRules
from podium.tasks.conversing import Answered
from podium.tasks.environments import Environments
from podium.tasks.grading import Grader, Grading
from podium.tasks.mixture import TaskPrompt
from podium.tasks.task import FAILED, Graded, Reward, with_turns
from podium.terminal import harmless
from podium.train.carry import Pending, Position, chosen, drawn_lengths
from podium.train.distributed import AgreedStop, HostFailedError, Interrupted, host_mesh, make_localize, share
from podium.train.episode import Episode
from podium.train.episodes import Episodes
from podium.train.feed import EncodedPrompt, Feed
from podium.train.signals import StopSignal

STEPS_APART = 4
"""Engine steps between the exchanges in which hosts check together whether a step has enough complete prompts."""


class Greedy(NamedTuple):
    """The greedy completion of a prompt, which others are compared with."""

    transcript: Transcript
    reward: Reward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt with its graded episodes."""

    prompt: TaskPrompt
    transcripts: list[Transcript]
    rewards: list[Reward]
    """One reward per transcript."""
    version: int = 0
    """Weight version at the start of the step; a token's age is this minus the token's version."""
    firsts: tuple[str | None, ...] = ()
    """What the environment of each transcript added to the prompt; empty: there are no environments."""
    greedy: Greedy | None = None
    """None: no recipe compares with it, or it is the last of the transcripts until the group is graded."""

    @functools.cached_property
    def tokens(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return tuple(self.transcripts[0].prompt.tolist())

    @property
    def totals(self) -> np.ndarray:
        """The total rewards, [G] float32."""
        return np.array([reward.total for reward in self.rewards], np.float32)

    @property
    def correct(self) -> float | None:
        """The share of right answers, among the episodes that did not fail; None: all failed."""
        found = [reward.parts["correct"] for reward in self.rewards if not reward.failed]
        return min(1.0, max(0.0, sum(found) / len(found))) if found else None

    @property
    def apart(self) -> "Group":
        """The group with its last transcript as its greedy completion."""
        greedy = Greedy(self.transcripts[-1], self.rewards[-1])
        return dataclasses.replace(
            self, transcripts=self.transcripts[:-1], rewards=self.rewards[:-1], firsts=self.firsts[:-1], greedy=greedy
        )

    def judged(self, part: str | None) -> np.ndarray:
        """What decides whether its rewards are equal, [G] float32: totals (None), or a part of the reward.

        NaN: the episode does not count, because it failed or has no such part.
        """
        return np.array([reward.part(part) for reward in self.rewards], np.float32)

    def equal_rewards(self, part: str | None) -> bool:
        """Whether all its episodes got the same reward, or part of it, so that its recipe leaves it out."""
        return bool(equal_reward_groups(self.judged(part)[None])[0])


class GroupScorer(Protocol):
    """Adds a part to the rewards of complete groups, on all hosts together; `podium.train.reward_models` has one."""

    def check(self, feed: Feed, prompts: Sequence[TaskPrompt]) -> None:
        """Raise ValueError if answers to these prompts cannot be scored."""
        ...

    def scored(self, groups: Sequence[Group], feed: Feed) -> tuple[list[Group], int]:
        """The groups with their scores, and the number of answers that have none because they are too long."""
        ...

    def standardised(self, groups: Sequence[Group]) -> list[Group]:
        """All scored groups of a step, with scores as they count in totals."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How to answer prompts."""

    sampling: SamplingParams
    completions: int
    """Completions per prompt, the greedy one included."""
    max_refills: int = 0
    """Maximum number of times that prompts with equal rewards are replaced by the next prompts of the run."""
    zero_variance_metric: str | None = None
    """Part of the reward that decides whether rewards are equal; None: their total."""
    in_flight: int = 0
    """Prompts to answer at the same time, at least those requested; the others continue in the next step."""


class FailingEnvironmentError(ValueError):
    """More conversations failed than `environments.max_failed` allows; the message has the first traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(harmless(message))  # it may quote what a model wrote


class _Answer(NamedTuple):
    """The completions of a prompt, or in a run with conversations its episodes, with their rewards."""

    completions: list[Completion]
    rewards: list[Reward]
    """Empty until all have ended."""
    episodes: list[Episode]

    def of(self, pending: Pending) -> Pending:
        """The prompt with this answer."""
        return dataclasses.replace(
            pending,
            completions=tuple(self.completions),
            rewards=tuple(self.rewards),
            episodes=tuple(self.episodes),
        )


class _HostPart(NamedTuple):
    """The results that a host sends to the others."""

    answers: list[_Answer]
    stats: RolloutStats
    episodes: EnvironmentStats = EnvironmentStats()


class _Scored(NamedTuple):
    """Groups with the scores of reward models, the seconds that these took, and how many answers were too long."""

    groups: list[Group]
    seconds: float
    too_long: int


class Rollouts:
    """Generates completions with the engine, and has them graded."""

    def __init__(
        self,
        spec: RolloutSpec,
        decoder: DecoderConfig,
        tokenizer: Tokenizer,
        mesh: Mesh,
        *,
        scorers: Sequence[GroupScorer] = (),
        folder: Path | None = None,
        stop: AgreedStop | None = None,
        watchdog: Watchdog | None = None,
        on_progress: Callable[[int, int, int], None] = lambda total, done, tokens: None,
    ) -> None:
        """Start the graders, and make the engine on this host's devices of the mesh; `load` gives it weights.

        `scorers` are those of the spec's reward models. Replies of judges are kept in `folder`, if set. `stop`, if set,
        can end a rollout early; `watchdog` is pinged regularly. `on_progress` is called after each group is complete
        with this host's number of completions, the number completed, and their tokens.

        Raises:
            ValueError: a task, its data or the engine's sizes are invalid.
        """
        assert len(scorers) == len(spec.reward_models), "each reward model has its weights"
        self.spec, self.feed = spec, Feed(spec.prompts, tokenizer)
        self._scorers = tuple(scorers)
        self.training = AnswerSettings(
            sampling=spec.sampling,
            completions=spec.completions,
            max_refills=spec.max_refills,
            zero_variance_metric=spec.zero_variance_metric,
            in_flight=spec.in_flight,
        )
        self._pending, self._version = tuple[Pending, ...](), 0
        self.held = EnvironmentStats()
        """Counts and times of environments and tools in the last call of `answer`."""
        self._last_failures = ("it was in an earlier part of the run",)
        dtype = jnp.dtype(spec.dtype)
        self.layout = spec.layout
        local = mesh if self.layout.over_hosts else host_mesh(mesh)
        rules = rollout_rules(self.layout, decoder, local)
        settings = host_share(spec.settings, mesh.size // local.size)
        self._localize = make_localize(decoder, mesh, local, dtype)
        self.device = Device(settings, decoder, rules, dtype=dtype)
        self.engine = RolloutEngine(self.device, tokenizer)
        self.ahead = CompileAhead(threads_for(rules.platform))
        self._stop = stop or AgreedStop(StopSignal())
        self._watchdog = watchdog or alone().watchdog
        self._on_progress = on_progress
        tasks = self.feed.tasks.levels
        self.grader = Grader(
            tasks,
            spec.grading,
            max_new_tokens=spec.sampling.max_new_tokens,
            replies=None if folder is None else folder / f"judged-{jax.process_index()}.jsonl",
        )
        self.environments = Environments(tasks, spec.environments, judges=spec.grading.judges)
        self.episodes = Episodes(
            self.engine,
            self.feed.dialogues,
            self.environments,
            rollout=settings,
            config=spec.environments,
            exchange=self._exchange if self.layout.over_hosts else None,
        )
        self.converses = any(self.feed.dialogues)
        """Whether a task has conversations; then all prompts are answered beside them."""
        if self.converses and self.layout.over_hosts and settings.limits.episode_timeout_s is not None:
            raise ValueError(
                f"rollout.layout {self.layout.name}: several hosts decode together, and their clocks differ; leave"
                " rollout.limits.episode_timeout_s out, or set rollout.layout to replicated, tensor, or hybrid within"
                " a host"
            )

    @property
    def position(self) -> Position:
        """The run's position in its prompts: saved with the run, and set when it resumes.

        If it is set, environments of conversations in flight are opened anew.
        """
        tasks = self.feed.tasks
        return Position(cursor=self.feed.cursor, pending=self._pending, curriculum=tasks.means, retired=tasks.retired)

    @position.setter
    def position(self, position: Position) -> None:
        self.episodes.forget()
        self.feed.cursor, self._pending = position.cursor, position.pending
        self.feed.tasks.means = position.curriculum
        self.feed.tasks.retired = position.retired

    def compile_ahead(self) -> None:
        """Begin to compile the engine's programs on other threads, if they are for an accelerator."""
        self.device.compile_ahead(self.ahead)

    def load(self, params: Params, frozen: Params | None = None, *, version: int = 0) -> float:
        """Use these weights from now on; returns the seconds that loading took.

        `frozen` are the weights that no update changes, if any; they need to be passed only once. `version` is the
        number of steps that trained the weights.
        """
        start = time.perf_counter()
        if frozen:
            self.device.freeze(self._localize(frozen))
        self._version = version
        self.engine.load(self._localize(params), version)
        return time.perf_counter() - start

    def unload(self) -> None:
        """Free the engine's weights and cache until the next `load`."""
        self.engine.unload()

    def answer(
        self, prompts: Sequence[EncodedPrompt], settings: AnswerSettings | None = None
    ) -> tuple[list[Group], RolloutStats]:
        """Complete and grade prompts; each host answers its share and receives the others' results.

        Without `settings`, as in training: with the recipe's refills, and with the carry-over of `rollout.in_flight`,
        under which the groups returned are those of the oldest prompts that are complete.

        Returns:
            As many groups as prompts, in order; with refills, groups with unequal rewards come first, then those with
            equal rewards, replaced ones included. And statistics of all of it.

        Raises:
            Interrupted: the run must stop now; raised on all hosts.
        """
        carries = settings is None
        settings = settings or self.training
        metric = settings.zero_variance_metric
        start = time.perf_counter()
        pending = [*(self._pending if carries else ()), *(Pending(prompt=prompt) for prompt in prompts)]
        groups: list[Group] = []
        episodes = EnvironmentStats()
        stats, wanted = RolloutStats(dropped_prompts=sum(prompt.skipped for prompt in prompts)), len(prompts)
        missing = wanted
        while True:
            useful = wanted - missing
            more = self.feed.next(max(0, max(missing, settings.in_flight - useful) - len(pending)))
            pending += [Pending(prompt=prompt) for prompt in more]
            choice, own = _Choice(self, pending, missing, wanted), share(len(pending))
            drawn_here = pending if self.layout.over_hosts else pending[own]
            requests = [_request(each, settings) for each in drawn_here]
            on_progress = functools.partial(self._on_progress, len(requests) * settings.completions)
            graded_here = own if self.layout.over_hosts else slice(None)
            grades = _Grades(self.grader, drawn_here, graded_here, on_progress, self._stop.poll)
            with _Ending(together=self.layout.over_hosts) as ending:
                # groups are graded while others are still decoded
                on_poll, enough = (self._watchdog.beat, choice.enough) if choice.asks else (self._poll, None)
                idle = not (requests or choice.asks)
                if self.converses:
                    ending.part = self._converse(drawn_here, settings, grades, own, choice, carries=carries)
                elif idle:
                    ending.part = grades.wait_for([], RolloutStats())
                else:
                    ending.part = grades.wait_for(*self.engine.generate(requests, grades.submit, on_poll, enough))
            answers, rolled, held = self._gather(ending)
            episodes = episodes.then(held)
            now = [answer.of(each) for each, answer in zip(pending, answers, strict=True)]
            drawn = tuple(drawn_lengths(pending, now))
            taken, pending = choice.split(now)
            scored = self._scored(taken)
            groups += scored.groups
            rolled = dataclasses.replace(
                rolled,
                waited_s=choice.waited_s,
                drawn_lengths=drawn,
                scored_s=scored.seconds,
                unscored=scored.too_long,
            )
            stats = stats.then(rolled).then(RolloutStats(dropped_prompts=sum(prompt.skipped for prompt in more)))
            missing = wanted - sum(not group.equal_rewards(metric) for group in groups)
            if stats.refill_rounds == settings.max_refills or not missing:
                break
            stats = dataclasses.replace(stats, refill_rounds=stats.refill_rounds + 1)
        if self.converses:
            self._check_failures(groups, episodes)
            self.held = episodes
        groups = self._finished(groups, settings)
        if carries:
            self._pending = tuple(pending)
            self._learn(groups)
        if settings.max_refills:
            groups.sort(key=lambda group: group.equal_rewards(metric))
        return groups, dataclasses.replace(
            stats,
            in_flight=len(pending),
            retired=sum(map(len, self.feed.tasks.retired.values())),
            answer_s=time.perf_counter() - start,
        )

    def check(self, prompts: Sequence[TaskPrompt]) -> list[str]:
        """Check that answers to these prompts, of each task, can be graded; otherwise as `Grader.check`."""
        for scorer in self._scorers:
            scorer.check(self.feed, prompts)
        return self.grader.check(prompts)

    def close(self) -> None:
        """Stop the graders and environments, and free the engine's memory."""
        self.grader.close()
        self.environments.close()
        self.ahead.close()
        self.engine.unload()

    def _scored(self, groups: list[Group]) -> "_Scored":
        """The groups with the scores of all reward models; the engine's weights and cache stay where they are."""
        start, too_long = time.perf_counter(), 0
        for scorer in self._scorers if groups else ():
            groups, more = scorer.scored(groups, self.feed)
            too_long += more
        return _Scored(groups, time.perf_counter() - start if self._scorers else 0.0, too_long)

    def _finished(self, groups: list[Group], settings: AnswerSettings) -> list[Group]:
        """All groups of a step, with standardised scores, and their greedy completions apart."""
        for scorer in self._scorers:
            groups = scorer.standardised(groups)
        return groups if settings.sampling.greedy_completion is None else [group.apart for group in groups]

    def _learn(self, groups: Sequence[Group]) -> None:
        """Let the shares of right answers decide what is drawn next, where the config says so."""
        for group in groups:
            if (correct := group.correct) is not None:
                self.feed.tasks.learn(group.prompt, correct)

    def _poll(self) -> None:
        self._watchdog.beat()
        self._stop.poll()

    def _converse(
        self,
        pending: Sequence[Pending],
        settings: AnswerSettings,
        grades: "_Grades",
        own: slice,
        choice: "_Choice",
        *,
        carries: bool,
    ) -> _HostPart:
        """Hold conversations, and grade each group of this host when its last one has ended.

        `own` is the host's share where all hosts hold all conversations together. `carries`: whether conversations of
        earlier steps go on.
        """
        together, several = self.layout.over_hosts, jax.process_count() > 1
        made = self.episodes.hold(
            [each.prompt for each in pending],
            settings.sampling,
            settings.completions,
            grades.submit_episodes,
            # Hosts that meet in the middle, to exchange replies or to count what is complete, must stop together.
            self._watchdog.beat if together or (several and choice.leaves) else self._poll,
            own if together else slice(None),
            begun=[each.episodes for each in pending] if carries else None,
            enough=choice.enough if choice.leaves else None,
        )
        return grades.wait_for_episodes(*made)

    def _exchange(self, answered: list[Answered]) -> list[Answered]:
        """What the environments of all hosts have answered. Raises Interrupted on all of them if one must stop."""
        with contextlib.suppress(Interrupted):
            self._stop.poll()  # signals received by other processes
        with self._watchdog.waiting():
            hosts, asked = self._stop.exchange(answered)
        if signal.SIGTERM in asked:
            raise Interrupted
        return [each for found in hosts for each in found]

    def _check_failures(self, groups: Sequence[Group], held: EnvironmentStats) -> None:
        """Raise FailingEnvironmentError if too many conversations failed through no fault of the model."""
        failed = [transcript.finish_reason == "failed" for group in groups for transcript in group.transcripts]
        limit = self.spec.environments.max_failed
        self._last_failures = held.failures or self._last_failures  # a conversation may have failed in an earlier step
        if sum(failed) > limit * len(failed):
            self._stop.leave_together()  # all hosts have counted the same
            raise FailingEnvironmentError(
                f"{sum(failed)} of {len(failed)} conversations failed, and environments.max_failed is {limit:g}:"
                f" this is no fault of the model. The first failure:\n{self._last_failures[0].rstrip()}\n"
                "Mend the environment, then continue the run"
            )

    def _gather(self, ending: "_Ending") -> tuple[list[_Answer], RolloutStats, EnvironmentStats]:
        """The answers of all hosts in the order of their prompts. If one has no part, all raise Interrupted.

        If one has failed, it raises its error, and the others HostFailedError.
        """
        with self._watchdog.waiting():
            gathered, asked = self._stop.exchange(ending.part, ending.failed)
        self._stop.agree(asked)
        parts = [part for part in gathered if part is not None]
        if len(parts) < len(gathered):
            raise Interrupted
        beside = [part.stats for part in parts]
        if self.layout.over_hosts:  # all hosts have counted the same
            beside = [
                dataclasses.replace(
                    beside[0],
                    reward_s=max(stats.reward_s for stats in beside),
                    judge_requests=sum(stats.judge_requests for stats in beside),
                    judge_tokens=sum(stats.judge_tokens for stats in beside),
                    judge_cached=sum(stats.judge_cached for stats in beside),
                    judge_ungraded=sum(stats.judge_ungraded for stats in beside),
                )
            ]
        stats = functools.reduce(RolloutStats.beside, beside)
        told = [part.episodes for part in parts]
        held = functools.reduce(EnvironmentStats.then, told[:1] if self.layout.over_hosts else told)
        return [answer for part in parts for answer in part.answers], stats, held


class _Ending(contextlib.AbstractContextManager["_Ending"]):
    """How a host's part of a rollout ends inside the block: by a result, a stop or an error, for the other hosts."""

    def __init__(self, *, together: bool) -> None:
        """`together`: all hosts decode together, so that an error of one cannot be exchanged and is raised at once."""
        self._together = together
        self.part: _HostPart | None = None
        """The result; None if the run must stop now, or if there was an error."""
        self.failed: Exception | None = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Interrupted):
            return True
        if self._together or not isinstance(error, Exception) or isinstance(error, HostFailedError):
            return False
        self.failed = error
        return True


class _Choice:
    """Decides, during decoding, which of the pending prompts form a step."""

    def __init__(self, rollouts: Rollouts, pending: Sequence[Pending], count: int, per_step: int) -> None:
        self._stop = rollouts._stop
        self._watchdog = rollouts._watchdog
        self._version = rollouts._version
        self._first = [each.first_version for each in pending]
        self._sizes = {"per_step": per_step, "max_staleness": rollouts.spec.settings.max_staleness}
        self._count = count
        self._engine_steps = 0
        self._since = math.inf
        self._together = rollouts.layout.over_hosts
        self.leaves = len(pending) > count
        """Whether prompts are left for the next step."""
        self.asks = self._together or self.leaves
        """Whether hosts ask each other what is complete; otherwise each waits for all, at its own pace."""

    @property
    def waited_s(self) -> float:
        """Seconds since enough prompts were complete."""
        return max(0.0, time.perf_counter() - self._since)

    def split(self, pending: Sequence[Pending]) -> tuple[list[Group], list[Pending]]:
        """The groups of the step, and the remaining prompts with what has been drawn of them; requires `enough`."""
        taken = self.of([bool(each.rewards) for each in pending])
        assert taken is not None, "there was enough"
        groups = [
            Group(
                prompt=each.prompt.prompt,
                transcripts=[episode.transcript for episode in each.episodes]
                or [transcript_of(each.prompt.tokens, completion) for completion in each.completions],
                rewards=list(each.rewards),
                version=self._version,
                firsts=tuple(episode.first for episode in each.episodes),
            )
            for each in (pending[index] for index in taken)
        ]
        return groups, [each for index, each in enumerate(pending) if index not in set(taken)]

    def of(self, complete: Sequence[bool]) -> list[int] | None:
        """Indices of the prompts (over all hosts) to take; None if decoding must continue."""
        return chosen(self._first, complete, self._count, version=self._version, **self._sizes)

    def enough(self, own: Sequence[bool]) -> bool:
        """Whether the complete prompts of all hosts suffice; all hosts must call this equally often.

        Raises Interrupted on all of them if one must stop.
        """
        self._engine_steps += 1
        if jax.process_count() > 1 and self._engine_steps % STEPS_APART:
            return False
        with contextlib.suppress(Interrupted):
            self._stop.poll()  # signals received by other processes
        with self._watchdog.waiting():
            hosts, asked = self._stop.exchange(list(own))
        if signal.SIGTERM in asked:
            raise Interrupted
        complete = list(own) if self._together else [each for flags in hosts for each in flags]
        if sum(complete) >= self._count:
            self._since = min(self._since, time.perf_counter())
        return self.of(complete) is not None


class _Grades:
    """Grades a host's prompts, group by group, while the engine continues."""

    def __init__(
        self,
        grader: Grader,
        pending: Sequence[Pending],
        own: slice,
        on_progress: Callable[[int, int], None],
        on_poll: Callable[[], None],
    ) -> None:
        """`own` is the slice of the pending prompts that this host grades; `on_poll` may raise to end a wait."""
        self._grader = grader
        self._on_poll = on_poll
        self._pending = pending
        self._on_progress = on_progress
        self._own = range(len(pending))[own]
        self._gradings: dict[int, Grading] = {}
        self._done = self._tokens = 0

    def submit(self, index: int, completions: list[Completion]) -> None:
        """Start grading the completions of a prompt."""
        prompt = self._pending[index].prompt.prompt
        graded = [(prompt, Graded(text=each.text, tokens=tuple(each.tokens.tolist()))) for each in completions]
        if index in self._own:
            self._gradings[index] = self._grader.submit(graded)
        self._done += len(completions)
        self._tokens += sum(len(each.tokens) for each in completions)
        self._on_progress(self._done, self._tokens)

    def submit_episodes(self, index: int, episodes: list[Episode]) -> None:
        """Start grading the episodes of a prompt; those that failed through no fault of the model get no reward."""
        asked = self._pending[index].prompt.prompt
        if index in self._own:
            graded = [(asked, _graded(each)) for each in episodes if not each.failed]
            self._gradings[index] = self._grader.submit(graded)
        self._done += len(episodes)
        self._tokens += sum(each.transcript.num_drawn for each in episodes)
        self._on_progress(self._done, self._tokens)

    def wait_for_episodes(self, made: list[list[Episode]], stats: RolloutStats, held: EnvironmentStats) -> _HostPart:
        """Wait for the grades of all prompts whose episodes have ended; returns them with all episodes."""
        start = time.perf_counter()
        answers: list[_Answer] = []
        for index in self._own:
            episodes, given = made[index], list(self._pending[index].rewards)
            if (grading := self._gradings.get(index)) is not None:
                rewards = iter(grading.result(self._on_poll))
                weight = self._grader.correct_weight(self._pending[index].prompt.prompt.task)
                given = [
                    FAILED if each.failed else with_turns(next(rewards), each.turn_rewards, weight) for each in episodes
                ]
            answers.append(_Answer([], given, episodes))
        return _HostPart(answers, self._with_grading(stats, start), held)

    def wait_for(self, completed: list[list[Completion]], stats: RolloutStats) -> _HostPart:
        """Wait for the grades; returns completions, rewards of complete groups, and stats with the time waited."""
        start = time.perf_counter()
        known = [list(each.rewards) for each in self._pending]
        rewards = {index: grading.result(self._on_poll) for index, grading in self._gradings.items()}
        answers = [_Answer(completed[index], rewards.get(index, known[index]), []) for index in self._own]
        return _HostPart(answers, self._with_grading(stats, start))

    def _with_grading(self, stats: RolloutStats, start: float) -> RolloutStats:
        """The statistics with the time waited since `start`, and what judges were asked."""
        judged = self._grader.take_judged()
        return dataclasses.replace(
            stats,
            reward_s=time.perf_counter() - start,
            judge_requests=judged.requests,
            judge_tokens=judged.tokens,
            judge_cached=judged.cached,
            judge_ungraded=judged.ungraded,
        )


def _graded(episode: Episode) -> Graded:
    """The part of an episode that graders read: its last answer, and the reward that its environment paid."""
    transcript = episode.transcript
    paid = None if episode.final_reward is None else episode.final_reward + sum(episode.turn_rewards)
    return Graded(
        text=transcript.drawn[-1].text if transcript.drawn else "",
        tokens=tuple(transcript.drawn_tokens.tolist()),
        transcript=transcript.messages,
        paid=paid,
        environment=episode.environment,
    )


def _request(pending: Pending, settings: AnswerSettings) -> Request:
    """The engine's request for a pending prompt."""
    return Request(
        prompt=pending.prompt.tokens,
        sampling=settings.sampling,
        seed=pending.prompt.seed,
        completions=settings.completions,
        begun=dict(enumerate(pending.completions)),
    )


def rollout_rules(layout: Layout, decoder: DecoderConfig, mesh: Mesh) -> ShardingRules:
    """The sharding rules of a rollout layout on a mesh, with the devices in the mesh's order."""
    shape = layout.mesh(mesh.shape, decoder.kv_heads)
    return ShardingRules(Mesh(mesh.devices.reshape(tuple(shape.values())), tuple(shape)), ROLLOUT_LAYOUTS[layout.name])
