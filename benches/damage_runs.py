"""Damaged run folders: what a run that continues there does. `benches.damage` counts the outcomes.

A run's folder with three checkpoints and the records of seven steps is copied and damaged: records (a file deleted,
shortened, with a hole, a doubled line, a changed number), checkpoints (digests gone and a bit flipped, symbolic links,
strangers among the steps, read-only), or any file at random. Then it is continued as `podium.train.open` does. Right is
an error that says what is wrong, or a continued run whose arrays are those that were saved and which says what its
records lack.
"""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypedDict

import jax
import numpy as np

from podium.config.schema import CheckpointConfig, Config
from podium.files import RunFileError, read_lines
from podium.observe.record_check import Extent
from podium.observe.run_dir import LENGTHS, METRICS, RECORDS, SAMPLES, RunDir
from podium.sampling.conversations.carry import Position
from podium.train.checkpoints import checkpoint
from podium.train.checkpoints.checkpoint import Checkpointer
from podium.train.checkpoints.step_files import DIGESTS, CheckpointError, newest_whole_step
from podium.train.state import TrainState

RECORDED = 7
"""Steps in the records; the last checkpoint is of the step before."""
LIMIT_S = 60
"""Seconds after which a trial is hung."""
ENDS_S = 10.0
"""Seconds in which its threads must end."""
SETTINGS = Config.model_validate({"name": "run", "model": "none", "tasks": [{"name": "arithmetic"}]}).document()
Harm = Callable[[Path, random.Random], None]
States = dict[int, TrainState]


class Row(TypedDict):
    """A trial."""

    where: str
    kind: str
    outcome: str


def make_run(folder: Path, states: States) -> None:
    """A run's folder with these steps saved, and records up to RECORDED."""
    with RunDir.open(folder, SETTINGS) as run:
        config = CheckpointConfig(keep_last=len(states))
        with contextlib.closing(Checkpointer(run.checkpoints, config, records=run)) as checkpointer:
            for step in range(1, RECORDED + 1):
                run.append(METRICS, {"step": step, "train-reward/total/mean": step / 16, "time/wall_s": float(step)})
                run.append(SAMPLES, {"step": step, "split": "train", "question": f"{step} + 1?"})
                run.append(LENGTHS, {"step": step, "prompt_lengths": [step], "completion_lengths": [2, step]})
                if step in states:
                    position = Position(cursor=step)
                    checkpointer.maybe_save(step, states[step], position, score=None, last=True)


def trials(folder: Path, states: States, seed: int, *, times: int, randomly: int) -> Iterator[Row]:
    """Each kind of damage so many times, and random damages."""
    make_run(folder / "intact", states)
    draw = random.Random(seed)
    for (where, kind), harm in HARMS.items():
        for _ in range(times):
            yield Row(where=where, kind=kind, outcome=_trial(folder, states, harm, draw))
    for _ in range(randomly):
        yield Row(where="any file", kind="random", outcome=_trial(folder, states, _harm_any_file, draw))
    yield Row(where="checkpoints", kind="read-only", outcome=_read_only(folder, states))


def _trial(folder: Path, states: States, harm: Harm, draw: random.Random) -> str:
    copy = folder / "copy"
    shutil.copytree(folder / "intact", copy, symlinks=True)
    try:
        harm(copy, draw)
        return judged(copy, folder / "intact", states)
    finally:
        shutil.rmtree(copy)


def _read_only(folder: Path, states: States) -> str:
    """The file system becomes read-only between two saves; simulated, since root may write everywhere."""
    shutil.copytree(folder / "intact", folder / "copy")

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    probe = checkpoint.try_to_write
    try:
        with contextlib.closing(Checkpointer(folder / "copy" / "checkpoints", CheckpointConfig())) as checkpointer:
            checkpoint.try_to_write = refuse
            with _limited(), _ending_threads():
                checkpointer.save(8, next(iter(states.values())), {"cursor": 8, "versions": {}}, score=None, wait=True)
        return "WRONG: saved"
    except CheckpointError as error:
        return "refused" if "Read-only" in str(error) and "writable" in str(error) else f"WRONG: {error}"
    except TimeoutError:
        return "HUNG"
    finally:
        checkpoint.try_to_write = probe
        shutil.rmtree(folder / "copy")


def judged(run: Path, intact: Path, states: States) -> str:
    """Continue the run and compare: `refused`, `continued`, `said`, or what is wrong."""
    said: list[str] = []
    try:
        with _limited(), _ending_threads():
            step, found = continued(run, states, said)
    except (CheckpointError, RunFileError) as error:
        return "refused" if str(run) in str(error) else f"WRONG: an error without the place: {error}"
    except TimeoutError:
        return "HUNG"
    except Exception as error:
        return f"WRONG: {type(error).__name__}: {error}"
    if step and (found is None or not _equal(found, states[step])):
        return f"WRONG: step {step} differs silently"
    lacking = [name for name in RECORDS if read_lines(run / name) != _until(intact / name, step)]
    unsaid = [name for name in lacking if not any(name in line or "has no checkpoint" in line for line in said)]
    if unsaid or (step != max(states) and not said):
        return f"WRONG: step {step}, {unsaid}, {said}"
    return "said" if said else "continued"


