import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint._src.path import async_path, gcs_utils

from podium.config.optimizer import OptimizerConfig
from podium.config.schema import CheckpointConfig
from podium.files import as_path
from podium.models.blocks.spec import ParamSpec
from podium.models.params import TRAIN_AXES
from podium.observe.run_dir import saved_steps
from podium.sharding import ShardingRules, abstract_params, make_mesh
from podium.train.checkpoints import checkpoint
from podium.train.checkpoints.checkpoint import Checkpointer, restore_params, restore_state
from podium.train.checkpoints.s3 import take_s3_for_a_bucket
from podium.train.checkpoints.step_files import CheckpointError, newest_whole_step
from podium.train.optimizer.transforms import make_optimizer
from podium.train.state import TrainState, abstract_state

SPECS = {
    "embed": ParamSpec((64, 32), ("vocab", "width"), 0.02),
    "layers.q": ParamSpec((2, 32, 4, 8), (None, "width", "heads", None), 0.02),
    "layers.norm": ParamSpec((2, 32), (None, None), 0.0, 1.0),
}
HOST = {"cursor": 17, "versions": {"jax": "0.10.2"}, "mean": 0.1 + 0.2, "name": None}


def rules(mesh: str = "fsdp:4,tp:2", devices: int = 8) -> ShardingRules:
    return ShardingRules(make_mesh(mesh, jax.devices()[:devices]), TRAIN_AXES)


def target(on: ShardingRules | None = None, optimizer: str = "adamw", specs=SPECS) -> TrainState:
    abstract = abstract_params(specs, jnp.float32, on or rules())
    return abstract_state(abstract, make_optimizer(OptimizerConfig(name=optimizer), 10, specs))


def make_state(seed: int = 0, optimizer: str = "adamw") -> TrainState:
    """A state of random numbers, the moments included, on 4 x 2 devices."""
    rng = np.random.default_rng(seed)

    def fill(leaf):
        values = rng.normal(size=leaf.shape) if leaf.dtype.kind == "f" else np.full(leaf.shape, seed)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(fill, target(optimizer=optimizer))


def assert_bit_equal(found, expected):
    def check(path, a, b):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path

    jax.tree_util.tree_map_with_path(check, found, expected)


@pytest.fixture
def open_checkpointer(tmp_path):
    """Checkpointers of the folder `run/checkpoints`, closed after the test."""
    opened = []

    def open_one(**config) -> Checkpointer:
        opened.append(Checkpointer(tmp_path / "run" / "checkpoints", CheckpointConfig(**config)))
        return opened[-1]

    yield open_one
    for checkpointer in opened:
        checkpointer.close()


def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
@pytest.mark.parametrize(("mesh", "devices"), [("fsdp:4,tp:2", 8), ("dp:2,fsdp:2,tp:2", 8), ("dp:1", 1)])
def test_a_state_comes_back_bit_for_bit_on_any_mesh(open_checkpointer, optimizer, mesh, devices):
    checkpointer, state = open_checkpointer(), make_state(3, optimizer)
    special = np.array([[-0.0, np.nan, np.inf, 1e-45] * 8] * 2, np.float32)
    norm = jax.device_put(special, state.params["layers.norm"].sharding)
    state = TrainState(step=state.step, params={**state.params, "layers.norm": norm}, opt_state=state.opt_state)
    checkpointer.save(5, state, HOST, score=None)
    wanted = target(rules(mesh, devices), optimizer)
    restored, host = checkpointer.restore(None, wanted)
    assert_bit_equal(restored, state)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, wanted)
    assert host == HOST


def test_parameters_that_are_all_minus_zero_keep_their_sign(open_checkpointer):
    checkpointer = open_checkpointer()
    state = jax.tree.map(lambda leaf: jax.device_put(-np.zeros(leaf.shape, leaf.dtype), leaf.sharding), make_state())
    checkpointer.save(1, state, {}, score=None)
    restored, _ = checkpointer.restore(1, target())
    assert_bit_equal(restored, state)
    assert np.signbit(restored.params["embed"]).all()


def test_the_state_may_be_donated_while_it_is_written(open_checkpointer):
    checkpointer, state = open_checkpointer(keep_last=9), make_state()
    advance = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    copies = {}
    for step in range(4):
        copies[step] = jax.tree.map(lambda leaf: np.array(leaf), state)
        checkpointer.save(step, state, {"step": step}, score=None)
        state = jax.block_until_ready(advance(advance(state)))
    for step, copy in copies.items():
        restored, host = checkpointer.restore(step, target())
        assert_bit_equal(restored, copy)
        assert host == {"step": step}


