"""The mixture of experts against the naive form: every expert computes every token, most by a gate of 0."""

import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import PartitionSpec as P
from tiny_decoder import tiny
from tiny_models import error_of_scale, rules_on

from podium import sharding
from podium.config.lora import LoraConfig
from podium.kernels import gpu_grouped, grouped
from podium.kernels.grouped import TILE_ROWS, Form, gradient_tiles, grouped_product, product_tiles, token_sums
from podium.models import expert_mixture
from podium.models.architecture import ModelError, with_lora
from podium.models.attention.packed_attention import causal_attention
from podium.models.blocks.choices import Recorded, Routed, choice_format, unknown_choice
from podium.models.blocks.experts import Experts
from podium.models.blocks.kind import Block, Stack
from podium.models.blocks.mlp import Mlp
from podium.models.blocks.routing import route
from podium.models.decoder import PassSettings, forward
from podium.models.expert_forms import (
    DeviceExperts,
    Group,
    Matrices,
    _of_rows,
    beyond_tiles,
    dense_form,
    sorted_form,
    split_form,
)
from podium.models.expert_mixture import mixed
from podium.models.files.hf_config import from_hf_config
from podium.models.params import GATHERED_AXES, GROUP_AXES, TRAIN_AXES, param_specs, trained_specs
from podium.models.presets import preset_decoder
from podium.sharding import ShardingRules, make_mesh

E, K, D, F, N = 8, 3, 16, 24, 40
UNKNOWN = unknown_choice(np.uint8)
TOLERANCE = 1e-5  # of the largest number
RANDOM = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RANDOM.standard_normal(shape), jnp.float32)


WEIGHTS = {"router": normal(D, E), "gate": normal(E, D, F), "up": normal(E, D, F), "down": normal(E, F, D)}
WEIGHTS = {name: w / w.shape[-2] ** 0.5 for name, w in WEIGHTS.items()}
X = normal(N, D)


def naive(w, x, top=K, normalized=True):
    """Plain autodiff can differentiate all of it but the choice."""
    shares = jax.nn.softmax(x @ w["router"])
    kept = jnp.where(shares >= jnp.sort(shares, axis=-1)[:, -top][:, None], shares, 0.0)
    if normalized:
        kept = kept / jnp.sum(kept, axis=-1, keepdims=True)
    every = [(jax.nn.silu(x @ g) * (x @ u)) @ d for g, u, d in zip(w["gate"], w["up"], w["down"], strict=True)]
    return sum(kept[:, e][:, None] * y for e, y in enumerate(every))


def routed(w, x, normalized=True, recorded=None, replay=True):
    logits = jnp.einsum("btd,de->bte", x[None], w["router"], precision="highest")
    return route(logits, K, normalized=normalized, recorded=recorded, replay=replay)


def computed(form, w, x, normalized=True):
    gates, chosen, _ = routed(w, x, normalized)
    experts = [Group(Matrices(w[name])) for name in ("gate", "up", "down")]
    return form(Routed(x, gates[0], chosen[0]), DeviceExperts(experts, "silu"), kernels="none")


@pytest.mark.parametrize("normalized", [True, False])
def test_values_and_gradients_are_those_of_autodiff_of_the_naive_form(normalized):
    def loss(function, w, x):
        y = function(w, x, normalized=normalized)
        return jnp.sum(jnp.sin(y)), y

    def of(function):
        return jax.jit(jax.value_and_grad(functools.partial(loss, function), (0, 1), has_aux=True))(WEIGHTS, X)

    (_, found), gradients = of(functools.partial(computed, sorted_form))
    (_, expected), wanted = of(naive)
    assert error_of_scale(found, expected) <= TOLERANCE
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        assert error_of_scale(one, other) <= TOLERANCE
    dense = jax.jit(functools.partial(computed, dense_form, normalized=normalized))(WEIGHTS, X)
    assert error_of_scale(dense, expected) <= TOLERANCE


