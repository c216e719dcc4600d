"""The naive side knows nothing of what it is compared with."""

import dataclasses

import numpy as np
import pytest

from podium.certify.naive_rules import Rules
from podium.certify.naive_step import Episode, Room, optimizer_steps
from podium.certify.task import LetterBackend, Numbers
from podium.models.tokenizer import Tokenizer
from podium.tasks.task import TaskSource
from tools.structure import imports, reached, read_modules

MODULES = read_modules()
NAIVE = sorted(name for name in MODULES if name.startswith("podium.certify.naive"))
COMPARED_WITH = ("podium.algorithms", "podium.train", "podium.rollout", "podium.sharding", "podium.tasks", "podium.run")


def test_the_naive_side_is_four_files():
    assert [f"podium.certify.naive{part}" for part in ("", "_optimizer", "_rules", "_step")] == NAIVE


def test_the_questions_of_a_certificate_s_run_are_their_own_numbers():
    tokenizer = Tokenizer(LetterBackend(), eos_tokens=())
    questions = [each.question for each in Numbers(TaskSource(), vocab=300).prompts("train")]
    encoded = [tokenizer.encode_chat(each, None) for each in questions]
    assert [" ".join(map(str, each)) for each in encoded] == questions
    assert sorted(map(len, encoded)) == list(map(len, encoded))
    assert (len(encoded[0]), len(encoded[-1])) == (1, 12)
    assert tokenizer.decode([1, 0, 17]) == "bb"


def test_an_advantage_of_a_user_s_own_is_given_the_parts_of_rewards():
    def own(rewards, lengths, *, parts):
        np.testing.assert_array_equal(parts.weights, [[[1.0, 0.5], [1.0, 0.0]]])
        np.testing.assert_array_equal(parts.values, [[[1.0, 4.0], [0.0, np.nan]]])
        return np.nansum(parts.values * parts.weights, axis=2) - rewards / 2

    episode = Episode(
        prompt=(1, 2),
        tokens=(3,),
        drawn=(True,),
        logprobs=(-1.0,),
        drawn_logprobs=(-1.0,),
        turns=(0,),
        truncated=False,
        reward=3.0,
        parts=(("correct", 1.0, 1.0), ("length", 4.0, 0.5)),
    )
    other = dataclasses.replace(episode, reward=0.0, parts=(("correct", 0.0, 1.0),))
    (step,) = optimizer_steps(
        Rules(advantage=own, mean="token"),
        [[episode, other]],
        Room(2, 2, 1),
        max_new_tokens=1,
        policy=lambda tokens, starts: np.zeros((2, 1)),
        reference=None,
        teacher=None,
    )
    np.testing.assert_array_equal(step.advantages, [[1.5], [0.0]])


@pytest.mark.parametrize("name", NAIVE)
def test_a_naive_module_imports_nothing_of_what_it_checks_not_even_through_others(name):
    """What it reads are the numbers of a model and of a config, and no function that computes with them."""
    found = reached(imports(MODULES), name)
    assert [each for each in sorted(found) if each.startswith(COMPARED_WITH)] == []
