"""Routers' choices of experts, recorded in one forward pass for another. No jax (see `blocks.routing`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

if TYPE_CHECKING:
    import jax

ChoiceFormat = Literal["uint8", "uint16"]
"""Number format of recorded choices. Its largest number says that a token's experts are not known."""
MAX_EXPERTS = np.iinfo(np.uint16).max
"""Experts are numbered from 0 in a ChoiceFormat, without its largest number."""


def choice_format(experts: int) -> ChoiceFormat:
    """The smallest unsigned integer format that can number this many experts."""
    return "uint8" if experts <= np.iinfo(np.uint8).max else "uint16"


def unknown_choice(dtype: DTypeLike) -> int:
    """The value that marks a token's experts as unknown in recorded choices of this format.

    The router then chooses the token's experts again.
    """
    return int(np.iinfo(dtype).max)


class Recorded(NamedTuple):
    """The choices that an earlier pass made for some tokens, and which tokens count."""

    choices: jax.Array  # [B, T, k] in a ChoiceFormat; `unknown_choice` where nothing was recorded
    counted: jax.Array  # [B, T] bool, whether the token counts in the statistics


class Balance(NamedTuple):
    """How a layer's router distributed the counted tokens of each row over experts."""

    load: jax.Array  # [B, E] float32, number of choices of each expert
    shares: jax.Array  # [B, E] float32, sum of the router's probabilities
    compared: jax.Array  # [B] float32, number of tokens with recorded choices
    differing: jax.Array  # [B] float32, how many of them the router would now send to another set of experts


class Routed(NamedTuple):
    """Tokens, and the experts that a router chose for them."""

    x: jax.Array  # [B, T, D]; on a device flattened, [N, D]
    gates: jax.Array  # [B, T, k] float32, or [N, k]
    chosen: jax.Array  # [B, T, k] int32, or [N, k]


class Routing(NamedTuple):
    """A router's results."""

    choices: jax.Array  # [B, T, k] in a ChoiceFormat, experts of each token
    balance: Balance | None
    """None without `Recorded` input, as in the rollout."""
