import functools
from collections.abc import Iterator

import pytest
from made_once import made_once

from podium.kernels.grouped import Form


@pytest.fixture(scope="module", autouse=True)
def programs_made_once() -> Iterator[None]:
    """Engines of equal settings share their programs."""
    with made_once():
        yield


@pytest.fixture(autouse=True)
def kernels_of_mixtures_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that claim to be of GPUs (`tiny_engine.OfGpu`) ask for kernels that a CPU can only emulate."""
    monkeypatch.setattr("podium.models.expert_forms.Form", functools.partial(Form, interpret=True))
