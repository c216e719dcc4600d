"""The settings of LoRA: what they mean, and what a user reads where they are wrong."""

from pathlib import Path

import pytest

from podium.config.errors import ConfigError
from podium.config.lora import LORA_RATE, MATRICES, LoraConfig
from podium.models.architecture import Lora, make_lora
from podium.settings import load_settings

BASE = "model: demo\ntasks: [{name: arithmetic}]\n"


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """The settings of a file that begins with a model and a task, with others behind it."""
    monkeypatch.chdir(tmp_path)

    def settings(text: str, *overrides: str):
        Path("a.yaml").write_text(BASE + text)
        return load_settings(["a.yaml"], overrides, {}).config

    return settings


@pytest.fixture
def errors(settings):
    """The problems of such a file, as texts."""

    def errors(text: str, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            settings(text, *overrides)
        return [str(problem) for problem in error.value.problems]

    return errors


def test_an_empty_section_has_the_defaults_and_none_is_no_lora(settings):
    assert settings("").lora is None
    assert settings("lora: {}\n").lora == LoraConfig()
    assert settings("", "lora.rank=4").lora == LoraConfig(rank=4)
    assert make_lora(None) is None
    assert make_lora(LoraConfig()) == Lora(rank=32, alpha=32.0, targets=MATRICES)


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        ("all", MATRICES),
        ("attention", ("q", "k", "v", "o")),
        ("mlp", ("gate", "up", "down")),
        ("[down, q]", ("q", "down")),
        ("[attention, up]", ("q", "k", "v", "o", "up")),
    ],
)
def test_targets_are_groups_or_names(settings, targets, found):
    lora = make_lora(settings(f"lora: {{targets: {targets}}}\n").lora)
    assert lora is not None
    assert lora.targets == found


@pytest.mark.parametrize(
    ("lora", "merged"),
    [
        ({}, False),
        ({"rank": 64}, False),
        ({"rank": 65}, True),
        ({"rank": 65, "base": "int8"}, False),
        ({"rank": 65, "base": "nf4"}, False),
        ({"rank": 65, "rollout": "apart"}, False),
        ({"rollout": "merged"}, True),
    ],
)
def test_auto_is_apart_up_to_rank_64_or_beside_a_base_of_fewer_bits(lora, merged):
    found = make_lora(LoraConfig(**lora))
    assert found is not None
    assert found.merged is merged


def test_the_learning_rate_is_ten_times_the_default_unless_it_is_set(settings):
    assert settings("").train.optimizer.learning_rate == 1e-6
    assert settings("lora: {}\n").train.optimizer.learning_rate == LORA_RATE == 1e-5
    assert settings("lora: {}\ntrain: {optimizer: {name: lion}}\n").train.optimizer.learning_rate == 1e-5
    assert settings("lora: {}\n", "train.optimizer.learning_rate=1e-6").train.optimizer.learning_rate == 1e-6


def test_a_rank_of_zero(errors):
    assert errors("lora:\n  rank: 0\n") == [
        "lora.rank: expected a whole number of at least 1, got 0\n"
        "    a.yaml:4\n"
        "    Rank of the adapters. In RL, small ranks suffice: an episode carries little information."
    ]


def test_an_unknown_target_names_the_nearest(errors):
    (found,) = errors("lora:\n  targets: [q, v_proj]\n")
    assert found == (
        "lora.targets.1: expected one of all, attention, mlp, experts, q, k, v, o, gate, up, down, expert_gate,"
        " expert_up, expert_down, got 'v_proj'; did you mean v?\n"
        "    a.yaml:4 (lora.targets.1)\n    a.yaml:4 (lora.targets)"
    )
    (found,) = errors("lora: {targets: atention}\n")
    assert "got 'atention'; did you mean attention?" in found
    (found,) = errors("lora: {targets: []}\n")
    assert found.startswith("lora.targets: an empty list: nothing would be trained; name all, attention")


def test_wrong_choices(errors):
    (found,) = errors("lora: {base: int4}\n")
    assert found.startswith("lora.base: expected one of bfloat16, int8, nf4, got 'int4'")
    (found,) = errors("lora: {alpha: 0}\n")
    assert found.startswith("lora.alpha: expected a number above 0, got 0")
