"""The known machines: sizes, hosts, memory, interconnect. One table for config, plan, pods and train. No jax.

Sizes follow Cloud TPU's documentation (docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x, "Configurations").
Names of TPUs count TensorCores. A v5e, v6e or TPU 8t chip has one. The two of a v4 or v5p chip are one device; the two
of a TPU7x or TPU 8i chip are two. Hosts are the processes of jax.distributed: one per virtual machine.
"""

import dataclasses
import difflib
import functools
import math
import os
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

GIB = 2**30
GPU_POOL = 0.9
"""Share of a GPU's memory that Podium lets jax reserve for arrays; jax's default is three quarters."""
POOL_VARIABLE, OLD_POOL_VARIABLE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Environment variables that set jax's share of GPU memory, new and old name; jax refuses to start if both are set."""
CUDA_CONTEXT, ALLOCATOR_RESERVE = 1 * GIB, 0.02
"""GPU memory that is not available for arrays: bytes outside jax's share, for CUDA's context, kernels and NCCL's
buffers; and the fraction of jax's share that is lost to fragmentation. On an H100 the context took 0.6 GiB without NCCL
(LOG.md); the rest is assumed."""


class AcceleratorError(ValueError):
    """An accelerator name that is unknown or cannot be planned for."""

    exit_status = 2  # wrong usage, as for every command


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A machine, or a slice of a pod, to rent as a whole."""

    name: str
    """The cloud's accelerator type, such as v6e-8; for GPUs, kind and number, such as h100-8; 2xv6e-16: two slices."""
    generation: str
    """The kind of chip, which names its file of constants in `podium/chips`."""
    devices: int
    """Devices over all hosts, as jax counts them: chips, or TPU7x's TensorCores."""
    hosts: int
    """Number of host processes, as jax.distributed counts them."""
    hbm_bytes: int
    """Usable memory of a device; for TPUs, what their compiler calls available."""
    chip_devices: int = 1
    """Devices of a chip, which is what clouds rent."""
    torus: tuple[int, ...] = ()
    """Chips along each axis of a slice's interconnect; empty if chips are connected by a switch or not at all."""
    wrapped: tuple[bool, ...] = ()
    """Whether each axis is a ring, with its ends connected."""
    host_bounds: tuple[int, int, int] | None = None
    """Chips of a host along each axis; None for machines other than TPUs."""
    chip_config: str | None = None
    """The compiler's name for the way a chip's cores are used; None if the chip has only one."""
    slices: int = 1
    """Groups of devices joined by a network that is slower than the interconnect; for GPUs, the number of machines."""

    @property
    def devices_per_host(self) -> int:
        """Devices of each process."""
        return self.devices // self.hosts

    @property
    def chips(self) -> int:
        """Chips over all hosts; prices are per chip."""
        return self.devices // self.chip_devices

    @property
    def chips_per_host(self) -> int:
        """Chips of each process."""
        return self.chips // self.hosts

    @property
    def devices_per_slice(self) -> int:
        """Devices in each slice, joined by the interconnect."""
        return self.devices // self.slices

    @property
    def per_machine(self) -> int:
        """Devices in each slice or GPU machine where a network joins several; 0 where there is only one."""
        return self.devices_per_slice if self.slices > 1 else 0

    @property
    def slice_name(self) -> str:
        """The cloud's type of a single slice, such as v6e-16 for 2xv6e-16."""
        return self.name.removeprefix(f"{self.slices}x")

    @property
    def platform(self) -> Literal["cpu", "gpu", "tpu"]:
        """Jax's name for the kind of device."""
        return "tpu" if self.host_bounds is not None else "gpu" if self.generation in GPUS else "cpu"

    @property
    def capability(self) -> str:
        """Compute capability of a GPU, as in `Gpu`; empty for other devices."""
        return GPUS[self.generation].capability if self.generation in GPUS else ""

    @property
    def compiled(self) -> bool:
        """Whether programs can be compiled for it where it is not; otherwise it is planned by its figures alone."""
        kind = GPUS.get(self.generation) or TPUS.get(self.generation)
        return kind is None or kind.compiled

    @property
    def topology(self) -> str:
        """The compiler's name of the slice, such as `v6e:2x4`; for GPUs, machines x 1 x GPUs of each."""
        if self.platform == "gpu":
            return f"{self.hosts}x1x{self.devices_per_host}"
        return f"{self.generation}:{'x'.join(map(str, self.torus))}"

    @property
    def topology_options(self) -> dict[str, object]:
        """Keyword arguments for jax's `get_topology_desc`, except name and platform."""
        if self.platform != "tpu":
            return {}
        options: dict[str, object] = {"chips_per_host_bounds": self.host_bounds}
        options |= {"num_slices": self.slices} if self.slices > 1 else {}
        return options | ({"chip_config_name": self.chip_config} if self.chip_config else {})

    @property
    def ici_links(self) -> int:
        """Number of interconnect links of the chip with the fewest: 1 for each axis, or 2 if the axis is a ring."""
        return sum((2 if wraps and size > 2 else 1) for size, wraps in self._axes if size > 1)

    @property
    def wiring_known(self) -> bool:
        """Whether it is documented which axes are rings. It is not for slices of v5e and v6e smaller than 16x16."""
        return len(self.torus) != 2 or self.devices_per_slice == 1 or all(self.wrapped)

    @property
    def _axes(self) -> list[tuple[int, bool]]:
        return list(zip(self.torus, self.wrapped, strict=True))


