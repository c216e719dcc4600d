import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

import podium
from podium.config.errors import ConfigError
from podium.config.schema import Config
from podium.files import RunFileError, read_lines
from podium.observe.record_check import Extent
from podium.observe.run_dir import (
    LENGTHS,
    MAY_CHANGE,
    METRICS,
    SAMPLES,
    Fork,
    RunDir,
    RunInUseError,
    parse_fork,
    read_config,
    run_home,
)
from podium.settings import load_settings

JUDGE = {"name": "a", "url": "http://here/v1", "model": "j", "rubric": "right is good"}


def make_config(tmp_path, **changes):
    tree = {"name": "demo", "runs_dir": str(tmp_path / "runs"), "model": "demo", "tasks": [{"name": "arithmetic"}]}
    tree["chat_template_date"] = "2031-01-04"
    return Config.model_validate(tree | changes)


def open_run(config, **options):
    return RunDir.open(run_home(config.runs_dir, config.name), config.document(), **options)


def open_and_close(config, **options):
    """A run that has begun: something is recorded."""
    with open_run(config, **options) as run:
        run.append(METRICS, {"step": 0})
        return run


def test_a_new_run_holds_its_resolved_config(tmp_path):
    config = make_config(tmp_path)
    with open_run(config) as run:
        assert not run.continued
        assert run.path == tmp_path / "runs" / "demo"
        assert Config.model_validate(yaml.safe_load((run.path / "config.yaml").read_text())) == config


def test_a_run_is_continued_if_the_config_agrees(tmp_path):
    open_and_close(make_config(tmp_path))
    assert open_and_close(make_config(tmp_path)).continued


def test_a_run_that_recorded_nothing_may_begin_again_with_another_config(tmp_path):
    with open_run(make_config(tmp_path), fork=Fork("runs/other", 3)):
        pass
    with open_run(make_config(tmp_path, seed=1)) as run:
        assert not run.continued
        assert run.fork is None
    with open_run(make_config(tmp_path, seed=1)) as run:
        assert run.fork is None


def test_a_different_config_is_an_error_that_names_each_key_and_the_ways_out(tmp_path):
    open_and_close(make_config(tmp_path))
    changed = make_config(
        tmp_path, seed=1, rollout={"temperature": 0.5}, tasks=[{"name": "arithmetic", "options": {"digits": 3}}]
    )
    with pytest.raises(RunFileError) as error:
        open_run(changed)
    message = str(error.value)
    assert "seed: 0 there, 1 now" in message
    assert "rollout.temperature: 1.0 there, 0.5 now" in message
    assert "tasks.0.options.digits: None there, 3 now" in message
    assert "set another name, or delete the folder" in message
    assert message.count(" there, ") == 3


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 200},
        {"mesh": "1,-1,1"},
        {"eval": {"every_steps": 5}},
        {"checkpoint": {"every_steps": 7, "keep_last": 2}},
        {"metrics": {"tensorboard": True}},
        {"grading": {"workers": 0}},
        {"rollout": {"slots": 8}},
        {"train": {"rows_per_device": 2}},
    ],
)
def test_keys_that_do_not_change_what_is_learned_may_differ_and_are_stored(tmp_path, change):
    open_and_close(make_config(tmp_path))
    changed = make_config(tmp_path, **change)
    run = open_and_close(changed)
    assert Config.model_validate(yaml.safe_load((run.path / "config.yaml").read_text())) == changed


@pytest.mark.parametrize("key", MAY_CHANGE)
def test_a_key_that_may_change_is_one_of_the_config(tmp_path, key):
    tree = make_config(tmp_path, grading={"judges": [JUDGE]}).model_dump()
    for part in key.split("."):
        tree = tree[0 if part == "*" else part]


def test_a_judge_may_be_asked_elsewhere_and_otherwise_but_not_about_something_else(tmp_path):
    open_and_close(make_config(tmp_path, grading={"judges": [JUDGE, {**JUDGE, "name": "b"}]}))
    moved = {**JUDGE, "url": "http://other/v1", "key_env": "KEY", "timeout_s": 9.0, "retries": 0, "concurrency": 1}
    open_and_close(make_config(tmp_path, grading={"judges": [moved, {**moved, "name": "b"}]}))
    asked = {**moved, "rubric": "short is good", "max_tokens": 9}
    with pytest.raises(RunFileError) as error:
        open_run(make_config(tmp_path, grading={"judges": [moved, {**asked, "name": "b"}]}))
    message = str(error.value)
    assert "grading.judges.1.rubric: 'right is good' there" in message
    assert message.count(" there, ") == 2


