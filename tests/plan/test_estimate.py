import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from estimated import CPU, QWEN_3B, QWEN_7B, SMALL, config, decoder, phase
from mixed_decoder import MIXED

from podium.accelerators import Accelerator, find_accelerator
from podium.algorithms.recipe_options import make_recipe
from podium.config.optimizer import OptimizerConfig
from podium.config.schema import Config
from podium.models.architecture import DecoderConfig
from podium.models.params import ROLLOUT_AXES, TRAIN_AXES, param_specs
from podium.plan.closed_form.estimate import estimate, far_too_large, first_flops
from podium.plan.closed_form.resident_memory import residents
from podium.plan.planner import make_plan
from podium.plan.request.phase_sizes import Planned, local_count, offloaded_bytes, optimizer_count
from podium.plan.request.step_calls import step_calls
from podium.plan.request.workload import simulate_rollout
from podium.rollout.programs import (
    abstract_chunk,
    abstract_engine_cache,
    abstract_slots,
    make_decode,
    make_extend,
    make_sync,
)
from podium.run.roles import find_decoder
from podium.sharding import ShardingRules, abstract_params, make_mesh, param_shardings
from podium.train.batches.batch import Batch
from podium.train.optimizer.offload import HOST_MEMORY
from podium.train.optimizer.transforms import abstract_opt_state, make_optimizer
from podium.train.state import abstract_state
from podium.train.step import TrainSettings, make_score, make_train_step


def test_a_device_holds_its_part_of_what_is_split():
    table = param_specs(SMALL)
    assert local_count(table["layers.q"], {"width": 8, "heads": 1}) == 2 * 2 * 4 * 4
    assert local_count(table["layers.attention_norm"], {"width": 8}) == 2 * 16
    assert local_count(table["layers.gate"], {"width": 2, "mlp": 4}) == 2 * 8 * 6


@pytest.mark.parametrize("mesh", ["fsdp:8", "fsdp:4,tp:2", "dp:2,fsdp:2,tp:2"])
def test_local_counts_are_those_of_the_sharding_rules(mesh):
    run = Planned.of(config(mesh=mesh), CPU, SMALL).sizes
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
    shards = Planned.of(config(mesh=mesh), CPU, model).sizes.train_parts
    assert optimizer_count(model, name, shards) == held


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd", "adafactor"])
def test_what_waits_in_the_hosts_memory_is_counted_as_the_trainer_keeps_it(name, moments):
    model = decoder(width=256, mlp_width=384, vocab=512, qkv_bias=True)
    optimizer = OptimizerConfig(name=name, moments=moments)
    made = make_optimizer(optimizer, 10, param_specs(model), offload=True)
    params = abstract_params(param_specs(model), jnp.float32, ShardingRules(make_mesh("fsdp:8"), TRAIN_AXES))
    leaves = jax.tree.leaves(abstract_opt_state(made, params))
    sizes = [
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in leaves
        if x.sharding.memory_kind == HOST_MEMORY
    ]
    train = {"optimizer": optimizer.model_dump(), "rows_per_device": 4}
    with_it, without = (
        Planned.of(config(train=train | {"offload_optimizer": each}), find_accelerator("v6e-8"), model).sizes
        for each in (True, False)
    )
    assert offloaded_bytes(with_it) == sum(sizes) > 0
    assert offloaded_bytes(without) == 0
    assert phase(without, "update").total - phase(with_it, "update").total == sum(sizes)


