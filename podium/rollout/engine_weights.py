"""An engine's weights: their layout, which ones change with updates, and how they are made from the trainer's."""

import dataclasses
from typing import Protocol, cast

import jax
import jax.numpy as jnp

from podium.compiler import Lowerable
from podium.models.adapters import merged
from podium.models.architecture import DecoderConfig, rollout_decoder, unrolled
from podium.models.blocks.kind import Place
from podium.models.linear import as_bits, kept_dtype, of_bits
from podium.models.params import (
    LAYERS,
    SCALE,
    TRAIN_AXES,
    ParamSpecs,
    indivisible,
    is_adapter,
    joined_groups,
    param_specs,
    place_weights,
    rollout_dtype,
    rollout_specs,
)
from podium.models.quantised import int8
from podium.models.side_by_side import joined
from podium.sharding import AnyParams, Params, ShardingRules, abstract_params, param_shardings


class Program(Lowerable, Protocol):
    """A jitted function of arrays."""

    def _cache_size(self) -> int:
        """Number of variants compiled so far."""
        ...


class SyncProgram(Program, Protocol):
    """Makes an engine's weights from the trainer's (`make_sync`)."""

    def __call__(self, params: Params, /) -> Params:
        """Return the weights, in their own buffers."""
        ...


def engine_decoder(decoder: DecoderConfig, rules: ShardingRules) -> DecoderConfig:
    """The decoder as an engine computes it: in the rollout's formats, and on GPUs unrolled and joined, unless it shares
    the trainer's frozen weights.

    XLA for GPUs copies a layer's slice of a stack of weights before each product, so that a decode step would move
    every weight three times (benches/results/gpu-decode-planned.json). Small products reach only a third of a GPU's
    memory bandwidth, and each needs a launch, so one product reads all matrices of a layer that share an input.
    """
    stacked = rules.platform != "gpu" or (decoder.lora is not None and decoder.lora.shared)
    own = rollout_decoder(decoder)
    return own if stacked else dataclasses.replace(unrolled(own), joined=True)


def engine_specs(decoder: DecoderConfig, rules: ShardingRules) -> ParamSpecs:
    """The specs of an engine's weights under these rules."""
    return rollout_specs(engine_decoder(decoder, rules), rules.num_shards("logits"))


def frozen_in_rollout(decoder: DecoderConfig, name: str) -> bool:
    """Whether an engine's copy of a weight never changes: with unmerged adapters, every weight except the adapters."""
    return decoder.lora is not None and not decoder.lora.merged and not is_adapter(name)


