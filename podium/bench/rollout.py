"""`podium bench rollout`: how fast the engine decodes on this machine, with the floor beside it.

Random weights in a model's shape answer random prompts of drawn lengths; nothing but its length ends a completion, so
that the work is the same whatever the numbers. On TPU and GPU the floor is the roofline: weights and live keys and
values read once per step. A CPU has no such constants: there it is the time of the step's matrix products alone,
measured beside.
"""

import functools
import json
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from podium.accelerators import find_accelerator
from podium.config.schema import Config
from podium.models.architecture import DecoderConfig
from podium.models.decoder import head_weights
from podium.models.linear import activation_dtype, make_linear
from podium.models.logprobs import logits_at
from podium.models.params import LAYERS, TRAIN_AXES, param_specs
from podium.models.presets import find_architecture
from podium.plan.calibration import load_chip
from podium.plan.estimate import decode_phase
from podium.plan.sizes import F32, make_sizes
from podium.plan.workload import SequenceLengths, draw_lengths
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request, RolloutStats, SamplingParams
from podium.sharding import Params, ShardingRules, init_params, make_mesh
from podium.train.generate import as_dtype, rollout_layout, rollout_rules
from podium.train.platform import prepare_platform

GROUP = 8  # completions of a prompt, where the batch divides by it
FULL_STEPS = 32  # of the run in which all slots are busy to the end


def bench(
    *, model: str, batch: int, lengths: str, layout: str, max_new_tokens: int, slots: int | None, as_json: bool
) -> int:
    """Measure and print; the exit status.

    Args:
        model: whose shape, as in a config.
        batch: sequences, in groups of 8 where they divide by it.
        lengths: as `podium plan --lengths`.
        layout: of `rollout.layout`.
        max_new_tokens: the longest completion.
        slots: decoded at once; unset: all.
        as_json: one JSON object instead of a table.

    Raises:
        ValueError: the model, the lengths or the layout cannot be used on this machine.
    """
    prepare_platform()
    mesh, decoder = make_mesh("auto"), find_architecture(model)
    config = rollout_config(model, batch, layout, max_new_tokens, slots or batch, shards=mesh.size)
    drawn = draw_lengths(lengths, config)
    result = measure(config, make_engine(config, decoder, mesh), drawn)
    if as_json:
        print(json.dumps(result))
        return 0
    title = f"{model}, {batch} sequences, lengths {lengths}, {layout}"
    table = Table("", "whole rollout", "all slots busy", title=title)
    for name in ("tokens_per_s", "tokens_per_cpu_s", "ms_per_step", "floor_ms", "slots_busy", "slot_utilisation"):
        table.add_row(name, *(f"{result[when][name]:,.3g}" for when in ("rollout", "full")))
    Console().print(table)
    print(f"floor: {result['floor']}; {result['rollout']['steps']} steps, {result['devices']} {result['device']}")
    return 0


def make_engine(config: Config, decoder: DecoderConfig, mesh: Mesh) -> RolloutEngine:
    """An engine with random weights whose programs are compiled."""
    layout = rollout_layout(config, decoder, mesh)
    rules, dtype = rollout_rules(layout, decoder, mesh), as_dtype(config.rollout.dtype, mesh)
    engine = RolloutEngine(config.rollout, decoder, rules, None, dtype=dtype)
    engine.load(init_params(0, param_specs(decoder), ShardingRules(mesh, TRAIN_AXES)))
    engine.warm_up()
    return engine


