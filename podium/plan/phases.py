"""Every compiled program of a run with abstract arguments, and what else a device holds while each one runs.

The programs come from the factories that trainer and engine call, put together by the same functions; the mesh may be
of devices that are not there. What compiles them is `podium.plan.worker`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from podium.algorithms.recipes import make_recipe
from podium.config.attention import Backend
from podium.config.schema import Config
from podium.config.sizes import prompt_buckets
from podium.models.architecture import DecoderConfig
from podium.models.params import param_specs
from podium.rollout.programs import (
    abstract_engine_cache,
    abstract_prompts,
    engine_specs,
    idle_slots,
    make_engine_programs,
)
from podium.sharding import abstract_params
from podium.train.batch import batch_sizes, make_batch
from podium.train.generate import as_dtype, rollout_layout, rollout_rules
from podium.train.optimizer import make_opt_init
from podium.train.setup import make_run_optimizer, make_train_settings
from podium.train.state import abstract_state
from podium.train.step import abstract_batch, make_train_programs
from podium.train.trainer import with_scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseProgram:
    """One compiled program of a run."""

    lower: Callable[[], jax.stages.Lowered]  # traces it with its arguments
    arguments: tuple[Any, ...]  # trees of arrays, abstract
    residents: Mapping[str, int]
    """Bytes of a device that are in use beside the program's own arguments, by what they are."""


def phase_programs(config: Config, decoder: DecoderConfig, mesh: Mesh) -> dict[str, PhaseProgram]:
    """The programs of a run by name, in the order in which a run first calls them.

    They are init, sync, prefill:T, insert:T and insert_across:T by bucket, decode, score where the recipe needs it, and
    update.

    Raises:
        ValueError: something does not divide over the mesh.
    """
    recipe = make_recipe(config.algorithm, group_size=config.group_size, prompts_per_step=config.prompts_per_step)
    specs, optimizer = param_specs(decoder), make_run_optimizer(config, decoder)
    settings = make_train_settings(config, decoder, mesh)
    params: Any = abstract_params(specs, jnp.dtype(jnp.float32), settings.stored)
    state = abstract_state(params, optimizer)
    score, train_step = make_train_programs(settings, recipe, optimizer)
    batch = abstract_batch(
        make_batch([], batch_sizes(config, settings.decoder, settings.computing))[0], settings.computing
    )
    logprobs: Any = jax.ShapeDtypeStruct(batch.tokens.shape, jnp.float32, sharding=batch.tokens.sharding)
    reference = params if recipe.needs_reference else None
    scored = with_scores(batch, recipe, lambda *_: logprobs, params, reference)

    own = {"parameters": device_bytes(params)}
    moments = {"optimizer": device_bytes((state.step, state.opt_state))}
    anchor = {"reference_weights": device_bytes(reference)} if recipe.needs_reference else {}
    rollout = _rollout_programs(
        config, decoder, mesh, settings.attention, params, own | moments | anchor, moments | anchor
    )
    waiting = config.algorithm.minibatches * device_bytes(scored)
    found = {"init": _phase(make_opt_init(optimizer, params), (params,), {}), **rollout}
    if recipe.scores_old_logprobs or recipe.needs_reference:
        beside = moments | anchor | {"batch": waiting - device_bytes(batch)}
        found["score"] = _phase(score, (params, batch), beside)
    beside = anchor | {"batch": waiting - device_bytes(scored)}
    return found | {"update": _phase(train_step, (state, scored), beside)}


def _rollout_programs(
    config: Config,
    decoder: DecoderConfig,
    mesh: Mesh,
    attention: Backend,
    params: Any,
    trainers: Mapping[str, int],
    beside_params: Mapping[str, int],
) -> dict[str, PhaseProgram]:
    """The engine's programs; `trainers` are bytes that the trainer holds, `beside_params` those but for `params`."""
    rules = rollout_rules(rollout_layout(config, decoder, mesh), decoder, mesh)
    dtype = as_dtype(config.rollout.dtype, mesh)
    engine = (config.rollout, decoder, rules, dtype)
    programs = make_engine_programs(*engine, attention)
    weights: Any = abstract_params(engine_specs(decoder, rules), dtype, rules)
    cache = abstract_engine_cache(*engine)
    split = rules.sharding("rows")
    on_device = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split))
    slots: Any = on_device(idle_slots(config.rollout.slots))
    rows: Any = jax.ShapeDtypeStruct((config.rollout.slots,), jnp.int32, sharding=split)
    prompts = {
        bucket: abstract_prompts(*engine, bucket=bucket) for bucket in prompt_buckets(config.rollout.max_prompt_tokens)
    }
    held = {"prompts": device_bytes(prompts)}  # the last ones of every bucket
    found = {"sync": _phase(programs.sync, (params,), beside_params)}
    for bucket, own in prompts.items():
        tokens = jax.ShapeDtypeStruct((config.rollout.prefill_rows, bucket), jnp.int32, sharding=split)
        lengths = jax.ShapeDtypeStruct((config.rollout.prefill_rows,), jnp.int32, sharding=split)
        beside = {**trainers, "kv_cache": device_bytes(cache), **held}
        found[f"prefill:{bucket}"] = _phase(programs.prefill, (weights, tokens, lengths), beside)
        others = {"rollout_weights": device_bytes(weights), "prompts": held["prompts"] - device_bytes(own)}
        for kind, program in (("insert", programs.insert), ("insert_across", programs.insert_across)):
            found[f"{kind}:{bucket}"] = _phase(program, (cache, own, rows, slots), {**trainers, **others})
    found["decode"] = _phase(programs.decode, (weights, cache, slots), {**trainers, **held})
    return found


def _phase(program: Any, arguments: tuple[Any, ...], residents: Mapping[str, int]) -> PhaseProgram:
    held = {name: size for name, size in residents.items() if size}
    return PhaseProgram(lower=functools.partial(program.lower, *arguments), arguments=arguments, residents=held)


def device_bytes(tree: Any) -> int:
    """Bytes of one device that a tree of abstract arrays takes."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
