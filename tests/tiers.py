"""Which tests `make test` leaves out because they are slow, and the recording of how long each takes.

A test is slow if `tests/durations.json` has more than SLOW_S CPU seconds for it and it is neither in CORE nor marked
`core`: the test of a capability that no quicker one covers. `python -m tools.test_durations` records the file.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parent / "durations.json"
SLOW_S = 2.0
CORE = (
    "tests/certify/test_planted_bugs.py",
    "tests/plan/test_planner.py::test_planned_memory_is_that_of_the_programs_that_a_trainer_compiles",
    "tests/pods/test_pod_command.py::test_one_command_each_from_renting_to_giving_back",
    "tests/rollout/test_layouts.py::test_every_layout_gives_the_tokens_and_log_probabilities_of_one_device",
    "tests/rollout/test_long_sequences.py",
    "tests/test_docs.py::test_a_python_block_runs[README.md",
    "tests/test_goldens.py",
    "tests/train/test_carry_conversations.py::test_what_is_in_flight_goes_on_bit_for_bit_in_another_process",
    "tests/train/test_critic.py::test_a_run_of_ppo_resumes_bit_for_bit_with_its_critic",
    "tests/train/test_hostile_conversations.py::test_of_300_conversations",
    "tests/train/test_kill.py",
    "tests/train/test_lora_run.py",
    "tests/train/test_reward_models.py",
    "tests/train/test_teacher.py::test_a_distilled_run_comes_closer_to_its_teacher",
)
"""Beginnings of the names of tests that `make test` runs however long they take."""
KEPT_S = 1.0
"""Shorter tests are not recorded."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write CPU seconds of the tests that ran")


@pytest.hookimpl(tryfirst=True)  # before -m leaves tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    for item in items:
        core = item.nodeid.startswith(CORE) or item.get_closest_marker("core") is not None
        if recorded.get(item.nodeid, 0.0) > SLOW_S and not core:
            item.add_marker(pytest.mark.slow)


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[STARTED] = cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "teardown" and STARTED in item.stash:
        report.user_properties.append(("cpu_s", cpu_s() - item.stash[STARTED]))
    return report


STARTED = pytest.StashKey[float]()


class Recorder:
    """Collects the durations in the process that gets all reports, and writes them at its end."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cpu_s" and report.when == "teardown":
                self.found[report.nodeid] = round(float(str(value)), 1)

    def pytest_sessionfinish(self) -> None:
        before = json.loads(FILE.read_text(encoding="utf-8"))
        after = {name: s for name, s in {**before, **self.found}.items() if s > KEPT_S}
        FILE.write_text(json.dumps(after, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())
