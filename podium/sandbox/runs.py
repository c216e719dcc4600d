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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from podium.sandbox.child import NONCE_CHARACTERS, Answer
from podium.sandbox.ways_out import way_to_python, ways_out

Why = Literal["time", "memory", "processes", "output", "ended"]
MOUNT_POINTS = ("/mnt", "/tmp", "/var")
"""Folders on which the new root may be mounted, in a separate namespace; the first one that does not contain the
interpreter is used."""
START_LIMIT_S = 30.0
END_LIMIT_S = 10.0
"""Seconds that a run or the sandbox may take to end."""
FLUSH_S = 0.2
"""Seconds that code may take to write its buffered output after it has exceeded its time limit."""
LOOK_S = 0.02
"""Minimum seconds between two readings of a run's CPU time."""
DROPPED_BYTES = 1 << 26
"""Maximum bytes that code may print for a request whose output is dropped."""
PART_BYTES = 1 << 16
"""Bytes of output read at once."""


class SandboxError(ValueError):
    """The sandbox cannot be made, or a run in it cannot start; the code has not run."""


class Ended(Exception):
    """A run ended without answering a request."""

    def __init__(self, why: Why, output: str, exit_status: int = 0) -> None:
        super().__init__(why)
        self.why: Why = why
        self.output = output
        self.exit_status = exit_status
        """For `ended`: the exit status as in a shell, 128 plus the signal's number if a signal ended the process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a run may use."""

    wall_s: float = 5.0
    """Seconds for each request."""
    cpu_s: float = 10.0
    """Seconds of CPU time for each request, of all processes together."""
    life_cpu_s: int = 60
    """Seconds of CPU time of each process over all requests, and between them."""
    memory_mib: int = 512
    """Limit of the address space of each process, and of the resident memory of all processes together."""
    disk_mib: int = 32
    """Total size of files in /box, the only folder that the code can write to."""
    processes: int = 16
    """Number of processes and threads."""
    output_bytes: int = 1 << 20
    """Maximum bytes of output per request, including the answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a program."""

    output: str
    """What the program printed, stdout and stderr together."""
    why: Why | None
    """Why it ended early: the limit that it exceeded, or `ended` if its process ended in another way, as by os._exit.
    None: it ran to its end, raised, or called sys.exit."""
    error: str
    """The exception that ended the program; empty if none did."""
    exit_status: int = 0
    """Exit status as in a shell: the program's own, from 0 to 255; 128 and the number of the signal that ended it; 1 if
    it raised an exception; 0 if a limit ended it."""


class Sandbox:
    """Runs code in isolation; several threads may run code at the same time."""

    def __init__(self, limits: Limits | None = None, *, without: Sequence[str] = ()) -> None:
        """Processes start with the first run. `without` names layers to leave out, for tests of the remaining ones."""
        self.limits = limits or Limits()
        self.has_proc = True
        """Whether runs have a /proc that shows their own processes; known after the first run has started."""
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

    def run(self, code: str, stdin: str = "", *, program: bool = False) -> Result:
        """Run code to its end. Raises SandboxError if it cannot start. `program`: as in `Run.execute`."""
        with self.open(stdin) as run:
            try:
                output, answer = run.execute(code, program=program)
            except Ended as ended:
                return Result(output=ended.output, why=ended.why, error="", exit_status=ended.exit_status)
        error = answer.get("error", "")
        error = error if isinstance(error, str) else "the answer is forged"
        status = answer.get("exit", int(bool(error)))
        if not isinstance(status, int) or not 0 <= status <= 255:  # the code has forged it
            status = 1
        return Result(output=output, why=None, error=error, exit_status=status)

    @contextlib.contextmanager
    def open(self, stdin: str = "") -> Iterator["Run"]:
        """Start a run for several requests, and end it with the block. Raises SandboxError if it cannot start."""
        run = self.begin(stdin)
        try:
            yield run
        finally:
            run.close()

    def begin(self, stdin: str = "") -> "Run":
        """Start a run, which the caller must close."""
        given = os.memfd_create("stdin")
        with open(given, "wb", closefd=False) as file:
            file.write(stdin.encode("utf-8", "replace"))
        os.lseek(given, 0, os.SEEK_SET)
        output, output_end = os.pipe()
        os.fchmod(output_end, 0o622)  # the code, another user's, may open it as /dev/stdout
        requests_end, requests = os.pipe()
        report, report_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs = (given, output_end, requests_end, report_end.detach())
        limits = dataclasses.asdict(self.limits)
        job = {name: limits[name] for name in ("life_cpu_s", "memory_mib", "disk_mib", "processes")}
        try:
            with self._lock:
                control = self._started()
                socket.send_fds(control, [json.dumps({**job, "without": self._without}).encode()], theirs)
                handle = _answered(control)
        except (OSError, SandboxError) as error:
            report.close()
            for descriptor in (output, requests):
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
                self._control.close()  # on which the zygote ends, with all processes that it has started
                try:
                    self._process.wait(END_LIMIT_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self._process = self._control = None

    def _started(self) -> socket.socket:
        """The socket of the zygote; starts the zygote if it is not running."""
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
            [sys.executable, "-S", "-s", "-P", "-B", "-c", code],  # like -I, which would ignore PYTHONHASHSEED
            env={"PYTHONHASHSEED": "0"},  # the order of sets, and so what code prints, is the same in all runs
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )
        theirs.close()
        answer, _ = _received(self._control)
        if error := answer.get("error"):
            way = way_to_python() if answer.get("unreadable") else ways_out()
            raise SandboxError(f"this machine permits no sandbox: {error}. {way}")
        self.has_proc = answer["proc"]
        return self._control


