"""The real gcloud and real ssh, against a fake API and hosts in network namespaces; and what gcloud does wrong."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podium.pods.gcloud import Argv, Gcloud
from podium.pods.inventory import read_slices
from podium.pods.remote import Remote
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


def run_arguments(world: NetworkWorld, **plan: object) -> list[str]:
    """`podium pod run` of fake training that goes as planned."""
    (world.shared / "plan.json").write_text(json.dumps(plan))
    config = world.folder / "job.yaml"
    config.write_text(f"model: demo\nruns_dir: {world.shared}\ntasks: [{{name: arithmetic}}]\n")
    prepare = world.folder / "prepare.sh"
    prepare.write_text("echo prepared\n")  # so that there is a setup, as every user has one
    own = ["--python", str(fake_python(world.folder)), "--prepare", str(prepare), "--env", "JAX_PLATFORMS=cpu"]
    return ["run", str(config), *own]


@pytest.fixture(scope="module")
def rented(network: NetworkWorld) -> NetworkWorld:
    done = network.podium("up", "demo", "--type", "v6e-16", "--zone", ZONES[0])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "demo is ready in us-east1-d: v6e-16, 4 machines\n"
    return network


def living(world: NetworkWorld) -> list[int]:
    """How many processes of jobs live on each host."""
    return [len(job_processes(home)) for home in world.hosts.homes]


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_run_over_real_ssh_and_a_laptop_that_is_lost_meanwhile(rented):
    arguments = run_arguments(rented, steps=150, step_s=0.1)
    with rented.following(rented.folder / "laptop.log", *arguments) as laptop:
        wait_for((rented.shared / "metrics.jsonl").exists)
        wait_for(lambda: living(rented) == [SUPERVISOR_AND_JOB] * WORKERS)  # fake jobs do not wait for each other
        laptop.kill()
    assert living(rented) == [SUPERVISOR_AND_JOB] * WORKERS
    done = rented.podium(*arguments)
    assert done.returncode == 0, done.stderr
    assert "step 150 of 150" in done.stdout
    assert [len(jobs) for jobs in rented.jobs()] == [1] * WORKERS
    assert living(rented) == [0] * WORKERS
    logs = [(home / "podrun" / "latest.log").read_text() for home in rented.hosts.homes]
    assert all(f"worker {worker} began; its token is [redacted]" in log for worker, log in enumerate(logs))
    assert "its key [redacted]" in logs[0]
    assert "its key None" in logs[1]
    steps = [json.loads(line)["step"] for line in (rented.shared / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 151))


def test_no_secret_is_in_gclouds_logs_or_anywhere_else(rented):
    found = [
        str(file)
        for file in rented.folder.rglob("*")
        if file.is_file() and not file.is_symlink()
        for value in CANARIES.values()
        if value.encode() in file.read_bytes()
    ]
    assert found == []
    assert list((rented.folder / "gcloud" / "logs").rglob("*.log"))


def test_a_worker_whose_cable_is_pulled_is_named_soon(rented):
    (tpu_slice,) = read_slices(Gcloud(rented.run).ask(Argv().nodes(ZONES[0])), [])
    remote = Remote(Gcloud(rented.run), tpu_slice)
    rented.hosts.cut(2)
    began = time.monotonic()
    try:
        answers = remote.ask("true", timeout_s=15.0)
    finally:
        rented.hosts.mend(2)
    assert time.monotonic() - began < 120  # gcloud alone would wait for ever
    assert sorted(answers) == [0, 1, 3]
    with pytest.raises(ValueError, match=r"3 of 4 workers succeeded\n +worker 2 \(10\.77\.0\.13\) did not answer"):
        remote.check_all(answers, "asking")


def test_gcloud_forgets_failures_of_a_list_of_workers(rented):
    argv = Argv().ssh("demo", ZONES[0], "2-3", "case $(hostname) in *-3) exit 3;; esac")
    assert rented.run(argv, 60.0).returncode == 0, "gcloud tells it now: the answers of workers may be believed"


def test_gcloud_runs_a_command_again_that_ended_with_255(rented):
    argv = Argv().ssh("demo", ZONES[0], "0", "echo x >> again; exit 255")
    finished = rented.run(argv, 20.0)
    runs = (rented.hosts.homes[0] / "again").read_text().split()
    assert len(runs) >= 2, "gcloud runs it once now"
    assert finished.returncode is None


def test_gcloud_writes_commands_into_its_log(rented):
    rented.run(Argv().ssh("demo", ZONES[0], "0", "echo MARKED-COMMAND"), 60.0)
    logs = (rented.folder / "gcloud" / "logs").rglob("*.log")
    assert any("MARKED-COMMAND" in log.read_text() for log in logs)


def test_gclouds_output_directory_does_not_work(rented, tmp_path):
    argv = (*Argv().ssh("demo", ZONES[0], "0", "echo hello"), f"--output-directory={tmp_path}")
    assert rented.run(argv, 60.0).returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_giving_it_back_leaves_nothing(rented):
    done = rented.podium("down", "demo")
    assert done.stdout == "deleted demo in us-east1-d; it is no longer listed\n"
    assert rented.fake.everything() == []
