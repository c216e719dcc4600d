"""The subject of a diagnosis: a machine's facts, what plans assume of it, and how large its probes are."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from podium.accelerators import GIB, Accelerator, Kernels, kernels_on, recognise
from podium.doctor.diagnosis import Row
from podium.doctor.facts import Facts, ask
from podium.doctor.kernel_cases import EMULATED, QUICK, THOROUGH, KernelShapes
from podium.doctor.system import System
from podium.models.architecture import DecoderConfig
from podium.models.files.hf_config import from_hf_config
from podium.plan.calibration import Chip, load_chip

MIB = 2**20


def smollm2(layers: int = 30, vocab: int = 49_152) -> DecoderConfig:
    """The shape of SmolLM2-135M, or of a smaller version."""
    described = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": 576,
        "num_hidden_layers": layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "rope_theta": 1e5,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    return from_hf_config(described, "SmolLM2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the probes compute."""

    product: int  # rows and columns of the products
    array_bytes: int  # of the array that is read, copied and sent
    calls: int  # calls of a round, of which an accelerator has many in flight
    disk_bytes: int
    kernels: KernelShapes
    decoder: DecoderConfig
    slots: int
    new_tokens: int  # of each completion
    row_tokens: int
    rows_per_device: int


TINY = Sizes(
    product=64,
    array_bytes=MIB,
    calls=1,
    disk_bytes=MIB,
    kernels=EMULATED,
    decoder=smollm2(layers=1, vocab=512),
    slots=4,
    new_tokens=4,
    row_tokens=96,
    rows_per_device=1,
)
"""Sizes for tests."""
CPU = dataclasses.replace(
    TINY,
    product=2048,
    array_bytes=256 * MIB,
    disk_bytes=256 * MIB,
    decoder=smollm2(),
    slots=8,
    new_tokens=16,
    row_tokens=128,
    rows_per_device=2,
)
ACCELERATOR = Sizes(
    product=8192,
    array_bytes=GIB,
    calls=10,
    disk_bytes=GIB,
    kernels=QUICK,
    decoder=smollm2(),
    slots=64,
    new_tokens=128,
    row_tokens=512,
    rows_per_device=8,
)
FULL = dataclasses.replace(
    ACCELERATOR,
    disk_bytes=8 * GIB,
    kernels=THOROUGH,
    slots=512,
    new_tokens=256,
    row_tokens=1024,
    rows_per_device=16,
)
"""The sizes that an H100 was measured with."""
FULL_CPU = dataclasses.replace(CPU, slots=32, new_tokens=64, row_tokens=512, disk_bytes=GIB)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A machine to examine."""

    system: System
    facts: Facts
    sizes: Sizes
    runs_dir: Path
    accelerator: Accelerator | None
    """This host's devices in the table of accelerators; None: a CPU, or devices that are not in it."""
    chip: Chip | None
    """The constants that plans assume for a device; None if unknown."""

    @property
    def platform(self) -> str:
        """The jax platform."""
        return self.facts.platform

    @property
    def kernels(self) -> Kernels:
        """The kind of kernels that the devices run."""
        return kernels_on(self.platform, self.facts.devices[0].capability)


class Probe(Protocol):
    """A part of the examination: yields one row per fact or measurement."""

    def __call__(self, subject: Subject, /) -> Iterable[Row]:
        """Examine the machine."""
        ...


def make_subject(system: System, sizes: Sizes | None, runs_dir: Path, *, full: bool = False) -> Subject:
    """Find out about a machine; `sizes` None: choose sizes that suit it."""
    facts = ask(system)
    kinds = [device.kind for device in facts.devices]
    accelerator = recognise(kinds[0], len(kinds)) if kinds else None
    on_cpu = facts.platform in ("cpu", "")
    suiting = (FULL_CPU if full else CPU) if on_cpu else (FULL if full else ACCELERATOR)
    return Subject(
        system=system,
        facts=facts,
        sizes=sizes or suiting,
        runs_dir=runs_dir,
        accelerator=accelerator,
        chip=None if accelerator is None else load_chip(accelerator.generation),
    )
