"""`podium bench rollout`: how fast the engine decodes on this machine, compared with the floor, a step's minimum time.

A model with random weights completes random prompts of drawn lengths. A completion ends only at its length, so every
run does the same work. On TPU and GPU the floor is the roofline: a step reads weights and live keys and values once. No
bandwidth is published for a CPU: its floor is the measured time of a step's matrix products alone.
"""

import dataclasses
import functools
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from podium.compile_ahead import CompileAhead, threads_for
from podium.config.schema import Config, RolloutConfig
from podium.doctor.benchmarks.timing import fastest_s
from podium.hosts.platform import prepare_platform
from podium.models.decoder import head_weights
from podium.models.linear import activation_dtype, make_linear
from podium.models.logprobs import logits_at
from podium.models.params import LAYERS, TRAIN_AXES, param_specs
from podium.models.presets import find_architecture
from podium.plan.calibration import load_chip
from podium.plan.closed_form.estimate import decode_phase
from podium.plan.request.phase_sizes import F32, RunSizes
from podium.plan.request.workload import SequenceLengths, draw_lengths
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request, RolloutStats, SamplingParams
from podium.run.run_spec import RunSpec
from podium.sampling.sampler import rollout_rules
from podium.sharding import Params, ShardingRules, init_params, make_mesh
from podium.train.setup import run_spec

GROUP = 8  # completions per prompt, if the batch divides by it
FULL_STEPS = 32  # decode steps of the rollout in which all slots stay busy


def bench(
    *, model: str, batch: int, lengths: str, layout: str, max_new_tokens: int, slots: int | None, as_json: bool
) -> int:
    """Measure a rollout, print the figures, and return the exit status.

    Args:
        model: model whose shape is used, named as in a config.
        batch: number of sequences; they form groups of 8 if 8 divides it.
        lengths: lengths of the completions, as for `podium plan --lengths`.
        layout: value of `rollout.layout`.
        max_new_tokens: length of the longest completion.
        slots: sequences decoded at once; None for all.
        as_json: whether to print one JSON object instead of a table.

    Raises:
        ValueError: this machine cannot use the model, the lengths or the layout.
    """
    prepare_platform()
    mesh, decoder = make_mesh("auto"), find_architecture(model)
    config = rollout_config(model, batch, layout, max_new_tokens, slots or batch, shards=mesh.size)
    spec = run_spec(config, decoder, mesh)
    result = measure(spec, make_engine(spec, mesh), run_lengths(lengths, spec))
    if as_json:
        print(json.dumps(dataclasses.asdict(result)))
        return 0
    title = f"{model}, {batch} sequences, lengths {lengths}, {layout}"
    table = Table("", "whole rollout", "all slots busy", title=title)
    for name in ("tokens_per_s", "tokens_per_cpu_s", "ms_per_step", "floor_ms", "slots_busy", "slot_utilisation"):
        table.add_row(name, f"{result.rollout[name]:,.3g}", f"{result.full[name]:,.3g}")
    Console().print(table)
    print(f"floor: {result.floor}; {result.rollout['steps']} steps, {result.devices} {result.device}")
    return 0


def make_engine(spec: RunSpec, mesh: Mesh) -> RolloutEngine:
    """Make an engine with random weights and compile its programs."""
    decoder, rollout = spec.decoder, spec.rollout
    rules = rollout_rules(rollout.layout, decoder, mesh)
    device = Device(rollout.settings, decoder, rules, dtype=jnp.dtype(rollout.dtype))
    engine = RolloutEngine(device, None)
    engine.load(init_params(0, param_specs(decoder), ShardingRules(mesh, TRAIN_AXES)))
    with CompileAhead(threads_for(rules.platform)) as ahead:
        device.compile_ahead(ahead)
        engine.warm_up()
    return engine


def device_of(engine: RolloutEngine) -> Device:
    """The device side of an engine that runs programs."""
    assert isinstance(engine.device, Device), "the device is not simulated"
    return engine.device


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutBench:
    """The measurements; each field is a key of the JSON object that is printed."""

    model: str
    layout: str
    device: str
    devices: int
    batch: int  # sequences
    slots: int
    dtype: str
    floor: str  # where the floor comes from
    full: dict[str, float]  # figures of the rollout in which all slots stay busy
    rollout: dict[str, float]  # figures of the rollout of the drawn lengths