MACHINE = 8
"""GPUs of a machine, for most kinds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU; the sources of its numbers are in its files in `podium/chips` and `podium/plan/gpus`."""

    memory: int
    """Bytes that CUDA reports as total."""
    capability: str
    """Compute capability, which decides kernels and number formats; for AMD's GPUs, the name of the architecture."""
    names: tuple[str, ...]
    """Beginnings of jax's `device_kind`."""
    networked: bool = True
    """Whether `podium/chips` has the bandwidth between machines."""
    machine: int = MACHINE
    """The most GPUs in one machine."""
    compiled: bool = True
    """Whether `podium/plan/gpus` describes it to the compiler; if not, it is planned by its figures alone."""


def _gib(size: float) -> int:
    return int(size * GIB)


GPUS: Mapping[str, Gpu] = {
    "t4": Gpu(memory=_gib(14.56), capability="7.5", names=("Tesla T4",), networked=False),
    "v100-16": Gpu(memory=16_935_682_048, capability="7.0", names=("Tesla V100-SXM2-16GB",), networked=False),
    "v100-32": Gpu(
        memory=_gib(31.74), capability="7.0", names=("Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB"), networked=False
    ),
    "a10g": Gpu(memory=_gib(22.06), capability="8.6", names=("NVIDIA A10G",), networked=False),
    "a6000": Gpu(memory=51_041_271_808, capability="8.6", names=("NVIDIA RTX A6000",), networked=False),
    "a100-40": Gpu(memory=42_331_013_120, capability="8.0", names=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")),
    "a100-80": Gpu(memory=85_100_068_864, capability="8.0", names=("NVIDIA A100",)),
    "l4": Gpu(memory=_gib(22.03), capability="8.9", names=("NVIDIA L4",), networked=False),
    "l40": Gpu(memory=_gib(44.40), capability="8.9", names=("NVIDIA L40",), networked=False),
    "l40s": Gpu(memory=_gib(44.40), capability="8.9", names=("NVIDIA L40S",), networked=False),
    "rtx6000ada": Gpu(memory=_gib(44.43), capability="8.9", names=("NVIDIA RTX 6000 Ada",), networked=False),
    "rtxpro6000": Gpu(memory=_gib(94.97), capability="12.0", names=("NVIDIA RTX PRO 6000 Blackwell",), networked=False),
    "h100": Gpu(memory=84_942_979_072, capability="9.0", names=("NVIDIA H100",)),
    "h200": Gpu(memory=151_397_597_184, capability="9.0", names=("NVIDIA H200",)),
    "gh200": Gpu(memory=_gib(94.50), capability="9.0", names=("NVIDIA GH200 480GB",), networked=False, machine=1),
    "b200": Gpu(memory=191_514_411_008, capability="10.0", names=("NVIDIA B200",)),
    "b300": Gpu(memory=297_021_865_984, capability="10.3", names=("NVIDIA B300",)),
    "gb200": Gpu(memory=197_897_748_480, capability="10.0", names=("NVIDIA GB200",), networked=False, machine=4),
    "rtx3090": Gpu(memory=_gib(23.70), capability="8.6", names=("NVIDIA GeForce RTX 3090",), networked=False),
    "rtx4090": Gpu(memory=_gib(23.64), capability="8.9", names=("NVIDIA GeForce RTX 4090",), networked=False),
    "rtx5090": Gpu(memory=_gib(31.36), capability="12.0", names=("NVIDIA GeForce RTX 5090",), networked=False),
    "mi300x": Gpu(memory=192 * GIB, capability="gfx942", names=("AMD Instinct MI300X",), compiled=False),
    "mi355x": Gpu(memory=288 * GIB, capability="gfx950", names=("AMD Instinct MI355X",), compiled=False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu:
    """A generation of TPUs; the sources of its other numbers are in its file in `podium/chips`."""

    memory: int
    """Bytes of a device that its compiler calls available."""
    names: tuple[str, ...]
    """Beginnings of jax's `device_kind`."""
    cores: tuple[int, ...]
    """TensorCores of each size."""
    chip_cores: int = 1
    """TensorCores of a chip."""
    chip_devices: int = 1
    """Devices of a chip."""
    wiring: Literal["flat", "cubic", "switched"] = "cubic"
    """The interconnect: a torus of two or three dimensions, or no torus."""
    sparse_core: bool = False
    """Whether its SparseCore exchanges arrays while the TensorCore multiplies."""
    chip_config: str | None = None
    """As in `Accelerator`."""
    compiled: bool = True
    """Whether its compiler knows it; if not, it is planned by its figures alone."""


FLAT = (1, 4, 8, 16, 32, 64, 128, 256)
"""Chips of the slices of v5e and v6e: 1x1, 2x2, 2x4, 4x4, ..., 16x16."""
# Memory is from the compiler's error messages about too large programs (libtpu 0.0.42.1): "exceeds available HBM
# (31.25G)". The compiler does not know TPU 8t and 8i (nor does 0.0.52): of their memory the same share is assumed as of
# TPU7x's, and their names, sizes and hosts of four chips are assumed to be as TPU7x's.
TPUS: Mapping[str, Tpu] = {
    "v4": Tpu(
        memory=_gib(30.75),
        names=("TPU v4",),
        cores=(8, 16, 32, 64, 128, 256, 512),
        chip_cores=2,
        chip_config="megacore",
    ),
    "v5e": Tpu(memory=_gib(15.75), names=("TPU v5 lite", "TPU v5e"), cores=FLAT, wiring="flat"),
    "v5p": Tpu(memory=_gib(95.74), names=("TPU v5",), cores=(8, 16, 32, 64, 128, 256, 512, 1024), chip_cores=2),
    "v6e": Tpu(memory=_gib(31.25), names=("TPU v6 lite", "TPU v6e"), cores=FLAT, wiring="flat", sparse_core=True),
    "tpu7x": Tpu(
        memory=_gib(94.75),
        names=("TPU7x",),
        cores=(2, 8, 16, 32, 64, 128, 256, 512),
        chip_cores=2,
        chip_devices=2,
        sparse_core=True,
    ),
    "tpu8t": Tpu(memory=_gib(213.19), names=("TPU8t",), cores=(4, 8, 16, 32, 64, 128, 256), compiled=False),
    "tpu8i": Tpu(
        memory=_gib(142.12),
        names=("TPU8i",),
        cores=(8, 16, 32, 64, 128, 256),
        chip_cores=2,
        chip_devices=2,
        wiring="switched",
        compiled=False,
    ),
}
GPU_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256)
"""Supported numbers of GPUs."""
ALIASES = {"v5e": "v5litepod"}  # the cloud's name of v5e
Kernels = Literal["tpu", "gpu", "none"]
"""The kind of kernels that run on a device; `none`: XLA's own operations are used instead."""
LEAST_CAPABILITY = (8, 0)
"""The oldest compute capability (Ampere) at which GPUs multiply bfloat16 and run Triton's kernels. T4, V100 and RTX 20
have 7.x."""
CPU_INFO = Path("/proc/cpuinfo")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""File with the memory limit of this container's processes: bytes, or `max`."""
CPU_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})
"""Linux's names of CPU instruction sets that multiply bfloat16 faster than float32."""
XLA_BFLOAT16 = frozenset({"AVX512_BF16", "AMX", "AMX_FP16"})
"""Values of XLA's flag xla_cpu_max_isa that allow at least one of the instruction sets in CPU_BFLOAT16."""

