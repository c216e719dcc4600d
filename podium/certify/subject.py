"""The subject of a certificate: a tiny clone of the config's model, or the model itself, and a step to train it on."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.algorithms.advantages import penalised_rewards
from podium.algorithms.recipes import Recipe, make_recipe
from podium.certify.naive import Scores, Sequences, in_float64, scores
from podium.config.imports import is_path
from podium.config.schema import Config
from podium.models.architecture import DecoderConfig
from podium.models.blocks.kind import Block, Stack
from podium.models.params import (
    ROLLOUT_AXES,
    TRAIN_AXES,
    ParamSpec,
    frozen_specs,
    is_adapter,
    param_specs,
    trained_specs,
)
from podium.models.presets import find_decoder
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Completion, Request
from podium.rollout.transcript import Transcript, transcript_of
from podium.run.resolve import resolve_recipe, sampling_params
from podium.sharding import Params, ShardingRules, make_mesh, param_shardings
from podium.tasks.mixture import TaskPrompt
from podium.tasks.task import Prompt, Reward
from podium.train.generate import Group
from podium.train.setup import load_weights, make_model

PROMPTS = 4
COMPLETIONS = 4
LONGEST_PROMPT = 12
LONGEST = 10
ROW_TOKENS = 24
"""T of a batch's rows: several sequences fit in most of them."""
SPREAD = 10.0  # times the initial normal: a model that has opinions, whose attention is not flat
NOISE = 0.3  # nat between a recorded log-probability and the sampler's, so that ratios lie on both sides of a clip

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with weights, and what it is trained on."""

    user: Config
    """The user's config."""
    config: Config
    """The same with a step, lengths and number formats of this check."""
    recipe: Recipe
    decoder: DecoderConfig
    weights: Arrays
    reference: Arrays | None
    """Weights of another model, which the KL is taken to; None without one."""

    def params(self, mesh: jax.sharding.Mesh, weights: Arrays | None = None) -> Params:
        """The weights on a mesh; another copy each time, since updates donate theirs."""
        shardings = param_shardings(param_specs(self.decoder), ShardingRules(mesh, TRAIN_AXES))
        return {
            name: jax.device_put(value, shardings[name], may_alias=False)
            for name, value in (self.weights if weights is None else weights).items()
        }

    def trained(self, mesh: jax.sharding.Mesh) -> Params:
        """The parameters that updates change."""
        specs = trained_specs(self.decoder)
        return {name: value for name, value in self.params(mesh).items() if name in specs}

    def frozen(self, mesh: jax.sharding.Mesh) -> Params:
        """The parameters that no update changes: with LoRA the model under the adapters."""
        specs = frozen_specs(self.decoder)
        return {name: value for name, value in self.params(mesh).items() if name in specs}

    @functools.cached_property
    def sampled(self) -> list[list[Completion]]:
        """Completions of random prompts by the rollout engine, [N][G], cut to different lengths."""
        rollout, random = self.config.rollout, np.random.default_rng(1)
        mesh = one_device()
        rules = ShardingRules(mesh, ROLLOUT_AXES)
        engine = RolloutEngine(rollout, self.decoder, rules, None, dtype=jnp.dtype("float32"))
        engine.device.freeze(self.frozen(mesh))
        engine.load(self.trained(mesh))
        settings = dataclasses.replace(sampling_params(self.config.rollout), stop=())
        requests = [
            Request(prompt=prompt, sampling=settings, seed=index, completions=self.config.group_size)
            for index, prompt in enumerate(self.prompts)
        ]
        made, _ = engine.generate(requests)
        lengths = iter(random.permutation(np.linspace(1, LONGEST, sum(map(len, made))).round().astype(int)))
        return [[_cut(each, int(next(lengths))) for each in group] for group in made]

    @functools.cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        """Random prompts of 1 to LONGEST_PROMPT tokens."""
        random = np.random.default_rng(0)
        lengths = np.linspace(1, LONGEST_PROMPT, self.config.prompts_per_step).round().astype(int)
        return [tuple(random.integers(0, self.decoder.vocab, length).tolist()) for length in lengths]

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The graded step that updates are made of: no group has equal rewards, and one completion was cut off."""
        random = np.random.default_rng(2)
        groups = []
        for index, (prompt, completions) in enumerate(zip(self.prompts, self.sampled, strict=True)):
            rewards = random.permutation(np.linspace(0.0, 1.0, len(completions)))
            noisy = [_with_noise(each, random) for each in completions]
            if index == len(self.prompts) - 1:
                noisy[-1] = dataclasses.replace(noisy[-1], finish_reason="length")
            groups.append(make_group(index, [transcript_of(prompt, each) for each in noisy], rewards))
        return groups

    @functools.cached_property
    def sequences(self) -> Sequences:
        """The same for the naive objective."""
        flat = [(group.tokens, each.drawn[0]) for group in self.groups for each in group.transcripts]
        ends = [each.finish_reason for group in self.groups for each in group.transcripts]
        lengths = np.array([len(each.tokens) for _, each in flat])
        n, T = int(lengths.max()), max(len(prompt) + len(each.tokens) for prompt, each in flat)
        masked = [self.recipe.mask_truncated and end == "length" for end in ends]
        valid = np.arange(n)[None] < np.where(masked, 0, lengths)[:, None]
        arrays: Any = {
            "tokens": np.stack([_padded([*prompt, *each.tokens], T) for prompt, each in flat]).astype(np.int32),
            "starts": np.array([len(prompt) for prompt, _ in flat], np.int32),
            "valid": valid,
            "advantages": np.zeros(len(flat)),
            "sampled_logprobs": np.stack([_padded(each.full_logprobs, n) for _, each in flat]).astype(np.float64),
        }
        known: Any = Sequences(**arrays, old_logprobs=None, reference_logprobs=None)
        if self.recipe.scores_old_logprobs:
            known = dataclasses.replace(known, old_logprobs=self.naive_scores(known).logprobs)
        if self.reference is not None:
            known = dataclasses.replace(known, reference_logprobs=self.naive_scores(known, self.reference).logprobs)
        rewards = np.stack([group.totals for group in self.groups])
        if self.recipe.kl == "k1_reward":
            sums = np.sum((known.sampled_logprobs - known.reference_logprobs) * valid, axis=1)
            rewards = penalised_rewards(rewards, sums.reshape(rewards.shape), self.recipe.kl_coef)
        advantages = self.recipe.advantage(rewards, valid.sum(axis=1).reshape(rewards.shape))
        return dataclasses.replace(known, advantages=advantages.ravel().astype(np.float64))

    def naive_scores(
        self, sequences: Sequences, weights: Arrays | None = None, temperature: float | None = None
    ) -> Scores:
        """Log-probabilities and entropies in float64, at the config's temperature unless another is given."""
        weights, default = self.weights if weights is None else weights, self.config.rollout.temperature
        with in_float64():
            wide: Any = {name: np.asarray(value, np.float64) for name, value in weights.items()}
            score = _naive_scorer(self.decoder)
            found = score(wide, sequences, default if temperature is None else temperature)
            return Scores(*(np.asarray(x) for x in found))  # pyright: ignore[reportArgumentType]


