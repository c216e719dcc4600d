"""Head and loss, compiled for a TPU that is not there: `python -m benches.children.head_step TPU KIND CHUNK T D V`."""

import json
import sys
from typing import cast

import jax
import jax.numpy as jnp

from podium.accelerators import find_accelerator
from podium.compiler import compiler_options
from podium.config.head import HeadKind, fast_memory, head_tile
from podium.hlo.cost import roofline, walk
from podium.hlo.hlo_text import parse
from podium.models.blocks.weights import Weight
from podium.models.logprobs import HeadSettings, token_logprobs
from podium.models.params import GATHERED_AXES, TRAIN_AXES
from podium.plan.calibration import load_chip
from podium.plan.request.topology import topology_devices
from podium.sharding import ShardingRules, make_mesh


def main(machine: str, kind: str, chunk: str, *sizes: str) -> None:
    """Print memory and the roofline's seconds of value and gradient, as JSON; the head's gradient is float32."""
    T, D, V = map(int, sizes)
    accelerator = find_accelerator(machine)
    rules = ShardingRules(make_mesh("dp:1", topology_devices(accelerator)[:1]), GATHERED_AXES, stored=TRAIN_AXES)

    def abstract(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=rules.sharding())

    def loss(hidden, sums, head, targets, weights):
        settings = HeadSettings(temperature=1.0, chunk=int(chunk), rules=rules, kind=cast(HeadKind, kind))
        return jnp.sum(token_logprobs(hidden, Weight(head, sums), targets, settings).logprobs * weights)

    def step(hidden, head, targets, weights):
        sums = jnp.zeros(head.shape, jnp.float32)
        return jax.value_and_grad(loss, argnums=(0, 1))(hidden, sums, head, targets, weights)

    given = [abstract("bfloat16", 1, T, D), abstract("bfloat16", V, D)]
    given += [abstract("int32", 1, T), abstract("float32", 1, T)]
    compiled = jax.jit(step, compiler_options=compiler_options("tpu")).lower(*given).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "the TPU's compiler gives both"
    chip, cost = load_chip(accelerator.generation), walk(parse(text), {"device": 1})
    least = roofline(cost, chip.peaks, links=chip.links)
    tokens, vocab = head_tile(T, V, D, 2, fast_memory(accelerator.generation))
    found = {
        "steps_of_a_kernel": -(-T // tokens) * -(-V // vocab),
        "least_ms_of_a_kernel": round(1e3 * 2 * T * D * V / chip.peaks.flops_bf16, 2),
        "temporaries_gib": round(memory.temp_size_in_bytes / 2**30, 3),
        "tflop": round(cost.flops / 1e12, 2),
        "hbm_gb": round(cost.hbm_bytes / 1e9, 1),
        "planned_ms": round(1e3 * (least.compute + least.hbm), 1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
