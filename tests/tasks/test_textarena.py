"""The adapter to TextArena, against a stand-in for its package with the same surface, and against the package."""

import enum
import random
import sys
import types

import pytest

from podium.config.schema import TaskConfig
from podium.tasks.conversation import Turn
from podium.tasks.conversations.environment_forms import conversing
from podium.tasks.registry import make_task, task_labels
from podium.tasks.task_list import task_page
from podium.tasks.try_task import play


class Kind(enum.Enum):
    PROMPT = 1
    PLAYER_ACTION = 2
    GAME_MESSAGE = 4


class Wrapper:
    def __init__(self, env) -> None:
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)

    def get_observation(self):
        raise AssertionError("wrappers of observations repeat all that was said")


class Brackets(Wrapper):
    def step(self, action: str):
        return self.env.step(action=f"[{action}]")


class Dice:
    """Says how many points the next throw of a die gives, and may be told to stop."""

    def __init__(self, throws: int = 3) -> None:
        self.throws, self.players = throws, 1

    def reset(self, num_players: int, seed: int | None = None) -> None:
        assert num_players == self.players, f"The number of players has to be {self.players}, received {num_players}"
        random.seed(seed)
        self.done, self.thrown, self.rewards = False, [], None
        self.messages = [(-1, f"Throw {self.throws} dice.\n", Kind.PROMPT)]

    def step(self, action: str):
        self.messages += [(0, action, Kind.PLAYER_ACTION), (Kind.PLAYER_ACTION, 0, action)]  # as some games swap them
        if action == "[throw]":
            self.thrown.append(random.randint(1, 6))
            self.messages.append((-1, f"You threw {self.thrown[-1]}.", Kind.GAME_MESSAGE))
        self.done = len(self.thrown) == self.throws or action == "[leave]"
        if self.done:
            self.rewards = {0: "not allowed" if action == "[leave]" else sum(self.thrown) / (6 * self.throws)}
        return self.done, {}

    def get_observation(self):
        said, self.messages = self.messages, []
        return 0, said

    def close(self):
        return self.rewards, {0: {"reason": "All dice are thrown."} if self.done else {}}


class Words(Dice):
    def __init__(self) -> None:
        raise LookupError("\n*****\n  Resource 'words' not found.\n  Use the downloader")


class Two(Dice):
    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.players = 2
        super().reset(num_players, seed)


@pytest.fixture
def arena(monkeypatch):
    registry = {"Dice-v0": lambda **given: Wrapper(Brackets(Dice(**given))), "Two-v0": Two, "Words-v0": Words}
    modules = {name: types.ModuleType(name) for name in ("textarena", "textarena.envs", "textarena.envs.registration")}
    modules["textarena"].__dict__.update(Wrapper=Wrapper, make=lambda name, **given: registry[name](**given))
    modules["textarena.envs.registration"].__dict__.update(ENV_REGISTRY=registry)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


DICE = TaskConfig(name="textarena:Dice-v0", options={"episodes": 5, "eval_episodes": 3})


def turn(text: str) -> Turn:
    return Turn(text=text, number=0)


def test_a_game_is_played_and_pays_what_it_says(arena):
    held, task = conversing(DICE), make_task(DICE)
    assert held is not None and held.rewards and held.tools == ()
    prompts = task.prompts("train")
    assert (len(prompts), len(task.prompts("eval"))) == (5, 3) and task_labels([DICE]) == ["Dice-v0"]
    game = held.open(prompts[0], 7, lambda value: value)
    assert game.begin() == "Throw 3 dice."
    assert game.reply(turn("what?")).messages[0]["content"] == "It is your turn."
    replies = [game.reply(turn("throw")) for _ in range(3)]
    texts = [str(reply.messages[0]["content"]) for reply in replies]
    thrown = [int(text.splitlines()[0].removeprefix("You threw ").rstrip(".")) for text in texts]
    assert [reply.done for reply in replies] == [False, False, True]
    assert texts[-1] == f"You threw {thrown[-1]}.\nAll dice are thrown."
    assert game.grade() == pytest.approx(sum(thrown) / 18)
    left = held.open(prompts[0], 7, lambda value: value)
    left.begin()
    assert left.reply(turn("leave")).done and left.grade() == 0.0
    unended = held.open(prompts[0], 7, lambda value: value)
    unended.begin()
    assert unended.grade() == 0.0


