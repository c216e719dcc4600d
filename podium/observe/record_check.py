"""Checks that a run's records are still as they were when its checkpoint was saved.

Each checkpoint stores the size and digest of every file of records. A resumed run compares them, removes duplicate
lines, and reports what is missing or has changed. Imports no jax.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import xxhash

from podium.files import open_file, write_atomically

SHOWN = 5
"""Maximum number of missing steps to list."""


class Extent(TypedDict):
    """Size and digest of a file of records at one time."""

    lines: int
    size: int
    """Size in bytes."""
    digest: str
    """XXH3 digest of the file, 128 bits, hexadecimal."""


class Ledger:
    """Follows files that only grow; each call reads what was appended since the last one."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Follow the files of these names in a folder; does not read anything yet."""
        self._tails = {folder / name: _Tail() for name in names}

    def extents(self) -> dict[str, Extent]:
        """The extent of every file by name; a file that does not exist counts as empty."""
        return {path.name: tail.extent(path) for path, tail in self._tails.items()}


class _Tail:
    """Incremental digest and extent of the part of a file that has been read so far."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._lines = self._size = 0

    def extent(self, path: Path) -> Extent:
        with contextlib.suppress(FileNotFoundError), open_file(path) as file:
            file.seek(self._size)
            while block := file.read(1 << 20):
                self._digest.update(block)
                self._lines += block.count(b"\n")
                self._size += len(block)
        return Extent(lines=self._lines, size=self._size, digest=self._digest.hexdigest())


def check_records(path: Path, saved: Extent, step: int, *, every_step: bool, checkpoints: Sequence[int]) -> str | None:
    """Compare a file of records with its state when `step` was saved. If only duplicate lines differ, remove them.

    Lines that were appended after the checkpoint do not count.

    Args:
        path: The file, which may be missing.
        saved: Its size and digest at the checkpoint.
        step: The step of the checkpoint.
        every_step: Whether the file has a line for each step.
        checkpoints: All saved steps of the run.

    Returns:
        A sentence that says what is wrong, or what was repaired; None if nothing differs.
    """
    data = path.read_bytes() if path.is_file() else b""
    lines = data.splitlines(keepends=True)
    if _begins_with(data, saved):
        never = missing_steps(_steps(lines), step) if every_step else []
        return f"{path.name} has no line for {listed(never)}: the run ended before it was written" if never else None
    once = list(dict.fromkeys(lines))
    if _begins_with(b"".join(once), saved):
        write_atomically(path, b"".join(once))
        doubled = len(lines) - len(once)
        return f"{path.name} had {doubled} doubled line{'s' if doubled > 1 else ''}: removed, nothing is lost"
    lost = missing_steps(_steps(lines), step) if every_step else []
    what = _difference(path, lines, saved, step) + (f"; {listed(lost)} {_are(lost)} missing" if lost else "")
    earlier = [each for each in checkpoints if lost and each < lost[0]]
    way_out = (
        f"to record them again, stop, delete the checkpoints after step {earlier[-1]}, and run the same command again"
        if earlier
        else "put back a copy if you have one"
    )
    return f"{path.name} has changed since step {step} was saved: {what}; the run continues; {way_out}"


def missing_steps(steps: Sequence[int], last: int) -> list[int]:
    """The numbers from 1 to `last` that are not in `steps`."""
    return sorted(set(range(1, last + 1)) - set(steps))


def listed(steps: Sequence[int]) -> str:
    """The first steps of a list, in words."""
    noun = "step" if len(steps) == 1 else "steps"
    more = f" and {len(steps) - SHOWN} more" if len(steps) > SHOWN else ""
    return f"{noun} {', '.join(map(str, steps[:SHOWN]))}{more}"


def _begins_with(data: bytes, saved: Extent) -> bool:
    return len(data) >= saved["size"] and xxhash.xxh3_128_hexdigest(data[: saved["size"]]) == saved["digest"]


def _difference(path: Path, lines: Sequence[bytes], saved: Extent, step: int) -> str:
    if not path.is_file():
        return f"the file, which had {saved['lines']} lines, is missing"
    kept = [line for line in lines if (number := _step(line)) is None or number <= step]
    if len(kept) == saved["lines"]:
        return "lines have changed"
    return f"it has {len(kept)} of {saved['lines']} lines up to that step"


def _are(steps: Sequence[int]) -> str:
    return "is" if len(steps) == 1 else "are"


def _steps(lines: Sequence[bytes]) -> list[int]:
    """The step numbers of the lines that record a training step, not an evaluation."""
    return [step for line in lines if (step := _step(line)) is not None and b'"eval/' not in line]


def _step(line: bytes) -> int | None:
    """The step of a record; None if the line is not a record of a step."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
