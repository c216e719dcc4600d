"""`podium plan` as a user meets it: what it prints, where, with which status."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from podium import cli
from podium.config.schema import Config
from podium.hlo.memory import Memory
from podium.plan import command
from podium.plan.compiled.compile import CompileProgress, CompilerError
from podium.plan.compiled.compile_worker import CompiledPhase, Job
from podium.plan.result import Plan
from podium.plan.search import study
from tests.plan.made_plans import GIB, HBM, close, estimated, plan, seconds, too_large
from tests.plan.test_check import write_run

MODEL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
RUN = """\
model: ./model
tasks: [{name: arithmetic}]
prompts_per_step: 8
group_size: 4
rollout: {max_prompt_tokens: 64, max_new_tokens: 64, slots: 32}
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What plans keep: many tests plan the same programs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def podium(tmp_path, monkeypatch, capsys, cache):
    """Runs a command line in this process, in a folder with a config and a model: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    Path("run.yaml").write_text(RUN)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(MODEL))

    def podium(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["podium", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code or 0, *capsys.readouterr()

    return podium


@pytest.fixture
def planner(monkeypatch):
    """Puts plans in the place of the planner's; keeps what it was asked for. `answer` decides what a config gets."""

    class Planner:
        calls: list[tuple[Config, str, bool]] = []  # noqa: RUF012
        compiled: Any = staticmethod(lambda config: plan())
        closed_form: Any = staticmethod(lambda config: estimated())

        def __call__(self, run, *, by="compiler", lengths="gsm8k", progress=None, whole=(), largest=False) -> Plan:
            config, accelerator, fast = run.config, run.sizes.accelerator, by == "closed_form"
            self.calls.append((config, accelerator.name, fast))
            if not fast and progress is not None:
                for state, done in (("compiling", 0), ("compiled", 1)):
                    progress(CompileProgress(phase="update", state=state, seconds=63.0, done=done, total=1))
            made = self.closed_form(config) if fast else self.compiled(config)
            return dataclasses.replace(made, accelerator=accelerator.name)

    planner = Planner()
    planner.calls = []
    monkeypatch.setattr(study, "make_plan", planner)
    monkeypatch.setattr(command, "check_compiler", lambda machine: None)
    return planner


def test_traces_answer_by_themselves(podium):
    status, out, err = podium("plan", "run.yaml", "--tpu", "v6e-8", "--fast")
    assert (status, err) == (0, "")
    assert out.startswith("fits v6e-8 as traced, with ")
    assert "traced, not compiled: sync, prefill, decode and update" in out


def test_the_closed_form_gives_the_first_answer_about_a_model(podium):
    status, out, err = podium("plan", "./model", "--on", "v6e-8")
    assert (status, err) == (0, "")
    assert out.startswith("fits v6e-8 by closed-form estimate, with ")
    assert "everything is estimated by the closed form" in out


def test_json_is_one_object_and_nothing_else_on_stdout(podium):
    status, out, err = podium("plan", "run.yaml", "--tpu", "v6e-8", "--fast", "--json", "--steps", "7")
    value = json.loads(out)
    assert (status, err) == (0, "")
    assert (value["verdict"], value["tpu"], value["estimate_only"], value["cost"]["steps"]) == (
        "fits",
        "v6e-8",
        True,
        7,
    )
    assert {"sync", "prefill", "decode", "update", "checkpoint"} <= {phase["name"] for phase in value["phases"]}


@pytest.mark.parametrize(("made", "status"), [(plan, 0), (close, 0), (too_large, 1)])
def test_the_status_says_whether_it_fits(podium, planner, made, status):
    planner.compiled = lambda config: made()
    done, out, err = podium("plan", "run.yaml", "--tpu", "v6e-8", "--json", "--no-suggest")
    assert done == status and json.loads(out)["verdict"] == made().verdict
    assert ("warning: too close to call on v6e-8" in err) == (made is close)


def test_what_the_compiler_does_is_told_on_stderr_after_an_estimate(podium, planner):
    _, out, err = podium("plan", "run.yaml", "--tpu", "v6e-8", "--no-suggest")
    lines = err.splitlines()
    assert lines[0].startswith("estimate while compiling: fits v6e-8 by closed-form estimate")
    assert lines[1] == "compiled update for v6e-8 in 63 s (1 of 1)" and len(lines) == 2
    assert out.startswith("fits v6e-8 with 6.9 GiB to spare") and "while" not in out


