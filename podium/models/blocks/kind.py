"""What a kind of layer is: it declares its weights, says what it costs and applies itself. No jax.

A decoder is stacks of blocks; a block is a mixer of tokens and a feed-forward. Each is a frozen dataclass with the
methods of `Kind`, in a module of this folder; `docs/layers.md` shows how to add one. Declarations are read by checks of
a config and by the planner, which must start without jax; `apply` imports its mathematics when it is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from podium.models.blocks.rope import Rope
from podium.models.blocks.spec import ParamSpec, ParamSpecs
from podium.models.blocks.weights import LayerWeight, LayerWeights

if TYPE_CHECKING:
    import jax

Tree: TypeAlias = Any
"""A pytree of arrays."""


class StateSpec(NamedTuple):
    """An array that decoding keeps of each sequence, whatever the sequence's length."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """The logical axis of each dimension, as of weights."""
    dtype: str | None = None
    """numpy's name of its format; None: that of the activations."""


class Work(NamedTuple):
    """What a kind costs, in numbers and multiply-adds of one layer, and what decoding keeps of it."""

    active: int
    """Elements of the matrices that a token is multiplied with."""
    total: int
    """Elements of all its matrices."""
    outputs: int
    """Numbers of a token that its products with the width make."""
    pair: int = 0
    """Multiply-adds of a forward pass for a query and a key that it sees."""
    window: int | None = None
    """The most keys that a query sees, itself included; None: all before it."""
    kv_heads: int = 0
    """Heads whose key and value decoding keeps of each token."""
    head_dim: int = 0
    """Numbers of such a key, and of such a value."""
    inner: int = 0
    """Numbers of a token that its last product reads."""
    states: tuple[StateSpec, ...] = ()
    """Arrays of fixed size that decoding keeps of each sequence; `Context.recur` brings them up to date."""


class At(NamedTuple):
    """The layer that attends."""

    layer: jax.Array  # [] int32, counted among the layers of its place in the pattern
    window: int | None
    """The most positions that a query sees, its own included; None: all before it."""


class Attend(Protocol):
    """Attention as the caller of `forward` computes it: over the rows of a batch, or over a cache."""

    def __call__(self, carried: Tree, at: At, q: jax.Array, k: jax.Array, v: jax.Array, /) -> tuple[Tree, jax.Array]:
        """What is carried on, and what each query found.

        Args:
            carried: what the caller keeps of this place in the pattern.
            at: the layer.
            q: [B, T, H, Q].
            k: [B, T, K, Q].
            v: [B, T, K, Q].

        Returns:
            The new `carried`, and [B, T, H, Q].
        """
        ...


States: TypeAlias = "tuple[jax.Array, ...]"
"""The arrays of `Work.states` for some sequences, [B, ...] each."""
Advance: TypeAlias = "Callable[[States, jax.Array], tuple[States, jax.Array]]"
"""`(states behind the tokens before, counts [B] int32) -> (states behind the new tokens, y [B, T, ...])`.

The first `counts` of a row's T tokens are its sequence's; the others change no state, and their y is not used."""


class Recur(Protocol):
    """Where the caller of `forward` keeps the states of layers: in a cache, or nowhere."""

    def __call__(self, carried: Tree, at: At, initial: States, advance: Advance, /) -> tuple[Tree, jax.Array]:
        """Call `advance` with the rows' states and keep what it returns.

        Args:
            carried: what the caller keeps of this place in the pattern.
            at: the layer.
            initial: the states of sequences without tokens.
            advance: the layer's mathematics.

        Returns:
            The new `carried`, and y of `advance`.
        """
        ...


