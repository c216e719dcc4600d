"""Runs whose environments are programs that talk to an OpenAI server; and that server, without a model."""

import http.client
import json
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from held_steps import CARRIED, Steps
from test_episodes import answered, opened, tokens_of
from tiny_runs import recipe_of

from podium.config.schema import TaskConfig
from podium.observe.records import read_metrics, read_samples
from podium.observe.run_dir import METRICS, SAMPLES
from podium.sampling.conversations.carry import Position
from podium.sampling.sampler import FailingEnvironmentError
from podium.serve.bodies import ChatBody, GenerateBody, RequestError, read_body
from podium.tasks.conversation import ToolCall, Turn
from podium.tasks.conversations.environment_forms import conversing
from podium.tasks.conversations.loopback import Line, Prompts, server
from podium.tasks.registry import make_task
from podium.tasks.try_task import play
from podium.train.batches.prepare import group_samples
from podium.train.loop import train

TALKER = [sys.executable, "-I", "-S", str(Path(__file__).parent / "talker.py")]


def program(way: str, **options: object) -> dict:
    return {"name": "program", "options": {"command": [*TALKER, way], "episodes": 8, "eval_episodes": 2, **options}}


def test_a_run_trains_on_what_it_drew_for_a_program(talk, tmp_path):
    config = talk(tasks=[program("counting")], environments={"workers": 1})
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
        assert step["policy/logprob_gap/max"] < 1e-4 and step["env/failed"] == 0
        assert step["env/turns/max"] == 3
        for each in completions:
            said = [message["content"] for message in each["messages"] if message["role"] == "assistant"]
            if each["finish_reason"] == "stop" and len(said) == 3:
                assert each["reward"] == sum(map(len, said)) % 5


def test_a_program_s_draws_depend_on_the_seed_and_not_on_when_it_asks(talk):
    groups, _, _ = answered(talk(tasks=[program("counting")], environments={"workers": 2}))
    late, _, _ = answered(talk(tasks=[program("late")], environments={"workers": 1}))
    assert tokens_of(groups) == tokens_of(late)
    for group in groups:
        assert len({each.prompt.tobytes() for each in group.transcripts}) == 1  # one seed for all of a prompt
        assert all(len(each.segments) == 1 for each in group.transcripts)
        assert {each.num_turns for each in group.transcripts} <= {1, 2, 3}


def test_tokens_in_and_out_are_those_that_are_trained(talk):
    config = talk(tasks=[program("tokens")])
    groups, _, _ = answered(config)
    for index, group in enumerate(groups):
        for sample, each, reward in zip(
            group_samples(group, index, recipe_of(config)), group.transcripts, group.rewards, strict=True
        ):
            assert len(each.segments) == 1 and each.prompt.tolist() == [5, 6, 7]
            given = [span.tokens.tolist() for span in each.spans if span.source == "environment"]
            assert given[0] == [8, 9] and len(each.drawn[0].tokens) <= 3
            assert (*sample.prompt, *sample.tokens.tolist()) == tuple(each.tokens.tolist())
            assert sample.mask.tolist() == each.mask[3:].tolist()
            total = each.drawn_tokens.sum() + each.sampled_logprobs.sum()
            assert reward.total == pytest.approx(float(total), rel=1e-6)
            assert not {11} & set(each.drawn[1].tokens[:-1].tolist())


def test_another_prompt_begins_a_segment_and_what_is_not_supported_is_refused(talk):
    config = talk(tasks=[program("afresh")])
    groups, _, _ = answered(config)
    for index, group in enumerate(groups):
        assert {len(each.segments) for each in group.transcripts} == {2}
        assert all(reward.total >= 0 for reward in group.rewards)
        samples = group_samples(group, index, recipe_of(config))
        drawn = sum(sample.num_drawn for sample in samples)
        assert len(samples) == 8 and drawn == sum(each.num_drawn for each in group.transcripts)


def test_a_tool_that_must_be_called_is_begun_and_the_beginning_is_not_trained(talk, roomy_model):
    lengths = {"max_prompt_tokens": 150, "max_new_tokens": 4, "max_episode_tokens": 160}
    config = talk(tasks=[program("agent")], rollout=lengths).model_copy(update={"model": str(roomy_model)})
    groups, rollouts, _ = answered(config)
    assert not rollouts.held.failures
    tokenizer = rollouts.feed.tokenizer
    begun = tokenizer.encode('<tool_call>{"name": "look", "arguments":')
    for group in groups:
        for each, reward in zip(group.transcripts, group.rewards, strict=True):
            assert reward.total == 1.0 and each.num_turns == 1
            assert each.prompt.tolist()[-len(begun) :] == begun
            assert each.mask.tolist() == [False] * len(each.prompt) + [True] * each.num_drawn