def test_tiles_of_rows_are_of_one_group_each():
    sizes = jnp.asarray([0, 5, 8, 0, 3, 0], jnp.int32)
    groups, begins, ends = (x.tolist() for x in gpu_grouped._tiles(sizes, 20, 4))
    found = [(g, a, min(a + 4, b)) for g, a, b in zip(groups, begins, ends, strict=True) if a < b]
    assert found == [(1, 0, 4), (1, 4, 5), (2, 5, 9), (2, 9, 13), (4, 13, 16)]
    assert len(groups) == 20 // 4 + 6  # enough for any sizes
    assert all(0 <= g < 6 for g in groups)


def test_a_gpus_kernels_multiply_bfloat16(monkeypatch):
    monkeypatch.setattr(gpu_grouped, "TILE_ROWS", 32)
    x, w, dy = (normal(*shape).astype(jnp.bfloat16) for shape in ((90, 70), (3, 70, 40), (90, 40)))
    sizes = jnp.asarray([50, 0, 35], jnp.int32)

    def run(form: Form) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(lambda x, w: grouped_product(form, x, w, (), sizes), x, w)
        return y[:85], *(each[:85] for each in pull(dy))

    half = jnp.dtype(jnp.bfloat16)
    for one, other in zip(run(Form("gpu", half, "own", True)), run(Form("none", half, "own")), strict=True):
        assert one.dtype == half
        assert error_of_scale(one.astype(jnp.float32), other.astype(jnp.float32)) <= 1e-2


