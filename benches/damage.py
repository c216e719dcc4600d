"""Damaged checkpoints: a run goes on from the newest whole step, never from one that differs, and what digests cost.

    python -m benches.damage        (CPU; two minutes, 2 GB of disk)

A run's checkpoints folder with three steps is copied, and files of it are damaged at random: a bit flipped, the end cut
off, the file deleted; in the newest step alone, or in the two newest. Or an intact step stands in the wrong place: an
older one in that of the newest, two exchanged, the same step of another run. Then the folder is opened as by a run that
continues. Right is: the newest step without damage, each array as it was saved, the damaged steps kept aside and told
by name; or, where the damage changes nothing that is read, the newest step itself, equal. Whole run folders are damaged
too (`benches.damage_runs`). The cost: seconds that the digests of a step take, beside those of its whole save, the
least of several saves each, as other processes only add; and the same of CPU seconds, without those for which a save
waits for the disk, and how many of those only read.
"""

import collections
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benches import damage_runs
from benches.record import arguments, record
from podium.config.schema import CheckpointConfig
from podium.train.checkpoints import checkpoint
from podium.train.checkpoints.checkpoint import Checkpointer, restore_state
from podium.train.checkpoints.step_files import ASIDE, BLOCK, Beat, CheckpointError, newest_whole_step
from podium.train.state import TrainState

STEPS = (2, 4, 6)
TIMES = {"flipped": 60, "cut": 20, "deleted": 20}
MISPLACED_TIMES = {"old as new": 10, "exchanged": 10, "of another run": 10}
MB = 1e6


def make_state(seed: int, *, layers: int, width: int) -> TrainState:
    """Random weights and two moments of each: 12 bytes per number."""
    rng = np.random.default_rng(seed)
    sharding = NamedSharding(Mesh(jax.devices()[:1], ("device",)), PartitionSpec())
    shapes = {"embed": (1024, width), "layers.up": (layers, width, 4 * width), "layers.norm": (layers, width)}

    def fill() -> dict[str, jax.Array]:
        values = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        return {name: jax.device_put(value, sharding) for name, value in values.items()}

    step = jax.device_put(np.int32(seed), sharding)
    return TrainState(step=step, params=fill(), opt_state={"first": fill(), "second": fill()})


def save_all(folder: Path, states: dict[int, TrainState]) -> None:
    """A run's checkpoints folder with these steps."""
    with contextlib.closing(Checkpointer(folder, CheckpointConfig(keep_last=len(states)))) as checkpointer:
        for step, state in states.items():
            checkpointer.save(step, state, {"cursor": step, "versions": {}}, score=step / 10, wait=True)


