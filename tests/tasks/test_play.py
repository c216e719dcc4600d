"""`podium tasks try`: conversations with written answers, without a model; and the game `guess`."""

import asyncio

import pytest

from podium.config.schema import TaskConfig
from podium.tasks.conversation import Turn
from podium.tasks.games.guess import Game
from podium.tasks.registry import make_task
from podium.tasks.task import TaskSource
from podium.tasks.try_task import play


class Rows:
    """A class in TRL's form, async."""

    def reset(self, **row) -> str:
        self.said: list[str] = []
        return "Say three words."

    async def word(self, text: str) -> str:
        """Say a word.

        Args:
            text: the word.
        """
        self.said.append(text)
        return f"{len(self.said)} of 3"

    def get_reward(self) -> float:
        return len(self.said) / 3


class Connected:
    """A class whose calls share something of their event loop, as an HTTP client does."""

    async def reset(self, **row) -> str:
        self.loop = asyncio.get_running_loop()
        return "Call."

    async def ask(self) -> str:
        """Ask the server."""
        return str(asyncio.get_running_loop() is self.loop)

    async def get_reward(self) -> float:
        return 1.0 if asyncio.get_running_loop() is self.loop else 0.0


def played(target: str, *answers: str, **options) -> tuple[float, list[str]]:
    lines: list[str] = []
    return play(target, answers, lines.append, **options), lines


def test_a_tool_is_called_and_the_last_answer_graded():
    question = make_task(TaskConfig(name="calculator")).prompts("train")[3]
    expression = question.question.removeprefix("What is ").rstrip("?")
    call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
    graded, lines = played("calculator", call, f"It is {question.answer}.", "never said", number=3)
    assert graded == 1.0 and f"[calculator] {question.answer}" in lines and f"[user] {question.question}" in lines
    graded, lines = played("calculator", 'calculator {"expression": "2*21"}', "calculator {", "no")
    assert graded == 0.0 and "[calculator] 42" in lines and any("not valid JSON" in line for line in lines)


@pytest.mark.parametrize(
    "call",
    [
        'calculator("2*21")',
        "calculator(expression='2*21')",
        '{"name": "calculator", "arguments": {"expression": "2*21"}}',
        "<tool_call>calculator<arg_key>expression</arg_key><arg_value>2*21</arg_value></tool_call>",
        "<tool_call><function=calculator><parameter=expression>2*21</parameter></function></tool_call>",
        '<|tool_call>call:calculator{expression:<|"|>2*21<|"|>}<tool_call|>',
        "<|tool_call_start|>[calculator(expression='2*21')]<|tool_call_end|>",
    ],
)
def test_a_call_may_be_typed_as_in_python_or_as_any_model_writes_it(call):
    assert "[calculator] 42" in played("calculator", call, "no")[1]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("calculator(1, 2)", "each argument of calculator needs its name"),
        ("calculator(", "not valid Python"),
        ('{"name": "calculator", ', "not valid JSON"),
        ('<tool_call>{"name": "calculator"', "not valid JSON"),
    ],
)
def test_a_typed_call_that_cannot_be_read_is_answered_with_what_is_wrong(call, problem):
    assert any(problem in line for line in played("calculator", call, "no")[1])


def test_an_environment_begins_replies_and_pays():
    paid, lines = played("test_play:Rows", 'word {"text": "a"}', 'word {"text": "b"}', "")
    assert paid == pytest.approx(2 / 3)
    assert lines[0] == "[user] Say three words." and "[word] 2 of 3" in lines


class Unpaid:
    """A class whose reward a function reads from it."""

    reset, word = Rows.reset, Rows.word


def test_an_environment_without_a_reward_is_played_too():
    paid, lines = played("test_play:Unpaid", 'word {"text": "a"}', "")
    assert paid == 0.0 and "[word] 1 of 3" in lines
    assert lines[-1] == "(the environment returns no reward: a reward function grades the conversation)"


def test_what_cannot_be_played_is_said():
    for target, message in (
        ("gsm8k", "its prompts are answered once"),
        ("guesss", "'guesss' is not a task"),
        ("test_play:Turn", "Turn"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            played(target, "1")
    with pytest.raises(ValueError, match="prompt 2000 does not exist"):
        played("guess", "1", number=2000)


def test_a_game_of_guess_is_paid_by_its_guesses():
    """8 turns: 1 at the first, 1 - 0.5 x 2 / 7 at the third, 0.5 at the last, else 0."""
    for guesses, expected in (
        (["41"], 1.0),
        (["32", "no", "I say 41"], 1 - 1 / 7),
        (["1"] * 7 + ["41"], 0.5),
        (["1"] * 8, 0.0),
    ):
        game = Game(41, 8)
        replies = [game.reply(Turn(text=text, number=place)) for place, text in enumerate(guesses)]
        assert replies[-1] is None and game.grade() == pytest.approx(expected)
        assert all(reply in ("larger", "Answer with one number.") for reply in replies[:-1])
    assert Game(3, 8).reply(Turn(text="5", number=0)) == "smaller"
    task = make_task(TaskConfig(name="guess"))
    first, second = task.prompts("train")[:2]
    numbers = {task.open(prompt, seed).number for prompt in (first, second) for seed in range(20)}
    assert len(numbers) > 10 and task.open(first, 4).number == task.open(first, 4).number
    assert {each.id for each in task.prompts("train")}.isdisjoint(each.id for each in task.prompts("eval"))
    with pytest.raises(ValueError, match="unset them"):
        type(task)(TaskSource(path="x"))


def test_all_async_calls_of_a_conversation_are_on_one_event_loop():
    paid, lines = played("test_play:Connected", "ask {}", "")
    assert paid == 1.0 and "[ask] True" in lines
