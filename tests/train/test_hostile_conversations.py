"""Runs some of whose conversations hang, end their process, or fail: the others train, and none is changed."""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held_steps import CARRIED, Steps, assert_same_draws
from scripted import HOSTILE
from test_episodes import answered, opened, tokens_of
from tiny_runs import make_config, sizes

from podium.algorithms.recipes import RECIPES
from podium.config.imports import imported
from podium.observe.records import read_metrics, read_samples
from podium.observe.run_dir import METRICS, SAMPLES
from podium.rollout.transcript import Transcript
from podium.run.run_spec import AnswerSettings
from podium.sampling.feed import request_seed
from podium.sampling.groups import Greedy, Group
from podium.tasks.mixture import TaskPrompt
from podium.tasks.task import FAILED, Prompt
from podium.train.batches.prepare import pack_step, step_advantages
from podium.train.loop import train

ACTS = ("hold", "stop", "exit", "sleep", "surrogate")
GROUPS, SIZE = 30, 10


def conversations(config, hostile: dict[str, str], monkeypatch) -> tuple[list[Group], Any]:
    """The conversations of a step; those of `hostile` do what it says, by question and seed."""
    monkeypatch.setenv(HOSTILE, json.dumps(hostile))
    with opened(config) as rollouts:
        prompts = rollouts.feed.next(GROUPS)
        groups, _ = rollouts.answer(prompts, AnswerSettings(sampling=rollouts.spec.training.sampling, completions=SIZE))
        return groups, (rollouts.held, prompts)


def test_of_300_conversations_of_which_5_misbehave_295_train_and_none_is_changed(talk, monkeypatch):
    """They hold the interpreter's lock, stop their process, end it, sleep, and reply half a character."""
    own = {"workers": 2, "retries": 0, "timeout_s": 3.0, "group_seed": "own", "max_failed": 0.1}
    config = talk("Hostile", environments=own, rollout={"slots": 32})
    expected, (_, prompts) = conversations(config, {}, monkeypatch)
    places = [(3, 1), (7, 9), (12, 0), (20, 5), (29, 2)]
    keys = [
        f"{prompts[index].prompt.prompt.question} {request_seed(prompts[index].seed, 'environment', sample)}"
        for index, sample in places
    ]
    groups, (held, _) = conversations(config, dict(zip(keys, ACTS, strict=True)), monkeypatch)
    failed = {
        (index, sample)
        for index, group in enumerate(groups)
        for sample, transcript in enumerate(group.transcripts)
        if transcript.finish_reason == "failed"
    }
    assert failed <= set(places[:4]) and len(failed) >= 1  # those that got no reply before a limit did nothing
    assert failed == set(places[:4]), held.failures
    assert len(held.failures) == 4 and held.moved > 0
    kept = [
        (one, other)
        for index, pair in enumerate(zip(groups, expected, strict=True))
        for sample in range(SIZE)
        if (index, sample) not in places
        for one, other in [tuple((group.transcripts[sample], group.rewards[sample]) for group in pair)]
    ]
    assert len(kept) == 295
    for (transcript, reward), (other, paid) in kept:
        assert transcript.messages == other.messages and reward == paid
        assert transcript.tokens.tolist() == other.tokens.tolist()
        assert transcript.mask.tolist() == other.mask.tolist()
        np.testing.assert_allclose(transcript.sampled_logprobs, other.sampled_logprobs, atol=1e-4)
    strange = groups[29].transcripts[2]
    assert strange.finish_reason != "failed" and "\ufffd" in str(strange.messages)


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("environment", ["NoEnd", "NoBeginning"])
def test_a_run_goes_on_after_steps_whose_conversations_all_failed(talk, tmp_path, environment, carry):
    carried = {"in_flight": 1.5, "max_staleness": 2} if carry else {}
    config = talk(
        environment, environments={"max_failed": 1.0}, rollout=carried, eval={"at_start": False, "at_end": False}
    )
    assert train(config, plain=True) == 0
    steps = [line for line in read_metrics(tmp_path / "run" / METRICS) if "env/failed" in line]
    assert [line["env/failed"] for line in steps] == [16, 16]
    assert all("train-reward/total/mean" not in line and line["optimizer/updates"] == 0 for line in steps)
    assert len(read_samples(tmp_path / "run" / SAMPLES)) >= 2


