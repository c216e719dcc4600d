from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_dtypes() -> Iterator[None]:
    """Losses and advantages never promote a dtype silently."""
    with jax.numpy_dtype_promotion("strict"):
        yield
