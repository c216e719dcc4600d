"""Loads a run's own config.yaml for the folder that contains it, wherever that is now.

A run writes all its settings to its folder, including `runs_dir` and `name`. If the folder is moved, or the file is
read from another working directory, these settings no longer point to the folder, so they are corrected, as are paths
of files in the folder (rows passed from Python). Imports no jax.
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
"""A run's folder has at least one of these files if it has a config."""
PLACE = ("runs_dir", "name")
"""The settings that say where a run is."""


def own_folder(file: Path) -> Path | None:
    """The folder of the run whose own config a file is, following links; None for any other file."""
    real = file if in_bucket(file) else file.resolve()
    is_own = real.name == CONFIG and real.is_file() and any((real.parent / name).is_file() for name in OWN)
    return real.parent if is_own else None


def at_home(file: Path, written: Node) -> Node:
    """The settings of a config file. If it is a run's own, `runs_dir`, `name` and paths are set for the folder's
    current place.
    """
    former, folder = _written_home(written), own_folder(file)
    if former is None or folder is None or is_same_place(former, folder):
        return written
    moved = in_folder(written, folder)
    place = {"runs_dir": str(folder.parent), "name": folder.name}
    kept = {key: Node(value, f"{file}, which is a run's own") for key, value in place.items()}
    return Node({**moved.section, **kept}, moved.origin)


def in_folder(written: Node, folder: Path) -> Node:
    """A run's settings, with paths inside its former folder changed to the same paths inside `folder`."""
    former = _written_home(written)
    return written if former is None else _moved(written, str(former), str(folder))


def check_place(files: Sequence[Path], loaded: Loaded) -> None:
    """Raise ConfigError if environment variables change the folder of a run whose own config is among the files.

    Later files and command line options may change it, because they were written for this command.
    """
    own = [folder for file in files if (folder := own_folder(file)) is not None]
    origins = {key: loaded.provenance.get(key, "") for key in PLACE}
    leading = [key for key, origin in origins.items() if origin.startswith("environment ")]
    if own and leading and not continues(files, loaded):
        rule = f"{own[-1] / CONFIG} is a run's own config and continues the run in {own[-1]}"
        way_out = f"unset the variable, or set it explicitly with --set {leading[0]}=... to start another run"
        raise wrong(leading[0], f"{rule}; {way_out}", origins[leading[0]])


def with_writers(error: ConfigError, files: Sequence[Path]) -> ConfigError:
    """Add to the error which versions of Podium wrote the files that are runs' own configs."""
    folders = {file: own_folder(file) for file in files}
    written = [Problem(key=str(file), message=versions_line(own)) for file, own in folders.items() if own is not None]
    return ConfigError([*error.problems, *written]) if written else error


def continues(files: Sequence[Path], loaded: Loaded) -> bool:
    """Whether these settings continue the run whose own config is among the files."""
    home = as_path(loaded.config.runs_dir) / str(loaded.config.name)
    folders = [folder for file in files if (folder := own_folder(file)) is not None]
    return any(is_same_place(home, folder) for folder in folders)


def is_same_place(home: Path, folder: Path) -> bool:
    """Whether `folder` is the run's folder `home`, or contains the local records of the run if `home` is in a
    bucket.
    """
    if in_bucket(folder):
        return str(home) == str(folder)
    local = records_folder(home) if in_bucket(home) else home
    return local.exists() and local.samefile(folder)


def _written_home(written: Node) -> Path | None:
    """The run's folder according to its config; None if the config does not name it."""
    values = [node.value for key in PLACE if (node := written.section.get(key)) is not None]
    match values:
        case [str(runs_dir), str(name)]:
            return as_path(runs_dir) / name
        case _:
            return None


def _moved(node: Node, former: str, now: str) -> Node:
    """Replace every path below `former` in the settings by the same path below `now`."""
    value = node.value
    if isinstance(value, dict):
        value = {key: _moved(child, former, now) for key, child in value.items()}
    elif isinstance(value, list):
        value = [_moved(child, former, now) for child in value]
    elif isinstance(value, str) and value.startswith(f"{former}/"):
        value = f"{now}/{value.removeprefix(f'{former}/')}"
    return Node(value, node.origin, node.text)
