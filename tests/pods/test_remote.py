"""Commands on workers: each is counted by its own answer, whatever the transport does to it."""

import base64
import gzip
import os
import re
import subprocess
from pathlib import Path

import pytest

from podium.pods.gcloud import Argv, Finished, Gcloud, GcloudError
from podium.pods.inventory import read_slices
from podium.pods.remote import Remote, RemoteError, arrived, wrapped
from tests.pods.pod_world import ZONES, PodWorld


@pytest.fixture
def world(make_world, pod):
    world = make_world()
    assert pod("up", "demo", "--type", "v6e-16", "--zone", ZONES[0])[0] == 0
    return world


def remote_of(world: PodWorld, run=None) -> Remote:
    gcloud = Gcloud(run or world.gcloud)
    (tpu_slice,) = read_slices(Gcloud(world.gcloud).ask(Argv().nodes()), [])
    return Remote(gcloud, tpu_slice)


def test_every_worker_answers_for_itself(world):
    remote = remote_of(world)
    answers = remote.ask('echo "I am $worker" && [ $worker -ne 2 ]')
    assert {worker: (answer.status, answer.text) for worker, answer in answers.items()} == {
        worker: (int(worker == 2), f"I am {worker}") for worker in range(4)
    }
    with pytest.raises(RemoteError, match=r"asking: 3 of 4 workers succeeded\n    worker 2: status 1: I am 2"):
        remote.check_all(answers, "asking")
    assert remote.ask("hostname", worker=3)[3].text == "t1v-n-fake-w-3"


def test_what_gcloud_returns_is_not_believed(world):
    def lying(argv, timeout_s):
        done = world.gcloud(argv, timeout_s)
        return Finished(argv=done.argv, returncode=0, stdout=done.stdout, stderr=done.stderr)

    with pytest.raises(RemoteError, match="worker 1: status 3"):
        remote_of(world, lying).ask_all("[ $worker -ne 1 ] || exit 3", "asking")

    def failing(argv, timeout_s):
        done = world.gcloud(argv, timeout_s)
        return Finished(argv=done.argv, returncode=1, stdout=done.stdout, stderr="ERROR: (x) list index out of range")

    assert len(remote_of(world, failing).ask_all("true", "asking")) == 4


def test_workers_that_do_not_answer_are_missing_and_named(world):
    world.hosts.gone.update((0, 3))
    remote = remote_of(world)
    assert sorted(remote.ask("true")) == [1, 2]
    with pytest.raises(RemoteError) as error:
        remote.ask_all("true", "asking")
    assert re.findall(r"worker (\d) \(127\S+\) did not answer: ssh: connect to host", str(error.value)) == ["0", "3"]


def test_no_command_ends_with_255_which_would_run_it_again(world):
    remote = remote_of(world)
    answers = remote.ask("echo x >> runs; exit 255", worker=0)
    assert (answers[0].status, (world.hosts.homes[0] / "runs").read_text()) == (254, "x\n")


def test_a_connection_that_drops_after_the_work_leaves_one_answer(world):
    drops = iter([255, 255])
    world.hosts.after = lambda worker, command: next(drops, None) if worker == 1 else None
    answers = remote_of(world).ask("echo x >> runs; wc -l < runs")
    assert sorted(answers) == [0, 1, 2, 3]
    assert answers[1].text.strip() == "3"


def test_a_torn_line_is_asked_for_again_from_its_worker_alone(world):
    asked = []

    def tearing(argv, timeout_s):
        done = world.gcloud(argv, timeout_s)
        asked.append(next(word for word in argv if word.startswith("--worker=")))
        text = done.stdout
        if asked[-1] == "--worker=all":
            first, second = text.splitlines(keepends=True)[:2]
            text = text.replace(first + second, first[:40] + second[:-1] + first[40:] + "\n")
        return Finished(argv=done.argv, returncode=0, stdout=text, stderr="")

    answers = remote_of(world, tearing).ask("echo $worker-done")
    assert [answers[worker].text for worker in range(4)] == ["0-done", "1-done", "2-done", "3-done"]
    assert asked[0] == "--worker=all"
    assert set(asked[1:]) <= {"--worker=0", "--worker=1"}
    assert asked[1:]


def test_long_answers_arrive_whole(world):
    answers = remote_of(world).ask("head -c 300000 /dev/urandom | base64 -w0; echo; echo $worker")
    assert all(len(answer.text) > 400000 and answer.text.endswith(f"\n{worker}") for worker, answer in answers.items())


def test_a_machine_that_is_none_of_the_slice_is_not_counted(world):
    (world.hosts.homes[2] / "bin" / "hostname").write_text("#!/bin/sh\necho 10.9.9.9\n")
    with pytest.raises(RemoteError, match="a machine with none of the slice's addresses"):
        remote_of(world).ask("true")


def test_an_ended_node_is_told_as_such(world):
    remote = remote_of(world)
    world.fake.preempt("demo")
    with pytest.raises(GcloudError, match="terminal state") as error:
        remote.ask("true")
    assert error.value.kind == "unusable"


def test_files_arrive_whole_or_not_at_all(world, tmp_path):
    files = [tmp_path / "a b.txt", tmp_path / "c.bin"]
    files[0].write_text("it's\n")
    files[1].write_bytes(bytes(range(256)) * 100)
    remote = remote_of(world)
    remote.ask_all("mkdir -p in", "making a folder")
    remote.send(files, "in")
    check = arrived(files, "in")
    assert len(remote.ask_all(check, "receiving")) == 4
    (world.hosts.homes[1] / "in" / "c.bin").write_bytes(b"\0")
    (world.hosts.homes[3] / "in" / "a b.txt").unlink()
    with pytest.raises(RemoteError, match=r"2 of 4(.|\n)*worker 1: .*c.bin: FAILED(.|\n)*worker 3: .*a b.txt"):
        remote.ask_all(check, "receiving")


def test_secrets_in_an_answer_are_hidden(world):
    gcloud = Gcloud(world.gcloud)
    (tpu_slice,) = read_slices(gcloud.ask(Argv().nodes()), [])
    remote = Remote(gcloud, tpu_slice, redact=lambda text: text.replace("hunter2", "[redacted]"))
    assert remote.ask("echo hunter2", worker=0)[0].text == "[redacted]"


def test_a_slice_without_machines_has_no_workers(world):
    (tpu_slice,) = read_slices(Gcloud(world.gcloud).ask(Argv().nodes()), [])
    import dataclasses

    with pytest.raises(RemoteError, match="lists no machines"):
        Remote(Gcloud(world.gcloud), dataclasses.replace(tpu_slice, addresses=()))


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_wrapping_is_plain_shell(tmp_path, shell):
    tool = tmp_path / "hostname"
    tool.write_text("#!/bin/sh\necho 10.0.0.12 10.0.0.1\n")
    tool.chmod(0o755)
    command = wrapped("printf '%s\\n' 'a\"b' \"$HOME\"; false", "abc123", ["10.0.0.11", "10.0.0.1", "10.0.0.2"])
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/h o m e"}
    done = subprocess.run([shell, "-c", command], env=environment, capture_output=True, text=True, check=True)
    mark, worker, status, packed = done.stdout.split()
    assert (mark, worker, status) == ("abc123", "1", "1")
    assert gzip.decompress(base64.b64decode(packed)).decode() == 'a"b\n/h o m e'
    assert Path(tool).exists()
