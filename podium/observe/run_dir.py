"""The folder of a run: its lock, its config, and its files.

    config.yaml      the resolved config               metrics.jsonl   a line per step, and one per evaluation
    summary.json a summary as one JSON object             samples.jsonl   questions, completions, rewards
    run.lock the process and host that write to the folder   lengths.jsonl   tokens of each prompt and completion
    machine.json the devices that the run last used
    shapes.json      the shapes of its micro-batches (podium.train.batches.run_shapes)
    fork.json        the run and step it was forked from, if any
    run.json         the run's id, and the version that last trained it (podium.observe.identity)
    identity.json    the run's id, which its checkpoints repeat (podium.train.checkpoints.step_files)
    curve.svg        chart of reward and accuracy
    data/            rows passed from Python (podium.api)
    plan.json the run's plan (podium.plan.report.deviation), on TPU and GPU
    checkpoints/     podium.train.checkpoints.checkpoint

A run in a bucket has all these files there and, except for checkpoints, a local copy (podium.observe.bucket). The
format of the records is in `podium.observe.records`. Imports no jax.
"""

import datetime
import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

import yaml
from pydantic import JsonValue, ValidationError

from podium.config.document import Node, Plain, read_document
from podium.config.errors import ConfigError, UsageError
from podium.config.schema import Config
from podium.config.show import flat, to_yaml
from podium.files import (
    JsonLines,
    Record,
    RunFileError,
    as_path,
    drop_lines_after,
    in_bucket,
    is_file,
    read_lines,
    to_json,
    write_atomically,
)
from podium.observe.bucket import Mirror, records_folder
from podium.observe.identity import RUN, claim, other_version, versions_line
from podium.observe.own_config import CONFIG, at_home, in_folder
from podium.observe.record_check import Extent, Ledger, check_records

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
LENGTHS = "lengths.jsonl"
CURVE = "curve.svg"
LOCK = "run.lock"
MACHINE = "machine.json"
RECORDS = (METRICS, SAMPLES, LENGTHS)
"""Files with a line for each record."""
CHECKPOINTS = "checkpoints"
FORK = "fork.json"
MARK = "commit_success.txt"
"""File that orbax adds to a step in a bucket when it is complete."""
DATA = "data"

DATE, LONGEST, SCHEDULE = "chat_template_date", "max_prompt_tokens", "train.optimizer.schedule"
Settings = Mapping[str, JsonValue]
"""All settings of a run by section, as returned by `Config.document`."""

MAY_CHANGE = (
    "name",
    "runs_dir",
    "mesh",
    "eval",
    "checkpoint",
    "metrics",
    "grading.workers",
    "grading.judges.*.url",
    "grading.judges.*.key_env",
    "grading.judges.*.timeout_s",
    "grading.judges.*.retries",
    "grading.judges.*.concurrency",
    "rollout.layout",
    "rollout.group_chips",
    "rollout.slots",
    "rollout.prefill_rows",
    "rollout.refill_steps",
    "rollout.page_tokens",
    "rollout.cache_tokens",
    "train.rows_per_device",
    "train.tokens_per_device",
    "train.remat",
    "train.layer_chunk_tokens",
    "train.attention",
    "train.head",
    "train.head_chunk_tokens",
    "train.offload_optimizer",
)
"""Keys (or whole sections) that may differ from the stored config when a run resumes, because they affect where and how
fast a run trains and how it is observed, but not what it learns. `steps` may also change if `train.optimizer.schedule`
is constant; other schedules depend on `steps`. A `*` stands for any index in a list."""


class RunInUseError(RunFileError):
    """Another process is writing to this run's folder."""


