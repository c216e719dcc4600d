"""From prompts to graded completions: the half of a step that training and evaluation share."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from podium.accelerators import auto_dtype, cpu_flags
from podium.config.schema import Config, Dtype, RolloutConfig
from podium.job.context import alone
from podium.job.watchdog import Watchdog
from podium.models.architecture import DecoderConfig
from podium.models.params import ROLLOUT_LAYOUTS
from podium.models.tokenizer import Tokenizer
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Completion, Request, SamplingParams
from podium.sharding import Params, ShardingRules
from podium.tasks.grading import Grader, Grading
from podium.tasks.mixture import TaskMixture, TaskPrompt
from podium.tasks.task import Graded, Reward
from podium.train.distributed import Interrupted, Stop, gather, host_mesh, make_localize, merged, share
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """A prompt that fits, and the seed of its completions."""

    prompt: TaskPrompt
    tokens: tuple[int, ...]
    seed: int


class _Part(NamedTuple):
    """What a host hands to the others."""

    answers: list[tuple[list[Completion], list[Reward]]]
    metrics: dict[str, float]
    reward_s: float


class Rollouts:
    """Draws prompts, has the engine complete them, and has the completions graded."""

    def __init__(
        self,
        config: Config,
        decoder: DecoderConfig,
        tokenizer: Tokenizer,
        mesh: Mesh,
        *,
        stop: Stop | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """Starts the graders and makes the engine, of this host's devices alone; `load` gives it weights.

        Args:
            config: of the run.
            decoder: the model's numbers.
            tokenizer: the model's.
            mesh: of all hosts.
            stop: what ends a rollout before its time; unset: nothing does.
            watchdog: hears often that completions are being made; unset: none.

        Raises:
            ValueError: a task, its data or the engine's sizes are wrong.
        """
        self.config, self.tokenizer = config, tokenizer
        self.tasks = TaskMixture(config.tasks, seed=config.seed)
        dtype = as_dtype(config.rollout.dtype, mesh)
        local = host_mesh(mesh)
        rules = rollout_rules(config.rollout, local)
        settings = host_settings(config.rollout, hosts=mesh.size // local.size)
        self._localize = make_localize(decoder, mesh, dtype)
        self.engine = RolloutEngine(settings, decoder, rules, tokenizer, dtype=dtype)
        self._stop = stop or Stop(StopSignal())
        self._watchdog = watchdog or alone().watchdog
        self.grader = Grader(config.tasks, config.grading, max_new_tokens=config.rollout.max_new_tokens)
        self.dropped_prompts = 0
        """Prompts skipped so far because they are too long."""
        self.rollout_s = self.reward_s = 0.0
        """Seconds so far of completing, and of waiting for grades after it."""
        self._generations: list[dict[str, float]] = []

    def load(self, params: Params) -> None:
        """Complete with these weights from now on."""
        self.engine.load(self._localize(params))

    def unload(self) -> None:
        """Give their memory back until the next `load`."""
        self.engine.unload()

    def collect(self, prompts: int) -> list[Group]:
        """The next prompts of the run, each completed `group_size` times and graded."""
        start = time.perf_counter()
        drawn = self._draw(prompts)
        self.rollout_s += time.perf_counter() - start
        return self.answer(drawn, sampling_params(self.config), completions=self.config.group_size)

    def answer(self, drawn: Sequence[Drawn], sampling: SamplingParams, *, completions: int) -> list[Group]:
        """Complete and grade prompts; each host does its share of them and has those of the others from them.

        Raises:
            Interrupted: the run is to stop now; on all hosts.
        """
        start = time.perf_counter()
        try:
            part = self._answer(drawn[share(len(drawn))], sampling, completions=completions)
        except Interrupted:
            part = None
        with self._watchdog.waiting():
            told = gather((part, self._stop.asked()))
        self._stop.agree([asked for _, asked in told])
        parts = [part for part, _ in told if part is not None]
        if len(parts) < len(told):
            raise Interrupted
        self._generations.append(merged([part.metrics for part in parts]))
        reward_s = max(part.reward_s for part in parts)
        self.reward_s += reward_s
        self.rollout_s += time.perf_counter() - start - reward_s
        answers = [answer for part in parts for answer in part.answers]
        return [
            Group(prompt=each.prompt, tokens=each.tokens, completions=completed, rewards=rewards)
            for each, (completed, rewards) in zip(drawn, answers, strict=True)
        ]

    def _answer(self, drawn: Sequence[Drawn], sampling: SamplingParams, *, completions: int) -> "_Part":
        """The share of this host; a group is graded while others are still decoded."""
        if not drawn:
            return _Part([], {}, 0.0)
        requests = [
            Request(prompt=each.tokens, sampling=sampling, seed=each.seed, completions=completions) for each in drawn
        ]
        gradings: list[Grading | None] = [None] * len(drawn)

        def grade(index: int, completed: list[Completion]) -> None:
            gradings[index] = self.grader.submit([(drawn[index].prompt, _graded(each)) for each in completed])

        completed = self.engine.generate(requests, on_group=grade, on_look=self._look)
        decoded = time.perf_counter()
        rewards = [grading.result() for grading in gradings if grading is not None]
        answers = list(zip(completed, rewards, strict=True))
        return _Part(answers, self.engine.metrics(), time.perf_counter() - decoded)

    def _look(self) -> None:
        self._watchdog.beat()
        self._stop.look()

    def metrics(self) -> dict[str, float]:
        """The engine's metrics since this was last asked: sums, and means weighted by what they are per."""
        generations, self._generations = self._generations, []
        if not generations:
            return {}
        total = {name: sum(each[name] for each in generations) for name in generations[0]}
        steps, seconds = total["rollout/decode_steps"], sum(_seconds(each) for each in generations)
        busy = sum(each["rollout/slot_utilisation"] * each["rollout/decode_steps"] for each in generations)
        total["rollout/slot_utilisation"] = busy / steps if steps else 0.0
        total["rollout/tokens_per_s"] = total["rollout/completion_tokens"] / seconds
        return total

    def encode(self, prompt: TaskPrompt, seed: int) -> Drawn | None:
        """The prompt as the model reads it; None if it is too long and such prompts are dropped."""
        tokens = tuple(self.tokenizer.encode_chat(prompt.prompt.question, prompt.system_prompt))
        rollout = self.config.rollout
        if len(tokens) <= rollout.max_prompt_tokens:
            return Drawn(prompt=prompt, tokens=tokens, seed=seed)
        if rollout.long_prompts == "error":
            raise ValueError(
                f"prompt {prompt.prompt.id} has {len(tokens)} tokens and rollout.max_prompt_tokens is"
                f" {rollout.max_prompt_tokens}; raise it, or set rollout.long_prompts to drop"
            )
        self.dropped_prompts += 1
        return None

    def close(self) -> None:
        """Stop the graders and give the engine's memory back."""
        self.grader.close()
        self.engine.unload()

    def _draw(self, count: int) -> list[Drawn]:
        """The next `count` prompts that fit."""
        drawn: list[Drawn] = []
        too_long: set[tuple[int, str]] = set()  # task and id of what was skipped
        while len(drawn) < count:
            cursor = self.tasks.cursor
            (prompt,) = self.tasks.next(1)
            each = self.encode(prompt, request_seed(self.config.seed, "train", cursor))
            if each is not None:
                drawn.append(each)
                continue
            too_long.add((prompt.task, prompt.prompt.id))
            if len(too_long) == sum(self.tasks.num_prompts().values()):
                limit = self.config.rollout.max_prompt_tokens
                raise ValueError(f"no prompt fits in rollout.max_prompt_tokens {limit}; raise it")
        return drawn


