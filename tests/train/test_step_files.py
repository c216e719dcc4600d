import json
import os
import random
import shutil
from pathlib import Path

import pytest
from processes import wait_for
from test_checkpoint import assert_bit_equal, make_state, open_checkpointer, target  # noqa: F401  # a fixture

from podium.config.schema import CheckpointConfig
from podium.job.job_records import ProgressReport
from podium.job.watchdog import Watchdog
from podium.observe.run_dir import saved_steps
from podium.train.checkpoints import checkpoint, step_files
from podium.train.checkpoints.checkpoint import Checkpointer, restore_state
from podium.train.checkpoints.s3 import s3_store
from podium.train.checkpoints.step_files import CheckpointError, damage, newest_whole_step


def flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def saved(folder: Path, *steps: int) -> Path:
    """A checkpoints folder in which every number tells its step's seed."""
    checkpointer = Checkpointer(folder / "run" / "checkpoints", CheckpointConfig(keep_last=len(steps)))
    for step in steps:
        checkpointer.save(step, make_state(step), {"cursor": step}, score=step / 100, wait=True)
    checkpointer.close()
    return folder / "run" / "checkpoints"


def nothing() -> None:
    pass


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
def test_a_bucket_is_asked_at_the_address_that_either_variable_names(monkeypatch, name):
    for each in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(each, raising=False)
    assert "endpoint" not in s3_store("s3://bucket/team/run")
    monkeypatch.setenv(name, "http://here:9000")
    store = s3_store("s3://bucket/team/run")
    assert (store["bucket"], store["path"], store["endpoint"]) == ("bucket", "team/run/", "http://here:9000")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://there:9000")  # says more than the one of all services
    assert s3_store("s3://bucket/team/run")["endpoint"] == "http://there:9000"


def test_what_is_no_step_among_checkpoints_is_left_alone(tmp_path):
    (tmp_path / "10").mkdir()
    for name in ("\u00b2", "1\u00bd", "tmp.5", "-3"):
        (tmp_path / name).mkdir()
    assert saved_steps(tmp_path) == [10]


def test_a_flipped_bit_in_any_file_is_found_and_the_step_before_is_taken(tmp_path):
    folder, rng, said = saved(tmp_path, 10, 20), random.Random(0), []
    newest = folder / "20"
    files = [file for file in sorted(newest.rglob("*")) if file.is_file() and file.stat().st_size]
    for file in files:
        content = file.read_bytes()
        flip(file, rng)
        said.clear()
        step = newest_whole_step(folder, said.append, nothing)
        if step == 20:  # orbax's own notes beside the step's folders: nothing is read from them
            assert file.parent == newest
            assert file.name not in ("sizes.json", "digests.json")
            restored, host = restore_state(folder, 20, target())
            assert_bit_equal(restored, make_state(20))
            assert host == {"cursor": 20}
        else:
            aside = folder / "20.damaged"
            assert (step, saved_steps(folder)) == (10, [10])
            assert len(said) == 1
            assert "checkpoint 20 is damaged" in said[0]
            assert str(aside) in said[0]
            assert "continuing from step 10" in said[0]
            aside.rename(newest)
        file.write_bytes(content)
    assert newest_whole_step(folder, said.append, nothing) == 20


def test_a_damaged_step_is_not_restored_and_the_advice_works(tmp_path):
    folder = saved(tmp_path, 10, 20)
    flip(max((folder / "20" / "params").rglob("*"), key=lambda file: file.stat().st_size), random.Random(1))
    with pytest.raises(CheckpointError, match="its digest does not match") as caught:
        restore_state(folder, None, target())
    assert f"use the newest intact one, {tmp_path / 'run'}@10" in str(caught.value)
    assert_bit_equal(restore_state(folder, 10, target())[0], make_state(10))


