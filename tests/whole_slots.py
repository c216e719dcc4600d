"""Engines with one decode program instead of three: for tests in which the number of live sequences is not the subject.

An engine decodes with all of its slots, with half and with a quarter of them, by three programs. Tests of the engine,
its verbs, its scheduler and its workload, the pages' blocks and the examples have all three.
"""

import contextlib
import pkgutil
from collections.abc import Callable, Iterator
from unittest import mock

from podium.config.schema import RolloutConfig
from podium.config.sizes import slot_sizes

ASKED_AT = "podium.rollout.cache_layout.slot_sizes"


def all_slots(rollout: RolloutConfig, shards: int) -> tuple[int, ...]:
    """The first of `slot_sizes` alone."""
    return slot_sizes(rollout, shards)[:1]


@contextlib.contextmanager
def whole_slots() -> Iterator[None]:
    """Engines that are made meanwhile decode with all slots, however few are live; plans count the same."""
    with _sizes(all_slots):
        yield


@contextlib.contextmanager
def every_size() -> Iterator[None]:
    """The opposite, within `whole_slots`."""
    with _sizes(slot_sizes):
        yield


@contextlib.contextmanager
def _sizes(found: Callable[[RolloutConfig, int], tuple[int, ...]]) -> Iterator[None]:
    """Plans keep simulations of rollouts, which must not outlive the sizes that they were made with."""
    simulated = pkgutil.resolve_name("podium.plan.request.workload:_simulated")
    with mock.patch(ASKED_AT, found):
        simulated.cache_clear()
        yield
    simulated.cache_clear()
