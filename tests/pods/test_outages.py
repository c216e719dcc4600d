"""Ten minutes without one of the services outside, at each phase of a run that is kept alive: the run goes on."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from podium.pods.gcloud import Finished, Runner
from tests.pods.soak import LOGIN, NO_NETWORK, ODD, ZONES, Command, Soak, commands_of, label_of
from tests.pods.soak_machines import STEPS

OUTAGE_S = 600.0
PHASES = {
    "first look": "list",
    "request": "create",
    "queue": "queued-resources list .*after create",
    "copying": "scp",
    "setting up": "agent start setup-",
    "starting": "agent start run-",
    "running": "agent status run-",
    "machines lost": "list .*after preemption",
    "request again": "create .*after preemption",
    "recording the end": "storage cp .*after all steps",
    "giving back": "delete .*after all steps",
}
"""The first command of each phase, as words of gcloud and what happened before."""
TEXTS = {
    "network": NO_NETWORK,
    "API": "ERROR: (gcloud.x) UNAVAILABLE: The service is currently unavailable.\n",
    "API, unknown": ODD[2],
    "bucket": "ERROR: (gcloud.storage.x) HTTPError 503: Service Unavailable\n",
}
CASES = [
    *(("network", phase) for phase in PHASES),
    *(("API", phase) for phase in PHASES),
    *(("API, unknown", phase) for phase in ("first look", "queue", "running", "machines lost", "giving back")),
    *(("bucket", phase) for phase in ("first look", "request", "running", "machines lost", "recording the end")),
    *(("ssh", phase) for phase in ("copying", "setting up", "starting", "running")),
    *(("package index", phase) for phase in ("copying", "setting up", "machines lost")),
    *(("capacity", phase) for phase in ("first look", "request again")),
]


class Outage:
    """A laptop's gcloud, in a story in which something cannot be reached from the first command of a phase on."""

    def __init__(self, soak: Soak, runner: Runner, service: str, phase: str, *, text: str = "") -> None:
        self.soak, self.runner, self.service, self.phase = soak, runner, service, PHASES[phase]
        self.text = text or TEXTS.get(service, "")
        self.until = 0.0
        self.happened = ""

    def __call__(self, argv: Sequence[str], timeout_s: float) -> Finished:
        soak = self.soak
        words = " ".join(argv)
        soak.fleet.settle()
        saved = soak.fleet.saved[label_of(soak, "run")]
        if saved >= STEPS // 4 and "preemption" not in self.happened:
            soak.preempt()
            self.happened += " after preemption"
        if saved == STEPS:
            self.happened += " after all steps"
        if not self.until and re.search(self.phase, words + self.happened):
            self._begin()
        if "create" in argv:
            self.happened += " after create"
        concerned = self.service != "bucket" or argv[1] == "storage"
        concerned &= self.service in ("network", "bucket") or not {"ssh", "scp", "storage"} & set(argv[:5])
        if self.text and concerned and soak.timeline.now < self.until:
            soak.timeline.running.sleep(8.0)
            return Finished(argv=tuple(argv), returncode=1, stdout="", stderr=self.text)
        return self.runner(argv, timeout_s)

    def _begin(self) -> None:
        soak = self.soak
        self.until = soak.timeline.now + OUTAGE_S
        if self.service == "ssh":
            soak.fleet.refused_until = self.until
        elif self.service == "package index":
            soak.fleet.setup_failures = 1000
            soak.timeline.at(self.until, lambda: setattr(soak.fleet, "setup_failures", 0))
        elif self.service == "capacity":
            soak.fake.capacity.update(dict.fromkeys(ZONES, 0))
            soak.timeline.at(self.until, soak.fake.capacity.clear)


def told(file: Path, service: str, phase: str, text: str = "") -> tuple[Soak, Command]:
    """The story of one run on one laptop, with an outage."""
    soak = Soak(1, file)
    command = soak.command("ada's", "keeper", "run")
    gcloud = command.project.slices.gcloud
    gcloud._runner = Outage(soak, gcloud._runner, service, phase, text=text)
    soak.timeline.after(0.0, lambda: soak.begin(command, soak._keep if text else soak.keep))
    with commands_of(soak):
        soak.timeline.run(lambda: command.laptop.ended is not None)
    assert gcloud._runner.until, "the phase was reached"
    return soak, command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "code.bundle"
    path.write_text("code")
    return path


@pytest.mark.parametrize(("service", "phase"), CASES, ids=lambda each: each)
def test_ten_minutes_without_a_service_end_nothing_at_any_phase(file, service, phase):
    soak, command = told(file, service, phase)
    said = [line for _, line in command.said]
    soak.fleet.settle()
    assert (command.status, soak.fleet.saved[label_of(soak, "run")]) == (0, STEPS), said
    assert soak.fake.everything() == [], said
    assert soak.twice == []
    if service not in ("ssh", "capacity"):
        assert any(line.startswith("waiting for ") for line in said), said


@pytest.mark.parametrize("phase", PHASES)
def test_an_expired_login_ends_the_command_at_once_with_the_command_that_renews_it(file, phase):
    soak, command = told(file, "network", phase, text=LOGIN)
    assert str(command.status).startswith("GcloudError: "), command.status
    assert "\n" not in str(command.status)
    assert str(command.status).endswith("run: gcloud auth login")
    said = " ".join(line for _, line in command.said)
    assert not soak.fake.everything() or "podium pod down demo" in said


def test_the_same_command_goes_on_after_the_login_was_renewed(file):
    soak = Soak(1, file)
    command = soak.command("ada's", "keeper", "run")
    command.bad.append((1e9 + 700.0, 1e9 + 4000.0, LOGIN))
    soak.timeline.after(0.0, lambda: soak.begin(command, soak.keep))
    with commands_of(soak):
        soak.timeline.run(lambda: command.laptop.ended is not None)
    soak.fleet.settle()
    assert (command.status, soak.fleet.saved[label_of(soak, "run")]) == (0, STEPS)
    assert soak.fake.everything() == []
    assert command.again == 1e9 + 4000.0
