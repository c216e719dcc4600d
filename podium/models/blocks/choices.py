"""The experts of tokens, passed from one forward pass to another. No jax: `podium.models.blocks.routing` chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import jax

UNKNOWN = 255
"""In recorded choices, which are bytes: the token's experts are not known, and are chosen anew."""


class Recorded(NamedTuple):
    """The choices that an earlier pass made for some tokens, and which tokens count."""

    choices: jax.Array  # [B, T, k] uint8; UNKNOWN where nothing was recorded
    counted: jax.Array  # [B, T] bool, whether the token is in the statistics


class Balance(NamedTuple):
    """How a layer's router shared out the counted tokens of each row."""

    load: jax.Array  # [B, E] float32, number of choices of each expert
    shares: jax.Array  # [B, E] float32, sum of the router's probabilities
    compared: jax.Array  # [B] float32, number of tokens with recorded choices
    differing: jax.Array  # [B] float32, how many of them the router would now send to another set of experts


class Routing(NamedTuple):
    """A router's results."""

    choices: jax.Array  # [B, T, k] uint8, experts of each token
    balance: Balance | None
    """None: nothing is known of the tokens, as in the rollout."""
