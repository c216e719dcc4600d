"""The subject that `podium certify` checks: a tiny clone of the config's model, or the model itself, and a step."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from podium.algorithms.recipe_options import make_recipe
from podium.algorithms.recipes import Recipe
from podium.certify.check_result import BAR, RECURRENT_BAR
from podium.certify.naive import Scores, Sequences, Weights, continuation_values, distributions, in_float64, scores
from podium.certify.naive_rules import Rules, rules_of
from podium.certify.naive_step import Episode, Room, optimizer_steps
from podium.certify.numbers_task import (
    CONVERSATIONS,
    LONGEST_QUESTION,
    LONGEST_REPLY,
    NAME,
    STOPS,
    TURNS,
    LetterBackend,
)
from podium.certify.tiny import Arrays, other_weights, random_weights, tiny_clone, with_long_window
from podium.config.data import DataConfig
from podium.config.imports import is_path
from podium.config.schema import Config, EnvironmentsConfig, GradingConfig, LimitsConfig, TaskConfig
from podium.hosts.platform import machine_of
from podium.models.architecture import DecoderConfig, frozen_decoder, scoring_decoder
from podium.models.params import TRAIN_AXES, frozen_specs, is_adapter, param_specs, trained_specs
from podium.models.text.tokenizer import Tokenizer
from podium.rollout.request import Completion, Request, StopReason
from podium.rollout.transcript import Transcript, transcript_of
from podium.run.resolve import resolve_algorithm, resolve_recipe, resolve_rollout, sampling_params
from podium.run.roles import find_decoder, scoring_models
from podium.run.run_spec import SCORE, Role
from podium.sampling.groups import Greedy, Group
from podium.sampling.sampler import Sampler
from podium.sharding import Params, ShardingRules, make_mesh, param_shardings
from podium.tasks.conversations.environment_forms import conversing
from podium.tasks.mixture import TaskPrompt
from podium.tasks.task import FAILED as FAILED_REWARD
from podium.tasks.task import Prompt, Reward
from podium.train.setup import load_weights, make_model

PROMPTS = 4
COMPLETIONS = 4
LONGEST_PROMPT = LONGEST_QUESTION
MAX_NEW_TOKENS = 16
"""The setting in the subject's config; completions of `Subject.groups` have at most `Lengths.completion` tokens."""
ROW_TOKENS = 28
"""Tokens per row of a batch; most rows hold several sequences."""
LONGEST_CONVERSATION = LONGEST_QUESTION + 2 * MAX_NEW_TOKENS + LONGEST_REPLY
"""Tokens of the longest conversation in the run that is watched: some are cut before their last turn."""
MOST_DRAWN = 24  # tokens that the model draws in a conversation, which cuts some of them
NOISE = 0.3  # nat between a recorded log-probability and the sampler's, so that ratios lie on both sides of a clip
OTHER_SEED = 7  # replaces a seed of 0
OTHER_THAN_1 = 0.9  # replaces a temperature of 1, at which a missing division would not show
IN_FLIGHT = 2.0  # rollout.in_flight: completions span several steps, and updates come between turns and their replies
MAX_STALENESS = 1  # so that a step has to wait for prompts that would become too old
PAGE_TOKENS = 4  # several pages even for short sequences
CACHE_SHARE = 0.35  # of the cache tokens that all slots need at most, so that sequences are preempted
EVAL_SAMPLES = 2  # answers to each evaluation question, besides the greedy one
EVAL_TEMPERATURE = 0.7  # replaces one of 1
OVERLONG_TOKENS = 6  # last tokens before MAX_NEW_TOKENS, over which the length reward falls
REWARDS = {"correct": 0.8, "length": 0.3}
RIGHT, RIGHT_FROM = "right", 0.5
"""A part of rewards without weight in the groups of `Subject.groups`: whether the total exceeds a bound."""
SPAN_ARRAYS = ("tokens", "sampled_logprobs", "full_logprobs", "versions")
HINT = 12  # most tokens that a privileged prompt has more than the policy's
PRIVILEGED = "{question} {answer}"
"""The template of these prompts; the naive implementation joins their tokens by itself."""
ALIKE = 1  # index of the group whose completions all have the same reward
TALK = 2  # index of the group whose longer episodes contain an environment's replies
LIMITS: tuple[StopReason, ...] = ("length", "turns", "drawn", "calls", "timeout")
"""Limits that end an episode, which is then truncated."""
FAILED = 3  # index of the group in which an episode fails, in the checks of batches


