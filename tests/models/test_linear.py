import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import rules_on

from podium.models.linear import make_linear, product

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
SIZES = {"b": 2, "t": 5, "d": 8, "h": 4, "q": 3, "f": 6, "v": 11}


def operands(pattern, dtype=FLOAT32):
    """Random x and weights for a pattern, weights in `dtype`."""
    random, (x_axes, w_axes) = np.random.default_rng(0), pattern.split("->")[0].split(",")
    x, w = (jnp.asarray(random.standard_normal([SIZES[a] for a in axes]), FLOAT32) for axes in (x_axes, w_axes))
    return x, w.astype(dtype)


@pytest.mark.parametrize("pattern", ["btd,dhq->bthq", "bthq,hqd->btd", "btd,df->btf", "btf,fd->btd", "btd,vd->btv"])
def test_gradients_of_the_written_out_product_are_those_of_einsum(pattern):
    """Whichever operand is the wider one."""
    x, w = operands(pattern)
    linear = make_linear(rules_on("dp:1", 1))

    def loss(product, x, w):
        return jnp.sum(jnp.sin(product(pattern, x, w)))

    found = jax.value_and_grad(lambda x, w: loss(linear, x, w), argnums=(0, 1))(x, w)
    expected = jax.value_and_grad(lambda x, w: loss(jnp.einsum, x, w), argnums=(0, 1))(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize("barrier", [True, False])
def test_operands_are_in_the_weights_format_and_sums_in_float32(barrier):
    """Rounded to bfloat16 first, the exact products and sums are those of numpy; nothing is rounded afterwards."""
    x, w = operands("btd,df->btf", BFLOAT16)

    def rounded(a):
        return np.asarray(a.astype(BFLOAT16), np.float64)

    y, pull = jax.vjp(lambda x, w: product("btd,df->btf", FLOAT32, barrier, x, w), x, w)
    dx, dw = pull(y)
    assert (y.dtype, dx.dtype, dw.dtype) == (FLOAT32, FLOAT32, BFLOAT16)
    np.testing.assert_allclose(y, rounded(x) @ rounded(w), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(dx, rounded(y) @ rounded(w).T, rtol=1e-6, atol=1e-5)
    exact = np.einsum("btd,btf->df", rounded(x), rounded(y))
    np.testing.assert_allclose(np.asarray(dw, np.float64), exact, rtol=2**-8)


def test_the_result_is_in_the_format_of_the_activations():
    x, w = operands("btd,df->btf", BFLOAT16)
    linear = make_linear(rules_on("dp:1", 1))
    assert linear("btd,df->btf", x, w).dtype == FLOAT32
    assert linear("btd,df->btf", x.astype(BFLOAT16), w).dtype == BFLOAT16
