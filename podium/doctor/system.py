"""Facts about a machine other than speeds: packages, driver, device files, memory, disk, and jax's devices.

`ThisSystem` asks the machine that this process runs on. Tests pass a different `System`.
"""

import contextlib
import dataclasses
import glob
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from podium.accelerators import capability_of, host_memory

PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
)
DEVICE_FILES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*")
"""Device files of TPUs (of v4 and older, and of newer ones) and of NVIDIA's GPUs, one for each."""
DRIVER_FILE = Path("/sys/module/nvidia/version")
MEMORY_FILE = Path("/proc/meminfo")
SMI_FIELDS = "name,driver_version,memory.total,memory.used"
SMI_TIMEOUT_S = 20.0
MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmiGpu:
    """A GPU as nvidia-smi describes it."""

    name: str
    driver: str
    total: int  # bytes
    used: int  # bytes, by all processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeenDevice:
    """A device of this host that jax sees."""

    platform: str
    kind: str
    limit: int = 0  # bytes that jax may use; 0: not reported
    capability: str = ""  # a GPU's compute capability, such as 8.0


class System(Protocol):
    """A machine."""

    def versions(self) -> Mapping[str, str]:
        """Python's version, and those of the installed packages among PACKAGES."""
        ...

    def wanted(self, package: str) -> str:
        """The version of a package that the installed jax asks for, as `==0.0.42.*`; empty if it asks for none."""
        ...

    def driver(self) -> str:
        """Version of NVIDIA's kernel driver; empty without one."""
        ...

    def smi(self) -> Sequence[SmiGpu] | None:
        """The GPUs that nvidia-smi reports; None if nvidia-smi is missing or fails."""
        ...

    def device_files(self) -> Sequence[str]:
        """The device files of TPUs and GPUs."""
        ...

    def environment(self) -> Mapping[str, str]:
        """The environment's variables."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes of the host's memory that this process may use at most, and that are free now."""
        ...

    def load(self) -> tuple[float, int]:
        """Processes that wanted a processor in the last minute, on average, and the number of processors."""
        ...

    def devices(self) -> Sequence[SeenDevice]:
        """The devices that jax finds on this host. Raises ValueError if jax cannot start."""
        ...

    def write_s(self, folder: Path, size: int) -> float:
        """Seconds to write a file of `size` bytes and to wait until it is on the disk. Raises OSError."""
        ...

    def free(self, folder: Path) -> int:
        """Free bytes of the disk of a folder."""
        ...


class ThisSystem:
    """The machine that this process runs on."""

    def versions(self) -> Mapping[str, str]:
        """Python's version, and those of the installed packages among PACKAGES."""
        found = {"python": platform.python_version()}
        for package in PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
        return found

    def wanted(self, package: str) -> str:
        """The version of a package that the installed jax asks for, as `==0.0.42.*`; empty if it asks for none."""
        asked = (
            re.match(rf"{package}\s*(==[\w.*]+)\s*(;|$)", each) for each in importlib.metadata.requires("jax") or ()
        )
        return next((found[1] for found in asked if found), "")

    def driver(self) -> str:
        """Version of NVIDIA's kernel driver; empty without one."""
        return DRIVER_FILE.read_text().strip() if DRIVER_FILE.exists() else ""

    def smi(self) -> Sequence[SmiGpu] | None:
        """The GPUs that nvidia-smi reports; None if nvidia-smi is missing or fails."""
        command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
            return [_gpu(line) for line in done.stdout.splitlines() if line.strip()]
        except (OSError, subprocess.SubprocessError, ValueError):
            return None

    def device_files(self) -> Sequence[str]:
        """The device files of TPUs and GPUs."""
        return sorted(path for pattern in DEVICE_FILES for path in glob.glob(pattern))

    def environment(self) -> Mapping[str, str]:
        """The environment's variables."""
        return os.environ

    def memory(self) -> tuple[int, int]:
        """Bytes of the host's memory that this process may use at most, and that are free now."""
        text = MEMORY_FILE.read_text() if MEMORY_FILE.exists() else ""
        found = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
        whole = host_memory()
        return whole, min(whole, found.get("MemAvailable", whole))

    def load(self) -> tuple[float, int]:
        """Processes that wanted a processor in the last minute, on average, and the number of processors."""
        return os.getloadavg()[0], os.cpu_count() or 1

    def devices(self) -> Sequence[SeenDevice]:
        """The devices that jax finds on this host. Raises ValueError if jax cannot start."""
        import jax

        from podium.sharding import find_devices

        return [
            SeenDevice(
                platform=device.platform,
                kind=device.device_kind,
                limit=(device.memory_stats() or {}).get("bytes_limit", 0),
                capability=capability_of(device),
            )
            for device in find_devices()
            if device.process_index == jax.process_index()
        ]

    def write_s(self, folder: Path, size: int) -> float:
        """Seconds to write a file of `size` bytes and to wait until it is on the disk. Raises OSError."""
        path, content = folder / f".podium-doctor-{os.getpid()}", os.urandom(min(size, MIB))
        try:
            start = time.perf_counter()
            with path.open("wb") as file:
                for _ in range(max(1, size // MIB)):
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            return time.perf_counter() - start
        finally:
            path.unlink(missing_ok=True)

    def free(self, folder: Path) -> int:
        """Free bytes of the disk of a folder."""
        return shutil.disk_usage(folder).free


def _gpu(line: str) -> SmiGpu:
    name, driver, total, used = (part.strip() for part in line.split(","))
    return SmiGpu(name=name, driver=driver, total=int(total) * MIB, used=int(used) * MIB)
