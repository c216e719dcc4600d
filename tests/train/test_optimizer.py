import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_decoder import dense_decoder

from podium.config.optimizer import OptimizerConfig
from podium.models.blocks.spec import ParamSpec, is_matrix
from podium.models.params import TRAIN_AXES, param_specs
from podium.sharding import ShardingRules, abstract_params, init_params, make_mesh
from podium.train.optimizer.transforms import (
    abstract_opt_state,
    learning_rate,
    make_optimizer,
    muon_dimensions,
    round_at_random,
)
from podium.train.state import TrainState, abstract_state, init_state

NAMES = ("adamw", "lion", "muon", "sgd", "adafactor")
SPECS = param_specs(
    dense_decoder(
        model_type="qwen3", vocab=256, width=128, layers=3, heads=4, kv_heads=2, head_dim=32, mlp_width=256,
        max_positions=64, rope_theta=1e4, rope_scaling=None, norm_eps=1e-6, tied=False, qkv_bias=True, qk_norm=True,
    )
)  # fmt: skip
MATRICES = {"embed", "head", *(f"layers.{name}" for name in ("q", "k", "v", "o", "gate", "up", "down"))}


def rules(mesh: str = "fsdp:4,tp:2") -> ShardingRules:
    return ShardingRules(make_mesh(mesh), TRAIN_AXES)


def one_update(config: OptimizerConfig, params, gradients, specs=SPECS):
    optimizer = make_optimizer(config, 10, specs)
    updates, _ = jax.jit(optimizer.update)(gradients, jax.jit(optimizer.init)(params), params)
    return updates


def test_matrices_are_told_from_norms_and_biases_by_their_axes():
    assert {name for name, spec in SPECS.items() if is_matrix(spec)} == MATRICES


@pytest.mark.parametrize(
    ("name", "rate"), [("adamw", 3e-3), ("lion", 3e-3), ("muon", 1e-2), ("sgd", 0.1), ("adafactor", 3e-3)]
)
def test_each_optimizer_reduces_a_quadratic(name, rate):
    rng = np.random.default_rng(0)
    params, target = (
        {key: rng.normal(spec.mean, 0.02, spec.shape).astype(np.float32) for key, spec in SPECS.items()}
        for _ in range(2)
    )
    optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=rate, schedule="cosine"), 60, SPECS)

    @jax.jit
    def loss(params):
        return sum(jnp.sum((params[name] - target[name]) ** 2) for name in params)

    @jax.jit
    def step(params, opt_state):
        updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    before, opt_state = float(loss(params)), jax.jit(optimizer.init)(params)
    for _ in range(60):
        params, opt_state = step(params, opt_state)
    assert float(loss(params)) < 0.1 * before
    assert {leaf.dtype for leaf in jax.tree.leaves(opt_state) if leaf.dtype.kind == "f"} == {np.dtype("float32")}


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_shrinks_matrices_and_leaves_norms_and_biases_alone(name):
    params = {key: jnp.ones(spec.shape) for key, spec in SPECS.items()}
    gradients = jax.tree.map(jnp.zeros_like, params)
    updates = one_update(OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.5), params, gradients)
    for key, update in updates.items():
        np.testing.assert_allclose(update, -0.05 if key in MATRICES else 0.0, rtol=1e-6, err_msg=key)


def test_adamw_takes_the_step_worked_by_hand():
    specs = {"w": ParamSpec((1, 2), ("width", "mlp"), 0.02), "b": ParamSpec((2,), (None,), 0.0)}
    params = {"w": jnp.array([[2.0, -4.0]]), "b": jnp.array([1.0, 1.0])}
    gradients = {"w": jnp.array([[0.5, -0.25]]), "b": jnp.array([3.0, 0.0])}
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.01, clip_norm=0.0, eps=1e-8)
    optimizer = make_optimizer(config, 10, specs)
    updates, state = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], [[-0.1 * (1 + 0.02), -0.1 * (-1 - 0.04)]], rtol=1e-5)
    np.testing.assert_allclose(updates["b"], [-0.1, 0.0], rtol=1e-5)
    # second step, gradient 0: m = 0.9 * 0.1 * g, v = 0.95 * 0.05 * g^2, corrected by 1 - 0.9^2 and 1 - 0.95^2
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, gradients), state, params)
    direction = (0.09 / 0.19) / math.sqrt(0.0475 / 0.0975)
    np.testing.assert_allclose(updates["b"], [-0.1 * direction, 0.0], rtol=1e-5)


