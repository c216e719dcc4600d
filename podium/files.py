"""Files that a run appends to or replaces whole, such that a kill at any instant leaves them readable.

A record is one line of JSON, flushed when written. Which files a run has is `podium.observe.run_dir`.
"""

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
BUCKETS = ("gs://", "s3://")


class RunFileError(ValueError):
    """A file or folder of a run that cannot be written, or does not hold what Podium writes."""


def as_path(text: str) -> Path:
    """A path of this machine, or of a bucket where the text begins with gs:// or s3://: with pathlib's methods too."""
    if not text.startswith(BUCKETS):
        return Path(text)
    from etils import epath
    from fsspec import config as fsspec_settings

    for store in ("gcs", "s3"):
        fsspec_settings.conf.setdefault(store, {})["use_listings_cache"] = False  # other hosts write there too
    for library in ("gcsfs", "s3fs"):  # which log the tracebacks of what they then raise
        logging.getLogger(library).setLevel(logging.CRITICAL)
    return epath.Path(text)  # pyright: ignore[reportReturnType]  # pathlib's methods without its type


def user_cache(name: str) -> Path:
    """The folder of this user's caches of one kind: `$XDG_CACHE_HOME/podium/NAME`, or below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podium" / name


def in_bucket(path: Path) -> bool:
    """Whether the path is of a bucket."""
    return str(path).startswith(BUCKETS)


def absolute(path: Path) -> Path:
    """The path from the root on; those of buckets always are."""
    return path if in_bucket(path) else path.absolute()


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
            way_out = "run the same command again, it continues from the last checkpoint"
            raise RunFileError(f"{why_not_written(self.path, error)}; {way_out}") from error

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
    """The records of a file, oldest first; none if there is no file.

    A last line that was cut by a kill is left out, and so are the zeros that a crash of the machine leaves at the end.

    So are last lines with zero bytes, which a file system leaves of what a host had not written when it went down.

    Raises RunFileError where another line is not a record.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    while len(lines) > 1 and (not lines[-1] or b"\0" in lines[-1]) and b"\0" in lines[-2]:
        lines[-2:] = [b""]
    complete, torn = lines[:-1], lines[-1]
    records = [parse_object(line, f"{path}:{number}") for number, line in enumerate(complete, start=1)]
    if torn:
        try:  # complete but for its line end
            records.append(parse_object(torn, str(path)))
        except RunFileError:
            return records
    return records


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object of a line. Raises RunFileError, which names where the line is, for anything else."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RunFileError(f"{where}: not a line of JSON: {error}; repair it or delete the line") from error
    if not isinstance(record, dict):
        raise RunFileError(f"{where}: expected a JSON object, got {line[:40]!r}; repair it or delete the line")
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
    if in_bucket(path):  # an object is there whole or not at all
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)  # its room counts as free
        raise RunFileError(why_not_written(path, error, len(content))) from error
    finally:
        temporary.unlink(missing_ok=True)  # there only if it was not put in place


def why_not_written(path: Path, error: OSError, size: int | None = None) -> str:
    """What to say of a file that cannot be written; of a full disk also the room that there is and is needed."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"{path} cannot be written: {error.strerror}"
    room = f"{shutil.disk_usage(path.parent).free / 1e6:,.2f} MB are free"
    need = "" if size is None else f", {size / 1e6:,.2f} MB are needed"
    return (
        f"{path} cannot be written: {error.strerror}; free some space in {path.parent} ({room}{need}),"
        " or write the run elsewhere with runs_dir"
    )
