"""What a run needs before its first step: the model on its mesh, and weights from wherever they begin."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from podium.config.attention import attention_backend
from podium.config.head import head_kind
from podium.config.lora import LoraConfig
from podium.config.schema import Config
from podium.config.sizes import optimizer_steps, row_groups, tokens_per_gather
from podium.models.adapters import base_of, make_quantise
from podium.models.architecture import DecoderConfig, make_lora
from podium.models.hf import load_params
from podium.models.params import TRAIN_AXES, check_tokens, frozen_dtype, param_specs, trained_specs
from podium.models.peft import load_adapter
from podium.models.source import ModelSource, read_architecture, resolve
from podium.models.tokenizer import Tokenizer, load_tokenizer
from podium.observe.run_dir import Fork
from podium.sharding import Params, ShardingRules, abstract_params, init_params, make_mesh
from podium.train.checkpoint import restore_params
from podium.train.generate import as_dtype
from podium.train.offload import check_host_memory
from podium.train.optimizer import make_optimizer
from podium.train.platform import prepare_platform
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
    def rules(self) -> ShardingRules:
        """Where its weights are kept."""
        return ShardingRules(self.mesh, TRAIN_AXES)


def make_model(config: Config) -> Model:
    """The model that a config names.

    Raises:
        ValueError: the model, its tokenizer or the mesh cannot be used.
    """
    prepare_platform()
    source, mesh = resolve(config.model), make_mesh(config.mesh)
    if config.train.offload_optimizer:
        check_host_memory(mesh)
    decoder = dataclasses.replace(read_architecture(source), lora=make_lora(config.lora))
    check_tokens(config, decoder, mesh.shape)
    tokenizer = load_tokenizer(source, config.chat_template)
    return Model(source=source, decoder=decoder, tokenizer=tokenizer, mesh=mesh, lora=config.lora)


def make_train_settings(config: Config, decoder: DecoderConfig, mesh: Mesh) -> TrainSettings:
    """The settings that the trainer's compiled programs share in this run."""
    return TrainSettings(
        decoder=decoder,
        mesh=mesh,
        dtype=as_dtype(config.train.dtype, mesh),
        temperature=config.rollout.temperature,
        remat=config.train.remat,
        head=head_kind(config.train.head, mesh.devices.flat[0].platform, mesh.shape["tp"]),
        head_chunk_tokens=config.train.head_chunk_tokens,
        attention=attention_backend(config.train.attention, mesh.devices.flat[0].platform),
        row_groups=row_groups(config),
        reduce_dtype=jnp.dtype(config.train.reduce_dtype),
        tokens=tokens_per_gather(config, sp=mesh.shape["sp"], tp=mesh.shape["tp"]),
        head_dtype=None if config.train.head_dtype == "auto" else jnp.dtype(config.train.head_dtype),
    )


def make_run_optimizer(config: Config, decoder: DecoderConfig) -> optax.GradientTransformation:
    """The optimizer of a run, its schedule over all of the run's steps."""
    specs, offload = trained_specs(decoder), config.train.offload_optimizer
    return make_optimizer(config.train.optimizer, optimizer_steps(config), specs, offload=offload)


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
