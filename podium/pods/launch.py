"""From ready machines to a running job, and watching it: every step on all workers, and safe to do twice.

    reach one -> what runs there? -> send -> unpack -> set up -> probe all -> secrets -> start all -> watch

A job has a name of its own for every attempt; the name begins with the run's, and with a digest of config and code, so
that the same command given again finds the job that it started, from any laptop.
"""

import base64
import contextlib
import dataclasses
import hashlib
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.job.records import Outcome, outcome
from podium.pods.push import HOME, Package
from podium.pods.remote import Answer, Remote, RemoteError, arrived
from podium.pods.secrets import LAST_LINE, Secrets, written
from podium.pods.slices import Clock

Status = Mapping[str, Any]

AGENT = f"{HOME}/agent"
SECRETS = "/dev/shm/podrun-secrets"
"""On the workers: a folder in memory."""
ASKED_TO_STOP = f"{HOME}/asked-to-stop"
"""Holds the job that `podium pod stop` ended, so that nobody starts it again."""
NO_AGENT = 3
NOTHING_STARTED: Status = {
    **dict.fromkeys(("host", "job", "worker", "workers", "exit", "pid", "record", "progress")),
    "state": "none",
    "log_bytes": 0,
}
UNPACK_S = 300.0
SETUP_S = 3600.0
SETUP_POLL_S = 10.0
LOOK_S, LOOK_WORKER_S = 15.0, 0.5
"""Seconds that all workers, and each more, have to say how they are: a host that is gone is to be named soon."""
START_S = 90.0
STOP_S = 60.0
SKEW_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What shall run."""

    name: str
    config: str
    """The resolved settings, as YAML."""
    package: Package
    accelerator: str
    devices_per_worker: int | None
    """Chips that each machine must have; None: not looked at."""
    secrets: Secrets
    environment: Mapping[str, str]
    """Variables that are not secret."""
    port: int = 8476

    @property
    def prefix(self) -> str:
        """Of the names of its jobs: equal for equal settings and code."""
        digest = hashlib.sha256(f"{self.package.key}\n{self.config}".encode()).hexdigest()[:6]
        return f"{re.sub(r'[^A-Za-z0-9._-]', '-', self.name)[:40]}-{digest}-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """What the workers say of the latest job, or of one."""

    statuses: Sequence[Status | None]
    """In the order of the workers; None: no answer."""
    asked_to_stop: str | None = None
    """The job that was ended by `podium pod stop`."""

    @property
    def outcome(self) -> Outcome:
        """What has become of it."""
        return outcome(self.statuses)

    @property
    def job(self) -> str | None:
        """The job that is told of."""
        return next((status["job"] for status in self.statuses if status and status.get("job")), None)

    @property
    def step(self) -> int:
        """How far it is, in steps."""
        steps = [
            (status.get(part) or {}).get("step") or 0
            for status in self.statuses
            if status
            for part in ("progress", "record")
        ]
        return max(steps, default=0)

    @property
    def silent(self) -> list[int]:
        """Workers that did not answer."""
        return [worker for worker, status in enumerate(self.statuses) if status is None]


def look(remote: Remote, job: str | None = None) -> View:
    """What all workers say of a job, or of the latest."""
    command = f"cat {ASKED_TO_STOP} 2>/dev/null; echo; [ -x {AGENT} ] || exit {NO_AGENT}; {AGENT} status {job or ''}"
    answers = remote.ask(f"({command.strip()})", timeout_s=LOOK_S + LOOK_WORKER_S * remote.workers)
    statuses: list[Status | None] = [None] * remote.workers
    asked = None
    for worker, answer in answers.items():
        asked = answer.text.partition("\n")[0].strip() or asked
        statuses[worker] = NOTHING_STARTED if answer.status == NO_AGENT else answer.json()
    return View(statuses=statuses, asked_to_stop=asked)


def launch(remote: Remote, run: Run, *, clock: Clock, say: Callable[[str], None]) -> str:
    """Start the run, or find it running or done; the name of its job.

    Raises:
        RemoteError: not all workers did a step, or another job has them; the message names the workers.
    """
    remote.warm_up()
    before = look(remote)
    same = [status for status in before.statuses if status and (status["job"] or "").startswith(run.prefix)]
    if any(status and status["state"] in ("running", "starting") for status in before.statuses):
        if not same:
            raise RemoteError(
                f"{remote.name} is busy with job {before.job}; wait for it, or: podium pod stop {remote.name}"
            )
        say(f"{before.job} runs already; following it")
        return str(before.job)
    if len(same) == remote.workers and before.outcome == "done":
        say(f"{before.job} is done")
        return str(before.job)
    attempts = [int(status["job"].removeprefix(run.prefix)) for status in same]
    job = f"{run.prefix}{max(attempts, default=0) + 1}"
    say(f"sending code {run.package.key} and config to {remote.workers} workers")
    _send(remote, run, job, say)
    if run.package.sets_up:
        _set_up(remote, run, f"{job}-setup", clock, say)
    try:
        for worker, kept in _secrets_of(run):
            with written(kept, _secrets_file(worker)) as file:
                remote.send([file], SECRETS, worker=worker)
        say(f"starting {job} on {remote.workers} workers")
        remote.check_all(remote.ask(start_command(remote.addresses, run, job), timeout_s=START_S), f"starting {job}")
    except BaseException:
        remote.ask(f"rm -rf {SECRETS}")
        raise
    return job


def start_command(addresses: Sequence[str], run: Run, job: str) -> str:
    """What starts the job on a worker, once, with the secrets that were sent, which are deleted."""
    package = run.package
    settings = {"REQUIRE_JAX_PROCESS_COUNT": str(len(addresses)), **run.environment}
    words = [
        f"--peers {','.join(addresses)} --port {run.port}",
        f"--accelerator {run.accelerator}",
        f'--cwd "$code/"{shlex.quote(package.inside)}',
        "--env PYTHONPATH=$code",
        *(f"--env {name}={shlex.quote(value)}" for name, value in settings.items()),
        *(("--env-file $secrets",) if run.secrets else ()),
    ]
    train = f'{package.python_command()} -m podium.cli train "$HOME/{package.folder}/{job}.yaml" --plain'
    start = f"{AGENT} start {job} --worker $worker {' '.join(words)} -- {train}"
    return f"{_own_secrets(run)}code={package.code}; {start}; done=$?; rm -rf {SECRETS}; (exit $done)"


def _own_secrets(run: Run) -> str:
    """Sets `$secrets` to a worker's own file; one that has not arrived whole is no file, so that nothing starts."""
    if not run.secrets:
        return ""
    files = [(worker, f"{SECRETS}/{_secrets_file(worker)}") for worker, _ in _secrets_of(run)]
    cases = " ".join(f"{'*' if worker is None else worker}) secrets={file};;" for worker, file in reversed(files))
    return f"case $worker in {cases} esac; [ \"$(tail -n 1 $secrets 2>&1)\" = '{LAST_LINE}' ] || rm -f $secrets; "


