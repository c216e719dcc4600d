"""Samples and grades completions of prompts: the half of a step that training and evaluation share."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from podium.compile_ahead import CompileAhead, threads_for
from podium.hosts.distributed import AgreedStop, host_mesh, make_localize, share
from podium.hosts.signals import StopSignal
from podium.job.job_context import alone
from podium.models.architecture import DecoderConfig
from podium.models.layouts import Layout
from podium.models.params import ROLLOUT_LAYOUTS
from podium.models.text.tokenizer import Tokenizer
from podium.observe.stats import EnvironmentStats
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request, RolloutStats
from podium.run.resolve import host_share
from podium.run.run_spec import AnswerSettings, RolloutSpec
from podium.sampling.conversations.carry import Pending, Position, drawn_lengths
from podium.sampling.conversations.episodes import Episodes
from podium.sampling.demonstrations import Demonstrations
from podium.sampling.exchange import Ending, Exchange, HostPart
from podium.sampling.feed import EncodedPrompt, Feed
from podium.sampling.grades import Grades
from podium.sampling.groups import Group, GroupScorer, StepGroups
from podium.sampling.partial_rollouts import Choice, PartialRollouts
from podium.sharding import Params, ShardingRules
from podium.tasks.conversations.environments import Environments
from podium.tasks.grading import Grader
from podium.tasks.mixture import TaskPrompt
from podium.terminal import harmless


class FailingEnvironmentError(ValueError):
    """More conversations failed than `environments.max_failed` allows; the message has the first traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(harmless(message))  # it may quote what a model wrote


class Refill:
    """The groups of a step so far; groups with equal rewards may be replaced by the next prompts of the run."""

    def __init__(self, settings: AnswerSettings, prompts: Sequence[EncodedPrompt]) -> None:
        """Start without groups; `prompts` are those of the first round."""
        self._settings = settings
        self.wanted = self.missing = len(prompts)
        """Number of groups with unequal rewards that the step should have, and how many of these are missing."""
        self.groups: list[Group] = []
        self.stats = RolloutStats(dropped_prompts=sum(prompt.skipped for prompt in prompts))

    def more(self, pending: int) -> int:
        """How many further prompts a round answers, in addition to the `pending` ones."""
        return max(0, max(self.missing, self._settings.in_flight - (self.wanted - self.missing)) - pending)

    def add(self, groups: Sequence[Group], stats: RolloutStats, more: Sequence[EncodedPrompt]) -> None:
        """Add the result of a round, which began with `more` prompts."""
        self.groups += groups
        self.stats = self.stats.then(stats).then(RolloutStats(dropped_prompts=sum(each.skipped for each in more)))
        self.missing = self.wanted - sum(not self._is_left_out(group) for group in self.groups)

    def again(self) -> bool:
        """Whether to start another round, which is then counted."""
        if self.stats.refill_rounds == self._settings.max_refills or not self.missing:
            return False
        self.stats = dataclasses.replace(self.stats, refill_rounds=self.stats.refill_rounds + 1)
        return True

    def in_order(self, groups: Sequence[Group]) -> list[Group]:
        """All groups of the step; with refills, those with unequal rewards come first."""
        return sorted(groups, key=self._is_left_out) if self._settings.max_refills else list(groups)

    def _is_left_out(self, group: Group) -> bool:
        return group.equal_rewards(self._settings.zero_variance_metric)


