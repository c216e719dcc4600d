"""A real server on loopback, asked as a browser asks."""

import asyncio
import fcntl
import json
import os
import threading
import time

import pytest
from in_thread import Server
from made_run import make_run, sample

from podium.observe import run_list, watch
from podium.observe.access import Address
from podium.observe.run_dir import LOCK

pytest.importorskip("uvicorn")
TOKEN = "a token"


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path / "runs" / "first", samples=[sample(1)])
    make_run(tmp_path / "runs" / "a b&<i>", steps=8, accuracies={})
    return tmp_path / "runs"


@pytest.fixture
def server(runs, monkeypatch):
    monkeypatch.setattr(watch, "POLL_S", 0.02)
    monkeypatch.setattr(watch, "plotly_script", lambda: "")
    served = Server(watch.make_app(runs))
    yield served
    served.close()


def test_runs_are_listed_and_shown(server):
    status, body, _ = server.ask("/")
    assert status == 200 and ">first<" in body and 'href="/runs/a%20b%26%3Ci%3E"' in body
    assert "a b&amp;&lt;i&gt;" in body and "<i>" not in body
    status, body, _ = server.ask("/runs/first")
    assert status == 200 and 'data-live="first"' in body and "connect-src 'self'" in body
    status, body, _ = server.ask("/data/first")
    assert status == 200 and json.loads(body)["runs"][0]["name"] == "made"
    assert server.ask("/runs/a%20b%26%3Ci%3E")[0] == 200


def test_every_page_forbids_to_load_anything(server):
    for path in ("/", "/runs/first"):
        policy = server.ask(path)[2].headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy


def test_the_list_shows_curves_that_grow_and_compares_the_chosen_runs(server, runs):
    body = server.ask("/")[1]
    assert body.count('<svg class="curve"') == 2 and "reward, 0.1" in body
    with (runs / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "train-reward/total/mean": 0.123}\n{"step": 42, "train-rew')
    body = server.ask("/")[1]
    assert "<td>41 of 40<td>0.123" in body and "<td>42" not in body
    status, _, answer = server.ask("/runs?run=first&run=a+b%26%3Ci%3E")
    assert status == 303 and answer.headers["location"] == "/runs/first/a%20b%26%3Ci%3E"
    assert server.ask(answer.headers["location"])[0] == 200
    compared = json.loads(server.ask("/data/first/a%20b%26%3Ci%3E")[1])
    assert len(compared["runs"]) == 2 and compared["comparison"]["differences"] == {}
    assert server.ask("/runs/first/none")[0] == server.ask("/runs/first/first")[0] == 404
    assert server.ask("/runs")[2].headers["location"] == "/"
    (runs / "first" / "config.yaml").write_text("steps: [")
    assert "<td>41<td>0.123" in server.ask("/")[1]


def test_many_comparisons_keep_a_bounded_number_of_reports(runs, monkeypatch):
    monkeypatch.setattr(watch, "REPORTS", 2)
    live = watch.LiveRuns(runs)

    async def ask():
        for names in (("first",), ("a b&<i>",), ("first", "a b&<i>"), ("a b&<i>", "first")):
            await live.report(names)

    asyncio.run(ask())
    assert list(live._made) == [("first", "a b&<i>"), ("a b&<i>", "first")]


@pytest.mark.parametrize("file", ["metrics.jsonl", "samples.jsonl", "config.yaml"])
def test_a_named_pipe_among_the_files_blocks_nothing(server, runs, file):
    (runs / "first" / file).unlink()
    os.mkfifo(runs / "first" / file)
    for path in ("/", "/runs/first", "/data/first", "/data/a%20b%26%3Ci%3E"):
        assert server.ask(path)[0] == 200


def test_a_run_whose_drive_hangs_is_named_and_holds_up_no_other(server, runs, monkeypatch):
    monkeypatch.setattr(watch, "PATIENCE_S", 1.0)
    hung, true_check = threading.Event(), run_list.is_run

    def check(folder):
        if folder.name == "first":
            hung.wait(30)
        return true_check(folder)

    monkeypatch.setattr(run_list, "is_run", check)
    monkeypatch.setattr(watch, "is_run", check)
    try:
        before = threading.active_count()
        for _ in range(2):
            assert server.ask("/data/a%20b%26%3Ci%3E")[0] == 200
            assert "<td>first<td><td><td><td><td>does not answer" in server.ask("/")[1]
        assert server.ask("/runs/first")[0] == 503
        assert threading.active_count() <= before + 3  # one that waits for each kind of question, however often asked
    finally:
        hung.set()


def test_a_token_in_a_file_stands_in_no_list_of_processes(runs, tmp_path, monkeypatch):
    served = []
    monkeypatch.setattr(watch, "take_port", lambda host, port: served.append((host, port)))
    monkeypatch.setattr(watch, "run", lambda app, sockets, **options: None)
    monkeypatch.setattr(watch, "plotly_script", lambda: "")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    watch.serve(runs, Address("0.0.0.0", 1, None, tmp_path / "token"))
    assert served == [("0.0.0.0", 1)]
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ValueError, match="is empty; write a token into it"):
        watch.serve(runs, Address("0.0.0.0", 1, None, tmp_path / "token"))
    with pytest.raises(ValueError, match=r"--token-file .*none cannot be read"):
        watch.serve(runs, Address("0.0.0.0", 1, None, tmp_path / "none"))


