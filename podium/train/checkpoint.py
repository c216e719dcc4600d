"""Checkpoints of a run: orbax writes them behind the loop's back, and a step is there whole or not at all.

    RUN/checkpoints/20/params/       the model, alone, so that evaluation and export read nothing else
    RUN/checkpoints/20/optimizer/    the optimizer's state and the step
    RUN/checkpoints/20/host/         what the loop wants back, as JSON
    RUN/checkpoints/20/sizes.json    bytes of every file above, written last: a damaged step differs from it

A step is written to a temporary folder and renamed when complete (orbax); a kill leaves only such a folder, and the
next `Checkpointer` of the run removes it. Arrays are stored by name, `layers.q` or `opt_state.1.mu.layers.q`, exactly,
and are read onto whatever mesh the reader asks for.
"""

import dataclasses
import functools
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from podium.config.schema import CheckpointConfig
from podium.observe.summary import versions
from podium.sharding import Params
from podium.train.state import TrainState

SIZES = "sizes.json"
ITEMS = ("params", "optimizer", "host")
SCORE = "score"
SHOWN_DIFFERENCES = 3


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


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or cannot be read; the message says which, why, and what to do."""


class Checkpointer:
    """Saves the states of one run, several hosts included, and gives them back.

    The folder is the run's `checkpoints`, made if it is not there; only the run itself may write to it. `on_save` is
    called when `maybe_save` begins to save.

    Raises:
        CheckpointError: if the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, *, on_save: Callable[[], None] = lambda: None) -> None:
        self._folder, self._config, self._on_save = folder.absolute(), config, on_save
        self._step: int | None = None  # last handed to orbax, whether or not it is whole yet
        self._failed = False  # what became of it
        self._bytes = 0  # of the arrays of that step
        _quiet_orbax()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=KeepPolicy(config),
            best_fn=lambda metrics: metrics[SCORE],  # has orbax store the scores; KeepPolicy compares them
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_sizes),
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"checkpoints cannot be kept in {self._folder}: {_first_line(error)}; make it writable,"
                " or write the run elsewhere with runs_dir"
            ) from error

    def maybe_save(self, step: int, state: TrainState, cursor: int, *, score: float | None, last: bool) -> float | None:
        """Save a step where the config says so, and the last one; the seconds that this took, None without a save.

        The cursor is the feed's: prompts drawn so far. The score is for `keep_best`; None: the step was not evaluated.
        Nothing comes after the `last`: it is whole on disk when this returns.
        """
        every, best = self._config.every_steps, self._config.keep_best and score is not None
        if not (last or best or (every and step % every == 0)):
            return None
        self._on_save()
        start = time.perf_counter()
        self.save(step, state, {"cursor": cursor, "versions": versions()}, score=score, wait=last)
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
            with self._write_errors():
                self._manager.save(step, args=items, metrics=metrics, force=True)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is whole on disk. Raises CheckpointError if it failed."""
        with self._write_errors():
            self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        """The steps that are whole on disk, oldest first."""
        return saved_steps(self._folder)

    def latest(self) -> int | None:
        """The newest step that is whole on disk."""
        return max(self.steps(), default=None)

    def restore(self, step: int | None, abstract_state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """A saved state and its host state, as `restore_state` reads them, after what is still being written."""
        self.wait()
        return restore_state(self._folder, step, abstract_state)

    def close(self) -> None:
        """Waits for the last save and stops orbax's threads. Raises CheckpointError if the save failed."""
        try:
            self.wait()
        finally:
            with self._write_errors():
                self._manager.close()

    def _write_sizes(self) -> None:
        """Called by orbax between the last byte of a step and its renaming, on every host."""
        if jax.process_index() == 0:
            (unnamed,) = self._folder.glob(f"{self._step}{ocp.utils.TMP_DIR_SUFFIX}*")
            (unnamed / SIZES).write_text(json.dumps(_sizes(unnamed)))

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Says what failed: orbax raises what its threads met at the next call, whatever that call is."""
        try:
            yield
        except Exception as error:
            self._failed = True
            self._manager.reload()  # it has forgotten the steps that the failed one would have replaced
            raise CheckpointError(
                f"the checkpoint of step {self._step} could not be written to {self._folder}: {_first_line(error)};"
                f" it takes up to {self._bytes / 1e6:,.2f} MB, and"
                f" {shutil.disk_usage(self._folder).free / 1e6:,.2f} MB are free; complete steps: {self.steps()};"
                " make room and continue the run"
            ) from error


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


def saved_steps(folder: Path) -> list[int]:
    """The steps that a run's `checkpoints` folder has under their final names, oldest first. Reads only."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def restore_state(folder: Path, step: int | None, abstract_state: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """A saved state, bit for bit, and the host state saved with it. Reads only: the run may be another's.

    Args:
        folder: `checkpoints` of a run directory.
        step: None: the newest.
        abstract_state: shapes, dtypes and shardings, on any mesh.

    Raises:
        CheckpointError: if there is no such step, its files are damaged, or it is of another model or optimizer.
    """
    step = _checked_step(folder, step)
    targets = {"params": abstract_state.params, "optimizer": _rest(abstract_state)}
    read = _read(folder, step, targets, host=True)
    return TrainState(params=read["params"], **read["optimizer"]), read["host"]


def restore_params(folder: Path, step: int | None, abstract_params: dict[str, jax.ShapeDtypeStruct]) -> Params:
    """The parameters of a saved step, without the optimizer's state; otherwise as `restore_state`."""
    return _read(folder, _checked_step(folder, step), {"params": abstract_params}, host=False)["params"]


