import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import rules_on

from podium.models.blocks.weights import Weight
from podium.models.linear import as_bits, make_linear, of_bits, product

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


def through_layers(x, stored, sums, *, kept):
    """Sum of squares of what leaves three layers in bfloat16 whose weights are stored so."""
    linear = make_linear(rules_on("dp:1", 1))

    def layer(x, given):
        stored, sums = given
        return linear("btd,df->btf", x, Weight(of_bits(stored).astype(BFLOAT16), sums, stored if kept else None)), None

    return jnp.sum(jax.lax.scan(layer, x, (stored, sums))[0] ** 2)


@pytest.mark.parametrize("make", [as_bits, lambda w: w.astype(FLOAT32)], ids=["bits", "float32"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_loop_over_layers_keeps_no_stack_of_weights_that_it_was_given(make, frozen):
    """And the numbers are the same bit for bit."""
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((2, 5, 8)), FLOAT32)
    stored = make(jnp.asarray(random.standard_normal((3, 8, 8)), BFLOAT16))
    sums = None if frozen else jnp.zeros((3, 8, 8), FLOAT32)
    found, stacks = [], []
    for kept in (True, False):
        gradient = jax.value_and_grad(lambda x, sums: through_layers(x, stored, sums, kept=kept), argnums=(0, 1))  # noqa: B023
        found.append(gradient(x, sums))
        loops = [each for each in jax.make_jaxpr(gradient)(x, sums).eqns if each.primitive is jax.lax.scan_p]
        stacks.append(sum(y.aval.shape == stored.shape for y in loops[0].outvars))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert stacks == [0, 1]
