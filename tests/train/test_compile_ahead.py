"""Programs that are compiled on other threads are the ones that a run calls."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
from made_once import made_anew
from tiny_runs import SHORT, make_config, merged

from podium.compile_ahead import Call, CompileAhead, threads_for
from podium.train.evaluate import evaluate_weights
from podium.train.loop import train

LARGE = ("decode", "extend", "copy", "train_step", "score", "values")
RUNS: dict[str, dict[str, object]] = {
    "grpo": {"mesh": "fsdp:8"},
    "kl and a moving bonus": {"algorithm": {"kl": "k3", "kl_coef": 0.1, "entropy_target": 0.5, "entropy_bonus": 0.01}},
    "critic": {"mesh": "fsdp:4,tp:2", "algorithm": {"recipe": "ppo", "advantage_options": {"gamma": 0.9, "lam": 0.8}}},
    "adapters": {"lora": {"rank": 2}, "algorithm": {"kl": "k3", "kl_coef": 0.1}},
    "carried over": {"rollout": {"in_flight": 6, "max_staleness": 5}},
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


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("run", RUNS)
def test_a_run_compiles_nothing_large_when_it_calls_it(
    run: str, tiny_model: Path, tmp_path: Path, compiled: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("podium.sampling.sampler.threads_for", lambda platform: 2)
    assert train(make_config(tiny_model, tmp_path, **merged(SHORT, {"steps": 2, **RUNS[run]})), plain=True) == 0
    found = [(name, own) for name, own in compiled if named(name)]
    assert any("train_step" in name for name, _ in found)
    assert any("decode" in name for name, _ in found)
    assert [name for name, own in found if own] == []


@pytest.mark.usefixtures("one_device")
def test_held_out_preferences_wait_for_the_program_that_scores(
    tiny_model: Path, tmp_path: Path, compiled: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
):
    """Nothing is compiled ahead before somebody waits for it."""
    wanted, wait = threading.Event(), CompileAhead.wait

    class Patient(ThreadPoolExecutor):
        def submit(self, compile_it: Callable[[], object]) -> Future[object]:
            return super().submit(lambda: wanted.wait() and compile_it())

    def note_and_wait(self: CompileAhead, *names: str) -> None:
        if "score" in names:
            wanted.set()
        wait(self, *names)

    monkeypatch.setattr("podium.compile_ahead.ThreadPoolExecutor", Patient)
    monkeypatch.setattr(CompileAhead, "wait", note_and_wait)
    monkeypatch.setattr("podium.sampling.sampler.threads_for", lambda platform: 2)
    rows = [{"prompt": f"{n} + 1", "chosen": str(n + 1), "rejected": str(n) * 2} for n in range(1, 3)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "tasks": [{"name": "preferences", "path": str(pairs), "eval_path": str(pairs)}],
        "algorithm": {"recipe": "dpo"},
        "eval": {"at_start": True, "questions": 2},
        "prompts_per_step": 2,
        "group_size": 2,
        "steps": 1,
    }
    assert train(make_config(tiny_model, tmp_path, **changes), plain=True) == 0
    scores = [own for name, own in compiled if "score" in name]  # one program for each shape of batches
    assert scores and not any(scores)


@pytest.mark.usefixtures("one_device")
def test_an_evaluation_compiles_nothing_large_when_it_calls_it(
    tiny_model: Path, tmp_path: Path, compiled: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("podium.sampling.sampler.threads_for", lambda platform: 2)
    evaluate_weights(make_config(tiny_model, tmp_path), None)
    assert any("decode" in name for name, _ in compiled)
    assert [name for name, own in compiled if named(name) and own] == []


def test_a_program_that_cannot_be_compiled_fails_when_it_is_called():
    refused = jax.jit(abs, compiler_options={"xla_no_such_option": "1"})
    with CompileAhead(1) as ahead:
        ahead.begin([("refused", Call(refused, (1.0,)))])
        ahead.wait("refused", "unknown")
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        refused(1.0)


def test_on_a_cpu_programs_are_compiled_when_they_are_called():
    assert threads_for("cpu") == 0
    assert threads_for("gpu") == threads_for("tpu") >= 1
    calls = iter([("abs", Call(jax.jit(abs), (1.0,)))])
    with CompileAhead(0) as ahead:
        ahead.begin(calls)
        ahead.wait("abs")
    assert len(list(calls)) == 1, "nothing was lowered"
