"""Every compiled program of a run with abstract arguments, and the memory in use in addition to each one.

The programs come from the factories that trainer and engine call. The mesh may consist of devices that do not exist.
`podium.plan.compiled.compile_worker` compiles them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from podium.compiler import Lowerable
from podium.models.adapters import abstract_frozen
from podium.models.architecture import DecoderConfig
from podium.models.decoder import head_weights
from podium.models.logprobs import logits_at
from podium.models.params import trained_specs
from podium.plan.closed_form.resident_memory import STEP, Resident, Stage, held
from podium.rollout.cache import Cache
from podium.rollout.engine_weights import abstract_weights, engine_decoder, frozen_in_rollout, keeps
from podium.rollout.programs import (
    Chunk,
    EngineForm,
    ExtendProgram,
    abstract_engine_cache,
    engine_calls,
    make_engine_programs,
    prefill,
)
from podium.run.run_spec import SCORE, Role, RunSpec
from podium.sampling.sampler import rollout_rules
from podium.sharding import AbstractParams, Params, ShardingRules, abstract_params
from podium.train.batches.batch import Batch, make_batch
from podium.train.optimizer.offload import takes_no_device
from podium.train.optimizer.transforms import make_opt_init
from podium.train.scorers import compared_head, make_role_program, role_settings
from podium.train.setup import make_run_optimizer
from podium.train.state import TrainState, abstract_state
from podium.train.step import TrainSettings, abstract_batch, abstract_scored, make_train_programs, make_value_step


class PhaseProgram:
    """One compiled program of a run."""

    def __init__(
        self,
        table: Iterable[Resident],
        stage: Stage,
        program: Lowerable,
        arguments: tuple[object, ...],
        own: Mapping[str, object],
    ) -> None:
        """`table` are all residents; `own` are those that are among the program's arguments, by kind of array."""
        self.trace = functools.partial(program.trace, *arguments)
        """Traces it with its arguments."""
        self.arguments = arguments
        """Pytrees of abstract arrays."""
        self.own = {name: device_bytes(tree) for name, tree in own.items()}
        """Bytes of the residents that are among its arguments, by kind of array."""
        self.residents = {name: size for name, size in held(table, stage, self.own).items() if size}
        """Bytes in use on a device in addition to the program's own arguments, by kind of array."""

    def lower(self, platform: str | None = None) -> jax.stages.Lowered:
        """Trace and lower it: for a platform by jax's name, or for that of its arguments' devices."""
        return self.trace().lower(lowering_platforms=(platform,) if platform else None)


Found = dict[str, PhaseProgram]
MakePhase = Callable[[Stage, Lowerable, tuple[object, ...], Mapping[str, object]], PhaseProgram]
"""Makes the program of a stage from its arguments; the last are the residents among them, by kind of array."""


def phase_programs(spec: RunSpec, mesh: Mesh) -> Found:
    """The programs of a run by name, in the order in which a run first calls them.

    Names: init, sync, prefill:T by chunk length, copy, decode:S by slots, score if it is needed, the `phase` of each
    other role and, if it is trained, its name, and update.

    Raises:
        ValueError: an array does not divide over the mesh.
    """
    training, engine = _Training(spec, mesh), _Engine(spec, mesh)
    phase = functools.partial(PhaseProgram, _residents(spec, training, engine))
    return {
        "init": PhaseProgram([], "sync", make_opt_init(training.optimizer, training.params), (training.params,), {}),
        **_rollout_programs(spec, training, engine, phase),
        **_update_programs(spec, training, phase),
    }


class _Role:
    """The abstract arrays of a model other than the policy."""

    def __init__(self, role: Role, settings: TrainSettings) -> None:
        self.weights: AbstractParams = {}
        """Empty if they are the policy's own frozen weights."""
        self.state: TrainState | None = None
        """The model's training state; None if the model is not trained."""
        if role.weights == "policy_base":
            return
        trained = abstract_params(trained_specs(role.decoder), jnp.dtype(jnp.float32), settings.stored)
        self.weights = abstract_frozen(role.decoder, settings.stored) | trained
        if role.learning is not None:
            self.state = abstract_state(self.weights, make_run_optimizer(role.learning.optimizer, role.decoder))


