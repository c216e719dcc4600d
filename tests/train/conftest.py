import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from made_once import made_once
from scripted import TALK, TEMPLATE
from tiny_runs import STEPWISE, make_config, merged, trained, write_tiny_model
from whole_slots import every_size, whole_slots

from podium.config.schema import Config
from podium.sharding import make_mesh
from podium.train.loop import train


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model with its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_model` with positions for conversations with long prompts."""
    folder = tmp_path_factory.mktemp("model") / "roomy"
    write_tiny_model(folder, longest=256)
    return folder


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a chat template by which conversations can be continued."""
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@pytest.fixture
def talk(tiny_model: Path, template: str, tmp_path: Path, one_device: None) -> Callable[..., Config]:
    """Configs of runs that talk to an environment of `scripted`, with changes."""

    def config(environment: str = "Counting", **changes: Any) -> Config:
        task = {"name": "arithmetic", "environment": f"scripted:{environment}"}
        changes = merged({"tasks": [task], "chat_template": template}, changes)
        return make_config(tiny_model, tmp_path, **merged(TALK, changes))

    return config


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


@pytest.fixture(scope="module", autouse=True)
def made_once_for_all() -> Iterator[None]:
    """Programs of equal settings are traced and compiled once in this process; other folders' tests make them anew."""
    with made_once():
        yield


@pytest.fixture(scope="module", autouse=True)
def one_decode_program() -> Iterator[None]:
    """Runs decode with all slots, however few are live."""
    with whole_slots():
        yield


@pytest.fixture(name="every_size")
def with_every_size() -> Iterator[None]:
    """But for those of this test."""
    with every_size():
        yield


@pytest.fixture(scope="session")
def run_of(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains a new run with changes to the tiny config; its folder."""

    def run(name: str = "run", **changes: Any) -> Path:
        config = make_config(tiny_model, tmp_path_factory.mktemp("runs"), name=name, **changes)
        with on_one_device(), whole_slots():
            assert train(config, plain=True) == 0
        return Path(config.runs_dir) / name

    return run


@pytest.fixture(scope="session")
def undisturbed(run_of: Callable[..., Path]) -> Path:
    """A run of four steps, evaluated and saved every two. Nobody changes it: tests copy it first."""
    run = run_of(**STEPWISE)
    assert all(line["optimizer/gradient_norm"] > 0 for line in trained(run))
    return run
