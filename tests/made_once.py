"""Programs made once for a process: equal runs of the tests share their tracing, lowering and compilation."""

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from podium.algorithms.recipe_options import make_recipe
from podium.rollout.engine_weights import make_sync
from podium.rollout.programs import make_copy, make_copy_cells, make_decode, make_extend
from podium.train.optimizer.transforms import make_optimizer
from podium.train.step import make_score, make_train_step

FACTORIES = (
    make_recipe,
    make_optimizer,
    make_score,
    make_train_step,
    make_sync,
    make_extend,
    make_copy,
    make_copy_cells,
    make_decode,
)
"""Pure functions of the settings that they are given. What each has made is kept for the rest of the process."""


def key_of(value: Any) -> Any:
    """A hashable stand-in that is equal for equal settings."""
    if isinstance(value, BaseModel):
        return type(value), value.model_dump_json()
    if isinstance(value, functools.partial):
        return value.func, key_of(value.args), key_of(value.keywords)
    if isinstance(value, Mapping):
        return tuple((name, key_of(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(key_of, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(key_of(getattr(value, field.name)) for field in dataclasses.fields(value))
    return value


MADE: dict[Callable[..., Any], dict[Any, Any]] = {}
"""What has been made, by factory and settings."""


def _kept(factory: Callable[..., Any]) -> Callable[..., Any]:
    made = MADE.setdefault(factory, {})
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def once(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        if factory is make_optimizer and given["config"].schedule == "constant":
            given["total_steps"] = 0  # has no effect then
        key = key_of(given)
        if key not in made:
            made[key] = factory(*args, **options)
        return made[key]

    return once


KEPT = {factory: _kept(factory) for factory in FACTORIES}


def forget_programs() -> None:
    """Make everything anew from now on."""
    for made in MADE.values():
        made.clear()


@contextlib.contextmanager
def made_once() -> Iterator[None]:
    """Every module of Podium that imported one of the factories has the one that keeps what it made."""
    with _in_place_of(KEPT):
        yield


@contextlib.contextmanager
def made_anew() -> Iterator[None]:
    """The opposite, within `made_once`: programs are traced again, for tests of what tracing reads."""
    with _in_place_of({kept: factory for factory, kept in KEPT.items()}):
        yield


@contextlib.contextmanager
def _in_place_of(others: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("podium."):
                for attribute, value in list(vars(module).items()):
                    if inspect.isfunction(value) and value in others:
                        patch.setattr(module, attribute, others[value])
        yield
