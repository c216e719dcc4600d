"""Prepares a run before its first step: the model on its mesh, and its initial weights."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from podium.algorithms.recipes import Recipe
from podium.config.lora import LoraConfig
from podium.config.schema import Config
from podium.hosts.platform import machine_of, prepare_platform
from podium.models.adapters import base_of
from podium.models.architecture import DecoderConfig
from podium.models.files.hf import load_params
from podium.models.files.peft import load_adapter
from podium.models.files.source import ModelSource, read_architecture
from podium.models.files.source import resolve as find_source
from podium.models.linear import kept
from podium.models.params import TRAIN_AXES, frozen_dtype, param_specs, trained_specs
from podium.models.quantised import make_quantise
from podium.models.text.tokenizer import Tokenizer, load_tokenizer
from podium.observe.run_dir import Fork
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.run.roles import decoder_of_run
from podium.run.run_spec import SCORE, OptimizerSpec, Role, RunSpec
from podium.sharding import Params, ShardingRules, abstract_params, init_params, make_mesh
from podium.train.checkpoints.checkpoint import restore_params
from podium.train.optimizer.offload import check_host_memory
from podium.train.optimizer.transforms import make_optimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model without its weights: source, architecture, tokenizer, and mesh."""

    source: ModelSource
    decoder: DecoderConfig
    tokenizer: Tokenizer
    mesh: Mesh
    lora: LoraConfig | None = None
    """How adapters are initialised; None without LoRA."""

    @property
    def machine(self) -> Machine:
        """The machine that the mesh is on."""
        return machine_of(list(self.mesh.devices.flat))

    @property
    def rules(self) -> ShardingRules:
        """How weights are stored."""
        return ShardingRules(self.mesh, TRAIN_AXES)


def make_model(config: Config) -> Model:
    """Prepare the model that a config names.

    Raises:
        ValueError: the model, its tokenizer or the mesh is unusable.
    """
    prepare_platform()
    source, mesh = find_source(config.model, waits=True), make_mesh(config.mesh)
    if config.train.offload_optimizer:
        check_host_memory(mesh)
    decoder = decoder_of_run(read_architecture(source), config.lora, config.rollout.weights)
    tokenizer = load_tokenizer(
        source, config.chat_template, config.chat_template_options, template_date=config.chat_template_date
    )
    tokenizer.check_vocab(decoder.vocab)
    return Model(source=source, decoder=decoder, tokenizer=tokenizer, mesh=mesh, lora=config.lora)


def make_role_model(role: Role, policy: Model) -> Model:
    """Prepare a model that scores the policy's batches, on the policy's mesh.

    Raises:
        ValueError: the model is unusable, or its tokenizer differs from the policy's, or, if whole distributions are
            compared, its head.
    """
    source = find_source(role.model, waits=True)
    if source == policy.source:
        return dataclasses.replace(policy, decoder=role.decoder, lora=None)
    tokenizer, key = load_tokenizer(source, template=False), f"{role.name}.model"
    if difference := policy.tokenizer.first_difference(tokenizer):
        raise ValueError(
            f"the tokenizer of {key} {role.model} differs from that of {policy.source.name}: {difference}; its scores "
            f"would be of other texts: set {key} to a model of the same family"
        )
    if role.compared and role.decoder.vocab != policy.decoder.vocab:
        raise ValueError(
            f"{role.name}.loss full compares whole distributions, and the heads of {role.model} and"
            f" {policy.source.name} have {role.decoder.vocab:,} and {policy.decoder.vocab:,} rows; set {role.name}.loss"
            " to sampled"
        )
    return Model(source=source, decoder=role.decoder, tokenizer=tokenizer, mesh=policy.mesh)


def run_spec(config: Config, decoder: DecoderConfig, mesh: Mesh, recipe: Recipe | None = None) -> RunSpec:
    """Resolve a config for the devices of a mesh, as `resolve` does."""
    return resolve(config, decoder, machine_of(list(mesh.devices.flat)), mesh=dict(mesh.shape), recipe=recipe)