class Lengths(NamedTuple):
    """Lengths in tokens of what is made for a subject's step."""

    shortest_prompt: int
    longest_prompt: int
    completion: int
    """Of the longest completion; the shortest has one token."""

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
    """With the small model's decoder."""
    weights: Arrays

    @property
    def decoder(self) -> DecoderConfig:
        """Its architecture."""
        return self.role.decoder

    def params(self, mesh: jax.sharding.Mesh) -> Params:
        """Copy its weights to a mesh; a new copy in every call."""
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
        """Copy `weights` (None: the subject's) to a mesh; a new copy in every call, since updates donate theirs."""
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
        spec = resolve_rollout(self.config, self.recipe, self.decoder, machine_of(mesh))
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
        """What the engine is asked for `sampled`."""
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
        """The same groups, with an episode and a greedy completion that failed for a reason that is not the model's."""
        *others, group = self.groups
        assert len(others) == FAILED, "the last group has one that fails"
        assert others[0].greedy is not None, "every group has one"
        others[0] = dataclasses.replace(others[0], greedy=others[0].greedy._replace(reward=FAILED_REWARD))
        (first, *rest), (_, *rewards) = group.transcripts, group.rewards
        first = dataclasses.replace(first, finish_reason="failed")
        return [*others, dataclasses.replace(group, transcripts=[first, *rest], rewards=[FAILED_REWARD, *rewards])]

    @property
    def converses(self) -> bool:
        """Whether a task of the user's config has conversations; then the run that is watched has them."""
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
    def sequences(self) -> Sequences:
        """The groups as input of the naive objective: one optimizer step on all of them."""
        whole = dataclasses.replace(self.rules, minibatches=1, zero_variance="keep")
        (sequences,) = self.naive_steps(self.groups, whole, self.weights)
        return sequences

    def naive_steps(
        self,
        groups: Sequence[Group],
        rules: Rules,
        weights: Arrays,
        valued: Arrays | None = None,
        reference: Arrays | None = None,
    ) -> list[Sequences]:
        """The naive implementation's optimizer steps for one pass over `groups`, starting from `weights`.

        `valued` are the critic's weights, and `reference` those of the reference model (None: the subject's).
        """
        anchor = None
        if rules.kl != "none" or rules.preferences:
            anchor = reference or self.models["reference"].weights
        critic = self.models.get("critic")
        return optimizer_steps(
            rules,
            [episodes_of(group) for group in groups],
            self.room,
            max_new_tokens=self.longest,
            policy=lambda tokens, starts: self.naive_scores(tokens, starts, weights).logprobs,
            reference=None
            if anchor is None
            else (lambda tokens, starts: self.naive_scores(tokens, starts, anchor).logprobs),
            teacher=self._taught(rules),
            critic=None
            if critic is None
            else (lambda tokens, starts: self._naive_values(tokens, starts, critic, valued or critic.weights)),
            entropy=None
            if rules.top_entropy == 1
            else (lambda tokens, starts: self.naive_scores(tokens, starts, weights).entropy),
        )

    def _taught(self, rules: Rules) -> Callable[[np.ndarray, np.ndarray], np.ndarray] | None:
        """The naive teacher's log-probabilities after each prompt: of the tokens, or of the whole vocabulary."""
        teacher = self.models.get("teacher")
        if teacher is None:
            return None
        if rules.teacher_loss == "sampled":
            return lambda tokens, starts: (
                self.naive_scores(tokens, starts, teacher.weights, decoder=teacher.decoder).logprobs
            )
        return lambda tokens, starts: self.naive_table(tokens, starts, teacher.weights, decoder=teacher.decoder)

    def _naive_values(self, tokens: np.ndarray, starts: np.ndarray, critic: NaiveModel, weights: Arrays) -> np.ndarray:
        """The naive critic's values before the tokens after each prompt, [S, n] float64."""
        with in_float64():
            return np.asarray(_naive_values(critic.decoder, self.room.continuation)(_wide(weights), tokens, starts))

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
            penalty: on repetition; 1: none, as for the trained policy.
        """
        with in_float64():
            score = _naive_scorer(decoder or self.decoder, self.room.continuation)
            at = self.config.rollout.temperature if temperature is None else temperature
            found = score(_wide(weights), tokens, starts, at, penalty)
            return Scores(*(np.asarray(x) for x in found))

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
            table = _naive_distributions(decoder or self.decoder, self.room.continuation)
            at = self.config.rollout.temperature if temperature is None else temperature
            return np.asarray(table(_wide(weights), tokens, starts, at, penalty))


def _wide(weights: Arrays) -> Weights:
    """The weights in float64; within `in_float64`."""
    return {name: jnp.asarray(np.asarray(value, np.float64)) for name, value in weights.items()}


def episodes_of(group: Group) -> list[Episode]:
    """Convert a group's transcripts and rewards to episodes of the naive implementation."""
    baseline = np.nan if group.greedy is None else float(group.greedy.reward.total)
    hint = tuple(map(int, group.prompt.prompt.answer.split()))
    return [
        episode_of(each, reward, baseline, hint) for each, reward in zip(group.transcripts, group.rewards, strict=True)
    ]


