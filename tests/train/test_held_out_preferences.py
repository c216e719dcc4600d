"""Rewards of held-out preferences: those that a step has on the same rows before its update."""

import json

import numpy as np
import pytest
from tiny_runs import make_config, make_group, read_records

from podium.algorithms.recipe_options import make_recipe
from podium.config.schema import AlgorithmConfig, TaskConfig
from podium.train.held_out import preference_stats
from podium.train.loop import train

pytestmark = pytest.mark.usefixtures("one_device")
PAIRS = [{"prompt": f"{n} + 1", "chosen": str(n + 1), "rejected": str(n) * 2} for n in range(1, 7)]
NAMES = ("chosen", "rejected", "margins", "accuracies")


@pytest.mark.parametrize("loss", ["dpo", pytest.param("kto", marks=pytest.mark.long)])
def test_they_are_those_of_the_next_step_on_the_same_rows(run_of, tmp_path, loss):
    """Rows are evaluated in two batches and trained on in one or two; the last step's weights have no next step."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    labels = loss == "kto"
    run = run_of(
        tasks=[
            TaskConfig(name="labelled" if labels else "preferences", path=str(path), eval_path=str(path)).model_dump()
        ],
        prompts_per_step=12 if labels else 6,
        group_size=1 if labels else 2,
        algorithm={"recipe": "dpo", "loss": loss},
        eval={"at_start": True, "every_steps": 1, "questions": 12},
        train={"optimizer": {"learning_rate": 1e-2}},
        steps=3,
    )
    lines = read_records(run / "metrics.jsonl")
    held_out = {line["step"]: line for line in lines if "eval-rewards/margins" in line}
    trained = {line["step"]: line for line in lines if "rewards/margins" in line}
    assert sorted(held_out) == [0, 1, 2, 3] and sorted(trained) == [1, 2, 3]
    names = NAMES[:3] if labels else NAMES
    for step in range(3):
        for name in names:
            assert held_out[step][f"eval-rewards/{name}"] == pytest.approx(
                trained[step + 1][f"rewards/{name}"], abs=2e-6
            )
    assert held_out[0]["eval-rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert held_out[3]["eval-rewards/margins"] > 0.01
    assert ("eval-rewards/accuracies" in held_out[3]) != labels
    assert labels or held_out[3]["eval-rewards/accuracies"] == 1.0


def test_a_held_out_pair_that_does_not_fit_ends_a_run_at_once(tiny_model, tmp_path, capsys):
    for name, rows in (
        ("train", PAIRS),
        ("test", [{"prompt": "1 + 1", "chosen": "the sum of one and one is two", "rejected": "3"}]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TaskConfig(name="preferences", path=str(tmp_path / "train.jsonl"), eval_path=str(tmp_path / "test.jsonl"))
    config = make_config(
        tiny_model, tmp_path, tasks=[task.model_dump()], group_size=2, algorithm={"recipe": "dpo"}, prompts_per_step=2
    )
    with pytest.raises(ValueError, match=r"preferences/eval/0: its chosen completion has more than"):
        train(config, plain=True)
    assert "the first compiles" not in capsys.readouterr().err


@pytest.mark.parametrize(("loss", "size"), [("dpo", 2), ("kto", 1)])
def test_means_and_shares_by_hand(loss, size):
    algorithm = AlgorithmConfig(recipe="dpo", loss=loss, loss_options={"beta": 0.5})
    recipe = make_recipe(algorithm, group_size=size, prompts_per_step=4)
    totals = [1.0, -1.0, 1.0, -1.0] if size == 2 else [1.0, 1.0, 1.0, -1.0]
    groups = [make_group(totals[first : first + size]) for first in range(0, 4, size)]
    found = preference_stats(recipe, groups, [2.0, 1.0, -1.0, 3.0])
    chosen = [2.0, -1.0] if size == 2 else [2.0, 1.0, -1.0]
    rejected = [1.0, 3.0] if size == 2 else [3.0]
    assert found.chosen == pytest.approx(0.5 * np.mean(chosen))
    assert found.rejected == pytest.approx(0.5 * np.mean(rejected))
    assert found.accuracy == (0.5 if size == 2 else None)