@pytest.mark.parametrize(("inner", "outer"), [(128, 256), (300, 200)])
def test_kernels_of_tpu_and_gpu_multiply_as_ragged_dot_does(inner, outer, monkeypatch):
    """Emulated; one group is empty, one ends within a tile, and rows, and the larger dimensions, are no whole tiles."""
    for name, most in {"WHOLE_INNER": 256, "TILE_INNER": 256, "TILE_OUTER": 128}.items():
        monkeypatch.setattr(grouped, name, most)
    monkeypatch.setattr(gpu_grouped, "TILE_ROWS", 32)
    rows = 200
    sizes = jnp.asarray([70, 0, 3, 127], jnp.int32)
    x, w, dy = normal(rows, inner), normal(4, inner, outer), normal(rows, outer)

    def product(form, x, w, sums):
        return jnp.sum(grouped_product(form, x, w, sums, sizes) * dy)

    single = jnp.dtype(jnp.float32)
    own, tpu, gpu = (
        Form(kernels, single, gradient, interpret=kernels != "none")
        for kernels, gradient in (("none", "own"), ("tpu", "float32"), ("gpu", "float32"))
    )
    expected = jax.jit(jax.grad(functools.partial(product, own), (0, 1)))(x, w, ())
    every = lambda x, w: jnp.sum(jax.lax.ragged_dot(x, w, sizes, precision="highest") * dy)  # noqa: E731
    plain = jax.jit(jax.grad(every, (0, 1)))(x, w)
    for form, at, parts in ((own, (0, 1), 0), (tpu, (0, 2), 1), (tpu, (0, 2), 2), (gpu, (0, 2), 1), (gpu, (0, 2), 2)):
        sums = tuple(jnp.zeros((4, inner, outer // parts)) for _ in range(parts))
        dx, dw = jax.jit(jax.grad(functools.partial(product, form), at))(x, w, sums)
        found = dx, jnp.concatenate(dw, axis=-1) if parts else dw
        for one, other, third in zip(found, expected, plain, strict=True):
            assert error_of_scale(one, other) <= TOLERANCE
            assert error_of_scale(one, third) <= TOLERANCE


@pytest.mark.parametrize(
    ("width", "of_expert", "product", "gradient"),
    [
        (2048, 768, (512, 2048, 768), (512, 1024, 768)),  # Qwen3-30B-A3B
        (2880, 2880, (512, 2880, 512), (512, 1024, 768)),  # gpt-oss-20b, which no tile divides
        (4096, 1536, (512, 2048, 768), (512, 1024, 768)),  # Qwen3-235B-A22B
    ],
)
def test_tiles_fit_a_kernels_memory(width, of_expert, product, gradient):
    assert product_tiles(512, width, of_expert, 2, 2) == product
    assert gradient_tiles(512, width, of_expert, 2, 4) == gradient
    for inner, outer in ((width, of_expert), (of_expert, width)):
        for operand, result in ((2, 2), (4, 4), (2, 4)):
            rows, deep, wide = product_tiles(512, inner, outer, operand, result)
            blocks = operand * (rows * deep + deep * wide) + result * rows * wide
            assert 2 * blocks + 4 * rows * wide <= 15 * 2**20
            rows, deep, wide = gradient_tiles(512, inner, outer, operand, result)
            blocks = operand * (rows * deep + rows * wide) + result * deep * wide
            assert 2 * blocks + 4 * deep * wide <= 15 * 2**20


def shapes_of(jaxpr):
    """The shapes of all results of a program, those of its inner programs too."""
    for each in jaxpr.eqns:
        yield from (result.aval.shape for result in each.outvars)
        for inner in jax.extend.core.jaxprs_in_params(each.params):
            yield from shapes_of(inner)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_kernels_read_a_layer_from_the_stack_of_all(platform):
    sizes, x, stack, layer = jnp.asarray([70, 0, 3], jnp.int32), normal(80, 128), normal(4, 3, 128, 256), jnp.int32(2)
    single = jnp.dtype(jnp.float32)
    expected = jax.lax.ragged_dot(x, stack[2], sizes, precision="highest")[:73]
    for form in (Form("none", single, "none"), Form(platform, single, "none", interpret=True)):
        assert error_of_scale(grouped_product(form, x, stack, (), sizes, layer)[:73], expected) <= TOLERANCE
    whole = functools.partial(grouped_product, Form(platform, single, "none"))
    shapes = set(shapes_of(jax.make_jaxpr(whole)(x, stack, (), sizes, layer).jaxpr))
    assert (12, 128, 256) in shapes
    assert (3, 128, 256) not in shapes


@pytest.mark.parametrize(
    "form", [Form("none", jnp.dtype("float32"), "none"), Form("tpu", jnp.dtype("float32"), "none", True)]
)
def test_rows_are_summed_by_token(form):
    counts = np.random.default_rng(0).integers(0, 5, 150)
    counts[-1] = 0
    tokens = np.repeat(np.arange(150), counts)
    rows = np.random.default_rng(1).standard_normal((len(tokens) + 7, 128)).astype(np.float32)
    rows[len(tokens) :] = np.nan  # they are of no token
    expected = np.zeros((150, 128), np.float32)
    np.add.at(expected, tokens, rows[: len(tokens)])
    given = jnp.asarray(rows), jnp.asarray(np.pad(tokens, (0, 7))), jnp.asarray(counts, jnp.int32)
    assert error_of_scale(token_sums(form, *given, most=4), expected) <= TOLERANCE


@pytest.mark.parametrize("prefers", [False, True])
def test_the_parts_of_all_devices_are_the_whole(prefers):
    """Also if nearly all rows are one device's, in two windows."""
    x, logits = normal(220, D), normal(1, 220, E)
    if prefers:
        logits = logits.at[..., :K].add(9.0)
    gates, chosen, _ = route(logits, K, normalized=True, recorded=None, replay=True)
    experts = [Group(Matrices(WEIGHTS[name], frozen=True)) for name in ("gate", "up", "down")]
    expected = sorted_form(Routed(x, gates[0], chosen[0]), DeviceExperts(experts, "silu"), kernels="none")
    found = []
    for first in (0, 4):
        here = [Group(Matrices(each.matrix.value[first : first + 4], frozen=True)) for each in experts]
        own = (chosen[0] - first) % E
        assert ((own < 4).sum() > TILE_ROWS) == (prefers and first == 0)
        found.append(split_form(Routed(x, gates[0], own), DeviceExperts(here, "silu"), kernels="none", count=E))
    assert error_of_scale(sum(found), expected) <= TOLERANCE


def test_recorded_choices_are_repeated_and_their_gates_made_anew():
    gates, chosen, told = routed(WEIGHTS, X)
    assert told.balance is None
    known = np.array(told.choices)
    known[0, ::4] = UNKNOWN
    other = dict(WEIGHTS, router=WEIGHTS["router"] + 0.05 * normal(D, E))
    counted = jnp.arange(N)[None] < N - 5
    again = routed(other, X, recorded=Recorded(jnp.asarray(known), counted))
    own = routed(other, X)
    differs = np.sort(own[1][0]) != np.sort(chosen[0])
    assert 0 < differs.any(axis=1).sum() < N  # else nothing is tested
    expected = np.where((known == UNKNOWN).any(-1)[0][:, None], own[1][0], chosen[0])
    np.testing.assert_array_equal(again[1][0], expected)
    logits = np.take_along_axis(np.asarray(X @ other["router"]), expected, axis=1)
    np.testing.assert_allclose(again[0][0], np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), rtol=1e-4)
    balance = again[2].balance
    seen = np.arange(N) < N - 5
    np.testing.assert_array_equal(balance.load[0], np.bincount(expected[seen].reshape(-1), minlength=E))
    shares = np.asarray(jax.nn.softmax(X @ other["router"]))[seen].sum(0)
    np.testing.assert_allclose(balance.shares[0], shares, rtol=1e-5)
    was_known = seen & (known[0, :, 0] != UNKNOWN)
    assert (balance.compared[0], balance.differing[0]) == (was_known.sum(), (differs.any(1) & was_known).sum())
    free = routed(other, X, recorded=Recorded(jnp.asarray(known), counted), replay=False)
    np.testing.assert_array_equal(free[1], own[1])
    assert free[2].balance.differing[0] == balance.differing[0]
    np.testing.assert_array_equal(gates.shape, (1, N, K))


def test_more_experts_than_bytes_can_number_are_numbered_by_two_bytes():
    """Expert 255 is one of 256, and an unknown choice among 255."""
    assert (choice_format(255), choice_format(256)) == ("uint8", "uint16")
    logits = normal(1, N, 300).at[0, 0, 255].set(9.0)
    _, chosen, told = route(logits, K, normalized=True, recorded=None, replay=True)
    assert told.choices.dtype == np.uint16
    np.testing.assert_array_equal(told.choices, chosen)
    assert 255 in told.choices[0, 0]
    known = np.asarray(told.choices).copy()
    known[0, 1] = unknown_choice(np.uint16)
    other = logits[:, ::-1]
    _, again, _ = route(
        other, K, normalized=True, recorded=Recorded(jnp.asarray(known), jnp.ones((1, N), bool)), replay=True
    )
    own = np.asarray(route(other, K, normalized=True, recorded=None, replay=True)[1])
    np.testing.assert_array_equal(again, np.where(np.arange(N)[None, :, None] == 1, own, known))


def decoder():
    attention, _ = tiny().dense_layers()[0]
    experts = Experts(count=E, top=K, width=24, normalized=True)
    blocks = [Block(mixer=attention, feed_forward=kind) for kind in (experts, Mlp(width=48))]
    return dataclasses.replace(tiny(), stacks=(Stack(pattern=tuple(blocks), repeats=2),))


TOKENS = np.random.default_rng(1).integers(0, 300, (8, 8)).astype(np.int32)


@functools.cache
def update_of(mesh, devices, dtype="float32", wide=False):
    """Value, gradients and choices of a training pass."""
    config = decoder()
    random = np.random.default_rng(0)
    layout = ShardingRules(make_mesh(mesh, jax.devices()[:devices]), TRAIN_AXES)
    rules = ShardingRules(layout.mesh, GATHERED_AXES, stored=TRAIN_AXES)
    params = {
        name: jax.device_put(
            (spec.mean + 8 * spec.std * random.standard_normal(spec.shape)).astype(np.float32),
            layout.sharding(*spec.axes),
        )
        for name, spec in param_specs(config).items()
    }

    def loss(params):
        positions = jnp.broadcast_to(jnp.arange(8)[None], (8, 8))
        options = {"config": config, "rules": rules, "dtype": jnp.dtype(dtype), "remat": "layer", "wide": wide}

        def attend(carried, at, q, k, v):
            return carried, causal_attention(q, k, v, jnp.tril(jnp.ones((8, 8), bool))[None])

        hidden, _, told = forward(params, TOKENS, positions, attend, settings=PassSettings(**options))
        return jnp.sum(jnp.sin(hidden.astype(jnp.float32))), told[0][1].choices

    (value, choices), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return float(value), jax.tree.map(np.asarray, gradients), np.asarray(choices)


def test_a_pass_without_gradients_takes_experts_from_their_stacks():
    config, rules = decoder(), rules_on("dp:1", 1)
    params = {name: normal(*spec.shape) * 0.1 for name, spec in param_specs(config).items()}
    positions = jnp.broadcast_to(jnp.arange(8)[None], (8, 8))

    def hidden(params, from_stacks):
        def attend(carried, at, q, k, v):
            return carried, causal_attention(q, k, v, jnp.tril(jnp.ones((8, 8), bool))[None])

        options = {"config": config, "rules": rules, "dtype": jnp.dtype("float32"), "from_stacks": from_stacks}
        return forward(params, TOKENS, positions, attend, settings=PassSettings(**options))[0]

    np.testing.assert_array_equal(hidden(params, True), hidden(params, False))
    loops = [
        each
        for each in jax.make_jaxpr(functools.partial(hidden, from_stacks=True))(params).eqns
        if each.primitive.name == "scan"
    ]
    consts, carried = loops[0].params["num_consts"], loops[0].params["num_carry"]
    shapes = [each.aval.shape for each in loops[0].invars]
    assert shapes[:consts].count((2, E, 32, 24)) == 2
    assert (2, E, 32, 24) not in shapes[consts + carried :]


MESHES = (
    "fsdp:2,tp:2,sp:2",
    *(pytest.param(mesh, marks=pytest.mark.long) for mesh in ("fsdp:8", "dp:4,tp:2", "sp:4,fsdp:2", "fsdp:4,dp:2")),
)


@pytest.mark.parametrize("mesh", MESHES)
def test_devices_that_share_experts_and_tokens_compute_what_one_does(mesh):
    value, gradients, choices = update_of(mesh, 8)
    expected, wanted, same = update_of("dp:1", 1)
    assert abs(value - expected) <= TOLERANCE * abs(expected)
    np.testing.assert_array_equal(choices, same)
    for name, gradient in gradients.items():
        assert error_of_scale(gradient, wanted[name]) <= TOLERANCE, name


def test_rows_that_fill_a_tpus_tiles_are_more_where_the_experts_do_not():
    """The dense form of 128 rows is that of 136, without the last."""
    x, gates = normal(128, 20), jax.nn.softmax(normal(128, 2))
    chosen = jnp.asarray(np.random.default_rng(0).integers(0, 4, (128, 2)), jnp.int32)
    experts = [Group(Matrices(normal(*shape), frozen=True)) for shape in ((4, 20, 24), (4, 20, 24), (4, 24, 20))]
    given = DeviceExperts(experts, "silu", [normal(4, 24), normal(4, 24)])
    plain, wide = (dense_form(Routed(x, gates, chosen), given, kernels=kind) for kind in ("none", "tpu"))
    np.testing.assert_allclose(plain, wide, rtol=1e-6, atol=1e-6)
    text = jax.jit(lambda x: dense_form(Routed(x, gates, chosen), given, kernels="tpu")).lower(x).as_text()
    assert "4x136x24" in text
    assert beyond_tiles(128, (4, 256, 128), "tpu") == beyond_tiles(64, (4, 20, 24), "tpu") == 0


def test_parts_of_many_devices_are_exchanged_in_two_phases(monkeypatch):
    """A gather, and its transpose: the sum of each device's part."""
    mesh = make_mesh("fsdp:8", jax.devices())
    monkeypatch.setattr(sharding, "MOST_AT_ONCE", 4)
    assert [len(groups[0]) for groups in sharding.exchanges(("fsdp",), mesh)] == [4, 2]
    x, every = normal(16, 3), normal(8, 16, 3)

    def both(x, own):
        names = ("fsdp",)
        return expert_mixture._gather(x, 0, names, mesh)[None], expert_mixture._scattered(own[0], 0, names, mesh)

    split = P("fsdp")
    whole, sums = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))(x, every)
    for device in range(8):
        np.testing.assert_array_equal(whole[device], x)
    np.testing.assert_allclose(sums, np.sum(every, axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_gradients_of_bfloat16_experts_are_summed_in_float32():
    """Of the experts in the last layer, whose inputs have no rounding of gradients behind them."""
    _, gradients, _ = update_of("fsdp:2,tp:2,sp:2", 8, "bfloat16", True)
    _, expected, _ = update_of("dp:1", 1, "bfloat16", True)
    rounded = np.asarray(jnp.asarray(expected["layers.0.expert_up"]).astype(jnp.bfloat16).astype(jnp.float32))
    assert np.any(rounded != expected["layers.0.expert_up"])
    for name in ("layers.0.expert_gate", "layers.0.expert_up", "layers.0.expert_down"):
        assert error_of_scale(gradients[name], expected[name]) <= 0.02, name


@pytest.mark.parametrize("rows", [(4, 1), (2, 5)])
def test_a_group_of_devices_holds_its_experts_and_adds_their_parts(rows):
    """With all experts for each token of a decode step, and sorted in a prefill."""
    rules = ShardingRules(make_mesh("fsdp:2,tp:2", jax.devices()[:4]), GROUP_AXES)
    B, T = rows
    x = X[: B * T]
    gates, chosen, _ = routed(WEIGHTS, x)
    shape = (B, T, -1)
    matrices = [WEIGHTS[name] for name in ("gate", "up", "down")]
    given = Routed(x.reshape(shape), gates.reshape(shape), chosen.reshape(shape))
    compute = jax.jit(lambda given, matrices: mixed(rules, given, matrices, count=E, activation="silu"))
    found = compute(given, matrices)
    assert error_of_scale(found.reshape(B * T, D), naive(WEIGHTS, x)) <= TOLERANCE


def test_adapters_are_beside_attention_and_experts_have_none_by_name():
    model = preset_decoder("Qwen/Qwen3-30B-A3B")
    named = {name.split(".")[1] for name in trained_specs(with_lora(model, LoraConfig(rank=4)))}
    assert named == {"q", "k", "v", "o"}
    with pytest.raises(ModelError, match=r"qwen3_moe has no matrix mlp .* if targets name experts; name q, k, v"):
        with_lora(model, LoraConfig(targets=["attention", "mlp"]))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"num_experts": 65_536}, r"num_experts must be a whole number from 1 to 65535"),
        ({"num_experts_per_tok": 9, "num_experts": 8}, r"num_experts_per_tok must be a whole number from 1 to 8"),
        ({"norm_topk_prob": 1}, r"norm_topk_prob must be true or false"),
        ({"mlp_only_layers": "none"}, r"mlp_only_layers must be a list of layers"),
    ],
)
def test_what_a_config_says_wrongly_of_experts_is_refused(said, message):
    raw = {
        "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, **said,
    }  # fmt: skip
    with pytest.raises(ModelError, match=message):
        from_hf_config(raw, "config.json")


