import pytest

from podium.compiler import FUSED_GATHERS, OFFLOADED_OPTIONS, TPU_OPTIONS, compiler_options


@pytest.mark.parametrize(
    ("libtpu", "fused"), [("0.0.42.1", True), ("0.0.50.1", False), ("0.0.51", False), ("0.1.0", False)]
)
def test_gathers_are_fused_where_the_compiler_takes_it(libtpu, fused):
    options = compiler_options("tpu", libtpu)
    assert (FUSED_GATHERS in options) == fused
    assert options.keys() | {FUSED_GATHERS} == TPU_OPTIONS.keys()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_other_devices_have_no_options_of_the_tpu(platform):
    assert not compiler_options(platform).keys() & TPU_OPTIONS.keys()


def test_only_programs_with_arrays_in_the_hosts_memory_have_more_room_before_something_is_made_again():
    assert {**compiler_options("tpu"), **OFFLOADED_OPTIONS} == compiler_options("tpu", offloaded=True)
    assert compiler_options("gpu", offloaded=True) == compiler_options("gpu")
    assert not OFFLOADED_OPTIONS.keys() & compiler_options("tpu").keys()
