"""Runs whose prompts are conversations: a tiny random model talks to environments whose replies are written down."""

import contextlib
import itertools
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from processes import below
from scripted import TALK, TEMPLATE, Counting, Echo
from tiny_runs import make_config, merged, recipe_of, rollout_spec, sizes, weights_of

import podium
from podium.observe.records import read_metrics, read_samples
from podium.observe.run_dir import LENGTHS, METRICS, SAMPLES
from podium.plan.request.simulated_device import Clock
from podium.plan.request.workload import Replies, SequenceLengths, simulate_rollout
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import RolloutStats
from podium.rollout.transcript import Transcript
from podium.run.run_spec import AnswerSettings
from podium.sampling.conversations.dialogue import Dialogue
from podium.sampling.exchange import Exchange
from podium.sampling.feed import prompt_messages
from podium.sampling.groups import Group
from podium.sampling.sampler import FailingEnvironmentError, Sampler
from podium.tasks.conversation import ToolCall, Turn, as_reply
from podium.tasks.conversations.conversing import Answered
from podium.tasks.conversations.tool_calls import Calls
from podium.tasks.task import Prompt
from podium.tasks.worker_process import WorkerProcess
from podium.train.batches.prepare import group_samples, pack_step, step_advantages
from podium.train.loop import train
from podium.train.setup import load_weights, make_model

GRPO = recipe_of(make_config())


@contextlib.contextmanager
def opened(config) -> Iterator[Sampler]:
    model = make_model(config)
    with contextlib.closing(
        Sampler(rollout_spec(config, model), model.decoder, model.tokenizer, model.mesh)
    ) as rollouts:
        rollouts.load(load_weights(model, None))
        yield rollouts
        assert rollouts.engine.keys == [] and rollouts.engine.pages_used == 0


def answered(config) -> tuple[list[Group], Sampler, RolloutStats]:
    with opened(config) as rollouts:
        groups, stats = rollouts.answer(rollouts.feed.next(config.prompts_per_step))
        return groups, rollouts, stats


def tokens_of(groups: list[Group]) -> list[list[list[int]]]:
    return [[transcript.tokens.tolist() for transcript in group.transcripts] for group in groups]


def test_a_run_trains_on_what_was_drawn_and_pays_what_the_environment_pays(talk, tmp_path):
    config = talk(eval={"at_start": True})
    assert train(config, plain=True) == 0
    steps = [line for line in read_metrics(tmp_path / "run" / METRICS) if "train-other/loss" in line]
    samples = read_samples(tmp_path / "run" / SAMPLES)
    assert [line["step"] for line in steps] == [1, 2]
    for step in steps:
        completions = [
            each
            for line in samples
            if line["split"] == "train" and line["step"] == step["step"]
            for each in line["completions"]
        ]
        assert len(completions) == 16
        assert step["train-other/total_valid_token_count"] == sum(each["tokens"] for each in completions)
        assert step["train-reward/total/mean"] == pytest.approx(np.mean([each["reward"] for each in completions]))
        assert step["policy/logprob_gap/max"] < 1e-4
        assert step["env/turns/max"] == 3 and step["env/failed"] == 0
        assert 1 <= step["rollout/parked"] <= 16
        assert step.get("env/stop/stop", 0.0) == pytest.approx(
            np.mean([each["finish_reason"] == "stop" for each in completions])
        )
    found = {each["finish_reason"] for line in samples for each in line["completions"]}
    assert found == {"stop", "length"}
    for line in samples:
        for each in line["completions"]:
            said = [message["content"] for message in each["messages"] if message["role"] == "assistant"]
            told = [message["content"] for message in each["messages"] if message["role"] == "user"]
            heard = said if each["finish_reason"] == "stop" else said[:-1]  # a turn that was cut is not answered
            paid = [float(len(text) % 3) for text in heard] + [0.0] * (len(said) - len(heard))
            if len(heard) == 3:
                paid[-1] = 0.0  # the third reply ends the conversation
            paid[-1] += sum(map(len, heard)) % 5
            assert (each["turn_rewards"], each["reward"]) == (paid, sum(paid))
            assert [text.split("+")[1] for text in told] == [f" {len(text) % 10} ?" for text in said[:-1]]
    evaluated = [line["eval/accuracy"] for line in read_metrics(tmp_path / "run" / METRICS) if "eval/accuracy" in line]
    assert len(evaluated) == 2 and all(0 <= each <= 1 for each in evaluated)


