"""A Google Cloud project for `podium pod`: its slices and their owner, how to reach them, and where to print."""

import dataclasses
import sys

from podium.job.redact import without_controls
from podium.patience import Clock
from podium.pods import world as worlds
from podium.pods.gcloud import Gcloud, GcloudError
from podium.pods.inventory import Slice
from podium.pods.options import Common
from podium.pods.rehearsal import Placeholders, rehearsed
from podium.pods.remote import Remote
from podium.pods.secrets import Secrets
from podium.pods.slices import Slices
from podium.pods.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Project:
    """A project and its slices, as seen by the owner."""

    world: World
    slices: Slices
    zone: str | None
    """gcloud's default zone."""
    secrets: Secrets

    @property
    def clock(self) -> Clock:
        """The clock for leases and pauses."""
        return self.world.clock

    def remote(self, tpu_slice: Slice, *, vm: bool = False) -> Remote:
        """The workers of a slice, or an ordinary virtual machine in the form of a slice."""
        gcloud = self.slices.gcloud.for_vms() if vm else self.slices.gcloud
        return Remote(
            gcloud,
            tpu_slice,
            redact=self.secrets.redact,
            random_word=self.world.random_word,
            clock=self.clock,
            say=self.say,
        )

    def note(self, when: str) -> None:
        """In a dry run, print when the next gcloud commands would run."""
        self.world.note(when)

    def say(self, line: str) -> None:
        """Print progress, to stderr."""
        if not self.world.quiet:
            print(self._harmless(line), file=sys.stderr, flush=True)

    def answer(self, text: str, *, end: str = "\n") -> None:
        """Print a result, to stdout."""
        if not self.world.quiet:
            print(self._harmless(text), end=end, flush=True)

    def _harmless(self, text: str) -> str:
        """Remove secrets and terminal control sequences from text that a worker may have printed."""
        return self.secrets.redact(without_controls(text))


def open_project(
    common: Common, placeholders: Placeholders, secrets: Secrets | None = None, *, follows: bool = False
) -> Project:
    """Open the named project, or gcloud's default.

    Args:
        common: the project's name, and whether this is a dry run.
        placeholders: what a dry run finds instead of the project's slices.
        secrets: values that must not occur in commands or output.
        follows: whether to wait without a limit while Google cannot be reached.

    Raises:
        GcloudError: gcloud is not installed, or has no project.
    """
    world = rehearsed(worlds.WORLD, placeholders) if common.dry_run else worlds.WORLD
    kept = secrets or Secrets({})
    gcloud = Gcloud(
        world.runner, project=common.project, is_secret=lambda word: bool(kept.found_in(word)), note=world.note
    )
    settings = dict(gcloud.ask(gcloud.argv.settings()))
    core = settings.get("core", {})
    if not (common.project or core.get("project")):
        raise GcloudError("project", "no project is set")
    slices = Slices(
        gcloud,
        owner=world.owner(core.get("account")),
        clock=world.clock,
        say=lambda line: project.say(line),
        random_word=world.random_word,
        parallel=world.parallel,
        follows=follows,
    )
    project = Project(world=world, slices=slices, zone=settings.get("compute", {}).get("zone"), secrets=kept)
    return project
