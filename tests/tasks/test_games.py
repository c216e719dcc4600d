"""The games mastermind, wordle and frozen_lake: cases worked by hand, and what holds whatever is said."""

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.config.schema import TaskConfig
from podium.tasks.conversation import Turn
from podium.tasks.conversations.environment_forms import conversing
from podium.tasks.games import frozen_lake, mastermind, wordle
from podium.tasks.games.five_letter_words import WORDS
from podium.tasks.games.frozen_lake import Walk
from podium.tasks.registry import make_task
from podium.tasks.try_task import play

GAMES = ("mastermind", "wordle", "frozen_lake")
SMALL = {"frozen_lake": {"size": 300}}
ANYTHING = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["1234", "crane", "up", "DOWN!", "I go right", "left </think> down", "1 1 2 2", "\ud800", ""]),
)


def turns(*answers: str) -> list[Turn]:
    return [Turn(text=text, number=number) for number, text in enumerate(answers)]


@pytest.mark.parametrize(
    ("code", "guess", "placed", "elsewhere"),
    [
        ("1234", "1234", 4, 0),
        ("1234", "4321", 0, 4),
        ("1122", "1212", 2, 2),
        ("1111", "1222", 1, 0),
        ("1223", "2214", 1, 2),
        ("5566", "1234", 0, 0),
        ("1234", "9999", 0, 0),
    ],
)
def test_a_guess_of_mastermind_is_marked(code, guess, placed, elsewhere):
    assert mastermind.marks(code, guess) == (placed, elsewhere)


def test_a_game_of_mastermind_is_read_and_paid():
    game = mastermind.Game("1234", 4)
    said = turns("is it 1 2, 4 3?", "123456", "I tried 1111 and 2222, now 1-2-3-5", "1235 again <think>4444</think> no")
    replies = [game.reply(each) for each in said]
    assert replies == ["2 in place, 2 elsewhere", "Answer with 4 digits.", "3 in place, 0 elsewhere", None]
    assert game.grade() == pytest.approx(0.4 * 3 / 4)
    for number, reward in ((1, 1.0), (2, 1 - 0.5 / 3), (4, 0.5)):
        won = mastermind.Game("1234", 4)
        assert [won.reply(each) for each in turns(*["5555"] * (number - 1), "1234")][-1] is None
        assert won.grade() == pytest.approx(reward)


@pytest.mark.parametrize(
    ("word", "guess", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("crane", "nacre", "YYYYG"),
        ("abbey", "babes", "YYGGX"),
        ("apple", "paper", "YYGYX"),
        ("those", "geese", "XXXGG"),
        ("speed", "erase", "YXXYY"),
        ("erase", "speed", "YXYYX"),
    ],
)
def test_a_guess_of_wordle_is_marked(word, guess, marks):
    assert wordle.marks(word, guess) == marks


def test_a_game_of_wordle_is_read_and_paid():
    game = wordle.Game("apple", 4)
    said = turns("My guess: PAPER.", "no idea, sir", "My first guess was paper; now ample", "grape")
    assert [game.reply(each) for each in said] == [
        "P A P E R\nY Y G Y X",
        "Answer with one word of five letters.",
        "A M P L E\nG X G G G",
        None,
    ]
    assert game.grade() == pytest.approx(4 * 0.1)
    for number, reward in ((1, 1.0), (2, 1 - 0.5 / 3), (4, 0.5)):
        won = wordle.Game("apple", 4)
        assert [won.reply(each) for each in turns(*["mount"] * (number - 1), "Apple")][-1] is None
        assert won.grade() == pytest.approx(reward)
    assert wordle.Game("apple", 4).grade() == 0.0


def test_the_words_of_wordle_are_words_of_five_letters():
    assert len(WORDS) > 900 and list(WORDS) == sorted(set(WORDS))
    assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in WORDS)


LAKE = (
    "..H",
    "H..",
    "..G",
)


