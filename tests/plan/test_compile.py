import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny_decoder import DECODER

from podium.accelerators import GIB, Accelerator, find_accelerator
from podium.config.attention_blocks import window_scope
from podium.hlo.cost import unknown_loops, walk
from podium.hlo.hlo_text import parse
from podium.hlo.memory import Memory
from podium.plan.compiled import compile as compiling
from podium.plan.compiled import tpu_compile
from podium.plan.compiled.compile import CompileProgress, CompilerError, answer_key, cache_folder, compile_phases
from podium.plan.compiled.compile_worker import Job, _compile_kernels, looped_work, named_memory
from podium.plan.compiled.phases import phase_programs
from podium.plan.compiled.tpu_compile import CODE_PER_TEXT, compile_tpu
from podium.sharding import make_mesh
from podium.train.setup import run_spec
from tests.plan.estimated import tiny_config

CPU = Accelerator(name="cpu-8", generation="cpu", devices=8, hosts=1, hbm_bytes=GIB)
OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (37.46G) exceeds"
    " available HBM (30.75G)."
)
REPORT = """\
Memory Space: default (color=0)
Total bytes: 18714980032 (17.43GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list

Memory Space: vmem (color=1)
Total bytes: 100532224 (95.88MiB)
"""
"""The beginning of what libtpu 0.0.42.1 writes of an update."""
GOLDEN = Path(__file__).parents[1] / "golden" / "plan"


