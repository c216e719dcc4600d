import io
import json
import math
import shlex
import subprocess

import pytest
import yaml
from rich.console import Console

from podium.config.schema import Config
from podium.observe.history import Answers, History, read_answers, read_history
from podium.observe.summary import commit, make_summary, print_summary, save_summary, versions


def sample(step, prompt, text, reward, split="eval"):
    return {
        "step": step,
        "split": split,
        "task": "arithmetic",
        "prompt": prompt,
        "question": f"question {prompt}",
        "answer": "12",
        "completions": [{"text": text, "reward": reward}],
    }


def make_run(tmp_path, *, lines=(), samples=(), **changes):
    folder = tmp_path / "demo"
    folder.mkdir()
    config = Config.model_validate({"name": "demo", "model": "demo", "tasks": [{"name": "arithmetic"}]} | changes)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    times = [{"time/wall_s": 10.0 * i, "time/cpu_s": 15.0 * i} for i in range(1, len(lines) + 1)]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line | time) + "\n" for line, time in zip(lines, times, strict=True))
    )
    (folder / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in samples))
    return folder


LINES = (
    {"step": 0, "eval/accuracy": 0.25},
    {"step": 1, "train-reward/total/mean": 0.3},
    {"step": 2, "train-reward/total/mean": None},
    {"step": 3, "train-reward/total/mean": 0.9},
    {"step": 3, "eval/accuracy": 0.75},
)
SAMPLES = (
    sample(0, "a", "11", 0.0),
    sample(0, "b", "12", 1.0),
    sample(2, "a", "train", 1.0, split="train"),
    sample(3, "a", "12", 1.0),
    sample(3, "b", "12", 1.0),
)


def test_a_history_has_the_points_of_each_curve_and_the_last_times(tmp_path):
    history = read_history(make_run(tmp_path, lines=LINES))
    assert history.points("train-reward/total/mean") == [(1, 0.3), (3, 0.9)]
    assert history.points("eval/accuracy") == [(0, 0.25), (3, 0.75)]
    assert (history.steps, history.last("time/wall_s"), history.last("time/cpu_s")) == (3, 50.0, 75.0)
    assert history.total("eval/accuracy") == 1.0 and history.last("no/metric") is history.total("no/metric") is None


def test_of_a_step_that_is_written_twice_the_last_line_counts():
    history = History(names=("a", "b"))
    for line in ({"step": 1, "a": 1.0}, {"step": 3, "a": 3.0, "c": 1}, {"step": 2, "a": 2.0, "b": math.inf}):
        history.add(line)
    history.add({"step": 1, "a": 7.0})
    history.add({"step": True, "a": 9.0})
    assert (list(history), history.points("a"), history.steps) == (["a"], [(1, 7.0), (2, 2.0), (3, 3.0)], 3)


def test_the_answers_shown_are_to_the_question_that_gained_most(tmp_path):
    assert read_answers(make_run(tmp_path, samples=SAMPLES)) == Answers("question a", "12", "11", "12")


@pytest.mark.parametrize("samples", [(), SAMPLES[:3], (SAMPLES[0], SAMPLES[4])])
def test_without_two_answers_to_a_question_there_is_none_to_show(tmp_path, samples):
    assert read_answers(make_run(tmp_path, samples=samples)) is None


def test_the_summary_has_what_scripts_read(tmp_path):
    summary = make_summary(make_run(tmp_path, lines=LINES))
    assert summary["steps"] == 3
    assert summary["wall_s"] == 50.0
    assert summary["cpu_s"] == 75.0
    assert summary["reward"] == {"first": 0.3, "last": 0.9}
    assert summary["eval"] == {"initial": {"step": 0, "accuracy": 0.25}, "final": {"step": 3, "accuracy": 0.75}}
    assert summary["versions"]["python"].startswith("3.")
    assert summary["versions"]["jax"] == versions()["jax"]
    assert summary["commit"] == commit()


def test_the_saved_summary_is_one_object(tmp_path):
    run = make_run(tmp_path, lines=LINES)
    save_summary(run)
    assert json.loads((run / "summary.json").read_text()) == make_summary(run)


def test_the_summary_of_a_run_that_was_stopped_early_has_nulls(tmp_path):
    summary = make_summary(make_run(tmp_path))
    assert summary["steps"] == 0
    assert summary["reward"] == {"first": None, "last": None}
    assert summary["eval"]["initial"] == summary["eval"]["final"] == {"step": None, "accuracy": None}


