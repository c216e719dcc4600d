"""A program that talks to the model that is trained, in the way its first argument names; standard library alone.

The row says which conversation it is, the seed what is said. The last line it prints is its reward.
"""

import json
import os
import random
import sys
import time
import urllib.error
import urllib.request

SEED, ROW = int(os.environ["PODIUM_SEED"]), json.loads(os.environ["PODIUM_ROW"])
BASE = os.environ["OPENAI_BASE_URL"]


def post(url: str, body: dict) -> dict | str:
    raw = json.dumps(body).encode()
    request = urllib.request.Request(url, raw, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        text = reply.read().decode()
    return text if body.get("stream") else json.loads(text)


def chat(messages: list[dict], **fields: object) -> dict:
    return post(f"{BASE}/chat/completions", {"model": "any", "messages": messages, **fields})


def draw(tokens: list[int], **sampling: object) -> dict:
    body = {"token_ids": tokens, "sampling_params": {"logprobs": 1, "temperature": 0.3, **sampling}}
    return post(BASE.removesuffix("/v1") + "/inference/v1/generate", body)["choices"][0]


def said(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def question(draws: random.Random, extra: str = "") -> dict:
    return {"role": "user", "content": f"What is {draws.randint(1, 9)} + {draws.randint(1, 9)} ?{extra}"}


def counting() -> float:
    """Three turns, each after the answers so far, whose letters it pays."""
    draws, letters = random.Random(SEED), 0
    messages = [question(draws)]
    for _ in range(3):
        answer = chat(messages)
        messages += [{"role": "assistant", "content": said(answer)}]
        letters += len(said(answer))
        messages += [question(draws)]
    return letters % 5


def late() -> float:
    """The same, after a while that no seed decides."""
    time.sleep(0.2 * random.SystemRandom().random())
    return counting()


def tokens() -> float:
    """Two turns and a rest of one in token ids, which it adds up."""
    prompt = [5, 6, 7]
    first = draw(prompt, max_tokens=3)
    second = draw([*prompt, *first["token_ids"], 8, 9], stop_token_ids=[11])
    whole = [*prompt, *first["token_ids"], 8, 9, *second["token_ids"]]
    third = draw(whole, max_tokens=2)
    drawn = [each for part in (first, second, third) for each in part["token_ids"]]
    content = [each for part in (first, second, third) for each in part["logprobs"]["content"]]
    assert [each["token"] for each in content] == [f"token_id:{each}" for each in drawn]
    assert len(first["token_ids"]) < 3 or first["finish_reason"] in ("length", "stop")
    return sum(drawn) + sum(each["logprob"] for each in content)


def afresh() -> float:
    """Two conversations, one after the other, and what the server refuses."""
    draws = random.Random(SEED)
    one = chat([question(draws)])
    for fields in ({"n": 2}, {"stop": ["x"]}, {"logprobs": True}, {"surprise": 1}):
        try:
            chat([question(draws)], **fields)
        except urllib.error.HTTPError as error:
            assert error.code == 400 and next(iter(fields)) in error.read().decode()
        else:
            return -1.0
    streamed = chat([question(draws)], stream=True, stream_options={"include_usage": True})
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    two = events[0]["choices"][0]["delta"]["content"]
    usage = events[1]["usage"]
    assert streamed.endswith("data: [DONE]\n\n") and usage["completion_tokens"] >= 1 <= usage["prompt_tokens"]
    return float(len(said(one)) + len(two))


def agent() -> float:
    """Asks as agents' clients do, with a tool that must be called; pays 1 if the answer has a reason."""
    tool = {"name": "look", "strict": True, "parameters": {"type": "object", "properties": {}}}
    fields = {
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "temperature": 0.2,
        "user": "me",
    }
    body = {"model": "any", "messages": [question(random.Random(SEED))], **fields}
    url, kind = f"{BASE}/chat/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), kind)) as reply:
        listed = reply.headers["X-Podium-Ignored"]
        answer = json.loads(reply.read())["choices"][0]
    assert listed == "temperature, user, tools.0.function.strict, reasoning_effort", listed
    calls = answer["message"].get("tool_calls")
    return float(answer["finish_reason"] in (("tool_calls",) if calls else ("length", "stop")))


def endless() -> float:
    """Asks until it is refused; pays how often it was answered."""
    messages, count = [question(random.Random(SEED))], 0
    while True:
        try:
            answer = chat(messages)
        except urllib.error.HTTPError as error:
            assert error.code == 400 and json.loads(error.read())["error"]["code"] == "context_length_exceeded"
            return float(count)
        count += 1
        messages += [{"role": "assistant", "content": said(answer)}, {"role": "user", "content": "1 ?"}]


def stubborn() -> float:
    """The same, and fails when it is refused."""
    messages = [question(random.Random(SEED))]
    while True:
        messages += [{"role": "assistant", "content": said(chat(messages))}, {"role": "user", "content": "1 ?"}]


def failing() -> float:
    """Fails in one of three conversations."""
    answer = said(chat([question(random.Random(SEED))]))
    if ROW["split"] == "train" and ROW["number"] % 3 == 0:
        sys.exit(f"the service of {ROW['number']} is down")
    return float(len(answer))


def foreign() -> float:
    """Asks with tokens that the model does not have."""
    draw([10**6])
    return 1.0


def unending() -> float:
    """Asks for an end at a token that the model does not have."""
    draw([5], stop_token_ids=[10**6])
    return 1.0


def silent() -> float:
    """Asks nothing."""
    return 1.0


print("what it prints before does not matter")
print(globals()[sys.argv[1]]())
