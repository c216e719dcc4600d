"""The gated delta net of Qwen3.5: a recurrent state of fixed size in place of keys and values. No jax until applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from podium.models.blocks.kind import (
    Applied,
    Context,
    DeltaRows,
    DeltaToken,
    Packed,
    States,
    StateSpec,
    StoredState,
    Work,
)
from podium.models.blocks.rope import Rope
from podium.models.blocks.spec import ParamSpec, ParamSpecs
from podium.models.blocks.weights import LayerWeights

if TYPE_CHECKING:
    import jax

    from podium.models.blocks.delta_rule import Tokens

CHUNK = 64
"""Number of tokens that `podium.models.blocks.delta_rule` computes together."""
TAPS = ("q_taps", "k_taps", "v_taps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rule:
    """The rule for a layer's projected tokens: implements `podium.models.blocks.kind.Advance`."""

    q: jax.Array  # [B, T, K, N]
    k: jax.Array  # [B, T, K, N]
    v: jax.Array  # [B, T, V, P]
    g: jax.Array  # [B, T, V] float32, logarithm of the decay
    beta: jax.Array  # [B, T, V] float32
    taps: Sequence[jax.Array]  # of q, k and v

    def append(self, states: States, counts: jax.Array, /) -> tuple[States, jax.Array]:
        """Advance rows of one sequence each."""
        import jax.numpy as jnp

        from podium.models.blocks.delta_rule import chunked, one_step

        *tails, state = states
        tails, (q, k, v) = self._convolved(tails, counts)
        real = jnp.arange(v.shape[1])[None] < counts[:, None]
        tokens = self._tokens(
            q, k, v, jnp.where(real[:, :, None], self.g, 0), jnp.where(real[:, :, None], self.beta, 0)
        )
        own = state.reshape(*tokens.v.shape[:1], *tokens.v.shape[2:4], *state.shape[2:])  # [B, K, R, N, P]
        y, own = one_step(tokens, own) if v.shape[1] == 1 else chunked(tokens, own, CHUNK)
        return (*tails, own.reshape(state.shape)), y.reshape(v.shape)

    def step(self, states: States, stored: StoredState, counts: jax.Array, /) -> tuple[States, StoredState, jax.Array]:
        """Advance rows by one token each; the large state is updated in place."""
        import jax.numpy as jnp

        from podium.models.blocks.delta_rule import unit

        tails, (q, k, v) = self._convolved(states, counts)
        q, k, v = (x[:, 0].astype(jnp.float32) for x in (unit(q) * q.shape[-1] ** -0.5, unit(k), v))
        stored, y = stored.delta_step(DeltaToken(q, k, v, jnp.exp(self.g[:, 0]), self.beta[:, 0]))
        return tails, stored, y[:, None]

    def _convolved(self, tails: Sequence[jax.Array], counts: jax.Array) -> tuple[States, Sequence[jax.Array]]:
        """The inputs of the next convolutions, and this call's q, k and v after the convolution."""
        from podium.models.blocks.delta_rule import next_conv

        given = zip((self.q, self.k, self.v), self.taps, tails, strict=True)
        found = [next_conv(x, taps, tail, counts) for x, taps, tail in given]
        return tuple(tail for _, tail in found), [x for x, _ in found]

    def packed(self, rows: Packed, kernel: DeltaRows | None = None, /) -> jax.Array:
        """Compute whole sequences in packed rows."""
        from podium.models.blocks.delta_rule import packed, short_conv

        given = zip((self.q, self.k, self.v), self.taps, strict=True)
        q, k, v = (short_conv(x, taps, rows.previous) for x, taps in given)
        if kernel is not None:
            return kernel(q, k, v, self.g, self.beta, rows)
        return packed(self._tokens(q, k, v, self.g, self.beta), rows, CHUNK).reshape(v.shape)

    def _tokens(self, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array) -> Tokens:
        from podium.models.blocks.delta_rule import Tokens, unit

        (B, T, V, P), (K, N) = v.shape, k.shape[2:]
        return Tokens(
            q=unit(q) * N**-0.5,
            k=unit(k),
            v=v.reshape(B, T, K, V // K, P),
            g=g.reshape(B, T, K, V // K),
            beta=beta.reshape(B, T, K, V // K),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """The gated delta rule (arXiv:2412.06464) after a short convolution; each key head has several value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    """Elements of a head's query, and of its key."""
    value_dim: int
    taps: int
    """Number of tokens that the convolution sums over, including its own."""

    scope = "attention"

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """No rotary embeddings."""
        return ()

    def specs(self, width: int, *, std: float, out_std: float) -> ParamSpecs:
        """The weights of one layer."""
        D, K, V, N, P, n = width, self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.taps
        group = "heads" if N == P else None
        of_keys = ParamSpec((D, K, N), ("width", "delta_heads", None), std, group=group)
        of_values = ParamSpec((D, V, P), ("width", "delta_heads", None), std, group=group)
        of_head = ParamSpec((D, V), ("width", "delta_heads"), std, group="numbers")
        tap_std = 0.1  # queries and keys are normalised after the convolution, and outputs after the rule
        return {
            "q": of_keys,
            "k": of_keys,
            "v": of_values,
            "z": of_values,
            "a": of_head,
            "b": of_head,
            "q_taps": ParamSpec((n, K, N), (None, "state_heads", None), tap_std),
            "k_taps": ParamSpec((n, K, N), (None, "state_heads", None), tap_std),
            "v_taps": ParamSpec((n, V, P), (None, "state_heads", None), tap_std),
            "o": ParamSpec((V, P, D), ("delta_heads", None, "width"), out_std),
            "log_decay": ParamSpec((V,), ("delta_heads",), 0.0),
            "decay_bias": ParamSpec((V,), ("delta_heads",), 0.0, -2.0),  # a token decays the state by about an eighth
            "out_scale": ParamSpec((P,), (None,), 0.0, 1.0),
        }

    def work(self, width: int) -> Work:
        """The cost of one layer: its matrices, and the rule's own products."""
        K, V, N, P = self.key_heads, self.value_heads, self.key_dim, self.value_dim
        keys, values = 2 * K * N, V * P
        elements = width * (keys + 3 * values + 2 * V)
        tail = self.taps - 1
        return Work(
            active=elements,
            total=elements,
            outputs=keys + 2 * values + 2 * V,
            per_token=V * (2 * CHUNK * (N + P) + CHUNK**2 // 3 + 6 * N * P),
            inner=values,
            states=(
                StateSpec((tail, K, N), (None, "state_heads", None)),
                StateSpec((tail, K, N), (None, "state_heads", None)),
                StateSpec((tail, V, P), (None, "state_heads", None)),
                StateSpec((V, N, P), ("state_heads", None, None), "float32"),
            ),
        )

    def apply(self, w: LayerWeights, x: jax.Array, context: Context) -> Applied:
        """norm(delta rule of the convolved q, k, v) silu(z), projected back to the width."""
        import jax
        import jax.numpy as jnp

        q, k, v, z = context.several("btd,dhn->bthn", x, w, ("q", "k", "v", "z"))
        decay, beta = (y.astype(jnp.float32) for y in context.several("btd,dh->bth", x, w, ("a", "b")))
        log_decay, bias, *taps = (context.vector(w[name]) for name in ("log_decay", "decay_bias", *TAPS))
        rates = jnp.exp(log_decay.astype(jnp.float32))[None, None]
        g = -rates * jax.nn.softplus(decay + bias.astype(jnp.float32)[None, None])
        q, k, v, g, beta = map(context.whole_rows, (q, k, v, g, jax.nn.sigmoid(beta)))
        rule = _Rule(q=q, k=k, v=v, g=g, beta=beta, taps=taps)
        initial = tuple(
            jnp.zeros((len(x), *each.shape), each.dtype or x.dtype) for each in self.work(x.shape[2]).states
        )
        carried, y = context.recur(initial, rule)
        y = context.plain_norm(context.projected_rows(y.astype(x.dtype)), w["out_scale"])
        y = (y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
        return Applied(context.linear("bthn,hnd->btd", y, w["o"]), carried)
