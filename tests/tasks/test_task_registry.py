import subprocess
import sys

import pytest
from sample_tasks import Echo

from podium.config.schema import TaskConfig
from podium.tasks.registry import TASKS, make_task, task_labels, task_options


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"reasoning_gym", "program"}))
def test_every_built_in_task_is_made_and_lists_its_options(name):
    assert make_task(TaskConfig(name=name, path=None)).system_prompt != ""
    assert "source" not in task_options(name)


def test_a_task_is_imported_by_path_with_its_options():
    task = make_task(TaskConfig(name="sample_tasks:Echo", options={"count": 2, "kind": "b"}))
    assert isinstance(task, Echo)
    assert [prompt.id for prompt in task.prompts("train")] == ["b/train/0", "b/train/1"]
    assert list(task_options("sample_tasks:Echo")) == ["count", "kind"]


def test_a_module_beside_the_config_is_found(tmp_path, monkeypatch):
    (tmp_path / "beside_config.py").write_text("from sample_tasks import Echo\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert make_task(TaskConfig(name="beside_config:Echo")).system_prompt == "Repeat."


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gsm8", {}, "'gsm8' is not a task; did you mean 'gsm8k'?"),
        (
            "qqq",
            {},
            "'qqq' is not a task; expected one of arithmetic, calculator, chat, code, environment, frozen_lake,",
        ),
        ("no_such_module:Task", {}, "no module 'no_such_module' found"),
        ("sample_tasks:Ecko", {}, "module sample_tasks has no 'Ecko'; did you mean 'Echo'?"),
        ("sample_tasks:NeedsOption", {}, "options.size: must be set"),
        ("sample_tasks:Echo", {"kind": "c"}, "options.kind: Input should be 'a' or 'b', got 'c'"),
        ("sample_tasks:Echo", {"count": 1.5}, "options.count: Input should be a valid integer, got 1.5"),
        ("gsm8k", {"columns": "x"}, "gsm8k: options.columns: unknown option; there are none"),
        ("sample_tasks:Unmade", {}, "begin its constructor `def __init__(self, source, *, ...)` (too many"),
        (
            "sample_tasks:TwoPlaces",
            {},
            "begin its constructor `def __init__(self, source, *, ...)` (missing a required",
        ),
        (
            "sample_tasks:number",
            {},
            "sample_tasks:number: 3 is no task: it lacks prompts, system_prompt (docs/tasks.md)",
        ),
    ],
)
def test_unknown_names_and_wrong_values_are_errors_with_a_way_out(name, options, message):
    with pytest.raises(ValueError) as error:
        make_task(TaskConfig(name=name, options=options))
    assert message in str(error.value)


def test_an_import_error_inside_a_users_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "imports_missing.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        make_task(TaskConfig(name="imports_missing:Task"))


def test_labels_are_distinct_whatever_the_names():
    names = ["gsm8k", "gsm8k", "my.tasks:Spelling", "gsm8k-2", "gsm8k"]
    assert task_labels([TaskConfig(name=name) for name in names]) == [
        "gsm8k",
        "gsm8k-2",
        "Spelling",
        "gsm8k-2-2",
        "gsm8k-3",
    ]


@pytest.mark.parametrize(
    "module", ["registry", "mixture", "grading", "grading_worker", "question_sets", "games.arithmetic"]
)
def test_tasks_import_no_jax_and_nothing_heavy(module):
    heavy = "{'jax', 'torch', 'transformers', 'datasets', 'sympy', 'reasoning_gym'}"
    code = f"import podium.tasks.{module}, sys; sys.exit(' '.join({heavy} & set(sys.modules)) or 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
