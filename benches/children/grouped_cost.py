"""Compiles a mixture's products for a GPU that is not there, and prints what they move and multiply, as JSON.

    python -m benches.children.grouped_cost MACHINE FORM ROWS EXPERTS WIDTH EXPERT_WIDTH

benches.gpu_grouped calls it.

FORM is `kernels` for Podium's, or `ragged_dot` for what XLA makes of jax's own product.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from podium.accelerators import Kernels, find_accelerator
from podium.hlo.cost import roofline, walk
from podium.hlo.hlo_text import parse
from podium.hlo.memory import measure
from podium.kernels.grouped import Form, grouped_product
from podium.plan.calibration import load_chip
from podium.plan.request.topology import topology_devices

KINDS: dict[str, Kernels] = {"kernels": "gpu", "ragged_dot": "none"}


def main(machine: str, form: str, *sizes: str) -> None:
    accelerator = find_accelerator(machine)
    rows, experts, width, expert_width = map(int, sizes)
    where = SingleDeviceSharding(topology_devices(accelerator)[0])
    array = functools.partial(jax.ShapeDtypeStruct, sharding=where)
    half = jnp.dtype(jnp.bfloat16)
    own = Form(KINDS[form], half, "own")

    def forward_and_backward(x: jax.Array, w: jax.Array, dy: jax.Array, counts: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(lambda x, w: grouped_product(own, x, w, (), counts), x, w)
        return y, *pull(dy)

    given = (
        array((rows, width), half),
        array((experts, width, expert_width), half),
        array((rows, expert_width), half),
        array((experts,), jnp.dtype(jnp.int32)),
    )
    compiled = jax.jit(forward_and_backward).lower(*given).compile()
    text = compiled.as_text()
    assert text is not None, "XLA for GPUs gives the text of what it compiled"
    cost, chip = walk(parse(text), {}), load_chip(accelerator.generation)
    found = {
        "gib": measure(compiled).peak / 2**30,  # pyright: ignore[reportArgumentType]
        "tflop": cost.flops / 1e12,
        "hbm_gb": cost.hbm_bytes / 1e9,
        "roofline_ms": 1e3 * sum(roofline(cost, chip.peaks, links=chip.links).parts.values()),
    }
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
