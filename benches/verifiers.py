"""Do environments of verifiers train as they are: files unchanged, no token read twice, a second run the same? CPU.

    python3.11 -m venv ENV && ENV/bin/pip install -e '.[demo,verifiers]' textarena nltk datasets
    git clone https://github.com/PrimeIntellect-ai/verifiers
    ENV/bin/pip install verifiers/environments/reverse_text verifiers/environments/alphabet_sort
    ENV/bin/python -m benches.verifiers

Trains a random model of 2 layers for 3 steps, twice, on `reverse_text` (one turn) and `alphabet_sort` (a scripted user,
two or three turns) of verifiers' repository and on Hangman of its textarena taskset. What they read is made here: rows,
a folder in the place of a data set of names, and a list of words in the place of nltk's. A random model wins nothing,
so the built-in part `tags` pays as well, and its words contain the tags. Some of the words are text that the tokenizer
would split differently, so reading answers again as text would change their tokens.

    changed    files of the installed packages that differ from the digests recorded when they were installed; bar 0
    segments   sequences of the update per conversation; bar 1: each request continued the tokens of the one before
    gap        largest difference of log-probabilities between trainer and sampler; bar 1e-4
    moved      steps whose gradient is not zero; bar 3
    same       whether the second run has the same conversations, rewards and losses; and, of the first group of each
               step, the same tokens and log-probabilities

Prints a table and writes benches/results/verifiers-cpu.json; exit status 1 where a bar is missed.
"""

import base64
import hashlib
import importlib.metadata
import json
import os
import string
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benches.environments import TEMPLATE, WORDS
from benches.learn_tools import answers, conversations
from benches.recipes import write_tiny_model
from benches.record import arguments, record
from podium.config.schema import Config
from podium.observe.records import MetricsRecord, read_metrics
from podium.observe.run_dir import METRICS, SAMPLES
from podium.tasks.rewards import TAGS
from podium.train.loop import train

STEPS, PROMPTS, GROUP = 3, 2, 4
GAP = 1e-4
"""Nats."""
SETTINGS = {
    "reverse_text": {"dataset_name": "./rows"},
    "alphabet_sort": {"min_turns": 2},
    "textarena": {"game": "Hangman-v0"},
}
"""The taskset of each environment, by verifiers' names."""
PACKAGES = ("verifiers", "reverse_text", "alphabet_sort", "textarena")
NOUNS = ("river", "stone", "lamp", "green", "horse", "window", "table", "paper", "cloud", "garden", "bridge", "winter")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jon")


def changed(package: str) -> list[str]:
    """Files of an installed package whose bytes are not those that were recorded at its installation."""
    found = importlib.metadata.files(package) or []
    return [str(each) for each in found if each.hash is not None and _digest(each.locate()) != each.hash.value]


