"""What the user sees of a run while it runs, on stderr: a live view on a terminal, plain lines elsewhere."""

import collections
import time
from collections.abc import Mapping
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from podium.observe.text import clock, shown, sparkline

PHASES = ("rollout", "reward", "score", "update", "sync")
"""Whose seconds of the last step are shown (`time/train/<phase>_s`)."""
RECENT_STEPS = 10
"""Steps whose mean duration gives the time left."""
WIDTH = 100


class ShownCompletion(NamedTuple):
    """A completion to show."""

    prompt: str
    completion: str
    reward: float


class Progress:
    """Follows a run from `with` to its end; an exception or Ctrl-C inside leaves the terminal as it was."""

    def __init__(self, run_name: str, steps: int, console: Console | None = None, *, first_step: int = 0):
        """Show nothing yet; of the run's `steps` an earlier process did `first_step`. Without a console: stderr."""
        self.console = console or Console(stderr=True)
        self._name = run_name
        self._steps = steps
        self._done = first_step
        self._started = self._phase_started = time.monotonic()
        self._step_ended: float | None = None
        self._phase = "start"
        self._phases_seen: set[str] = set()
        self._durations: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)
        self._rewards: list[float] = []
        self._lengths: list[float] = []
        self._metrics: Mapping[str, float] = {}
        self._evaluations: list[tuple[int, float]] = []
        self._sample: ShownCompletion | None = None
        self._notice: str | None = None
        self._live: Live | None = None
        if self.console.is_interactive:
            self._live = Live(self, console=self.console, refresh_per_second=4)

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the live view as it is; what is printed from now on stands below it."""
        if self._live is not None:
            self._live.stop()

    def phase(self, name: str) -> None:
        """Say what is being done from now on: `model`, `rollout`, `update`, `evaluation`, ..."""
        self._phase, self._phase_started = name, time.monotonic()
        if self._live is None and self._notice is not None:
            self.message(self._notice)
            self._notice = None
        if self._live is None and name not in self._phases_seen:
            self.message(f"{name} ...")
        self._phases_seen.add(name)

    def step(self, step: int, metrics: Mapping[str, float], sample: ShownCompletion | None = None) -> None:
        """Show a step that is done: how many are, its metrics by their names, and one of its completions."""
        now = time.monotonic()
        if self._step_ended is not None:  # the first step compiles, and says nothing about the others
            self._durations.append(now - self._step_ended)
        self._step_ended, self._done, self._metrics = now, step, metrics
        self._rewards.append(float(metrics.get("train-reward/total/mean", float("nan"))))
        self._lengths.append(float(metrics.get("train-seq_len/completion/mean", float("nan"))))
        self._sample = sample or self._sample
        if self._live is None:
            self.message(
                f"step {step}/{self._steps}  reward {self._rewards[-1]:.3f}  length {self._lengths[-1]:.1f}  "
                f"{_speed(self._metrics)}  {self._step_s():.2f} s  left {self._left()}"
            )

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """Show the `eval/accuracy` of the weights after `step` steps."""
        accuracy = float(results["eval/accuracy"])
        self._evaluations.append((step, accuracy))
        if self._live is None:
            self.message(f"evaluation at step {step}  accuracy {accuracy:.3f}")

    def message(self, text: str) -> None:
        """Show a line that stays: a warning, a saved checkpoint, how to resume."""
        self.console.print(Text(text), soft_wrap=True)
        self.console.file.flush()

    def notice(self, text: str) -> None:
        """Have a line shown soon. Prints nothing itself, so that a signal's handler may call it in mid-print."""
        self._notice = text

    def _left(self) -> str:
        if not self._durations:
            return "?"
        per_step = sum(self._durations) / len(self._durations)
        return clock(per_step * (self._steps - self._done))

    def _step_s(self) -> float:
        return float(self._metrics.get("time/train/step_s", 0.0))

    def __rich__(self) -> RenderableType:
        """The live view, drawn anew four times a second."""
        now = time.monotonic()
        rows: list[RenderableType] = [self._bar(now), Text(), self._numbers()]
        if self._sample is not None:
            rows += [Text(), _last_sample(self._sample, self._width())]
        title = Text.assemble(("podium ", "bold"), f"{shown(self._name, 40)} ", (clock(now - self._started), "dim"))
        if self._notice is not None:
            rows += [Text(), Text(self._notice, style="bold yellow")]
        return Panel(Group(*rows), title=title, title_align="left", border_style="cyan", width=self._width())

    def _width(self) -> int:
        return min(self.console.width, WIDTH)

    def _bar(self, now: float) -> RenderableType:
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        phase = Text.assemble((self._phase, "bold cyan"), f" {now - self._phase_started:.0f} s")
        row.add_row(
            Text(f"step {self._done}/{self._steps}", style="bold"),
            ProgressBar(total=self._steps, completed=self._done),
            Text.assemble(phase, "   ", (f"{self._left()} left", "dim")),
        )
        return row

    def _numbers(self) -> RenderableType:
        width = max(8, self._width() // 3)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(justify="right", no_wrap=True, min_width=6)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        if self._rewards:
            grid.add_row("reward", f"{self._rewards[-1]:.3f}", Text(sparkline(self._rewards, width), style="green"))
            grid.add_row("length", f"{self._lengths[-1]:.1f}", Text(sparkline(self._lengths, width), style="blue"))
            grid.add_row("step", f"{self._step_s():.1f} s", Text(_seconds(self._metrics)))
        if self._evaluations:
            values = [accuracy for _, accuracy in self._evaluations]
            steps = " > ".join(f"{value:.2f}" for value in values[-6:])
            note = f"{steps}  (step {self._evaluations[-1][0]})"
            grid.add_row("accuracy", f"{values[-1]:.3f}", Text(note, style="magenta"))
        return grid


def _speed(metrics: Mapping[str, float]) -> str:
    return f"{metrics.get('throughput/train/valid_tokens_per_s', 0.0):,.0f} tokens/s"


def _seconds(metrics: Mapping[str, float]) -> str:
    spent = {phase: metrics.get(f"time/train/{phase}_s", 0.0) for phase in PHASES}
    return "  ".join([*(f"{phase} {value:.1f}" for phase, value in spent.items() if value), _speed(metrics)])


def _last_sample(sample: ShownCompletion, width: int) -> RenderableType:
    room = 2 * (width - 16)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("prompt", Text(shown(sample.prompt, room)))
    grid.add_row("answer", Text(shown(sample.completion, room), style="italic"))
    grid.add_row("reward", Text(f"{sample.reward:.2f}", style="green" if sample.reward > 0 else "red"))
    return grid
