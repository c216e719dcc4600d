"""Counts of the package's structure may only fall (`tools/structure_counts.py`), and are recorded when they do."""

import ast

import pytest

from tools import structure_counts
from tools.structure_counts import count_all, read_golden, record, risen, totals


@pytest.mark.core
def test_no_count_rises_and_a_lower_one_is_recorded() -> None:
    recorded, found = read_golden(), count_all()
    assert risen(recorded, found) == []
    assert totals(recorded) == totals(found), "lower than recorded: python -m tools.structure --record"


WIDE = """
class Wide:
    '''Thirteen attributes.'''

    a: int
    b = c = 0

    def __init__(self, d, e, f, g, h, i, j, k, l):
        self.d, self.e, self.f, self.g, self.h, self.i = d, e, f, g, h, i
        self.j, self.k, self.l, self.m = j, k, l, call(1, 2, 3, 4, 5, 6)


def narrow(config: "Config", *others, one, two=3):
    return call(1, 2, 3, 4, 5, *others)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two rooms, and where its counts are recorded."""
    for path, text in {
        "podium/train/step.py": WIDE,
        "podium/plan/step.py": "def f(critic):\n" + "    x = 1\n" * 59,
        "podium/run/resolve.py": "def f(config: Config | None):\n" + "    x = 1\n" * 60,
        "podium/plan/cli.py": "# Reference and teachers",
        "podium/run/cli.py": "preferences = self_taught",
        "podium/tasks/math_answers/correctness.py": "reference = 1",
        "podium/kernels/tpu.py": "def kernel(a, b, c, d, e, f, g, h, i): ...",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(structure_counts, "GOLDEN", tmp_path / "structure.json")
    return tmp_path


def test_counts_are_those_of_a_package_written_by_hand(package) -> None:
    assert count_all(package) == {
        "functions outside config/ and run/ that take Config": {"podium/train/step.py": 1},
        "functions with more than 8 parameters": {"podium/train/step.py": 1},
        "kernels with more than 8 parameters": {"podium/kernels/tpu.py": 1},
        "classes with more than 12 attributes": {"podium/train/step.py": 1},
        "functions over 60 lines": {"podium/run/resolve.py": 1},
        "calls with more than 5 positional arguments": {"podium/train/step.py": 1},
        "files that name a teacher": {"podium/plan/cli.py": 1},
        "files that name a critic": {"podium/plan/step.py": 1},
        "files that name a reward model": {},
        "files that name a reference": {"podium/plan/cli.py": 1},
        "file names in two rooms": {"podium/train/step.py": 1, "podium/plan/step.py": 1},
    }


def test_a_count_that_has_risen_names_the_file_and_is_not_recorded(package, monkeypatch) -> None:
    monkeypatch.setattr(structure_counts, "count_all", lambda: count_all(package))
    assert record() == []
    (package / "podium/run/loop.py").write_text(f"critic = 1{WIDE}")
    problems = record()
    assert "files that name a critic: 1 -> 2, in podium/run/loop.py (0 -> 1)" in problems
    assert "functions with more than 8 parameters: 1 -> 2, in podium/run/loop.py (0 -> 1)" in problems
    assert read_golden()["files that name a critic"] == {"podium/plan/step.py": 1}
    (package / "podium/run/loop.py").unlink()
    (package / "podium/train/step.py").write_text(ast.unparse(ast.parse("x = 1")))
    assert record() == []
    assert totals(read_golden())["functions with more than 8 parameters"] == 0