def _secrets_of(run: Run) -> list[tuple[int | None, Secrets]]:
    """Whose file has which secrets: one for all, and worker 0's own where it needs more."""
    others, first = run.secrets.of_worker(1), run.secrets.of_worker(0)
    files: list[tuple[int | None, Secrets]] = [(None, others)] if run.secrets else []
    return files if first.names == others.names else [*files, (0, first)]


def _secrets_file(worker: int | None) -> str:
    return "all" if worker is None else f"worker{worker}"


def stop(remote: Remote, job: str, *, remember: bool) -> View:
    """End a job on all workers, with all that it started.

    Args:
        remote: the workers.
        job: which job.
        remember: leave word that this was asked for, so that nobody starts it again.

    Raises:
        RemoteError: with the workers on which something is left.
    """
    word = f"echo {job} > {ASKED_TO_STOP}; " if remember else ""
    command = f"rm -rf {SECRETS}; [ -x {AGENT} ] || exit 0; {word}{AGENT} stop {job} --grace {STOP_S:.0f}"
    remote.ask_all(f"({command})", f"stopping {job}", timeout_s=STOP_S + 60.0)
    return look(remote, job)


def read_log(remote: Remote, worker: int, job: str | None, place: int, limit: int = 2**18) -> tuple[str, int]:
    """What a worker's log has after `place` bytes, up to `limit`, and the place behind it; "" if it does not answer."""
    command = f"{AGENT} logs {job or ''} --from-byte {place} 2>/dev/null | head -c {limit} | base64 -w0"
    answer = remote.ask(command, worker=worker).get(worker)
    if answer is None:
        return "", place
    data = base64.b64decode(answer.text)
    return data.decode(errors="replace"), place + len(data)


