"""Shows a run's progress: a live view in a terminal, a chart in a notebook, plain lines elsewhere."""

import collections
import math
import os
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from podium.observe.metrics import HELD_OUT_PAIRS, MARGIN, UPDATES
from podium.observe.notebook import NotebookView, StepRow, in_notebook
from podium.observe.text import clock, shown, sparkline
from podium.terminal import harmless

TURNS = "env/turns/mean"
PHASES = ("rollout", "reward", "score", "update", "sync")
"""Phases whose duration in the last step is shown (`time/train/<phase>_s`)."""
RECENT_STEPS = 10
"""Number of steps whose mean duration is used to estimate the remaining time."""
SIDE_BY_SIDE = 120
"""Terminal width, in columns, from which the sample is shown beside the numbers instead of below them."""
LINE_S = 30.0
"""Seconds between two plain lines during a long phase."""
COMPILED_IN = ("rollout", "update", "score", "evaluation")
"""Phases whose programs are compiled, or loaded from the cache, the first time a process enters them."""


class PhaseProgress(NamedTuple):
    """Progress of a rollout or an evaluation: number of completions, completed ones, tokens drawn."""

    total: int
    done: int
    tokens: int

    def text(self, seconds: float) -> str:
        """Text such as `40 of 64 completions, 3,120 tokens, 0:12 left`; `seconds` have passed since the phase began."""
        left = clock(seconds / self.done * (self.total - self.done)) if self.done else "?"
        return f"{self.done} of {self.total} completions, {self.tokens:,} tokens, {left} left"


class ShownCompletion(NamedTuple):
    """A completion to show."""

    prompt: str
    completion: str
    reward: float


def run_console(*, plain: bool) -> Console:
    """The console of a run: stderr, without a live view if `plain`; in a notebook the cell's output, as plain text."""
    if in_notebook():
        return Console(file=sys.stdout, force_jupyter=False, force_interactive=False, width=100)
    return Console(stderr=True, force_interactive=False if plain else None)


