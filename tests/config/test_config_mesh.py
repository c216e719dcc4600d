"""What `mesh:` means on how many devices."""

import pytest

from podium.config.mesh import mesh_shape, mesh_sizes
from podium.sharding import make_mesh


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("auto", (1, -1, 1, 1)),
        ("host_local", (4, -1, 1, 1)),
        ("fsdp:4,tp:2", (1, 4, 1, 2)),
        ("tp:2, dp:-1", (-1, 1, 1, 2)),
        ("1, -1, 1", (1, -1, 1, 1)),
        ("2,4,1", (2, 4, 1, 1)),
        ("dcn:2,fsdp:4", (2, 4, 1, 1)),
        ("dcn:2,dp:3,fsdp:-1,tp:2", (6, -1, 1, 2)),
        ("dcn:2,dp:-1,fsdp:4", (-1, 4, 1, 1)),
        ("sp:4", (1, 1, 4, 1)),
        ("tp:2,sp:2,fsdp:-1", (1, -1, 2, 2)),
    ],
)
def test_a_mesh_is_read_without_devices(text, sizes):
    assert tuple(mesh_sizes(text, hosts=4).values()) == sizes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4x2",
        "1,2",
        "1,2,3,4",
        "pp:2",
        "dp:2,dp:2",
        "-1,-1,1",
        "0,1,1",
        "dp:0",
        "1,-2,1",
        "dcn:0",
        "dcn:-1,fsdp:4",
        "dcn:2,dcn:2",
    ],
)
def test_what_is_no_mesh_is_refused_without_devices(text):
    with pytest.raises(ValueError, match=r"^mesh "):
        mesh_sizes(text)


@pytest.mark.parametrize(
    ("text", "devices", "hosts", "shape"),
    [
        ("auto", 8, 2, (1, 8, 1, 1)),
        ("host_local", 8, 2, (2, 4, 1, 1)),
        ("host_local", 8, 1, (1, 8, 1, 1)),
        ("tp:2,dp:-1", 8, 1, (4, 1, 1, 2)),
        ("2,2,2", 8, 1, (2, 2, 1, 2)),
    ],
)
def test_one_size_takes_what_is_left(text, devices, hosts, shape):
    assert tuple(mesh_shape(text, devices=devices, hosts=hosts).values()) == shape


@pytest.mark.parametrize(("text", "devices"), [("fsdp:4", 8), ("2,2,2", 4), ("dp:3,fsdp:-1", 8)])
def test_a_mesh_that_does_not_fit_says_how_many_devices_it_needs(text, devices):
    with pytest.raises(ValueError, match=rf"needs \d+ devices.*this machine has {devices};"):
        mesh_shape(text, devices=devices, hosts=1)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("auto", (2, 8, 1, 1)),
        ("host_local", (4, 4, 1, 1)),
        ("dcn:2,fsdp:-1", (2, 8, 1, 1)),
        ("dcn:2,fsdp:-1,tp:2", (2, 4, 1, 2)),
        ("dcn:2,dp:-1,fsdp:2", (8, 2, 1, 1)),
        ("1,-1,1", (1, 16, 1, 1)),
    ],
)
def test_slices_are_the_outermost_copies(text, shape):
    """Two slices of two hosts with four devices each."""
    assert tuple(mesh_shape(text, devices=16, hosts=4, slices=2).values()) == shape


@pytest.mark.parametrize(
    ("text", "slices", "message"),
    [
        ("dcn:2,fsdp:-1", 1, "dcn is the number of slices, and there is 1; set dcn:1, or leave it out"),
        ("dcn:4,fsdp:-1", 2, "dcn is the number of slices, and there are 2; set dcn:2, or leave it out"),
        ("dcn:2,dp:-1,fsdp:16", 2, "dp 1 does not divide over 2 slices; set fsdp, sp and tp within a slice"),
    ],
)
def test_slices_that_are_not_there_are_refused(text, slices, message):
    with pytest.raises(ValueError, match=message):
        mesh_shape(text, devices=16, hosts=4, slices=slices)


class Device:
    """What make_mesh asks of a device."""

    platform = "tpu"

    def __init__(self, index: int) -> None:
        self.id, self.process_index, self.slice_index = index, (index // 4 + 1) % 4, index // 4 % 2


def test_devices_of_a_slice_and_of_a_host_are_contiguous_whatever_their_order():
    devices = make_mesh("dcn:2,fsdp:-1", [Device(index) for index in reversed(range(16))]).devices
    places = [(device.slice_index, device.process_index, device.id) for device in devices.flat]
    assert places == sorted(places)
    assert {device.slice_index for device in devices[0].flat} == {0}