def test_operations_of_a_small_model_by_hand():
    run = Planned.of(config(mesh="fsdp:8"), CPU, SMALL).sizes
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
        run, dtype = Planned.of(config, CPU, model).sizes, jnp.dtype(jnp.float32)
        settings = TrainSettings(
            model, self.mesh, dataclasses.replace(run.update, dtype="float32", tokens_per_gather=0)
        )
        recipe = make_recipe(config.algorithm, group_size=config.group_size, prompts_per_step=config.prompts_per_step)
        optimizer = make_optimizer(config.train.optimizer, 10, specs)
        params = abstract_params(specs, dtype, train)
        rows = settings.computing.sharding(None, "batch", None)
        shape = (run.spec.batch.max_micro_batches, run.rows * run.batch_shards, run.row_tokens)
        ints, floats = (jax.ShapeDtypeStruct(shape, kind, sharding=rows) for kind in (jnp.int32, jnp.float32))
        counts = (jax.ShapeDtypeStruct((), kind, sharding=settings.computing.sharding()) for kind in "if")
        names = ("tokens", "targets", "positions", "segments", "prompts")
        fields: Any = dict.fromkeys(names, ints)
        fields |= dict.fromkeys(("mask", "weights", "advantages", "sampled_logprobs"), floats)
        fields |= zip(("num_micro_batches", "num_tokens"), counts, strict=True)
        batch = Batch(**fields, scores={}, ages=None)
        held = abstract_params(specs, dtype, rollout)
        cache = abstract_engine_cache(config.rollout, model, rollout, dtype)
        slots = abstract_slots(config.rollout, model, config.rollout.slots, rollout, penalised=False)
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
    run = Planned.of(settings, CPU, model).sizes
    first = first_flops(run, settings.rollout.slots) if name == "decode" else 0
    assert 8 * (phase(run, name).flops + first) == Programs(settings, model).flops(name)


def test_what_programs_take_and_give_is_what_the_estimate_says():
    settings = config(mesh="fsdp:8", train={"rows_per_device": 1})
    model = decoder(width=128, mlp_width=256, vocab=512)
    run, programs = Planned.of(settings, CPU, model).sizes, Programs(settings, model)
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


def test_layouts_of_the_rollout_hold_and_send_what_they_say():
    lengths, v6e = {"max_prompt_tokens": 512, "max_new_tokens": 1024}, find_accelerator("v6e-16")
    runs = {
        layout: Planned.of(config(mesh=mesh, rollout={**lengths, "layout": layout}), v6e, QWEN_3B).sizes
        for layout, mesh in (("replicated", "auto"), ("legacy", "auto"), ("maxtext", "host_local"))
    }
    whole = 2 * sum(math.prod(spec.shape) for spec in param_specs(QWEN_3B).values())
    held = {layout: residents(run, "sync")["rollout_weights"] / whole for layout, run in runs.items()}
    assert held == pytest.approx({"replicated": 1.0, "legacy": 1 / 16, "maxtext": 1 / 4}, rel=2e-3)  # norms are whole
    sent = {layout: phase(run, "decode").ici_bytes for layout, run in runs.items()}
    assert sent["replicated"] == 0
    assert sent["legacy"] == pytest.approx((36 * 100.7e6 + 622e6) * 15 / 16, rel=1e-3)  # as measured
    assert 0 < sent["maxtext"] < sent["legacy"] / 20


def test_a_reference_is_held_and_scored_with():
    plain, anchored = (Planned.of(config(algorithm=kl), CPU, SMALL).sizes for kl in ({}, {"kl": "k3", "kl_coef": 1e-3}))
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
    added = sum(residents(anchored, "sync").values()) - sum(residents(plain, "sync").values())
    assert added == residents(plain, "sync")["parameters"]


@pytest.mark.parametrize(("flags", "size"), [({"avx2"}, 4), ({"avx2", "avx512_bf16"}, 2)])
def test_auto_is_the_faster_format_of_this_cpu_and_bfloat16_elsewhere(flags, size, monkeypatch):
    monkeypatch.setattr("podium.run.machine.cpu_flags", lambda: flags)
    on_cpu, on_gpu = (Planned.of(config(), machine, SMALL).sizes for machine in (CPU, find_accelerator("h100-8")))
    assert (on_cpu.activation, on_cpu.rollout_activation) == (size, size)
    assert (on_gpu.activation, on_gpu.rollout_activation) == (2, 2)
    assert on_gpu.platform == "gpu"


def test_a_mesh_that_does_not_fit_the_machine_is_an_error():
    with pytest.raises(ValueError, match="mesh 'fsdp:16' needs 16 devices"):
        Planned.of(config(mesh="fsdp:16"), CPU, SMALL)


