"""What the engine's schedule is worth on this machine: refill, shrinking programs, paged attention, overlap.

    python -m benches.rollout_schedule            (CPU; a few minutes)

One model of SmolLM2-135M's shape with random weights, four questions, all sides in one process:

    lengths    64 requests of 16 to 512 tokens (GSM8K-like): 16 slots that are refilled and shrink, against static
               batches of 16 that all run to their longest, in CPU seconds; and as many slots as requests; bar 2
    attention  of decoding, one layer and 64 slots: 128 live tokens in a cache of 2,048, against 2,048; bar 0.25
    host       share of a rollout in which the device has no decode call, where calls overlap; bar 0.03

Prints one JSON line and writes benches/results/rollout-schedule-PLATFORM.json; exit status 1 where a bar is missed.
"""

import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benches.decode import SMOLLM2_135M
from benches.record import arguments, record
from podium.config.schema import RolloutConfig
from podium.doctor.benchmarks.rollout import device_of
from podium.models.architecture import with_layers
from podium.models.params import ROLLOUT_AXES, param_specs
from podium.rollout import cache as caches
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request, SamplingParams
from podium.sharding import ShardingRules, init_params, make_mesh

BARS = {"lengths": 2.0, "attention": 0.25, "host": 0.03}


def requests_of(lengths: np.ndarray | Sequence[int], vocab: int, prompt: int = 64) -> list[Request]:
    """A request of one completion for each length."""
    rng = np.random.default_rng(0)
    return [
        Request(
            prompt=tuple(rng.integers(0, vocab, prompt).tolist()),
            sampling=SamplingParams(max_new_tokens=int(length)),
            seed=seed,
        )
        for seed, length in enumerate(lengths)
    ]


def cpu_seconds(engine: RolloutEngine, batches: Sequence[Sequence[Request]]) -> tuple[float, int, int]:
    """CPU seconds, steps and tokens of answering some batches, one after the other."""
    start, steps, tokens = time.process_time(), 0, 0
    for batch in batches:
        _, stats = engine.generate(batch)
        steps, tokens = steps + stats.calls.decode_steps, tokens + stats.completion_tokens
    return time.process_time() - start, steps, tokens


def engine_of(decoder: Any, params: Any, **settings: Any) -> RolloutEngine:
    """An engine with its programs compiled."""
    rules = ShardingRules(make_mesh("auto"), ROLLOUT_AXES)
    config = RolloutConfig(max_prompt_tokens=64, max_new_tokens=512, **settings)
    engine = RolloutEngine(Device(config, decoder, rules, dtype=jnp.dtype("bfloat16")), None)
    engine.load(params)
    engine.warm_up()
    return engine


def lengths_bench(decoder: Any, params: Any, lengths: np.ndarray) -> dict[str, Any]:
    """Refill and shrinking against batches that are padded to their longest."""
    requests = requests_of(lengths, decoder.vocab)
    ours = cpu_seconds(engine_of(decoder, params, slots=16, refill_steps=8), [requests])
    longest = [int(lengths[i : i + 16].max()) for i in range(0, len(lengths), 16)]
    padded = requests_of(np.repeat(longest, 16)[: len(lengths)], decoder.vocab)
    fixed = engine_of(decoder, params, slots=16, refill_steps=8)
    static = cpu_seconds(fixed, [padded[i : i + 16] for i in range(0, len(padded), 16)])
    wide = cpu_seconds(engine_of(decoder, params, slots=64, refill_steps=8), [requests])
    tokens = int(lengths.sum())  # those that count, on both sides
    return {
        "ours": {"cpu_s": ours[0], "steps": ours[1], "tokens_per_cpu_s": tokens / ours[0]},
        "static": {"cpu_s": static[0], "steps": static[1], "tokens_per_cpu_s": tokens / static[0]},
        "all_slots": {"cpu_s": wide[0], "steps": wide[1], "tokens_per_cpu_s": tokens / wide[0]},
        "ratio": static[0] / ours[0],
    }


