"""Does a tiny model learn to write functions that pass hidden tests in the sandbox, and not from a coin's rewards? CPU.

    python -m benches.learn_code        (needs nothing but Podium, and a machine that the sandbox runs on; minutes)

Each question names a function of two whole numbers; an answer is its code, which the task `code` runs against hidden
tests. A model of 2 layers, with a word for each piece of code, first imitates answers of which RIGHT are right and the
others are code of another function: it knows the form, and guesses. Then it trains with GRPO, once per seed, and as a
control with the rewards of a coin. Success, which is all hidden tests passed, is counted from the recorded answers of
the first and of the last FIRST_AND_LAST steps, with 95 % intervals (Wilson's). Prints a table and writes
benches/results/learn-code-cpu.json; exit status 1 where a bar is missed: success rises beyond the intervals, for the
control it does not.
"""

import json
import random
import time
from pathlib import Path
from typing import Any

from benches.environments import TEMPLATE, WORDS
from benches.learn_guess import compare, trainer
from benches.learn_tools import conversations, share
from benches.recipes import write_tiny_model
from podium.config.schema import Config
from podium.observe.run_dir import Fork
from podium.train.loop import train

FUNCTIONS = {
    "sum": "a + b",
    "difference": "a - b",
    "product": "a * b",
    "larger": "max ( a , b )",
    "smaller": "min ( a , b )",
    "remainder": "a % b",
    "quotient": "a // b",
    "power": "a ** b",
    "first": "a",
    "second": "b",
    "distance": "abs ( a - b )",
    "equal": "a == b",
}
"""What a function computes, and the expression that does."""
CODE = "def f ( a , b ) : return {} "
INPUTS = ((7, 2), (3, 3), (2, 5), (9, 4))
"""Of the hidden tests."""
RIGHT = 0.3
"""Share of the imitated answers that are right."""
ANSWERS, IMITATED = 4000, 300
"""Answers to imitate, and steps of imitation."""
STEPS, FIRST_AND_LAST = 20, 2


def write_tasks(folder: Path) -> None:
    """The questions with their tests, and the answers to imitate: `questions.jsonl`, `answers.jsonl`."""
    questions = [
        {
            "question": name,
            "name": "f",
            "tests": [{"arguments": pair, "expected": eval(code, {}, {"a": pair[0], "b": pair[1]})} for pair in INPUTS],
        }
        for name, code in FUNCTIONS.items()
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    writer = random.Random(0)
    names = list(FUNCTIONS)
    with (folder / "answers.jsonl").open("w") as file:
        for _ in range(ANSWERS):
            asked = writer.choice(names)
            written = asked if writer.random() < RIGHT else writer.choice([name for name in names if name != asked])
            answer = {"role": "assistant", "content": CODE.format(FUNCTIONS[written])}
            file.write(json.dumps({"messages": [{"role": "user", "content": asked}, answer]}) + "\n")


def settings(name: str, folder: Path, seed: int, **rest: Any) -> Config:
    """A run of the tiny model in `folder`."""
    common = {
        "name": name,
        "runs_dir": str(folder / "runs"),
        "model": str(folder / "model"),
        "seed": seed,
        "grading": {"workers": 2},
        "eval": {"at_start": False, "at_end": False},
        "metrics": {"samples_every": 1},
        "checkpoint": {"every_steps": 0},
    }
    return Config.model_validate(common | rest)


def imitate(folder: Path) -> None:
    """Train `folder/runs/start`: a new model imitates the answers."""
    pieces = dict.fromkeys(" ".join([CODE, *FUNCTIONS.values()]).replace("{}", "").split())
    write_tiny_model(folder / "model", (*WORDS, *FUNCTIONS, *pieces), TEMPLATE, 64, spread=0.1)
    write_tasks(folder)
    config = settings(
        "start", folder, 0,
        steps=IMITATED,
        prompts_per_step=64,
        group_size=1,
        algorithm={"recipe": "sft"},
        tasks=[{"name": "chat", "path": str(folder / "answers.jsonl")}],
        rollout={"dtype": "float32", "max_prompt_tokens": 32, "max_new_tokens": 20},
        train=trainer(3e-3),
    )  # fmt: skip
    train(config, plain=True)


def success(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Share of answers that passed all tests."""
    return share(sum(answer["parts"]["correct"] == 1 for answer in answers), len(answers))


def learn(name: str, rewards: dict[str, float], seed: int, folder: Path, *, in_flight: float = 1.0) -> dict[str, Any]:
    """Train from `folder/runs/start`; success in the first and in the last steps."""
    task = {
        "name": "code",
        "path": str(folder / "questions.jsonl"),
        "eval_path": str(folder / "questions.jsonl"),
        "options": {"reward": "all"},
        "rewards": rewards,
        "system_prompt": "",
    }
    config = settings(
        name, folder, seed,
        steps=STEPS,
        prompts_per_step=12,
        group_size=16,
        tasks=[task],
        rollout={
            "dtype": "float32", "slots": 192, "max_prompt_tokens": 8, "max_new_tokens": 20, "in_flight": in_flight,
        },
        algorithm={"recipe": "grpo", "mask_truncated": False},
        train=trainer(1e-3),
    )  # fmt: skip
    began = time.process_time()
    train(config, fork=Fork(str(folder / "runs" / "start"), None), plain=True)
    cpu_s = round(time.process_time() - began, 1)
    answers = conversations(folder / "runs" / name)
    steps = sorted(answers)
    by_step = [success(answers[step])["mean"] for step in steps]
    first, last = (
        success([answer for step in part for answer in answers[step]])
        for part in (steps[:FIRST_AND_LAST], steps[-FIRST_AND_LAST:])
    )
    return {"name": name, "seed": seed, "cpu_s": cpu_s, "first": first, "last": last, "success_by_step": by_step}


def meets_bar(row: dict[str, Any], *, control: bool) -> bool:
    """Whether success rose beyond the intervals; for a control, whether it did not."""
    return (row["last"]["low"] > row["first"]["high"]) is not control


def main() -> None:
    """Print and write the table; exit status 1 where a run misses its bar."""
    compare("learn-code-cpu", __doc__, imitate, learn, meets_bar)


if __name__ == "__main__":
    main()