@pytest.mark.parametrize(
    ("way", "limits", "reason"),
    [
        ("endless", {"max_turns": 2}, "turns"),
        ("endless", {"max_drawn_tokens": 12}, "drawn"),
        ("endless", {}, "length"),
        ("stubborn", {"max_turns": 2}, "turns"),
    ],
)
def test_a_limit_ends_a_program_s_conversation(talk, way, limits, reason):
    groups, rollouts, _ = answered(talk(tasks=[program(way)], rollout={"limits": limits}))
    for group in groups:
        for each, reward in zip(group.transcripts, group.rewards, strict=True):
            assert each.finish_reason == reason and not rollouts.held.failures
            assert reward.total == (0.0 if way == "stubborn" else each.num_turns)


def test_a_program_that_fails_is_tried_again_and_in_no_mean(talk):
    groups, rollouts, _ = answered(talk(tasks=[program("failing")], environments={"max_failed": 0.9, "retries": 1}))
    numbers = [group.prompt.prompt.metadata["number"] for group in groups]
    for number, group in zip(numbers, groups, strict=True):
        assert {reward.failed for reward in group.rewards} == {number % 3 == 0}
    count = 4 * sum(number % 3 == 0 for number in numbers)
    assert len(rollouts.held.failures) == 2 * count > 0
    assert "the service of" in rollouts.held.failures[0] and "ended with code 1" in rollouts.held.failures[0]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("foreign", "a program's request cannot be answered: prompt has token 1000000"),
        (
            "unending",
            "a program's request cannot be answered: stop token 1000000 is outside the model's vocabulary of",
        ),
        ("silent", "without sending a request to the model"),
    ],
)
def test_a_program_that_asks_what_cannot_be_answered_has_failed(talk, way, message):
    with pytest.raises(FailingEnvironmentError, match=message):
        answered(talk(tasks=[program(way)]))


@pytest.mark.long
def test_programs_go_on_over_updates_and_begin_again_in_a_continued_run(talk):
    held = {"rollout": {**CARRIED, "reproducible": True}, "environments": {"workers": 1}}
    config = talk(tasks=[program("counting", episodes=40)], **held)
    carried = Steps(config, 3)
    crossed = [each for each in carried.transcripts if each.versions[0] != each.versions[-1]]
    assert crossed and all((np.diff(each.versions) >= 0).all() for each in carried.transcripts)
    assert all(len(each.segments) == 1 for each in carried.transcripts)
    record = json.loads(json.dumps(carried.position.record()))
    with opened(config) as rollouts:
        rollouts.position = Position.read(record, rollouts.feed)
        begun = [each.prompt.prompt.prompt.id for each in rollouts.position.pending]
        groups, _ = rollouts.answer(rollouts.feed.next(4))
        assert begun and {group.prompt.prompt.id for group in groups} & set(begun)
        assert not rollouts.held.failures
        rollouts.episodes.client.forget()


def asked(messages: list[dict], **fields: object) -> ChatBody:
    return read_body(ChatBody, json.dumps({"messages": messages, **fields}).encode())


USER = {"role": "user", "content": "How many?"}
LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
CALL = ToolCall(name="look_up", arguments={"a": 1}, id="call00000")
CALLING = Turn(text="Look. <call>", said="Look.", number=0, calls=(CALL,), tokens=(3,))


def test_a_request_that_repeats_the_conversation_says_what_is_new():
    prompts = Prompts()
    first = prompts.read(asked([USER], tools=[LOOK_UP], max_tokens=5, stop_token_ids=[7]))
    assert first.fresh and first.messages == ({**USER},) and first.tools[0]["function"]["name"] == "look_up"
    assert (first.max_tokens, first.stop_tokens) == (5, (7,))
    prompts.answered(CALLING)
    call = {"index": 0, "id": "mine", "type": "function", "function": {"name": "look_up", "arguments": '{ "a": 1 }'}}
    answer = {"role": "assistant", "content": " Look.\n", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "mine", "content": "12"}
    again = prompts.read(asked([USER, answer, result], tools=[LOOK_UP]))
    assert not again.fresh and [each["content"] for each in again.messages] == ["12"]
    assert again.messages[0]["name"] == "look_up"
    prompts.answered(Turn(text="It is 12.", number=1))
    for messages in (
        [USER, answer, result],  # the same again
        [USER, {**answer, "content": "Listen."}, result, {"role": "assistant", "content": "It is 12."}, USER],
        [USER, {"role": "assistant", "content": "It is 12."}, {"role": "assistant", "content": "No."}],
    ):
        assert prompts.read(asked(messages)).fresh
        prompts.answered(Turn(text="It is 12.", number=2))
    tokens = prompts.read(GenerateBody(token_ids=[1, 2]))
    prompts.answered(Turn(text="", number=3, tokens=(3, 4)))
    assert tokens.fresh and tokens.tokens == (1, 2)
    more = prompts.read(GenerateBody(token_ids=[1, 2, 3, 4, 5]))
    assert (more.fresh, more.tokens) == (False, (5,))
    prompts.answered(Turn(text="", number=4, tokens=()))
    assert prompts.read(GenerateBody(token_ids=[1, 2, 9])).fresh


