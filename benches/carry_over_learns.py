"""Do runs with `rollout.in_flight` 1.5, whose completions go on over updates, learn as much as those that wait? CPU.

    python -m benches.carry_over_learns [TASK ...]       (minutes; `code` needs a machine that the sandbox runs on)

Two tasks, three seeds each, GRPO: `sums`, one-digit sums by a tiny random model (`benches.recipes`), and `code`,
functions that pass hidden tests by one that has imitated some (`benches.learn_code`). `last` is the mean reward of
sums' last 10 steps, and the share of functions that pass in the last 2. Rewards of both kinds of run are compared by
the spread over seeds. The first run of 1.5 is repeated: whether its rewards are the same. Writes
benches/results/carry-over-learns-cpu.json; exit status 1 where the means differ by more than twice the standard error
of their difference, where nothing was carried, or where the repetition differs.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benches.learn_code import imitate
from benches.learn_code import learn as learn_code
from benches.learn_guess import PAID
from benches.recipes import first_and_last, make_config, write_tiny_model
from benches.record import arguments, record, recorded, within_noise
from podium.observe.metrics import REWARD
from podium.train.loop import train

SEEDS, IN_FLIGHT = (0, 1, 2), (1.0, 1.5)
STALENESS = "async/staleness/mean"


class Learned(NamedTuple):
    """What became of a run."""

    last: float
    """Its reward at the end."""
    rewards: list[float]
    """Those of each step."""
    staleness: float
    """Updates since a group's first token, averaged over steps; 0 if nothing is carried over."""


def sums(name: str, seed: int, in_flight: float, folder: Path) -> Learned:
    """Train a new model on one-digit sums, with slots for all that is in flight: what waits for one has no age."""
    plain = make_config(folder / "model", folder / "runs", "grpo")
    rollout = plain.rollout.model_copy(update={"in_flight": in_flight, "slots": 768})
    train(plain.model_copy(update={"name": name, "seed": seed, "rollout": rollout}), plain=True)
    return learned(folder / "runs" / name)


def code(name: str, seed: int, in_flight: float, folder: Path) -> Learned:
    """Train what `imitate` left on functions."""
    row = learn_code(name, PAID, seed, folder, in_flight=in_flight)
    return learned(folder / "runs" / name)._replace(last=row["last"]["mean"])


def learned(run: Path) -> Learned:
    """Read a run's metrics."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [step[REWARD] for step in steps]
    staleness = statistics.mean(step.get(STALENESS, 0.0) for step in steps)
    return Learned(first_and_last(rewards)[1], rewards, round(staleness, 3))


TASKS = {"sums": sums, "code": code}
NAME = "carry-over-learns-cpu"


def compare(task: str, folder: Path) -> dict[str, object]:
    """Train a task's runs below `folder`, which has its model; their figures and what is judged."""
    train_one = TASKS[task]
    runs = {
        in_flight: [train_one(f"{in_flight}-{seed}", seed, in_flight, folder) for seed in SEEDS]
        for in_flight in IN_FLIGHT
    }
    again = train_one("again", SEEDS[0], IN_FLIGHT[1], folder)
    waiting, carried = ([run.last for run in runs[in_flight]] for in_flight in IN_FLIGHT)
    print(task, waiting, carried, flush=True)
    return {
        "runs": {str(in_flight): [run._asdict() for run in each] for in_flight, each in runs.items()},
        "within_noise": within_noise(waiting, carried),
        "carried": all(run.staleness > 0 for run in runs[IN_FLIGHT[1]]),
        "repeated": again == runs[IN_FLIGHT[1]][0],
    }


def main() -> None:
    """Train, compare, and write the figures."""
    parser = arguments(__doc__)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], metavar="TASK", help=", ".join(TASKS))
    args = parser.parse_args()
    found: dict[str, dict[str, object]] = recorded(NAME, "tasks", args.results) or {}
    for task in args.tasks or TASKS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if task == "sums":
                write_tiny_model(folder / "model")
            else:
                imitate(folder)
            found[task] = compare(task, folder)
    met = all(row[key] for row in found.values() for key in ("within_noise", "carried", "repeated"))
    record(NAME, {"tasks": found, "met": met}, args.results)
    sys.exit(not met)


if __name__ == "__main__":
    main()
