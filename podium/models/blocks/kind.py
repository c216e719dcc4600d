"""The interface of layer kinds: a kind declares its weights and its cost, and applies itself. No jax.

A decoder is stacks of blocks; a block is a token mixer and a feed-forward. Each is a frozen dataclass with the methods
of `Kind`, in a module of this folder; `docs/layers.md` shows how to add one. Config checks and the planner read the
declarations and must start without jax, so `apply` imports its mathematics when it is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from podium.models.blocks.activation import Activation
from podium.models.blocks.choices import Recorded, Routed
from podium.models.blocks.rope import Rope
from podium.models.blocks.spec import ParamSpec, ParamSpecs
from podium.models.blocks.weights import LayerWeight, LayerWeights

if TYPE_CHECKING:
    import jax

Tree: TypeAlias = Any
"""A pytree of arrays."""


class StateSpec(NamedTuple):
    """An array of fixed size that decoding stores for each sequence, whatever its length."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Logical axis of each dimension, as for weights."""
    dtype: str | None = None
    """numpy name of the number format; None: that of the activations."""


class Work(NamedTuple):
    """The cost of one layer of a kind, and what decoding stores for it."""

    active: int
    """Number of matrix elements that each token is multiplied with."""
    total: int
    """Number of elements of all matrices of the layer."""
    outputs: int
    """Elements per token of the outputs of all products whose input is the layer's input [..., D]."""
    pair: int = 0
    """Multiply-adds of a forward pass per query-key pair."""
    window: int | None = None
    """Number of keys that a query sees, including its own; None for all previous keys."""
    kv_heads: int = 0
    """Number of heads whose keys and values decoding stores for each token."""
    head_dim: int = 0
    """Head dimension of keys and of values."""
    inner: int = 0
    """Elements per token of the input to the layer's last matrix product."""
    per_token: int = 0
    """Multiply-adds per token of a forward pass without weights and independent of the sequence length
    (recurrences)."""
    states: tuple[StateSpec, ...] = ()
    """Arrays of fixed size that decoding stores for each sequence; updated through `Context.recur`."""


class At(NamedTuple):
    """Which layer calls `Attend` or `Recur`, and the settings of its attention."""

    layer: jax.Array  # [] int32, index among the layers of its place in the pattern
    window: int | None
    """Number of positions that a query sees, including its own; None: all before it."""
    sinks: jax.Array | None = None
    """[H], score of each head with a key that has no value and that every query sees; None if absent."""


class Attend(Protocol):
    """Attention as provided by the caller of `forward`: over the rows of a batch, or over a cache."""

    def __call__(self, carried: Tree, at: At, q: jax.Array, k: jax.Array, v: jax.Array, /) -> tuple[Tree, jax.Array]:
        """Attend; returns the updated `carried` and the output.

        Args:
            carried: the caller's data for this place in the pattern, such as a cache.
            at: the layer.
            q: [B, T, H, Q].
            k: [B, T, K, Q].
            v: [B, T, K, Q].

        Returns:
            The updated `carried`, and the output [B, T, H, Q].
        """
        ...


States: TypeAlias = "tuple[jax.Array, ...]"
"""The arrays of `Work.states` for some sequences, [B, ...] each."""


class Packed(NamedTuple):
    """Which sequences the tokens of packed rows belong to.

    A sequence is a segment alone, or the segment of its prompt followed by its own: then only other segments with the
    same prompt lie between the two.
    """

    segments: jax.Array  # [B, T] int32, segment of each token; 0 is padding
    prompts: jax.Array  # [B, T] int32, segment of each token's prompt; its own segment if it has no separate prompt
    previous: jax.Array  # [B, T] int32, index in the row of the previous token of its sequence; T if it is the first


