"""The launch guard: workers as threads here, each with its own connection, and once as the real command."""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from podium.config.schema import Config, TaskConfig
from podium.job.cluster import Cluster, ClusterError, check_devices, find_cluster, from_metadata, local_worker
from podium.job.guard import ARRIVAL_S, Guard, GuardError, MissingError
from podium.job.job_context import identity
from podium.job.job_records import read_json

SAME = {"steps": "3", "commit": "abc", "version of jax": "0.10.2"}


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def make_cluster(worker: int, port: int, workers: int = 4) -> Cluster:
    return Cluster(worker=worker, workers=workers, coordinator=f"127.0.0.1:{port}")


def meet(
    port: int, folder: Path, workers: list[int], *, number: int = 4, arrival_s: float = 30.0, **changes: Any
) -> dict[int, str]:
    """What each of these workers of `number` ends with, by place in the list ("": all is well)."""
    ends: dict[int, str] = {}

    def join(place: int, worker: int) -> None:
        mine = {**SAME, **changes.get("identity", {}).get(place, {})}
        path = changes.get("folders", {}).get(place, folder)
        try:
            nonce = changes.get("nonces", {}).get(place, "")
            with Guard(make_cluster(worker, port, number), arrival_s=arrival_s, nonce=nonce) as guard:
                guard.agree(mine, path)
            ends[place] = ""
        except GuardError as error:
            ends[place] = str(error)
            changes.get("kinds", {})[place] = error.kind

    threads = [threading.Thread(target=join, args=each) for each in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return ends


def test_all_there_and_alike_go_on_and_leave_the_port_and_the_folder_free(port, tmp_path):
    ends = meet(port, tmp_path / "runs", [0, 1, 2, 3])
    assert ends == dict.fromkeys(range(4), "")
    assert list((tmp_path / "runs").iterdir()) == []
    for _ in range(2):  # no connection that is closing keeps it
        socket.create_server(("127.0.0.1", port)).close()


def test_a_worker_of_another_attempt_is_not_heard_and_disturbs_nobody(port, tmp_path):
    """It comes as worker 1 too, and knows another nonce: the job begins, and the stray ends alone."""
    ends = meet(port, tmp_path, [0, 1, 1, 2, 3], nonces={2: "n1"})
    assert {place: end for place, end in ends.items() if end} == {2: ends[2]}
    assert "worker 0 is not waiting for this job" in ends[2]


def test_what_is_missing_may_come_and_what_differs_stays_so(port, tmp_path):
    kinds: dict[int, str] = {}
    meet(port, tmp_path, [0, 2], arrival_s=0.5, kinds=kinds)
    assert kinds == {0: "missing", 1: "missing"}
    meet(port, tmp_path, [0, 1, 2, 3], kinds=kinds, identity={3: {"steps": "4"}})
    assert kinds == dict.fromkeys(range(4), "guard")
    assert ARRIVAL_S == 60.0  # one machine may be reached a good while after the others


@pytest.mark.parametrize("knows", [True, False])
def test_a_stranger_at_worker_0s_port_reads_no_file_of_a_follower(port, tmp_path, knows, monkeypatch):
    """It may know the nonce or not: it is given no file but those that the guard makes."""
    monkeypatch.setattr("podium.job.guard.SHARED_S", 0.3)
    (tmp_path / "token").write_text("hf_CANARY")
    said: list[str] = []

    def stranger() -> None:
        with socket.create_server(("127.0.0.1", port)) as server:
            connection = server.accept()[0]
            proof = hashlib.sha256(b" leader").hexdigest() if knows else "guessed"
            connection.sendall(json.dumps({"proof": proof, "file": "../token"}).encode() + b"\n")
            with contextlib.suppress(OSError):
                while data := connection.recv(65536):
                    said.append(data.decode())
                    if "identity" in "".join(said):
                        connection.shutdown(socket.SHUT_WR)  # ends the follower, which reads the request before that
            connection.close()

    thread = threading.Thread(target=stranger)
    thread.start()
    (tmp_path / "runs").mkdir()
    ends = meet(port, tmp_path / "runs", [1])
    thread.join()
    assert ends[0]
    assert "identity" in "".join(said)
    assert "CANARY" not in "".join(said)


def test_missing_workers_are_named_to_all(port, tmp_path):
    ends = meet(port, tmp_path, [0, 2], arrival_s=1.0)
    assert set(ends) == {0, 1}
    assert set(ends.values()) == {
        "launch guard: workers 1, 3 are missing: 2 of 4 arrived, and no more within 1 s;"
        " start the same command on all workers (--worker=all), or set PODRUN_ARRIVAL_S to wait longer"
    }


def test_a_missing_first_worker_is_named(port, tmp_path):
    ends = meet(port, tmp_path, [1], arrival_s=0.5)
    assert "worker 1 cannot reach worker 0 at 127.0.0.1" in ends[0]
    assert "start worker 0, read its log if it has ended, or open the port" in ends[0]


def test_a_worker_0_that_has_ended_is_named_with_its_reason(port, tmp_path):
    """Its process is gone, so only its record says why, on hosts that share the folder of records."""
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"message": "ConfigError: steps: expected int, got 'many'"}))
    with pytest.raises(MissingError, match=r"cannot reach worker 0 .*worker 0 has ended: ConfigError: steps:"):
        Guard(make_cluster(1, port), arrival_s=0.2, leader_record=record)


