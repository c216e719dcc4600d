"""The benches run: each says what it takes, small ones go through, and what judges their numbers is right."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from others_code import others_code

from benches import closed_form, gpu_accuracy, gpu_steps, tasks
from benches.children import gpu_step
from benches.demo import RandomArithmetic, meets_bar
from benches.gsm8k import check_grader
from benches.record import command, record
from podium.config.schema import TaskConfig
from podium.hlo.memory import Memory
from podium.tasks.registry import make_task

ROOT = Path(__file__).parents[1]
NO_BENCH = (
    "__init__",
    "record",
    "own_step",
    "planned",
    "torch_peer",
    "recipes",
    "damage_runs",
    "hf_generate",
)  # recipes takes no options, and its tests run what it runs; damage runs damage_runs, rollout_hf runs hf_generate
BENCHES = [*sorted(path.stem for path in (ROOT / "benches").glob("*.py") if path.stem not in NO_BENCH), "pods"]
NEED_TORCH = ("logits_parity",)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parity
@pytest.mark.parametrize("name", BENCHES)
def test_bench_says_what_it_is_for(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    if name in NEED_TORCH:
        others_code("torch")
    module = importlib.import_module(f"benches.{name}.__main__" if name == "pods" else f"benches.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert f"python -m benches.{name}" in said
    assert "--results" in said


def test_a_bench_tells_malloc_before_it_imports_jax():
    told = "import sys, podium.malloc as malloc; malloc.keep_freed_memory = lambda: print('jax' in sys.modules)"
    finished = run(sys.executable, "-c", f"{told}; import benches.own_step")
    assert finished.stdout.split()[:1] == ["False"], finished.stderr


def test_a_bench_is_a_command():
    finished = run(sys.executable, "-m", "benches.demo", "--help")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("usage: python -m benches.demo ")


@pytest.mark.long
def test_gpu_script_goes_through_on_a_cpu():
    finished = run("sh", "benches/gpu.sh", "--tiny")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    decode, update = (json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{"))
    assert decode["rollout"]["tokens"] == 8 * 4
    assert 0 < update["completion_tokens"] <= 2 * 4 * 8


@pytest.mark.long
@pytest.mark.parametrize("name", ["serve", "turns"])
def test_a_trial_of_a_bench_goes_through(name: str):
    finished = run(sys.executable, "-m", f"benches.{name}", "--tiny")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert json.loads(finished.stdout.splitlines()[-1])


def test_where_a_gpus_time_goes_is_tried_on_a_cpu(tmp_path: Path):
    given = ("--tiny", "--results", str(tmp_path), "--only", "decode", "decode, four steps unrolled", "update, demo")
    finished = run(sys.executable, "-m", "benches.gpu_steps", *given)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads((tmp_path / "gpu-steps-cpu.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["decode", "update, demo", "decode, four steps unrolled"]
    for row in found["rows"]:
        assert row["busy_ms"] + row["gap_ms"] + row["outside_ms"] == pytest.approx(row["traced_ms"], abs=1e-3)
        assert 0 < row["busy_ms"] <= row["kernel_ms"] + 1e-3
        assert row["kernels"] > 10
    again = run(sys.executable, "-m", "benches.gpu_steps", *given)
    assert (again.returncode, again.stdout) == (0, ""), "what the file has is not measured again"


def test_a_variant_that_fails_is_part_of_the_result():
    variant = gpu_steps.Variant(name="decode", given=["decode:demo"], flags="--xla_gpu_has_no_such_flag=1")
    row = gpu_steps.measure(variant, 60, os.environ, tiny=True)
    assert "xla_gpu_has_no_such_flag" in gpu_steps.line(row)
    assert gpu_steps.line(gpu_steps.measure(variant, 0.01, os.environ, tiny=True)).endswith("not done after 0 s")


def test_time_of_a_trace_is_kernels_gaps_and_what_is_outside():
    us = 1000
    spans = [(0, 10), (11, 20), (15, 30), (50, 60), (60, 64)]
    kernels = [gpu_step.Span(us * begin, us * end, name) for (begin, end), name in zip(spans, "abacc", strict=True)]
    call = gpu_step.Span(0, 3 * us, "cuGraphLaunch")
    found = gpu_step.where_time_goes(kernels, [call], steps=2, traced_s=100e-6)
    expected = {"traced_ms": 0.05, "kernel_ms": 0.024, "busy_ms": 0.0215, "gap_ms": 0.0105, "outside_ms": 0.018}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert (found["long_gap_ms"], found["long_gaps"], found["kernels"]) == (0.01, 0.5, 2.5)
    assert (found["median_kernel_us"], found["median_gap_us"]) == (10.0, 10.5)
    assert found["largest"] == [("a", 1.0, 0.0125), ("c", 1.0, 0.007), ("b", 0.5, 0.0045)]
    assert found["host_calls"] == [("cuGraphLaunch", 0.5, 0.0015)]


def test_a_loops_event_does_not_count_beside_its_body():
    loop, first, second, after = ((0, 9, "loop"), (1, 4, "first"), (4, 9, "second"), (9, 12, "after"))
    spans = [gpu_step.Span(*each) for each in (first, loop, after, second)]
    assert [span.name for span in gpu_step.innermost(spans)] == ["first", "second", "after"]


def test_gpu_script_says_how_it_is_used():
    finished = run("sh", "benches/gpu.sh", "--help")
    assert finished.returncode == 2
    assert "--tiny" in finished.stdout


@pytest.mark.parametrize(("name", "found"), [("NVIDIA L40S", "l40s-1"), ("NVIDIA A100-SXM4-80GB", "a100-80-1")])
def test_a_gpu_is_planned_for_by_what_nvidia_smi_calls_it(monkeypatch, name, found):
    monkeypatch.setattr(gpu_accuracy, "_smi", lambda what: f"{name}\nanother\n")
    assert gpu_accuracy.this_gpu().name == found


def test_a_gpu_without_a_target_is_told_where_to_add_one(monkeypatch):
    monkeypatch.setattr(gpu_accuracy, "_smi", lambda what: "NVIDIA P40\n")
    with pytest.raises(
        ValueError, match="NVIDIA P40: podium plan has no target for this GPU; add one to podium/plan/gpus"
    ):
        gpu_accuracy.this_gpu()


def test_record_says_how_a_number_came_about(tmp_path: Path):
    said = json.loads(record("question-cpu", {"answer": 42}, tmp_path / "new", packages=("pytest",)).read_text())
    assert said["answer"] == 42
    assert said["versions"]["pytest"] == pytest.__version__
    assert said["machine"]["cores"] >= 1
    assert {"command", "commit", "date"} <= set(said)


def test_a_command_names_no_folder_of_a_machine(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["record.py", "--results", "/home/me/numbers", "--kills", "20"])
    assert command().endswith(" --results numbers --kills 20")


def test_random_rewards_do_not_depend_on_the_answer_and_evaluation_is_honest():
    task = make_task(TaskConfig(name="benches.demo:RandomArithmetic"))
    assert isinstance(task, RandomArithmetic)
    prompt, held_out = task.prompts("train")[0], task.prompts("eval")[0]
    right = [task.grade(prompt, prompt.answer) for _ in range(400)]
    wrong = [task.grade(prompt, "no number") for _ in range(400)]
    assert 0.4 < np.mean(right) < 0.6
    assert 0.4 < np.mean(wrong) < 0.6
    assert (task.grade(held_out, held_out.answer), task.grade(held_out, "no number")) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("after", "wall_s", "control", "expected"),
    [
        (0.95, 400.0, False, True),
        (0.85, 400.0, False, False),
        (0.95, 500.0, False, False),
        (0.30, 600.0, True, True),  # answers stay long, which takes time
        (0.45, 400.0, True, False),
    ],
)
def test_demo_run_is_held_to_its_bar(after: float, wall_s: float, control: bool, expected: bool):
    row = {"before": {"accuracy": 0.5, "avg_at_k": 0.25}, "after": {"accuracy": 1.0, "avg_at_k": after}}
    assert meets_bar({**row, "wall_s": wall_s}, control) is expected


def test_random_configurations_are_the_same_each_time_and_near_what_devices_have():
    (first, config, accelerator), (again, _, _) = (next(closed_form.limit_draws(1, 3)) for _ in range(2))
    assert first == again
    assert (config.model, config.mesh) == (first["model"], first["mesh"])
    needed = max(each.total for each in closed_form.estimates(config, accelerator))
    low, high = closed_form.LIMIT_NEAR
    assert low <= needed / accelerator.hbm_bytes <= high


@pytest.mark.parametrize(("form", "truth", "false"), [(0.9, 1.2, 1), (0.9, 0.99, 0), (1.01, 1.02, 0), (1.1, 0.9, 0)])
def test_a_run_said_to_fit_that_does_not_is_counted(form: float, truth: float, false: int):
    row = {"hbm_gib": 1.0, "closed_form_gib": form, "compiled_gib": truth, "error": form / truth - 1}
    found = closed_form.figures([row, row | {"ratio": 1.5}, row | {"ratio": 0.9}])
    assert (found["programs"], found["false_fits"]) == (3, 3 * false)
    assert found["mean"] == pytest.approx(abs(form / truth - 1), abs=1e-4)
    assert found["seconds"] == [0.9, pytest.approx(1.2), 1.5]


def test_each_drawn_configuration_says_what_its_binding_programs_take(monkeypatch: pytest.MonkeyPatch):
    settings, config, accelerator = next(closed_form.limit_draws(1, 3))
    sizes = {"update": 100, "decode": 90, "prefill": 10, "score": 20}
    monkeypatch.setattr(closed_form, "estimate", lambda *_: [Sized(name, size) for name, size in sizes.items()])
    monkeypatch.setattr(
        closed_form, "compile_phases", lambda jobs: {job.phase: Sized(job.phase, 2**30) for job in jobs}
    )
    row = closed_form.ask(settings, config, accelerator)
    assert row["compiled_gib"] == {"update": 1.0, "decode": 1.0} and not row["refused"]


def test_runs_of_tasks_that_stand_in_the_results_are_not_repeated():
    row = {"task": "sums-2", "seed": 0, "control": False, "steps": 40}
    assert tasks.missing([row], ["sums-2"], [0, 1], 40) == [("sums-2", 1, False), ("sums-2", 0, True)]
    assert len(tasks.missing([row], ["sums-2"], [0, 1], 10)) == 3


class Sized:
    """Stands for an estimate and for a compiled phase."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.total, self.device_bytes = name, size, size
        self.memory, self.refused = Memory(peak=size, code=0), False


