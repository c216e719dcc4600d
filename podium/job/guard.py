"""The launch guard: all workers of a job are there, once each and alike, before jax is started. Standard library only.

jax alone waits for minutes where a worker is missing and then names nobody, lets a second copy of a worker kill the
healthy job, and does not notice other settings or versions at all. Here the workers meet at worker 0, at the port that
jax takes afterwards, before anything heavy is imported:

    worker k -> worker 0   {"worker": k, "workers": N, "host": ...}      at once: I am here
    worker k -> worker 0   {"identity": {...}}                           when its settings are read
    worker 0 -> worker k   {"file": ...}                                 with a nonce, in the runs' folder
    worker k -> worker 0   {"nonce": ...}                                as worker k reads it there
    worker 0 -> worker k   {"problems": [...]}                           none: go
"""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from podium.job.cluster import Cluster, ClusterError

ARRIVAL_S = 6.0
"""How long after one worker's arrival the next may come."""
ANSWER_S = 60.0
"""How long a worker that is there may take to read its settings."""
HELLO_S = 2.0
"""How long a connection may take to say who it is."""
SHARED_S = 3.0
"""How long a file may take to be seen on another host."""
RETRY_S = 0.1
SHOWN = 3  # differences of a worker

Message = dict[str, Any]


class GuardError(ClusterError):
    """The workers of a job are not all there, once each and alike."""