def episode_of(transcript: Transcript, reward: Reward, baseline: float = np.nan, hint: tuple[int, ...] = ()) -> Episode:
    """Convert a transcript to an episode of the naive implementation.

    `baseline` is its prompt's greedy reward, and `hint` what a privileged teacher reads after the prompt.
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
        reward=float(reward.total),
        turn_rewards=reward.turns,
        parts=tuple((name, reward.parts[name], weight) for name, weight in reward.weights.items()),
        values=tuple(reward.parts.items()),
        baseline=baseline,
        privileged=(*prompt.tokens.tolist(), *hint),
    )


def make_subject(config: Config, *, full: bool = False) -> Subject:
    """Make a tiny clone of the config's model with random weights; with `full`, load the model itself.

    Raises:
        ValueError: the model cannot be used, or the loss is the user's own.
    """
    user, config = config, _small_step(config)
    if full:
        model = make_model(config)
        decoder, loaded = model.decoder, load_weights(dataclasses.replace(model, mesh=one_device()), None)
        weights = {name: np.asarray(value, np.float32) for name, value in loaded.items()}
        weights |= {name: value for name, value in random_weights(decoder, seed=0).items() if is_adapter(name)}
    else:
        decoder = tiny_clone(find_decoder(config))
        weights = random_weights(decoder, seed=0)
    recipe = dataclasses.replace(resolve_recipe(config), loss_parts={})
    rules = _rules_of_own(recipe) if is_path(config.algorithm.recipe) else rules_of(config.algorithm)
    rules = dataclasses.replace(rules, penalised=config.rollout.repetition_penalty != 1)
    if config.teacher is not None:
        rules = dataclasses.replace(
            rules,
            teacher_weight=config.teacher.weight,
            teacher_loss=config.teacher.loss,
            teacher_reverse=config.teacher.reverse,
            teacher_privileged=config.teacher.prompt == "privileged",
        )
    charged = rules.advantage != "maxrl"  # its rewards must not be negative
    name = NAME if config.rollout.max_episode_tokens is None else CONVERSATIONS
    options: dict[str, object] = {"vocab": decoder.vocab, "shortest": shortest_prompt(recipe)}
    task = TaskConfig(name=name, options=options, rewards=REWARDS if charged else {"correct": 0.8})
    config = config.model_copy(update={"tasks": [task]})
    return Subject(
        user=user,
        config=config,
        recipe=recipe,
        rules=rules,
        decoder=decoder,
        weights=weights,
        full=full,
        models=small_models(scoring_models(config, recipe, decoder), decoder, weights),
    )


def with_long_sequences(subject: Subject) -> Subject:
    """The same subject with a step of long sequences: of many pages, blocks and chunks of a prompt.

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
    return dataclasses.replace(subject, config=config, decoder=decoder, lengths=LONG)


def shortest_prompt(recipe: Recipe) -> int:
    """The least number of tokens of a prompt: two in pairs, which share all but the last."""
    return 2 if recipe.data_form == "pair" else 1


