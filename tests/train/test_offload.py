"""Moments in the host's memory: the same numbers, wherever a run begins, and a program that fetches them late."""

import gzip
import importlib.util
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_runs import DECODER, make_config, rules_of

from podium.accelerators import find_accelerator
from podium.config.optimizer import OptimizerConfig
from podium.config.schema import CheckpointConfig
from podium.hlo.hlo_text import parse
from podium.models.params import param_specs
from podium.plan.compiled.compile import compile_phases
from podium.plan.compiled.compile_worker import Job
from podium.sharding import abstract_params, init_params
from podium.train.checkpoints.checkpoint import Checkpointer
from podium.train.optimizer.offload import HOST_MEMORY, apply_gradients, check_host_memory
from podium.train.optimizer.transforms import make_optimizer
from podium.train.state import TrainState, abstract_state, init_state

SPECS = {name: param_specs(DECODER)[name] for name in ("embed", "layers.gate", "layers.mlp_norm")}
HOST_SPACE = 5  # XLA's number of the host's memory
ROUNDING = 3e-7  # of a number; its own loop and one among others round differently
RULES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw in bfloat16": {"moments": "bfloat16"},
    "muon": {"name": "muon"},
    "adafactor": {"name": "adafactor"},
    "sgd": {"name": "sgd"},
    "lion without clipping": {"name": "lion", "clip_norm": 0.0},
    "a rule of the user's": {"name": f"{__name__}:over_all"},
}

SHORTLY = ("adamw in bfloat16", "adafactor")
"""Those of the short suite: moments in another format, and moments of another shape."""


def over_all(config: OptimizerConfig) -> optax.GradientTransformation:
    """A rule that looks at all parameters at once."""
    return optax.chain(optax.trace(config.beta1), optax.normalize_by_update_norm())


def optimizer_of(rule: dict[str, Any], *, offload: bool) -> optax.GradientTransformation:
    return make_optimizer(OptimizerConfig(**{"weight_decay": 0.1, **rule}), 10, SPECS, offload=offload)


def kinds(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf.sharding.memory_kind for path, leaf in leaves}


def updated(rule: dict[str, Any], *, offload: bool, streamed: bool) -> TrainState:
    """The state after two updates on random gradients."""
    rules = rules_of("fsdp:2,tp:2", 4)
    optimizer = optimizer_of(rule, offload=offload)
    state = init_state(init_params(0, SPECS, rules), optimizer)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.opt_state))

    def update(params, opt_state, grads):
        return apply_gradients(optimizer, grads, opt_state, params, streamed=streamed)[:2]

    step = jax.jit(update, donate_argnums=(0, 1), out_shardings=shardings)
    params, opt_state = state.params, state.opt_state
    for seed in (1, 2):
        params, opt_state = step(params, opt_state, init_params(seed, SPECS, rules))
    return TrainState(step=state.step, params=params, opt_state=opt_state)


def assert_bits(found: Any, expected: Any) -> None:
    def check(path, a, b):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path

    jax.tree_util.tree_map_with_path(check, found, expected)


@pytest.mark.parametrize(
    "rule", [rule if rule in SHORTLY else pytest.param(rule, marks=pytest.mark.long) for rule in RULES]
)
def test_every_rule_updates_as_without_on_one_memory_and_as_one_parameter_after_the_other(rule):
    plain = updated(RULES[rule], offload=False, streamed=False)
    moved = updated(RULES[rule], offload=True, streamed=False)
    assert_bits(moved, plain)
    streamed = updated(RULES[rule], offload=True, streamed=True)
    assert kinds(streamed) == kinds(moved)
    for found, expected in zip(jax.tree.leaves(streamed), jax.tree.leaves(plain), strict=True):
        steps = 2**-8 if found.dtype == jnp.bfloat16 else ROUNDING
        np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=steps, atol=ROUNDING)


@pytest.mark.parametrize("rule", RULES)
def test_what_has_a_parameters_shape_waits_in_the_hosts_memory_and_nothing_else(rule):
    optimizer = optimizer_of(RULES[rule], offload=True)
    state = abstract_state(abstract_params(SPECS, jnp.float32, rules_of()), optimizer)
    leaves = jax.tree_util.tree_leaves_with_path(state.opt_state)
    shapes = {name: spec.shape for name, spec in SPECS.items()}
    moments = [path for path, leaf in leaves if shapes.get(getattr(path[-1], "key", "")) == leaf.shape]
    waiting = [path for path, leaf in leaves if leaf.sharding.memory_kind == HOST_MEMORY]
    assert waiting == moments != []
    assert HOST_MEMORY not in kinds(state.params).values()


@pytest.mark.parametrize("saved", [False, True])
def test_a_state_that_was_saved_either_way_is_restored_either_way(tmp_path, saved):
    state = updated({}, offload=saved, streamed=False)
    checkpointer = Checkpointer(tmp_path / "checkpoints", CheckpointConfig())
    checkpointer.save(1, state, {}, score=None, wait=True)
    for offload in (False, True):
        wanted = abstract_state(abstract_params(SPECS, jnp.float32, rules_of()), optimizer_of({}, offload=offload))
        restored, _ = checkpointer.restore(1, wanted)
        assert_bits(restored, state)
        assert kinds(restored) == kinds(wanted)
    checkpointer.close()


def test_a_device_without_such_memory_is_an_error_that_says_what_to_set():
    device = SimpleNamespace(device_kind="METAL", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    mesh: Any = SimpleNamespace(devices=np.array([device], object))
    with pytest.raises(
        ValueError, match=r"train.offload_optimizer true needs .* METAL; set train.offload_optimizer to"
    ):
        check_host_memory(mesh)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
def test_a_tpus_program_fetches_a_parameters_moments_in_a_loop_of_its_own(tmp_path):
    """Outside of loops the compiler begins with all of them, before the backward pass."""
    train = {"offload_optimizer": True, "remat": "layer", "head_chunk_tokens": 16}
    config = make_config(train=train, mesh="auto")
    job = Job(
        phase="update", config=config, decoder=DECODER, accelerator=find_accelerator("v6e-1"), programs=tmp_path / "p"
    )
    compile_phases([job], folder=tmp_path)
    (path,) = (tmp_path / "p").glob("*.hlo.gz")
    module = parse(gzip.decompress(path.read_bytes()).decode())
    fetching = [
        computation.name
        for computation in module.computations.values()
        for each in computation.instructions.values()
        if each.opcode == "copy-start" and each.shapes[1].space == HOST_SPACE
    ]
    assert module.entry.name not in fetching
    assert len(fetching) == 2 * len(set(fetching)) == 2 * len(param_specs(DECODER))
