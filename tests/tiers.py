"""Which tests `make test` leaves out because they are slow, and the recording of how long each takes.

`make test` is to take 600 CPU seconds. Most of all tests' time went into a few hundred of 9,000 tests, above all into
further cases of a test whose first case has compiled and run the same code. So a test is slow if `tests/durations.json`
has more than SLOW_S CPU seconds for it, or if it is a further case of a function whose earlier cases leave nothing of
CASES_S; unless it is in CORE or marked `core`: the test of a capability that no quicker one covers.
`python -m tools.test_durations` records the file.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parent / "durations.json"
SLOW_S = 0.6
CASES_S = 0.3
"""CPU seconds of all cases of a test function; its first case may take SLOW_S alone."""
CORE = (
    "tests/certify/test_planted_bugs.py::test_a_check_without_a_model_is_red",
    "tests/certify/test_planted_bugs.py::test_a_planted_bug_is_named",
    "tests/models/test_attention.py::test_values_and_gradients_are_the_references[gpu_kernel-(6, 2, 16)",
    "tests/models/test_blocks.py::test_decoding_a_token_at_a_time_gives_what_rows_give",
    "tests/models/test_lora.py::test_gradients_of_adapters_are_those_of_the_dense_form",
    "tests/models/test_quantised.py::test_codes_apart_and_merged_give_the_logits_of_their_values[int8-dp:1",
    "tests/models/test_recurrence.py::test_outputs_and_gradients_are_those_of_the_rule[8.0",
    "tests/plan/test_planner.py::test_a_fast_plan_takes_a_few_seconds_and_imports_no_jax[configs/demo",
    "tests/pods/test_pod_command.py::test_one_command_each_from_renting_to_giving_back",
    "tests/rollout/test_layouts.py::test_every_layout_gives_the_tokens_and_log_probabilities_of_one_device[hybrid",
    "tests/rollout/test_layouts.py::test_every_layout_gives_the_tokens_and_log_probabilities_of_one_device[tensor",
    "tests/rollout/test_engine.py::test_every_request_gets_its_completions_in_order",
    "tests/rollout/test_kinds.py::test_completions_continue_where_an_earlier_step_left_them",
    "tests/rollout/test_long_sequences.py",
    "tests/rollout/test_verbs.py::test_preemption_loses_nothing",
    "tests/test_goldens.py",
    "tests/train/test_carry_conversations.py::test_what_is_in_flight_goes_on_bit_for_bit_in_another_process",
    "tests/train/test_critic.py::test_a_run_of_ppo_resumes_bit_for_bit_with_its_critic",
    "tests/train/test_denominators.py",
    "tests/train/test_episodes.py::test_credit_of_turns_is_the_hand_computed_advantage_of_each_token",
    "tests/train/test_hostile_conversations.py::test_of_300_conversations",
    "tests/train/test_kill.py",
    "tests/train/test_loop.py",
    "tests/train/test_lora_run.py::test_a_checkpoint_has_adapters_and_not_the_model",
    "tests/train/test_lora_run.py::test_a_run_that_was_stopped_goes_on_bit_for_bit",
    "tests/train/test_moving_reference.py::test_it_moves_after_every_so_many_steps_and_the_loss_compares_with_it",
    "tests/train/test_resume.py::test_a_run_of_two_steps_goes_on_to_four_as_if_it_had_never_stopped",
    "tests/train/test_reward_models.py::test_a_run_learns_from_scores_and_resumes_bit_for_bit",
    "tests/train/test_sft.py::test_it_learns_the_data_and_a_run_begins_from_it",
    "tests/train/test_step.py::test_gradients_do_not_depend_on_devices_and_packing",
    "tests/train/test_teacher.py::test_a_distilled_run_comes_closer_to_its_teacher",
    "tests/train/test_trainer.py::test_the_correction_weighs_tokens_by_how_much_likelier_the_trainer_finds_them",
)
"""Beginnings of the names of tests that `make test` runs however long they take."""
KEPT_S = 0.1
"""Shorter tests are not recorded."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write CPU seconds of the tests that ran")


@pytest.hookimpl(tryfirst=True)  # before -m leaves tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    spent: Counter[str] = Counter()
    for item in items:
        if item.nodeid.startswith(CORE) or item.get_closest_marker("core") is not None:
            continue
        function, seconds = item.nodeid.partition("[")[0], recorded.get(item.nodeid, 0.0)
        if seconds > SLOW_S or (seconds and spent[function] and spent[function] + seconds > CASES_S):
            item.add_marker(pytest.mark.slow)
        spent[function] += seconds  # a slow case too: what it compiles, the next one would compile without it


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
                self.found[report.nodeid] = round(float(str(value)), 2)

    def pytest_sessionfinish(self) -> None:
        before = json.loads(FILE.read_text(encoding="utf-8"))
        after = {name: s for name, s in {**before, **self.found}.items() if s > KEPT_S}
        FILE.write_text(json.dumps(after, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())
