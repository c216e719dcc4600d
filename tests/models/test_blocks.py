"""Kinds of layers that Podium does not have, beside those that it has: nothing in `podium/` knows them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter
from tiny_decoder import tiny
from tiny_models import rules_on

from podium.models.architecture import Lora
from podium.models.attention import causal_attention
from podium.models.blocks.attention import Attention
from podium.models.blocks.kind import Applied, Block, Stack, Work
from podium.models.blocks.mlp import Mlp
from podium.models.blocks.rope import Rope, RopeScaling
from podium.models.blocks.spec import ParamSpec
from podium.models.decoder import forward
from podium.models.params import param_specs
from podium.models.stored import StoredDecoder

T, B = 8, 4
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)


@dataclasses.dataclass(frozen=True)
class Decay:
    """A state that each token decays and adds to, in place of keys and values."""

    rate: float
    scope, ropes = "attention", ()

    def specs(self, width, *, std, out_std):
        return {"into": ParamSpec((width, width), ("width", None), std)}

    def work(self, width):
        return Work(active=width * width, total=width * width, outputs=width)

    def apply(self, w, x, context):
        def add(state, token):
            state = self.rate * state + token
            return state, state

        added = context.linear("btd,de->bte", x, w["into"]).swapaxes(0, 1)
        state, y = jax.lax.scan(add, context.carried[context.layer], added)
        return Applied(y.swapaxes(0, 1), context.carried.at[context.layer].set(state))


@dataclasses.dataclass(frozen=True)
class Gate:
    """A feed-forward of one matrix that tells how far it was open for each token."""

    scope, ropes = "mlp", ()

    def specs(self, width, *, std, out_std):
        return {"gate": ParamSpec((width, width), ("width", None), std), "open": ParamSpec((width,), (None,), std)}

    def work(self, width):
        return Work(active=width * width, total=width * width, outputs=width)

    def apply(self, w, x, context):
        opened = jax.nn.sigmoid(x @ w["open"])  # [B, T]
        return Applied(opened[:, :, None] * context.linear("btd,de->bte", x, w["gate"]), context.carried, opened)


NEAR = Attention(heads=4, kv_heads=2, head_dim=8, rope=Rope(theta=10.0, dims=8), window=3)
FAR = Attention(heads=4, kv_heads=2, head_dim=8, rope=Rope(theta=1e4, dims=8), norm=True)
PATTERN = (
    Block(mixer=NEAR, feed_forward=Gate()),
    Block(mixer=Decay(0.5), feed_forward=Mlp(width=48)),
    Block(mixer=FAR, feed_forward=Mlp(width=24)),
)
MIXED = dataclasses.replace(
    tiny(vocab=64), stacks=(Stack(pattern=PATTERN, repeats=2), Stack(pattern=PATTERN[:1], repeats=1))
)


def weights(rules):
    random = np.random.default_rng(0)
    made = {
        name: (spec.mean + 0.2 * random.standard_normal(spec.shape)).astype(np.float32)
        for name, spec in param_specs(MIXED).items()
    }
    return {name: jax.device_put(x, rules.sharding(*param_specs(MIXED)[name].axes)) for name, x in made.items()}


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

    positions = start + jnp.broadcast_to(jnp.arange(t)[None], (B, t))
    return forward(
        params, tokens, positions, attend, caches, config=MIXED, rules=rules, dtype=jnp.dtype("float32"), **options
    )


def naive(params, tokens):
    """Hidden states of one sequence [T] in float64 numpy, layer after layer as the pattern says."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    norm = lambda x, scale: x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + MIXED.norm_eps) * scale  # noqa: E731
    order = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0)]  # place, and layer of the place
    x, opened = p["embed"][tokens], []
    at = np.arange(len(tokens))
    for place, layer in order:
        w = {name.split(".")[2]: value[layer] for name, value in p.items() if name.startswith(f"layers.{place}.")}
        y = norm(x, w["attention_norm"])
        if place == 1:
            powers = np.tril(0.5 ** np.maximum(at[:, None] - at[None], 0))
            x = x + powers @ (y @ w["into"])
        else:
            theta, window = (1e4, 8) if place == 2 else (10.0, 3)
            q, k, v = (np.einsum("td,dhq->thq", y, w[name]) for name in "qkv")
            if place == 2:
                q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
            turn = np.exp(1j * at[:, None] * theta ** (-np.arange(4) / 4))[:, None]
            q, k = (np.stack([z.real, z.imag]) for z in ((a[..., :4] + 1j * a[..., 4:]) * turn for a in (q, k)))
            scores = np.einsum("cthq,cshq->hts", q, k.repeat(2, axis=2)) / np.sqrt(8)
            gap = at[:, None] - at[None]
            shares = np.exp(np.where((gap >= 0) & (gap < window), scores, -np.inf))
            shares /= shares.sum(axis=-1, keepdims=True)
            x = x + np.einsum("hts,shq,hqd->td", shares, v.repeat(2, axis=1), w["o"])
        y = norm(x, w["mlp_norm"])
        if place in (0, 3):
            opened.append(1 / (1 + np.exp(-y @ w["open"])))
            x = x + opened[-1][:, None] * (y @ w["gate"])
        else:
            gate = y @ w["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (y @ w["up"])) @ w["down"]
    return norm(x, p["final_norm"]), opened


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
