"""What the commands need from outside: gcloud, the time, the user's name, random words, a terminal.

`WORLD` is the real one. A dry run (`podium.pods.rehearsal`) and the tests put others in its place.
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
"""Owner of the slices, as a label's value, where gcloud's account is a machine's own."""
RUN_VARIABLE = "PODRUN_RUN"
"""The run that a machine of `--on-vm` keeps alive, as a label's value; `podium pod down` there deletes only its own."""


def random_word(purpose: str) -> str:
    """A word that was never used before; a dry run shows its purpose instead."""
    return secrets.token_hex(8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """Everything that a command takes from outside."""

    runner: Runner = run_process
    foreground: Callable[[Sequence[str]], int] = subprocess.call
    """Runs a command that uses the terminal; returns its exit status."""
    clock: Clock = time
    user: Callable[[], str] = getpass.getuser
    random_word: Callable[[str], str] = random_word
    note: Callable[[str], None] = lambda when: None
    """Receives when the next gcloud commands are run; a dry run prints it before them."""
    parallel: int = 4
    """Lists that are requested at once."""
    quiet: bool = False
    """Whether to print no results and progress: true in a dry run, where they would be invented."""

    def owner(self, account: str | None) -> str:
        """The owner's label for slices rented under a gcloud account; None: this machine's user."""
        return os.environ.get(OWNER_VARIABLE) or owner_label(account or self.user())


WORLD = World()