def test_what_a_clock_decides_is_not_reproducible():
    with pytest.raises(ValueError, match="a clock decides"):
        make_config(rollout={"reproducible": True, "limits": {"episode_timeout_s": 5.0}})


def test_what_the_engine_was_given_is_what_is_trained(talk):
    groups, _, _ = answered(talk())
    for index, group in enumerate(groups):
        for sample, transcript in zip(group_samples(group, index, GRPO), group.transcripts, strict=True):
            assert (*sample.prompt, *sample.tokens.tolist()) == tuple(transcript.tokens.tolist())
            assert sample.mask.tolist() == transcript.mask[len(sample.prompt) :].tolist()
            assert sample.num_drawn == transcript.num_drawn


def test_conversations_of_a_group_begin_alike_or_each_in_its_own_way(talk):
    doors = {"tasks": [{"environment": "scripted:Doors", "options": {"episodes": 8, "eval_episodes": 2}}]}
    groups, _, _ = answered(talk(**doors))
    assert all(len({t.prompt.tobytes() for t in group.transcripts}) == 1 for group in groups)
    assert len({group.tokens for group in groups}) > 1
    config = talk(**doors, environments={"group_seed": "own"})
    groups, _, _ = answered(config)
    assert any(len({t.prompt.tobytes() for t in group.transcripts}) > 1 for group in groups)
    for index, group in enumerate(groups):
        samples = group_samples(group, index, GRPO)
        assert len({each.group for each in samples}) == len({each.prompt for each in samples})
    assert train(config, plain=True) == 0


def test_our_failure_is_in_no_mean_and_too_many_stop_the_run(talk, tmp_path):
    config = talk("Failing", environments={"max_failed": 0.9})
    groups, rollouts, _ = answered(config)
    failed = [[reward.failed for reward in group.rewards] for group in groups]
    count = sum(map(sum, failed))
    assert 0 < count < 16 and len(rollouts.held.failures) == count
    assert "RuntimeError: the service is down" in rollouts.held.failures[0]
    for index, group in enumerate(groups):
        for sample, no_reward in zip(group_samples(group, index, GRPO), failed[index], strict=True):
            assert (sample.num_drawn == 0) == no_reward
    tried, rollouts, _ = answered(talk("Failing", environments={"max_failed": 0.9, "retries": 2}))
    assert len(rollouts.held.failures) == 3 * count  # it fails again with the same seed
    assert tokens_of(tried) == tokens_of(groups)
    with pytest.raises(FailingEnvironmentError, match=r"(?s)of 16.*max_failed is 0.2.*service is down"):
        answered(talk("Down"))
    assert (
        train(talk("Failing", environments={"max_failed": 0.9}, eval={"at_start": False, "at_end": False}), plain=True)
        == 0
    )
    steps = [line for line in read_metrics(tmp_path / "run" / METRICS) if "train-other/loss" in line]
    assert all(np.isfinite(line["train-other/loss"]) and np.isfinite(line["train-reward/total/mean"]) for line in steps)


def test_a_reply_that_does_not_come_is_our_failure(talk):
    groups, rollouts, _ = answered(talk("Hanging", environments={"timeout_s": 3.0, "max_failed": 1.0}))
    assert rollouts.held.failures and "environments.timeout_s, 3 s" in rollouts.held.failures[0]
    said = [m["content"] for g in groups for t in g.transcripts if t.finish_reason == "failed" for m in t.messages[-1:]]
    assert said and all("e" in each for each in said)


HOLDS: dict[str, Callable[[Transcript], bool]] = {
    "turns": lambda each: each.num_turns == 1,
    "drawn": lambda each: each.num_drawn == 4,
    "timeout": lambda each: each.num_turns == 1,
    "stop": lambda each: all(len(span.tokens) <= 4 for span in each.spans if span.source == "environment"),
}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_turns": 1}, "turns"),
        ({"max_drawn_tokens": 4}, "drawn"),
        ({"episode_timeout_s": 1e-9}, "timeout"),
        ({"max_reply_tokens": 2}, "stop"),
    ],
)
def test_limits_end_conversations_by_name(talk, limits, reason):
    (groups, _, _), (whole, _, _) = answered(talk(rollout={"limits": limits})), answered(talk())
    found = [transcript for group in groups for transcript in group.transcripts]
    assert reason in {each.finish_reason for each in found}
    ended = [each for each in found if each.finish_reason == reason]
    assert HOLDS[reason](ended[0])
    if reason == "turns":  # the environment has heard the last turn
        assert [each.turns[0] for g in groups for each in g.rewards] != [0.0] * 16
    assert max(t.num_turns for g in whole for t in g.transcripts) == 3


