"""The families of models, a file each: every module of this package declares some in `FAMILIES`. No jax.

docs/models.md shows how to add one. A family is found because its file is here; nothing else names it.
"""

import importlib
import pkgutil
from collections.abc import Mapping

from podium.models.family import Family


def find_families() -> dict[str, Family]:
    """The families that the modules of this package declare, by model type."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    declared = [family for module in modules for family in module.FAMILIES]
    found = {family.model_type: family for family in declared}
    assert len(found) == len(declared), "two families declare one model type"
    return found


FAMILIES: Mapping[str, Family] = find_families()
"""By model type."""
