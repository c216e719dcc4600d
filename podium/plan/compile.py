"""Compiles the programs of a run in processes of their own, two at once, and keeps what they say.

An answer is kept under all that decides it: the phase, the settings that its program and its neighbours in memory
follow from, the model, the machine, our own source and the versions of the compiler. So an interrupted plan goes on
where it was, and a second one needs no jax at all. No jax here.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

import podium
from podium.accelerators import GIB, Accelerator
from podium.algorithms.recipes import Recipe, make_recipe
from podium.config.schema import Config
from podium.plan.compiled import CompiledPhase
from podium.plan.store import cache_folder, compiler_versions, write_file
from podium.plan.topology import check_compiler, compiler_environment
from podium.plan.worker import JOB, OUTCOME, Job

AT_ONCE = 2
LIMIT_S = 1800.0
"""Of one compilation: a 3B model's update takes 1 to 3 minutes on two cores."""
POLL_S = 0.05
PACKAGE = Path(podium.__file__).parent
SOURCES = (
    "sharding.py",
    *(f"{part}/*.py" for part in ("config", "models", "rollout", "algorithms", "train")),
    *(f"plan/{name}.py" for name in ("phases", "worker", "compiled", "hlo", "cost", "traffic", "collectives")),
    *(f"plan/{name}.py" for name in ("memory", "liveness")),
)
"""What an answer follows from, besides settings and compiler."""
ELSEWHERE = {"name", "runs_dir", "model", "chat_template", "seed", "tasks", "grading", "eval", "checkpoint", "metrics"}
"""Settings that no program depends on; the model's numbers are asked for themselves."""
OF_TRAINING = {"steps", "prompts_per_step", "group_size", "algorithm", "train"}
OF_ENGINE = {"slots", "refill_steps", "prefill_rows"}
PHASES_OF_ENGINE = ("sync", "prefill", "place", "place_across", "decode")
_ANSWER = TypeAdapter(CompiledPhase)