def test_why_worker_0_exits_is_told_to_the_others(port, tmp_path):
    """A usage error ends the process by SystemExit; its cause is what is told."""
    ends: dict[int, str] = {}
    thread = threading.Thread(target=lambda: ends.update(meet(port, tmp_path, [1], number=2)))
    thread.start()
    with pytest.raises(SystemExit), Guard(make_cluster(0, port, workers=2)):
        try:
            raise ValueError("--from runs/x: no such run")
        except ValueError:
            sys.exit(2)
    thread.join()
    assert "has ended: ValueError: --from runs/x: no such run" in ends[0]


def test_a_worker_that_was_started_twice_is_named(port, tmp_path):
    ends = meet(port, tmp_path, [0, 1, 1, 2], arrival_s=1.5)
    assert len(set(ends.values())) == 1
    host = socket.gethostname()
    assert f"worker 1 was started twice, on {host} and on {host}; stop one of them; worker 3 is missing" in ends[0]


def test_a_second_first_worker_ends_alone(port, tmp_path):
    with Guard(make_cluster(0, port), arrival_s=0.5), pytest.raises(GuardError, match="worker 0 cannot listen on"):
        Guard(make_cluster(0, port))


def test_a_copy_that_comes_late_ends_alone_and_the_job_goes_on(port, tmp_path):
    """As where a transport starts the command again: jax would let the copy end the healthy job."""
    with socket.create_server(("127.0.0.1", port)) as jax:  # which has the port by now, and answers no greeting
        late: dict[int, str] = {}
        thread = threading.Thread(target=lambda: late.update(meet(port, tmp_path, [1], arrival_s=0.3)))
        thread.start()
        connection, _ = jax.accept()
        connection.sendall(b"PRI * HTTP/2.0\r\n")
        thread.join(60)
        connection.close()
    assert "worker 0 is not waiting for this job at" in late[0]
    assert "the job is already running there" in late[0]


@pytest.mark.parametrize(
    ("key", "value"), [("steps", "4"), ("commit", "abd"), ("version of jax", "0.10.3"), ("rollout.slots", "8")]
)
def test_what_differs_is_named_with_both_values(port, tmp_path, key, value):
    ends = meet(port, tmp_path, [0, 1, 2, 3], identity={2: {key: value}})
    assert len(set(ends.values())) == 1
    assert ends[0] == (
        f"launch guard: {key} is {value!r} on worker 2 ({socket.gethostname()}) and {SAME.get(key)!r} on worker 0"
    )


