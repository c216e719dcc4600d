"""Sends secrets to the workers: as an owner-only file in memory that is deleted once a job has read it.

No command, environment flag, metadata, log, config or checkpoint contains them: command lines are visible in the
process list and in gcloud's own log, metadata and labels to everybody in the project, and a disk outlives the machine
in snapshots. Only the names in `ALLOWED` are sent. The workers' agent uses this module too, so it imports only the
standard library.
"""

import contextlib
import dataclasses
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from podium.job.redact import SECRET_NAME, SHORTEST, Redactor

ALLOWED = ("HF_TOKEN", "WANDB_API_KEY")
"""The secrets that Podium uses."""
FIRST_WORKER_ONLY = ("WANDB_API_KEY",)
"""Secrets that only worker 0 needs, because only process 0 writes to services."""
LAST_LINE = "# end"
"""Last line of a file of secrets; a file without it is incomplete."""
_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=(.*)")


class SecretError(ValueError):
    """A secret that cannot be sent as it is; the message never contains its value."""

    exit_status = 2


@dataclasses.dataclass(frozen=True)
class Secrets:
    """Names and values of secrets; `repr` hides the values."""

    values: Mapping[str, str] = dataclasses.field(repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, sorted."""
        return tuple(sorted(self.values))

    def __bool__(self) -> bool:
        return bool(self.values)

    def placeholders(self) -> "Secrets":
        """A copy with placeholder values, for a dry run."""
        return Secrets(dict.fromkeys(self.names, "VALUE"))

    def of_worker(self, worker: int) -> "Secrets":
        """The secrets that a worker needs."""
        return Secrets({name: self.values[name] for name in self.values if not worker or name not in FIRST_WORKER_ONLY})

    @functools.cached_property
    def redactor(self) -> Redactor:
        """A redactor of the values, and of this process's own secrets."""
        return Redactor.from_environment(os.environ, self.values.values())

    def redact(self, text: str) -> str:
        """The text without the values, in any form."""
        return self.redactor.redact(text)

    def found_in(self, text: str) -> list[str]:
        """The names of the secrets whose value the text contains."""
        return [name for name in self.names if Redactor([self.values[name]]).found_in(text)]

    def text(self) -> str:
        """The content of the agent's --env-file."""
        return "".join(f"{name}={self.values[name]}\n" for name in self.names) + f"{LAST_LINE}\n"


def read_variables(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `--env NAME=VALUE` options. Raises SecretError for other forms and for names of secrets."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise SecretError(f"--env {pair}: write NAME=VALUE; a name has letters, digits and '_'")
        if SECRET_NAME.search(name):
            raise SecretError(
                f"--env {name}: secrets must not appear in a command; put it in a file, and use --env-file"
            )
        found[name] = value
    return found


def gather(environ: Mapping[str, str], env_file: Path | None) -> Secrets:
    """Collect the secrets to send: the allowed names, from an env file or else from the environment.

    Raises:
        SecretError: the file is missing or can be read by others, or a value cannot be sent.
    """
    given = {**environ, **{name: value for name, value in read_env_file(env_file).items() if value}}
    known = {name: given[name] for name in ALLOWED if given.get(name)}
    for name, value in known.items():
        letters = sum(character.isascii() and character.isalnum() for character in value)
        if letters < SHORTEST or any(character.isspace() or not character.isprintable() for character in value):
            raise SecretError(
                f"{name} is not a usable secret: it needs at least {SHORTEST} letters or digits, and no spaces"
            )
    return Secrets(known)


def read_env_file(path: Path | None) -> dict[str, str]:
    """Read the NAME=VALUE lines of a file; `export`, comments and quotes around values are allowed. None: no lines.

    Raises:
        SecretError: the file cannot be read, can be read by others, or has a line of another form.
    """
    if path is None:
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        found = path.stat()
    except OSError as error:
        raise SecretError(f"--env-file {path} cannot be read: {error.strerror}") from None
    if found.st_mode & 0o077 or found.st_uid != os.geteuid():
        mode = f"mode {found.st_mode & 0o777:o}"
        raise SecretError(
            f"--env-file {path} can be read by others (user {found.st_uid}, {mode}); run: chmod 600 {path}"
        )
    settings = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if not match:
            raise SecretError(f"--env-file {path}:{number} is not NAME=VALUE")
        settings[match[1]] = match[2].strip().strip("\"'")
    return settings


@contextlib.contextmanager
def written(secrets: Secrets, name: str) -> Iterator[Path]:
    """Write the secrets to a file with this name and mode 0600, in memory if possible; deleted after the block."""
    memory = Path("/dev/shm")
    _delete_leftovers(memory)
    folder = tempfile.mkdtemp(prefix=f"podium-{os.getpid()}_", dir=memory if memory.is_dir() else None)
    try:
        path = Path(folder) / name
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.text())
        yield path
    finally:
        shutil.rmtree(folder)


def _delete_leftovers(memory: Path) -> None:
    """Delete folders left by killed commands of this user; a folder's name contains the process id."""
    for folder in memory.glob("podium-*_*"):
        process = folder.name.removeprefix("podium-").partition("_")[0]
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(folder, ignore_errors=True)