class _Training:
    """The trainer's abstract arrays, and what its programs are made with."""

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        decoder, compared = spec.decoder, spec.compared
        self.settings = TrainSettings(decoder, mesh, spec.update)
        self.optimizer = make_run_optimizer(spec.optimizer, decoder)
        self.params = abstract_params(trained_specs(decoder), jnp.dtype(jnp.float32), self.settings.stored)
        self.frozen = abstract_frozen(decoder, self.settings.stored)
        self.state = abstract_state(self.params, self.optimizer)
        self.roles = {role.name: _Role(role, self.settings) for role in spec.roles.values()}
        self.batch = abstract_batch(make_batch([], spec.batch)[0], self.settings.computing)
        """A minibatch before it is scored."""
        width = 0 if compared is None else compared.decoder.width
        self.scored = abstract_scored(spec.batch, spec.recipe, self.settings, width=width)
        weights = {} if compared is None else self.roles[compared.name].weights
        self.compared = compared_head(weights) if weights else {}
        """The head of a role whose distributions updates compute; empty without one, or if it is among `frozen`."""


def _residents(spec: RunSpec, training: _Training, engine: "_Engine") -> list[Resident]:
    """All arrays that stay on a device between programs."""
    state, frozen = training.state, training.frozen
    merged = spec.decoder.lora is not None and spec.decoder.lora.merged
    kept = [] if keeps(frozen, spec.decoder, engine.rules, engine.dtype) else engine.frozen
    roles = [(spec.roles[name].kind, role) for name, role in training.roles.items()]
    return [
        Resident("parameters", device_bytes(training.params)),
        Resident("optimizer", device_bytes((state.step, state.opt_state))),
        *(Resident(f"{kind}_weights", device_bytes(role.weights)) for kind, role in roles),
        *(
            Resident(f"{kind}_optimizer", device_bytes((role.state.step, role.state.opt_state)))
            for kind, role in roles
            if role.state is not None
        ),
        # Unless it has its own copy, the rollout reads the trainer's frozen weights.
        Resident("frozen_weights", device_bytes(frozen), STEP if kept or merged else ("sync", "update")),
        Resident("rollout_weights", device_bytes(kept), ("sync", "update")),
        Resident("rollout_weights", device_bytes(engine.weights), ("rollout",)),
        Resident("kv_cache", device_bytes(engine.cache), ("rollout",)),
        Resident("batch", spec.recipe.minibatches * device_bytes(training.scored), ("update",)),
    ]


def _rollout_programs(spec: RunSpec, training: _Training, engine: "_Engine", phase: MakePhase) -> Found:
    """The programs that take the rollout's weights from the trainer, make completions, and grade them."""
    decoder = spec.decoder
    synced: dict[str, object] = {"parameters": training.params}
    weights = training.params
    if decoder.lora is not None and decoder.lora.merged:
        weights, synced["frozen_weights"] = weights | training.frozen, training.frozen
    found = {"sync": phase("sync", engine.programs.sync, (weights,), synced)}
    form = EngineForm(spec.rollout.settings, decoder, engine.rules, engine.dtype)
    for name, call in engine_calls(engine.programs, form).items():
        read = {} if name == "copy" else {"rollout_weights": engine.weights}
        found[name] = phase("rollout", *call, {"kv_cache": engine.cache, **read})
    for role in spec.rollout.grading_models:
        weights, program = training.roles[role.name].weights, make_role_program(role, training.settings)
        arguments = weights, _abstract_own_batch(spec, role, training.settings)
        found[role.phase] = phase("rollout", program, arguments, {f"{role.kind}_weights": weights})
    return found


