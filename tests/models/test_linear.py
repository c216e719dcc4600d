import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import rules_on

import podium.sharding as sharding
from podium.models.blocks.spec import ParamSpec
from podium.models.blocks.weights import Weight
from podium.models.linear import as_bits, layer_weight, make_linear, of_bits, product
from podium.models.params import GATHERED_AXES, TRAIN_AXES
from podium.sharding import ShardingRules

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


def updated(rules, x, stored, dtype, *, wide):
    """The value of two products and the gradients of x and of their stored weights, up [D, F] and down [F, D]."""
    specs = {"up": ParamSpec((8, 16), ("width", "mlp"), 1.0), "down": ParamSpec((16, 8), ("mlp", "width"), 1.0)}

    def loss(x, stored):
        w = {
            name: layer_weight(name, value, specs[name], frozen=False, rules=rules, dtype=dtype, wide=wide)
            for name, value in stored.items()
        }
        linear = make_linear(rules)
        return jnp.sum(jnp.sin(linear("btf,fd->btd", linear("btd,df->btf", x, w["up"]), w["down"])))

    stored = {name: jax.device_put(w, rules.storage.sharding(*specs[name].axes)) for name, w in stored.items()}
    x = jax.device_put(x, rules.sharding("batch", "tokens", None))
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(x, stored), (x, stored)


@pytest.mark.parametrize(
    ("mesh", "dtype", "wide"),
    [
        ("fsdp:8", FLOAT32, False),
        ("dp:2,fsdp:4", BFLOAT16, True),
        ("fsdp:4,sp:2", BFLOAT16, False),
        ("fsdp:4,sp:2", FLOAT32, False),
        ("fsdp:4,tp:2", BFLOAT16, True),
    ],
)
def test_gradients_over_many_chips_are_summed_in_several_exchanges(mesh, dtype, wide, monkeypatch):
    """Neighbours first, then their groups; the gradients are those of one device, and stored as the weights are."""
    for name in ("MOST_AT_ONCE", "MOST_GATHERED"):
        monkeypatch.setattr(sharding, name, 2)
    monkeypatch.setattr(ShardingRules, "most_parts", 2)
    random = np.random.default_rng(0)
    x, up, down = (jnp.asarray(random.standard_normal(shape), FLOAT32) for shape in ((8, 4, 8), (8, 16), (16, 8)))
    split = ShardingRules(rules_on(mesh, 8).mesh, GATHERED_AXES, stored=TRAIN_AXES)
    alone = ShardingRules(rules_on("dp:1", 1).mesh, GATHERED_AXES, stored=TRAIN_AXES)
    lowered, given = updated(split, x, {"up": up, "down": down}, dtype, wide=wide)
    value, (dx, found) = lowered.compile()(*given)
    one, same = updated(alone, x, {"up": up, "down": down}, dtype, wide=wide)
    expected, (wanted_dx, wanted) = one.compile()(*same)
    tolerance = 1e-5 if wide or dtype == FLOAT32 else 0.02  # rounded to bfloat16 before they are summed, or not
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(dx, wanted_dx, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(wanted_dx))))
    for name, gradient in found.items():
        assert gradient.sharding.is_equivalent_to(given[1][name].sharding, 2)
        scale = float(jnp.max(jnp.abs(wanted[name])))
        np.testing.assert_allclose(gradient, wanted[name], rtol=0, atol=tolerance * scale)
    groups = set(re.findall(r"reduce_scatter.*replica_groups = dense<(\[\[.*?\]\])>", lowered.as_text()))
    assert {len(json.loads(text)[0]) for text in groups} == {2}
    assert len(groups) == (3 if mesh in ("fsdp:8", "fsdp:4,sp:2") else 2)
