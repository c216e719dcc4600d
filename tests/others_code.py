"""Other people's libraries that some tests compare Podium with; none is a dependency, and `make parity` installs them.

Without them these tests are skipped. Under `make parity` a missing library is an error, so that none is skipped there.
"""

import importlib
import os
from types import ModuleType
from typing import Literal

import pytest

Library = Literal["torch", "peft", "trl", "bitsandbytes"]


def others_code(library: Library) -> ModuleType:
    """The library; the test is skipped where it is not installed. Mark such a test `parity`."""
    if os.environ.get("PARITY") == "1":
        return importlib.import_module(library)
    return pytest.importorskip(library, reason=f"{library} is not installed; `make parity` installs and runs this")
