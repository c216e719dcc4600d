"""Completions that are carried over updates: which prompts make a step, and that time changes no draw."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import assert_same_run, config_of, make_config, read_records, rollout_spec, trained

from podium.config.errors import ConfigError
from podium.observe.alarms import length_distance
from podium.observe.run_dir import saved_steps
from podium.rollout.request import CallCounts, Completion, RolloutStats, ScheduleCounts
from podium.sampling.conversations.carry import Pending, Position, chosen
from podium.sampling.sampler import Sampler
from podium.settings import load_settings
from podium.tasks.task import Reward
from podium.train.loop import train
from podium.train.setup import load_weights, make_model

CARRIED = {"in_flight": 1.5, "max_staleness": 1, "max_new_tokens": 10, "slots": 8, "refill_steps": 2}
"""Six groups of four share eight slots, and a step takes four of them."""


@given(
    lengths=st.lists(st.integers(1, 12), min_size=60, max_size=60),
    per_step=st.integers(1, 4),
    over=st.sampled_from([1.25, 1.5, 2.0, 2.5, 3.0]),
    more=st.integers(0, 2),
    slots=st.integers(1, 8),
)
def test_no_prompt_is_older_than_the_bound_or_lost_or_taken_twice(lengths, per_step, over, more, slots):
    """Any lengths, in looks, of prompts that enter slots in their order."""
    room, bound = max(int(over * per_step), per_step), int(np.ceil(over - 1)) + more
    left, first, taken, pending, version = dict(enumerate(lengths)), {}, [], [], 0
    while len(taken) + room < len(lengths):
        begin = len(taken) + len(pending)
        pending += range(begin, begin + room - len(pending))
        versions = [first.get(prompt) for prompt in pending]
        sizes = {"per_step": per_step, "version": version, "max_staleness": bound}
        while (found := chosen(versions, [not left[each] for each in pending], per_step, **sizes)) is None:
            running = [prompt for prompt in pending if left[prompt]][:slots]
            assert running, "there is nothing left to wait for"
            for prompt in running:
                first.setdefault(prompt, version)
                left[prompt] -= 1
        now = [pending[index] for index in found]
        assert len(now) == per_step
        assert all(version - first[prompt] <= bound for prompt in now)
        assert [first[prompt] for prompt in now] == sorted(first[prompt] for prompt in now)
        taken += now
        pending = [prompt for prompt in pending if prompt not in now]
        version += 1
    assert sorted(taken + pending) == list(range(len(taken) + room - per_step))


def test_the_oldest_are_taken_first_and_what_is_at_the_bound_is_waited_for():
    sizes = {"per_step": 2, "version": 5, "max_staleness": 2}
    assert chosen([4, 3, None], [True, True, True], 2, **sizes) == [1, 0]
    assert chosen([4, 4, None], [True, False, True], 2, **sizes) == [0, 2]
    assert chosen([4, 3, None], [True, False, True], 2, **sizes) is None
    assert chosen([None, None], [True, False], 2, **sizes) is None


class Made:
    """Steps of a rollout whose weights stay as they are: as with a learning rate of 0."""

    def __init__(self, config, steps: int) -> None:
        model = make_model(config)
        self.steps, self.stats = [], []
        with contextlib.closing(
            Sampler(rollout_spec(config, model), model.decoder, model.tokenizer, model.mesh)
        ) as rollouts:
            weights = load_weights(model, None)
            for step in range(steps):
                rollouts.load(weights, version=step)
                groups, stats = rollouts.answer(rollouts.feed.next(config.prompts_per_step))
                self.steps.append(groups)
                self.stats.append(stats)
            self.position, self.feed = rollouts.position, rollouts.feed

    def answers(self) -> dict[tuple[int, ...], list[list[int]]]:
        """The tokens of each prompt's completions."""
        return {
            group.tokens: [each.drawn_tokens.tolist() for each in group.transcripts]
            for step in self.steps
            for group in step
        }


@pytest.fixture(scope="module")
def carried(tiny_model, one_device) -> Made:
    return Made(make_config(tiny_model, rollout=CARRIED), 8)


@pytest.fixture(scope="module")
def waited_for(tiny_model, one_device) -> Made:
    """The same prompts, each step with its own."""
    alone = {name: value for name, value in CARRIED.items() if name not in ("in_flight", "max_staleness")}
    return Made(make_config(tiny_model, rollout=alone), 9)