class CompilerError(Exception):
    """The compiler crashed, took too long, or had too little memory; the message names the file with its text."""

    exit_code = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a phase of a plan is."""

    phase: str
    state: Literal["cached", "compiling", "compiled"]
    seconds: float
    """Since its compilation began."""
    done: int
    """Phases that are finished, this one included if it is."""
    total: int


OnProgress = Callable[[Progress], None]


def compile_phases(
    jobs: Sequence[Job],
    *,
    folder: Path | None = None,
    at_once: int = AT_ONCE,
    limit_s: float = LIMIT_S,
    progress: OnProgress | None = None,
) -> dict[str, CompiledPhase]:
    """Every phase's compiled program, by name; from disk what was compiled before.

    Args:
        jobs: one for each phase; what takes longest should come first.
        folder: where answers and texts of crashes are kept; unset: the user's cache folder.
        at_once: processes.
        limit_s: seconds that one compilation may take.
        progress: called when a phase begins or ends, and about every second while one is compiled.

    Raises:
        ValueError: the config does not fit the machine, or there is no compiler for it.
        CompilerError: a program could not be compiled; those that were are kept.
    """
    for machine in {job.accelerator for job in jobs if job.accelerator.generation != "cpu"}:
        check_compiler(machine)
    folder = folder or cache_folder()
    report = progress or (lambda _: None)
    found: dict[str, CompiledPhase] = {}
    waiting: list[Job] = []
    for job in jobs:
        path = folder / "answers" / f"{answer_key(job)}.json"
        if path.exists():
            found[job.phase] = _ANSWER.validate_json(path.read_bytes())
            report(Progress(phase=job.phase, state="cached", seconds=0.0, done=len(found), total=len(jobs)))
        else:
            waiting.append(job)
    with contextlib.ExitStack() as stack:
        running: list[_Worker] = []
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(stack.enter_context(_Worker(waiting.pop(0), folder, limit_s)))
            for worker in list(running):
                if (compiled := worker.result()) is not None:
                    running.remove(worker)
                    found[worker.job.phase] = compiled
                    path = folder / "answers" / f"{answer_key(worker.job)}.json"
                    write_file(path, _ANSWER.dump_json(compiled))
                if compiled is not None or worker.tells():
                    state = "compiling" if compiled is None else "compiled"
                    report(
                        Progress(
                            phase=worker.job.phase,
                            state=state,
                            seconds=worker.seconds,
                            done=len(found),
                            total=len(jobs),
                        )
                    )
            time.sleep(POLL_S)
    return found


def answer_key(job: Job) -> str:
    """The name of what is known of a job: a hash of all that decides it."""
    config = job.config.model_dump(mode="json", exclude=ELSEWHERE)
    settings: Any = config
    if job.phase.partition(":")[0] in PHASES_OF_ENGINE:
        settings = {name: value for name, value in config.items() if name not in OF_TRAINING}
        settings |= {"optimizer": job.config.train.optimizer.name, "reference": _recipe(job.config).needs_reference}
    else:
        settings["rollout"] = {name: value for name, value in config["rollout"].items() if name not in OF_ENGINE}
    decisive = {
        "phase": job.phase,
        "settings": settings,
        "decoder": dataclasses.asdict(job.decoder),
        "accelerator": dataclasses.asdict(job.accelerator),
        "versions": compiler_versions(job.accelerator),
        "flags": [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        "source": _source_hash(),
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:32]


def _recipe(config: Config) -> Recipe:
    return make_recipe(config.algorithm, group_size=config.group_size, prompts_per_step=config.prompts_per_step)


def _source_hash() -> str:
    """Of all that makes a program and reads what became of it."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in PACKAGE.glob(pattern)):
        digest.update(f"{path.relative_to(PACKAGE)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Worker:
    """A process that does one job; left early, it is killed."""

    def __init__(self, job: Job, folder: Path, limit_s: float) -> None:
        self.job, self.folder, self.limit_s = job, folder, limit_s

    def __enter__(self) -> "_Worker":
        self._stack = contextlib.ExitStack()
        self._files = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="podium-plan-")))
        (self._files / "job.json").write_bytes(JOB.dump_json(self.job))
        log = self._stack.enter_context((self._files / "log.txt").open("wb"))
        files = self._files / "job.json", self._files / "result.json"
        command = [sys.executable, "-m", "podium.plan.worker", *files, str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            env=_environment(self.job.accelerator),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        self._start = self._told = time.perf_counter()
        self._told -= 1.0
        self._host_bytes = 0
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._stack.close()

    @property
    def seconds(self) -> float:
        """Since the process began."""
        return time.perf_counter() - self._start

    def tells(self) -> bool:
        """Whether it is time to say that it goes on: once a second."""
        if (now := time.perf_counter()) - self._told < 1.0:
            return False
        self._told = now
        return True

    def result(self) -> CompiledPhase | None:
        """What became of it; None while it runs.

        Raises:
            ValueError: the config does not fit the machine.
            CompilerError: nothing became of it.
        """
        status = self._process.poll()
        if status is None:
            self._host_bytes = max(self._host_bytes, _resident_bytes(self._process.pid))
            if self.seconds > self.limit_s:
                raise CompilerError(
                    f"compiling {self.job.phase} for {self.job.accelerator.name} took longer than {self.limit_s:.0f} s;"
                    " allow more, or plan with --fast"
                )
            return None
        if status != 0:
            raise CompilerError(self._crash(status))
        outcome = OUTCOME.validate_json((self._files / "result.json").read_bytes())
        if outcome.compiled is None:
            raise ValueError(outcome.refused)
        return outcome.compiled

    def _crash(self, status: int) -> str:
        """What a process that ended early leaves, and where its text is kept."""
        text = (self._files / "log.txt").read_bytes()
        name = f"{self.job.accelerator.name}-{self.job.phase.replace(':', '-')}-{self._process.pid}.txt"
        path = self.folder / "crashes" / name
        write_file(path, text)
        where = f"compiling {self.job.phase} for {self.job.accelerator.name}"
        if status == -signal.SIGKILL or b"bad_alloc" in text or b"MemoryError" in text:
            machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return (
                f"{where}: this machine has too little memory; the compiler had taken {self._host_bytes / GIB:.1f} of"
                f" its {machine / GIB:.1f} GiB when it ended. Free some, or plan with --fast. Its text: {path}"
            )
        last = text.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return f"{where}: the compiler failed ({how}): {last[0][:300]}\nIts whole text: {path}"


def _environment(accelerator: Accelerator) -> dict[str, str]:
    """Of a process that compiles for it."""
    own = {"JAX_PLATFORMS": "cpu"} if accelerator.generation == "cpu" else compiler_environment(accelerator)
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | own | {"PYTHONPATH": os.pathsep.join(paths)}


def _resident_bytes(pid: int) -> int:
    """The most memory that a process has had so far; 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = [line for line in lines if line.startswith("VmHWM:")]
    return int(found[0].split()[1]) * 1024 if found else 0