def test_lion_steps_by_the_sign_and_sgd_by_the_momentum():
    specs = {"w": ParamSpec((2, 2), ("width", "mlp"), 0.02)}
    params = {"w": jnp.zeros((2, 2))}
    gradient = {"w": jnp.array([[3.0, -0.1], [0.0, 7.0]])}
    lion = one_update(OptimizerConfig(name="lion", learning_rate=0.1, clip_norm=0.0), params, gradient, specs)
    np.testing.assert_allclose(lion["w"], [[-0.1, 0.1], [0.0, -0.1]], rtol=1e-6)
    sgd = make_optimizer(OptimizerConfig(name="sgd", learning_rate=0.1, clip_norm=0.0), 10, specs)
    _, state = sgd.update(gradient, sgd.init(params), params)
    updates, _ = sgd.update(gradient, state, params)
    np.testing.assert_allclose(updates["w"], -0.1 * 1.9 * gradient["w"], rtol=1e-6)


def test_gradients_are_clipped_by_their_norm_together():
    specs = {"a": ParamSpec((1,), (None,), 0.0), "b": ParamSpec((1,), (None,), 0.0)}
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    gradients = {"a": jnp.array([3.0]), "b": jnp.array([-4.0])}
    for clip_norm, scale in ((1.0, 0.2), (10.0, 1.0), (0.0, 1.0)):
        config = OptimizerConfig(name="sgd", learning_rate=1.0, clip_norm=clip_norm)
        updates = one_update(config, params, gradients, specs)
        np.testing.assert_allclose([updates["a"][0], updates["b"][0]], [-3 * scale, 4 * scale], rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "expected"),
    [
        ("constant", 0, [8, 8, 8, 8, 8, 8, 8]),
        ("constant", 4, [2, 4, 6, 8, 8, 8, 8]),
        ("constant", 1, [8, 8, 8, 8, 8, 8, 8]),
        ("linear", 0, [8, 7, 6, 5, 4, 3, 2]),
        ("linear", 2, [4, 8, 8, 6.5, 5, 3.5, 2]),
        ("cosine", 2, [4, 8, 8, 2 + 3 * (1 + math.sqrt(0.5)), 5, 2 + 3 * (1 - math.sqrt(0.5)), 2]),
        ("linear", 7, [8 / 7 * step for step in range(1, 8)]),
    ],
)
def test_the_learning_rate_has_the_values_worked_by_hand(schedule, warmup_steps, expected):
    config = OptimizerConfig(learning_rate=8.0, schedule=schedule, warmup_steps=warmup_steps, final_fraction=0.25)
    rate = learning_rate(config, 7)
    np.testing.assert_allclose([rate(step) for step in range(7)], expected, rtol=1e-6)


def test_the_optimizer_follows_the_schedule():
    specs = {"a": ParamSpec((1,), (None,), 0.0)}
    config = OptimizerConfig(name="sgd", beta1=0.0, learning_rate=1.0, schedule="linear", clip_norm=0.0)
    optimizer = make_optimizer(config, 3, specs)
    state, params, steps = optimizer.init({"a": jnp.zeros(1)}), {"a": jnp.zeros(1)}, []
    for _ in range(3):
        updates, state = optimizer.update({"a": jnp.ones(1)}, state, params)
        steps.append(float(updates["a"][0]))
    np.testing.assert_allclose(steps, [-1.0, -0.5, 0.0])


def orthogonalised(matrix: np.ndarray) -> np.ndarray:
    """Muon's Newton-Schulz in numpy, float64: five quintic steps on the matrix over its Frobenius norm."""
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def test_muon_orthogonalises_each_layers_matrix_by_itself():
    rng = np.random.default_rng(0)
    gradients = {key: jnp.asarray(rng.normal(size=spec.shape), jnp.float32) for key, spec in SPECS.items()}
    params = {key: jnp.zeros(spec.shape) for key, spec in SPECS.items()}
    updates = one_update(OptimizerConfig(name="muon", learning_rate=1.0, clip_norm=0.0), params, gradients)
    for name, fan_in in {"q": 128, "o": 128, "k": 128, "up": 128, "down": 256}.items():
        for layer in range(3):
            matrix = np.asarray(gradients[f"layers.{name}"][layer], np.float64).reshape(fan_in, -1)  # [in, out]
            expected = -0.2 * math.sqrt(max(matrix.shape)) * orthogonalised(matrix)
            found = updates[f"layers.{name}"][layer].reshape(fan_in, -1)
            np.testing.assert_allclose(found, expected, atol=2e-4, err_msg=name)


def test_muon_leaves_embedding_head_norms_and_biases_to_adam():
    assert {name for name, spec in SPECS.items() if muon_dimensions(spec)} == MATRICES - {"embed", "head"}
    gradients = {key: jnp.full(spec.shape, 5.0) for key, spec in SPECS.items()}
    params = {key: jnp.zeros(spec.shape) for key, spec in SPECS.items()}
    updates = one_update(OptimizerConfig(name="muon", learning_rate=0.1, clip_norm=0.0), params, gradients)
    np.testing.assert_allclose(updates["embed"], updates["embed"][0, 0])
    assert -0.2 < float(updates["embed"][0, 0]) < -0.1  # Adam's first step with Nesterov momentum


