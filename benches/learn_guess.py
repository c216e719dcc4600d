"""Does a tiny model learn to play `guess` in several turns, and not from a coin's rewards? CPU, no download, minutes.

    python -m benches.learn_guess        (needs nothing but Podium)

The game: a number from 1 to 64, 8 guesses, and `larger` or `smaller` after each. A model of 2 layers, with a word for
each number, first imitates games of a player who halves the interval with three of four guesses and otherwise guesses
at random: it knows the form and what can be done, and finds a third of the numbers. Then it trains with GRPO, once per
seed, and as a control with the rewards of a coin. Success, which is the number found, and turns are counted here from
the recorded conversations, of the first and of the last FIRST_AND_LAST steps, with 95 % intervals. Prints a table and
writes benches/results/learn-guess-cpu.json; exit status 1 where a bar is missed.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benches.demo import seeds_of
from benches.environments import TEMPLATE, WORDS
from benches.learn_tools import answers, conversations, mean, share
from benches.recipes import write_tiny_model
from benches.record import arguments, record
from podium.config.schema import Config
from podium.observe.run_dir import Fork
from podium.tasks.games.guess import GuessGame
from podium.tasks.task import TaskSource
from podium.train.loop import train

LARGEST, TURNS = 64, 8
FIRST_AND_LAST = 3
"""Steps that are put together at the start and at the end of a run."""
GAMES, IMITATED = 4000, 400
"""Games of the player, and steps of imitation."""
HALVED = 0.75
"""Share of the player's guesses that halve the interval; the others are random."""
STEPS = 60
PAID, TOSSED = {"correct": 1.0}, {"correct": 0.0, "benches.learn_guess:coin": 1.0}
"""The rewards of a run and of a control."""
TOSSES = random.Random(0)


def coin(completion: str) -> float:
    """A reward that does not depend on what was played."""
    return float(TOSSES.random() < 0.5)


