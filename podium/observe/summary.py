"""Ends a run: writes summary.json and prints the summary, both from the run's files."""

import importlib.metadata
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

import yaml
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from podium.config.imports import SESSION
from podium.files import to_json, write_atomically
from podium.observe.chart import MARK, reward_curve
from podium.observe.history import Answers, History, Point, padding_share, read_answers, read_history
from podium.observe.identity import SUMMARY
from podium.observe.metrics import ACCURACY, HELD_OUT_PAIRS, PAIRS, REWARD, UPDATES
from podium.observe.run_dir import CONFIG, CURVE, METRICS, SAMPLES
from podium.observe.text import clock, shown

PACKAGES = ("podium-rl", "jax", "jaxlib", "optax", "orbax-checkpoint", "transformers", "numpy")
"""Packages whose versions a run records."""
MAX_WIDTH = 100
"""Maximum columns of the printed summary."""
CHART_ROWS = 5
"""Rows of bars in the chart; axis and legend take three more."""
LABEL_WIDTH = 8
FILES = (CURVE, METRICS, SAMPLES, CONFIG, "checkpoints")
"""Files of a run's folder that the summary names; docs/metrics.md lists the others."""


def save_summary(folder: Path) -> None:
    """Write the run's summary.json."""
    write_atomically(folder / SUMMARY, to_json(make_summary(folder), indent=2) + "\n")


class RewardRange(TypedDict):
    """The reward of a run's first and last step; None if it has no steps."""

    first: float | None
    last: float | None


class EvaluatedStep(TypedDict):
    """An evaluation's step and accuracy; None if absent."""

    step: int | None
    accuracy: float | None


class Evaluations(TypedDict):
    """The evaluation before training, and the last one."""

    initial: EvaluatedStep
    final: EvaluatedStep


class Summary(TypedDict):
    """The content of summary.json."""

    name: str
    model: str
    steps: int
    steps_without_update: int
    wall_s: float
    cpu_s: float
    reward: RewardRange
    eval: Evaluations
    versions: dict[str, str]
    commit: str | None


def make_summary(folder: Path) -> Summary:
    """The content of summary.json (see docs/metrics.md) for the run in `folder`, finished or not."""
    history = read_history(folder)
    config = _settings(folder)
    rewards, accuracies = history.points(REWARD), history.points(ACCURACY)
    initial = [point for point in accuracies if point[0] == 0]
    final = [point for point in accuracies if point[0] > 0]
    return {
        "name": config["name"],
        "model": config["model"],
        "steps": history.steps,
        "steps_without_update": _idle(history),
        "wall_s": history.last("time/wall_s") or 0.0,
        "cpu_s": history.last("time/cpu_s") or 0.0,
        "reward": {"first": rewards[0][1] if rewards else None, "last": rewards[-1][1] if rewards else None},
        "eval": {"initial": _evaluation(initial[:1]), "final": _evaluation(final[-1:])},
        "versions": versions(),
        "commit": commit(),
    }


def _idle(history: History) -> int:
    """Number of steps with nothing to train on."""
    return sum(updates == 0 for _, updates in history.points(UPDATES))


class _Settings(TypedDict):
    name: str
    model: str
    steps: int


def _settings(folder: Path) -> _Settings:
    """Read the settings that the run wrote; they may be invalid in this version."""
    return yaml.safe_load((folder / CONFIG).read_text())


def _evaluation(point: list[Point]) -> EvaluatedStep:
    step, accuracy = point[0] if point else (None, None)
    return {"step": step, "accuracy": accuracy}


def versions() -> dict[str, str]:
    """Versions of Python and of PACKAGES, without packages that are not installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of Podium's checkout, with `-dirty` if files differ from it; None outside a checkout."""
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
    except (OSError, subprocess.TimeoutExpired):  # git is missing, or the disk does not respond
        return None
    return described.stdout.strip() or None


def print_summary(folder: Path, console: Console) -> None:
    """Print the result of a run: accuracy and an answer before and after, files, next commands.

    Prints at most 23 lines at 80 columns (unless a command is longer than a line), so that nothing scrolls out of a
    terminal with 24 lines. Commands are printed below the frame, each on its own line, for copying.
    """
    history = read_history(folder)
    width = min(console.width, MAX_WIDTH)
    rows: list[RenderableType] = [_headline(history)]
    bars, marks, legend = REWARD, ACCURACY, _legend("reward of each step", "accuracy, held out")
    if PAIRS in history:  # preferences have no rewards
        bars, marks, legend = PAIRS, HELD_OUT_PAIRS, _legend("pairs in order of each step", "held out")
    if bars in history:
        curve = reward_curve(history.points(bars), history.points(marks), width=width - 6, height=CHART_ROWS)
        rows += [legend, curve]
    answers = read_answers(folder)
    if answers is not None:
        rows.append(_before_and_after(answers, width))
    title = f"podium  {shown(folder.name, 40)}"
    console.print(Panel(Group(*rows), title=title, title_align="left", width=width))
    console.print(_files(folder), no_wrap=True, overflow="ellipsis")
    planned = _settings(folder)["steps"]
    if history.steps < planned:
        stopped = f"stopped after step {history.steps} of {planned}; to continue"
        ours = not _names_session_objects(_settings(folder))
        console.print(Text(f"{stopped}:" if ours else f"{stopped}, repeat the call with:", style="bold"))
        commands = [continue_command(folder) if ours else _name_argument(folder)]
    else:
        console.print(Text("next:", style="bold"))
        commands = next_commands(folder)
    for command in commands:
        console.print(Text(f"  {command}"), soft_wrap=True)


