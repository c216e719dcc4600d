"""The engine beside Hugging Face `generate` on this CPU, in the same run: tokens per CPU-second.

    python -m benches.rollout_hf --torch PYTHON        (an environment with torch and transformers; 15 minutes)

A model of SmolLM2-135M's shape with random weights, 64 requests of 64 prompt tokens and 128 new ones each, temperature
1. `generate` runs in bfloat16 and in float32, in batches of 8 to 64, whichever is best; ours with 64 slots. Both
sides take turns, and the best of each counts. Prints a table, writes benches/results/rollout-hf-cpu.json; exit status 1
where a bar is missed: 2.5 times bfloat16's, 1.3 times the best's tokens per CPU-second.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benches.decode import SMOLLM2_135M
from benches.record import arguments, record
from podium.config.schema import RolloutConfig
from podium.models.params import ROLLOUT_AXES, param_specs
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request, SamplingParams
from podium.sharding import ShardingRules, init_params, make_mesh

BARS = {"bfloat16": 2.5, "best": 1.3}
REQUESTS, PROMPT, NEW = 64, 64, 128


def hugging_face(python: str, dtype: str, batch: int) -> dict[str, Any]:
    """One run of `generate` over all requests, in a process of its own."""
    command = [python, str(Path(__file__).with_name("hf_generate.py")), dtype, str(batch)]
    command += [str(n) for n in (REQUESTS, PROMPT, NEW)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def ours(dtype: str) -> RolloutEngine:
    """The engine, its programs compiled."""
    rules = ShardingRules(make_mesh("auto"), ROLLOUT_AXES)
    config = RolloutConfig(max_prompt_tokens=PROMPT, max_new_tokens=NEW, slots=REQUESTS)
    engine = RolloutEngine(Device(config, SMOLLM2_135M, rules, dtype=jnp.dtype(dtype)), None)
    engine.load(init_params(0, param_specs(SMOLLM2_135M), rules))
    engine.warm_up()
    return engine


def answer(engine: RolloutEngine) -> dict[str, float]:
    """Answer all requests once."""
    rng = np.random.default_rng(0)
    requests = [
        Request(
            prompt=tuple(rng.integers(0, SMOLLM2_135M.vocab, PROMPT).tolist()),
            sampling=SamplingParams(max_new_tokens=NEW),
            seed=seed,
        )
        for seed in range(REQUESTS)
    ]
    wall, cpu = time.perf_counter(), time.process_time()
    _, stats = engine.generate(requests)
    return _row(stats.completion_tokens, time.perf_counter() - wall, time.process_time() - cpu)


def _row(tokens: int, wall_s: float, cpu_s: float) -> dict[str, float]:
    return {"tokens_per_cpu_s": tokens / cpu_s, "tokens_per_s": tokens / wall_s, "cpu_s": cpu_s, "wall_s": wall_s}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--torch", required=True, metavar="PYTHON", help="a Python with torch and transformers")
    parser.add_argument("--batches", default="16,64", help="of generate")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    engines = {dtype: ours(dtype) for dtype in ("bfloat16", "float32")}
    best: dict[str, dict[str, Any]] = {}
    for _ in range(args.rounds):
        rows = {f"ours {dtype}": answer(engine) for dtype, engine in engines.items()}
        for dtype in ("bfloat16", "float32"):
            for batch in map(int, args.batches.split(",")):
                rows[f"generate {dtype} {batch}"] = hugging_face(args.torch, dtype, batch)
        for name, row in rows.items():
            if name not in best or row["tokens_per_cpu_s"] > best[name]["tokens_per_cpu_s"]:
                best[name] = row
    for name, row in best.items():
        print(f"{name:<24}{row['tokens_per_cpu_s']:8.1f} tokens per CPU-second{row['tokens_per_s']:8.1f} per second")
    rates = {name: row["tokens_per_cpu_s"] for name, row in best.items()}
    mine = max(rate for name, rate in rates.items() if name.startswith("ours"))
    theirs = {name: rate for name, rate in rates.items() if name.startswith("generate")}
    ratios = {
        "bfloat16": mine / max(rate for name, rate in theirs.items() if "bfloat16" in name),
        "best": mine / max(theirs.values()),
    }
    print(f"{ratios['bfloat16']:.2f} times bfloat16's, {ratios['best']:.2f} times the best's")
    record("rollout-hf-cpu", {"runs": best, "ratios": ratios, "bars": BARS}, args.results)
    sys.exit(not all(ratios[name] >= bar for name, bar in BARS.items()))


if __name__ == "__main__":
    main()
