import contextlib
import errno
import json
import logging
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from podium.files import (
    JsonLines,
    RunFileError,
    as_path,
    drop_lines_after,
    error_number,
    read_lines,
    to_json,
    why_not_written,
    write_atomically,
)


def write_lines(path, steps, tail=b""):
    path.write_bytes(b"".join(b'{"step": %d, "loss": 0.5}\n' % step for step in steps) + tail)


def test_a_record_is_on_disk_as_soon_as_it_is_written(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write({"step": 1, "loss": np.float32(0.25), "lengths": np.array([3, 4])})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.25, "lengths": [3, 4]}\n'
    lines.close()


def test_records_are_appended_to_those_of_an_earlier_process(tmp_path):
    for step in (1, 2):
        lines = JsonLines(tmp_path / "metrics.jsonl")
        lines.write({"step": step})
        lines.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_what_is_not_finite_is_null():
    assert to_json({"a": float("nan"), "b": [np.inf, 1.0]}) == '{"a": null, "b": [null, 1.0]}'


def test_a_lone_surrogate_of_a_model_does_not_break_the_file(tmp_path):
    lines = JsonLines(tmp_path / "samples.jsonl")
    lines.write({"text": "a\ud800b\u2028c"})
    lines.close()
    assert read_lines(tmp_path / "samples.jsonl") == [{"text": "a\\ud800b\u2028c"}]


def test_no_file_has_no_records(tmp_path):
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_zeros_that_a_crash_left_at_the_end_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + b"\0" * 4096)
    assert [record["step"] for record in read_lines(path)] == [1, 2]
    path.write_bytes(b'{"step": 1}\n{"st' + b"\0" * 4096)
    assert [record["step"] for record in read_lines(path)] == [1]


@pytest.mark.parametrize(
    "tail",
    [
        b'{"step": 3, "lo',
        b"{",
        b'{"step": 3, "x": "\xe2\x82',
        b"\x00\x00\x00",
        b"\0" * 4096 + b"\n",
        b'{"st\0\0\n\0\0\n\0',
    ],
)
def test_a_torn_last_line_is_left_out(tmp_path, tail):
    write_lines(tmp_path / "metrics.jsonl", [1, 2], tail)
    assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [1], b'{"step": 2}')
    assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("broken", [b"nonsense\n", b"[1]\n"])
def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + broken + b'{"step": 2}\n')
    with pytest.raises(RunFileError, match=r"metrics\.jsonl:2: .*repair it"):
        read_lines(path)


def test_dropping_lines_keeps_those_up_to_the_step_and_repairs_the_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [0, 1, 2, 2, 3, 4], b'{"step": 5, "lo')
    drop_lines_after(path, 2)
    lines = JsonLines(path)
    lines.write({"step": 3})
    lines.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 2, 3]


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_atomic_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(RunFileError, match=r"summary\.json cannot be written: No space left on device"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named_with_the_way_out():
    full = JsonLines(Path("/dev/full"))  # a file on a full disk
    with pytest.raises(RunFileError, match=r"/dev/full cannot be written: No space left on device; free some space"):
        full.write({"step": 1})
    full.close()  # what is left in the buffer fails no second time, so the error above is what a user sees


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KB."""
    if os.geteuid():
        pytest.skip("only root can mount one")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_with_the_folder_the_room_and_the_way_out(small_disk):
    with pytest.raises(RunFileError) as caught:
        write_atomically(small_disk / "summary.json", b"x" * 250_000)
    message = str(caught.value)
    assert f"{small_disk / 'summary.json'} cannot be written: No space left on device" in message
    assert re.search(
        rf"free some space in {small_disk} \(0\.07 MB and [\d,]+ files \(inodes\) are free, 0\.25 MB are", message
    )
    assert message.endswith("or write the run elsewhere with runs_dir")
    lines = JsonLines(small_disk / "metrics.jsonl")
    with pytest.raises(
        RunFileError,
        match=r"small \(0\.0. MB and .* are free\), .* runs_dir; run the same command again",
    ):
        lines.write({"text": "x" * 250_000})
    with contextlib.suppress(OSError):  # its buffer still holds the record
        lines.close()


@pytest.mark.parametrize(("bucket", "library"), [("gs://bucket/runs", "gcsfs"), ("s3://bucket/runs", "s3fs")])
def test_what_reaches_buckets_raises_and_does_not_log_tracebacks(bucket, library):
    logging.getLogger(library).setLevel(logging.NOTSET)
    as_path(bucket)
    assert not logging.getLogger(library).isEnabledFor(logging.ERROR)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_place_that_forbids_writing_is_named_with_its_way_out(tmp_path, monkeypatch, number):
    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    said = rf"metrics.jsonl cannot be written: {os.strerror(number)}; make {tmp_path} writable, or .* runs_dir"
    with pytest.raises(RunFileError, match=said):
        JsonLines(tmp_path / "metrics.jsonl")
    with pytest.raises(RunFileError, match=said):
        write_atomically(tmp_path / "metrics.jsonl", "text")


@pytest.fixture
def few_files(tmp_path):
    """A file system of 64 MB that can hold four files."""
    if os.geteuid():
        pytest.skip("only root can mount one")
    folder = tmp_path / "few"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=4", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_table_of_inodes_is_no_lack_of_space(few_files):
    with pytest.raises(RunFileError) as caught:
        for number in range(5):
            write_atomically(few_files / f"{number}.json", "{}")
    message = str(caught.value)
    assert f"cannot be written: No space left on device; delete files in {few_files}: its file system cannot" in message
    assert "all of its 4 inodes are in use; each file needs one, so its 67.1" in message
    assert "free some space" not in message


def test_a_renaming_that_fails_is_no_lack_of_space(tmp_path, monkeypatch):
    def refuse(old: object, new: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(old), None, str(new))

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(RunFileError) as caught:
        write_atomically(tmp_path / "summary.json", "new")
    path = tmp_path / "summary.json"
    said = f"{path} cannot be written: {path}.{os.getpid()}.tmp could not be renamed to {path}: Input/output error"
    assert (
        str(caught.value)
        == f"{said}; the disk failed: run `dmesg` for details, or write the run elsewhere with runs_dir"
    )


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), errno.EDQUOT),
        (RuntimeError("Error writing local file: [OS error 28: ENOSPC No space left on device]"), errno.ENOSPC),
        (ValueError('PERMISSION_DENIED: Failed to open "x": Permission denied'), errno.EACCES),
        (ValueError("no such key"), None),
    ],
)
def test_the_number_of_an_error_is_found_in_whatever_a_library_makes_of_it(error, number):
    assert error_number(error) == number
    wrapped = RuntimeError("saving failed")
    wrapped.__cause__ = error
    assert isinstance(error, OSError) == (error_number(wrapped) is not None)


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_no_error_but_a_lack_of_space_asks_for_space(tmp_path, number):
    said = why_not_written(tmp_path / "a", OSError(number, os.strerror(number)))
    assert os.strerror(number) in said and said.endswith("or write the run elsewhere with runs_dir")
    assert ("MB" in said) == (number in (errno.ENOSPC, errno.EDQUOT))
