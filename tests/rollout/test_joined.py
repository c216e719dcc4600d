"""Matrices that an engine on a GPU stores side by side, computed on the CPU: they give what single ones do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import tiny
from tiny_engine import OfGpu, make_pass, mesh_of

from podium.certify.tiny import random_weights, tiny_clone
from podium.models.architecture import DecoderConfig, Lora
from podium.models.params import GROUP_AXES, ROLLOUT_AXES, frozen_dtype, is_adapter
from podium.models.presets import preset_decoder
from podium.rollout.engine_weights import abstract_weights, engine_decoder, engine_specs, make_sync
from podium.sharding import ShardingRules, make_mesh

BIASED = tiny(qkv_bias=True, qk_norm=True)
WIDE = tiny(width=64, mlp_width=64, heads=2, kv_heads=1, head_dim=64)
SOME = Lora(rank=2, alpha=4.0, targets=("q", "v", "up"))
ALL = Lora(rank=4, alpha=4.0, targets=("q", "k", "v", "o", "gate", "up", "down"), base="int8")


def hidden_states(params, decoder: DecoderConfig, rules: ShardingRules) -> np.ndarray:
    return np.asarray(make_pass(decoder, rules)(params))


def stored_weights(decoder: DecoderConfig):
    """Random weights in the formats in which a trainer stores them; codes are random too, with small scales."""
    found = {}
    for name, value in random_weights(decoder, seed=0).items():
        kept = "float32" if decoder.lora is None or is_adapter(name) else frozen_dtype(name, decoder)
        if kept in ("int8", "uint8"):
            value = np.clip(np.round(100 * value), -127, 127) % (128 if kept == "int8" else 256)
        found[name] = jnp.asarray(0.01 * np.abs(value) if name.endswith(".scale") else value, kept)
    return found


def synced(params, decoder: DecoderConfig, rules: ShardingRules):
    """An engine's weights."""
    adapters = {name: value for name, value in params.items() if is_adapter(name)}
    if decoder.lora is None:
        return make_sync(decoder, rules, jnp.dtype("float32"))(params)
    frozen = {name: value for name, value in params.items() if name not in adapters}
    place = make_sync(decoder, rules, jnp.dtype("float32"), frozen=True)
    return make_sync(decoder, rules, jnp.dtype("float32"))(adapters) | place(frozen)


@pytest.mark.parametrize(
    ("decoder", "joined"),
    [
        (BIASED, {"q+k+v", "gate+up"}),
        (dataclasses.replace(BIASED, lora=SOME), {"q+k+v", "q+k+v.lora_a", "q+k+v.lora_b", "gate+up.lora_b"}),
        (dataclasses.replace(BIASED, lora=ALL), {"q+k+v.scale", "gate+up.scale", "gate+up.lora_a"}),
        (dataclasses.replace(WIDE, lora=dataclasses.replace(SOME, base="nf4")), {"q+k+v.scale", "gate+up.lora_a"}),
        (tiny_clone(preset_decoder("Qwen/Qwen3.5-35B-A3B")), {"q+k+v+z", "a+b", "q+k+v", "gate+up"}),
    ],
)
def test_joined_matrices_give_what_single_ones_do(decoder, joined):
    rules = OfGpu(mesh_of(1), ROLLOUT_AXES)
    params = stored_weights(decoder)
    found = synced(params, decoder, rules)
    assert joined <= {name.split(".", 2)[2] for name in found if name.startswith("layers.")}
    assert not {"q", "up"} & {name.split(".")[2] for name in found if name.startswith("layers.")}
    abstract = abstract_weights(decoder, rules, jnp.dtype("float32"))
    assert {name: (each.shape, each.dtype) for name, each in abstract.items()} == {
        name: (each.shape, each.dtype) for name, each in found.items()
    }
    expected = hidden_states(params, decoder, ShardingRules(rules.mesh, ROLLOUT_AXES))
    states = hidden_states(found, engine_decoder(decoder, rules), rules)
    assert np.abs(states - expected).max() <= 1e-5 * np.abs(expected).max()


def test_devices_that_share_a_layer_have_their_part_of_every_matrix_and_exchange_none():
    rules = OfGpu(make_mesh("tp:2", jax.devices()[:2]), GROUP_AXES)
    params = stored_weights(BIASED)
    found = synced(params, BIASED, rules)
    q, k = (params[f"layers.{name}"][0] for name in ("q", "k"))
    first = found["layers.0.q+k+v"].addressable_shards[0].data[0]
    assert np.array_equal(first, np.concatenate([q[:, :2], k[:, :1], params["layers.v"][0][:, :1]], axis=1))
    expected = hidden_states(params, BIASED, ShardingRules(mesh_of(1), ROLLOUT_AXES))
    states = hidden_states(found, engine_decoder(BIASED, rules), rules)
    assert np.abs(states - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_layer_has_four_products_with_weights():
    rules = OfGpu(mesh_of(1), ROLLOUT_AXES)
    weights = abstract_weights(BIASED, rules, jnp.dtype("float32"))
    text = make_pass(engine_decoder(BIASED, rules), rules).lower(weights).as_text()
    of_attention = 2
    assert text.count("dot_general") == BIASED.layers * (4 + of_attention)


def test_codes_of_nf4_are_expanded_once_a_layers_input_is_there():
    decoder = dataclasses.replace(WIDE, lora=dataclasses.replace(SOME, base="nf4"))
    rules = OfGpu(mesh_of(1), ROLLOUT_AXES)
    weights = abstract_weights(decoder, rules, jnp.dtype("float32"))
    text = make_pass(engine_decoder(decoder, rules), rules, from_stacks=True).lower(weights).as_text()
    late = [line for line in text.splitlines() if "optimization_barrier" in line and f"x12x{WIDE.width}xf32>" in line]
    assert len(late) == 1, "one barrier, in the function that all layers of a kind share"
    assert late[0].count("xui8>") == len(ALL.targets) - 3, "q, k and v are one matrix, and so are gate and up"


def test_matrices_of_other_formats_stay_apart():
    decoder = tiny_clone(preset_decoder("Qwen/Qwen3.5-9B"))
    rules = OfGpu(mesh_of(1), ROLLOUT_AXES)
    own = {name.partition(".")[2].partition(".")[2] for name in engine_specs(decoder, rules)}
    assert {"q+k+v+z", "a+b"} <= own
    lora = dataclasses.replace(ALL, targets=("o",))
    own = {
        name.partition(".")[2].partition(".")[2]
        for name in engine_specs(dataclasses.replace(decoder, lora=lora), rules)
    }
    assert {"q", "z", "a+b"} <= own