def _send(remote: Remote, run: Run, job: str, say: Callable[[str], None]) -> None:
    """Send code and config, unpack them, and see that every worker has what is needed."""
    folder = run.package.folder
    fresh = f"rm -rf {SECRETS} {ASKED_TO_STOP} && mkdir -m 700 {SECRETS}"
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / f"{job}.yaml"
        config.write_text(run.config, encoding="utf-8")
        files = [*run.package.files, config]
        remote.ask_all(f"umask 077; mkdir -p {folder}", "making folders")
        remote.send(files, folder)
        expected = f" --expect-devices {run.devices_per_worker}" if run.devices_per_worker else ""
        steps = (arrived(files, folder), run.package.unpack_command(), fresh, f"{AGENT} probe{expected}")
        answers = remote.ask(" && ".join(steps), timeout_s=UNPACK_S)
    _check_probes(remote, answers, say)


def _set_up(remote: Remote, run: Run, job: str, clock: Clock, say: Callable[[str], None]) -> None:
    """The user's script and the installation, as a job of its own, waited for on all workers."""
    say("setting up the workers: this takes minutes the first time")
    command = f"{AGENT} start {job} -- sh -c {shlex.quote(run.package.setup_command())}"
    remote.ask_all(command, "starting the setup", timeout_s=START_S)
    until = clock.time() + SETUP_S
    while clock.time() < until:
        view = look(remote, job)
        ended = [status is not None and status["state"] in ("finished", "killed") for status in view.statuses]
        failed = [worker for worker, status in enumerate(view.statuses) if status and status["exit"]]
        if failed:
            text, _ = read_log(remote, failed[0], job, 0)
            last = " | ".join(text.strip().splitlines()[-5:])
            raise RemoteError(f"{remote.name}: the setup failed on worker(s) {', '.join(map(str, failed))}: {last}")
        if all(ended):
            return
        clock.sleep(SETUP_POLL_S)
    raise RemoteError(f"{remote.name}: the setup is not done after {SETUP_S:.0f} s; podium pod ssh {remote.name}")


def _check_probes(remote: Remote, answers: dict[int, Answer], say: Callable[[str], None]) -> None:
    """Raises RemoteError where a worker has not got what was sent, or has not what is needed."""
    found = {}
    for worker, answer in answers.items():
        with contextlib.suppress(RemoteError):  # it did not come to its probe
            found[worker] = answer.json()
    problems = [f"    worker {worker}: {problem}" for worker in found for problem in found[worker].get("problems", ())]
    if problems:
        raise RemoteError("\n".join((f"{remote.name}: workers that cannot be used:", *problems)))
    remote.check_all(answers, "unpacking the code")
    clocks = [each["time"] for each in found.values()]
    if max(clocks) - min(clocks) > SKEW_S:
        say(f"warning: the workers' clocks differ by {max(clocks) - min(clocks):.0f} s")