def test_the_parameters_alone_are_read_without_the_optimizer(open_checkpointer, tmp_path):
    checkpointer, state = open_checkpointer(), make_state(2)
    checkpointer.save(7, state, HOST, score=None, wait=True)
    shutil.rmtree(folder(tmp_path) / "7" / "optimizer" / "d")
    sizes = folder(tmp_path) / "7" / "sizes.json"
    sizes.write_text(json.dumps({k: v for k, v in json.loads(sizes.read_text()).items() if "optimizer/d/" not in k}))
    one = rules("dp:1", 1)
    assert_bit_equal(restore_params(folder(tmp_path), 7, abstract_params(SPECS, jnp.float32, one))[0], state.params)


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({}, [5, 6]),
        ({"keep_last": 1}, [6]),
        ({"keep_last": 1, "keep_every": 2}, [2, 4, 6]),
        ({"keep_last": 1, "keep_best": 1}, [3, 6]),
        ({"keep_last": 1, "keep_best": 2}, [3, 4, 6]),
        ({"keep_last": 2, "keep_every": 4, "keep_best": 1}, [3, 4, 5, 6]),
        ({"keep_last": 1, "keep_best": 5}, [2, 3, 4, 6]),
    ],
)
def test_the_newest_the_multiples_and_the_best_are_kept(open_checkpointer, config, kept):
    scores = {2: 0.5, 3: 0.9, 4: 0.5}  # of equal scores the newer one stays; 1, 5 and 6 were not evaluated
    for part in ((1, 2, 3), (4, 5, 6)):  # the scores outlive the process
        checkpointer = open_checkpointer(**config)
        for step in part:
            checkpointer.save(step, make_state(), {}, score=scores.get(step))
        checkpointer.close()
    assert checkpointer.steps() == kept
    assert checkpointer.steps()[-1] == 6


def test_a_step_counts_only_when_it_is_whole(open_checkpointer, monkeypatch):
    seal, seen = Checkpointer._seal, []

    def look_before_and_after(self):
        seen.append(self.steps())
        seal(self)
        seen.append(self.steps())

    monkeypatch.setattr(Checkpointer, "_seal", look_before_and_after)
    checkpointer = open_checkpointer()
    checkpointer.save(1, make_state(), {}, score=None, wait=True)
    assert seen == [[], []]
    assert checkpointer.steps() == [1]


def test_the_host_state_is_what_it_was_when_the_save_began(open_checkpointer):
    checkpointer, host = open_checkpointer(), {"statistics": {"mean": 1.0}}
    checkpointer.save(1, make_state(), host, score=None)
    host["statistics"]["mean"] = 2.0
    assert checkpointer.restore(1, target())[1] == {"statistics": {"mean": 1.0}}
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpointer.save(2, make_state(), {"mean": np.float32(1)}, score=None)
    assert checkpointer.steps() == [1]


def test_a_step_saved_twice_is_written_once(open_checkpointer, tmp_path):
    checkpointer = open_checkpointer()
    checkpointer.save(1, make_state(), {"first": True}, score=None)
    checkpointer.save(1, make_state(), {"first": False}, score=None, wait=True)
    assert checkpointer.restore(1, target())[1] == {"first": True}


def test_reading_another_runs_checkpoints_changes_nothing_there(open_checkpointer, tmp_path):
    open_checkpointer().save(1, make_state(), HOST, score=None, wait=True)
    unfinished = folder(tmp_path) / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    before = sorted(path.stat().st_mtime_ns for path in folder(tmp_path).rglob("*"))
    assert restore_state(folder(tmp_path), None, target())[1] == HOST
    assert sorted(path.stat().st_mtime_ns for path in folder(tmp_path).rglob("*")) == before


def test_only_a_run_in_s3_needs_private_functions_of_orbax(open_checkpointer, monkeypatch):
    monkeypatch.delattr(gcs_utils, "get_kvstore_for_gcs")
    take_s3_for_a_bucket.cache_clear()
    open_checkpointer()
    with pytest.raises(CheckpointError, match=r"orbax-checkpoint .* cannot write to S3 .*get_kvstore_for_gcs"):
        Checkpointer(as_path("s3://bucket/run/checkpoints"), CheckpointConfig())


def test_no_checkpoint_and_no_such_step_are_told(open_checkpointer, tmp_path):
    checkpointer = open_checkpointer(keep_last=2)
    assert checkpointer.steps() == []
    with pytest.raises(CheckpointError, match=r"has no checkpoint; it has steps \[\]"):
        checkpointer.restore(None, target())
    checkpointer.save(3, make_state(), {}, score=None, wait=True)
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 4; it has steps \[3\]"):
        checkpointer.restore(4, target())
    assert saved_steps(tmp_path / "nowhere") == []


