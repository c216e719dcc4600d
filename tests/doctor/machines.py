"""Simulated machines, each with the answers that a test gives it."""

import dataclasses
import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.doctor.system import SeenDevice, SmiGpu

GIB = 2**30
GOOD = {"python": "3.11.9", "jax": "0.10.2", "jaxlib": "0.10.2"}
H100 = "NVIDIA H100 80GB HBM3"
CUDA = {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MadeSystem:
    """A machine without GPUs on which all is well, but for what a test changes."""

    packages: Mapping[str, str] = dataclasses.field(default_factory=lambda: GOOD)
    libtpu: str = "==0.0.42.*"
    kernel_driver: str = ""
    cards: Sequence[SmiGpu] | None = None
    files: Sequence[str] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seen: Sequence[SeenDevice] = (SeenDevice(platform="cpu", kind="cpu"),)
    broken: str = ""  # jax's error at its start
    bytes_per_s: float = 1e9
    sync_s: float = 0.001
    read_only: bool = False
    wanted_processors: float = 0.3

    def versions(self) -> Mapping[str, str]:
        return self.packages

    def wanted(self, package: str) -> str:
        return self.libtpu

    def driver(self) -> str:
        return self.kernel_driver

    def smi(self) -> Sequence[SmiGpu] | None:
        return self.cards

    def device_files(self) -> Sequence[str]:
        return self.files

    def environment(self) -> Mapping[str, str]:
        return self.variables

    def memory(self) -> tuple[int, int]:
        return 24 * GIB, 20 * GIB

    def load(self) -> tuple[float, int]:
        return self.wanted_processors, 2

    def devices(self) -> Sequence[SeenDevice]:
        if self.broken:
            raise ValueError(self.broken)
        return self.seen

    def write_s(self, folder: Path, size: int) -> float:
        if self.read_only:
            raise OSError(errno.EROFS, "Read-only file system", str(folder))
        return self.sync_s + size / self.bytes_per_s

    def free(self, folder: Path) -> int:
        return 100 * GIB


def with_gpus(there: int, found: int, *, driver: str = "580.95.05", **changed: Any) -> MadeSystem:
    """A machine with H100s, of which jax finds some."""
    fields: dict[str, Any] = {
        "packages": GOOD | CUDA,
        "kernel_driver": driver,
        "cards": [SmiGpu(name=H100, driver=driver, total=80 * GIB, used=0)] * there,
        "files": [f"/dev/nvidia{number}" for number in range(there)],
        "seen": [SeenDevice(platform="gpu", kind=H100, limit=72 * GIB)] * found
        or [SeenDevice(platform="cpu", kind="cpu")],
    }
    return MadeSystem(**{**fields, **changed})


def with_chips(there: int, found: int, **changed: Any) -> MadeSystem:
    """A machine with v6e chips, of which jax finds some."""
    fields: dict[str, Any] = {
        "packages": {**GOOD, "libtpu": "0.0.42.1"},
        "files": [f"/dev/vfio/{number}" for number in range(there)],
        "seen": [SeenDevice(platform="tpu", kind="TPU v6 lite", limit=int(31.25 * GIB))] * found
        or [SeenDevice(platform="cpu", kind="cpu")],
    }
    return MadeSystem(**{**fields, **changed})
