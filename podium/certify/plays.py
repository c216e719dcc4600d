"""Checks environments without a model: games that are played to their end, and calls of tools as models write them."""

import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from podium.certify.check_result import Check
from podium.config.schema import TaskConfig
from podium.serve.bodies import ChatBody, RequestError
from podium.tasks.conversation import Turn, as_reply
from podium.tasks.conversations.loopback import Line
from podium.tasks.conversations.program import Led
from podium.tasks.conversations.tool_calls import CallForm, read_calls
from podium.tasks.games.calculator import calculator
from podium.tasks.registry import make_task
from podium.tasks.task import Prompt

GAMES_EACH = 12
WRITTEN: Mapping[CallForm, str] = {
    "tags": 'A<tool_call>{"name": "f", "arguments": {"x": 1, "y": "b c"}}</tool_call>\n<tool_call>'
    '{"name": "g", "arguments": {}}</tool_call>',
    "parameters": "A<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\nb c\n</parameter>\n"
    "</function>\n</tool_call><tool_call>\n<function=g>\n</function>\n</tool_call>",
    "keys": "A<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n<arg_key>y</arg_key>\n<arg_value>b c"
    "</arg_value>\n</tool_call><tool_call>g\n</tool_call>",
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1, "y": "b c"}<|call|>'
    "<|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}<|call|>",
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1, "y": "b c"}}, {"name": "g", "arguments": {}}]',
    "deepseek": "A<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>f\n```json\n"
    '{"x": 1, "y": "b c"}\n```<\uff5ctool▁call▁end\uff5c>'
    "<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>g\n```json\n{}\n"
    "```<\uff5ctool▁call▁end\uff5c>",
    "braces": 'A<|tool_call>call:f{x:1,y:<|"|>b c<|"|>}<tool_call|><|tool_call>call:g{}<tool_call|>',
    "python": "A<|tool_call_start|>[f(x=1, y='b c'), g()]<|tool_call_end|>",
    "invoke": '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="x">1</atem:parameter>\n'
    '<atem:parameter name="y">b c</atem:parameter>\n</atem:invoke>\n<atem:invoke name="g">\n</atem:invoke>\n'
    "</atem:function_calls>",
    "object": '{"name": "f", "parameters": {"x": 1, "y": "b c"}}',
}
"""The calls f(x=1, y="b c") and g() in each form; the last form has only the first."""
SUMS: Mapping[str, str] = {
    "12 * (3 + 4)": "84",
    "2 ** 10 - 7 // 2": "1021",
    "7 / 2": "3.5",
    "-3 - -5": "2",
    "17 % 5": "2",
    "1 / 3": "0.3333333333",
}


class _Asks(threading.Thread):
    """A program that asks the model twice and then earns 1, or 0.25 where its second request is refused."""

    def __init__(self, line: Line) -> None:
        super().__init__(daemon=True)
        self._line, self._earned, self.heard = line, 0.0, list[str]()
        self.start()

    def run(self) -> None:
        said = [{"role": "user", "content": "8 9"}]
        try:
            for _ in range(2):
                turn = self._line.ask(ChatBody.model_validate({"model": "policy", "messages": said}))
                self.heard.append(turn.text)
                said += [{"role": "assistant", "content": turn.text}, {"role": "user", "content": "7"}]
            self._earned = 1.0
        except RequestError:
            self._earned = 0.25
        self._line.end()

    def reward(self) -> float:
        """Wait until it has ended."""
        self.join()
        return self._earned

    def stop(self) -> None:
        """Do nothing, since it ends by itself."""


def _wrong_programs() -> int:
    """Number of conversations, led by a program, that have a wrong request, end or reward."""
    wrong = 0
    for answers, paid in ((2, 1.0), (1, 0.25)):
        led = Led(_Asks)
        requests = [led.begin()]
        replies = [led.reply(Turn(text=text, number=turn)) for turn, text in enumerate("AB"[:answers])]
        requests += [each.asking for each in replies if each.asking is not None]
        said = [[(each["role"], each["content"]) for each in asking.messages] for asking in requests]
        wrong += said != [[("user", "8 9")], [("user", "7")]] or [each.fresh for each in requests] != [True, False]
        wrong += replies[-1].done != (answers == 2) or led.grade() != paid
    return wrong


def plays_check(tasks: Sequence[TaskConfig]) -> Check:
    """Count the games of the config's tasks with a wrong reply, end or reward, and the calls that are read wrongly."""
    own = [(NAIVE_GAMES[task.name], task) for task in tasks if task.name in NAIVE_GAMES]
    return Check(
        name="environments",
        claim="calls in every form are read as they are written; games and programs go on, end and pay by their rules",
        difference=float(sum(_wrong_games(*each) for each in own) + sum(_is_misread(form) for form in WRITTEN))
        + sum(calculator(text) != value for text, value in SUMS.items())
        + _wrong_programs(),
        bar=0,
    )


