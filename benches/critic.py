"""Does the demo learn by PPO with a critic, and not from a coin's rewards? Beside GRPO, for several seeds. CPU.

    python -m benches.critic --seeds 0,1,2        (up to 12 minutes of CPU time per seed, and 8 for the control)

For each seed the demo is trained twice from the same model: by GRPO as in configs/demo.yaml, and by recipe `ppo` with a
critic of the policy's own weights. The control is PPO with a coin's rewards and seed 0; its evaluation is honest. It
prints a table and writes benches/results/critic-cpu.json; exit status 1 where a run misses its bar: sampled accuracy
0.9 in at most 1.5 times GRPO's CPU seconds, and for the control no more than 0.1 above its start. `--set` reaches every
PPO run.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benches.demo import BAR_CONTROL_RISE, CONTROL, sampled, seeds_of, train
from benches.record import arguments, record

NAME = "critic-cpu"
BAR_ACCURACY, BAR_CPU = 0.9, 1.5
PPO = ("algorithm.recipe=ppo", "algorithm.zero_variance=keep", "critic.learning_rate=4e-5", "eval.every_steps=0")


def meets_bar(row: Mapping[str, Any], grpo_cpu_s: float) -> bool:
    """Whether PPO's run is as accurate as it must be, and cheap enough beside GRPO's of the same seed."""
    return sampled(row["after"]) >= BAR_ACCURACY and row["cpu_s"] <= BAR_CPU * grpo_cpu_s


def is_flat(row: Mapping[str, Any]) -> bool:
    """Whether the control's accuracy stayed where it was."""
    return sampled(row["after"]) - sampled(row["before"]) <= BAR_CONTROL_RISE


def shown(row: Mapping[str, Any]) -> str:
    """Accuracy before and after, and the cost."""
    return f"{sampled(row['before']):.3f} -> {sampled(row['after']):.3f}, {row['cpu_s']:.0f} CPU s"


def main() -> None:
    """Prints and writes the table; exit status 1 where a run misses its bar."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=seeds_of, default=[0, 1, 2], help="comma-separated")
    parser.add_argument("--steps", type=int, default=14, help="of the PPO runs")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="as in podium")
    args = parser.parse_args()
    settings = [*PPO, f"steps={args.steps}", *args.settings]
    bars = {"accuracy": BAR_ACCURACY, "cpu": BAR_CPU, "control_rise": BAR_CONTROL_RISE}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        control = train(folder, "control", 0, [CONTROL, *settings], None)
        print(f"control {shown(control)}  {'ok' if is_flat(control) else 'MISSED'}", flush=True)
        for seed in args.seeds:
            ppo = train(folder, f"ppo-{seed}", seed, settings, None)
            grpo = train(folder, f"grpo-{seed}", seed, [], None)
            rows.append({"seed": seed, "ppo": ppo, "grpo": grpo, "meets_bar": meets_bar(ppo, grpo["cpu_s"])})
            verdict = "ok" if rows[-1]["meets_bar"] else "MISSED"
            print(f"seed {seed}: ppo {shown(ppo)}; grpo {shown(grpo)}  {verdict}", flush=True)
            result = {"settings": settings, "bars": bars, "control": control, "control_is_flat": is_flat(control)}
            record(NAME, result | {"runs": rows}, args.results)  # after each seed: an interrupted bench keeps its rows
    sys.exit(not (is_flat(control) and all(row["meets_bar"] for row in rows)))


if __name__ == "__main__":
    main()
