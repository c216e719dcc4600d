"""The machine that a run is resolved for: actual devices, or a table entry for planning. No jax."""

import dataclasses
from typing import Literal

from podium.accelerators import Accelerator, Kernels, auto_dtype, cpu_flags, kernels_on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of all hosts, with the properties that settings depend on."""

    platform: str
    """The jax platform: cpu, gpu or tpu."""
    devices: int
    """Number of devices over all hosts."""
    hosts: int = 1
    """Number of jax.distributed processes."""
    slices: int = 1
    """Number of groups of devices that are joined by the data center's network."""
    accelerator: Accelerator | None = None
    """Entry in the table of accelerators, with its speed; None: not in the table."""
    cpu_flags: frozenset[str] = frozenset()
    """Instruction sets of the host's CPU, which decide its number format."""
    capability: str = ""
    """Compute capability of the GPUs, such as 8.0; empty if it is unknown."""

    @property
    def kernels(self) -> Kernels:
        """The kind of kernels that the devices run."""
        return kernels_on(self.platform, self.capability)

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """The number format of `dtype: auto`."""
        return auto_dtype(self.platform, self.cpu_flags, self.capability)

    @classmethod
    def planned(cls, accelerator: Accelerator) -> "Machine":
        """The machine of a table entry; for a CPU, the current machine's is assumed."""
        return cls(
            platform=accelerator.platform,
            devices=accelerator.devices,
            hosts=accelerator.hosts,
            slices=accelerator.slices,
            accelerator=accelerator,
            cpu_flags=cpu_flags(),
            capability=accelerator.capability,
        )
