"""Files that a run appends to or replaces whole, such that a kill at any instant leaves them readable.

A record is one line of JSON, flushed when written. Which files a run has is `podium.observe.run_dir`.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]


class RunFileError(ValueError):
    """A file or folder of a run that cannot be written, or does not hold what Podium writes."""


class JsonLines:
    """A file that grows by one line of JSON per record."""

    def __init__(self, path: Path):
        """Open `path` for appending."""
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one record and hand it to the operating system. Raises RunFileError where the disk takes no more."""
        try:
            self._file.write(to_json(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunFileError(
                f"{self.path} cannot be written: {error.strerror}; free some space and run the same command again, "
                "it continues from the last checkpoint"
            ) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def to_json(record: Record, *, indent: int | None = None) -> str:
    """The record as strict JSON: numpy numbers as numbers, what is not finite as null."""
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # a numpy scalar or array
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):  # a lone surrogate has no UTF-8 form
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, oldest first; none if there is no file. A last line that was cut by a kill is left out.

    Raises RunFileError where another line is not a record.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    complete, torn = lines[:-1], lines[-1]
    records = [_parse(line, f"{path}:{number}") for number, line in enumerate(complete, start=1)]
    if torn:
        try:  # complete but for its line end
            records.append(_parse(torn, str(path)))
        except RunFileError:
            return records
    return records


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RunFileError(f"{where} is not a line of JSON ({error}); repair it or delete the line") from error
    if not isinstance(record, dict):
        raise RunFileError(f"{where} holds {line[:40]!r} and each line must be an object; repair it or delete the line")
    return record


def drop_lines_after(path: Path, step: int) -> None:
    """Keep the records of `path` up to `step`, in one atomic replacement; a torn last line goes too."""
    if not path.exists():
        return
    kept = [record for record in read_lines(path) if record.get("step", 0) <= step]
    write_atomically(path, "".join(to_json(record) + "\n" for record in kept))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content`, text as UTF-8: readers and a kill see the old content or the new, never a part.

    Raises RunFileError where the folder cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RunFileError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)  # there only if it was not put in place