def test_a_model_far_too_large_is_refused_by_name():
    message = far_too_large(Planned.of(config(), find_accelerator("v6e-1"), QWEN_7B).sizes)
    assert message is not None
    assert message.startswith("update needs about ")
    for part in ("v6e-1 has 31.2", "gradients", "--fit`", "--force"):
        assert part in message


def test_what_may_fit_is_not_refused():
    assert far_too_large(Planned.of(config(), find_accelerator("v6e-8"), QWEN_3B).sizes) is None
    needed = max(each.total for each in estimate(Planned.of(config(), CPU, SMALL).sizes))
    just_enough, too_little = (
        Accelerator(name="cpu", generation="cpu", devices=8, hosts=1, hbm_bytes=int(needed / factor) + 1)
        for factor in (1.5, 1.6)
    )
    assert far_too_large(Planned.of(config(), just_enough, SMALL).sizes) is None
    assert far_too_large(Planned.of(config(), too_little, SMALL).sizes) is not None


@pytest.mark.parametrize("mesh", ["fsdp:8", "dp:8"])
def test_the_cache_is_counted_as_each_kind_of_layer_keeps_it(mesh):
    """Pages of whole sequences, rings of a window, and states: as the engine allocates them."""
    settings = config(mesh=mesh, rollout={"max_prompt_tokens": 60, "max_new_tokens": 20, "page_tokens": 4})
    run = Planned.of(settings, CPU, MIXED).sizes
    rules = ShardingRules(make_mesh(mesh), ROLLOUT_AXES)
    cache = jax.tree.leaves(abstract_engine_cache(run.rollout, MIXED, rules, jnp.dtype(run.spec.rollout.dtype)))
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in cache)
    assert run.cache_bytes == held
    assert len(cache) == 3 * 2 + 1 + 1  # keys and values of three places, a state, and hidden states


def test_a_step_reads_no_more_than_a_window_reaches_and_each_state_twice():
    settings = config(rollout={"max_prompt_tokens": 60, "max_new_tokens": 20, "page_tokens": 4})
    run = Planned.of(settings, CPU, MIXED).sizes
    near, far = 3 * 2 * 2 * 8, 2 * 2 * 2 * 8  # keys and values of a token in layers with a window of 3, and without
    read = 2 * (near * 8 + far * 40) * run.rollout_activation  # of two sequences; a window touches two pages of 4
    assert run.read_bytes(2, 40) == read + 2 * 2 * (2 * 32 * 4)
    assert run.cached_pairs(40) == 2 * 4 * 8 * (3 * 8 + 2 * 40)
    # a prefill's ring takes a page at once, whose tokens see three pages
    assert run.cached_pairs(40, 40) == 2 * 4 * 8 * (3 * 12 + 2 * 40)


@pytest.mark.parametrize(("base", "number"), [("bfloat16", 2), ("int8", 1)])
def test_a_teacher_stays_beside_the_trainer_and_is_a_phase_of_its_own(base, number):
    """Qwen3-8B teaches Qwen3-1.7B on 8 chips: its weights by hand, and its operations."""
    settings = {"model": "Qwen/Qwen3-1.7B", "algorithm": {"recipe": "distill"}, "train": {"head": "chunked"}}
    accelerator = find_accelerator("v6e-8")
    plain = config(**settings)
    student = find_decoder(plain)
    taught = config(**settings, teacher={"model": "Qwen/Qwen3-8B", "base": base})
    alone, run = Planned.of(plain, accelerator, student).sizes, Planned.of(taught, accelerator, student).sizes
    added = residents(run, "sync")["teacher_weights"]
    layers, ends = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288), 2 * 151936 * 4096
    scales = 36 * 4 * (4096 + 2 * 1024 + 2 * 12288 + 2 * 4096 / 8) * (base == "int8")  # those of the width are split
    assert added == pytest.approx((number * layers + 2 * ends) / 8 + scales, rel=1e-3)
    assert sum(residents(run, "sync").values()) - sum(residents(alone, "sync").values()) == added
    assert [each.name for each in estimate(run)][4:7] == ["score", "teacher", "update"]
    teacher, score = phase(run, "teacher"), phase(run, "score")
    assert teacher.parts["teacher_weights"] == score.parts["teacher_weights"] == added
    weights = 2 * run.tokens * (layers + ends / 2)
    assert weights < teacher.flops < 1.05 * weights
    assert phase(run, "update").flops == phase(alone, "update").flops