def job_of(phase: str, folder: Path, *, accelerator: Accelerator = CPU, **changes: Any) -> Job:
    return Job(
        phase=phase,
        config=tiny_config(**changes),
        decoder=DECODER,
        accelerator=accelerator,
        programs=folder / "programs",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this module's answers are kept; sync is among them."""
    folder = tmp_path_factory.mktemp("plan")
    compile_phases([job_of("sync", folder)], folder=folder)
    return folder


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of all processes that are started."""
    found, popen = [], subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        process = popen(*arguments, **options)
        found.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    return found


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


# What is kept


def test_what_was_compiled_is_answered_from_disk(folder, no_process):
    reports: list[CompileProgress] = []
    compiled = compile_phases([job_of("sync", folder)], folder=folder, progress=reports.append)["sync"]
    assert [(each.phase, each.state, each.done, each.total) for each in reports] == [("sync", "cached", 1, 1)]
    mesh = make_mesh("auto")
    here = phase_programs(run_spec(tiny_config(), DECODER, mesh), mesh)["sync"]
    stats = here.lower().compile().memory_analysis()
    assert compiled.residents == here.residents
    sizes = (stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes)
    assert compiled.memory.peak == sum(sizes) - stats.alias_size_in_bytes > 0
    assert sum(compiled.parts.values()) == compiled.memory.peak


def test_the_same_program_is_not_compiled_again_under_other_settings(folder):
    first = compile_phases([job_of("sync", folder)], folder=folder)["sync"]
    lion = {"optimizer": {"name": "lion"}}
    again = compile_phases([job_of("sync", folder, train=lion)], folder=folder)["sync"]
    assert len(list((folder / "programs").glob("*.json"))) == 1
    assert again.compile_s == first.compile_s  # the first's own
    assert again.residents["optimizer"] < first.residents["optimizer"]


class Lowered:
    """A program whose compiler writes down what it assigns, as libtpu does, and then `ends`."""

    def __init__(self, ends: Any, *, accepted: bool, report: str = REPORT) -> None:
        self.ends, self.accepted, self.report = ends, accepted, report

    def compile(self, compiler_options: dict[str, str]) -> Any:
        folder = Path(compiler_options["xla_dump_to"])
        for attempt, text in (("module_0000.jit_f", "an earlier attempt"), ("module_0003.jit_f", "HloModule jit_f")):
            (folder / f"{attempt}.after_optimizations.txt").write_text(text)
            (folder / f"{attempt}.after_optimizations-memory-usage-report.txt").write_text(self.report)
        if self.accepted:
            (folder / "module_0003.jit_f.after_optimizations_after_buffer_assignment.txt").touch()
        return self.ends()


def refuse() -> None:
    raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)


def test_a_program_is_known_long_before_its_code():
    never = threading.Event()
    made = compile_tpu(Lowered(never.wait, accepted=True), whole=False)
    never.set()
    assert (made.memory.peak, made.refusal, made.whole) == (18_714_980_032, None, False)
    assert made.text == "HloModule jit_f" and made.memory.code == CODE_PER_TEXT * len(made.text)


def test_a_program_whose_code_comes_while_it_is_read_is_not_taken_for_whole(monkeypatch):
    """Its code is still the estimate, which would be kept as the compiler's own number."""
    read, compiler = threading.Event(), list[threading.Thread]()

    def end() -> Any:
        compiler.append(threading.current_thread())
        assert read.wait(60)
        return types.SimpleNamespace(cost_analysis=dict)

    def memory(**sizes: int) -> Memory:
        read.set()
        compiler[0].join(60)
        return Memory(**sizes)

    monkeypatch.setattr(tpu_compile, "Memory", memory)
    made = compile_tpu(Lowered(end, accepted=True), whole=False)
    assert not compiler[0].is_alive() and (made.whole, made.counted) == (False, None)
    assert made.memory.code == CODE_PER_TEXT * len(made.text)


def test_the_report_of_an_older_compiler_is_read_too():
    older = "Total bytes used: 8858405408 (8.25GiB)\n\nAllocations sorted by size:\n"
    made = compile_tpu(Lowered(refuse, accepted=True, report=older), whole=False)
    assert made.memory.peak == 8_858_405_408


def test_a_whole_program_has_the_size_of_its_code():
    class Compiled:
        def memory_analysis(self) -> Any:
            return types.SimpleNamespace(generated_code_size_in_bytes=1234)

        def cost_analysis(self) -> dict[str, float]:
            return {"flops": 1e12, "bytes accessed": 1e9}

    made = compile_tpu(Lowered(Compiled, accepted=True), whole=True)
    assert made.whole and made.memory == Memory(peak=18_714_980_032, code=1234)


def test_a_refused_program_has_its_text_and_the_figure_of_the_refusal():
    made = compile_tpu(Lowered(refuse, accepted=False), whole=False)
    assert made.refusal is not None and made.refusal.needed == pytest.approx(37.46 * GIB)
    assert made.text and not made.whole and made.memory.peak == 18_714_980_032


def test_a_refusal_before_anything_was_assigned_has_its_own_figure():
    made = compile_tpu(Lowered(refuse, accepted=False, report=""), whole=False)
    assert made.refusal is not None and made.memory.peak == made.refusal.needed and made.text == ""


def test_a_failure_of_the_compiler_is_no_refusal():
    def crash() -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile TPU kernel")

    with pytest.raises(jax.errors.JaxRuntimeError, match="Mosaic"):
        compile_tpu(Lowered(crash, accepted=False), whole=False)


def test_a_compiler_that_writes_no_report_is_an_error():
    with pytest.raises(RuntimeError, match="wrote no report of the memory"):
        compile_tpu(Lowered(lambda: None, accepted=True, report=""), whole=False)


def test_an_answer_is_for_one_machine_model_source_and_set_of_options(tmp_path, monkeypatch):
    job = job_of("update", tmp_path)
    other = [
        dataclasses.replace(job, phase="score"),
        dataclasses.replace(job, accelerator=dataclasses.replace(CPU, devices=4)),
        dataclasses.replace(job, accelerator=find_accelerator("v6e-8")),
        dataclasses.replace(job, decoder=dataclasses.replace(DECODER, vocab=301)),
        job_of("update", tmp_path, train={"rows_per_device": 2}),
    ]
    keys = {answer_key(each) for each in (job, *other)}
    monkeypatch.setenv("XLA_FLAGS", "--xla_other=1")
    keys.add(answer_key(job))
    monkeypatch.setattr(compiling, "_source_hash", lambda: "other")
    keys.add(answer_key(job))
    assert len(keys) == len(other) + 3


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "x"},
        {"steps": 7},
        {"algorithm": {"clip_low": 0.1}},
        {"train": {"remat": "none"}},
        {"eval": {"samples": 2}},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_an_answer_is_for_one_whole_config(changes, tmp_path):
    """No setting is on a list of those that a phase does not depend on: such a list would grow stale."""
    for phase in ("sync", "decode", "update"):
        assert answer_key(job_of(phase, tmp_path)) != answer_key(job_of(phase, tmp_path, **changes))


def test_where_programs_are_kept_decides_no_answer(tmp_path):
    assert answer_key(job_of("sync", tmp_path)) == answer_key(job_of("sync", tmp_path / "elsewhere"))


