"""How fast the rollout engine decodes on this machine: `podium bench rollout`, and the head and sampling alone.

A random model of SmolLM2-135M's shape answers random prompts. Prints the figures of `podium bench rollout`, with the
CPU milliseconds per decode step of the head and of sampling, as one JSON line, and writes
benches/results/decode-PLATFORM.json.

    python -m benches.decode --batch 160 --slots 64 --lengths fixed:20
"""

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benches.record import arguments, record
from podium.bench.rollout import config_lengths, make_engine, measure, rollout_config
from podium.doctor.subject import smollm2
from podium.models.architecture import with_layers
from podium.models.decoder import head_weights
from podium.models.logprobs import logits_at
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import SamplingParams
from podium.rollout.sampling import fill_row, idle_rows, sample
from podium.sharding import make_mesh
from podium.train.platform import prepare_platform

SMOLLM2_135M = smollm2()
REPEATS = 3


def cpu_ms(function: Callable[[], Any]) -> float:
    """The fewest CPU milliseconds of a call, after one that compiles."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.process_time()
        jax.block_until_ready(function())
        times.append(time.process_time() - start)
    return 1e3 * min(times[1:])


def parts(engine: RolloutEngine) -> dict[str, float]:
    """CPU milliseconds per decode step of the head and of sampling, each alone."""
    S, params, rules = engine.config.slots, engine.device.params, engine.rules
    assert params is not None
    rows = idle_rows(S)
    for row in range(S):
        fill_row(rows, row, SamplingParams(max_new_tokens=1), seed=0, completion=row)
    head = jax.jit(lambda params, x: logits_at(x, head_weights(params, rules, engine.dtype), 1.0))
    hidden = jnp.ones((S, engine.decoder.width), engine.dtype)
    logits, draw, live = head(params, hidden), jax.jit(sample), jnp.ones(S, bool)
    return {
        "head_cpu_ms": cpu_ms(lambda: head(params, hidden)),
        "sampling_cpu_ms": cpu_ms(lambda: draw(logits, rows, jnp.arange(S), live)),
    }


def main() -> None:
    """Measure, print and record."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M.layers, help="fewer: a quick trial")
    parser.add_argument("--vocab", type=int, default=SMOLLM2_135M.vocab)
    parser.add_argument("--batch", type=int, default=160, help="sequences")
    parser.add_argument("--slots", type=int, default=64, help="sequences decoded at once")
    parser.add_argument("--lengths", default="fixed:20", help="of completions, as of `podium bench rollout`")
    parser.add_argument("--max-new-tokens", type=int, default=20)
    args = parser.parse_args()
    prepare_platform()
    mesh = make_mesh("auto")
    config = rollout_config("demo", args.batch, "auto", args.max_new_tokens, args.slots, shards=mesh.size)
    decoder = dataclasses.replace(with_layers(SMOLLM2_135M, args.layers), vocab=args.vocab)
    engine = make_engine(config, decoder, mesh)
    found = dataclasses.asdict(measure(config, engine, config_lengths(args.lengths, config))) | parts(engine)
    result = {"layers": args.layers, "vocab": args.vocab, "lengths": args.lengths, **found}
    print(json.dumps(result))
    record(f"decode-{jax.default_backend()}", result, args.results)


if __name__ == "__main__":
    main()
