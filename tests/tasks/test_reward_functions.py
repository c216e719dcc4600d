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


def group(*texts: str, prompt: TaskPrompt = PROMPT) -> list[Submission]:
    return [(prompt, Graded(text=text, tokens=tuple(range(len(text))))) for text in texts]


def graded(
    *parts: Callable[..., Any], texts: tuple[str, ...] = ("2", "3"), prompt: TaskPrompt = PROMPT
) -> list[Reward]:
    """The rewards of a group by the sum of these functions."""
    weights = {name_of(part): 1.0 for part in parts}
    config = TaskConfig(name="arithmetic", rewards=weights, correct=next(iter(weights)))
    grader = Grader([config], GradingConfig(workers=0), max_new_tokens=64)
    try:
        return grader.grade(group(*texts, prompt=prompt))
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
    ended = threading.Event()

    @reward(timeout_s=1.5)
    def slow(completion: str) -> float:
        if completion == "slow":
            ended.wait(60)
        return 1.0

    @reward(timeout_s=1.5)
    async def slower(completion: str) -> float:
        await asyncio.sleep(60 if completion == "slow" else 0)
        return 1.0

    rewards = graded(slow, slower, texts=("slow", "quick", "slow"))
    ended.set()
    assert [each.total for each in rewards] == [0.0, 2.0, 0.0]
    assert [each.timed_out for each in rewards] == [True, False, True]
    assert len([line for line in caplog.messages if "took longer than 1.5 s" in line]) == 2


@pytest.mark.parametrize("value", [None, float("nan"), "many", "0.5", b"1", [1.0]])
def test_what_is_no_number_is_a_bug(value):
    with pytest.raises(ValueError, match=r"(?s)reward \S+lambda\S* returned .*a finite number.*prompt a/0"):
        graded(lambda completion: value)


@pytest.mark.parametrize("value", [None, 1.0, "01", {"a": 1.0, "b": 2.0}])
def test_a_group_needs_a_list(value):
    with pytest.raises(ValueError, match=r"(?s)returned .* for 2 completions; return a list.*prompt a/0"):
        graded(lambda completions: value)


# Functions with TRL's signature: each does what one of the examples in TRL's documentation does.

CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]


def asked(*, conversation: bool = False, **columns: object) -> TaskPrompt:
    """A prompt as a data set with a `prompt` column gives it: text, or a list of messages."""
    row = {"prompt": CONVERSATION if conversation else "1 + 1?", **columns}
    messages = CONVERSATION if conversation else None
    prompt = Prompt(id="a/0", question="1 + 1?", answer="", metadata=row, messages=messages)
    return TaskPrompt(task=0, prompt=prompt, system_prompt=None)


def by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def by_characters(completions, **kwargs):
    return [float(len(text)) for text in completions]


def in_tags(completions, **kwargs):
    return [float(messages[0]["content"].startswith("<think>")) for messages in completions]


def boxed_truth(completions, ground_truth, **kwargs):
    return [float(text == rf"\boxed{{{truth}}}") for text, truth in zip(completions, ground_truth, strict=True)]


def of_mathematics(prompts, completions, task, **kwargs):
    rows = zip(prompts, completions, task, strict=True)
    return [(1.0 if prompt == "1 + 1?" and text == "2" else -1.0) if t == "math" else None for prompt, text, t in rows]


def of_code(prompts, completions, task, **kwargs):
    return [0.5 if each == "code" else None for each in task]


async def not_empty(prompts, completions, **kwargs):
    await asyncio.sleep(0.001)
    return [1.0 if text else 0.0 for text in completions]


def logged(completions, ground_truth, log_extra=None, log_metric=None, trainer_state=None, **kwargs):
    assert log_extra is None and log_metric is None and trainer_state is None
    return [float(truth in text) for text, truth in zip(completions, ground_truth, strict=True)]


