"""Compiles a run's programs in separate processes, two at a time, and caches the results on disk.

The cache key covers everything that can change a result: the phase, the whole config, the model, the machine, our own
source and the compiler's versions. So an interrupted plan resumes where it stopped, and repeating a plan needs no jax.
After a change to the config every phase is lowered again, but `podium.plan.compiled.compile_worker` compiles only the
programs whose text has changed. No jax here.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

import podium
from podium.accelerators import GIB, Accelerator
from podium.files import user_cache, write_atomically
from podium.plan.compiled.compile_worker import JOB, JOB_RESULT, CompiledPhase, Job, key_of
from podium.plan.request.topology import check_compiler, compiler_environment, missing_library

AT_ONCE = 2
LIMIT_S = 1800.0  # limit of one compilation; the update of a 3B model takes 60 to 180 s on two cores
POLL_S = 0.05
PACKAGE = Path(podium.__file__).parent
_ANSWER = TypeAdapter(CompiledPhase)


State = Literal["cached", "compiling", "compiled"]


class CompilerError(Exception):
    """The compiler crashed, timed out or ran out of memory; the message names the file with its output."""

    exit_code = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileProgress:
    """Progress of the compilation of one phase."""

    phase: str
    state: State
    seconds: float  # since its compilation started
    done: int  # finished phases, including this one if it is finished
    total: int


OnProgress = Callable[[CompileProgress], None]


def compile_phases(
    jobs: Sequence[Job],
    *,
    folder: Path | None = None,
    at_once: int = AT_ONCE,
    limit_s: float = LIMIT_S,
    progress: OnProgress | None = None,
) -> dict[str, CompiledPhase]:
    """Compile the programs of one config with `compile_jobs`; returns the results by phase name."""
    found = compile_jobs(jobs, folder=folder, at_once=at_once, limit_s=limit_s, progress=progress)
    return {job.phase: compiled for job, compiled in zip(jobs, found, strict=True)}


def compile_jobs(
    jobs: Sequence[Job],
    *,
    folder: Path | None = None,
    at_once: int = AT_ONCE,
    limit_s: float = LIMIT_S,
    progress: OnProgress | None = None,
) -> list[CompiledPhase]:
    """Compile programs, reuse cached results, and return the results in the order of the jobs.

    Args:
        jobs: the programs, in the order in which to start them; put the slowest first.
        folder: cache for results and for the output of crashed compilers; unset: the user's cache folder.
        at_once: number of compiling processes at a time.
        limit_s: timeout of one compilation in seconds.
        progress: called when a phase ends, and repeatedly while one compiles.

    Raises:
        ValueError: the config does not fit the machine, or the machine's compiler is not installed.
        CompilerError: a program could not be compiled; results from before it stay in the cache.
    """
    for machine in {job.accelerator for job in jobs}:
        check_compiler(machine)
    folder = _make_folders(folder or cache_folder())
    found: dict[int, CompiledPhase] = {}

    def report(job: Job, state: State, seconds: float) -> None:
        if progress is not None:
            progress(CompileProgress(phase=job.phase, state=state, seconds=seconds, done=len(found), total=len(jobs)))

    for number, job in enumerate(jobs):
        path = _answer_path(folder, job)
        if path.exists():
            found[number] = _ANSWER.validate_json(path.read_bytes())
            report(job, "cached", 0.0)
    waiting = [number for number in range(len(jobs)) if number not in found]
    with contextlib.ExitStack() as stack:
        running: dict[int, _Compilation] = {}
        while waiting or running:
            for number in waiting[: at_once - len(running)]:
                running[number] = stack.enter_context(_Compilation(jobs[number], folder, limit_s))
            waiting = [number for number in waiting if number not in running]
            for number, each in list(running.items()):
                compiled = each.result()
                if compiled is not None:
                    del running[number]
                    found[number] = compiled
                    write_atomically(_answer_path(folder, each.job), _ANSWER.dump_json(compiled))
                report(each.job, "compiling" if compiled is None else "compiled", each.seconds)
            time.sleep(POLL_S)
    return [found[number] for number in range(len(jobs))]


def _make_folders(folder: Path) -> Path:
    for name in ("answers", "crashes"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return folder


def cache_folder() -> Path:
    """The user's cache folder for the planner's results and compiled programs."""
    return user_cache("plan")


def answer_key(job: Job) -> str:
    """The cache key of a job: a hash of everything that can change its result."""
    return key_of([JOB.dump_python(job, mode="json", exclude={"programs"}), _source_hash()], job.accelerator)


def _answer_path(folder: Path, job: Job) -> Path:
    return folder / "answers" / f"{answer_key(job)}.json"


def sources() -> list[Path]:
    """The source files that the cache key covers: the whole package, since a shorter list would go stale."""
    return sorted(PACKAGE.glob("**/*.py"))


@functools.cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    for path in sources():
        digest.update(f"{path.relative_to(PACKAGE)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Compilation:
    """A process that compiles one job; killed on leaving the context."""

    def __init__(self, job: Job, folder: Path, limit_s: float) -> None:
        self.job = job
        self.folder = folder
        self.limit_s = limit_s

    def __enter__(self) -> "_Compilation":
        self._stack = contextlib.ExitStack()
        self._files = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="podium-plan-")))
        (self._files / "job.json").write_bytes(JOB.dump_json(self.job))
        log = self._stack.enter_context((self._files / "log.txt").open("wb"))
        files = self._files / "job.json", self._files / "result.json"
        command = [sys.executable, "-m", "podium.plan.compiled.compile_worker", *files, str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            env=worker_environment(self.job.accelerator),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # so that Ctrl-C reaches only the parent
        )
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._stack.close()

    @property
    def seconds(self) -> float:
        """Seconds since the compiling process started."""
        return time.perf_counter() - self._start

    def result(self) -> CompiledPhase | None:
        """The compiled program; None while the process is running.

        Raises:
            ValueError: the config does not fit the machine.
            CompilerError: the process failed.
        """
        status = self._process.poll()
        if status is None:
            if self.seconds > self.limit_s:
                raise CompilerError(
                    f"compiling {self.job.phase} for {self.job.accelerator.name} took longer than {self.limit_s:.0f} s;"
                    " allow more, or plan with --fast"
                )
            return None
        if status != 0:
            raise CompilerError(self._crash(status))
        result = JOB_RESULT.validate_json((self._files / "result.json").read_bytes())
        if isinstance(result, str):
            raise ValueError(result)
        return result

    def _crash(self, status: int) -> str:
        """The error message of a failed process, with the path of its output."""
        text = (self._files / "log.txt").read_bytes()
        name = f"{self.job.accelerator.name}-{self.job.phase.replace(':', '-')}-{self._process.pid}.txt"
        path = self.folder / "crashes" / name
        write_atomically(path, text)
        where = f"compiling {self.job.phase} for {self.job.accelerator.name}"
        if status == -signal.SIGKILL or b"bad_alloc" in text or b"MemoryError" in text:
            machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            taken = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            return (
                f"{where}: this machine has too little memory; the compiler had taken {taken / GIB:.1f} of"
                f" its {machine / GIB:.1f} GiB when it ended. Free some, or plan with --fast. Its output: {path}"
            )
        if library := missing_library(text.decode(errors="replace")):
            return f"{where}: {library}. Its output: {path}"
        last = text.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return f"{where}: the compiler failed ({how}): {last[0][:300]}\nIts whole output: {path}"


def worker_environment(accelerator: Accelerator) -> dict[str, str]:
    """The environment of a process that traces or compiles for an accelerator."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | compiler_environment(accelerator) | {"PYTHONPATH": os.pathsep.join(paths)}