def continued(run: Path, states: States, said: list[str]) -> tuple[int, TrainState | None]:
    """Open the run as training does, up to its next save; return the step and the state that it continues from."""
    with RunDir.open(run, SETTINGS) as run_dir:
        step = newest_whole_step(run_dir.checkpoints, said.append, lambda: None)
        config = CheckpointConfig(keep_last=len(states))
        with contextlib.closing(Checkpointer(run_dir.checkpoints, config, records=run_dir)) as checkpointer:
            state = None
            saved: Mapping[str, Extent] = {}
            if step is not None:
                abstract = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), states[step]
                )
                state, host_state = checkpointer.restore(step, abstract)
                saved = host_state.get("records", {})
            said += run_dir.compare(saved, step or 0, checkpointer.steps())
            run_dir.truncate(step or -1)
            next_one = next(iter(states.values())) if state is None else state
            checkpointer.maybe_save(100, next_one, Position(cursor=100), score=None, last=True)
    return step or 0, state


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise TimeoutError in the block after LIMIT_S."""

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _ending_threads() -> Iterator[None]:
    """Raise TimeoutError if threads that began in the block, for which an exit would wait, outlive it."""
    before = set(threading.enumerate())
    try:
        yield
    finally:
        for thread in set(threading.enumerate()) - before:
            if not thread.daemon and thread.name.startswith(("json_ch", "serialize", "array_type", "write_metadata")):
                thread.join(ENDS_S)
                if thread.is_alive():
                    raise TimeoutError(thread.name)


def _equal(left: TrainState, right: TrainState) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def _until(path: Path, step: int) -> list[dict[str, object]]:
    return [record for record in read_lines(path) if record["step"] <= step]


def _on_lines(name: str, change: Callable[[list[bytes], random.Random], list[bytes]]) -> Harm:
    def harm(run: Path, draw: random.Random) -> None:
        path = run / name
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True), draw)))

    return harm


def _shortened(lines: list[bytes], draw: random.Random) -> list[bytes]:
    return lines[: draw.randrange(len(lines) - 2)]


def _with_hole(lines: list[bytes], draw: random.Random) -> list[bytes]:
    place = draw.randrange(len(lines) - 2)
    return lines[:place] + lines[place + 1 :]


def _doubled(lines: list[bytes], draw: random.Random) -> list[bytes]:
    place = draw.randrange(len(lines) - 2)
    return lines[: place + 1] + lines[place:]


def _changed(lines: list[bytes], draw: random.Random) -> list[bytes]:
    place = draw.randrange(len(lines) - 2)
    record = json.loads(lines[place])
    return [*lines[:place], json.dumps({**record, "step": record["step"] + 1}).encode() + b"\n", *lines[place + 1 :]]


def _deleted(name: str) -> Harm:
    return lambda run, _: (run / name).unlink()


def _flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _newest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))


def _undigested(run: Path, draw: random.Random) -> None:
    """No digests, and a bit of an array flipped."""
    newest = _newest(run)
    (newest / DIGESTS).unlink()
    _flip(max((newest / "params").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else -1), draw)


def _linked_step(run: Path, _: random.Random) -> None:
    oldest = min((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    oldest.rename(run / "elsewhere")
    oldest.symlink_to(run / "elsewhere")


def _linked_folder(run: Path, _: random.Random) -> None:
    (run / "checkpoints").rename(run / "elsewhere")
    (run / "checkpoints").symlink_to(run / "elsewhere")


def _stranger(run: Path, _: random.Random) -> None:
    (run / "checkpoints" / "\N{SUPERSCRIPT TWO}").mkdir()
    (run / "checkpoints" / "notes.txt").write_text("mine")


def _empty_step(run: Path, _: random.Random) -> None:
    (run / "checkpoints" / "99").mkdir()


def _no_checkpoints(run: Path, _: random.Random) -> None:
    shutil.rmtree(run / "checkpoints")


def _other_identity(run: Path, _: random.Random) -> None:
    (run / "identity.json").write_text('{"run": "another"}\n')


def _other_config(run: Path, _: random.Random) -> None:
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("seed: 0", "seed: 1"))


def _harm_any_file(run: Path, draw: random.Random) -> None:
    path = draw.choice(sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size))
    kind = draw.choice(("flip", "cut", "delete"))
    if kind == "flip":
        _flip(path, draw)
    elif kind == "cut":
        os.truncate(path, draw.randrange(path.stat().st_size))
    else:
        path.unlink()


HARMS: dict[tuple[str, str], Harm] = {
    **{(name, "deleted"): _deleted(name) for name in RECORDS},
    **{(name, "shortened"): _on_lines(name, _shortened) for name in RECORDS},
    **{(name, "a hole"): _on_lines(name, _with_hole) for name in RECORDS},
    **{(name, "a doubled line"): _on_lines(name, _doubled) for name in RECORDS},
    **{(name, "a changed number"): _on_lines(name, _changed) for name in RECORDS},
    ("checkpoints", "no digests, a bit flipped"): _undigested,
    ("checkpoints", "a step is a link"): _linked_step,
    ("checkpoints", "the folder is a link"): _linked_folder,
    ("checkpoints", "strangers"): _stranger,
    ("checkpoints", "an empty step"): _empty_step,
    ("checkpoints", "deleted"): _no_checkpoints,
    ("identity.json", "deleted"): _deleted("identity.json"),
    ("identity.json", "of another run"): _other_identity,
    ("config.yaml", "deleted"): _deleted("config.yaml"),
    ("config.yaml", "another seed"): _other_config,
    ("run.lock", "deleted"): _deleted("run.lock"),
}
"""Damages by where and what."""