@pytest.mark.parametrize(
    ("function", "prompt", "texts", "values"),
    [
        (by_tokens, asked(), ("four", "tw"), [4.0, 2.0]),
        (by_characters, asked(), ("four", "tw"), [4.0, 2.0]),
        (in_tags, asked(conversation=True), ("<think>a</think>", "b"), [1.0, 0.0]),
        (boxed_truth, asked(ground_truth="2"), (r"\boxed{2}", r"\boxed{6}"), [1.0, 0.0]),
        (not_empty, asked(), ("", "x"), [0.0, 1.0]),
        (logged, asked(ground_truth="2"), ("it is 2", "3"), [1.0, 0.0]),
    ],
)
def test_functions_written_for_trl_run_unchanged(function, prompt, texts, values):
    assert [each.total for each in graded(function, prompt=prompt, texts=texts)] == values


def test_a_function_that_does_not_apply_is_left_out_of_the_reward(caplog):
    found = {
        task: graded(of_mathematics, of_code, prompt=asked(task=task), texts=("2", "3"))
        for task in ("math", "code", "poetry")
    }
    assert [each.total for each in found["math"]] == [1.0, -1.0]
    assert found["math"][1].parts == {"correct": 0.0, "of_mathematics": -1.0}
    assert found["code"][0].parts == {"correct": 0.5, "of_code": 0.5} and found["code"][0].total == 0.5
    assert [each.parts for each in found["poetry"]] == [{"correct": 0.0}] * 2
    assert all(each.failed for each in found["poetry"])  # nothing grades them: they count in no mean
    (warning,) = (line for line in caplog.messages if "no reward applies to prompt a/0" in line)
    assert "each function returned None" in warning


def test_every_argument_of_trl_is_a_list_of_the_group():
    given: dict[str, Any] = {}

    def hears_all(**kwargs):
        given.update(kwargs)
        return [0.0, 0.0]

    graded(hears_all, prompt=asked(conversation=True, level=3), texts=("ab", "c"))
    assert given["prompts"] == [CONVERSATION] * 2 and given["completion_ids"] == [[0, 1], [0]]
    assert given["completions"] == [[{"role": "assistant", "content": text}] for text in ("ab", "c")]
    assert given["level"] == [3, 3] and given["num_tokens"] == [2, 1]
    assert "prompt" not in given


def test_names_that_only_trls_trainer_knows_need_a_default():
    with pytest.raises(
        ValueError, match="asks for 'trainer_state', which exists only in TRL; give the parameter a default"
    ):
        graded(lambda completions, trainer_state, **kwargs: [0.0, 0.0])
    with pytest.raises(ValueError, match=r"both completion and TRL's prompts, completion_ids or \*\*kwargs; keep one"):
        graded(lambda completion, **kwargs: 0.0)


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
    ended = threading.Event()

    @reward(timeout_s=600)
    def stuck(completion: str) -> float:
        ended.wait(600)
        return 1.0

    name = name_of(stuck)
    config = TaskConfig(name="arithmetic", rewards={name: 1.0}, correct=name)
    grader = Grader([config], GradingConfig(workers=0), max_new_tokens=64)
    grading = grader.submit(group("a"))
    grader.close()
    with pytest.raises(CancelledError):
        grading.result()
    ended.set()


RUN = ["model=nobody/nothing"]


def test_a_config_names_functions_by_import_path():
    task = "tasks=[{name: arithmetic, rewards: {correct: 1.0, test_reward_functions:row_of: 0.5}}]"
    assert load_settings([], [*RUN, task], {}).config.tasks[0].rewards["test_reward_functions:row_of"] == 0.5


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("rewards: {test_reward_functions:row_off: 1.0}", "has no 'row_off'; did you mean 'row_of'"),
        ("rewards: {no_module:f: 1.0}", "no module 'no_module' found"),
        ("rewards: {'session:gone': 1.0}", "passed by the Python session that started the run"),
        ("rewards: {test_reward_functions:RUN: 1.0}", "not a function"),
        ("correct: tags", "'tags' is not a part of the reward; set correct"),
        ("correct: cosine_length, rewards: {cosine_length: 1.0}", "cosine_length depends on correctness"),
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