def call_of_everything(self: Dialogue, text: str, tokens: list[int], **context: object) -> Calls:
    """Reads a call into each answer that says something, where the real reader wants a call's text."""
    if not text:
        return Calls(said=text)
    return Calls(calls=(ToolCall(name="echo", arguments={"message": text}),), said="")


def counted(transcript: list) -> float:
    """Messages of a conversation."""
    return float(len(transcript))


def test_trls_class_form_is_taken_as_it_is(tiny_model, template, tmp_path, one_device, monkeypatch):
    """A random model writes no JSON: what is read as a call is replaced, all else is the whole run."""
    monkeypatch.setattr(Dialogue, "read", call_of_everything)
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 1 ?"}]} for n in range(1, 9)]
    changes = {"steps": 1, "prompts_per_step": 4, "group_size": 4, "eval": {"at_start": False, "at_end": False}}
    run = podium.grpo(
        str(tiny_model),
        rows,
        environment=Echo,
        rewards=[counted],
        chat_template=template,
        runs_dir=str(tmp_path),
        **merged({name: value for name, value in TALK.items() if name != "tasks"}, changes),
    )
    completions = [each for line in run.samples for each in line["completions"]]
    called = 0
    for each in completions:
        replies = [message["content"] for message in each["messages"] if message["role"] == "tool"]
        answers = [message for message in each["messages"] if message["role"] == "assistant"]
        calls = [call["function"]["arguments"]["message"] for each in answers for call in each.get("tool_calls", [])]
        assert calls[: len(replies)] == replies and len(calls) - len(replies) in (0, 1)
        called += len(replies)
        paid = float(len(replies[-1])) if replies else 0.0
        assert each["parts"] == {"correct": paid, "counted": float(len(each["messages"]))}
        assert each["reward"] == paid + len(each["messages"])
    assert called > 4
    assert sum(line.get("tools/echo/calls", 0) for line in run.metrics) == called
    assert run.config.tasks[0].environment == "scripted:Echo"


@pytest.mark.parametrize("beside", [False, True])
def test_a_get_reward_that_returns_none_is_no_reward_and_no_grade_of_the_task(talk, monkeypatch, beside):
    """As a reward function's None: left out where no other part applies; the rows' own answers grade nothing."""
    monkeypatch.setattr(Dialogue, "read", call_of_everything)
    rewards = {"correct": 2.0} | ({"test_episodes:counted": 0.5} if beside else {})
    config = talk(tasks=[{"name": "arithmetic", "environment": "scripted:Sparing", "rewards": rewards}])
    groups, _, _ = answered(config)
    found = Counter[bool]()
    for group in groups:
        for each, reward in zip(group.transcripts, group.rewards, strict=True):
            replies = [message["content"] for message in each.messages if message["role"] == "tool"]
            paid = len(str(replies[-1])) if replies else 0
            applies = paid % 2 == 0
            found[applies] += 1
            assert reward.failed == (not applies and not beside)
            if not reward.failed:
                assert reward.total == 2.0 * paid * applies + 0.5 * len(each.messages) * beside
            assert ("correct" in reward.weights, "counted" in reward.weights) == (applies, beside)
    assert min(found[True], found[False]) > 1, found