def test_a_worker_of_a_job_of_another_size_is_named(port, tmp_path):
    ends: list[str] = []

    def join_another() -> None:
        with pytest.raises(GuardError) as error, Guard(make_cluster(1, port, workers=8), arrival_s=30.0) as guard:
            guard.agree(SAME, tmp_path)
        ends.append(str(error.value))

    thread = threading.Thread(target=join_another)
    thread.start()
    found = meet(port, tmp_path, [0], arrival_s=1.5)
    thread.join()
    assert "arrived as worker 1 of 8, but this job has 4" in found[0]
    assert ends == [found[0]]


def test_a_folder_that_is_not_shared_is_named(port, tmp_path, monkeypatch):
    monkeypatch.setattr("podium.job.guard.SHARED_S", 0.3)
    other = tmp_path / "local disk"
    ends = meet(port, tmp_path / "runs", [0, 1, 2, 3], folders={3: other})
    assert len(set(ends.values())) == 1
    assert f"worker 3 ({socket.gethostname()}) does not see what worker 0 writes to {tmp_path}/runs" in ends[0]
    assert f"(its folder is {other}): set runs_dir to one directory that all hosts share" in ends[0]


def test_a_folder_that_cannot_be_made_is_named(port, tmp_path):
    (tmp_path / "file").write_text("")
    ends = meet(port, tmp_path / "file" / "runs", [0, 1], number=2)
    assert "worker 0 cannot write to" in ends[0]
    assert len(set(ends.values())) == 1


def test_a_worker_that_arrives_and_ends_is_named(port, tmp_path):
    ends: dict[int, str] = {}
    thread = threading.Thread(target=lambda: ends.update(meet(port, tmp_path, [0, 1], number=3)))
    thread.start()
    with Guard(make_cluster(2, port, workers=3)):
        pass
    thread.join()
    assert f"worker 2 ({socket.gethostname()}) arrived and then ended" in ends[0]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("late_s", [0.0, 1.5])
def test_why_worker_0_ends_before_the_check_is_told_to_all(port, tmp_path, late_s, monkeypatch):
    """An error in its settings, before or after the others have arrived; they do not wait for a minute."""
    monkeypatch.setenv("WANDB_API_KEY", "CANARY0123456789abcdef")
    ends: dict[int, str] = {}
    kinds: dict[int, str] = {}

    def follow() -> None:
        time.sleep(late_s)
        ends.update(meet(port, tmp_path, [1, 2], number=3, kinds=kinds))

    thread = threading.Thread(target=follow)
    thread.start()
    with pytest.raises(ValueError), Guard(make_cluster(0, port, workers=3)):
        raise ValueError("steps: expected int, got 'many' with CANARY0123456789abcdef")
    thread.join()
    said = f"launch guard: worker 0 ({socket.gethostname()}) has ended: ValueError: steps: expected int, got 'many'"
    assert [text.startswith(said) and "CANARY" not in text for text in ends.values()] == [True, True], ends
    assert kinds == {0: "missing", 1: "missing"}


def test_worker_0_that_ends_well_or_waits_for_nobody_does_not_linger(port, monkeypatch, capsys):
    with pytest.raises(SystemExit), Guard(make_cluster(0, port, workers=3)):
        raise SystemExit(0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("podium.job.guard.ENDED_S", 0.5)
    with pytest.raises(ValueError), Guard(make_cluster(0, port, workers=3)):
        raise ValueError("no")
    assert "waiting up to 0.5 s for each other worker" in capsys.readouterr().err


def test_strangers_at_the_port_are_not_counted(port, tmp_path):
    def connect() -> socket.socket:
        deadline = time.monotonic() + 60
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port))
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)

    ends: dict[int, str] = {}

    def disturb_and_join() -> None:
        for greeting in (b"GET / HTTP/1.1\r\n\r\n", b'{"worker": "x"}\n', b"[1]\n", b""):
            with connect() as stranger:
                stranger.sendall(greeting)
        ends.update(meet(port, tmp_path, [1], number=2))

    thread = threading.Thread(target=disturb_and_join)
    thread.start()
    first = meet(port, tmp_path, [0], number=2)
    thread.join(120)
    assert (first, ends) == ({0: ""}, {0: ""})