def test_a_walk_over_the_lake_is_shown_and_paid():
    walk = Walk(LAKE, 6, None)
    assert [walk.reply(each) for each in turns("I go RIGHT", "up", "north", "down, or rather down")] == [
        ". P H\nH . .\n. . G",
        ". P H\nH . .\n. . G",  # against the edge
        "Answer with up, down, left or right.",
        ". . H\nH P .\n. . G",
    ]
    assert walk.grade() == 0.5 * (1 - 2 / 4)
    assert [walk.reply(each) for each in turns("right", "down")] == [". . H\nH . P\n. . G", None]
    assert walk.grade() == 1.0
    fallen = Walk(LAKE, 6, None)
    assert fallen.reply(turns("down")[0]) is None and fallen.grade() == 0.0
    late = Walk(LAKE, 1, None)
    assert late.reply(turns("right")[0]) is None and late.grade() == 0.5 * (1 - 3 / 4)
    assert frozen_lake.distances(LAKE)[(0, 0)] == 4 and (2, 0) in frozen_lake.distances(LAKE)


def test_slippery_ice_lets_a_third_of_the_moves_go_as_said():
    wide = ("." * 12,) * 11 + ("." * 11 + "G",)
    went: dict[tuple[int, int], int] = {}
    for seed in range(3000):
        walk = Walk(wide, 5, random.Random(seed))
        walk.player = (5, 5)
        walk.reply(turns("left")[0])
        step = (walk.player[0] - 5, walk.player[1] - 5)
        went[step] = went.get(step, 0) + 1
    assert went.keys() == {(0, -1), (-1, 0), (1, 0)}  # never back
    assert all(900 < count < 1100 for count in went.values())
    task = make_task(TaskConfig(name="frozen_lake", options={"slippery": True}))
    prompt = task.prompts("eval")[0]
    assert "slippery" in prompt.question
    walks = []
    for seed in (1, 1, 2, 3, 4):
        walk = task.open(prompt, seed)
        walks.append([walk.reply(each) for each in turns(*["right", "down"] * 4)])
    assert walks[0] == walks[1] and len({str(each) for each in walks}) > 1


@pytest.mark.parametrize("name", GAMES)
def test_held_out_games_are_others_and_each_is_once(name):
    options = SMALL.get(name, {})
    task = make_task(TaskConfig(name=name, options=options))
    secret: Callable = lambda prompt: prompt.metadata.get("lake") or prompt.answer  # noqa: E731
    train, evaluated = ([secret(each) for each in task.prompts(split)] for split in ("train", "eval"))
    assert len(evaluated) == 100 and len(train) >= 300
    assert len({*train, *evaluated}) == len(train) + len(evaluated)
    assert [each.id for each in make_task(TaskConfig(name=name, options=options)).prompts("train")] == [
        each.id for each in task.prompts("train")
    ]
    prompt = task.prompts("train")[0]
    assert not any(str(secret(prompt)) in str(message) for message in (prompt.question, prompt.messages))


def test_options_that_leave_nothing_to_train_on_are_an_error():
    for name, options in (("frozen_lake", {"side": 2}), ("mastermind", {"pegs": 1}), ("wordle", {"eval_size": 999})):
        with pytest.raises(ValueError, match=f"{name}: with these options there are only .* lower eval_size"):
            make_task(TaskConfig(name=name, options=options)).prompts("train")
    with pytest.raises(ValueError, match=r"frozen_lake: options.turns: the goal is 14 moves away, and 12 moves cannot"):
        make_task(TaskConfig(name="frozen_lake", options={"side": 8}))


@pytest.mark.parametrize("name", GAMES)
def test_every_lake_and_code_is_what_its_options_say(name):
    if name == "mastermind":
        codes = make_task(TaskConfig(name=name, options={"pegs": 2, "colours": 3, "eval_size": 1})).prompts("train")
        assert len(codes) == 8 and {digit for each in codes for digit in each.answer} == {"1", "2", "3"}
    elif name == "frozen_lake":
        for prompt in make_task(TaskConfig(name=name, options={"side": 6, "holes": 0.3, "size": 50})).prompts("train"):
            lake = prompt.metadata["lake"]
            assert {len(row) for row in (*lake, lake)} == {6} and lake[-1][-1] == "G" and reachable(lake)


