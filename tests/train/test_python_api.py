"""`podium.grpo` and what it returns, as a script uses them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import podium
from podium.api.given_data import Questions, overrides, reward_parts, task_settings
from podium.config.errors import ConfigError
from podium.config.imports import imported, name_of

pytestmark = pytest.mark.usefixtures("one_device")

ROWS = [{"question": f"What is {a} + {b}?", "answer": a + b, "level": a} for a in range(4) for b in range(4)]
TINY: dict[str, Any] = {
    "steps": 2,
    "prompts_per_step": 4,
    "group_size": 4,
    "grading": {"workers": 0},
    "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 3, "slots": 16, "prefill_rows": 8},
    "train__rows_per_device": 2,
    "train__optimizer": {"learning_rate": 1e-2},
    "metrics": {"samples_every": 2},
}


def short(num_tokens: int) -> float:
    return 1.0 / num_tokens


def longest(completions: list[str], level: int) -> np.ndarray:
    assert level in range(4)
    lengths = np.array([len(text) for text in completions])
    return (lengths == lengths.max()).astype(np.float32)


async def patient(completion: str, row: dict) -> float:
    await asyncio.sleep(0.001)
    return float(row["level"] / 4)


class Always:
    def __call__(self, row: dict) -> float:
        return 1.0


ALWAYS = Always()  # one object, even if pytest makes the run twice: another would get its own name


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def heard() -> list[tuple]:
    return []


@pytest.fixture(scope="module")
def run(tiny_model, runs, heard, one_device) -> podium.Run:
    return podium.grpo(
        str(tiny_model),
        ROWS[4:],
        eval_data=iter(ROWS[:4]),
        rewards=[podium.math_equal, (short, 0.5), (longest, 0.25), (patient, 0.125), (ALWAYS, 0.0)],
        on_step=lambda step, metrics, samples: heard.append((step, metrics["train-reward/total/mean"], samples)),
        name="first",
        runs_dir=runs,
        **TINY,
    )


def test_rewards_are_weighted_sums_of_what_the_functions_gave(run, heard):
    assert [step for step, _, _ in heard] == [1, 2]
    (sample, *_) = [line for line in run.samples if line["split"] == "train"]
    assert sample in heard[sample["step"] - 1][2]
    question = next(row for row in ROWS if row["question"] == sample["question"])
    for completion in sample["completions"]:
        parts = completion["parts"]
        assert set(parts) == {"correct", "short", "longest", "patient", "Always"}
        assert parts["short"] == 1 / completion["tokens"] and parts["patient"] == question["level"] / 4
        expected = parts["correct"] + 0.5 * parts["short"] + 0.25 * parts["longest"] + 0.125 * parts["patient"]
        assert completion["reward"] == pytest.approx(expected)
    assert max(each["parts"]["longest"] for each in sample["completions"]) == 1.0


def test_a_run_has_its_metrics_and_its_evaluations(run, heard):
    steps = [line for line in run.metrics if "train-reward/total/mean" in line]
    assert [line["train-reward/total/mean"] for line in steps] == [reward for _, reward, _ in heard]
    assert {"train-reward/func/short/mean", "train-reward/func/patient/mean"} <= set(steps[0])
    assert [line["step"] for line in run.metrics if "eval/accuracy" in line] == [2]
    last = run.metrics[-1]
    assert last["step"] == 2 and "train-reward/total/mean" in last and "eval/accuracy" in last
    assert "data:image/svg+xml" in run._repr_html_()
    assert run.steps == [2] and run.config.steps == 2 and "step 2" in repr(run)
    assert podium.load_run(run.path).metrics == run.metrics


def test_the_rows_are_in_the_runs_folder(run):
    task = run.config.tasks[0]
    assert task.path and task.path.startswith(str(run.path)) and task.eval_path and len(task.options) == 2


def test_its_weights_answer_and_are_evaluated_and_exported(run, tmp_path):
    answers = run.generate(["What is 1 + 1?"] * 2, max_new_tokens=3, temperature=0)
    assert len(answers) == 2 and answers[0].text == answers[1].text and len(answers[0].sampled_logprobs) <= 3
    own, other = run.evaluate(), run.evaluate(ROWS[:2], rewards=[(short, 1.0)], eval={"samples": 2, "greedy": False})
    assert own.accuracy == [line["eval/accuracy"] for line in run.metrics if "eval/accuracy" in line][-1]
    assert (own.step, len(own.answers), len(other.answers)) == (2, 4, 2)
    assert 0.3 < other.accuracy <= 1.0
    assert (run.export(tmp_path / "model") / "model.safetensors").is_file()


def test_an_exception_leaves_everything_usable_and_the_run_can_go_on(tiny_model, runs):
    def fail(step, metrics, samples):
        raise KeyError("mine")

    def begin(**options):
        return podium.grpo(str(tiny_model), ROWS, rewards=[short], name="again", runs_dir=runs, **TINY, **options)

    def end(step, metrics, samples):
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyError, match="mine"):
        begin(on_step=fail)
    assert podium.load_run(f"{runs}/again").steps == [1]
    with pytest.raises(SystemExit) as ended:  # a script of several runs does not begin the next one
        begin(on_step=end)
    assert ended.value.code == 143
    run = begin()
    assert run.steps == [1, 2] and not any("eval/accuracy" in line for line in run.metrics)


def broken(completion: str) -> float:
    raise ZeroDivisionError("in my reward")


def test_a_bug_in_a_reward_is_shown_with_its_prompt(tiny_model, runs):
    with pytest.raises(ValueError, match=r"(?s)reward \S+broken failed.*ZeroDivisionError: in my reward.*What is"):
        podium.grpo(str(tiny_model), ROWS, rewards=[podium.math_equal, broken], runs_dir=runs, **TINY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": [3]}, "data: row 0 is 3; expected a dict"),
        ({"data": []}, "data: it has no rows"),
        ({"data": [{"question": "q", "answer": object()}]}, "data: row 0 cannot be written as JSON"),
        ({"data": [{"prompts": "q", "answer": 1}]}, "no column 'question'"),
        ({"data": 3}, "data: 3 has no rows; give dicts"),
        ({"data": "no/such.jsonl"}, "data: no/such.jsonl does not exist"),
        ({"data": "gsm8k"}, "data: gsm8k does not exist; .* hub as owner/name"),
        ({"data": {"dev": ROWS}}, r"it has the splits dev, and train is needed; give one split: data=data\['dev'\]"),
        ({"eval_data": {"train": ROWS}}, "it has the splits train, and test or validation is needed"),
        ({"subset": "main"}, "subset: 'main' selects a part of a data set on the hub, and data is not one"),
        (
            {"rewards": [lambda completions, trainer_state, **kwargs: []]},
            "asks for 'trainer_state', which exists only in TRL",
        ),
        ({"rewards": []}, "rewards: none given"),
        ({"rewards": ["format"]}, "format do not define when an answer is correct"),
        ({"rewards": [podium.math_equal, podium.text_equal]}, "keep one"),
        ({"rewards": [short, short]}, "listed twice"),
        ({"rewards": ["formt", podium.math_equal]}, "did you mean format"),
        ({"rewards": ["no_such:reward"]}, "no module 'no_such' found"),
        (
            {"rewards": [lambda leven: 1.0]},
            "asks for 'leven', and the row of prompt jsonl/train/0 has question, answer",
        ),
        ({"rewards": [lambda *texts: 1.0]}, "its parameter names determine its arguments"),
        ({"rollout": {"max_new": 3}}, r"argument rollout.max_new"),
        ({"learning_rate": 3e-4}, "learning_rate"),
    ],
)
def test_a_wrong_argument_is_an_error_before_anything_is_compiled(tiny_model, runs, options, message, monkeypatch):
    monkeypatch.setattr("podium.train.setup.load_trained", lambda *_: pytest.fail("the model was loaded"))
    settings = {"data": ROWS, "runs_dir": runs, **TINY, **options}
    with pytest.raises((ValueError, ConfigError), match=message):
        podium.grpo(str(tiny_model), **settings)


def test_settings_are_sections_or_double_underscores():
    found = {each.key: each.value for each in overrides({"train": {"optimizer": {"eps": 1}}, "rollout__slots": 4})}
    assert found == {"train.optimizer.eps": 1, "rollout.slots": 4}


def rows_at(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize("kind", ["dicts", "frame", "dataset", "splits", "generator"])
def test_rows_of_every_kind_become_the_same_file(tmp_path, kind):
    rows = [{"prompt": "1+1?", "answer": 2.0, "hint": None}, {"prompt": "2+2?", "answer": 4.0, "hint": "even"}]
    made: dict[str, Callable[[], Any]] = {
        "dicts": lambda: rows,
        "frame": lambda: pytest.importorskip("pandas").DataFrame(rows),
        "dataset": lambda: pytest.importorskip("datasets").Dataset.from_list(rows),
        "splits": lambda: {"train": rows, "test": rows[:1]},
        "generator": lambda: (row for row in rows),
    }
    (task,) = task_of(made[kind](), folder=tmp_path)
    assert rows_at(task["path"]) == rows
    if kind == "splits":
        (task,) = task_of(rows, made[kind](), folder=tmp_path)
        assert rows_at(task["eval_path"]) == rows[:1]


def test_a_frames_missing_values_are_none(tmp_path):
    frame = pytest.importorskip("pandas").DataFrame({"prompt": ["a", "b"], "answer": [1, None], "day": ["x", None]})
    (task,) = task_of(frame, folder=tmp_path)
    assert rows_at(task["path"])[1] == {"prompt": "b", "answer": None, "day": None}


def test_an_id_of_the_hub_is_a_data_set(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, subset):
        asked.append((name, subset))
        return {"train": ROWS, "validation": ROWS[:2]}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (task,) = task_of("openai/gsm8k", "openai/gsm8k", folder=tmp_path, subset="main")
    assert (task["options"]["dataset"], task["options"]["subset"]) == ("openai/gsm8k", "main") and "path" not in task
    assert rows_at(task["eval_path"]) == ROWS[:2] and asked == [("openai/gsm8k", "main")]
    task_of("openai/gsm8k", "HuggingFaceH4/MATH-500", folder=tmp_path, subset="socratic")
    assert asked[1:] == [("HuggingFaceH4/MATH-500", None)]


def test_a_path_that_exists_is_no_id_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/train").mkdir(parents=True)
    Path("data/train/train.jsonl").write_text('{"question": "?", "answer": 1}')
    assert task_of("data/train", folder=tmp_path)[0]["path"] == "data/train"


def task_of(data: Any, eval_data: Any = None, *, folder: Path, subset: str | None = None) -> list[dict[str, Any]]:
    return task_settings(Questions(data, eval_data, subset), podium.math_equal, folder=folder)[0].value


def test_without_an_answer_the_first_function_counts():
    assert reward_parts([short]) == ({"test_python_api:short": 1.0}, None)
    assert reward_parts([podium.text_equal, ("format", 0.5)]) == ({"correct": 1.0, "format": 0.5}, "text")


def test_import_is_quick_and_train_is_no_trap():
    code = (
        "import sys, podium\nfrom podium import train, plan\nassert 'jax' not in sys.modules\n"
        "assert callable(train) and callable(plan) and 'grpo' in dir(podium)\n"
        "import podium.train.loop\nassert callable(podium.train) and podium.train.loop\n"
        "try:\n    train('nothing.yaml')\nexcept ValueError as error:\n    assert 'nothing.yaml' in str(error)\n"
        "try:\n    podium.grop\nexcept AttributeError as error:\n    assert 'grpo' in str(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_says_where_it_is_before_jax_is_imported(tmp_path):
    code = (
        "import sys\nsys.modules['jax'] = None\nimport podium\n"
        "rows = [{'question': '1 + 1?', 'answer': 2}]\n"
        f"podium.grpo('demo', data=rows, steps=1, name='a', runs_dir={str(tmp_path)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"run {tmp_path}/a: loading jax and the model\n"
    assert "import of jax halted" in done.stderr


def test_every_public_name_is_there_and_documented():
    for name in podium.__all__:
        assert getattr(podium, name).__doc__, name


def test_a_cell_that_is_run_again_keeps_its_functions_name():
    again = [eval("lambda row: 0.25", {"__name__": "__main__"}) for _ in range(2)]
    other = eval("lambda row: 0.75", {"__name__": "__main__"})
    assert name_of(again[0]) == name_of(again[1]) != name_of(other)
    assert imported(name_of(again[1]), what="a reward") is again[1]