def small_models(roles: Sequence[Role], policy: DecoderConfig, weights: Arrays) -> Mapping[str, NaiveModel]:
    """The models beside a policy with these weights, by the name of their role, each small and with its vocabulary."""
    found: dict[str, NaiveModel] = {}
    for role in roles:
        if role.phase == SCORE:
            found[role.name] = NaiveModel(role, other_weights(policy, weights))
            continue
        decoder = dataclasses.replace(tiny_clone(policy), vocab=policy.vocab, lora=None)
        if role.learning is not None:
            own, decoder, seed = scoring_decoder(decoder), scoring_decoder(decoder), 3
        else:  # a layer more of each kind
            stacks = tuple(dataclasses.replace(stack, repeats=stack.repeats + 1) for stack in decoder.stacks)
            decoder, seed = dataclasses.replace(decoder, stacks=stacks), 2
            own = frozen_decoder(decoder, "bfloat16")
        found[role.name] = NaiveModel(dataclasses.replace(role, decoder=own), random_weights(decoder, seed=seed))
    return found


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
    """The reference answer of a group, 1 to HINT tokens: what a teacher with its own prompts reads besides."""
    return [1 + (17 * index + 5 * place) % 300 for place in range(1 + 4 * index % HINT)]


def one_device() -> jax.sharding.Mesh:
    """A mesh of the first device only."""
    return make_mesh("auto", jax.devices()[:1])


def _small_step(config: Config) -> Config:
    """The config with a step of a few short completions; each batch is used twice if the recipe allows it.

    If a task has conversations, `rollout.max_episode_tokens` is set, and unset otherwise. All computation is in
    float32, including weights that LoRA freezes. Values that would hide a bug are replaced: a temperature of 1, and a
    `rollout.in_flight` that carries no prompts over to the next step. Pages are small, and too few for all slots.
    Weights that the rollout rounds are not rounded, so that sampler and trainer can be compared; the correction that
    they have by default stays.
    """
    alone = resolve_algorithm(config).model_copy(update={"loss_parts": []})
    config = config.model_copy(update={"algorithm": alone})
    recipe = make_recipe(config.algorithm, group_size=config.group_size, prompts_per_step=config.prompts_per_step)
    group = config.group_size  # of preferences, as in the data
    if not recipe.preferences:  # few, but more than the k of pass@k, whose advantages would otherwise all be 0
        group = max(COMPLETIONS, int(recipe.advantage.keywords.get("k", 0)) + 1)
    twice = make_recipe(config.algorithm, group_size=group, prompts_per_step=2 * config.algorithm.minibatches)
    if is_path(twice.loss):
        raise ValueError(
            f"algorithm.loss {twice.loss}: certify has no naive implementation to compare it with; test it separately,"
            " and certify the run with one of Podium's losses"
        )
    if twice.learns_values and is_path(config.algorithm.recipe):
        raise ValueError(
            f"algorithm.recipe {config.algorithm.recipe} has a critic, and certify has no naive form of its advantage;"
            " certify the run with recipe ppo"
        )
    if twice.router_loss_coef:
        raise ValueError(
            f"algorithm.router_loss_coef {twice.router_loss_coef:g}: certify has no naive form of it to compare with;"
            " certify the run with 0"
        )
    algorithm: dict[str, object] = {}
    if config.algorithm.zero_variance_metric is not None or twice.zero_variance == "refill":
        algorithm["zero_variance_metric"] = "correct"  # a question of the subject's task is never right
    algorithm |= {"minibatches": 1, "updates_per_batch": 1 if twice.loss == "reinforce" else 2}
    given = config.rollout
    talks = not twice.demonstrations and any(conversing(task) is not None for task in config.tasks)
    lengths = {"max_prompt_tokens": LONGEST_PROMPT, "max_new_tokens": MAX_NEW_TOKENS, "stop": list(STOPS)}
    lengths |= {
        "max_episode_tokens": LONGEST_CONVERSATION if talks else None,
        "limits": LimitsConfig(max_turns=TURNS, max_drawn_tokens=MOST_DRAWN),
    }
    longest = LONGEST_CONVERSATION if talks else LONGEST_PROMPT + MAX_NEW_TOKENS
    slots = {"slots": PROMPTS * group, "prefill_rows": PROMPTS, "layout": "replicated", "refill_steps": 2}
    slots |= {"page_tokens": PAGE_TOKENS, "cache_tokens": round(CACHE_SHARE * PROMPTS * group * longest)}
    visible = {
        "temperature": given.temperature if given.temperature != 1.0 else OTHER_THAN_1,
        "in_flight": IN_FLIGHT,
        "max_staleness": MAX_STALENESS,
        "thinking": "keep",
        "long_prompts": "drop",
        "weights": "dtype",
        "reproducible": talks,  # a step is repeated bit for bit
    }
    row_tokens = LONGEST_PROMPT + 2 * MAX_NEW_TOKENS if twice.data_form == "pair" else ROW_TOKENS
    sizes = {"packing": "shared_prompts", "row_tokens": row_tokens, "rows_per_device": None, "tokens_per_device": None}
    lora = config.lora and config.lora.model_copy(update={"base": "bfloat16", "adapter": None})
    asked: dict[str, object] = {"at_start": False, "at_end": False, "every_steps": 0, "questions": None}
    asked |= {"greedy": True, "samples": EVAL_SAMPLES}
    if config.eval.temperature == 1:
        asked["temperature"] = EVAL_TEMPERATURE
    parts: dict[str, Any] = {
        "lora": lora,
        "eval": config.eval.model_copy(update=asked),
        "rollout": given.model_copy(update={**lengths, **slots, **visible, "dtype": "float32"}),
        # The naive form chooses experts anew in a second update.
        "train": config.train.model_copy(update={**sizes, "dtype": "float32", "replay_routing": False}),
        "algorithm": config.algorithm.model_copy(update=algorithm),
        "grading": GradingConfig(workers=0, overlong_buffer_tokens=OVERLONG_TOKENS),
        "environments": EnvironmentsConfig(workers=0, retries=0, group_seed=config.environments.group_seed),
        "data": DataConfig(),  # the subject's task has few prompts
        "reward_models": [],  # rewards are an input of the update; the subject's task has its own
    }
    if config.teacher is not None and config.teacher.prompt == "privileged":
        own = {"template": PRIVILEGED, "max_prompt_tokens": LONGEST_PROMPT + HINT}
        parts["teacher"] = config.teacher.model_copy(update=own)
    if config.critic is not None:
        parts["critic"] = config.critic.model_copy(update={"warmup_steps": 0})
    parts |= {"prompts_per_step": PROMPTS, "group_size": group, "seed": config.seed or OTHER_SEED}
    return config.model_copy(update=parts)


