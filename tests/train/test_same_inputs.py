"""Hosts that read other weights or other questions than process 0 are found before the first step."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_runs import write_tiny_model

from podium.config.schema import TaskConfig
from podium.hosts.same_inputs import BLOCK, BLOCKS, compare, file_fingerprint, model_files, questions
from podium.job.guard import GuardError
from podium.tasks.mixture import TaskMixture


def copy_of(folder: Path, to: Path, scale: float) -> Path:
    """The same model with its weights times a number."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    for file in to.glob("*.safetensors"):
        weights = {name: (value * scale).astype(value.dtype) for name, value in load_file(file).items()}
        save_file(weights, file)
    return to


def test_a_host_with_other_weights_is_named_with_the_file(tmp_path):
    model = tmp_path / "model"
    write_tiny_model(model)
    first, same, other = (
        model_files(copy_of(model, tmp_path / name, scale))
        for name, scale in (("first", 1.0), ("same", 1.0), ("other", 1.1))
    )
    compare([first, same])
    with pytest.raises(
        GuardError, match=r"model file model.safetensors is .* on worker 2 and .* on worker 0"
    ) as caught:
        compare([first, same, other])
    assert "worker 1" not in str(caught.value)
    assert "copy the same files" in str(caught.value)


def test_samples_of_a_large_file_see_its_size_its_ends_and_a_scale(tmp_path):
    file = tmp_path / "model.safetensors"
    values = np.random.default_rng(0).standard_normal(BLOCK * BLOCKS, np.float32)
    found = []
    for changed in (values, values * np.float32(1.1), values[:-1], np.append(values[:-1], np.float32(7))):
        file.write_bytes(changed.tobytes())
        found.append(file_fingerprint(file))
    assert len(set(found)) == 4
    file.write_bytes(values.tobytes())
    assert file_fingerprint(file) == found[0]


@pytest.mark.parametrize("change", ["fewer", "other", "another answer", "only the evaluation's"])
def test_a_host_with_other_questions_is_named_with_the_task(tmp_path, change):
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(5)]
    changed = {
        "fewer": (rows[:-1], rows),
        "other": ([{**rows[0], "question": "1 + 0?"}, *rows[1:]], rows),
        "another answer": ([{**rows[0], "answer": "2"}, *rows[1:]], rows),
        "only the evaluation's": (rows, rows[1:]),
    }[change]
    found = []
    for host, (train, evaluation) in {"first": (rows, rows), "other": changed}.items():
        for name, lines in (("train", train), ("eval", evaluation)):
            (tmp_path / f"{host}-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        task = TaskConfig(
            name="jsonl", path=str(tmp_path / f"{host}-train.jsonl"), eval_path=str(tmp_path / f"{host}-eval.jsonl")
        )
        found.append(questions(TaskMixture([task], seed=0), evaluates=True))
    kind = "evaluation" if change == "only the evaluation's" else "training"
    with pytest.raises(GuardError, match=f"{kind} questions of jsonl is .* on worker 1 and .* on worker 0"):
        compare(found)
    compare([found[0], found[0]])


def test_a_host_with_another_solution_is_found_if_a_teacher_reads_it(tmp_path):
    found = []
    for solution in ("1 + 2", "2 + 1"):
        file = tmp_path / f"{solution}.jsonl"
        file.write_text(json.dumps({"question": "What is 3?", "answer": "3", "solution": solution}))
        found.append(TaskMixture([TaskConfig(name="jsonl", path=str(file))], seed=0))
    for columns, same in (((), True), (("solution",), False)):
        one, other = (questions(each, evaluates=False, columns=columns) for each in found)
        assert (one == other) is same
