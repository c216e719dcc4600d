"""What can be found out about a machine without measuring: whether versions match, devices, and memory. No jax."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from podium.accelerators import GIB, GPUS, LEAST_CAPABILITY, Accelerator, auto_dtype, kernels_on
from podium.chips import chip_constants
from podium.doctor.diagnosis import Row, rate
from podium.doctor.system import SeenDevice, SmiGpu, System

LEAST_DRIVER: Mapping[str, int] = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}
"""The oldest major version of NVIDIA's driver for each plugin: docs.jax.dev/en/latest/installation.html."""
PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
"""Packages that jaxlib ignores, with a warning, unless their version equals its own."""
LEAST_MEMORY = 0.97
"""Share of the memory that plans assume, below which other processes must be using it."""
BUSY = 1.5
"""Load per processor, in processes, above which the doctor's own measurements would be disturbed."""
OTHERS_BYTES = GIB // 2
"""Bytes of a GPU's memory in use before jax starts, from which the doctor reports it; an idle GPU uses some MiB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a machine; all except `devices` are read before jax allocates memory."""

    versions: Mapping[str, str]
    wanted_libtpu: str
    driver: str
    smi: Sequence[SmiGpu] | None
    files: Sequence[str]
    environment: Mapping[str, str]
    memory: tuple[int, int]
    load: tuple[float, int]
    devices: Sequence[SeenDevice]
    error: str = ""  # why jax found no devices

    @property
    def platform(self) -> str:
        """The jax platform of the devices; empty without devices."""
        return self.devices[0].platform if self.devices else ""

    @property
    def hidden(self) -> bool:
        """Whether the environment tells jax to use the CPU alone."""
        return self.environment.get("JAX_PLATFORMS", "") == "cpu"

    @property
    def gpus(self) -> int:
        """Number of GPUs that jax should find."""
        files = [each for each in self.files if each.startswith("/dev/nvidia")]
        return _visible(self.environment, len(files) if self.smi is None else len(self.smi), "CUDA_VISIBLE_DEVICES")

    @property
    def tpus(self) -> int:
        """Number of TPU chips that jax should find. Without other signs of a TPU, a /dev/vfio file may be of another
        device.
        """
        named = "libtpu" in self.versions or any(name.startswith("TPU_") for name in self.environment)
        files = [each for each in self.files if each.startswith("/dev/accel") or ("/vfio/" in each and named)]
        return _visible(self.environment, len(files), "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")


def ask(system: System) -> Facts:
    """Collect the facts. jax starts last, so that the memory in use is that of other processes."""
    known = Facts(
        versions=system.versions(),
        wanted_libtpu=system.wanted("libtpu"),
        driver=system.driver(),
        smi=system.smi(),
        files=system.device_files(),
        environment=dict(system.environment()),
        memory=system.memory(),
        load=system.load(),
        devices=(),
    )
    try:
        return dataclasses.replace(known, devices=system.devices())
    except ValueError as error:
        return dataclasses.replace(known, error=str(error).strip().splitlines()[0])


def versions(facts: Facts) -> Iterator[Row]:
    """Versions of packages and drivers, and which of them do not match."""
    jaxlib = facts.versions.get("jaxlib", "")
    for package, version in facts.versions.items():
        problem = ""
        if package in PLUGINS and version != jaxlib:
            problem = f"jaxlib {jaxlib} ignores it: only the same version is used; pip install {package}=={jaxlib}"
        elif package == "libtpu" and not _meets(version, facts.wanted_libtpu):
            problem = f"this jax asks for {facts.wanted_libtpu}; pip install 'podium-rl[tpu]'"
        yield Row(name=package, text=version, problem=problem)
    if facts.driver or facts.smi:
        version = facts.driver or (facts.smi or [])[0].driver
        yield Row(name="NVIDIA driver", text=version, problem=_old_driver(facts, version))


def _old_driver(facts: Facts, version: str) -> str:
    major = int(version.partition(".")[0]) if version[:1].isdecimal() else 0
    for plugin, least in LEAST_DRIVER.items():
        if plugin in facts.versions and major < least:
            other = (
                ""
                if plugin == "jax-cuda12-plugin" or major < LEAST_DRIVER["jax-cuda12-plugin"]
                else (", or pip install 'jax[cuda12]' instead")
            )
            return f"{plugin} needs driver {least} or newer; install one{other}"
    return ""


def _meets(version: str, wanted: str) -> bool:
    """Whether a version meets a requirement such as `==0.0.42.*`; requirements in other forms count as met."""
    found = re.fullmatch(r"==([\d.]+?)(\.\*)?", wanted)
    return not found or version == found[1] or (bool(found[2]) and version.startswith(f"{found[1]}."))