def test_whoever_interrupts_is_told_what_is_kept(podium, planner):
    def interrupt(config):
        raise KeyboardInterrupt

    planner.compiled = interrupt
    status, out, err = podium("plan", "run.yaml", "--tpu", "v6e-8")
    assert (status, out) == (130, "")
    assert (
        err.endswith("interrupted; compiled programs are kept, and the same command continues\n") and "error" not in err
    )


def test_a_crash_of_the_compiler_is_status_3(podium, planner):
    def crash(config):
        raise CompilerError(
            "compiling update for v6e-8: the compiler failed (signal SIGSEGV): boom\nIts whole output: x"
        )

    planner.compiled = crash
    status, out, err = podium("plan", "run.yaml", "--tpu", "v6e-8", "--json")
    assert (status, out) == (3, "")
    assert err.endswith(
        "error: compiling update for v6e-8: the compiler failed (signal SIGSEGV): boom\nIts whole output: x\n"
    )


FAST = ("run.yaml", "--tpu", "v6e-8", "--fast")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give CONFIG and --on, as `podium plan run.yaml --on v6e-8`, or --check RUN alone"),
        (("run.yaml",), "give CONFIG and --on, as `podium plan run.yaml --on v6e-8`, or --check RUN alone"),
        (
            ("--check", "runs/a", "--html", "plan.html"),
            "give CONFIG and --on, as `podium plan run.yaml --on v6e-8`, or",
        ),
        (
            (*FAST, "--compare", "seed=1,2", "--suggest"),
            "--suggest works on one plan for one machine; drop it",
        ),
        (("run.yaml", "--check", "runs/a"), "give CONFIG and --on, as `podium plan run.yaml --on v6e-8`, or"),
        (("run.yaml", "--tpu", "v6e-9"), "unknown accelerator 'v6e-9'; nearest: v6e-8, v6e-4, v6e-16"),
        (("run.yaml", "--tpu", "v6e-8,"), "unknown accelerator ''; nearest: "),
        ((*FAST, "--set", "mesh=fsdp:3"), "mesh 'fsdp:3' needs 3 devices, and this machine has 8; set mesh to auto"),
        (
            (*FAST, "--set", "mesh=fsdp:2,tp:4"),
            "mesh 'fsdp:2,tp:4': 6 query heads (./model) cannot be split evenly by tp:4; on 8 devices tp can be 1, 2",
        ),
        (
            (*FAST, "--set", "rollout.layout=replicated", "--set", "rollout.slots=12"),
            "rollout.slots is 12 and is split over 8 devices; set it to a multiple of 8",
        ),
        (
            (*FAST, "--set", "rollout.layout=replicated", "--set", "rollout.prefill_rows=3"),
            "rollout.prefill_rows is 3 and is split over 8 devices",
        ),
        (
            ("Qwen/Qwen3-0.6B", "--on", "v6e-1", "--fast", "--set", "rollout.max_new_tokens=1000000"),
            "rollout.max_new_tokens: 1000000, with rollout.max_prompt_tokens 512, makes sequences of 1000512 tokens,"
            " and Qwen/Qwen3-0.6B has 40960 positions; set rollout.max_new_tokens to 40448 or less",
        ),
        ((*FAST, "--lengths", "fixed:99"), "lengths 'fixed:99': must be 1 to rollout.max_new_tokens, 64; raise that"),
        (
            (*FAST, "--lengths", "nowhere"),
            "lengths 'nowhere': no such file; write gsm8k, fixed:N, or the path of a run",
        ),
        ((*FAST, "--prices", "none.yaml"), "prices none.yaml: cannot be read (No such file or directory)"),
        (
            (*FAST, "--html", "none/plan.html"),
            "--html none/plan.html: the folder none does not exist; create it, or name another",
        ),
        ((*FAST, "--search", "seed"), "--search seed: cannot be searched; search one of train.rows_per_device, "),
        ((*FAST, "--search", "rollout.slots", "--compare", "seed=1,2"), "--search and --compare cannot be combined"),
        ((*FAST, "--compare", "seed"), "--compare seed: write KEY=a,b,c, as rollout.layout=replicated,legacy;"),
        ((*FAST, "--compare", "seeed=1"), "v6e-8 seeed=1: seeed: unknown key; did you mean seed?"),
        (("--check", "runs/none"), "--check runs/none: plan.json is missing; podium train writes it on TPU"),
    ],
)
def test_a_wrong_question_is_status_2_in_a_line(podium, arguments, message):
    status, out, err = podium("plan", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [("--nope",), ("run.yaml", "--tpu", "v6e-8", "--steps", "0"), ("run.yaml", "--tpu")]
)
def test_wrong_usage_is_status_2(podium, arguments):
    status, out, err = podium("plan", *arguments)
    assert (status, out) == (2, "") and "Error" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("steps", "0", "a whole number of at least 1, got 0"),
        ("rollout.slots", "1000000000000", "a whole number from 1 to 65536, got 1000000000000"),
    ],
)
def test_a_wrong_setting_is_status_2(podium, key, value, rule):
    status, out, err = podium("plan", *FAST, "--set", f"{key}={value}")
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {key}: expected {rule}\n    --set {key}={value}\n")


