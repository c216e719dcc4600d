import json
import math

import numpy as np
import pytest

from podium.files import to_json
from podium.observe.records import completion_records, lengths_record, read_metrics, sample_record, sampled_groups
from podium.rollout.request import Completion
from podium.rollout.transcript import transcript_of
from podium.tasks.task import Prompt, Reward


def test_a_sample_has_the_question_and_all_its_completions():
    completion = Completion(
        tokens=np.array([5, 6, 2], np.int32),
        sampled_logprobs=np.zeros(3, np.float32),
        full_logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
        text="12",
        finish_reason="stop",
    )
    record = sample_record(
        3,
        "train",
        "arithmetic",
        Prompt(id="arithmetic/train/7", question="7 + 5?", answer="12"),
        completion_records(
            [transcript_of((1, 2), completion)], [Reward(total=1.5, parts={"correct": 1.0, "format": 1.0})]
        ),
    )
    assert json.loads(to_json(record)) == {
        "step": 3,
        "split": "train",
        "task": "arithmetic",
        "prompt": "arithmetic/train/7",
        "question": "7 + 5?",
        "answer": "12",
        "completions": [
            {
                "text": "12",
                "reward": 1.5,
                "parts": {"correct": 1.0, "format": 1.0},
                "finish_reason": "stop",
                "tokens": 3,
            }
        ],
    }


def test_lengths_are_plain_lists():
    assert lengths_record(2, [10, 11], [3, 4, 5, 6]) == {
        "step": 2,
        "prompt_lengths": [10, 11],
        "completion_lengths": [3, 4, 5, 6],
    }


@pytest.mark.parametrize(("prompts_per_step", "samples_every"), [(1, 1), (4, 10), (16, 10), (3, 7), (32, 32)])
def test_every_kth_group_of_the_run_is_kept_wherever_steps_begin(prompts_per_step, samples_every):
    kept = [
        (step - 1) * prompts_per_step + group
        for step in range(1, 30)
        for group in sampled_groups(step, prompts_per_step=prompts_per_step, samples_every=samples_every)
    ]
    assert kept == list(range(0, 29 * prompts_per_step, samples_every))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_null_in_the_file_and_nan_when_read(tmp_path, value):
    file = tmp_path / "metrics.jsonl"
    file.write_text(to_json({"step": 1, "loss": value, "reward": 0.5}) + "\n")
    assert json.loads(file.read_text()) == {"step": 1, "loss": None, "reward": 0.5}
    (read,) = read_metrics(file)
    assert math.isnan(read.pop("loss"))
    assert read == {"step": 1, "reward": 0.5}