def measure(config: Config, engine: RolloutEngine, lengths: SequenceLengths) -> dict[str, Any]:
    """Figures, as JSON has them, of a rollout of these lengths and of one in which all slots are busy to the end."""
    slots = config.rollout.slots
    prompts = np.resize(lengths.prompts, -(-slots // lengths.completions.shape[1]))
    full = SequenceLengths(
        prompts=prompts,
        completions=np.full(
            (len(prompts), lengths.completions.shape[1]), min(FULL_STEPS, config.rollout.max_new_tokens)
        ),
    )
    found: dict[str, Any] = {}
    for name, drawn in (("full", full), ("rollout", lengths)):
        requests = _requests(drawn, engine.decoder.vocab)
        cpu, start = time.process_time(), time.perf_counter()
        _, stats = engine.generate(requests)
        found[name] = _figures(stats, time.perf_counter() - start, time.process_time() - cpu)
        assert not stats.compilations, "programs were compiled in advance"
    context = float(np.mean(np.repeat(lengths.prompts, lengths.completions.shape[1]) + lengths.completions.ravel() / 2))
    floor_ms, floor = _floor(config, engine, context)
    for each in found.values():
        each["floor_ms"] = floor_ms
    mesh = engine.rules.mesh
    return {
        "model": config.model,
        "layout": rollout_layout(config, engine.decoder, mesh).name,
        "device": jax.devices()[0].device_kind,
        "devices": mesh.size,
        "batch": int(lengths.completions.size),
        "slots": slots,
        "dtype": str(engine.dtype),
        "floor": floor,
        **found,
    }


def rollout_config(model: str, batch: int, layout: str, max_new_tokens: int, slots: int, *, shards: int) -> Config:
    """A config that decodes `batch` sequences, in groups of 8 where they divide by it."""
    group = math.gcd(batch, GROUP)
    rollout = {"layout": layout, "slots": slots, "prefill_rows": -(-8 // shards) * shards}
    return Config.model_validate(
        {
            "model": model,
            "tasks": [{"name": "gsm8k"}],
            "prompts_per_step": batch // group,
            "group_size": group,
            "rollout": {"max_prompt_tokens": 256, "max_new_tokens": max_new_tokens, **rollout},
        }
    )


def _requests(lengths: SequenceLengths, vocab: int) -> list[Request]:
    """A request for each completion's length: those of a prompt that end at the same token are one request."""
    rng = np.random.default_rng(0)
    found = []
    for prompt, completions in zip(lengths.prompts, lengths.completions, strict=True):
        tokens = tuple(rng.integers(0, vocab, prompt).tolist())
        for length, count in zip(*np.unique(completions, return_counts=True), strict=True):
            sampling = SamplingParams(max_new_tokens=int(length))
            found.append(Request(prompt=tokens, sampling=sampling, seed=len(found), completions=int(count)))
    return found


def _figures(stats: RolloutStats, wall_s: float, cpu_s: float) -> dict[str, float]:
    return {
        "tokens_per_s": stats.completion_tokens / wall_s,
        "tokens_per_cpu_s": stats.completion_tokens / cpu_s,
        "ms_per_step": 1e3 * stats.decode_s / stats.decode_steps,
        "slots_busy": stats.slots_busy,
        "slot_utilisation": stats.slot_utilisation,
        "steps": stats.decode_steps,
        "tokens": stats.completion_tokens,
        "prefill_tokens": stats.prefill_tokens,
        "prefill_s": stats.prefill_s,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
    }


def _floor(config: Config, engine: RolloutEngine, context: float) -> tuple[float, str]:
    """The least milliseconds of a step of all slots, and how that was found."""
    rules, params, decoder = engine.rules, engine.device.params, engine.decoder
    assert params is not None
    if rules.on_cpu:
        products = jax.jit(functools.partial(_products, rules=rules, dtype=engine.dtype))
        x = jnp.ones((config.rollout.slots, decoder.width), activation_dtype(rules, engine.dtype))
        jax.block_until_ready(products(params, x))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(products(params, x))
            times.append(time.perf_counter() - start)
        return 1e3 * min(times), "the step's matrix products alone, measured"
    accelerator = find_accelerator(f"{jax.devices()[0].device_kind.lower().removeprefix('tpu ')}-{rules.mesh.size}")
    run, peaks = make_sizes(config, decoder, accelerator), load_chip(accelerator.generation).peaks
    form = decode_phase(run, config.rollout.slots, context)
    flops = peaks.flops_f32 if run.rollout_activation == F32 else peaks.flops_bf16
    read = run.rollout_weight_bytes + run.kv_bytes(int(config.rollout.slots // run.rollout_shards * context))
    return 1e3 * max(form.flops / flops, read / peaks.hbm_bandwidth), "roofline: weights, keys and values read once"


def _products(params: Params, x: jax.Array, *, rules: ShardingRules, dtype: jnp.dtype) -> jax.Array:
    """All matrix products of a decode step and nothing else; x is [S, D]."""
    linear, rows = make_linear(rules), x[:, None]
    names = ("q", "k", "v", "o", "gate", "up", "down")
    layers = {name: params[LAYERS + name].astype(dtype) for name in names}

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        q, k, v = (linear("btd,dhq->bthq", x, w[name]) for name in ("q", "k", "v"))
        x = linear("bthq,hqd->btd", q + jnp.mean(k + v), w["o"])
        gate, up = linear("btd,df->btf", x, w["gate"]), linear("btd,df->btf", x, w["up"])
        return linear("btf,fd->btd", gate + up, w["down"]), None

    rows, _ = jax.lax.scan(layer, rows, layers)
    return logits_at(rows[:, 0], head_weights(params, rules, dtype), 1.0)
