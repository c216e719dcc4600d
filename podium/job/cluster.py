"""Finds the processes of a job: from our launcher's variables, jax's variables, or a TPU machine's metadata.

Imports only the standard library and the table of accelerators, because it runs before anything slow.
"""

import contextlib
import dataclasses
import glob
import os
import socket
import urllib.request
from collections.abc import Mapping

from podium.accelerators import find_accelerator

COORDINATOR_PORT = 8476  # opened by Google's automatic firewall rule, unlike jax's default, 8482 (jax#35905)
LAUNCHERS = (
    ("PODRUN_WORKER", "PODRUN_WORKERS", "PODRUN_COORDINATOR"),
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"),
)
"""Variables of our launcher, and jax's own: index of this process, number of processes, HOST:PORT of process 0."""
METADATA = "metadata.google.internal"
METADATA_S = 2.0
CHIPS = ("/dev/accel*", "/dev/vfio/[0-9]*")


class ClusterError(ValueError):
    """The processes of a job do not match what its environment requires."""

    exit_status = 78


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes of a job, one per host, and the index of this one."""

    worker: int
    workers: int
    coordinator: str
    """HOST:PORT of worker 0, where the guard and then jax listen."""
    accelerator: str | None = None
    """Type of the slice, such as v6e-16; None if unknown."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host, int(port)


def find_cluster(environ: Mapping[str, str]) -> Cluster | None:
    """Find the processes of this job; None if this is the only one.

    Raises:
        ClusterError: the variables contradict each other, or REQUIRE_MULTIHOST, REQUIRE_JAX_PROCESS_COUNT or the
            accelerator's number of hosts require another number of processes.
    """
    names = next((names for names in LAUNCHERS if names[1] in environ), None)
    cluster = _from_variables(environ, names) if names else from_metadata(environ)
    workers = cluster.workers if cluster else 1
    _check_required(environ, workers)
    _check_hosts(cluster.accelerator if cluster else environ.get("PODRUN_ACCELERATOR"), workers)
    return cluster if workers > 1 else None


def from_metadata(environ: Mapping[str, str]) -> Cluster | None:
    """Read the slice of this TPU virtual machine from Google's metadata server; None on any other machine."""
    if environ.get("TPU_SKIP_MDS_QUERY") or not any(glob.glob(pattern) for pattern in CHIPS):
        return None
    server = environ.get("GCE_METADATA_IP", METADATA)
    try:
        accelerator = read_metadata(server, "attributes/accelerator-type")
        worker = read_metadata(server, "attributes/agent-worker-number")
        endpoints = read_metadata(server, "attributes/worker-network-endpoints")
        addresses = [endpoint.split(":")[2] for endpoint in endpoints.split(",")]
        coordinator = f"{addresses[0]}:{environ.get('JAX_COORDINATOR_PORT', COORDINATOR_PORT)}"
        return Cluster(worker=int(worker), workers=len(addresses), coordinator=coordinator, accelerator=accelerator)
    except (OSError, ValueError, IndexError):
        return None


def check_devices(cluster: Cluster, *, processes: int, devices: int, local_devices: int, slices: int) -> None:
    """Raise ClusterError if jax found other processes or devices than the cluster and its accelerator have."""
    if processes != cluster.workers:
        raise ClusterError(f"jax has {processes} processes and the job has {cluster.workers} workers; start it again")
    if devices != local_devices * processes:
        raise ClusterError(
            f"worker {cluster.worker} has {local_devices} devices of {devices} and there are {processes} workers;"
            " all must have the same number: a chip is missing, or another process has it"
        )
    if cluster.accelerator is None:
        return
    accelerator = find_accelerator(cluster.accelerator)
    expected = accelerator.devices_per_host
    if local_devices != expected:
        raise ClusterError(
            f"worker {cluster.worker} has {local_devices} devices and a host of {cluster.accelerator} has {expected};"
            " a chip is missing, or another process has it"
        )
    if accelerator.platform == "tpu" and slices != accelerator.slices:
        raise ClusterError(
            f"jax has {slices} slices and {cluster.accelerator} has {accelerator.slices}; set MEGASCALE_NUM_SLICES,"
            " MEGASCALE_SLICE_ID and MEGASCALE_COORDINATOR_ADDRESS in all processes, as podium pod k8s does"
        )


def _from_variables(environ: Mapping[str, str], names: tuple[str, str, str]) -> Cluster:
    accelerator = environ.get("PODRUN_ACCELERATOR")
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise ClusterError(f"{names[1]} is set and {missing[0]} is not; set {', '.join(names)}, or none of them")
    worker, workers, coordinator = (environ[name] for name in names)
    host, _, port = coordinator.rpartition(":")
    rules = (
        (workers.isdecimal() and int(workers) >= 1, f"{names[1]} is {workers!r}; it must be the number of workers"),
        (worker.isdecimal(), f"{names[0]} is {worker!r}; it must be the index of this worker, from 0"),
        (bool(host) and port.isdecimal(), f"{names[2]} is {coordinator!r}; write HOST:{COORDINATOR_PORT}, of worker 0"),
    )
    for holds, message in rules:
        if not holds:
            raise ClusterError(message)
    if int(worker) >= int(workers):
        raise ClusterError(f"{names[0]} is {worker} and {names[1]} is {workers}; workers are counted from 0")
    return Cluster(worker=int(worker), workers=int(workers), coordinator=coordinator, accelerator=accelerator)


def _check_required(environ: Mapping[str, str], workers: int) -> None:
    """Check REQUIRE_MULTIHOST and REQUIRE_JAX_PROCESS_COUNT, variables of Podium's predecessor."""
    way_out = "start the same command on all workers (--worker=all)"
    if environ.get("REQUIRE_MULTIHOST") in ("1", "true") and workers == 1:
        raise ClusterError(f"REQUIRE_MULTIHOST is set and this process is alone; {way_out}")
    required = environ.get("REQUIRE_JAX_PROCESS_COUNT") or "0"
    if not required.isdecimal():
        raise ClusterError(f"REQUIRE_JAX_PROCESS_COUNT is {required!r}; it must be a number of processes")
    if int(required) not in (0, workers):
        raise ClusterError(f"REQUIRE_JAX_PROCESS_COUNT is {required} and this job has {workers}; {way_out}")


def _check_hosts(accelerator: str | None, workers: int) -> None:
    """Raise ClusterError unless the job's processes make up whole slices."""
    if accelerator is None:
        return
    try:
        hosts = find_accelerator(accelerator).hosts
    except ValueError as error:
        raise ClusterError(str(error)) from None
    if workers % hosts:
        raise ClusterError(
            f"{accelerator} has {hosts} hosts and this job has {workers} workers;"
            " start the same command on all workers (--worker=all)"
        )


def read_metadata(server: str, key: str, timeout_s: float = METADATA_S) -> str:
    """Read one key of a virtual machine's metadata. Raises OSError without a metadata server or without the key."""
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/{key}", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout_s) as reply:
        return reply.read().decode().strip()


def local_worker(addresses: tuple[str, ...]) -> int | None:
    """The index of the one address that belongs to this host; None if no address or several belong to this host."""
    local = []
    for index, address in enumerate(addresses):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((address, 0))
            local.append(index)
    return local[0] if len(local) == 1 else None


def chips() -> int:
    """The number of TPU chips of this host, by their device files."""
    return max(len([path for path in glob.glob(pattern) if os.path.exists(path)]) for pattern in CHIPS)