def test_carried_completions_are_those_that_a_step_would_have_waited_for(carried, waited_for):
    expected, crossed = waited_for.answers(), 0
    for step, groups in enumerate(carried.steps):
        assert [group.version for group in groups] == [step] * 4
        for group in groups:
            assert [each.drawn_tokens.tolist() for each in group.transcripts] == expected[group.tokens]
            for each in group.transcripts:
                assert step - 1 <= each.versions[0] <= each.versions[-1] <= step
                assert (np.diff(each.versions) >= 0).all()
                assert len(each.versions) == len(each.sampled_logprobs) == each.num_drawn
                crossed += each.versions[0] != each.versions[-1]
    assert crossed > 4


def test_no_token_is_lost_or_counted_twice(carried):
    """What was drawn is what steps took and what is in flight."""
    taken = sum(each.num_drawn for step in carried.steps for group in step for each in group.transcripts)
    held = sum(len(each.tokens) for pending in carried.position.pending for each in pending.completions)
    assert sum(stats.completion_tokens for stats in carried.stats) == taken + held
    assert {stats.in_flight for stats in carried.stats} == {2}
    assert sum(stats.scheduled.rebuilt_tokens for stats in carried.stats) > 0


def test_the_lengths_that_were_drawn_are_those_of_all_that_ended(carried):
    """Each once: those that steps took, and those that wait in prompts that go on."""
    taken = [each.num_drawn for step in carried.steps for group in step for each in group.transcripts]
    held = [each for pending in carried.position.pending for each in pending.completions]
    ended = taken + [len(each.tokens) for each in held if each.finish_reason is not None]
    drawn = [length for stats in carried.stats for length in stats.drawn_lengths]
    assert sorted(drawn) == sorted(ended)
    assert any(
        list(stats.drawn_lengths) != [each.num_drawn for group in step for each in group.transcripts]
        for stats, step in zip(carried.stats, carried.steps, strict=True)
    )


def test_the_distance_of_lengths_is_the_largest_between_their_distribution_functions():
    assert length_distance([1, 2, 3, 4], [4, 3, 2, 1, 4, 3, 2, 1]) == 0
    assert length_distance([1, 1], [2, 2]) == 1
    assert length_distance([1, 2], [2, 3]) == 0.5
    assert length_distance([1, 2, 3, 9], [3, 9]) == 0.5
    assert length_distance([], [1]) is length_distance([1], []) is None


def test_the_time_of_rebuilding_is_its_share_of_the_prefilled_tokens():
    stats = RolloutStats(
        calls=CallCounts(prefill_s=2.0), scheduled=ScheduleCounts(prefill_tokens=400, rebuilt_tokens=100)
    )
    assert stats.rebuild_s == 0.5
    assert RolloutStats(calls=CallCounts(prefill_s=2.0)).rebuild_s == 0


def test_a_position_is_read_as_it_was_written(carried):
    read = Position.read(json.loads(json.dumps(carried.position.record())), carried.feed)
    assert read.cursor == carried.position.cursor == 8 * 4 + 2
    for found, expected in zip(read.pending, carried.position.pending, strict=True):
        assert (found.prompt.tokens, found.prompt.seed) == (expected.prompt.tokens, expected.prompt.seed)
        assert found.rewards == expected.rewards
        for one, other in zip(found.completions, expected.completions, strict=True):
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
            assert one.versions.tobytes() == other.versions.tobytes()
            assert one.sampled_logprobs.tobytes() == other.sampled_logprobs.tobytes()


def test_a_prompt_that_is_complete_is_written_with_its_rewards(carried):
    ended = Completion(
        tokens=np.array([5], np.int32),
        sampled_logprobs=np.array([-0.1], np.float32),
        full_logprobs=np.array([-0.2], np.float32),
        versions=np.array([3], np.int32),
        text="five",
        finish_reason="stop",
    )
    rewards = (Reward(total=0.1 + 0.2, parts={"correct": 1.0, "own": 0.1}, timed_out=True),)
    pending = Pending(prompt=carried.feed.at(3), completions=(ended,), rewards=rewards)
    record = json.loads(json.dumps(Position(cursor=9, pending=(pending,)).record()))
    (found,) = Position.read(record, carried.feed).pending
    assert (found.rewards, found.first_version, found.prompt.number) == (rewards, 3, 3)


