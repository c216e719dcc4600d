"""The weight of every token of a step, and what becomes of the loss, against denominators worked out by hand here.

`tests/train/test_trainer.py` checks how batches are built with the functions that build them; these tests share
nothing with them but the completions' lengths.
"""

import numpy as np
import pytest
from tiny_runs import changed, groups_of, make_config, make_group, make_trainer, recipe_of, with_logprobs

from podium.run.run_spec import BatchSizes
from podium.train.batches.prepare import pack_step

LENGTHS = [[2, 5], [1, 3], [4, 4], [6, 1]]
"""Tokens of two completions each of four prompts: the first two prompts have 11 tokens, the last two 15."""
LONGEST_ALLOWED = 9
"""Longer than every completion, so that a divisor that is the longest of them is another number."""


def step_weights(mean: str, minibatches: int) -> list[list[float]]:
    """The weights of each optimizer step's tokens, as the trainer's batches hold them, those of a completion once."""
    config = make_config(prompts_per_step=4, group_size=2, algorithm={"mean": mean, "minibatches": minibatches})
    groups = [make_group([0.0, 1.0], seed=seed, lengths=lengths) for seed, lengths in enumerate(LENGTHS)]
    sizes = BatchSizes(
        row_tokens=16, rows=2, max_rows=8, packing="shared_prompts", max_new_tokens=LONGEST_ALLOWED, devices=1
    )
    found = []
    for minibatch in pack_step(groups, recipe_of(config), sizes).minibatches:
        weights = minibatch.batch.weights.reshape(-1, 16)
        spans = [weights[span.row, span.start : span.start + span.length] for span in minibatch.spans]
        assert all((own == own[0]).all() for own in spans)
        assert weights.sum() == pytest.approx(sum(own.sum() for own in spans))
        found.append([float(own[0]) for own in spans])
    return found


@pytest.mark.parametrize(
    ("mean", "whole", "halves"),
    [
        ("token", [1 / 26] * 8, [[1 / 11] * 4, [1 / 15] * 4]),
        (
            "sequence",
            [1 / 16, 1 / 40, 1 / 8, 1 / 24, 1 / 32, 1 / 32, 1 / 48, 1 / 8],
            [[1 / 8, 1 / 20, 1 / 4, 1 / 12], [1 / 16, 1 / 16, 1 / 24, 1 / 4]],
        ),
        ("constant", [1 / 72] * 8, [[1 / 36] * 4] * 2),
    ],
)
def test_denominators_are_those_of_one_optimizer_step_s_own_completions(mean, whole, halves):
    """Of a minibatch, not of the whole batch: half of it has half as many completions and its own tokens."""
    np.testing.assert_allclose(step_weights(mean, 1), [whole], rtol=1e-6)
    np.testing.assert_allclose(step_weights(mean, 2), halves, rtol=1e-6)


def test_a_constant_divisor_is_the_longest_allowed_and_not_the_longest_drawn():
    """The same completions under twice the limit of new tokens move the weights half as far."""
    moved = []
    for limit in (8, 16):
        lengths = {"max_prompt_tokens": 8, "max_new_tokens": limit}
        trainer, state = make_trainer(algorithm={"mean": "constant"}, rollout=lengths, train={"row_tokens": 24})
        groups = with_logprobs(trainer, state, groups_of(lengths=[3, 1, 5, 2]))
        moved.append(changed(trainer, state, groups)[0])
    for name, whole in moved[0].items():
        scale = np.abs(whole).max()
        np.testing.assert_allclose(2 * moved[1][name], whole, rtol=0, atol=1e-4 * scale, err_msg=name)
