"""From prompts to graded completions: the half of a step that training and evaluation share."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from podium.accelerators import auto_dtype, cpu_flags, recognise
from podium.algorithms.advantages import equal_reward_groups
from podium.algorithms.recipes import make_recipe
from podium.config.schema import Config, Dtype, RolloutConfig
from podium.config.sizes import check_split
from podium.job.context import alone
from podium.job.watchdog import Watchdog
from podium.models.architecture import DecoderConfig
from podium.models.layouts import Layout, resolve
from podium.models.params import ROLLOUT_LAYOUTS
from podium.models.tokenizer import Tokenizer
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Completion, Request, RolloutStats, SamplingParams
from podium.sharding import Params, ShardingRules
from podium.tasks.grading import Grader, Grading
from podium.tasks.mixture import TaskPrompt
from podium.tasks.task import Graded, Reward
from podium.train.distributed import AgreedStop, Interrupted, gather, host_mesh, make_localize, share
from podium.train.feed import EncodedPrompt, Feed
from podium.train.signals import StopSignal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt, and what became of its completions."""

    prompt: TaskPrompt
    tokens: tuple[int, ...]
    """The prompt as the model read it."""
    completions: list[Completion]
    rewards: list[Reward]

    @property
    def totals(self) -> np.ndarray:
        """The rewards, [G] float32."""
        return np.array([reward.total for reward in self.rewards], np.float32)

    @property
    def equal_rewards(self) -> bool:
        """Whether all its completions earned the same: a group baseline learns nothing from it."""
        return bool(equal_reward_groups(self.totals[None])[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How prompts are answered."""

    sampling: SamplingParams
    completions: int
    """For each prompt."""
    max_refills: int = 0
    """How often prompts whose group has equal rewards are replaced by the next ones of the run."""


class _HostPart(NamedTuple):
    """The results that a host sends to the others."""

    answers: list[tuple[list[Completion], list[Reward]]]
    stats: RolloutStats


class Rollouts:
    """Has the engine complete prompts, and the completions graded."""

    def __init__(
        self,
        config: Config,
        decoder: DecoderConfig,
        tokenizer: Tokenizer,
        mesh: Mesh,
        *,
        stop: AgreedStop | None = None,
        watchdog: Watchdog | None = None,
        on_progress: Callable[[int, int, int], None] = lambda total, done, tokens: None,
    ) -> None:
        """Starts the graders and makes the engine, of this host's devices in the mesh alone; `load` gives it weights.

        Where it is set, `stop` ends a rollout before its time and `watchdog` often hears that it goes on. `on_progress`
        hears of each group that is complete: this host's completions, how many are complete, and their tokens.

        Raises:
            ValueError: a task, its data or the engine's sizes are wrong.
        """
        self.config, self.feed = config, Feed(config, tokenizer)
        recipe = make_recipe(config.algorithm, group_size=config.group_size, prompts_per_step=config.prompts_per_step)
        self.training = AnswerSettings(
            sampling=sampling_params(config),
            completions=config.group_size,
            max_refills=recipe.max_refills if recipe.zero_variance == "refill" else 0,
        )
        dtype = as_dtype(config.rollout.dtype, mesh)
        local = host_mesh(mesh)
        self.layout = rollout_layout(config, decoder, mesh)
        rules = rollout_rules(self.layout, decoder, local)
        settings = host_settings(config.rollout, hosts=mesh.size // local.size)
        self._localize = make_localize(decoder, mesh, dtype)
        self.engine = RolloutEngine(settings, decoder, rules, tokenizer, dtype=dtype)
        self._stop = stop or AgreedStop(StopSignal())
        self._watchdog = watchdog or alone().watchdog
        self._on_progress = on_progress
        self.grader = Grader(config.tasks, config.grading, max_new_tokens=config.rollout.max_new_tokens)

    def load(self, params: Params, frozen: Params | None = None) -> float:
        """Complete with these weights from now on; the seconds that it took to bring them here.

        `frozen` are those that no update changes, if there are any: given once, they stay.
        """
        start = time.perf_counter()
        if frozen:
            self.engine.device.freeze(self._localize(frozen))
        self.engine.load(self._localize(params))
        return time.perf_counter() - start

    def unload(self) -> None:
        """Give their memory back until the next `load`."""
        self.engine.unload()

    def answer(
        self, prompts: Sequence[EncodedPrompt], settings: AnswerSettings | None = None
    ) -> tuple[list[Group], RolloutStats]:
        """Complete and grade prompts; each host does its share of them and gets those of the others from them.

        Without `settings` as in training, with the refills of the recipe.

        Returns:
            A group for each prompt, in their order; with refills first the groups that teach something, then those of
            equal rewards, the replaced ones included. And what all of it took.

        Raises:
            Interrupted: the run is to stop now; on all hosts.
        """
        settings, start = settings or self.training, time.perf_counter()
        groups: list[Group] = []
        stats, wanted = RolloutStats(), len(prompts)
        while True:
            own = prompts[share(len(prompts))]
            requests = [
                Request(prompt=p.tokens, sampling=settings.sampling, seed=p.seed, completions=settings.completions)
                for p in own
            ]
            grades = _Grades(self.grader, own, functools.partial(self._on_progress, len(own) * settings.completions))
            try:
                # a group is graded while others are still decoded
                made = self.engine.generate(requests, grades.submit, self._poll) if own else ([], RolloutStats())
                part = grades.wait_for(*made)
            except Interrupted:
                part = None
            answers, rolled = self._gather(part)
            stats = stats.then(rolled)
            groups += [
                Group(prompt=each.prompt, tokens=each.tokens, completions=completions, rewards=rewards)
                for each, (completions, rewards) in zip(prompts, answers, strict=True)
            ]
            stats = dataclasses.replace(stats, dropped_prompts=stats.dropped_prompts + sum(p.skipped for p in prompts))
            missing = wanted - sum(not group.equal_rewards for group in groups)
            if stats.refill_rounds == settings.max_refills or not missing:
                break
            prompts = self.feed.next(missing)
            stats = dataclasses.replace(stats, refill_rounds=stats.refill_rounds + 1)
        if settings.max_refills:
            groups.sort(key=lambda group: group.equal_rewards)
        return groups, dataclasses.replace(stats, answer_s=time.perf_counter() - start)

    def close(self) -> None:
        """Stop the graders and give the engine's memory back."""
        self.grader.close()
        self.engine.unload()

    def _poll(self) -> None:
        self._watchdog.beat()
        self._stop.poll()

    def _gather(self, part: _HostPart | None) -> tuple[list[tuple[list[Completion], list[Reward]]], RolloutStats]:
        """The answers of all hosts in the order of their prompts; None on one of them interrupts all."""
        with self._watchdog.waiting():
            gathered = gather((part, self._stop.asked()))
        self._stop.agree([asked for _, asked in gathered])
        parts = [part for part, _ in gathered if part is not None]
        if len(parts) < len(gathered):
            raise Interrupted
        stats = functools.reduce(RolloutStats.beside, (part.stats for part in parts))
        return [answer for part in parts for answer in part.answers], stats


class _Grades:
    """The gradings of a host's prompts, begun group by group while the engine goes on."""

    def __init__(
        self, grader: Grader, prompts: Sequence[EncodedPrompt], on_progress: Callable[[int, int], None]
    ) -> None:
        self._grader, self._prompts, self._on_progress = grader, prompts, on_progress
        self._gradings: dict[int, Grading] = {}
        self._done = self._tokens = 0

    def submit(self, index: int, completions: list[Completion]) -> None:
        """Begin to grade the completions of a prompt."""
        prompt = self._prompts[index].prompt
        graded = [(prompt, Graded(text=each.text, num_tokens=len(each.tokens))) for each in completions]
        self._gradings[index] = self._grader.submit(graded)
        self._done += len(completions)
        self._tokens += sum(len(each.tokens) for each in completions)
        self._on_progress(self._done, self._tokens)

    def wait_for(self, completed: list[list[Completion]], stats: RolloutStats) -> _HostPart:
        """All completions with their rewards, and the stats with the seconds of waiting for these."""
        start = time.perf_counter()
        answers = [(completions, self._gradings[index].result()) for index, completions in enumerate(completed)]
        return _HostPart(answers, dataclasses.replace(stats, reward_s=time.perf_counter() - start))


def rollout_layout(config: Config, decoder: DecoderConfig, mesh: Mesh) -> Layout:
    """The layout of a run's rollout on the mesh of all its devices, whose hosts decode each by itself."""
    devices: list[Any] = list(mesh.devices.flat)
    hosts = len({device.process_index for device in devices})
    machine = recognise(devices[0].device_kind, mesh.size)
    return resolve(config, decoder, machine, devices=mesh.size, hosts=hosts)


def rollout_rules(layout: Layout, decoder: DecoderConfig, mesh: Mesh) -> ShardingRules:
    """How weights and sequences are split over the devices of a mesh, in the order that they have there."""
    shape = layout.mesh(mesh.shape, decoder.kv_heads)
    return ShardingRules(Mesh(mesh.devices.reshape(tuple(shape.values())), tuple(shape)), ROLLOUT_LAYOUTS[layout.name])


def host_settings(config: RolloutConfig, *, hosts: int) -> RolloutConfig:
    """A host's share of the engine's slots, rows and cache. Raises ValueError where they do not divide."""
    check_split(config, hosts, "hosts")
    own = {"slots": config.slots // hosts, "prefill_rows": config.prefill_rows // hosts}
    if config.cache_tokens is not None:
        own["cache_tokens"] = config.cache_tokens // hosts
    return config.model_copy(update=own)


def sampling_params(config: Config) -> SamplingParams:
    """How completions are drawn in training."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
    )


@functools.cache
def as_dtype(name: Dtype, mesh: Mesh) -> jnp.dtype:
    """The number format that a config's `dtype` means on these devices."""
    return jnp.dtype(auto_dtype(mesh.devices.flat[0].platform, cpu_flags()) if name == "auto" else name)
