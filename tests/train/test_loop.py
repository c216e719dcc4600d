import contextlib
import dataclasses
import inspect
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from tiny_runs import cache_settings, make_config, read_records

from podium import cli
from podium.config.schema import Config
from podium.observe.metrics import find_metric
from podium.observe.run_dir import Fork, RunDir, RunInUseError, read_config
from podium.observe.summary import next_commands
from podium.rollout.engine import RolloutEngine
from podium.rollout.scheduler import Scheduler
from podium.train.evaluate import evaluate_command
from podium.train.generate import Rollouts
from podium.train.loop import train
from podium.train.recorder import Recorder
from podium.train.setup import load_weights, make_model
from podium.train.step_files import CheckpointError, saved_steps
from podium.train.trainer import DivergedError, Trainer

pytestmark = pytest.mark.usefixtures("one_device", "compiled_once")

STEPS = 4
CLOCKED = (
    "async/waited_s",
    "time/",
    "throughput/",
    "memory/",
    "rollout/prefill_s",
    "rollout/decode_s",
    "rollout/tokens_per_s",
)
SOMETIMES_COMPILED = ("rollout/compilations",)
STEPWISE: dict[str, Any] = {"steps": STEPS, "eval": {"every_steps": 2, "samples": 2}, "checkpoint": {"every_steps": 2}}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """All that metrics.jsonl holds but what a clock says."""
    return [
        {name: value for name, value in record.items() if not name.startswith((*CLOCKED, *SOMETIMES_COMPILED))}
        for record in read_records(run / "metrics.jsonl")
    ]


def trained(run: Path) -> list[dict[str, Any]]:
    """The records of steps, without those of evaluations."""
    return [record for record in read_records(run / "metrics.jsonl") if "train-other/total_valid_token_count" in record]


def weights_of(run: Path, step: int | None = None) -> dict[str, bytes]:
    model = make_model(read_config(run))
    return {name: np.asarray(value).tobytes() for name, value in load_weights(model, Fork(str(run), step)).items()}


def assert_same_run(found: Path, expected: Path) -> None:
    assert metrics_of(found) == metrics_of(expected)
    assert weights_of(found) == weights_of(expected)
    for name in ("samples.jsonl", "lengths.jsonl"):
        assert (found / name).read_bytes() == (expected / name).read_bytes()


@pytest.fixture(scope="module")
def run_of(tiny_model, tmp_path_factory, one_device, compiled_once) -> Callable[..., Path]:
    """Trains a new run with changes to the tiny config; its folder."""

    def run(name: str = "run", **changes: Any) -> Path:
        config = make_config(tiny_model, tmp_path_factory.mktemp("runs"), name=name, **changes)
        assert train(config, plain=True) == 0
        return Path(config.runs_dir) / name

    return run


@pytest.fixture(scope="module")
def undisturbed(run_of) -> Path:
    """A run of four steps, evaluated and saved every two."""
    return run_of(**STEPWISE)


def config_of(run: Path, **changes: Any) -> Config:
    """The config of a run with other values at its top."""
    return Config.model_validate({**read_config(run).model_dump(mode="json"), **changes})


def test_a_run_leaves_its_records(undisturbed):
    assert read_config(undisturbed).steps == STEPS
    assert yaml.safe_load((undisturbed / "config.yaml").read_text())["group_size"] == 4
    assert [record["step"] for record in read_records(undisturbed / "metrics.jsonl")] == [0, 1, 2, 2, 3, 4, 4]
    lengths = read_records(undisturbed / "lengths.jsonl")
    assert [record["step"] for record in lengths] == [1, 2, 3, 4]
    assert {(len(each["prompt_lengths"]), len(each["completion_lengths"])) for each in lengths} == {(4, 16)}
    samples = read_records(undisturbed / "samples.jsonl")
    assert {(each["step"], each["split"]) for each in samples} == {
        *((step, "train") for step in (1, 2, 3, 4)),
        *((step, "eval") for step in (0, 2, 4)),
    }
    assert {len(each["completions"]) for each in samples if each["split"] == "train"} == {4}
    assert sum(each["split"] == "train" for each in samples) == 8  # every second group of four