def _is_misread(form: CallForm) -> bool:
    """Whether the calls that are written in this form are read as others, or those in a thought are read at all."""
    assert set(WRITTEN) == set(get_args(CallForm)), "each form is written"
    text = WRITTEN[form]
    wanted = [("f", {"x": 1, "y": "b c"}), *([] if form == "object" else [("g", {})])]
    found = [(each.name, dict(each.arguments)) for each in read_calls(text, form).calls]
    hidden = read_calls(f"<think>{text}</think>B", form).calls
    return json.dumps(found) != json.dumps(wanted) or bool(hidden)


Said = Iterator[tuple[str, str | None]]
"""Answers, with the environment's reply to each; None: the game is over."""
NaiveGame = Callable[[Any, Prompt, Any, random.Random], tuple[list[tuple[str, str | None]], float]]
"""Plays a game of a task, given as it was opened: answers with their replies, and the final reward."""


def _wrong_games(play: NaiveGame, config: TaskConfig) -> int:
    """Number of games in which a reply or the reward is not that of the rules."""
    task: Any = make_task(config)
    wrong = 0
    for number, prompt in enumerate(task.prompts("eval")[:GAMES_EACH]):
        game = task.open(prompt, number)
        rounds, reward = play(task, prompt, game, random.Random(number))
        replies = [as_reply(game.reply(Turn(text=text, number=turn))) for turn, (text, _) in enumerate(rounds)]
        said = [None if each.done else str(each.messages[0]["content"]) for each in replies]
        wrong += said != [reply for _, reply in rounds] or abs(game.grade() - reward) > 1e-9
    return wrong


def _paid(number: int, most: int) -> float:
    """The reward of a game that is won with answer `number` of at most `most`: from 1 to 0.5, in equal steps."""
    return 1.0 if most == 1 else 0.5 + 0.5 * (most - number) / (most - 1)


def _guess(task: Any, prompt: Prompt, game: Any, random: random.Random) -> tuple[list[tuple[str, str | None]], float]:
    rounds: list[tuple[str, str | None]] = []
    for turn in range(1, task.turns + 1):
        said = game.number if random.random() < 0.15 else random.randint(1, task.largest)
        last = said == game.number or turn == task.turns
        rounds.append((f"Is it {said}?", None if last else "larger" if said < game.number else "smaller"))
        if last:
            return rounds, _paid(turn, task.turns) if said == game.number else 0.0
    raise AssertionError("the last turn ends the game")


def _mastermind(
    task: Any, prompt: Prompt, game: Any, random: random.Random
) -> tuple[list[tuple[str, str | None]], float]:
    code, rounds, best = prompt.answer, list[tuple[str, str | None]](), 0.0
    for turn in range(1, task.turns + 1):
        said = code if random.random() < 0.1 else "".join(random.choices("123456789"[: task.colours], k=task.pegs))
        placed = sum(a == b for a, b in zip(code, said, strict=True))
        alike = sum(min(code.count(digit), said.count(digit)) for digit in set(said))
        best = max(best, (placed + (alike - placed) / 2) / len(code))
        last = said == code or turn == task.turns
        rounds.append((f"My guess is {said}", None if last else f"{placed} in place, {alike - placed} elsewhere"))
        if last:
            return rounds, _paid(turn, task.turns) if said == code else 0.4 * best
    raise AssertionError("the last turn ends the game")


def _wordle(task: Any, prompt: Prompt, game: Any, random: random.Random) -> tuple[list[tuple[str, str | None]], float]:
    word, rounds, best = prompt.answer, list[tuple[str, str | None]](), 0.0
    for turn in range(1, task.turns + 1):
        said = word if random.random() < 0.15 else "".join(random.choices(word + "e", k=5))
        marks = ["G" if a == b else "X" for a, b in zip(word, said, strict=True)]
        for place, letter in enumerate(said):
            free = sum(a == letter != b for a, b in zip(word, said, strict=True))
            before = sum(said[each] == letter and marks[each] == "Y" for each in range(place))
            if marks[place] == "X" and before < free:
                marks[place] = "Y"
        best = max(best, 0.1 * marks.count("G") + 0.05 * marks.count("Y"))
        last = said == word or turn == task.turns
        rounds.append((f"I say: {said}", None if last else f"{' '.join(said.upper())}\n{' '.join(marks)}"))
        if last:
            return rounds, _paid(turn, task.turns) if said == word else best
    raise AssertionError("the last turn ends the game")


NAIVE_GAMES: Mapping[str, NaiveGame] = {"guess": _guess, "mastermind": _mastermind, "wordle": _wordle}