class Fork(NamedTuple):
    """The run and step whose checkpoint another run starts from."""

    run: str
    step: int | None
    """Step of the checkpoint; None for the newest."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return as_path(self.run) / CHECKPOINTS


def recipe_of(fork: Fork) -> str | None:
    """`algorithm.recipe` of the run that a fork starts from; None if its config is missing or unreadable."""
    try:
        text = (as_path(fork.run) / CONFIG).read_text(encoding="utf-8")
        match yaml.safe_load(text):
            case {"algorithm": {"recipe": str(recipe)}}:
                return recipe
    except (OSError, ValueError, yaml.YAMLError):  # ValueError: not UTF-8
        pass
    return None


def parse_fork(text: str) -> Fork:
    """Parse `RUN@STEP` (or `RUN`) of the command line.

    Raises:
        UsageError: RUN is not a run's folder, or STEP is not a number.
        BucketError: the folder is in a bucket that cannot be read.
    """
    folder, separator, step = text.rpartition("@")
    if not separator:
        folder, step = text, ""
    if separator and not step.isdecimal():
        raise UsageError(f"--from {text}: {step!r} is not a step; write RUN@STEP, such as runs/demo@20, or RUN")
    if not is_file(as_path(folder) / CONFIG):
        raise UsageError(
            f"--from {text}: {folder} has no {CONFIG}, so it is not a run's folder; give one, such as runs/demo"
        )
    return Fork(folder, int(step) if step else None)


def run_of(text: str | Path) -> Fork | None:
    """The run that `RUN@STEP` or `RUN` names, with its step if given; None if RUN is not a run's folder."""
    try:
        return parse_fork(str(text))
    except ValueError:
        return None


def saved_steps(folder: Path) -> list[int]:
    """The complete steps in a run's `checkpoints` folder, oldest first. Writes nothing.

    In a bucket, where folders cannot be renamed, these are the steps that orbax has marked as complete.
    """
    steps = [path for path in folder.glob("*") if path.name.isdecimal()]
    return sorted(int(path.name) for path in steps if not in_bucket(folder) or (path / MARK).exists())