def test_a_teachers_logits_are_computed_in_the_update_if_it_learns_the_whole_distribution():
    """By hand: once in the forward pass and once recomputed; the batch holds hidden states of 4,096 numbers a token."""
    settings = {"model": "Qwen/Qwen3-1.7B", "algorithm": {"recipe": "distill"}, "train": {"head": "chunked"}}
    student, accelerator = find_decoder(config(**settings)), find_accelerator("v6e-8")
    sampled, full = (
        Planned.of(config(**settings, teacher={"model": "Qwen/Qwen3-8B", "loss": loss}), accelerator, student).sizes
        for loss in ("sampled", "full")
    )
    logits = 2 * sampled.tokens * 151936 * 4096
    assert phase(full, "update").flops - phase(sampled, "update").flops == 2 * logits
    assert phase(sampled, "teacher").flops - phase(full, "teacher").flops == logits
    batches = [phase(each, "update").parts["batch"] for each in (sampled, full)]
    assert batches[1] - batches[0] == sampled.spec.batch.max_micro_batches * sampled.tokens * 2 * 4096
    assert [each.name for each in estimate(full)][4:] == ["teacher", "update", "checkpoint"]


def test_a_teacher_with_prompts_of_its_own_scores_longer_rows_beside_the_policy_s_batch():
    """Rows of 8 + 8 tokens, and of 40 + 8; the policy's batch waits beside the teacher's."""
    settings = {"model": "Qwen/Qwen3-1.7B", "algorithm": {"recipe": "distill"}, "train": {"head": "chunked"}}
    own = {"prompt": "privileged", "template": "{question} {answer}", "max_prompt_tokens": 40}
    student, accelerator = find_decoder(config(**settings)), find_accelerator("v6e-8")
    same, told = (
        Planned.of(config(**settings, teacher={"model": "Qwen/Qwen3-8B", **more}), accelerator, student).sizes
        for more in ({}, own)
    )
    rows = told.of(told.spec.roles["teacher"])
    assert rows.row_tokens == same.row_tokens + 32
    share = rows.row_tokens / same.row_tokens
    assert 0.9 * share < phase(told, "teacher").flops / phase(same, "teacher").flops < 1.2 * share
    batches = [phase(each, "teacher").parts["batch"] for each in (same, told)]
    assert batches[1] == pytest.approx(batches[0] * (1 + share), rel=1e-6)
    assert phase(told, "update").flops == phase(same, "update").flops


def test_a_plan_counts_the_rows_of_a_teacher_with_longer_prompts():
    settings = {"model": "Qwen/Qwen3-1.7B", "algorithm": {"recipe": "distill"}}
    own = {"prompt": "privileged", "template": "{question} {answer}", "max_prompt_tokens": 40}
    calls = []
    for more in ({}, own):
        made = config(**settings, teacher={"model": "Qwen/Qwen3-8B", **more})
        found = make_plan(Planned.of(made, find_accelerator("v6e-8")), by="closed_form")
        calls.append({each.name: each for each in found.phases})
    assert calls[0]["update"].seconds == calls[1]["update"].seconds
    assert 1.5 < calls[1]["teacher"].flops / calls[0]["teacher"].flops < 6


