"""A Google Cloud project as `podium pod` sees it: whose slices, how to reach them, and where to print."""

import dataclasses
import getpass
import os
import sys
import time

from podium.job.redact import without_controls
from podium.pods.gcloud import Gcloud, GcloudError, Runner, run_process
from podium.pods.inventory import Slice, owner_label
from podium.pods.options import Common
from podium.pods.remote import Remote
from podium.pods.secrets import Secrets
from podium.pods.slices import Clock, Slices

RUNNER: Runner = run_process
CLOCK: Clock = time
OWNER_VARIABLE = "PODRUN_OWNER"
"""Whose slices they are, as a label has it, where gcloud's account is a machine's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Project:
    """The slices of a project as their owner sees them."""

    slices: Slices
    clock: Clock
    zone: str | None
    """gcloud's default zone."""
    secrets: Secrets

    def remote(self, tpu_slice: Slice) -> Remote:
        """The workers of a slice."""
        return Remote(self.slices.gcloud, tpu_slice, self.secrets.redact)

    def say(self, line: str) -> None:
        """Print progress, to stderr."""
        print(self._harmless(line), file=sys.stderr, flush=True)

    def answer(self, text: str, *, end: str = "\n") -> None:
        """Print a result, to stdout."""
        print(self._harmless(text), end=end, flush=True)

    def _harmless(self, text: str) -> str:
        """The text without secrets, and without what a worker's output could do to a terminal."""
        return self.secrets.redact(without_controls(text))


def open_project(common: Common, secrets: Secrets | None = None) -> Project:
    """The project that is named, or gcloud's own. Raises GcloudError where gcloud is not installed or has none."""
    secrets = secrets or Secrets({})
    gcloud = Gcloud(RUNNER, project=common.project, is_secret=lambda word: bool(secrets.found_in(word)))
    settings = dict(gcloud.ask(gcloud.argv.settings()))
    core = settings.get("core", {})
    if not (common.project or core.get("project")):
        raise GcloudError("project", "no project is set")
    owner = os.environ.get(OWNER_VARIABLE) or owner_label(core.get("account") or getpass.getuser())
    slices = Slices(gcloud, owner=owner, clock=CLOCK, say=lambda line: project.say(line))
    project = Project(slices=slices, clock=CLOCK, zone=settings.get("compute", {}).get("zone"), secrets=secrets)
    return project