def test_a_run_ends_with_a_summary(undisturbed):
    summary = json.loads((undisturbed / "summary.json").read_text())
    evaluated = {each["step"]: each["eval/accuracy"] for each in metrics_of(undisturbed) if "eval/accuracy" in each}
    assert (summary["steps"], summary["name"]) == (STEPS, "run")
    assert summary["wall_s"] > 0
    assert summary["cpu_s"] > 0
    assert summary["eval"]["initial"] == {"step": 0, "accuracy": evaluated[0]}
    assert summary["eval"]["final"] == {"step": STEPS, "accuracy": evaluated[STEPS]}
    assert {"python", "jax", "optax"} <= set(summary["versions"])
    assert "commit" in summary


def test_every_metric_of_a_run_is_documented(undisturbed):
    names = {name for record in read_records(undisturbed / "metrics.jsonl") for name in record} - {"step"}
    assert sorted(name for name in names if find_metric(name) is None) == []
    assert {"time/wall_s", "rollout/decode_steps", "policy/logprob_gap/max", "eval/arithmetic/pass_at_k"} <= names


def test_metrics_of_a_step_are_about_the_same_step(undisturbed):
    lengths = read_records(undisturbed / "lengths.jsonl")
    for record, length in zip(trained(undisturbed), lengths, strict=True):
        completions = length["completion_lengths"]
        assert record["rollout/completion_tokens"] == record["tokens/completion"] == sum(completions)
        assert record["rollout/prompt_tokens"] == sum(length["prompt_lengths"])
        assert record["train-seq_len/completion/mean"] == pytest.approx(np.mean(completions))
        assert record["time/train/step_s"] >= record["time/train/rollout_s"] + record["time/train/update_s"]
        assert record["policy/logprob_gap/max"] < 1e-4


def test_programs_are_compiled_in_the_first_step_only(undisturbed):
    assert [record["rollout/compilations"] for record in trained(undisturbed)][1:] == [0] * (STEPS - 1)


def test_the_same_config_gives_the_same_run(run_of, undisturbed):
    assert_same_run(run_of(**STEPWISE), undisturbed)


def test_another_seed_gives_another_run(run_of, undisturbed):
    other = run_of(**{**STEPWISE, "steps": 2}, seed=1)
    assert metrics_of(other)[1] != metrics_of(undisturbed)[1]


def test_a_run_of_two_steps_goes_on_to_four_as_if_it_had_never_stopped(run_of, undisturbed):
    run = run_of(**{**STEPWISE, "steps": 2})
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert train(config_of(run, steps=STEPS), plain=True) == 0
    assert_same_run(run, undisturbed)
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS


def test_a_damaged_newest_checkpoint_is_told_and_the_run_goes_on_from_the_one_before(tmp_path, undisturbed, capfd):
    shutil.copytree(undisturbed, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "4"
    largest = max((newest / "optimizer").rglob("*"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 4
    largest.write_bytes(data)
    assert train(config_of(tmp_path / "run", runs_dir=str(tmp_path)), plain=True) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "checkpoint 4 is damaged (optimizer/" in said
    assert "continuing from step 2" in said
    assert (newest.parent / "4.damaged").is_dir()
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_after_its_step_saved_and_to_be_continued(
    tiny_model, tmp_path, undisturbed, monkeypatch, capfd, number, status
):
    """Also where no checkpoint is due: after step 1 here."""
    config = make_config(tiny_model, tmp_path, **STEPWISE)
    run, write = tmp_path / "run", Recorder.write

    def write_and_signal(self, *arguments):
        os.kill(os.getpid(), number)
        write(self, *arguments)

    monkeypatch.setattr(Recorder, "write", write_and_signal)
    assert train(config, plain=True) == status
    monkeypatch.undo()
    assert f"podium train {run}/config.yaml" in capfd.readouterr().err
    assert saved_steps(run / "checkpoints") == [1]
    assert (run / "summary.json").exists()
    assert train(config, plain=True) == 0
    assert_same_run(run, undisturbed)


def test_what_was_recorded_after_the_last_checkpoint_is_recorded_again(tiny_model, tmp_path, undisturbed, monkeypatch):
    """As after a kill in step 4: the checkpoint is of step 2, metrics are there up to step 3."""
    config = make_config(tiny_model, tmp_path, **STEPWISE)
    update = Trainer.update

    def fail_in_step_4(self, state, batches, step):
        if step == 3:
            raise KeyboardInterrupt
        return update(self, state, batches, step)

    monkeypatch.setattr(Trainer, "update", fail_in_step_4)
    with pytest.raises(KeyboardInterrupt):
        train(config, plain=True)
    monkeypatch.undo()
    assert metrics_of(tmp_path / "run")[-1]["step"] == 3
    assert train(config, plain=True) == 0
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_run_that_is_done_stays_as_it_is(run_of, undisturbed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    assert train(config_of(run, runs_dir=str(tmp_path)), plain=True) == 0
    assert_same_run(run, undisturbed)


def test_a_fork_goes_on_from_the_step_it_is_told(tiny_model, tmp_path, undisturbed):
    """With the same settings its two steps are the last two of the other."""
    fork = Fork(str(undisturbed), 2)
    config = make_config(tiny_model, tmp_path, **{**STEPWISE, "steps": 2, "name": "forked"})
    assert train(config, fork=fork, plain=True) == 0
    run = tmp_path / "forked"
    expected = [{**each, "step": each["step"] - 2} for each in metrics_of(undisturbed) if each["step"] > 2]
    assert [each for each in metrics_of(run) if each["step"] > 0] == [
        each for each in expected if each["step"] in (1, 2)
    ]
    assert weights_of(run, 2) == weights_of(undisturbed, 4)
    assert (
        metrics_of(run)[0]["eval/accuracy"]
        == [
            each["eval/accuracy"] for each in metrics_of(undisturbed) if each["step"] == 2 and "eval/accuracy" in each
        ].pop()
    )
    assert json.loads((run / "fork.json").read_text())["step"] == 2


def test_a_fork_of_a_step_that_was_not_kept_names_those_that_were(tiny_model, tmp_path, undisturbed):
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3; it has steps \[2, 4\]"):
        train(make_config(tiny_model, tmp_path), fork=Fork(str(undisturbed), 3), plain=True)


def test_numbers_that_are_not_finite_stop_the_run_and_leave_the_batch(tiny_model, tmp_path):
    optimizer = {"name": "sgd", "learning_rate": 1e30, "clip_norm": 0.0}
    config = make_config(
        tiny_model,
        tmp_path,
        steps=30,
        eval={"at_start": False},
        train={"optimizer": optimizer},
        algorithm={"updates_per_batch": 2},  # the second one meets what the first has made
    )
    with pytest.raises(DivergedError, match=r"update \d+ diverged: loss .* its batch is in"):
        train(config, plain=True)
    assert len(list((tmp_path / "run").glob("diverged-update-*.npz"))) == 1


def test_a_group_is_graded_while_others_are_still_decoded(tiny_model, tmp_path, monkeypatch):
    """Four groups of four pass through four slots one after the other."""
    config, events, retire = make_config(tiny_model, tmp_path, rollout={"slots": 4}), [], Scheduler.retire
    model = make_model(config)
    monkeypatch.setattr(Scheduler, "retire", lambda self, slot: (events.append("ended"), retire(self, slot)))
    with contextlib.closing(Rollouts(config, model.decoder, model.tokenizer, model.mesh)) as rollouts:
        submit = rollouts.grader.submit
        monkeypatch.setattr(rollouts.grader, "submit", lambda items: (events.append("graded"), submit(items))[1])
        rollouts.load(load_weights(model, None))
        groups, _ = rollouts.answer(rollouts.feed.next(4))
    graded = [index for index, event in enumerate(events) if event == "graded"]
    assert len(graded) == 4
    assert events[graded[0] :].count("ended") == 12
    assert [len(group.rewards) for group in groups] == [4] * 4


def test_a_run_that_another_process_trains_is_left_alone(undisturbed):
    before = (undisturbed / "metrics.jsonl").read_bytes()
    config = read_config(undisturbed)
    with RunDir.open(config), pytest.raises(RunInUseError, match=r"is in use by process .* wait for it, stop it"):
        train(config, plain=True)
    assert (undisturbed / "metrics.jsonl").read_bytes() == before


def test_groups_of_equal_rewards_are_replaced_by_others_up_to_a_bound(run_of):
    """A random model earns nothing in most groups: every round of refills is needed, and not enough."""
    run = run_of(steps=2, algorithm={"recipe": "dapo", "mask_truncated": False, "max_refills": 2})
    for record, lengths in zip(trained(run), read_records(run / "lengths.jsonl"), strict=True):
        drawn = len(lengths["prompt_lengths"])
        assert record["rollout/refill_rounds"] == 2
        assert 4 < drawn <= 12
        assert record["group/dropped"] == round(drawn * record["group/equal_rewards_fraction"])
        assert record["group/dropped"] > 4
        assert record["rollout/prompt_tokens"] == sum(lengths["prompt_lengths"])


def test_eight_devices_train_as_one_does(tiny_model, tmp_path, undisturbed):
    settings = {"mesh": "fsdp:2,sp:2,tp:2", "rollout": {"prefill_rows": 8, "slots": 16}, "train": {"row_tokens": 20}}
    config = make_config(tiny_model, tmp_path, **STEPWISE, **settings).model_copy(update={"steps": 2})
    assert train(config, plain=True) == 0
    found, expected = trained(tmp_path / "run")[0], trained(undisturbed)[0]
    assert found["train-reward/total/mean"] == expected["train-reward/total/mean"]
    for name in ("optimizer/gradient_norm", "policy/entropy", "train-other/loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6)


def questions_in(folder: Path, lengths: list[int]) -> dict[str, Any]:
    """A task of questions of so many words each."""
    rows = [{"question": " ".join(["What"] * length), "answer": "1"} for length in lengths]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text(json.dumps({"question": "What is 1", "answer": "1"}) + "\n")
    return {"tasks": [{"name": "jsonl", "path": str(folder)}]}


def test_prompts_that_are_too_long_are_skipped_and_counted(run_of, tmp_path):
    """One of two prompts fits: a step of four skips three or four, more than an epoch holds."""
    run = run_of(**questions_in(tmp_path, [3, 20]), steps=2)
    records = trained(run)
    assert [record["train-seq_len/prompt/max"] for record in records] == [3, 3]
    assert sum(record["rollout/dropped_prompts"] for record in records) in (7, 8)


def test_no_prompt_that_fits_is_an_error(tiny_model, tmp_path):
    config = make_config(tiny_model, tmp_path, **questions_in(tmp_path, [17, 20, 30]))
    with pytest.raises(ValueError, match=r"no prompt fits in rollout\.max_prompt_tokens 16; raise it"):
        train(config, plain=True)


def test_a_prompt_that_is_too_long_is_an_error_where_the_config_says_so(tiny_model, tmp_path):
    task = questions_in(tmp_path, [20, 20])
    config = make_config(tiny_model, tmp_path, **task, rollout={"long_prompts": "error"})
    with pytest.raises(ValueError, match=r"prompt jsonl/train/\d has 20 tokens and rollout\.max_prompt_tokens is 16"):
        train(config, plain=True)


def test_slots_that_do_not_divide_are_an_error_and_leave_no_grader_behind(tiny_model, tmp_path):
    settings = {"mesh": "1,8,1", "rollout": {"slots": 12}, "grading": {"workers": 1}}
    before = children()
    with pytest.raises(ValueError, match=r"rollout\.slots is 12 and is split over 8 devices"):
        train(make_config(tiny_model, tmp_path, **settings), plain=True)
    assert children() <= before


def test_a_mesh_that_splits_no_row_evenly_is_an_error_before_anything_is_loaded(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"rows of 19 tokens cannot be split evenly by sp:2; set train.row_tokens to"):
        make_model(make_config(tiny_model, tmp_path, mesh="fsdp:4,sp:2"))


def children() -> set[str]:
    """Process ids of this process's children; none where the system does not say."""
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return set(path.read_text().split()) if path.exists() else set()


def test_an_evaluation_of_a_run_prints_one_object_on_stdout(undisturbed, capfd):
    config = config_of(undisturbed)
    assert evaluate_command(config, run=Fork(str(undisturbed), None), as_json=True) == 0
    (line,) = capfd.readouterr().out.splitlines()
    found = json.loads(line)
    last = metrics_of(undisturbed)[-1]
    assert (found["target"], found["step"]) == (f"{undisturbed}@{STEPS}", STEPS)
    assert {name: value for name, value in found.items() if name.startswith("eval/")} == {
        name: value for name, value in last.items() if name.startswith("eval/")
    }


def test_an_evaluation_shows_and_writes_its_answers(undisturbed, tmp_path, capfd):
    config, out = config_of(undisturbed), tmp_path / "answers.jsonl"
    assert evaluate_command(config, run=Fork(str(undisturbed), None), as_json=False, show=2, out=out) == 0
    said = capfd.readouterr().err
    answers = read_records(out)
    assert (len(answers), said.count("question  "), said.count("expected  ")) == (8, 2, 2)
    assert f"question  {answers[0]['question']}\n" in said
    assert {answer["step"] for answer in answers} == {STEPS}


@pytest.fixture
def copied(undisturbed, tmp_path) -> Path:
    """The run again, in a folder that may be changed."""
    run = tmp_path / "runs" / "run"
    shutil.copytree(undisturbed, run)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(undisturbed.parent), str(run.parent)))
    return run


def test_the_commands_that_the_summary_prints_work(copied, monkeypatch):
    """All of "try next", in this process."""
    commands = next_commands(copied, STEPS)
    assert [command.split()[1] for command in commands] == ["eval", "export", "train"]
    for command in commands:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert not stopped.value.code, command
    assert json.loads((copied / "summary.json").read_text())["steps"] == 2 * STEPS


@pytest.mark.long
def test_the_commands_that_the_summary_prints_work_as_they_are_printed(copied, tmp_path, programs):
    """The same by a shell that has no environment of ours active."""
    for command in next_commands(copied, STEPS):
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        environment |= {name.upper(): str(value) for name, value in cache_settings(programs).items()}
        environment["PYTHONPATH"] = str(Path(cli.__file__).parents[1])
        done = subprocess.run(command, shell=True, cwd=Path.cwd(), env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_an_evaluation_of_an_earlier_step_is_that_of_the_run(tiny_model, tmp_path, undisturbed, capfd):
    evaluate_command(config_of(undisturbed), run=Fork(str(undisturbed), 2), as_json=True)
    found = json.loads(capfd.readouterr().out)
    (expected,) = (each for each in metrics_of(undisturbed) if each["step"] == 2 and "eval/accuracy" in each)
    assert found["eval/arithmetic/avg_at_k"] == expected["eval/arithmetic/avg_at_k"]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)]
)
def test_the_command_saves_and_exits_by_the_signal_s_number(
    tiny_model, tmp_path, programs, monkeypatch, number, status
):
    """The real command in a process of its own, with a grading worker, and continued by a second."""
    for name, value in cache_settings(programs).items():
        monkeypatch.setenv(name.upper(), str(value))
    file = tmp_path / "run.yaml"
    config = make_config(tiny_model, tmp_path, steps=100_000, grading={"workers": 1}, eval={"at_start": False})
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    process = start(file)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 2, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    done = read_records(metrics)[-1]["step"]
    assert saved_steps(tmp_path / "run" / "checkpoints")[-1] == done
    assert f"podium train {tmp_path}/run/config.yaml" in err
    assert "Traceback" not in err
    again = start(file, "--set", f"steps={done + 1}")
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert [record["step"] for record in trained(tmp_path / "run")] == list(range(1, done + 2))


def start(file: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "podium.cli", "train", str(file), "--plain", *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the run did not begin"
        time.sleep(0.05)


def test_a_fork_begins_its_own_schedule(tiny_model, tmp_path):
    optimizer = {"learning_rate": 1e-3, "schedule": "linear"}
    settings = {"eval": {"at_start": False, "at_end": False}, "train": {"optimizer": optimizer}}
    train(make_config(tiny_model, tmp_path, name="first", steps=2, **settings), plain=True)
    fork = Fork(str(tmp_path / "first"), None)
    train(make_config(tiny_model, tmp_path, name="second", steps=3, **settings), fork=fork, plain=True)
    lines = read_records(tmp_path / "second" / "metrics.jsonl")
    rates = [line["optimizer/learning_rate"] for line in lines if "optimizer/learning_rate" in line]
    assert rates == pytest.approx([1e-3, 5e-4, 0.0], abs=1e-9)


def test_the_schedule_follows_the_run_where_steps_have_nothing_to_train_on(tiny_model, tmp_path, monkeypatch):
    """Steps 2 and 4 of 5 earn equal rewards: no update, and the last step's rate is the schedule's last."""
    answer, steps = Rollouts.answer, iter([1, 0, 1, 0, 1])

    def some_without_difference(self, prompts, settings=None):
        groups, stats = answer(self, prompts, settings)
        if settings is None:
            earned = [1.0, 0.0, 0.0, 0.0] if next(steps) else [0.0] * 4
            groups = [
                dataclasses.replace(
                    group,
                    rewards=[dataclasses.replace(each, total=x) for each, x in zip(group.rewards, earned, strict=True)],
                )
                for group in groups
            ]
        return groups, stats

    monkeypatch.setattr(Rollouts, "answer", some_without_difference)
    settings: dict[str, Any] = {
        "steps": 5,
        "algorithm": {"zero_variance": "drop"},
        "eval": {"at_start": False, "at_end": False},
        "train": {"optimizer": {"learning_rate": 1e-3, "schedule": "linear"}},
    }
    train(make_config(tiny_model, tmp_path, **settings), plain=True)
    lines = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [line["optimizer/updates"] for line in lines] == [1, 0, 1, 0, 1]
    rates = [line["optimizer/learning_rate"] for line in lines]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0], abs=1e-9)
    moved = [line.get("optimizer/update_norm") for line in lines]
    assert moved[2] is not None and moved[2] > 0
    assert moved[-1] == 0.0  # the rate that the optimizer itself used
    assert all("rollout/entropy" in line for line in lines)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps_without_update"] == 2


