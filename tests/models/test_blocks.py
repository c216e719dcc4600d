"""Kinds of layers that Podium does not have, beside those that it has: nothing in `podium/` knows them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixed_decoder import MIXED, PATTERN, Decay, naive, weights
from pydantic import TypeAdapter
from tiny_decoder import tiny
from tiny_models import rules_on

from podium.models.architecture import Lora
from podium.models.attention.mask import Visibility, packed_rows
from podium.models.attention.packed_attention import causal_attention
from podium.models.blocks.kind import Stack
from podium.models.blocks.rope import RopeScaling
from podium.models.decoder import PassSettings, forward
from podium.models.files.decoder_json import StoredDecoder
from podium.models.params import param_specs

T, B = 8, 4
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)


def empty_caches():
    keys = {place.prefix: jnp.zeros((len(place.layers), 2, B, T, 2, 8)) for place in MIXED.places}
    states = {place.prefix: jnp.zeros((len(place.layers), B, 32)) for place in MIXED.places}
    return [(states if isinstance(place.block.mixer, Decay) else keys)[place.prefix] for place in MIXED.places]


def passed(params, tokens, start, caches, rules, **options):
    """Hidden states, caches and what the layers tell of tokens [B, t] at positions from `start`."""
    t = tokens.shape[1]
    gap = start + jnp.arange(t)[:, None] - jnp.arange(T)[None]

    def attend(cache, at, q, k, v):
        cache = jax.lax.dynamic_update_slice(cache, jnp.stack([k, v])[None], (at.layer, 0, 0, start, 0, 0))
        seen = (gap >= 0) & (gap < (at.window or T))
        return cache, causal_attention(q, *cache[at.layer], jnp.broadcast_to(seen[None], (B, t, T)))

    def recur(cache, at, initial, advance):
        (state,), y = advance.append((cache[at.layer],), jnp.full(B, t))
        return cache.at[at.layer].set(state), y

    positions = start + jnp.broadcast_to(jnp.arange(t)[None], (B, t))
    options |= {"config": MIXED, "rules": rules, "dtype": jnp.dtype("float32")}
    return forward(params, tokens, positions, attend, caches, recur=recur, settings=PassSettings(**options))


TOKENS = np.random.default_rng(1).integers(0, 64, (B, T)).astype(np.int32)


@pytest.mark.parametrize("options", [{}, {"remat": "layer"}])
@pytest.mark.parametrize(("mesh", "devices"), [("dp:1", 1), ("fsdp:2,tp:2", 4)])
def test_a_decoder_of_several_kinds_is_what_they_are_one_after_the_other(mesh, devices, options):
    """Two bases of rotation, a window, a state instead of a cache, and what one kind tells of its tokens."""
    rules = rules_on(mesh, devices)
    params = weights(rules)
    found, _, told = jax.jit(lambda params: passed(params, TOKENS, 0, empty_caches(), rules, **options))(params)
    wanted = [naive(params, tokens) for tokens in TOKENS]
    np.testing.assert_allclose(found, np.stack([hidden for hidden, _ in wanted]), rtol=1e-4, atol=1e-4)
    opened = np.concatenate([told[0][1], told[3][1]])  # of layers 0, 3 and 6
    np.testing.assert_allclose(opened, np.stack([own for _, own in wanted], axis=1), rtol=1e-4, atol=1e-5)
    assert told[1] == ((), ())


def test_decoding_a_token_at_a_time_gives_what_rows_give():
    rules = rules_on("dp:1", 1)
    params, caches = weights(rules), empty_caches()
    whole, kept, _ = passed(params, TOKENS, 0, caches, rules)
    step = jax.jit(lambda tokens, start, caches: passed(params, tokens, start, caches, rules)[:2])
    found = []
    for start in range(T):
        hidden, caches = step(TOKENS[:, start : start + 1], start, caches)
        found.append(hidden[:, 0])
    np.testing.assert_allclose(np.stack(found, axis=1), whole, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), list(caches), list(kept))


def test_packed_rows_behind_a_shared_prompt_give_what_each_sequence_alone_gives():
    """A prompt of 3 tokens, two completions behind it, and its own sequence; then padding."""
    rules = rules_on("dp:1", 1)
    params = weights(rules)
    segments = jnp.array([[1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 0]])
    prompts = jnp.where(segments == 4, 4, jnp.minimum(segments, 1))
    positions = jnp.array([[0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 0]])
    tokens = np.random.default_rng(2).integers(0, 64, segments.shape).astype(np.int32)

    def attend(rows, at, q, k, v):
        seen = Visibility(segments, prompts, positions, at.window)
        return rows, causal_attention(q, k, v, seen.mask())

    hidden, _, _ = forward(
        params,
        tokens,
        positions,
        attend,
        [packed_rows(segments, prompts)] * len(MIXED.places),
        recur=lambda rows, at, initial, advance: (rows, advance.packed(rows)),
        settings=PassSettings(config=MIXED, rules=rules, dtype=jnp.dtype("float32")),
    )
    for places in ([0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7], [8, 9]):
        np.testing.assert_allclose(hidden[0, places], naive(params, tokens[0, places])[0], rtol=1e-4, atol=1e-4)


def test_a_decoder_is_the_same_after_a_way_through_json():
    """As it goes to a process that compiles; kinds are found by their import paths."""
    stored = TypeAdapter(StoredDecoder)
    adapted = dataclasses.replace(tiny(rope_scaling=SCALING), lora=Lora(rank=4, alpha=8.0, targets=("q", "o")))
    for decoder in (adapted, dataclasses.replace(adapted, stacks=(Stack(pattern=(PATTERN[2],), repeats=2),))):
        assert decoder.places
        assert stored.validate_json(stored.dump_json(decoder)) == decoder


def test_weights_are_stacked_by_place_and_counted_by_kind():
    specs = param_specs(MIXED)
    assert {name: spec.shape for name, spec in specs.items() if name.endswith((".q", ".into", ".gate"))} == {
        "layers.0.q": (2, 32, 4, 8),
        "layers.0.gate": (2, 32, 32),
        "layers.1.into": (2, 32, 32),
        "layers.1.gate": (2, 32, 48),
        "layers.2.q": (2, 32, 4, 8),
        "layers.2.gate": (2, 32, 24),
        "layers.3.q": (1, 32, 4, 8),
        "layers.3.gate": (1, 32, 32),
    }
    attention, square = 2 * 32 * 6 * 8, 32 * 32
    assert MIXED.active == 5 * attention + 5 * square + 2 * 3 * 32 * (48 + 24) + 64 * 32
    assert [place.layers for place in MIXED.places] == [range(0, 6, 3), range(1, 6, 3), range(2, 6, 3), range(6, 7)]


def test_a_pass_that_keeps_no_states_refuses_a_layer_that_needs_one():
    rules = rules_on("dp:1", 1)
    with pytest.raises(ValueError, match="give forward a recur="):
        jax.eval_shape(
            lambda params: forward(
                params,
                TOKENS,
                jnp.zeros((B, T), jnp.int32),
                lambda carried, at, q, k, v: (carried, q),
                settings=PassSettings(config=MIXED, rules=rules, dtype=jnp.dtype("float32")),
            ),
            weights(rules),
        )
