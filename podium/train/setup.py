"""What a run needs before its first step: the model on its mesh, and weights from wherever they begin."""

import ctypes
import dataclasses
import glob
import os
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from podium.config.schema import Config
from podium.config.sizes import optimizer_steps
from podium.models.architecture import DecoderConfig
from podium.models.hf import load_params
from podium.models.params import TRAIN_AXES, param_specs
from podium.models.source import ModelSource, read_architecture, resolve
from podium.models.tokenizer import Tokenizer, load_tokenizer
from podium.sharding import Params, ShardingRules, abstract_params, make_mesh
from podium.train.checkpoint import restore_params
from podium.train.generate import as_dtype
from podium.train.optimizer import make_optimizer
from podium.train.step import Program

if TYPE_CHECKING:
    from podium.observe.run_dir import Fork


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


def prepare_platform() -> None:
    """Have jax start on the CPU alone where there is nothing else; a second call does nothing new."""
    if only_cpu():
        jax.config.update("jax_platforms", "cpu")  # libtpu, where it is installed, would look for chips, at length
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Have malloc keep the memory that XLA's programs free on CPU, for the next one to use.

    glibc gives it back to the kernel, which then has to clear every page again: a sixth of the CPU time of the demo's
    update (benches/results/pages-cpu.json). Only threads that start later use it, so it comes before jax's backend.
    Does nothing where the C library is another.
    """
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((m_arena_max, 1), (m_mmap_max, 0), (m_trim_threshold, -1)):
            mallopt(parameter, value)


def only_cpu() -> bool:
    """Whether jax will find nothing but the CPU; known without starting it."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*"))


def make_program(config: Config, decoder: DecoderConfig, mesh: Mesh) -> Program:
    """What the compiled programs of a run have in common."""
    return Program(
        decoder=decoder,
        mesh=mesh,
        dtype=as_dtype(config.train.dtype, mesh),
        temperature=config.rollout.temperature,
        remat=config.train.remat,
        head_chunk_tokens=config.train.head_chunk_tokens,
    )


def make_run_optimizer(config: Config, decoder: DecoderConfig) -> optax.GradientTransformation:
    """The optimizer of a run, its schedule over all of the run's steps."""
    return make_optimizer(config.train.optimizer, optimizer_steps(config), param_specs(decoder))


def load_weights(model: Model, run: "Fork | None") -> Params:
    """Float32 weights in their shards: the model's own, or those of a run's checkpoint."""
    if run is None:
        return load_params(model.source, model.decoder, model.rules, jnp.float32)
    specs = param_specs(model.decoder)
    return restore_params(run.checkpoints, run.step, abstract_params(specs, jnp.float32, model.rules))