def test_when_every_step_is_damaged_nothing_is_moved_and_nothing_starts_afresh(tmp_path):
    folder = saved(tmp_path, 10, 20)
    for step in (10, 20):
        os.truncate(folder / str(step) / "host" / "metadata", 1)
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged \(20: host/metadata has 1 bytes"):
        newest_whole_step(folder, print, nothing)
    assert saved_steps(folder) == [10, 20]


def test_a_second_damaged_step_of_a_number_does_not_replace_the_first(tmp_path):
    folder = saved(tmp_path, 10, 20)
    (folder / "20.damaged").mkdir()
    (folder / "20" / "sizes.json").unlink()
    assert newest_whole_step(folder, print, nothing) == 10
    assert (folder / "20.damaged-2" / "params").is_dir()


def test_a_step_without_digests_is_not_continued_from(tmp_path):
    """With neither the file nor its size, as versions before digests wrote them, and as a deletion could leave it."""
    folder = saved(tmp_path, 10, 20)
    (folder / "20" / "digests.json").unlink()
    sizes = json.loads((folder / "20" / "sizes.json").read_text())
    del sizes["digests.json"]
    (folder / "20" / "sizes.json").write_text(json.dumps(sizes))
    flip(max((folder / "20" / "params").rglob("*"), key=lambda file: file.stat().st_size), random.Random(2))
    said = []
    assert newest_whole_step(folder, said.append, nothing) == 10
    assert "sizes.json does not list digests.json" in said[0]


def replace(there: Path, by: Path) -> None:
    shutil.rmtree(there)
    shutil.copytree(by, there)


def test_an_old_step_in_the_place_of_a_new_one_is_not_continued_from(tmp_path):
    folder, said = saved(tmp_path, 10, 20, 30), []
    replace(folder / "30", folder / "10")
    with pytest.raises(CheckpointError, match=r"30 is damaged: it was saved as step 10; use .*run@20"):
        restore_state(folder, 30, target(), digests=False)
    assert newest_whole_step(folder, said.append, nothing) == 20
    assert "checkpoint 30 is damaged (it was saved as step 10)" in said[0]


def test_two_steps_that_were_swapped_are_both_set_aside(tmp_path):
    folder, said = saved(tmp_path, 10, 20, 30), []
    (folder / "20").rename(folder / "other")
    (folder / "30").rename(folder / "20")
    (folder / "other").rename(folder / "30")
    assert newest_whole_step(folder, said.append, nothing) == 10
    assert (folder / "20.damaged").is_dir() and (folder / "30.damaged").is_dir()
    assert len(said) == 2


@pytest.mark.parametrize("whole", [False, True])
def test_steps_of_another_run_are_not_continued_from(tmp_path, whole):
    """One step, or all of them."""
    folder, other, said = saved(tmp_path, 10, 20), saved(tmp_path / "other", 10, 20), []
    for step in (10, 20) if whole else (20,):
        replace(folder / str(step), other / str(step))
    if whole:
        with pytest.raises(CheckpointError, match=r"every checkpoint .* is damaged \(20: it was saved by run"):
            newest_whole_step(folder, said.append, nothing)
        assert saved_steps(folder) == [10, 20]
    else:
        assert newest_whole_step(folder, said.append, nothing) == 10
        assert "it was saved by run" in said[0]


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_a_lost_identity_is_written_again_from_the_steps(tmp_path, text):
    folder, said = saved(tmp_path, 10, 20), []
    identity = folder.parent / "identity.json"
    before = identity.read_text()
    identity.unlink() if text is None else identity.write_text(text)
    assert newest_whole_step(folder, said.append, nothing) == 20
    assert identity.read_text() == before
    assert "was missing or unreadable" in said[0]


def test_steps_of_two_runs_without_an_identity_are_refused(tmp_path):
    folder, other = saved(tmp_path, 10, 20), saved(tmp_path / "other", 20)
    replace(folder / "20", other / "20")
    (folder.parent / "identity.json").unlink()
    with pytest.raises(CheckpointError, match=r"of several runs: .*\(steps \[10\]\).*move away"):
        newest_whole_step(folder, print, nothing)


def test_an_intact_step_of_a_version_without_binding_is_continued_from_and_said(tmp_path):
    folder, said = saved(tmp_path, 10), []
    files = json.dumps(json.loads((folder / "10" / "digests.json").read_text())["files"])
    (folder / "10" / "digests.json").write_text(files)
    sizes = json.loads((folder / "10" / "sizes.json").read_text())
    (folder / "10" / "sizes.json").write_text(json.dumps(sizes | {"digests.json": len(files)}))
    (folder.parent / "identity.json").unlink()
    assert newest_whole_step(folder, said.append, nothing) == 10
    assert len(said) == 1
    assert "did not record its step and run" in said[0]
    flip(max((folder / "10" / "params").rglob("*"), key=lambda file: file.stat().st_size), random.Random(3))
    with pytest.raises(CheckpointError, match="its digest does not match"):
        newest_whole_step(folder, said.append, nothing)


@pytest.mark.parametrize("text", ["[]", '{"host/metadata": 1}', "{", "\0" * 200])
def test_sizes_that_are_no_sizes_are_damage(tmp_path, text):
    folder = saved(tmp_path, 10)
    (folder / "10" / "sizes.json").write_text(text)
    assert damage(folder / "10", digests=True) is not None


@pytest.mark.parametrize("grows", [True, False])
def test_a_slow_save_lives_as_long_as_it_writes(open_checkpointer, monkeypatch, grows):  # noqa: F811
    """A disk that takes a little at a time, or nothing, for sixteen times what the watchdog allows, by its clock."""
    now, beats, ends = [0.0], [], []
    watchdog = Watchdog(ProgressReport(None), hang_s=0.5, compile_s=0.5, clock=lambda: now[0], end=ends.append)
    monkeypatch.setattr(checkpoint, "POLL_S", 0.05)
    checkpointer = open_checkpointer()
    monkeypatch.setattr(checkpointer, "_beat", lambda: beats.append(watchdog.beat()))
    seal = checkpointer._seal

    def slowly() -> None:
        (unfinished,) = checkpointer._unfinished()
        more = unfinished / "params" / "more"
        for _ in range(20):
            if grows:
                before = len(beats)
                with more.open("ab") as file:
                    file.write(b"x" * 1000)
                wait_for(lambda before=before: len(beats) > before)
            now[0] += 0.4
            watchdog.check()
        more.unlink(missing_ok=True)
        seal()

    monkeypatch.setattr(checkpointer._manager._checkpointer, "_post_finalization_callback", slowly)
    checkpointer.save(1, make_state(), {}, score=None, wait=True)
    assert set(ends) == (set() if grows else {124})


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (PermissionError("The provided token has expired."), "renew the login: gcloud auth application-default login"),
        (TimeoutError("no answer for half an hour"), "check the network"),
    ],
)
def test_a_bucket_that_cannot_be_read_is_no_damage(monkeypatch, error, advice):
    def unread(path: Path) -> None:
        raise error

    monkeypatch.setattr(step_files, "in_bucket", lambda path: True)
    monkeypatch.setattr(step_files, "_wrong_sizes", unread)
    with pytest.raises(CheckpointError, match=f"cannot be read: .*; {advice}$"):
        damage(Path("gs:/bucket/runs/run/checkpoints/20"), digests=True)
