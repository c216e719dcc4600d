"""Which number format `auto` means, from what the CPU says of itself."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from podium import accelerators
from podium.accelerators import auto_dtype, capability_of, cpu_flags, host_memory, kernels_of, kernels_on

OLD = "fpu sse4_2 avx avx2 fma avx512f avx512_vnni"
NEW = f"{OLD} avx512_bf16"


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Have Linux describe the CPU by these flags, and XLA's by these options."""

    def say(flags: str, xla_flags: str = "") -> None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: spectre\n\n" * 2)
        monkeypatch.setattr(accelerators, "CPU_INFO", tmp_path / "cpuinfo")
        monkeypatch.setenv("XLA_FLAGS", xla_flags)

    return say


@pytest.mark.parametrize(
    ("flags", "xla_flags", "dtype"),
    [
        (OLD, "", "float32"),
        (NEW, "", "bfloat16"),
        (f"{OLD} amx_bf16 amx_tile", "", "bfloat16"),
        (NEW, "--xla_cpu_max_isa=AVX2", "float32"),
        (NEW, "--xla_a=1 --xla_cpu_max_isa=AVX512_VNNI --xla_b=2", "float32"),
        (NEW, "--xla_cpu_max_isa=AVX512_BF16", "bfloat16"),
        (NEW, "--xla_cpu_max_isa=amx", "bfloat16"),
    ],
)
def test_auto_on_a_cpu_is_bfloat16_where_it_is_faster(say, flags: str, xla_flags: str, dtype: str):
    say(flags, xla_flags)
    assert auto_dtype("cpu", cpu_flags()) == dtype


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_auto_is_bfloat16_on_accelerators(platform: str):
    assert auto_dtype(platform, frozenset()) == "bfloat16"


# Compute capabilities of NVIDIA's table: V100 7.0, T4 7.5, A100 8.0, L4 8.9, H100 9.0, B200 10.0, RTX 5090 12.0.
@pytest.mark.parametrize(
    ("capability", "dtype", "kernels"),
    [("7.0", "float32", "none"), ("7.5", "float32", "none"), ("6.1", "float32", "none")]
    + [(each, "bfloat16", "gpu") for each in ("8.0", "8.9", "9.0", "10.0", "12.0", "")]
    + [("gfx942", "bfloat16", "none")],  # AMD's MI300X
)
def test_a_gpus_capability_decides_kernels_and_number_format(capability: str, dtype: str, kernels: str):
    assert auto_dtype("gpu", frozenset(), capability) == dtype
    assert kernels_on("gpu", capability) == kernels
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    assert (capability_of(device), kernels_of(device)) == (capability, kernels)


def test_kernels_of_other_platforms_do_not_depend_on_a_capability():
    assert [kernels_on(platform) for platform in ("cpu", "tpu")] == ["none", "tpu"]
    assert kernels_of(SimpleNamespace(platform="tpu")) == "tpu"


def test_memory_is_the_limit_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(accelerators, "MEMORY_LIMIT", tmp_path / "memory.max")
    whole = host_memory()
    for text, expected in (("1073741824\n", 2**30), ("max\n", whole), (f"{2 * whole}\n", whole)):
        (tmp_path / "memory.max").write_text(text)
        assert host_memory() == expected


def test_a_machine_that_is_no_linux_says_nothing_of_its_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(accelerators, "CPU_INFO", tmp_path / "absent")
    assert cpu_flags() == frozenset()
    (tmp_path / "absent").write_text("processor : 0\nFeatures : fp asimd bf16\n")  # ARM
    assert auto_dtype("cpu", cpu_flags()) == "float32"
