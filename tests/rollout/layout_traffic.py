"""What one decode step of each rollout layout sends, compiled for 8 CPU devices or, as a program, for v6e-8.

python tests/rollout/layout_traffic.py        needs libtpu and `compiler_environment`; one JSON object on stdout
"""

import json
from collections.abc import Mapping

import jax.numpy as jnp
from jax.sharding import Mesh
from tiny_decoder import dense_decoder

from podium.accelerators import find_accelerator
from podium.config.schema import RolloutConfig
from podium.config.sizes import steps_at_once
from podium.hlo.cost import unknown_loops, walk
from podium.hlo.hlo_text import parse
from podium.models.layouts import Layout
from podium.models.params import ROLLOUT_LAYOUTS
from podium.plan.compiled.compile_worker import ATTENTION
from podium.plan.request.topology import topology_devices
from podium.rollout.engine_weights import engine_specs
from podium.rollout.programs import abstract_engine_cache, abstract_slots, make_decode
from podium.sampling.sampler import rollout_rules
from podium.sharding import abstract_params, make_mesh

STEPS = 8
CONFIG = RolloutConfig(max_prompt_tokens=128, max_new_tokens=128, slots=32)
DECODER = dense_decoder(
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
FEW = 2000  # bytes of a collective of a few numbers of each sequence


def traffic(layout: str, mesh: Mesh, dtype: jnp.dtype) -> dict[str, dict[str, float]]:
    """Bytes that a device sends in one decode step, and its collectives, by kind; those of a few numbers as `few`.

    What a call sends before its steps, for first tokens, is left out.
    """
    rules = rollout_rules(Layout(name=layout, group=GROUPS.get(layout, 1)), DECODER, mesh)
    weights = abstract_params(engine_specs(DECODER, rules), dtype, rules)
    cache = abstract_engine_cache(CONFIG, DECODER, rules, dtype)
    decode = make_decode(DECODER, rules, dtype, steps=STEPS)
    module = parse(
        decode.lower(weights, cache, *abstract_slots(CONFIG, DECODER, CONFIG.slots, rules, penalised=False))
        .compile()
        .as_text()
    )
    rounds = STEPS // steps_at_once(STEPS, rules.num_shards("batch"))
    found: dict[str, dict[str, float]] = {"sent": {}, "calls": {}}
    for sign, times in ((-1, rounds), (1, 2 * rounds)):
        trips = {loop: 1 if ATTENTION in loop else times for loop in unknown_loops(module)}
        for work in walk(module, mesh.shape, trips=trips).works:
            for each in work.transfers:
                kind = each.kind if each.sent > FEW else "few"
                for name, value in (("sent", each.sent), ("calls", 1.0)):
                    found[name][kind] = found[name].get(kind, 0.0) + sign * work.times * value / STEPS
    for counts in found.values():
        for kind in [kind for kind, value in counts.items() if not value]:
            del counts[kind]
    found["sent"].pop("few", None)
    return found


def layers_weights(*names: str) -> int:
    """Elements of these weights of all layers."""
    D, H, K, Q, F = DECODER.width, DECODER.heads, DECODER.kv_heads, DECODER.head_dim, 1024
    sizes = {"q": D * H * Q, "k": D * K * Q, "v": D * K * Q, "o": H * Q * D, "gate": D * F, "up": D * F, "down": F * D}
    return DECODER.layers * sum(sizes[name] for name in names)


def all_layouts(mesh: Mesh, dtype: jnp.dtype) -> Mapping[str, dict[str, dict[str, float]]]:
    """The traffic of every layout."""
    return {layout: traffic(layout, mesh, dtype) for layout in ROLLOUT_LAYOUTS}


if __name__ == "__main__":
    v6e = make_mesh("fsdp:8", topology_devices(find_accelerator("v6e-8")))
    print(json.dumps(all_layouts(v6e, jnp.dtype("bfloat16"))))