def test_a_checkpoint_of_another_model_names_parameters_and_both_shapes(open_checkpointer):
    checkpointer = open_checkpointer()
    checkpointer.save(1, make_state(), {}, score=None, wait=True)
    other = {
        "embed": ParamSpec((128, 32), ("vocab", "width"), 0.02),
        "head": ParamSpec((32, 128), ("width", "vocab"), 0.02),
        "layers.norm": SPECS["layers.norm"],
    }
    with pytest.raises(CheckpointError) as caught:
        checkpointer.restore(1, target(specs=other))
    message = str(caught.value)
    assert "belongs to another model" in message
    assert "embed is float32[64, 32] in the checkpoint and float32[128, 32] in this run" in message
    assert "head is missing in the checkpoint and float32[32, 128] in this run" in message
    assert "layers.q is float32[2, 32, 4, 8] in the checkpoint and missing in this run" in message
    with pytest.raises(CheckpointError, match=r"to another optimizer:\n(    opt_state.*\n){3}    and \d+ more"):
        checkpointer.restore(1, target(optimizer="muon"))


def files_that_matter(step_folder: Path) -> list[Path]:
    inside = (path for path in step_folder.rglob("*") if path.is_file() and path.parent != step_folder)
    return [step_folder / "sizes.json", *sorted(inside)]