class RunDir:
    """The folder of the run that this process trains. One process locks it and writes to it until `close`."""

    def __init__(
        self,
        home: Path,
        lock: IO[str] | None,
        settings: Settings,
        *,
        continued: bool,
        fork: Fork | None,
        mirror: Mirror | None = None,
        notice: str | None = None,
    ):
        """Use `RunDir.open` or `RunDir.follow` instead."""
        self.home = home
        """The run's folder as seen by all machines, possibly in a bucket."""
        self.path = records_folder(home) if in_bucket(home) else home
        """Local folder with the run's records."""
        self.continued = continued
        """Whether the folder already contained this run, with or without a checkpoint."""
        self.settings = settings
        """All settings of the run, as in its config.yaml; the date of its prompts is set."""
        self.fork = fork
        """Source of the initial weights, if not the config's model."""
        self.opened = time.monotonic()
        self._lock, self._mirror = lock, mirror
        self._notice = notice
        self._lines: dict[str, JsonLines] = {}
        self._ledger = Ledger(self.path, RECORDS)

    @classmethod
    def open(cls, home: Path, settings: Settings, *, fork: Fork | None = None) -> "RunDir":
        """Create the folder if necessary, lock it, and write the settings to it.

        Args:
            home: the folder, from `run_home`.
            settings: all settings of the run.
            fork: source of a new run's initial weights; an existing run keeps its own.

        Raises:
            RunInUseError: another process trains in this folder.
            RunFileError: the folder cannot be written, or contains something else or a run with another config.
        """
        path = records_folder(home) if in_bucket(home) else home
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFileError(
                f"run folder {path} cannot be created: {error.strerror}; set runs_dir or name"
            ) from error
        if not (path / CONFIG).exists():
            _check_empty(path)
        lock, mirror = _take_lock(path), None
        try:
            mirror = Mirror(path, home) if in_bucket(home) else None
            continued = (path / CONFIG).exists() and _has_begun(path, home)
            settings = _with_kept(settings, path if continued else None)
            notice = other_version(path) if continued else None
            if continued:
                _check_steps(home, settings)
                _check_agreement(path, settings)
                fork = _kept_fork(path, fork)
            elif fork is not None:
                write_atomically(path / FORK, to_json(fork._asdict()) + "\n")
            else:
                (path / FORK).unlink(missing_ok=True)
            claim(path, home)
            write_atomically(path / CONFIG, to_yaml(settings, {}))
            if mirror is not None:
                mirror.push()
        except BaseException:
            if mirror is not None:
                mirror.close()
            lock.close()
            raise
        return cls(home, lock, settings, continued=continued, fork=fork, mirror=mirror, notice=notice)

    @classmethod
    def follow(cls, home: Path, settings: Settings, *, continued: bool, fork: Fork | None) -> "RunDir":
        """Open the folder read-only, while another process of the run writes to it.

        `settings`, `continued` and `fork` are those of the writing process.
        """
        return cls(home, None, settings, continued=continued, fork=fork)

    @property
    def writes(self) -> bool:
        """Whether this process writes to the folder."""
        return self._lock is not None

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.home / CHECKPOINTS

    def push(self) -> None:
        """Copy the records to the bucket, if the run is in one; call this before a checkpoint is complete."""
        if self._mirror is not None:
            self._mirror.push()

    def truncate(self, step: int) -> None:
        """Drop the records after `step`, from which training resumes."""
        if not self.writes:
            return
        self._close_lines()
        for name in RECORDS:
            drop_lines_after(self.path / name, step)
        self._ledger = Ledger(self.path, RECORDS)

    def extents(self) -> dict[str, Extent]:
        """Current extent of each record file, to save with a checkpoint; empty in processes that do not write
        records.
        """
        return self._ledger.extents() if self.writes else {}

    def compare(self, saved: Mapping[str, Extent], step: int, checkpoints: Sequence[int]) -> list[str]:
        """Compare the records with their state when the run's newest checkpoint was saved; call this before `truncate`.

        Args:
            saved: the result of `extents` at that time; empty for checkpoints of older versions, which did not save it.
            step: the step that the run continues from; 0 for the start.
            checkpoints: all saved steps.

        Returns:
            Lines about what is missing, has changed or was repaired, about records that starting over replaces, and
            about another version that trained the run before.
        """
        if not self.writes:
            return []
        notice = [] if self._notice is None else [self._notice]
        if not step:
            recorded = max((each.get("step", 0) for each in read_lines(self.path / METRICS)), default=0)
            lost = (
                f"{self.checkpoints} has no checkpoint: the {recorded} recorded steps are trained again from the start,"
                " and their records are replaced"
            )
            return [*notice, lost] if recorded else notice
        every = {METRICS: True, LENGTHS: True, SAMPLES: False}
        found = (
            check_records(self.path / name, saved[name], step, every_step=every[name], checkpoints=checkpoints)
            for name in RECORDS
            if name in saved
        )
        return [*notice, *(line for line in found if line is not None)]

    def check_saved(self, saved: Settings | None, step: int) -> None:
        """Raise RunFileError if the checkpoint that the run continues from was saved with other settings.

        Args:
            saved: the settings in the checkpoint; None for checkpoints of older versions, which did not store them.
            step: the checkpoint's step; 0 without a checkpoint.
        """
        if not step or saved is None:
            return
        where = f"step {step} in {self.checkpoints}"
        try:
            stored = Config.model_validate(in_folder(Node.of(cast(Plain, saved), where), self.path).plain())
        except ValidationError as error:
            raise RunFileError(
                f"{where} was not written by this version ({_problem(error)}): {versions_line(self.path)}"
            ) from error
        if differences := _disagreement(stored.document(), self.settings, self.path):
            raise RunFileError(
                f"{where} was saved with settings that differ from this run's:\n{differences}\nput back the "
                "config.yaml or the checkpoints that belong together; to continue from these weights with other "
                f"settings, start a run with another name and --from {self.home}@{step}"
            )

    def append(self, name: str, record: Record) -> None:
        """Append a record to METRICS, SAMPLES or LENGTHS; it survives a kill of this process."""
        if not self.writes:
            return
        if name not in self._lines:
            self._lines[name] = JsonLines(self.path / name)
        self._lines[name].write(record)

    def with_chosen(self, config: Config) -> Config:
        """Fill in the run's date and longest prompt if the config leaves them unset."""
        own = self.settings["rollout"]
        assert isinstance(own, Mapping)
        rollout = config.rollout.model_copy(update={LONGEST: own[LONGEST]})
        return config.model_copy(update={DATE: self.settings[DATE], "rollout": rollout})

    def write_machine(self, text: str) -> None:
        """Record the devices that the run now trains on."""
        if self.writes:
            write_atomically(self.path / MACHINE, to_json({"text": text}) + "\n")

    def close(self) -> None:
        """Close the files and release the lock; a second call does nothing."""
        self._close_lines()
        try:
            if self._mirror is not None:
                self._mirror.close()
        finally:
            if self._lock is not None:
                self._lock.close()

    def _close_lines(self) -> None:
        for lines in self._lines.values():
            lines.close()
        self._lines.clear()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def run_home(runs_dir: str, name: str | None) -> Path:
    """The folder of the run with this name. Raises RunFileError if the name is not valid in `runs_dir`."""
    if not name or name in (".", "..") or Path(name).name != name:
        raise RunFileError(f"name: {name!r} cannot be a folder in runs_dir; set a name without '/', such as name=demo")
    return as_path(runs_dir) / name


