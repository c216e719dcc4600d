"""The real gcloud and real ssh, against a fake API and hosts in network namespaces; and what gcloud does wrong.

A command of gcloud takes a second or two. What takes many is `long`: tests/pods/test_pod_command.py and test_remote.py
have the same with a gcloud that is recorded.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from podium.pods.gcloud import Argv, Gcloud
from podium.pods.inventory import read_slices
from podium.pods.remote import Remote, WorkerReply
from tests.pods.clock import wait_for
from tests.pods.hosts import fake_python
from tests.pods.network_world import ZONES, NetworkWorld, job_processes, network_world, why_no_network
from tests.pods.pod_world import CANARIES

pytestmark = pytest.mark.skipif(why_no_network() is not None, reason=why_no_network() or "")
WORKERS = 4
SUPERVISOR_AND_JOB = 2


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Iterator[NetworkWorld]:
    with network_world(tmp_path_factory.mktemp("network"), checkout, workers=WORKERS) as world:
        world.environment |= CANARIES
        yield world


@pytest.fixture(scope="module")
def remote(network: NetworkWorld) -> Remote:
    """Machines that somebody has rented."""
    name = network.fake.stranger(ZONES[0], "there", accelerator="v6e-16")
    (tpu_slice,) = read_slices([network.fake.nodes[name]], [])
    return Remote(Gcloud(network.run), tpu_slice)


@pytest.fixture(scope="module")
def replies(remote: Remote) -> dict[int, WorkerReply]:
    """What they say to a command."""
    return remote.ask("echo MARKED-COMMAND from $(hostname); [ $(hostname) != t1v-n-fake-w-2 ]", timeout_s=60.0)


def test_each_worker_answers_for_itself_over_real_ssh(remote, replies):
    said = {worker: (reply.status, reply.text.strip()) for worker, reply in replies.items()}
    assert said == {worker: (int(worker == 2), f"MARKED-COMMAND from t1v-n-fake-w-{worker}") for worker in range(4)}
    with pytest.raises(ValueError, match=r"3 of 4 workers succeeded\n +worker 2: status 1: MARKED"):
        remote.check_all(replies, "asking")


def test_gcloud_writes_commands_into_its_log(network, replies):
    logs = (network.folder / "gcloud" / "logs").rglob("*.log")
    assert any("MARKED-COMMAND" in log.read_text() for log in logs)


def test_gcloud_forgets_failures_of_a_list_of_workers(network, remote):
    argv = Argv().ssh(remote.name, ZONES[0], "2-3", "case $(hostname) in *-3) exit 3;; esac")
    assert network.run(argv, 60.0).returncode == 0, "gcloud tells it now: the answers of workers may be believed"


@pytest.mark.long
def test_gcloud_runs_a_command_again_that_ended_with_255(network, remote):
    argv = Argv().ssh(remote.name, ZONES[0], "0", "echo x >> again; exit 255")
    again = network.hosts.homes[0] / "again"
    gcloud = subprocess.Popen(
        network.words(argv), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
    )
    try:
        wait_for(lambda: again.exists() and len(again.read_text().split()) >= 2)
        assert gcloud.poll() is None, "gcloud runs it once or twice now"
    finally:
        os.killpg(gcloud.pid, signal.SIGKILL)
        gcloud.wait()


@pytest.mark.long
def test_gclouds_output_directory_does_not_work(network, remote, tmp_path):
    argv = (*Argv().ssh(remote.name, ZONES[0], "0", "echo hello"), f"--output-directory={tmp_path}")
    assert network.run(argv, 60.0).returncode != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_worker_whose_cable_is_pulled_is_named_soon(network, remote):
    network.hosts.cut(2)
    try:
        answers = remote.ask("true", timeout_s=15.0)  # gcloud alone would wait for ever
    finally:
        network.hosts.mend(2)
    assert sorted(answers) == [0, 1, 3]
    with pytest.raises(ValueError, match=r"3 of 4 workers succeeded\n +worker 2 \(10\.77\.0\.13\) did not answer"):
        remote.check_all(answers, "asking")


def run_arguments(world: NetworkWorld, **plan: object) -> list[str]:
    """`podium pod run` of fake training that goes as planned."""
    (world.shared / "plan.json").write_text(json.dumps(plan))
    config = world.folder / "job.yaml"
    config.write_text(f"model: demo\nruns_dir: {world.shared}\ntasks: [{{name: arithmetic}}]\n")
    prepare = world.folder / "prepare.sh"
    prepare.write_text("echo prepared\n")  # so that there is a setup, as every user has one
    own = ["--python", str(fake_python(world.folder)), "--prepare", str(prepare), "--env", "JAX_PLATFORMS=cpu"]
    return ["run", str(config), "--slice", "demo", *own]


def living(world: NetworkWorld) -> list[int]:
    """How many processes of jobs live on each host."""
    return [len(job_processes(home)) for home in world.hosts.homes]


@pytest.mark.long
def test_a_run_over_real_ssh_and_a_laptop_that_is_lost_meanwhile(network):
    done = network.podium("up", "demo", "--type", "v6e-16", "--zone", ZONES[0])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "demo is ready in us-east1-d: v6e-16, 4 machines\n"
    arguments = run_arguments(network, steps=4, hold=True)
    with network.following(network.folder / "laptop.log", *arguments) as laptop:
        wait_for((network.shared / "metrics.jsonl").exists)
        wait_for(lambda: living(network) == [SUPERVISOR_AND_JOB] * WORKERS)  # fake jobs do not wait for each other
        laptop.kill()
    assert living(network) == [SUPERVISOR_AND_JOB] * WORKERS
    again = network.folder / "again.log"
    with network.following(again, *arguments) as laptop:
        wait_for(lambda: "is already running; following it" in again.read_text())
        (network.shared / "released").touch()
        assert laptop.wait(120) == 0, again.read_text()
    assert "step 4 of 4" in again.read_text()
    assert [len(jobs) for jobs in network.jobs()] == [1] * WORKERS
    assert living(network) == [0] * WORKERS
    logs = [(home / "podrun" / "latest.log").read_text() for home in network.hosts.homes]
    assert all(f"worker {worker} began; its token is [redacted]" in log for worker, log in enumerate(logs))
    assert "its key [redacted]" in logs[0]
    assert "its key None" in logs[1]
    steps = [json.loads(line)["step"] for line in (network.shared / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert files_with_secrets(network) == []
    assert list((network.folder / "gcloud" / "logs").rglob("*.log"))
    done = network.podium("down", "demo")
    assert re.fullmatch(r"deleted demo-[0-9a-f]{8} in us-east1-d; it is no longer listed\n", done.stdout)
    assert not any("demo" in name for name in network.fake.everything())


def files_with_secrets(world: NetworkWorld) -> list[str]:
    """Files that hold a secret: of the laptop, of gcloud, and of the machines."""
    files = (file for file in world.folder.rglob("*") if file.is_file() and not file.is_symlink())
    return [str(file) for file in files if any(value.encode() in file.read_bytes() for value in CANARIES.values())]
