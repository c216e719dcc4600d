"""What a run needs before its first step: the model on its mesh, and weights from wherever they begin."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from podium.config.lora import LoraConfig
from podium.config.schema import Config
from podium.models.adapters import base_of, make_quantise
from podium.models.architecture import DecoderConfig, make_lora
from podium.models.hf import load_params
from podium.models.params import TRAIN_AXES, frozen_dtype, param_specs, trained_specs
from podium.models.peft import load_adapter
from podium.models.source import ModelSource, read_architecture
from podium.models.source import resolve as find_source
from podium.models.tokenizer import Tokenizer, load_tokenizer
from podium.observe.run_dir import Fork
from podium.run.divisible import check_tokens
from podium.run.machine import Machine
from podium.run.resolve import resolve, resolve_rollout
from podium.run.spec import OptimizerSpec, RolloutSpec, RunSpec, UpdateSpec
from podium.sharding import Params, ShardingRules, abstract_params, init_params, make_mesh
from podium.train.checkpoint import restore_params
from podium.train.offload import check_host_memory
from podium.train.optimizer import make_optimizer
from podium.train.platform import machine_of, prepare_platform
from podium.train.step import TrainSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model without its weights: where it is from, its numbers, its tokenizer, and the mesh it will be on."""

    source: ModelSource
    decoder: DecoderConfig
    tokenizer: Tokenizer
    mesh: Mesh
    lora: LoraConfig | None = None
    """How its adapters begin, where it has some."""

    @property
    def machine(self) -> Machine:
        """The devices of its mesh."""
        return machine_of(self.mesh)

    @property
    def rules(self) -> ShardingRules:
        """Where its weights are kept."""
        return ShardingRules(self.mesh, TRAIN_AXES)


def make_model(config: Config) -> Model:
    """The model that a config names.

    Raises:
        ValueError: the model, its tokenizer or the mesh cannot be used.
    """
    prepare_platform()
    source, mesh = find_source(config.model), make_mesh(config.mesh)
    if config.train.offload_optimizer:
        check_host_memory(mesh)
    decoder = dataclasses.replace(read_architecture(source), lora=make_lora(config.lora))
    check_tokens(config, decoder, mesh.shape)
    tokenizer = load_tokenizer(source, config.chat_template)
    tokenizer.check_vocab(decoder.vocab)
    return Model(source=source, decoder=decoder, tokenizer=tokenizer, mesh=mesh, lora=config.lora)


def run_spec(config: Config, decoder: DecoderConfig, mesh: Mesh) -> RunSpec:
    """What the config means on the devices of a mesh."""
    return resolve(config, decoder, machine_of(mesh), mesh=dict(mesh.shape))


def rollout_spec(config: Config, model: Model) -> RolloutSpec:
    """How the config has prompts completed and graded: all that evaluation takes of a run."""
    return resolve_rollout(config, model.decoder, model.machine)


def make_train_settings(update: UpdateSpec, decoder: DecoderConfig, mesh: Mesh) -> TrainSettings:
    """The settings that the trainer's compiled programs share in this run."""
    return TrainSettings(
        decoder=decoder,
        mesh=mesh,
        dtype=jnp.dtype(update.dtype),
        temperature=update.temperature,
        remat=update.remat,
        head=update.head,
        head_chunk_tokens=update.head_chunk_tokens,
        attention=update.attention,
        row_groups=update.row_groups,
        reduce_dtype=jnp.dtype(update.reduce_dtype),
        tokens=update.tokens_per_gather,
        head_dtype=None if update.head_dtype is None else jnp.dtype(update.head_dtype),
    )


def make_run_optimizer(optimizer: OptimizerSpec, decoder: DecoderConfig) -> optax.GradientTransformation:
    """The optimizer of a run, its schedule over all of the run's steps."""
    return make_optimizer(optimizer.settings, optimizer.steps, trained_specs(decoder), offload=optimizer.offload)


def load_weights(model: Model, run: Fork | None) -> Params:
    """All weights, sharded: the model's own, or those of a run's checkpoint; with LoRA, the base and its adapters."""
    trained, frozen = load_parts(model, run)
    return frozen | trained


def load_parts(model: Model, run: Fork | None) -> tuple[Params, Params]:
    """The same in two: the weights that updates change, and those that none does."""
    frozen = load_frozen(model)
    return load_trained(model, run, frozen), frozen


def load_frozen(model: Model) -> Params:
    """The weights that no update changes: with LoRA the model's own, as they are kept; else none."""
    if model.decoder.lora is None:
        return {}
    plain = dataclasses.replace(model.decoder, lora=None)
    kept = {name: frozen_dtype(name, model.decoder) for name in param_specs(plain)}
    whole = [name for name, dtype in kept.items() if dtype == "bfloat16"]
    found = load_params(model.source, plain, model.rules, jnp.bfloat16, only=whole)
    for name in kept.keys() - found.keys():
        (value,) = load_params(model.source, plain, model.rules, jnp.float32, only=[name]).values()
        found |= make_quantise(name, model.decoder, model.rules)(value)
    return found


def load_trained(model: Model, run: Fork | None, frozen: Params) -> Params:
    """Float32 weights that updates change, sharded: new ones, or those of a run's checkpoint.

    New ones are the model's own, or with LoRA those of the adapter that the config names, else random ones. Raises
    ValueError where the checkpoint or the adapter is of other weights than `frozen`.
    """
    specs, lora = trained_specs(model.decoder), model.lora
    if run is not None:
        abstract = abstract_params(specs, jnp.float32, model.rules)
        return restore_params(run.checkpoints, run.step, abstract, base=base_of(frozen))
    if lora is None:
        return load_params(model.source, model.decoder, model.rules, jnp.float32)
    if lora.adapter is not None:
        return load_adapter(Path(lora.adapter), model.decoder, model.rules, frozen)
    return init_params(lora.seed, specs, model.rules)
