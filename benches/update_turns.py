"""CPU seconds of the demo's update with the config's own shape and with the chosen ones, by turns in one process.

    python -m benches.update_turns            (CPU; some minutes)

Random weights of SmolLM2-135M's shape, and samples as long as the demo's: 6 of 8 groups with completions of 17 tokens
in one step, 8 groups with completions of 6 in the next. Shapes are chosen from the first's lengths. Times are those
of the compiled update alone; the first of each shape compiles and does not count.

Prints a line for each update, and writes benches/results/update-turns-cpu.json; exit status 1 above the bar.
"""

import sys
import time

import jax
import numpy as np

from benches.decode import SMOLLM2_135M
from benches.record import arguments, record
from podium.config.load import load
from podium.doctor.benchmarks.update import random_batch
from podium.hosts.platform import prepare_platform
from podium.models.params import trained_specs
from podium.plan.request.workload import SequenceLengths, draw_lengths
from podium.sharding import init_params, make_mesh
from podium.train.batches.balance import Lengths
from podium.train.batches.shapes import choose_shapes, with_shapes
from podium.train.setup import make_run_optimizer, run_spec
from podium.train.state import init_state
from podium.train.step import TrainSettings, make_train_step, shard_batch

BAR = 0.72
ROUNDS = 2


def main() -> int:
    """Measure, print and record."""
    options = arguments(__doc__)
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = options.parse_args()
    prepare_platform()
    config = load(["configs/demo.yaml"], [f"train.dtype={options.dtype}"], {}).config
    mesh = make_mesh("auto", jax.devices()[:1])
    spec = run_spec(config, SMOLLM2_135M, mesh)
    settings, optimizer = (
        TrainSettings(SMOLLM2_135M, mesh, spec.update),
        make_run_optimizer(spec.optimizer, SMOLLM2_135M),
    )
    drawn = [
        draw_lengths(source, config.rollout, prompts=prompts, completions=8, seed=seed)
        for seed, (source, prompts) in enumerate([("fixed:17", 6), ("fixed:6", 8)])
    ]
    shapes = choose_shapes(groups_of(drawn[0]), spec.batch, per_step=8)
    sides = {"own": spec.batch, "chosen": with_shapes(spec.batch, shapes)}
    step = make_train_step(settings, spec.recipe, optimizer)
    state = init_state(init_params(0, trained_specs(SMOLLM2_135M), settings.stored), optimizer)
    found = []
    for number in range(-1, ROUNDS):
        for name, sizes in sides.items() if number % 2 else reversed(sides.items()):
            for lengths in drawn:
                batch = random_batch(sizes, SMOLLM2_135M, lengths)
                placed = shard_batch(batch, settings.computing)
                wall, cpu = time.perf_counter(), time.process_time()
                state, metrics = step(state, placed)
                jax.block_until_ready((state, metrics))
                each = {
                    "side": name,
                    "completion_tokens": int(batch.num_tokens),
                    "micro_batches": int(batch.num_micro_batches),
                    "shape": list(batch.tokens.shape[1:]),
                    "padding": int(np.sum(batch.segments[: int(batch.num_micro_batches)] == 0)),
                    "cpu_s": round(time.process_time() - cpu, 3),
                    "wall_s": round(time.perf_counter() - wall, 3),
                }
                print(each, file=sys.stderr, flush=True)
                found += [each] if number >= 0 else []
    spent = {name: sum(each["cpu_s"] for each in found if each["side"] == name) for name in sides}
    ratio = spent["chosen"] / spent["own"]
    print(f"{options.dtype}: chosen shapes take {ratio:.2f} of the CPU seconds of the config's own (bar {BAR})")
    result = {"dtype": options.dtype, "shapes": shapes, "cpu_s": spent, "ratio": round(ratio, 3), "bar": BAR}
    record("update-turns-cpu", {**result, "updates": found}, options.results)
    return int(ratio > BAR)


def groups_of(lengths: SequenceLengths) -> list[list[Lengths]]:
    """The lengths of eight groups, of which the last are dropped."""
    groups = [
        [Lengths(group=g, shown=int(prompt) - 1, own=int(own)) for own in completions]
        for g, (prompt, completions) in enumerate(zip(lengths.prompts, lengths.completions, strict=True))
    ]
    return groups + [[] for _ in range(8 - len(groups))]


if __name__ == "__main__":
    sys.exit(main())
