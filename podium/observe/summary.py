"""The end of a run: writes summary.json and prints the summary, both from the run's files."""

import importlib.metadata
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from podium.files import to_json, write_atomically
from podium.observe.chart import MARK, reward_curve
from podium.observe.history import Answers, History, Point, read_answers, read_history
from podium.observe.run_dir import CONFIG, CURVE, LENGTHS, METRICS, SAMPLES, SUMMARY
from podium.observe.text import clock, shown

PACKAGES = ("podium-rl", "jax", "jaxlib", "optax", "orbax-checkpoint", "transformers", "numpy")
"""Packages whose versions a run records."""
ANSWER_LENGTH = 240


def save_summary(folder: Path) -> None:
    """Write summary.json of the run in `folder`."""
    write_atomically(folder / SUMMARY, to_json(make_summary(folder), indent=2) + "\n")


def make_summary(folder: Path) -> dict[str, Any]:
    """The content of summary.json (docs/metrics.md lists it) for the run in `folder`, as far as it has come."""
    history = read_history(folder)
    config = yaml.safe_load((folder / CONFIG).read_text())
    initial = [point for point in history.accuracies if point[0] == 0]
    final = [point for point in history.accuracies if point[0] > 0]
    return {
        "name": config["name"],
        "model": config["model"],
        "steps": history.steps,
        "steps_without_update": history.steps_without_update,
        "wall_s": history.wall_s,
        "cpu_s": history.cpu_s,
        "reward": {
            "first": history.rewards[0][1] if history.rewards else None,
            "last": history.rewards[-1][1] if history.rewards else None,
        },
        "eval": {"initial": _evaluation(initial[:1]), "final": _evaluation(final[-1:])},
        "versions": versions(),
        "commit": commit(),
    }


def _evaluation(point: list[Point]) -> dict[str, int | float | None]:
    step, accuracy = point[0] if point else (None, None)
    return {"step": step, "accuracy": accuracy}


def versions() -> dict[str, str]:
    """Versions of Python and of PACKAGES; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the checkout that Podium runs from, with `-dirty` if files differ; None without a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git, or the checkout is on a disk that does not respond
        return None
    return described.stdout.strip() or None


def print_summary(folder: Path, console: Console) -> None:
    """Print the result of the run in `folder`: accuracy and an answer before and after, files, next commands."""
    history = read_history(folder)
    name = shown(folder.name, 40)
    rows: list[RenderableType] = [_headline(history)]
    if history.rewards:
        width = min(console.width, 100) - 6
        legend = Text.assemble(("reward of each step", "green"), "   ", (f"{MARK} accuracy, held out", "magenta"))
        rows += [Text(), legend, reward_curve(history.rewards, history.accuracies, width=width)]
    answers = read_answers(folder)
    if answers is not None:
        rows += [Text(), _before_and_after(answers)]
    rows += [Text(), _files(folder), Text(), _next_commands(folder, history)]
    console.print(Panel(Group(*rows), title=f"podium  {name}", title_align="left", width=min(console.width, 100)))


def _headline(history: History) -> Text:
    text = Text()
    if history.accuracies:
        first, last = history.accuracies[0], history.accuracies[-1]
        text.append("accuracy on held-out questions  ")
        text.append(f"{first[1]:.3f}", style="bold")
        text.append(f" (step {first[0]})")
        if last[0] > first[0]:
            text.append(" -> ")
            text.append(f"{last[1]:.3f}", style="bold green" if last[1] > first[1] else "bold red")
            text.append(f" (step {last[0]})")
        text.append("\n")
    idle = f" ({history.steps_without_update} without an update)" if history.steps_without_update else ""
    took = f"{clock(history.wall_s)}, {clock(history.cpu_s)} of CPU time"
    text.append(f"{history.steps} steps{idle} in {took}", style="dim")
    return text


def _before_and_after(answers: Answers) -> Table:
    grid = _grid()
    grid.add_row("question", Text(shown(answers.question, ANSWER_LENGTH)))
    grid.add_row("expected", Text(shown(answers.expected, ANSWER_LENGTH)))
    grid.add_row("before", Text(shown(answers.before, ANSWER_LENGTH), style="italic"))
    grid.add_row("after", Text(shown(answers.after, ANSWER_LENGTH), style="italic green"))
    return grid


def _files(folder: Path) -> Table:
    kinds = {
        CURVE: "chart of reward and accuracy",
        METRICS: "all metrics, one line per step",
        SAMPLES: "sample completions with their rewards",
        LENGTHS: "tokens per prompt and completion",
        SUMMARY: "this summary, for scripts",
        CONFIG: "the settings",
        "checkpoints": "weights and optimizer",
        "tensorboard": "tensorboard --logdir " + str(folder),
        "wandb": "wandb sync (uploads the offline run)",
    }
    grid = _grid()
    grid.add_row("files", Text(f"{folder}/", style="bold"))
    for name, kind in kinds.items():
        if (folder / name).exists():
            grid.add_row("", Text.assemble(f"{name:<16}", (kind, "dim")))
    return grid


def next_commands(folder: Path, steps: int) -> list[str]:
    """Commands to try after a run of `steps` steps, written for this process's working directory."""
    podium = _program()
    run = shlex.quote(str(folder))
    config = shlex.quote(str(folder / CONFIG))
    again = f"{podium} train {config} --set steps={2 * max(1, steps)}"
    schedule = yaml.safe_load((folder / CONFIG).read_text())["train"]["optimizer"]["schedule"]
    if schedule != "constant":  # the schedule ended at the last step, so more steps need a new run
        again += f" --set name={shlex.quote(folder.name + '-more')} --from {run}"
    return [f"{podium} eval {run} --show 5", f"{podium} export {run} {shlex.quote(f'{folder}-model')}", again]


def _program() -> str:
    """The `podium` command as a shell must call it: by path if the environment is not activated."""
    installed = Path(sys.executable).parent / "podium"
    found = shutil.which("podium")
    if not installed.exists() or (found and Path(found).resolve() == installed.resolve()):
        return "podium"
    here = installed.relative_to(Path.cwd()) if installed.is_relative_to(Path.cwd()) else installed
    return shlex.quote(str(here))


def _next_commands(folder: Path, history: History) -> Table:
    grid = _grid()
    for index, command in enumerate(next_commands(folder, history.steps)):
        grid.add_row("" if index else "try next", Text(command))
    return grid


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=8)
    grid.add_column(overflow="fold")
    return grid
