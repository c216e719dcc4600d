"""What moves between devices and their host's memory during an update, and what of it is waited for."""

import importlib.util

import pytest
from estimated import QWEN_3B, config, decoder

from podium.accelerators import find_accelerator
from podium.hlo.cost import Peaks, Roofline
from podium.plan.calibration import Chip, Factor, calibrated
from podium.plan.closed_form.estimate import update_phase
from podium.plan.compiled.compile import compile_phases
from podium.plan.compiled.compile_worker import Job
from podium.plan.planner import make_plan
from podium.plan.request.candidate import Case
from podium.plan.request.phase_sizes import Planned, offloaded_bytes
from podium.plan.request.plan_subject import Subject
from podium.plan.result import Seconds
from podium.plan.search.study import Study

V6E, H100 = find_accelerator("v6e-8"), find_accelerator("h100-8")
WAYS = {"inputs": {"remat": "offload"}, "moments": {"offload_optimizer": True}, "neither": {}}
NEEDS_LIBTPU = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")


def share(value: float, low: float, high: float) -> Factor:
    return Factor(value=value, low=low, high=high, source="")


def test_a_copy_is_waited_for_as_far_as_it_outlasts_the_work_beside_it_at_the_same_end_of_both_ranges():
    peaks = Peaks(flops_bf16=1e12, flops_f32=1e12, hbm_bandwidth=1e9, link_bandwidth=1e9, host_bandwidth=1e9)
    ici, host = share(1, 1, 1), share(0.5, 0.25, 1)
    chip = Chip(peaks=peaks, links=1, calibration={"ici": ici, "host": host, "update": share(0.8, 0.5, 1)})
    line = Roofline(compute=8.0, hbm=0.0, ici=0.0, latency=0.0, copies=((2.0, 3.0, 4.0), (4.0, 1.0, 0.0)))
    seconds, bound_by = calibrated([(1, line)], chip, "update")
    # two copies of 3 s beside 4 s of work, four of 1 s beside none
    expected, least, most = 2 * (3 / 0.5 - 4 / 0.8) + 4 / 0.5, 4.0, 2 * (3 / 0.25 - 4 / 0.5) + 4 / 0.25
    assert seconds == Seconds(value=8 / 0.8 + expected, low=8 + least, high=8 / 0.5 + most)
    assert bound_by == "compute"
    alone = Roofline(compute=1.0, hbm=0.0, ici=0.0, latency=0.0, copies=line.copies)
    assert calibrated([(1, alone)], chip, "update")[1] == "host"


@pytest.mark.parametrize("way", WAYS)
def test_the_closed_form_copies_each_layers_input_there_and_back_and_moments_once_an_update(way):
    run = Planned.of(config(train={"rows_per_device": 4} | WAYS[way]), V6E, QWEN_3B).sizes
    copies = [each for each in update_phase(run, micro_batches=4).copies if each[1]]
    one = 4 * run.row_tokens * 2048 * 2
    shares = {times * beside for times, size, beside in copies if size == one}
    if way == "inputs":
        assert [(times, size) for times, size, _ in copies] == [(36, one), (36, one)]
        assert sum(shares) == pytest.approx(1)
        assert min(shares) == pytest.approx(1 / 4, abs=0.02)  # the layers forward, of those and three more backward
    else:
        assert copies == ([(1 / 4, 2 * offloaded_bytes(run), 0.0)] if way == "moments" else [])


@NEEDS_LIBTPU
@pytest.mark.parametrize(
    "way", ["inputs", *(pytest.param(way, marks=pytest.mark.long) for way in ("moments", "neither"))]
)
def test_a_compiled_update_copies_what_the_closed_form_says(way, tmp_path):
    made = config(train={"rows_per_device": 2, "head_chunk_tokens": 16} | WAYS[way])
    model, accelerator = decoder(width=256, mlp_width=512, vocab=1024, head_dim=128), find_accelerator("v6e-1")
    job = Job(phase="update", config=made, decoder=model, accelerator=accelerator, programs=tmp_path / "p")
    works = compile_phases([job], folder=tmp_path)["update"].cost(1).works
    copied = [(work.times * work.host_bytes, work.beside) for work in works if work.host_bytes]
    run = Planned.of(made, accelerator, model).sizes
    expected = sum(times * size for times, size, _ in update_phase(run).copies)
    assert sum(size for size, _ in copied) == pytest.approx(expected, rel=0.25)  # arrays are padded to tiles
    assert bool(copied) == (way != "neither")
    if way == "inputs":
        assert all(traffic for _, (_, _, traffic) in copied)  # a layer is computed meanwhile


def test_of_a_gpu_that_is_not_there_an_update_with_moments_on_the_host_is_estimated_and_says_so():
    made = config(train={"rows_per_device": 4} | WAYS["moments"])
    plan = make_plan(Planned.of(made, H100, QWEN_3B))
    assert plan.estimate_only
    assert any(note.startswith("estimated, not compiled: ") for note in plan.notes)
    assert any("0.80 (0.40-0.95) of 64 GB/s" in note for note in plan.notes)
    subject = Subject(model="Qwen/Qwen2.5-3B-Instruct", settings=["train.offload_optimizer=true"])
    (probe,) = Study(subject, lengths="fixed:8").peaks([(Case(H100), ["update"])])
    assert not probe.compiled
