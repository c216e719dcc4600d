import math
from collections.abc import Mapping

import numpy as np
import pytest
from jax.sharding import Mesh

from podium.models.params import GATHERED_AXES, TRAIN_AXES
from podium.sharding import ShardingRules, exchange_sizes, exchanges


class Device:
    """What the rules ask of a device."""

    def __init__(self, platform: str, kind: str) -> None:
        self.platform, self.device_kind = platform, kind


def rules_of(kind: str, sizes: Mapping[str, int], platform: str = "tpu") -> ShardingRules:
    """How an update computes on devices that are not there; the mesh has one device along an axis without a size."""
    shape = {axis: sizes.get(axis, 1) for axis in ("dp", "fsdp", "sp", "tp")}
    devices = [Device(platform, kind) for _ in range(math.prod(shape.values()))]
    mesh = Mesh(np.array(devices, dtype=object).reshape(tuple(shape.values())), tuple(shape))
    return ShardingRules(mesh, GATHERED_AXES, stored=TRAIN_AXES)


@pytest.mark.parametrize(
    ("devices", "sizes"),
    [
        (1, [1]),
        (6, [6]),
        (8, [8]),
        (16, [8, 2]),
        (32, [8, 4]),
        (64, [8, 8]),
        (256, [8, 8, 4]),
        (12, [6, 2]),
        (22, [2, 11]),
        (13, [13]),
        (26, [2, 13]),
    ],
)
def test_many_devices_exchange_parts_in_groups_of_up_to_eight(devices, sizes):
    assert exchange_sizes(devices) == sizes


def test_groups_are_neighbours_first_then_the_same_place_in_each_group():
    first, second, third = exchanges(("fsdp",), rules_of("TPU v6 lite", {"fsdp": 256}).mesh)
    assert first is not None and second is not None and third is not None
    assert (first[0], first[-1]) == ([0, 1, 2, 3, 4, 5, 6, 7], [248, 249, 250, 251, 252, 253, 254, 255])
    assert (second[0], second[-1]) == ([0, 8, 16, 24, 32, 40, 48, 56], [199, 207, 215, 223, 231, 239, 247, 255])
    assert (third[0], third[-1]) == ([0, 64, 128, 192], [63, 127, 191, 255])
    assert exchanges(("fsdp",), rules_of("TPU v6 lite", {"fsdp": 8}).mesh) == [None]


@pytest.mark.parametrize(
    ("kind", "sizes", "many"),
    [
        ("TPU v6 lite", {"fsdp": 8}, False),
        ("TPU v6 lite", {"fsdp": 16}, True),
        ("TPU v6 lite", {"dp": 8, "fsdp": 8}, False),
        ("TPU v6 lite", {"fsdp": 8, "tp": 4}, False),
        ("TPU v6 lite", {"fsdp": 8, "sp": 2}, True),
        ("TPU v5", {"fsdp": 32}, False),
        ("TPU v5", {"fsdp": 64}, True),
        ("TPU v4", {"fsdp": 64}, True),
    ],
)
def test_gradients_that_the_tpus_compiler_would_sum_whole_are_summed_in_exchanges(kind, sizes, many):
    rules = rules_of(kind, sizes)
    assert rules.in_many_parts("width", "mlp") is many
    assert not rules.in_many_parts("rank", "mlp")


def test_gradients_on_gpus_are_left_to_xla():
    assert not rules_of("NVIDIA H100 80GB HBM3", {"fsdp": 64}, "gpu").in_many_parts("width", "mlp")
