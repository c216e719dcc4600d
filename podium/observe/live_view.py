"""Shows a run's progress: a live view in a terminal, a chart in a notebook, plain lines elsewhere."""

import os
import sys
import termios
import time
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from podium.observe.metrics import ACCURACY, HELD_OUT_PAIRS
from podium.observe.notebook import NotebookView, StepRow, in_notebook
from podium.observe.run_state import EARNED, LENGTH, TURNS, Phase, PhaseProgress, RunState, ShownCompletion
from podium.observe.text import shown, sparkline
from podium.terminal import harmless

PHASES = ("rollout", "reward", "score", "update", "sync")
"""Phases whose duration in the last step is shown (`time/train/<phase>_s`)."""
SIDE_BY_SIDE = 120
"""Terminal width, in columns, from which the sample is shown next to the numbers instead of below them."""
LINE_S = 30.0
"""Seconds between two plain lines during a long phase."""


def run_console(*, plain: bool) -> Console:
    """The console of a run: stderr, without a live view if `plain`; in a notebook the cell's output, as plain text."""
    if in_notebook():
        return Console(file=sys.stdout, force_jupyter=False, force_interactive=False, width=100)
    return Console(stderr=True, force_interactive=False if plain else None)


class Progress:
    """Shows a run inside a `with` block, and restores the terminal afterwards."""

    def __init__(self, run_name: str, steps: int, console: Console | None = None, *, first_step: int = 0):
        """Does not show anything yet. `first_step` is the number of steps done by earlier processes. The default
        console is stderr.
        """
        self.console = console or Console(stderr=True)
        self._state = RunState(run_name, steps, done=first_step)
        self._phases_seen: set[str] = set()
        self._line_at = self._state.started
        self._live = _View(self, console=self.console, refresh_per_second=4) if self.console.is_interactive else None
        self.notebook = NotebookView(run_name) if in_notebook() else None
        """Output below a notebook's cell, instead of one line per step and the summary; None outside notebooks."""
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
        state = self._state
        if self.notebook is not None:
            more = f"; the same call with name={state.name!r} continues" if state.done < state.steps else ""
            self.notebook.line(f"{state.done_text()}  {state.took()}{more}", last=True)
        if self._live is not None:
            self._live.stop()
        if self._terminal is not None:
            self._terminal.restore()

    def machine(self, text: str) -> None:
        """Show the devices: below the live view, or as a line if there is none."""
        self._state.machine = text
        if self._live is None:
            self.message(text)

    def phase(self, name: str) -> None:
        """Show that a phase begins: `model`, `rollout`, `update`, `evaluation`, ..."""
        state, first = self._state, name not in self._phases_seen
        state.phase = Phase(name, first=first)
        self._line_at = state.phase.began
        if self._live is None and state.notice is not None:
            self.message(state.notice)
            state.notice = None
        if self._lines and first:
            self.message(f"{name} ...{' (the first compiles)' if state.phase.compiles else ''}")
        self._phases_seen.add(name)
        self._draw(name)

    def advance(self, total: int, done: int, tokens: int) -> None:
        """Update the phase's progress: number of completions, how many are done, and tokens sampled."""
        now, phase = time.monotonic(), self._state.phase
        phase.advance = PhaseProgress(total, done, tokens)
        text = f"{phase.name}: {phase.advance.text(phase.seconds())}"
        if self._lines and now - self._line_at >= LINE_S:
            self._line_at = now
            self.message(text)
        self._draw(text)

    def step(self, step: int, metrics: Mapping[str, float], sample: ShownCompletion | None = None) -> None:
        """Show a finished step: its number (from 1), its metrics by name, and one of its completions."""
        state = self._state
        state.step(step, metrics, sample)
        if self.notebook is not None:
            earned, length, entropy = map(state.value, (state.earning, LENGTH, "rollout/entropy"))
            self.notebook.step(StepRow(step, earned, length, entropy, state.step_s()), EARNED[state.earning])
        self._curve()
        if self._lines:
            turns = f"turns {state.history.last(TURNS):.1f}  " if TURNS in state.history else ""
            self.message(
                f"{state.done_text()}  length {state.value(LENGTH):.1f}  {turns}{state.speed()}  "
                f"{state.step_s():.2f} s  left {state.left()}"
            )

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """Show the `eval/accuracy` of the weights after `step` steps."""
        accuracy = results[ACCURACY]
        self._state.history.add({"step": step, ACCURACY: accuracy})
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
        self._state.notice = text

    def _curve(self) -> None:
        """Update the chart of a notebook."""
        if self.notebook is not None:
            history = self._state.history
            self.notebook.curve(history.points(self._state.earning), history.points(ACCURACY))

    def _draw(self, doing: str) -> None:
        """Update the line of a notebook: steps done, reward, time left, and what the run is doing."""
        if self.notebook is not None:
            self.notebook.line(f"{self._state.done_text()}  {self._state.left()} left  {doing}")

    def __rich__(self) -> RenderableType:
        """The live view, redrawn four times a second."""
        return _panel(self._state, self.console.width)


