"""A process that runs other people's code: graders, environments, tools.

Whatever that code does, the process does not outlive the trainer. The process leads its own session, and the kernel
kills that session's group, with all that tools have started, when the trainer ends: this needs no thread in the
process, which might be waiting for the interpreter's lock. `podium.tasks.workers` sends requests to such processes, and
limits their time.
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable
from types import FrameType

LENGTH = struct.Struct("!Q")
"""Header of each message: its size in bytes."""
PART = 1 << 16
"""Bytes read at a time."""
KEYS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY")
"""Environment variables that processes do not get: they handle text written by a model and do not need secrets."""
END_LIMIT_S = 5.0
"""Seconds to wait for the end of a killed process; the kernel keeps a process whose disk does not respond."""
LOOK_S = 1.0
"""Maximum seconds between two checks whether the process has ended; a process that it forked may keep the connection
open."""


class Channel:
    """One end of a connection between two processes. Two threads may use it at a time: one sends, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.settimeout(None)

    def send(self, message: bytes) -> None:
        """Send a message, as long as the other end takes to read it. Raises EOFError if the connection is closed."""
        try:
            self._socket.sendall(LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise EOFError(f"the connection is closed: {error}") from None

    def receive(self) -> bytes:
        """Wait for a message. Raises EOFError if the connection is closed."""
        (size,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return self._exactly(size)

    def waits(self, timeout_s: float) -> bool:
        """Wait for the beginning of a message or the end of the connection; returns whether either happened."""
        waiting = select.poll()
        try:
            waiting.register(self._socket, select.POLLIN)
        except ValueError:  # closed on another thread
            return True
        return bool(waiting.poll(1000 * timeout_s))

    def close(self) -> None:
        """Close this end; threads waiting on it get an EOFError."""
        with contextlib.suppress(OSError):  # the connection is closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            try:
                part = self._socket.recv(min(PART, size - len(found)))
            except OSError as error:
                raise EOFError(f"the connection is closed: {error}") from None
            if not part:
                raise EOFError("the other end is closed")
            found += part
        return bytes(found)


class WorkerProcess:
    """A worker process, and this end of its connection.

    A plain subprocess instead of multiprocessing, which would run the caller's main module again (possibly importing
    jax); and a fork of a process that uses jax might hang.
    """

    def __init__(self, module: str, *, hidden: Iterable[str] = ()) -> None:
        """Start `main(connection, lifeline)` of a module, which calls `join_parent` with both.

        The process has the import path and the environment variables of this one, except KEYS and `hidden`.
        Raises OSError if this machine has too little memory, or too many processes, for another one.
        """
        left_out = {*KEYS, *hidden}
        variables = {name: value for name, value in os.environ.items() if name not in left_out}
        variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {module} import main; main({theirs.fileno()}, {lifeline})"],
                pass_fds=[theirs.fileno(), lifeline],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what it prints must not mix with `podium eval --json`
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self.channel = Channel(ours)
        self.pid = self._process.pid
        self._stopping = threading.Lock()
        self._stopped = False

    @property
    def exit_code(self) -> int | None:
        """The exit code, or minus the number of the signal that killed the process; None while it runs."""
        return self._process.poll()

    def receive(self) -> bytes:
        """Wait for a message without a limit of time. Raises EOFError if the process has ended, or closed its end."""
        while not self.channel.waits(LOOK_S):
            if self.exit_code is not None:
                raise EOFError("the process has ended")
        return self.channel.receive()

    def stop(self) -> None:
        """End the process and what it has started; any number of times, from any thread. Waits for its end."""
        with self._stopping:
            if self._stopped:  # its number may belong to another process by now
                return
            with contextlib.suppress(ProcessLookupError):  # no process of the group is left
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_LIMIT_S)
                self._stopped = True

    def close(self) -> None:
        """End the process, and close the connection."""
        self.stop()
        self.channel.close()
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)


def join_parent(connection: int, lifeline: int) -> Channel:
    """In a worker process: end with the parent, leave signals to it, and return the channel to it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave_to_parent)
    for descriptor in (connection, lifeline):
        os.set_inheritable(descriptor, False)
    _end_with(lifeline)
    return Channel(socket.socket(fileno=connection))


def leave_to_parent(number: int, frame: FrameType | None) -> None:
    """Signal handler that does nothing: the parent finishes its step, and then ends this process.

    Unlike SIG_IGN, programs that are started from here do not inherit it, so that `terminate` ends them.
    """


def _end_with(lifeline: int) -> None:
    """Have the kernel kill this process's group as soon as the other end of a pipe is closed (Linux).

    The parent alone holds that end. Unlike PR_SET_PDEATHSIG, this does not depend on the thread that started us, and it
    ends what tools have started, too.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return
    with contextlib.suppress(OSError):  # the kernel does not support this; the end of the connection is still noticed
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    ended = select.poll()
    ended.register(lifeline, select.POLLIN)
    if ended.poll(0):  # the parent has already ended
        os.killpg(0, signal.SIGKILL)