def make_sync(decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype, *, frozen: bool = False) -> SyncProgram:
    """The jitted `training params -> rollout params`, cast and laid out for decoding, in new buffers.

    Since they are copies, the trainer can donate its parameters to the next update. If weights are gathered, layers are
    moved one at a time; moving all at once, a TPU would gather all of them before storing any, in twice the memory. The
    same holds for merging adapters; they are always merged into the frozen weights. With unmerged adapters, only the
    adapters are synced; with `frozen`, all other weights. Matrices that an engine reads in one product are written side
    by side. Matrices that only the rollout stores in int8 are quantised from the trainer's values, with their scales.
    """
    engine = engine_decoder(decoder, rules)
    specs = {
        name: spec for name, spec in engine_specs(decoder, rules).items() if frozen_in_rollout(decoder, name) == frozen
    }
    single = rollout_specs(dataclasses.replace(engine, joined=False), rules.num_shards("logits"))
    stored = param_shardings(param_specs(decoder), ShardingRules(rules.mesh, TRAIN_AXES))
    wanted = param_shardings(specs, rules)
    merging = decoder.lora is not None and decoder.lora.merged
    places = {layer: place for place in engine.places for layer in place.layers}
    stacked = engine.stacks == decoder.stacks
    alike = specs.keys() <= stored.keys() and all(
        stored[name].is_equivalent_to(wanted[name], len(spec.shape)) for name, spec in specs.items()
    )
    trained = _trained(rules)
    in_place = alike and stacked and not engine.joined and not merging

    def put(name: str, value: jax.Array) -> jax.Array:
        shape, axes, *_ = single[name]
        missing = [(0, size - found) for size, found in zip(shape[-value.ndim :], value.shape, strict=True)]
        value = jnp.pad(value.astype(rollout_dtype(name, decoder, dtype)), missing)
        value = as_bits(value) if rules.on_cpu else value
        return rules.constrain(value, *axes[len(axes) - value.ndim :])

    def move_layer(layer: Params, place: Place) -> Params:
        if decoder.lora and merging:
            layer = merged({name: of_bits(value) for name, value in layer.items()}, decoder.lora.scale)
        moved: Params = {}
        for name, value in layer.items():
            parts = _rounded(place.prefix + name, of_bits(value), single, trained)
            moved |= {part.removeprefix(place.prefix): put(part, each) for part, each in parts.items()}
        groups = joined_groups(place.block.specs(decoder.width, std=0.0, out_std=0.0), engine)
        return {place.prefix + name: jnp.copy(value) for name, value in joined(moved, groups, rules).items()}

    def move_stack(layers: Params, place: Place) -> Params:
        if stacked:
            return jax.lax.scan(lambda _, layer: (None, move_layer(layer, place)), None, layers)[1]
        moved: Params = {}
        for index, layer in enumerate(place.layers):
            one = move_layer({name: value[index] for name, value in layers.items()}, places[layer])
            moved |= {name: value[None] for name, value in one.items()}
        return moved

    def sync(params: Params) -> Params:
        whole = {name: value for name, value in params.items() if in_place or not name.startswith(LAYERS)}
        moved = {name: jnp.copy(put(name, of_bits(value))) for name, value in whole.items()}
        for place in decoder.places if not in_place else ():
            layers = place_weights(params, place)
            moved |= move_stack(layers, place) if layers else {}
        return moved

    return cast(SyncProgram, jax.jit(sync, out_shardings=wanted))


def _trained(rules: ShardingRules) -> ShardingRules:
    """The rules by which training splits weights, expressed on a rollout's mesh, where a group's axes divide fsdp."""
    return ShardingRules(rules.mesh, {"width": tuple(rules.mesh.shape)} if "rows" in rules.axes else TRAIN_AXES)


def _rounded(name: str, value: jax.Array, specs: ParamSpecs, trained: ShardingRules) -> Params:
    """Quantise a layer's weight to codes and scales if `specs` has them; otherwise, or if the weight is codes already,
    return it unchanged.

    Each device quantises the part that it stores in training, so that devices exchange codes instead of float32
    weights.
    """
    if name + SCALE not in specs or value.dtype in (jnp.int8, jnp.uint8):
        return {name: value}
    spec = specs[name]
    of_layer = spec._replace(shape=spec.shape[1:], axes=spec.axes[1:], stacked=spec.stacked - 1)
    if any(indivisible({name: of_layer}, trained.num_shards)):
        codes, scale = int8(value, of_layer)
    else:
        codes, scale = int8(trained.constrain(value, *of_layer.axes), of_layer)
        codes = trained.constrain(codes, *of_layer.axes)
    return {name: codes, name + SCALE: scale}


def abstract_weights(decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """An engine's weights with abstract arrays."""
    specs = engine_specs(decoder, rules)
    dtypes = {name: kept_dtype(jnp.dtype(rollout_dtype(name, decoder, dtype)), rules) for name in specs}
    return {
        name: jax.ShapeDtypeStruct(each.shape, dtypes[name], sharding=each.sharding)
        for name, each in abstract_params(specs, dtype, rules).items()
    }


def keeps(params: AnyParams, decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype) -> bool:
    """Whether an engine can use the trainer's frozen weights (concrete or abstract) without a copy.

    True if layout and number format are the same, or if adapters are merged into the weights at each sync.
    """
    if decoder.lora is None or decoder.lora.merged:
        return True
    engine = engine_decoder(decoder, rules)
    if engine.joined or engine.stacks != decoder.stacks:
        return False
    wanted = abstract_weights(decoder, rules, dtype)

    def kept(name: str, value: jax.Array | jax.ShapeDtypeStruct) -> bool:
        same = (value.shape, value.dtype) == (wanted[name].shape, wanted[name].dtype)
        return same and value.sharding.is_equivalent_to(wanted[name].sharding, value.ndim)

    return all(kept(name, value) for name, value in params.items())
