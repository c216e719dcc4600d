"""`podium bench update`: time of a config's update on this machine, by the trainer's own compiled program.

Weights and completions are random. Lengths are drawn as `podium plan` draws them, so the two can be compared.
"""

import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from podium.accelerators import recognise
from podium.config.schema import Config
from podium.doctor.benchmarks.rollout import run_lengths
from podium.doctor.benchmarks.timing import product_rate
from podium.hosts.platform import prepare_platform
from podium.models.architecture import DecoderConfig
from podium.models.flops import Work, step_work, update_flops
from podium.models.params import frozen_dtype, param_specs, trained_specs
from podium.models.quantised import make_quantise
from podium.plan.calibration import load_chip
from podium.plan.request.planned_rows import chosen_sizes
from podium.plan.request.workload import SequenceLengths
from podium.run.roles import find_decoder
from podium.run.run_spec import BatchSizes, RunSpec
from podium.sharding import Params, init_params, make_mesh
from podium.train.batches.batch import Batch, make_batch
from podium.train.batches.samples import single_answer
from podium.train.profile import start_trace
from podium.train.setup import make_run_optimizer, run_spec
from podium.train.state import init_state
from podium.train.step import TrainSettings, make_train_step, shard_batch


def bench(config: Config, *, lengths: str, repeats: int, as_json: bool) -> int:
    """Time one optimizer step, print the figures, and return the exit status.

    Raises:
        ValueError: this machine cannot use the model, the mesh or the lengths.
    """
    prepare_platform()
    mesh = make_mesh(config.mesh)
    spec = run_spec(config, find_decoder(config), mesh)
    found = measure(spec, mesh, run_lengths(lengths, spec), repeats)
    if as_json:
        print(json.dumps(found))
    else:
        rate = f"{found['tokens_per_s']:,.0f} real tokens/s"
        reached = f"{found['model_tflop_per_s_per_device']:.3g} of {found['peak_tflop_per_s']:.3g} TFLOP/s per device"
        print(
            f"{found['wall_s']:.3g} s an update ({found['cpu_s']:.3g} CPU s), {rate}; {reached} ({found['peak']} peak):"
            f" MFU {found['mfu']:.1%}"
        )
    return 0


def measure(
    spec: RunSpec, mesh: Mesh, lengths: SequenceLengths, repeats: int, *, trace: Path | None = None
) -> dict[str, object]:
    """Time updates on a step's first minibatch: the fastest of `repeats` after one that compiles.

    `trace`: a folder for jax's trace of one more update, whose seconds are `traced_s` of the result.
    """
    decoder = spec.decoder
    settings, optimizer = TrainSettings(decoder, mesh, spec.update), make_run_optimizer(spec.optimizer, decoder)
    recipe = dataclasses.replace(spec.recipe, kl="none", kl_coef=0.0)  # a KL term takes negligible time
    train_step = make_train_step(settings, recipe, optimizer)
    first = len(np.array_split(lengths.prompts, recipe.minibatches)[0])
    lengths = SequenceLengths(prompts=lengths.prompts[:first], completions=lengths.completions[:first])
    on_host = random_batch(chosen_sizes(lengths, spec.batch, 1), decoder, lengths)
    batch = shard_batch(on_host, settings.computing)
    state = init_state(init_params(0, trained_specs(decoder), settings.stored), optimizer)
    frozen = random_frozen(decoder, settings)
    times = []
    for _ in range(repeats + 1):
        start, cpu = time.perf_counter(), time.process_time()
        state, metrics = train_step(state, batch, frozen)
        jax.block_until_ready(metrics)
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    wall_s, cpu_s = (min(each) for each in zip(*times[1:], strict=True))
    traced: dict[str, object] = {}
    if trace is not None:
        start_trace(trace)
        start = time.perf_counter()
        jax.block_until_ready(train_step(state, batch, frozen)[1])
        traced["traced_s"] = time.perf_counter() - start
        jax.profiler.stop_trace()
    work = step_work(lengths.prompts.tolist(), lengths.completions.tolist(), decoder.windows)
    room = int(on_host.num_micro_batches) * int(np.prod(on_host.tokens.shape[1:]))
    return {
        "model": spec.model,
        "device": jax.devices()[0].device_kind,
        "devices": mesh.size,
        "dtype": str(settings.dtype),
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "completion_tokens": int(on_host.num_tokens),
        "real_tokens": work.tokens,
        "padding_tokens": room - int(np.sum(np.asarray(on_host.segments) > 0)),
        "micro_batches": int(on_host.num_micro_batches),
        "rows": on_host.tokens.shape[1],
        "row_tokens": on_host.tokens.shape[2],
        "tokens_per_s": work.tokens / wall_s,
        **use_of_peak(decoder, work, wall_s, settings),
        **traced,
    }


def random_frozen(decoder: DecoderConfig, settings: TrainSettings) -> Params:
    """Random frozen weights in their stored format; empty without LoRA."""
    if decoder.lora is None:
        return {}
    frozen: Params = {}
    for name, spec in param_specs(dataclasses.replace(decoder, lora=None)).items():
        (value,) = init_params(0, {name: spec}, settings.stored).values()
        whole = frozen_dtype(name, decoder) == "bfloat16"
        frozen |= {name: value.astype(jnp.bfloat16)} if whole else make_quantise(name, decoder, settings.stored)(value)
    return frozen


def use_of_peak(decoder: DecoderConfig, work: Work, seconds: float, settings: TrainSettings) -> dict[str, object]:
    """The operations that the model needs, and the share of the devices' peak rate that they reached.

    The peak is the published one, or that of a large matrix product where none is published.
    """
    devices, dtype = settings.mesh.size, settings.dtype
    known = recognise(jax.devices()[0].device_kind, devices)
    if known is not None:
        peaks = load_chip(known.generation).peaks
        peak = peaks.flops_f32 if dtype == jnp.float32 else peaks.flops_bf16
    else:
        peak = product_rate(dtype)
    flops = update_flops(decoder, work)
    return {
        "model_tflop": flops / 1e12,
        "model_tflop_per_s_per_device": flops / seconds / devices / 1e12,
        "peak_tflop_per_s": peak / 1e12,
        "peak": "measured" if known is None else "published",
        "mfu": flops / seconds / devices / peak,
    }


def random_batch(sizes: BatchSizes, decoder: DecoderConfig, lengths: SequenceLengths) -> Batch[np.ndarray]:
    """Make a batch of random tokens of these lengths, packed as the trainer packs them, in numpy arrays."""
    random = np.random.default_rng(0)
    samples = []
    for group, (size, own) in enumerate(zip(lengths.prompts, lengths.completions, strict=True)):
        prompt = tuple(random.integers(0, decoder.vocab, size).tolist())
        for length in own:
            tokens = random.integers(0, decoder.vocab, length).astype(np.int32)
            logprobs = np.full(length, -np.log(decoder.vocab), np.float32)
            advantage, weight = float(random.standard_normal()), 1.0 / float(np.sum(lengths.completions))
            samples.append(
                single_answer(
                    group=group,
                    prompt=prompt,
                    tokens=tokens,
                    sampled_logprobs=logprobs,
                    advantage=advantage,
                    weight=weight,
                )
            )
    return make_batch(samples, sizes)[0]