def _panel(state: RunState, columns: int) -> RenderableType:
    """The live view of a run on a terminal of this width."""
    room = columns - 4
    rows: list[RenderableType] = [_bar(state), _doing(state.phase, room), Text()]
    if columns >= SIDE_BY_SIDE and state.sample is not None:
        both = Table.grid(padding=(0, 2), expand=True)
        both.add_column(ratio=1)
        both.add_column(ratio=1)
        both.add_row(_numbers(state, room // 2 - 2), _last_sample(state.sample, room // 2 - 2))
        rows.append(both)
    else:
        rows.append(_numbers(state, room))
        if state.sample is not None:
            rows += [Text(), _last_sample(state.sample, room)]
    title = Text.assemble(("podium ", "bold"), f"{shown(state.name, 40)} ", (state.took(), "dim"))
    if state.notice is not None:
        rows += [Text(), Text(harmless(state.notice), style="bold yellow")]
    return Panel(
        Group(*rows),
        title=title,
        title_align="left",
        subtitle=Text(state.machine, "dim"),
        subtitle_align="left",
        border_style="cyan",
        width=columns,
    )


def _bar(state: RunState) -> RenderableType:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    row.add_row(
        Text(f"step {state.done}/{state.steps}", style="bold"),
        ProgressBar(total=state.steps, completed=state.done),
        Text(f"{state.left()} left", style="dim"),
    )
    return row


def _doing(phase: Phase, width: int) -> Text:
    """The line with the phase, its seconds, and its progress."""
    seconds = phase.seconds()
    more = "the first one compiles its programs" if phase.compiles else ""
    if phase.advance is not None:
        more = phase.advance.text(seconds)
    line = Text.assemble((phase.name, "bold cyan"), f" {seconds:.0f} s   ", (more, "dim"))
    line.truncate(width)
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
                return  # in the background (started with `&`), tcgetattr would stop this process
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


def _numbers(state: RunState, width: int) -> RenderableType:
    """The table of numbers; on narrow terminals the ends of lines are cut off, but never the labels."""
    label, value = 8, 7
    room = max(4, width - label - value - 4)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, width=label)
    grid.add_column(justify="right", no_wrap=True, width=value)
    grid.add_column(no_wrap=True, overflow="crop", width=room)
    if state.metrics:
        curves = [
            (EARNED[state.earning], state.earning, f"{state.value(state.earning):.3f}", "green"),
            ("length", LENGTH, f"{state.value(LENGTH):.1f}", "blue"),
        ]
        if TURNS in state.history:
            curves.append(("turns", TURNS, f"{state.history.last(TURNS):.1f}", "blue"))
        for name, metric, last, style in curves:
            values = [each for _, each in state.history.points(metric)]
            grid.add_row(name, last, Text(sparkline(values, room), style=style))
        for index, text in enumerate(_seconds(state, room)):
            grid.add_row("" if index else "step", "" if index else f"{state.step_s():.1f} s", Text(text))
    if evaluations := state.history.points(ACCURACY):
        last_step, last_accuracy = evaluations[-1]
        note = f"  (step {last_step})"
        kept = max(1, min(len(evaluations), (room - len(note) + 3) // 7))
        steps = " > ".join(f"{accuracy:.2f}" for _, accuracy in evaluations[-kept:])
        grid.add_row("accuracy", f"{last_accuracy:.3f}", Text(steps + note, style="magenta"))
    return grid


def _seconds(state: RunState, width: int) -> list[str]:
    """Seconds by phase, and tokens per second, wrapped to `width`."""
    spent = {phase: state.metrics.get(f"time/train/{phase}_s", 0.0) for phase in PHASES}
    lines: list[str] = []
    for word in (*(f"{phase} {value:.1f}" for phase, value in spent.items() if value), state.speed()):
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
