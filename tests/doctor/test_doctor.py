"""`podium doctor` finds what is wrong with a machine, names it with the way out, and measures the one that it is on."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import jax
import pytest

from podium import cli
from podium.doctor import command, model
from podium.doctor.benchmarks import timing
from podium.doctor.command import WITHOUT_DEVICES, as_object, diagnose
from podium.doctor.diagnosis import Row, rate, seconds
from podium.doctor.machine_subject import TINY
from podium.doctor.system import SmiGpu
from podium.sharding import make_mesh
from tests.doctor.machines import CUDA, GIB, GOOD, H100, MadeSystem, with_chips, with_gpus


def problems(system: MadeSystem) -> list[str]:
    """What is wrong with a machine, but for what would have to be measured."""
    found = diagnose(system, Path("runs"), sizes=TINY, probes=WITHOUT_DEVICES)
    return [f"{section}, {row.name}: {row.problem}" for section, row in found.problems]


@pytest.mark.parametrize(
    "system",
    [MadeSystem(), with_gpus(8, 8), with_chips(8, 8), with_gpus(1, 1, cards=None)],
    ids=["cpu", "gpu", "tpu", "without nvidia-smi"],
)
def test_nothing_is_wrong_with_a_machine_on_which_all_is_well(system):
    assert problems(system) == []


@pytest.mark.parametrize(
    ("system", "named"),
    [
        (
            with_gpus(1, 1, driver="570.86.10"),
            "versions, NVIDIA driver: jax-cuda13-plugin needs driver 580 or newer; install one",
        ),
        (
            with_gpus(1, 0, driver="470.10", cards=None, packages={**GOOD, "jax-cuda12-plugin": "0.10.2"}),
            "versions, NVIDIA driver: jax-cuda12-plugin needs driver 525 or newer; install one",
        ),
        (
            MadeSystem(packages=GOOD | CUDA | {"jax-cuda13-pjrt": "0.10.1"}),
            "versions, jax-cuda13-pjrt: jaxlib 0.10.2 ignores it",
        ),
        (
            MadeSystem(packages={**GOOD, "libtpu": "0.0.50"}),
            "versions, libtpu: this jax asks for ==0.0.42.\\*; pip install 'podium-rl\\[tpu\\]'",
        ),
        (with_gpus(8, 7), "devices, GPUs: nvidia-smi has 8 and jax finds 7; one is broken"),
        (with_gpus(8, 0, cards=None), "devices, GPUs: /dev has 8 and jax finds 0; look at nvidia-smi"),
        (with_gpus(1, 0, packages=GOOD), "devices, GPUs: .* pip install 'podium-rl\\[cuda\\]'"),
        (with_chips(4, 3), "devices, TPU chips: /dev has 4 and jax finds 3"),
        (with_chips(4, 0), "devices, TPU chips: .*another process may hold them; JAX_PLATFORMS=tpu makes jax say why"),
        (with_chips(4, 0, packages=GOOD, variables={"TPU_NAME": "a"}), "pip install 'podium-rl\\[tpu\\]'"),
        (MadeSystem(broken="Unable to initialize backend 'tpu'"), "devices, jax: jax does not start: Unable to init"),
        (
            with_gpus(1, 1, cards=[SmiGpu(name=H100, driver="580.1", total=80 * GIB, used=30 * GIB)]),
            "memory, GPU 0: 30.0 GiB were in use before jax started; end the processes of nvidia-smi",
        ),
        (
            dataclasses.replace(with_gpus(1, 1), seen=[dataclasses.replace(with_gpus(1, 1).seen[0], limit=50 * GIB)]),
            "memory, usable by jax: 72% of what is assumed; another process holds memory, or XLA_CLIENT_MEM_FRACTION",
        ),
        (MadeSystem(wanted_processors=20.0), "devices, load: 20 processes want 2 processors: nothing below is this"),
        (MadeSystem(bytes_per_s=40e6), "disk, write: 19% of what is assumed; write runs to a faster disk"),
        (MadeSystem(sync_s=0.4), "disk, small file: 20.0 times what is assumed"),
        (MadeSystem(read_only=True), "disk, .*: cannot be written: Read-only file system; set runs_dir"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_is_wrong_is_named_with_the_way_out(system, named):
    found = problems(system)
    assert any(re.search(named, each) for each in found), found


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ("9.0", "9.0: kernels and bfloat16"),
        ("7.5", "7.5, below 8.0: programs are XLA's, without kernels, and in float32"),
    ],
)
def test_it_is_said_what_a_gpu_runs(capability, said):
    system = with_gpus(1, 1)
    seen = [dataclasses.replace(system.seen[0], capability=capability)]
    found = diagnose(dataclasses.replace(system, seen=seen), Path("runs"), sizes=TINY, probes=WITHOUT_DEVICES)
    (row,) = (row for row in found.sections["devices"] if row.name == "compute capability")
    assert (row.text, row.problem) == (said, "")


def test_devices_that_the_environment_hides_are_no_fault():
    assert problems(with_gpus(8, 0, variables={"JAX_PLATFORMS": "cpu"})) == []
    assert problems(with_gpus(8, 2, variables={"CUDA_VISIBLE_DEVICES": "0,3"})) == []
    assert problems(with_chips(8, 1, variables={"TPU_VISIBLE_CHIPS": "0"})) == []


def test_other_devices_than_tpus_have_files_of_vfio_too():
    assert problems(MadeSystem(files=["/dev/vfio/12"])) == []


def test_a_rate_is_wrong_below_its_share_and_a_time_above_its_multiple():
    assert not rate("read", "GB/s", 60.0, 100.0, least=0.6, way_out="wait").problem
    assert rate("read", "GB/s", 59.0, 100.0, least=0.6, way_out="wait").problem == "59% of what is assumed; wait"
    assert not rate("read", "GB/s", 1.0, None, least=0.6, way_out="wait").problem
    assert not seconds("sync", "ms", 2.0, 1.0, most=2.0, way_out="wait").problem
    assert seconds("sync", "ms", 2.1, 1.0, most=2.0, way_out="wait").problem == "2.1 times what is assumed; wait"


def test_a_device_that_fails_is_a_row_and_the_rest_is_examined():
    import jax

    def failing(subject):
        yield Row(name="first", text="well")
        raise jax.errors.JaxRuntimeError("INTERNAL: uncorrectable ECC error\nstack")

    probes = {"products": failing, "rest": lambda subject: [Row(name="last", text="well")]}
    found = diagnose(MadeSystem(), Path("runs"), sizes=TINY, probes=probes)
    assert [row.name for rows in found.sections.values() for row in rows] == ["first", "failed", "last"]
    assert found.problems[0][1].problem == "INTERNAL: uncorrectable ECC error"


def run(monkeypatch, capsys, system: MadeSystem, *options: str) -> tuple[object, str]:
    monkeypatch.setattr(command, "ThisSystem", lambda: system)
    monkeypatch.setattr(command, "PROBES", WITHOUT_DEVICES)
    monkeypatch.setattr(sys, "argv", ["podium", "doctor", *options])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code, capsys.readouterr().out


def test_scripts_read_the_exit_status_and_one_object(monkeypatch, capsys):
    status, out = run(monkeypatch, capsys, MadeSystem(), "--json")
    assert (status, json.loads(out)["ok"], json.loads(out)["problems"]) == (0, True, [])
    status, out = run(monkeypatch, capsys, MadeSystem(bytes_per_s=1e6), "--json")
    assert status == 1 and json.loads(out)["problems"][0].startswith("disk, write: ")
    status, out = run(monkeypatch, capsys, with_gpus(8, 7, driver="525.60.13"))
    assert status == 1 and "versions, NVIDIA driver: " in out and "devices, GPUs: " in out and "2 wrong" in out
    status, _ = run(monkeypatch, capsys, MadeSystem(), "--quick")
    assert status == 2


@pytest.mark.usefixtures("whole_slots")
def test_this_machine_is_measured_from_its_versions_to_a_small_model(tmp_path, monkeypatch):
    from podium.doctor.system import ThisSystem

    monkeypatch.setattr(model, "make_mesh", lambda text: make_mesh(text, jax.devices()[:1]))  # compiles faster
    for name, size in (("product_rate", TINY.product), ("copy_rate", TINY.array_bytes)):  # of the plan's peaks
        measure = getattr(timing, name)
        monkeypatch.setattr(timing, name, lambda *given, measure=measure, size=size: measure(*given, size))
    sizes = dataclasses.replace(TINY, row_tokens=32 + TINY.new_tokens)  # one program prefills
    found = diagnose(ThisSystem(), tmp_path, sizes=sizes)
    rows = {row.name: row for section in found.sections.values() for row in section}
    assert list(found.sections) == list(command.PROBES)
    for name in ("bfloat16", "float32", "int8", "read", "copy", "write", "all-gather", "all-to-all", "decode step"):
        assert (rows[name].measured or 0) > 0, name
    assert rows["update"].assumed and rows["kernels"].text.startswith("skipped")
    assert json.loads(json.dumps(as_object(found)))["sections"]["links"][0]["unit"] == "ms"
    assert list(tmp_path.iterdir()) == []
