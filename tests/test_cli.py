"""The command line: what it prints, where, with which status, and what it does not import."""

import importlib.metadata
import json
import re
import resource
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from podium import __version__, cli
from podium.config.errors import ConfigError, Problem
from podium.config.mesh import mesh_sizes

CONFIG = "model: nobody/nothing\ntasks:\n- name: arithmetic\n"
HEAVY = ("jax", "transformers", "datasets", "torch", "orbax", "optax")


@pytest.fixture
def podium(tmp_path, monkeypatch, capsys):
    """Runs a command line in this process, in an empty folder: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)

    def podium(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["podium", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, *capsys.readouterr()

    return podium


@pytest.fixture
def stub(monkeypatch):
    """Replaces a module that does the work by one function, and keeps what it was called with."""

    def stub(module: str, name: str, answer) -> list:
        calls = []

        def function(*arguments, **options):
            calls.append((arguments, options))
            if isinstance(answer, BaseException):
                raise answer
            return answer

        fake = types.ModuleType(module)
        setattr(fake, name, function)
        monkeypatch.setitem(sys.modules, module, fake)
        return calls

    return stub


def test_help_takes_less_than_half_a_second():
    def cpu_seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "podium.cli", "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cpu_seconds() for _ in range(3)) < 0.5


LIGHT = [
    ("--help", 0),
    ("train --help", 0),
    ("config show run.yaml", 0),
    ("config schema", 0),
    ("config migrate old.yaml", 0),
    ("tasks", 0),
    ("tasks arithmetic", 0),
    ("train run.yaml --set steps=0", 2),
    ("train run.yaml --set tasks.0.name=arithmetik", 2),
    ("train run.yaml --set model=./none.gguf", 2),
    ("eval nobody/nothing --task arithmetik", 2),
    ("train run.yaml --from nowhere@3", 2),
    ("export nowhere out", 2),
]
"""Command lines that need no model, or whose settings are wrong, and their status."""


def test_nothing_heavy_is_imported_before_the_settings_are_right(tmp_path):
    """In its own process, which runs one command after the other."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "old.yaml").write_text("steps: 3\n")
    code = (
        "import sys\nfrom podium.cli import main\nfor line in sys.argv[1:]:\n    sys.argv = ['podium', *line.split()]\n"
        "    try:\n        main()\n    except SystemExit as stopped:\n"
        f"        print('status:', stopped.code or 0, *(name for name in {HEAVY} if name in sys.modules))\n"
    )
    command = [sys.executable, "-c", code, *(line for line, _ in LIGHT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("status:")]
    assert dict(zip((line for line, _ in LIGHT), found, strict=True)) == {line: [str(code)] for line, code in LIGHT}
    assert "Traceback" not in done.stderr


def test_train_hands_over_the_settings(podium, stub):
    calls = stub("podium.train.loop", "train", 0)
    assert podium("train", "run.yaml", "--set", "steps=3", "--plain") == (0, "", "")
    ((config,), options) = calls[0]
    assert (config.steps, config.name) == (3, "run")
    assert {name: options[name] for name in ("fork", "plain")} == {"fork": None, "plain": True}
    assert not options["job"].watched
    assert options["check"].force is False


def test_force_reaches_the_check_of_the_plan(podium, stub):
    calls = stub("podium.train.loop", "train", 0)
    assert podium("train", "run.yaml", "--force")[0] == 0
    assert calls[0][1]["check"].force is True


def test_train_forks_from_a_step_of_a_run(podium, stub):
    calls = stub("podium.train.loop", "train", 0)
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text(CONFIG)
    assert podium("train", "run.yaml", "--from", "runs/a@20")[0] == 0
    assert calls[0][1]["fork"] == ("runs/a", 20)


@pytest.mark.parametrize("status", [0, 1, 130, 143])
def test_the_status_of_a_run_is_the_commands(podium, stub, status):
    stub("podium.train.loop", "train", status)
    assert podium("train", "run.yaml")[0] == status


def test_wrong_settings_are_status_2_with_everything_on_stderr(podium):
    status, out, err = podium("train", "run.yaml", "--set", "steps=0", "--set", "seeed=1")
    assert (status, out) == (2, "")
    assert err == (
        "error: 2 errors in the settings\n"
        "steps: expected a whole number of at least 1, got 0\n"
        "    --set steps=0\n"
        "    Training steps; each is rollout, grading and update.\n"
        "seeed: unknown key; did you mean seed?\n"
        "    --set seeed=1\n"
    )


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", "run.yaml", "--nope"], ["eval"]])
def test_wrong_usage_is_status_2(podium, arguments):
    status, out, err = podium(*arguments)
    assert (status, out) == (2, "") and "Traceback" not in err and "Usage:" in err


def test_a_settings_error_found_later_is_status_2(podium, stub):
    stub("podium.train.loop", "train", ConfigError([Problem(key="mesh", message="needs 8 devices")]))
    assert podium("train", "run.yaml") == (2, "", "error: mesh: needs 8 devices\n")


def test_a_full_disk_is_status_1_without_a_traceback(podium, stub):
    stub("podium.train.loop", "train", OSError(28, "No space left on device", "runs/a"))
    status, out, err = podium("train", "run.yaml")
    assert (status, out) == (1, "") and err == "error: [Errno 28] No space left on device: 'runs/a'\n"


def test_an_error_of_our_own_is_status_1_without_a_traceback(podium, monkeypatch):
    loop = types.SimpleNamespace(train=lambda config, **options: mesh_sizes("4x2"))
    monkeypatch.setitem(sys.modules, "podium.train.loop", loop)
    status, out, err = podium("train", "run.yaml")
    assert (status, out) == (1, "") and err.startswith("error: mesh '4x2': write auto, ") and err.count("\n") == 1


def test_a_bug_keeps_its_traceback(podium, stub, monkeypatch):
    for error in (ValueError("shapes do not match"), KeyError("x")):
        stub("podium.train.loop", "train", error)
        monkeypatch.setattr(sys, "argv", ["podium", "train", "run.yaml"])
        with pytest.raises(type(error)):
            cli.main()


def test_ctrl_c_outside_of_training_is_status_130(podium, stub):
    stub("podium.train.loop", "train", KeyboardInterrupt())
    assert podium("train", "run.yaml")[0] == 130


def test_show_prints_what_loads_again(podium):
    status, out, err = podium("config", "show", "run.yaml", "--set", "steps=7")
    assert (status, err) == (0, "")
    assert "steps: 7  # --set steps=7\n" in out and "  - name: arithmetic  # run.yaml:3\n" in out
    Path("again.yaml").write_text(out)
    assert podium("config", "show", "again.yaml")[1].count("again.yaml:") > 50


def test_schema_is_json(podium):
    status, out, _ = podium("config", "schema")
    assert status == 0 and json.loads(out)["properties"]["rollout"]["$ref"] == "#/$defs/RolloutConfig"


def test_migrate_writes_yaml_to_stdout_and_remarks_to_stderr(podium):
    Path("old.yaml").write_text("rollout: {n: 4, backend: naive}\n")
    status, out, err = podium("config", "migrate", "old.yaml")
    assert status == 0 and "group_size: 4  # was rollout.n: 4\n" in out
    assert err.startswith("changed:\n  ") and "  rollout.n: 4 -> group_size: 4\n" in err
    assert err.endswith("no counterpart:\n  rollout.backend: naive (old.yaml:1): Podium has one engine\n")


def test_migrate_writes_a_new_file_and_never_over_one(podium):
    Path("old.yaml").write_text("steps: 4\n")
    assert podium("config", "migrate", "old.yaml", "-o", "new.yaml")[:2] == (0, "")
    assert podium("config", "show", "new.yaml")[0] == 0
    status, _, err = podium("config", "migrate", "old.yaml", "-o", "new.yaml")
    assert (status, err) == (2, "error: -o new.yaml: exists already; name a new file, or delete it\n")


def test_tasks_are_listed_with_a_line_each(podium):
    status, out, _ = podium("tasks")
    assert status == 0 and {line.split()[0] for line in out.splitlines()} >= {"arithmetic", "gsm8k", "math500", "jsonl"}


def test_a_task_shows_its_options_and_splits(podium):
    status, out, _ = podium("tasks", "arithmetic")
    assert status == 0 and "  digits: a whole number from 1 to 12, default 1\n" in out
    assert "splits: train_split: train, eval_split: test\n" in out


def test_an_unknown_task_is_status_2(podium):
    status, out, err = podium("tasks", "gms8k")
    assert (status, out) == (2, "") and "did you mean 'gsm8k'?" in err


def test_evaluation_of_a_model_asks_all_questions_of_one_task(podium, stub):
    calls = stub("podium.train.evaluate", "evaluate_command", 0)
    arguments = ["--task", "arithmetic", "--samples", "4", "--no-greedy", "--json", "--set", "tasks.0.options.digits=2"]
    assert podium("eval", "nobody/nothing", *arguments)[0] == 0
    ((config,), options) = calls[0]
    assert options == {"run": None, "as_json": True, "show": 0, "out": None}
    assert (config.model, config.eval.samples, config.eval.greedy, config.eval.questions) == (
        "nobody/nothing", 4, False, None,
    )  # fmt: skip
    assert [(task.name, task.options) for task in config.tasks] == [("arithmetic", {"digits": 2})]


def test_evaluation_of_a_run_uses_its_settings(podium, stub):
    calls = stub("podium.train.evaluate", "evaluate_command", 0)
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text(
        "name: a\nmodel: nobody/nothing\nrollout: {slots: 16}\neval: {questions: 5}\n"
        "grading: {overlong_buffer_tokens: 8}\n"
        "tasks:\n- {name: gsm8k}\n"
        "- {name: arithmetic, options: {digits: 3}, system_prompt: Be short., rewards: {correct: 1.0, length: 1.0}}\n"
    )
    assert podium("eval", "runs/a@20", "--task", "arithmetic", "--split", "other", "--questions", "9")[0] == 0
    ((config,), options) = calls[0]
    assert options == {"run": ("runs/a", 20), "as_json": False, "show": 0, "out": None}
    assert (config.rollout.slots, config.eval.questions, config.name) == (16, 9, "a")
    (task,) = config.tasks
    assert (task.options, task.system_prompt, task.eval_split) == ({"digits": 3}, "Be short.", "other")
    assert task.rewards == {"correct": 1.0}


def test_evaluation_of_a_run_asks_all_of_its_tasks_unless_told_otherwise(podium, stub):
    calls = stub("podium.train.evaluate", "evaluate_command", 0)
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text(
        "name: a\nmodel: nobody/nothing\ntasks:\n"
        "- {name: gsm8k, rewards: {correct: 1.0, length: 0.1}}\n- {name: arithmetic}\n"
    )
    assert podium("eval", "runs/a", "--show", "5", "--out", "answers.jsonl")[0] == 0
    ((config,), options) = calls[0]
    assert [(task.name, task.rewards) for task in config.tasks] == [
        ("gsm8k", {"correct": 1.0}), ("arithmetic", {"correct": 1.0}),
    ]  # fmt: skip
    assert options == {"run": ("runs/a", None), "as_json": False, "show": 5, "out": Path("answers.jsonl")}


def test_evaluation_of_a_model_without_a_task_says_what_to_name(podium):
    status, _, err = podium("eval", "nobody/nothing")
    assert (
        status == 2
        and "nobody/nothing is a model, not a run, so it has no tasks of its own; name one with --task" in err
    )


def test_an_unknown_task_of_an_evaluation_names_the_option(podium):
    status, _, err = podium("eval", "nobody/nothing", "--task", "gms8k")
    assert status == 2 and err.endswith("\n    --task gms8k\n")


def test_export_hands_over_run_folder_and_format(podium, stub):
    calls = stub("podium.train.export", "export_run", 0)
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text(CONFIG)
    assert podium("export", "runs/a", "out", "--step", "3", "--dtype", "float32")[0] == 0
    assert calls == [
        (("runs/a", Path("out")), {"step": 3, "dtype": "float32", "merge": False, "push": None, "private": False})
    ]


def test_the_version_is_printed(podium):
    status, said, _ = podium("--version")
    assert status == 0
    form = r"podium (\S+) \(commit (not known|[0-9a-f]{40}(?:-dirty)?)\), jax (\S+), Python ([\d.]+)\n"
    assert (found := re.fullmatch(form, said)), said
    assert found[1] == __version__ and found[3] == importlib.metadata.version("jax")


def test_no_arguments_print_the_help(podium):
    status, out, err = podium()
    assert status == 2 and "train" in out + err


def test_sigterm_before_training_begins_ends_the_process(tmp_path):
    code = "import sys, time, types\nfake = types.ModuleType('podium.train.loop')\n" + (
        "def train(config, **options):\n    print('started', flush=True)\n    time.sleep(60)\n"
        "fake.train = train\nsys.modules['podium.train.loop'] = fake\nfrom podium.cli import main\nmain()\n"
    )
    (tmp_path / "run.yaml").write_text(CONFIG)
    command = [sys.executable, "-c", code, "train", "run.yaml"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == -signal.SIGTERM  # a shell says 143


def test_eval_grades_by_the_part_of_the_reward_that_counts_as_correct(podium, stub):
    calls = stub("podium.train.evaluate", "evaluate_command", 0)
    Path("own_judge_of_cli.py").write_text("def judge(completion):\n    return 1.0\n")
    Path("runs/own").mkdir(parents=True)
    rewards = "rewards: {'own_judge_of_cli:judge': 2.0, tags: 0.5}, correct: 'own_judge_of_cli:judge'"
    Path("runs/own/config.yaml").write_text(f"model: a/b\nname: own\ntasks: [{{name: arithmetic, {rewards}}}]\n")
    status, _, errors = podium("eval", "runs/own")
    assert status == 0, errors
    assert calls[0][0][0].tasks[0].rewards == {"own_judge_of_cli:judge": 1.0}


def test_private_without_push_is_refused(podium):
    Path("runs/own").mkdir(parents=True)
    Path("runs/own/config.yaml").write_text(CONFIG)
    status, _, errors = podium("export", "runs/own", "out", "--private")
    assert status == 2 and "give --push USER/NAME" in errors


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "nowhere.yaml"),
        ("train", "run.yaml", "--set", "model=./nowhere"),
        ("train", "run.yaml", "--set", "steps=0"),
        ("train", "run.yaml", "--from", "runs/nowhere@3"),
        ("eval", "./nowhere", "--task", "arithmetic"),
        ("eval", "a/b", "--task", "arithmetik"),
        ("chat", "./nowhere"),
        ("export", "runs/nowhere", "out"),
        ("report", "runs/nowhere"),
        ("watch", "nowhere"),
        ("init", "."),
        ("tasks", "nowhere"),
        ("plan", "nowhere.yaml", "--on", "v6e-8"),
        ("plan", "run.yaml", "--on", "v6e-9"),
        ("plan", "run.yaml"),
        ("certify", "nowhere.yaml"),
        ("pod", "run", "nowhere.yaml"),
        ("nowhere",),
        ("train", "run.yaml", "--nowhere"),
    ],
)
def test_what_cannot_be_carried_out_as_it_is_written_is_status_2(podium, arguments):
    Path("run.yaml").write_text(CONFIG)
    status, _, err = podium(*arguments)
    assert status == 2, err


def test_an_evaluation_of_a_short_model_takes_lengths_that_it_has(podium, stub):
    calls = stub("podium.train.evaluate", "evaluate_command", 0)
    Path("short").mkdir()
    Path("short/config.json").write_text(
        """{"model_type": "llama", "vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 128}"""
    )
    assert podium("eval", "./short", "--task", "arithmetic")[0] == 0
    rollout = calls[0][0][0].rollout
    assert (rollout.max_prompt_tokens, rollout.max_new_tokens) == (64, 64)
    assert podium("eval", "./short", "--task", "arithmetic", "--set", "rollout.max_new_tokens=16")[0] == 0
    assert calls[1][0][0].rollout.max_new_tokens == 16
