"""What a micro-batch costs by itself, besides its tokens: weights are gathered, and gradients are summed. No jax.

By published peaks of the device, without the shares of them that programs reach, which nearly cancel. Every host of a
run computes the same.
"""

from podium.chips import chip_constants
from podium.config.mesh import MeshSizes
from podium.models.architecture import DecoderConfig
from podium.models.flops import trained_elements
from podium.models.params import count, param_specs, trained_specs
from podium.run.machine import Machine
from podium.run.run_spec import UpdateSpec

NUMBERS = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""
FLOPS_PER_BYTE = {"cpu": 16.0, "gpu": 250.0, "tpu": 560.0}
"""Peak operations per byte of memory traffic of devices that `podium.chips` does not know. AMD's EPYC 9654: 96 cores x
2.4 GHz x 32 float32 operations over 461 GB/s; an H100 has 295 and an A100 153 in bfloat16; a v6e has 560."""


def micro_batch_cost(decoder: DecoderConfig, update: UpdateSpec, machine: Machine, mesh: MeshSizes) -> float:
    """Time of what a micro-batch does whatever its size, in the time of a token's products on one device.

    It reads the weights for the forward and for the backward pass, after gathering them from the devices that share
    them, and adds its gradients, after summing them over devices, to those of the micro-batches before.
    """
    weights, trained = count(param_specs(decoder)) / mesh["tp"], count(trained_specs(decoder)) / mesh["tp"]
    shards = mesh["fsdp"] * mesh["sp"]
    recomputed = update.remat in ("layer", "offload")
    backward = 2 if decoder.lora is None else 1
    products = (1 + recomputed + backward) * decoder.active
    products += 0 if decoder.lora is None else trained_elements(decoder)
    token = 2 * products / (mesh["tp"] * mesh["sp"])  # operations
    passes = 1 if update.remat == "none" else 2
    memory = 2 * NUMBERS[update.dtype] * weights + 2 * NUMBERS["float32"] * trained / shards  # bytes
    links = passes * NUMBERS[update.dtype] * weights + NUMBERS[update.reduce_dtype] * trained
    links *= (shards - 1) / shards
    generation = None if machine.accelerator is None else machine.accelerator.generation
    known = None if generation is None else chip_constants(generation)
    if known is None:
        return memory * FLOPS_PER_BYTE[machine.platform] / token
    flops = known["flops_f32" if update.dtype == "float32" else "flops_bf16"]
    seconds = memory / known["hbm_bandwidth"]
    seconds += links / (known["links"] * known["link_bandwidth"]) if links else 0.0
    return seconds * flops / token