class Context(Protocol):
    """What the decoder offers a layer: mathematics whose placement on devices is not the layer's business."""

    @property
    def layer(self) -> jax.Array:
        """[] int32, which of the layers at this place of the pattern it is."""
        ...

    @property
    def carried(self) -> Tree:
        """What the caller keeps of this place in the pattern: a cache of keys and values, or a state."""
        ...

    @property
    def positions(self) -> jax.Array:
        """[B, T] int32 of each token in its own sequence."""
        ...

    def norm(self, x: jax.Array, scale: LayerWeight) -> jax.Array:
        """RMS norm over the last dimension, with the decoder's epsilon."""
        ...

    def linear(self, pattern: str, x: jax.Array, w: LayerWeight) -> jax.Array:
        """The einsum of an activation and a weight."""
        ...

    def heads(self, x: jax.Array, w: LayerWeights, *, bias: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, T, H, Q], keys and values [B, T, K, Q]: products with `q`, `k`, `v`, and `q_bias` and so on."""
        ...

    def rotate(self, x: jax.Array, rope: Rope) -> jax.Array:
        """Rotary embedding of [B, T, H, Q] at the tokens' positions; `rope` is one of the kind's `ropes`."""
        ...

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None = None) -> tuple[Tree, jax.Array]:
        """What this place carries on, and what the queries found, [B, T, H, Q]."""
        ...

    def recur(self, initial: States, advance: Advance) -> tuple[Tree, jax.Array]:
        """What this place carries on, and y of `advance`, which gets the states behind the tokens before these.

        `initial` are the states of sequences without tokens, in the order of `Work.states`.
        """
        ...


class Applied(NamedTuple):
    """What a kind makes of an activation."""

    y: jax.Array  # [B, T, D], added to the residual stream
    carried: Tree
    """What the place keeps, of the same shape as `context.carried`."""
    auxiliary: Tree = ()
    """Arrays [B, ...] that the caller of `forward` gets of each layer."""


class Kind(Protocol):
    """A mixer of tokens or a feed-forward."""

    @property
    def scope(self) -> str:
        """The `jax.named_scope` of its operations."""
        ...

    @property
    def ropes(self) -> Sequence[Rope]:
        """The rotary embeddings that it uses."""
        ...

    def specs(self, width: int, *, std: float, out_std: float) -> ParamSpecs:
        """Its weights in one layer; `out_std` is for matrices that write into the residual stream."""
        ...

    def work(self, width: int) -> Work:
        """What it costs."""
        ...

    def apply(self, w: LayerWeights, x: jax.Array, context: Context) -> Applied:
        """Apply it to normed activations [B, T, D]."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A layer: x + mixer(norm(x)), then x + feed_forward(norm(x))."""

    mixer: Kind
    feed_forward: Kind

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        """Both, in the order in which they are applied."""
        return self.mixer, self.feed_forward

    def specs(self, width: int, *, std: float, out_std: float) -> ParamSpecs:
        """The weights of one layer. What starts random comes first: seeds draw in this order."""
        norm = ParamSpec((width,), (None,), 0.0, 1.0)
        mixer, after = (kind.specs(width, std=std, out_std=out_std) for kind in self.kinds)
        assert not mixer.keys() & after.keys(), "the mixer and the feed-forward of a block share names of weights"
        declared = {"attention_norm": norm, **_random(mixer), "mlp_norm": norm, **_random(after)}
        return declared | mixer | after

    def work(self, width: int) -> Work:
        """What the layer costs, of both kinds together."""
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
            states=mixer.states,
        )


def _random(specs: ParamSpecs) -> ParamSpecs:
    return {name: spec for name, spec in specs.items() if spec.std}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """A pattern of blocks, repeated: one loop of the compiled program."""

    pattern: tuple[Block, ...]
    repeats: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A place in a stack's pattern: its layers have one kind, and their weights lie in one stack [repeats, ...]."""

    block: Block
    prefix: str
    """How the names of its weights begin."""
    layers: range
    """Which of the decoder's layers stand here."""


def places(stacks: Sequence[Stack], prefix: str) -> tuple[Place, ...]:
    """Every place, stack by stack. Where there is but one, `prefix` stands alone, else it has the place's number."""
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
