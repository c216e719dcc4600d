"""How fast the update is on this machine: the trainer's own compiled program on packed random completions.

    python -m benches.update --prompts 8 --completions 8 --prompt-tokens 50 --new-tokens 20 --row-tokens 256 --rows 4

A random model of SmolLM2-135M's shape. Prints one JSON line and writes benches/results/update-PLATFORM.json: seconds
per optimizer step, wall clock and CPU (on a busy machine only CPU seconds can be compared), tokens by kind, and model
FLOP/s as `podium.models.flops` counts them. For a config's own update there is `podium bench update`.
"""

import argparse
import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np

from benches.decode import SMOLLM2_135M, best
from benches.record import arguments, record
from podium.algorithms.recipes import RECIPES
from podium.config.attention import attention_backend
from podium.config.head import head_kind
from podium.config.optimizer import OptimizerConfig
from podium.models.flops import step_work, update_flops
from podium.models.params import GATHERED_AXES, TRAIN_AXES, param_specs
from podium.sharding import ShardingRules, init_params, make_mesh
from podium.train.batch import Batch, BatchSizes, Sample, make_batch
from podium.train.optimizer import make_optimizer
from podium.train.platform import prepare_platform
from podium.train.state import init_state
from podium.train.step import TrainSettings, make_train_step, shard_batch


def random_samples(args: argparse.Namespace, vocab: int) -> list[Sample]:
    """Groups of completions of a quarter to all of `new_tokens`; the same at any time."""
    random = np.random.default_rng(0)
    samples = []
    for group in range(args.prompts):
        prompt = tuple(random.integers(0, vocab, args.prompt_tokens).tolist())
        for length in random.integers(max(1, args.new_tokens // 4), args.new_tokens + 1, args.completions):
            tokens = random.integers(0, vocab, length).astype(np.int32)
            logprobs = np.full(length, -np.log(vocab), np.float32)
            samples.append(Sample(group=group, prompt=prompt, tokens=tokens, sampled_logprobs=logprobs))
    weight = 1.0 / sum(len(sample.tokens) for sample in samples)
    return [
        dataclasses.replace(sample, advantage=float(advantage), weight=weight)
        for sample, advantage in zip(samples, random.standard_normal(len(samples)), strict=True)
    ]


def random_batch(args: argparse.Namespace, vocab: int, rows: int) -> Batch:
    """Those samples, packed as the trainer packs them; numpy arrays."""
    samples = random_samples(args, vocab)
    batch, _ = make_batch(
        samples,
        BatchSizes(
            row_tokens=args.row_tokens,
            rows=rows,
            max_rows=len(samples),
            packing="shared_prompts",
            max_new_tokens=args.new_tokens,
        ),
    )
    return batch


def measure(args: argparse.Namespace) -> dict[str, float]:
    """The numbers."""
    decoder = dataclasses.replace(SMOLLM2_135M, layers=args.layers, vocab=args.vocab)
    mesh, specs = make_mesh("auto"), param_specs(decoder)
    optimizer = make_optimizer(OptimizerConfig(), 100, specs)
    settings = TrainSettings(
        decoder=decoder,
        mesh=mesh,
        dtype=jnp.dtype(args.dtype),
        temperature=1.0,
        remat=args.remat,
        head_chunk_tokens=args.head_chunk_tokens,
        attention=attention_backend("auto", jax.default_backend()),
        head=head_kind("auto", jax.default_backend(), mesh.shape["tp"]),
    )
    train_step = make_train_step(settings, RECIPES["grpo"], optimizer)
    state = init_state(init_params(0, specs, ShardingRules(mesh, TRAIN_AXES)), optimizer)
    batch = random_batch(args, decoder.vocab, args.rows * settings.computing.num_shards("batch"))
    batch = shard_batch(batch, ShardingRules(mesh, GATHERED_AXES))

    def step() -> dict[str, jax.Array]:
        nonlocal state
        state, metrics = train_step(state, batch)
        return metrics

    wall_s, cpu_s = best(step, args.repeats)
    filled = int(np.sum(np.asarray(batch.segments) > 0))
    room = int(batch.num_micro_batches) * int(np.prod(batch.tokens.shape[1:]))
    groups = itertools.groupby(random_samples(args, decoder.vocab), key=lambda sample: sample.group)
    lengths = [[len(sample.tokens) for sample in own] for _, own in groups]
    work = step_work([args.prompt_tokens] * args.prompts, lengths)
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "tokens/completion": float(batch.num_tokens),
        "tokens/prompt": filled - float(batch.num_tokens),
        "tokens/padding": room - filled,
        "completion_tokens_per_s": float(batch.num_tokens) / wall_s,
        "model_tflop_per_s": update_flops(decoder, work) / wall_s / 1e12,
        "peak_memory_gib": stats.get("peak_bytes_in_use", 0) / 2**30,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M.layers, help="fewer: a quick trial")
    parser.add_argument("--vocab", type=int, default=SMOLLM2_135M.vocab)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=20)
    parser.add_argument("--row-tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch on each device")
    parser.add_argument("--head-chunk-tokens", type=int, default=1024)
    parser.add_argument("--remat", default="none", choices=("none", "layer"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "results"}
    prepare_platform()
    result = {**settings, **measure(args)}
    print(json.dumps(result))
    record(f"update-{jax.default_backend()}", result, args.results)


if __name__ == "__main__":
    main()
