"""Measures the rates of a roofline (products, memory, links between devices and to the host), and the disk."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podium.doctor.benchmarks.timing import (
    copy_rate,
    fastest_s,
    from_device_rate,
    product_rate,
    read_rate,
    to_device_rate,
)
from podium.doctor.diagnosis import Row, rate, seconds
from podium.doctor.machine_subject import Subject
from podium.files import in_bucket
from podium.hlo.cost import roofline, walk
from podium.hlo.hlo_text import parse
from podium.plan.calibration import calibrated

TERA = 1e12
GIGA = 1e9
MEGA = 1e6
LEAST_RATE = 0.6
"""Share of a published rate below which a device is slow. An H100 reached 0.70 (products) and 0.81 (copies)."""
MOST_TRANSFER = 2.0
DISK_RATE, LEAST_DISK = 200 * MEGA, 0.5
"""Bytes per second at which a 3B model's checkpoint of 36 GB takes three minutes, and the share of it that is
enough."""
SYNC_BYTES = 4096
SYNC_S, MOST_SYNC = 0.02, 10.0
"""Expected seconds of a small synchronised write, and how many times as long is a problem: each step makes a few."""
LINK = "link"
"""Mesh axis of all devices of this host."""


def products(subject: Subject) -> Iterator[Row]:
    """Square products of each number format, compared with the published peak."""
    peaks, sizes = subject.chip and subject.chip.peaks, subject.sizes
    known = {"bfloat16": peaks and peaks.flops_bf16, "float32": peaks and peaks.flops_f32, "int8": None}
    way_out = "the clock may be throttled, or another process uses the device; run it again when nothing else runs"
    for name, assumed in known.items():
        found = product_rate(jnp.dtype(name), sizes.product, calls=sizes.calls) / TERA
        yield rate(name, "TFLOP/s", found, assumed and assumed / TERA, least=LEAST_RATE, way_out=way_out)


def bandwidth(subject: Subject) -> Iterator[Row]:
    """Reading and copying a large array, compared with the published bandwidth."""
    sizes, assumed = subject.sizes, subject.chip and subject.chip.peaks.hbm_bandwidth / GIGA
    way_out = "another process may use the device; run it again when nothing else runs"
    for name, measure in (("read", read_rate), ("copy", copy_rate)):
        found = measure(sizes.array_bytes, calls=sizes.calls) / GIGA
        yield rate(name, "GB/s", found, assumed, least=LEAST_RATE, way_out=way_out)


def host_link(subject: Subject) -> Iterator[Row]:
    """Measure copies between host memory and a device."""
    if subject.platform == "cpu":
        yield Row(name="host to device", text="skipped: a CPU's memory is the host's")
        return
    chip = subject.chip
    assumed = chip and chip.peaks.host_bandwidth * chip.calibration["host"].value / GIGA
    least = chip.calibration["host"].low / chip.calibration["host"].value if chip else 0.0
    way_out = "the slot may have fewer lanes than the device; offloading would take longer than planned"
    for name, measure in (("host to device", to_device_rate), ("device to host", from_device_rate)):
        yield rate(name, "GB/s", measure(subject.sizes.array_bytes) / GIGA, assumed, least=least, way_out=way_out)


def links(subject: Subject) -> Iterator[Row]:
    """Collectives over all devices of this host, compared with the planned time of their compiled programs."""
    devices = jax.local_devices()
    if len(devices) == 1:
        yield Row(name="collectives", text="skipped: there is one device")
        return
    mesh = Mesh(np.asarray(devices), (LINK,))
    size = max(1, subject.sizes.array_bytes // 4 // len(devices) ** 2) * len(devices) ** 2
    split = jax.device_put(jnp.zeros(size, jnp.float32), NamedSharding(mesh, PartitionSpec(LINK)))
    way_out = "a link may be down: look at nvidia-smi topo -m, or rent another machine"
    for name, collective in COLLECTIVES.items():
        program = jax.jit(
            jax.shard_map(collective, mesh=mesh, in_specs=PartitionSpec(LINK), out_specs=PartitionSpec(LINK))
        )
        compiled = program.lower(split).compile()
        measured = fastest_s(compiled, split, calls=subject.sizes.calls)
        assumed = _assumed_s(subject, compiled.as_text() or "", len(devices))
        yield seconds(name, "ms", 1e3 * measured, assumed and 1e3 * assumed, most=MOST_TRANSFER, way_out=way_out)


def _gather(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, LINK, tiled=True)


def _scatter(x: jax.Array) -> jax.Array:
    return jax.lax.psum_scatter(x, LINK, tiled=True)


def _exchange(x: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(x, LINK, 0, 0, tiled=True)


COLLECTIVES: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "all-gather": _gather,
    "reduce-scatter": _scatter,
    "all-to-all": _exchange,
}


def _assumed_s(subject: Subject, text: str, devices: int) -> float | None:
    """Planned seconds of a compiled program; None for devices that the planner does not know."""
    chip, accelerator = subject.chip, subject.accelerator
    if chip is None or accelerator is None or accelerator.devices != devices:
        return None
    links = max(1, accelerator.ici_links if accelerator.torus else chip.links)
    cost = walk(parse(text), {LINK: devices})
    found, _ = calibrated([(1.0, roofline(cost, chip.peaks, links=links))], chip, "decode")
    return found.value


def disk(subject: Subject) -> Iterator[Row]:
    """Writing a file where runs are stored, until it is on the disk."""
    if in_bucket(subject.runs_dir):
        yield Row(name=str(subject.runs_dir), text="skipped: a bucket; podium train checks that it can be written")
        return
    folder = _existing(subject.runs_dir.absolute())
    way_out = "write runs to a faster disk with runs_dir"
    try:
        took = subject.system.write_s(folder, subject.sizes.disk_bytes)
        sync = subject.system.write_s(folder, SYNC_BYTES)
    except OSError as error:
        yield Row(name=str(folder), problem=f"cannot be written: {error.strerror}; set runs_dir to a folder that can")
        return
    found = subject.sizes.disk_bytes / took / MEGA
    yield Row(name="free", unit="GB", measured=subject.system.free(folder) / GIGA, text=str(folder))
    yield rate("write", "MB/s", found, DISK_RATE / MEGA, least=LEAST_DISK, way_out=way_out)
    yield seconds("small file", "ms", 1e3 * sync, 1e3 * SYNC_S, most=MOST_SYNC, way_out=way_out)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.is_dir())
