"""Token places that an update computes for each token that it needs, with the config's own shape and with chosen ones.

    python -m benches.update_shapes            (no accelerator; a minute)

Steps are drawn from the planner's lengths. A run chooses its shapes from its first step, and each later step one of
them, by the trainer's own rules; 8 runs of 40 further steps. Needed are the completions, and each group's prompt once.

Prints a table and writes benches/results/update-shapes-planned.json; exit status 1 where a bar is missed.
"""

import sys
from typing import Any, NamedTuple

import numpy as np

from benches.record import arguments, record
from podium.config.schema import RolloutConfig
from podium.plan.request.workload import draw_lengths
from podium.run.run_spec import BatchSizes, RowRules
from podium.train.batches.balance import Lengths
from podium.train.batches.shapes import choose_shapes, pack, with_shapes

RUNS, JUDGED = range(8), range(40, 80)
"""Seeds of the first steps of runs, and of the further steps that their shapes are judged by."""


class Case(NamedTuple):
    """A run, and the bar of its ratio."""

    lengths: str
    longest: tuple[int, int]
    """Longest prompt and longest completion."""
    prompts: int
    group: int
    devices: int
    shape: tuple[int, int]
    """Rows of a device and tokens of each, of the config's own shape."""
    cost: float
    """As `podium.run.micro_batch_cost` gives it."""
    tile: int = 128
    dropped: float = 0.0
    bar: float = 1.3


CASES = {
    "GSM8K 3B v6e-8, 16 x 8 (flagship)": Case("gsm8k", (512, 1024), 16, 8, 8, (4, 1536), 2582),
    "GSM8K 3B v6e-8, 64 x 16": Case("gsm8k", (512, 1024), 64, 16, 8, (4, 1536), 2582),
    "GSM8K 3B v6e-16, 16 x 8": Case("gsm8k", (512, 1024), 16, 8, 16, (4, 1536), 2706),
    "GSM8K 3B h100-1, 16 x 8": Case("gsm8k", (512, 1024), 16, 8, 1, (4, 1536), 443),
    "8,192 tokens allowed, v6e-16, 32 x 8": Case("gsm8k", (512, 8192), 32, 8, 16, (1, 8704), 2706),
    "demo, 6 of 8 groups, completions of 17": Case("fixed:17", (64, 20), 8, 8, 1, (2, 320), 32, 16, 0.25, 1.1),
    "demo, 8 groups, completions of 6": Case("fixed:6", (64, 20), 8, 8, 1, (2, 320), 32, 16, 0.0, 1.1),
}


def groups_of(case: Case, seed: int) -> list[list[Lengths]]:
    """The lengths of a drawn step, by group; those of dropped groups are empty."""
    rollout = RolloutConfig(max_prompt_tokens=case.longest[0], max_new_tokens=case.longest[1])
    drawn = draw_lengths(case.lengths, rollout, prompts=case.prompts, completions=case.group, seed=seed)
    kept = round(case.prompts * (1 - case.dropped))
    return [
        [Lengths(group=g, shown=int(drawn.prompts[g]) - 1, own=int(own)) for own in drawn.completions[g]]
        if g < kept
        else []
        for g in range(case.prompts)
    ]


def measure(case: Case) -> dict[str, Any]:
    """Places for each needed token, and planned time, of all runs of a case."""
    rows, row_tokens = case.shape
    own = BatchSizes(
        row_tokens=row_tokens,
        rows=rows * case.devices,
        max_rows=case.prompts * case.group,
        packing="shared_prompts",
        max_new_tokens=case.longest[1],
        devices=case.devices,
        rules=RowRules(micro_batch_cost=case.cost, tile=case.tile, row_step=case.devices),
    )
    steps = [[each for group in groups_of(case, seed) for each in group] for seed in JUDGED]
    needed = [sum(x.own for x in step) + sum({x.group: x.shown for x in step}.values()) for step in steps]

    def judged(sizes: BatchSizes) -> tuple[float, float]:
        found = [pack(step, sizes) for step in steps]
        places = [each.micro_batches * each.sizes.rows * each.sizes.row_tokens for each in found]
        return float(np.mean(np.array(places) / needed)), sum(each.time for each in found)

    before, time_before = judged(own)
    ratios, times, chosen = [], [], []
    for seed in RUNS:
        shapes = choose_shapes(groups_of(case, seed), own, per_step=case.prompts)
        ratio, time = judged(with_shapes(own, shapes))
        ratios.append(ratio)
        times.append(time / time_before)
        chosen.append([f"{shape.rows // case.devices}x{shape.row_tokens}" for shape in shapes])
    return {
        "own_shape": f"{rows}x{row_tokens}",
        "own": round(before, 3),
        "chosen": round(float(np.mean(ratios)), 3),
        "worst_run": round(max(ratios), 3),
        "time_of_own": round(float(np.mean(times)), 3),
        "shapes_of_runs": chosen,
        "bar": case.bar,
    }


def main() -> int:
    """Measure all cases."""
    options = arguments(__doc__).parse_args()
    found = {name: measure(case) for name, case in CASES.items()}
    for name, each in found.items():
        print(
            f"{name:40} own {each['own']:.2f}  chosen {each['chosen']:.2f}  worst {each['worst_run']:.2f}"
            f"  time {each['time_of_own']:.2f}"
        )
    record("update-shapes-planned", {"cases": found}, options.results)
    return int(any(each["chosen"] > each["bar"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