def _digest(path: os.PathLike[str]) -> str:
    digest = hashlib.sha256(Path(path).read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def write_data(folder: Path) -> None:
    """What the environments read, where they look for it from `folder`."""
    rows = [{"prompt": f"{one} {NOUNS[(7 * index + 3) % len(NOUNS)]}"} for index, one in enumerate(NOUNS)]
    _write_rows(folder / "rows", rows)
    people = [f"{first} {last.title()}" for first, last in zip(NAMES, NOUNS, strict=False)]
    turned = [{"names": people[index:] + people[:index]} for index in range(len(people))]
    _write_rows(folder / "kalomaze" / "alphabetic-arxiv-authors-it1", [*turned, *turned])
    words = folder / "nltk_data" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("README", "en", "en-basic"):
        (words / name).write_text("\n".join(NOUNS) + "\n")


def _write_rows(folder: Path, rows: Sequence[Mapping[str, object]]) -> None:
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(name: str, run: str) -> Config:
    """A run on an environment; what it reads is in the current folder."""
    task = {
        "name": f"verifiers:{name}",
        "options": {"taskset": SETTINGS[name], "size": 10, "eval_size": 2},
        "rewards": {"correct": 1.0, "tags": 1.0},
    }
    common = {
        "name": run,
        "model": "./model",
        "steps": STEPS,
        "prompts_per_step": PROMPTS,
        "group_size": GROUP,
        "tasks": [task],
        "environments": {"workers": 1, "timeout_s": 300},
        "grading": {"workers": 0},
        "rollout": {
            "dtype": "float32", "slots": 8, "max_prompt_tokens": 512, "max_new_tokens": 8, "max_episode_tokens": 1024,
        },
        "algorithm": {"recipe": "grpo", "mask_truncated": False},
        "train": {"dtype": "float32", "rows_per_device": 8, "remat": "none", "optimizer": {"learning_rate": 1e-3}},
        "eval": {"at_start": False, "at_end": False},
        "metrics": {"samples_every": 1},
        "checkpoint": {"every_steps": 0},
    }  # fmt: skip
    return Config.model_validate(common)


def updates(run: Path) -> list[MetricsRecord]:
    """The metrics of each step."""
    return [line for line in read_metrics(run / METRICS) if "policy/logprob_gap/max" in line]


def losses(steps: list[MetricsRecord]) -> list[dict[str, float]]:
    """Of each step what does not depend on the clock."""
    kinds = ("train-", "optimizer/", "policy/", "reward/", "env/turns", "env/segments")
    return [{key: value for key, value in line.items() if key.startswith(kinds)} for line in steps]


def measured(name: str) -> dict[str, object]:
    """Two runs on an environment, and what its bars say."""
    for number in (1, 2):
        train(settings(name, f"{name}-{number}"), plain=True)
    first, second = (Path("runs") / f"{name}-{number}" for number in (1, 2))
    steps = updates(first)
    played = [each for step in conversations(first).values() for each in step]
    turns = [len(answers(each)) for each in played]
    same_samples = (first / SAMPLES).read_bytes() == (second / SAMPLES).read_bytes()
    same = same_samples and losses(steps) == losses(updates(second))
    row: dict[str, object] = {
        "steps": len(steps),
        "conversations": len(played),
        "turns": {"mean": sum(turns) / len(turns), "max": max(turns)},
        "drawn_tokens": sum(each["tokens"] for each in played),
        "segments": max(line["env/segments"] for line in steps),
        "failed": max(line["env/failed"] for line in steps),
        "gap": max(line["policy/logprob_gap/max"] for line in steps),
        "moved": sum(line["optimizer/gradient_norm"] > 0 for line in steps),
        "same": same,
    }
    whole = row["moved"] == STEPS and row["conversations"] == STEPS * PROMPTS * GROUP
    exact = row["segments"] == 1 and max(line["policy/logprob_gap/max"] for line in steps) < GAP
    return {**row, "meets_bar": whole and exact and same and row["failed"] == 0}


def main() -> None:
    """Prints and writes the table; exit status 1 where a run misses its bar."""
    args = arguments(__doc__).parse_args()
    results = args.results.resolve()
    rows: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder)
        moves = [f"[{letter}]" for letter in string.ascii_uppercase]
        write_tiny_model(folder / "model", (*WORDS, *TAGS, *moves, *NOUNS, *NAMES), TEMPLATE, 1024, spread=0.1)
        hidden = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "NLTK_DATA": str(folder / "nltk_data")}
        os.environ.update(hidden)
        before = Path.cwd()
        os.chdir(folder)
        try:
            for name in SETTINGS:
                rows[name] = measured(name)
                print(name, json.dumps(rows[name]), flush=True)
        finally:
            os.chdir(before)
    files = {package: changed(package) for package in PACKAGES}
    print("changed files", files)
    record("verifiers-cpu", {"environments": rows, "changed": files}, results, packages=PACKAGES)
    sys.exit(any(files.values()) or not all(row["meets_bar"] for row in rows.values()))


if __name__ == "__main__":
    main()
