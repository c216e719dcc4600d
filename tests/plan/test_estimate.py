import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from podium.accelerators import GIB, Accelerator, find_accelerator
from podium.algorithms.recipes import make_recipe
from podium.config.optimizer import OptimizerConfig
from podium.config.schema import Config
from podium.models.architecture import DecoderConfig
from podium.models.params import ROLLOUT_AXES, TRAIN_AXES, param_specs
from podium.models.presets import find_architecture
from podium.plan.estimate import PhaseEstimate, estimate, far_too_large, first_flops, residents, score_phase
from podium.plan.sizes import RunSizes, local_count, make_sizes, optimizer_count
from podium.rollout.programs import (
    abstract_chunk,
    abstract_engine_cache,
    abstract_slots,
    make_decode,
    make_extend,
    make_sync,
)
from podium.sharding import ShardingRules, abstract_params, make_mesh, param_shardings
from podium.train.batch import Batch
from podium.train.optimizer import abstract_opt_state, make_optimizer
from podium.train.state import abstract_state
from podium.train.step import TrainSettings, make_score, make_train_step

MIB = 2**20
CPU = Accelerator(name="cpu", generation="cpu", devices=8, hosts=1, hbm_bytes=GIB)


def decoder(**changed: Any) -> DecoderConfig:
    numbers: dict[str, Any] = {
        "model_type": "qwen2",
        "vocab": 32,
        "width": 16,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "mlp_width": 24,
        "max_positions": 4096,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "norm_eps": 1e-6,
        "tied": True,
        "qkv_bias": False,
        "qk_norm": False,
    }
    return DecoderConfig(**{**numbers, **changed})


SMALL = decoder()
QWEN_3B = decoder(
    vocab=151936, width=2048, layers=36, heads=16, kv_heads=2, head_dim=128, mlp_width=11008, qkv_bias=True
)
QWEN_7B = decoder(
    vocab=152064, width=3584, layers=28, heads=28, kv_heads=4, head_dim=128, mlp_width=18944, qkv_bias=True, tied=False
)
QWEN3_8B = decoder(
    vocab=151936, width=4096, layers=36, heads=32, kv_heads=8, head_dim=128, mlp_width=12288, qk_norm=True, tied=False
)
SMOLLM2 = decoder(vocab=49152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp_width=1536)


def config(**changed: Any) -> Config:
    settings: dict[str, Any] = {
        "model": "none",
        "tasks": [{"name": "arithmetic"}],
        "prompts_per_step": 2,
        "group_size": 8,
        "rollout": {
            "max_prompt_tokens": 8,
            "max_new_tokens": 8,
            "slots": 16,
            "prefill_rows": 8,
            "refill_steps": 2,
            "page_tokens": 16,
        },
        "train": {"rows_per_device": 2, "head_chunk_tokens": 16},
    }
    settings |= changed
    return Config.model_validate({**settings, "rollout": {"layout": "replicated", **settings["rollout"]}})


def phase(run: RunSizes, name: str) -> PhaseEstimate:
    return {each.name: each for each in (*estimate(run), score_phase(run))}[name]


def test_a_device_holds_its_part_of_what_is_split():
    table = param_specs(SMALL)
    assert local_count(table["layers.q"], {"width": 8, "heads": 1}) == 2 * 2 * 4 * 4
    assert local_count(table["layers.attention_norm"], {"width": 8}) == 2 * 16
    assert local_count(table["layers.gate"], {"width": 2, "mlp": 4}) == 2 * 8 * 6


@pytest.mark.parametrize("mesh", ["fsdp:8", "fsdp:4,tp:2", "dp:2,fsdp:2,tp:2"])
def test_local_counts_are_those_of_the_sharding_rules(mesh):
    run = make_sizes(config(mesh=mesh), SMALL, CPU)
    specs = param_specs(SMALL)
    shardings = param_shardings(specs, ShardingRules(make_mesh(mesh), TRAIN_AXES))
    own = {name: local_count(weight, run.train_parts) for name, weight in param_specs(SMALL).items()}
    assert own == {name: math.prod(shardings[name].shard_shape(spec.shape)) for name, spec in specs.items()}


