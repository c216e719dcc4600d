"""Finds the models of a run without their weights: its policy, and each other one as a `Role`. No jax."""

import dataclasses
from collections.abc import Iterator

from podium.algorithms.advantages import VALUES
from podium.algorithms.recipes import REFERENCE_LOGPROBS, TEACHER_HIDDEN, TEACHER_LOGPROBS, Recipe
from podium.config.critic_section import CriticConfig
from podium.config.lora import LoraConfig
from podium.config.rollout_weights import RolloutWeights
from podium.config.schema import Config
from podium.config.sizes import conversation_tokens, too_long_to_score
from podium.models.architecture import DecoderConfig, ModelError, frozen_decoder, scoring_decoder, with_lora
from podium.models.presets import find_architecture
from podium.run.run_spec import SCORE, ConversationSpec, LearningSpec, OptimizerSpec, Role
from podium.run.token_sizes import longer_prompts, rows_per_device


def find_decoder(config: Config) -> DecoderConfig:
    """The decoder of a run including its adapters. Raises ModelError as `find_architecture` and `decoder_of_run` do."""
    return decoder_of_run(find_architecture(config.model), config.lora, config.rollout.weights)


def decoder_of_run(decoder: DecoderConfig, lora: LoraConfig | None, rollout_weights: RolloutWeights) -> DecoderConfig:
    """A model's decoder with a run's adapters, and the format of its rollout's weights.

    Raises ModelError if it has no matrix of a target of the adapters.
    """
    return dataclasses.replace(with_lora(decoder, lora), rollout_weights=rollout_weights)


def scoring_models(config: Config, recipe: Recipe, decoder: DecoderConfig) -> tuple[Role, ...]:
    """The models that score batches of the policy, whose architecture is `decoder`.

    Raises ModelError if a model does not exist, or if the critic's has several labels.
    """
    return (
        *_reference(config, recipe, decoder),
        *_teacher(config),
        *_critic(config, recipe, decoder),
    )


def _reference(config: Config, recipe: Recipe, decoder: DecoderConfig) -> Iterator[Role]:
    """The first model, if the recipe compares with it: beside adapters it is their base."""
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
    """The teacher, all of which is frozen, if the config has one."""
    if (teacher := config.teacher) is not None:
        is_base = config.lora is not None and (teacher.model, teacher.base) == (config.model, config.lora.base)
        yield Role(
            name="teacher",
            model=teacher.model,
            decoder=frozen_decoder(find_architecture(teacher.model), teacher.base),
            weights="policy_base" if is_base else "frozen",
            scores=TEACHER_HIDDEN if teacher.loss == "full" else TEACHER_LOGPROBS,
            phase="teacher",
            longer_prompts=None if teacher.prompt == "same" else longer_prompts(config),
        )


def _critic(config: Config, recipe: Recipe, decoder: DecoderConfig) -> Iterator[Role]:
    """The critic, if the recipe has one: the policy's decoder without adapters, unless the config names a model."""
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
    """The reward models that tasks use, all of which are frozen, and how they score.

    Raises:
        ModelError: there is no such model, or it has no head with one score.
        ValueError: conversations are longer than its positions.
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
