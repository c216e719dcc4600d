"""Copies of a whole cache in the engine's programs, compiled for a machine that is not there.

python tests/rollout/cache_copies.py MACHINE MODEL...     needs libtpu and `compiler_environment`

One JSON object on stdout: for each model and program the copies of at least half a stack of keys or values, and the
program's temporary bytes, but for copies of weights, over the cache's.
"""

import json
import math
import re
import sys

import jax
import jax.numpy as jnp

from podium.accelerators import find_accelerator
from podium.config.schema import RolloutConfig
from podium.models.architecture import DecoderConfig
from podium.models.layouts import Layout
from podium.plan.request.topology import topology_devices
from podium.rollout.engine_weights import engine_specs
from podium.rollout.programs import abstract_chunk, abstract_engine_cache, abstract_slots, make_engine_programs
from podium.sampling.sampler import rollout_rules
from podium.sharding import abstract_params, make_mesh
from tests.tiny_decoder import tiny

MODELS = {  # heads, heads of keys, head size, width
    "SmolLM2-135M": (9, 3, 64, 576),
    "SmolLM2-360M": (15, 5, 64, 960),
    "Qwen2.5-0.5B": (14, 2, 64, 896),
    "Llama-3.2-1B": (32, 8, 64, 2048),
    "Danube3-4B": (32, 8, 120, 3840),
    "Danube2-1.8B": (32, 8, 80, 2560),
    "Phi-3-mini": (32, 32, 96, 3072),
    "Qwen3-0.6B": (16, 8, 128, 1024),
    "Qwen2.5-3B": (16, 2, 128, 2048),
    "Gemma-3-1B": (4, 1, 256, 1152),
}
MACHINES = ("v4-8", "v5litepod-8", "v5p-8", "v6e-1", "v6e-4", "v6e-8")
CONFIG = RolloutConfig()
WHOLE = re.compile(r"= \(?\w+\[([\d,]+)\]\S* copy(?:-start)?\(")
DTYPE = jnp.dtype("bfloat16")


def decoder_of(model: str) -> DecoderConfig:
    """A model's attention with few and narrow layers around it."""
    heads, kv_heads, head_dim, width = MODELS[model]
    return tiny(vocab=2048, width=width, layers=3, heads=heads, kv_heads=kv_heads, head_dim=head_dim, mlp_width=256)


def copies(machine: str, model: str) -> dict[str, dict[str, float]]:
    """What the programs that read and write the cache do with it, under default settings."""
    decoder, devices = decoder_of(model), topology_devices(find_accelerator(machine))
    rules = rollout_rules(Layout(name="replicated"), decoder, make_mesh(f"fsdp:{len(devices)}", devices))
    programs = make_engine_programs(CONFIG, decoder, rules, DTYPE)
    weights = abstract_params(engine_specs(decoder, rules), DTYPE, rules)
    cache = abstract_engine_cache(CONFIG, decoder, rules, DTYPE)
    stored = [math.prod(each.sharding.shard_shape(each.shape)) for each in jax.tree.leaves(cache)]
    values = cache.places[0].kv.values
    pages = values.sharding.shard_shape(values.shape)[1]  # of a device; no weight has such a dimension
    lowered = {
        "decode": programs.decode.lower(
            weights, cache, *abstract_slots(CONFIG, decoder, CONFIG.slots, rules, penalised=False)
        ),
        "prefill": programs.extend.lower(weights, cache, abstract_chunk(CONFIG, 128, rules)),
    }
    found: dict[str, dict[str, float]] = {}
    for name, program in lowered.items():
        compiled = program.compile()
        copied = [[int(dim) for dim in dims.split(",")] for dims in WHOLE.findall(compiled.as_text())]
        weights_copied = DTYPE.itemsize * sum(math.prod(dims) for dims in copied if pages not in dims)
        temporaries = compiled.memory_analysis().temp_size_in_bytes - weights_copied
        found[name] = {
            "copies": sum(pages in dims and math.prod(dims) >= max(stored) // 2 for dims in copied),
            "temporaries": temporaries / (DTYPE.itemsize * sum(stored)),
        }
    return found


if __name__ == "__main__":
    print(json.dumps({model: copies(sys.argv[1], model) for model in sys.argv[2:]}))