def test_an_environment_in_processes_survives_one_that_is_killed(talk):
    config = talk(environments={"workers": 2, "retries": 0})
    with opened(config) as rollouts:
        prompts = rollouts.feed.next(4)
        settings = AnswerSettings(sampling=rollouts.spec.training.sampling, completions=4)
        killed: list[int] = []

        def poll() -> None:
            if rollouts.engine.keys and not killed:  # all environments have begun
                killed.append(rollouts.episodes.client.environments._pool._shared[0].worker.pid)
                os.kill(killed[0], signal.SIGKILL)

        rollouts.exchange.poll = poll
        groups, _ = rollouts.answer(prompts, settings)
        assert rollouts.held.failures == () and rollouts.held.moved == 8
    expected, _, _ = answered(talk())
    assert tokens_of(groups) == tokens_of(expected)


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=pytest.mark.long)])
def test_random_conversations_leave_nothing(talk, monkeypatch, rounds):
    """Forty a round. Tools and environments raise, hang and end their processes; every other round is broken off, and
    in the others a process is killed."""
    monkeypatch.setattr(Dialogue, "read", call_of_everything)
    wild = [
        {"name": "arithmetic", "environment": "scripted:Wild"},
        {"environment": "scripted:WildTools", "options": {"episodes": 100, "eval_episodes": 2}},
    ]
    failing = {"workers": 2, "retries": 1, "timeout_s": 5.0, "max_failed": 1.0}
    config = talk(tasks=wild, environments=failing, rollout={"cache_tokens": 96, "stop": ["3", "5", "is", "+"]})
    draw, seen, started = random.Random(0), Counter(), list[subprocess.Popen]()
    begin = WorkerProcess.__init__

    def begun(self, module: str, **options) -> None:
        begin(self, module, **options)
        started.append(self._process)

    monkeypatch.setattr(WorkerProcess, "__init__", begun)
    with opened(config) as rollouts:
        settings = AnswerSettings(sampling=rollouts.spec.training.sampling, completions=4)
        for number in range(rounds):
            breaks, left = number % 2, [draw.randrange(2, 12)]

            def poll(breaks: int = breaks, left: list[int] = left) -> None:
                left[0] -= bool(rollouts.engine.keys)
                if left[0] == 0 and breaks:
                    raise KeyboardInterrupt
                if left[0] == 0 and rollouts.episodes.client.environments._pool._shared:
                    os.kill(rollouts.episodes.client.environments._pool._shared[0].worker.pid, signal.SIGKILL)

            rollouts.exchange.poll = poll
            with contextlib.suppress(KeyboardInterrupt):
                groups, stats = rollouts.answer(rollouts.feed.next(10), settings)
                seen["evicted"] += stats.scheduled.evicted + stats.scheduled.preempted
                seen.update(transcript.finish_reason for group in groups for transcript in group.transcripts)
                seen["moved"] += rollouts.held.moved
                seen["wrong"] += sum(ran.error for ran in rollouts.held.ran)
            assert rollouts.engine.keys == [] and rollouts.engine.pages_used == 0 and not rollouts.engine.busy
            assert (
                not rollouts.episodes.client.environments._pool._homes
                and not rollouts.episodes.client.environments._deadlines
            )
    assert all(seen[each] for each in ("evicted", "length", "failed", "moved", "wrong")), seen
    assert len(started) > failing["workers"]  # some ended and were replaced
    assert all(process.returncode is not None for process in started)
    assert not {process.pid for process in started} & set(below(os.getpid()))


@pytest.mark.parametrize("polls", [pytest.param(1, marks=pytest.mark.long), 4])
def test_a_run_broken_off_while_tools_run_continues_as_if_nothing_had_happened(talk, tmp_path, monkeypatch, polls):
    """As after a kill in step 2: what was drawn of it is drawn again."""
    saving = {"rollout": {"reproducible": True}, "checkpoint": {"every_steps": 1}, "environments": {"workers": 2}}
    quiet = {"eval": {"at_start": False, "at_end": False}, "steps": 3}
    config, other = (talk("Slow", **merged(saving, quiet), runs_dir=str(tmp_path / name)) for name in ("one", "two"))
    assert train(config, plain=True) == 0
    poll, load, left, versions = Exchange.poll, Sampler.load, [polls], list[int]()

    def loaded(rollouts: Sampler, *weights: Any, version: int) -> float:
        versions.append(version)
        return load(rollouts, *weights, version=version)

    def break_off(exchange: Exchange) -> None:
        poll(exchange)
        left[0] -= versions[-1] == 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Sampler, "load", loaded)
    monkeypatch.setattr(Exchange, "poll", break_off)
    with pytest.raises(KeyboardInterrupt):
        train(other, plain=True)
    monkeypatch.undo()
    assert train(other, plain=True) == 0
    one, two = tmp_path / "one" / "run", tmp_path / "two" / "run"
    assert weights_of(one) == weights_of(two)
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in (SAMPLES, LENGTHS))


