"""The list of runs in `podium watch`: a table with each run's state and reward curve. Imports no jax."""

import base64
import contextlib
import hashlib
import html
import json
import os
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

import yaml

from podium.files import open_file
from podium.observe.metrics import ACCURACY, REWARD
from podium.observe.run_dir import CONFIG, LOCK, METRICS
from podium.observe.text import ago, bucket_means

CURVE_POINTS = 60
CURVE_WIDTH = 120
CURVE_HEIGHT = 28
REFRESH_S = 10
"""Seconds between reloads of the list."""
SCRIPT = f'setInterval(() => document.querySelector("input:checked") || location.reload(), {1000 * REFRESH_S});'
"""Reloads the list, unless a run is selected for comparison."""
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
)
"""The content security policy of the list: only its own script may run."""


class RunLine:
    """A run's row in the list; each refresh reads only what was appended to metrics.jsonl since the previous one."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet."""
        self.folder = folder
        self.step = 0
        self.steps: int | None = None
        """Steps that the config asks for; None if it cannot be read."""
        self.rewards: list[float] = []
        """Mean reward of each step."""
        self.accuracy: float | None = None
        """Accuracy of the last evaluation."""
        self.state = ""
        """Whether the run is training, and how long ago it last wrote, as text."""
        self.changed = 0.0
        """Time of the run's last write, in seconds since 1970."""
        self._config_changed = 0.0
        self._file: tuple[int, int] | None = None  # device and inode of the file that was read
        self._read = 0  # bytes

    def refresh(self) -> bool:
        """Read what is new; returns whether the folder contains a run."""
        self.changed, self.state = changed(self.folder), state(self.folder)
        if not is_run(self.folder):
            return False
        with contextlib.suppress(OSError):  # no config
            self._read_config()
        with contextlib.suppress(OSError):  # no metrics yet
            self._append()
        return True

    def _read_config(self) -> None:
        written = (self.folder / CONFIG).stat().st_mtime
        if written == self._config_changed:
            return
        self._config_changed = written
        with open_file(self.folder / CONFIG) as file:
            text = file.read().decode("utf-8", "replace")
        try:
            config = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            config = None
        steps = config.get("steps") if isinstance(config, dict) else None
        self.steps = steps if isinstance(steps, int) else None

    def _append(self) -> None:
        with open_file(self.folder / METRICS) as file:
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) != self._file or found.st_size < self._read:
                self.step = 0
                self.rewards = []
                self.accuracy = None
                self._read = 0
                self._file = (found.st_dev, found.st_ino)
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # the last line may still be being written
        self._read += len(whole)
        for line in whole.splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(record, dict):
            return
        step, reward, accuracy = (record.get(name) for name in ("step", REWARD, ACCURACY))
        self.step = step if isinstance(step, int) else self.step
        self.accuracy = float(accuracy) if isinstance(accuracy, int | float) else self.accuracy
        if isinstance(reward, int | float):
            self.rewards.append(float(reward))


def is_run(folder: Path) -> bool:
    """Whether the folder contains a run's config or metrics."""
    return (folder / CONFIG).is_file() or (folder / METRICS).is_file()


def state(folder: Path) -> str:
    """Whether a run is training, and how long ago it last wrote, as text."""
    doing = "training" if locked(folder / LOCK) else "not training"
    return f"{doing}; last written {ago(time.time() - changed(folder))}"


def locked(lock: Path) -> bool:
    """Whether a local process holds a lock on the file; does not try to take it."""
    try:
        inode, table = lock.stat().st_ino, Path("/proc/locks").read_text()
    except OSError:
        return False
    rows = [line.split() for line in table.splitlines()]
    return any(row[1] == "FLOCK" and row[5].endswith(f":{inode}") for row in rows if len(row) > 5)


def changed(folder: Path) -> float:
    """Time at which a run last wrote a metric or its config, in seconds since 1970."""
    times = [path.stat().st_mtime for path in (folder / METRICS, folder / CONFIG) if path.exists()]
    return max(times, default=0.0)


def list_page(lines: Sequence[RunLine], silent: Sequence[str]) -> str:
    """The list as a page, most recently written run first; `silent` names folders that did not respond in time."""
    rows = "".join(map(_row, sorted(lines, key=lambda line: -line.changed)))
    rows += "".join(f"<tr><td><td>{html.escape(name)}<td><td><td><td><td>does not answer</tr>" for name in silent)
    head = "<thead><tr><th><th>run<th>step<th>reward<th><th>accuracy<th>state</thead>"
    table = (
        f'<form action="/runs"><div class="scroll"><table class="runs">{head}<tbody>{rows}</tbody></table></div>'
        "<p><button>Compare the chosen runs</button></p></form>"
    )
    style = (Path(__file__).parent / "report" / "page.css").read_text("utf-8")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>Podium: runs</title><style>{style}</style>'
        f"<h1>Runs</h1>{table if rows else '<p>No runs yet.</p>'}<script>{SCRIPT}</script>"
    )


def _row(line: RunLine) -> str:
    name = line.folder.name
    escaped = html.escape(name, quote=True)
    box = f'<input type="checkbox" name="run" value="{escaped}" aria-label="compare {escaped}">'
    cells = (
        box,
        f'<a href="/runs/{urllib.parse.quote(name, safe="")}">{escaped}</a>',
        str(line.step) if line.steps is None else f"{line.step} of {line.steps}",
        f"{line.rewards[-1]:.3f}" if line.rewards else "",
        _curve(line.rewards),
        "" if line.accuracy is None else f"{line.accuracy:.3f}",
        html.escape(line.state),
    )
    return f"<tr>{''.join(f'<td>{cell}' for cell in cells)}</tr>"


def _curve(rewards: Sequence[float]) -> str:
    """The rewards as an SVG line without axes; empty for fewer than two steps."""
    means = bucket_means(rewards, CURVE_POINTS)
    if len(means) < 2:
        return ""
    low, span = min(means), max(means) - min(means) or 1.0
    points = " ".join(
        f"{2 + i * (CURVE_WIDTH - 4) / (len(means) - 1):.1f},"
        f"{CURVE_HEIGHT - 2 - (value - low) / span * (CURVE_HEIGHT - 4):.1f}"
        for i, value in enumerate(means)
    )
    return (
        f'<svg class="curve" viewBox="0 0 {CURVE_WIDTH} {CURVE_HEIGHT}" width="{CURVE_WIDTH}" '
        f'height="{CURVE_HEIGHT}" role="img" aria-label="reward, {means[0]:.2f} to {means[-1]:.2f}">'
        f'<polyline points="{points}"/></svg>'
    )
