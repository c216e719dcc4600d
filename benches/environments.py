"""A tiny random model learns from an environment: it guesses one of three numbers, twice. CPU, no download, a minute.

    python -m benches.environments        (needs nothing but Podium)

The model has 2 layers of width 32, and only the words of the game. Most of its answers hold no number at first. Who
makes the same two guesses in every game earns 0.5, and that is what it comes to; who heeds the replies could earn 2/3,
but its first guess is soon always the same, 1 or 3. Prints a line and writes benches/results/environments-cpu.json;
exit status 1 where the mean reward of the last five steps is below the bar. tests/train/test_environments_teach.py runs
the same.
"""

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benches.recipes import write_tiny_model
from benches.record import arguments, record
from podium.config.schema import Config
from podium.train.loop import train

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ ' <end> ' if message.role == 'assistant' else ' ' }}{% endfor %}"
)
"""A chat template by which a conversation can be continued."""
WORDS = ("<unk>", "<pad>", "<end>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lesson:
    """A task that a tiny model learns."""

    options: dict[str, Any]
    words: tuple[str, ...]
    """What the model knows besides WORDS."""
    prompt: int
    """Most tokens of a prompt."""
    episode: int
    """Most tokens of a conversation."""
    steps: int
    bar: float
    """Mean reward that the last five steps must have."""


LESSONS = {
    "guess": Lesson(
        options={"largest": 3, "turns": 2}, words=("1", "2", "3", "larger", "smaller"), prompt=40, episode=56,
        steps=16, bar=0.4,
    ),
}  # fmt: skip


def make_config(name: str, model: Path, runs: Path) -> Config:
    """A run that teaches a lesson."""
    lesson = LESSONS[name]
    sizes = {"max_prompt_tokens": lesson.prompt, "max_new_tokens": 2, "max_episode_tokens": lesson.episode}
    return Config.model_validate(
        {
            "name": name,
            "runs_dir": str(runs),
            "model": str(model),
            "steps": lesson.steps,
            "prompts_per_step": 4,
            "group_size": 32,
            "tasks": [{"name": name, "options": lesson.options}],
            "grading": {"workers": 0},
            "environments": {"workers": 0, "group_seed": "own"},
            "rollout": {"dtype": "float32", "slots": 128, "prefill_rows": 32, "refill_steps": 2, **sizes},
            "algorithm": {"recipe": "grpo", "mask_truncated": False, "entropy_bonus": 0.03},
            "train": {
                "dtype": "float32", "rows_per_device": 64, "remat": "none", "optimizer": {"learning_rate": 3e-3}
            },
            "eval": {"at_start": False, "at_end": False},
            "checkpoint": {"every_steps": 0},
        }
    )  # fmt: skip


def learn(name: str, folder: Path) -> list[float]:
    """Trains a new tiny model below `folder`; the mean reward of each step."""
    lesson, model = LESSONS[name], folder / name
    write_tiny_model(model, (*WORDS, *lesson.words), TEMPLATE, lesson.episode)
    train(make_config(name, model, folder / "runs"), plain=True)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train-reward/total/mean"] for line in lines]


def measure(name: str, folder: Path) -> dict[str, Any]:
    """A row of the results."""
    start = time.process_time()
    rewards = learn(name, folder)
    return {
        "task": name,
        "first": float(np.mean(rewards[:2])),
        "last": float(np.mean(rewards[-5:])),
        "bar": LESSONS[name].bar,
        "cpu_s": round(time.process_time() - start, 1),
    }


def main() -> None:
    """Prints the lines and writes them; exit status 1 where a bar is missed."""
    args = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(name, Path(folder)) for name in LESSONS]
    for row in rows:
        print(json.dumps(row))
    record("environments-cpu", {"rows": rows}, args.results)
    sys.exit(any(row["last"] < row["bar"] for row in rows))


if __name__ == "__main__":
    main()
