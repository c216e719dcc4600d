"""Clients that would hold the server, a server that is told to end, and programs that only some requests need."""

import concurrent.futures
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest
from in_thread import Server
from processes import below, runs, wait_for
from test_server import JSON, LONG, QUESTION, answered, encode, idle, open_connection

from benches.recipes import VOCAB, write_tiny_model
from podium.config.errors import UsageError
from podium.observe import connection, listening, watch
from podium.observe.access import LOOPBACK, Address
from podium.rollout.request import Request, SamplingParams
from podium.serve import app as routes
from podium.serve.app import make_app
from podium.serve.clients import Clients

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-A: "
"""The beginning of a head that never ends."""


def connected(port):
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def ended(client):
    """Whether the server has closed a connection; waits for it."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_client_that_never_ends_its_head_is_not_waited_for(served, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    silent, half, trickling = (connected(served.server.port) for _ in range(3))
    half.sendall(HALF)
    stop = threading.Event()

    def trickle():
        try:
            trickling.sendall(HALF)
            while not stop.wait(0.02):
                trickling.sendall(b"a")
        except OSError:
            pass

    thread = threading.Thread(target=trickle)
    thread.start()
    assert all(ended(each) for each in (silent, half, trickling))
    stop.set()
    thread.join()
    again = connected(served.server.port)  # after an answer, the next head has a deadline too
    again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert again.recv(4096).startswith(b"HTTP/1.1 200")
    again.sendall(HALF)
    while again.recv(4096):
        pass
    for each in (silent, half, trickling, again):
        each.close()


def test_clients_with_half_a_head_make_room_for_others(served, monkeypatch):
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", 20)
    server = Server(make_app(routes.Server(served.model, served.clients), token=None, hosts=LOOPBACK))
    held = [connected(server.port) for _ in range(50)]
    try:
        for each in held:
            each.sendall(HALF)
        for _ in range(3):
            status, text, _ = server.ask("/v1/completions", "POST", json.dumps({"prompt": QUESTION}), **JSON)
            assert status == 200, text
        assert server.clients <= 20
        assert sum(ended(each) for each in held[:25]) == 25  # those that came first
    finally:
        for each in held:
            each.close()
        server.close()


def test_a_client_that_does_not_read_its_answer_is_closed(monkeypatch):
    """An answer of 64 MB, more than the kernel buffers."""
    monkeypatch.setattr(connection, "UNREAD_S", 0.3)

    async def large(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a" * (64 << 20)})

    server = Server(large)
    client = connected(server.port)
    client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert client.recv(1)  # it sends
    wait_for(lambda: server.clients == 0)
    client.close()
    server.close()


def test_a_connection_for_which_there_is_no_room_is_refused(served, slow, monkeypatch):
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", 2)
    server = Server(make_app(routes.Server(served.model, served.clients), token=None, hosts=LOOPBACK))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(ask, server, max_tokens=30, temperature=1e6) for _ in range(2)]
        wait_for(lambda: served.clients.counters.in_flight == 2)
        status, text, answer = server.ask("/health")
        assert (status, text, answer.headers["retry-after"]) == (503, "too many connections", "5")
        assert [each.result()[0] for each in busy] == [200, 200]
    assert server.ask("/health")[0] == 200
    server.close()


def test_the_number_of_open_files_bounds_the_connections(monkeypatch):
    limits = {"now": (512, 1024)}
    monkeypatch.setattr("resource.getrlimit", lambda which: limits["now"])
    monkeypatch.setattr("resource.setrlimit", lambda which, given: limits.update(now=given))
    assert (listening.most_connections(), limits["now"]) == (1024 - 128, (1024, 1024))
    limits["now"] = (1024, 1 << 20)
    assert (listening.most_connections(), limits["now"]) == (2048, (2176, 1 << 20))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-6},
        {"temperature": 1e6},
        {"repetition_penalty": 1e-6},
        {"repetition_penalty": 1e6, "temperature": 1e-6},
        {"top_p": 1e-6, "min_p": 0.999},
    ],
)
def test_no_number_that_is_accepted_makes_logits_infinite(served, fields):
    """The cache of all requests is dropped where logits are not finite."""
    assert answered(served, "/v1/completions", prompt=QUESTION, max_tokens=8, **fields)["choices"]


# Ports.


def test_a_port_in_use_is_an_error_before_anything_is_opened(monkeypatch, tmp_path, capsys):
    from podium.serve.command import serve

    monkeypatch.setattr("podium.serve.command.open_model", lambda *_, **__: pytest.fail("the model was opened"))
    monkeypatch.setattr("podium.serve.command.longest_sequence", lambda model, context: 64)
    monkeypatch.setattr(watch, "plotly_script", lambda: "")
    (taken,) = listening.take_port("127.0.0.1", 0)
    port = taken.getsockname()[1]
    address = Address("127.0.0.1", port)
    with pytest.raises(UsageError, match=f"--port {port}: another process already uses it; give another --port"):
        serve("demo", address, name=None, context=None, slots=1, max_queue=1, settings=[])
    with pytest.raises(UsageError, match="another process already uses it"):
        watch.serve(tmp_path, address)
    assert "http" not in capsys.readouterr().out
    taken.close()
    with pytest.raises(UsageError, match="cannot listen there"):
        listening.take_port("203.0.113.1", 0)


def test_an_address_that_this_machine_lacks_is_left_out_if_the_name_has_another(monkeypatch):
    """A container without IPv6 calls ::1 localhost too."""
    found = socket.getaddrinfo("203.0.113.1", 0, type=socket.SOCK_STREAM)
    found += socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    (taken,) = listening.take_port("localhost", 0)
    assert taken.getsockname()[0] == "127.0.0.1"
    taken.close()


# The end.


@pytest.fixture
def ending(served, monkeypatch):
    """A server of its own, with an engine thread of its own that begins where the other's has ended."""
    assert idle(served)
    step = served.engine.step

    def slowly():
        time.sleep(0.02)
        step()

    monkeypatch.setattr(served.engine, "step", slowly)
    clients = Clients(served.engine, max_queue=60)
    own = routes.Server(served.model, clients)
    server = Server(make_app(own, token=None, hosts=LOOPBACK), own.end)
    yield server, clients
    server.close()
    clients.close()


