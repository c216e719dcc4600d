"""The state that a run starts from: its models, or another run's checkpoint."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from podium.algorithms.controllers import first_coefs
from podium.hosts.distributed import from_leader
from podium.models.architecture import DecoderConfig
from podium.models.params import TRAIN_AXES, trained_specs
from podium.observe.run_dir import Fork, recipe_of
from podium.run.run_spec import Role, RunSpec
from podium.sampling.conversations.carry import HostState
from podium.sharding import Params, ShardingRules, abstract_params
from podium.train.checkpoints.checkpoint import restore_params, restore_state, saved_names
from podium.train.setup import make_run_optimizer
from podium.train.state import (
    ModelState,
    TrainState,
    abstract_coefs,
    abstract_state,
    init_state,
    restarted,
    with_coefs,
)

POLICY = "policy"


class Weights(Protocol):
    """Loads the weights of a run's models before its first step onto the devices that train them."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of the devices that train the models."""
        ...

    @property
    def frozen(self) -> Params:
        """The policy's weights that updates do not change: with LoRA the base model's, otherwise none."""
        ...

    @property
    def base(self) -> str | None:
        """The fingerprint of `frozen`; None if all weights are trained."""
        ...

    def trained(self) -> Params:
        """The policy's weights that updates change; each call returns new arrays."""
        ...

    def of(self, role: Role) -> Params:
        """The weights of another model of the run; each call returns new arrays, unless they are the policy's frozen
        weights.
        """
        ...


def make_optimizers(spec: RunSpec) -> dict[str, optax.GradientTransformation]:
    """The optimizers of the policy (POLICY) and of the other trained models, by role name."""
    made = {POLICY: make_run_optimizer(spec.optimizer, spec.decoder)}
    for role in spec.scoring_models:
        if role.learning is not None:
            made[role.name] = make_run_optimizer(role.learning.optimizer, role.decoder)
    return made


class Origin(NamedTuple):
    """What a run starts from: the first weights of its models, and their optimizers."""

    spec: RunSpec
    weights: Weights
    optimizers: Mapping[str, optax.GradientTransformation]
    """The result of `make_optimizers`."""

    @property
    def changing(self) -> list[Role]:
        """The models other than the policy that change in training."""
        return [role for role in self.spec.scoring_models if role.changes]

    def abstract(self) -> TrainState:
        """The abstract result of `first`, for checkpoints."""
        models = {role.name: self._abstract(role.name, role.decoder) for role in self.changing}
        policy = self._abstract(POLICY, self.spec.decoder)
        assert isinstance(policy, TrainState), "the policy is trained"
        coefs = abstract_coefs(policy.params, first_coefs(self.spec.recipe))
        return dataclasses.replace(policy, models=models, coefs=coefs)

    def first(self) -> TrainState:
        """The state before the first step."""
        return self._completed(init_state(self.weights.trained(), self.optimizers[POLICY]))

    def forked(self, fork: Fork, recipe: str, say: Callable[[str], None]) -> tuple[TrainState, HostState]:
        """The first state of a run that starts from the weights of another run's checkpoint.

        The optimizer's moments are taken over too if both runs have the same recipe, and a further model's moments if
        both runs train that model. Moments of another loss would keep moving the weights in its direction for about ten
        steps. A model that only this run trains, a model that follows the policy, and adapted coefficients start fresh.

        Args:
            fork: the run and its step.
            recipe: `algorithm.recipe` of this run.
            say: prints a line.

        Returns:
            The state, and the host state: `versions`, and the argument of `Position.read`.

        Raises:
            CheckpointError: the step does not exist, is damaged, or belongs to another model or optimizer.
        """
        names, its_recipe = saved_names(fork.checkpoints, fork.step), from_leader(lambda: recipe_of(fork))
        learned = {name.partition(".")[0] for name in names} & self.optimizers.keys()
        if its_recipe == recipe or learned:
            whole = self._as_saved(names)
            state, saved = restore_state(fork.checkpoints, fork.step, whole, base=self.weights.base)
            state = restarted(state)
        else:
            say(f"{fork.run} had recipe {its_recipe}: its weights are taken, and the optimizer starts fresh")
            abstract = self._abstract_params(self.spec.decoder)
            params, saved = restore_params(fork.checkpoints, fork.step, abstract, base=self.weights.base)
            state = init_state(params, self.optimizers[POLICY])
        kept = {name: own for name, own in state.models.items() if name in learned}
        return self._completed(dataclasses.replace(state, models=kept)), _begun_again(saved)

    def _abstract(self, name: str, decoder: DecoderConfig) -> ModelState:
        """The abstract state of a model: a training state if it is trained, otherwise its weights."""
        params = self._abstract_params(decoder)
        return abstract_state(params, self.optimizers[name]) if name in self.optimizers else cast(Params, params)

    def _abstract_params(self, decoder: DecoderConfig) -> dict[str, jax.ShapeDtypeStruct]:
        return abstract_params(trained_specs(decoder), jnp.float32, ShardingRules(self.weights.mesh, TRAIN_AXES))

    def _as_saved(self, names: list[str]) -> TrainState:
        """The abstract state with only the models and coefficients that a saved step has, given the names of its
        arrays.
        """
        abstract = self.abstract()
        coefs = [name.removeprefix("coefs.") for name in names if name.startswith("coefs.")]
        others = {name.partition(".")[0] for name in names} - {"step", "opt_state", "coefs"}
        # A model that follows the policy in this run was stored like the policy.
        models = {name: abstract.models[name] if name in self.optimizers else abstract.params for name in others}
        return dataclasses.replace(abstract, models=models, coefs=abstract_coefs(abstract.params, coefs))

    def _completed(self, state: TrainState) -> TrainState:
        """Add models and coefficients that the state lacks, with their initial values from the config."""
        models = dict(state.models)
        for role in self.changing:
            if role.name not in models:
                params = self.weights.of(role)
                trained = role.name in self.optimizers
                models[role.name] = init_state(params, self.optimizers[role.name]) if trained else params
        return with_coefs(dataclasses.replace(state, models=models), first_coefs(self.spec.recipe))


def _begun_again(saved: HostState) -> HostState:
    """Convert the host state of a forked run to the start of a new run, whose settings may differ."""
    begun = (each["number"] for each in saved.pop("in_flight", ()))  # they restart from their prompts
    saved["cursor"] = min(begun, default=saved["cursor"])
    saved.pop("curriculum", None)
    saved.pop("retired", None)
    saved.pop("data", None)
    return saved
