"""Which tests `make test` leaves out, how their times are recorded, and which tests a change selects."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.changed_tests import tests_of as selected

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

def burn(seconds):
    import time
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_quick():
    pass

def test_long_ago_slow():
    pass

@pytest.mark.core
def test_slow_and_core():
    pass

@pytest.mark.parametrize("n", [1])
def test_burns(n):
    burn(0.8)

@pytest.mark.parametrize("n", range(4))
def test_cases(n):
    pass

@pytest.mark.parametrize("n", range(3))
def test_heavy(n):
    pass
"""


@pytest.fixture
def project(tmp_path):
    """A folder with this repository's tiers and some tests."""
    (tmp_path / "tiers.py").write_text((ROOT / "tests" / "tiers.py").read_text())
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tiers"]\n')
    (tmp_path / "test_some.py").write_text(TESTS)
    slow = {"long_ago_slow": 9.0, "slow_and_core": 9.0, "cases[0]": 0.6, "cases[1]": 0.2, "cases[2]": 1.6}
    slow |= {"heavy[0]": 3.0, "heavy[1]": 0.2}
    (tmp_path / "durations.json").write_text(json.dumps({f"test_some.py::test_{k}": v for k, v in slow.items()}))
    markers = "[pytest]\npythonpath = .\nmarkers =\n    slow: slow\n    core: core\n"
    (tmp_path / "pytest.ini").write_text(markers)
    return tmp_path


def ran(project: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_slow_tests_are_left_out_unless_they_are_core(project):
    found = ran(project, "-m", "not slow")
    passed = {line.removeprefix("PASSED test_some.py::test_") for line in found.splitlines() if "PASSED" in line}
    assert passed == {"quick", "slow_and_core", "burns[1]", "cases[0]", "cases[3]", "heavy[2]"}, found


def test_further_cases_are_slow_only_beside_their_first(project):
    assert "PASSED test_some.py::test_cases[1]" in ran(project, "-m", "not slow", "test_some.py::test_cases[1]")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_cpu_seconds_are_recorded_by_every_worker(project, workers):
    ran(project, "--record-durations", "-n", workers)
    recorded = json.loads((project / "durations.json").read_text())
    assert list(recorded) == ["test_some.py::test_burns[1]"]
    assert recorded["test_some.py::test_burns[1]"] >= 0.7
    ran(project, "--record-durations", "-k", "quick")
    assert list(json.loads((project / "durations.json").read_text())) == ["test_some.py::test_burns[1]"]


SOURCES = {
    "podium/files.py": "",
    "podium/train/step.py": "def f():\n    from podium import files\n",
    "podium/plan/cli.py": "import podium.train.step",
    "podium/cli.py": "",
    "podium/birds/__init__.py": "found = [load(each) for each in pkgutil.iter_modules(__path__)]",
    "podium/birds/tern.py": "",
    "tests/conftest.py": "import tiers",
    "tests/tiers.py": "",
    "tests/plan/conftest.py": "",
    "tests/plan/machines.py": "from podium.plan import cli",
    "tests/plan/test_plan.py": "import machines",
    "tests/train/test_step.py": "from podium.train.step import f",
    "tests/test_cli.py": "import podium.cli",
    "tests/test_birds.py": "from podium.birds import found",
    "tests/test_docs.py": "",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["podium/files.py"], ["tests/plan/test_plan.py", "tests/train/test_step.py"]),
        (["podium/cli.py"], ["tests/test_cli.py"]),
        (["tests/plan/machines.py"], ["tests/plan/test_plan.py"]),
        (["tests/plan/conftest.py"], ["tests/plan/test_plan.py"]),
        (["tests/test_cli.py", "README.md"], ["tests/test_cli.py", "tests/test_docs.py"]),
        (["podium/birds/tern.py"], ["tests/test_birds.py"]),
        ([], []),
    ],
)
def test_a_change_selects_the_tests_that_reach_it(changed, expected):
    assert selected(changed, SOURCES) == expected


def test_the_environment_of_all_tests_selects_all():
    assert len(selected(["tests/tiers.py"], SOURCES)) == 5