def ask(server, **body):
    raw = json.dumps({"prompt": QUESTION, "seed": 1, **body})
    return server.ask("/v1/completions", "POST", raw, **JSON)


def test_answers_in_progress_end_and_new_requests_are_told_to_come_again(ending, monkeypatch):
    server, clients = ending
    step, go_on = clients.thread.engine.step, threading.Event()
    monkeypatch.setattr(
        clients.thread.engine, "step", lambda: go_on.wait(60) and step()
    )  # nothing ends before it is to
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(ask, server, max_tokens=40, temperature=1e6) for _ in range(16)]
        wait_for(lambda: clients.counters.in_flight == 16)
        half = connected(server.port)
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        half.sendall(b"Content-Length: 10\r\nExpect: 100-continue\r\n\r\n")
        assert half.recv(1000).startswith(b"HTTP/1.1 100 ")  # it reads the body
        half.sendall(b"{")
        server._server.should_exit = True
        wait_for(lambda: clients.ending)
        late = [ask(server, max_tokens=1), server.ask("/health")]
        refused = http.client.HTTPResponse(half)
        refused.begin()
        go_on.set()
        assert [each.result()[0] for each in answers] == [200] * 16
    for status, text, answer in late:
        assert (status, json.loads(text)["error"]["code"]) == (503, "ending") and int(answer.headers["retry-after"]) > 0
    assert refused.status == 503 and refused.headers["retry-after"]
    half.close()


def test_what_does_not_end_in_time_is_told_to_come_again(slow, ending, monkeypatch):
    """An answer takes 3 s."""
    monkeypatch.setattr(routes, "GRACE_S", 0.2)
    server, clients = ending
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        wholes = [pool.submit(ask, server, max_tokens=100, temperature=1e6) for _ in range(3)]
        streams = [pool.submit(ask, server, max_tokens=100, temperature=1e6, stream=True) for _ in range(3)]
        wait_for(lambda: clients.counters.in_flight == 6 and clients.counters.tokens)
        server._server.should_exit = True
        wholes, streams = ([each.result() for each in found] for found in (wholes, streams))
    for status, text, answer in wholes:
        assert (status, json.loads(text)["error"]["code"]) == (503, "ending") and answer.headers["retry-after"]
    for status, text, _ in streams:
        assert status == 200 and json.loads(text.split("data: ")[-1])["error"]["code"] == "ending"
    assert clients.counters.in_flight == 0


