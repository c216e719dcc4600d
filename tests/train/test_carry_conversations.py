"""Conversations that are carried over updates: time changes no draw, and environments are found again."""

import json

import numpy as np
import pytest
import scripted
from held_steps import CARRIED, Steps, assert_same_draws
from scripted import Counting
from tiny_runs import assert_same_run, config_of, trained

from podium.sampling.conversations.carry import Position
from podium.sampling.conversations.dialogue import Dialogue
from podium.tasks.conversation import ToolCall
from podium.tasks.conversations.tool_calls import Calls
from podium.train.loop import train

TASKS = [
    {"name": "arithmetic", "environment": "scripted:Counting"},
    {"environment": "scripted:Doors", "options": {"episodes": 40, "eval_episodes": 2}},
    {"name": "arithmetic"},
]
"""Conversations, some of which the environment begins, and single answers beside them."""
WAITING = {"refill_steps": CARRIED["refill_steps"]}
"""A rollout that ends with its step, by the programs of one that carries over."""


def test_carried_conversations_are_those_that_a_step_would_have_waited_for(talk, monkeypatch):
    made, begin = [], Counting.__init__

    def counted(self, prompt, seed) -> None:
        made.append(prompt.id)
        begin(self, prompt, seed)

    monkeypatch.setattr(Counting, "__init__", counted)
    carried = Steps(talk(tasks=TASKS, rollout=CARRIED), 7)
    held = [each for pending in carried.position.pending for each in pending.episodes]
    talks = [group for step in carried.groups for group in step if group.prompt.task == 0]
    begun = 4 * len(talks) + sum(pending.prompt.prompt.task == 0 for pending in carried.position.pending) * 4
    assert len(made) == begun  # each has one environment, over all steps
    waited_for = Steps(talk(tasks=TASKS, rollout=WAITING), 8).by_prompt()
    crossed = {True: 0, False: 0}
    for step, groups in enumerate(carried.groups):
        assert [group.version for group in groups] == [step] * 4
        for group in groups:
            assert_same_draws(group, waited_for[group.prompt.task, group.prompt.prompt.id])
            for each in group.transcripts:
                assert step - 1 <= each.versions[0] <= each.versions[-1] <= step
                assert (np.diff(each.versions) >= 0).all()
                crossed[each.num_turns > 1] += bool(each.versions[0] != each.versions[-1])
    assert min(crossed.values()) > 2, crossed
    drawn = sum(each.num_drawn for each in carried.transcripts)
    drawn += sum(each.transcript.num_drawn + len(each.drawing.tokens if each.drawing else ()) for each in held)
    assert sum(stats.completion_tokens for stats in carried.stats) == drawn
    ended = [each.num_drawn for each in carried.transcripts]
    ended += [each.transcript.num_drawn for each in held if each.ended]
    assert sorted(length for stats in carried.stats for length in stats.drawn_lengths) == sorted(ended)


def test_what_is_in_flight_goes_on_bit_for_bit_in_another_process_and_whatever_the_delays(talk):
    """As if the run were stopped after every step: environments are opened again and told what they were told."""
    exactly = {"rollout": {**CARRIED, "reproducible": True}, "environments": {"workers": 1}}
    whole = Steps(talk(tasks=TASKS, **exactly), 4)
    slow = [{"name": "arithmetic", "environment": "scripted:Slow"}, *TASKS[1:]]
    for other in (Steps(talk(tasks=TASKS, **exactly), 4, anew=True), Steps(talk(tasks=slow, **exactly), 4)):
        assert not other.failures
        for one, two in zip(whole.transcripts, other.transcripts, strict=True):
            assert one.messages == two.messages
            for name in ("tokens", "sampled_logprobs", "full_logprobs", "versions"):
                assert np.array_equal(getattr(one, name), getattr(two, name)), name
        for one, two in zip(whole.groups, other.groups, strict=True):
            assert [group.rewards for group in one] == [group.rewards for group in two]
        assert whole.position.record() == other.position.record()
    states = {each.state for pending in whole.position.pending for each in pending.episodes}
    assert len(states) > 1, states


