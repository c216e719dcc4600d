"""The examples of docs/environments.md do what the page says; tests/test_docs.py runs each as it stands, for a step."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import ROOMY
from shown_commands import ROOT, fenced
from tiny_runs import make_config

import podium
from podium.config.imports import name_of
from podium.config.schema import TaskConfig
from podium.observe.records import read_samples
from podium.observe.run_dir import SAMPLES
from podium.settings import load_settings
from podium.tasks.conversation import ToolCall
from podium.tasks.conversations.environment_forms import conversing
from podium.tasks.conversations.tools import run_call
from podium.tasks.functions import RewardFunction
from podium.tasks.task import Graded, Prompt
from podium.tasks.try_task import play
from podium.train.loop import train

PAGE = ROOT / "docs" / "environments.md"
MODULES = {"mytools": "def population", "mygames": "class Guess"}
"""The reader's modules that YAML names, and the example that each holds."""


def example(mark: str) -> str:
    """The code of the example with this definition, without the run that it starts."""
    (code,) = (text for text in fenced(PAGE, "python") if mark in text)
    return "".join(line for line in code.splitlines(keepends=True) if not line.startswith("podium.grpo("))


def defined(mark: str) -> Any:
    """What an example defines."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example(mark), "example", "exec"), names)
    return SimpleNamespace(**names)


def test_each_of_the_three_ways_fits_in_fifteen_lines():
    for mark in ("def population", "class Guess", "class Doubt"):
        (code,) = (text for text in fenced(PAGE, "python") if mark in text)
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= 15, (mark, len(lines))


def played(environment: object, answers: Sequence[str], **options: Any) -> tuple[float, list[str]]:
    lines: list[str] = []
    return play(name_of(environment), answers, lines.append, **options), lines


def test_the_function_is_called_and_its_mistakes_are_told():
    population = defined("def population").population
    call = ToolCall(name="population", arguments={"city": "Paris"})
    assert run_call({"population": population}, call, lambda value: value) == ("2100000", False)
    wrong = ToolCall(name="population", arguments={"city": "Bonn"})
    assert run_call({"population": population}, wrong, lambda value: value) == ("Error: KeyError: 'Bonn'", True)


def test_the_guess_is_paid_by_its_nearest_number():
    paid, lines = played(defined("class Guess").Guess, ['guess {"number": 1}', 'guess {"number": 9}', ""], seed=3)
    assert "[user] I think of a number from 1 to 9." in lines
    assert {"[guess] larger", "[guess] smaller"} <= {*lines}  # neither 1 nor 9
    number = next(n for n in range(2, 9) if paid == pytest.approx(1 - min(n - 1, 9 - n) / 9))
    others = {played(defined("class Guess").Guess, [f'guess {{"number": {n}}}', ""], seed=3)[0] for n in range(1, 10)}
    assert max(others) == 1.0 and 2 <= number <= 8


def reply_of(held: Any, prompt: Prompt, *answers: str) -> tuple[list[str], float]:
    """The replies to answers, until the conversation ends, and all that it paid."""
    running, replies, paid = held.open(prompt, 1, lambda value: value), [], 0.0
    running.begin()
    for number, text in enumerate(answers):
        reply = running.reply(podium_turn(text, number))
        replies += [str(message["content"]) for message in reply.messages]
        paid += reply.reward
        if reply.done:
            break
    return replies, paid + running.grade()


def podium_turn(text: str, number: int) -> Any:
    return SimpleNamespace(text=text, number=number, calls=(), problem="")


def test_the_doubt_is_paid_for_an_answer_that_stays():
    held = conversing(TaskConfig(name="environment", environment=name_of(defined("class Doubt").Doubt)))
    prompt = Prompt(id="", question="What is 3 + 1?", answer="4")
    assert reply_of(held, prompt, "4", "Yes, 4.", "never asked") == (["Are you sure?"], 1.0)
    assert reply_of(held, prompt, "4", "No, 5.") == (["Are you sure?"], 0.0)


def test_the_door_with_the_prize_ends_the_game():
    held = conversing(TaskConfig(name="environment", environment=name_of(defined("class Doors").Doors)))
    replies, paid = reply_of(held, Prompt(id="", question="", answer=""), "one?", "1", "2", "3")
    assert paid == 1.0 and replies[-1] == "Here it is." and set(replies[:-1]) == {"Nothing."}


def test_the_task_opens_conversations_whose_turns_are_paid():
    debate = defined("class Debate").Debate
    held = conversing(TaskConfig(name=name_of(debate)))
    prompts = debate(podium.TaskSource()).prompts("train")
    assert [prompt.answer for prompt in prompts] == ["1", "2", "3", "4", "5", "6", "7", "8"]
    assert reply_of(held, prompts[3], "4", "5", "never asked") == (["Say it again.", "Say it again."], 0.5)
    assert reply_of(held, prompts[3], "4", "4")[1] == 1.0


def test_reward_functions_get_what_they_ask_for():
    polite, looks = defined("def polite").polite, defined("def reward_func").reward_func
    transcript = ({"role": "assistant", "content": "Please guess."}, {"role": "user", "content": "No."})
    group = [Graded(text="", tokens=(), transcript=transcript, environment=SimpleNamespace(reward=0.25))] * 2
    prompt = Prompt(id="", question="", answer="")
    for function, expected in ((polite, [1.0, 1.0]), (looks, [[0.25, 0.25]])):
        asked = RewardFunction(name_of(function))
        assert [asked.call(**arguments) for arguments in asked.arguments(prompt, group)] == expected
    assert polite(transcript=[]) == 0.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the reader has the modules and rows that the page's YAML names."""
    for name, mark in MODULES.items():
        (tmp_path / f"{name}.py").write_text(example(mark))
    rows = [f'{{"question": "What is {n} + 1 ?", "answer": "{n + 1}"}}\n' for n in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


WITHIN = [
    number for number, text in enumerate(fenced(PAGE, "yaml")) if not re.search("name: (program|verifiers:)", text)
]
"""The page's settings but those of other programs, which test_programs.py and test_verifiers.py run."""


@pytest.mark.parametrize("number", WITHIN)
def test_the_settings_of_the_page_are_run(number, folder, roomy_model, template, one_device):
    (folder / "base.yaml").write_text("model: a/b\n")
    (folder / "page.yaml").write_text(fenced(PAGE, "yaml")[number])
    shown = load_settings([folder / "base.yaml", folder / "page.yaml"], [], {}).config
    config = make_config(
        roomy_model,
        folder,
        chat_template=template,
        steps=1,
        prompts_per_step=6,
        tasks=shown.model_dump(mode="json")["tasks"],
        environments={"workers": 0},
        rollout=ROOMY,
        eval={"at_start": False, "at_end": False},
        metrics={"samples_every": 1},
    )
    assert train(config, plain=True) == 0
    completions = [each for line in read_samples(folder / "run" / SAMPLES) for each in line["completions"]]
    assert len(completions) == 24 and all(each["messages"] for each in completions)
