"""Runs code that a model wrote, in a sandbox that needs no root. Standard library alone.

    with Sandbox() as sandbox:
        result = sandbox.run("print(1)")

What the code prints, returns or exits with is its own word, and never a verdict.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from podium.sandbox.child import Answer

Why = Literal["time", "memory", "processes", "output", "ended"]
WAYS_OUT = (
    "On Ubuntu 24.04 and newer, allow it with `sysctl kernel.apparmor_restrict_unprivileged_userns=0`; in a container,"
    " start it with profiles that permit unshare and mount (docker: --security-opt seccomp=unconfined --security-opt"
    " apparmor=unconfined); elsewhere, raise user.max_user_namespaces"
)
MOUNT_POINTS = ("/mnt", "/tmp", "/var")
"""Folders to mount the new root on, in a namespace of its own; the first that the interpreter does not lie below."""
START_LIMIT_S = 30.0
END_LIMIT_S = 10.0
"""Seconds in which a run or the sandbox that is to end must have ended."""


class SandboxError(ValueError):
    """The sandbox cannot be made, or a run in it cannot begin; the code has not run."""


class Ended(Exception):
    """A run ended without the answer that was waited for."""

    def __init__(self, why: Why, output: str) -> None:
        super().__init__(why)
        self.why: Why = why
        self.output = output


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a run may use."""

    wall_s: float = 5.0
    """Seconds for each request."""
    cpu_s: int = 10
    """Seconds of CPU time of each process, over all requests."""
    memory_mib: int = 512
    """Address space of each process, and resident memory of all together."""
    disk_mib: int = 32
    """Files in /box, the only folder that it can write to."""
    processes: int = 16
    """Processes and threads."""
    output_bytes: int = 1 << 20
    """Output for one request, its answer included."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a program."""

    output: str
    """What it printed, stdout and stderr together."""
    why: Why | None
    """Why it ended early: the limit that it exceeded, or `ended` if its process ended in another way, as by os._exit.
    None: it ran to its end, raised, or called sys.exit."""
    error: str
    """The exception that it ended with; empty: none."""
    exit_status: int = 0
    """What it called sys.exit with, from 0 to 255; 0 if it did not."""


class Sandbox:
    """A place to run code in; runs of several threads go on beside each other."""

    def __init__(self, limits: Limits | None = None, *, without: Sequence[str] = ()) -> None:
        """Nothing is started before the first run. `without` names layers to leave out, for tests of the others."""
        self.limits = limits or Limits()
        self._without = tuple(without)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def run(self, code: str, stdin: str = "") -> Result:
        """Run a program to its end. SandboxError if it cannot begin."""
        with self.open(stdin) as run:
            try:
                output, answer = run.execute(code)
            except Ended as ended:
                return Result(output=ended.output, why=ended.why, error="")
        status = answer.get("exit", 0)
        if not isinstance(status, int) or not 0 <= status <= 255:  # the code has forged it
            status = 1
        return Result(output=output, why=None, error=str(answer.get("error", "")), exit_status=status)

    @contextlib.contextmanager
    def open(self, stdin: str = "") -> Iterator["Run"]:
        """Begin a run that is asked several things, and end it. SandboxError if it cannot begin."""
        run = self.begin(stdin)
        try:
            yield run
        finally:
            run.close()

    def begin(self, stdin: str = "") -> "Run":
        """Begin a run, which the caller must close."""
        given = os.memfd_create("stdin")
        with open(given, "wb", closefd=False) as file:
            file.write(stdin.encode("utf-8", "replace"))
        os.lseek(given, 0, os.SEEK_SET)
        output, output_end = os.pipe()
        requests_end, requests = os.pipe()
        report, report_end = os.pipe()
        theirs = (given, output_end, requests_end, report_end)
        limits = dataclasses.asdict(self.limits)
        job = {name: limits[name] for name in ("cpu_s", "memory_mib", "disk_mib", "processes")}
        try:
            with self._lock:
                control = self._started()
                socket.send_fds(control, [json.dumps({**job, "without": self._without}).encode()], theirs)
                handle = _answered(control)
        except (OSError, SandboxError) as error:
            for descriptor in (output, requests, report):
                os.close(descriptor)
            self.close()
            raise error if isinstance(error, SandboxError) else SandboxError(f"a run cannot begin: {error}") from error
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        assert handle is not None
        return Run(self.limits, output, requests, report, handle)

    def close(self) -> None:
        """End the sandbox, and all runs in it."""
        with self._lock:
            if self._process is not None and self._control is not None:
                self._control.close()  # at which the zygote ends, with all that it has started
                try:
                    self._process.wait(END_LIMIT_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self._process = self._control = None

    def _started(self) -> socket.socket:
        """The socket of the zygote, which is started if it does not run."""
        if self._control is not None:
            return self._control
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_LIMIT_S)
        package = Path(__file__).parents[2]
        root = next(path for path in MOUNT_POINTS if Path(path).is_dir() and not sys.base_prefix.startswith(path))
        code = (
            f"import sys; sys.path.append({str(package)!r}); from podium.sandbox.zygote import main; sys.path.pop();"
            f" main({theirs.fileno()}, {root!r})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-s", "-P", "-B", "-c", code],  # as -I, but that reads no PYTHONHASHSEED
            env={"PYTHONHASHSEED": "0"},  # the order of sets, and so what code prints, is the same in all runs
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )
        theirs.close()
        try:
            _answered(self._control)
        except SandboxError as error:
            raise SandboxError(f"this machine permits no sandbox: {error}. {WAYS_OUT}") from None
        return self._control


