"""Secrets on their way to the workers: a file that only its owner reads, in memory, deleted once a job has read it.

They are in no command, no environment flag, no metadata, no log, no config and no checkpoint: a command line stands in
the process list and in gcloud's own log, metadata and labels are shown to everybody in the project, and a disk
outlives the machine in snapshots. Which names travel is a list; all else stays here.
"""

import base64
import contextlib
import dataclasses
import os
import re
import shutil
import tempfile
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ALLOWED = ("HF_TOKEN", "WANDB_API_KEY")
"""What the jobs of Podium know to use."""
FIRST_WORKER_ONLY = ("WANDB_API_KEY",)
"""Only process 0 writes to services."""
SHORTEST = 8
"""Characters of a value that may be taken for a secret: shorter ones stand in any text."""
HIDDEN = "[redacted]"
LAST_LINE = "# end"
"""Of a file with secrets: without it something is missing."""
_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=(.*)")


class SecretError(ValueError):
    """A secret that cannot travel; the message never has its value."""

    exit_status = 2


@dataclasses.dataclass(frozen=True)
class Secrets:
    """Names and values; shown, it has no values."""

    values: Mapping[str, str] = dataclasses.field(repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(sorted(self.values))

    def __bool__(self) -> bool:
        return bool(self.values)

    def of_worker(self, worker: int) -> "Secrets":
        """Those that a worker needs."""
        return Secrets(
            {name: value for name, value in self.values.items() if not worker or name not in FIRST_WORKER_ONLY}
        )

    def redact(self, text: str) -> str:
        """The text without their values, also where they are quoted for a URL or written in base64."""
        for form in sorted(self.forms(), key=len, reverse=True):
            text = text.replace(form, HIDDEN)
        return text

    def found_in(self, text: str) -> list[str]:
        """The names of those whose value the text holds."""
        return [name for name in self.names if any(form in text for form in _forms(self.values[name]))]

    def forms(self) -> set[str]:
        """Every way in which a value may be written."""
        return {form for value in self.values.values() for form in _forms(value)}

    def text(self) -> str:
        """As the agent's --env-file reads it."""
        return "".join(f"{name}={self.values[name]}\n" for name in self.names) + f"{LAST_LINE}\n"


def _forms(value: str) -> set[str]:
    data = value.encode()
    # base64 of a longer text that holds the value shows it shifted by nothing, one or two bytes; its ends depend on
    # what stands beside it.
    shifted = (base64.b64encode(b"\0" * shift + data).decode() for shift in range(3))
    inner = {text[-(-8 * shift // 6) : -4] for shift, text in enumerate(shifted)}
    return {value, urllib.parse.quote(value, safe=""), *(text for text in inner if len(text) >= SHORTEST)}


def gather(environ: Mapping[str, str], env_file: Path | None, names: Sequence[str] = ALLOWED) -> Secrets:
    """The secrets to send: those of the allowed names that a .env file or the environment has, the file's first.

    Args:
        environ: usually `os.environ`.
        env_file: NAME=VALUE lines; names that are not allowed stay here.
        names: what is allowed.

    Raises:
        SecretError: the file is missing or can be read by others, or a value cannot be sent.
    """
    known = {name: environ[name] for name in names if environ.get(name)}
    if env_file is not None:
        known |= {name: value for name, value in _read(env_file).items() if name in names and value}
    for name, value in known.items():
        if len(value) < SHORTEST or any(character.isspace() or not character.isprintable() for character in value):
            raise SecretError(
                f"{name} is not a usable secret: at least {SHORTEST} printable characters without spaces are needed"
            )
    return Secrets(known)


def _read(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
        mode = path.stat().st_mode
    except OSError as error:
        raise SecretError(f"--env-file {path} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise SecretError(f"--env-file {path} can be read by others (mode {mode & 0o777:o}); run: chmod 600 {path}")
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if not match:
            raise SecretError(f"--env-file {path}:{number} is not NAME=VALUE")
        found[match[1]] = match[2].strip().strip("\"'")
    return found


@contextlib.contextmanager
def written(secrets: Secrets, name: str) -> Iterator[Path]:
    """A file of that name and mode 0600 with the secrets, in memory where this machine can, gone after the block."""
    memory = Path("/dev/shm")
    _delete_of_the_dead(memory)
    folder = tempfile.mkdtemp(prefix=f"podium-{os.getpid()}_", dir=memory if memory.is_dir() else None)
    try:
        path = Path(folder) / name
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.text())
        yield path
    finally:
        shutil.rmtree(folder)


def _delete_of_the_dead(memory: Path) -> None:
    """What commands of this user left that were killed: each folder has the number of its process in its name."""
    for folder in memory.glob("podium-*_*"):
        process = folder.name.removeprefix("podium-").partition("_")[0]
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(folder, ignore_errors=True)
