"""The files of saved steps: seals them with digests, finds damage, and sets damaged steps aside.

    20/params/ 20/optimizer/ 20/host/ 20/metrics/    written by orbax
    20/digests.json    the step, its run's id, and a digest of every file above
    20/sizes.json      bytes of every file above, written last
    40.damaged/        a step found damaged when the run was resumed; it is never read again
    ../identity.json   the run's id, as in run.json; written when its first step is saved

Sizes, step and run are compared whenever a step is read; this detects a step copied over another or from another run.
Digests, which require reading every byte, are compared before a run resumes from a step, and before another run or an
evaluation starts from it.
"""

import contextlib
import json
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Required, TypedDict

import xxhash

from podium.files import cause_of, in_bucket, write_atomically
from podium.observe.identity import IDENTITY, RUN, stored_id
from podium.observe.run_dir import saved_steps
from podium.patience import BucketError, fault_of

SIZES, DIGESTS = "sizes.json", "digests.json"
ASIDE = ".damaged"
UNREADABLE = (OSError, ValueError, AttributeError, TypeError, KeyError)
"""Errors of files that cannot be read, or are not the expected JSON."""
BLOCK = 1 << 20  # bytes read at once: small enough for the CPU's cache, large enough for few calls
READERS = 4
Beat = Callable[[], None]
"""Callback that reports progress; called repeatedly while bytes are read or written."""


class Seal(TypedDict):
    """Contents of digests.json. Older versions, which did not record step and run, wrote only the value of `files`."""

    step: int
    run: str
    files: dict[str, str]
    """Digest of every file, by path below the step's folder."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message says which, why, and what to do."""


def seal(path: Path, step: int, beat: Beat) -> None:
    """Write the digests, bound to step and run, and then the sizes of a step whose other files are complete.

    Raises:
        CheckpointError: identity.json is lost, and the other steps name more than one run.
    """
    # orbax still changes the files beside the folders
    sizes = {name: size for name, size in stored_sizes(path).items() if "/" in name}
    # just written, so still in memory: a single reader is fast enough and disturbs training least
    files = _digests(path, list(sizes), beat, readers=1)
    text = json.dumps(Seal(step=step, run=_claim(path.parent), files=files))
    (path / DIGESTS).write_text(text)
    (path / SIZES).write_text(json.dumps({**sizes, DIGESTS: len(text)}))


def damage(path: Path, *, digests: bool, beat: Beat = lambda: None) -> str | None:
    """Describe what is wrong with a step: its first damaged file, or that it is really another step or of another run.
    None if intact.

    With `digests` every byte is read; otherwise only sizes, step and run are compared. Raises CheckpointError if a
    bucket cannot be read.
    """
    try:
        return _wrong_sizes(path) or _wrong_place(path) or (_wrong_bytes(path, beat) if digests else None)
    except Exception as error:
        if (refused := refusal(path, error)) is not None:
            raise refused from error
        if not isinstance(error, UNREADABLE):
            raise
        name = Path(getattr(error, "filename", None) or SIZES).name
        return f"{name} cannot be read: {cause_of(error)}"


def refusal(path: Path, error: Exception) -> CheckpointError | None:
    """The error for a bucket that does not let a step be read; None if the step itself is at fault."""
    if in_bucket(path) and fault_of(error) != "other":
        return CheckpointError(str(BucketError(str(path), error)))
    return None


