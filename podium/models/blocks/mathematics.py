"""Array functions that layers are built from, in pure jax: independent of devices and of the rest of Podium."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from podium.models.blocks.activation import Activation, Clamped


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def gated(gate: jax.Array, up: jax.Array, activation: Activation = "silu") -> jax.Array:
    """act(gate) * up. Recomputed in the backward pass, which would otherwise keep three more arrays of its size."""
    if isinstance(activation, Clamped):
        gate = jnp.minimum(gate, activation.limit)
        up = jnp.clip(up, -activation.limit, activation.limit)
        return gate * jax.nn.sigmoid(activation.alpha * gate) * (up + 1)
    return (jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)) * up


@functools.partial(jax.checkpoint, prevent_cse=False)
def opened(x: jax.Array, gate: jax.Array) -> jax.Array:
    """X times sigmoid(gate), recomputed in the backward pass as in `gated`."""
    return x * jax.nn.sigmoid(gate)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(2, 3, 4))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float, offset: float, wide: bool) -> jax.Array:
    """RMS norm (arXiv:1910.07467) over the last dimension, computed in float32, in the dtype of `x`.

    The scale is `offset` + `scale`. The product with it is made in float32 if `wide`, else in the dtype of `x`, as in
    Llama. Recomputed in the backward pass, which would otherwise keep two float32 arrays of
    its size.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    if wide:
        return (y * jnp.expand_dims(offset + scale.astype(jnp.float32), range(x.ndim - 1))).astype(x.dtype)
    scale = scale + offset if offset else scale
    return (y.astype(x.dtype) * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


def rope_tables(positions: jax.Array, frequencies: np.ndarray, length: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each position's rotation angles, times `length`, [B, T, Q/2] float32 each."""
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if length == 1 else (cos * length, sin * length)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary position embedding of `x` [B, T, H, Q]; pairs are formed from the halves of a head, as in Hugging Face.

    Tables for fewer than Q/2 pairs rotate the first elements of a head, and leave the others as they are.
    """
    turned = 2 * cos.shape[-1]
    if turned < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :turned], cos, sin), x[..., turned:]], axis=-1)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]  # [B, T, 1, Q/2]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def scaled_queries(q: jax.Array, factor: float) -> jax.Array:
    """Queries times a number, multiplied in float32."""
    return (q.astype(jnp.float32) * factor).astype(q.dtype)


def sharpened(q: jax.Array, positions: jax.Array, beta: float, period: int) -> jax.Array:
    """Queries [B, T, H, Q] at positions [B, T], times 1 + beta log(1 + floor(position / period))."""
    factors = 1 + beta * jnp.log(1 + jnp.floor(positions.astype(jnp.float32) / period))
    return (q.astype(jnp.float32) * factors[:, :, None, None]).astype(q.dtype)


@jax.custom_vjp
def rotate_by_product(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """`rotate` for TPUs, with the same results: a product with a matrix of 0, 1 and -1 swaps the halves.

    XLA fuses this into one pass. Slicing half heads takes three passes, because a register's lanes hold whole
    heads.
    """
    fixed = x.shape[-1] - 2 * cos.shape[-1]  # elements of a head that are not rotated
    swap = np.kron([[0, 1], [-1, 0]], np.eye(cos.shape[-1]))  # (a, b) becomes (-b, a)
    swap = jnp.asarray(np.pad(swap, (0, fixed)), x.dtype)
    turned = jnp.einsum(
        "bthq,qr->bthr", x, swap, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    cos, sin = (jnp.concatenate([table, table], axis=-1)[:, :, None] for table in (cos, sin))
    if fixed:
        room = ((0, 0), (0, 0), (0, 0), (0, fixed))
        cos, sin = jnp.pad(cos, room, constant_values=1), jnp.pad(sin, room)
    return (x.astype(jnp.float32) * cos + turned * sin).astype(x.dtype)


rotate_by_product.defvjp(  # custom, so that policies of jax.checkpoint do not see and save this product
    lambda x, cos, sin: (rotate_by_product(x, cos, sin), (cos, sin)),
    lambda tables, d: (rotate_by_product(d, tables[0], -tables[1]), None, None),
)