def reachable(lake: tuple[str, ...]) -> bool:
    """Whether the goal can be reached, by going on from all cells reached until nothing is new."""
    found: set[tuple[int, int]] = {(0, 0)}
    while True:
        near = {(r + a, c + b) for r, c in found for a, b in ((0, 1), (1, 0), (0, -1), (-1, 0))}
        more = {(r, c) for r, c in near if r in range(6) and c in range(6) and lake[r][c] != "H"} | found
        if more == found:
            return (5, 5) in found
        found = more


@pytest.mark.parametrize("name", GAMES)
@given(said=st.lists(ANYTHING, min_size=15, max_size=15), number=st.integers(0, 99), seed=st.integers(0, 9))
def test_whatever_is_said_a_game_ends_in_time_and_pays_from_0_to_1(name, said, number, seed):
    held, prompt = conversing(TaskConfig(name=name)), EVALUATED[name][number]
    assert held is not None
    played = []
    for _ in range(2):
        game = held.open(prompt, seed, lambda value: value)
        assert game.begin() is None
        replies = []
        for turn in turns(*said):
            replies.append(game.reply(turn))
            if replies[-1].done:
                break
        played.append((replies, game.grade()))
    assert played[0] == played[1]
    replies, reward = played[0]
    assert reward is not None and 0 <= reward <= 1
    assert replies[-1].done and len(replies) <= {"mastermind": 10, "wordle": 6, "frozen_lake": 12}[name]
    assert all(message["content"] for reply in replies[:-1] for message in reply.messages)


EVALUATED = {name: make_task(TaskConfig(name=name, options=SMALL.get(name, {}))).prompts("eval") for name in GAMES}


@given(code=st.text("1234", min_size=4, max_size=4), guess=st.text("1234", min_size=4, max_size=4))
def test_marks_of_mastermind_are_those_of_the_best_pairing(code, guess):
    """Right digits at any place are the most that a permutation of the guess can match; and marks are symmetric."""
    placed, elsewhere = mastermind.marks(code, guess)
    best = max(sum(map(str.__eq__, code, each)) for each in itertools.permutations(guess))
    assert placed + elsewhere == best and placed == sum(a == b for a, b in zip(code, guess, strict=True))
    assert mastermind.marks(guess, code) == (placed, elsewhere)


@given(word=st.sampled_from(WORDS), guess=st.sampled_from(WORDS))
def test_marks_of_wordle_count_each_letter_as_often_as_the_word_has_it(word, guess):
    found = wordle.marks(word, guess)
    for place, mark in enumerate(found):
        assert (mark == "G") == (word[place] == guess[place])
    for letter in set(guess):
        marked = [mark for each, mark in zip(guess, found, strict=True) if each == letter]
        assert len(marked) - marked.count("X") == min(word.count(letter), guess.count(letter))
        assert sorted(mark for mark in marked if mark != "G") == [*"X" * marked.count("X"), *"Y" * marked.count("Y")]
        loose = [mark for mark in marked if mark != "G"]
        assert loose == sorted(loose, reverse=True)  # Y before X


@pytest.mark.parametrize(
    ("name", "answers", "reward"),
    [
        ("mastermind", lambda prompt: ["1111", "who knows", prompt.answer], 1 - 0.5 * 2 / 9),
        ("wordle", lambda prompt: ["xxxxx", prompt.answer], 1 - 0.5 / 5),
        ("frozen_lake", lambda prompt: ["stay"] * 12, 0.0),
    ],
)
def test_games_are_played_without_a_model(name, answers, reward):
    lines: list[str] = []
    prompt = make_task(TaskConfig(name=name)).prompts("train")[0]
    assert play(name, answers(prompt), lines.append) == pytest.approx(reward)
    assert lines[0] == f"[user] {prompt.question}" and lines[-1] == f"(reward: {reward:g})"