def newest_whole_step(folder: Path, announce: Callable[[str], None], beat: Beat) -> int | None:
    """Find the newest intact step, comparing every byte; newer steps that are damaged are renamed and announced.

    A lost identity.json is restored from the steps. Returns None if nothing is saved.

    Raises:
        CheckpointError: all steps are damaged, or identity.json is lost and the steps are of several runs; nothing is
            renamed.
    """
    damaged: dict[int, str] = {}
    steps = saved_steps(folder)
    if steps and stored_id(folder.parent / IDENTITY) is None and (run := _claim(folder)) in _runs(folder):
        announce(
            f"{folder.parent / IDENTITY} was missing or unreadable; its checkpoints name run {run}, so it was restored"
        )
    for step in reversed(steps):
        if (what := damage(folder / str(step), digests=True, beat=beat)) is None:
            for worse, why in damaged.items():
                aside = _put_aside(folder / str(worse))
                announce(
                    f"checkpoint {worse} is damaged ({why}) and is kept as {aside}, which you may delete;"
                    f" continuing from step {step}"
                )
            if _stored(folder / str(step)).seal is None:
                announce(
                    f"checkpoint {step} was written by a version that did not record its step and run: its bytes are "
                    "intact, but a copy of another step would look the same"
                )
            return step
        damaged[step] = what
    if damaged:
        found = "; ".join(f"{step}: {why}" for step, why in damaged.items())
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged ({found}); put back a copy of one, or train from the start: set"
            f" another name, or delete {folder.parent}"
        )
    return None


def stored_sizes(path: Path) -> dict[str, int]:
    """Size in bytes of every file of a step, by path below its folder. S3's objects that stand for folders are left
    out.
    """
    if in_bucket(path):
        return {name: int(about["size"]) for name, about in _objects(path).items() if not name.endswith("/")}
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return {file.relative_to(path).as_posix(): file.stat().st_size for file in files}


def _claim(folder: Path) -> str:
    """The id of the run that owns the folder: taken from run.json, or from the steps if the files are lost, or newly
    made.
    """
    if (run := stored_id(folder.parent / IDENTITY)) is not None:
        return run
    runs, own = _runs(folder), stored_id(folder.parent / RUN)
    if own is not None and runs and own not in runs:
        raise CheckpointError(
            f"{folder.parent} is the folder of run {own} ({RUN}), and the checkpoints in it are of "
            f"{' and of '.join(f'run {run}' for run in runs)}: put back this run's own checkpoints; to continue from "
            "the other run's weights, start a run with another name and --from the folder of that run"
        )
    if own is None and len(runs) > 1:
        raise CheckpointError(
            f"{folder.parent / IDENTITY} is missing or unreadable, and the checkpoints in {folder} are of several runs:"
            f" {', '.join(f'{run} (steps {steps})' for run, steps in runs.items())}; move away those of other runs"
        )
    run = own or next(iter(runs), uuid.uuid4().hex)
    write_atomically(folder.parent / IDENTITY, json.dumps({"run": run}) + "\n")
    return run


def _runs(folder: Path) -> dict[str, list[int]]:
    """The ids in the digests of the saved steps, each with its steps; steps that are unreadable or record no run are
    left out.
    """
    found: dict[str, list[int]] = {}
    for step in saved_steps(folder):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if (sealed := _stored(folder / str(step)).seal) is not None:
                found.setdefault(sealed["run"], []).append(step)
    return found


class _Stored(NamedTuple):
    """The contents of a step's digests.json."""

    files: dict[str, str]
    """Digest of every file, by path below the step's folder."""
    seal: Seal | None
    """The digests with their step and run; None if an older version, which did not record step and run, wrote
    the file."""


def _stored(path: Path) -> _Stored:
    content = json.loads((path / DIGESTS).read_text())
    return _Stored(content["files"], content) if "files" in content else _Stored(content, None)


def _wrong_sizes(path: Path) -> str | None:
    sizes: dict[str, int] = json.loads((path / SIZES).read_text())
    stored = stored_sizes(path)
    if DIGESTS not in sizes:
        return f"{SIZES} does not list {DIGESTS}, so its digests cannot be trusted"
    for name, size in sizes.items():
        if name not in stored:
            return f"{name} is missing"
        if stored[name] != size:
            return f"{name} has {stored[name]} bytes instead of {size}"
    return None


