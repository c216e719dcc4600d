"""Parts of the reward that are functions: what they are given, limits, repetitions, and a judge over HTTP."""

import asyncio
import contextlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import httpx
import pytest

from podium.config.errors import ConfigError
from podium.config.imports import name_of
from podium.config.schema import GradingConfig, TaskConfig
from podium.settings import load_settings
from podium.tasks import functions
from podium.tasks.functions import reward
from podium.tasks.grading import Grader, Submission
from podium.tasks.mixture import TaskPrompt
from podium.tasks.task import Graded, Prompt, Reward

PROMPT = TaskPrompt(
    task=0, prompt=Prompt(id="a/0", question="1 + 1?", answer="2", metadata={"level": 3}), system_prompt=None
)


def group(*texts: str) -> list[Submission]:
    return [(PROMPT, Graded(text=text, num_tokens=len(text))) for text in texts]


def graded(*parts: Callable[..., Any], texts: tuple[str, ...] = ("2", "3")) -> list[Reward]:
    """The rewards of a group by the sum of these functions."""
    weights = {name_of(part): 1.0 for part in parts}
    config = TaskConfig(name="arithmetic", rewards=weights, correct=next(iter(weights)))
    grader = Grader([config], GradingConfig(workers=0), max_new_tokens=64)
    try:
        return grader.grade(group(*texts))
    finally:
        grader.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(functions, "FIRST_PAUSE_S", 0.001)


def row_of(row: dict) -> float:
    return row["level"] + float(row["answer"])


def with_default(completion: str, hint: str = "none") -> float:
    return float(hint == "none" and completion == "2")


def better(completions: list[str], num_tokens: list[int], answer: str) -> list[bool]:
    assert num_tokens == [len(text) for text in completions]
    return [text == answer for text in completions]


def test_a_function_is_given_what_its_parameters_name():
    first, second = graded(row_of, with_default, better)
    assert (first.parts, second.parts) == (
        {"correct": 1.0, "row_of": 5.0, "with_default": 1.0, "better": 1.0},
        {"correct": 1.0, "row_of": 5.0, "with_default": 0.0, "better": 0.0},
    )
    assert (first.total, second.total) == (7.0, 5.0)


def test_what_counts_as_correct_is_held_within_0_and_1():
    (found,) = graded(lambda completion: -3.0, texts=("x",))
    assert found.parts["correct"] == 0.0 and found.total == -3.0


def test_a_call_that_is_too_slow_counts_as_0_and_is_told_once(caplog):
    @reward(timeout_s=0.6)
    def slow(completion: str) -> float:
        time.sleep(20 if completion == "slow" else 0)
        return 1.0

    @reward(timeout_s=0.6)
    async def slower(completion: str) -> float:
        await asyncio.sleep(20 if completion == "slow" else 0)
        return 1.0

    start = time.monotonic()
    rewards = graded(slow, slower, texts=("slow", "quick", "slow"))
    assert time.monotonic() - start < 10
    assert [each.total for each in rewards] == [0.0, 2.0, 0.0]
    assert [each.timed_out for each in rewards] == [True, False, True]
    assert len([line for line in caplog.messages if "took longer than 0.6 s" in line]) == 2


@pytest.mark.parametrize("value", [None, float("nan"), "many", "0.5", b"1", [1.0]])
def test_what_is_no_number_is_a_bug(value):
    with pytest.raises(ValueError, match=r"(?s)reward \S+lambda\S* returned .*a finite number.*prompt a/0"):
        graded(lambda completion: value)


def test_too_few_numbers_for_a_group_are_a_bug():
    with pytest.raises(ValueError, match="returned 1 numbers for 2 completions"):
        graded(lambda completions: [1.0])


def test_calls_run_beside_each_other_up_to_their_limit():
    running, most = 0, 0

    @reward(concurrency=3)
    async def counted(completion: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 1.0

    graded(counted, texts=tuple("abcdefgh"))
    assert most == 3


class Judge(http.server.BaseHTTPRequestHandler):
    """Says how long a text is; each text's first question is answered with an error, and `hang` with nothing."""

    seen: list[str]

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        self.seen.append(text)
        if text == "hang":
            time.sleep(5)
        status = 503 if self.seen.count(text) == 1 else 200
        body = json.dumps({"score": len(text)}).encode()
        with contextlib.suppress(OSError):  # who asked has given up
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[tuple[str, list[str]]]:
    Judge.seen = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", Judge.seen
    server.shutdown()
    server.server_close()


def test_a_judge_over_http_is_asked_again_and_given_up(judge):
    url, seen = judge

    @reward(timeout_s=1.2, retries=1, concurrency=8)
    async def judged(completion: str) -> float:
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            answer = await client.post(url, json={"text": completion})
            return answer.raise_for_status().json()["score"]

    rewards = graded(judged, texts=("good", "better", "hang"))
    assert [each.parts["judged"] for each in rewards] == [4.0, 6.0, 0.0]
    assert [each.timed_out for each in rewards] == [False, False, True]
    assert [seen.count(text) for text in ("good", "better", "hang")] == [2, 2, 2]


def test_a_judge_that_never_answers_well_stops_the_run(judge):
    url, _ = judge

    @reward(retries=0)
    def judged(completion: str) -> float:
        return httpx.post(url, json={"text": completion}, trust_env=False).raise_for_status().json()["score"]

    with pytest.raises(ValueError, match=r"(?s)judged\w* failed.*503"):
        graded(judged)


def test_closing_does_not_wait_for_calls():
    @reward(timeout_s=60)
    def stuck(completion: str) -> float:
        time.sleep(5)
        return 1.0

    name = name_of(stuck)
    config = TaskConfig(name="arithmetic", rewards={name: 1.0}, correct=name)
    grader = Grader([config], GradingConfig(workers=0), max_new_tokens=64)
    grading, start = grader.submit(group("a")), time.monotonic()
    grader.close()
    with pytest.raises(CancelledError):
        grading.result()
    assert time.monotonic() - start < 2


RUN = ["model=nobody/nothing"]


def test_a_config_names_functions_by_import_path():
    task = "tasks=[{name: arithmetic, rewards: {correct: 1.0, test_reward_functions:row_of: 0.5}}]"
    assert load_settings([], [*RUN, task], {}).config.tasks[0].rewards["test_reward_functions:row_of"] == 0.5


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("rewards: {test_reward_functions:row_off: 1.0}", "has no 'row_off'; did you mean 'row_of'"),
        ("rewards: {no_module:f: 1.0}", "no module 'no_module' here"),
        ("rewards: {'session:gone': 1.0}", "handed over by the Python session that began the run"),
        ("rewards: {test_reward_functions:RUN: 1.0}", "not a function"),
        ("correct: tags", "'tags' is not a part of it; set correct"),
        (
            "rewards: {correct: 1.0, test_reward_functions:row_of: 1.0}, correct: test_reward_functions:row_of",
            "does not grade",
        ),
        ("rewards: {test_reward_functions:row_of: 1.0, functions:row_of: 1.0}", "reported as 'row_of'"),
    ],
)
def test_a_wrong_name_is_an_error_of_the_config(task, message):
    with pytest.raises(ConfigError, match=message):
        load_settings([], [*RUN, f"tasks=[{{name: arithmetic, {task}}}]"], {})


def test_how_a_function_is_called_has_limits():
    with pytest.raises(ValueError, match="retries 0 or more"):
        reward(retries=-1)
