"""Resolves settings, a model and a machine to a `RunSpec`; each choice is made here, once. No jax.

The trainer resolves for its actual devices, the planner for a machine of the table, `podium certify` for one device.
All call the same functions, so a plan has the same spec as the run.
"""

import dataclasses
import math

from podium.algorithms.recipe_options import make_recipe
from podium.algorithms.recipes import Recipe, find_recipe
from podium.config.attention_blocks import attention_backend, row_tile
from podium.config.data import DataConfig
from podium.config.head import head_kind
from podium.config.mesh import MeshSizes, mesh_shape
from podium.config.rollout_weights import CORRECTION
from podium.config.schema import AlgorithmConfig, Config, Dtype, RolloutConfig
from podium.config.sizes import check_split, too_long
from podium.models.architecture import DecoderConfig
from podium.models.layouts import choose_layout
from podium.models.params import TRAIN_AXES, axis_parts
from podium.rollout.request import SamplingParams
from podium.run.machine import Machine
from podium.run.micro_batch_cost import micro_batch_cost
from podium.run.roles import check_graders, grading_models, own_prompts, scoring_models, teaching
from podium.run.run_spec import (
    AnswerSettings,
    BatchSizes,
    DemonstrationSpec,
    Format,
    OptimizerSpec,
    PromptSpec,
    RolloutSpec,
    RowRules,
    RunSpec,
    UpdateSpec,
    pair_cost,
)
from podium.run.token_sizes import (
    batch_sequences,
    optimizer_steps,
    row_groups,
    row_tokens,
    rows_per_device,
    tokens_per_gather,
)


def resolve(
    config: Config,
    decoder: DecoderConfig,
    machine: Machine,
    *,
    mesh: MeshSizes | None = None,
    recipe: Recipe | None = None,
) -> RunSpec:
    """Make every choice of a run on a machine.

    Args:
        config: the run's settings.
        decoder: the model's architecture, LoRA included.
        machine: the run's devices.
        mesh: sizes of the mesh axes; unset: resolved from the config's `mesh`.
        recipe: the config's recipe if it was resolved already; None: resolve it here.

    Raises:
        ValueError: settings conflict with each other, the model or the machine; the message names the key and a way
            out.
    """
    recipe = recipe or resolve_recipe(config)
    mesh = mesh or resolve_mesh(config, machine)
    update = resolve_update(config, recipe, machine, mesh)
    if config.algorithm.router_loss_coef and not decoder.routed:
        raise ValueError(
            f"algorithm.router_loss_coef is {config.algorithm.router_loss_coef:g}, which is for mixtures of experts, "
            f"and {config.model} has no routers; leave it unset"
        )
    spec = RunSpec(
        name=config.name or config.model,
        model=config.model,
        machine=machine,
        decoder=decoder,
        scoring_models=scoring_models(config, recipe, decoder),
        recipe=recipe,
        mesh=mesh,
        batch=resolve_batch(config, recipe, decoder, machine=machine, mesh=mesh, update=update),
        update=update,
        optimizer=OptimizerSpec(
            settings=config.train.optimizer, steps=optimizer_steps(config), offload=config.train.offload_optimizer
        ),
        rollout=dataclasses.replace(
            resolve_rollout(config, recipe, decoder, machine), demonstrations=resolve_demonstrations(config)
        ),
        steps=config.steps,
        prompts_per_step=config.prompts_per_step,
        checkpoint=config.checkpoint,
        metrics=config.metrics,
    )
    _check_positions(spec)
    check_graders(config)
    return spec


def _check_positions(spec: RunSpec) -> None:
    """Raise ValueError if sequences can be longer than the number of positions of a model of the run."""
    positions = {spec.model: spec.decoder.max_positions}
    positions |= {role.model: role.decoder.max_positions for role in spec.scoring_models}
    for model, most in positions.items():
        if found := too_long(spec.rollout.settings, most, model):
            raise ValueError(f"{found.keys[0]}: {found.message}")
    for role in spec.scoring_models:
        longest, most, own = spec.batch_of(role).row_tokens, role.decoder.max_positions, spec.rollout.prompts.privileged
        if role.longer_prompts is not None and own is not None and longest > most:
            raise ValueError(
                f"{role.name}.max_prompt_tokens: {own.max_tokens} makes sequences of up to {longest} tokens, and the"
                f" {role.name} has {most} positions; lower it, or rollout.max_new_tokens"
            )


def resolve_mesh(config: Config, machine: Machine) -> MeshSizes:
    """Resolve the sizes of the mesh axes. Raises ValueError if the mesh does not fit the machine."""
    return mesh_shape(config.mesh, devices=machine.devices, hosts=machine.hosts, slices=machine.slices)


def resolve_algorithm(config: Config) -> AlgorithmConfig:
    """The config's `algorithm`, with a default correction if the rollout's weights are rounded and the config sets
    none.

    The default applies if the config sets neither `correction` nor `old_logprobs`, if the recipe samples and has no
    correction, and if the loss is not vespo, which already weights by the ratio to the sampler. Raises ValueError for
    an unknown recipe.
    """
    given = config.algorithm
    chosen = given.correction is not None or given.old_logprobs is not None
    if config.rollout.weights == "dtype" or chosen:
        return given
    recipe = find_recipe(given.recipe)
    if recipe.demonstrations or recipe.correction != "none" or (given.loss or recipe.loss) == "vespo":
        return given
    return AlgorithmConfig.model_validate({**CORRECTION, **given.model_dump(exclude_none=True)})


def resolve_recipe(config: Config) -> Recipe:
    """Resolve the recipe with the config's overrides, sampler and models. Raises ValueError if they conflict."""
    recipe = make_recipe(
        resolve_algorithm(config), group_size=config.group_size, prompts_per_step=config.prompts_per_step
    )
    return dataclasses.replace(recipe, penalised=config.rollout.repetition_penalty != 1, teaching=teaching(config))