def test_a_step_is_repeated_when_the_position_before_it_is_set_again(talk):
    """In the same process; environments that have gone on meanwhile are not used."""
    steps = Steps(talk(rollout={**CARRIED, "in_flight": 3.0, "max_staleness": 3, "reproducible": True}), 0)
    with steps.opened() as rollouts:
        for step in range(2):
            steps.run(rollouts, step)
        record, before = json.loads(json.dumps(rollouts.position.record())), rollouts.position.pending
        steps.run(rollouts, 2)
        later = {each.prompt.number: each.episodes for each in rollouts.position.pending}
        crossed = [
            pair
            for each in before
            if each.prompt.number in later
            for pair in zip(each.episodes, later[each.prompt.number], strict=False)  # those not begun have none
        ]
        assert any(earlier.replies < later.replies for earlier, later in crossed)
        rollouts.position = Position.read(record, rollouts.feed)
        steps.run(rollouts, 2)
    *_, once, again = steps.groups
    assert not steps.failures
    for one, two in zip(once, again, strict=True):
        assert_same_draws(one, two)


def test_an_environment_that_answers_otherwise_when_it_is_opened_anew_begins_again(talk, monkeypatch):
    monkeypatch.setattr(scripted.Fickle, "made", 0)
    config = talk("Fickle", rollout=CARRIED, environments={"retries": 1})
    found = Steps(config, 3, anew=True)
    assert found.failures and all("differs from before the run was resumed" in each for each in found.failures)
    assert "set rollout.in_flight to 1" in found.failures[0]
    assert {each.finish_reason for each in found.transcripts} <= {"stop", "length"}
    monkeypatch.setattr(scripted.Fickle, "made", 0)
    assert not Steps(config, 3).failures  # its environments stay open from step to step


def test_reward_functions_get_environments_that_ended_in_an_earlier_step(talk, monkeypatch):
    """This also holds after a resume, when earlier answers are sent again to new environments."""

    def call_of_everything(self: Dialogue, text: str, tokens: list[int], **context: object) -> Calls:
        calls = (ToolCall(name="echo", arguments={"message": text}),) if text else ()
        return Calls(calls=calls, said="" if text else text)

    monkeypatch.setattr(Dialogue, "read", call_of_everything)
    task = {"environment": "scripted:Echo", "rewards": {"scripted:echoed": 1.0}, "correct": "scripted:echoed"}
    task |= {"options": {"episodes": 40, "eval_episodes": 2}}
    waited_for = Steps(talk(tasks=[task], rollout=WAITING), 5).by_prompt()
    ended, paid = 0, 0.0
    for anew in (False, True):
        found = Steps(talk(tasks=[task], rollout=CARRIED), 4, anew=anew)
        for step in found.groups:
            for group in step:
                assert_same_draws(group, waited_for[group.prompt.task, group.prompt.prompt.id])
                paid += sum(reward.total for reward in group.rewards)
        ended += sum(each.ended for pending in found.position.pending for each in pending.episodes)
        assert not found.failures
    assert ended > 0 and paid > 0


@pytest.mark.long
def test_a_run_goes_on_bit_for_bit_with_conversations_in_flight(talk, tmp_path):
    """Replies are late and out of order, from two processes; some environments fail."""
    changes = {
        "rollout": {**CARRIED, "reproducible": True},
        "environments": {"workers": 2, "max_failed": 0.9},
        "eval": {"every_steps": 1, "at_start": False},
        "tasks": [{"name": "arithmetic", "environment": "scripted:SlowFailing"}, *TASKS[1:]],
    }
    runs = {}
    for name, stops in (("whole", [3]), ("stopped", [1, 3])):
        runs[name] = tmp_path / name / "run"
        assert train(talk(**changes, steps=stops[0], runs_dir=str(tmp_path / name)), plain=True) == 0
        for steps in stops[1:]:
            assert train(config_of(runs[name], steps=steps), plain=True) == 0
    assert_same_run(runs["stopped"], runs["whole"])
    records = trained(runs["whole"])
    assert [record["async/in_flight"] for record in records] == [2] * 3
    assert max(record["async/staleness/max"] for record in records) == 1
    assert sum(record["async/crossed_share"] for record in records) > 0
    assert sum(record["env/failed"] for record in records) > 0
    assert max(record["async/logprob_gap_by_age/0"] for record in records) < 1e-4