def attention_bench(repeats: int = 5) -> dict[str, float]:
    """CPU milliseconds of one layer's decode attention by live tokens, in a cache of 2,048 for each slot."""
    rules, slots, page, length = ShardingRules(make_mesh("auto"), ROLLOUT_AXES), 64, 64, 2048
    decoder = with_layers(SMOLLM2_135M, 1)
    config = RolloutConfig(
        max_prompt_tokens=length - 1, max_new_tokens=1, page_tokens=page, cache_tokens=slots * length
    )
    abstract = caches.abstract_cache(decoder, config, dtype=jnp.dtype("float32"), rules=rules)
    cache = caches.make_empty(abstract)().places[0].kv
    tables = jnp.asarray(np.random.default_rng(0).permutation(slots * length // page).reshape(slots, -1), jnp.int32)
    q, k = (jnp.ones((slots, 1, heads, decoder.head_dim)) for heads in (decoder.heads, decoder.kv_heads))

    def step(cache: Any, starts: Any) -> Any:
        spans = caches.Spans(tables, starts, jnp.ones_like(starts))
        cache, seen = caches.extend(cache, jnp.int32(0), spans, caches.Heads(q, k, k), rules)
        return cache, jnp.sum(seen)

    run, found = jax.jit(step, donate_argnums=0), {}
    for live in (128, 2048):
        times = []
        for _ in range(repeats + 1):
            start = time.process_time()
            cache, _ = jax.block_until_ready(run(cache, np.full(slots, live - 1, np.int32)))
            times.append(time.process_time() - start)
        found[f"live_{live}_cpu_ms"] = 1e3 * min(times[1:])
    return found | {"ratio": found["live_128_cpu_ms"] / found["live_2048_cpu_ms"]}


def host_bench(decoder: Any, params: Any) -> dict[str, float]:
    """Share of a rollout in which the device has no decode call, where the next is given out before the last is read.

    A thread notes when each call ends; from then until the next one is given out the device waits for the host.
    """
    engine = engine_of(decoder, params, slots=16, refill_steps=8)
    device = device_of(engine)
    device.overlap = True
    given, ended, threads = [], [], []
    decode = device.programs.decode

    def watched(*arguments: Any) -> Any:
        given.append(time.perf_counter())
        *kept, steps = decode(*arguments)
        number = len(given) - 1

        def wait() -> None:
            jax.block_until_ready(steps)
            ended.append((number, time.perf_counter()))

        threads.append(threading.Thread(target=wait))
        threads[-1].start()
        return *kept, steps

    watched._cache_size = decode._cache_size  # pyright: ignore[reportFunctionMemberAccess]
    device.programs = device.programs._replace(decode=watched)
    start = time.perf_counter()
    _, stats = engine.generate(requests_of([128] * 48, decoder.vocab))
    wall = time.perf_counter() - start
    for thread in threads:
        thread.join()
    ends = dict(ended)
    idle = sum(max(0.0, given[number + 1] - ends[number]) for number in range(len(given) - 1))
    return {
        "idle_s": idle,
        "wall_s": wall,
        "share": idle / wall,
        "steps": stats.calls.decode_steps,
        "calls": len(given),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M.layers, help="fewer: a quick trial")
    parser.add_argument("--requests", type=int, default=64)
    args = parser.parse_args()
    decoder = with_layers(SMOLLM2_135M, args.layers)
    params = init_params(0, param_specs(decoder), ShardingRules(make_mesh("auto"), ROLLOUT_AXES))
    rng = np.random.default_rng(0)
    lengths = np.clip(np.rint(rng.lognormal(np.log(120), 0.8, args.requests)), 16, 512).astype(int)
    result = {
        "layers": args.layers,
        "mean_length": float(lengths.mean()),
        "attention": attention_bench(),
        "host": host_bench(decoder, params),
        "lengths": lengths_bench(decoder, params, lengths),
        "bars": BARS,
    }
    print(json.dumps(result))
    record(f"rollout-schedule-{jax.default_backend()}", result, args.results)
    met = (
        result["lengths"]["ratio"] >= BARS["lengths"],
        result["attention"]["ratio"] <= BARS["attention"],
        result["host"]["share"] <= BARS["host"],
    )
    sys.exit(not all(met))


if __name__ == "__main__":
    main()
