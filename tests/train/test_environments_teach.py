"""A tiny random model learns from an environment that it talks to, and from tests that its code must pass."""

import numpy as np
import pytest

from benches import learn_code, learn_guess
from benches.environments import LESSONS, learn

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.long
@pytest.mark.parametrize("name", LESSONS)
def test_an_environment_teaches_a_random_model(name, tmp_path):
    rewards = learn(name, tmp_path)
    assert np.mean(rewards[:2]) < LESSONS[name].bar / 2  # it knew nothing
    assert np.mean(rewards[-5:]) >= LESSONS[name].bar


@pytest.mark.long
def test_a_game_of_eight_guesses_is_learned_and_not_from_a_coin(tmp_path, monkeypatch):
    monkeypatch.setattr(learn_guess, "STEPS", 35)
    learn_guess.imitate(tmp_path)
    played = learn_guess.learn("played", learn_guess.PAID, 0, tmp_path)
    tossed = learn_guess.learn("tossed", learn_guess.TOSSED, 0, tmp_path)
    assert learn_guess.meets_bar(played, control=False)
    assert learn_guess.meets_bar(tossed, control=True)


@pytest.mark.long
def test_functions_that_pass_hidden_tests_are_learned_and_not_from_a_coin(tmp_path, monkeypatch):
    monkeypatch.setattr(learn_code, "STEPS", 12)
    learn_code.imitate(tmp_path)
    paid = learn_code.learn("paid", learn_guess.PAID, 0, tmp_path)
    tossed = learn_code.learn("tossed", learn_guess.TOSSED, 0, tmp_path)
    assert learn_code.meets_bar(paid, control=False)
    assert learn_code.meets_bar(tossed, control=True)
