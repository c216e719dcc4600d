"""Environments in the shape of TRL's examples run without a changed line, with the reward functions beside them."""

import contextlib
from typing import Any

import pytest
import trl_shapes
from scripted import ROOMY
from tiny_runs import make_config
from trl_shapes import CatchEnv, EchoToolEnv, WordleEnv

from podium.config.schema import EnvironmentsConfig, TaskConfig
from podium.observe.records import read_metrics, read_samples
from podium.observe.run_dir import METRICS, SAMPLES
from podium.sampling.conversations.dialogue import Dialogue
from podium.tasks.conversation import ToolCall, Turn
from podium.tasks.conversations.conversing import Answered
from podium.tasks.conversations.environment_forms import conversing
from podium.tasks.conversations.environments import Environments
from podium.tasks.conversations.tool_calls import Calls
from podium.tasks.functions import RewardFunction
from podium.tasks.task import Graded, Prompt
from podium.train.loop import train

CALLS = {
    "EchoToolEnv": [("echo", {"message": "Hello"}), ("echo", {"message": "Hello World!"})],
    "WordleEnv": [("guess", {"guess": "up"}), ("guess", {"guess": "a longer one"}), ("guess", {"guess": "on"})],
    "CatchEnv": [("move", {"direction": "up"}), ("move", {"direction": "right"}), ("stay", {}), ("stay", {})],
}
REPLIES = {
    "EchoToolEnv": ["Hello", "Hello World!"],
    "WordleEnv": ["up: no. 1 guesses.\n", "You attempted an invalid move.\n", "on: no. 2 guesses.\n"],
    "CatchEnv": [
        "Error: Invalid direction 'up': must be 'left' or 'right'.",
        "Ball: row 2 of 3, column 2; paddle: column 2.",
        "Ball: row 3 of 3, column 2; paddle: column 2.",
        "Error: Episode is done.",
    ],
}
FIRST = {
    "EchoToolEnv": None,
    "WordleEnv": "Guess a word of two letters.\n",
    "CatchEnv": "Ball: row 1 of 3, column 2; paddle: column 1.",
}
REWARDS = {"EchoToolEnv": ("reward_func", 1.2), "WordleEnv": ("reward_func", 0.5), "CatchEnv": ("reward_from_env", 1.0)}


def task(name: str, function: str) -> TaskConfig:
    part = f"trl_shapes:{function}"
    return TaskConfig.model_validate({"environment": f"trl_shapes:{name}", "rewards": {part: 1.0}, "correct": part})


@pytest.mark.parametrize("workers", [0, 1])
def test_classes_are_played_and_paid_by_the_functions_that_look_at_them(workers):
    """All three at once; in their own process they come back without their clients."""
    names = list(CALLS)
    prompt = Prompt(id="", question="", answer="", metadata={"prompt": "Play.", "level": 3})
    tasks = [task(name, REWARDS[name][0]) for name in names]
    with contextlib.closing(Environments(tasks, EnvironmentsConfig(workers=workers))) as environments:

        def answer() -> Answered:
            answered = environments.next(60.0)
            assert answered is not None and answered.kind != "failed", answered
            return answered

        for number, name in enumerate(names):
            environments.open(number, number, prompt, 7)
            assert answer().value == FIRST[name]
            for turn, (tool, arguments) in enumerate(CALLS[name]):
                call = ToolCall(name=tool, arguments=arguments)
                environments.say(number, Turn(text="", number=turn, calls=(call,)))
                (message,) = answer().value.messages  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
                assert (message["role"], message["content"]) == ("tool", REPLIES[name][turn])
        kinds = (EchoToolEnv, WordleEnv, CatchEnv)
        for number, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            environments.grade(number)
            ended = answer()
            assert ended.value is None and type(ended.environment) is kind
            assert (hasattr(ended.environment, "client") or hasattr(ended.environment, "env")) == (workers == 0)
            function = RewardFunction(f"trl_shapes:{REWARDS[name][0]}")
            (arguments,) = function.arguments(prompt, [Graded(text="", tokens=(), environment=ended.environment)] * 2)
            assert function.call(**arguments) == [pytest.approx(REWARDS[name][1])] * 2
            if isinstance(ended.environment, CatchEnv):
                assert ended.environment.caught  # a property of its class
            elif isinstance(ended.environment, EchoToolEnv):
                assert ended.environment.columns == ["level", "prompt"]  # of the row, and nothing else


def test_tools_are_the_public_methods_as_trl_finds_them():
    found = {}
    for name in CALLS:
        held = conversing(task(name, "reward_func"))
        assert held is not None and not held.rewards
        found[name] = [tool["function"]["name"] for tool in held.tools]
    assert found == {"EchoToolEnv": ["echo"], "WordleEnv": ["guess"], "CatchEnv": ["move", "stay"]}


def local_class() -> type:
    class Local(EchoToolEnv):
        @property
        def twice(self) -> float:
            return 2 * self.reward

        @property
        def broken(self) -> float:
            raise RuntimeError("no connection")

    return Local


def make_local() -> object:
    return local_class()()


