"""Runs on several hosts, with one process each: all do the same work, but each rolls out its own share of the prompts.

Settings, prompts and seeds are the same everywhere, so all processes compute the same batches and decisions; an update
is one program over the mesh of all devices. Each host samples completions for its share of the prompts on its own
devices, at its own pace, and sends them to all others. Only process 0 writes shared files.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from podium.hosts.platform import prepare_platform
from podium.hosts.signals import StopSignal
from podium.job.cluster import Cluster, check_devices
from podium.job.job_context import JobContext
from podium.models.architecture import DecoderConfig
from podium.models.params import TRAIN_AXES, param_specs
from podium.patience import PATIENCE_S
from podium.sharding import Params, ShardingRules, param_shardings, slice_of

INITIALIZATION_S, HEARTBEAT_S = 120, 30
SHUTDOWN_S = 300 + round(PATIENCE_S)
"""Seconds that finished processes wait for the last one; process 0 uploads its metrics, and may wait for its bucket."""
CLEAN_UP_S = 10.0
"""Seconds that a failed process may take to close its files while the others wait for it."""
LEADER_S = 24 * 3600
"""Seconds that the others wait for a value from process 0, which may be reading from a bucket. Collectives on CPU would
time out after 30 s."""
SMALLEST_MESSAGE = 4096  # bytes; messages are padded to powers of two, so that few programs are compiled
STOP_KEY = "podium/stop/signal"
POLL_S = 1.0
"""Seconds between two queries to the coordinator for signals that other processes received."""
Value = TypeVar("Value")
_TURNS = itertools.count()


@contextlib.contextmanager
def joined(job: JobContext) -> Iterator[None]:
    """Connect the processes of a job inside the block; an exception that leaves the block ends the process.

    The exception must not propagate: jax would wait for the other processes and then abort without the exit status.
    """
    if job.cluster is None:
        yield
        return
    if job.guard is not None:
        job.guard.close()  # jax needs its port
    _initialize(job.cluster)
    try:
        yield
        jax.distributed.shutdown()  # waits for all
    except BaseException as error:
        status = job.report.failed(error)
        traceback.print_exception(error)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)


@contextlib.contextmanager
def failing_fast(job: JobContext) -> Iterator[None]:
    """Record an exception immediately, and limit the time for cleanup, during which the other processes hang."""
    try:
        yield
    except BaseException as error:
        status = job.report.failed(error)
        if job.cluster is not None:
            end = threading.Timer(CLEAN_UP_S, os._exit, (status,))
            end.daemon = True
            end.start()
        raise


def is_leader() -> bool:
    """Whether this process writes the shared files."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def gather(value: Value) -> list[Value]:
    """All-gather a picklable value of any size: the values of all processes, in order. Every process must call this."""
    if not jax.distributed.is_initialized():
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    size = np.array(divmod(len(data), 2**32), np.uint32)  # high and low half: jax has no 64-bit integers
    sizes = [(int(high) << 32) + int(low) for high, low in multihost_utils.process_allgather(size)]
    message = np.zeros(max(SMALLEST_MESSAGE, 1 << (max(sizes) - 1).bit_length()), np.uint8)
    message[: len(data)] = data
    messages = np.asarray(multihost_utils.process_allgather(message))  # [processes, bytes]
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(messages, sizes, strict=True)]


def local_memory(name: str) -> int | None:
    """The maximum of a `memory_stats` entry over this process's devices; None if devices do not report it (CPU)."""
    stats = [found for device in jax.local_devices() if (found := device.memory_stats())]
    return max(each[name] for each in stats) if stats else None


@dataclasses.dataclass(frozen=True)
class _Made(Generic[Value]):
    """A value made on process 0, or the error that occurred instead."""

    value: Value


def from_leader(make: Callable[[], Value]) -> Value:
    """Run `make` on process 0 and return its value on all; a ValueError or OSError there is raised on all."""
    if not jax.distributed.is_initialized():
        return make()
    made: _Made[Value] | Exception | None = None  # None: on the other processes
    if is_leader():
        try:
            made = _Made(make())
        except (ValueError, OSError) as error:
            made = error
    _client().wait_at_barrier(f"podium/leader/{next(_TURNS)}", 1000 * LEADER_S)
    found = gather(made)[0]
    if isinstance(found, Exception):
        raise found
    assert found is not None, "process 0 is the leader"
    return found.value


