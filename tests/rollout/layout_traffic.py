"""What one decode step of each rollout layout sends, compiled for 8 CPU devices or, as a program, for v6e-8.

python tests/rollout/layout_traffic.py        needs libtpu and `compiler_environment`; one JSON object on stdout
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from podium.accelerators import find_accelerator
from podium.config.schema import RolloutConfig
from podium.hlo.cost import unknown_loops, walk
from podium.hlo.text import parse
from podium.models.architecture import DecoderConfig
from podium.models.layouts import Layout
from podium.models.params import ROLLOUT_LAYOUTS
from podium.plan.topology import topology_devices
from podium.rollout.programs import abstract_engine_cache, engine_specs, idle_slots, make_decode
from podium.sharding import abstract_params, make_mesh
from podium.train.generate import rollout_rules

STEPS = 8
CONFIG = RolloutConfig(max_prompt_tokens=128, max_new_tokens=128, slots=32)
DECODER = DecoderConfig(
    model_type="qwen2",
    vocab=4096,
    width=512,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=128,
    mlp_width=1024,
    max_positions=512,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-6,
    tied=True,
    qkv_bias=True,
    qk_norm=False,
)


GROUPS = {"tensor": 8, "hybrid": 4}
FEW = 4000  # bytes of a collective of a few numbers of each sequence


def traffic(layout: str, mesh: Mesh, dtype: jnp.dtype) -> dict[str, dict[str, float]]:
    """Bytes that a device sends in one decode step, and its collectives, by kind; those of a few numbers as `few`."""
    rules = rollout_rules(Layout(name=layout, group=GROUPS.get(layout, 1)), DECODER, mesh)
    weights = abstract_params(engine_specs(DECODER, rules), dtype, rules)
    cache = abstract_engine_cache(CONFIG, DECODER, rules, dtype)
    slots: Any = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rules.sharding("rows")), idle_slots(CONFIG.slots)
    )
    decode = make_decode(DECODER, rules, dtype, steps=STEPS)
    module = parse(decode.lower(weights, cache, slots).compile().as_text())
    cost = walk(module, mesh.shape, trips=dict.fromkeys(unknown_loops(module), STEPS))
    found: dict[str, dict[str, float]] = {"sent": {}, "calls": {}}
    for each in cost.collectives:
        kind = each.kind if each.sent / each.calls > FEW else "few"
        for name, value in (("sent", each.sent), ("calls", each.calls)):
            found[name][kind] = found[name].get(kind, 0) + value / STEPS
    found["sent"].pop("few", None)
    return found


def layers_weights(*names: str) -> int:
    """Elements of these weights of all layers."""
    D, H, K, Q, F = DECODER.width, DECODER.heads, DECODER.kv_heads, DECODER.head_dim, DECODER.mlp_width
    sizes = {"q": D * H * Q, "k": D * K * Q, "v": D * K * Q, "o": H * Q * D, "gate": D * F, "up": D * F, "down": F * D}
    return DECODER.layers * sum(sizes[name] for name in names)


def all_layouts(mesh: Mesh, dtype: jnp.dtype) -> Mapping[str, dict[str, dict[str, float]]]:
    """The traffic of every layout."""
    return {layout: traffic(layout, mesh, dtype) for layout in ROLLOUT_LAYOUTS}


if __name__ == "__main__":
    v6e = make_mesh("fsdp:8", topology_devices(find_accelerator("v6e-8")))
    print(json.dumps(all_layouts(v6e, jnp.dtype("bfloat16"))))
