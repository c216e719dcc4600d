"""What the commands need from their environment: gcloud, the time, the user's name, random words, a terminal.

`WORLD` is the real one. A dry run (`podium.pods.rehearsal`) and the tests replace it.
"""

import dataclasses
import getpass
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence

from podium.patience import Clock
from podium.pods.gcloud import Runner, run_process
from podium.pods.inventory import owner_label

OWNER_VARIABLE = "PODRUN_OWNER"
"""Environment variable with the owner's label for slices, on machines where gcloud's account is a service account."""
RUN_VARIABLE = "PODRUN_RUN"
"""Environment variable with the label of the run that a machine of `--on-vm` keeps alive; `podium pod down` on that
machine deletes only this run's slices."""


def random_word(purpose: str) -> str:
    """Make a random word, which is practically unique; a dry run shows its purpose instead."""
    return secrets.token_hex(8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """Everything that a command takes from its environment."""

    runner: Runner = run_process
    foreground: Callable[[Sequence[str]], int] = subprocess.call
    """Runs a command that uses the terminal; returns its exit status."""
    clock: Clock = time
    user: Callable[[], str] = getpass.getuser
    random_word: Callable[[str], str] = random_word
    note: Callable[[str], None] = lambda when: None
    """Called with a description of when the next gcloud commands are run, which a dry run prints before them."""
    parallel: int = 4
    """Number of lists that are requested concurrently."""
    quiet: bool = False
    """Whether to suppress results and progress; true in a dry run, where they would be invented."""

    def owner(self, account: str | None) -> str:
        """The owner's label for slices rented under a gcloud account; None for this machine's user."""
        return os.environ.get(OWNER_VARIABLE) or owner_label(account or self.user())


WORLD = World()