class Sampler:
    """Samples completions with the engine, and has them graded."""

    def __init__(
        self,
        spec: RolloutSpec,
        decoder: DecoderConfig,
        tokenizer: Tokenizer,
        mesh: Mesh,
        *,
        scorers: Sequence[GroupScorer] = (),
        folder: Path | None = None,
        exchange: Exchange | None = None,
        on_progress: Callable[[int, int, int], None] = lambda total, done, tokens: None,
    ) -> None:
        """Start the graders, and make the engine, without weights, on this host's devices of the mesh.

        `scorers` are the spec's grading models. Judges' replies are stored in `folder`, if set. `exchange` connects to
        the run's other hosts; unset: no stop signals and no watchdog. `on_progress` is called when a group is complete,
        with this host's number of completions, how many are done, and their tokens.

        Raises:
            ValueError: a task, its data or the engine's sizes are invalid.
        """
        assert len(scorers) == len(spec.grading_models), "each grading model has its weights"
        self.spec, self._scorers, self._on_progress = spec, tuple(scorers), on_progress
        feed = Feed(spec.prompts, tokenizer)
        dtype, together = jnp.dtype(spec.dtype), spec.layout.over_hosts
        local = mesh if together else host_mesh(mesh)
        rules = rollout_rules(spec.layout, decoder, local)
        settings = host_share(spec.settings, mesh.size // local.size)
        self._localize = make_localize(decoder, mesh, local, dtype)
        self.device = Device(settings, decoder, rules, dtype=dtype)
        self.engine = RolloutEngine(self.device, tokenizer)
        self.ahead = CompileAhead(threads_for(rules.platform))
        self.exchange = exchange or Exchange(AgreedStop(StopSignal()), alone().watchdog, together=together)
        tasks = feed.tasks.levels
        self.grader = Grader(
            tasks,
            spec.grading,
            max_new_tokens=spec.training.sampling.max_new_tokens,
            replies=None if folder is None else folder / f"judged-{jax.process_index()}.jsonl",
        )
        self.episodes: Episodes | None = None
        """Holds conversations, through which then all prompts go; None if no task has any."""
        if any(feed.dialogues):
            self.episodes = Episodes(
                self.engine,
                feed.dialogues,
                Environments(tasks, spec.environments, judges=spec.grading.judges),
                rollout=settings,
                config=spec.environments,
                exchange=self.exchange.answered if together else None,
            )
        self.partial = PartialRollouts(feed, spec)
        self.held = EnvironmentStats()
        """Counts and times of environments and tools in the last call of `answer`."""
        if self.episodes is not None and together and settings.limits.episode_timeout_s is not None:
            raise ValueError(
                f"rollout.layout {spec.layout.name}: several hosts decode together, and their clocks differ; leave"
                " rollout.limits.episode_timeout_s out, or set rollout.layout to replicated, tensor, or hybrid within"
                " a host"
            )

    @property
    def feed(self) -> Feed:
        """The run's prompts."""
        return self.partial.feed

    @property
    def demonstrations(self) -> Demonstrations | None:
        """The demonstrations that are mixed into steps; None if the run has none."""
        return self.partial.demonstrations

    @property
    def position(self) -> Position:
        """The run's position in its prompts: saved with the run, and set when it resumes.

        Setting it makes environments of conversations in flight reopen.
        """
        return self.partial.position

    @position.setter
    def position(self, position: Position) -> None:
        if self.episodes is not None:
            self.episodes.client.forget()
        self.partial.position = position

    def compile_ahead(self) -> None:
        """Start compiling the engine's programs on other threads, if there is an accelerator."""
        if self.ahead.threads:
            self.device.compile_ahead(self.ahead)

    def load(self, params: Params, frozen: Params | None = None, *, version: int = 0) -> float:
        """Load weights into the engine; returns the seconds that this took.

        `frozen` are the weights that no update changes, if any; they need to be passed only once. `version` is the
        number of steps that trained the weights.
        """
        start = time.perf_counter()
        if frozen:
            self.device.freeze(self._localize(frozen))
        self.partial.version = version
        self.engine.load(self._localize(params), version)
        return time.perf_counter() - start

    def next(self, prompts: int) -> StepGroups:
        """Answer the next prompts of the run with training settings; see `answer`."""
        groups, stats = self.answer(self.feed.next(prompts))
        mixed_in = () if self.demonstrations is None else self.demonstrations.next(self.demonstrations.per_step).groups
        return StepGroups(groups, stats, self.held if self.episodes is not None else None, mixed_in)

    def answer(
        self, prompts: Sequence[EncodedPrompt], settings: AnswerSettings | None = None
    ) -> tuple[list[Group], RolloutStats]:
        """Complete and grade prompts; each host answers its share and receives the others' results.

        Without `settings`, training's apply: the recipe's refills, and the carry-over of `rollout.in_flight`, with
        which the groups of the oldest complete prompts are returned.

        Returns:
            As many groups as prompts, in order, and statistics. With refills, groups with unequal rewards come first,
            then those with equal rewards, including replaced ones.

        Raises:
            Interrupted: the run must stop now; raised on all hosts.
        """
        start, carries, exchange = time.perf_counter(), settings is None, self.exchange
        settings = settings or self.spec.training
        refill, held = Refill(settings, prompts), EnvironmentStats()
        pending = [*(self.partial.pending if carries else ()), *(Pending(prompt=prompt) for prompt in prompts)]
        while True:
            more = self.feed.next(refill.more(len(pending)))
            pending += [Pending(prompt=prompt) for prompt in more]
            choice = Choice(self.partial, pending, refill.missing, refill.wanted, exchange)
            mine = share(len(pending))  # what this host decodes and grades; if all decode together, what it grades
            here, own = (pending, mine) if exchange.together else (pending[mine], slice(None))
            on_progress = functools.partial(self._on_progress, len(here) * settings.completions)
            grades = Grades(self.grader, here, own, on_progress, exchange.stop.poll)
            with Ending(together=exchange.together) as ending:  # groups are graded while others are still decoded
                if self.episodes is not None:
                    ending.part = self._converse(here, settings, grades, own, choice, carries=carries)
                elif here or choice.asks:
                    requests = [_request(each, settings) for each in here]
                    on_poll, enough = (exchange.watchdog.beat, choice.enough) if choice.asks else (exchange.poll, None)
                    ending.part = grades.wait_for(*self.engine.generate(requests, grades.submit, on_poll, enough))
                else:
                    ending.part = grades.wait_for([], RolloutStats())
            part = exchange.gather(ending)
            if self.episodes is not None:
                held = held.then(part.episodes)
            now = [answer.of(each) for each, answer in zip(pending, part.answers, strict=True)]
            lengths = tuple(drawn_lengths(pending, now))
            taken, pending = choice.split(now)
            rolled = dataclasses.replace(part.stats, waited_s=choice.waited_s, drawn_lengths=lengths)
            refill.add(*self._scored(taken, rolled), more)
            if not refill.again():
                break
        if self.episodes is not None:
            self._check_failures(refill.groups, held)
            self.held = held
        groups = self._finished(refill.groups, settings)
        if carries:
            self.partial.pending = tuple(pending)
            self._learn(groups)
        return refill.in_order(groups), dataclasses.replace(
            refill.stats,
            in_flight=len(pending),
            retired=sum(map(len, self.feed.tasks.retired.values())),
            answer_s=time.perf_counter() - start,
        )

    def _converse(
        self,
        here: Sequence[Pending],
        settings: AnswerSettings,
        grades: Grades,
        own: slice,
        choice: Choice,
        *,
        carries: bool,
    ) -> HostPart:
        """Hold conversations, and grade each group of this host when its last conversation has ended.

        `own` are those of the prompts `here` that this host grades. `carries`: whether conversations of earlier steps
        continue.
        """
        assert self.episodes is not None, "a task has conversations"
        exchange = self.exchange
        # Hosts that exchange replies or counts of complete prompts during decoding must stop together.
        meets = exchange.together or (jax.process_count() > 1 and choice.leaves)
        made = self.episodes.hold(
            [each.prompt for each in here],
            settings.sampling,
            completions=settings.completions,
            on_episodes=grades.submit_episodes,
            on_poll=exchange.watchdog.beat if meets else exchange.poll,
            own=own,
            begun=[each.episodes for each in here] if carries else None,
            enough=choice.enough if choice.leaves else None,
        )
        return grades.wait_for_episodes(*made)

    def check(self, prompts: Sequence[TaskPrompt]) -> list[str]:
        """Check that answers to these prompts of each task can be graded, as `Grader.check` does.

        Mixed-in demonstrations are checked too.
        """
        for scorer in self._scorers:
            scorer.check(self.feed, prompts)
        return self.grader.check(prompts) + ([] if self.demonstrations is None else self.demonstrations.check())

    def close(self) -> None:
        """Stop the graders and environments, and free the engine's memory."""
        self.grader.close()
        if self.episodes is not None:
            self.episodes.client.environments.close()
        self.ahead.close()
        self.engine.unload()

    def _scored(self, groups: list[Group], stats: RolloutStats) -> tuple[list[Group], RolloutStats]:
        """Add the scores of all grading models to the groups; the engine keeps its weights and cache."""
        if not self._scorers:
            return groups, stats
        start, too_long = time.perf_counter(), 0
        for scorer in self._scorers if groups else ():
            groups, more = scorer.scored(groups, self.feed)
            too_long += more
        grading = dataclasses.replace(stats.grading, scored_s=time.perf_counter() - start, unscored=too_long)
        return groups, dataclasses.replace(stats, grading=grading)

    def _finished(self, groups: list[Group], settings: AnswerSettings) -> list[Group]:
        """Finish all groups of a step: standardise scores, and separate greedy completions."""
        for scorer in self._scorers:
            groups = scorer.standardised(groups)
        return groups if settings.sampling.greedy_completion is None else [group.apart for group in groups]

    def _learn(self, groups: Sequence[Group]) -> None:
        """Pass the shares of right answers to curricula and other settings that choose the next prompts."""
        for group in groups:
            if (correct := group.correct) is not None:
                self.feed.tasks.learn(group.prompt, correct)

    def _check_failures(self, groups: Sequence[Group], held: EnvironmentStats) -> None:
        """Raise FailingEnvironmentError if too many conversations failed through no fault of the model."""
        failed = [transcript.finish_reason == "failed" for group in groups for transcript in group.transcripts]
        limit = self.spec.environments.max_failed
        failures = self.partial.failures = held.failures or self.partial.failures
        if sum(failed) > limit * len(failed):
            self.exchange.stop.leave_together()  # all hosts have counted the same failures
            raise FailingEnvironmentError(
                f"{sum(failed)} of {len(failed)} conversations failed through no fault of the model, and "
                f"environments.max_failed is {limit:g}. The first failure:\n{failures[0].rstrip()}\nFix the "
                "environment, then continue the run"
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
    """The sharding rules of a rollout layout on the devices of a mesh, in the mesh's order."""
    shape = layout.mesh(mesh.shape, decoder.kv_heads)
    return ShardingRules(Mesh(mesh.devices.reshape(tuple(shape.values())), tuple(shape)), ROLLOUT_LAYOUTS[layout.name])
