"""The launch guard: before jax starts, it checks that no worker of the job is missing, duplicated or mismatched.

By itself, jax waits for minutes for a missing worker without naming it, lets a second copy of a worker kill the healthy
job, and does not notice different settings or versions. In this check, the workers connect to worker 0, at the port
that jax uses afterwards, before anything slow is imported:

    worker k -> worker 0   {"worker": k, "workers": N, "host": ...}      at once
    worker k -> worker 0   {"identity": {...}}                           once its settings are read
    worker 0 -> worker k   {"file": ...}                                 a file with a nonce, in `runs_dir`
    worker k -> worker 0   {"nonce": ...}                                the nonce that worker k reads in that file
    worker 0 -> worker k   {"problems": [...], "lasting": ...}           no problems: start; at once if worker 0 ends

Every message carries a proof that its sender knows the job's nonce (PODRUN_NONCE, which the launcher generates for each
attempt), one proof for worker 0 and another for the others; messages without it are ignored. Standard library only.
"""

import contextlib
import hashlib
import json
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.files import RunFileError, absolute, in_bucket, write_atomically
from podium.job.cluster import Cluster, ClusterError
from podium.job.job_records import MISSING, exit_status, one_line
from podium.job.redact import own_redactor

ARRIVAL_S = 60.0
"""Seconds to wait for the next worker after the last one arrived."""
ANSWER_S = 60.0
"""Seconds that a worker may take to read its settings after it arrived."""
ENDED_S = ARRIVAL_S
"""If worker 0 ends before the check, it waits this many seconds for each next worker, to report the reason: as long as
the others try to reach it."""
HELLO_S = 2.0
"""Seconds for a new connection to send its first message."""
SHARED_S = 3.0
"""Seconds for a file to appear on another host."""
RETRY_S = 0.1
SHOWN = 3
"""Maximum number of differences listed per worker."""

FILE = ".guard-"
Message = dict[str, Any]


class GuardError(ClusterError):
    """A worker of the job is duplicated or mismatched: the same command would fail again."""

    kind = "guard"


class MissingError(GuardError):
    """A worker is missing, or ended during the check: the same command may succeed."""

    kind = "missing"
    exit_status = MISSING