def test_a_missing_compiler_is_told_before_any_work(podium, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name))
    status, out, err = podium("plan", "run.yaml", "--tpu", "v6e-8")
    assert (status, out) == (2, "")
    assert err.startswith("error: v6e-8: the TPU compiler (libtpu) is not installed; pip install 'podium-rl[tpu]', or")
    assert podium("plan", "run.yaml", "--tpu", "v6e-8", "--fast")[0] == 0


def test_a_missing_gpu_compiler_is_told_too(podium, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "cuda" in name else find(name))
    status, out, err = podium("plan", "run.yaml", "--on", "h100-8")
    assert (status, out) == (2, "")
    assert err == (
        "error: h100-8: the GPU compiler (jax_cuda12_plugin) is not installed; pip install 'podium-rl[plan-gpu]', or"
        " plan with --fast\n"
    )
    assert podium("plan", "run.yaml", "--on", "h100-8", "--fast")[0] == 0
    # Settings that are wrong are told first: nobody should install a compiler for them.
    wrong = podium("plan", "run.yaml", "--on", "h100-8", "--set", "mesh=dp:3")[2]
    assert wrong.startswith("error: ") and "mesh" in wrong and "compiler" not in wrong


def test_changes_are_compiled_where_they_are_needed_or_asked_for(podium, planner):
    faster = dataclasses.replace(estimated(), step=seconds(2.0))
    planner.closed_form = lambda config: faster if config.rollout.slots == 16 else estimated()
    planner.compiled = lambda config: dataclasses.replace(
        plan(), step=seconds(2.5 if config.rollout.slots == 16 else 3.1)
    )
    _, out, _ = podium("plan", "run.yaml", "--tpu", "v6e-8")
    first = out.splitlines()[0]
    assert first.endswith("--set rollout.slots=16 makes a step 35% shorter (estimated)")  # 60 s to compile
    assert {config.rollout.slots for config, _, fast in planner.calls if not fast} == {32}
    _, out, _ = podium("plan", "run.yaml", "--tpu", "v6e-8", "--suggest", "--json")
    (found,) = json.loads(out)["suggestions"]
    assert (found["key"], found["value"], found["old"], found["compiled"]) == ("rollout.slots", 16, 32, True)
    assert podium("plan", "run.yaml", "--tpu", "v6e-8", "--no-suggest")[1].count("rollout.slots") == 0


@pytest.fixture
def compiler(monkeypatch):
    """Takes the place of the compiler of probes; `accepts` decides about a config. Keeps the jobs."""

    class Compiler:
        jobs: list[Job] = []  # noqa: RUF012
        accepts: Any = staticmethod(lambda config: True)

        def __call__(self, jobs, *, progress=None) -> list[CompiledPhase]:
            self.jobs += jobs
            sizes = [20 * GIB if self.accepts(job.config) else int(36.4 * GIB) for job in jobs]
            empty: dict[str, Any] = {"residents": {}, "parts": {}, "largest": (), "work": (), "compile_s": 9.0}
            return [CompiledPhase(memory=Memory(peak=size, code=0), refused=size > HBM, **empty) for size in sizes]

    compiler = Compiler()
    compiler.jobs = []
    monkeypatch.setattr(study, "compile_jobs", compiler)
    return compiler


