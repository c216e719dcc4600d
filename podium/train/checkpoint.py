"""Checkpoints of a run: orbax writes them behind the loop's back, and a step is there whole or not at all.

    RUN/checkpoints/20/params/       the model, alone, so that evaluation and export read nothing else
    RUN/checkpoints/20/optimizer/    the optimizer's state and the step
    RUN/checkpoints/20/host/         what the loop wants back, completions in flight included, as JSON
    RUN/checkpoints/20/sizes.json    bytes of every file, beside their digests (podium.train.step_files), written last

A step is written to a temporary folder and renamed when complete (orbax); a kill leaves only such a folder, and the
next `Checkpointer` of the run removes it. Arrays are stored by name, `layers.q` or `opt_state.1.mu.layers.q`, exactly,
and are read onto whatever mesh the reader asks for.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.path import atomicity

from podium.config.schema import CheckpointConfig
from podium.files import absolute, in_bucket
from podium.observe.summary import versions
from podium.sharding import Params
from podium.train.carry import Position
from podium.train.distributed import from_leader
from podium.train.s3 import take_s3_for_a_bucket
from podium.train.state import TrainState
from podium.train.step_files import Beat, CheckpointError, damage, first_line, saved_steps, seal, stored_sizes

SCORE = "score"
SHOWN_DIFFERENCES = 3
LOOK_S = 2.0
"""Between two looks at how much of a step is written."""
SAVE_LIMIT_S = 24 * 3600
"""After so long orbax gives a save up; a save that stands still is for the watchdog."""


@functools.cache
def _quiet_orbax() -> None:
    """Keeps what orbax raises and drops what it prints besides; once in a process, when orbax is first used.

    It logs each phase of a save, and the traceback of what it then raises. When a write fails it closes its event loop
    while other writes are under way; each of them then reports, as an exception that nobody can catch, a closed loop.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if not (isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"):
            report(unraisable)

    sys.unraisablehook = report_others
    take_s3_for_a_bucket()


def _idle() -> None:
    """Who is told, where nobody is."""


class Checkpointer:
    """Saves the states of one run, several hosts included, and gives them back.

    The folder is the run's `checkpoints`, made if it is not there; only the run itself may write to it. `on_save` is
    called when `maybe_save` begins to save; `beat`, while somebody waits for a save and what is on disk of it grows.
    `base` is the fingerprint of frozen weights, which are no part of a state: who restores one must have the same.

    Raises:
        CheckpointError: if the folder cannot be made or written to.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        base: str | None = None,
        *,
        on_save: Beat = _idle,
        beat: Beat = _idle,
    ) -> None:
        self._folder, self._config, self._on_save, self._beat = absolute(folder), config, on_save, beat
        self.base = base
        self._step: int | None = None  # last handed to orbax, whether or not it is whole yet
        self._failed, self._bytes = False, 0  # what became of it, and bytes of its arrays
        _quiet_orbax()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=KeepPolicy(config),
            best_fn=lambda metrics: metrics[SCORE],  # has orbax store the scores; KeepPolicy compares them
            cleanup_tmp_directories=True,
            temporary_path_class=atomicity.CommitFileTemporaryPath if in_bucket(self._folder) else None,
            async_options=ocp.AsyncOptions(timeout_secs=SAVE_LIMIT_S, post_finalization_callback=self._seal),
        )
        try:
            _try_to_write(self._folder)
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"checkpoints cannot be kept in {self._folder}: {first_line(error)}; make it writable,"
                " or write the run elsewhere with runs_dir"
            ) from error

    def maybe_save(
        self, step: int, state: TrainState, position: Position, *, score: float | None, last: bool, due: bool = False
    ) -> float | None:
        """Save a step where the config says so, the last one, and one that is `due`; the seconds that this took.

        None without a save. All hosts of a run must agree on what is due.
        `position` is where the run stands in its prompts. The score is for `keep_best`; None: the step was not
        evaluated. Nothing comes after the `last`: it is whole on disk when this returns.
        """
        every, best = self._config.every_steps, self._config.keep_best and score is not None
        if not (last or best or due or (every and step % every == 0)):
            return None
        self._on_save()
        start = time.perf_counter()
        host_state = position.record() | {"versions": versions(), "base": self.base}
        self.save(step, state, host_state, score=score, wait=last)
        return time.perf_counter() - start

    def save(
        self, step: int, state: TrainState, host_state: dict[str, Any], *, score: float | None, wait: bool = False
    ) -> None:
        """Starts to save a step; `state` may be donated as soon as this returns.

        Returns after the arrays have left the devices, or after the previous save if that takes longer. A step that
        this checkpointer has saved is not saved again. What `keep_*` does not keep is deleted when this step is whole.
        The host state is what JSON can hold. With `wait`, returns only when the step is whole on disk.

        Raises:
            CheckpointError: if this step, or an earlier one that was still being written, failed.
        """
        if step != self._step or self._failed:
            self.wait()
            params, rest = _named_arrays(state.params), _named_arrays(_rest(state))
            self._step, self._failed = step, False
            self._bytes = sum(array.nbytes for array in (*params.values(), *rest.values()))
            items = ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                optimizer=ocp.args.StandardSave(rest),
                host=ocp.args.JsonSave(json.loads(json.dumps(host_state))),  # the loop goes on changing its own
            )
            metrics = None if score is None else {SCORE: score}
            with self._write_errors(), self._beating():
                self._manager.save(step, args=items, metrics=metrics, force=True)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is whole on disk. Raises CheckpointError if it failed."""
        with self._write_errors(), self._beating():
            self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        """The steps that are whole on disk, oldest first."""
        return saved_steps(self._folder)

    def restore(self, step: int | None, abstract_state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """A saved state and its host state, as `restore_state` reads them, after what is still being written.

        Digests are not compared: `newest_whole_step` has done that before a run goes on.
        """
        self.wait()
        return restore_state(self._folder, step, abstract_state, base=self.base, digests=False)

    def close(self) -> None:
        """Waits for the last save and stops orbax's threads. Raises CheckpointError if the save failed."""
        try:
            self.wait()
        finally:
            with self._write_errors():
                self._manager.close()

    def _seal(self) -> None:
        """Called by orbax between the last byte of a step and its renaming, on the first host."""
        (unnamed,) = self._unfinished()
        seal(unnamed, self._beat)

    def _unfinished(self) -> list[Path]:
        """The folder in which the step is being written, if it is; in a bucket it has its final name already."""
        if in_bucket(self._folder):
            return [] if self._step is None else [self._folder / str(self._step)]
        return list(self._folder.glob(f"{self._step}{ocp.utils.TMP_DIR_SUFFIX}*"))

    def _beating(self) -> contextlib.AbstractContextManager[None]:
        """In the block, a sign of life as long as the bytes of the step that is being written become more."""
        return _growing(self._unfinished, self._beat, LOOK_S * (5 if in_bucket(self._folder) else 1))

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Says what failed: orbax raises what its threads met at the next call, whatever that call is."""
        try:
            yield
        except Exception as error:
            self._failed = True
            self._manager.reload()  # it has forgotten the steps that the failed one would have replaced
            raise CheckpointError(
                f"the checkpoint of step {self._step} could not be written to {self._folder}: {first_line(error)};"
                f" it takes up to {self._bytes / 1e6:,.2f} MB{_free(self._folder)}; complete steps: {self.steps()};"
                " make room and continue the run"
            ) from error


@contextmanager
def _growing(folders: Callable[[], list[Path]], beat: Beat, every_s: float) -> Iterator[None]:
    """In the block, `beat` is called when the bytes in the folders have become more, looked at every so often."""
    done = threading.Event()

    def watch() -> None:
        before = -1
        while not done.wait(every_s):
            with contextlib.suppress(OSError):  # files are renamed meanwhile
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
    """Which checkpoints stay: the newest, the multiples of `keep_every`, and those of the best scores.

    Orbax's own BestN keeps n checkpoints without a score until there are more than n.
    """

    config: CheckpointConfig

    def should_preserve(
        self,
        checkpoints: Sequence[ocp.checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: ocp.checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        """For each checkpoint, oldest first, whether it stays; of equal scores the newer one does."""
        scores = sorted((info.metrics[SCORE], info.step) for info in checkpoints if info.metrics)
        keep = {step for _, step in scores[max(0, len(scores) - self.config.keep_best) :]}
        keep |= {info.step for info in checkpoints[-self.config.keep_last :]}
        if self.config.keep_every:
            keep |= {info.step for info in checkpoints if info.step % self.config.keep_every == 0}
        return [info.step in keep for info in checkpoints]


def restore_state(
    folder: Path, step: int | None, abstract_state: TrainState, *, base: str | None = None, digests: bool = True
) -> tuple[TrainState, dict[str, Any]]:
    """A saved state, bit for bit, and the host state saved with it. Reads only: the run may be another's.

    Args:
        folder: `checkpoints` of a run directory.
        step: None: the newest.
        abstract_state: shapes, dtypes and shardings, on any mesh.
        base: fingerprint of the frozen weights that the state is to be beside; None: there are none.
        digests: whether every byte is compared with what was written, not sizes alone.

    Raises:
        CheckpointError: if there is no such step, its files are damaged, or it is of another model or optimizer.
    """
    step = _checked_step(folder, step, digests=digests)
    targets = {"params": abstract_state.params, "optimizer": _rest(abstract_state)}
    read = _read(folder, step, targets, host=True)
    _check_base(folder / str(step), read["host"].get("base"), base)
    return TrainState(params=read["params"], **read["optimizer"]), read["host"]


def restore_params(
    folder: Path, step: int | None, abstract_params: dict[str, jax.ShapeDtypeStruct], *, base: str | None = None
) -> Params:
    """The parameters of a saved step, without the optimizer's state; otherwise as `restore_state`."""
    step = _checked_step(folder, step, digests=True)
    read = _read(folder, step, {"params": abstract_params}, host=True)
    _check_base(folder / str(step), read["host"].get("base"), base)
    return read["params"]


def _check_base(path: Path, saved: str | None, base: str | None) -> None:
    """Raises CheckpointError where adapters were trained beside other frozen weights than there are now."""
    if saved != base:
        raise CheckpointError(
            f"{path} has adapters of the base {saved}, and the config's model, as it is kept, is {base}: other weights,"
            " or another lora.base; set model and lora.base to what the run was trained with"
        )


def _try_to_write(folder: Path) -> None:
    """Make the folder, and a file in it that is deleted; its name is this host's, as others try at the same time."""
    if in_bucket(folder):
        probe = folder / f".written-{uuid.uuid4().hex}"
        probe.write_text("")
        probe.unlink()
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _free(folder: Path) -> str:
    return "" if in_bucket(folder) else f", and {shutil.disk_usage(folder).free / 1e6:,.2f} MB are free"


def _rest(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "opt_state": state.opt_state}


def _named_arrays(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, `opt_state.1.mu.layers.q`: what is stored has no Python types in it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _checked_step(folder: Path, step: int | None, *, digests: bool) -> int:
    """The step to read, whose files are as they were written; every process must call it."""

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


def _read(folder: Path, step: int, targets: dict[str, Any], *, host: bool) -> dict[str, Any]:
    """Each target with arrays for its leaves, and under "host" the host state."""
    _quiet_orbax()
    path = absolute(folder / str(step))
    wanted = {item: _named_arrays(target) for item, target in targets.items()}
    args: dict[str, Any] = {item: ocp.args.StandardRestore(arrays) for item, arrays in wanted.items()}
    try:
        with ocp.StandardCheckpointer() as reader:
            stored: dict[str, Any] = {item: reader.metadata(path / item).item_metadata.tree for item in wanted}
    except Exception as error:
        raise _damaged(folder, step, first_line(error)) from error
    for item, arrays in wanted.items():
        _check_same_arrays(path / item, arrays, stored[item])
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            read = reader.restore(
                path, ocp.args.Composite(**args, **({"host": ocp.args.JsonRestore()} if host else {}))
            )
    except Exception as error:
        raise _damaged(folder, step, first_line(error)) from error
    trees = {item: jax.tree.structure(target) for item, target in targets.items()}
    restored = {item: trees[item].unflatten([read[item][name] for name in wanted[item]]) for item in targets}
    return restored | ({"host": read["host"]} if host else {})


def _check_same_arrays(path: Path, wanted: dict[str, Any], stored: dict[str, Any]) -> None:
    """Raises CheckpointError where the names, shapes or dtypes differ; orbax would cut, pad or cast some of them."""

    def kind(arrays: dict[str, Any], name: str) -> str:
        return f"{arrays[name].dtype}{list(arrays[name].shape)}" if name in arrays else "not there"

    differences = [
        f"{name} is {kind(stored, name)} in the checkpoint and {kind(wanted, name)} in this run"
        for name in dict.fromkeys((*wanted, *stored))
        if kind(stored, name) != kind(wanted, name)
    ]
    if differences:
        more = len(differences) - SHOWN_DIFFERENCES
        raise CheckpointError(
            f"{path} is of another {'model' if path.name == 'params' else 'optimizer'}:\n    "
            + "\n    ".join(differences[:SHOWN_DIFFERENCES] + ([f"and {more} more"] if more > 0 else []))
            + "\n  use the config that it was saved with, or start a run with another name"
        )


def _damaged(folder: Path, step: int, what: str) -> CheckpointError:
    run, others = absolute(folder).parent, [other for other in saved_steps(folder) if other != step]
    whole = [other for other in others if damage(folder / str(other), digests=False) is None]
    way_out = f"name the newest whole one, {run}@{whole[-1]}" if whole else "no other one is whole"
    return CheckpointError(f"checkpoint {folder / str(step)} is damaged: {what}; {way_out}")