OTHER_GPUS = ("NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop", "NVIDIA GeForce RTX 5090 Laptop")
"""GPUs that are not in the table, although their names begin like one that is."""
_NAMES = {name: kind for kind, each in {**TPUS, **GPUS}.items() for name in each.names} | dict.fromkeys(OTHER_GPUS, "")
DEVICE_KINDS: Mapping[str, str] = {name: _NAMES[name] for name in sorted(_NAMES, key=len, reverse=True)}
"""Beginnings of jax's `device_kind`, longer ones first, and the generation of each."""
SPARSE_CORES = tuple(name for kind, tpu in TPUS.items() if tpu.sparse_core for name in (kind, *tpu.names))
"""Names, in this table and in jax, of the TPU generations whose SparseCore exchanges arrays while the TensorCore
multiplies."""


def find_accelerator(name: str) -> Accelerator:
    """The accelerator with this name, such as v6e-8, v5litepod-16 (or v5e-16), v5p-64, h100-8, a100-80-8; 2xv6e-16 is
    two TPU slices.

    Raises AcceleratorError if it is unknown; the message suggests the nearest names.
    """
    if several := re.fullmatch(r"\s*(\d+)x(.+)", name):
        return _joined(find_accelerator(several[2]), int(several[1]))
    table = accelerators()
    kind, _, size = name.strip().lower().rpartition("-")
    known = f"{ALIASES.get(kind, kind)}-{size}"
    if known not in table:
        if kind in GPUS and not GPUS[kind].networked and size.isdecimal() and int(size) > GPUS[kind].machine:
            others = ", ".join(other for other, gpu in GPUS.items() if gpu.networked)
            raise AcceleratorError(
                f"{known}: the bandwidth between machines of {kind} is not known; plan for one machine, "
                f"{kind}-{GPUS[kind].machine}, or for a GPU whose bandwidth is known ({others})"
            )
        if name.strip().lower() == "cpu":
            raise AcceleratorError(
                "--on cpu: plans are for TPUs and GPUs, such as v6e-8 or h100-8; on a CPU, train a few steps "
                "instead: podium train CONFIG --set steps=3. After podium calibrate RUN, plans know this CPU"
            )
        near = _nearest(known if kind else size, table)
        raise AcceleratorError(f"unknown accelerator {name!r}; nearest: {', '.join(near)}")
    return table[known]