def _rest(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "opt_state": state.opt_state}


def _named_arrays(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, `opt_state.1.mu.layers.q`: what is stored has no Python types in it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for item in ITEMS for path in (folder / item).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _checked_step(folder: Path, step: int | None) -> int:
    """The step to read, whose files all have the sizes that they had when they were written."""
    steps = saved_steps(folder)
    if not steps or (step is not None and step not in steps):
        raise CheckpointError(
            f"{folder} has no checkpoint{'' if step is None else f' of step {step}'}; it has steps {steps}"
        )
    step = steps[-1] if step is None else step
    if damage := _damage(folder / str(step)):
        raise _damaged(folder, step, damage)
    return step


def _damage(path: Path) -> str | None:
    """The first file of a step that is not as it was written, and how; None: all are."""
    try:
        expected, found = json.loads((path / SIZES).read_text()), _sizes(path)
    except (OSError, ValueError) as error:
        return f"{SIZES}: {_first_line(error)}"
    for file, size in expected.items():
        if file not in found:
            return f"{file} is missing"
        if found[file] != size:
            return f"{file} has {found[file]} bytes instead of {size}"
    return None


def _read(folder: Path, step: int, targets: dict[str, Any], *, host: bool) -> dict[str, Any]:
    """Each target with arrays for its leaves, and under "host" the host state."""
    _quiet_orbax()
    path = (folder / str(step)).absolute()
    wanted = {item: _named_arrays(target) for item, target in targets.items()}
    args: dict[str, Any] = {item: ocp.args.StandardRestore(arrays) for item, arrays in wanted.items()}
    try:
        with ocp.StandardCheckpointer() as reader:
            stored: dict[str, Any] = {item: reader.metadata(path / item).item_metadata.tree for item in wanted}
    except Exception as error:
        raise _damaged(folder, step, _first_line(error)) from error
    for item, arrays in wanted.items():
        _check_same_arrays(path / item, arrays, stored[item])
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            read = reader.restore(
                path, ocp.args.Composite(**args, **({"host": ocp.args.JsonRestore()} if host else {}))
            )
    except Exception as error:
        raise _damaged(folder, step, _first_line(error)) from error
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
    run, before = folder.absolute().parent, [other for other in saved_steps(folder) if other < step]
    whole = [other for other in before if _damage(folder / str(other)) is None]
    way_out = f"continue from the previous one with --from {run}@{whole[-1]}" if whole else "no earlier one is intact"
    return CheckpointError(f"checkpoint {folder / str(step)} is damaged: {what}; {way_out}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].partition(" [tensorstore_spec")[0]