class Guard:
    """A worker's side of the meeting: announces it when made, and `agree` says whether the job may begin."""

    def __init__(self, cluster: Cluster, *, arrival_s: float = ARRIVAL_S) -> None:
        """Says to worker 0 that this worker is there; worker 0 itself begins to listen.

        Raises:
            GuardError: worker 0 cannot be reached, or this is worker 0 and cannot listen.
        """
        self.cluster, self._arrival_s = cluster, arrival_s
        self._server: socket.socket | None = None
        self._leader: _Peer | None = None
        if cluster.worker == 0:
            self._server = _listen(cluster)
        else:
            self._leader = _connect(cluster, arrival_s)
            hello = {"worker": cluster.worker, "workers": cluster.workers, "host": socket.gethostname()}
            self._leader.send(hello)

    @classmethod
    def from_environment(cls, cluster: Cluster, environ: Mapping[str, str]) -> "Guard":
        """With the patience of PODRUN_ARRIVAL_S where it is set."""
        return cls(cluster, arrival_s=float(environ.get("PODRUN_ARRIVAL_S", ARRIVAL_S)))

    def agree(self, identity: Mapping[str, str], folder: Path | None) -> None:
        """Returns when all workers are there and have the same identity and the same folder; then the port is free.

        Args:
            identity: what must be equal, by name.
            folder: must be one and the same directory on all hosts, worker 0 makes it; None: nothing is shared.

        Raises:
            GuardError: on all workers that are there, with what is wrong and whose fault it is.
        """
        with self:
            problems = self._lead(identity, folder) if self._leader is None else self._follow(identity, folder)
        if problems:
            raise GuardError("launch guard: " + "; ".join(problems))

    def close(self) -> None:
        """Give the port back; a second call does nothing."""
        if self._server is not None:
            self._server.close()
        if self._leader is not None:
            self._leader.close()

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _follow(self, identity: Mapping[str, str], folder: Path | None) -> list[str]:
        """The problems that worker 0 tells."""
        assert self._leader is not None
        leader, patience = self._leader, ANSWER_S + self._arrival_s * self.cluster.workers
        try:
            leader.send({"identity": dict(identity)})
            while True:
                message = leader.receive(patience)
                if "problems" in message:
                    return message["problems"]
                assert folder is not None, "worker 0 does the same"
                leader.send({"nonce": _read_nonce(folder / message["file"]), "folder": str(folder.absolute())})
        except (OSError, ValueError) as error:
            return [
                f"worker {self.cluster.worker}: {self.cluster.coordinator} is not a worker 0 that waits for this job"
                f" ({error}); it runs already there, another program has the port, or worker 0 has ended"
            ]

    def _lead(self, identity: Mapping[str, str], folder: Path | None) -> list[str]:
        """The problems that worker 0 finds, after telling the others."""
        peers, problems = self._meet()
        try:
            if not problems:
                problems = self._compare(peers, identity)
            if not problems and folder is not None:
                problems = _check_shared(peers, folder)
            for peer in peers:
                with contextlib.suppress(OSError):  # it has ended: its own record says why
                    peer.send({"problems": problems})
            for peer in peers:
                peer.wait_for_end()  # who closes first keeps the port busy for a minute
        finally:
            for peer in peers:
                peer.close()
        return problems

    def _meet(self) -> tuple[list["_Peer"], list[str]]:
        """Everybody who arrives, and what is wrong with it as far as that is known by who came."""
        assert self._server is not None
        workers = self.cluster.workers
        peers: list[_Peer] = []
        here, problems = {0: socket.gethostname()}, []
        last = time.monotonic()
        while len(here) < workers and time.monotonic() < last + self._arrival_s:
            peer = _accept(self._server, last + self._arrival_s - time.monotonic())
            if peer is None:
                continue
            peers.append(peer)
            last = time.monotonic()
            if peer.workers != workers or not 0 < peer.worker < workers:
                problems.append(
                    f"{peer.name} came as worker {peer.worker} of {peer.workers} and this job has {workers}"
                )
            elif peer.worker in here:
                problems.append(
                    f"worker {peer.worker} was started twice, on {here[peer.worker]} and on {peer.host};"
                    " stop one of them"
                )
            else:
                here[peer.worker] = peer.host
        missing = sorted(set(range(workers)) - set(here))
        if missing:
            names = f"worker {missing[0]} is" if len(missing) == 1 else f"workers {', '.join(map(str, missing))} are"
            problems.append(
                f"{names} missing: {len(here)} of {workers} arrived and nobody came for {self._arrival_s:g} s more;"
                " start the same command on all workers (--worker=all), or set PODRUN_ARRIVAL_S to wait longer"
            )
        return peers, problems

    def _compare(self, peers: list["_Peer"], ours: Mapping[str, str]) -> list[str]:
        """In what workers differ from worker 0."""
        problems = []
        for peer in peers:
            try:
                theirs = peer.receive(ANSWER_S)["identity"]
            except (OSError, ValueError, KeyError):
                problems.append(f"{peer.name} arrived and ended, or said nothing for {ANSWER_S:g} s; see its own log")
                continue
            differences = [
                f"{key} is {theirs.get(key)!r} on {peer.name} and {ours.get(key)!r} on worker 0"
                for key in dict.fromkeys((*ours, *theirs))
                if ours.get(key) != theirs.get(key)
            ]
            more = [f"and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
            problems += differences[:SHOWN] + more
        return problems


class _Peer:
    """A connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._buffer = connection, b""
        self.worker, self.workers, self.host = -1, 0, "?"

    def introduce(self) -> bool:
        """Whether the other side says that it is a worker."""
        try:
            hello = self.receive(HELLO_S)
            self.worker, self.workers, self.host = int(hello["worker"]), int(hello["workers"]), str(hello["host"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    @property
    def name(self) -> str:
        return f"worker {self.worker} ({self.host})"

    def send(self, message: Message) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> Message:
        """The next line; OSError or ValueError where none comes, or something else."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._connection.settimeout(max(0.01, deadline - time.monotonic()))
            data = self._connection.recv(65536)
            if not data:
                raise OSError("it closed the connection")
            self._buffer += data
            if not self._buffer.startswith(b"{"):
                raise ValueError("it speaks another language")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def wait_for_end(self) -> None:
        """Returns when the other side has closed, or does not within a second."""
        with contextlib.suppress(OSError):
            self._connection.settimeout(1.0)
            while self._connection.recv(65536):
                pass

    def close(self) -> None:
        self._connection.close()


def _listen(cluster: Cluster) -> socket.socket:
    try:
        return socket.create_server(cluster.address, backlog=4 * cluster.workers)
    except OSError as error:
        raise GuardError(
            f"launch guard: worker 0 cannot listen on {cluster.coordinator} ({error.strerror}): another job or another"
            " worker 0 has the port, or worker 0 was started on another host"
        ) from error


def _connect(cluster: Cluster, patience_s: float) -> _Peer:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _Peer(socket.create_connection(cluster.address, timeout=max(0.1, deadline - time.monotonic())))
        except OSError as error:
            if time.monotonic() + RETRY_S > deadline:
                raise GuardError(
                    f"launch guard: worker {cluster.worker} cannot reach worker 0 at {cluster.coordinator} for"
                    f" {patience_s:g} s ({error.strerror or error}); start worker 0, or open the port between workers"
                ) from error
        time.sleep(RETRY_S)


def _accept(server: socket.socket, timeout_s: float) -> _Peer | None:
    """A worker that says who it is; None: nobody came, or something else did."""
    server.settimeout(max(0.01, timeout_s))
    try:
        connection, _ = server.accept()
    except OSError:
        return None
    peer = _Peer(connection)
    if peer.introduce():
        return peer
    peer.close()
    return None


def _check_shared(peers: list[_Peer], folder: Path) -> list[str]:
    """Who does not see in the runs' folder what worker 0 writes there."""
    try:
        with _nonce_file(folder) as (path, nonce):
            for peer in peers:
                with contextlib.suppress(OSError):  # told of below
                    peer.send({"file": path.name})
            return [problem for peer in peers if (problem := _view_of(peer, path, nonce))]
    except OSError as error:
        return [f"worker 0 cannot write to {folder.absolute()}: {error.strerror}; set runs_dir"]


def _view_of(peer: _Peer, path: Path, nonce: str) -> str | None:
    """What is wrong with what a worker sees."""
    try:
        reply = peer.receive(ANSWER_S)
    except (OSError, ValueError) as error:
        return f"{peer.name} ended while the runs' folder was compared ({error}); see its own log"
    if reply.get("nonce") == nonce:
        return None
    return (
        f"{peer.name} does not see what worker 0 writes to {path.parent.absolute()} (it looks in"
        f" {reply.get('folder')}): set runs_dir to one directory that all hosts share"
    )


@contextlib.contextmanager
def _nonce_file(folder: Path) -> Iterator[tuple[Path, str]]:
    folder.mkdir(parents=True, exist_ok=True)
    nonce = secrets.token_hex(8)
    path = folder / f".guard-{nonce}"
    with path.open("w", encoding="utf-8") as file:
        file.write(nonce)
        file.flush()
        os.fsync(file.fileno())
    try:
        yield path, nonce
    finally:
        path.unlink(missing_ok=True)


def _read_nonce(path: Path) -> str | None:
    """What the file holds, as soon as this host sees it; None: it does not in time."""
    deadline = time.monotonic() + SHARED_S
    while True:
        with contextlib.suppress(OSError):
            return path.read_text(encoding="utf-8")
        if time.monotonic() > deadline:
            return None
        time.sleep(RETRY_S)
