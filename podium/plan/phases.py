"""Every compiled program of a run with abstract arguments, and the memory in use beside each one.

The programs come from the factories that trainer and engine call. The mesh may consist of devices that do not exist.
`podium.plan.worker` compiles them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import cast

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
from podium.rollout.cache import Cache
from podium.rollout.programs import (
    Chunk,
    ExtendProgram,
    abstract_engine_cache,
    engine_calls,
    make_engine_programs,
    prefill,
)
from podium.rollout.weights import abstract_weights, engine_decoder, frozen_in_rollout, keeps
from podium.run.spec import RunSpec
from podium.sharding import AbstractParams, Params, ShardingRules, abstract_params
from podium.train.batch import make_batch
from podium.train.critic import make_critic, make_critic_optimizer
from podium.train.generate import rollout_rules
from podium.train.offload import takes_no_device
from podium.train.optimizer import make_opt_init
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

    own = {"parameters": device_bytes(params)}
    moments = {"optimizer": device_bytes((state.step, state.opt_state))}
    anchor = {"reference_weights": device_bytes(params)} if recipe.needs_reference and not frozen else {}
    rewarding = {each.name: abstract_frozen(each.decoder, settings.stored) for each in spec.rollout.reward_models}
    teachers = {"teacher_weights": device_bytes(taught), "reward_weights": device_bytes(rewarding)}
    valued = _abstract_critic(spec, settings)
    critics = {
        "critic_weights": device_bytes(valued and valued.params),
        "critic_optimizer": device_bytes(valued and (valued.step, valued.opt_state)),
    }
    kept = _kept(spec, mesh, frozen)
    merged = decoder.lora is not None and decoder.lora.merged
    under = {"frozen_weights": device_bytes(frozen)}
    # Unless it has its own copy, the rollout reads the trainer's frozen weights.
    trainers = own | moments | anchor | teachers | critics | (under if kept or merged else {})
    beside = moments | anchor | teachers | critics | ({} if merged else under | kept)
    rollout = _rollout_programs(spec, mesh, params | frozen if merged else params, trainers, beside)
    found = {"init": _phase(make_opt_init(optimizer, params), (params,), {}), **rollout}
    for each in spec.rollout.reward_models:
        _, program = make_reward_program(each, settings)
        shape = make_batch([], reward_batch(each, shards=settings.computing.num_shards("batch")))[0]
        scoring = (rewarding[each.name], abstract_batch(shape, settings.computing))
        others = {"reward_weights": teachers["reward_weights"] - device_bytes(scoring[0])}
        found[f"reward:{each.name}"] = _phase(program, scoring, trainers | _rollout_bytes(spec, mesh) | others)
    waiting = recipe.minibatches * device_bytes(scored)
    if recipe.scorers:
        beside = moments | anchor | teachers | critics | kept | {"batch": waiting - device_bytes(batch)}
        found["score"] = _phase(score, (params | frozen, batch), beside)
    if teacher is not None and recipe.teacher is not None:
        own_batch, held = dataclasses.replace(batch, choices=None), {"reward_weights": teachers["reward_weights"]}
        if teacher.own_batch is None:
            held["batch"] = waiting - device_bytes(own_batch)
        else:
            own_batch = abstract_batch(make_batch([], teacher.own_batch)[0], settings.computing)
            held["batch"] = waiting
        beside = own | moments | anchor | ({} if teacher.is_base else under) | critics | kept | held
        found["teacher"] = _phase(
            make_teacher_program(recipe.teacher, settings, teacher.decoder), (taught or frozen, own_batch), beside
        )
    if spec.critic is not None and valued is not None:
        critic = make_critic(spec.critic, settings, make_critic_optimizer(spec.critic))
        own_batch = dataclasses.replace(batch, choices=None)
        others = own | moments | anchor | teachers | under | kept
        beside = others | {
            "critic_optimizer": critics["critic_optimizer"],
            "batch": waiting - device_bytes(own_batch),
        }
        found["values"] = _phase(critic.values, (valued.params, own_batch), beside)
        beside = others | {"batch": waiting - device_bytes(scored)}
        found["critic"] = _phase(critic.step, (valued, scored), beside)
    rest = teachers | {"teacher_weights": teachers["teacher_weights"] - device_bytes(compared)}
    beside = anchor | rest | critics | kept | {"batch": waiting - device_bytes(scored)}
    return found | {"update": _phase(train_step, (state, scored, frozen | compared), beside)}


def _abstract_critic(spec: RunSpec, settings: TrainSettings) -> TrainState | None:
    """The critic's state; None without a critic."""
    if spec.critic is None:
        return None
    params = abstract_params(trained_specs(spec.critic.decoder), jnp.dtype(jnp.float32), settings.stored)
    return abstract_state(params, make_critic_optimizer(spec.critic))


