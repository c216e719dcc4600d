"""The list of runs in `podium watch`: a table with each run's state and reward curve. Imports no jax."""

import base64
import contextlib
import hashlib
import html
import os
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

import yaml

from podium.files import open_file
from podium.observe.curve_svg import small_curve
from podium.observe.history import History
from podium.observe.metrics import ACCURACY, REWARD
from podium.observe.report.read import parse_record
from podium.observe.run_dir import CONFIG, LOCK, METRICS
from podium.observe.text import ago

SHOWN = (REWARD, ACCURACY)
"""Metrics in the list."""
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
    """A run's row in the list. Each refresh reads only what was appended to metrics.jsonl since the previous one."""

    def __init__(self, folder: Path) -> None:
        """Does not read anything yet."""
        self.folder = folder
        self.history = History(SHOWN)
        self.steps: int | None = None
        """Steps that the config asks for; None if the config cannot be read."""
        self.state = ""
        """Whether the run is training, and how long ago it last wrote, as text."""
        self.changed = 0.0
        """Time of the run's last write, in seconds since 1970."""
        self._config_changed = 0.0
        self._file: tuple[int, int] | None = None  # device and inode of the file
        self._read = 0  # bytes

    def refresh(self) -> bool:
        """Read what was appended; returns whether the folder contains a run."""
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
                self.history = History(SHOWN)
                self._read = 0
                self._file = (found.st_dev, found.st_ino)
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # the last line may still be being written
        self._read += len(whole)
        for line in whole.splitlines():
            self.history.add(parse_record(line) or {})


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
    name, history = line.folder.name, line.history
    reward, accuracy = history.last(REWARD), history.last(ACCURACY)
    escaped = html.escape(name, quote=True)
    box = f'<input type="checkbox" name="run" value="{escaped}" aria-label="compare {escaped}">'
    cells = (
        box,
        f'<a href="/runs/{urllib.parse.quote(name, safe="")}">{escaped}</a>',
        str(history.steps) if line.steps is None else f"{history.steps} of {line.steps}",
        "" if reward is None else f"{reward:.3f}",
        small_curve([value for _, value in history.points(REWARD)]),
        "" if accuracy is None else f"{accuracy:.3f}",
        html.escape(line.state),
    )
    return f"<tr>{''.join(f'<td>{cell}' for cell in cells)}</tr>"