def test_an_environment_of_a_class_that_no_other_process_knows_arrives_with_its_attributes():
    config = TaskConfig.model_validate(
        {"environment": "test_trl_environments:make_local", "rewards": {"trl_shapes:reward_func": 1.0}}
    )
    with contextlib.closing(Environments([config], EnvironmentsConfig(workers=1))) as environments:
        environments.open(0, 0, Prompt(id="", question="", answer=""), 1)
        environments.next(60.0)
        call = ToolCall(name="echo", arguments={"message": "four"})
        environments.say(0, Turn(text="", number=0, calls=(call,)))
        environments.next(60.0)
        environments.grade(0)
        ended = environments.next(60.0)
    left: Any = ended and ended.environment
    assert (left.reward, left.twice) == (pytest.approx(0.4), pytest.approx(0.8)) and not hasattr(left, "broken")


def test_an_environment_is_not_sent_where_no_function_asks_for_it():
    config = TaskConfig.model_validate({"environment": "trl_shapes:EchoToolEnv", "path": "rows.jsonl"})
    with contextlib.closing(Environments([config], EnvironmentsConfig(workers=0))) as environments:
        environments.open(0, 0, Prompt(id="", question="", answer=""), 1)
        environments.next(60.0)
        environments.grade(0)
        ended = environments.next(60.0)
    assert ended is not None and ended.kind == "graded" and ended.environment is None


def one_environment(environment) -> float:
    return environment.reward


def test_functions_ask_for_environments_by_name():
    alone = RewardFunction("test_trl_environments:one_environment")
    echo = EchoToolEnv()
    echo.reward = 0.5
    group = [Graded(text="", tokens=(), environment=echo)] * 2
    asked = Prompt(id="p", question="", answer="")
    assert [alone.call(**each) for each in alone.arguments(asked, group)] == [0.5, 0.5]
    none = RewardFunction("trl_shapes:only_wordle")
    assert none.call(**none.arguments(asked, group)[0]) == [None, None]
    alone.check(asked, environment=True)
    for function in (alone, RewardFunction("trl_shapes:reward_func")):
        with pytest.raises(ValueError, match="its task has no `environment`; set one"):
            function.check(asked)


def read_by_length(self: Dialogue, text: str, tokens: list[int], **context: Any) -> Calls:
    """Reads a call of a tool into each answer, where the real reader wants a call's text."""
    functions: list[Any] = [tool["function"] for tool in self._tools]
    function = functions[len(text) % len(functions)]
    arguments = dict.fromkeys(function["parameters"]["properties"], "right" if function["name"] == "move" else text)
    return Calls(calls=(ToolCall(name=function["name"], arguments=arguments),), said="")


def expected(name: str, replies: list[str]) -> float:
    """What a conversation is paid, by the tool's replies that were heard."""
    match name:
        case "echo":
            return 0.1 * len(replies[-1]) if replies else 0.0
        case "guess":
            said = [reply for reply in replies if not reply.startswith("Error")]
            if not said or "invalid" in said[-1]:
                return 0.0
            return 0.25 * sum("invalid" not in reply for reply in said)
        case _:
            return float(sum("row 3 of 3" in reply and "paddle: column 2" in reply for reply in replies))


def test_a_run_trains_on_the_three_of_them(roomy_model, template, tmp_path, one_device, monkeypatch):
    monkeypatch.setattr(Dialogue, "read", read_by_length)
    parts = {name: f"trl_shapes:{REWARDS[name][0]}" for name in CALLS}
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "What is {n} + 1 ?"}}\n' for n in range(1, 9)))
    tasks = [
        {
            "environment": f"trl_shapes:{name}",
            "rewards": {part: 1.0},
            "correct": part,
            "path": str(tmp_path / "rows.jsonl"),
        }
        for name, part in parts.items()
    ]
    config = make_config(
        roomy_model,
        tmp_path,
        chat_template=template,
        steps=1,
        prompts_per_step=6,
        tasks=tasks,
        environments={"workers": 1, "retries": 0},
        rollout={**ROOMY, "limits": {"max_turns": 4}},
        eval={"at_start": False, "at_end": False},
        metrics={"samples_every": 1},
    )
    assert train(config, plain=True) == 0
    completions = [each for line in read_samples(tmp_path / "run" / SAMPLES) for each in line["completions"]]
    assert len(completions) == 24
    seen = set()
    for each in completions:
        replies = [message for message in each["messages"] if message["role"] == "tool"]
        name = replies[0]["name"] if replies else None
        texts = [str(message["content"]) for message in replies]
        paid = expected({"stay": "move"}.get(name or "", name or ""), texts)
        assert each["reward"] == pytest.approx(paid), each
        seen.add(name)
    assert {"echo", "guess"} <= seen and seen & {"move", "stay"}
    (step,) = (line for line in read_metrics(tmp_path / "run" / METRICS) if "train-other/loss" in line)
    assert step["env/failed"] == 0 and step["tools/echo/calls"] > 0
    assert trl_shapes.EchoToolEnv  # imported here and in the other process