class Progress:
    """Shows a run inside a `with` block, and restores the terminal afterwards."""

    def __init__(self, run_name: str, steps: int, console: Console | None = None, *, first_step: int = 0):
        """Show nothing yet; `first_step` is the number of steps done by earlier processes. Default console: stderr."""
        self.console = console or Console(stderr=True)
        self._name = run_name
        self._steps = steps
        self._done = first_step
        self._started = self._phase_started = time.monotonic()
        self._step_ended: float | None = None
        self._phase, self._first = "start", False
        self._phases_seen: set[str] = set()
        self._advance: PhaseProgress | None = None
        self._line_at = self._started
        self._durations: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)
        self._earning = "reward"
        self._rewards: list[float] = []
        self._lengths: list[float] = []
        self._turns: list[float] = []
        """Mean number of turns in each step; empty where prompts are answered once."""
        self._metrics: Mapping[str, float] = {}
        self._evaluations: list[tuple[int, float]] = []
        self._sample: ShownCompletion | None = None
        self._notice: str | None = None
        self._machine = ""
        self._live: Live | None = None
        if self.console.is_interactive:
            self._live = _View(self, console=self.console, refresh_per_second=4)
        self.notebook = NotebookView(run_name) if in_notebook() else None
        """Output below a notebook's cell, in place of one line per step and the summary; None elsewhere."""
        self._lines = self._live is None and self.notebook is None
        self._terminal: _NoEcho | None = None

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._terminal = _NoEcho()
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Freeze the view; later output appears below it."""
        if self.notebook is not None:
            took = clock(time.monotonic() - self._started)
            unfinished = self._done < self._steps
            more = f"; the same call with name={self._name!r} continues" if unfinished else ""
            self.notebook.line(f"step {self._done}/{self._steps}{self._earned()}  {took}{more}", last=True)
        if self._live is not None:
            self._live.stop()
        if self._terminal is not None:
            self._terminal.restore()

    def machine(self, text: str) -> None:
        """Show the devices: below the live view; as a line elsewhere."""
        self._machine = text
        if self._live is None:
            self.message(text)

    def phase(self, name: str) -> None:
        """Show that a phase begins: `model`, `rollout`, `update`, `evaluation`, ..."""
        self._phase = name
        self._phase_started = time.monotonic()
        self._advance = None
        self._line_at = self._phase_started
        self._first = name not in self._phases_seen
        if self._live is None and self._notice is not None:
            self.message(self._notice)
            self._notice = None
        if self._lines and self._first:
            self.message(f"{name} ...{' (the first compiles)' if name in COMPILED_IN else ''}")
        self._phases_seen.add(name)
        self._draw(name)

    def advance(self, total: int, done: int, tokens: int) -> None:
        """Update the phase's progress: number of completions, completed ones, tokens drawn."""
        now, self._advance = time.monotonic(), PhaseProgress(total, done, tokens)
        text = f"{self._phase}: {self._advance.text(now - self._phase_started)}"
        if self._lines and now - self._line_at >= LINE_S:
            self._line_at = now
            self.message(text)
        self._draw(text)

    def step(self, step: int, metrics: Mapping[str, float], sample: ShownCompletion | None = None) -> None:
        """Show a finished step: its number (from 1), its metrics by name, and one of its completions."""
        now = time.monotonic()
        if self._step_ended is not None:  # the first step compiles, so its duration is not representative
            self._durations.append(now - self._step_ended)
        self._step_ended = now
        self._done = step
        self._metrics = metrics
        self._earning = "margin" if MARGIN in metrics else "reward"  # preferences earn nothing
        self._rewards.append(float(metrics.get(MARGIN, metrics.get("train-reward/total/mean", float("nan")))))
        self._lengths.append(float(metrics.get("train-seq_len/completion/mean", float("nan"))))
        if TURNS in metrics:
            self._turns.append(float(metrics[TURNS]))
        self._sample = sample or self._sample
        if self.notebook is not None:
            entropy = float(metrics.get("rollout/entropy", float("nan")))
            row = StepRow(step, self._rewards[-1], self._lengths[-1], entropy, self._step_s())
            self.notebook.step(row, self._earning)
        self._curve()
        if self._lines:
            self.message(
                f"step {step}/{self._steps}{self._earned()}  length {self._lengths[-1]:.1f}  "
                f"{f'turns {self._turns[-1]:.1f}  ' if self._turns else ''}"
                f"{_speed(self._metrics)}  {self._step_s():.2f} s  left {self._left()}"
            )

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """Show the `eval/accuracy` of the weights after `step` steps."""
        accuracy = float(results["eval/accuracy"])
        self._evaluations.append((step, accuracy))
        self._curve()
        if self._lines:
            pairs = f"  pairs in order {results[HELD_OUT_PAIRS]:.3f}" if HELD_OUT_PAIRS in results else ""
            self.message(f"evaluation at step {step}  accuracy {accuracy:.3f}{pairs}")

    def message(self, text: str) -> None:
        """Print a permanent line: a warning, a saved checkpoint, how to resume."""
        self.console.print(Text(harmless(text)), soft_wrap=True)
        self.console.file.flush()

    def notice(self, text: str) -> None:
        """Show a line at the next refresh. Prints nothing itself, so a signal handler may call it at any time."""
        self._notice = text

    def _curve(self) -> None:
        """Update the chart of a notebook."""
        if self.notebook is not None:
            first = self._done - len(self._rewards) + 1
            rewards = [(step, reward) for step, reward in enumerate(self._rewards, first) if math.isfinite(reward)]
            self.notebook.curve(rewards, self._evaluations)

    def _draw(self, doing: str) -> None:
        """Update the line of a notebook: steps done, reward, time left, and what the run is doing."""
        if self.notebook is not None:
            done = f"step {self._done}/{self._steps}{self._earned()}"
            self.notebook.line(f"{done}  {self._left()} left  {doing}")

    def _earned(self) -> str:
        return f"  {self._earning} {self._rewards[-1]:.3f}" if self._rewards else ""

    def _left(self) -> str:
        if not self._durations:
            return "?"
        per_step = sum(self._durations) / len(self._durations)
        return clock(per_step * (self._steps - self._done))

    def _step_s(self) -> float:
        return float(self._metrics.get("time/train/step_s", 0.0))

    def __rich__(self) -> RenderableType:
        """The live view, redrawn four times a second."""
        now, room = time.monotonic(), self.console.width - 4
        rows: list[RenderableType] = [self._bar(), self._doing(now), Text()]
        if self.console.width >= SIDE_BY_SIDE and self._sample is not None:
            both = Table.grid(padding=(0, 2), expand=True)
            both.add_column(ratio=1)
            both.add_column(ratio=1)
            both.add_row(self._numbers(room // 2 - 2), _last_sample(self._sample, room // 2 - 2))
            rows.append(both)
        else:
            rows.append(self._numbers(room))
            if self._sample is not None:
                rows += [Text(), _last_sample(self._sample, room)]
        title = Text.assemble(("podium ", "bold"), f"{shown(self._name, 40)} ", (clock(now - self._started), "dim"))
        if self._notice is not None:
            rows += [Text(), Text(harmless(self._notice), style="bold yellow")]
        return Panel(
            Group(*rows),
            title=title,
            title_align="left",
            subtitle=Text(self._machine, "dim"),
            subtitle_align="left",
            border_style="cyan",
            width=self.console.width,
        )

    def _numbers(self, width: int) -> RenderableType:
        curves = (
            _Curve(self._earning, self._rewards, ".3f", "green"),
            _Curve("length", self._lengths, ".1f", "blue"),
            _Curve("turns", self._turns, ".1f", "blue"),
        )
        drawn = [curve for curve in curves if curve.values]
        return _numbers(drawn, self._metrics, self._evaluations, width)

    def _bar(self) -> RenderableType:
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        row.add_row(
            Text(f"step {self._done}/{self._steps}", style="bold"),
            ProgressBar(total=self._steps, completed=self._done),
            Text(f"{self._left()} left", style="dim"),
        )
        return row

    def _doing(self, now: float) -> Text:
        """The line with the phase, its seconds, and its progress."""
        seconds = now - self._phase_started
        more = ""
        if self._advance is not None:
            more = self._advance.text(seconds)
        elif self._first and self._phase in COMPILED_IN:
            more = "the first one compiles its programs"
        line = Text.assemble((self._phase, "bold cyan"), f" {seconds:.0f} s   ", (more, "dim"))
        line.truncate(self.console.width - 4)
        return line


class _View(Live):
    """A live view that clears the screen when the width of the terminal changes."""

    _columns = 0

    def refresh(self) -> None:
        """Redraw, on a cleared screen if the width has changed."""
        columns = self.console.width
        if self._columns not in (0, columns):
            self.console.clear()  # rich cannot erase lines that the terminal has wrapped or cut
        self._columns = columns
        super().refresh()


class _NoEcho:
    """Stops the terminal from echoing `^C`, which would shift the view by a line."""

    def __init__(self) -> None:
        self._saved: list[int | list[bytes | int]] | None = None
        try:
            if os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
                return  # in the background, as after `&`, tcgetattr would stop this process
            self._saved = termios.tcgetattr(sys.stdin)
            quiet = termios.tcgetattr(sys.stdin)
            quiet[3] &= ~termios.ECHOCTL
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
        except (termios.error, OSError, ValueError):  # not a terminal
            self._saved = None

    def restore(self) -> None:
        """Restore the terminal's settings."""
        if self._saved is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)
            self._saved = None


class _Curve(NamedTuple):
    """A number of each step."""

    name: str
    values: Sequence[float]
    form: str
    """Format of a value."""
    style: str


def _numbers(
    curves: Sequence[_Curve],
    metrics: Mapping[str, float],
    evaluations: Sequence[tuple[int, float]],
    width: int,
) -> RenderableType:
    """The table of numbers; on narrow terminals the ends of lines are cut, never the labels."""
    label, value = 8, 7
    room = max(4, width - label - value - 4)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, width=label)
    grid.add_column(justify="right", no_wrap=True, width=value)
    grid.add_column(no_wrap=True, overflow="crop", width=room)
    for curve in curves:
        last = format(curve.values[-1], curve.form)
        grid.add_row(curve.name, last, Text(sparkline(curve.values, room), style=curve.style))
    if curves:
        step_s = f"{metrics.get('time/train/step_s', 0.0):.1f} s"
        for index, text in enumerate(_seconds(metrics, room)):
            grid.add_row("" if index else "step", "" if index else step_s, Text(text))
    if evaluations:
        values = [accuracy for _, accuracy in evaluations]
        note = f"  (step {evaluations[-1][0]})"
        kept = max(1, min(len(values), (room - len(note) + 3) // 7))
        steps = " > ".join(f"{value:.2f}" for value in values[-kept:])
        grid.add_row("accuracy", f"{values[-1]:.3f}", Text(steps + note, style="magenta"))
    return grid


def _speed(metrics: Mapping[str, float]) -> str:
    if metrics.get(UPDATES) == 0:
        return "no update"
    return f"{metrics.get('throughput/train/valid_tokens_per_s', 0.0):,.0f} tokens/s"


def _seconds(metrics: Mapping[str, float], width: int) -> list[str]:
    """Seconds by phase, and tokens per second, wrapped to `width`."""
    spent = {phase: metrics.get(f"time/train/{phase}_s", 0.0) for phase in PHASES}
    lines: list[str] = []
    for word in (*(f"{phase} {value:.1f}" for phase, value in spent.items() if value), _speed(metrics)):
        if lines and len(lines[-1]) + 2 + len(word) <= width:
            lines[-1] += f"  {word}"
        else:
            lines.append(word)
    return lines


def _last_sample(sample: ShownCompletion, width: int) -> RenderableType:
    room = 2 * (width - 12)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, width=8)
    grid.add_column(overflow="fold")
    grid.add_row("prompt", Text(shown(sample.prompt, room)))
    grid.add_row("answer", Text(shown(sample.completion, room), style="italic"))
    grid.add_row("reward", Text(f"{sample.reward:.2f}", style="green" if sample.reward > 0 else "red"))
    return grid
