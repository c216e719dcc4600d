"""Which run a folder is, and which version of Podium wrote it.

    run.json         the run's id, and the version that last trained it
    identity.json    the same id, next to the checkpoints that repeat it (podium.train.checkpoints.step_files)

The id is stored twice so that another run's checkpoints, copied here with their identity.json, are not mistaken for
this run's. Imports no jax.
"""

import json
import uuid
from pathlib import Path
from typing import TypedDict

from podium import __version__
from podium.files import RunFileError, to_json, write_atomically

RUN = "run.json"
IDENTITY = "identity.json"
SUMMARY = "summary.json"


class RunRecord(TypedDict):
    """The contents of run.json."""

    run: str
    """The run's id."""
    podium: str
    """The version of Podium that last trained the run."""


def stored_id(path: Path) -> str | None:
    """The run's id in run.json or identity.json; None if the file does not exist or cannot be read."""
    found = _read(path).get("run")
    return found if isinstance(found, str) else None


def claim(folder: Path, home: Path) -> None:
    """Write run.json, which records the run's id and this version of Podium.

    Args:
        folder: the local folder of the run's records.
        home: the run's folder with its checkpoints; the same folder unless the run is in a bucket.

    Raises:
        RunFileError: identity.json belongs to another run, or run.json cannot be written.
    """
    own, theirs = stored_id(folder / RUN), stored_id(home / IDENTITY)
    if own is not None and theirs is not None and own != theirs:
        raise RunFileError(
            f"{home} is the folder of run {own} ({RUN}), and {IDENTITY} in it belongs to run {theirs}, so the "
            f"checkpoints may be of that run too: put back this run's own {IDENTITY} and checkpoints; to continue "
            "from the other run's weights, start a run with another name and --from the folder of that run"
        )
    record: RunRecord = {"run": own or theirs or uuid.uuid4().hex, "podium": __version__}
    write_atomically(folder / RUN, to_json(record) + "\n")


def writer(folder: Path) -> str | None:
    """The version of Podium that last trained the run in a folder; None if it is not recorded."""
    found = _read(folder / RUN).get("podium")
    if isinstance(found, str):
        return found
    match _read(folder / SUMMARY).get("versions"):
        case {"podium-rl": str(version)}:
            return version
        case _:
            return None


def versions_line(folder: Path) -> str:
    """A sentence about which version of Podium wrote a run and which one is running; for runs that cannot be read."""
    found = writer(folder)
    if found is None:
        return f"the version of Podium that wrote the run is not recorded, and this is {__version__}"
    if found == __version__:
        return f"Podium {found}, which is this version, wrote the run"
    return f"Podium {found} wrote the run, and this is {__version__}: use that version, pip install podium-rl=={found}"


def other_version(folder: Path) -> str | None:
    """A line for the user if another version last trained the run in a folder; None if this version did."""
    found = writer(folder)
    if found == __version__:
        return None
    by = "a version of Podium that did not record which" if found is None else f"Podium {found}"
    return (
        f"this run was last trained by {by}, and continues with {__version__}: results may not be bit-for-bit the same"
    )


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