def this_cpu(devices: int = 1) -> Accelerator:
    """An entry for this machine's CPU, which is not in the table; used to compile for the CPU and to compare runs."""
    return Accelerator(name=f"cpu-{devices}", generation="cpu", devices=devices, hosts=1, hbm_bytes=host_memory())


def host_memory() -> int:
    """Bytes of memory that processes on this host may use at most, within the container's limit if there is one."""
    limit = MEMORY_LIMIT.read_text().strip() if MEMORY_LIMIT.exists() else "max"
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(whole, int(limit)) if limit.isdecimal() else whole


def recognise(device_kind: str, devices: int, slices: int = 1) -> Accelerator | None:
    """Find the accelerator with `devices` devices of jax's kind `device_kind`; None if it is not in the table.

    `slices` is the number of TPU slices that the devices form.
    """
    kind = next((name for start, name in DEVICE_KINDS.items() if device_kind.startswith(start)), None)
    if kind is None:
        return None
    if kind in GPUS:
        return accelerators().get(f"{kind}-{devices}")
    if kind not in TPUS:
        return None
    cores = devices // slices * TPUS[kind].chip_cores // TPUS[kind].chip_devices
    one = accelerators().get(f"{ALIASES.get(kind, kind)}-{cores}")
    return one and _joined(one, slices)


