"""Which tokens see which, and the attention that training and prefill use.

The kernels of TPU and GPU belong here, behind the same function; this is XLA's own on every backend.
"""

import jax


def packed_mask(segments: jax.Array, prompts: jax.Array) -> jax.Array:
    """What each token of a packed row may see: earlier tokens of its own segment and of its prompt's.

    Args:
        segments: [B, T] int32, the segment of each token; 0 is padding.
        prompts: [B, T] int32, the segment that is the token's prompt; its own where it has none apart.

    Returns:
        [B, T, T] bool, query by key.
    """
    T = segments.shape[1]
    causal = jax.numpy.tri(T, dtype=bool)[None]
    key = segments[:, None, :]
    return causal & ((key == segments[:, :, None]) | (key == prompts[:, :, None]))


@jax.named_scope("scores")
def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Scaled dot-product attention with grouped heads; scores and softmax in float32.

    Args:
        q: [B, T, H, Q].
        k: [B, S, K, Q], K divides H.
        v: [B, S, K, Q].
        mask: [B, T, S] bool, true where a query sees a key. A row of none gives finite numbers without meaning.

    Returns:
        [B, T, H, Q].
    """
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
