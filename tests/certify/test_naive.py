"""The naive side knows nothing of what it is compared with."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from podium.algorithms.controllers import (
    ENTROPY_BONUS,
    KL_COEF,
    LAST_ENTROPY,
    after_step,
    after_update,
    first_coefs,
    loss_coefs,
)
from podium.algorithms.recipe_options import make_recipe
from podium.certify.naive import divergences
from podium.certify.naive_rules import Rules, rules_of
from podium.certify.naive_run import Coefficients, moved_weights
from podium.certify.naive_step import Episode, Room, optimizer_steps
from podium.certify.numbers_task import (
    LONGEST_MESSAGE,
    LetterBackend,
    Numbers,
    Talk,
    as_read,
    asked_tokens,
    calls_in,
    following,
    reply_to,
)
from podium.config.schema import AlgorithmConfig
from podium.models.text.tokenizer import Tokenizer
from podium.sampling.conversations.dialogue import Dialogue
from podium.tasks.conversation import call_id
from podium.tasks.conversations.tools import tool_schema
from podium.tasks.task import TaskSource
from tools.structure import imports, reached, read_modules

MODULES = read_modules()
NAIVE = sorted(name for name in MODULES if name.startswith("podium.certify.naive"))
COMPARED_WITH = ("podium.algorithms", "podium.train", "podium.rollout", "podium.sharding", "podium.tasks", "podium.run")


def test_the_naive_side_is_seven_files():
    parts = ("", "_draws", "_mixture", "_optimizer", "_rules", "_run", "_step")
    assert [f"podium.certify.naive{part}" for part in parts] == NAIVE


def test_the_questions_of_a_certificate_s_run_are_their_own_numbers():
    tokenizer = Tokenizer(LetterBackend(), eos_tokens=())
    questions = [each.question for each in Numbers(TaskSource(), vocab=300).prompts("train")]
    encoded = [tokenizer.encode_chat(each, None) for each in questions]
    assert [" ".join(map(str, each)) for each in encoded] == questions
    assert sorted(map(len, encoded)) == list(map(len, encoded))
    assert (len(encoded[0]), len(encoded[-1])) == (1, 12)
    assert tokenizer.decode([1, 0, 17]) == "BB"


def test_an_answer_of_a_certificate_s_conversations_has_one_end():
    dialogue = Dialogue("talk", Tokenizer(LetterBackend(), eos_tokens=()), [])
    asked, replied = [{"role": "user", "content": "8 9"}], [{"role": "user", "content": "5 7"}]
    assert dialogue.prompt(asked) == (8, 9)
    assert dialogue.reply(replied, history=asked, drawn_end=0) == [5, 7]
    assert dialogue.reply(replied, history=asked, drawn_end=None) == [0, 5, 7]
    (message,) = reply_to(1, "BC", 300, 4)
    reply = tuple(as_read(message))
    assert len(reply) <= LONGEST_MESSAGE
    assert following([1, 2, 0], 1, 300, 4) == reply
    assert following([1, 2], 1, 300, 4) == (0, *reply)


def test_a_certificate_s_conversations_call_a_tool_and_read_a_long_message_in_part():
    tokenizer = Tokenizer(LetterBackend(), eos_tokens=())
    dialogue = Dialogue("talk", tokenizer, list(map(tool_schema, Talk.tools)))
    asked = [{"role": "system", "content": Talk.system_prompt}, {"role": "user", "content": "8"}]
    assert dialogue.prompt(asked) == asked_tokens("8", tools=True)
    text = tokenizer.decode([1, 14, 15, 31])
    read = dialogue.read(text, [1, 14, 15, 31])
    assert [(each.name, each.arguments) for each in read.calls] == [("add", {"x": x}) for x in (1, 2, 2)]
    assert calls_in(0, text) == [(call_id(0, place), x) for place, x in enumerate("122")]
    message = {"role": "tool", "content": "10 20 30 40 50"}
    cut = dialogue.fitting(message, LONGEST_MESSAGE)
    assert tuple(tokenizer.encode(str(cut["content"]))) == tuple(as_read((10, 20, 30, 40, 50))) == (10, 7, 50)


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
        {},
        max_new_tokens=1,
    )
    np.testing.assert_array_equal(step.advantages, [[1.5], [0.0]])


@functools.cache
def edges() -> dict[str, set[str]]:
    return imports(MODULES)


@pytest.mark.parametrize("name", NAIVE)
def test_a_naive_module_imports_nothing_of_what_it_checks_not_even_through_others(name):
    """What it reads are the numbers of a model and of a config, and no function that computes with them."""
    found = reached(edges(), name)
    assert [each for each in sorted(found) if each.startswith(COMPARED_WITH)] == []


ADAPTED = Rules(
    advantage="group",
    mean="token",
    kl="k3",
    kl_coef=0.1,
    kl_target=0.5,
    kl_gain=2.0,
    entropy_bonus=0.01,
    entropy_target=1.0,
    entropy_step=0.02,
    entropy_bonus_max=0.04,
)


def test_the_naive_coefficients_by_hand():
    begun = Coefficients(kl_coef=0.1, entropy_bonus=0.01)
    assert begun.applied(ADAPTED) == dataclasses.replace(begun, entropy_bonus=0.0)
    low = begun.after_update(ADAPTED, 0.9)
    assert (low.entropy_bonus, low.applied(ADAPTED).entropy_bonus) == pytest.approx((0.03, 0.03))
    assert low.after_update(ADAPTED, 1.0).entropy_bonus == 0.04
    assert begun.after_update(ADAPTED, 1.1).entropy_bonus == 0.0
    assert begun.after_step(ADAPTED, 0.55).kl_coef == pytest.approx(0.12)
    assert begun.after_step(ADAPTED, 5.0).kl_coef == pytest.approx(0.14)
    assert begun.after_step(ADAPTED, 0.0).kl_coef == pytest.approx(0.06)
    still = dataclasses.replace(ADAPTED, kl_target=None, entropy_target=None)
    assert begun.after_update(still, 0.9).after_step(still, 5.0) == begun == begun.applied(still)


def test_the_naive_coefficients_are_the_trainer_s_on_a_random_run():
    config = AlgorithmConfig(
        kl="k3",
        kl_coef=0.1,
        kl_target=0.5,
        kl_gain=2.0,
        entropy_bonus=0.01,
        entropy_target=1.0,
        entropy_step=0.02,
        entropy_bonus_max=0.04,
    )
    recipe = make_recipe(config, group_size=4, prompts_per_step=4)
    rules, random = rules_of(config), np.random.default_rng(0)
    ours, naive = first_coefs(recipe), Coefficients(kl_coef=0.1, entropy_bonus=0.01)
    for _ in range(20):
        for entropy in random.uniform(0.5, 1.5, 3).tolist():
            used = naive.applied(rules)
            applied = loss_coefs(recipe, ours)
            assert (applied[KL_COEF], applied[ENTROPY_BONUS]) == pytest.approx((used.kl_coef, used.entropy_bonus))
            ours, naive = after_update(recipe, ours, entropy=entropy), naive.after_update(rules, entropy)
            assert ours[LAST_ENTROPY] == naive.last_entropy
        kl = random.uniform(0.3, 0.7)
        ours, naive = after_step(recipe, ours, kl=kl), naive.after_step(rules, kl)
        assert ours[KL_COEF] == pytest.approx(naive.kl_coef)


def test_a_moved_reference_by_hand():
    moved = moved_weights({"w": np.array([1.0, 2.0])}, {"w": np.array([3.0, 2.0], np.float32)}, 0.75)
    np.testing.assert_array_equal(moved["w"], [2.5, 2.0])


KL_OF_TWO = {1.0: math.log(4 / 3) / 2, 0.0: math.log(1 / 2) / 4 + math.log(3 / 2) * 3 / 4}
"""KL(p || q) and KL(q || p) of p = (1/2, 1/2) and q = (1/4, 3/4)."""


@pytest.mark.parametrize(
    ("reverse", "expected"), [*KL_OF_TWO.items(), (0.25, KL_OF_TWO[1.0] / 4 + KL_OF_TWO[0.0] * 3 / 4)]
)
def test_the_naive_divergence_by_hand(reverse, expected):
    p, q = jnp.log(jnp.array([[[0.5, 0.5]]])), jnp.log(jnp.array([[[0.25, 0.75]]]))
    assert float(divergences(reverse, p, q)[0, 0]) == pytest.approx(expected, rel=1e-6)