def variables(worker: int, workers: int = 2, coordinator: str = "10.0.0.1:8476", **more: str) -> dict[str, str]:
    told = {"PODRUN_WORKER": str(worker), "PODRUN_WORKERS": str(workers), "PODRUN_COORDINATOR": coordinator}
    return {**told, **more}


def test_the_launcher_s_variables_make_a_cluster():
    cluster = find_cluster(variables(1, PODRUN_ACCELERATOR="v4-16"))
    assert cluster == Cluster(worker=1, workers=2, coordinator="10.0.0.1:8476", accelerator="v4-16")
    assert cluster.address == ("10.0.0.1", 8476)


def test_jax_s_own_variables_make_one_too():
    jax = {"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "3", "JAX_COORDINATOR_ADDRESS": "host:1"}
    assert find_cluster(jax) == Cluster(worker=0, workers=3, coordinator="host:1")


@pytest.mark.parametrize("environ", [{}, variables(0, 1), {"REQUIRE_MULTIHOST": "0", "REQUIRE_JAX_PROCESS_COUNT": "0"}])
def test_alone_is_no_cluster(environ):
    assert find_cluster(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PODRUN_WORKERS": "2"}, "PODRUN_WORKERS is set and PODRUN_WORKER is not; set PODRUN_WORKER, PODRUN_WORKERS"),
        (variables(2), "PODRUN_WORKER is 2 and PODRUN_WORKERS is 2; workers are counted from 0"),
        (variables(0, coordinator="10.0.0.1"), "PODRUN_COORDINATOR is '10.0.0.1'; write HOST:8476, of worker 0"),
        ({**variables(0), "PODRUN_WORKERS": "two"}, "PODRUN_WORKERS is 'two'; it must be the number of workers"),
        (
            {"REQUIRE_MULTIHOST": "1"},
            "REQUIRE_MULTIHOST is set and this process is alone; start the same command on all",
        ),
        ({"REQUIRE_JAX_PROCESS_COUNT": "4"}, "REQUIRE_JAX_PROCESS_COUNT is 4 and this job has 1; start the same"),
        (variables(0, REQUIRE_JAX_PROCESS_COUNT="4"), "REQUIRE_JAX_PROCESS_COUNT is 4 and this job has 2"),
        ({"REQUIRE_JAX_PROCESS_COUNT": "all"}, "REQUIRE_JAX_PROCESS_COUNT is 'all'; it must be a number of processes"),
        ({"PODRUN_ACCELERATOR": "v6e-16"}, "v6e-16 has 4 hosts and this job has 1 workers"),
        (variables(0, 3, PODRUN_ACCELERATOR="v6e-16"), "v6e-16 has 4 hosts and this job has 3 workers"),
        (variables(0, PODRUN_ACCELERATOR="v6e-17"), "unknown accelerator 'v6e-17'"),
    ],
)
def test_what_contradicts_itself_or_a_requirement_is_refused(environ, message):
    with pytest.raises(ClusterError) as error:
        find_cluster(environ)
    assert str(error.value).startswith(message)
    assert error.value.exit_status == 78


