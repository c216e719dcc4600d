"""What all `podium pod` commands share: whose slices, how to reach them, and where to say things.

Results go to stdout, what is going on to stderr. With --dry-run only the commands are printed (`podium.pods.ideal`).
"""

import dataclasses
import getpass
import sys
import time
from collections.abc import Sequence

from podium.pods.gcloud import Gcloud, GcloudError, Runner, run_process
from podium.pods.ideal import IdealCloud
from podium.pods.inventory import LEASE, OWNER, Slice, label_text
from podium.pods.remote import Remote
from podium.pods.secrets import Secrets
from podium.pods.slices import Clock, Slices

RUNNER: Runner = run_process
CLOCK: Clock = time
NO_SECRETS = Secrets({})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command."""

    project: str | None = None
    dry_run: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pod:
    """The pods of a project as their owner sees them."""

    slices: Slices
    clock: Clock
    zone: str | None
    """gcloud's own."""
    secrets: Secrets
    dry_run: bool

    @property
    def gcloud(self) -> Gcloud:
        """The project's TPUs."""
        return self.slices.gcloud

    def remote(self, one: Slice) -> Remote:
        """The workers of a slice."""
        return Remote(self.gcloud, one, self.secrets.redact)

    def say(self, line: str) -> None:
        """Tell what is going on."""
        if not self.dry_run:
            print(self.secrets.redact(line), file=sys.stderr, flush=True)

    def answer(self, text: str, *, end: str = "\n") -> None:
        """Print a result."""
        if not self.dry_run:
            print(text, end=end, flush=True)


def open_pod(
    common: Common,
    *,
    secrets: Secrets = NO_SECRETS,
    zones: Sequence[str] = (),
    workers: int = 1,
    exists: str | None = None,
    lease_s: int = 3600,
) -> Pod:
    """The project's pods, seen by the owner of gcloud's account.

    Args:
        common: options.
        secrets: what may not be in any command or output.
        zones: for --dry-run, where things are.
        workers: for --dry-run, machines of the slice.
        exists: for --dry-run, a slice that is there.
        lease_s: for --dry-run, how long it may still stand.

    Raises:
        GcloudError: gcloud is not there, or has no project.
    """
    if common.dry_run:
        owner = label_text(getpass.getuser())
        ideal = IdealCloud(print, zone=zones[0] if zones else None, workers=workers)
        if exists:
            lease = str(int(ideal.time()) + lease_s)
            ideal.holds(exists, "v6e-8", {OWNER: owner, LEASE: lease})
        gcloud = Gcloud(ideal, project=common.project, secrets=tuple(secrets.forms()))
        slices = Slices(gcloud, owner=owner, clock=ideal, parallel=1)
        return Pod(slices=slices, clock=ideal, zone=ideal.zone, secrets=secrets, dry_run=True)
    gcloud = Gcloud(RUNNER, project=common.project, secrets=tuple(secrets.forms()))
    settings = gcloud.settings()
    core = settings.get("core", {})
    if not (common.project or core.get("project")):
        raise GcloudError("project", "no project is set")
    owner = label_text(core.get("account") or getpass.getuser())

    def say(line: str) -> None:
        print(secrets.redact(line), file=sys.stderr, flush=True)

    slices = Slices(gcloud, owner=owner, clock=CLOCK, say=say)
    return Pod(slices=slices, clock=CLOCK, zone=settings.get("compute", {}).get("zone"), secrets=secrets, dry_run=False)
