"""Saves and restores a run's checkpoints with orbax, in the background; a step is saved completely or not at all.

    RUN/checkpoints/20/params/       the model's parameters, separate so that evaluation and export read only them
    RUN/checkpoints/20/optimizer/    the optimizer's state, the step, the states of other models that change, and
                                     the coefficients that the run adapts
    RUN/checkpoints/20/host/         the loop's state, including completions in flight, as JSON
    RUN/checkpoints/20/sizes.json    bytes of every file, beside their digests (podium.train.checkpoints.step_files),
    written last RUN/identity.json                the run's id, which is also in the digests of each step

orbax writes a step to a temporary folder and renames it when complete; a kill leaves only the temporary folder, which
the next `Checkpointer` of the run removes. Arrays are stored exactly, by name (`layers.q`, `opt_state.1.mu.layers.q`),
and can be restored onto any mesh.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint._src.futures import future as orbax_futures  # its public API cannot end waiting threads
from orbax.checkpoint.path import atomicity

from podium.config.schema import CheckpointConfig
from podium.files import absolute, cause_of, disk_advice, in_bucket
from podium.hosts.distributed import from_leader
from podium.observe.record_check import Extent
from podium.observe.run_dir import Settings, saved_steps
from podium.observe.summary import versions
from podium.patience import telling
from podium.sampling.conversations.carry import HostState, Position
from podium.sharding import Params
from podium.train.checkpoints.postponing import Postponing, try_to_write
from podium.train.checkpoints.s3 import S3, take_s3_for_a_bucket, wait_for_gcs
from podium.train.checkpoints.step_files import Beat, CheckpointError, damage, refusal, seal, stored_sizes
from podium.train.state import TrainState

SCORE = "score"
SHOWN_DIFFERENCES = 3
POLL_S = 2.0
"""Seconds between two checks of how much of a step has been written."""
SAVE_LIMIT_S = 24 * 3600
"""Seconds after which orbax gives up on a save; the watchdog ends a save that makes no progress before that."""


@functools.cache
def _quiet_orbax() -> None:
    """Silence orbax's logging, but not its exceptions; called once per process, before orbax is first used.

    Otherwise orbax logs each phase of a save, and also the tracebacks of errors that it raises. If a write fails, it
    closes its event loop while other writes are running, and each of these reports an unraisable "Event loop is
    closed".
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    report = sys.unraisablehook

    def report_others(unraisable: "sys.UnraisableHookArgs") -> None:
        if not (isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"):
            report(unraisable)

    sys.unraisablehook = report_others


def _prepare_orbax(folder: Path) -> None:
    """Silence orbax, and make it accept `folder` if that is in S3, and wait if a bucket does not respond."""
    _quiet_orbax()
    if str(folder).startswith(S3):
        take_s3_for_a_bucket()
    elif in_bucket(folder):
        wait_for_gcs()


def _idle() -> None:
    """Do nothing: the default callback."""


class Records(Protocol):
    """The records of a run, as checkpoints need them."""

    def extents(self) -> Mapping[str, Extent]:
        """A summary of the current contents of the records."""
        ...

    def push(self) -> None:
        """Copy the records to where the checkpoints are, before a step is complete; called in another thread."""
        ...


class Beside(TypedDict):
    """What every checkpoint of a run stores in addition to the state."""

    base: str | None
    settings: NotRequired[Settings]
    data: NotRequired[Mapping[str, str]]


class Checkpointer:
    """Saves and restores the states of one run, on one host or several.

    The folder is the run's `checkpoints`, created if missing; only the run itself may write to it. `on_save` is called
    when `maybe_save` starts a save; `beat` is called repeatedly while a caller waits for a save, as long as its files
    grow. `base` is the fingerprint of the frozen weights, which are not part of the state: restoring requires the same
    weights. `maybe_save` stores a summary of the run's `records`, the run's `settings` and the digests of its `data`
    with the state.

    Raises:
        CheckpointError: the folder cannot be created or written to.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        base: str | None = None,
        *,
        on_save: Beat = _idle,
        beat: Beat = _idle,
        records: Records | None = None,
        settings: Settings | None = None,
        data: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = absolute(folder)
        self._config = config
        self._on_save = on_save
        self._beat = beat
        self._records = records
        self._beside: Beside = {"base": base}
        if settings is not None:
            self._beside["settings"] = settings
        if data is not None:
            self._beside["data"] = data
        self._step: int | None = None  # last step passed to orbax, complete or not
        self._failed = False  # whether saving it failed
        self._bytes = 0  # bytes of the step's arrays
        self._postponing = Postponing(self._folder)
        _prepare_orbax(folder)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=KeepPolicy(config, self._folder),
            best_fn=lambda metrics: metrics[SCORE],  # makes orbax store the scores, which KeepPolicy compares
            cleanup_tmp_directories=True,
            temporary_path_class=atomicity.CommitFileTemporaryPath if in_bucket(self._folder) else None,
            async_options=ocp.AsyncOptions(timeout_secs=SAVE_LIMIT_S, post_finalization_callback=self._seal),
        )
        try:
            try_to_write(self._folder)
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        except Exception as error:
            if not isinstance(error, OSError | ValueError) and not in_bucket(self._folder):  # buckets raise any kind
                raise
            raise CheckpointError(
                f"checkpoints cannot be kept in {self._folder}: {cause_of(error)}; {disk_advice(error, self._folder)}"
            ) from error

    def maybe_save(
        self, step: int, state: TrainState, position: Position, *, score: float | None, last: bool, due: bool = False
    ) -> float | None:
        """Save a step if the config asks for it, or if it is `due` or `last`; returns the seconds that saving took.

        Returns None if the step is not saved. If the bucket does not respond, a regular save is `postponed`: each step
        tries again, and the next regular save waits, so that training continues through a short outage. All hosts of a
        run must pass the same `due`. `position` is the run's position in its prompts. `score` is for `keep_best`; None
        if the step was not evaluated. The `last` step is completely on disk when this returns.
        """
        every, best = self._config.every_steps, self._config.keep_best and score is not None
        regular = due or bool(every and step % every == 0)
        if not (last or best or regular or self.postponed):
            return None
        if self._postponing.puts_off(regular=regular, needed=last or bool(best)):
            return None
        self._on_save()
        start = time.perf_counter()
        host_state: HostState = {
            **position.record(),
            "versions": versions(),
            "records": {} if self._records is None else self._records.extents(),
            **self._beside,
        }
        self.save(step, state, host_state, score=score, wait=last)
        return time.perf_counter() - start

    def save(
        self, step: int, state: TrainState, host_state: HostState, *, score: float | None, wait: bool = False
    ) -> None:
        """Start saving a step; `state` may be donated as soon as this returns.

        Returns once the arrays are copied from the devices, and any previous save has finished. A step that this
        checkpointer has already saved is not saved again. Steps not covered by `keep_*` are deleted when this one is
        complete. The host state must consist of JSON values. With `wait`, returns only when the step is on disk.

        Raises:
            CheckpointError: saving this step, or an earlier one still in progress, failed.
        """
        if step != self._step or self._failed:
            self.wait()
            params, rest = _named_arrays(state.params), _named_rest(state)
            self._step, self._failed = step, False
            self._bytes = sum(array.nbytes for array in (*params.values(), *rest.values()))
            items = ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                optimizer=ocp.args.StandardSave(rest),
                host=ocp.args.JsonSave(json.loads(json.dumps(host_state))),  # a copy, as the loop keeps changing it
            )
            metrics = None if score is None else {SCORE: score}
            with self._write_errors(), self._beating():
                if not in_bucket(self._folder):  # before orbax starts threads that wait for the step's folder
                    try_to_write(self._folder)
                self._manager.save(step, args=items, metrics=metrics, force=True)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is completely on disk. Raises CheckpointError if it failed."""
        with self._write_errors(), self._beating():
            self._manager.wait_until_finished()

    @property
    def postponed(self) -> bool:
        """Whether a save that was due is still pending, because the bucket did not respond."""
        return self._postponing.postponed

    @property
    def data(self) -> Mapping[str, str] | None:
        """Digests of the run's data."""
        return self._beside.get("data")

    def steps(self) -> list[int]:
        """The steps that are completely on disk, oldest first."""
        return saved_steps(self._folder)

    def restore(self, step: int | None, abstract_state: TrainState) -> tuple[TrainState, HostState]:
        """Read a saved state and its host state, as `restore_state` does, after pending writes have finished.

        Does not compare digests: `newest_whole_step` does that before a run continues.
        """
        self.wait()
        return restore_state(self._folder, step, abstract_state, base=self._beside["base"], digests=False)

    def close(self) -> None:
        """Wait for the last save and stop orbax's threads. Raises CheckpointError if the save failed."""
        try:
            self.wait()
        finally:
            with self._write_errors():
                self._manager.close()

    def _seal(self) -> None:
        """Write the step's digests. orbax calls this on the first host when all bytes are written, before it renames
        the step.
        """
        assert self._step is not None, "orbax finishes only a step that was passed to it"
        if self._records is not None:
            self._records.push()  # resuming from the step needs them; training does not wait for this
        (unnamed,) = self._unfinished()
        seal(unnamed, self._step, self._beat)

    def _unfinished(self) -> list[Path]:
        """The folder in which the step is being written, if any; in a bucket it already has its final name."""
        if in_bucket(self._folder):
            return [] if self._step is None else [self._folder / str(self._step)]
        return list(self._folder.glob(f"{self._step}{ocp.utils.TMP_DIR_SUFFIX}*"))

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Inside the block, call `beat` while the files of the step being written grow, or a request waits for the
        bucket.
        """
        with (
            telling(self._beat),
            _growing(self._unfinished, self._beat, POLL_S * (5 if in_bucket(self._folder) else 1)),
        ):
            yield

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Translate orbax's errors. orbax raises errors of its background threads at whichever call comes next."""
        try:
            yield
        except Exception as error:
            self._failed = True
            _end_waiting_threads()
            with contextlib.suppress(Exception):  # an error of the bucket, which is reported below
                self._manager.reload()  # orbax no longer lists the steps that the failed one would have replaced
            raise CheckpointError(
                f"the checkpoint of step {self._step} could not be written to {self._folder}: {cause_of(error)};"
                f" {self._way_out(error)}"
            ) from error

    def _way_out(self, error: BaseException) -> str:
        """Advice for the error message of a failed save."""
        advice = f"{disk_advice(error, self._folder, self._bytes)}; the same command continues from the newest"
        try:
            return f"complete steps: {self.steps()}; {advice} of them"
        except Exception:  # the bucket cannot be read either
            return f"{advice} complete step"


def _end_waiting_threads() -> None:
    """End the threads of a failed save, which would wait for the step's folder until SAVE_LIMIT_S has passed.

    A process does not exit before its threads. The threads then fail at once, because the folder does not exist. With
    several hosts, the process ends without waiting for its threads.
    """
    if jax.distributed.is_initialized():
        return
    for thread in threading.enumerate():
        if isinstance(thread, orbax_futures._SignalingThread):
            orbax_futures.set_signals(thread._receive_signals, operation_id=thread._operation_id)


@contextmanager
def _growing(folders: Callable[[], list[Path]], beat: Beat, every_s: float) -> Iterator[None]:
    """Inside the block, check the folders every `every_s` seconds and call `beat` if their bytes have changed."""
    done = threading.Event()

    def watch() -> None:
        before = -1
        while not done.wait(every_s):
            with contextlib.suppress(Exception):  # files are renamed meanwhile; a bucket raises any kind
                now = sum(sum(stored_sizes(folder).values()) for folder in folders())
                if now != before:
                    beat()
                before = now

    thread = threading.Thread(target=watch, name="bytes-written", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@dataclasses.dataclass(frozen=True)
class KeepPolicy(ocp.checkpoint_managers.PreservationPolicy):
    """Keeps the newest checkpoints, the multiples of `keep_every`, and those with the best scores.

    Orbax's own BestN keeps n checkpoints without a score until there are more than n. A step that is a symbolic link
    is kept too: its files are elsewhere, where the user put them, and orbax deletes no links.
    """

    config: CheckpointConfig
    folder: Path
    """Folder of the checkpoints."""

    def should_preserve(
        self,
        checkpoints: Sequence[ocp.checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: ocp.checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        """For each checkpoint, oldest first, whether to keep it; among equal scores the newer one wins."""
        scores = sorted((info.metrics[SCORE], info.step) for info in checkpoints if info.metrics)
        keep = {step for _, step in scores[max(0, len(scores) - self.config.keep_best) :]}
        keep |= {info.step for info in checkpoints[-self.config.keep_last :]}
        if self.config.keep_every:
            keep |= {info.step for info in checkpoints if info.step % self.config.keep_every == 0}
        return [info.step in keep or _is_link(self.folder / str(info.step)) for info in checkpoints]


def _is_link(path: Path) -> bool:
    return not in_bucket(path) and path.is_symlink()


def restore_state(
    folder: Path, step: int | None, abstract_state: TrainState, *, base: str | None = None, digests: bool = True
) -> tuple[TrainState, HostState]:
    """Read a saved state, bit for bit, with its host state. Writes nothing: the folder may belong to another run.

    Args:
        folder: `checkpoints` of a run directory.
        step: None for the newest.
        abstract_state: shapes, dtypes and shardings, on any mesh.
        base: fingerprint of the frozen weights that the state will be used with; None without frozen weights.
        digests: compare every byte with its digest, not only file sizes.

    Raises:
        CheckpointError: the step does not exist, its files are damaged, or it belongs to another model or optimizer.
    """
    step = _checked_step(folder, step, digests=digests)
    targets = {"params": _named_arrays(abstract_state.params), "optimizer": _named_rest(abstract_state)}
    read, host = _read(folder, step, targets)
    _check_base(folder / str(step), host.get("base"), base)
    state: TrainState = jax.tree.unflatten(jax.tree.structure(_rest(abstract_state)), read["optimizer"].values())
    return dataclasses.replace(state, params=read["params"]), host


def restore_params(
    folder: Path, step: int | None, abstract_params: dict[str, jax.ShapeDtypeStruct], *, base: str | None = None
) -> tuple[Params, HostState]:
    """Read the parameters of a saved step, whatever optimizer it belongs to; otherwise like `restore_state`."""
    step = _checked_step(folder, step, digests=True)
    read, host = _read(folder, step, {"params": _named_arrays(abstract_params)})
    _check_base(folder / str(step), host.get("base"), base)
    return read["params"], host


def _check_base(path: Path, saved: str | None, base: str | None) -> None:
    """Raises CheckpointError if the adapters were trained on frozen weights other than `base`."""
    if saved != base:
        raise CheckpointError(
            f"{path} has adapters of the base {saved}, and the config's model, as stored, is {base}: its weights or "
            "lora.base differ; set model and lora.base to what the run was trained with"
        )


def _rest(state: TrainState) -> TrainState:
    return dataclasses.replace(state, params={})


def _named_rest(state: TrainState) -> Params:
    """All arrays except the parameters, by name; names of another model's arrays begin with its role's name."""
    return {name.removeprefix("models."): array for name, array in _named_arrays(_rest(state)).items()}


def saved_names(folder: Path, step: int | None) -> list[str]:
    """The names of all arrays except the parameters in a saved step (None: the newest).

    Names of another model's arrays begin with its role's name and a dot, and those of adapted coefficients with
    `coefs.`. Every process must call this.
    """
    _prepare_orbax(folder)
    step = _checked_step(folder, step, digests=False)
    with ocp.StandardCheckpointer() as reader:
        names = reader.metadata(absolute(folder / str(step)) / "optimizer").item_metadata.tree
    return list(names)


def _named_arrays(tree: Params | TrainState | dict[str, jax.ShapeDtypeStruct]) -> Params:
    """The leaves of a tree by path, such as `opt_state.1.mu.layers.q`, so that no Python types are stored."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _checked_step(folder: Path, step: int | None, *, digests: bool) -> int:
    """The step to read, after checking that its files are intact; every process must call this."""

    def checked() -> int:
        steps = saved_steps(folder)
        if not steps or (step is not None and step not in steps):
            raise CheckpointError(
                f"{folder} has no checkpoint{'' if step is None else f' of step {step}'}; it has steps {steps}"
            )
        found = steps[-1] if step is None else step
        if what := damage(folder / str(found), digests=digests):
            raise _damaged(folder, found, what)
        return found

    return from_leader(checked)


def _read(folder: Path, step: int, wanted: Mapping[str, Params]) -> tuple[dict[str, Params], HostState]:
    """Restore the arrays of each item, in the order of `wanted`, and the host state."""
    _prepare_orbax(folder)
    path = absolute(folder / str(step))
    try:
        with ocp.StandardCheckpointer() as reader:
            stored = {item: reader.metadata(path / item).item_metadata.tree for item in wanted}
    except Exception as error:
        raise refusal(path, error) or _damaged(folder, step, cause_of(error)) from error
    for item, arrays in wanted.items():
        _check_same_arrays(path / item, arrays, stored[item])
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            read = reader.restore(path, _restore_args(wanted))
    except Exception as error:
        raise refusal(path, error) or _damaged(folder, step, cause_of(error)) from error
    restored = {item: {name: read[item][name] for name in arrays} for item, arrays in wanted.items()}
    return restored, read["host"]


def _restore_args(wanted: Mapping[str, Params]) -> ocp.args.Composite:
    params, host = ocp.args.StandardRestore(wanted["params"]), ocp.args.JsonRestore()
    if "optimizer" not in wanted:
        return ocp.args.Composite(params=params, host=host)
    return ocp.args.Composite(params=params, optimizer=ocp.args.StandardRestore(wanted["optimizer"]), host=host)


class _Kind(Protocol):
    """The attributes shared by arrays and orbax's array metadata."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> object: ...


def _check_same_arrays(path: Path, wanted: Mapping[str, _Kind], stored: Mapping[str, _Kind]) -> None:
    """Raises CheckpointError if names, shapes or dtypes differ; orbax would silently truncate, pad or cast some."""

    def kind(arrays: Mapping[str, _Kind], name: str) -> str:
        return f"{arrays[name].dtype}{list(arrays[name].shape)}" if name in arrays else "missing"

    differences = [
        f"{name} is {kind(stored, name)} in the checkpoint and {kind(wanted, name)} in this run"
        for name in dict.fromkeys((*wanted, *stored))
        if kind(stored, name) != kind(wanted, name)
    ]
    if differences:
        more = len(differences) - SHOWN_DIFFERENCES
        raise CheckpointError(
            f"{path} belongs to another {'model' if path.name == 'params' else 'optimizer'}:\n    "
            + "\n    ".join(differences[:SHOWN_DIFFERENCES] + ([f"and {more} more"] if more > 0 else []))
            + "\n  use the config that it was saved with, or start a run with another name"
        )


def _damaged(folder: Path, step: int, what: str) -> CheckpointError:
    run, others = absolute(folder).parent, [other for other in saved_steps(folder) if other != step]
    whole = [other for other in others if damage(folder / str(other), digests=False) is None]
    way_out = f"use the newest intact one, {run}@{whole[-1]}" if whole else "no other checkpoint is intact"
    return CheckpointError(f"checkpoint {folder / str(step)} is damaged: {what}; {way_out}")