def test_programs_whose_processes_are_lost_begin_again_without_a_failure(talk, monkeypatch):
    talker = [sys.executable, "-I", "-S", str(Path(__file__).parent / "talker.py"), "counting"]
    task = {"name": "program", "options": {"command": talker, "episodes": 8, "eval_episodes": 2}}
    config = talk(tasks=[task], environments={"workers": 2, "retries": 0})
    expected, _, _ = answered(config)
    with opened(config) as rollouts:
        killed: list[int] = []

        def poll() -> None:
            if rollouts.engine.keys and not killed:
                killed.append(rollouts.episodes.client.environments._pool._shared[0].worker.pid)
                os.kill(killed[0], signal.SIGKILL)

        rollouts.exchange.poll = poll
        settings = AnswerSettings(sampling=rollouts.spec.training.sampling, completions=4)
        groups, _ = rollouts.answer(rollouts.feed.next(4), settings)
        assert len(rollouts.held.failures) <= 1  # if a single program was being answered, it may be to blame
        assert rollouts.held.moved >= 1
    if not rollouts.held.failures:
        assert tokens_of(groups) == tokens_of(expected)


def test_code_of_a_user_that_exits_does_not_make_a_run_seem_done(tiny_model, tmp_path, one_device, monkeypatch):
    config = make_config(tiny_model, tmp_path, tasks=[{"name": "scripted:Leaving"}])
    with pytest.raises(RuntimeError, match=r"called sys.exit\(0\), which would end the run"):
        train(config, plain=True)
    (tmp_path / "leaving_script.py").write_text("import sys; sys.exit(0)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"module leaving_script ends the program as it is imported \(sys.exit\(0\)\)"):
        imported("leaving_script:task", what="a task")


def wait_without_calls(process):
    """Wait until a process has no call in progress: a single one would be to blame for the loss of its process."""
    question, until = process.ping(), time.monotonic() + 60
    while not process.responded(question) or process.begun:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_environments_that_are_lost_between_steps_change_nothing_that_is_carried_over(talk):
    """With a schedule that no clock decides, all is as it would have been, to the last position. Each that was lost is
    counted in the step that goes on with it; a grade that had come before is not."""
    carried = {**CARRIED, "in_flight": 3.0, "max_staleness": 3, "reproducible": True}
    config = talk(rollout=carried, environments={"workers": 1, "retries": 0})
    whole, broken = Steps(config, 3), Steps(config, 0)
    lost = [0]
    with broken.opened() as rollouts:
        for step in range(3):
            broken.run(rollouts, step)
            left = [each for pending in rollouts.position.pending for each in pending.episodes if not each.ended]
            lost.append(sum(each.state != "ending" for each in left))
            process = rollouts.episodes.client.environments._pool._shared[0].worker
            wait_without_calls(process)
            os.kill(process.pid, signal.SIGKILL)
            until = time.monotonic() + 60
            while not process._ended.locked():  # the next step finds it lost, however busy the machine is
                assert time.monotonic() < until
                time.sleep(0.01)
    assert not broken.failures
    assert [held.moved for held in broken.held] == lost[:3] and min(lost[1:]) > 4
    for one, other in zip(whole.groups, broken.groups, strict=True):
        for group, same in zip(one, other, strict=True):
            assert_same_draws(group, same)
    assert whole.position is not None and broken.position is not None
    assert whole.position.record() == broken.position.record()


@pytest.mark.parametrize("zero_variance", ["drop", "keep"])
@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_stumbles_over_a_step_whose_conversations_all_failed(name, zero_variance):
    """Whether it keeps such groups or drops them, there is nothing to train on, and no advantage."""
    recipe = dataclasses.replace(RECIPES[name](), zero_variance=zero_variance)
    prompt = TaskPrompt(task=0, prompt=Prompt(id="a", question="?", answer=""), system_prompt=None)
    failed = dataclasses.replace(Transcript().add_prompt((1, 2, 3)), finish_reason="failed")
    group = Group(prompt=prompt, transcripts=[failed] * 4, rewards=[FAILED] * 4, greedy=Greedy(failed, FAILED))
    packed = pack_step([group] * 3, recipe, sizes(row_tokens=16, rows=1, max_rows=8, packing="none"))
    advantages, _ = step_advantages(packed, recipe, [])
    assert packed.minibatches == [] and not advantages.any() and np.isfinite(advantages).all()
