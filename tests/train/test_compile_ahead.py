"""Programs that are compiled on other threads are the ones that a run calls."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import pytest
from made_once import made_anew
from tiny_runs import SHORT, make_config, merged

from podium.ahead import Call, CompileAhead, threads_for
from podium.compiler import Lowerable
from podium.train.evaluate import evaluate_weights
from podium.train.loop import train

pytestmark = pytest.mark.usefixtures("one_device")
LARGE = ("decode", "extend", "copy", "train_step", "score", "values")
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "kl and a moving bonus": {"algorithm": {"kl": "k3", "kl_coef": 0.1, "entropy_target": 0.5, "entropy_bonus": 0.01}},
    "critic": {"algorithm": {"recipe": "ppo", "advantage_options": {"gamma": 0.9, "lam": 0.8}}},
    "adapters": {"lora": {"rank": 2}, "algorithm": {"kl": "k3", "kl_coef": 0.1}},
    "carried over": {"rollout": {"in_flight": 6}},
}


@pytest.fixture
def compiled() -> Iterator[list[tuple[str, bool]]]:
    """The functions that jax compiles during a test, and whether the main thread waited for each."""
    found: list[tuple[str, bool]] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            own = threading.current_thread() is threading.main_thread()
            found.append((str(kwargs.get("fun_name", "")), own))

    jax.monitoring.register_event_duration_secs_listener(note)
    with made_anew():
        yield found
    jax.monitoring.unregister_event_duration_listener(note)


def named(function: str) -> bool:
    return any(f"({name})" in function or name == function for name in LARGE)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_compiles_nothing_large_when_it_calls_it(
    run: str, tiny_model: Path, tmp_path: Path, compiled: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("podium.train.generate.threads_for", lambda platform: 2)
    assert train(make_config(tiny_model, tmp_path, **merged(SHORT, {"steps": 2, **RUNS[run]})), plain=True) == 0
    found = [(name, own) for name, own in compiled if named(name)]
    assert any("train_step" in name for name, _ in found)
    assert any("decode" in name for name, _ in found)
    assert [name for name, own in found if own] == []


def test_an_evaluation_compiles_nothing_large_when_it_calls_it(
    tiny_model: Path, tmp_path: Path, compiled: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("podium.train.generate.threads_for", lambda platform: 2)
    evaluate_weights(make_config(tiny_model, tmp_path), None)
    assert any("decode" in name for name, _ in compiled)
    assert [name for name, own in compiled if named(name) and own] == []


def test_a_program_that_cannot_be_compiled_fails_when_it_is_called():
    class Refused:
        """A lowered program that the compiler refuses."""

        def lower(self, *arguments: object) -> "Refused":
            return self

        def compile(self) -> None:
            raise ValueError("too large")

    with CompileAhead(1) as ahead:
        ahead.begin([("large", Call(cast(Lowerable, Refused()), ()))])
        ahead.wait("large", "unknown")


def test_on_a_cpu_programs_are_compiled_when_they_are_called():
    assert threads_for("cpu") == 0
    assert threads_for("gpu") == threads_for("tpu") == os.cpu_count()
    calls = iter([("abs", Call(jax.jit(abs), (1.0,)))])
    with CompileAhead(0) as ahead:
        ahead.begin(calls)
        ahead.wait("abs")
    assert len(list(calls)) == 1, "nothing was lowered"
