"""Appends to files and replaces them atomically, so that they stay readable if the process is killed at any instant. A
record is one line of JSON, flushed when written. `podium.observe.run_dir` lists the files of a run.
"""

import contextlib
import errno
import json
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from podium.patience import BucketError, fault_of, way_out

Record = Mapping[str, object]
BUCKETS = ("gs://", "s3://")


class RunFileError(ValueError):
    """A file or folder of a run cannot be written, or contains something that Podium does not write."""


def as_path(text: str) -> Path:
    """Convert to the path of a local file or of a bucket object (gs:// or s3://), which has pathlib's methods."""
    if not text.startswith(BUCKETS):
        return Path(text)
    from etils import epath

    from podium.buckets import wait_in_requests

    for library in ("gcsfs", "s3fs", "aiobotocore", "botocore"):  # they log tracebacks of exceptions that they raise
        logging.getLogger(library).setLevel(logging.CRITICAL)
    wait_in_requests(text[:2])
    return epath.Path(text)  # pyright: ignore[reportReturnType]  # has pathlib's methods, not its type


def user_cache(name: str) -> Path:
    """The user's cache folder of this name: `$XDG_CACHE_HOME/podium/NAME`, or below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podium" / name


def in_bucket(path: Path) -> bool:
    """Whether the path is in a bucket."""
    return str(path).startswith(BUCKETS)


def is_file(path: Path) -> bool:
    """Whether a file or an object exists. Raises BucketError if its bucket does not tell; `Path.is_file` of a bucket is
    then False.
    """
    if not in_bucket(path):
        return path.is_file()
    try:
        path.stat()
    except Exception as error:  # libraries of buckets raise any kind
        if isinstance(error, FileNotFoundError) and fault_of(error) == "other":
            return False
        raise BucketError(str(path), error) from error
    return True


def absolute(path: Path) -> Path:
    """The absolute path of a file; unchanged if the file is in a bucket, whose paths are always absolute."""
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
            with contextlib.suppress(OSError):  # closing would fail again and hide the error below
                self._file.close()
            way_out = "run the same command again to continue from the last checkpoint"
            raise RunFileError(f"{why_not_written(self.path, error)}; {way_out}") from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def to_json(record: Record, *, indent: int | None = None) -> str:
    """The record as strict JSON: numpy numbers become numbers, and non-finite numbers become null."""
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False, indent=indent)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {_encodable(str(key)): _plain(item) for key, item in value.items()}
    if callable(tolist := getattr(value, "tolist", None)):  # a numpy scalar or array
        return _plain(tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return _encodable(value) if isinstance(value, str) else value


def _encodable(text: str) -> str:
    """The text with lone surrogates escaped, because they cannot be encoded as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


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

    Ignores a last line that is incomplete because of a kill, and zero bytes at the end, which a file system may leave
    after a host crash in place of unwritten data.

    Raises RunFileError if any other line is not a record.
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


def parse_object(
    line: bytes, where: str, made_of: Callable[[list[tuple[str, Any]]], dict[str, Any]] = dict
) -> dict[str, Any]:
    """Parse the JSON object of a line. For anything else, raises RunFileError, which names `where`.

    `made_of` builds each object from its (name, value) pairs, and may raise ValueError.
    """
    try:
        record = json.loads(line, object_pairs_hook=None if made_of is dict else made_of)
    except (ValueError, RecursionError) as error:
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
    """The error message for a file that cannot be written: what was tried, the cause, and what to do about it.

    `size` is in bytes. If the disk is full, the message says how much space and how many files are free, and what is
    needed.
    """
    reason = error.strerror if error.filename2 is None else cause_of(error)
    return f"{path} cannot be written: {reason}; {disk_advice(error, path.parent, size)}"


def cause_of(error: BaseException) -> str:
    """The cause of a disk error, in one line: both names if a rename failed, and only the cause for orbax and
    tensorstore.
    """
    if isinstance(error, OSError) and error.strerror and error.filename2 is not None:
        return f"{error.filename} could not be renamed to {error.filename2}: {error.strerror}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return (str(error).splitlines() or [type(error).__name__])[0].partition(" [tensorstore_spec")[0]


def disk_advice(
    error: BaseException,
    folder: Path,
    size: int | None = None,
    *,
    elsewhere: str = "or write the run elsewhere with runs_dir",
) -> str:
    """What to do about a disk error, by its errno, when writing `size` bytes to `folder`; `elsewhere` ends the
    advice.
    """
    if in_bucket(folder):
        return way_out(fault_of(error), str(folder)[:2])
    number = error_number(error)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"{_room(folder, size, quota=number == errno.EDQUOT)}, {elsewhere}"
    if number in FORBIDDEN:
        return f"make {folder} writable, {elsewhere}"
    advice = next((text for numbers, text in ADVICE.items() if number in numbers), None)
    return f"check the disk of {folder}, {elsewhere}" if advice is None else f"{advice}, {elsewhere}"


FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
ADVICE: Mapping[tuple[int, ...], str] = {
    (errno.EIO, errno.ENXIO, errno.ENODEV): "the disk failed: run `dmesg` for details",
    (errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EREMOTEIO): (
        "the network file system cannot be reached: mount it again"
    ),
    (errno.EMFILE, errno.ENFILE): "too many files are open: raise `ulimit -n`",
    (errno.EFBIG,): "the file is larger than this machine allows: raise `ulimit -f`, or use another file system",
    (errno.ENAMETOOLONG,): "set a shorter name",
    (errno.ENOENT, errno.ENOTDIR): "the folder was moved or deleted meanwhile: put it back",
    (
        errno.EEXIST,
        errno.ENOTEMPTY,
        errno.EISDIR,
        errno.EBUSY,
    ): "something else has this name: move it away",
}
"""What to do about disk errors, by errno."""


def error_number(error: BaseException) -> int | None:
    """The errno of the operating system error that caused an exception; None if there is none. tensorstore and
    safetensors mention the errno only in their messages.
    """
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.errno is not None:
            return behind.errno
        behind = behind.__cause__ or behind.__context__
    if found := re.search(r"(?:OS error|os error|Errno) (\d+)", str(error)):
        return int(found[1])
    known = (errno.ENOSPC, errno.EDQUOT, *FORBIDDEN, *(number for numbers in ADVICE for number in numbers))
    return next((number for number in known if os.strerror(number) in str(error)), None)


def room(folder: Path) -> tuple[int, int | None]:
    """Free bytes and free files (inodes) in a folder's file system; None for files if their number is not limited."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize, disk.f_favail if disk.f_files else None


def _room(folder: Path, size: int | None, *, quota: bool) -> str:
    """What is free in a folder's file system and what is needed, in bytes and in files, and what to delete."""
    try:
        disk = os.statvfs(folder)
    except OSError:  # the folder has vanished too
        return f"free some space for {folder}"
    free = f"{disk.f_bavail * disk.f_frsize / 1e6:,.2f} MB"
    need = "" if size is None else f", {size / 1e6:,.2f} MB are needed"
    if quota:
        return f"your quota of space or of files is used up: delete files in {folder} ({free} are free for all{need})"
    if disk.f_files and not disk.f_favail:
        counted = (
            f"all of its {disk.f_files:,} inodes are in use; each file needs one, so its {free} of free space cannot be"
            " used"
        )
        return f"delete files in {folder}: its file system cannot hold another ({counted})"
    files = f" and {disk.f_favail:,} files (inodes)" if disk.f_files else ""
    return f"free some space in {folder} ({free}{files} are free{need})"