@functools.cache
def _naive_values(decoder: DecoderConfig, n: int) -> Callable[[Weights, np.ndarray, np.ndarray], jax.Array]:
    return jax.jit(lambda weights, tokens, starts: continuation_values(weights, tokens, starts, decoder, n))


class _NaiveScorer(Protocol):
    def __call__(
        self, weights: Weights, tokens: np.ndarray, starts: np.ndarray, temperature: float, penalty: float, /
    ) -> Scores[jax.Array]: ...


@functools.cache
def _naive_scorer(decoder: DecoderConfig, n: int) -> _NaiveScorer:
    def scored(
        weights: Weights, tokens: jax.Array, starts: jax.Array, temperature: float, penalty: float
    ) -> Scores[jax.Array]:
        return scores(
            distributions(
                weights, tokens, starts=starts, decoder=decoder, temperature=temperature, penalty=penalty, n=n
            ),
            tokens,
            starts,
        )

    return jax.jit(scored)


class _NaiveDistributions(Protocol):
    def __call__(
        self, weights: Weights, tokens: np.ndarray, starts: np.ndarray, temperature: float, penalty: float, /
    ) -> jax.Array: ...


@functools.cache
def _naive_distributions(decoder: DecoderConfig, n: int) -> _NaiveDistributions:
    return jax.jit(
        lambda weights, tokens, starts, temperature, penalty: distributions(
            weights, tokens, starts=starts, decoder=decoder, temperature=temperature, penalty=penalty, n=n
        )
    )


def _rules_of_own(recipe: Recipe) -> Rules:
    """Rules for a user's own recipe, copied from its options; its advantage function is used unchecked.

    Raises ValueError if that function gives each token its own advantage.
    """
    if "tokens" in inspect.signature(recipe.advantage).parameters:
        raise ValueError(
            "algorithm.recipe: its advantage takes the scores of tokens, and certify has no naive form of that; test it"
            " separately, and certify the run with one of Podium's recipes"
        )
    names = {field.name for field in dataclasses.fields(Rules)} & {field.name for field in dataclasses.fields(recipe)}
    return Rules(**{name: getattr(recipe, name) for name in names})


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