def test_devices_are_checked_against_the_accelerator():
    cluster = Cluster(worker=1, workers=4, coordinator="a:1", accelerator="v6e-16")
    check_devices(cluster, processes=4, devices=16, local_devices=4, slices=1)
    for counts, message in (
        ({"processes": 1, "devices": 4, "local_devices": 4}, "jax has 1 processes and the job has 4 workers"),
        ({"processes": 4, "devices": 15, "local_devices": 4}, "worker 1 has 4 devices of 15 and there are 4 workers"),
        (
            {"processes": 4, "devices": 8, "local_devices": 2},
            "has 2 devices and a host of v6e-16 has 4; a chip is missing",
        ),
    ):
        with pytest.raises(ClusterError, match=message):
            check_devices(cluster, slices=1, **counts)
    several = Cluster(worker=1, workers=8, coordinator="a:1", accelerator="2xv6e-16")
    check_devices(several, processes=8, devices=32, local_devices=4, slices=2)
    with pytest.raises(ClusterError, match=r"jax has 1 slices and 2xv6e-16 has 2; set MEGASCALE_NUM_SLICES"):
        check_devices(several, processes=8, devices=32, local_devices=4, slices=1)


def test_a_host_finds_itself_among_addresses():
    assert local_worker(("198.51.100.1", "127.0.0.1", "198.51.100.2")) == 1
    assert local_worker(("127.0.0.1", "127.0.0.2")) is None  # both are this host's
    assert local_worker(("198.51.100.1",)) is None


@pytest.fixture
def metadata_server(monkeypatch, tmp_path) -> Callable[[dict[str, str]], None]:
    """Serves these attributes as Google's metadata server does, to a host that has chips."""
    import http.server

    served: dict[str, str] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key = self.path.rpartition("/")[2]
            found = key in served and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(served.get(key, "").encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    (tmp_path / "accel0").touch()
    monkeypatch.setattr("podium.job.cluster.CHIPS", (f"{tmp_path}/accel*",))
    yield lambda attributes: (served.update(attributes), {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"})[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_tpu_s_metadata_make_a_cluster(metadata_server):
    environ = metadata_server(
        {
            "accelerator-type": "v4-16",
            "agent-worker-number": "1",
            "worker-network-endpoints": "unknown:unknown:10.0.0.5,unknown:unknown:10.0.0.6",
        }
    )
    assert find_cluster(environ) == Cluster(worker=1, workers=2, coordinator="10.0.0.5:8476", accelerator="v4-16")
    assert from_metadata({**environ, "TPU_SKIP_MDS_QUERY": "1"}) is None


def test_a_host_without_metadata_is_alone(metadata_server):
    assert find_cluster(metadata_server({"accelerator-type": "v6e-8"})) is None


def test_identity_names_every_setting():
    tasks = [TaskConfig(name="arithmetic", options={"digits": 2})]
    found = identity(Config(name="run", model="demo", tasks=tasks).document())
    assert found["tasks.0.options.digits"] == "2"
    assert found["train.optimizer.learning_rate"] == "1e-06"
    assert "commit" in found
    assert "version of jax" in found


def test_the_command_ends_with_78_and_says_why_before_jax_is_imported(port, tmp_path):
    """One of two workers is started with another setting; both are told, and their records say so."""
    config = {"model": "demo", "tasks": [{"name": "arithmetic"}], "runs_dir": str(tmp_path / "runs")}
    processes = []
    for worker in range(2):
        job = tmp_path / f"job-{worker}"
        job.mkdir()
        file = job / "run.yaml"
        file.write_text(yaml.safe_dump({**config, "steps": 3 + worker}))
        environ = {**os.environ, **variables(worker, coordinator=f"127.0.0.1:{port}"), "PODRUN_JOB_DIR": str(job)}
        code = (
            "import sys, podium.cli as cli\n"
            f"sys.argv = ['podium', 'train', {str(file)!r}, '--plain']\n"
            "try:\n    cli.main()\nfinally:\n    assert 'jax' not in sys.modules\n"
        )
        command = [sys.executable, "-c", code]
        processes.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [78, 78], errors
    for worker, error in enumerate(errors):
        assert error.startswith("error: launch guard: steps is '4' on worker 1 ("), error
        record = read_json(tmp_path / f"job-{worker}" / "record.json")
        assert record is not None
        assert (record["kind"], record["exit"], record["worker"]) == ("guard", 78, worker)
        assert json.dumps(record["message"])
