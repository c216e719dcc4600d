"""How fast the rollout engine decodes on this machine, and where its time goes.

A random model of SmolLM2-135M's shape answers random prompts. Milliseconds per decode step and tokens per second, wall
clock and CPU seconds (on a busy machine only CPU seconds can be compared), and the time of the programs' parts alone:
prefill, sampling, the head. Prints them as one JSON line and writes benches/results/decode-PLATFORM.json.

    python -m benches.decode --slots 64 --prompt-tokens 50 --new-tokens 20 --requests 20 --completions 8
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benches.record import arguments, record
from podium.config.schema import RolloutConfig
from podium.models.architecture import DecoderConfig
from podium.models.decoder import head_weights
from podium.models.logprobs import logits_at
from podium.models.params import ROLLOUT_AXES, param_specs
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request, SamplingParams
from podium.rollout.sampling import fill_row, idle_rows, sample
from podium.sharding import ShardingRules, init_params, make_mesh

SMOLLM2_135M = DecoderConfig(
    model_type="llama",
    vocab=49152,
    width=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    mlp_width=1536,
    max_positions=8192,
    rope_theta=1e5,
    rope_scaling=None,
    norm_eps=1e-5,
    tied=True,
    qkv_bias=False,
    qk_norm=False,
)


class NoText:
    """A tokenizer of which nothing is asked: completions run to their full length."""

    eos_tokens = ()
    special_tokens: Mapping[str, int] = {}  # nothing writes it

    def decode(self, tokens: list[int]) -> str:
        """Nothing, whatever the tokens."""
        return ""


def best(function: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """The least wall and CPU seconds of a call, after one that compiles."""
    times = []
    jax.block_until_ready(function())
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(function())
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(wall for wall, _ in times), min(cpu for _, cpu in times)


def parts(engine: RolloutEngine, repeats: int) -> dict[str, float]:
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
        "head_cpu_ms": 1e3 * best(lambda: head(params, hidden), repeats)[1],
        "sampling_cpu_ms": 1e3 * best(lambda: draw(logits, rows, jnp.arange(S), live), repeats)[1],
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M.layers, help="fewer: a quick trial")
    parser.add_argument("--vocab", type=int, default=SMOLLM2_135M.vocab)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=50)
    parser.add_argument("--max-prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=20)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--prefill-rows", type=int, default=10)
    parser.add_argument("--refill-steps", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    rules = ShardingRules(make_mesh("auto"), ROLLOUT_AXES)
    config = RolloutConfig(
        max_prompt_tokens=args.max_prompt_tokens,
        max_new_tokens=args.new_tokens,
        slots=args.slots,
        prefill_rows=args.prefill_rows,
        refill_steps=args.refill_steps,
    )
    decoder = dataclasses.replace(SMOLLM2_135M, layers=args.layers, vocab=args.vocab)
    engine = RolloutEngine(
        config,
        decoder,
        rules,
        NoText(),
        dtype=jnp.dtype(args.dtype),
    )
    engine.load(init_params(0, param_specs(decoder), rules))
    prompts = np.random.default_rng(0).integers(0, decoder.vocab, (args.requests, args.prompt_tokens))
    sampling = SamplingParams(max_new_tokens=args.new_tokens)
    requests = [
        Request(prompt=tuple(prompt.tolist()), sampling=sampling, seed=seed, completions=args.completions)
        for seed, prompt in enumerate(prompts)
    ]
    engine.generate(requests)
    runs = []
    for _ in range(args.repeats):
        cpu = time.process_time()
        _, stats = engine.generate(requests)
        runs.append((time.process_time() - cpu, stats))
    cpu_s, run = min(runs, key=lambda run: run[0])
    result = {
        **{name: value for name, value in vars(args).items() if name != "results"},
        "rollout/prefill_s": run.prefill_s,
        "rollout/decode_s": run.decode_s,
        "rollout/decode_steps": run.decode_steps,
        "rollout/slot_utilisation": run.slot_utilisation,
        "rollout/tokens_per_s": run.tokens_per_s,
        "rollout/compilations": run.compilations,
        "rollout/prompt_tokens": run.prompt_tokens,
        "rollout/completion_tokens": run.completion_tokens,
        "cpu_s": cpu_s,
        "wall_s": run.generate_s,
        "decode_step_ms": 1e3 * run.decode_s / run.decode_steps if run.decode_steps else 0.0,
        **parts(engine, args.repeats),
    }
    print(json.dumps(result))
    record(f"decode-{jax.default_backend()}", result, args.results)


if __name__ == "__main__":
    main()