def _take_lock(path: Path) -> IO[str]:
    """Lock run.lock; the operating system releases the lock however this process ends."""
    try:
        lock = (path / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise RunFileError(f"run folder {path} cannot be written: {error.strerror}; set runs_dir") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "another process"
        lock.close()
        raise RunInUseError(
            f"run folder {path} is in use by {owner}; wait for it, stop it, or set another name"
        ) from None
    except OSError as error:
        lock.close()
        reason = errno.errorcode.get(error.errno or 0, str(error))
        raise RunFileError(f"run folder {path} cannot be locked ({reason}); set runs_dir to a local disk") from error
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on host {socket.gethostname()}\n")
    lock.flush()
    return lock


def _has_begun(path: Path, home: Path) -> bool:
    """Whether the run has records or checkpoints. A run that failed before it had any may restart with another
    config.
    """
    return bool(read_lines(path / METRICS)) or any((home / CHECKPOINTS).glob("*"))


def _check_empty(path: Path) -> None:
    ours = (LOCK, FORK, CONFIG, DATA, RUN)  # and temporary files, which a kill during creation may leave
    strangers = sorted(item.name for item in path.iterdir() if item.name not in ours and item.suffix != ".tmp")
    if strangers:
        raise RunFileError(
            f"run folder {path} holds {strangers[0]!r} but no {CONFIG}, so it is not a run's folder; "
            "set another name, or delete the folder"
        )


def _kept_fork(path: Path, asked: Fork | None) -> Fork | None:
    stored = _read_fork(path) if (path / FORK).exists() else None
    if asked is not None and asked != stored:
        began = f"began from {stored.run}@{stored.step}" if stored else "did not start from another run"
        raise RunFileError(
            f"run folder {path} exists and {began}, and --from asks for {asked.run}@{asked.step}; "
            "leave --from out to continue it, or set another name"
        )
    return stored


def _read_fork(path: Path) -> Fork:
    match _parsed(path / FORK):
        case {"run": str(run), "step": int() | None as step}:
            return Fork(run, step)
        case other:
            raise RunFileError(
                f"{path / FORK} does not name the run and step that this run started from ({other!r}); put back a "
                f'copy ({{"run": FOLDER, "step": NUMBER}}), or delete the folder {path}'
            )


def _parsed(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        return str(error)


def _with_kept(settings: Settings, begun: Path | None) -> Settings:
    """Fill in unset settings with the values that the existing run in `begun` has chosen.

    These are the date that prompts show, which is today's in a new run, and the longest prompt, which older versions of
    Podium stored as a number.
    """
    kept = None if begun is None else read_config(begun)
    date = settings[DATE] or (kept and kept.chat_template_date) or datetime.date.today().isoformat()
    rollout = settings["rollout"]
    if kept is not None and isinstance(rollout, Mapping) and rollout[LONGEST] is None:
        rollout = {**rollout, LONGEST: kept.rollout.max_prompt_tokens}
    return {**settings, DATE: date, "rollout": rollout}


def _check_steps(home: Path, settings: Settings) -> None:
    """Raise UsageError if the run has more steps than the settings ask for: saved steps are never undone."""
    saved, steps = saved_steps(home / CHECKPOINTS), settings["steps"]
    if saved and isinstance(steps, int) and saved[-1] > steps:
        earlier = [step for step in saved if step <= steps]
        fork = (
            f", or start another run from an earlier step: --from {home}@{earlier[-1]} --set name=NAME"
            if earlier
            else ""
        )
        raise UsageError(
            f"steps: {saved[-1]} steps of run {home} are done and saved, and only {steps} are asked for, so there is "
            f"nothing to train; set steps above {saved[-1]} to continue{fork}"
        )


def _check_agreement(path: Path, settings: Settings) -> None:
    """Raise RunFileError if the settings differ from the stored ones in a way that affects what the run learns."""
    if differences := _disagreement(read_config(path).document(), settings, path):
        raise RunFileError(
            f"run folder {path} contains a run with another config:\n{differences}\nrestore these settings to "
            f"continue it; to start over set another name, or delete the folder {path}"
        )


def _disagreement(stored: Settings, settings: Settings, path: Path) -> str:
    """The settings that affect what a run learns and differ from the stored ones, one per line; empty if none
    differ.
    """
    changed = _differences(_portable(stored, path), _portable(settings, path))
    free = MAY_CHANGE
    if flat(stored)[SCHEDULE] == "constant" and SCHEDULE not in changed:
        free = (*MAY_CHANGE, "steps")
    return "\n".join(
        f"    {key}: {old!r} there, {new!r} now"
        for key, (old, new) in changed.items()
        if not any(_is_below(re.sub(r"\.\d+\b", ".*", key), allowed) for allowed in free)
        and (key, old) != (DATE, None)  # written by a version that showed each day's date
    )


def _portable(value: object, folder: Path) -> object:
    """Make paths below a run's folder, in a tree of settings, independent of where the folder is."""
    if isinstance(value, Mapping):
        return {key: _portable(child, folder) for key, child in value.items()}
    if isinstance(value, list):
        return [_portable(child, folder) for child in value]
    if isinstance(value, str) and "/" in value and Path(value).absolute().is_relative_to(folder.absolute()):
        return f"RUN/{Path(value).absolute().relative_to(folder.absolute())}"
    return value


def _is_below(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def read_config(path: Path) -> Config:
    """The config of the run in a folder. Raises RunFileError if it is missing or this version cannot read it."""
    try:
        return Config.model_validate(at_home(path / CONFIG, read_document(path / CONFIG)).plain())
    except ValidationError as error:
        problem = _problem(error)
    except ConfigError as error:
        problem = "; ".join(each.message for each in error.problems)
    raise RunFileError(
        f"{path / CONFIG} is not a valid config ({problem}); {versions_line(path)}; or set another name, or delete "
        f"the folder {path}"
    )


def _problem(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())


def read_machine(path: Path) -> str | None:
    """The devices that the run in a folder last trained on, as `write_machine` recorded them; None if absent."""
    match _parsed(path / MACHINE) if (path / MACHINE).is_file() else None:
        case {"text": str(text)}:
            return text
        case _:
            return None


def _differences(old: object, new: object, key: str = "") -> dict[str, tuple[object, object]]:
    """The leaves in which two trees differ, as dotted key -> (old, new)."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {key: (old, new)}
    found = {}
    for part in [*old, *(part for part in new if part not in old)]:
        found |= _differences(old.get(part), new.get(part), f"{key}.{part}" if key else str(part))
    return found