def harm(folder: Path, kind: str, draw: random.Random) -> str:
    """Damage one file of a step; which one."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    # by size: most of a checkpoint is weights; every third time any file, so that the small ones are met too
    sizes = [path.stat().st_size for path in files] if draw.randrange(3) else None
    (path,) = draw.choices(files, weights=sizes)
    data = bytearray(path.read_bytes())
    if kind == "flipped":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    elif kind == "cut":
        os.truncate(path, draw.randrange(len(data)))
    else:
        path.unlink()
    return path.relative_to(folder).as_posix()


def misplace(folder: Path, other_run: Path, kind: str, draw: random.Random) -> list[int]:
    """Put an intact step in a wrong place; return the steps whose folders hold something else."""
    newest, older = folder / str(STEPS[-1]), draw.choice(STEPS[:-1])
    if kind == "exchanged":
        newest.rename(folder / "between")
        (folder / str(older)).rename(newest)
        (folder / "between").rename(folder / str(older))
        return [STEPS[-1], older]
    shutil.rmtree(newest)
    shutil.copytree(folder / str(older) if kind == "old as new" else other_run / str(STEPS[-1]), newest)
    return [STEPS[-1]]


def abstract(state: TrainState) -> TrainState:
    """Shapes, dtypes and shardings of a state."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def equal(left: TrainState, right: TrainState) -> bool:
    """Whether all arrays are the same, bit by bit."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def outcome(folder: Path, states: dict[int, TrainState], harmed: list[int]) -> str:
    """How a run that continues takes it: `fell back`, `unharmed`, or what is wrong."""
    said: list[str] = []
    try:
        step = newest_whole_step(folder, said.append, lambda: None)
        if step is None:
            return "WRONG: starts afresh"
        with contextlib.closing(Checkpointer(folder, CheckpointConfig(keep_last=3))) as checkpointer:
            restored, host = checkpointer.restore(step, abstract(states[step]))
    except CheckpointError as error:
        return f"WRONG: refused: {error}"
    if not equal(restored, states[step]) or host != {"cursor": step, "versions": {}}:
        return f"WRONG: step {step} differs silently"
    if step in harmed:
        return "unharmed"
    aside = all((folder / f"{each}{ASIDE}").is_dir() for each in STEPS if each > step)
    told = len(said) == sum(each > step for each in STEPS)
    expected = max(each for each in STEPS if each not in harmed)
    return "fell back" if step == expected and aside and told else f"WRONG: step {step}, {said}"


def trials(folder: Path, seed: int) -> Iterator[dict[str, Any]]:
    """A row per trial."""
    draw = random.Random(seed)
    states = {step: make_state(step, layers=2, width=64) for step in STEPS}
    save_all(folder / "whole", states)
    save_all(folder / "other" / "checkpoints", {step: make_state(100 + step, layers=2, width=64) for step in STEPS})
    for kind, times in MISPLACED_TIMES.items():
        for _ in range(times):
            shutil.copytree(folder / "whole", folder / "copy")
            harmed = misplace(folder / "copy", folder / "other" / "checkpoints", kind, draw)
            yield {
                "where": "whole steps",
                "kind": kind,
                "files": [str(step) for step in harmed],
                "outcome": outcome(folder / "copy", states, harmed),
            }
            shutil.rmtree(folder / "copy")
    for where, harmed in (("the newest", [6]), ("the two newest", [6, 4])):
        for kind, times in TIMES.items():
            for _ in range(times):
                shutil.copytree(folder / "whole", folder / "copy")
                files = [harm(folder / "copy" / str(step), kind, draw) for step in harmed]
                yield {
                    "where": where,
                    "kind": kind,
                    "files": files,
                    "outcome": outcome(folder / "copy", states, harmed),
                }
                shutil.rmtree(folder / "copy")


def cost(folder: Path, *, saves: int, layers: int, width: int) -> dict[str, Any]:
    """Seconds of whole saves, of the digests in them, and of comparing the digests of one step."""
    state, sealing, saving = make_state(0, layers=layers, width=width), [], []
    sealing_cpu, saving_cpu = [], []
    seal = checkpoint.seal

    def timed(path: Path, step: int, beat: Beat) -> None:
        start, start_cpu = time.perf_counter(), time.process_time()
        seal(path, step, beat)
        sealing.append(time.perf_counter() - start)
        sealing_cpu.append(time.process_time() - start_cpu)

    checkpoint.seal = timed
    try:
        with contextlib.closing(Checkpointer(folder, CheckpointConfig(keep_last=1))) as checkpointer:
            for step in range(1, saves + 1):
                start, start_cpu = time.perf_counter(), time.process_time()
                checkpointer.save(step, state, {"cursor": 0, "versions": {}}, score=None, wait=True)
                saving.append(time.perf_counter() - start)
                saving_cpu.append(time.process_time() - start_cpu)
    finally:
        checkpoint.seal = seal
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    reading_cpu = min(read_all(folder) for _ in range(saves))
    start = time.perf_counter()
    restore_state(folder, None, abstract(state), digests=False)
    reading = time.perf_counter() - start
    start = time.perf_counter()
    newest_whole_step(folder, print, lambda: None)
    return {
        "mb_of_arrays": sum(x.nbytes for x in jax.tree.leaves(state)) / MB,
        "mb_on_disk": size / MB,
        "save_s": saving,
        "digests_s": sealing,
        "save_cpu_s": saving_cpu,
        "digests_cpu_s": sealing_cpu,
        "reading_cpu_s": reading_cpu,
        "share_of_a_save": min(sealing[1:]) / min(saving[1:]),  # the first save also starts threads
        "share_of_its_cpu_seconds": min(sealing_cpu[1:]) / min(saving_cpu[1:]),
        "restore_s": reading,
        "compare_s": time.perf_counter() - start,
    }


def read_all(folder: Path) -> float:
    """CPU seconds of reading every file as digests do, without digests."""
    block, start = bytearray(BLOCK), time.process_time()
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as source:
                while source.readinto(block):  # pyright: ignore[reportAttributeAccessIssue]  # a raw file has it
                    pass
    return time.process_time() - start


def main() -> None:
    """Prints and writes the counts; exit status 1 where a trial is wrong."""
    parser = arguments(__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of the damage; unset: another one each time")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory() as scratch:
        rows = list(trials(Path(scratch), seed))
        states = {step: make_state(step, layers=2, width=64) for step in STEPS}
        rows += [{**row} for row in damage_runs.trials(Path(scratch) / "runs", states, seed, times=2, randomly=20)]
        costs = cost(Path(scratch) / "cost", saves=9, layers=10, width=512)
    counts = collections.Counter((row["where"], row["kind"], row["outcome"]) for row in rows)
    for (where, kind, how), count in sorted(counts.items()):
        print(f"{count:4} {kind:25} in {where:15} {how}")
    wrong = [row for row in rows if row["outcome"].startswith(("WRONG", "HUNG"))]
    share, cpu = costs["share_of_a_save"], costs["share_of_its_cpu_seconds"]
    reading = costs["reading_cpu_s"] / min(costs["save_cpu_s"][1:])
    size = f"{costs['mb_of_arrays']:.0f} MB"
    print(f"digests: {share:.2%} of a save of {size}, {cpu:.2%} of its CPU seconds ({reading:.2%} to read the files)")
    table = [{"where": w, "kind": k, "outcome": o, "count": n} for (w, k, o), n in sorted(counts.items())]
    result = {"seed": seed, "trials": len(rows), "wrong": wrong, "outcomes": table, "cost": costs}
    record(f"damage-{jax.default_backend()}", result, args.results)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
