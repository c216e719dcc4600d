"""Bars b and c: who is named where a machine is mismatched or fails."""

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benches.pods.bench import DEVICES, LIMIT_S, WORKERS, Bench, Row, on_cpu, options, rented, seconds_since, wait
from podium.job.job_records import GUARD, MISSING, first_failure
from podium.pods.launch import AGENT, poll
from podium.pods.remote import Remote
from tests.pods.network_world import job_processes
from tests.pods.unreliable import SIGNS

HANG_S = 8
NAMED_S, GUARD_S, MISSING_S = 40.0, 10.0, 75.0
"""Seconds until a cause is named on the laptop, by the guard, and by the guard where it waits for who is missing."""
UNLIKE = {
    "missing": (2, "worker 2 is missing"),
    "duplicated": (1, "worker 1 was started twice"),
    "other config": (2, r"learning_rate is '0\.5' on worker 2"),
    "other commit": (3, "commit is 'None' on worker 3"),
    "unshared folder": (3, r"worker 3 \(.*does not see what worker 0 writes"),
}
"""Which machine is mismatched, and the message that must name it."""


def bar_b(bench: Bench) -> Iterator[Row]:
    """The guard names the machine that is missing, duplicated or mismatched."""
    config = bench.config("guarded", runs_dir="runs", steps=1)
    with rented(bench):
        bench.pod(*bench.counting_words("before", steps=1))  # leaves code and agent on the machines
        remote = bench.remote()
        for what, (guilty, named) in UNLIKE.items():
            job = f"guard-{what.replace(' ', '-')}"
            commands = guard_commands(bench, remote, config, job, what, guilty)
            cases = " ".join(f"{worker}) {command};;" for worker, command in enumerate(commands))
            begun = time.monotonic()
            remote.ask_all(f"case $worker in {cases} esac", "starting", timeout_s=60.0)
            line = wait(lambda job=job: first_failure(poll(remote, job).workers), 120.0)
            named_s = seconds_since(begun)
            guard_s = guards_seconds(remote, job)
            limit_s, status = (MISSING_S, MISSING) if what == "missing" else (GUARD_S, GUARD)
            started = [worker for worker in range(WORKERS) if what != "missing" or worker != guilty]
            ends = wait(lambda job=job, started=started: exits(remote, job, started), 60.0)
            left = wait(lambda: bench.left() == 0, 10.0) is None
            yield {
                "case": what,
                "guard_s": guard_s,
                "named_on_laptop_s": named_s,
                "line": line,
                "exits": ends,
                "good": bool(line and re.search(named, line) and guard_s < limit_s and set(ends or ()) == {status})
                and not left,
            }


def guard_commands(bench: Bench, remote: Remote, config: Path, job: str, what: str, guilty: int) -> list[str]:
    """What starts the job on each machine, where one is missing, duplicated or mismatched."""

    def start(worker: int, *, agent: str = AGENT, code: str = "$HOME/podrun/code/*", more: str = "") -> str:
        folder = "$HOME" if (what, worker) == ("unshared folder", guilty) else str(bench.world.shared)
        variables = " ".join(options({**on_cpu(DEVICES), SIGNS: bench.signs, "PYTHONPATH": "$code"}))
        train = f"{sys.executable} -m podium.cli train {config} --plain{more}"
        place = f"--worker {worker} --peers {','.join(remote.addresses)} --cwd {folder}"
        return f"code=$(echo {code}); {agent} start {job} {place} {variables} -- {train}"

    commands = [start(worker) for worker in range(WORKERS)]
    if what == "missing":
        commands[guilty] = "true"
    elif what == "duplicated":
        again = start(guilty, agent=f"{AGENT} --home $HOME/again")  # first: one that comes late ends alone
        commands[guilty + 1] = f"{again}; {commands[guilty + 1]}"
    elif what == "other config":
        commands[guilty] = start(guilty, more=" --set train.optimizer.learning_rate=0.5")
    elif what == "other commit":
        copied = "cp -rT $HOME/podrun/code/* $HOME/copy && rm -rf $HOME/copy/.git"
        commands[guilty] = f"{copied}; {start(guilty, code='$HOME/copy')}"
    return commands


def guards_seconds(remote: Remote, job: str) -> float:
    """From the first worker's start to the first verdict of the guard, by the machines' clocks."""
    statuses = [status for status in poll(remote, job).workers if status and status["job"]]
    verdicts = [status["record"]["time"] for status in statuses if status["record"]]
    return round(min(verdicts) - min(status["created"] for status in statuses), 1) if verdicts else LIMIT_S


def exits(remote: Remote, job: str, workers: Sequence[int]) -> list[int] | None:
    """The exit statuses of these workers; None until all have ended."""
    statuses = poll(remote, job).workers
    found = [(statuses[worker] or {}).get("exit") for worker in workers]
    return None if None in found else [int(each or 0) for each in found]


FAILURES = {
    "kill -9 of a worker": (2, r"worker 2 \(.*signal 9 \(SIGKILL\)"),
    "kill -9 of worker 0": (0, r"worker 0 \(.*signal 9 \(SIGKILL\)"),
    "kill -9 of all of a machine's": (1, r"worker 1 \(.*was killed with all its processes"),
    "cut cable": (2, "worker 2 does not answer"),
    "exception": (1, r"worker 1 \(.*a bug that one host alone meets"),
    "hang": (3, r"worker 3 \(.*was stuck in rollout"),
}
"""Which machine fails, and the message that must name it."""


def bar_c(bench: Bench) -> Iterator[Row]:
    """The laptop that follows a run names who failed first, and why."""
    with rented(bench):
        for number, (what, (guilty, named)) in enumerate(FAILURES.items()):
            name = f"failing-{number}"
            impatient = options({"PODRUN_HANG_S": HANG_S} if what == "hang" else {})
            with bench.following(*bench.run_words(bench.config(name), *impatient)) as (laptop, out):
                if not wait(lambda name=name: len(bench.metrics(name)) >= 3):
                    raise RuntimeError(f"the run did not begin:\n{out.read_text()[-3000:]}")
                time.sleep(10.0)  # the laptop has looked at it running
                begun = time.monotonic()
                fail(bench, what, guilty)
                found = wait(lambda out=out, named=named: re.search(named + ".*", out.read_text()), LIMIT_S)
                named_s = seconds_since(begun)
                ended = wait(lambda: bench.left() == 0, 120.0) is not None
                ended_s = seconds_since(begun) if ended else None
                if what == "cut cable":
                    bench.world.hosts.mend(guilty)
                status = wait(lambda laptop=laptop: laptop.poll() is not None) and laptop.returncode
            for sign in bench.signs.iterdir():
                sign.unlink()
            limit_s = NAMED_S + (HANG_S if what == "hang" else 0.0)
            yield {
                "case": what,
                "named_s": named_s,
                "line": found and found[0],
                "all_ended_s": ended_s,
                "status": status,
                "good": bool(found and named_s < limit_s and ended and status),
            }


def fail(bench: Bench, what: str, guilty: int) -> None:
    """Have it happen to a machine."""
    if what == "cut cable":
        bench.world.hosts.cut(guilty)
    elif what in ("exception", "hang"):
        (bench.signs / str(guilty)).write_text("raise" if what == "exception" else "hang")
    else:
        home = bench.world.hosts.homes[guilty]
        everything = "all of" in what
        for process in job_processes(home):
            supervises = b"\0supervise\0" in Path(f"/proc/{process}/cmdline").read_bytes()
            if everything or not supervises:
                os.kill(process, 9)
