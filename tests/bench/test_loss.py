"""`podium bench loss`: the seed's flags and keys, and one loss by every implementation."""

import json

import pytest
from typer.testing import CliRunner

from podium.doctor.benchmarks.cli import bench_app

TINY = [
    "--batch",
    "2",
    "--time",
    "3",
    "--vocab",
    "40",
    "--iters",
    "1",
    "--warmup",
    "0",
    "--old_logp_noise_scale",
    "0.2",
]
TINY += ["--epsilon_low", "0.1", "--epsilon_high", "0.3", "--block_size", "16", "--time_block", "8", "--dtype", "f32"]


def run(*options: str):
    return CliRunner().invoke(bench_app, ["loss", *TINY, *options])


@pytest.mark.parametrize("mode", ["on_policy", "off_policy"])
def test_every_implementation_has_the_same_loss(mode):
    found = {}
    for impl in ("jax", "ref", "kernel"):
        done = run("--impl", impl, "--mode", mode)
        assert done.exit_code == 0, done.output
        found[impl] = json.loads(done.stdout)
    assert set(found["kernel"]) == {
        *("impl", "mode", "device", "shape", "dtype", "loss", "kernel", "grpo", "first_call_s", "avg_step_ms"),
        *("mem_after_alloc", "mem_after_run", "mem_compiled"),
    }
    losses = [each["loss"] for each in found.values()]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)
    assert found["kernel"]["kernel"]["interpret"] and found["kernel"]["kernel"]["block_size"] == 16
    assert found["kernel"]["shape"] == {"batch": 2, "time": 3, "vocab": 40}


def test_a_machine_without_a_kernel_says_so():
    assert "cpu has no kernel: the TPU's kernel is interpreted" in run("--impl", "kernel").stderr


def test_sums_in_bfloat16_are_refused():
    done = run("--compute_dtype", "bf16")
    assert done.exit_code == 1
    assert "off by up to 0.06 nat" in str(done.exception)
