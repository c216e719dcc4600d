"""The state that a run starts from: of its models, or of another run's checkpoint."""

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
    """Gives the weights of a run's models before its first step, on the devices that train them."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of these devices."""
        ...

    @property
    def frozen(self) -> Params:
        """Those of the policy that no update changes; with LoRA its base, otherwise none."""
        ...

    @property
    def base(self) -> str | None:
        """The fingerprint of `frozen`; None if all weights are trained."""
        ...

    def trained(self) -> Params:
        """Those of the policy that updates change; new arrays in every call."""
        ...

    def of(self, role: Role) -> Params:
        """Those of a model beside the policy; new arrays in every call, unless they are the policy's frozen ones."""
        ...


def make_optimizers(spec: RunSpec) -> dict[str, optax.GradientTransformation]:
    """The optimizers of the policy (POLICY) and of the other trained models, by the name of their role."""
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
    """Of `make_optimizers`."""

    @property
    def changing(self) -> list[Role]:
        """The models beside the policy that change in training."""
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

        It takes the optimizer's moments too if both runs have the same recipe, or both train a further model. Moments
        of another loss would keep moving the weights in its direction for about ten steps. A model that only this run
        trains, one that follows the policy, and adapted coefficients begin anew.

        Args:
            fork: the run and its step.
            recipe: `algorithm.recipe` of this run.
            say: prints a line.

        Returns:
            The state, and the host state: `versions`, and the input of `Position.read`.

        Raises:
            CheckpointError: there is no such step, it is damaged, or it belongs to another model or optimizer.
        """
        names, its_recipe = saved_names(fork.checkpoints, fork.step), from_leader(lambda: recipe_of(fork))
        learned = {name.partition(".")[0] for name in names} & self.optimizers.keys()
        if its_recipe == recipe or learned:
            whole = self._as_saved(names)
            state, saved = restore_state(fork.checkpoints, fork.step, whole, base=self.weights.base)
            state = restarted(state)
        else:
            say(f"{fork.run} had recipe {its_recipe}: its weights are taken, and the optimizer begins again")
            abstract = self._abstract_params(self.spec.decoder)
            params, saved = restore_params(fork.checkpoints, fork.step, abstract, base=self.weights.base)
            state = init_state(params, self.optimizers[POLICY])
        kept = {name: own for name, own in state.models.items() if name in learned}
        return self._completed(dataclasses.replace(state, models=kept)), _begun_again(saved)

    def _abstract(self, name: str, decoder: DecoderConfig) -> ModelState:
        """The abstract state of a model: a trained one's, or else its weights."""
        params = self._abstract_params(decoder)
        return abstract_state(params, self.optimizers[name]) if name in self.optimizers else cast(Params, params)

    def _abstract_params(self, decoder: DecoderConfig) -> dict[str, jax.ShapeDtypeStruct]:
        return abstract_params(trained_specs(decoder), jnp.float32, ShardingRules(self.weights.mesh, TRAIN_AXES))

    def _as_saved(self, names: list[str]) -> TrainState:
        """The abstract state with the models and coefficients that a saved step of arrays with these names has."""
        abstract = self.abstract()
        coefs = [name.removeprefix("coefs.") for name in names if name.startswith("coefs.")]
        others = {name.partition(".")[0] for name in names} - {"step", "opt_state", "coefs"}
        # A model that this run does not train followed the policy, and is stored as the policy is.
        models = {name: abstract.models[name] if name in self.optimizers else abstract.params for name in others}
        return dataclasses.replace(abstract, models=models, coefs=abstract_coefs(abstract.params, coefs))

    def _completed(self, state: TrainState) -> TrainState:
        """The state with those models that it lacks as they begin, and with the coefficients of the config."""
        models = dict(state.models)
        for role in self.changing:
            if role.name not in models:
                params = self.weights.of(role)
                trained = role.name in self.optimizers
                models[role.name] = init_state(params, self.optimizers[role.name]) if trained else params
        return with_coefs(dataclasses.replace(state, models=models), first_coefs(self.spec.recipe))


def _begun_again(saved: HostState) -> HostState:
    """The host state of a forked run as the start of another, whose settings may differ."""
    begun = (each["number"] for each in saved.pop("in_flight", ()))  # they start from their prompts
    saved["cursor"] = min(begun, default=saved["cursor"])
    saved.pop("curriculum", None)
    saved.pop("retired", None)
    saved.pop("data", None)
    return saved
