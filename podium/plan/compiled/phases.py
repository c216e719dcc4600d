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

from podium.algorithms.recipes import TEACHER_HIDDEN
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
from podium.run.run_spec import RunSpec
from podium.sampling.sampler import rollout_rules
from podium.sharding import AbstractParams, Params, ShardingRules, abstract_params
from podium.train.batches.batch import make_batch
from podium.train.critic import make_critic, make_critic_optimizer
from podium.train.optimizer.offload import takes_no_device
from podium.train.optimizer.transforms import make_opt_init
from podium.train.reward_models import make_reward_program, reward_batch
from podium.train.scorers import make_teacher_program
from podium.train.setup import make_run_optimizer, make_train_settings
from podium.train.state import TrainState, abstract_state
from podium.train.step import TEACHER_HEAD, TrainSettings, abstract_batch, abstract_scored, make_train_programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseProgram:
    """One compiled program of a run."""

    lower: Callable[[], jax.stages.Lowered]  # traces it with its arguments
    arguments: tuple[object, ...]  # pytrees of abstract arrays
    residents: Mapping[str, int]
    """Bytes in use on a device beside the program's own arguments, by kind of array."""


def phase_programs(spec: RunSpec, mesh: Mesh) -> dict[str, PhaseProgram]:
    """The programs of a run by name, in the order in which a run first calls them.

    Names: init, sync, prefill:T by chunk length, copy, decode:S by slots, reward:NAME by reward model, score, teacher,
    values and critic if they are needed, and update.

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
    teacher = spec.teacher
    width = 0 if teacher is None else teacher.decoder.width
    scored = abstract_scored(spec.batch, recipe, settings, teacher_width=width)
    taught = {} if teacher is None or teacher.is_base else abstract_frozen(teacher.decoder, settings.stored)
    compared: dict[str, jax.ShapeDtypeStruct] = {}
    if taught and TEACHER_HIDDEN in scored.scores:
        compared[TEACHER_HEAD] = taught.get("head", taught["embed"])

    rewarding = {each.name: abstract_frozen(each.decoder, settings.stored) for each in spec.rollout.reward_models}
    valued = _abstract_critic(spec, settings)
    engine = _abstract_engine(spec, mesh)
    merged = decoder.lora is not None and decoder.lora.merged
    kept = [] if keeps(frozen, decoder, engine.rules, engine.dtype) else engine.frozen
    waiting = recipe.minibatches * device_bytes(scored)
    table = [
        Resident("parameters", device_bytes(params)),
        Resident("optimizer", device_bytes((state.step, state.opt_state))),
        Resident("reference_weights", device_bytes(params) if recipe.needs_reference and not frozen else 0),
        Resident("teacher_weights", device_bytes(taught)),
        Resident("reward_weights", device_bytes(rewarding)),
        Resident("critic_weights", device_bytes(valued and valued.params)),
        Resident("critic_optimizer", device_bytes(valued and (valued.step, valued.opt_state))),
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
        weights = {} if name == "copy" else {"rollout_weights": engine.weights}
        found[name] = phase("rollout", *call, {"kv_cache": engine.cache, **weights})
    for each in spec.rollout.reward_models:
        _, program = make_reward_program(each, settings)
        shape = make_batch([], reward_batch(each, shards=settings.computing.num_shards("batch")))[0]
        graded = (rewarding[each.name], abstract_batch(shape, settings.computing))
        found[f"reward:{each.name}"] = phase("rollout", program, graded, {"reward_weights": graded[0]})
    if recipe.scorers:
        found["score"] = phase("update", score, (params | frozen, batch), own | under | {"batch": batch})
    unrouted = dataclasses.replace(batch, choices=None)
    if teacher is not None and recipe.teacher is not None:
        read = under if teacher.is_base else {"teacher_weights": taught}
        shown, given = unrouted, {"batch": unrouted}
        if teacher.own_batch is not None:
            shown, given = abstract_batch(make_batch([], teacher.own_batch)[0], settings.computing), {}
        program = make_teacher_program(recipe.teacher, settings, teacher.decoder)
        found["teacher"] = phase("update", program, (taught or frozen, shown), read | given)
    if spec.critic is not None and valued is not None:
        critic, moments = make_critic(spec.critic, settings, make_critic_optimizer(spec.critic)), valued.opt_state
        read = {"critic_weights": valued.params}
        found["values"] = phase("update", critic.values, (valued.params, unrouted), read | {"batch": unrouted})
        read |= {"critic_optimizer": (valued.step, moments), "batch": scored}
        found["critic"] = phase("update", critic.step, (valued, scored), read)
    trained = own | under | {"optimizer": (state.step, state.opt_state), "batch": scored, "teacher_weights": compared}
    found["update"] = phase("update", train_step, (state, scored, frozen | compared), trained)
    return found


def _abstract_critic(spec: RunSpec, settings: TrainSettings) -> TrainState | None:
    """The critic's state; None without a critic."""
    if spec.critic is None:
        return None
    params = abstract_params(trained_specs(spec.critic.decoder), jnp.dtype(jnp.float32), settings.stored)
    return abstract_state(params, make_critic_optimizer(spec.critic))


class _AbstractEngine(NamedTuple):
    """The rollout's programs and arrays."""

    rules: ShardingRules
    dtype: jnp.dtype
    programs: EnginePrograms
    weights: AbstractParams
    frozen: list[jax.ShapeDtypeStruct]
    """Those of `weights` that no update changes."""
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
    """The seed system's prefill, which computes logits of all prompt tokens (and ran out of memory by them)."""

    def extend(params: Params, cache: Cache, chunk: Chunk) -> tuple[Cache, jax.Array]:
        hidden, cache, _ = prefill(params, cache, chunk, decoder=decoder, rules=rules, dtype=dtype)
        logits = logits_at(hidden, head_weights(params, rules, dtype), 1.0)  # [R, T, V]
        last = jnp.take_along_axis(logits, (chunk.counts - 1)[:, None, None], axis=1)[:, 0]
        return cache, rules.constrain(last, "batch", None)

    return cast(ExtendProgram, jax.jit(extend, donate_argnums=1))  # which is lowered only: its results differ


def _phase(
    table: Iterable[Resident],
    stage: Stage,
    program: Lowerable,
    arguments: tuple[object, ...],
    own: Mapping[str, object],
) -> PhaseProgram:
    """A program, and what is on a device beside its arguments; `own` are those of them that are residents, by kind."""
    beside = held(table, stage, {name: device_bytes(tree) for name, tree in own.items()})
    residents = {name: size for name, size in beside.items() if size}
    return PhaseProgram(lower=functools.partial(program.lower, *arguments), arguments=arguments, residents=residents)


def device_bytes(tree: object) -> int:
    """Bytes on one device of a tree of abstract arrays; arrays in host memory do not count."""
    own = [x for x in jax.tree.leaves(tree) if not takes_no_device(x.sharding)]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in own)