def test_a_critic_stays_beside_the_trainer_and_has_a_forward_pass_and_an_update():
    """Qwen3-0.6B values Qwen3-1.7B's tokens on 8 chips: its float32 weights and two moments by hand, without a head."""
    settings = {"model": "Qwen/Qwen3-1.7B", "train": {"head": "chunked"}}
    accelerator = find_accelerator("v6e-8")
    plain, valued = (
        config(**settings),
        config(**settings, algorithm={"recipe": "ppo"}, critic={"model": "Qwen/Qwen3-0.6B", "updates": 2}),
    )
    student = find_decoder(plain)
    alone, run = Planned.of(plain, accelerator, student).sizes, Planned.of(valued, accelerator, student).sizes
    layers, embedding = 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072), 151936 * 1024
    added = {name: residents(run, "sync")[name] for name in ("critic_weights", "critic_optimizer")}
    assert added["critic_weights"] == pytest.approx(4 * (layers + embedding) / 8, rel=1e-3)
    assert added["critic_optimizer"] == 2 * added["critic_weights"]
    assert sum(residents(run, "sync").values()) - sum(residents(alone, "sync").values()) == sum(added.values())
    assert [each.name for each in estimate(run)][4:7] == ["values", "critic", "update"]
    values, critic, update = (phase(run, name) for name in ("values", "critic", "update"))
    assert 2 * run.tokens * layers < values.flops < 1.4 * 2 * run.tokens * layers
    assert 3 * values.flops < critic.flops < 4.3 * values.flops
    for each in (values, critic, update):
        assert added.items() <= each.parts.items()
        assert each.parts["parameters"] == residents(run, "sync")["parameters"]
    assert critic.parts.get("logits", 0) <= 4 * run.tokens, "one number per token"
    assert update.flops == phase(alone, "update").flops


def test_a_reward_model_stays_beside_the_trainer_and_scores_whole_conversations_in_its_own_rows(tmp_path):
    """A model of 4 layers of width 1024 grades Qwen3-1.7B on 8 chips: weights, operations and calls by hand."""
    raw = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    settings: dict[str, Any] = {"model": "Qwen/Qwen3-1.7B", "train": {"head": "chunked", "rows_per_device": 2}}
    settings["rollout"] = {"max_prompt_tokens": 64, "max_new_tokens": 448}
    judged = settings | {
        "tasks": [{"name": "arithmetic", "rewards": {"helpful": 1.0}}],
        "reward_models": [{"name": "helpful", "model": str(tmp_path)}],
    }
    accelerator, student = find_accelerator("v6e-8"), find_decoder(config(**settings))
    alone, run = (Planned.of(config(**each), accelerator, student).sizes for each in (settings, judged))
    layers, embedding = 4 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072), 151936 * 1024
    added = residents(run, "sync")["reward_weights"]
    assert added == pytest.approx(2 * (layers + embedding) / 8, rel=1e-3)
    assert sum(residents(run, "sync").values()) - sum(residents(alone, "sync").values()) == added
    assert [each.name for each in estimate(run)][4:6] == ["reward", "update"]
    reward, decode = phase(run, "reward"), phase(run, "decode")
    assert reward.parts["reward_weights"] == decode.parts["reward_weights"] == added
    assert reward.parts["kv_cache"] == decode.parts["kv_cache"]
    tokens = 2 * 640  # of two rows on a device, each a quarter longer than 512
    assert 2 * tokens * layers < reward.flops < 1.3 * 2 * tokens * layers
    drawn = simulate_rollout(run.draw_lengths("gsm8k"), run.rollout, shards=run.rollout_shards)
    (call,) = [each for each in step_calls(run, drawn, micro_batches=1) if each.phase == "reward"]
    read = drawn.completion_tokens + 8 * drawn.prompt_tokens
    assert (call.program, call.calls) == ("reward:helpful", math.ceil(read / (16 * 640)))
    assert phase(run, "update").flops == phase(alone, "update").flops


def test_gradients_of_several_micro_batches_are_written_and_added_to_their_sum():
    """Of each parameter 16 bytes a micro-batch, and 8 if there is only one; the rest of both updates is the same."""
    both = []
    for prompts in (1, 16):
        made = config(prompts_per_step=prompts, train={"rows_per_device": 8, "packing": "none"})
        run = Planned.of(made, CPU, SMALL).sizes
        both.append((run.spec.batch.max_micro_batches, phase(run, "update"), run.own_count))
    (one, alone, own), (several, added, _) = both
    assert one == 1 < several
    assert added.hbm_bytes - alone.hbm_bytes == 2 * 4 * own
    assert added.passes - alone.passes == 3 * 4 * own