def test_what_an_agent_asks_for_reaches_the_run():
    named = {"type": "function", "function": {"name": "look_up"}}
    fields = {"tool_choice": named, "parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": False}}
    found = Prompts().read(asked([USER], tools=[LOOK_UP], **fields))
    assert (found.must_call, found.parallel, found.options) == ("look_up", False, {"enable_thinking": False})
    plain = Prompts().read(asked([USER], tools=[LOOK_UP]))
    assert (plain.must_call, plain.parallel, plain.options) == (None, True, {})
    with pytest.raises(RequestError, match="response_format"):
        asked([USER], response_format={"type": "json_object"})


def test_the_server_answers_with_calls_and_forgets_conversations_that_have_ended():
    line = Line()
    url = server().open(line)
    server().open_session(line, "a session")
    results: list[dict] = []

    def post(address: str, headers: dict[str, str]) -> None:
        body = json.dumps({"messages": [USER], "tools": [LOOK_UP]}).encode()
        request = urllib.request.Request(f"{address}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as reply:
            results.append(json.loads(reply.read()))

    for address, headers in ((url, {}), (server().sessions_address, {"X-Session-ID": "a session"})):
        asking = threading.Thread(target=post, args=(address, headers))
        asking.start()
        call = line.next()
        assert call is not None
        call.answer.set_result(CALLING)
        asking.join()
    for result in results:
        choice = result["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Look."
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": '{"a": 1}'}
        assert choice["message"]["tool_calls"][0]["id"] == "call00000"
    with urllib.request.urlopen(f"{url}/models") as reply:
        assert json.loads(reply.read())["data"][0]["id"] == "policy"
    server().drop(line)
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        post(url, {})
    refused.value.close()
    with pytest.raises(RequestError, match="has ended"):
        line.ask(asked([USER]))


@pytest.mark.parametrize(("said", "status"), [("x", 400), ("-5", 400), (str(1 << 40), 413)])
def test_a_body_of_unknown_length_is_refused_and_not_waited_for(said, status):
    address = urllib.parse.urlsplit(server().open(Line()))
    connection = http.client.HTTPConnection(address.netloc, timeout=60)
    connection.putrequest("POST", f"{address.path}/chat/completions")
    connection.putheader("Content-Length", said)
    connection.endheaders()
    assert connection.getresponse().status == status
    connection.close()


def test_a_body_in_chunks_and_an_unknown_route_are_refused_by_name():
    address = urllib.parse.urlsplit(server().open(Line()))
    asks = [
        ("POST", "chat/completions", {"Transfer-Encoding": "chunked"}, 411, "send Content-Length"),
        ("GET", "models/gpt-4", {}, 404, "unknown route"),
    ]
    for method, route, headers, status, message in asks:
        connection = http.client.HTTPConnection(address.netloc, timeout=60)
        connection.request(method, f"{address.path}/{route}", None, headers)
        answer = connection.getresponse()
        assert (answer.status, message in json.loads(answer.read())["error"]["message"]) == (status, True)
        connection.close()


def test_a_program_is_played_from_the_keyboard_without_a_model(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr("podium.tasks.try_task._config", lambda target: TaskConfig(**program("counting")))
    assert play("program", ["one", "two", "three"], lines.append) == 1
    assert sum("What is" in line for line in lines) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"command": ["no-such-program"]}}, "program 'no-such-program' not found"),
        ({"options": {"command": []}}, "command"),
        ({"options": {"command": TALKER}, "tools": ["calculator"]}, "its programs write all messages"),
        ({"options": {"command": TALKER}, "system_prompt": "Be brief."}, "its programs write all messages"),
    ],
)
def test_what_a_program_cannot_have_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config = TaskConfig(name="program", **changes)
        make_task(config)
        conversing(config)