def make_subject(config: Config, *, full: bool = False) -> Subject:
    """A tiny clone of the config's model, with random weights; or the model itself.

    Raises:
        ValueError: the model cannot be used.
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
    recipe = resolve_recipe(config)
    reference = None
    if recipe.needs_reference:
        noise = random_weights(decoder, seed=1)
        reference = {name: value + np.float32(0.02) * noise[name] for name, value in weights.items()}
    if recipe.needs_reference and decoder.lora is not None:
        reference = {name: value for name, value in weights.items() if not is_adapter(name)}
    return Subject(user=user, config=config, recipe=recipe, decoder=decoder, weights=weights, reference=reference)


def tiny_clone(decoder: DecoderConfig) -> DecoderConfig:
    """A decoder of the same kind that compiles in a second: every switch as it is, at most 2 layers of width 64."""
    attention, mlp = decoder.dense_layer
    kv_heads = 2 if attention.kv_heads % 2 == 0 else 1
    head_dim = min(attention.head_dim, 16)
    block = Block(
        mixer=dataclasses.replace(
            attention,
            heads=kv_heads * (attention.heads // attention.kv_heads),
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=dataclasses.replace(attention.rope, dims=head_dim),
        ),
        feed_forward=dataclasses.replace(mlp, width=min(mlp.width, 96)),
    )
    return dataclasses.replace(
        decoder,
        vocab=min(decoder.vocab, 320),
        width=min(decoder.width, 64),
        stacks=(Stack(pattern=(block,), repeats=min(decoder.layers, 2)),),
        lora=decoder.lora and dataclasses.replace(decoder.lora, rank=4, alpha=4 * decoder.lora.scale),
    )


def random_weights(decoder: DecoderConfig, *, seed: int) -> Arrays:
    """Weights that all have an effect: biases and norms differ from 0 and 1, and adapters add something."""
    random = np.random.default_rng(seed)
    return {
        name: (spec.mean + _spread(name, spec) * random.standard_normal(spec.shape)).astype(np.float32)
        for name, spec in param_specs(decoder).items()
    }


def _spread(name: str, spec: ParamSpec) -> float:
    return 0.1 if is_adapter(name) or not spec.std else SPREAD * spec.std


def make_group(index: int, transcripts: list[Transcript], rewards: Sequence[float] | np.ndarray) -> Group:
    """A graded group, as `Rollouts.answer` gives it."""
    task = TaskPrompt(task=0, prompt=Prompt(id=str(index), question="", answer=""), system_prompt=None)
    paid = [Reward(total=float(reward), parts={"correct": float(reward)}) for reward in rewards]
    return Group(prompt=task, transcripts=transcripts, rewards=paid)


def one_device() -> jax.sharding.Mesh:
    """The first device alone."""
    return make_mesh("auto", jax.devices()[:1])


def _small_step(config: Config) -> Config:
    """The config with a step of a few short completions, each batch used twice where a recipe allows it.

    Everything is in float32, weights that LoRA freezes too.
    """
    group = max(COMPLETIONS, 2)
    twice = make_recipe(config.algorithm, group_size=group, prompts_per_step=config.algorithm.minibatches)
    if is_path(twice.loss):
        raise ValueError(
            f"algorithm.loss {twice.loss}: certify has no naive form of it to compare with; test it by itself, and"
            " certify the run with one of Podium's losses"
        )
    algorithm = {"minibatches": 1, "updates_per_batch": 1 if twice.loss == "reinforce" else 2}
    lengths = {"max_prompt_tokens": LONGEST_PROMPT, "max_new_tokens": LONGEST}
    slots = {"slots": PROMPTS * group, "prefill_rows": PROMPTS, "layout": "replicated"}
    sizes = {"packing": "shared_prompts", "row_tokens": ROW_TOKENS, "rows_per_device": None, "tokens_per_device": None}
    lora = config.lora and config.lora.model_copy(update={"base": "bfloat16", "adapter": None})
    parts: dict[str, Any] = {
        "lora": lora,
        "rollout": config.rollout.model_copy(update={**lengths, **slots, "dtype": "float32"}),
        "train": config.train.model_copy(update={**sizes, "dtype": "float32"}),
        "algorithm": config.algorithm.model_copy(update=algorithm),
    }
    return config.model_copy(update={**parts, "prompts_per_step": PROMPTS, "group_size": group})


@functools.cache
def _naive_scorer(decoder: DecoderConfig) -> Any:
    return jax.jit(lambda weights, sequences, temperature: scores(weights, sequences, decoder, temperature))


def _cut(completion: Completion, length: int) -> Completion:
    return dataclasses.replace(
        completion,
        tokens=completion.tokens[:length],
        sampled_logprobs=completion.sampled_logprobs[:length],
        full_logprobs=completion.full_logprobs[:length],
        versions=completion.versions[:length],
        finish_reason="stop",
    )


def _with_noise(completion: Completion, random: np.random.Generator) -> Completion:
    noise = random.normal(0.0, NOISE, len(completion.tokens)).astype(np.float32)
    return dataclasses.replace(completion, full_logprobs=completion.full_logprobs + noise)


def _padded(values: Sequence[Any] | np.ndarray, length: int) -> np.ndarray:
    return np.pad(np.asarray(values), (0, length - len(values)))
