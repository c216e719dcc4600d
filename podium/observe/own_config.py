"""A run's own config.yaml, wherever its folder is now: it belongs to the folder that holds it.

A run writes all its settings to its folder, `runs_dir` and `name` among them. If the folder is moved, or the file is
read from another working directory, these no longer lead to it. Files that the run itself keeps in its folder (rows
passed from Python) are found again too. Imports no jax.
"""

from collections.abc import Sequence
from pathlib import Path

from podium.config.document import Node
from podium.config.errors import ConfigError, Problem, wrong
from podium.config.load import Loaded
from podium.files import as_path, in_bucket
from podium.observe.bucket import records_folder
from podium.observe.identity import IDENTITY, RUN, versions_line

CONFIG = "config.yaml"
OWN = ("run.lock", RUN, IDENTITY, "metrics.jsonl")
"""Files of which a run's folder has one as soon as it has its config."""
PLACE = ("runs_dir", "name")
"""The settings that say where a run is."""


def own_folder(file: Path) -> Path | None:
    """The folder of the run that wrote a file as its own config, links followed; None for any other file."""
    real = file if in_bucket(file) else file.resolve()
    is_own = real.name == CONFIG and real.is_file() and any((real.parent / name).is_file() for name in OWN)
    return real.parent if is_own else None


def at_home(file: Path, written: Node) -> Node:
    """The settings of a config file; if it is a run's own, with `runs_dir`, `name` and paths as they are now."""
    former, folder = _written_home(written), own_folder(file)
    if former is None or folder is None or is_same_place(former, folder):
        return written
    moved = in_folder(written, folder)
    place = {"runs_dir": str(folder.parent), "name": folder.name}
    kept = {key: Node(value, f"{file}, which is a run's own") for key, value in place.items()}
    return Node({**moved.section, **kept}, moved.origin)


def in_folder(written: Node, folder: Path) -> Node:
    """A run's settings with the paths below the folder that they name as the same paths below `folder`."""
    former = _written_home(written)
    return written if former is None else _moved(written, str(former), str(folder))


def check_place(files: Sequence[Path], loaded: Loaded) -> None:
    """Raise ConfigError if the environment leads away from the run whose own config is among the files.

    Later files and options of the command line may: they were written for this command.
    """
    own = [folder for file in files if (folder := own_folder(file)) is not None]
    origins = {key: loaded.provenance.get(key, "") for key in PLACE}
    leading = [key for key, origin in origins.items() if origin.startswith("environment ")]
    if own and leading and not continues(files, loaded):
        rule = f"{own[-1] / CONFIG} is a run's own config and continues the run in {own[-1]}"
        way_out = f"unset the variable, or say with --set {leading[0]}=... where another run begins"
        raise wrong(leading[0], f"{rule}; {way_out}", origins[leading[0]])


def with_writers(error: ConfigError, files: Sequence[Path]) -> ConfigError:
    """The error, with the versions that wrote those of the files which are runs' own configs."""
    folders = {file: own_folder(file) for file in files}
    written = [Problem(key=str(file), message=versions_line(own)) for file, own in folders.items() if own is not None]
    return ConfigError([*error.problems, *written]) if written else error


def continues(files: Sequence[Path], loaded: Loaded) -> bool:
    """Whether these settings continue the run whose own config is among the files."""
    home = as_path(loaded.config.runs_dir) / str(loaded.config.name)
    folders = [folder for file in files if (folder := own_folder(file)) is not None]
    return any(is_same_place(home, folder) for folder in folders)


def is_same_place(home: Path, folder: Path) -> bool:
    """Whether a folder is that of the run at `home`, or holds the local records of a run in a bucket."""
    if in_bucket(folder):
        return str(home) == str(folder)
    local = records_folder(home) if in_bucket(home) else home
    return local.exists() and local.samefile(folder)


def _written_home(written: Node) -> Path | None:
    """The folder of the run as its config says; None if it does not."""
    values = [node.value for key in PLACE if (node := written.section.get(key)) is not None]
    match values:
        case [str(runs_dir), str(name)]:
            return as_path(runs_dir) / name
        case _:
            return None


def _moved(node: Node, former: str, now: str) -> Node:
    """The settings with every path below `former` as the same path below `now`."""
    value = node.value
    if isinstance(value, dict):
        value = {key: _moved(child, former, now) for key, child in value.items()}
    elif isinstance(value, list):
        value = [_moved(child, former, now) for child in value]
    elif isinstance(value, str) and value.startswith(f"{former}/"):
        value = f"{now}/{value.removeprefix(f'{former}/')}"
    return Node(value, node.origin, node.text)