class Timed:
    """Environments that reply after some seconds of a clock, which the engine's calls advance."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self.seconds, self.clock, self.now = seconds, clock, 0.0
        self.talks: dict[int, Counting] = {}
        self.due: list[tuple[float, int, Answered]] = []
        self.numbers = itertools.count()

    def watch(self, engine: RolloutEngine) -> None:
        prefill, decode = engine.device.prefill, engine.device.decode

        def prefilled(call):
            self.now += self.clock.call_seconds(call.chunk)
            return prefill(call)

        def decoded(rows, tokenizer):
            drawn = decode(rows, tokenizer)()
            self.now += drawn.steps * self.clock.step_seconds(len(drawn.counts))
            return lambda: drawn

        engine.device.prefill, engine.device.decode = prefilled, decoded

    def _answer(self, seconds: float, *answered: Any) -> None:
        self.due.append((self.now + seconds, next(self.numbers), Answered(*answered)))

    def open(self, number: int, task: int, prompt: Prompt, seed: int, *, apart: bool = False) -> None:
        self.talks[number] = Counting(prompt, seed)
        self._answer(0.0, number, "opened")

    def holds(self, number: int) -> bool:
        return number in self.talks

    def say(self, number: int, turn: Turn) -> None:
        reply = as_reply(self.talks[number].reply(turn))
        self._answer(0.0 if reply.done else self.seconds, number, "replied", reply)

    def grade(self, number: int) -> None:
        self._answer(0.0, number, "graded", float(self.talks[number].grade()))

    def drop(self, number: int) -> None:
        self.talks.pop(number, None)

    def next(self, wait_s: float) -> Answered | None:
        soonest = min(self.due, default=None, key=lambda each: each[:2])
        if soonest is None or (soonest[0] > self.now and not wait_s):
            return None
        self.now = max(self.now, soonest[0])
        self.due.remove(soonest)
        return soonest[2]

    def close(self) -> None:
        return None


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("seconds", [0.0, 0.2, 2.0])
def test_the_loop_takes_as_long_as_the_planner_says(talk, roomy_model, seconds):
    """By its own clock: what a call takes is given, and so is the time of a reply."""
    clock = Clock(prefill_s={24: 0.03}, decode_s={8: 0.02, 4: 0.012, 2: 0.008})
    sizes = {"max_new_tokens": 30, "max_episode_tokens": 140}
    config = talk(rollout=sizes, prompts_per_step=8).model_copy(update={"model": str(roomy_model)})
    with opened(config) as rollouts:
        rollouts.feed.tokenizer.eos_tokens = (2, 3, 4, 5, 13, 14, 15, 16)  # a quarter of all, so that answers end soon
        timed = Timed(seconds, clock)
        timed.watch(rollouts.engine)
        rollouts.episodes.client.environments.close()
        rollouts.episodes.client.environments = timed  # pyright: ignore[reportAttributeAccessIssue]
        groups, _ = rollouts.answer(rollouts.feed.next(8))
    found = [group.transcripts for group in groups]
    assert {transcript.num_turns for each in found for transcript in each} == {3}
    drawn = np.array([[transcript.num_drawn for transcript in each] for each in found])
    given = np.mean([t.num_tokens - len(t.prompt) - t.num_drawn for each in found for t in each]) / 2
    replies = Replies(turns=3, tokens=round(given), seconds=seconds)
    lengths = SequenceLengths(
        prompts=np.array([len(group.tokens) for group in groups]),
        completions=drawn + 2 * replies.tokens,
        replies=replies,
    )
    planned = simulate_rollout(lengths, config.rollout, clock=clock)
    assert planned.seconds == pytest.approx(timed.now, rel=0.2)
    assert planned.completion_tokens == drawn.sum()
    assert (planned.idle_s > 0) == (seconds == 2.0)


FORGETFUL = TEMPLATE.replace("{{ message.content }}", "{{ message.content.split(' 1')[-1] }}")
"""It leaves out what stands before the last number that begins with 1, as others leave out thinking."""


@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_a_conversation_goes_on_from_what_the_template_keeps_of_it(talk, tmp_path, credit):
    """Each part is a sequence of the update; all that was drawn is trained once, where it was drawn."""
    path = tmp_path / "forgetful.jinja"
    path.write_text(FORGETFUL)
    sampling = {"thinking": "segment", "max_new_tokens": 12, "max_episode_tokens": 64, "stop": ["3", "5", "is", "+"]}
    algorithm = {"recipe": "dr_grpo", "credit": credit} | ({"gamma": 0.5} if credit == "turn" else {})
    config = talk(chat_template=str(path), rollout=sampling, algorithm=algorithm)
    groups, rollouts, _ = answered(config)
    dialogue, several = rollouts.feed.dialogues[0], 0
    recipe = recipe_of(config)
    for group in groups:
        for transcript in group.transcripts:
            answers = [place for place, each in enumerate(transcript.messages) if each["role"] == "assistant"]
            for segment in transcript.segments[1:]:
                before = answers[segment.spans[0].turn]
                said = [*prompt_messages(group.prompt), *transcript.messages[:before]]
                assert segment.prompt.tolist() == list(dialogue.prompt(said))
            several += len(transcript.segments) > 1
    assert several > 3
    packed = pack_step(groups, recipe, sizes(row_tokens=90, rows=4, max_rows=64, packing="shared_prompts"))
    advantages, _ = step_advantages(packed, recipe, [])
    (minibatch,) = packed.minibatches
    found = dict.fromkeys(minibatch.places, 0)
    for (n, g), sample in zip(minibatch.places, minibatch.samples, strict=True):
        transcript = groups[packed.kept[n]].transcripts[g]
        segment = next(each for each in transcript.segments if each.prompt.tolist() == list(sample.prompt))
        assert sample.tokens.tolist() == np.concatenate([each.tokens for each in segment.continuation]).tolist()
        if credit == "turn":
            own = advantages[n, g, sample.start : sample.start + len(sample.tokens)]
            by_turn = {int(t): {float(a) for a in own[sample.mask & (sample.turns == t)]} for t in sample.turns}
            assert all(len(each) <= 1 for each in by_turn.values())
        found[n, g] += sample.num_drawn
    assert found == {(n, g): groups[packed.kept[n]].transcripts[g].num_drawn for n, g in found}
    assert train(config, plain=True) == 0
    steps = [line for line in read_metrics(tmp_path / "run" / METRICS) if "train-other/loss" in line]
    assert all(line["policy/logprob_gap/max"] < 1e-4 and line["env/segments"] > 1 for line in steps)


def test_credit_of_turns_is_the_hand_computed_advantage_of_each_token(talk, tmp_path):
    """Returns from each turn on, minus the mean of the group's conversations that reached it."""
    config = talk(algorithm={"recipe": "dr_grpo", "credit": "turn", "gamma": 0.5})
    groups, _, _ = answered(config)
    recipe = recipe_of(config)
    packed = pack_step(groups, recipe, sizes(row_tokens=64, rows=4, max_rows=16, packing="none"))
    found, _ = step_advantages(packed, recipe, [])
    several = 0
    for n, index in enumerate(packed.kept.tolist()):
        group = groups[index]
        returns = [
            [
                sum(0.5 ** (later - turn) * r for later, r in enumerate(reward.turns) if later >= turn)
                for turn in range(t.num_turns)
            ]
            for reward, t in zip(group.rewards, group.transcripts, strict=True)
        ]
        for g, transcript in enumerate(group.transcripts):
            place = 0
            for span in transcript.continuation:
                own = found[n, g, place : place + len(span.tokens)]
                place += len(span.tokens)
                reached = [each[span.turn] for each in returns if len(each) > span.turn]
                expected = returns[g][span.turn] - np.mean(reached) if span.drawn and len(reached) > 1 else 0.0
                assert own == pytest.approx(np.full(len(own), expected), abs=1e-5)
                several += span.drawn and span.turn > 0 and expected != 0
    assert several > 3
    assert train(config, plain=True) == 0


def test_credit_of_turns_without_turns_to_compare_is_refused():
    for changes, rule in (
        ({"recipe": "reinforce_pp", "credit": "turn"}, "does not compare a prompt's completions"),
        ({"gamma": 0.5}, "credit is episode"),
        ({"credit": "turn", "kl": "k1_reward", "kl_coef": 0.1}, "covers whole conversations"),
    ):
        with pytest.raises(ValueError, match=rule):
            recipe_of(make_config(algorithm=changes))