@pytest.mark.parametrize("mesh", ["fsdp:8", "fsdp:4,tp:2"])
@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd", "adafactor"])
def test_an_optimizers_state_is_counted_as_optax_makes_it(name, mesh):
    model = decoder(width=256, mlp_width=384, vocab=512, qkv_bias=True)
    specs = param_specs(model)
    params = abstract_params(specs, jnp.dtype(jnp.float32), ShardingRules(make_mesh(mesh), TRAIN_AXES))
    state = abstract_opt_state(make_optimizer(OptimizerConfig(name=name), 10, specs), params)
    muons_coefficients = (3,)
    floats = [x for x in jax.tree.leaves(state) if x.dtype == jnp.float32 and x.shape != muons_coefficients]
    held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in floats)
    shards = make_sizes(config(mesh=mesh), model, CPU).train_parts
    assert optimizer_count(model, name, shards) == held


def test_operations_of_a_small_model_by_hand():
    run = make_sizes(config(mesh="fsdp:8"), SMALL, CPU)
    attention_weights = 16 * (4 + 2 + 2) * 4 + 4 * 4 * 16
    layer = attention_weights + 3 * 16 * 24
    tokens = 2 * 16  # of a device
    scores = 4 * tokens * 16 * (4 * 4) * 2  # both products, two layers
    forward = 2 * tokens * (2 * layer + 32 * 16) + scores
    assert phase(run, "score").flops == forward
    again = scores // 2  # the backward pass makes the blocks of scores once more
    assert phase(run, "update").flops == 4 * forward + again - 2 * tokens * (16 * 24) * 2
    assert phase(run, "prefill").flops == 2 * 8 * 2 * layer + 4 * 8 * 16 * 16 * 2  # a page of 16, and no logits
    assert phase(run, "decode").flops == 2 * (2 * (2 * layer + 32 * 16) + 4 * 16 * 16 * 2)


class Programs:
    """The trainer's and the engine's own programs for a run on 8 CPU devices, with abstract arguments."""

    def __init__(self, config: Config, model: DecoderConfig) -> None:
        self.mesh, specs = make_mesh(config.mesh), param_specs(model)
        train, rollout = (ShardingRules(self.mesh, axes) for axes in (TRAIN_AXES, ROLLOUT_AXES))
        run, dtype = make_sizes(config, model, CPU), jnp.dtype(jnp.float32)
        settings = TrainSettings(
            decoder=model,
            mesh=self.mesh,
            dtype=dtype,
            temperature=1.0,
            remat=config.train.remat,
            head_chunk_tokens=config.train.head_chunk_tokens,
            attention=run.attention,
        )
        recipe = make_recipe(config.algorithm, group_size=config.group_size, prompts_per_step=config.prompts_per_step)
        optimizer = make_optimizer(config.train.optimizer, 10, specs)
        params = abstract_params(specs, dtype, train)
        rows = settings.computing.sharding(None, "batch", None)
        shape = (run.max_micro_batches, run.rows * run.dp * run.fsdp, run.row_tokens)
        ints, floats = (jax.ShapeDtypeStruct(shape, kind, sharding=rows) for kind in (jnp.int32, jnp.float32))
        counts = (jax.ShapeDtypeStruct((), kind, sharding=settings.computing.sharding()) for kind in "if")
        names = ("tokens", "targets", "positions", "segments", "prompts")
        fields: Any = dict.fromkeys(names, ints)
        fields |= dict.fromkeys(("mask", "weights", "advantages", "sampled_logprobs"), floats)
        fields |= zip(("num_micro_batches", "num_tokens"), counts, strict=True)
        batch = Batch(**fields, old_logprobs=None, reference_logprobs=None, ages=None)
        held = abstract_params(specs, dtype, rollout)
        cache = abstract_engine_cache(config.rollout, model, rollout, dtype)
        slots = abstract_slots(config.rollout, config.rollout.slots, rollout)
        chunk = abstract_chunk(config.rollout, max(run.buckets), rollout)
        self.calls: dict[str, tuple[Any, tuple]] = {
            "update": (make_train_step(settings, recipe, optimizer), (abstract_state(params, optimizer), batch)),
            "score": (make_score(settings), (params, batch)),
            "sync": (make_sync(model, rollout, dtype), (params,)),
            "prefill": (make_extend(model, rollout, dtype), (held, cache, chunk)),
            "decode": (make_decode(model, rollout, dtype, steps=1), (held, cache, *slots)),
        }

    def flops(self, name: str) -> int:
        """Operations of all devices, as written: one round of loops whose count is not known."""
        function, arguments = self.calls[name]
        return dot_flops(function.trace(*arguments).jaxpr.jaxpr)

    def memory(self, name: str) -> Any:
        """What the compiler says of the memory of one device."""
        function, arguments = self.calls[name]
        return function.lower(*arguments).compile().memory_analysis()