def test_active_parameters_are_those_of_a_token_s_experts():
    model = preset_decoder("Qwen/Qwen3-30B-A3B")
    attention, router, expert = 2 * 2048 * (32 + 4) * 128, 2048 * 128, 3 * 2048 * 768
    head = 151_936 * 2048
    assert model.active == 48 * (attention + router + 8 * expert) + head
    assert model.stored == 48 * (attention + router + 128 * expert) + head
    assert (model.multiplied(512), model.multiplied(513), model.choices) == (model.stored, model.active, 48 * 8)


def test_rules_of_one_device_need_no_mesh():
    rules = rules_on("dp:1", 1)
    gates, chosen, _ = routed(WEIGHTS, X)
    matrices = [WEIGHTS[name] for name in ("gate", "up", "down")]
    found = mixed(rules, Routed(X[None], gates, chosen), matrices, count=E, activation="silu")
    assert error_of_scale(found[0], naive(WEIGHTS, X)) <= TOLERANCE


def test_biases_of_rows_are_made_again_where_remat_saves_products(capsys: pytest.CaptureFixture[str]):
    random = np.random.default_rng(0)
    bias, weight, rows = (
        jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((3, 7), (5, 7), (11, 5))
    )
    own = jnp.asarray(random.integers(0, 3, 11))
    np.testing.assert_array_equal(_of_rows(bias, own, jnp.dtype("float32")), bias[own])

    def layer(bias: jax.Array, weight: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(rows @ weight + _of_rows(bias, own, rows.dtype)))

    saving = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    print_saved_residuals(saving, bias, weight, rows)
    assert capsys.readouterr().out.count("f32[11,7]") == 1, "the product with the weight alone"
