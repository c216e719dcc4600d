"""Finds the models of a run, without their weights: the policy, and every other model as a `Role`. No jax."""

import dataclasses
from collections.abc import Iterator

from podium.algorithms.advantages import VALUES
from podium.algorithms.recipes import REFERENCE_LOGPROBS, TAUGHT_HIDDEN, TAUGHT_LOGPROBS, Recipe, Teaching
from podium.config.critic_section import CriticConfig
from podium.config.lora import LoraConfig
from podium.config.rollout_weights import RolloutWeights
from podium.config.schema import Config
from podium.config.sizes import conversation_tokens, too_long_to_score
from podium.models.architecture import DecoderConfig, ModelError, frozen_decoder, scoring_decoder, with_lora
from podium.models.presets import find_architecture
from podium.run.run_spec import SCORE, ConversationSpec, LearningSpec, OptimizerSpec, PrivilegedSpec, Role
from podium.run.token_sizes import rows_per_device


def find_decoder(config: Config) -> DecoderConfig:
    """The decoder of a run, adapters included. Raises ModelError like `find_architecture` and `decoder_of_run`."""
    return decoder_of_run(find_architecture(config.model), config.lora, config.rollout.weights)


def decoder_of_run(decoder: DecoderConfig, lora: LoraConfig | None, rollout_weights: RolloutWeights) -> DecoderConfig:
    """A model's decoder with a run's adapters and number format of rollout weights.

    Raises ModelError if the model has no matrix for one of the adapters' targets.
    """
    return dataclasses.replace(with_lora(decoder, lora), rollout_weights=rollout_weights)


def scoring_models(config: Config, recipe: Recipe, decoder: DecoderConfig) -> tuple[Role, ...]:
    """The models that score the policy's batches; `decoder` is the policy's.

    Raises ModelError if a model does not exist, or if the critic's model has several labels.
    """
    return (
        *_reference(config, recipe, decoder),
        *_teacher(config),
        *_critic(config, recipe, decoder),
    )


def _reference(config: Config, recipe: Recipe, decoder: DecoderConfig) -> Iterator[Role]:
    """The reference (the run's first model), if the recipe uses one; with adapters, it is their base model."""
    if recipe.needs_reference:
        stays = "frozen" if decoder.lora is None else "policy_base"
        yield Role(
            name="reference",
            model=config.model,
            decoder=decoder,
            weights=stays if config.reference is None else "moving",
            scores=REFERENCE_LOGPROBS,
            phase=SCORE,
            follows=config.reference,
        )


def _teacher(config: Config) -> Iterator[Role]:
    """The teacher, entirely frozen, if the config has one."""
    if (teacher := config.teacher) is not None:
        is_base = config.lora is not None and (teacher.model, teacher.base) == (config.model, config.lora.base)
        yield Role(
            name="teacher",
            model=teacher.model,
            decoder=frozen_decoder(find_architecture(teacher.model), teacher.base),
            weights="policy_base" if is_base else "frozen",
            scores=TAUGHT_HIDDEN if teacher.loss == "full" else TAUGHT_LOGPROBS,
            phase="teacher",
            longer_prompts=_longer_prompts(config),
        )


def teaching(config: Config) -> Teaching | None:
    """The terms that the teacher adds to the recipe; None without a teacher."""
    if (teacher := config.teacher) is None:
        return None
    return Teaching(weight=teacher.weight, loss=teacher.loss, reverse=teacher.reverse)


def own_prompts(config: Config) -> PrivilegedSpec | None:
    """The prompts of the teacher; None if it reads the policy's prompts, or without a teacher."""
    if (teacher := config.teacher) is None or teacher.prompt == "same":
        return None
    assert teacher.template is not None, "a privileged prompt has one"
    longest = teacher.max_prompt_tokens or config.rollout.prompt_tokens
    return PrivilegedSpec(role="teacher", template=teacher.template, max_tokens=longest)


def _longer_prompts(config: Config) -> int | None:
    """By how many tokens the teacher's prompts can be longer than the policy's; None if it reads the policy's prompts.

    With conversations it is the whole longest prompt, because a conversation may begin with a prompt of any length and
    fill a row.
    """
    if (own := own_prompts(config)) is None:
        return None
    shorter = 0 if config.rollout.max_episode_tokens is not None else config.rollout.prompt_tokens
    return max(0, own.max_tokens - shorter)


def _critic(config: Config, recipe: Recipe, decoder: DecoderConfig) -> Iterator[Role]:
    """The critic, if the recipe has one; it has the policy's decoder without adapters, unless the config names
    a model.
    """
    if recipe.learns_values:
        critic = config.critic or CriticConfig()
        yield Role(
            name="critic",
            model=critic.model or config.model,
            decoder=scoring_decoder(decoder) if critic.model is None else find_architecture(critic.model, "scores"),
            weights="trained",
            scores=VALUES,
            phase="values",
            learning=LearningSpec(
                optimizer=OptimizerSpec(
                    settings=config.train.optimizer.model_copy(update={"learning_rate": critic.learning_rate}),
                    steps=config.steps * recipe.minibatches * critic.updates,
                    offload=config.train.offload_optimizer,
                ),
                warmup_steps=critic.warmup_steps,
                updates=critic.updates,
                clip=critic.clip,
            ),
        )


def grading_models(config: Config, recipe: Recipe) -> tuple[Role, ...]:
    """The reward models that tasks use, all frozen, and how they score.

    Raises:
        ModelError: a model does not exist, or has no head with a single score.
        ValueError: conversations can be longer than a model's positions.
    """
    used = {part for task in config.tasks for part in task.rewards}
    found = []
    for index, each in enumerate(config.reward_models):
        if each.name not in used:
            continue
        try:
            decoder = find_architecture(each.model, "own scores")
        except ModelError as error:
            raise ModelError(f"reward_models.{index}.model: {error}") from error
        positions, key = decoder.max_positions, f"reward_models.{index}.max_tokens"
        if wrong := too_long_to_score(config.rollout, each.max_tokens, positions, key=key, model=each.model):
            raise ValueError(f"{wrong.keys[0]}: {wrong.message}")
        found.append(
            Role(
                name=f"reward:{each.name}",
                model=each.model,
                decoder=frozen_decoder(decoder, each.base),
                weights="frozen",
                scores=None,
                phase=f"reward:{each.name}",
                conversations=ConversationSpec(
                    part=each.name,
                    chat_template=each.chat_template,
                    template_date=config.chat_template_date,
                    row_tokens=conversation_tokens(config.rollout, each.max_tokens, positions),
                    rows_per_device=rows_per_device(config, recipe),
                    standardise=each.standardise,
                ),
            )
        )
    return tuple(found)


def check_graders(config: Config) -> None:
    """Raise ValueError if a reward model or judge is not used by any task. Evaluations skip this check."""
    used = {part for task in config.tasks for part in task.rewards}
    named = [(f"reward_models.{index}", each.name) for index, each in enumerate(config.reward_models)]
    named += [(f"grading.judges.{index}", each.name) for index, each in enumerate(config.grading.judges)]
    for key, name in named:
        if name not in used:
            raise ValueError(
                f"{key}.name: no task's rewards contain {name!r}, so it would grade nothing; add it to "
                f"tasks.0.rewards with a weight, or leave {key} out"
            )
