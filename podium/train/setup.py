"""What a run needs before its first step: the model on its mesh, and weights from wherever they begin."""

import dataclasses

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from podium.config.attention import attention_backend
from podium.config.schema import Config
from podium.config.sizes import optimizer_steps, row_groups
from podium.models.architecture import DecoderConfig
from podium.models.hf import load_params
from podium.models.params import TRAIN_AXES, param_specs
from podium.models.source import ModelSource, read_architecture, resolve
from podium.models.tokenizer import Tokenizer, load_tokenizer
from podium.observe.run_dir import Fork
from podium.sharding import Params, ShardingRules, abstract_params, make_mesh
from podium.train.checkpoint import restore_params
from podium.train.generate import as_dtype
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
    source = resolve(config.model)
    return Model(
        source=source,
        decoder=read_architecture(source),
        tokenizer=load_tokenizer(source, config.chat_template),
        mesh=make_mesh(config.mesh),
    )


def make_train_settings(config: Config, decoder: DecoderConfig, mesh: Mesh) -> TrainSettings:
    """The settings that the trainer's compiled programs share in this run."""
    return TrainSettings(
        decoder=decoder,
        mesh=mesh,
        dtype=as_dtype(config.train.dtype, mesh),
        temperature=config.rollout.temperature,
        remat=config.train.remat,
        head_chunk_tokens=config.train.head_chunk_tokens,
        attention=attention_backend(config.train.attention, mesh.devices.flat[0].platform),
        row_groups=row_groups(config),
    )


def make_run_optimizer(config: Config, decoder: DecoderConfig) -> optax.GradientTransformation:
    """The optimizer of a run, its schedule over all of the run's steps."""
    return make_optimizer(config.train.optimizer, optimizer_steps(config), param_specs(decoder))


def load_weights(model: Model, run: Fork | None) -> Params:
    """Float32 weights, sharded: the model's own, or those of a run's checkpoint."""
    if run is None:
        return load_params(model.source, model.decoder, model.rules, jnp.float32)
    specs = param_specs(model.decoder)
    return restore_params(run.checkpoints, run.step, abstract_params(specs, jnp.float32, model.rules))
