import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podium import cli
from podium.pods.host.jobs import Host
from tests.pods.host_agent import Agent
from tests.pods.pod_world import PodWorld, make_checkout


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean git checkout of Podium's pods."""
    return make_checkout(tmp_path_factory.mktemp("git") / "checkout")


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: Path):
    """Makes worlds in which the commands run; what runs in them ends with the test."""
    worlds: list[PodWorld] = []

    def make(workers: int = 4, longest_s: float = 0.1) -> PodWorld:
        folder = tmp_path / f"world{len(worlds)}"
        folder.mkdir()
        worlds.append(PodWorld(folder, workers=workers, longest_s=longest_s))
        worlds[-1].install(monkeypatch)
        monkeypatch.chdir(checkout)
        return worlds[-1]

    yield make
    for world in worlds:
        world.hosts.close()


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str, str]]:
    """Runs `podium pod ...` in this process: (status, stdout, stderr)."""

    def pod(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["podium", "pod", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code or 0, *capsys.readouterr()

    return pod


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "home")
    yield agent
    host = Host(agent.home)
    for folder in (agent.home / "jobs").glob("*"):
        assert host.stop(folder.name, 0.0) == []