@functools.cache
def accelerators() -> dict[str, Accelerator]:
    """Every known accelerator by name, small to large within its kind."""
    slices = [_slice(generation, cores) for generation, tpu in TPUS.items() for cores in tpu.cores]
    counts = [
        (kind, count) for kind, gpu in GPUS.items() for count in GPU_COUNTS if count <= gpu.machine or gpu.networked
    ]
    gpus = [_gpus(kind, count) for kind, count in counts]
    return {each.name: each for each in (*slices, *gpus)}


def pool_share() -> float:
    """The share of a GPU's memory that jax reserves for arrays, given this process's environment. Raises ValueError if
    the environment variable is not a share.
    """
    name = OLD_POOL_VARIABLE if OLD_POOL_VARIABLE in os.environ else POOL_VARIABLE
    text = os.environ.get(name, str(GPU_POOL))
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(
            f"{name}={text}: expected a fraction of the memory above 0 and at most 1; unset the variable for the "
            "default"
        )
    return share


def reserve_gpu_memory() -> None:
    """Let jax reserve `GPU_POOL` of a GPU's memory unless the environment says otherwise; call it before jax starts."""
    if OLD_POOL_VARIABLE not in os.environ:
        os.environ.setdefault(POOL_VARIABLE, str(GPU_POOL))


def usable_gpu_memory(kind: str, share: float) -> int:
    """Bytes of a GPU for arrays: the share that jax reserves, less CUDA's context and the allocator's reserve."""
    memory = GPUS[kind].memory
    return int((1 - ALLOCATOR_RESERVE) * min(share * memory, memory - CUDA_CONTEXT))


def auto_dtype(platform: str, flags: Set[str], capability: str = "") -> Literal["float32", "bfloat16"]:
    """Resolve `dtype: auto`: the faster number format on cpu, gpu or tpu.

    `flags` are the result of `cpu_flags`: bfloat16 is slower than float32 on a CPU without CPU_BFLOAT16. `capability`
    is a GPU's compute capability, as for `kernels_on`: below LEAST_CAPABILITY, GPUs cannot multiply bfloat16.
    """
    if platform == "cpu":
        return "bfloat16" if CPU_BFLOAT16 & flags else "float32"
    return "float32" if _too_old(capability) else "bfloat16"


def kernels_on(platform: str, capability: str = "") -> Kernels:
    """The kind of kernels that run on a device of a jax platform (cpu, gpu or tpu).

    `capability` is a GPU's compute capability, such as 7.5; if it is empty, the GPU is assumed to run kernels. AMD's
    GPUs run none.
    """
    if platform == "tpu":
        return "tpu"
    return "gpu" if platform == "gpu" and not _too_old(capability) and not of_amd(capability) else "none"


class JaxDevice(Protocol):
    """The part of jax's device interface that Podium reads; a GPU also has `compute_capability`."""

    @property
    def platform(self) -> str:
        """The jax platform: cpu, gpu or tpu."""
        ...


def capability_of(device: JaxDevice) -> str:
    """The compute capability of a GPU, such as 8.0; empty for other devices, and for GPUs that do not report it."""
    return getattr(device, "compute_capability", "") if device.platform == "gpu" else ""


def kernels_of(device: JaxDevice) -> Kernels:
    """The kind of kernels that a device runs."""
    return kernels_on(device.platform, capability_of(device))


def of_amd(capability: str) -> bool:
    """Whether a GPU with this capability is one of AMD's, for which Podium has no kernels."""
    return capability.startswith("gfx")