def resolve_batch(
    config: Config, recipe: Recipe, decoder: DecoderConfig, *, machine: Machine, mesh: MeshSizes, update: UpdateSpec
) -> BatchSizes:
    """Resolve the shapes of a run's batches on a mesh, and the rules for others."""
    shards = axis_parts(TRAIN_AXES, mesh)["batch"]
    return BatchSizes(
        row_tokens=row_tokens(config, recipe),
        rows=rows_per_device(config, recipe) * shards,
        max_rows=batch_sequences(config),
        packing=config.train.packing,
        max_new_tokens=config.rollout.max_episode_tokens or config.rollout.max_new_tokens,
        choices=decoder.choices,
        choice_format=decoder.choice_format,
        ages=config.rollout.in_flight > 1,
        demonstrations=config.demonstrations is not None,
        devices=shards,
        pairs=recipe.data_form == "pair",
        rules=RowRules(
            pair_cost=pair_cost(decoder),
            micro_batch_cost=micro_batch_cost(decoder, update, machine, mesh),
            tile=math.lcm(row_tile(update.attention), mesh["sp"]),
            row_step=shards * update.row_groups,
        ),
    )


def resolve_update(config: Config, recipe: Recipe, machine: Machine, mesh: MeshSizes) -> UpdateSpec:
    """Resolve how batches are scored and trained on. Raises ValueError if the machine cannot run a requested kernel."""
    train = config.train
    compares = recipe.teaching is not None and recipe.teaching.loss == "full"  # needs all logits
    return UpdateSpec(
        dtype=resolve_format(train.dtype, machine),
        reduce_dtype=train.reduce_dtype,
        head_dtype=None if train.head_dtype == "auto" else train.head_dtype,
        temperature=config.rollout.temperature,
        remat=train.remat,
        head=head_kind("chunked" if compares and train.head == "auto" else train.head, machine.platform, mesh["tp"]),
        head_chunk_tokens=train.head_chunk_tokens,
        attention=attention_backend(train.attention, machine.kernels),
        row_groups=row_groups(config, recipe),
        replay_routing=train.replay_routing,
        tokens_per_gather=tokens_per_gather(config, recipe, sp=mesh["sp"], tp=mesh["tp"]),
    )


def resolve_prompts(config: Config) -> PromptSpec:
    """Resolve the source of a run's prompts, and their maximum length."""
    return PromptSpec(
        tasks=tuple(config.tasks),
        data=config.data,
        seed=config.seed,
        max_tokens=config.rollout.prompt_tokens,
        long_prompts=config.rollout.long_prompts,
        privileged=own_prompts(config),
    )


def resolve_demonstrations(config: Config) -> DemonstrationSpec | None:
    """Resolve the demonstrations that a run mixes into its updates; None if the run has no demonstrations."""
    if (part := config.demonstrations) is None:
        return None
    tasks = [each.task for each in part.tasks] or [
        task.model_copy(update={"curriculum": None}) for task in config.tasks
    ]
    prompts = dataclasses.replace(resolve_prompts(config), tasks=tuple(tasks), data=DataConfig(), privileged=None)
    return DemonstrationSpec(prompts=prompts, per_step=config.demonstrations_per_step)


def resolve_rollout(config: Config, recipe: Recipe, decoder: DecoderConfig, machine: Machine) -> RolloutSpec:
    """Resolve how prompts are completed and graded on a machine, for training and evaluation.

    Raises ValueError if the layout does not fit the model or the machine, or if sequences exceed the model's positions.
    """
    rollout = config.rollout
    if found := too_long(rollout, decoder.max_positions, config.model):
        raise ValueError(f"{found.keys[0]}: {found.message}")
    assert decoder.rollout_weights == rollout.weights, "the decoder is a run's (`decoder_of_run`)"
    return RolloutSpec(
        settings=rollout,
        layout=choose_layout(
            rollout,
            decoder,
            machine.accelerator,
            devices=machine.devices,
            hosts=machine.hosts,
            optimizer=config.train.optimizer.name,
        ),
        dtype=resolve_format(rollout.dtype, machine),
        prompts=resolve_prompts(config),
        grading=config.grading,
        grading_models=grading_models(config, recipe),
        environments=config.environments,
        evaluation=config.eval,
        training=AnswerSettings(
            sampling=dataclasses.replace(
                sampling_params(rollout), greedy_completion=config.group_size if "baselines" in recipe.reads else None
            ),
            completions=config.group_size + ("baselines" in recipe.reads),
            max_refills=recipe.max_refills if recipe.zero_variance == "refill" else 0,
            zero_variance_metric=recipe.zero_variance_metric,
            in_flight=rollout.prompts_in_flight(config.prompts_per_step),
        ),
    )


def resolve_format(dtype: Dtype, machine: Machine) -> Format:
    """Resolve a config's `dtype` to a number format on a machine."""
    return machine.dtype if dtype == "auto" else dtype


def sampling_params(rollout: RolloutConfig) -> SamplingParams:
    """The sampling settings of training."""
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        stop=tuple(rollout.stop),
    )


def host_share(rollout: RolloutConfig, hosts: int) -> RolloutConfig:
    """One host's share of the engine's slots, rows and cache. Raises ValueError if they are not divisible by the number
    of hosts.
    """
    check_split(rollout, hosts, "hosts")
    own = {"slots": rollout.slots // hosts, "prefill_rows": rollout.prefill_rows // hosts}
    if rollout.cache_tokens is not None:
        own["cache_tokens"] = rollout.cache_tokens // hosts
    return rollout.model_copy(update=own)
