"""A job of several hosts in which one thing goes wrong: who is named as its cause, how soon, and is anything left.

    python -m benches.failures --hosts 4        (CPU, Linux; a minute or two per failure)

Each host is a folder on this machine with the worker's agent, as `podium pod` uses it, and real jax.distributed between
them on loopback. Prints a line per failure: seconds until the cause is known from the workers' statuses, the line that
says it, the exit status of each worker; and writes benches/results/failures-cpu.json. Exit status 1 where a failure is
not named rightly, or a process is left.
"""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import yaml

from benches.recipes import write_tiny_model
from benches.record import arguments, record
from podium.pods.records import Status, first_failure
from podium.pods.supervisor import Host
from podium.tasks.arithmetic import Arithmetic
from podium.tasks.task import Prompt
from podium.train.setup import prepare_platform

ROOT = Path(__file__).parents[1]
SETTINGS: dict[str, Any] = {
    "steps": 100_000,
    "prompts_per_step": 8,
    "group_size": 2,
    "tasks": [{"name": "benches.failures:Unreliable"}],
    "grading": {"workers": 0},
    "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 3, "slots": 8, "prefill_rows": 8},
    "train": {"rows_per_device": 2},
    "eval": {"at_start": False, "at_end": False},
    "checkpoint": {"every_steps": 0},
}
HANG_S = 8
LIMIT_S = 300.0
POLL_S = 0.3
SIGN = "FAILURES_SIGN"
"""Names a file; what it says happens to the process that has it in its environment."""


class Unreliable(Arithmetic):
    """Arithmetic whose grader fails or hangs as soon as a file says so."""

    def grade(self, prompt: Prompt, completion: str) -> float:
        """As arithmetic does, until told otherwise."""
        sign = Path(os.environ[SIGN])
        what = sign.read_text() if sign.exists() else ""
        if what == "raise":
            raise RuntimeError("a bug that one host alone meets")
        if what == "hang":
            time.sleep(1e6)
        return super().grade(prompt, completion)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """What goes wrong, and how it must be told."""

    name: str
    guilty: int
    named: str
    """Must be in the line that tells the cause."""
    before: bool = False
    """Whether it is there from the start: the launch guard has to find it."""
    limit_s: float = 40.0
    """Until the cause is known."""


FAILURES = (
    Failure(name="missing", guilty=2, named="worker 2 is missing", before=True, limit_s=10.0),
    Failure(name="duplicate", guilty=1, named="worker 1 was started twice", before=True, limit_s=10.0),
    Failure(name="other config", guilty=2, named="learning_rate is '0.5' on worker 2", before=True, limit_s=10.0),
    Failure(name="other commit", guilty=3, named="commit is 'None' on worker 3", before=True, limit_s=10.0),
    Failure(name="unshared folder", guilty=3, named="worker 3", before=True, limit_s=10.0),
    Failure(name="kill -9", guilty=2, named="signal 9 (SIGKILL)"),
    Failure(name="kill -9 of the coordinator", guilty=0, named="signal 9 (SIGKILL)"),
    Failure(name="kill -9 of all of a host", guilty=1, named="was killed with all its processes"),
    Failure(name="exception", guilty=1, named="a bug that one host alone meets"),
    Failure(name="hang", guilty=3, named="was stuck in rollout", limit_s=HANG_S + 5.0),
)