@pytest.mark.parametrize("damage", ["deleted", "cut", "emptied"])
def test_every_damaged_file_is_named_and_the_way_back_is_given(open_checkpointer, tmp_path, damage):
    checkpointer = open_checkpointer(keep_last=2)
    for step in (10, 20):
        checkpointer.save(step, make_state(step), {}, score=None, wait=True)
    (folder(tmp_path) / "15").mkdir()  # what a kill inside a deletion leaves: never offered as the way back
    newest = folder(tmp_path) / "20"
    assert len(files_that_matter(newest)) > 10
    for file in files_that_matter(newest):
        content = file.read_bytes()
        if damage == "deleted":
            file.unlink()
        else:
            os.truncate(file, len(content) // 2 if damage == "cut" else 0)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.restore(None, target())
        assert str(newest) in str(caught.value)
        assert str(file.relative_to(newest)) in str(caught.value)
        assert f"use the newest intact one, {tmp_path / 'run'}@10" in str(caught.value)
        file.write_bytes(content)
    restored, _ = checkpointer.restore(10, target())
    assert_bit_equal(restored, make_state(10))


def test_content_that_is_no_checkpoint_is_an_error_too(open_checkpointer, tmp_path):
    checkpointer = open_checkpointer()
    checkpointer.save(1, make_state(), {}, score=None, wait=True)
    for file in ("sizes.json", "host/metadata", "params/_METADATA", "params/manifest.ocdbt"):
        path = folder(tmp_path) / "1" / file
        content = path.read_bytes()
        path.write_bytes(b"\0" * len(content))
        with pytest.raises(CheckpointError, match=r"1 is damaged: .*; no other checkpoint is intact"):
            checkpointer.restore(1, target())
        path.write_bytes(content)


def test_what_a_kill_left_is_ignored_and_removed(open_checkpointer, tmp_path):
    open_checkpointer().save(1, make_state(1), HOST, score=None, wait=True)
    unfinished = folder(tmp_path) / "2.orbax-checkpoint-tmp"
    shutil.copytree(folder(tmp_path) / "1", unfinished)
    checkpointer = open_checkpointer(keep_last=2)
    assert checkpointer.steps() == [1]
    assert_bit_equal(checkpointer.restore(None, target())[0], make_state(1))
    checkpointer.save(2, make_state(2), {}, score=None, wait=True)
    assert not unfinished.exists()
    assert checkpointer.steps() == [1, 2]


@pytest.fixture
def no_large_files():
    """Writing beyond 4 KB of a file fails, as on a full disk but for the errno (EFBIG for ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(on: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]) if on else before)

    yield limit
    limit(False)


def test_a_save_that_fails_is_told_at_the_next_call_and_the_last_good_step_stays(open_checkpointer, no_large_files):
    checkpointer, state = open_checkpointer(), make_state(1)
    checkpointer.save(1, state, HOST, score=None, wait=True)
    no_large_files(True)
    checkpointer.save(2, make_state(2), {}, score=None)
    with pytest.raises(
        CheckpointError,
        match=r"step 2 could not be written to .* steps: \[1\]; the file is larger than this machine allows",
    ):
        checkpointer.save(3, make_state(3), {}, score=None)
    checkpointer.save(3, make_state(3), {}, score=None)
    with pytest.raises(CheckpointError, match="step 3 could not be written"):
        checkpointer.wait()
    no_large_files(False)
    restored, host = checkpointer.restore(None, target())
    assert_bit_equal(restored, state)
    assert host == HOST
    checkpointer.save(3, make_state(3), {}, score=None, wait=True)
    assert checkpointer.steps()[-1] == 3


def test_a_folder_that_became_read_only_is_named_with_its_way_out(open_checkpointer, monkeypatch):
    checkpointer = open_checkpointer()
    checkpointer.save(1, make_state(1), HOST, score=None, wait=True)

    def refuse(folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))

    monkeypatch.setattr(checkpoint, "try_to_write", refuse)
    with pytest.raises(CheckpointError, match=r"Read-only file system.*\[1\]; make .*/checkpoints writable") as caught:
        checkpointer.save(2, make_state(2), {}, score=None)
    assert "make room" not in str(caught.value)


def test_a_save_whose_folder_cannot_be_made_leaves_no_thread_that_waits(open_checkpointer, monkeypatch):
    checkpointer = open_checkpointer()
    checkpointer.save(1, make_state(1), HOST, score=None, wait=True)
    before = set(threading.enumerate())

    mkdir = async_path.mkdir

    async def refuse(path: Path, **options: bool) -> None:
        if ".orbax-checkpoint-tmp" in path.name:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        await mkdir(path, **options)

    monkeypatch.setattr(async_path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpointer.save(2, make_state(2), {}, score=None, wait=True)
    for thread in set(threading.enumerate()) - before:
        # orbax raises what ended the thread: a ValueError of TensorStore's where the folder was missing when it wrote
        with contextlib.suppress(OSError, ValueError):
            thread.join(timeout=10)  # the interpreter joins it too before it exits
        assert not thread.is_alive(), thread.name


def test_a_step_that_is_a_symbolic_link_is_restored_and_never_in_the_way(open_checkpointer, tmp_path):
    checkpointer = open_checkpointer(keep_last=1)
    checkpointer.save(1, make_state(1), HOST, score=None, wait=True)
    elsewhere = tmp_path / "another disk"
    (folder(tmp_path) / "1").rename(elsewhere)
    (folder(tmp_path) / "1").symlink_to(elsewhere)
    assert newest_whole_step(folder(tmp_path), print, lambda: None) == 1
    assert_bit_equal(checkpointer.restore(1, target())[0], make_state(1))
    for step in (2, 3):
        checkpointer.save(step, make_state(step), {}, score=None, wait=True)
    assert checkpointer.steps() == [1, 3]  # what the user put elsewhere stays


def test_closing_tells_of_a_failed_save(tmp_path, no_large_files):
    checkpointer = Checkpointer(folder(tmp_path), CheckpointConfig())
    no_large_files(True)
    checkpointer.save(2, make_state(2), {}, score=None)
    with pytest.raises(CheckpointError, match="step 2 could not be written"):
        checkpointer.close()


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot be kept in .*run/checkpoints: .*runs_dir"):
        Checkpointer(folder(tmp_path), CheckpointConfig())


KILLED = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
from tests.train.test_checkpoint import *

checkpointer = Checkpointer(Path(sys.argv[1]), CheckpointConfig(keep_every=10))
first = 1 + max(checkpointer.steps(), default=0)
print("open", flush=True)
for step in range(first, first + 1000):
    checkpointer.save(step, state_of(step), {"step": step}, score=None, wait=step % 2 == 0)
    if step % 2 == 0:
        print(step, flush=True)
"""


def state_of(step: int) -> TrainState:
    """Every number of this state tells its step."""
    description = target()
    return jax.tree.map(
        lambda leaf: jax.device_put(np.full(leaf.shape, step).astype(leaf.dtype), leaf.sharding), description
    )


@pytest.mark.parametrize("kills", [2, pytest.param(24, marks=pytest.mark.long)])
def test_after_a_kill_at_any_instant_the_last_saved_step_is_whole(tmp_path, kills):
    rng, announced = random.Random(0), 0
    for _ in range(kills):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder(tmp_path))],
            cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        lines = [child.stdout.readline() for _ in range(1 + rng.randrange(3))]  # "open", and some saved steps
        time.sleep(rng.uniform(0.0, 0.4))
        child.send_signal(signal.SIGKILL)
        output, errors = child.communicate()
        assert errors == ""
        announced = max(
            [announced, *(int(line) for line in (*lines[1:], *output.splitlines()) if line.strip().isdigit())]
        )
        if not saved_steps(folder(tmp_path)):
            assert announced == 0
            continue
        state, host = restore_state(folder(tmp_path), None, target())
        assert_bit_equal(state, state_of(host["step"]))
        assert announced <= host["step"]
    assert announced >= kills
