"""Traces a run's programs for a machine that is not there, without its compiler or plugin.

Tracing and lowering need of a device only its name and its place, so plain objects stand for the devices.
"""

import dataclasses
from collections.abc import Collection

import jax

from podium.accelerators import DEVICE_KINDS, Accelerator
from podium.config.mesh import mesh_text
from podium.plan.calibration import find_chip
from podium.plan.compiled.phases import PhaseProgram, phase_programs
from podium.plan.traced.fusion import COMPILERS
from podium.plan.traced.lifetimes import TracedMachine, TracedMemory, measure
from podium.plan.traced.lowered_program import DeviceProgram, read_program
from podium.plan.traced.simplification import simplify
from podium.run.run_spec import RunSpec
from podium.sharding import make_mesh

JAX_PLATFORMS = {"gpu": "cuda"}
"""Platforms that jax calls otherwise when it lowers."""


class _Memory(str):
    """A memory of a device, by its name."""

    @property
    def kind(self) -> str:
        """The name again: jax reads it from a memory."""
        return str(self)


@dataclasses.dataclass(eq=False)
class AbsentDevice:
    """A device of a machine that is not there, with what jax asks of a device when it traces."""

    id: int
    process_index: int
    platform: str
    device_kind: str
    slice_index: int = 0
    compute_capability: str = ""
    core_on_chip: int = 0
    num_cores: int = 1

    @property
    def local_hardware_id(self) -> int:
        """The number of the device."""
        return self.id

    @property
    def client(self) -> object:
        """The client of this machine's CPU, which lowers programs."""
        return jax.devices("cpu")[0].client

    def memory_stats(self) -> None:
        """Nothing: there is no memory."""

    def memory(self, kind: str) -> _Memory:
        """The memory with a name."""
        return _Memory(kind)

    def default_memory(self) -> _Memory:
        """The device's own memory."""
        return _Memory("device")

    def addressable_memories(self) -> list[_Memory]:
        """The device's own memory and the host's."""
        return [_Memory("device"), _Memory("pinned_host")]


def absent_devices(accelerator: Accelerator) -> list[AbsentDevice]:
    """The devices of an accelerator, for `make_mesh`."""
    known = (start for start, generation in DEVICE_KINDS.items() if generation == accelerator.generation)
    kind = next(known, accelerator.generation)
    per_host, per_slice = (max(1, accelerator.devices // count) for count in (accelerator.hosts, accelerator.slices))
    return [
        AbsentDevice(
            id=number,
            process_index=number // per_host,
            platform=accelerator.platform,
            device_kind=kind,
            slice_index=number // per_slice,
            compute_capability=accelerator.capability,
        )
        for number in range(accelerator.devices)
    ]


def absent_programs(spec: RunSpec, accelerator: Accelerator) -> dict[str, PhaseProgram]:
    """The programs of a run on a machine that is not there. Raises ValueError if an array does not divide."""
    return phase_programs(spec, make_mesh(mesh_text(spec.mesh), absent_devices(accelerator)))


def trace_memory(program: PhaseProgram, accelerator: Accelerator, *, skipped: Collection[str] = ()) -> TracedMemory:
    """The memory and work of a run's program on one device, without the arrays in use beside it.

    `skipped` are scopes of the choices that take their cheapest branch.

    Raises:
        UnknownOperation: nothing is known of one of its operations without a compiler.
    """
    lowered = program.lower(JAX_PLATFORMS.get(accelerator.platform, accelerator.platform))
    return measure_lowered(lowered, accelerator, skipped=skipped)


def measure_lowered(
    lowered: jax.stages.Lowered, accelerator: Accelerator, *, skipped: Collection[str] = ()
) -> TracedMemory:
    """The memory and work of a lowered program on one device; `skipped` as above. Raises UnknownOperation."""
    chip = find_chip(accelerator.generation)
    machine = TracedMachine(COMPILERS[accelerator.platform], chip and chip.peaks, skipped=frozenset(skipped))
    return measure(_read(lowered, accelerator.per_machine), machine)


def lowered_flops(lowered: jax.stages.Lowered) -> float:
    """Operations of a lowered program on one device, each loop of unknown length once. Raises UnknownOperation."""
    body = _read(lowered).body
    simplify(body)
    return body.flops


def _read(lowered: jax.stages.Lowered, per_machine: int = 0) -> DeviceProgram:
    module = lowered.compiler_ir()
    assert module is not None  # jax lowers to StableHLO
    return read_program(module, per_machine)