def make_run_optimizer(optimizer: OptimizerSpec, decoder: DecoderConfig) -> optax.GradientTransformation:
    """The optimizer of a run, with its schedule over all steps."""
    return make_optimizer(optimizer.settings, optimizer.steps, trained_specs(decoder), offload=optimizer.offload)


class StoredWeights:
    """Loads the weights of a run's models before its first step from files; implements
    `podium.train.first_state.Weights`.
    """

    def __init__(self, policy: Model, beside: Mapping[str, Model], say: Callable[[str], None]) -> None:
        """Load the policy's frozen weights.

        `beside` are the other models by role name. `say` prints fingerprints of weights that are not part of the run's
        checkpoints.
        """
        self._policy, self._beside, self._say = policy, beside, say
        self.mesh = policy.mesh
        """The mesh of all models."""
        frozen = load_frozen(policy)
        self.base = base_of(frozen)
        self.frozen = kept(frozen, policy.rules)

    def trained(self) -> Params:
        """The policy's weights that updates change."""
        return load_trained(self._policy, None, self.frozen)

    def of(self, role: Role) -> Params:
        """The weights of another model; these may be the policy's frozen weights, without its adapters."""
        model, line, params = self._beside[role.name], "the frozen weights beside the adapters", self.frozen
        if role.weights != "policy_base":
            params = load_role_weights(model)
            if role.changes:
                return params
            line, params = f"weights {base_of(params)}", kept(params, model.rules)
        if role.phase != SCORE:
            self._say(f"{role.name}: {model.source.name}, {line}")
        return params


def load_weights(model: Model, run: Fork | None) -> Params:
    """Load all weights, sharded: the model's own, or those of a run's checkpoint; with LoRA, base and adapters."""
    trained, frozen = load_parts(model, run)
    return frozen | trained


def load_parts(model: Model, run: Fork | None) -> tuple[Params, Params]:
    """Load all weights as two parts: those that updates change, and those that never change."""
    frozen = load_frozen(model)
    return load_trained(model, run, frozen), frozen


def load_frozen(model: Model) -> Params:
    """Load the weights that never change, in their stored format: with LoRA all of the base model's, otherwise none."""
    if model.decoder.lora is None:
        return {}
    plain = dataclasses.replace(model.decoder, lora=None)
    formats = {name: frozen_dtype(name, model.decoder) for name in param_specs(plain)}
    whole = [name for name, dtype in formats.items() if dtype == "bfloat16"]
    found = load_params(model.source, plain, model.rules, jnp.bfloat16, only=whole)
    for name in formats.keys() - found.keys():
        (value,) = load_params(model.source, plain, model.rules, jnp.float32, only=[name]).values()
        found |= make_quantise(name, model.decoder, model.rules)(value)
    return found


def load_role_weights(model: Model) -> Params:
    """Load the initial weights of another model: in its decoder's frozen format, or else float32."""
    if model.decoder.lora is not None:
        return load_frozen(model)
    return load_params(model.source, model.decoder, model.rules, jnp.float32)


def load_trained(model: Model, run: Fork | None, frozen: Params) -> Params:
    """Load the weights that updates change, float32 and sharded: initial ones, or those of a run's checkpoint.

    Initial weights are the model's own; with LoRA, those of the config's adapter, or random. Raises ValueError if the
    checkpoint or the adapter was trained on other frozen weights than `frozen`.
    """
    specs, lora = trained_specs(model.decoder), model.lora
    if run is not None:
        abstract = abstract_params(specs, jnp.float32, model.rules)
        return restore_params(run.checkpoints, run.step, abstract, base=base_of(frozen))[0]
    if lora is None:
        return load_params(model.source, model.decoder, model.rules, jnp.float32)
    if lora.adapter is not None:
        return load_adapter(Path(lora.adapter), model.decoder, model.rules, frozen)
    return init_params(lora.seed, specs, model.rules)
