"""Converts the layers' expert choices of a forward pass to one array, with all layers side by side, and back."""

import jax
import jax.numpy as jnp
import numpy as np

from podium.models.architecture import DecoderConfig
from podium.models.blocks.choices import Balance, Recorded, Routing
from podium.models.blocks.kind import Tree


def routings(auxiliary: tuple[Tree, ...]) -> list[Routing]:
    """The `Routing` that the routers of each place returned from `forward`, stacked over the place's layers."""
    kinds = (of_feed_forward for _, of_feed_forward in auxiliary)
    return [each for each in kinds if isinstance(each, Routing)]


def joined_choices(auxiliary: tuple[Tree, ...], decoder: DecoderConfig) -> jax.Array:
    """The experts of each token [B, T, C], layer after layer, of a decoder with routers."""
    found = [jnp.moveaxis(each.choices, 0, 2) for each in routings(auxiliary)]  # [B, T, L, k]
    by_place = jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in found], axis=-1)
    return _taken(by_place, np.argsort(_columns(decoder), kind="stable"))


def recorded_choices(choices: jax.Array, counted: jax.Array, decoder: DecoderConfig) -> list[Recorded | None]:
    """The inverse of `joined_choices`, for `forward`: the recorded choices at each place, stacked over its layers.

    `choices` are [B, T, C]; `counted` [B, T] says which tokens are in statistics.
    """
    begin, found = 0, dict[str, Recorded]()
    by_layer = np.argsort(_columns(decoder), kind="stable")
    choices = _taken(choices, np.argsort(by_layer))
    for place, kind in decoder.routed:
        layers = len(place.layers)
        own = choices[..., begin : begin + layers * kind.top].reshape(*choices.shape[:2], layers, kind.top)
        every = jnp.broadcast_to(counted[None], (layers, *counted.shape))
        found[place.prefix] = Recorded(jnp.moveaxis(own, 2, 0), every)
        begin += layers * kind.top
    return [found.get(place.prefix) for place in decoder.places]


def _columns(decoder: DecoderConfig) -> list[int]:
    """The layer of each choice, with the choices of one place after those of another."""
    return [layer for place, kind in decoder.routed for layer in place.layers for _ in range(kind.top)]


def _taken(choices: jax.Array, columns: np.ndarray) -> jax.Array:
    """Reorder the columns [..., C]. Trainer and engine may group layers into different places, but have the same
    layers.
    """
    return choices if np.array_equal(columns, np.arange(len(columns))) else choices[..., columns]


def balances(auxiliary: tuple[Tree, ...]) -> list[Balance]:
    """How the routers of each place distributed the tokens over experts, stacked over the place's layers."""
    return [each.balance for each in routings(auxiliary) if each.balance is not None]
