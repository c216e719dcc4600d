"""Each rule fires on a run that has its fault, alone, and no rule on a healthy one."""

import pytest
from made_run import make_run

from podium.observe.report.findings import RULES, findings
from podium.observe.report.read import read_run

NO_REWARD = {"train-reward/total/mean": lambda step: 0.0}
LITTLE_REWARD = {"train-reward/total/mean": lambda step: 0.3}
FAULTS = {
    "nothing_learned": ({"group/equal_rewards_fraction": lambda step: 1.0, **NO_REWARD}, {}),
    "idle_steps": ({"optimizer/updates": lambda step: float(step % 2)}, {}),
    "entropy_collapse": ({"rollout/entropy": lambda step: 0.8 if step < 12 else 0.01, **LITTLE_REWARD}, {}),
    "lengths_at_cap": ({"rollout/truncated_fraction": lambda step: 0.7}, {}),
    "eval_flat": ({}, {"accuracies": {0: 0.1, 40: 0.12}, "interval": 0.005}),
    "one_part_eats": ({"train-reward/func/format/mean": lambda step: 0.9 - step / 50}, {}),
    "gap_too_large": ({"policy/logprob_gap/mean": lambda step: 0.1}, {}),
    "gap_growing": ({"policy/logprob_gap/mean": lambda step: 0.002 * step}, {}),
    "always_clipped": ({"optimizer/gradient_norm": lambda step: 3.0}, {}),
    "eval_noise": ({}, {"accuracies": {0: 0.6, 40: 0.7}, "interval": 0.2, "rise": 0.0}),
    "mostly_padding": ({"tokens/padding": lambda step: 2000.0}, {}),
    "bound_by_slots": ({"time/train/rollout_s": lambda step: 8.0, "rollout/slot_utilisation": lambda step: 0.97}, {}),
}  # fmt: skip


@pytest.mark.parametrize("rule", FAULTS)
def test_a_rule_fires_on_its_fault_and_no_other_does(tmp_path, rule):
    changes, options = FAULTS[rule]
    if "rise" in options:
        options = {name: value for name, value in options.items() if name != "rise"}
        changes = {**changes, "train-reward/total/mean": lambda step: 0.6 + step / 500}
    found = findings(read_run(make_run(tmp_path / "run", changes, **options)))
    assert [finding.rule for finding in found] == [rule]
    assert all((finding.title, finding.evidence, finding.advice) for finding in found)


def test_a_gap_of_rounded_weights_is_too_large_from_a_lower_bound(tmp_path):
    run = make_run(tmp_path / "run", {"policy/logprob_gap/mean": lambda step: 0.03})
    assert findings(read_run(run)) == []
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("rollout:", "rollout:\n  weights: w8a8", 1))
    (found,) = findings(read_run(run))
    assert (found.rule, found.level) == ("gap_too_large", "problem")
    assert found.advice == "Set rollout.weights to int8, which leaves activations as they are, or to dtype."


def test_no_rule_fires_on_a_healthy_run(tmp_path):
    assert findings(read_run(make_run(tmp_path / "run"))) == []


def test_every_rule_has_a_fault_here_and_names_itself():
    assert [rule.__name__ for rule in RULES] == list(FAULTS)


def test_a_solved_task_is_not_a_fault(tmp_path):
    solved = {
        "train-reward/total/mean": lambda step: min(0.99, 0.2 + step / 20),
        "group/equal_rewards_fraction": lambda step: 0.95,
        "rollout/entropy": lambda step: max(0.01, 1.0 - step / 20),
    }
    assert findings(read_run(make_run(tmp_path / "run", solved, accuracies={0: 0.1, 40: 0.99}))) == []


def test_a_run_that_has_just_begun_is_not_judged(tmp_path):
    faults = {"group/equal_rewards_fraction": lambda step: 1.0, "rollout/truncated_fraction": lambda step: 1.0}
    assert findings(read_run(make_run(tmp_path / "run", faults, steps=5, accuracies={}))) == []


def test_cut_answers_are_named_as_the_reason_that_nothing_is_learned(tmp_path):
    faults = {
        "group/equal_rewards_fraction": lambda step: 1.0,
        "rollout/truncated_fraction": lambda step: 0.72,
        "train-reward/total/mean": lambda step: 0.0,
    }
    found = {finding.rule: finding for finding in findings(read_run(make_run(tmp_path / "run", faults)))}
    assert "rollout.max_new_tokens (now 64)" in found["nothing_learned"].advice
