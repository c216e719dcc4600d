"""The loss on logits, compiled for a TPU that is not there: `python -m benches.children.loss_step TPU IMPL B T V`."""

import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from podium.accelerators import find_accelerator
from podium.algorithms.logits_loss import grpo_loss_of_logits
from podium.hlo.cost import walk
from podium.hlo.hlo_text import parse
from podium.kernels.logits import LogitsOptions
from podium.kernels.tiles import Tiles
from podium.kernels.tpu_logits import STRIP
from podium.plan.request.topology import topology_devices


def main(machine: str, impl: str, *sizes: str) -> None:
    """Print memory, bytes moved by kernel, and how many strips the kernels' loops have, as JSON."""
    B, T, V = map(int, sizes)
    where = SingleDeviceSharding(topology_devices(find_accelerator(machine))[0])
    given = [((B, T, V), jnp.bfloat16), ((B, T), jnp.int32), ((B, T), jnp.float32), ((B, T), jnp.float32)]
    abstract = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype in given]
    options = LogitsOptions(way="tpu" if impl == "kernel" else "xla", in_place=True)

    def loss(logits, targets, advantages, old_logprobs):
        found = grpo_loss_of_logits(logits, targets, advantages, old_logprobs=old_logprobs, options=options)
        return jnp.mean(found.losses)

    compiled = jax.jit(jax.value_and_grad(loss), donate_argnums=0).lower(*abstract).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "the TPU's compiler gives both"
    moved = {"rest": 0.0}
    for work in walk(parse(text), {"device": 1}).works:
        name = next((name for name in ("statistics", "gradient") if f"logits_{name}" in work.name), "rest")
        moved[name] = moved.get(name, 0.0) + work.times * work.hbm_bytes
    tiles = Tiles()
    found = {
        "gb": memory.peak_memory_in_bytes / 1e9,
        "temporaries_gb": memory.temp_size_in_bytes / 1e9,
        "moved": moved,
        "strips": B * -(-T // tiles.tokens) * -(-V // tiles.vocab) * (tiles.tokens * tiles.vocab // STRIP),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
