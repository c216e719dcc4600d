"""The decoder's operations for layers (products, norms, rotations, attention), placed on the devices of a mesh."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from podium.models.architecture import DecoderConfig
from podium.models.blocks import mathematics
from podium.models.blocks.activation import Activation
from podium.models.blocks.choices import Recorded, Routed
from podium.models.blocks.kind import Advance, At, Attend, Recur, States, Tree
from podium.models.blocks.rope import Rope
from podium.models.blocks.weights import LayerWeight, LayerWeights, Weight
from podium.models.expert_mixture import mixed
from podium.models.linear import make_linear, output_dims, several
from podium.models.params import Group
from podium.models.side_by_side import apart
from podium.sharding import ShardingRules

Tables = tuple[jax.Array, jax.Array]
"""Cosines and sines, [B, T, Q/2] float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerContext:
    """Implements `podium.models.blocks.kind.Context` on a mesh."""

    config: DecoderConfig
    rules: ShardingRules
    layer: jax.Array
    carried: Tree
    positions: jax.Array
    tables: Mapping[Rope, Tables]
    attention: Attend
    recurrence: Recur | None
    joined: Sequence[Group] = ()
    """Matrices that are stored side by side."""
    recorded: Recorded | None = None
    replay: bool = True

    def norm(self, x: jax.Array, scale: LayerWeight) -> jax.Array:
        """RMS norm over the last dimension."""
        assert isinstance(scale, jax.Array), "the scale of a norm has no adapter and is no matrix"
        config = self.config
        return mathematics.rms_norm(x, scale, config.norm_eps, config.norm_offset, config.wide_norms)

    def plain_norm(self, x: jax.Array, scale: LayerWeight) -> jax.Array:
        """RMS norm over the last dimension, without an offset; scaled in the activations' number format."""
        return mathematics.rms_norm(x, _value(scale), self.config.norm_eps, 0.0, False)

    def linear(self, pattern: str, x: jax.Array, w: LayerWeight) -> jax.Array:
        """The einsum of an activation and a weight."""
        return make_linear(self.rules)(pattern, x, w)

    def several(self, pattern: str, x: jax.Array, w: LayerWeights, names: Sequence[str]) -> Sequence[jax.Array]:
        """The einsums of one activation with each of these weights; one product if they are stored side by side."""
        group = next((each for each in self.joined if each.names == tuple(names)), None)
        if group is None:
            return [self.linear(pattern, x, w[name]) for name in names]
        y = self.linear(pattern, x, w[group.whole])
        return apart(y, output_dims(pattern)[1], group, self.rules)

    def exact(self, pattern: str, x: jax.Array, w: LayerWeight) -> jax.Array:
        """The einsum of an activation and a weight in float32."""
        assert isinstance(w, jax.Array | Weight), "a router has no adapter"
        value = w.value if isinstance(w, Weight) else w
        exact = value.astype(jnp.float32)
        if isinstance(w, Weight) and w.sums is not None:
            exact = jax.lax.stop_gradient(exact) + w.sums  # zeros, which get the gradient
        return jnp.einsum(pattern, x.astype(jnp.float32), exact, precision=jax.lax.Precision.HIGHEST)

    def experts(
        self,
        routed: Routed,
        matrices: Sequence[LayerWeight],
        biases: Sequence[LayerWeight],
        *,
        count: int,
        activation: Activation,
    ) -> jax.Array:
        """The sum over each token's chosen experts of gate times expert, [B, T, D]."""
        values = [_value(bias) for bias in biases]
        return mixed(self.rules, routed, matrices, values, count=count, activation=activation)

    def vector(self, w: LayerWeight) -> jax.Array:
        """A weight that is not an operand of a matrix product, in its compute format."""
        return _value(w)

    def biased(self, y: jax.Array, bias: LayerWeight) -> jax.Array:
        """Activations plus a bias of their last dimensions."""
        return (y + _value(bias)[None, None]).astype(y.dtype)

    def heads(self, x: jax.Array, w: LayerWeights, *, bias: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Project x [B, T, D] to queries [B, T, H, Q], keys and values [B, T, K, Q], with biases if `bias`.

        The results are sharded for attention: each device has whole heads of some of the rows.
        """
        pattern, names = "btd,dhq->bthq", ("q", "k", "v")
        if self.joined:
            found = self.several(pattern, x, w, names)
        else:
            found = several(self.linear, self.rules, pattern, x, [w[name] for name in names], "heads")
        q, k, v = found
        if bias:
            q, k, v = (self.biased(y, w[name]) for y, name in ((q, "q_bias"), (k, "k_bias"), (v, "v_bias")))
        return _to_sequences(self.rules, q, k, v) if self.rules.num_shards("head_dim") > 1 else (q, k, v)

    def rotate(self, x: jax.Array, rope: Rope) -> jax.Array:
        """Apply a rotary embedding; on TPU by a matrix product."""
        turn = mathematics.rotate_by_product if self.rules.platform == "tpu" else mathematics.rotate
        return turn(x, *self.tables[rope])

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None = None,
        sinks: LayerWeight | None = None,
    ) -> tuple[Tree, jax.Array]:
        """Call the caller's attention, and lay its output out for the next product."""
        at = At(self.layer, window, None if sinks is None else _value(sinks))
        carried, attended = self.attention(self.carried, at, q, k, v)
        if self.rules.num_shards("head_dim") > 1:  # the inverse of `_to_sequences`
            attended = self.rules.constrain(attended, "rows", None, "heads", "head_dim")
        return carried, attended

    def recur(self, initial: States, advance: Advance) -> tuple[Tree, jax.Array]:
        """Advance the caller's states. Raises ValueError if the caller of `forward` stores none."""
        if self.recurrence is None:
            raise ValueError("a layer keeps a state of each sequence and this pass keeps none; give forward a recur=")
        return self.recurrence(self.carried, At(self.layer, None), initial, advance)

    def whole_rows(self, x: jax.Array) -> jax.Array:
        """Lay out [B, T, H, ...] with whole rows, splitting heads over the axes that split tokens or widths before."""
        rest = [None] * (x.ndim - 3)
        x = self.rules.constrain(x, "rows", "tokens", "delta_heads", *rest)
        return self.rules.constrain(x, "batch", None, "state_heads", *rest)

    def projected_rows(self, y: jax.Array) -> jax.Array:
        """The inverse of `whole_rows`."""
        rest = [None] * (y.ndim - 3)
        y = self.rules.constrain(y, "batch", None, "state_heads", *rest)
        return self.rules.constrain(y, "rows", "tokens", "delta_heads", *rest)


def _value(weight: LayerWeight) -> jax.Array:
    assert isinstance(weight, jax.Array), "this weight has no adapters: only matrices can have them"
    return weight


def _to_sequences(
    rules: ShardingRules, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reshard q [B, T, H, Q], k and v [B, T, K, Q] for attention: from parts of heads to whole heads of fewer rows."""
    B, T, H, Q = q.shape
    K = k.shape[2]
    parts = (q.reshape(B, T, K, H // K, Q), k[:, :, :, None], v[:, :, :, None])
    joined = rules.constrain(jnp.concatenate(parts, axis=3), "rows", None, "kv_heads", None, "head_dim")
    joined = rules.constrain(joined, "batch", None, "cache_heads", None, None)
    return joined[:, :, :, :-2].reshape(B, T, H, Q), joined[:, :, :, -2], joined[:, :, :, -1]


def to_rows(rules: ShardingRules, x: jax.Array) -> jax.Array:
    """Reshard [B, T, D] so that each device has whole tokens of its rows.

    Products with sharded weights leave the width D split over devices instead.
    """
    x = rules.constrain(x, "batch_by_width", "tokens_by_width", "width")
    x = rules.constrain(x, "rows", "tokens_by_width", "width_of_rows")
    return rules.constrain(x, "rows", "tokens", None)


def split_rows(rules: ShardingRules, x: jax.Array, groups: int) -> jax.Array:
    """Group every device's rows: [B, T, ...] becomes [groups, B/groups, T, ...] without communication."""
    devices = rules.num_shards("batch")
    x = x.reshape(devices, groups, -1, *x.shape[1:])
    x = jnp.moveaxis(x, 1, 0).reshape(groups, -1, *x.shape[3:])
    return rules.constrain(x, None, "batch", "tokens", *[None] * (x.ndim - 3))


def merge_rows(rules: ShardingRules, x: jax.Array, *axes: str) -> jax.Array:
    """The inverse of `split_rows`, for arrays whose dimensions after the rows have these logical axes."""
    groups, devices = len(x), rules.num_shards("batch")
    x = x.reshape(groups, devices, -1, *x.shape[2:])
    x = jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[3:])
    return rules.constrain(x, "batch", *axes, *[None] * (x.ndim - 1 - len(axes)))