class DeltaRows(Protocol):
    """The gated delta rule over packed rows, provided by a caller of `forward` whose devices have a kernel for it."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, rows: Packed, /
    ) -> jax.Array:
        """Compute y [B, T, V, P] in the format of `v`.

        Args:
            q: [B, T, K, N], neither normed nor scaled.
            k: [B, T, K, N], not normed.
            v: [B, T, V, P].
            g: [B, T, V] float32, logarithm of the decay.
            beta: [B, T, V] float32.
            rows: the tokens' sequences.
        """
        ...


class Advance(Protocol):
    """The computation of a recurrent layer, for both ways in which callers of `forward` lay out sequences."""

    def append(self, states: States, counts: jax.Array, /) -> tuple[States, jax.Array]:
        """Advance rows of one sequence each by their new tokens.

        Args:
            states: after the previous tokens.
            counts: [B] int32. Only the first `counts` of a row's T tokens are real; the others must not change the
                states, and their y is ignored.

        Returns:
            The states after the new tokens, and y [B, T, ...].
        """
        ...

    def packed(self, rows: Packed, kernel: DeltaRows | None = None, /) -> jax.Array:
        """Compute y [B, T, ...] of whole sequences in packed rows; y at padding is finite and ignored."""
        ...


class DeltaToken(NamedTuple):
    """A new token of each row, as the gated delta rule takes it; all float32."""

    q: jax.Array  # [R, K, N]; value heads share key heads in order
    k: jax.Array  # [R, K, N]
    v: jax.Array  # [R, V, P]
    decay: jax.Array  # [R, V], factor of the state
    beta: jax.Array  # [R, V], strength of the new value


class StoredState(Protocol):
    """A state of rows of one sequence each, in the cache that stores it."""

    def delta_step(self, token: DeltaToken, /) -> tuple[StoredState, jax.Array]:
        """Advance by one token each, in place; returns the state, and y [R, V, P] float32."""
        ...


@runtime_checkable
class Stepping(Advance, Protocol):
    """An `Advance` that can also update its last state in place, in the cache, for decode steps of one token per
    row.
    """

    def step(self, states: States, stored: StoredState, counts: jax.Array, /) -> tuple[States, StoredState, jax.Array]:
        """Like `append` for one token per row; `states` holds all states but the last, which is updated in place."""
        ...


class Recur(Protocol):
    """Storage of recurrent states, provided by the caller of `forward`: in a cache, or nowhere."""

    def __call__(self, carried: Tree, at: At, initial: States, advance: Advance, /) -> tuple[Tree, jax.Array]:
        """Call `advance.append` with the rows' states and store what it returns, or `advance.packed`.

        Args:
            carried: the caller's data for this place in the pattern.
            at: the layer.
            initial: the states of sequences without previous tokens.
            advance: the layer's computation.

        Returns:
            The updated `carried`, and y.
        """
        ...


class Context(Protocol):
    """What the decoder provides to a layer: operations whose placement on devices does not concern the layer."""

    @property
    def layer(self) -> jax.Array:
        """[] int32, index of the layer among those at its place in the pattern."""
        ...

    @property
    def carried(self) -> Tree:
        """The caller's data for this place in the pattern: a cache of keys and values, or a state."""
        ...

    @property
    def positions(self) -> jax.Array:
        """[B, T] int32, position of each token in its own sequence."""
        ...

    @property
    def recorded(self) -> Recorded | None:
        """The recorded expert choices of the tokens in this layer, from an earlier pass; None if nothing was
        recorded.
        """
        ...

    @property
    def replay(self) -> bool:
        """Whether tokens go to their recorded experts instead of the router's choice."""
        ...

    def norm(self, x: jax.Array, scale: LayerWeight) -> jax.Array:
        """RMS norm over the last dimension, with the decoder's epsilon and the decoder's offset added to the stored
        scale.
        """
        ...

    def plain_norm(self, x: jax.Array, scale: LayerWeight) -> jax.Array:
        """RMS norm over the last dimension with the decoder's epsilon, without the decoder's offset of the scale.

        Names of such scales do not end in `_norm`: initial values of those that do are lowered by the offset.
        """
        ...

    def linear(self, pattern: str, x: jax.Array, w: LayerWeight) -> jax.Array:
        """The einsum of an activation and a weight."""
        ...

    def several(self, pattern: str, x: jax.Array, w: LayerWeights, names: Sequence[str]) -> Sequence[jax.Array]:
        """The einsums of one activation with each of these weights, which are a whole `ParamSpec.group`, in order.

        Computed as one product if the weights are stored side by side.
        """
        ...

    def exact(self, pattern: str, x: jax.Array, w: LayerWeight) -> jax.Array:
        """`linear` with operands and result in float32, for a router: near ties must not be decided by rounding."""
        ...

    def experts(
        self,
        routed: Routed,
        matrices: Sequence[LayerWeight],
        biases: Sequence[LayerWeight],
        *,
        count: int,
        activation: Activation,
    ) -> jax.Array:
        """The sum over each token's chosen experts of gate times expert, [B, T, D]; arguments as for `mixed`."""
        ...

    def vector(self, w: LayerWeight) -> jax.Array:
        """A weight that is not an operand of a matrix product, such as a convolution's taps, in its compute format."""
        ...

    def biased(self, y: jax.Array, bias: LayerWeight) -> jax.Array:
        """Activations [B, T, ...] plus a bias of their last dimensions, in the format of the activations."""
        ...

    def heads(self, x: jax.Array, w: LayerWeights, *, bias: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Project to queries [B, T, H, Q], keys and values [B, T, K, Q] with weights `q`, `k`, `v`, and biases if
        `bias`.
        """
        ...

    def rotate(self, x: jax.Array, rope: Rope) -> jax.Array:
        """Apply a rotary embedding to [B, T, H, Q] at the tokens' positions; `rope` is one of the kind's `ropes`."""
        ...

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None = None,
        sinks: LayerWeight | None = None,
    ) -> tuple[Tree, jax.Array]:
        """Attend; returns the updated `carried` and the output [B, T, H, Q]. `window` and `sinks` are as in `At`."""
        ...

    def recur(self, initial: States, advance: Advance) -> tuple[Tree, jax.Array]:
        """Advance the states; returns the updated `carried` and y. `advance` gets the states after the previous tokens.

        `initial` are the states of sequences without previous tokens, in the order of `Work.states`.
        """
        ...

    def whole_rows(self, x: jax.Array) -> jax.Array:
        """Lay out [B, T, H, ...] for `recur`: each device has all tokens of some rows, in some of the heads."""
        ...

    def projected_rows(self, y: jax.Array) -> jax.Array:
        """The inverse of `whole_rows`, for the next product with a weight."""
        ...


class Applied(NamedTuple):
    """The result of applying a kind."""

    y: jax.Array  # [B, T, D], added to the residual stream
    carried: Tree
    """Updated data for this place, of the same structure as `context.carried`."""
    auxiliary: Tree = ()
    """Arrays [B, ...] that `forward` returns for each layer."""


class Kind(Protocol):
    """The interface of a layer kind: a token mixer or a feed-forward."""

    @property
    def scope(self) -> str:
        """The `jax.named_scope` for its operations."""
        ...

    @property
    def ropes(self) -> Sequence[Rope]:
        """The rotary embeddings that it uses."""
        ...

    def specs(self, width: int, *, std: float, out_std: float) -> ParamSpecs:
        """The weights of one layer; `out_std` is for matrices that write to the residual stream."""
        ...

    def work(self, width: int) -> Work:
        """The cost of one layer."""
        ...

    def apply(self, w: LayerWeights, x: jax.Array, context: Context) -> Applied:
        """Apply it to normed activations [B, T, D]."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A layer: x + mixer(norm(x)), then x + feed_forward(norm(x))."""

    mixer: Kind
    feed_forward: Kind
    norms_behind: bool = False
    """Whether the outputs of mixer and feed-forward are normed as well, before they are added to x (Gemma)."""

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        """Mixer and feed-forward, in order of application."""
        return self.mixer, self.feed_forward

    def specs(self, width: int, *, std: float, out_std: float) -> ParamSpecs:
        """The weights of one layer. Random ones come first: this order determines what a seed draws."""
        norm = ParamSpec((width,), (None,), 0.0, 1.0)
        mixer, after = (kind.specs(width, std=std, out_std=out_std) for kind in self.kinds)
        assert not mixer.keys() & after.keys(), "the mixer and the feed-forward of a block share names of weights"
        declared = {"attention_norm": norm, **_random(mixer), "mlp_norm": norm, **_random(after)}
        behind = {"attention_out_norm": norm, "mlp_out_norm": norm} if self.norms_behind else {}
        return {**declared, **mixer, **after, **behind}

    def work(self, width: int) -> Work:
        """The cost of one layer: mixer and feed-forward together."""
        mixer, after = (kind.work(width) for kind in self.kinds)
        return Work(
            active=mixer.active + after.active,
            total=mixer.total + after.total,
            outputs=mixer.outputs + after.outputs,
            pair=mixer.pair + after.pair,
            window=mixer.window,
            kv_heads=mixer.kv_heads,
            head_dim=mixer.head_dim,
            inner=mixer.inner + after.inner,
            per_token=mixer.per_token + after.per_token,
            states=mixer.states,
        )


def _random(specs: ParamSpecs) -> ParamSpecs:
    return {name: spec for name, spec in specs.items() if spec.std}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """A pattern of blocks, repeated; compiled as one loop."""

    pattern: tuple[Block, ...]
    repeats: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A place in a stack's pattern: layers of one kind whose weights are stacked as [repeats, ...]."""

    block: Block
    prefix: str
    """Prefix of the names of its weights."""
    layers: range
    """Indices of the decoder's layers at this place."""


def places(stacks: Sequence[Stack], prefix: str) -> tuple[Place, ...]:
    """All places, stack by stack. A single place has `prefix` as its prefix; with several, their number is added."""
    found: list[Place] = []
    first = 0
    several = sum(len(stack.pattern) for stack in stacks) > 1
    for stack in stacks:
        end = first + len(stack.pattern) * stack.repeats
        for offset, block in enumerate(stack.pattern):
            own = f"{prefix}{len(found)}." if several else prefix
            found.append(Place(block=block, prefix=own, layers=range(first + offset, end, len(stack.pattern))))
        first = end
    return tuple(found)