def test_steps_may_not_change_under_a_schedule_that_ends_at_the_last_step(tmp_path):
    cosine = {"optimizer": {"schedule": "cosine"}}
    open_and_close(make_config(tmp_path, train=cosine))
    with pytest.raises(RunFileError, match="steps: 100 there, 200 now"):
        open_run(make_config(tmp_path, train=cosine, steps=200))


def test_a_key_whose_name_begins_like_a_free_one_is_not_free(tmp_path):
    open_and_close(make_config(tmp_path))
    with pytest.raises(RunFileError, match="model: 'demo' there, 'other' now"):
        open_run(make_config(tmp_path, model="other"))
    with pytest.raises(RunFileError, match=r"grading\.timeout_s: 5\.0 there, 6\.0 now"):
        open_run(make_config(tmp_path, grading={"timeout_s": 6.0}))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"model: demo\nrecipe: grpo\n", "tasks: Field required; recipe: Extra .*"),
        (b"model: demo\xef\n", "is not UTF-8 text .*"),
        (b"name: 2026-13-45\n", "model: Field required; tasks: Field required"),
        (b"model: [demo\n", "not YAML: while parsing a flow sequence.*"),
    ],
    ids=["other keys", "not UTF-8", "no such date", "not YAML"],
)
def test_a_stored_config_that_cannot_be_read_is_an_error_with_a_way_out(tmp_path, content, problem):
    run = open_and_close(make_config(tmp_path))
    (run.path / "config.yaml").write_bytes(content)
    with pytest.raises(
        RunFileError, match=rf"(?s)is not a valid config \({problem}\); Podium .* wrote the run.*; or set another"
    ):
        open_run(make_config(tmp_path))


@pytest.mark.parametrize("content", [b"", b'{"run": "x"\xef', b'{"run": 1, "step": 2}', b'["run", "step"]'])
def test_a_stored_fork_that_cannot_be_read_is_an_error_with_a_way_out(tmp_path, content):
    run = open_and_close(make_config(tmp_path), fork=Fork("runs/other", 3))
    (run.path / "fork.json").write_bytes(content)
    with pytest.raises(RunFileError, match=r"fork\.json does not name the run and step .*; put back a copy"):
        open_run(make_config(tmp_path))


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("")
    with pytest.raises(RunFileError, match=r"holds 'thesis\.tex' but no config\.yaml"):
        open_run(make_config(tmp_path))
    assert [item.name for item in folder.iterdir()] == ["thesis.tex"]


def test_what_a_kill_during_creation_leaves_does_not_matter(tmp_path):
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "run.lock").write_text("process 1 on host x\n")
    (folder / "config.yaml.1.tmp").write_text("model:")
    assert not open_and_close(make_config(tmp_path)).continued


@pytest.mark.parametrize("name", [None, "", "..", "a/b", "/etc"])
def test_a_name_that_is_not_a_folder_name_is_an_error(tmp_path, name):
    with pytest.raises(RunFileError, match=r"name: .* cannot be a folder"):
        open_run(make_config(tmp_path, name=name))


def test_an_unwritable_place_is_an_error_that_names_the_key(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunFileError, match=r"cannot be created: (Not a directory|File exists); set runs_dir"):
        open_run(make_config(tmp_path))


def test_a_folder_that_cannot_be_locked_is_an_error_that_names_the_key(tmp_path):
    (tmp_path / "runs" / "demo" / "run.lock").mkdir(parents=True)
    with pytest.raises(RunFileError, match="demo cannot be written: Is a directory; set runs_dir"):
        open_run(make_config(tmp_path))


def test_a_run_in_use_is_an_error_that_names_the_process(tmp_path):
    config = make_config(tmp_path)
    with open_run(config) as run:
        with pytest.raises(RunInUseError, match=rf"{run.path} is in use by process {os.getpid()} on host \S+; wait"):
            open_run(config)
        with pytest.raises(RunInUseError):  # a refused process does not take the lock away
            open_run(config)
    open_and_close(config)