def _too_old(capability: str) -> bool:
    return (
        bool(capability)
        and not of_amd(capability)
        and tuple(int(part) for part in capability.split(".")) < LEAST_CAPABILITY
    )


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this machine's CPU, as Linux names them; empty on other systems.

    The bfloat16 sets are left out if XLA_FLAGS excludes them with xla_cpu_max_isa.
    """
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # macOS, say
        lines = []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    limit = re.search(r"--xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", ""))
    hidden = CPU_BFLOAT16 if limit and limit[1].upper() not in XLA_BFLOAT16 else frozenset()
    return frozenset(flags) - hidden


def _slice(generation: str, cores: int) -> Accelerator:
    """A slice of TPUs with this number of TensorCores."""
    tpu = TPUS[generation]
    chips = cores // tpu.chip_cores
    wiring = {"flat": _flat, "cubic": _cubic, "switched": _switched}[tpu.wiring](chips)
    return Accelerator(
        name=f"{ALIASES.get(generation, generation)}-{cores}",
        generation=generation,
        devices=chips * tpu.chip_devices,
        hosts=max(1, chips // math.prod(wiring.host_bounds)),
        hbm_bytes=tpu.memory,
        chip_devices=tpu.chip_devices,
        chip_config=tpu.chip_config,
        torus=wiring.torus,
        wrapped=wiring.wrapped,
        host_bounds=wiring.host_bounds,
    )


class _Wiring(NamedTuple):
    """How the chips of a slice are joined, as in `Accelerator`."""

    torus: tuple[int, ...]
    wrapped: tuple[bool, ...]
    host_bounds: tuple[int, int, int]


def _flat(chips: int) -> _Wiring:
    """Two dimensions. Up to 8 chips form one machine; larger slices consist of 2x2 machines. Only axes of 16 chips are
    rings.
    """
    rows = 2 ** (int(math.log2(chips)) // 2)
    torus = (rows, chips // rows)
    return _Wiring(torus, tuple(size == 16 for size in torus), (*torus, 1) if chips <= 8 else (2, 2, 1))


def _cubic(chips: int) -> _Wiring:
    """Three dimensions: one chip, or 2x2x1 machines, arranged as close to a cube as possible. Axes are rings from 4x4x4
    on.
    """
    if chips == 1:
        return _Wiring((1, 1, 1), (False,) * 3, (1, 1, 1))
    torus = [2, 2, 1]
    while math.prod(torus) < chips:  # 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, 4x4x8, ...
        torus[max(axis for axis, size in enumerate(torus) if size == min(torus))] *= 2
    return _Wiring(tuple(torus), (min(torus) >= 4,) * 3, (2, 2, 1))


def _switched(chips: int) -> _Wiring:
    """Machines of four chips, any two of which are few hops apart (TPU 8i's Boardfly); counted as if by a switch."""
    return _Wiring((), (), (2, 2, 1))


def _gpus(kind: str, count: int) -> Accelerator:
    """Describe `count` GPUs: in one machine, connected by a switch, or in several machines."""
    machines = max(1, count // GPUS[kind].machine)
    return Accelerator(
        name=f"{kind}-{count}",
        generation=kind,
        devices=count,
        hosts=machines,
        hbm_bytes=usable_gpu_memory(kind, pool_share()),
        slices=machines,
    )


def _joined(one: Accelerator, slices: int) -> Accelerator:
    """Several TPU slices of a type as one machine. Raises AcceleratorError for GPUs, whose type already has their
    number.
    """
    if one.platform != "tpu" or one.slices > 1 or not slices:
        raise AcceleratorError(
            f"{slices}x{one.name}: write a number of slices before a type of TPU, as 2xv6e-16; the number of GPUs says"
            " how many machines there are, as h100-16"
        )
    if slices == 1:
        return one
    return dataclasses.replace(
        one, name=f"{slices}x{one.name}", devices=slices * one.devices, hosts=slices * one.hosts, slices=slices
    )


def _kinds(table: dict[str, Accelerator]) -> list[str]:
    return list(dict.fromkeys(each.rpartition("-")[0] for each in table))


def _nearest(name: str, table: dict[str, Accelerator]) -> list[str]:
    """Up to three known names closest to a wrong one: the nearest sizes of the most similar kinds."""
    kinds = _kinds(table)
    alone = ALIASES.get(name, name)
    if alone in kinds:  # the name has no number of devices
        return [each for each in (f"{alone}-{size}" for size in (1, 4, 8, 16, 32)) if each in table][:3]
    kind, _, size = name.rpartition("-")
    like = [each for each in kinds if each == kind] or [each for each in kinds if each.startswith(f"{kind}-")]
    like = like or difflib.get_close_matches(kind or name, kinds, 3, cutoff=0.0)
    count = int(size) if size.isdecimal() else MACHINE
    sizes = {
        each: [int(other.rpartition("-")[2]) for other in table if other.rpartition("-")[0] == each] for each in like
    }
    by_size = {each: sorted(sizes[each], key=lambda other: abs(other - count)) for each in like}
    return [f"{each}-{by_size[each][rank]}" for rank in range(3) for each in like if rank < len(by_size[each])][:3]
