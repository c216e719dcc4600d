"""The naive side knows nothing of what it is compared with."""

import pytest

from tools.structure import imports, reached, read_modules

MODULES = read_modules()
NAIVE = sorted(name for name in MODULES if name.startswith("podium.certify.naive"))
COMPARED_WITH = ("podium.algorithms", "podium.train", "podium.rollout", "podium.sharding", "podium.tasks", "podium.run")


def test_the_naive_side_is_four_files():
    assert [f"podium.certify.naive{part}" for part in ("", "_optimizer", "_rules", "_step")] == NAIVE


@pytest.mark.parametrize("name", NAIVE)
def test_a_naive_module_imports_nothing_of_what_it_checks_not_even_through_others(name):
    """What it reads are the numbers of a model and of a config, and no function that computes with them."""
    found = reached(imports(MODULES), name)
    assert [each for each in sorted(found) if each.startswith(COMPARED_WITH)] == []