def test_a_search_probes_only_what_the_setting_moves_and_plans_the_answer(podium, planner, compiler):
    compiler.accepts = lambda config: config.rollout.slots <= 24
    status, out, err = podium("plan", "run.yaml", "--tpu", "v6e-8", "--search", "rollout.slots", "--json")
    value = json.loads(out)
    assert status == 0 and value["setting"] == "rollout.slots=24" and value["verdict"] == "fits"
    assert (value["search"]["value"], value["search"]["too_large"], value["search"]["proven"]) == (24, 32, True)
    assert "rollout.slots=32: decode needs 36.4 of 31.25 GiB, refused by the compiler" in err
    assert {job.phase.partition(":")[0] for job in compiler.jobs} == {"prefill", "copy", "decode"}
    assert [config.rollout.slots for config, _, fast in planner.calls if not fast] == [24]


def test_a_search_in_which_nothing_fits_is_status_1(podium, planner, compiler):
    planner.compiled = lambda config: too_large()
    compiler.accepts = lambda config: False
    status, out, _ = podium("plan", "run.yaml", "--tpu", "v6e-8", "--search", "rollout.slots")
    assert status == 1 and out.startswith("rollout.slots: even 8 does not fit (36.4 GiB)\n")


def test_settings_and_machines_are_compared_best_first(podium, planner):
    planner.compiled = lambda config: plan() if config.rollout.layout == "replicated" else too_large()
    arguments = ["--tpu", "v6e-8,v6e-4", "--compare", "rollout.layout=legacy,replicated"]
    status, out, err = podium("plan", "run.yaml", *arguments, "--json")
    plans = json.loads(out)["plans"]
    assert status == 0 and err
    assert [(each["tpu"], each["setting"]) for each in plans[:2]] == [
        ("v6e-4", "rollout.layout=replicated"),
        ("v6e-8", "rollout.layout=replicated"),
    ]
    assert len(plans) == 4 and all(each["reason"] for each in plans)


def test_a_setting_that_cannot_be_planned_does_not_stop_the_others(podium):
    status, out, _ = podium("plan", *FAST, "--compare", "mesh=auto;fsdp:4,tp:2;fsdp:3", "--json")
    value = json.loads(out)
    assert status == 0 and len(value["plans"]) == 2
    (refused,) = value["refused"]
    assert refused["setting"] == "mesh=fsdp:3" and refused["error"].startswith("mesh 'fsdp:3' needs 3 devices")


def test_a_comparison_in_which_nothing_fits_is_status_1(podium, planner):
    planner.compiled = lambda config: too_large()
    assert podium("plan", "run.yaml", "--tpu", "v6e-8", "--compare", "seed=1,2")[0] == 1


def test_the_page_is_written_beside_the_answer(podium):
    status, out, _ = podium("plan", *FAST, "--html", "plan.html")
    assert status == 0 and out.startswith("fits v6e-8")
    assert "fits v6e-8 as traced" in Path("plan.html").read_text()


def test_nothing_heavy_is_imported_before_the_question_is_right(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    code = """import sys
from podium.cli import main
for arguments in (["--help"], ["run.yaml", "--tpu", "v6e-9"], ["--check", "none"]):
    sys.argv[1:] = ["plan", *arguments]
    try:
        main()
    except SystemExit as stopped:
        print("status", stopped.code or 0)
print("imported", [name for name in ("jax", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    said = [line for line in done.stdout.splitlines() if line.startswith(("status", "imported"))]
    assert said == ["status 0", "status 2", "status 2", "imported []"], done.stderr


def test_the_check_is_printed_as_a_table_or_an_object(podium, tmp_path):
    write_run(tmp_path)
    status, out, _ = podium("plan", "--check", str(tmp_path))
    line = next(line.split() for line in out.splitlines() if line.strip().startswith("update"))
    assert status == 0 and line[-3:-1] == ["1.0", "s"] and line[-1].endswith("%")
    value = json.loads(podium("plan", "--check", str(tmp_path), "--json")[1])
    assert value["rows"][1]["name"] == "step" and value["rows"][1]["measured"] == 4.0
