"""Every compiled program of a run with abstract arguments, and the memory in use beside each one.

The programs come from the factories that trainer and engine call. The mesh may consist of devices that do not exist.
`podium.plan.compiled.compile_worker` compiles them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from podium.compiler import Lowerable
from podium.models.adapters import abstract_frozen
from podium.models.architecture import DecoderConfig
from podium.models.decoder import head_weights
from podium.models.logprobs import logits_at
from podium.models.params import trained_specs
from podium.plan.traced.resident_memory import STEP, Resident, Stage, held
from podium.rollout.cache import Cache
from podium.rollout.engine_weights import abstract_weights, engine_decoder, frozen_in_rollout, keeps
from podium.rollout.programs import (
    Chunk,
    EnginePrograms,
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
from podium.train.scorers import make_role_program, role_settings
from podium.train.setup import make_run_optimizer, make_train_settings
from podium.train.state import abstract_state
from podium.train.step import (
    TEACHER_HEAD,
    TrainSettings,
    abstract_batch,
    abstract_scored,
    make_train_programs,
    make_value_step,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseProgram:
    """One compiled program of a run."""

    lower: Callable[[], jax.stages.Lowered]  # traces it with its arguments
    arguments: tuple[object, ...]  # pytrees of abstract arrays
    residents: Mapping[str, int]
    """Bytes in use on a device beside the program's own arguments, by kind of array."""


def phase_programs(spec: RunSpec, mesh: Mesh) -> dict[str, PhaseProgram]:
    """The programs of a run by name, in the order in which a run first calls them.

    Names: init, sync, prefill:T by chunk length, copy, decode:S by slots, reward:NAME by reward model, score if it is
    needed, the `phase` of each other role and, if it is trained, its name, and update.

    Raises:
        ValueError: an array does not divide over the mesh.
    """
    recipe, decoder = spec.recipe, spec.decoder
    specs, optimizer = trained_specs(decoder), make_run_optimizer(spec.optimizer, decoder)
    settings = make_train_settings(spec.update, decoder, mesh)
    params = abstract_params(specs, jnp.dtype(jnp.float32), settings.stored)
    frozen = abstract_frozen(decoder, settings.stored)
    state = abstract_state(params, optimizer)
    score, train_step = make_train_programs(settings, recipe, optimizer)
    batch = abstract_batch(make_batch([], spec.batch)[0], settings.computing)
    weights = {role.name: _abstract_weights(role, settings) for role in spec.roles.values()}
    learning = {
        role.name: abstract_state(weights[role.name], make_run_optimizer(role.learning.optimizer, role.decoder))
        for role in spec.scoring_models
        if role.learning is not None
    }
    scored = abstract_scored(
        spec.batch, recipe, settings, width=0 if spec.compared is None else spec.compared.decoder.width
    )
    compared: dict[str, jax.ShapeDtypeStruct] = {}
    if spec.compared is not None and (of_compared := weights[spec.compared.name]):
        compared[TEACHER_HEAD] = of_compared.get("head", of_compared["embed"])

    engine = _abstract_engine(spec, mesh)
    merged = decoder.lora is not None and decoder.lora.merged
    kept = [] if keeps(frozen, decoder, engine.rules, engine.dtype) else engine.frozen
    waiting = recipe.minibatches * device_bytes(scored)
    table = [
        Resident("parameters", device_bytes(params)),
        Resident("optimizer", device_bytes((state.step, state.opt_state))),
        *(Resident(f"{role.kind}_weights", device_bytes(weights[role.name])) for role in spec.roles.values()),
        *(
            Resident(f"{spec.roles[name].kind}_optimizer", device_bytes((each.step, each.opt_state)))
            for name, each in learning.items()
        ),
        # Unless it has its own copy, the rollout reads the trainer's frozen weights.
        Resident("frozen_weights", device_bytes(frozen), STEP if kept or merged else ("sync", "update")),
        Resident("rollout_weights", device_bytes(kept), ("sync", "update")),
        Resident("rollout_weights", device_bytes(engine.weights), ("rollout",)),
        Resident("kv_cache", device_bytes(engine.cache), ("rollout",)),
        Resident("batch", waiting, ("update",)),
    ]
    phase = functools.partial(_phase, table)
    own, under = {"parameters": params}, {"frozen_weights": frozen}
    found = {"init": _phase([], "sync", make_opt_init(optimizer, params), (params,), {})}
    synced = own | under if merged else own
    found["sync"] = phase("sync", engine.programs.sync, (params | frozen if merged else params,), synced)
    for name, call in engine_calls(engine.programs, spec.rollout.settings, decoder, engine.rules, engine.dtype).items():
        read = {} if name == "copy" else {"rollout_weights": engine.weights}
        found[name] = phase("rollout", *call, {"kv_cache": engine.cache, **read})
    for role in spec.rollout.grading_models:
        read, shown = {f"{role.kind}_weights": weights[role.name]}, _abstract_own_batch(spec, role, settings)
        found[role.phase] = phase("rollout", make_role_program(role, settings), (weights[role.name], shown), read)
    if recipe.scorers:
        found[SCORE] = phase("update", score, (params | frozen, batch), own | under | {"batch": batch})
    unrouted = dataclasses.replace(batch, choices=None)
    for role in spec.scoring_models:
        if role.phase == SCORE:
            continue
        read = {f"{role.kind}_weights": weights[role.name]} if weights[role.name] else under
        shown, given = unrouted, {"batch": unrouted}
        if role.longer_prompts is not None:
            shown, given = _abstract_own_batch(spec, role, settings), {}
        program = make_role_program(role, settings)
        found[role.phase] = phase("update", program, (weights[role.name] or frozen, shown), read | given)
        if role.learning is not None:
            own_state = learning[role.name]
            optimizer = make_run_optimizer(role.learning.optimizer, role.decoder)
            step = make_value_step(role_settings(role, settings), optimizer, clip=role.learning.clip)
            read |= {f"{role.kind}_optimizer": (own_state.step, own_state.opt_state), "batch": scored}
            found[role.name] = phase("update", step, (own_state, scored), read)
    trained = own | under | {"optimizer": (state.step, state.opt_state), "batch": scored, "teacher_weights": compared}
    found["update"] = phase("update", train_step, (state, scored, frozen | compared), trained)
    return found


