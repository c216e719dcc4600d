"""Reward functions that raise what ends threads and loops, block, or never give up: the run goes on or says why."""

import asyncio
import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import wait_for
from test_reward_functions import graded, group

from podium.config.imports import name_of
from podium.config.schema import GradingConfig, TaskConfig
from podium.tasks import functions
from podium.tasks.functions import FunctionError, RewardFunction, reward
from podium.tasks.grading import Grader
from podium.tasks.grading_worker import Item, grade_item
from podium.tasks.task import Prompt

RAISED = [
    SystemExit(0),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    TimeoutError(),
    StopIteration(),
    BaseException("own"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(functions, "STUCK_S", 0.2)


def plain(error: BaseException) -> Callable[..., Any]:
    def raising(completion: str) -> float:
        raise error

    return raising


def coroutine(error: BaseException) -> Callable[..., Any]:
    async def raising(completion: str) -> float:
        await asyncio.sleep(0)
        raise error

    return raising


def in_a_task(error: BaseException) -> Callable[..., Any]:
    async def child() -> float:
        raise error

    async def raising(completion: str) -> float:
        return await asyncio.create_task(child())

    return raising


def lazy(error: BaseException) -> Callable[..., Any]:
    def raising(completions: list[str]) -> Iterator[float]:
        for _ in completions:
            raise error
            yield 0.0

    return raising


def in_a_number(error: BaseException) -> Callable[..., Any]:
    class Number:
        def __float__(self) -> float:
            raise error

    def raising(completion: str) -> Any:
        return Number()

    return raising


@pytest.mark.parametrize("make", [plain, coroutine, in_a_task, lazy, in_a_number])
@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_a_function_raises_stops_the_run_with_its_traceback(error, make):
    with pytest.raises(FunctionError) as raised:
        graded(make(error))
    message = str(raised.value)
    assert "took longer" not in message and "then continue the run" in message
    assert type(error).__name__ in message and "raise error" in message


def test_other_functions_are_still_called_after_one_has_ended_its_loop():
    async def leaving(completion: str) -> float:
        await asyncio.gather(asyncio.create_task(coroutine(SystemExit(3))(completion)))
        return 1.0

    async def well(completion: str) -> float:
        await asyncio.sleep(0.01)
        return 1.0

    names = [name_of(leaving), name_of(well)]
    tasks = [TaskConfig(name="arithmetic", rewards={name: 1.0}, correct=name) for name in names]
    grader = Grader(tasks, GradingConfig(workers=0), max_new_tokens=64)
    try:
        with pytest.raises(FunctionError, match="SystemExit: 3"):
            grader.grade(group("a"))
        ((prompt, answer),) = group("a")
        (found,) = grader.grade([(dataclasses.replace(prompt, task=1), answer)])
    finally:
        grader.close()
    assert found.total == 1.0


def test_a_timeout_that_a_function_raises_is_tried_again_and_named():
    calls: list[str] = []

    @reward(retries=2)
    async def refused(completion: str) -> float:
        calls.append(completion)
        raise TimeoutError("the judge is down")

    with pytest.raises(FunctionError, match="TimeoutError: the judge is down"):
        graded(refused, texts=("a",))
    assert len(calls) == 3


def test_an_async_function_that_blocks_its_loop_is_too_slow_and_others_go_on(caplog):
    """And its end is nobody's error, although the run may be over by then."""
    goes_on, idle = threading.Event(), threading.Event()

    @reward(timeout_s=0.5)
    async def blocking(completion: str) -> float:
        if completion == "block":
            goes_on.wait(60)
            asyncio.get_running_loop().call_later(0.1, idle.set)
        return 1.0

    async def well(completion: str) -> float:
        await asyncio.sleep(0.001)
        return 2.0

    name, other = name_of(blocking), name_of(well)
    tasks = [TaskConfig(name="arithmetic", rewards={each: 1.0}, correct=each) for each in (name, other)]
    grader = Grader(tasks, GradingConfig(workers=0), max_new_tokens=64)
    try:
        assert grader.grade(group("block"))[0].timed_out
        ((prompt, answer),) = group("a")
        (found,) = grader.grade([(dataclasses.replace(prompt, task=1), answer)])
    finally:
        grader.close()
    assert (found.total, found.timed_out) == (2.0, False)
    wait_for(lambda: not any(thread.name == "rewards" for thread in threading.enumerate()))
    goes_on.set()
    assert idle.wait(60)
    assert not [each for each in caplog.records if each.name in ("asyncio", "concurrent.futures")]


def test_an_async_function_that_does_not_let_itself_be_cancelled_is_too_slow():
    @reward(timeout_s=0.3)
    async def stubborn(completion: str) -> float:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    assert [each.timed_out for each in graded(stubborn, texts=("a",))] == [True]


def cancel_all() -> Callable[..., Any]:
    async def cancelling(completion: str) -> float:
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(0)
        return 1.0

    return cancelling


async def stop_loop(completion: str) -> float:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    return 1.0


def endless(completions: list[str]) -> Iterator[float]:
    while True:
        yield 1.0


def quoting(completion: str) -> float:
    raise ValueError("x" * 3_000_000 + "the end")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (cancel_all(), "all_tasks"),
        (endless, "returned more than 2 numbers for 2 completions"),
        (quoting, "the end"),
        (lambda completion: 10**400, "a reward is a finite number"),
        (lambda completion: 1e39, "returned 1e.39; a reward is a finite number, within float32"),
        (lambda completion: float("nan"), "returned nan; a reward is a finite number"),
    ],
)
def test_what_has_no_end_or_no_message_is_a_short_clear_error(function, said):
    with pytest.raises(FunctionError, match=said) as raised:
        graded(function)
    assert len(str(raised.value)) < 30_000