def rollout_rules(config: RolloutConfig, mesh: Mesh) -> ShardingRules:
    """Where the rollout's weights and sequences are."""
    return ShardingRules(mesh, ROLLOUT_LAYOUTS[config.layout])


def host_settings(config: RolloutConfig, *, hosts: int) -> RolloutConfig:
    """A host's share of the engine's slots and rows. Raises ValueError where they do not divide."""
    for name, value in (("slots", config.slots), ("prefill_rows", config.prefill_rows)):
        if value % hosts:
            raise ValueError(
                f"rollout.{name} is {value} and is split over {hosts} hosts; set it to a multiple of {hosts}"
            )
    return config.model_copy(update={"slots": config.slots // hosts, "prefill_rows": config.prefill_rows // hosts})


def request_seed(seed: int, purpose: str, index: int) -> int:
    """The seed of a request, 31 bits: a function of the run's seed, what it is for, and its place in the order."""
    digest = hashlib.sha256(f"{seed} {purpose} {index}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


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


def _seconds(generation: dict[str, float]) -> float:
    return generation["rollout/completion_tokens"] / generation["rollout/tokens_per_s"]


def _graded(completion: Completion) -> Graded:
    return Graded(
        text=completion.text,
        num_tokens=len(completion.tokens),
        truncated=completion.finish_reason == "length",
    )