@pytest.mark.parametrize("name", ["none", "..", "%2e%2e", "..%2f..%2fetc", "first%2f..%2ffirst", "first%00"])
def test_what_is_no_run_is_not_found(server, name):
    assert server.ask(f"/runs/{name}")[0] == 404
    assert server.ask(f"/data/{name}")[0] == 404
    assert server.ask(f"/events/{name}")[0] == 404


def test_nothing_can_be_written(server, runs):
    for route in watch.make_app(runs).routes:
        assert route.methods == {"GET", "HEAD"}
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/", "/runs/first", "/data/first", "/events/first"):
            assert server.ask(path, method)[0] == 405
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


def test_a_change_is_announced_and_the_data_is_new(server, runs, monkeypatch):
    monkeypatch.setattr(watch, "REST", 0.0)
    connection, stream = server.listen("/events/first")
    assert stream.readline() == b"event: state\n"
    assert stream.readline().startswith(b"data: not training; last written ")
    assert stream.readline() == b"\n"
    with (runs / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "train-reward/total/mean": 0.5}\n')
    assert stream.readline().startswith(b"data: not training")
    connection.close()
    values = json.loads(server.ask("/data/first")[1])["runs"][0]["metrics"]["train-reward/total/mean"]["values"]
    assert values[-1] == 0.5


def test_reports_are_made_once_for_all_who_look(server, runs, monkeypatch):
    made = []
    monkeypatch.setattr(watch, "report_object", lambda folders: made.append(folders) or time.sleep(0.2) or {"runs": []})
    monkeypatch.setattr(watch, "REST", 1e6)
    threads = [threading.Thread(target=server.ask, args=("/data/first",)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    with (runs / "first" / "metrics.jsonl").open("a") as file:  # a change soon after waits: training has the machine
        file.write("{}\n")
    server.ask("/data/first")
    assert len(made) == 1


def test_clients_that_are_gone_leave_nothing(server):
    connections = [server.listen("/events/first") for _ in range(20)]
    for _, stream in connections:
        stream.readline()
    assert server.clients == 20
    for connection, stream in connections:
        stream.close()
        connection.close()
    limit = time.monotonic() + 20
    while server.clients and time.monotonic() < limit:
        server.ask("/")
    assert server.clients <= 1  # the one that asks


def test_another_site_s_name_for_this_machine_is_refused(server):
    assert server.ask("/", Host="evil.example")[0] == 421
    assert server.ask("/", Host="127.0.0.1.evil.example:80")[0] == 421
    assert server.ask("/", Host=f"localhost:{server.port}")[0] == 200


def test_elsewhere_than_on_loopback_a_token_is_needed(runs, monkeypatch):
    with pytest.raises(
        ValueError, match=r"--host 0\.0\.0\.0 accepts connections from other machines: add --token-file"
    ):
        watch.serve(runs, Address("0.0.0.0", 1))
    with pytest.raises(ValueError, match="is not a folder; give the runs_dir"):
        watch.serve(runs / "none", Address("127.0.0.1", 1))
    monkeypatch.setattr(watch, "plotly_script", lambda: "")
    served = Server(watch.make_app(runs, token=TOKEN, hosts=()))
    try:
        for path in ("/", "/runs/first", "/data/first", "/events/first", "/?token=wrong"):
            assert served.ask(path)[0] == 401
        assert served.ask("/", Cookie="podium_token=wrong")[0] == 401
        status, _, answer = served.ask("/?token=a%20token", Host="pod.example")
        assert status == 303 and "httponly" in answer.headers["set-cookie"].lower()
        cookie = answer.headers["set-cookie"].partition(";")[0]
        assert served.ask("/runs/first", Cookie=cookie)[0] == 200
    finally:
        served.close()


def test_whether_a_run_trains_is_seen_without_taking_its_lock(runs):
    assert run_list.state(runs / "first").startswith("not training")
    with (runs / "first" / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_list.state(runs / "first").startswith("training")
    assert run_list.state(runs / "first").startswith("not training")
