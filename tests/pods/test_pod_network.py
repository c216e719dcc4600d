"""The real gcloud and real ssh, against a fake API and hosts in network namespaces; and what gcloud does wrong."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podium.pods.gcloud import Argv, Finished, Gcloud, run_process
from podium.pods.inventory import read_slices
from podium.pods.remote import Remote
from tests.pods.fake_tpu import FakeTpu, serve
from tests.pods.hosts import ROOT, NetworkHosts, fake_python, gcloud_environment, why_no_network_hosts
from tests.pods.pod_world import CANARIES, ZONES

pytestmark = [
    pytest.mark.skipif(why_no_network_hosts() is not None, reason=why_no_network_hosts() or ""),
    pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed"),
]
WORKERS = 4


class Network:
    """Ada's laptop in a network of its own, with gcloud, a cloud, and four machines."""

    def __init__(self, folder: Path, hosts: NetworkHosts, fake: FakeTpu, api: str, checkout: Path) -> None:
        self.folder, self.hosts, self.fake, self.checkout = folder, hosts, fake, checkout
        self.environment = {**os.environ, **gcloud_environment(folder, api), **CANARIES, "PYTHONPATH": str(ROOT)}
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.config = folder / "job.yaml"
        self.config.write_text(f"model: demo\nruns_dir: {self.shared}\ntasks: [{{name: arithmetic}}]\n")
        self.python = fake_python(folder)

    def podium(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """`podium pod ...` on the laptop."""
        command = [*self.inside(), sys.executable, "-m", "podium.cli", "pod", *arguments]
        return subprocess.run(command, cwd=self.checkout, env=self.environment, capture_output=True, text=True)

    def run(self, argv: tuple[str, ...], timeout_s: float) -> Finished:
        """A command on the laptop."""
        settings = [
            f"{name}={value}" for name, value in self.environment.items() if name.startswith(("CLOUDSDK", "HOME"))
        ]
        return run_process((*self.inside(), "env", *settings, *argv), timeout_s)

    def inside(self) -> tuple[str, ...]:
        """What puts a command into the laptop's network."""
        return ("ip", "netns", "exec", self.hosts.laptop)

    def plan(self, **plan: object) -> None:
        """What the fake training does."""
        for file in self.shared.iterdir():
            file.unlink()
        (self.shared / "plan.json").write_text(json.dumps(plan))

    def jobs(self) -> list[list[str]]:
        """The jobs that each host has had."""
        return [sorted(path.name for path in (home / "podrun" / "jobs").iterdir()) for home in self.hosts.homes]

    def run_arguments(self, *more: str) -> list[str]:
        """`podium pod run` of the config."""
        return ["run", str(self.config), "--python", str(self.python), "--env", "JAX_PLATFORMS=cpu", *more]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("network")
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(NetworkHosts(folder, WORKERS))
        fake = FakeTpu(
            zones=ZONES,
            provision_s=0.6,
            operation_s=0.1,
            addresses=lambda name, count: hosts.addresses[:count],
            on_keys=hosts.authorize,
        )
        with hosts.on_the_laptop():
            api = stack.enter_context(serve(fake))
        yield Network(folder, hosts, fake, api, checkout)


@pytest.fixture(scope="module")
def rented(network: Network) -> Network:
    done = network.podium("up", "demo", "--type", "v6e-16", "--zone", ZONES[0])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "demo is ready in us-east1-d: v6e-16, 4 machines\n"
    return network


def test_a_run_over_real_ssh_and_a_laptop_that_is_lost_meanwhile(rented):
    rented.plan(steps=100, step_s=0.1)
    command = [*rented.inside(), sys.executable, "-m", "podium.cli", "pod", *rented.run_arguments()]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=rented.checkout, env=rented.environment, stdout=quiet, stderr=quiet) as laptop:
        deadline = time.monotonic() + 120
        while not (rented.shared / "metrics.jsonl").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        laptop.kill()
    assert [process_count(home) for home in rented.hosts.homes] == [1] * WORKERS
    done = rented.podium(*rented.run_arguments())
    assert done.returncode == 0, done.stderr
    assert "step 100 of 100" in done.stdout
    assert [len(jobs) for jobs in rented.jobs()] == [1] * WORKERS
    assert [process_count(home) for home in rented.hosts.homes] == [0] * WORKERS
    logs = [(home / "podrun" / "latest.log").read_text() for home in rented.hosts.homes]
    assert all(f"worker {worker} began; its token is [redacted]" in log for worker, log in enumerate(logs))
    assert "its key [redacted]" in logs[0]
    assert "its key None" in logs[1]
    steps = [json.loads(line)["step"] for line in (rented.shared / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 101))


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


def process_count(home: Path) -> int:
    """Training processes of a host."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                count += b"fake_job.py" in command and f"HOME={home}".encode() in (entry / "environ").read_bytes()
    return count


def test_a_worker_whose_cable_is_pulled_is_named_soon(rented):
    (one,) = read_slices(Gcloud(rented.run).nodes(ZONES[0]), [])
    remote = Remote(Gcloud(rented.run), one)
    rented.hosts.cut(2)
    began = time.monotonic()
    try:
        answers = remote.ask("true", timeout_s=15.0)
    finally:
        rented.hosts.mend(2)
    assert time.monotonic() - began < 30
    assert sorted(answers) == [0, 1, 3]
    with pytest.raises(ValueError, match=r"3 of 4 workers did it\n +worker 2 \(10\.77\.0\.13\) did not answer"):
        remote.check_all(answers, "asking")


def test_gcloud_forgets_failures_of_a_list_of_workers(rented):
    argv = Argv().ssh("demo", ZONES[0], "2-3", "case $(hostname) in *-3) exit 3;; esac")
    assert rented.run(argv, 60.0).returncode == 0, "gcloud tells it now: the answers of workers may be believed"


def test_gcloud_runs_a_command_again_that_ended_with_255(rented):
    argv = Argv().ssh("demo", ZONES[0], "0", "echo x >> again; exit 255")
    finished = rented.run(argv, 14.0)
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
    assert done.stdout == "deleted demo in us-east1-d; no list shows it any more\n"
    assert rented.fake.everything() == []
