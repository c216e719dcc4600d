"""Where the planner keeps what took long to find out: files below the user's cache folder, whole or not there."""

import importlib.metadata
import os
import tempfile
from pathlib import Path

from podium.accelerators import Accelerator


def cache_folder() -> Path:
    """The planner's own folder: `$XDG_CACHE_HOME/podium/plan`, or below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "podium" / "plan"


def write_file(path: Path, content: bytes) -> None:
    """Write a file by renaming: whoever is interrupted leaves no half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def compiler_versions(accelerator: Accelerator) -> dict[str, str]:
    """Versions of what decides a compiled program, by package; without importing them."""
    packages = ["jax", "jaxlib", *(["libtpu"] if accelerator.compiles else [])]
    return {name: importlib.metadata.version(name) for name in packages}
