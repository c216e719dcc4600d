import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from made_once import made_once
from tiny_runs import STEPWISE, cache_settings, make_config, write_tiny_model

from podium.sharding import make_mesh
from podium.train.loop import train


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model with its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder)
    return folder


@contextlib.contextmanager
def on_one_device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "podium.train.setup.make_mesh",
            lambda text: make_mesh(text, jax.devices()[:1] if text == "auto" else None),
        )
        yield


@pytest.fixture(scope="module")
def one_device() -> Iterator[None]:
    """Runs with `mesh: auto` have the first of the test's devices: programs for one compile faster."""
    with on_one_device():
        yield


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled programs are kept for this session."""
    return tmp_path_factory.mktemp("programs")


@contextlib.contextmanager
def keeping_programs(folder: Path) -> Iterator[None]:
    """Programs are traced once in this process, and compiled once by all that share the folder."""
    settings = cache_settings(folder)
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        with made_once():
            yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def compiled_once(programs: Path) -> Iterator[None]:
    """Programs that several runs share are compiled by the first."""
    with keeping_programs(programs):
        yield


@pytest.fixture(scope="session")
def run_of(tiny_model: Path, programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains a new run with changes to the tiny config; its folder."""

    def run(name: str = "run", **changes: Any) -> Path:
        config = make_config(tiny_model, tmp_path_factory.mktemp("runs"), name=name, **changes)
        with on_one_device(), keeping_programs(programs):
            assert train(config, plain=True) == 0
        return Path(config.runs_dir) / name

    return run


@pytest.fixture(scope="session")
def undisturbed(run_of: Callable[..., Path]) -> Path:
    """A run of four steps, evaluated and saved every two. Nobody changes it: tests copy it first."""
    return run_of(**STEPWISE)
