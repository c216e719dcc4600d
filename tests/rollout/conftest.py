from collections.abc import Iterator

import pytest
from made_once import made_once


@pytest.fixture(scope="module", autouse=True)
def programs_made_once() -> Iterator[None]:
    """Engines of equal settings share their programs."""
    with made_once():
        yield