def test_every_module_of_podium_decides_an_answer():
    hashed = {path.relative_to(compiling.PACKAGE).parts[0] for path in compiling.sources()}
    assert {"hlo", "plan", "models", "rollout", "train", "algorithms", "config", "sharding.py"} <= hashed


def test_files_lie_below_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "podium" / "plan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "podium" / "plan"


# What goes wrong


def test_a_tpu_without_its_compiler_is_told_before_anything_starts(tmp_path, monkeypatch, no_process):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"v6e-8: the TPU compiler \(libtpu\) is not installed"):
        compile_phases([job_of("sync", tmp_path, accelerator=find_accelerator("v6e-8"))], folder=tmp_path)


def test_a_config_that_does_not_divide_is_the_users_error(tmp_path):
    with pytest.raises(ValueError, match=r"rollout\.slots is 12 and is split over 8 devices; set it to a multiple"):
        compile_phases([job_of("decode", tmp_path, rollout={"slots": 12})], folder=tmp_path)


def test_a_crash_keeps_its_text_and_what_was_done_before(tmp_path):
    with pytest.raises(
        CompilerError, match=r"compiling nonsense for cpu-8: the compiler failed \(exit status 1\)"
    ) as e:
        compile_phases([job_of("sync", tmp_path), job_of("nonsense", tmp_path)], folder=tmp_path, at_once=1)
    assert e.value.exit_code == 3
    kept = Path(str(e.value).rpartition("Its whole output: ")[2])
    assert kept.parent == tmp_path / "crashes"
    assert "KeyError: 'nonsense'" in kept.read_text()
    assert len(list((tmp_path / "answers").glob("*.json"))) == 1


def test_a_compiler_that_is_killed_had_too_little_memory(tmp_path, monkeypatch):
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nsleep 0.3\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    message = r"this machine has too little memory; the compiler had taken \d+\.\d of its \d+\.\d GiB"
    with pytest.raises(CompilerError, match=message):
        compile_phases([job_of("sync", tmp_path)], folder=tmp_path)


def test_a_compilation_that_takes_too_long_is_ended(tmp_path, pids):
    with pytest.raises(CompilerError, match=r"compiling sync for cpu-8 took longer than 0 s; .*--fast"):
        compile_phases([job_of("sync", tmp_path)], folder=tmp_path, limit_s=0.01)
    assert pids
    assert all(map(is_gone, pids))


def test_whoever_interrupts_leaves_no_process(tmp_path, pids):
    def interrupt(progress: CompileProgress) -> None:
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_phases([job_of(name, tmp_path) for name in ("sync", "init")], folder=tmp_path, progress=interrupt)
    assert all(map(is_gone, pids))


def test_a_process_ends_when_nobody_waits_for_it(tmp_path):
    """Its parent dies without a word; it notices."""
    code = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, '-m', 'podium.plan.compiled.compile_worker', sys.argv[1]]\n"
        "command += ['none', str(os.getpid())]\n"
        "process = subprocess.Popen(command)\n"
        "print(process.pid, flush=True)\nos._exit(0)\n"
    )
    fifo = tmp_path / "job"
    os.mkfifo(fifo)  # the worker waits for it to be written
    done = subprocess.run([sys.executable, "-c", code, fifo], capture_output=True, text=True, check=True)
    pid, patience = int(done.stdout), time.monotonic() + 120
    while not is_gone(pid) and time.monotonic() < patience:
        time.sleep(0.1)
    assert is_gone(pid)


# What a program's text says


def test_rounds_of_a_loop_are_counted_when_they_are_known():
    module = parse((GOLDEN / "decode.hlo").read_text())
    works = looped_work(module, {"fsdp": 8})
    (loop,) = unknown_loops(module)
    for rounds in (1, 7):
        whole = walk(module, {"fsdp": 8}, trips={loop: rounds})
        flops = sum((each.once + rounds * each.each) * each.work.flops for each in works)
        moved = sum((each.once + rounds * each.each) * each.work.hbm_bytes for each in works)
        assert flops == pytest.approx(sum(work.times * work.flops for work in whole.works))
        assert moved == pytest.approx(whole.hbm_bytes)
    assert any(each.once for each in works)
    assert any(each.each for each in works)


