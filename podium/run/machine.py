"""The machine that a run is resolved for: devices that are here, or a table entry that is planned for. No jax."""

import dataclasses

from podium.accelerators import Accelerator, cpu_flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of all hosts, as far as settings depend on them."""

    platform: str
    """Jax's name: cpu, gpu or tpu."""
    devices: int
    """Over all hosts."""
    hosts: int = 1
    """Processes of jax.distributed."""
    slices: int = 1
    """Groups of devices that the data center's network joins."""
    accelerator: Accelerator | None = None
    """Its entry in the table of accelerators, which has its speed; None: not in the table."""
    cpu_flags: frozenset[str] = frozenset()
    """Instruction sets of the host's CPU, which decide the number format there."""

    @classmethod
    def planned(cls, accelerator: Accelerator) -> "Machine":
        """The machine that an accelerator is; its CPU is taken to be this machine's."""
        return cls(
            platform=accelerator.platform,
            devices=accelerator.devices,
            hosts=accelerator.hosts,
            slices=accelerator.slices,
            accelerator=accelerator,
            cpu_flags=cpu_flags(),
        )