def share(count: int) -> slice:
    """The current process's contiguous share of `count` items; shares differ by at most one item."""
    hosts, host = (jax.process_count(), jax.process_index()) if jax.distributed.is_initialized() else (1, 0)
    return slice(count * host // hosts, count * (host + 1) // hosts)


def on_host(x: jax.Array) -> np.ndarray:
    """Copy a global array to numpy, complete on every host; all processes must call this."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def host_mesh(mesh: Mesh) -> Mesh:
    """The current host's part of a mesh, with the same axis names; with a single host, the mesh itself."""
    here = [device.process_index == jax.process_index() for device in mesh.devices.flat]
    if all(here):
        return mesh
    indices = np.argwhere(np.array(here).reshape(mesh.devices.shape))
    box = tuple(slice(low, high + 1) for low, high in zip(indices.min(0), indices.max(0), strict=True))
    devices = mesh.devices[box]
    if devices.size != len(indices):
        raise ValueError(
            f"mesh {dict(mesh.shape)}: the devices of a host do not form a box in it, so it cannot roll out"
            " alone; set mesh to auto, or to sizes of which tp, or tp and a part of fsdp, fill a host"
        )
    return Mesh(devices, mesh.axis_names)


def make_localize(decoder: DecoderConfig, mesh: Mesh, local: Mesh, dtype: jnp.dtype) -> Callable[[Params], Params]:
    """Make the function `params on the global mesh -> the same params, complete within this host, on its part of it`.

    The function accepts any subset of the parameters. In full training they are cast to `dtype` before they are sent;
    with LoRA, adapters and frozen weights are sent unchanged. If both meshes are the same, it is the identity.
    """
    if local is mesh:
        return lambda params: params
    specs = param_specs(decoder)
    on_local = param_shardings(specs, ShardingRules(local, TRAIN_AXES))
    hosts = mesh.size // local.size
    # all hosts' boxes side by side; the mesh orders its devices by host
    devices = np.array(list(mesh.devices.flat), dtype=object).reshape(hosts, *local.devices.shape)
    side_by_side = Mesh(devices, ("hosts", *mesh.axis_names))
    everywhere = {name: NamedSharding(side_by_side, sharding.spec) for name, sharding in on_local.items()}

    def copy(params: Params) -> Params:
        return {name: value.astype(dtype) if decoder.lora is None else value for name, value in params.items()}

    @functools.cache
    def gathering(names: frozenset[str]) -> Callable[[Params], Params]:
        return jax.jit(copy, out_shardings={name: everywhere[name] for name in names})

    def localize(params: Params) -> Params:
        return {
            name: jax.make_array_from_single_device_arrays(
                value.shape, on_local[name], [shard.data for shard in value.addressable_shards]
            )
            for name, value in gathering(frozenset(params))(params).items()
        }

    return localize


class Interrupted(Exception):
    """The rollout was abandoned because the run must stop now; raised in all processes of the run."""


class HostFailedError(Exception):
    """Another process of the run failed; its own record says why. Raised in all others, at the same place."""

    kind = "lost"


class AgreedStop:
    """Lets all processes of a run agree to stop when one of them receives a signal, at any time.

    jax's own synchronisation point counts calls, and hosts that roll out at their own pace make different numbers of
    calls. Here the process that receives the signal posts it to the coordinator, which the others poll; all agree when
    they exchange their completions.
    """

    def __init__(self, signals: StopSignal) -> None:
        """Start without a requested stop; `signals` are the stop signals of this process."""
        self._signals = signals
        self._agreed: int | None = None
        self._posted: int | None = None
        self._together = False
        self._polled = time.monotonic()

    @property
    def leaving_together(self) -> bool:
        """Whether all processes are leaving the loop at the same place, so that they can save a step together."""
        return self._together or not jax.distributed.is_initialized()

    def exchange(self, value: Value, failed: Exception | None = None) -> tuple[list[Value], list[int | None]]:
        """All-gather a value of each process, and the signals that they know, in order. Every process must call this.

        `failed` is this process's error, if any: it is raised here, and HostFailedError in the other processes.
        """
        text = None if failed is None else f"{type(failed).__name__}: {failed}"
        hosts = gather((value, self._signals.requested or self._posted, text))
        broken = next(((host, text) for host, (_, _, text) in enumerate(hosts) if text is not None), None)
        if broken is not None:
            self.leave_together()
            raise failed or HostFailedError(f"worker {broken[0]} failed: {broken[1]}")
        return [value for value, _, _ in hosts], [asked for _, asked, _ in hosts]

    def leave_together(self) -> None:
        """Record that all processes are about to raise an error at the same place."""
        self._together = True

    @property
    def requested(self) -> int | None:
        """Number of the signal that stops the run, the same in all processes; None while it continues."""
        return self._agreed if jax.distributed.is_initialized() else self._signals.requested

    @property
    def exit_code(self) -> int:
        """Exit status of the process: 130 after Ctrl-C, 143 after SIGTERM, 0 if no stop was requested."""
        return 128 + self.requested if self.requested else 0

    def poll(self) -> None:
        """Raise Interrupted if this or another process has received SIGTERM; call it often during a rollout."""
        number = self._signals.requested
        if jax.distributed.is_initialized():
            number = self._poll_others(number)
        if number == signal.SIGTERM:
            raise Interrupted

    def agree(self, asked: Sequence[int | None]) -> None:
        """Agree on the first signal among those known to the processes, in their order."""
        self._agreed = next((number for number in asked if number is not None), self._agreed)

    def _poll_others(self, number: int | None) -> int | None:
        """The first signal received by any process, as far as this process knows."""
        client = _client()
        if number is not None and self._posted is None:
            self._posted = number
            client.key_value_set(STOP_KEY, str(int(number)), allow_overwrite=True)
        if self._posted is None and time.monotonic() - self._polled > POLL_S:
            self._polled = time.monotonic()
            found = client.key_value_dir_get(STOP_KEY.rpartition("/")[0])
            self._posted = int(found[0][1]) if found else None
        return self._posted


class _Coordinator(Protocol):
    """The part of jax's coordinator client that this module uses: a key-value store shared by all processes."""

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None: ...

    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


def _client() -> _Coordinator:
    from jax._src import distributed  # there is no public API for it

    client = distributed.global_state.client
    assert client is not None, "jax.distributed is initialized"
    return client


def _initialize(cluster: Cluster) -> None:
    """Start jax.distributed and check that it sees the cluster's processes and devices."""
    prepare_platform()
    # its SIGTERM handler would hide the signal from Python; `AgreedStop` and `gather` handle it instead
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.workers,
        cluster.worker,
        initialization_timeout=INITIALIZATION_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=SHUTDOWN_S,
        coordinator_bind_address=cluster.coordinator,
    )
    check_devices(
        cluster,
        processes=jax.process_count(),
        devices=jax.device_count(),
        local_devices=jax.local_device_count(),
        slices=len({slice_of(device) for device in jax.devices()}),
    )
