"""One run on several hosts: a process on each, which all do the same but for their own share of the rollout.

Settings, prompts and seeds are the same everywhere, so every process computes the same prompts, the same batch and the
same decisions; updates are one program over the mesh of all devices. Completions are made by each host for its share of
the prompts, on its own devices and at its own pace, and handed to all. Process 0 alone writes what is shared.
"""

import contextlib
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
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from podium.job.cluster import Cluster, check_devices
from podium.job.context import JobContext
from podium.models.architecture import DecoderConfig
from podium.models.params import TRAIN_AXES, param_specs
from podium.sharding import Params, ShardingRules, param_shardings
from podium.train.platform import prepare_platform
from podium.train.signals import StopSignal

INITIALIZATION_S, HEARTBEAT_S = 120, 30
SHUTDOWN_S = 300
"""How long processes that are done wait for the last: process 0 first hands its metrics over, perhaps for a minute."""
CLEAN_UP_S = 10.0
"""How long a process that failed may take to close its files: the others wait for it."""
LEADER_S = 24 * 3600
"""How long the others wait for what process 0 makes: it may read from far. CPU's collectives would meet for 30 s."""
SMALLEST_MESSAGE = 4096  # bytes; messages are padded to powers of two, so that few programs are compiled
STOP_KEY = "podium/stop/signal"
POLL_S = 1.0
"""Between two requests to the coordinator, whether a signal came to another process."""
Value = TypeVar("Value")
_TURNS = itertools.count()


@contextlib.contextmanager
def joined(job: JobContext) -> Iterator[None]:
    """The processes of a job know each other inside; an exception ends this process at the end of the block.

    It cannot go further: jax would wait for the others, and abort without the exit status.
    """
    if job.cluster is None:
        yield
        return
    if job.guard is not None:
        job.guard.close()  # jax takes its port
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
    """An exception inside is recorded at once, and what then closes has little time: the others hang meanwhile."""
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
    """Whether this process writes what is shared."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def gather(value: Value) -> list[Value]:
    """What each process gives, in their order, for all; every process must call it. Any size, exact."""
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
    """The largest `memory_stats` figure of that name over this process's devices; None where they do not say (CPU)."""
    stats = [found for device in jax.local_devices() if (found := device.memory_stats())]
    return max(each[name] for each in stats) if stats else None


def from_leader(make: Callable[[], Value]) -> Value:
    """What process 0 makes, for all; what it raises for a user to mend is raised in all."""
    if not jax.distributed.is_initialized():
        return make()
    made: tuple[Any, Exception | None] = (None, None)
    if is_leader():
        try:
            made = (make(), None)
        except (ValueError, OSError) as error:
            made = (None, error)
    _client().wait_at_barrier(f"podium/leader/{next(_TURNS)}", 1000 * LEADER_S)
    value, error = gather(made)[0]
    if error is not None:
        raise error
    return value  # pyright: ignore[reportReturnType]  # None only beside an error


def share(count: int) -> slice:
    """The contiguous share of this process in a number of items; shares differ by at most one."""
    hosts, host = (jax.process_count(), jax.process_index()) if jax.distributed.is_initialized() else (1, 0)
    return slice(count * host // hosts, count * (host + 1) // hosts)


def on_host(x: jax.Array) -> np.ndarray:
    """A global array as numpy's, whole on every host; every process must call it."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def host_mesh(mesh: Mesh) -> Mesh:
    """The part of a mesh that is this host's: its axes with the sizes that they have here; alone, the mesh itself."""
    here = [device.process_index == jax.process_index() for device in mesh.devices.flat]
    if all(here):
        return mesh
    indices = np.argwhere(np.array(here).reshape(mesh.devices.shape))
    box = tuple(slice(low, high + 1) for low, high in zip(indices.min(0), indices.max(0), strict=True))
    devices = mesh.devices[box]
    if devices.size != len(indices):
        raise ValueError(
            f"mesh {dict(mesh.shape)}: a host's devices are not a box in it, so that a host cannot roll out by itself;"
            " set mesh to auto, or to sizes of which tp, or tp and a part of fsdp, fill a host"
        )
    return Mesh(devices, mesh.axis_names)


def make_localize(decoder: DecoderConfig, mesh: Mesh, local: Mesh, dtype: jnp.dtype) -> Callable[[Params], Params]:
    """The function `params on the mesh of all hosts -> the whole model, split over this host's part of it`.

    Any of the model's parameters can be moved, the others stay. What is trained whole is cast to `dtype` before it
    travels; adapters and what is frozen travel as they are. Where both meshes are one, nothing does.
    """
    if local is mesh:
        return lambda params: params
    specs = param_specs(decoder)
    on_local = param_shardings(specs, ShardingRules(local, TRAIN_AXES))
    hosts = mesh.size // local.size
    # every host's box side by side, in the mesh's own order of devices, which is that of the hosts
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
    """The rollout was given up because the run is to stop now; raised in all processes of the run."""


class AgreedStop:
    """Whether the run is to stop, as all its processes know it: a signal comes to one of them, at any time.

    jax has a point of agreement of its own, but it counts calls, and hosts that roll out at their own pace make
    different numbers of them. Here the process that gets the signal posts it with the coordinator, which the others
    poll; all agree where they exchange their completions.
    """

    def __init__(self, signals: StopSignal) -> None:
        """Nothing is requested yet; `signals` are those of this process."""
        self._signals = signals
        self._agreed: int | None = None
        self._posted: int | None = None
        self._polled = time.monotonic()

    @property
    def requested(self) -> int | None:
        """Number of the signal by which the run is to stop, the same in all processes; None: it goes on."""
        return self._agreed if jax.distributed.is_initialized() else self._signals.requested

    @property
    def exit_code(self) -> int:
        """What the process exits with: 130 after Ctrl-C, 143 after SIGTERM, 0 if nothing was requested."""
        return 128 + self.requested if self.requested else 0

    def poll(self) -> None:
        """Raises Interrupted if SIGTERM came, here or to another process; to be called often while rolling out."""
        number = self._signals.requested
        if jax.distributed.is_initialized():
            number = self._poll_others(number)
        if number == signal.SIGTERM:
            raise Interrupted

    def asked(self) -> int | None:
        """The signal that this process knows of, to be exchanged with the others' before `agree`."""
        return self._signals.requested or self._posted

    def agree(self, asked: Sequence[int | None]) -> None:
        """Settle on the first of what all processes asked, in their order."""
        self._agreed = next((number for number in asked if number is not None), self._agreed)

    def _poll_others(self, number: int | None) -> int | None:
        """The first signal that came to any process, as far as it is known here."""
        client = _client()
        if number is not None and self._posted is None:
            self._posted = number
            client.key_value_set(STOP_KEY, str(int(number)), allow_overwrite=True)
        if self._posted is None and time.monotonic() - self._polled > POLL_S:
            self._polled = time.monotonic()
            found = client.key_value_dir_get(STOP_KEY.rpartition("/")[0])
            self._posted = int(found[0][1]) if found else None
        return self._posted


def _client() -> Any:
    """The connection of jax to the coordinator, which keeps small values for all processes."""
    from jax._src import distributed  # no public name leads to it

    return distributed.global_state.client


def _initialize(cluster: Cluster) -> None:
    """Start jax's service and check that it found what the cluster has."""
    prepare_platform()
    # its handler of SIGTERM hides the signal from Python's; `AgreedStop` and `gather` agree on ours
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
        cluster, processes=jax.process_count(), devices=jax.device_count(), local_devices=jax.local_device_count()
    )