@pytest.mark.parametrize("refill", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "refill"])
def test_a_run_goes_on_bit_for_bit_with_what_was_in_flight(tiny_model, tmp_path, one_device, refill):
    recipe = {"recipe": "dapo", "max_refills": 1} if refill else {}
    changes = {
        "rollout": CARRIED,
        "eval": {"every_steps": 1, "questions": 2},
        "algorithm": recipe,
        "tasks": [{"name": "arithmetic", "rewards": {"correct": 1.0, "length": 1.0}}],  # lengths of a group differ
        "grading": {"overlong_buffer_tokens": 8},
    }
    runs = {}
    for name, stops in (("whole", [3]), ("stopped", [1, 3])):
        config = make_config(tiny_model, tmp_path / name, steps=stops[0], **changes)
        runs[name] = Path(config.runs_dir) / "run"
        assert train(config, plain=True) == 0
        for steps in stops[1:]:
            assert train(config_of(runs[name], steps=steps), plain=True) == 0
    assert_same_run(runs["stopped"], runs["whole"])
    assert saved_steps(runs["whole"] / "checkpoints") == [3]
    records = trained(runs["whole"])
    assert [record["async/in_flight"] for record in records] == [2] * 3
    assert max(record["async/staleness/max"] for record in records) == 1
    assert records[0]["async/staleness/max"] == 0
    assert records[0]["async/logprob_gap_by_age/0"] < 1e-4
    if not refill:  # few groups teach something: most steps have no update
        assert max(record.get("async/logprob_gap_by_age/1", 0.0) for record in records) > 1e-3
        assert min(record.get("async/effective_share", 1.0) for record in records) < 1 - 1e-6
    assert sum(record["async/crossed_share"] for record in records) > 0
    assert records[0]["async/effective_share"] == pytest.approx(1, abs=1e-4)
    assert records[0]["async/clip_share_by_age/0"] == 0
    lengths = read_records(runs["whole"] / "lengths.jsonl")
    for record, line in zip(records, lengths, strict=True):
        assert record["async/drawn_length/mean"] == pytest.approx(np.mean(line["drawn_lengths"]))
        expected = length_distance(line["completion_lengths"], line["drawn_lengths"])
        assert record["async/length_distance"] == expected
        assert (record["async/rebuild_s"] > 0) == (record["rollout/rebuilt_tokens"] > 0)


BASE = ["model=demo", "tasks=[{name: arithmetic}]"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["in_flight=1.5", "max_staleness=0"],
            r"max_staleness: 0 is too low for rollout.in_flight 1.5: .* set 1",
        ),
        (["in_flight=4", "max_staleness=2"], r"for up to 3 more; set 3 or more, or rollout.in_flight to 3 or less"),
        (["max_staleness=1"], r"max_staleness: 1 has no effect with rollout.in_flight 1"),
        (["in_flight=1.01"], r"in_flight: 1.01 x prompts_per_step 32 is not one prompt more .* set 1.04 or more"),
        (["in_flight=0.5"], r"in_flight: expected a number of at least 1"),
        (["in_flight=1.5", "algorithm.recipe=gspo"], r"nothing corrects it; set algorithm.old_logprobs to sampler, or"),
        (["in_flight=1.5", "algorithm.recipe=reinforce"], r"nothing corrects it; set algorithm.correction to truncate"),
        (["in_flight=1.5", "algorithm.minibatches=2"], r"max_staleness: 2 with several updates of a batch"),
        (["in_flight=1.5", "algorithm.recipe=sft", "group_size=1"], r"recipe sft samples nothing"),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings, message):
    given = [each if "." in each.split("=")[0] or each.startswith("group") else f"rollout.{each}" for each in settings]
    with pytest.raises(ConfigError, match=message):
        load_settings([], [*BASE, *given], {})


@pytest.mark.parametrize(
    "settings",
    [
        ["rollout.max_staleness=0"],
        ["rollout.in_flight=1.5"],
        ["rollout.in_flight=1.5", "rollout.max_staleness=1", "algorithm.updates_per_batch=2"],
        ["rollout.in_flight=1.5", "algorithm.recipe=gspo", "algorithm.correction=truncate"],
    ],
)
def test_settings_that_agree_are_taken(settings):
    load_settings([], [*BASE, *settings], {})