def test_a_function_that_stops_the_loop_stops_it_for_nobody():
    for _ in range(2):
        assert [each.total for each in graded(stop_loop)] == [1.0, 1.0]


def takes_the_first(tests: list[Any], row: dict[str, Any]) -> float:
    tests[0]["asked"].append("more")
    row["answer"] = "changed"
    return float(len(tests.pop()["asked"]))


def takes_the_first_of_each(prompts, completions, tests, **kwargs) -> list[float]:
    prompts[0][0]["content"] = "changed"
    return [takes_the_first(each, {"tests": []}) for each in tests]


@pytest.mark.parametrize("function", [takes_the_first, takes_the_first_of_each])
def test_what_a_function_does_to_its_row_no_other_call_sees(function):
    asked = {"role": "user", "content": "why"}
    prompt = Prompt(id="p", question="why", answer="", metadata={"tests": [{"asked": ["a"]}]}, messages=[asked])
    part = RewardFunction(name_of(function))
    answers = [answer for _, answer in group("a", "b")]
    for _ in range(2):
        found = [part.call(**arguments) for arguments in part.arguments(prompt, answers)]
        assert found in ([2.0, 2.0], [[2.0, 2.0]])
    assert prompt.metadata == {"tests": [{"asked": ["a"]}]} and prompt.messages == [{"role": "user", "content": "why"}]


class Unspeakable:
    def __repr__(self) -> str:
        raise SystemExit(1)


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (np.float32(0.5), "graded", ""),
        (np.bool_(True), "graded", ""),
        (Fraction(1, 2), "graded", ""),
        (10**400, "bug", "must return a number from 0 to 1"),
        ("1", "bug", "returned '1'"),
        (np.ones(2), "bug", "must return a number from 0 to 1"),
        (Unspeakable(), "bug", "SystemExit: 1"),
    ],
)
def test_a_grade_is_any_number_from_0_to_1_and_nothing_else_ends_its_process(value, kind, said):
    class Returns:
        def grade(self, prompt: Prompt, completion: str) -> Any:
            return value

    outcome = grade_item(Returns(), Item(0, Prompt(id="p", question="", answer=""), ""))  # pyright: ignore
    assert outcome.kind == kind and said in outcome.message
    if kind == "graded":
        assert outcome.correct == float(value)


def leaves(completion: str) -> float:
    os.chdir(FOLDERS[0])
    return 1.0


async def leaves_later(completion: str) -> float:
    await asyncio.sleep(0)
    return leaves(completion)


def leaves_and_deletes(completion: str) -> float:
    os.mkdir(f"{FOLDERS[0]}/deleted")
    os.chdir(f"{FOLDERS[0]}/deleted")
    os.rmdir(f"{FOLDERS[0]}/deleted")
    return 1.0


def visits(completion: str) -> float:
    with contextlib.chdir(FOLDERS[0]):
        return 1.0


FOLDERS: list[Path] = []


@pytest.mark.parametrize("function", [leaves, leaves_later, leaves_and_deletes])
def test_a_function_that_leaves_the_working_directory_is_named_and_the_run_stays(
    function, tmp_path, monkeypatch, caplog
):
    """Its files would be written elsewhere, or nowhere."""
    monkeypatch.setattr("test_hostile_functions.FOLDERS", [tmp_path])
    home = os.getcwd()
    assert [each.total for each in graded(function, texts=("2",))] == [1.0]
    assert os.getcwd() == home
    (warned,) = caplog.messages
    assert warned.startswith(
        f"reward test_hostile_functions:{function.__name__}, or one that ran at the same time, left"
    )
    assert f"changed back to {home}, " in warned


def test_functions_that_visit_a_folder_on_several_threads_keep_their_values(tmp_path, monkeypatch):
    """`contextlib.chdir` on several threads may end in the folder that another one visits."""
    monkeypatch.setattr("test_hostile_functions.FOLDERS", [tmp_path])
    home = os.getcwd()
    assert [each.total for each in graded(visits, texts=("2",) * 16)] == [1.0] * 16
    assert os.getcwd() == home