def devices(facts: Facts) -> Iterator[Row]:
    """The processors and their load; the devices that the machine has, and those that jax finds."""
    load, cores = facts.load
    busy = f"{load:.0f} processes want {cores} processors: nothing below is this machine's own speed; end them first"
    yield Row(name="load", measured=load, text=f"{cores} processors", problem=busy if load > BUSY * cores else "")
    kinds = {device.kind: 0 for device in facts.devices}
    for device in facts.devices:
        kinds[device.kind] += 1
    yield Row(
        name="jax",
        text=", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "no devices",
        problem=f"jax does not start: {facts.error}; the versions above may not go together" if facts.error else "",
    )
    for name, platform, expected, where in (
        ("GPUs", "gpu", facts.gpus, "/dev" if facts.smi is None else "nvidia-smi"),
        ("TPU chips", "tpu", facts.tpus, "/dev"),
    ):
        found = sum(device.platform == platform for device in facts.devices)
        if not expected and not found:
            continue
        problem = ""
        if found < expected and not facts.hidden:
            problem = f"{where} has {expected} and jax finds {found}; {_way_out(facts, platform, found)}"
        hidden = "JAX_PLATFORMS=cpu hides them from jax" if facts.hidden else ""
        yield Row(name=name, unit="devices", measured=found, assumed=expected, text=hidden, problem=problem)
    if facts.platform == "gpu" and (capability := facts.devices[0].capability):
        yield Row(name="compute capability", text=_what_it_runs(capability))
    if facts.platform == "gpu" and facts.smi is None:
        yield Row(name="nvidia-smi", text="not there: devices are counted by their files in /dev")
    yield from _tpu_environment(facts)


def _what_it_runs(capability: str) -> str:
    if kernels_on("gpu", capability) == "gpu":
        return f"{capability}: kernels and bfloat16"
    if auto_dtype("gpu", frozenset(), capability) == "bfloat16":
        return f"{capability}: programs are XLA's, without kernels, and in bfloat16"
    least = ".".join(map(str, LEAST_CAPABILITY))
    return f"{capability}, below {least}: programs are XLA's, without kernels, and in float32"


def _way_out(facts: Facts, platform: str, found: int) -> str:
    if platform == "tpu" and "libtpu" not in facts.versions:
        return "pip install 'podium-rl[tpu]'"
    if platform == "gpu" and not any(plugin in facts.versions for plugin in LEAST_DRIVER):
        return "pip install 'podium-rl[cuda]'"
    if found:
        return "one is broken, or the environment hides it: look at dmesg, or rent another machine"
    busy = "another process may hold them" if platform == "tpu" else "look at nvidia-smi and at the driver above"
    return f"{busy}; JAX_PLATFORMS={platform if platform == 'tpu' else 'cuda'} makes jax say why"


def _tpu_environment(facts: Facts) -> Iterator[Row]:
    named = {name: value for name, value in sorted(facts.environment.items()) if name.startswith("TPU_")}
    if facts.platform == "tpu" and named:
        yield Row(name="TPU environment", text=", ".join(f"{name}={value}" for name, value in named.items()))


def memory(facts: Facts, accelerator: Accelerator | None) -> Iterator[Row]:
    """Memory that programs may use, compared with what plans assume, and whether other processes use some."""
    whole, free = facts.memory
    yield Row(name="host", unit="GiB", measured=whole / GIB, text=f"{free / GIB:.1f} GiB of it free")
    limits = [device.limit for device in facts.devices if device.limit]
    if not limits:
        return
    assumed = accelerator and accelerator.hbm_bytes / GIB
    way_out = "another process holds memory, or XLA_CLIENT_MEM_FRACTION gives jax less"
    yield rate("usable by jax", "GiB", min(limits) / GIB, assumed, least=LEAST_MEMORY, way_out=way_out)
    total = _total(facts, accelerator)
    if total:
        yield Row(name="reserved", unit="GiB", measured=(total - min(limits)) / GIB, text="not for arrays")
    for number, gpu in enumerate(facts.smi or ()):
        if gpu.used > OTHERS_BYTES:
            problem = f"{gpu.used / GIB:.1f} GiB were in use before jax started; end the processes of nvidia-smi"
            yield Row(name=f"GPU {number}", text=gpu.name, problem=problem)


def _total(facts: Facts, accelerator: Accelerator | None) -> int:
    if facts.smi:
        return facts.smi[0].total
    if accelerator is None:
        return 0
    if accelerator.generation in GPUS:
        return GPUS[accelerator.generation].memory
    return int((chip_constants(accelerator.generation) or {}).get("hbm_bytes", 0))


def _visible(environment: Mapping[str, str], there: int, *names: str) -> int:
    """How many of the devices the environment variables leave visible."""
    given = next((environment[name] for name in names if name in environment), None)
    return there if given is None else min(there, len([each for each in given.split(",") if each.strip()]))