def _answered(control: socket.socket) -> int | None:
    """The zygote's answer: a handle of the first process of a run, if one was begun. SandboxError if it could not."""
    message, handles, _, _ = socket.recv_fds(control, 4096, 1)
    if not message:
        raise SandboxError("its process ended")
    error = json.loads(message).get("error")
    if error:
        raise SandboxError(error)
    return handles[0] if handles else None


class Run:
    """A process in the sandbox, which is asked one thing after another."""

    def __init__(self, limits: Limits, output: int, requests: int, report: int, handle: int) -> None:
        self.wall_s = limits.wall_s
        """Limit of time of each request from now on."""
        self._output_bytes = limits.output_bytes
        self._output = output
        self._requests = requests
        self._report = report
        self._handle = handle
        self._closed = False
        os.set_blocking(requests, False)

    def execute(
        self, code: str, *, name: str = "__main__", shown: bool = False, errors: bool = True
    ) -> tuple[str, Answer]:
        """Run code as a module of this name; names are kept. Returns what it printed, and the answer.

        Args:
            code: text of the module.
            name: its `__name__`.
            shown: print the value of a last expression, as an interactive session does.
            errors: whether what it writes to stderr, and the traceback of an exception, are output too.
        """
        return self.ask({"do": "run", "code": code, "name": name, "shown": shown, "errors": errors})

    def call(self, name: str, arguments: Sequence[object]) -> Answer:
        """Call a function with arguments that `podium.sandbox.child.written` wrote; returns `value` or `error`."""
        return self.ask({"do": "call", "name": name, "arguments": arguments})[1]

    def ask(self, request: dict[str, object]) -> tuple[str, Answer]:
        """Send a request. Returns what was printed, and the answer. Ended if none comes within the limits."""
        nonce = secrets.token_hex(16).encode()
        waiting = memoryview(json.dumps({**request, "nonce": nonce.decode()}).encode() + b"\n")
        deadline = time.monotonic() + self.wall_s
        found = bytearray()
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        poll.register(self._requests, select.POLLOUT)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._ended("time", found, deadline)
            ready = dict(poll.poll(1000 * left))
            if self._requests in ready:
                with contextlib.suppress(BrokenPipeError, BlockingIOError):
                    waiting = waiting[os.write(self._requests, waiting) :]
                if not waiting or ready[self._requests] & select.POLLERR:
                    poll.unregister(self._requests)
            if self._output in ready:
                part = os.read(self._output, 1 << 16)
                if not part:
                    raise self._ended("ended", found, deadline)
                found += part
                if len(found) > self._output_bytes:
                    raise self._ended("output", found, deadline)
                before, marked, answer = found.partition(nonce)
                if marked and b"\n" in answer:
                    return before.decode("utf-8", "replace"), _read(bytes(answer.partition(b"\n")[0]))

    def close(self) -> None:
        """End the run and wait until the kernel has removed all of it."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        poll.poll(1000 * END_LIMIT_S)
        for descriptor in (self._output, self._requests, self._report, self._handle):
            os.close(descriptor)

    def _ended(self, why: Why, found: bytearray, deadline: float) -> Ended | SandboxError:
        """What to raise for a run that has ended or must end; its own first process may report the reason."""
        if why == "ended":
            poll = select.poll()
            poll.register(self._report, select.POLLIN)
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                return self._ended("time", found, deadline)  # it has closed its output, and goes on
            said = os.read(self._report, 4096).decode("utf-8", "replace")
            if said.startswith("failed"):
                return SandboxError(f"a run could not be set up ({said})")
            why = said or why  # pyright: ignore[reportAssignmentType]
        return Ended(why, bytes(found[: self._output_bytes]).decode("utf-8", "replace"))


def _read(text: bytes) -> Answer:
    """An answer, which the code may have forged: all that is certain afterwards is that it is a JSON object."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return {"error": "the answer is not JSON"}
    return answer if isinstance(answer, dict) else {"error": "the answer is no object"}