def measure(spec: RunSpec, engine: RolloutEngine, lengths: SequenceLengths) -> RolloutBench:
    """Measure a rollout of these lengths, and one in which all slots stay busy."""
    rollout, vocab, device = spec.rollout.settings, spec.decoder.vocab, device_of(engine)
    found: dict[str, dict[str, float]] = {}
    for name, requests in (
        ("full", full_requests(rollout, lengths, vocab)),
        ("rollout", _requests(lengths, vocab)),
    ):
        cpu, start = time.process_time(), time.perf_counter()
        _, stats = engine.generate(requests)
        found[name] = _figures(stats, time.perf_counter() - start, time.process_time() - cpu)
        assert not stats.calls.compilations, "programs were compiled in advance"
    context = float(np.mean(np.repeat(lengths.prompts, lengths.completions.shape[1]) + lengths.completions.ravel() / 2))
    floor_ms, floor = _floor(spec, device, context)
    for each in found.values():
        each["floor_ms"] = floor_ms
    mesh = device.form.rules.mesh
    return RolloutBench(
        model=spec.model,
        layout=spec.rollout.layout.name,
        device=jax.devices()[0].device_kind,
        devices=mesh.size,
        batch=int(lengths.completions.size),
        slots=rollout.slots,
        dtype=str(device.form.dtype),
        floor=floor,
        full=found["full"],
        rollout=found["rollout"],
    )


def rollout_config(model: str, batch: int, layout: str, max_new_tokens: int, slots: int, *, shards: int) -> Config:
    """Make the config of a rollout of `batch` sequences, in groups of 8 if 8 divides the batch."""
    group = math.gcd(batch, GROUP)
    return Config.model_validate(
        {
            "model": model,
            "tasks": [{"name": "gsm8k"}],
            "prompts_per_step": batch // group,
            "group_size": group,
            "rollout": {
                "max_prompt_tokens": 256,
                "max_new_tokens": max_new_tokens,
                "layout": layout,
                "slots": slots,
                "prefill_rows": -(-8 // shards) * shards,
            },
        }
    )


def run_lengths(source: str, spec: RunSpec) -> SequenceLengths:
    """Lengths of a step's prompts and completions, as `podium plan` draws them."""
    rollout = spec.rollout.settings
    return draw_lengths(source, rollout, prompts=spec.prompts_per_step, completions=spec.group_size)


def full_requests(rollout: RolloutConfig, lengths: SequenceLengths, vocab: int) -> list[Request]:
    """Make the requests of a rollout in which all slots stay busy, with prompts of these lengths."""
    group = lengths.completions.shape[1]
    prompts = np.resize(lengths.prompts, -(-rollout.slots // group))
    steps = min(FULL_STEPS, rollout.max_new_tokens)
    return _requests(SequenceLengths(prompts=prompts, completions=np.full((len(prompts), group), steps)), vocab)


def _requests(lengths: SequenceLengths, vocab: int) -> list[Request]:
    """Make the requests; completions of one prompt that have the same length share a request."""
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
        "ms_per_step": 1e3 * stats.calls.decode_s / stats.calls.decode_steps,
        "slots_busy": stats.slots_busy,
        "slot_utilisation": stats.slot_utilisation,
        "steps": stats.calls.decode_steps,
        "tokens": stats.completion_tokens,
        "prefill_tokens": stats.scheduled.prefill_tokens,
        "prefill_s": stats.calls.prefill_s,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
    }


def _floor(spec: RunSpec, device: Device, context: float) -> tuple[float, str]:
    """The minimum time in milliseconds of a decode step of all slots, and the source of this figure."""
    rules, slots, params = device.form.rules, spec.rollout.settings.slots, device.params
    assert params is not None
    if rules.on_cpu:
        products = jax.jit(functools.partial(_products, rules=rules, dtype=device.form.dtype))
        x = jnp.ones((slots, spec.decoder.width), activation_dtype(rules, device.form.dtype))
        return 1e3 * fastest_s(products, params, x), "the step's matrix products alone, measured"
    accelerator = spec.machine.accelerator
    if accelerator is None:
        return 0.0, f"none: podium plan has no target for {jax.devices()[0].device_kind}"
    run, peaks = RunSizes(spec=spec), load_chip(accelerator.generation).peaks
    form = decode_phase(run, slots, context)
    flops = peaks.flops_f32 if run.rollout_activation == F32 else peaks.flops_bf16
    read = run.rollout_weight_bytes + run.kv_bytes(int(slots // run.rollout_shards * context))
    return 1e3 * max(form.flops / flops, read / peaks.hbm_bandwidth), "roofline: weights, keys and values read once"


def _products(params: Params, x: jax.Array, *, rules: ShardingRules, dtype: jnp.dtype) -> jax.Array:
    """Compute all matrix products of a decode step and nothing else; x is [S, D]."""
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
