"""A project with a fake API and hosts that are folders, in which `podium pod` runs in this process."""

import itertools
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from podium.pods import world
from podium.pods.world import World
from tests.pods.clock import Clock
from tests.pods.fake_gcloud import Cloud
from tests.pods.hosts import ROOT, LocalHosts, fake_python

ZONES = ("us-east1-d", "us-east5-b", "europe-west4-a")
CANARIES = {"HF_TOKEN": "hf_CANARYaaaaBBBBccccDDDD1234", "WANDB_API_KEY": "CANARY0123456789abcdef0123456789abcdef01"}
_NETWORKS = itertools.count(os.getpid() % 200 + 1)


class PodWorld(Cloud):
    """Ada's laptop, a project, and machines."""

    def __init__(self, folder: Path, *, workers: int = 4, longest_s: float = 0.1) -> None:
        network = f"127.{next(_NETWORKS) % 250 + 1}.{os.getpid() % 250 + 1}"
        self.folder, self.workers = folder, workers
        self.addresses = [f"{network}.{worker + 1}" for worker in range(workers)]
        self.hosts = LocalHosts(folder, self.addresses)
        super().__init__(
            clock=Clock(longest_s),
            zones=ZONES,
            hosts=self.hosts,
            provision_s=6.0,
            operation_s=1.0,
            addresses=lambda name, count: self.addresses[:count],
        )
        self.hosts.now = self.clock.time
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.python = fake_python(folder)
        self.config = folder / "job.yaml"
        self.config.write_text(f"model: demo\nruns_dir: {self.shared}\ntasks: [{{name: arithmetic}}]\n")
        self.prepare = folder / "prepare.sh"
        self.prepare.write_text("echo prepared\n")  # so that every run has a setup, as every user's has
        self.plan(steps=4)

    @property
    def type(self) -> str:
        """A slice of so many machines."""
        return {1: "v6e-8", 2: "v4-16", 4: "v6e-16"}[self.workers]

    def plan(self, **plan: Any) -> None:
        """What the fake training does."""
        (self.shared / "plan.json").write_text(json.dumps({"step_s": 0.05, **plan}))

    def release(self) -> None:
        """Let a fake training that was planned to `hold` end."""
        (self.shared / "released").touch()

    def on_command(self, text: str, act: Callable[[], None]) -> None:
        """Do something once, just before the first gcloud command that contains a text."""

        def before(argv: tuple[str, ...]) -> None:
            if any(text in word for word in argv):
                self.gcloud.before = lambda argv: None
                act()

        self.gcloud.before = before

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has the commands use this world."""
        monkeypatch.setattr(world, "WORLD", World(runner=self.gcloud, clock=self.clock))
        for name, value in CANARIES.items():
            monkeypatch.setenv(name, value)

    def run_arguments(self, *more: str) -> list[str]:
        """`podium pod run` of this world's config."""
        own = ["--python", str(self.python), "--prepare", str(self.prepare), "--env", "JAX_PLATFORMS=cpu"]
        return ["run", str(self.config), *own, *more]

    def metrics(self) -> list[dict[str, Any]]:
        """What the fake training recorded."""
        path = self.shared / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def log(self, worker: int) -> str:
        """The log of a worker's latest job."""
        return (self.hosts.homes[worker] / "podrun" / "latest.log").read_text()


def make_checkout(folder: Path) -> Path:
    """A small git checkout that has what the workers' side needs."""
    folder.mkdir()
    parts = ("*.py", "config/*.py", "job/*.py", "pods/*.py", "pods/host/*")  # what the agent imports, and more
    files = [file for part in parts for file in (ROOT / "podium").glob(part) if file.is_file()]
    for file in files:
        target = folder / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    (folder / "constraints.txt").write_text("numpy==2.4.6\n")
    (folder / ".gitignore").write_text("__pycache__/\n")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "all")
    return folder


def git(folder: Path, *arguments: str) -> str:
    """What git says in a folder."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command: Sequence[str] = ("git", "-C", str(folder), *who, *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def rent(world: PodWorld, pod, name: str = "demo") -> None:
    assert pod("up", name, "--type", world.type, "--zone", ZONES[0])[0] == 0
