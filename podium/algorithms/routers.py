"""The routers of a mixture of experts: statistics of how evenly they distribute tokens, and a loss for balance."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from podium.models.blocks.choices import Balance


def router_loss(routers: Sequence[Balance]) -> jax.Array:
    """The balance loss of Switch Transformers (arXiv:2101.03961), mean over layers: 1 if all experts are used equally.

    E sum_e f_e P_e, where f is an expert's share of the choices (without gradient) and P its share of the router's
    probabilities, over the tokens of a micro-batch. Differs: f is a share of choices, not of tokens, so that the value
    does not depend on how many experts a token goes to (transformers' is that many times as large).
    """
    layers = [_balance_loss(each) for each in routers]
    return jnp.mean(jnp.concatenate(layers))


def _balance_loss(router: Balance) -> jax.Array:
    """The loss of each of the layers [L] at one place."""
    load, shares = _load(router), jnp.sum(router.shares, axis=1)  # [L, E]
    shares = shares / jnp.maximum(jnp.sum(shares, axis=-1, keepdims=True), 1e-30)
    return load.shape[-1] * jnp.sum(load * shares, axis=-1)


def _load(router: Balance) -> jax.Array:
    """Each expert's share of the choices [L, E]."""
    load = jnp.sum(jax.lax.stop_gradient(router.load), axis=1)
    return load / jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1.0)


def router_stats(routers: Sequence[Balance]) -> dict[str, jax.Array]:
    """Statistics of a micro-batch's routers, [] each; means over layers."""
    loads = [_load(each) for each in routers]
    most = jnp.concatenate([load.shape[-1] * jnp.max(load, axis=-1) for load in loads])
    unused = jnp.concatenate([jnp.mean(load == 0, axis=-1) for load in loads])
    differing = sum(jnp.sum(each.differing) for each in routers)
    compared = sum(jnp.sum(each.compared) for each in routers)
    return {
        "routing_disagreement": differing / jnp.maximum(compared, 1.0),
        "router_load_max": jnp.mean(most),
        "router_unused": jnp.mean(unused),
        "router_balance": jax.lax.stop_gradient(router_loss(routers)),
    }