def _wrong_place(path: Path) -> str | None:
    sealed = _stored(path).seal
    if sealed is None:
        return None
    if sealed["step"] != int(path.name):
        return f"it was saved as step {sealed['step']}"
    for name in (IDENTITY, RUN):
        run = stored_id(path.parent.parent / name)
        if run is not None and sealed["run"] != run:
            return f"it was saved by run {sealed['run']}, and {path.parent.parent / name} names {run}"
    return None


def _wrong_bytes(path: Path, beat: Beat) -> str | None:
    written = _stored(path).files
    names = [name for name in json.loads((path / SIZES).read_text()) if name != DIGESTS]
    changed = [name for name, digest in _digests(path, names, beat).items() if written.get(name) != digest]
    return f"{changed[0]} differs from what was written (its digest does not match)" if changed else None


def _put_aside(path: Path) -> Path:
    names = (path.with_name(f"{path.name}{ASIDE}{number}") for number in ("", *(f"-{n}" for n in range(2, 1000))))
    aside = next(name for name in names if not name.exists())
    if not in_bucket(path):
        return path.rename(aside)
    store = _store(path)
    for name in stored_sizes(path):  # one by one: S3's objects for folders cannot be moved
        store.cp_file(f"{path}/{name}", f"{aside}/{name}")
    store.rm(str(path), recursive=True)
    return aside


def _digests(path: Path, names: Sequence[str], beat: Beat, *, readers: int = READERS) -> dict[str, str]:
    """Digests of a step's files: XXH3 of every byte, or in a bucket the digests that the bucket stores."""
    if in_bucket(path):
        return {name: _bucket_digest(about) for name, about in _objects(path).items() if name in set(names)}
    shares = [names[start::readers] for start in range(readers)]
    with ThreadPoolExecutor(readers) as pool:
        read = pool.map(lambda share: _read_digests(path, share, beat), shares)
        found = {name: digest for each in read for name, digest in each.items()}
    return {name: found[name] for name in names}


class ObjectFacts(TypedDict, total=False):
    """Size and digests that a bucket reports for an object, in Google's or S3's form."""

    size: Required[int]
    ETag: str
    md5Hash: str
    crc32c: str


class _Store(Protocol):
    """The part of fsspec's untyped file systems that this module uses."""

    def cp_file(self, path1: str, path2: str) -> None: ...

    def rm(self, path: str, *, recursive: bool) -> None: ...

    def find(self, path: str, *, detail: Literal[True]) -> dict[str, ObjectFacts]: ...


def _store(path: Path) -> _Store:
    import fsspec

    return fsspec.filesystem(str(path).partition("://")[0])


def _objects(path: Path) -> dict[str, ObjectFacts]:
    """The bucket's metadata of the objects in a folder, by path relative to the folder."""
    root = str(path).partition("://")[2].rstrip("/") + "/"
    return {name.removeprefix(root): about for name, about in _store(path).find(root, detail=True).items()}


def _bucket_digest(about: ObjectFacts) -> str:
    """MD5 of an object; an object composed of parts has only CRC32C, or S3's digest of digests."""
    if "ETag" in about:
        return f"etag:{about['ETag']}"
    return f"md5:{about['md5Hash']}" if "md5Hash" in about else f"crc32c:{about['crc32c']}"  # pyright: ignore[reportTypedDictNotRequiredAccess]


def _read_digests(path: Path, names: Sequence[str], beat: Beat) -> dict[str, str]:
    """XXH3 digests (128 bits, hexadecimal) of files; all files are read into the same buffer."""
    block, found = memoryview(bytearray(BLOCK)), {}
    for name in names:
        digest = xxhash.xxh3_128()
        with (path / name).open("rb", buffering=0) as source:
            while count := source.readinto(block):  # pyright: ignore[reportAttributeAccessIssue]  # a raw file has it
                digest.update(block[:count])
                beat()
        found[name] = digest.hexdigest()
    return found