def _received(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The zygote's answer, and descriptors that came with it."""
    message, handles, _, _ = socket.recv_fds(control, 4096, 1)
    return json.loads(message or b'{"error": "its process ended"}'), handles


def _answered(control: socket.socket) -> int | None:
    """A handle of the first process of a run. Raises SandboxError if the run could not start."""
    answer, handles = _received(control)
    if error := answer.get("error"):
        raise SandboxError(error)
    return handles[0] if handles else None


class Run:
    """A process in the sandbox that answers one request after another."""

    def __init__(self, limits: Limits, output: int, requests: int, report: socket.socket, handle: int) -> None:
        self.limits = limits
        """Limits of each request from now on, `wall_s`, `cpu_s` and `output_bytes`."""
        self.spent_s = 0.0
        """CPU seconds of all processes of the run until the last answer."""
        self._output = output
        self._requests = requests
        self._report = report
        self._handle = handle
        self._closed = False
        os.set_blocking(requests, False)

    def execute(
        self,
        code: str,
        *,
        name: str = "__main__",
        others: Sequence[str] = (),
        shown: bool = False,
        errors: bool = True,
        program: bool = False,
    ) -> tuple[str, Answer]:
        """Run code as a module of this name; names are kept. Returns what it printed, and the answer.

        Args:
            code: text of the module.
            name: its `__name__`.
            others: texts whose definitions it gets, of names that it uses and does not make.
            shown: print the value of a last expression, as an interactive session does.
            errors: whether what it writes to stderr, and the traceback of an exception, are output too.
            program: end it as the interpreter ends a program: wait for its threads, run its hooks, close its files.
        """
        return self.ask(_run_request(code, name, others, shown=shown, errors=errors, program=program))

    def define(self, code: str, name: str, others: Sequence[str] = ()) -> Answer:
        """Run code as a module of this name for its definitions; its output is dropped. See `execute`."""
        return self.ask(_run_request(code, name, others, shown=False, errors=True, program=False), kept=False)[1]

    def call(self, name: str, arguments: Sequence[object], keywords: Mapping[str, object] | None = None) -> Answer:
        """Call a function. Returns `value` or `error`; with a value of None also the `arguments` after the call.

        Args:
            name: of the function, or of a method of a class `Solution`.
            arguments: as `podium.sandbox.values.written` writes them.
            keywords: likewise.
        """
        return self.ask({"do": "call", "name": name, "arguments": arguments, "keywords": keywords or {}}, kept=False)[1]

    def next_items(self, number: object) -> Answer:
        """The next items of an iterator that the code has sent: `value`, a list of them and whether there are more."""
        return self.ask({"do": "next", "number": number}, kept=False)[1]

    def ask(self, request: dict[str, object], *, kept: bool = True) -> tuple[str, Answer]:
        """Send a request. Returns what was printed, and the answer. Raises Ended if none arrives within the limits.

        `kept`: whether what is printed is returned, and counts as output. Else only its amount is limited.
        """
        nonce = secrets.token_hex(NONCE_CHARACTERS // 2).encode()
        waiting = memoryview(nonce + json.dumps(request).encode() + b"\n")
        found = _Output(nonce, self.limits.output_bytes, kept=kept)
        deadline = time.monotonic() + self.limits.wall_s
        look = time.monotonic() + self.limits.cpu_s
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        poll.register(self._requests, select.POLLOUT)
        while found.answer is None:
            now = time.monotonic()
            if now >= look:
                left = self.limits.cpu_s - (self._cpu_s(deadline) - self.spent_s)
                look = now + max(LOOK_S, left) if left > 0 else now
            if now >= min(look, deadline):
                raise self._late(found)
            ready = dict(poll.poll(1000 * (min(look, deadline) - now)))
            if self._requests in ready:
                with contextlib.suppress(BrokenPipeError, BlockingIOError):
                    waiting = waiting[os.write(self._requests, waiting) :]
                if not waiting or ready[self._requests] & select.POLLERR:
                    poll.unregister(self._requests)
            if self._output in ready:
                part = os.read(self._output, PART_BYTES)
                if not part:
                    raise self._ended(found, deadline)
                found.add(part)
                if found.too_long:
                    raise Ended("output", found.text())
        self.spent_s = max(self.spent_s, self._cpu_s(deadline))
        return found.text(), _read(found.answer)

    def close(self) -> None:
        """End the run and wait until the kernel has removed all its processes."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        poll.poll(1000 * END_LIMIT_S)
        self._report.close()
        for descriptor in (self._output, self._requests, self._handle):
            os.close(descriptor)

    def _cpu_s(self, deadline: float) -> float:
        """CPU seconds of the run, as reported by its first process; the last known value if that has ended."""
        with contextlib.suppress(OSError):
            self._report.settimeout(max(LOOK_S, deadline - time.monotonic()))
            self._report.send(b"cpu")
            said = json.loads(self._report.recv(4096, socket.MSG_PEEK) or b"{}")
            if "cpu_s" in said:  # otherwise this is the final report, which `_ended` reads
                self._report.recv(4096)
                return said["cpu_s"]
        return self.spent_s

    def _late(self, found: "_Output") -> Ended:
        """The exception for a run that has exceeded its time limit; it may still write its buffered output."""
        with contextlib.suppress(OSError):
            self._report.send(b"flush")
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        until = time.monotonic() + FLUSH_S
        while not found.too_long and poll.poll(1000 * max(0.0, until - time.monotonic())):
            part = os.read(self._output, PART_BYTES)
            if not part:
                break
            found.add(part)
        return Ended("time", found.text())

    def _ended(self, found: "_Output", deadline: float) -> Ended | SandboxError:
        """The exception for a run that has closed its output; the run's first process reports the reason."""
        self._report.settimeout(max(LOOK_S, deadline - time.monotonic()))
        try:
            said = json.loads(self._report.recv(4096) or b"{}")
        except TimeoutError:
            return Ended("time", found.text())  # the code has closed its output and is still running
        if "failed" in said:
            return SandboxError(f"a run could not be set up ({said['failed']})")
        return Ended(said.get("why") or "ended", found.text(), said.get("status", 1))


def _run_request(
    code: str, name: str, others: Sequence[str], *, shown: bool, errors: bool, program: bool
) -> dict[str, object]:
    asked = {"code": code, "name": name, "others": others, "shown": shown, "errors": errors, "program": program}
    return {"do": "run", **asked}


class _Output:
    """A run's output for one request: what its code prints, a nonce, and the answer as one line."""

    def __init__(self, nonce: bytes, limit: int, *, kept: bool) -> None:
        self.answer: bytes | None = None
        """The answer, once it is complete."""
        self._nonce = nonce
        self._limit = limit
        self._kept = kept
        self._printed = bytearray()
        self._dropped = 0
        self._answer: bytearray | None = None
        """The received part of the answer, after the nonce."""

    @property
    def too_long(self) -> bool:
        """Whether the output exceeds its limit."""
        dropped = self._dropped > DROPPED_BYTES
        return dropped or len(self._printed) > self._limit or len(self._answer or b"") > self._limit

    def add(self, part: bytes) -> None:
        """Add received bytes."""
        if self._answer is None:
            start = max(0, len(self._printed) - len(self._nonce) + 1)
            self._printed += part
            place = self._printed.find(self._nonce, start)
            if place < 0:
                if not self._kept:
                    self._drop(len(self._printed) - len(self._nonce) + 1)
                return
            self._answer, part = bytearray(), bytes(self._printed[place + len(self._nonce) :])
            del self._printed[place:]
        self._answer += part
        if b"\n" in part:
            self.answer = bytes(self._answer.partition(b"\n")[0])

    def text(self) -> str:
        """What the code printed."""
        return bytes(self._printed[: self._limit]).decode("utf-8", "replace") if self._kept else ""

    def _drop(self, count: int) -> None:
        if count > 0:
            self._dropped += count
            del self._printed[:count]


def _read(text: bytes) -> Answer:
    """Parse an answer. The code may have forged it, so only its being a JSON object is checked."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return {"error": "the answer is not JSON"}
    return answer if isinstance(answer, dict) else {"error": "the answer is not an object"}