def test_the_commit_is_the_checkouts(monkeypatch, tmp_path):
    package = tmp_path / "podium" / "observe"
    package.mkdir(parents=True)
    monkeypatch.setattr("podium.observe.summary.__file__", str(package / "summary.py"))
    assert commit() is None
    (package / "summary.py").write_text("")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    head = subprocess.run(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert commit() == head.stdout.strip()
    (package / "summary.py").write_text("changed")
    assert commit() == head.stdout.strip() + "-dirty"


def printed(folder, width=90):
    file = io.StringIO()
    print_summary(folder, Console(file=file, width=width))
    return file.getvalue()


def test_the_printed_summary_has_accuracy_answers_files_and_next_commands(tmp_path):
    samples = (sample(0, "a", "\x1b[2J[b]11", 0.0), *SAMPLES[3:])
    text = printed(make_run(tmp_path, lines=LINES, samples=samples, steps=3), width=2000)
    assert "0.250 (step 0) -> 0.750 (step 3)" in text
    assert "3 steps in 0:50, 1:15 of CPU time" in text
    assert "\\x1b[2J[b]11" in text
    assert "metrics.jsonl, samples.jsonl" in text
    assert "summary.json" not in text
    assert [line.split()[1] for line in text.splitlines()[-2:]] == ["eval", "export"]


def test_the_printed_summary_says_how_much_of_the_updates_is_padding(tmp_path):
    """Places of both steps together: 30 + 10 of 400, of which 60 hold demonstrations."""
    lines = (
        {"step": 1, "tokens/padding": 30, "tokens/prompt": 50, "tokens/completion": 60, "tokens/demonstrations": 60},
        {"step": 2, "tokens/padding": 10, "tokens/prompt": 90, "tokens/completion": 100},
    )
    assert ", updates 10% padding" in printed(make_run(tmp_path, lines=lines, steps=2), width=2000)


def test_a_run_without_updates_has_no_padding(tmp_path):
    lines = ({"step": 1, "tokens/padding": 0, "tokens/prompt": 0, "tokens/completion": 0},)
    assert "padding" not in printed(make_run(tmp_path, lines=lines, steps=1), width=2000)


LONG = (sample(0, "a", "before " * 200, 0.0), sample(3, "a", "after " * 200, 1.0))


def test_the_summary_of_preferences_has_their_pairs_instead_of_rewards(tmp_path):
    lines = (
        {"step": 0, "eval/accuracy": 0.0, "eval-rewards/accuracies": 0.0},
        {"step": 1, "train-reward/total/mean": 0.0, "rewards/accuracies": 0.5},
        {"step": 1, "eval/accuracy": 0.125, "eval-rewards/accuracies": 0.875},
    )
    printed = io.StringIO()
    print_summary(make_run(tmp_path, lines=lines, steps=1), Console(file=printed, width=80))
    assert "held-out pairs in order  0.000 (step 0) -> 0.875 (step 1)" in printed.getvalue()
    assert "pairs in order of each step" in printed.getvalue()
    assert "reward" not in printed.getvalue() and "accuracy" not in printed.getvalue()


@pytest.mark.parametrize("steps", [3, 9])
def test_the_printed_summary_leaves_a_line_of_a_small_terminal_to_the_shell(tmp_path, steps):
    """Everything is long: question, answers, list of files."""
    folder = make_run(tmp_path, lines=LINES, samples=LONG, steps=steps)
    for name in ("curve.svg", "lengths.jsonl", "summary.json", "checkpoints", "tensorboard", "wandb"):
        (folder / name).mkdir()
    lines = printed(folder, width=80).splitlines()
    assert len(lines) <= 23
    framed = [line for line in lines if line.startswith("\u2502")]
    assert all(len(line) == 80 for line in framed)
    assert not any("\u2502" in line for line in lines[lines.index(framed[-1]) + 1 :])


def test_a_command_is_one_line_however_narrow_the_terminal(tmp_path):
    folder = make_run(tmp_path, lines=LINES, steps=9)
    last = printed(folder, width=40).splitlines()[-1]
    assert shlex.split(last)[-2:] == ["train", str(folder / "config.yaml")]


def test_after_a_run_that_was_stopped_the_next_command_continues_it(tmp_path):
    lines = printed(make_run(tmp_path, lines=LINES, steps=9)).splitlines()
    assert lines[-2] == "stopped after step 3 of 9; to continue:"
    assert len([line for line in lines if line.startswith("  ")]) == 1


def test_a_run_with_a_function_of_its_session_continues_there(tmp_path):
    tasks = [{"name": "arithmetic", "rewards": {"correct": 1.0, "session:short": 0.1}}]
    lines = printed(make_run(tmp_path, lines=LINES, steps=9, tasks=tasks)).splitlines()
    assert lines[-2:] == ["stopped after step 3 of 9; to continue, repeat the call with:", '  name="demo"']


def test_a_run_without_steps_can_be_summed_up_too(tmp_path):
    assert "0 steps in 0:00" in printed(make_run(tmp_path))
