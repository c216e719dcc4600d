"""Every setting does something: a tiny run records which settings are read, and by whom.

A setting counts as read when code outside podium.config, podium.settings and podium.plan reads the attribute of its
own section. Rules that only say what cannot be combined do not count, nor does `model_dump`.
"""

import importlib.machinery
import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args, get_origin

import numpy as np
import pytest
from made_once import made_anew
from pydantic import create_model
from tiny_runs import TINY, merged

from podium.algorithms.recipe_options import make_recipe
from podium.algorithms.recipes import Recipe
from podium.config.critic_section import CriticConfig
from podium.config.data import FilterConfig, ProgressConfig, RetireConfig
from podium.config.judge import JudgeConfig
from podium.config.reference import ReferenceConfig
from podium.config.reward_model import RewardModelConfig
from podium.config.schema import (
    AlgorithmConfig,
    Config,
    DemonstrationsConfig,
    EnvironmentsConfig,
    LimitsConfig,
    LossPartConfig,
    Section,
)
from podium.train.loop import train

Setting = tuple[str, str]
"""Class of the section, and name."""

INVENTED = ("name", "path", "seed", "steps", "dtype", "mode", "shape", "temperature", "clip_low", "size")
"""Settings that nothing reads, under names that code reads of other things: each section gets those that it lacks."""
ARGUMENTS = {"std": ("none", "batch"), "std_ddof": (0, 1), "std_eps": (1e-6, 1.0)}
"""Settings that become arguments of a function, with two values each: they count as read where the result differs."""
CHECKS = {"_holds_together", "conflicts"}
"""Functions below which settings are only checked."""


def inner_section(annotation: Any) -> type[Section] | None:
    """The section that a field holds, or has a list of."""
    parts = (annotation, *get_args(annotation))
    return next((part for part in parts if isinstance(part, type) and issubclass(part, Section)), None)


def settings(section: type[Section]) -> Iterator[Setting]:
    """Every setting of a section and of the sections in it."""
    for name, field in section.model_fields.items():
        inner = inner_section(field.annotation)
        if inner is None:
            yield section.__name__, name
        else:
            yield from settings(inner)


def with_invented(section: type[Section]) -> type[Section]:
    """A section like this one, with invented settings in it and in all below."""
    fields: dict[str, Any] = {name: (str | None, None) for name in INVENTED if name not in section.model_fields}
    for name, field in section.model_fields.items():
        if inner := inner_section(field.annotation):
            changed = with_invented(inner)
            several, optional = get_origin(field.annotation) is list, field.default is None
            fields[name] = (
                (list[changed], field.default if several and field.default == [] else ...)
                if several
                else (changed | None, None)
                if optional
                else (changed, changed())
            )
    return create_model(section.__name__, __base__=section, **fields)


def counts(frame: types.FrameType) -> bool:
    """Whether a reader of a setting uses it."""
    module = frame.f_globals["__name__"]
    if not module.startswith("podium.") or module.startswith(("podium.settings", "podium.plan")):
        return False
    if module.startswith("podium.config.") and module != "podium.config.sizes":
        return False
    outer: types.FrameType | None = frame
    while outer is not None:
        if outer.f_code.co_name in CHECKS:
            return False
        outer = outer.f_back
    return True


@contextmanager
def recorded() -> Iterator[set[Setting]]:
    """The settings that are read meanwhile; what a recipe carries on under its name is read of the recipe."""
    found: set[Setting] = set()
    owners: dict[type, dict[str, Setting]] = {}

    def readable(kind: type) -> dict[str, Setting]:
        if issubclass(kind, Section):
            return {name: (kind.__name__, name) for name in kind.model_fields}
        return {name: ("AlgorithmConfig", name) for name in AlgorithmConfig.model_fields}

    def recording(read: Any) -> Any:
        def __getattribute__(self: Any, name: str) -> Any:
            kind = type(self)
            if kind not in owners:
                owners[kind] = readable(kind)
            setting = owners[kind].get(name)
            carried = kind is AlgorithmConfig and name in Recipe.__dataclass_fields__
            if setting and setting not in found and not carried and counts(sys._getframe(1)):
                found.add(setting)
            return read(self, name)

        return __getattribute__

    with pytest.MonkeyPatch.context() as patch:
        for owner in (Section, Recipe):
            patch.setattr(owner, "__getattribute__", recording(owner.__getattribute__))
        yield found