def halving(number: int, reply: str) -> int:
    """The next guess of a player who began with 32 and halves the interval, after a reply to one of his guesses."""
    step = max(1, (number & -number) // 2)
    return max(1, min(LARGEST, number + (step if reply == "larger" else -step)))


def game_played(player: random.Random) -> list[dict[str, str]]:
    """Messages of one game of the player."""
    (prompt,) = GuessGame(TaskSource(), largest=LARGEST, turns=TURNS, size=1).prompts("train")
    messages = [{"role": "user", "content": prompt.question}]
    number, best = player.randint(1, LARGEST), LARGEST // 2
    for _ in range(TURNS):
        guess = best if player.random() < HALVED else player.randint(1, LARGEST)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            return messages
        reply = "larger" if guess < number else "smaller"
        best = halving(guess, reply)
        messages.append({"role": "user", "content": reply})
    return messages[:-1]


def settings(name: str, folder: Path, seed: int, **rest: Any) -> Config:
    """A run of the tiny model in `folder`."""
    common = {
        "name": name,
        "runs_dir": str(folder / "runs"),
        "model": str(folder / "model"),
        "seed": seed,
        "grading": {"workers": 0},
        "environments": {"workers": 0, "group_seed": "own"},
        "eval": {"at_start": False, "at_end": False},
        "metrics": {"samples_every": 1},
    }
    return Config.model_validate(common | rest)


def trainer(learning_rate: float) -> dict[str, Any]:
    """Settings of the update."""
    optimizer = {"learning_rate": learning_rate, "warmup_steps": 4}
    return {"dtype": "float32", "rows_per_device": 64, "remat": "none", "optimizer": optimizer}


def imitate(folder: Path) -> None:
    """Train `folder/runs/start`: a new model imitates the player's games."""
    words = (*WORDS, *map(str, range(1, LARGEST + 1)), "larger", "smaller")
    write_tiny_model(folder / "model", words, TEMPLATE, 128, spread=0.1)
    player = random.Random(0)
    games = folder / "games.jsonl"
    games.write_text("".join(json.dumps({"messages": game_played(player)}) + "\n" for _ in range(GAMES)))
    config = settings(
        "start", folder, 0,
        steps=IMITATED,
        prompts_per_step=128,
        group_size=1,
        algorithm={"recipe": "sft"},
        tasks=[{"name": "chat", "path": str(games)}],
        rollout={"dtype": "float32", "max_prompt_tokens": 96, "max_new_tokens": 2},
        train=trainer(3e-3),
        checkpoint={"every_steps": 0},
    )  # fmt: skip
    train(config, plain=True)


def measured(games: list[dict[str, Any]]) -> dict[str, Any]:
    """Success and guesses of recorded games."""
    return {
        "games": len(games),
        "success": share(sum(game["parts"]["correct"] > 0 for game in games), len(games)),
        "turns": mean([len(answers(game)) for game in games]),
    }


def learn(name: str, rewards: dict[str, float], seed: int, folder: Path) -> dict[str, Any]:
    """Train from `folder/runs/start`; what happened in the games of the first and of the last steps."""
    config = settings(
        name, folder, seed,
        steps=STEPS,
        prompts_per_step=8,
        group_size=32,
        tasks=[{"name": "guess", "options": {"largest": LARGEST, "turns": TURNS}, "rewards": rewards}],
        rollout={
            "dtype": "float32", "slots": 256, "prefill_rows": 64, "refill_steps": 2, "max_prompt_tokens": 48,
            "max_new_tokens": 2, "max_episode_tokens": 96,
        },
        algorithm={"recipe": "grpo", "mask_truncated": False},
        train=trainer(1e-3),
        checkpoint={"every_steps": 0},
    )  # fmt: skip
    began = time.process_time()
    train(config, fork=Fork(str(folder / "runs" / "start"), None), plain=True)
    cpu_s = round(time.process_time() - began, 1)
    games = conversations(folder / "runs" / name)
    steps = sorted(games)
    by_step = [measured(games[step]) for step in steps]
    first, last = (
        [game for step in part for game in games[step]] for part in (steps[:FIRST_AND_LAST], steps[-FIRST_AND_LAST:])
    )
    return {
        "name": name,
        "seed": seed,
        "cpu_s": cpu_s,
        "first": measured(first),
        "last": measured(last),
        "success_by_step": [each["success"]["mean"] for each in by_step],
        "turns_by_step": [each["turns"]["mean"] for each in by_step],
    }


def meets_bar(row: dict[str, Any], *, control: bool) -> bool:
    """Whether success rose and guesses became fewer beyond the intervals; for a control, whether it did not rise."""
    first, last = row["first"], row["last"]
    rose = last["success"]["low"] > first["success"]["high"]
    fell = last["turns"]["high"] < first["turns"]["low"]
    return not rose if control else rose and fell


class Learns(Protocol):
    """Trains a run with these rewards and this seed from what `imitate` left in a folder; its figures."""

    def __call__(self, name: str, rewards: dict[str, float], seed: int, folder: Path) -> dict[str, Any]:
        """Train it."""
        ...


class Passes(Protocol):
    """Whether a run's figures are as they must be, or those of a control."""

    def __call__(self, row: dict[str, Any], *, control: bool) -> bool:
        """Judge it."""
        ...


def compare(result: str, about: str | None, imitate: Callable[[Path], None], learn: Learns, meets_bar: Passes) -> None:
    """Train runs and controls, once per seed; print and write the table; exit status 1 where one misses its bar."""
    parser = arguments(about)
    parser.add_argument("--seeds", type=seeds_of, default=[0, 1, 2], help="comma-separated")
    args = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {"runs": [], "control": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        imitate(folder)
        for kind, rewards in (("runs", PAID), ("control", TOSSED)):
            for seed in args.seeds:
                row = learn(f"{kind}-{seed}", rewards, seed, folder)
                row["meets_bar"] = meets_bar(row, control=kind == "control")
                rows[kind].append(row)
                print(row["name"], row["first"], row["last"], f"{row['cpu_s']:.0f} CPU s", flush=True)
    record(result, rows, args.results)
    sys.exit(not all(row["meets_bar"] for kind in rows.values() for row in kind))


def main() -> None:
    """Print and write the table; exit status 1 where a run misses its bar."""
    compare("learn-guess-cpu", __doc__, imitate, learn, meets_bar)


if __name__ == "__main__":
    main()
