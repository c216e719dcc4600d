"""The subject that `podium certify` checks: a tiny clone of the config's model, or the model itself, and a step."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np

from podium.algorithms.recipes import Recipe
from podium.certify.check_result import BAR, RECURRENT_BAR
from podium.certify.naive import (
    Scores,
    Sequences,
    continuation_values,
    distributions,
    in_float64,
    router_shares,
    scores,
    wide,
)
from podium.certify.naive_rules import ENTROPY, OLD_LOGPROBS, Rules
from podium.certify.naive_step import Episode, Room, Scored, minibatch_steps
from podium.certify.numbers_task import LONGEST_PROMPT, LetterBackend
from podium.certify.tiny import Arrays, with_long_window
from podium.config.schema import Config
from podium.hosts.platform import machine_of
from podium.models.architecture import DecoderConfig
from podium.models.params import TRAIN_AXES, frozen_specs, param_specs, trained_specs
from podium.models.text.tokenizer import Tokenizer
from podium.rollout.request import Completion, Request, StopReason
from podium.rollout.transcript import Transcript, transcript_of
from podium.run.resolve import resolve_rollout, sampling_params
from podium.run.run_spec import Role
from podium.sampling.groups import Greedy, Group
from podium.sampling.sampler import Sampler
from podium.sharding import Params, ShardingRules, make_mesh, param_shardings
from podium.tasks.mixture import TaskPrompt
from podium.tasks.task import FAILED as FAILED_REWARD
from podium.tasks.task import Prompt, Reward

PROMPTS = 4
MAX_NEW_TOKENS = 16
"""The setting in the subject's config; completions of `Subject.groups` have at most `Lengths.completion` tokens."""
ROW_TOKENS = 32
"""Tokens per row of a batch; most rows hold several sequences."""
NOISE = 0.3  # nat between a recorded log-probability and the sampler's, so that ratios lie on both sides of a clip
RIGHT, RIGHT_FROM = "right", 0.5
"""A part, without weight, of the rewards in `Subject.groups`: whether the total exceeds RIGHT_FROM."""
SPAN_ARRAYS = ("tokens", "sampled_logprobs", "full_logprobs", "versions")
HINT = 12  # most tokens by which a privileged prompt is longer than the policy's
ALIKE = 1  # index of the group whose completions all have the same reward
TALK = 2  # index of the group whose longer episodes contain an environment's replies
LIMITS: tuple[StopReason, ...] = ("length", "turns", "drawn", "calls", "timeout")
"""Limits that end an episode, which is then truncated."""
FAILED = 3  # index of the group in which an episode fails, in the checks of batches


class Lengths(NamedTuple):
    """Lengths in tokens of the prompts and completions of a subject's step."""

    shortest_prompt: int
    longest_prompt: int
    completion: int
    """The length of the longest completion; the shortest has one token."""

    def prompts(self, count: int, least: int) -> list[int]:
        """Lengths of `count` prompts, of at least `least` tokens."""
        return np.linspace(max(least, self.shortest_prompt), self.longest_prompt, count).round().astype(int).tolist()


SHORT = Lengths(shortest_prompt=1, longest_prompt=LONGEST_PROMPT, completion=10)
LONG = Lengths(shortest_prompt=58, longest_prompt=250, completion=24)
"""Completions of these prompts cross 64, 128, 192 and 256 positions."""
LONG_PAGE_TOKENS = 16


