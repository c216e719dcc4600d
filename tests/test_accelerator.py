"""On an accelerator the engine and the update compute what they do on the CPU; `benches/gpu.sh` runs this there.

Without one both sides are the CPU: it shows that what a lent machine is asked still runs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import tiny

from podium.algorithms.recipes import RECIPES
from podium.config.optimizer import OptimizerConfig
from podium.config.schema import Config, RolloutConfig
from podium.doctor.benchmarks.update import random_batch
from podium.models.params import GATHERED_AXES, ROLLOUT_AXES, TRAIN_AXES, param_specs
from podium.plan.request.workload import SequenceLengths
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request, SamplingParams
from podium.sharding import ShardingRules, init_params, make_mesh
from podium.train.optimizer.transforms import make_optimizer
from podium.train.setup import run_spec
from podium.train.state import init_state
from podium.train.step import TrainSettings, make_train_step, shard_batch

DECODER = tiny(vocab=512, width=64, layers=3, head_dim=16, mlp_width=96, max_positions=256, rope_theta=1e5)
CONFIG = Config.model_validate(
    {
        "model": "demo",
        "tasks": [{"name": "arithmetic"}],
        "prompts_per_step": 4,
        "group_size": 4,
        "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 16},
        "train": {"row_tokens": 64, "rows_per_device": 2},
    }
)
LENGTHS = SequenceLengths(prompts=np.full(4, 12), completions=np.random.default_rng(0).integers(4, 17, (4, 4)))
TOLERANCE = 1e-4
pytestmark = pytest.mark.long


def mesh_of(platform: str | None):
    return make_mesh("auto", jax.devices(platform)[:1])


def completions(platform: str | None, dtype=jnp.float32):
    config = RolloutConfig(max_prompt_tokens=32, max_new_tokens=16, slots=8, prefill_rows=4)
    mesh = mesh_of(platform)
    engine = RolloutEngine(Device(config, DECODER, ShardingRules(mesh, ROLLOUT_AXES), dtype=jnp.dtype(dtype)), None)
    params = init_params(0, param_specs(DECODER), ShardingRules(mesh, TRAIN_AXES))
    engine.load({name: value if "norm" in name else 5 * value for name, value in params.items()})
    prompts = np.random.default_rng(0).integers(0, DECODER.vocab, (6, 20)).tolist()
    sampling = SamplingParams(max_new_tokens=16)
    completions, _ = engine.generate(
        [Request(prompt=tuple(prompt), sampling=sampling, seed=n, completions=3) for n, prompt in enumerate(prompts)]
    )
    return completions


def updated(platform: str | None):
    mesh, specs = mesh_of(platform), param_specs(DECODER)
    optimizer = make_optimizer(OptimizerConfig(name="sgd", learning_rate=1.0, clip_norm=0.0), 10, specs)
    spec = run_spec(CONFIG, DECODER, mesh)
    settings = TrainSettings(
        DECODER, mesh, dataclasses.replace(spec.update, dtype="float32", head_chunk_tokens=32, tokens_per_gather=0)
    )
    state = init_state(init_params(0, specs, ShardingRules(mesh, TRAIN_AXES)), optimizer)
    batch = shard_batch(random_batch(spec.batch, DECODER, LENGTHS), ShardingRules(mesh, GATHERED_AXES))
    state, metrics = make_train_step(settings, RECIPES["grpo"](), optimizer)(state, batch)
    return {name: np.asarray(value) for name, value in {**state.params, **metrics}.items()}


def test_accelerator_draws_the_tokens_that_the_cpu_draws():
    with jax.default_matmul_precision("highest"):
        ours, theirs = completions(None), completions("cpu")
    for group, expected in zip(ours, theirs, strict=True):
        for completion, other in zip(group, expected, strict=True):
            np.testing.assert_array_equal(completion.tokens, other.tokens)
            np.testing.assert_allclose(completion.sampled_logprobs, other.sampled_logprobs, atol=TOLERANCE)


def test_update_on_the_accelerator_is_that_on_the_cpu():
    with jax.default_matmul_precision("highest"):
        ours, theirs = updated(None), updated("cpu")
    for name, expected in theirs.items():
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(ours[name], expected, atol=TOLERANCE * scale, err_msg=name)
