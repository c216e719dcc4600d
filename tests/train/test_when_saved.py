"""When a run saves: by steps, by the time, and later where its bucket does not answer."""

import threading
from pathlib import Path
from typing import Any

import pytest

from podium.config.schema import CheckpointConfig
from podium.train.checkpoints import postponing
from podium.train.checkpoints.checkpoint import Checkpointer
from podium.train.checkpoints.postponing import Postponing
from podium.train.checkpoints.saving import Saving


class Nowhere:
    """A position of a run that does not matter."""

    def record(self) -> dict[str, Any]:
        return {}


class Saves(Checkpointer):
    """A checkpointer of a run in a bucket that answers while `answering` is set; it keeps the steps that it saved."""

    def __init__(self, **config: Any) -> None:
        self._folder, self._config = Path("gs://bucket"), CheckpointConfig(**config)
        self._on_save, self._records, self._beside = lambda: None, None, {"base": None}
        self._postponing = Postponing(self._folder)
        self.answering, self.saved = threading.Event(), []

    def save(self, step: int, *_: Any, **more: Any) -> None:
        self.saved.append(step)

    def done(self, *steps: int, last: int = 0) -> list[int]:
        """Train these steps; returns the steps that were saved."""
        before = len(self.saved)
        for step in steps:
            self.maybe_save(step, None, Nowhere(), score=None, last=step == last)  # type: ignore[arg-type]
        return self.saved[before:]


@pytest.mark.parametrize(("every_s", "saved"), [(600.0, [2, 3]), (0.0, [])])
def test_a_save_is_due_so_long_after_the_last(monkeypatch, every_s, saved):
    now, made = [0.0], Saves(every_steps=0)
    monkeypatch.setattr("podium.train.checkpoints.saving.time.monotonic", lambda: now[0])
    stop: Any = None
    saving = Saving(made, stop, every_s=every_s, to_continue=lambda: "")
    for step, now[0] in enumerate((599.0, 600.0, 1200.0, 1799.0), 1):
        saving.reached(step, None, Nowhere())  # type: ignore[arg-type]
        saving.after_step(score=None, last=False)
    assert made.saved == saved


@pytest.fixture
def saves(monkeypatch) -> Saves:
    made = Saves(every_steps=10)
    monkeypatch.setattr(postponing, "in_bucket", lambda path: True)
    monkeypatch.setattr(postponing, "try_to_write", lambda path: made.answering.wait(60.0))
    monkeypatch.setattr(postponing, "ANSWER_S", 0.01)
    return made


def test_a_save_without_a_bucket_comes_with_the_first_step_after_its_return(saves):
    assert saves.done(*range(1, 15)) == []
    assert saves.postponed
    saves.answering.set()
    postponing.wait([saves._postponing._attempt])
    assert saves.done(*range(15, 25)) == [15, 20]
    assert not saves.postponed


def test_the_next_regular_save_waits_for_the_bucket_and_so_does_the_last(saves):
    assert saves.done(*range(1, 25)) == [20]
    assert saves.done(25, last=25) == [25]
    saves.answering.set()


def test_a_bucket_that_refuses_is_told_by_the_save(saves, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError("expired")

    monkeypatch.setattr(postponing, "try_to_write", refuse)
    assert saves.done(*range(1, 11)) == [10]
