"""Whatever ends a run between two checkpoints, the newest whole step is saved, and the message says how to go on."""

import contextlib
import errno
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripted import Counting
from tiny_runs import SHORT, STEPWISE, assert_same_run, make_config, merged, trained

from podium.config.schema import Config
from podium.files import RunFileError
from podium.job.job_context import JobContext
from podium.job.job_records import HANG, ProgressReport
from podium.job.watchdog import Watchdog
from podium.observe.run_dir import saved_steps
from podium.sampling.sampler import Sampler
from podium.tasks.conversation import Reply, Turn
from podium.train import loop
from podium.train.evaluate import evaluate
from podium.train.loop import train
from podium.train.trainer import DivergedError, Trainer

pytestmark = pytest.mark.usefixtures("one_device")
NEVER = {"checkpoint": {"every_steps": 0, "every_minutes": 0.0}}
"""No checkpoint before the last step."""
STEP_PROMPTS = 4


class Asked:
    """How many prompts a user's code has been asked about, and whether it still fails in the third step."""

    prompts = 0
    broken = False

    @classmethod
    def once_more(cls) -> None:
        cls.prompts += 1
        if cls.broken and cls.prompts > 2 * STEP_PROMPTS:
            raise RuntimeError("the user's own bug")


@pytest.fixture(autouse=True)
def broken_until_mended() -> None:
    Asked.prompts, Asked.broken = 0, True


def fragile(completions: list[str]) -> list[float]:
    """Pays for letters, and raises in the third step until it is mended."""
    Asked.once_more()
    return [float(len(completion) % 3) for completion in completions]


class Fragile(Counting):
    """An environment that raises in the third step until it is mended."""

    def reply(self, turn: Turn) -> Reply | None:
        if Asked.broken and Asked.prompts >= 2:
            raise RuntimeError("the user's own bug")
        return super().reply(turn)


def with_reward(model: Path, folder: Path, name: str, **changes: Any) -> Config:
    task = {"name": "arithmetic", "rewards": {"correct": 1.0, f"test_leaving:{name}": 1.0}}
    settings = {"tasks": [task], "eval": {"at_start": False, "at_end": False}, "steps": 4, **NEVER}
    return make_config(model, folder, **merged(settings, changes))


def said(capfd: pytest.CaptureFixture[str]) -> str:
    return " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(
    ("status", "notice", "said"),
    [
        (0, None, ("done", "3 steps", 0)),
        (143, None, ("stopped", "stopped by signal 15 after step 3, which is saved", 143)),
        (143, "this host will be moved", ("stopped", "this host will be moved after step 3, which is saved", 143)),
    ],
)
def test_the_last_record_says_what_ended_the_run(monkeypatch, status, notice, said):
    """The machine's notice, which came before the signal that it made the run send itself."""
    run: Any = types.SimpleNamespace(around=types.SimpleNamespace(stop=types.SimpleNamespace(exit_code=status)))
    monkeypatch.setattr(loop, "open_run", lambda *_, **__: contextlib.nullcontext((run, None, 0)))
    monkeypatch.setattr(loop, "run_steps", lambda *_: 3)
    monkeypatch.setattr(loop, "summarise", lambda *_: None)
    ended: list[Any] = []
    report = types.SimpleNamespace(end=lambda *words: ended.append(words))
    job: Any = types.SimpleNamespace(notice=notice and types.SimpleNamespace(text=notice), report=report)
    assert train(make_config(), job=job) == status
    assert ended == [said]


def test_an_error_in_a_reward_function_loses_no_whole_step(tiny_model, tmp_path, capfd):
    config = with_reward(tiny_model, tmp_path / "a", "fragile")
    with pytest.raises(ValueError, match="test_leaving:fragile failed"):
        train(config, plain=True)
    text = said(capfd)
    run = tmp_path / "a" / "run"
    assert "step 2 is saved; to continue: " in text and f"podium train {run}/config.yaml" in text
    assert saved_steps(run / "checkpoints") == [2]
    Asked.broken = False
    assert train(config, plain=True) == 0
    undisturbed = with_reward(tiny_model, tmp_path / "b", "fragile")
    assert train(undisturbed, plain=True) == 0
    assert_same_run(run, tmp_path / "b" / "run")


