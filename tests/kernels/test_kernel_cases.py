"""The cases of kernels that `podium doctor` runs on its device, emulated, against the same by plain jax in float32."""

import pytest

from podium.doctor.kernel_cases import BARS, CASES, EMULATED, error_of

NAMES = [make.__name__ for makes in CASES.values() for make in makes]


@pytest.mark.parametrize("name", list(dict.fromkeys(NAMES)))
def test_an_emulated_kernel_is_right(name):
    """By the platform of this machine, kernels that a GPU and a TPU have are the GPU's."""
    (make,) = {make for makes in CASES.values() for make in makes if make.__name__ == name}
    cases = list(make(EMULATED, "TPU v6 lite"))
    assert cases
    for case in cases:
        assert error_of(case) < BARS[case.dtype], case.name
