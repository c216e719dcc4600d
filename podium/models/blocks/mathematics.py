"""Array functions that layers are built from, in pure jax: independent of devices and of the rest of Podium."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(jax.checkpoint, prevent_cse=False)
def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up. Recomputed in the backward pass, which would otherwise store three more arrays of this size."""
    return jax.nn.silu(gate) * up


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMS norm (arXiv:1910.07467) over the last dimension, computed in float32 and returned in the dtype of `x`.

    Recomputed in the backward pass, which would otherwise store two float32 arrays of this size.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y.astype(x.dtype) * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


def rope_tables(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each position's angles, [B, T, Q/2] float32."""
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary position embedding of `x` [B, T, H, Q]; pairs are formed from the halves of a head, as in Hugging Face."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]  # [B, T, 1, Q/2]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@jax.custom_vjp
def rotate_by_product(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """`rotate` for TPUs, with the same results: a product with a matrix of 0, 1 and -1 swaps the halves.

    XLA fuses all of it into one pass. Slicing half heads takes three passes, because a register's lanes hold whole
    heads.
    """
    swap = jnp.asarray(np.kron([[0, 1], [-1, 0]], np.eye(x.shape[-1] // 2)), x.dtype)  # (a, b) becomes (-b, a)
    turned = jnp.einsum(
        "bthq,qr->bthr", x, swap, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    cos, sin = (jnp.concatenate([table, table], axis=-1)[:, :, None] for table in (cos, sin))
    return (x.astype(jnp.float32) * cos + turned * sin).astype(x.dtype)


rotate_by_product.defvjp(  # custom, so that policies of jax.checkpoint do not see and save this product
    lambda x, cos, sin: (rotate_by_product(x, cos, sin), (cos, sin)),
    lambda tables, d: (rotate_by_product(d, tables[0], -tables[1]), None, None),
)
