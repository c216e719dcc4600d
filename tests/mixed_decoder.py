"""A decoder of kinds of layers that Podium does not have, beside attention with and without a window.

Nothing in `podium/` knows its kinds; `naive` computes it without Podium.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from tiny_decoder import tiny

from podium.models.blocks.attention import Attention
from podium.models.blocks.kind import Applied, Block, Stack, StateSpec, Work
from podium.models.blocks.mlp import Mlp
from podium.models.blocks.rope import Rope
from podium.models.blocks.spec import ParamSpec
from podium.models.params import param_specs


@dataclasses.dataclass(frozen=True)
class Adding:
    """What `Decay` does with tokens that are projected."""

    rate: float
    added: jax.Array  # [B, T, D]

    def append(self, states, counts):
        def add(state, token):
            i, token = token
            state = jnp.where((i < counts)[:, None], self.rate * state + token, state)
            return state, state

        tokens = jnp.arange(self.added.shape[1]), self.added.swapaxes(0, 1)
        state, y = jax.lax.scan(add, states[0], tokens)
        return (state,), y.swapaxes(0, 1)

    def packed(self, rows):
        (B, T, _), row = self.added.shape, jnp.arange(len(self.added))

        def add(i, y):  # one column more, for tokens without a previous one
            return y.at[:, i].set(self.rate * y[row, rows.previous[:, i]] + self.added[:, i])

        return jax.lax.fori_loop(0, T, add, jnp.zeros((B, T + 1, self.added.shape[2])))[:, :T]


@dataclasses.dataclass(frozen=True)
class Decay:
    """A state that each token decays and adds to, in place of keys and values."""

    rate: float
    scope, ropes = "attention", ()

    def specs(self, width, *, std, out_std):
        return {"into": ParamSpec((width, width), ("width", None), std)}

    def work(self, width):
        states = (StateSpec((width,), (None,), "float32"),)
        return Work(active=width * width, total=width * width, outputs=width, states=states)

    def apply(self, w, x, context):
        rule = Adding(self.rate, context.linear("btd,de->bte", x, w["into"]))
        carried, y = context.recur((jnp.zeros((len(x), x.shape[2])),), rule)
        return Applied(y, carried)


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
            theta, window = (1e4, len(tokens)) if place == 2 else (10.0, 3)
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