def _abstract_weights(role: Role, settings: TrainSettings) -> AbstractParams:
    """The weights of a model other than the policy; empty if they are the policy's own frozen weights."""
    if role.weights == "policy_base":
        return {}
    trained = abstract_params(trained_specs(role.decoder), jnp.dtype(jnp.float32), settings.stored)
    return abstract_frozen(role.decoder, settings.stored) | trained


def _abstract_own_batch(spec: RunSpec, role: Role, settings: TrainSettings) -> Batch[jax.Array]:
    """A batch that only this role scores."""
    return abstract_batch(make_batch([], spec.batch_of(role))[0], settings.computing)


class _AbstractEngine(NamedTuple):
    """The rollout's programs and arrays."""

    rules: ShardingRules
    dtype: jnp.dtype
    programs: EnginePrograms
    weights: AbstractParams
    frozen: list[jax.ShapeDtypeStruct]
    """The weights among `weights` that no update changes."""
    cache: Cache


def _abstract_engine(spec: RunSpec, mesh: Mesh) -> _AbstractEngine:
    decoder, rollout = spec.decoder, spec.rollout.settings
    rules = rollout_rules(spec.rollout.layout, decoder, mesh)
    dtype = jnp.dtype(spec.rollout.dtype)
    programs = make_engine_programs(rollout, decoder, rules, dtype)
    if rollout.layout == "legacy":
        programs = programs._replace(extend=_with_all_logits(engine_decoder(decoder, rules), rules, dtype))
    weights = abstract_weights(decoder, rules, dtype)
    return _AbstractEngine(
        rules=rules,
        dtype=dtype,
        programs=programs,
        weights=weights,
        frozen=[weight for name, weight in weights.items() if frozen_in_rollout(decoder, name)],
        cache=abstract_engine_cache(rollout, decoder, rules, dtype),
    )


def _with_all_logits(decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype) -> ExtendProgram:
    """The seed system's prefill, which computes logits of all prompt tokens (and ran out of memory because of them)."""

    def extend(params: Params, cache: Cache, chunk: Chunk) -> tuple[Cache, jax.Array]:
        hidden, cache, _ = prefill(params, cache, chunk, decoder=decoder, rules=rules, dtype=dtype)
        logits = logits_at(hidden, head_weights(params, rules, dtype), 1.0)  # [R, T, V]
        last = jnp.take_along_axis(logits, (chunk.counts - 1)[:, None, None], axis=1)[:, 0]
        return cache, rules.constrain(last, "batch", None)

    return cast(ExtendProgram, jax.jit(extend, donate_argnums=1))  # it is only lowered, never run: its results differ


def _phase(
    table: Iterable[Resident],
    stage: Stage,
    program: Lowerable,
    arguments: tuple[object, ...],
    own: Mapping[str, object],
) -> PhaseProgram:
    """Make a `PhaseProgram`; `own` are the residents that are among its arguments, by kind."""
    beside = held(table, stage, {name: device_bytes(tree) for name, tree in own.items()})
    residents = {name: size for name, size in beside.items() if size}
    return PhaseProgram(lower=functools.partial(program.lower, *arguments), arguments=arguments, residents=residents)


def device_bytes(tree: object) -> int:
    """Bytes on one device of a tree of abstract arrays; arrays in host memory do not count."""
    own = [x for x in jax.tree.leaves(tree) if not takes_no_device(x.sharding)]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in own)