def throws(*games) -> list[list[str]]:
    """What the games say if they are played in turn, one throw each."""
    for game in games:
        game.begin()
    said: list[list[str]] = [[] for _ in games]
    for _ in range(3):
        for game, texts in zip(games, said, strict=True):
            texts.append(str(game.reply(turn("throw")).messages[0]["content"]))
    return said


def test_games_side_by_side_draw_what_each_would_draw_alone(arena):
    """TextArena's games share Python's global generator."""
    held, prompts = conversing(DICE), make_task(DICE).prompts("train")
    assert held is not None
    opened = lambda number, seed: held.open(prompts[number], seed, lambda value: value)  # noqa: E731
    random.seed(3)
    expected = random.random()
    random.seed(3)
    alone = [throws(opened(number, 1))[0] for number in range(3)]
    together = throws(opened(0, 1), opened(1, 1), opened(2, 1), opened(0, 2))
    assert random.random() == expected  # and leave it as it was
    assert together[:3] == alone and len({str(each) for each in together}) > 1


def test_names_that_are_no_game_of_one_player_are_errors(arena):
    for name, message in (
        ("textarena:Dice-v1", r"unknown game 'Dice-v1'; did you mean 'Dice-v0'"),
        ("textarena:Words-v0", "textarena:Words-v0 cannot be started with one player: Resource 'words' not found.;"),
        ("textarena:Two-v0", "textarena:Two-v0 cannot be started with one player: The number of players has to be 2"),
    ):
        with pytest.raises(ValueError, match=message):
            make_task(TaskConfig(name=name))
    with pytest.raises(ValueError, match="unexpected keyword argument 'sides'"):
        make_task(TaskConfig(name="textarena:Dice-v0", options={"config": {"sides": 20}}))


def test_a_game_is_described_and_tried(arena):
    assert "episodes: a whole number" in task_page("textarena:Dice-v0")
    lines: list[str] = []
    play("textarena:Dice-v0", ["throw"] * 3, lines.append)
    assert lines[0] == "[user] Throw 3 dice." and lines[-1].startswith("(reward: ")


def test_without_the_package_the_error_gives_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ValueError, match=r"pip install 'podium-rl\[textarena\]'"):
        make_task(TaskConfig(name="textarena:GuessTheNumber-v0"))


@pytest.mark.filterwarnings("default")
def test_the_package_itself_is_played():
    pytest.importorskip("textarena", reason="needs the extra textarena")
    for name, answers in (
        ("GuessTheNumber-v0", [str(number) for number in range(1, 21)]),
        ("Mastermind-v0", ["[1 2 3 4]", "nothing", "[1 2 3 5]", "[9 9]", "[]"]),
        ("2048-v0-3x3", ["[up]", "[left]", "[down]", "[right]"] * 5),
        ("Blackjack-v0", ["[stand]"] * 5),
        ("Countdown-v0", ["[100 75 +]", "[1]"]),
        ("Sokoban-v0", ["[up]", "[down]", "[left]", "[right]"] * 8),
    ):
        config = TaskConfig(name=f"textarena:{name}")
        held, prompt = conversing(config), make_task(config).prompts("eval")[3]
        assert held is not None
        played = []
        for _ in range(2):
            game = held.open(prompt, 5, lambda value: value)
            said = [game.begin()]
            for text in answers:
                reply = game.reply(turn(text))
                said.append(str(reply.messages[0]["content"]))
                if reply.done:
                    break
            played.append((said, game.grade()))
        assert played[0] == played[1], name
        said, reward = played[0]
        assert all(said) and len(set(said)) > 1 and 0 <= (reward or 0.0) <= 1
        assert len(said[1]) < 2 * len(str(said[0])) + 400  # a reply does not repeat the conversation
    with pytest.raises(ValueError, match="cannot be started with one player: The number of players has to be 2"):
        make_task(TaskConfig(name="textarena:TicTacToe-v0"))