def how_to_continue(folder: Path) -> str:
    """How to continue a run from its last checkpoint: a command, or the argument to add to the Python call."""
    if _names_session_objects(_settings(folder)):
        return f"repeat the call with {_name_argument(folder)}"
    return continue_command(folder)


def _name_argument(folder: Path) -> str:
    return f'name="{folder.name}"'


def _names_session_objects(value: object) -> bool:
    """Whether settings name an object that exists only in the run's Python session."""
    if isinstance(value, dict):
        return any(map(_names_session_objects, (*value, *value.values())))
    if isinstance(value, list):
        return any(map(_names_session_objects, value))
    return isinstance(value, str) and value.startswith(f"{SESSION}:")


def _legend(bars: str, marks: str) -> Text:
    return Text.assemble((bars, "green"), "   ", (f"{MARK} {marks}", "magenta"))


def _headline(history: History) -> Text:
    text = Text()
    pairs = HELD_OUT_PAIRS in history
    if evaluated := history.points(HELD_OUT_PAIRS if pairs else ACCURACY):
        first, last = evaluated[0], evaluated[-1]
        text.append("held-out pairs in order  " if pairs else "accuracy on held-out questions  ")
        text.append(f"{first[1]:.3f}", style="bold")
        text.append(f" (step {first[0]})")
        if last[0] > first[0]:
            text.append(" -> ")
            text.append(f"{last[1]:.3f}", style="bold green" if last[1] > first[1] else "bold red")
            text.append(f" (step {last[0]})")
        text.append("\n")
    idle = f" ({count} without an update)" if (count := _idle(history)) else ""
    padding = "" if (share := padding_share(history)) is None else f", updates {share:.0%} padding"
    text.append(f"{history.steps} steps{idle} in {times(history)}{padding}", style="dim")
    return text


def times(history: History) -> str:
    """The wall time and the CPU time of a run, in words."""
    wall, cpu = (clock(history.last(name) or 0.0) for name in ("time/wall_s", "time/cpu_s"))
    return f"{wall}, {cpu} of CPU time"


def _before_and_after(answers: Answers, width: int) -> Table:
    line = width - 4 - LABEL_WIDTH - 2  # without the frame, the label and the space after it
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, width=LABEL_WIDTH)
    grid.add_column(overflow="fold")
    grid.add_row("question", Text(shown(answers.question, line), no_wrap=True))
    grid.add_row("expected", Text(shown(answers.expected, line), no_wrap=True))
    grid.add_row("before", Text(_folded(answers.before, line), style="italic"))
    grid.add_row("after", Text(_folded(answers.after, line), style="italic green"))
    return grid


def _folded(text: str, width: int) -> str:
    """Wrap the text to at most two lines of `width` characters."""
    line = shown(text, 2 * width)
    return f"{line[:width]}\n{line[width:]}" if len(line) > width else line


def _files(folder: Path) -> Text:
    """The run's folder, with the names of the most useful files."""
    found = ", ".join(name for name in FILES if (folder / name).exists())
    return Text.assemble((f"{folder}/ ", "bold"), (found, "dim"))


def next_commands(folder: Path) -> list[str]:
    """Commands to try after a complete run, relative to the current working directory."""
    podium, run = _program(), shlex.quote(str(folder))
    return [f"{podium} eval {run} --show 5", f"{podium} export {run} {shlex.quote(f'{folder}-model')}"]


def continue_command(folder: Path) -> str:
    """The command that continues a run from its last checkpoint, relative to the current working directory."""
    return f"{_program()} train {shlex.quote(str(folder / CONFIG))}"


def _program() -> str:
    """The `podium` command as a shell must call it: by path if the environment is not activated."""
    installed = Path(sys.executable).parent / "podium"
    found = shutil.which("podium")
    if not installed.exists() or (found and Path(found).resolve() == installed.resolve()):
        return "podium"
    here = installed.relative_to(Path.cwd()) if installed.is_relative_to(Path.cwd()) else installed
    return shlex.quote(str(here))