def _update_programs(spec: RunSpec, training: _Training, phase: MakePhase) -> Found:
    """The programs that score a step's batch and train on it."""
    settings, batch, state, scored = training.settings, training.batch, training.state, training.scored
    score, train_step = make_train_programs(settings, spec.recipe, training.optimizer)
    own = {"parameters": training.params, "frozen_weights": training.frozen}
    found: Found = {}
    if spec.recipe.scorers:
        found[SCORE] = phase("update", score, (training.params | training.frozen, batch), own | {"batch": batch})
    for role in spec.scoring_models:
        if role.phase != SCORE:
            found |= _role_programs(spec, role, training, phase)
    arguments = state, scored, training.frozen | training.compared
    own |= {"optimizer": (state.step, state.opt_state), "batch": scored}
    if spec.compared is not None:
        own[f"{spec.compared.kind}_weights"] = training.compared
    return found | {"update": phase("update", train_step, arguments, own)}


def _role_programs(spec: RunSpec, role: Role, training: _Training, phase: MakePhase) -> Found:
    """The program by which a role scores a batch and, if it is trained, the one that trains it."""
    settings, arrays, scored = training.settings, training.roles[role.name], training.scored
    # The policy's own frozen weights are those of a role without weights.
    read = {f"{role.kind}_weights": arrays.weights} if arrays.weights else {"frozen_weights": training.frozen}
    shown = dataclasses.replace(training.batch, choices=None)
    given: dict[str, object] = {"batch": shown}
    if role.longer_prompts is not None:
        shown, given = _abstract_own_batch(spec, role, settings), {}
    program, arguments = make_role_program(role, settings), (arrays.weights or training.frozen, shown)
    found = {role.phase: phase("update", program, arguments, read | given)}
    if role.learning is not None and (state := arrays.state) is not None:
        optimizer = make_run_optimizer(role.learning.optimizer, role.decoder)
        step = make_value_step(role_settings(role, settings), optimizer, clip=role.learning.clip)
        own = read | {f"{role.kind}_optimizer": (state.step, state.opt_state), "batch": scored}
        found[role.name] = phase("update", step, (state, scored), own)
    return found


def _abstract_own_batch(spec: RunSpec, role: Role, settings: TrainSettings) -> Batch[jax.Array]:
    """A batch that only this role scores."""
    return abstract_batch(make_batch([], spec.batch_of(role))[0], settings.computing)


class _Engine:
    """The rollout's programs and abstract arrays."""

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        decoder, rollout = spec.decoder, spec.rollout.settings
        self.rules = rules = rollout_rules(spec.rollout.layout, decoder, mesh)
        self.dtype = dtype = jnp.dtype(spec.rollout.dtype)
        self.programs = make_engine_programs(rollout, decoder, rules, dtype)
        if rollout.layout == "legacy":
            extend = _with_all_logits(engine_decoder(decoder, rules), rules, dtype)
            self.programs = self.programs._replace(extend=extend)
        self.weights = abstract_weights(decoder, rules, dtype)
        self.frozen = [weight for name, weight in self.weights.items() if frozen_in_rollout(decoder, name)]
        """The weights among `weights` that no update changes."""
        self.cache = abstract_engine_cache(rollout, decoder, rules, dtype)


def _with_all_logits(decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype) -> ExtendProgram:
    """The seed system's prefill, which computes logits of all prompt tokens (and ran out of memory because of them)."""

    def extend(params: Params, cache: Cache, chunk: Chunk) -> tuple[Cache, jax.Array]:
        hidden, cache, _ = prefill(params, cache, chunk, decoder=decoder, rules=rules, dtype=dtype)
        logits = logits_at(hidden, head_weights(params, rules, dtype), 1.0)  # [R, T, V]
        last = jnp.take_along_axis(logits, (chunk.counts - 1)[:, None, None], axis=1)[:, 0]
        return cache, rules.constrain(last, "batch", None)

    return cast(ExtendProgram, jax.jit(extend, donate_argnums=1))  # it is only lowered, never run: its results differ


def device_bytes(tree: object) -> int:
    """Bytes on one device of a tree of abstract arrays; arrays in host memory do not count."""
    own = [x for x in jax.tree.leaves(tree) if not takes_no_device(x.sharding)]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in own)