def test_the_lock_ends_with_its_process_however_it_ends(tmp_path):
    config = make_config(tmp_path)
    program = f"""
        import sys, time
        from pathlib import Path
        from podium.observe.run_dir import RunDir
        run = RunDir.open(Path({str(run_home(config.runs_dir, config.name))!r}), {config.document()!r})
        print("locked", flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(RunInUseError, match=f"process {other.pid} "):
            open_run(config)
        other.send_signal(signal.SIGKILL)
    open_and_close(config)


def test_a_failed_opening_gives_the_lock_up(tmp_path):
    open_and_close(make_config(tmp_path))
    with pytest.raises(RunFileError):
        open_run(make_config(tmp_path, seed=1))
    assert open_and_close(make_config(tmp_path)).continued


def test_truncating_forgets_what_came_after_the_step_in_all_three_files(tmp_path):
    with open_run(make_config(tmp_path)) as run:
        for step in (1, 2, 3):
            for name in (METRICS, SAMPLES, LENGTHS):
                run.append(name, {"step": step})
        run.truncate(1)
        run.append(METRICS, {"step": 2, "again": True})
        assert read_lines(run.path / METRICS) == [{"step": 1}, {"step": 2, "again": True}]
        assert read_lines(run.path / SAMPLES) == read_lines(run.path / LENGTHS) == [{"step": 1}]


def test_a_fork_is_remembered_by_the_run_that_began_with_it(tmp_path):
    source = open_and_close(make_config(tmp_path)).path
    fork = parse_fork(f"{source}@20")
    assert fork == Fork(str(source), 20)
    child = make_config(tmp_path, name="child", seed=1)
    assert open_and_close(child, fork=fork).fork == fork
    assert open_and_close(child).fork == fork
    assert open_and_close(child, fork=fork).fork == fork


def test_a_run_that_exists_cannot_begin_elsewhere(tmp_path):
    source = open_and_close(make_config(tmp_path)).path
    child = make_config(tmp_path, name="child")
    open_and_close(child)
    with pytest.raises(RunFileError, match=r"did not start from another run, and --from asks for .*@20; leave --from"):
        open_run(child, fork=Fork(str(source), 20))


def test_a_fork_without_step_means_the_newest_checkpoint(tmp_path):
    source = open_and_close(make_config(tmp_path)).path
    assert parse_fork(str(source)) == Fork(str(source), None)


@pytest.mark.parametrize(
    ("text", "rule"),
    [("{run}@x", "'x' is not a step"), ("{run}@-1", "'-1' is not a step"), ("nowhere@3", "nowhere has no config.yaml")],
)
def test_a_fork_of_nothing_is_an_error(tmp_path, text, rule):
    source = open_and_close(make_config(tmp_path)).path
    with pytest.raises(ValueError, match=f"--from .*{rule}"):
        parse_fork(text.format(run=source))


def recorded(tmp_path: Path) -> tuple[Path, dict[str, Extent]]:
    """A run of four steps whose checkpoint is of step 3, and what its records held then."""
    with open_run(make_config(tmp_path)) as run:
        for step in (1, 2, 3):
            for name in (METRICS, SAMPLES, LENGTHS):
                run.append(name, {"step": step, "of": name})
        extents = run.extents()
        for name in (METRICS, SAMPLES, LENGTHS):
            run.append(name, {"step": 4})
    return run.path, extents


def checked(tmp_path: Path, extents: dict[str, Extent], checkpoints: tuple[int, ...] = (3,)) -> list[str]:
    with open_run(make_config(tmp_path)) as run:
        found = run.compare(extents, 3, checkpoints)
        run.truncate(3)
        return found


def test_records_that_grew_after_the_checkpoint_are_whole(tmp_path):
    _, extents = recorded(tmp_path)
    assert [each["lines"] for each in extents.values()] == [3, 3, 3]
    assert checked(tmp_path, extents) == []
    assert checked(tmp_path, {}) == []  # a checkpoint of a version that did not save them


@pytest.mark.parametrize("name", [METRICS, SAMPLES, LENGTHS])
@pytest.mark.parametrize(
    "lines, said",
    [
        (None, "the file, which had 3 lines, is missing"),
        ([0], "it has 1 of 3 lines"),
        ([0, 2, 3], "it has 2 of 3 lines"),
        ([1, 0, 2, 3], "lines have changed"),
    ],
)
def test_records_that_were_damaged_are_said(tmp_path, name, lines, said):
    path, extents = recorded(tmp_path)
    before = (path / name).read_text().splitlines(keepends=True)
    (path / name).unlink()
    if lines is not None:
        (path / name).write_text("".join(before[each] for each in lines))
    (line,) = checked(tmp_path, extents)
    assert line.startswith(f"{name} has changed since step 3 was saved: {said}")
    assert "the run continues" in line


def test_a_hole_in_the_records_names_its_steps_and_the_checkpoint_to_return_to(tmp_path):
    path, extents = recorded(tmp_path)
    lines = (path / METRICS).read_text().splitlines(keepends=True)
    (path / METRICS).write_text(lines[0] + lines[2])
    (line,) = checked(tmp_path, extents, checkpoints=(1, 3))
    assert "step 2 is missing" in line
    assert "delete the checkpoints after step 1, and run the same command again" in line


def test_a_doubled_record_is_removed(tmp_path):
    path, extents = recorded(tmp_path)
    lines = (path / LENGTHS).read_text().splitlines(keepends=True)
    (path / LENGTHS).write_text("".join([lines[0], lines[1], lines[1], lines[2]]))
    assert checked(tmp_path, extents) == [f"{LENGTHS} had 1 doubled line: removed, nothing is lost"]
    assert (path / LENGTHS).read_text() == "".join(lines[:3])


@pytest.mark.parametrize(("begun", "again", "kept"), [(512, None, 512), (None, None, None), (256, 256, 256)])
def test_an_unset_prompt_length_is_the_one_that_a_run_has_stored(tmp_path, begun, again, kept):
    """Older versions stored 512 where none was set."""
    for length in (begun, again):
        run = open_and_close(make_config(tmp_path, rollout={"max_prompt_tokens": length}))
        rollout = run.settings["rollout"]
    assert isinstance(rollout, dict) and rollout["max_prompt_tokens"] == kept
    assert read_config(run.path).rollout.max_prompt_tokens == kept


def test_a_prompt_length_other_than_the_stored_one_is_another_config(tmp_path):
    open_and_close(make_config(tmp_path, rollout={"max_prompt_tokens": 256}))
    with pytest.raises(RunFileError, match=r"rollout\.max_prompt_tokens: 256 there, 128 now"):
        open_run(make_config(tmp_path, rollout={"max_prompt_tokens": 128}))


def test_a_run_of_a_version_without_dates_is_continued_and_has_one_from_then_on(tmp_path):
    run = open_and_close(make_config(tmp_path))
    path = run.path / "config.yaml"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "chat_template_date" not in line))
    assert read_config(run.path).chat_template_date is None
    open_and_close(make_config(tmp_path))
    assert read_config(run.path).chat_template_date == "2031-01-04"
    assert open_and_close(make_config(tmp_path, chat_template_date=None)).settings["chat_template_date"] == "2031-01-04"


def test_a_run_says_which_version_trained_it_before(tmp_path):
    run = open_and_close(make_config(tmp_path))
    with open_run(make_config(tmp_path)) as again:
        assert again.compare({}, 1, [1]) == []
    record = json.loads((run.path / "run.json").read_text())
    assert record["podium"] == podium.__version__
    (run.path / "run.json").write_text(json.dumps({**record, "podium": "0.0.7"}))
    said = [f"this run was last trained by Podium 0.0.7, and continues with {podium.__version__}: results may not be"]
    with open_run(make_config(tmp_path)) as again:
        assert [line[: len(said[0])] for line in again.compare({}, 1, [1])] == said
    assert json.loads((run.path / "run.json").read_text()) == record
    (run.path / "run.json").unlink()
    with open_run(make_config(tmp_path)) as again:
        (line,) = again.compare({}, 1, [1])
        assert "by a version of Podium that did not record which" in line


def test_a_run_of_a_newer_version_is_named_with_that_version(tmp_path):
    run = open_and_close(make_config(tmp_path))
    (run.path / "run.json").write_text(json.dumps({"run": "1", "podium": "9.8.7"}))
    with (run.path / "config.yaml").open("a") as file:
        file.write("of_the_future: 1\n")
    rule = (
        f"Podium 9.8.7 wrote the run, and this is {podium.__version__}: use that version, pip install podium-rl==9.8.7"
    )
    with pytest.raises(
        RunFileError, match=rf"(?s)is not a valid config \(of_the_future: Extra .*\); {re.escape(rule)}"
    ):
        open_run(make_config(tmp_path))
    with pytest.raises(ConfigError, match=rf"(?s)of_the_future: unknown key.*{re.escape(rule)}"):
        load_settings([run.path / "config.yaml"], [], {})


def test_the_identity_of_another_run_is_refused(tmp_path):
    run = open_and_close(make_config(tmp_path))
    own = json.loads((run.path / "run.json").read_text())["run"]
    (run.path / "identity.json").write_text('{"run": "another"}')
    before = (run.path / "config.yaml").read_bytes()
    rule = rf"is the folder of run {own} \(run.json\), and identity.json in it belongs to run another, .* start a run"
    with pytest.raises(RunFileError, match=rule):
        open_run(make_config(tmp_path))
    assert (run.path / "config.yaml").read_bytes() == before


def test_a_checkpoint_of_other_settings_is_refused_by_the_keys_that_differ(tmp_path):
    with open_run(make_config(tmp_path)) as run:
        run.check_saved(None, 3)
        run.check_saved(make_config(tmp_path, seed=1).document(), 0)
        same = make_config(tmp_path)
        run.check_saved(same.model_copy(update={"mesh": "fsdp:2", "steps": 7}).document(), 3)
        with pytest.raises(
            RunFileError, match=r"(?s)step 3 in .* was saved with settings that differ.*seed: 1 there, 0 now"
        ):
            run.check_saved(same.model_copy(update={"seed": 1}).document(), 3)
        with pytest.raises(RunFileError, match=r"was not written by this version \(of_the_future: Extra"):
            run.check_saved({**same.document(), "of_the_future": 1}, 3)