def test_a_process_that_gets_a_sigterm_in_the_middle_of_answers_ends_them_and_leaves_nothing(tmp_path):
    """As a container's is stopped: a stream and a whole answer come to their end, and then nothing runs any more."""
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    write_tiny_model(tmp_path / "tiny", VOCAB, template, 2048)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["serve", str(tmp_path / "tiny"), "--port", str(port), "--slots", "2"]
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2000, "temperature": 1e6, "n": 4}
    clients = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(2)]
    with (
        contextlib.closing(clients[0]),
        contextlib.closing(clients[1]),
        subprocess.Popen(
            [sys.executable, "-m", "podium.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None and process.stderr is not None
            assert "Ctrl-C ends" in process.stdout.readline()
            for client, stream in zip(clients, (True, False), strict=True):
                client.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": stream}), JSON)
            streamed = clients[0].getresponse()
            first = streamed.read1(100)
            started = below(process.pid)
            process.send_signal(signal.SIGTERM)
            said = (first + streamed.read()).decode().split("\n\n")
            whole = json.loads(clients[1].getresponse().read())
            assert process.wait(60) in (-signal.SIGTERM, 128 + signal.SIGTERM)
        finally:
            process.kill()
        assert "Traceback" not in process.stderr.read()
    assert said[-2] == "data: [DONE]" and '"finish_reason":"' in said[-3]
    assert [each["finish_reason"] for each in whole["choices"]] == ["stop"] * 4
    wait_for(lambda: not any(map(runs, started)))


# Programs that only some requests need.


def test_a_request_that_needs_other_programs_holds_up_no_other(served, monkeypatch):
    """Its programs are compiled on another thread, where this test keeps them until others have been answered."""
    go_on, asked = threading.Event(), []

    class Patient:
        def __init__(self, call):
            self.call = call

        def lower(self):
            asked.append(self.call)
            assert go_on.wait(60)
            return self.call.lower()

    extra = served.engine.device.extra_calls
    monkeypatch.setattr(served.clients.thread, "_compiled", set())
    monkeypatch.setattr(
        served.engine.device,
        "extra_calls",
        lambda request: {name: Patient(call) for name, call in extra(request).items()},
    )
    odd = [{"repetition_penalty": 1.3}, {"echo": True, "logprobs": 0}]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(answered, served, "/v1/completions", prompt=QUESTION, **each) for each in odd]
        wait_for(lambda: asked)
        for _ in range(3):
            assert answered(served, "/v1/completions", prompt=QUESTION, max_tokens=4)["choices"]
        assert not any(each.done() for each in waiting)
        go_on.set()
        assert all(each.result()["choices"] for each in waiting)
    left = open_connection(served, "/v1/completions", {**LONG, "repetition_penalty": 1.3})
    left.close()
    assert idle(served)


def test_the_programs_that_are_compiled_beside_are_those_that_the_engine_calls(served):
    """After it, the engine's thread compiles no program of its own for a penalty or for scores."""
    compiled = []

    def note(event, duration, **about):
        if event.endswith("backend_compile_duration"):
            compiled.append(str(about.get("fun_name", "")))

    assert idle(served)
    engine = served.engine
    plain = SamplingParams(max_new_tokens=2)
    penalised = SamplingParams(max_new_tokens=2, repetition_penalty=1.3)
    requests = [
        Request(prompt=encode(served), sampling=penalised, seed=0),
        Request(prompt=encode(served), sampling=plain, seed=0, score_prompt=True),
    ]
    assert engine.device.extra_calls(Request(prompt=(1,), sampling=plain, seed=0)) == {}
    names = [set(engine.device.extra_calls(each)) for each in requests]
    assert names == [{"penalised:8", "penalised:4", "penalised:2"}, {f"scored:{n}" for n in (32, 64, 127)}]
    jax.clear_caches()
    engine.warm_up()
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for request in requests:
            for call in engine.device.extra_calls(request).values():
                call.lower().compile()
        ahead = len(compiled)
        assert ahead >= 6
        for request in requests:
            engine.generate([request])
        assert [name for name in compiled[ahead:] if "decode" in name or "extend" in name] == []
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
