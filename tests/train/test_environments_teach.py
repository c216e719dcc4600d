"""A tiny random model learns from an environment that it talks to."""

import numpy as np
import pytest

from benches.environments import LESSONS, learn

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.long
@pytest.mark.parametrize("name", LESSONS)
def test_an_environment_teaches_a_random_model(name, tmp_path):
    rewards = learn(name, tmp_path)
    assert np.mean(rewards[:2]) < LESSONS[name].bar / 2  # it knew nothing
    assert np.mean(rewards[-5:]) >= LESSONS[name].bar