class Job:
    """A job on hosts that are folders."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.folder, self.number = folder, hosts
        self.hosts = [Host(folder / f"host-{worker}") for worker in range(hosts)]
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        folder.mkdir(parents=True)

    def start(self, config: Path, failure: Failure) -> None:
        """Start all workers at once, but for what the failure changes."""
        spare = Host(self.folder / "host-again")
        places = [(worker, host) for worker, host in enumerate(self.hosts)]
        if failure.name == "missing":
            places.pop(failure.guilty)
        if failure.name == "duplicate":
            places.insert(failure.guilty + 1, (failure.guilty, spare))
            self.hosts.append(spare)
        started = [self._start(host, worker, config, failure) for worker, host in places]
        for process in started:
            answer, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, answer

    def _start(self, host: Host, worker: int, config: Path, failure: Failure) -> "subprocess.Popen[str]":
        guilty = worker == failure.guilty
        cwd, extra, package = self.folder, [], ROOT
        if guilty and failure.name == "other config":
            extra = ["--set", "train.optimizer.learning_rate=0.5"]
        if guilty and failure.name == "unshared folder":
            cwd = self.folder / "elsewhere"
            cwd.mkdir()
        if guilty and failure.name == "other commit":  # the same files, from no checkout
            package = self.folder / "copy"
            for part in ("podium", "benches"):
                shutil.copytree(ROOT / part, package / part)
        environ = {"PYTHONPATH": package, "PODRUN_HANG_S": HANG_S, SIGN: self.sign(worker)}
        command = [sys.executable, "-m", "podium.pods.agent", "--home", str(host.home), "start", "job"]
        command += ["--worker", str(worker), "--peers", ",".join(["127.0.0.1"] * self.number)]
        command += ["--port", str(self.port), "--cwd", str(cwd)]
        command += [part for name, value in environ.items() for part in ("--env", f"{name}={value}")]
        command += ["--", sys.executable, "-m", "podium.cli", "train", str(config), "--plain", *extra]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def sign(self, worker: int) -> Path:
        """Where a worker is told what happens to it."""
        return self.folder / f"sign-{worker}"

    def statuses(self) -> list[Status | None]:
        """Of all workers; one that was never started ends nothing."""
        return [host.status("job") for host in self.hosts]

    def break_it(self, failure: Failure) -> None:
        """Have the failure happen to its host."""
        host = self.hosts[failure.guilty]
        supervisor = host.status("job")["pid"]
        if failure.name in ("exception", "hang"):
            self.sign(failure.guilty).write_text("raise" if failure.name == "exception" else "hang")
            return
        everything = failure.name == "kill -9 of all of a host"
        for process in host.processes("job"):
            if everything or process != supervisor:
                os.kill(process, signal.SIGKILL)

    def stop(self) -> list[int]:
        """End what is left, as the laptop does when it knows the cause; what withstood."""
        left = [process for host in self.hosts for process in host.stop("job", 1.0)]
        return left + [process for host in self.hosts for process in host.processes("job")]


def wait(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """What the condition gives as soon as it is something; None: it did not in time."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return found or None


def steps_of(statuses: Sequence[Status | None]) -> int:
    """Steps that all have done."""
    return min(((status or {}).get("progress") or {}).get("step") or 0 for status in statuses)


def measure(folder: Path, config: Path, failure: Failure, hosts: int) -> dict[str, Any]:
    """A row of the table."""
    job = Job(folder, hosts)
    try:
        begun = time.monotonic()
        job.start(config, failure)
        if not failure.before:
            if not wait(lambda: steps_of(job.statuses()) >= 3 or first_failure(job.statuses())):
                raise TimeoutError(f"{failure.name}: the job did not begin")
            begun = time.monotonic()
            job.break_it(failure)
        line = wait(lambda: first_failure(job.statuses()))
        named_s = time.monotonic() - begun
        by_itself = wait(lambda: not any((each or {})["state"] == "running" for each in job.statuses()), 60.0)
        ended_s = time.monotonic() - begun
        exits = [(status or {})["exit"] for status in job.statuses()]
    finally:
        left = job.stop()
    whole = line is not None and failure.named in line and (failure.before or f"worker {failure.guilty} " in line)
    return {
        "failure": failure.name,
        "named_s": round(named_s, 1),
        "all_ended_s": round(ended_s, 1) if by_itself else None,
        "exits": exits,
        "line": line,
        "left": left,
        "good": bool(whole and named_s < failure.limit_s and not left),
    }


def main() -> None:
    """Prints the table and writes it."""
    parser = arguments(__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--only", action="append", choices=[failure.name for failure in FAILURES])
    args = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    prepare_platform()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        write_tiny_model(folder / "model")
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump({"model": str(folder / "model"), "runs_dir": "runs", **SETTINGS}))
        for failure in FAILURES:
            if not args.only or failure.name in args.only:
                row = measure(folder / failure.name.replace(" ", "_"), config, failure, args.hosts)
                rows.append(row)
                verdict = "" if row["good"] else "NOT GOOD: "
                print(
                    f"{row['failure']:28} {row['named_s']:5.1f} s  {row['exits']}  {verdict}{row['line']}", flush=True
                )
    result = {"hosts": args.hosts, "hang_s": HANG_S, "rows": rows}
    record(f"failures-{jax.default_backend()}", result, args.results)
    print(json.dumps({"good": sum(row["good"] for row in rows), "of": len(rows)}))
    sys.exit(not all(row["good"] for row in rows))


if __name__ == "__main__":
    main()
