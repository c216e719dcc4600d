"""The naive side knows nothing of what it is compared with."""

import pytest

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


@pytest.mark.parametrize("name", NAIVE)
def test_a_naive_module_imports_nothing_of_what_it_checks_not_even_through_others(name):
    """What it reads are the numbers of a model and of a config, and no function that computes with them."""
    found = reached(imports(MODULES), name)
    assert [each for each in sorted(found) if each.startswith(COMPARED_WITH)] == []
