"""`podium filter` measures every prompt once, and a run draws only what it keeps, retires, or learns fastest."""

import json

import pytest
from test_curriculum_run import break_off_in
from tiny_runs import assert_same_run, make_config, trained

from podium.observe.records import read_samples
from podium.observe.run_dir import SAMPLES
from podium.tasks.pass_rates import read_pass_rates
from podium.train import filtering
from podium.train.filtering import filter_command
from podium.train.loop import train

pytestmark = pytest.mark.usefixtures("one_device")


def known(answer: str) -> float:
    """Whatever the model says: of sums of 3, half of the answer."""
    return {0: 1.0, 1: 0.5, 2: 0.0}[int(answer) % 3]


def write_rows(folder, name: str, first: int, count: int) -> str:
    rows = [{"question": f"What is {n} ?", "answer": str(n)} for n in range(first, first + count)]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


PARTS = {"test_filter:known": 1.0}


def config(model, folder, **changes):
    tasks = [
        {"name": "jsonl", "path": write_rows(folder, name, first, 9), "eval_path": write_rows(folder, "eval", 0, 3)}
        for name, first in (("one", 0), ("two", 9))
    ]
    tasks = [{**task, "rewards": PARTS, "correct": next(iter(PARTS))} for task in tasks]
    return make_config(
        model,
        folder,
        tasks=tasks,
        checkpoint={"every_steps": 1},
        eval={"at_start": False, "questions": 1},
        metrics={"samples_every": 1},
        **changes,
    )


def test_what_is_measured_decides_what_is_drawn(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(filtering, "PROMPTS_AT_ONCE", 4)
    path = tmp_path / "rates" / "pass.jsonl"
    filtered = config(tiny_model, tmp_path, steps=2, data={"filter": {"file": str(path), "samples": 2}})
    answer, left = filtering.Sampler.answer, [2]

    def break_off(self, prompts, settings=None):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return answer(self, prompts, settings)

    monkeypatch.setattr(filtering.Sampler, "answer", break_off)
    with pytest.raises(KeyboardInterrupt):
        filter_command(filtered)
    assert len(path.read_text().splitlines()) == 1 + 2 * 4
    left[0] = 99
    assert filter_command(filtered) == 0
    assert left[0] == 99 - 4  # what had been measured was not measured again
    assert "jsonl-2: 3 of 9 prompts kept; 3 solved too often, 3 too rarely" in capsys.readouterr().out
    rates = read_pass_rates(path)
    assert [sorted(own.values()) for own in rates.right.values()] == [[0.0] * 3 + [0.5] * 3 + [1.0] * 3] * 2
    monkeypatch.undo()
    assert train(filtered, plain=True) == 0
    samples = read_samples(tmp_path / "run" / SAMPLES)
    drawn = [int(line["answer"]) for line in samples if line["split"] == "train"]
    assert len(drawn) == 8 and {n % 3 for n in drawn} == {1}
    more = config(tiny_model, tmp_path, data={"filter": {"file": str(path), "samples": 3}})
    with pytest.raises(ValueError, match="was measured with another samples; name another"):
        filter_command(more)
    with pytest.raises(ValueError, match=r"data\.filter is not set"):
        filter_command(config(tiny_model, tmp_path))


def test_a_run_that_retires_and_follows_progress_goes_on_as_if_nothing_had_happened(tiny_model, tmp_path, monkeypatch):
    chosen = {"retire": {"pass_rate": 0.5, "keep": 2}, "progress": {"window": 4}}

    def of(runs):
        runs.mkdir()
        return config(tiny_model, runs, steps=5, data=chosen)

    assert train(of(tmp_path / "whole"), plain=True) == 0
    run = tmp_path / "whole" / "run"
    lines = trained(run)
    retired = [line.get("curriculum/retired", 0) for line in lines]
    assert retired == sorted(retired) and retired[-1] > 4
    assert all(line.get("curriculum/jsonl/share", 0) + line.get("curriculum/jsonl-2/share", 0) == 1 for line in lines)
    samples = read_samples(run / SAMPLES)
    drawn = [int(line["answer"]) for line in samples if line["split"] == "train"]
    solved = [n for n in drawn if n % 3 != 2]
    assert len(solved) - len(set(solved)) <= 8  # repeated only in the step that retired them, or as the last of a task
    break_off_in(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(of(tmp_path / "broken"), plain=True)
    monkeypatch.undo()
    broken = config(tiny_model, tmp_path / "broken", steps=5, data=chosen)
    assert train(broken, plain=True) == 0
    assert_same_run(tmp_path / "broken" / "run", run)