def test_between_the_command_and_the_compiled_decode_there_are_five_calls(tiny_model, tmp_path, monkeypatch):
    """Podium's own functions on the stack below `podium.cli.train`, itself included, each time a decode is called."""
    depths: list[list[str]] = []
    init = RolloutEngine.__init__

    def with_watched_decode(self, *arguments, **options):
        init(self, *arguments, **options)
        decode = self.device.programs.decode

        def watched(*call):
            frames = [
                frame.frame.f_code.co_qualname
                for frame in inspect.stack(context=0)[1:]
                if str(frame.frame.f_globals.get("__name__", "")).startswith("podium.")
            ]
            depths.append(frames[: frames.index("train", frames.index("train") + 1) + 1])
            return decode(*call)

        watched._cache_size = decode._cache_size  # pyright: ignore[reportFunctionMemberAccess]
        self.device.programs = self.device.programs._replace(decode=watched)

    monkeypatch.setattr(RolloutEngine, "__init__", with_watched_decode)
    config = make_config(tiny_model, tmp_path, steps=1, eval={"at_start": False, "at_end": False})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with pytest.raises(typer.Exit):
        cli.train([file], plain=True)
    assert depths
    assert {tuple(frames) for frames in depths} == {
        ("RolloutEngine.step", "RolloutEngine.generate", "Rollouts.answer", "run_steps", "train", "train")
    }
