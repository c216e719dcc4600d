"""The server of `podium serve` and the one for programs in training write the same documents."""

import http.client
import json
import threading
import urllib.parse

from podium.tasks.conversation import Turn
from podium.tasks.conversations.loopback import Line, server

JSON = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "What is 3 + 4 ?"}
CHAT = "/chat/completions"
HEAD = {"id", "object", "created", "model"}


def in_training(path, body, turn):
    """Status and text of the answer of the server for programs, to which the run gives `turn`."""
    line = Line()
    address = urllib.parse.urlsplit(server().open(line))
    found = []

    def ask():
        connection = http.client.HTTPConnection(address.netloc, timeout=60)
        connection.request("POST", f"{address.path.removesuffix('/v1')}{path}", json.dumps(body))
        answer = connection.getresponse()
        found.append((answer.status, answer.read().decode()))
        connection.close()

    asking = threading.Thread(target=ask)
    asking.start()
    if turn is not None:
        call = line.next()
        assert call is not None
        call.answer.set_result(turn)
    asking.join()
    server().drop(line)
    return found[0]


def both(served, path, body, turn=None):
    status, text, _ = served.server.ask(path, "POST", json.dumps(body), **JSON)
    trained_status, trained_text = in_training(path, body, turn)
    assert status == trained_status
    return text, trained_text


def said(text="7"):
    return Turn(text=text, number=1, tokens=(5,), logprobs=(-0.5,), read=6)


def test_a_message_is_the_same_document_of_both(served):
    for text in both(served, f"/v1{CHAT}", {"messages": [USER], "max_tokens": 1}, said()):
        document = json.loads(text)
        (choice,) = document["choices"]
        assert set(document) == HEAD | {"choices", "usage"} and document["object"] == "chat.completion"
        assert document["id"].startswith("chatcmpl-")
        assert set(choice) == {"index", "message", "logprobs", "finish_reason"}
        assert set(choice["message"]) == {"role", "content"} and choice["message"]["role"] == "assistant"
        usage = document["usage"]
        assert set(usage) == {"prompt_tokens", "completion_tokens", "total_tokens"}
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 1, 7)


def test_a_stream_has_the_same_events_of_both(served):
    body = {"messages": [USER], "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    for text in both(served, f"/v1{CHAT}", body, said()):
        assert text.endswith("\n\n")
        *events, last = text.removesuffix("\n\n").split("\n\n")
        assert last == "data: [DONE]" and all(event.startswith("data: {") for event in events)
        first, *_, usage = (json.loads(event.removeprefix("data: ")) for event in events)
        (choice,) = first["choices"]
        assert set(first) == HEAD | {"choices"} and first["object"] == "chat.completion.chunk"
        assert set(choice) == {"index", "delta", "logprobs", "finish_reason"}
        assert set(choice["delta"]) == {"role", "content"}
        assert set(usage) == HEAD | {"choices", "usage"} and usage["choices"] == []
        assert usage["id"] == first["id"] and usage["usage"]["total_tokens"] == 7


def test_tokens_are_the_same_document_of_both(served):
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}}
    for text in both(served, "/inference/v1/generate", body, said()):
        document = json.loads(text)
        (choice,) = document["choices"]
        assert set(document) == {"request_id", "choices"}
        assert set(choice) == {"index", "token_ids", "logprobs", "finish_reason"} and len(choice["token_ids"]) == 1
        (token,) = choice["logprobs"]["content"]
        assert token["token"] == f"token_id:{choice['token_ids'][0]}" and token["logprob"] <= 0


def test_a_wrong_field_is_refused_in_the_same_words_by_both(served):
    for body in ({"messages": []}, {"messages": [USER], "temperature": -1}, {"messages": [USER], "colour": "red"}):
        ours, theirs = both(served, f"/v1{CHAT}", body)
        assert json.loads(ours) == json.loads(theirs)
        error = json.loads(ours)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert error["message"].startswith(error["param"])


def test_the_only_model_is_listed_by_both(served):
    address = urllib.parse.urlsplit(server().open(Line()))
    connection = http.client.HTTPConnection(address.netloc, timeout=60)
    connection.request("GET", f"{address.path}/models")
    theirs = json.loads(connection.getresponse().read())
    connection.close()
    ours = json.loads(served.server.ask("/v1/models")[1])
    for document, name in ((ours, "tiny"), (theirs, "policy")):
        (model,) = document["data"]
        assert document["object"] == "list" and model["object"] == "model"
        assert (model["id"], model["owned_by"]) == (name, "podium") and isinstance(model["created"], int)