@pytest.fixture
def wandb_asked(monkeypatch) -> dict[str, Any]:
    """A package wandb that keeps what `init` is called with."""
    asked: dict[str, Any] = {}
    run = types.SimpleNamespace(url=None, log=lambda *_, **__: None, finish=lambda **_: None)
    package, errors = types.ModuleType("wandb"), types.ModuleType("wandb.errors")
    package.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    vars(errors).update(UsageError=ValueError, AuthenticationError=PermissionError)
    vars(package).update(Settings=dict, setup=lambda _: None, init=lambda **given: asked.update(given) or run)
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setitem(sys.modules, "wandb.errors", errors)
    return asked


@pytest.mark.usefixtures("one_device")
def test_every_setting_is_read_and_an_invented_one_is_not(tiny_model, tmp_path, wandb_asked):
    """Two steps with refills, a question too long for its prompt, evaluations, checkpoints and a metric service."""
    short, long = tmp_path / "short.jsonl", tmp_path / "long.jsonl"
    for file, times in ((short, 1), (long, 9)):
        rows = ({"question": "What is 1 + 2 ? " * each, "answer": "3"} for each in {1, times})
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    correction = {"correction": "mask", "correction_low": 0.5, "correction_high": 2.0, "old_logprobs": "trainer"}
    targets = {"kl_target": 0.1, "entropy_target": 100.0}
    changes = {
        "model": str(tiny_model),
        "runs_dir": str(tmp_path),
        "steps": 2,
        "tasks": [
            {
                "name": "arithmetic",
                "rewards": {"correct": 1.0, "length": 1.0},
                "curriculum": {"levels": [{}, {"operations": ["sub"]}]},
            },
            {"name": "jsonl", "path": str(long), "eval_path": str(short)},
        ],
        "algorithm": {"recipe": "dapo", "max_refills": 1, "kl": "k3", "kl_coef": 0.1, **correction, **targets},
        "grading": {"overlong_buffer_tokens": 2},  # lengths of a group differ, so there is an update
        "lora": {"rank": 2},
        "teacher": {"model": str(tiny_model)},
        "train": {"optimizer": {"schedule": "linear"}},
        "eval": {"every_steps": 3, "questions": 2, "samples": 1},
        "checkpoint": {"every_steps": 1, "keep_best": 1},
        "metrics": {"wandb": {"mode": "offline", "tags": ["tiny"]}},
    }
    config = with_invented(Config).model_validate(merged(TINY, changes))
    with made_anew(), recorded() as read:
        assert train(config, plain=True) == 0  # pyright: ignore[reportArgumentType]
    by_effect = {("AlgorithmConfig", name) for name in ARGUMENTS}
    by_effect.add(("TaskConfig", "completion"))  # of written completions alone: tests/train/test_sft.py
    by_effect.add(("RolloutConfig", "group_chips"))  # of several devices: tests/models/test_layout_choice.py
    by_effect |= {("TeacherConfig", name) for name in ("template", "max_prompt_tokens")}  # test_privileged.py
    by_effect.add(("AlgorithmConfig", "gamma"))  # with credit: turn
    by_effect |= {  # tests/train/test_reward_models.py
        ("RewardModelConfig", name) for name in RewardModelConfig.model_fields
    }
    by_effect |= {("JudgeConfig", name) for name in JudgeConfig.model_fields}  # tests/tasks/test_judges.py
    by_effect |= {("CriticConfig", name) for name in CriticConfig.model_fields}  # of ppo: tests/train/test_critic.py
    by_effect |= {("ReferenceConfig", name) for name in ReferenceConfig.model_fields}  # test_moving_reference.py
    by_effect |= {  # tests/train/test_filter.py
        (section.__name__, name)
        for section in (FilterConfig, RetireConfig, ProgressConfig)
        for name in section.model_fields
    }
    by_effect |= {  # tests/train/test_loss_parts.py
        (section.__name__, name) for section in (LossPartConfig, DemonstrationsConfig) for name in section.model_fields
    }
    by_effect |= {  # of conversations: tests/train/test_episodes.py
        (section.__name__, name) for section in (LimitsConfig, EnvironmentsConfig) for name in section.model_fields
    }
    unread = set(settings(type(config))) - read - by_effect
    assert unread == set(settings(type(config))) - set(settings(Config))
    assert len(unread) > 60
    assert (wandb_asked["project"], wandb_asked["tags"]) == ("podium", ["tiny"])


@pytest.mark.parametrize("option", ARGUMENTS)
def test_an_option_of_the_advantage_changes_it(option):
    rewards, lengths = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]), np.ones((2, 3))
    recipes = [
        make_recipe(AlgorithmConfig.model_validate({option: value}), group_size=3, prompts_per_step=2)
        for value in ARGUMENTS[option]
    ]
    first, second = (recipe.advantage(rewards, lengths) for recipe in recipes)
    assert not np.allclose(first, second)
