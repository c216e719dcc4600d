"""Profiles steps: jax's trace for Perfetto and TensorBoard, and a table of the slowest operations.

A trace names operations as the compiler does (`fusion.12`). The part of Podium that an operation belongs to is read
from the compiled programs' metadata, where `jax.named_scope` recorded it.
"""

import collections
import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import jax

from podium.config.errors import UsageError

FOLDER = "profile"
"""Folder within a run's folder, with a trace and a table per window of steps."""
TOUCHED = "profile-now"
"""If a user creates this file in a run's folder, the next step is profiled and the file deleted."""
SHOWN = 20
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?op_name=\"([^\"]+)\"", re.MULTILINE)
_WRAPPER = re.compile(r"(?:jit|pjit|jvp|transpose|vmap|checkpoint|remat|shard_map)\(([^()]*)\)")
_BRANCH = re.compile(r"branch_\d+_fun")
_PLUMBING = {"", "main", "while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "branch"}


class Window(NamedTuple):
    """Steps to profile, first and last inclusive, counted from 1."""

    first: int
    last: int


class Operation(NamedTuple):
    """The total time of an operation's events."""

    program: str
    name: str
    """Scopes and kind, such as `layers/attention/dot_general`."""
    seconds: float
    times: int


def parse_window(text: str) -> Window:
    """Parse `--profile FIRST:LAST`. Raises ValueError for any other text."""
    first, colon, last = text.partition(":")
    if not (first.isdecimal() and (last.isdecimal() or not colon)) or not 1 <= int(first) <= int(last or first):
        raise UsageError(f"--profile {text}: expected steps as FIRST:LAST, such as 10:12, counted from 1")
    return Window(int(first), int(last or first))


class Profiler:
    """Traces the steps of a window, and the next step whenever `profile-now` appears in the run's folder."""

    def __init__(self, folder: Path | None, window: Window | None, announce: Callable[[str], None]) -> None:
        """`folder` is the run's folder; None: do not profile in this process. `announce` is called with a line per
        profile.
        """
        self._folder = folder
        self._window = window
        self._announce = announce
        self._until: int | None = None
        self._trace = Path()

    def begin(self, step: int) -> None:
        """Call before step `step` (counted from 1)."""
        if self._folder is None or self._until is not None:
            return
        window = self._window if self._window is not None and self._window.first == step else None
        touched = self._folder / TOUCHED
        if window is None and touched.exists():
            window = Window(step, step)
            touched.unlink(missing_ok=True)
        if window is None:
            return
        self._until = window.last
        self._trace = self._folder / FOLDER / f"steps-{window.first}-{window.last}"
        start_trace(self._trace)

    def end(self, step: int) -> None:
        """Call after step `step`; after the window's last step, writes the trace and the table."""
        if self._until is None or step < self._until:
            return
        self.close()

    def close(self) -> None:
        """Write the trace and the table, if a window is open."""
        if self._until is None:
            return
        self._until = None
        jax.profiler.stop_trace()
        table = "\n".join(operation_table(operations(read_events(self._trace), program_scopes())))
        path = self._trace.with_suffix(".txt")
        path.write_text(table + "\n", encoding="utf-8")
        self._announce(
            f"{table}\nprofile: {path}, and the trace below {self._trace} for ui.perfetto.dev or TensorBoard"
        )


def start_trace(folder: Path) -> None:
    """Start jax's trace into `folder`, without Python's own calls; `jax.profiler.stop_trace` writes it."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would record millions of unrelated calls
    jax.profiler.start_trace(folder, profiler_options=options)


def read_events(folder: Path) -> Iterator[tuple[str, str, float]]:
    """Yield (program, operation, seconds) for every event of a compiled program in a trace.

    Events nest (a loop contains its body); only the innermost events on a thread are yielded.
    """
    for path in sorted(folder.glob("**/*.xplane.pb")):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                yield from _innermost(line.events)


class TraceEvent(Protocol):
    """An event of a trace, as jax's profiler reads it."""

    @property
    def start_ns(self) -> float:
        """Start time in nanoseconds."""
        ...

    @property
    def duration_ns(self) -> float:
        """Duration in nanoseconds."""
        ...

    @property
    def stats(self) -> Iterable[tuple[str, object]]:
        """Properties of the event by name, such as `hlo_op`."""
        ...


def _innermost(events: Iterable[TraceEvent]) -> Iterator[tuple[str, str, float]]:
    found: list[tuple[float, float, str, str]] = []
    for event in events:
        stats = dict(event.stats)
        if "hlo_op" in stats:
            program = re.sub(r"\(\d+\)$", "", str(stats.get("hlo_module", "")))
            found.append((event.start_ns, event.duration_ns, program, str(stats["hlo_op"])))
    found.sort(key=lambda each: (each[0], -each[1]))
    for index, (start, duration, program, operation) in enumerate(found):
        inner = index + 1 < len(found) and found[index + 1][0] + found[index + 1][1] <= start + duration
        if not inner:
            yield program, operation, duration / 1e9


def program_scopes() -> dict[tuple[str, str], str]:
    """The scopes of every operation in this process's compiled programs, by (program, operation)."""
    found = {}
    for executable in jax.local_devices()[0].client.live_executables():
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # some backends do not keep the text
            for module in executable.hlo_modules():
                scopes = _INSTRUCTION.findall(module.to_string())
                found |= {(module.name, name): scope_of(path) for name, path in scopes}
    return found


def scope_of(path: str) -> str:
    """Reduce an operation's path to Podium's names: `jit(step)/transpose(jvp(mlp))/dot` becomes `mlp/dot`."""
    before = None
    while before != path:
        before, path = path, _WRAPPER.sub(lambda found: found[1], path)
    parts = [re.sub(r"[^\w.-].*", "", part) for part in path.split("/")[1:]]
    return "/".join(part for part in parts if part not in _PLUMBING and not _BRANCH.fullmatch(part)) or path


def operations(events: Iterable[tuple[str, str, float]], scopes: dict[tuple[str, str], str]) -> list[Operation]:
    """Sum events by program and scope, longest first; an operation without a scope keeps its own name."""
    seconds: collections.Counter[tuple[str, str]] = collections.Counter()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for program, operation, took in events:
        key = (program.removeprefix("jit_"), scopes.get((program, operation), operation))
        seconds[key] += took  # pyright: ignore[reportArgumentType]  # a Counter of floats
        counts[key] += 1
    return [Operation(*key, took, counts[key]) for key, took in seconds.most_common()]


def operation_table(found: list[Operation]) -> list[str]:
    """Lines of a table of the slowest operations, with their share of the total."""
    total = sum(each.seconds for each in found)
    lines = [f"{'share':>6} {'seconds':>9} {'calls':>8}  {'program':<16} operation"]
    lines += [
        f"{each.seconds / total:6.1%} {each.seconds:9.4f} {each.times:8,}  {each.program:<16} {each.name}"
        for each in found[:SHOWN]
    ]
    rest = found[SHOWN:]
    if rest:
        left = sum(each.seconds for each in rest)
        lines.append(f"{left / total:6.1%} {left:9.4f} {sum(each.times for each in rest):8,}  {len(rest)} others")
    return lines
