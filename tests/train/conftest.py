from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tiny_runs import cache_settings, write_tiny_model

from podium.sharding import make_mesh


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model with its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def one_device() -> Iterator[None]:
    """Runs with `mesh: auto` have the first of the test's devices: programs for one compile faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "podium.train.setup.make_mesh",
            lambda text: make_mesh(text, jax.devices()[:1] if text == "auto" else None),
        )
        yield


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled programs are kept for this session."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def compiled_once(programs: Path) -> Iterator[None]:
    """Programs that several runs share are compiled by the first."""
    settings = cache_settings(programs)
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