def _kept(spec: RunSpec, mesh: Mesh, frozen: AbstractParams) -> dict[str, int]:
    """Bytes of the rollout's own copy of frozen weights, which it keeps during updates."""
    rules = rollout_rules(spec.rollout.layout, spec.decoder, mesh)
    dtype = jnp.dtype(spec.rollout.dtype)
    if keeps(frozen, spec.decoder, rules, dtype):
        return {}
    weights = abstract_weights(spec.decoder, rules, dtype)
    own = [weight for name, weight in weights.items() if frozen_in_rollout(spec.decoder, name)]
    return {"rollout_weights": device_bytes(own)}


def _rollout_bytes(spec: RunSpec, mesh: Mesh) -> dict[str, int]:
    """Bytes of the engine's weights and cache."""
    rules = rollout_rules(spec.rollout.layout, spec.decoder, mesh)
    dtype = jnp.dtype(spec.rollout.dtype)
    cache = abstract_engine_cache(spec.rollout.settings, spec.decoder, rules, dtype)
    weights = abstract_weights(spec.decoder, rules, dtype)
    return {"rollout_weights": device_bytes(weights), "kv_cache": device_bytes(cache)}


def _rollout_programs(
    spec: RunSpec,
    mesh: Mesh,
    params: AbstractParams,
    trainers: Mapping[str, int],
    beside_params: Mapping[str, int],
) -> dict[str, PhaseProgram]:
    """The engine's programs. `trainers`: bytes that the trainer holds; `beside_params`: the same without `params`."""
    decoder, rollout = spec.decoder, spec.rollout.settings
    rules = rollout_rules(spec.rollout.layout, decoder, mesh)
    dtype = jnp.dtype(spec.rollout.dtype)
    engine = (rollout, decoder, rules, dtype)
    programs = make_engine_programs(*engine)
    weights = abstract_weights(decoder, rules, dtype)
    if rollout.layout == "legacy":
        programs = programs._replace(extend=_with_all_logits(engine_decoder(decoder, rules), rules, dtype))
    found = {"sync": _phase(programs.sync, (params,), beside_params)}
    for name, call in engine_calls(programs, *engine).items():
        beside = {"rollout_weights": device_bytes(weights)} if name == "copy" else {}  # elsewhere they are arguments
        found[name] = _phase(*call, {**trainers, **beside})
    return found


def _with_all_logits(decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype) -> ExtendProgram:
    """The seed system's prefill, which computes logits of all prompt tokens (and ran out of memory by them)."""

    def extend(params: Params, cache: Cache, chunk: Chunk) -> tuple[Cache, jax.Array]:
        hidden, cache, _ = prefill(params, cache, chunk, decoder=decoder, rules=rules, dtype=dtype)
        logits = logits_at(hidden, head_weights(params, rules, dtype), 1.0)  # [R, T, V]
        last = jnp.take_along_axis(logits, (chunk.counts - 1)[:, None, None], axis=1)[:, 0]
        return cache, rules.constrain(last, "batch", None)

    return cast(ExtendProgram, jax.jit(extend, donate_argnums=1))  # which is lowered only: its results differ


def _phase(program: Lowerable, arguments: tuple[object, ...], residents: Mapping[str, int]) -> PhaseProgram:
    held = {name: size for name, size in residents.items() if size}
    return PhaseProgram(lower=functools.partial(program.lower, *arguments), arguments=arguments, residents=held)


def device_bytes(tree: object) -> int:
    """Bytes on one device of a tree of abstract arrays; arrays in host memory do not count."""
    own = [x for x in jax.tree.leaves(tree) if not takes_no_device(x.sharding)]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in own)
