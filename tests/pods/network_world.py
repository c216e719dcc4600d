"""A project in which all but Google is real: gcloud, ssh, and machines with their own network."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from podium.pods.gcloud import Finished, run_process
from tests.pods.fake_tpu import FakeTpu, serve
from tests.pods.hosts import ROOT, NetworkHosts, gcloud_environment, why_no_network_hosts

ZONES = ("us-east1-d", "us-east5-b", "europe-west4-a")


def why_no_network() -> str | None:
    """Why there can be no such project here; None: there can."""
    return why_no_network_hosts() or (None if shutil.which("gcloud") else "gcloud is not installed")


class NetworkWorld:
    """Ada's laptop in its own network, with gcloud, a cloud, and machines."""

    def __init__(self, folder: Path, hosts: NetworkHosts, fake: FakeTpu, api: str, checkout: Path) -> None:
        self.folder, self.hosts, self.fake, self.checkout = folder, hosts, fake, checkout
        self.environment = {**os.environ, **gcloud_environment(folder, api), "PYTHONPATH": str(ROOT)}
        self.shared = folder / "shared"
        """On all machines."""
        self.shared.mkdir()

    def podium(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """`podium pod ...` on the laptop."""
        return subprocess.run(
            self.command(*arguments), cwd=self.checkout, env=self.environment, capture_output=True, text=True
        )

    def following(self, out: Path, *arguments: str) -> "subprocess.Popen[bytes]":
        """The same, begun, with what it says in a file."""
        command = self.command(*arguments)
        with out.open("wb") as file:
            return subprocess.Popen(command, cwd=self.checkout, env=self.environment, stdout=file, stderr=file)

    def command(self, *arguments: str) -> list[str]:
        """What is typed there; the code is this checkout's, whether or not it is installed."""
        return [*self.inside, sys.executable, "-P", "-m", "podium.cli", "pod", *arguments]

    def run(self, argv: Sequence[str], timeout_s: float) -> Finished:
        """Any command on the laptop: a `podium.pods.gcloud.Runner`."""
        return run_process(self.words(argv), timeout_s)

    def words(self, argv: Sequence[str]) -> tuple[str, ...]:
        """What runs a command on the laptop."""
        settings = [
            f"{name}={value}" for name, value in self.environment.items() if name.startswith(("CLOUDSDK", "HOME"))
        ]
        return (*self.inside, "env", *settings, *argv)

    @property
    def inside(self) -> tuple[str, ...]:
        """What puts a command into the laptop's network."""
        return ("ip", "netns", "exec", self.hosts.laptop)

    def jobs(self) -> list[list[str]]:
        """The jobs that each host has had, without their setups."""
        names = [[path.name for path in home.glob("podrun/jobs/*")] for home in self.hosts.homes]
        return [sorted(name for name in each if not name.startswith("setup-")) for each in names]


@contextlib.contextmanager
def network_world(folder: Path, checkout: Path, *, workers: int = 4) -> Iterator[NetworkWorld]:
    """Makes one, and removes it with all that runs in it."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(NetworkHosts(folder, workers))
        fake = FakeTpu(
            zones=ZONES,
            provision_s=0.6,
            operation_s=0.1,
            addresses=lambda name, count: hosts.addresses[:count],
            on_keys=hosts.authorize,
        )
        with hosts.on_the_laptop():
            api = stack.enter_context(serve(fake))
        yield NetworkWorld(folder, hosts, fake, api, checkout)


def job_processes(home: Path) -> list[int]:
    """What lives of a host's jobs, supervisors included."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"PODRUN_JOB_DIR={home}/".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found