class Guard(contextlib.AbstractContextManager["Guard"]):
    """One worker's side of the check: it connects to worker 0 at once, and `agree` decides whether the job may start.

    Raises:
        GuardError: worker 0 cannot be reached, or this is worker 0 and cannot listen.
    """

    def __init__(
        self, cluster: Cluster, *, arrival_s: float = ARRIVAL_S, nonce: str = "", leader_record: Path | None = None
    ) -> None:
        """Listen as worker 0, or connect to it.

        `arrival_s`: seconds within which the next worker must arrive. `nonce`: the nonce of this attempt.
        `leader_record`: file in which worker 0 records why it ended, if this host can read it.
        """
        self.cluster = cluster
        self._arrival_s = arrival_s
        self._nonce = nonce
        self._server = _listen(cluster) if cluster.worker == 0 else None
        self._leader = None if cluster.worker == 0 else _connect(cluster, arrival_s, nonce, leader_record)
        if self._leader:
            self._leader.send({"worker": cluster.worker, "workers": cluster.workers, "host": socket.gethostname()})

    def agree(self, identity: Mapping[str, str], folder: Path | None) -> None:
        """Wait until all workers have arrived with one identity and one folder, and free the port.

        Args:
            identity: values that must be equal in all workers, by name.
            folder: a directory that all hosts must share, created by worker 0; None: do not check.

        Raises:
            GuardError: on all workers that have arrived; the message names the workers and what is wrong with them.
        """
        with self:
            problems, lasting = self._lead(identity, folder) if self._leader is None else self._follow(identity, folder)
        if problems:
            raise (GuardError if lasting else MissingError)("launch guard: " + "; ".join(problems))

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._server is not None and self._server.fileno() >= 0 and error is not None and exit_status(error):
            self._announce(error)
        self.close()

    def close(self) -> None:
        """Free the port."""
        for connection in filter(None, (self._server, self._leader)):
            connection.close()  # closing twice is harmless

    def _announce(self, error: BaseException) -> None:
        """Tell the other workers why worker 0 ends before the check, for example because of an error in its
        settings.
        """
        assert self._server is not None
        cause = error.__context__ if isinstance(error, SystemExit) and error.__context__ is not None else error
        why = one_line(own_redactor().redact(f"{type(cause).__name__}: {cause}"))
        problem = f"worker 0 ({socket.gethostname()}) has ended: {why}"
        told: set[int] = set()
        patience_s = min(ENDED_S, self._arrival_s)
        print(
            f"{problem}; waiting up to {patience_s:g} s for each other worker, to report this",
            file=sys.stderr,
            flush=True,
        )
        last = time.monotonic()
        while len(told) < self.cluster.workers - 1 and (left_s := last + patience_s - time.monotonic()) > 0:
            peer = _accept(self._server, left_s, self._nonce)
            if peer is None:
                continue
            last = time.monotonic()
            told.add(peer.worker)
            with contextlib.suppress(OSError):  # it has ended too
                peer.send({"problems": [problem], "lasting": False})
            peer.close_last()

    def _follow(self, identity: Mapping[str, str], folder: Path | None) -> tuple[list[str], bool]:
        """The problems that worker 0 reports, and whether another attempt would have the same problems."""
        assert self._leader is not None
        leader = self._leader
        patience_s = ANSWER_S + self._arrival_s * self.cluster.workers
        try:
            leader.send({"identity": dict(identity)})
            while True:
                message = leader.receive(patience_s)
                if "problems" in message:
                    return message["problems"], message["lasting"]
                assert folder is not None, "worker 0 has the same setting"
                name = FILE + Path(message["file"]).name.removeprefix(FILE)  # read no other file
                leader.send({"nonce": _read_nonce(folder / name), "folder": str(absolute(folder))})
        except (OSError, ValueError, KeyError) as error:
            return [
                f"worker {self.cluster.worker}: worker 0 is not waiting for this job at {self.cluster.coordinator}"
                f" ({error}); the job is already running there, another program has the port, or worker 0 has ended"
            ], False

    def _lead(self, identity: Mapping[str, str], folder: Path | None) -> tuple[list[str], bool]:
        """Find problems and report them to the other workers; also returns whether the problems would recur in another
        attempt.
        """
        peers, problems, missing = self._meet()
        try:
            if not problems and not missing:
                problems, missing = self._compare(peers, identity)
            if not problems and not missing and folder is not None:
                problems = _check_shared(peers, folder)
            for peer in peers:
                with contextlib.suppress(OSError):  # it has ended, and its own record says why
                    peer.send({"problems": [*problems, *missing], "lasting": bool(problems)})
        finally:
            for peer in peers:
                peer.close_last()
        return [*problems, *missing], bool(problems)

    def _meet(self) -> tuple[list["_Peer"], list[str], list[str]]:
        """Accept workers; returns their connections, problems with duplicates or worker numbers, and a line about
        missing workers.
        """
        assert self._server is not None
        workers = self.cluster.workers
        peers: list[_Peer] = []
        here = {0: socket.gethostname()}
        problems: list[str] = []
        last = time.monotonic()
        while len(here) < workers and time.monotonic() < last + self._arrival_s:
            peer = _accept(self._server, last + self._arrival_s - time.monotonic(), self._nonce)
            if peer is None:
                continue
            peers.append(peer)
            last = time.monotonic()
            if peer.workers != workers or not 0 < peer.worker < workers:
                problems.append(
                    f"{peer.name} arrived as worker {peer.worker} of {peer.workers}, but this job has {workers}"
                )
            elif peer.worker in here:
                problems.append(
                    f"worker {peer.worker} was started twice, on {here[peer.worker]} and on {peer.host};"
                    " stop one of them"
                )
            else:
                here[peer.worker] = peer.host
        absent = sorted(set(range(workers)) - set(here))
        names = f"worker {absent[0]} is" if len(absent) == 1 else f"workers {', '.join(map(str, absent))} are"
        missing = (
            f"{names} missing: {len(here)} of {workers} arrived, and no more within {self._arrival_s:g} s;"
            " start the same command on all workers (--worker=all), or set PODRUN_ARRIVAL_S to wait longer"
        )
        return peers, problems, [missing] if absent else []

    def _compare(self, peers: list["_Peer"], ours: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Compare workers with worker 0; returns their differences, and a line for each worker that has ended
        meanwhile.
        """
        problems: list[str] = []
        ended: list[str] = []
        for peer in peers:
            try:
                theirs = peer.receive(ANSWER_S)["identity"]
            except (OSError, ValueError, KeyError):
                ended.append(f"{peer.name} arrived and then ended, or was silent for {ANSWER_S:g} s; see its own log")
                continue
            differences = [
                f"{key} is {theirs.get(key)!r} on {peer.name} and {ours.get(key)!r} on worker 0"
                for key in dict.fromkeys((*ours, *theirs))
                if ours.get(key) != theirs.get(key)
            ]
            more = [f"and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
            problems += differences[:SHOWN] + more
        return problems, ended


class _Peer:
    """A connection that carries lines of JSON, and the worker at its other end."""

    worker = -1
    workers = 0
    host = "?"

    def __init__(self, connection: socket.socket, nonce: str, *, leads: bool) -> None:
        """Wrap a connection; `leads`: whether worker 0 is at the other end."""
        self._connection = connection
        self._buffer = b""
        proofs = [hashlib.sha256(f"{nonce} {role}".encode()).hexdigest() for role in ("leader", "follower")]
        self._theirs, self._ours = proofs if leads else proofs[::-1]

    @property
    def name(self) -> str:
        return f"worker {self.worker} ({self.host})"

    def send(self, message: Message) -> None:
        self._connection.sendall(json.dumps({"proof": self._ours, **message}).encode() + b"\n")

    def receive(self, timeout_s: float) -> Message:
        """Receive the next message. Raises OSError if none arrives, and ValueError if it does not belong to
        this job.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._connection.settimeout(max(0.01, deadline - time.monotonic()))
            data = self._connection.recv(65536)
            if not data:
                raise OSError("the connection was closed")
            self._buffer += data
            if not self._buffer.startswith(b"{"):
                raise ValueError("another protocol")
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = json.loads(line)
        if message.get("proof") != self._theirs:
            raise ValueError("another job: it has another nonce")
        return message

    def close_last(self) -> None:
        """Wait up to a second for the other end to close, then close: closing first would keep the port busy for a
        minute.
        """
        self._connection.settimeout(1.0)
        with contextlib.suppress(OSError):
            while self._connection.recv(65536):
                pass
        self.close()

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


def _connect(cluster: Cluster, patience_s: float, nonce: str, leader_record: Path | None) -> _Peer:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            connection = socket.create_connection(cluster.address, timeout=max(0.1, deadline - time.monotonic()))
            return _Peer(connection, nonce, leads=True)
        except OSError as error:
            if time.monotonic() + RETRY_S > deadline:
                raise MissingError(
                    f"launch guard: worker {cluster.worker} cannot reach worker 0 at {cluster.coordinator} for"
                    f" {patience_s:g} s ({error.strerror or error}); {_leader_ended(leader_record)}start worker 0, read"
                    " its log if it has ended, or open the port between workers"
                ) from error
        time.sleep(RETRY_S)


def _leader_ended(record: Path | None) -> str:
    """Worker 0's own record of why it ended, as the start of a sentence; empty if this host cannot see one."""
    if record is None:
        return ""
    try:
        return f"worker 0 has ended: {json.loads(record.read_text())['message']}; "
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _accept(server: socket.socket, timeout_s: float, nonce: str) -> _Peer | None:
    """Accept the connection of a worker; None if no worker connected in time, or something else did."""
    server.settimeout(max(0.01, timeout_s))
    with contextlib.suppress(OSError):
        peer = _Peer(server.accept()[0], nonce, leads=False)
        try:
            hello = peer.receive(HELLO_S)
            peer.worker = int(hello["worker"])
            peer.workers = int(hello["workers"])
            peer.host = str(hello["host"])
            return peer
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            peer.close()
    return None


def _check_shared(peers: list[_Peer], folder: Path) -> list[str]:
    """One line for each worker that does not see a file that worker 0 writes to the folder."""
    path = folder / f"{FILE}{secrets.token_hex(8)}"
    nonce = secrets.token_hex(8)
    try:
        if not in_bucket(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, nonce)
    except (OSError, RunFileError) as error:
        return [f"worker 0 cannot write to {absolute(folder)} ({error}); set runs_dir"]
    try:
        for peer in peers:
            with contextlib.suppress(OSError):  # reported below
                peer.send({"file": path.name})
        return [problem for peer in peers if (problem := _missing_nonce(peer, path, nonce))]
    finally:
        path.unlink(missing_ok=True)


def _missing_nonce(peer: _Peer, path: Path, nonce: str) -> str | None:
    """A line about why a worker does not see the file; None if the worker sees it."""
    try:
        reply = peer.receive(ANSWER_S)
    except (OSError, ValueError) as error:
        return f"{peer.name} ended while the runs folder was being checked ({error}); see its own log"
    if reply.get("nonce") == nonce:
        return None
    return (
        f"{peer.name} does not see what worker 0 writes to {absolute(path.parent)} (its folder is"
        f" {reply.get('folder')}): set runs_dir to one directory that all hosts share"
    )


def _read_nonce(path: Path) -> str | None:
    """Read the file as soon as it appears on this host; None if it does not appear in time."""
    deadline = time.monotonic() + SHARED_S
    while True:
        with contextlib.suppress(OSError):
            return path.read_text(encoding="utf-8")
        if time.monotonic() > deadline:
            return None
        time.sleep(RETRY_S)