@pytest.mark.parametrize("name", NAMES)
def test_moments_live_where_their_parameters_do(name):
    abstract = abstract_params(SPECS, jnp.float32, rules())
    optimizer = make_optimizer(OptimizerConfig(name=name), 10, SPECS)
    moments = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_opt_state(optimizer, abstract)):
        parameter = abstract.get(getattr(path[-1], "key", ""))
        if parameter is not None and parameter.shape == leaf.shape:
            assert leaf.sharding == parameter.sharding, path
            moments += 1
        else:
            assert leaf.sharding.is_fully_replicated, path
    # Adafactor factors what has two sides of 128 or more; the others keep one or two arrays of the parameter's shape.
    factored = {"embed", "head", "layers.gate", "layers.up", "layers.down"}
    both = {"adamw": 2 * len(SPECS), "adafactor": len(SPECS) - len(factored)}
    assert moments == both.get(name, len(SPECS) + (len(SPECS) - 7 if name == "muon" else 0))


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_the_first_state_is_made_where_the_abstract_state_says_and_stays_there(name):
    optimizer = make_optimizer(OptimizerConfig(name=name, weight_decay=0.1), 10, SPECS)
    state = init_state(init_params(0, SPECS, rules()), optimizer)
    abstract = abstract_state(abstract_params(SPECS, jnp.float32, rules()), optimizer)

    def update(state):
        updates, opt_state = optimizer.update(state.params, state.opt_state, state.params)
        return TrainState(step=state.step + 1, params=optax.apply_updates(state.params, updates), opt_state=opt_state)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    updated = jax.jit(update, out_shardings=shardings, donate_argnums=0)(state)
    assert int(updated.step) == 1

    def check(path, leaf, expected):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (expected.shape, expected.dtype, expected.sharding), path

    jax.tree_util.tree_map_with_path(check, updated, abstract)


def test_moments_in_bfloat16_are_rounded_at_random_and_right_on_average():
    x = jnp.full((200_000,), 1 + 1 / 512, jnp.float32)  # a quarter of a step of bfloat16 above 1
    rounded = round_at_random(x, jax.random.key(0))
    assert rounded.dtype == jnp.bfloat16
    assert set(np.unique(rounded.astype(jnp.float32))) == {1.0, 1 + 1 / 128}
    assert float(jnp.mean(rounded.astype(jnp.float32))) == pytest.approx(1 + 1 / 512, abs=1e-4)
    kept = jnp.asarray([0.0, -2.5, jnp.inf, -jnp.inf], jnp.float32)  # what bfloat16 holds stays as it is
    np.testing.assert_array_equal(round_at_random(kept, jax.random.key(1)).astype(jnp.float32), kept)


@pytest.mark.parametrize(  # not muon, which makes much of any rounding
    "name", ["adamw", *(pytest.param(name, marks=pytest.mark.long) for name in NAMES if name not in ("adamw", "muon"))]
)
def test_small_moments_take_half_and_follow_the_large_ones(name):
    """A second moment falls by a thousandth a step: to the nearest it would stand still."""
    specs = {"layers.up": ParamSpec((2, 128, 128), (None, "width", "mlp"), 0.02)}
    params = {"layers.up": jnp.zeros((2, 128, 128))}
    settings = {"name": name, "learning_rate": 1.0, "beta1": 0.9, "beta2": 0.999, "clip_norm": 0.0}
    updates, states = {}, {}
    for moments in ("float32", "bfloat16"):
        optimizer = make_optimizer(OptimizerConfig(**settings, moments=moments), 10, specs)
        update, states[moments] = jax.jit(optimizer.update), optimizer.init(params)
        for step in range(60):
            gradient = {"layers.up": jnp.full((2, 128, 128), 1.0 if step == 0 else 1e-3)}
            updates[moments], states[moments] = update(gradient, states[moments], params)
    sizes = {kind: sum(x.nbytes for x in jax.tree.leaves(state) if x.ndim) for kind, state in states.items()}
    assert sizes["bfloat16"] == sizes["float32"] // 2
    means = [float(jnp.mean(each["layers.up"])) for each in updates.values()]
    assert means[1] == pytest.approx(means[0], rel=0.01)


def test_small_moments_continue_bit_for_bit():
    params = {"layers.up": jnp.ones((4, 8))}
    specs = {"layers.up": ParamSpec((4, 8), ("width", "mlp"), 0.02)}
    optimizer = make_optimizer(OptimizerConfig(moments="bfloat16"), 10, specs)
    gradient = {"layers.up": jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32)}
    runs = []
    for _ in range(2):
        state = optimizer.init(params)
        for _ in range(3):
            _, state = optimizer.update(gradient, state, params)
        runs.append(jax.tree.leaves(state))
    jax.tree.map(np.testing.assert_array_equal, *runs)