def test_an_error_in_an_environment_loses_no_whole_step(talk, monkeypatch, capfd):
    config = talk("x", steps=3, eval={"at_start": False, "at_end": False}, **NEVER)
    config = config.model_copy(
        update={"tasks": [config.tasks[0].model_copy(update={"environment": "test_leaving:Fragile"})]}
    )
    answer = Sampler.answer

    def counted(self: Sampler, *arguments: Any):
        found = answer(self, *arguments)
        Asked.prompts += 1  # steps, here
        return found

    monkeypatch.setattr(Sampler, "answer", counted)
    with pytest.raises(ValueError, match="Fix the environment, then continue the run"):
        train(config, plain=True)
    assert "step 2 is saved; to continue" in said(capfd)
    run = Path(config.runs_dir) / "run"
    assert saved_steps(run / "checkpoints") == [2]
    Asked.broken = False
    assert train(config, plain=True) == 0
    assert [line["step"] for line in trained(run)] == [1, 2, 3]


def fail_at(number: int, action: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """The action, which raises at its call of this number, counted from 1, before it does anything."""
    calls: list[None] = []

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            raise error
        return action(*arguments, **options)

    return failing


WAYS: dict[str, tuple[str, int, BaseException, int]] = {
    # what raises, at which call, what, and how many steps are whole then
    "evaluation": ("podium.train.loop.evaluate", 2, RuntimeError("no memory"), 2),
    "an interrupted evaluation": ("podium.train.loop.evaluate", 2, KeyboardInterrupt(), 2),
    "Ctrl-C": ("podium.sampling.sampler.Sampler.answer", 4, KeyboardInterrupt(), 1),
    "SystemExit": ("podium.train.trainer.Trainer.prepare", 4, SystemExit(7), 3),
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_ends_the_loop_the_newest_whole_step_is_saved(
    tiny_model, tmp_path, undisturbed, monkeypatch, capfd, way
):
    """And the run that is continued is the one that was never stopped."""
    target, number, error, whole = WAYS[way]
    config = make_config(tiny_model, tmp_path, **merged(STEPWISE, NEVER))
    monkeypatch.setattr(target, fail_at(number, pkgutil.resolve_name(target), error))
    with pytest.raises(RuntimeError if isinstance(error, SystemExit) else type(error)):
        train(config, plain=True)
    monkeypatch.undo()
    assert f"step {whole} is saved; to continue" in said(capfd)
    run = tmp_path / "run"
    assert saved_steps(run / "checkpoints") == [whole]
    assert train(config, plain=True) == 0
    assert_same_run(run, undisturbed)


@pytest.mark.parametrize(
    ("target", "number", "name"),
    [
        ("podium.observe.run_dir.RunDir.append", 5, "lengths.jsonl"),  # metrics, two samples, lengths of each step
        ("podium.sampling.sampler.Sampler.load", 3, "metrics.jsonl"),
    ],
)
def test_a_step_that_could_not_be_recorded_is_saved_and_its_missing_line_is_said(
    tiny_model, tmp_path, monkeypatch, capfd, target, number, name
):
    settings = merged(merged(SHORT, NEVER), {"eval": {"at_start": False, "at_end": False}})
    config = make_config(tiny_model, tmp_path, **settings)
    monkeypatch.setattr(target, fail_at(number, pkgutil.resolve_name(target), RunFileError("the disk is full")))
    with pytest.raises(RunFileError, match="the disk is full"):
        train(config, plain=True)
    monkeypatch.undo()
    assert "step 2 is saved; to continue" in said(capfd)
    assert train(config, plain=True) == 0
    assert f"{name} has no line for step 2: the run ended before it was written" in said(capfd)
    assert saved_steps(tmp_path / "run" / "checkpoints")[-1] == 3


def test_a_function_that_hears_of_each_step_may_fail_without_losing_it(tiny_model, tmp_path, undisturbed, capfd):
    def on_step(step: int, metrics: object, samples: object) -> None:
        if step == 3:
            raise ZeroDivisionError

    config = make_config(tiny_model, tmp_path, **merged(STEPWISE, NEVER))
    with pytest.raises(ZeroDivisionError):
        train(config, plain=True, on_step=on_step)
    assert "step 3 is saved; to continue" in said(capfd)
    assert train(config, plain=True) == 0
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_step_whose_weights_the_failed_update_replaced_is_said_to_be_lost(tiny_model, tmp_path, monkeypatch, capfd):
    """The update frees the state before it; what an earlier checkpoint holds is named."""
    config = make_config(tiny_model, tmp_path, **merged(STEPWISE, {"eval": {"at_start": False}}))
    update = Trainer.update

    def diverging(self: Trainer, state: Any, batches: Any, step: int, **options: Any) -> Any:
        found = update(self, state, batches, step, **options)
        if step == 3:
            raise DivergedError("update 4 diverged")
        return found

    monkeypatch.setattr(Trainer, "update", diverging)
    with pytest.raises(DivergedError):
        train(config, plain=True)
    lost = "step 3 could not be saved: the update that failed had already replaced its weights; the newest saved"
    assert lost in said(capfd)
    assert saved_steps(tmp_path / "run" / "checkpoints") == [2]


def test_an_error_in_the_first_step_saves_nothing_and_says_nothing(tiny_model, tmp_path, monkeypatch, capfd):
    config = make_config(tiny_model, tmp_path, **merged(STEPWISE, NEVER))
    monkeypatch.setattr("podium.sampling.sampler.Sampler.answer", fail_at(1, Sampler.answer, RuntimeError("at once")))
    with pytest.raises(RuntimeError, match="at once"):
        train(config, plain=True)
    assert "saved" not in said(capfd)
    assert saved_steps(tmp_path / "run" / "checkpoints") == []


def test_a_disk_that_is_full_at_the_end_hides_no_error(tiny_model, tmp_path, monkeypatch, capfd):
    config = make_config(tiny_model, tmp_path, **merged(STEPWISE, NEVER))
    monkeypatch.setattr("podium.train.loop.evaluate", fail_at(2, evaluate, RuntimeError("the first error")))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    target = "podium.train.checkpoints.checkpoint.try_to_write"
    monkeypatch.setattr(target, fail_at(2, pkgutil.resolve_name(target), full))
    with pytest.raises(RuntimeError, match="the first error"):
        train(config, plain=True)
    assert "step 2 could not be saved: the checkpoint of step 2 could not be written" in said(capfd)


def test_a_process_that_hangs_saves_its_newest_step_before_the_watchdog_ends_it(
    tiny_model, tmp_path, undisturbed, monkeypatch, capfd
):
    """The watchdog's thread saves while the loop stands in its third step."""
    ended = threading.Event()
    report = ProgressReport(tmp_path / "job")
    (tmp_path / "job").mkdir()
    clock = [0.0]

    def end(status: int) -> None:
        assert status == HANG
        ended.set()

    watchdog = Watchdog(report, poll_s=0.01, clock=lambda: clock[0], end=end)
    answer = fail_at(4, Sampler.answer, KeyboardInterrupt())  # one evaluation came before

    def stuck(self: Sampler, *arguments: Any) -> Any:
        try:
            return answer(self, *arguments)
        except KeyboardInterrupt:
            clock[0] = 1e9
            assert ended.wait(60)
            assert saved_steps(tmp_path / "run" / "checkpoints") == [1]
            raise

    monkeypatch.setattr(Sampler, "answer", stuck)
    config = make_config(tiny_model, tmp_path, **merged(STEPWISE, NEVER))
    job = JobContext(cluster=None, report=report, watchdog=watchdog)
    with pytest.raises(KeyboardInterrupt):
        train(config, plain=True, job=job)
    monkeypatch.undo()
    assert "watchdog: step 1 is saved; to continue" in said(capfd)
    assert train(config, plain=True) == 0
    assert_same_run(tmp_path / "run", undisturbed)


SLOW = """
import pathlib, time

def slow(completions):
    if pathlib.Path("slow").exists():
        pathlib.Path("asked").touch()
        time.sleep(600)
    return [1.0 for _ in completions]
"""


@pytest.mark.long
def test_sigterm_does_not_wait_for_a_slow_reward_function(tiny_model, tmp_path):
    """A machine may disappear half a minute after it: the steps before are saved at once."""
    (tmp_path / "own.py").write_text(SLOW)
    task = {"name": "arithmetic", "rewards": {"correct": 1.0, "own:slow": 1.0}}
    settings: dict[str, Any] = {"tasks": [task], "steps": 100_000, "eval": {"at_start": False}, **NEVER}
    config = make_config(tiny_model, tmp_path, **settings)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    process = subprocess.Popen(
        [sys.executable, "-m", "podium.cli", "train", "run.yaml", "--plain"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])},
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, process)
    (tmp_path / "slow").touch()
    wait_until((tmp_path / "asked").exists, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert saved_steps(tmp_path / "run" / "checkpoints") == [trained(tmp_path / "run")[-1]["step"]]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