def test_grader_check_counts_what_is_graded_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answers = ["#### 18", "16 - 19 = -3\n#### -3", "#### 1,200", "#### 0"]
    rows = [json.dumps({"question": f"question {n}", "answer": answer}) for n, answer in enumerate(answers)]
    (tmp_path / "test.jsonl").write_text("\n".join(rows))
    task = make_task(TaskConfig(name="gsm8k", path=str(tmp_path)))
    found = check_grader(task)
    assert (found["questions"], found["own_answer_missed"], found["different_number_accepted"]) == (4, 0, 0)
    monkeypatch.setattr(task, "grade", lambda prompt, completion: float("18" in completion))
    found = check_grader(task)
    assert found["own_answer_missed"] == 3 * len(found["forms"])
    assert found["different_number_accepted"] > 0


@pytest.mark.parity
def test_torch_peer_computes_the_models_logits_and_gradient():
    torch = others_code("torch")
    import transformers

    from benches.torch_peer import Sampler

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("llama", **sizes, **heads)
    ).eval()
    sampler, prompts = Sampler(model, 16), [[5, 6, 7, 8], [9, 10]]
    logits, cache, padding = sampler._prefill(prompts, 4, 2)
    again = sampler._logits(torch.tensor([[3], [3]]), (4 - padding)[:, None], seen_by(torch, padding), cache, 4)
    with torch.no_grad():
        for row, prompt in enumerate(prompts):
            for found, tokens in ((logits[row], prompt), (again[row], [*prompt, 3])):
                expected = model(input_ids=torch.tensor([tokens])).logits[0, -1]
                assert float((found - expected).abs().max()) < 0.03 * float(expected.abs().max())


def seen_by(torch, padding):
    """The bias of a fifth token: it sees all but the padding."""
    seen = torch.arange(5)[None] >= padding[:, None]
    return torch.zeros(seen.shape).masked_fill(~seen, -1e30)[:, None, None, None]
