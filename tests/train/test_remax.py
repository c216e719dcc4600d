"""ReMax: a greedy completion of each prompt, drawn and graded with the others, and trained by nothing."""

import dataclasses

import numpy as np
import pytest
from test_curriculum_run import break_off_in
from test_episodes import opened
from tiny_runs import assert_same_run, make_config, make_group, make_trainer, read_records, spec_of, trained

from podium.accelerators import find_accelerator
from podium.plan.request.phase_sizes import Planned
from podium.plan.request.workload import simulate_rollout
from podium.rollout.request import Request
from podium.tasks.task import FAILED
from podium.train.batches.prepare import pack_step, step_advantages
from podium.train.loop import train

pytestmark = pytest.mark.usefixtures("one_device")

REMAX = {"recipe": "remax"}
CARRIED = {"in_flight": 1.5, "max_staleness": 1, "max_new_tokens": 10, "slots": 8, "refill_steps": 2}


def config(model, runs, **changes):
    return make_config(model, runs, algorithm=REMAX, tasks=[TASK], **changes)


def letters(completion: str) -> float:
    """A reward that differs from completion to completion."""
    return len(completion) + sum(map(ord, completion)) / 1000


TASK = {"name": "arithmetic", "rewards": {"test_remax:letters": 1.0}, "correct": "test_remax:letters"}


def test_a_group_has_a_greedy_completion_with_its_reward_beside_those_of_any_recipe(tiny_model, tmp_path):
    with opened(config(tiny_model, tmp_path)) as rollouts:
        groups, stats = rollouts.answer(rollouts.feed.next(4))
        asked = [group.tokens for group in groups]
        sampling = rollouts.spec.training.sampling
        greedy = dataclasses.replace(sampling, temperature=0.0, greedy_completion=None)
        alone, _ = rollouts.engine.generate([Request(prompt=each, sampling=greedy, seed=1) for each in asked])
    with opened(make_config(tiny_model, tmp_path, tasks=[TASK])) as plain:
        expected, fewer = plain.answer(plain.feed.next(4))
    for group, (own,), other in zip(groups, alone, expected, strict=True):
        assert group.greedy is not None and other.greedy is None
        assert group.greedy.transcript.drawn_tokens.tolist() == own.tokens.tolist()
        assert group.greedy.reward.total == pytest.approx(letters(own.text), abs=1e-6)
        assert [each.drawn_tokens.tolist() for each in group.transcripts] == [
            each.drawn_tokens.tolist() for each in other.transcripts
        ]
        assert group.totals.tolist() == other.totals.tolist()
    drawn = sum(group.greedy.transcript.num_drawn for group in groups if group.greedy)
    assert stats.completion_tokens == fewer.completion_tokens + drawn
    assert stats.prompt_tokens == fewer.prompt_tokens  # one prefill for both


def test_advantages_are_rewards_minus_the_greedy_one_and_it_is_not_trained():
    groups = [make_group([1.0, 0.0, 0.5], seed=seed).apart for seed in range(3)]
    assert groups[2].greedy is not None
    groups[2] = dataclasses.replace(groups[2], greedy=groups[2].greedy._replace(reward=FAILED))
    trainer, _ = make_trainer(algorithm=REMAX, group_size=2)
    packed = pack_step(groups, trainer.recipe, trainer.sizes)
    assert len(packed.minibatches[0].samples) == 6
    found, _ = step_advantages(packed, trainer.recipe, [])
    np.testing.assert_allclose(found, [[0.5, -0.5], [0.5, -0.5], [0.0, 0.0]])


@pytest.mark.long
def test_a_run_reports_greedy_completions_and_one_broken_off_goes_on_as_if_nothing_had_happened(
    tiny_model, tmp_path, monkeypatch
):
    def of(runs):
        return config(tiny_model, runs, steps=4, rollout=CARRIED, checkpoint={"every_steps": 1}, eval={"questions": 2})

    assert train(of(tmp_path / "whole"), plain=True) == 0
    run = tmp_path / "whole" / "run"
    for line in trained(run):
        assert line["train-reward/greedy/mean"] <= line["train-reward/greedy/max"]
        assert line["train-other/batch_global"] == 16
    samples = [line for line in read_records(run / "samples.jsonl") if line["split"] == "train"]
    assert all(len(line["completions"]) == 4 and line["greedy"]["tokens"] > 0 for line in samples)
    for line in samples:
        for each in line["completions"]:
            assert each["advantage"] == pytest.approx(each["reward"] - line["greedy"]["reward"], abs=1e-5)

    break_off_in(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(of(tmp_path / "broken"), plain=True)
    monkeypatch.undo()
    assert train(of(tmp_path / "broken"), plain=True) == 0
    assert_same_run(tmp_path / "broken" / "run", run)


def test_a_conversation_has_a_greedy_one_beside_it(talk):
    with opened(talk(algorithm=REMAX, prompts_per_step=2, group_size=2)) as rollouts:
        groups, _ = rollouts.answer(rollouts.feed.next(2))
        for group in groups:
            assert group.greedy is not None and len(group.transcripts) == len(group.firsts) == 2
            transcript = group.greedy.transcript
            assert transcript.num_turns > 1
            before: list[int] = []
            for span in transcript.spans:
                if span.drawn:
                    sampling = dataclasses.replace(
                        rollouts.spec.training.sampling,
                        temperature=0.0,
                        greedy_completion=None,
                        max_new_tokens=len(span.tokens),
                    )
                    request = Request(prompt=tuple(before[:1]), sampling=sampling, seed=0, ledgers={0: tuple(before)})
                    ((again,),), _ = rollouts.engine.generate([request])
                    assert again.tokens.tolist() == span.tokens.tolist()
                before += span.tokens.tolist()


def test_a_plan_counts_what_is_decoded_and_trains_on_the_rest():
    changes = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "rollout": {"max_prompt_tokens": 64, "max_new_tokens": 64}}
    one = make_config(algorithm=REMAX, **changes)
    accelerator = find_accelerator("v6e-1")
    drawn = Planned.of(one, accelerator).sizes.draw_lengths("gsm8k")
    assert drawn.completions.shape == (4, 4) and drawn.decoded.completions.shape == (4, 5)
    rollout = one.rollout.model_copy(update={"slots": 8, "prefill_rows": 4})
    assert simulate_rollout(drawn, rollout).completions == 20
    assert spec_of(one).rollout.training.completions == 5 and spec_of(make_config()).rollout.training.completions == 4
