"""Files that are appended to or replaced atomically, so that a kill at any instant leaves them readable.

A record is one line of JSON, flushed when written. `podium.observe.run_dir` lists the files of a run.
"""

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

Record = Mapping[str, object]
BUCKETS = ("gs://", "s3://")


class RunFileError(ValueError):
    """A file or folder of a run cannot be written, or contains something that Podium does not write."""


def as_path(text: str) -> Path:
    """Convert to the path of a local file or of a bucket object (gs:// or s3://), which has pathlib's methods."""
    if not text.startswith(BUCKETS):
        return Path(text)
    from etils import epath
    from fsspec import config as fsspec_settings

    for store in ("gcs", "s3"):
        fsspec_settings.conf.setdefault(store, {})["use_listings_cache"] = False  # other hosts write there too
    for library in ("gcsfs", "s3fs"):  # they also log the tracebacks of exceptions that they raise
        logging.getLogger(library).setLevel(logging.CRITICAL)
    return epath.Path(text)  # pyright: ignore[reportReturnType]  # has pathlib's methods, not its type


def user_cache(name: str) -> Path:
    """The user's cache folder of this name: `$XDG_CACHE_HOME/podium/NAME`, or below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podium" / name


def in_bucket(path: Path) -> bool:
    """Whether the path is in a bucket."""
    return str(path).startswith(BUCKETS)


def absolute(path: Path) -> Path:
    """The absolute path; paths in buckets always are."""
    return path if in_bucket(path) else path.absolute()


class JsonLines:
    """A file that grows by one line of JSON per record."""

    def __init__(self, path: Path):
        """Open `path` for appending. Raises RunFileError if it cannot be opened."""
        self.path = path
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise RunFileError(why_not_written(path, error)) from error

    def write(self, record: Record) -> None:
        """Append one record and hand it to the operating system. Raises RunFileError if it cannot be written."""
        try:
            self._file.write(to_json(record) + "\n")
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # it would fail again and hide the error below
                self._file.close()
            way_out = "run the same command again, it continues from the last checkpoint"
            raise RunFileError(f"{why_not_written(self.path, error)}; {way_out}") from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def to_json(record: Record, *, indent: int | None = None) -> str:
    """The record as strict JSON: numpy numbers become numbers, and numbers that are not finite become null."""
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False, indent=indent)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if callable(tolist := getattr(value, "tolist", None)):  # a numpy scalar or array
        return _plain(tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):  # a lone surrogate has no UTF-8 form
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return value


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes.

    Raises OSError otherwise; opening a named pipe, for example, would block until something writes to it.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file, oldest first; empty if the file does not exist.

    Ignores a last line that is incomplete because of a kill, and zero bytes at the end, which a file system leaves
    after a host crash in place of data that it had not written yet.

    Raises RunFileError if another line is not a record.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    while len(lines) > 1 and (not lines[-1] or b"\0" in lines[-1]) and b"\0" in lines[-2]:
        lines[-2:] = [b""]
    complete, torn = lines[:-1], lines[-1]
    records = [parse_object(line, f"{path}:{number}") for number, line in enumerate(complete, start=1)]
    if torn:
        try:  # complete except for its line end
            records.append(parse_object(torn, str(path)))
        except RunFileError:
            return records
    return records


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """Parse the JSON object of a line. For anything else, raises RunFileError, which names `where`."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RunFileError(f"{where}: not a line of JSON: {error}; repair it or delete the line") from error
    if not isinstance(record, dict):
        raise RunFileError(f"{where}: expected a JSON object, got {line[:40]!r}; repair it or delete the line")
    return record


def drop_lines_after(path: Path, step: int) -> None:
    """Drop the records of `path` after `step`, and a torn last line, in one atomic replacement."""
    if not path.exists():
        return
    kept = [record for record in read_lines(path) if record.get("step", 0) <= step]
    write_atomically(path, "".join(to_json(record) + "\n" for record in kept))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content`, text as UTF-8; readers see the old or the new content, also after a kill.

    Raises RunFileError if it cannot be written.
    """
    if in_bucket(path):  # an object is replaced atomically
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
        temporary.unlink(missing_ok=True)  # so that the free space reported includes it
        raise RunFileError(why_not_written(path, error, len(content))) from error
    finally:
        temporary.unlink(missing_ok=True)  # exists only if it was not moved into place


def why_not_written(path: Path, error: OSError, size: int | None = None) -> str:
    """The error message for a file that cannot be written; if the disk is full, with the free and the needed space."""
    if forbids_writing(error):
        return (
            f"{path} cannot be written: {error.strerror}; make {path.parent} writable, or write the run elsewhere with"
            " runs_dir"
        )
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"{path} cannot be written: {error.strerror}"
    room = f"{shutil.disk_usage(path.parent).free / 1e6:,.2f} MB are free"
    need = "" if size is None else f", {size / 1e6:,.2f} MB are needed"
    return (
        f"{path} cannot be written: {error.strerror}; free some space in {path.parent} ({room}{need}),"
        " or write the run elsewhere with runs_dir"
    )


def forbids_writing(error: BaseException) -> bool:
    """Whether the cause of an error is that a place is read-only, or that this user may not write there."""
    forbidden = (errno.EROFS, errno.EACCES, errno.EPERM)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in forbidden
    # tensorstore's errors have only the text
    return any(os.strerror(number) in str(error) for number in forbidden)