def dot_flops(jaxpr: Any) -> int:
    """Operations of the matrix products in a jaxpr."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * math.prod(out) * math.prod(left[dim] for dim in contracted)
        inner = [each for value in equation.params.values() for each in jax.tree.leaves(value, is_leaf=is_jaxpr)]
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        times *= equation.params["mesh"].size if equation.primitive.name == "shard_map" else 1
        total += times * sum(dot_flops(getattr(each, "jaxpr", each)) for each in inner if is_jaxpr(each))
    return total


def is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


@pytest.mark.parametrize(
    ("remat", "attention"),
    [("layer", "auto"), ("products", "auto"), ("none", "auto"), ("offload", "auto"), ("layer", "reference")],
)
@pytest.mark.parametrize("name", ["update", "score", "prefill", "decode"])
def test_operations_are_those_of_the_programs_as_written(name, remat, attention):
    train = {"rows_per_device": 2, "head_chunk_tokens": 16, "remat": remat, "attention": attention}
    settings = config(mesh="fsdp:8", train=train)
    model = decoder(layers=3, tied=False, qkv_bias=True)
    run = make_sizes(settings, model, CPU)
    first = first_flops(run, settings.rollout.slots) if name == "decode" else 0
    assert 8 * (phase(run, name).flops + first) == Programs(settings, model).flops(name)


def test_what_programs_take_and_give_is_what_the_estimate_says():
    settings = config(mesh="fsdp:8", train={"rows_per_device": 1})
    model = decoder(width=128, mlp_width=256, vocab=512)
    run, programs = make_sizes(settings, model, CPU), Programs(settings, model)
    small = 2000  # bytes: counts, and what slots and prompts are described with
    update, decode, sync = (programs.memory(name) for name in ("update", "decode", "sync"))
    parts = phase(run, "update").parts
    state = parts["parameters"] + parts["optimizer"]
    assert 0 <= update.argument_size_in_bytes - state - parts["batch"] < small
    assert 0 <= update.alias_size_in_bytes - state < small
    parts = phase(run, "decode").parts
    assert 0 <= decode.argument_size_in_bytes - parts["rollout_weights"] - parts["kv_cache"] < small
    assert 0 <= sync.output_size_in_bytes - parts["rollout_weights"] < small
    assert sync.argument_size_in_bytes == parts["parameters"]


# Peak MiB of programs compiled for v6e-8 by libtpu 0.0.42.1 (jax 0.10.2, xla_tpu_no_crash_on_oom), arguments included,
# with the reference attention.
HALF_B_4_LAYERS = decoder(
    vocab=151936, width=896, layers=4, heads=14, kv_heads=2, head_dim=64, mlp_width=4864, qkv_bias=True
)
WIDE = decoder(vocab=8192, width=1024, layers=4, heads=8, kv_heads=2, head_dim=128, mlp_width=4096, qkv_bias=True)
COMPILED = [
    ("3b", QWEN_3B, 512, 1024, 4, 128, 16, {"update": 10681, "score": 3420}),
    ("0.5b", HALF_B_4_LAYERS, 256, 256, 4, 64, 8, {"update": 1611, "score": 1000}),
    ("rows", WIDE, 512, 512, 8, 256, 64, {"update": 883, "score": 321}),
    ("long", WIDE, 1024, 1024, 2, 256, 64, {"update": 745, "score": 310}),
]
BEFORE = {"reduce_dtype": "bfloat16"}
"""What was not a choice when these programs were compiled: they have bfloat16 sums."""
ELSEWHERE = {
    "update": (),
    "score": ("optimizer",),
}
"""Parts that stay in memory beside a program and are no argument of it."""


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case[0])
def test_memory_is_near_what_the_tpus_compiler_said(case):
    _, model, prompt, completion, rows, slots, prefill_rows, peaks = case
    settings = config(
        rollout={
            "max_prompt_tokens": prompt, "max_new_tokens": completion, "slots": slots, "prefill_rows": prefill_rows
        },
        train={"rows_per_device": rows, "attention": "reference", **BEFORE},
    )  # fmt: skip
    run = make_sizes(settings, model, find_accelerator("v6e-8"))
    estimated = {
        name: sum(size for part, size in phase(run, name).parts.items() if part not in ELSEWHERE[name]) / MIB
        for name in peaks
    }
    assert estimated == pytest.approx(peaks, rel=0.12)


@pytest.mark.parametrize(
    ("layers", "train", "peak", "flops"),
    [
        (4, {"rows_per_device": 16}, 6909, 2.069e14),
        (36, {"rows_per_device": 64, "layer_chunk_tokens": 10240, "remat": "offload"}, 13824, 4.187e15),
    ],
    ids=["layer", "offload"],
)
def test_an_update_without_scores_takes_what_the_tpus_compiler_said(layers, train, peak, flops):
    lengths = {"max_prompt_tokens": 512, "max_new_tokens": 1024, "slots": 128}
    settings = config(rollout=lengths, train={"row_tokens": 2560, **BEFORE, **train}, prompts_per_step=256)
    run = make_sizes(settings, dataclasses.replace(QWEN_3B, layers=layers), find_accelerator("v6e-8"))
    assert phase(run, "update").total / MIB == pytest.approx(peak, rel=0.08)
    assert phase(run, "update").flops == pytest.approx(flops, rel=1e-3)


# GiB of updates at the limit as compilers assigned them (jax 0.10.2, libtpu 0.0.42.1, XLA for CUDA 12): machine, model,
# mesh, rows of a device and their tokens, remat, attention, optimizer, tokens of a chunk of the head.
LIMIT = [
    ("v6e-4", "Qwen/Qwen2.5-3B-Instruct", "fsdp:2,tp:2", 32, 2304, "layer", "auto", "adamw", 512, 29.51),
    ("v4-16", "Qwen/Qwen2.5-7B-Instruct", "fsdp:8,tp:1", 16, 2176, "layer", "auto", "adamw", 4096, 32.26),
    ("v6e-16", "Qwen/Qwen3-0.6B", "fsdp:4,tp:4", 40, 2304, "products", "auto", "adamw", 4096, 25.39),
    ("v6e-8", "Qwen/Qwen2.5-7B-Instruct", "fsdp:8,tp:1", 19, 1280, "layer", "reference", "sgd", 4096, 30.93),
    ("h100-8", "Qwen/Qwen3-8B", "fsdp:8,tp:1", 19, 2304, "layer", "reference", "lion", 4096, 70.03),
    ("l40s-8", "Qwen/Qwen3-1.7B", "fsdp:2,tp:4", 24, 2176, "products", "auto", "sgd", 1024, 28.13),
    ("h100-8", "Qwen/Qwen3-4B", "fsdp:8,tp:1", 40, 4608, "layer", "blocks", "sgd", 4096, 64.95),
    ("h100-8", "Qwen/Qwen3-8B", "fsdp:4,tp:2", 6, 1152, "none", "auto", "lion", 1024, 62.09),
    ("a100-80-8", "meta-llama/Llama-3.2-1B-Instruct", "fsdp:8,tp:1", 16, 1280, "none", "auto", "lion", 1024, 58.24),
]


@pytest.mark.parametrize("case", LIMIT, ids=lambda case: f"{case[0]} {case[5]} {case[6]}")
def test_an_update_at_the_limit_is_near_what_the_compiler_assigned(case, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    machine, model, mesh, rows, tokens, remat, attention, optimizer, chunk, gib = case
    train = {"rows_per_device": rows, "remat": remat, "attention": attention, "head_chunk_tokens": chunk}
    settings = config(
        mesh=mesh,
        prompts_per_step=256,
        rollout={"max_prompt_tokens": 128, "max_new_tokens": tokens - 128, "slots": 128, "prefill_rows": 128},
        train=train | BEFORE | {"optimizer": {"name": optimizer}},
    )
    run = make_sizes(settings, find_architecture(model), find_accelerator(machine))
    assert phase(run, "update").total / GIB == pytest.approx(gib, rel=0.05)


def test_the_3b_runs_operations_and_transfers_are_near_what_the_tpus_compiler_said():
    lengths = {"max_prompt_tokens": 512, "max_new_tokens": 1024}
    settings = config(rollout=lengths, train={"rows_per_device": 4, "attention": "reference", **BEFORE})
    run = make_sizes(settings, QWEN_3B, find_accelerator("v6e-8"))
    update, score = phase(run, "update"), phase(run, "score")
    assert (update.flops, score.flops) == (pytest.approx(1.542e14, rel=1e-3), pytest.approx(4.209e13, rel=1e-3))
    assert (update.ici_bytes, score.ici_bytes) == (pytest.approx(1.716e10, rel=0.1), pytest.approx(5.4e9, rel=0.01))
    assert (update.hbm_bytes, score.hbm_bytes) == (pytest.approx(5.04e11, rel=0.1), pytest.approx(7.31e10, rel=0.1))
    assert phase(run, "sync").ici_bytes == pytest.approx(5.4e9, rel=0.01)


def test_layouts_of_the_rollout_hold_and_send_what_they_say():
    lengths, v6e = {"max_prompt_tokens": 512, "max_new_tokens": 1024}, find_accelerator("v6e-16")
    runs = {
        layout: make_sizes(config(mesh=mesh, rollout={**lengths, "layout": layout}), QWEN_3B, v6e)
        for layout, mesh in (("replicated", "auto"), ("legacy", "auto"), ("maxtext", "host_local"))
    }
    whole = 2 * sum(math.prod(spec.shape) for spec in param_specs(QWEN_3B).values())
    held = {layout: residents(run)["rollout_weights"] / whole for layout, run in runs.items()}
    assert held == pytest.approx({"replicated": 1.0, "legacy": 1 / 16, "maxtext": 1 / 4}, rel=2e-3)  # norms are whole
    sent = {layout: phase(run, "decode").ici_bytes for layout, run in runs.items()}
    assert sent["replicated"] == 0
    assert sent["legacy"] == pytest.approx((36 * 100.7e6 + 622e6) * 15 / 16, rel=1e-3)  # as measured
    assert 0 < sent["maxtext"] < sent["legacy"] / 20


def test_a_reference_is_held_and_scored_with():
    plain, anchored = (make_sizes(config(algorithm=kl), SMALL, CPU) for kl in ({}, {"kl": "k3", "kl_coef": 1e-3}))
    assert [each.name for each in estimate(plain)] == ["sync", "prefill", "copy", "decode", "update", "checkpoint"]
    assert [each.name for each in estimate(anchored)] == [
        "sync",
        "prefill",
        "copy",
        "decode",
        "score",
        "update",
        "checkpoint",
    ]
    added = sum(residents(anchored).values()) - sum(residents(plain).values())
    assert added == residents(plain)["parameters"]


@pytest.mark.parametrize(("flags", "size"), [({"avx2"}, 4), ({"avx2", "avx512_bf16"}, 2)])
def test_auto_is_the_faster_format_of_this_cpu_and_bfloat16_elsewhere(flags, size, monkeypatch):
    monkeypatch.setattr("podium.plan.sizes.cpu_flags", lambda: flags)
    on_cpu, on_gpu = (make_sizes(config(), SMALL, machine) for machine in (CPU, find_accelerator("h100-8")))
    assert (on_cpu.activation, on_cpu.rollout_activation) == (size, size)
    assert (on_gpu.activation, on_gpu.rollout_activation) == (2, 2)
    assert on_gpu.platform == "gpu"


def test_a_mesh_that_does_not_fit_the_machine_is_an_error():
    with pytest.raises(ValueError, match="mesh 'fsdp:16' needs 16 devices"):
        make_sizes(config(mesh="fsdp:16"), SMALL, CPU)


def test_a_model_far_too_large_is_refused_by_name():
    message = far_too_large(config(), QWEN_7B, find_accelerator("v6e-1"))
    assert message is not None
    assert message.startswith("update needs about ")
    for part in ("v6e-1 has 31.2", "gradients", "`podium plan`", "--force"):
        assert part in message


def test_what_may_fit_is_not_refused():
    assert far_too_large(config(), QWEN_3B, find_accelerator("v6e-8")) is None
    needed = max(each.total for each in estimate(make_sizes(config(), SMALL, CPU)))
    just_enough, too_little = (
        Accelerator(name="cpu", generation="cpu", devices=8, hosts=1, hbm_bytes=int(needed / factor) + 1)
        for factor in (1.5, 1.6)
    )
    assert far_too_large(config(), SMALL, just_enough) is None
    assert far_too_large(config(), SMALL, too_little) is not None
