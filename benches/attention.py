"""What does attention block by block save on CPU? Values and gradients of one layer's attention, two ways.

    python -m benches.attention

Both sides in one run, taken in turn, with the heads of SmolLM2-135M: `reference` makes all scores of a row at once,
`blocks` is what `train.attention: auto` means on CPU. Rows are one sequence of 2,048 tokens; a prompt with twelve
completions and padding, as the trainer packs them; and rows of the demo's length.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benches.record import arguments, medians, record
from podium.hosts.platform import prepare_platform
from podium.models.attention.mask import Visibility
from podium.models.attention.packed_attention import row_attention
from podium.models.params import GATHERED_AXES
from podium.sharding import ShardingRules, make_mesh

HEADS, KV_HEADS, HEAD_DIM, REPEATS = 9, 3, 64, 7
# Name, rows, tokens of a row, tokens of the prompt, completions of how many tokens.
CASES = (
    ("one sequence", 1, 2048, 2048, 0, 0),
    ("a prompt and 12 completions", 1, 2048, 200, 12, 130),
    ("the demo's rows", 2, 320, 40, 8, 20),
)


def main() -> None:
    args = arguments(__doc__).parse_args()
    prepare_platform()
    rules = ShardingRules(make_mesh("auto", jax.devices()[:1]), GATHERED_AXES)
    rows = []
    for name, B, T, *packed in CASES:
        segments, prompts = ids(B, T, *packed)
        random = np.random.default_rng(0)
        q, k, v, d_out = (
            jnp.asarray(random.standard_normal((B, T, heads, HEAD_DIM)), jnp.float32)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        )
        d_out = d_out * (segments > 0)[:, :, None, None]
        programs = {
            backend: jax.jit(functools.partial(gradients, backend, rules))
            .lower(q, k, v, d_out, segments, prompts)
            .compile()
            for backend in ("reference", "blocks")
        }
        given = (q, k, v, d_out, segments, prompts)
        found = medians({name: functools.partial(program, *given) for name, program in programs.items()}, REPEATS)
        for backend, program in programs.items():
            memory = program.memory_analysis()
            assert memory is not None, "the CPU's compiler gives it"
            found[backend]["memory_mib"] = memory.temp_size_in_bytes / 2**20
        rows += [{"rows": name, "tokens": T, "attention": backend, **each} for backend, each in found.items()]
        reference, blocks = found["reference"], found["blocks"]
        rows[-1] |= {
            "cpu_ratio": blocks["cpu_s"] / reference["cpu_s"],
            "memory_ratio": blocks["memory_mib"] / reference["memory_mib"],
        }
    path = record("attention-cpu", {"rows": rows}, args.results)
    print(path.read_text())


def ids(B: int, T: int, prompt: int, completions: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Segments and prompts [B, T] of a prompt and its completions, and padding."""
    segments = np.repeat(np.arange(1, completions + 2), [prompt, *[length] * completions])[:T]
    row = np.concatenate([segments, np.zeros(T - len(segments), int)]).astype(np.int32)
    rows = np.tile(row, (B, 1))
    return jnp.asarray(rows), jnp.asarray((rows > 0).astype(np.int32))


def gradients(backend, rules, q, k, v, d_out, segments, prompts):
    out, pull = jax.vjp(row_attention(backend, Visibility(segments, prompts), rules), q, k, v)
    return out, pull(d_out)


if __name__ == "__main__":
    main()