class NaiveModel(NamedTuple):
    """A small model in a role of the run."""

    role: Role
    """Role of the model, with the small model's decoder."""
    weights: Arrays

    @property
    def decoder(self) -> DecoderConfig:
        """Architecture of the model."""
        return self.role.decoder

    def params(self, mesh: jax.sharding.Mesh) -> Params:
        """Copy its weights to a mesh; every call makes a new copy."""
        shardings = param_shardings(param_specs(self.decoder), ShardingRules(mesh, TRAIN_AXES))
        return {name: jax.device_put(x, shardings[name], may_alias=False) for name, x in self.weights.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A small model with weights, the algorithm that trains it, and a step of graded completions to train on."""

    user: Config
    """The user's config."""
    config: Config
    """The user's config with the small steps, short lengths and float32 formats of the checks."""
    recipe: Recipe
    rules: Rules
    """The same algorithm for the naive implementation."""
    decoder: DecoderConfig
    weights: Arrays
    full: bool
    """Whether this is the model itself and not a tiny clone."""
    models: Mapping[str, NaiveModel]
    """The models beside the policy, by the name of their role."""
    lengths: Lengths = SHORT

    def params(self, mesh: jax.sharding.Mesh, weights: Arrays | None = None) -> Params:
        """Copy `weights` (None: the subject's) to a mesh; every call makes a new copy, since updates donate theirs."""
        shardings = param_shardings(param_specs(self.decoder), ShardingRules(mesh, TRAIN_AXES))
        return {
            name: jax.device_put(value, shardings[name], may_alias=False)
            for name, value in (self.weights if weights is None else weights).items()
        }

    @property
    def gradient_bar(self) -> float:
        """Tolerance of a gradient's difference."""
        recurrent = any(place.block.work(self.decoder.width).states for place in self.decoder.places)
        return RECURRENT_BAR if recurrent else BAR

    def trained(self, mesh: jax.sharding.Mesh, weights: Arrays | None = None) -> Params:
        """The parameters that updates change, as in `weights` (None: the subject's)."""
        specs = trained_specs(self.decoder)
        return {name: value for name, value in self.params(mesh, weights).items() if name in specs}

    def frozen(self, mesh: jax.sharding.Mesh) -> Params:
        """The parameters that updates do not change: none, or with LoRA the base model's."""
        specs = frozen_specs(self.decoder)
        return {name: value for name, value in self.params(mesh).items() if name in specs}

    @functools.cached_property
    def rollouts(self) -> Sampler:
        """The run's own sampling and grading, on the first device. Call its `load` before use."""
        mesh = one_device()
        spec = resolve_rollout(self.config, self.recipe, self.decoder, machine_of(list(mesh.devices.flat)))
        return Sampler(spec, self.decoder, Tokenizer(LetterBackend(), eos_tokens=()), mesh)

    @functools.cached_property
    def sampled(self) -> list[list[Completion]]:
        """Completions of `prompts` by the rollout engine, [N][G], cut to different lengths."""
        random, mesh = np.random.default_rng(1), one_device()
        self.rollouts.load(self.trained(mesh), self.frozen(mesh))
        made, _ = self.rollouts.engine.generate(self.requests)
        lengths = iter(
            random.permutation(np.linspace(1, self.lengths.completion, sum(map(len, made))).round().astype(int))
        )
        return [[_cut(each, int(next(lengths))) for each in group] for group in made]

    @property
    def requests(self) -> list[Request]:
        """The requests whose completions are `sampled`."""
        settings = dataclasses.replace(
            sampling_params(self.config.rollout), stop=(), max_new_tokens=self.lengths.completion
        )
        return [
            Request(prompt=prompt, sampling=settings, seed=index, completions=self.config.group_size)
            for index, prompt in enumerate(self.prompts)
        ]

    @functools.cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        """Random prompts; those of pairs have at least two tokens."""
        random = np.random.default_rng(0)
        lengths = self.lengths.prompts(self.config.prompts_per_step, shortest_prompt(self.recipe))
        return [tuple(random.integers(0, self.decoder.vocab, length).tolist()) for length in lengths]

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The graded groups of one step, with the special cases that updates must handle.

        Groups have different reward sums. In one group all rewards are equal, in one the longer episodes are
        conversations of up to three turns, and every limit has cut an episode. Rewards of preferences are 1 and -1
        instead.
        """
        random = np.random.default_rng(2)
        groups = []
        for index, (prompt, completions) in enumerate(zip(self.prompts, self.sampled, strict=True)):
            rewards = random.uniform(0.0, 0.5 + index, len(completions))
            transcripts = [transcript_of(prompt, _with_noise(each, random)) for each in completions]
            if self.recipe.preferences:
                rewards[:] = [1.0, -1.0] if len(rewards) == 2 else [1.0 - 2 * (index % 2)]
            elif index == ALIKE:
                rewards[:] = rewards[0]
            turns: list[tuple[float, ...]] = [() for _ in transcripts]
            if index == TALK:
                transcripts = [_with_replies(each) for each in transcripts]
                turns = [
                    _divided(float(reward), each.num_turns) for reward, each in zip(rewards, transcripts, strict=True)
                ]
            for place, reason in enumerate(LIMITS[index :: len(self.prompts)], start=1):
                if place <= len(transcripts):
                    transcripts[-place] = dataclasses.replace(transcripts[-place], finish_reason=reason)
            groups.append(make_group(index, transcripts, rewards, turns, greedy=0.1 + 0.3 * index))
        return groups

    @property
    def failing_groups(self) -> list[Group]:
        """The groups, in which one episode and one greedy completion failed for a reason that is not the model's."""
        *others, group = self.groups
        assert len(others) == FAILED, "the last group has failed episodes"
        assert others[0].greedy is not None, "every group has a greedy completion"
        others[0] = dataclasses.replace(others[0], greedy=others[0].greedy._replace(reward=FAILED_REWARD))
        (first, *rest), (_, *rewards) = group.transcripts, group.rewards
        first = dataclasses.replace(first, finish_reason="failed")
        return [*others, dataclasses.replace(group, transcripts=[first, *rest], rewards=[FAILED_REWARD, *rewards])]

    @property
    def converses(self) -> bool:
        """Whether a task of the user's config has conversations; the watched run has them then too."""
        return self.config.rollout.max_episode_tokens is not None

    @property
    def longest(self) -> int:
        """The longest completion or conversation, in tokens: the denominator of `mean: constant`."""
        return self.config.rollout.max_episode_tokens or self.config.rollout.max_new_tokens

    @property
    def room(self) -> Room:
        """Sizes of the naive implementation's padded arrays, for every step."""
        return Room(
            episodes=self.config.prompts_per_step * self.config.group_size,
            prompt=self.lengths.longest_prompt,
            continuation=self.longest,
            hint=HINT,
        )

    @functools.cached_property
    def sequences(self) -> Sequences[np.ndarray]:
        """The groups as input of the naive objective: one optimizer step on all of them."""
        whole = dataclasses.replace(self.rules, minibatches=1, zero_variance="keep")
        (sequences,) = self.naive_steps(self.groups, whole, self.weights)
        assert sequences is not None, "the groups have tokens to train on"
        return sequences

    def naive_steps(
        self,
        groups: Sequence[Group],
        rules: Rules,
        weights: Arrays,
        others: Mapping[str, Arrays] = MappingProxyType({}),
    ) -> list[Sequences[np.ndarray] | None]:
        """The naive implementation's optimizer steps for one pass over `groups`, starting from the policy's `weights`.

        A minibatch without a token to train on has None.

        `others` replaces weights of the models beside the policy, by the name of their role.
        """
        models: dict[str, Scored] = {
            OLD_LOGPROBS: lambda tokens, starts: self.naive_scores(tokens, starts, weights).logprobs,
            ENTROPY: lambda tokens, starts: self.naive_scores(tokens, starts, weights).entropy,
        }
        for name, model in self.models.items():
            assert model.role.scores is not None, "the model scores batches"
            models[model.role.scores] = self._scored_by(model._replace(weights=others.get(name, model.weights)))
        episodes = [episodes_of(group) for group in groups]
        return minibatch_steps(rules, episodes, self.room, models, max_new_tokens=self.longest)

    def _scored_by(self, model: NaiveModel) -> Scored:
        """The function by which a model scores tokens: values, log-probabilities, or those of the whole vocabulary."""
        weights, decoder = model.weights, model.decoder
        if decoder.scores != "none":
            return lambda tokens, starts: self._naive_values(tokens, starts, model)
        if model.role.compared:
            return lambda tokens, starts: self.naive_table(tokens, starts, weights, decoder=decoder)
        return lambda tokens, starts: self.naive_scores(tokens, starts, weights, decoder=decoder).logprobs

    def _naive_values(self, tokens: np.ndarray, starts: np.ndarray, model: NaiveModel) -> np.ndarray:
        """The model's naive values before the tokens after each prompt, [S, n] float64."""
        with in_float64():
            n = self.room.continuation
            return np.asarray(_values(wide(model.weights), tokens, starts, decoder=model.decoder, n=n))

    def naive_scores(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        weights: Arrays,
        temperature: float | None = None,
        decoder: DecoderConfig | None = None,
        penalty: float = 1.0,
    ) -> Scores[np.ndarray]:
        """Score the tokens after each prompt with the naive model, [S, n] float64.

        Args:
            tokens: [S, T] int32, prompts with what follows them.
            starts: [S] int32, lengths of the prompts.
            weights: by parameter name.
            temperature: of the softmax; None: the config's.
            decoder: of the weights; None: the subject's.
            penalty: the repetition penalty; 1 has no effect, as for the trained policy.
        """
        table = self.naive_table(tokens, starts, weights, temperature, penalty=penalty, decoder=decoder)
        with in_float64():
            return Scores(*(np.asarray(x) for x in _scores(table, tokens, starts)))

    def naive_table(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        weights: Arrays,
        temperature: float | None = None,
        penalty: float = 1.0,
        decoder: DecoderConfig | None = None,
    ) -> np.ndarray:
        """Log-probabilities of the whole vocabulary at the places after each prompt, [S, n, V] float64.

        Arguments as for `naive_scores`.
        """
        with in_float64():
            table = _distributions(
                wide(weights),
                tokens,
                starts,
                decoder=decoder or self.decoder,
                temperature=self.config.rollout.temperature if temperature is None else temperature,
                penalty=penalty,
                n=self.room.continuation,
            )
            return np.asarray(table)

    def naive_router_shares(self, tokens: np.ndarray, weights: Arrays) -> np.ndarray:
        """The shares that routers give experts, [S, T, K, E] float64, for sequences [S, T] and K layers."""
        with in_float64():
            return np.asarray(_router_shares(wide(weights), tokens, decoder=self.decoder))


_router_shares = jax.jit(
    lambda weights, tokens, decoder: jax.vmap(lambda own: router_shares(weights, own, decoder))(tokens),
    static_argnames="decoder",
)
_values = jax.jit(continuation_values, static_argnames=("decoder", "n"))
_distributions = jax.jit(distributions, static_argnames=("decoder", "n"))
_scores = jax.jit(scores)


def episodes_of(group: Group) -> list[Episode]:
    """Convert a group's transcripts and rewards to episodes of the naive implementation."""
    baseline = np.nan if group.greedy is None else float(group.greedy.reward.total)
    hint = tuple(map(int, group.prompt.prompt.answer.split()))
    return [
        episode_of(each, reward, baseline, hint) for each, reward in zip(group.transcripts, group.rewards, strict=True)
    ]


def episode_of(transcript: Transcript, reward: Reward, baseline: float = np.nan, hint: tuple[int, ...] = ()) -> Episode:
    """Convert a transcript to an episode of the naive implementation.

    `baseline` is the reward of its prompt's greedy completion, and `hint` what a privileged prompt adds to the prompt.
    """
    prompt, *spans = transcript.spans
    while spans and spans[-1].source != "drawn":
        spans.pop()
    return Episode(
        prompt=tuple(prompt.tokens.tolist()),
        tokens=tuple(token for span in spans for token in span.tokens.tolist()),
        drawn=tuple(span.source == "drawn" for span in spans for _ in span.tokens),
        logprobs=tuple(logprob for span in spans for logprob in span.full_logprobs.tolist()),
        drawn_logprobs=tuple(logprob for span in spans for logprob in span.sampled_logprobs.tolist()),
        turns=tuple(
            sum(each.source == "drawn" for each in spans[:place])
            for place, span in enumerate(spans)
            for _ in span.tokens
        ),
        truncated=transcript.finish_reason != "stop",
        reward=np.nan if reward.failed else float(reward.total),
        turn_rewards=reward.turns,
        parts=tuple((name, value, reward.weights.get(name)) for name, value in reward.parts.items()),
        baseline=baseline,
        privileged=(*prompt.tokens.tolist(), *hint),
    )


def with_long_sequences(subject: Subject) -> Subject:
    """The same subject with a step of long sequences: they fill many pages and blocks, and prompts many chunks.

    The windows of a clone are longer too, so that the pages of a window are fewer than those of a sequence.
    """
    rollout = subject.config.rollout.model_copy(
        update={
            "max_prompt_tokens": LONG.longest_prompt,
            "max_new_tokens": LONG.completion,
            "max_episode_tokens": None,
            "page_tokens": LONG_PAGE_TOKENS,
            "cache_tokens": None,
            "reproducible": True,  # prompts enter in chunks of 128 tokens
        }
    )
    config = subject.config.model_copy(update={"rollout": rollout})
    decoder = subject.decoder if subject.full else with_long_window(subject.decoder)
    positions = max(decoder.max_positions, LONG.longest_prompt + LONG.completion)  # no weight depends on it
    decoder = dataclasses.replace(decoder, max_positions=positions)
    return dataclasses.replace(subject, config=config, decoder=decoder, lengths=LONG)


def shortest_prompt(recipe: Recipe) -> int:
    """The least number of tokens of a prompt: two for pairs, whose rows share all tokens of a prompt but the last."""
    return 2 if recipe.data_form == "pair" else 1


def make_group(
    index: int,
    transcripts: list[Transcript],
    rewards: Sequence[float] | np.ndarray,
    turns: Sequence[tuple[float, ...]] | None = None,
    *,
    greedy: float,
) -> Group:
    """Make a graded group like those that `Sampler` returns, with the reward of a greedy completion.

    `turns` are the rewards of conversations' turns.
    """
    question, answer = (" ".join(map(str, each)) for each in (transcripts[0].prompt.tolist(), _hint(index)))
    task = TaskPrompt(task=0, prompt=Prompt(id=str(index), question=question, answer=answer), system_prompt=None)
    paid = [
        Reward(
            total=float(reward),
            parts={"correct": float(reward), RIGHT: float(reward > RIGHT_FROM)},
            weights={"correct": 1.0},
            turns=own,
        )
        for reward, own in zip(rewards, turns or [() for _ in transcripts], strict=True)
    ]
    baseline = Greedy(transcripts[0], Reward(total=greedy, parts={"correct": greedy}, weights={"correct": 1.0}))
    return Group(prompt=task, transcripts=transcripts, rewards=paid, greedy=baseline)


def _hint(index: int) -> list[int]:
    """The right answer to a group's prompt, 1 to HINT tokens, which a privileged prompt adds to it."""
    return [1 + (17 * index + 5 * place) % 300 for place in range(1 + 4 * index % HINT)]


def one_device() -> jax.sharding.Mesh:
    """A mesh of the first device only."""
    return make_mesh("auto", jax.devices()[:1])


def _cut(completion: Completion, length: int) -> Completion:
    return dataclasses.replace(
        completion,
        tokens=completion.tokens[:length],
        sampled_logprobs=completion.sampled_logprobs[:length],
        full_logprobs=completion.full_logprobs[:length],
        versions=completion.versions[:length],
        choices=None if completion.choices is None else completion.choices[:length],
        finish_reason="stop",
    )


def _with_noise(completion: Completion, random: np.random.Generator) -> Completion:
    noise = random.normal(0.0, NOISE, len(completion.tokens)).astype(np.float32)
    return dataclasses.replace(completion, full_logprobs=completion.full_logprobs + noise)


def _with_replies(transcript: Transcript) -> Transcript:
    """Split the drawn tokens into as many parts as fit, up to five, and mark every second as an environment's reply.

    The parts are of unequal length, so that a turn's tokens are not mistaken for another's. An episode of one or two
    tokens stays as it is.
    """
    prompt, drawn = transcript.spans
    size = len(drawn.tokens)
    ends = {0: [0, size], 1: [0, 1, 2, size], 2: [0, 2, 3, 4, 5, size]}[min(2, size // 3)]
    spans = [prompt]
    for place, (start, end) in enumerate(itertools.pairwise(ends)):
        own = {name: getattr(drawn, name)[start:end] for name in SPAN_ARRAYS}
        choices = None if drawn.choices is None else drawn.choices[start:end]
        span = dataclasses.replace(drawn, turn=(place + 1) // 2, choices=choices, **own)
        if place % 2:
            nothing = np.zeros_like(span.full_logprobs)
            span = dataclasses.replace(span, source="environment", sampled_logprobs=nothing, full_logprobs=nothing)
        spans.append(span)
    return dataclasses.replace(transcript, spans=tuple(spans))


def _divided(total: float, turns: int) -> tuple[float, ...]:
    """Rewards of turns that sum to the total, all of them different."""
    shares = [1.0 + turn for turn in range(turns)]
    return tuple(total * share / sum(shares) for share in shares)
