"""Compiles a decode program for a GPU that is not there, and prints what one of its steps moves, as JSON.

    python -m benches.children.decode_bytes MACHINE FORM SLOTS CONTEXT SETTING...       (benches.gpu_decode calls it)

FORM is `stacks` for a loop over stacked weights, as the trainer has them, and attention in XLA; `layers` for an array
for each matrix of a layer; or `joined` for what the engine does, with matrices of one input side by side.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator

import jax.numpy as jnp

import podium.rollout.cache
import podium.rollout.engine_weights
import podium.rollout.programs
from benches.record import ROOT
from podium.accelerators import Accelerator, find_accelerator
from podium.config.attention_blocks import cache_block_pages
from podium.config.mesh import mesh_text
from podium.config.sizes import steps_at_once
from podium.hlo.cost import ProgramCost, roofline
from podium.hlo.hlo_text import Computation, Instruction, Module, parse
from podium.hlo.liveness import computations_run
from podium.hlo.traffic import fused, products, updates
from podium.models.architecture import DecoderConfig, rollout_decoder, unrolled
from podium.models.params import param_specs
from podium.plan.calibration import calibrated, load_chip
from podium.plan.closed_form.least_bytes import decode_bytes
from podium.plan.compiled.compile_worker import looped_work
from podium.plan.compiled.phases import phase_programs
from podium.plan.request.phase_sizes import RunSizes
from podium.plan.request.topology import topology_devices
from podium.rollout.engine_weights import abstract_weights
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.run.roles import find_decoder
from podium.run.run_spec import RunSpec
from podium.sampling.sampler import rollout_rules
from podium.settings import load_settings
from podium.sharding import AbstractParams, make_mesh

CONFIG = ROOT / "configs" / "gsm8k_qwen25_3b.yaml"
SMALLEST_MATRIX = 2**18  # elements; biases of heads have fewer, and the dimensions of some activations
MOVING = ("fusion", "copy", "convert", "concatenate", "transpose", "pad")
STEP = "while/body"  # in the sources of what a step does


def main(machine: str, form: str, slots: str, context: str, *settings: str) -> None:
    if form == "stacks":
        podium.rollout.engine_weights.engine_decoder = lambda decoder, rules: rollout_decoder(decoder)
        podium.rollout.programs.engine_decoder = lambda decoder, rules: rollout_decoder(decoder)
        podium.rollout.programs.engine_options = lambda platform, kind: {}
        podium.rollout.cache.gpu_kernel_decodes = lambda page_tokens, head_dim: False
    if form == "layers":
        podium.rollout.engine_weights.engine_decoder = lambda decoder, rules: unrolled(rollout_decoder(decoder))
        podium.rollout.programs.engine_decoder = lambda decoder, rules: unrolled(rollout_decoder(decoder))
    accelerator = find_accelerator(machine)
    config = load_settings([str(CONFIG)], [f"rollout.slots={slots}", *settings]).config
    decoder = find_decoder(config)
    spec = resolve(config, decoder, Machine.planned(accelerator))
    mesh = make_mesh(mesh_text(spec.mesh), topology_devices(accelerator))
    rules = rollout_rules(spec.rollout.layout, decoder, mesh)
    start = time.process_time()
    compiled = phase_programs(spec, mesh)[f"decode:{slots}"].lower().compile()
    cpu_s, text, memory = time.process_time() - start, compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    module = parse(text)
    weights = abstract_weights(decoder, rules, jnp.dtype(spec.rollout.dtype))
    rows = int(slots) // rules.num_shards("batch")
    found = {
        **step_cost(module, spec, int(context), accelerator),
        "floor_bytes": decode_bytes(RunSizes(spec=spec), rows, int(context)),
        "weights_written": weights_written(module, weights, decoder),
        "largest_written": largest_written(module),
        "temporary_bytes": memory.temp_size_in_bytes,
        "compile_cpu_s": round(cpu_s, 1),
    }
    print(json.dumps(found))


def step_cost(module: Module, spec: RunSpec, context: int, accelerator: Accelerator) -> dict[str, float]:
    """What a device does in one step of the program's loop: bytes moved, kernels, and milliseconds.

    Milliseconds by the roofline, and with the shares of it that plans assume.
    """
    page = spec.rollout.settings.page_tokens
    blocks = math.ceil(context / (page * cache_block_pages(page, "gpu")))
    at_once = steps_at_once(spec.rollout.settings.refill_steps, RunSizes(spec=spec).rollout_shards)
    works = looped_work(module, spec.mesh, blocks, skipped=["sample"])
    step = ProgramCost(tuple(dataclasses.replace(each.work, times=each.each / at_once) for each in works if each.each))
    chip = load_chip(accelerator.generation)
    line = roofline(step, chip.peaks, links=chip.links)
    seconds, _ = calibrated([(1, line)], chip, "decode")
    return {
        "step_bytes": step.hbm_bytes,
        "step_ms": 1e3 * sum(line.parts.values()),
        "planned_ms": 1e3 * seconds.value,
        "kernels": sum(work.times / (blocks if work.of_block else 1) for work in step.works),
        "bandwidth": chip.peaks.hbm_bandwidth,
    }


def weights_written(module: Module, weights: AbstractParams, decoder: DecoderConfig) -> int:
    """Number of instructions, products apart, that write an array with the dimensions of a matrix, stored or single."""
    stored = [value.shape[1:] if name.startswith("layers") else value.shape for name, value in weights.items()]
    single = [spec.shape[1:] for name, spec in param_specs(decoder).items() if name.startswith("layers")]
    shapes = {_dimensions(shape) for shape in (*stored, *single)}
    matrices = {shape for shape in shapes if math.prod(shape) >= SMALLEST_MATRIX}
    found = 0
    for each, computation in _instructions(module):
        makes = each.opcode in MOVING and any(_dimensions(shape.dims) in matrices for shape in each.shapes)
        found += makes and not any(products(*part) for part in fused(module, each, computation))
    return found


def largest_written(module: Module) -> int:
    """Bytes of the largest array that one instruction of a step writes in full, without the head's product.

    An activation, a product's partial sums, or what sampling makes of the logits.
    """
    largest = 0
    for each, _ in _instructions(module):
        if each.opcode in MOVING and STEP in each.source and "logits" not in each.source:
            inner = module.computations[each.callees["calls"][0]] if each.opcode == "fusion" else None
            in_place = updates(inner, module) if inner else [None] * len(each.shapes)
            written = [shape.size for shape, part in zip(each.shapes, in_place, strict=True) if part is None]
            largest = max([largest, *written])
    return largest


def _instructions(module: Module) -> Iterator[tuple[Instruction, Computation]]:
    """Those that a device carries out one by one, with their computations; not those inside a fusion."""
    for title in dict.fromkeys(computations_run(module, module.entry.name)):
        computation = module.computations[title]
        yield from ((each, computation) for each in computation.instructions.values())


def _dimensions(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(each for each in shape if each > 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