def test_a_loop_over_windows_of_experts_rows_is_counted_once():
    text = (GOLDEN / "decode.hlo").read_text()
    (loop,) = unknown_loops(parse(text))
    module = parse(text.replace(f'"{loop}"', '"jit(decode)/mlp/windows/while"'))
    (renamed,) = unknown_loops(module)
    works = looped_work(module, {"fsdp": 8})
    whole = walk(module, {"fsdp": 8}, trips={renamed: 1})
    assert not any(each.each for each in works)
    assert sum(each.once * each.work.hbm_bytes for each in works) == pytest.approx(whole.hbm_bytes)


@pytest.mark.parametrize(("blocks", "rounds"), [(1, 4 / 3), (4, 16 / 3), (32, 6)])
def test_attention_in_a_window_reads_the_pages_of_the_window_and_no_more(blocks, rounds):
    """Of 17 pages, in blocks of 3, where full attention reads blocks of 4."""
    text = (GOLDEN / "decode.hlo").read_text()
    (loop,) = unknown_loops(parse(text))
    module = parse(text.replace(f'"{loop}"', f'"jit(decode)/{window_scope(17)}/scores/while"'))
    (renamed,) = unknown_loops(module)
    works = looped_work(module, {"fsdp": 8}, blocks, block_pages=4)
    whole = walk(module, {"fsdp": 8}, trips={renamed: rounds})
    assert not any(each.each for each in works)
    assert sum(each.once * each.work.hbm_bytes for each in works) == pytest.approx(whole.hbm_bytes)


def written_short(text: str) -> str:
    """As libtpu 0.0.50 writes it: elements of tuples are no instructions of their own, but `%tuple#index`."""
    element = re.compile(r"^ +%([\w.-]+) = .* get-tuple-element\(%([\w.-]+)\), index=(\d+).*\n", re.MULTILINE)
    short = {name: f"%{whole}#{index}" for name, whole, index in element.findall(text)}

    def written(name: str) -> str:
        whole, index, number = short[name].partition("#") if name in short else (f"%{name}", "", "")
        return (written(whole[1:]) if index else whole) + index + number

    return re.sub(r"%([\w.-]+)", lambda found: written(found[1]), element.sub("", text))


@pytest.mark.parametrize("name", ["decode", "stack", "stack_overlapping"])
def test_newer_compilers_text_says_the_same(name):
    text = (GOLDEN / f"{name}.hlo").read_text()
    short = written_short(text)
    assert text.count(" get-tuple-element(") > 10 > short.count(" get-tuple-element(") and "#" in short
    old, new = (parse(each) for each in (text, short))
    assert list(new.loops.values()) == list(old.loops.values())
    assert set(looped_work(new, {"fsdp": 8})) == set(looped_work(old, {"fsdp": 8}))
    assert named_memory(new, 10**9)[0] == named_memory(old, 10**9)[0]


def test_more_than_one_loop_that_runs_nobody_knows_how_often_is_an_error():
    text = (GOLDEN / "stack.hlo").read_text().replace("known_trip_count", "").replace("direction=LT", "direction=NE")
    with pytest.raises(ValueError, match="does not say how often its loops run"):
        looped_work(parse(text), {"fsdp": 8})


@pytest.mark.parametrize("more", [-60_000, 0, 10**8])
def test_names_add_up_to_the_compilers_figure(more):
    module = parse((GOLDEN / "decode.hlo").read_text())
    parts, arrays = named_memory(module, 10**9)
    found = 10**9 - parts["fragmentation"]
    less, _ = named_memory(module, found + more)
    assert sum(less.values()) == found + more
    assert less.get("fragmentation", 0) == pytest.approx(max(0, more), abs=len(parts))
    assert (less["parameters"], less["kv_cache"]) == (parts["parameters"], parts["kv_cache"])  # arguments
    assert [each.bytes for each in arrays] == sorted((each.bytes for each in arrays), reverse=True)


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.1", {"xla_gpu_enable_triton_gemm": False}),
        ("INTERNAL: another", None),
    ],
)
def test_products_that_xla_has_no_kernel_for_are_those_of_cublas(said, options):
    class Lowered:
        def compile(self, compiler_options=None):
            if compiler_options is None:
                raise jax.errors.JaxRuntimeError(said)
            return compiler_options

    if options is None:
        with pytest.raises(jax.errors.JaxRuntimeError, match="another"):
            _compile_kernels(Lowered())
    else:
        assert _compile_kernels(Lowered()) == options
