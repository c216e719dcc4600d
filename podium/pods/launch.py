"""From ready machines to a running job, and its status: every step on all workers, and safe to repeat.

    connect to one -> poll -> send -> unpack -> set up -> probe all -> secrets -> start all -> poll

Every attempt is a job with a name of its own, which begins with the run's name and a digest of config and code: so the
same command, from any laptop, finds the job that it started.
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

from podium.accelerators import find_accelerator
from podium.job.records import NO_JOB, JobOutcome, Status, outcome
from podium.pods.push import DEMO_MODEL, HOME, Package
from podium.pods.remote import Remote, RemoteError, WorkerReply, arrived
from podium.pods.secrets import LAST_LINE, Secrets, written
from podium.pods.slices import Clock

AGENT = f"{HOME}/agent"
SECRETS = "/dev/shm/podrun-secrets"
"""On the workers: a folder in memory."""
ASKED_TO_STOP = f"{HOME}/asked-to-stop"
"""Contains the job that `podium pod stop` ended, so that it is not restarted."""
NO_AGENT = 3
UNPACK_S, START_S, STOP_S = 300.0, 90.0, 60.0
SETUP_S, SETUP_POLL_S = 3600.0, 10.0
POLL_S, POLL_WORKER_S = 15.0, 0.5
"""Seconds that all workers, and each of them in addition, have to report: a host that is gone is to be named soon."""
SKEW_S = 60.0
LOG_BYTES = 2**18
"""Read of a log at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What to run."""

    name: str
    config: str
    """The resolved settings, as YAML."""
    package: Package
    accelerator: str
    secrets: Secrets
    environment: Mapping[str, str]
    """Variables that are not secret."""

    @property
    def on_cpu(self) -> bool:
        """Whether it leaves the TPUs alone, as a test does."""
        return self.environment.get("JAX_PLATFORMS") == "cpu"

    @property
    def prefix(self) -> str:
        """How the names of its jobs begin: equal for equal settings and code."""
        digest = hashlib.sha256(f"{self.package.key}\n{self.config}".encode()).hexdigest()[:6]
        return f"{re.sub(r'[^A-Za-z0-9._-]', '-', self.name)[:40]}-{digest}-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStatus:
    """What the workers report about a job."""

    workers: Sequence[Status | None]
    """In the order of the workers; None: no reply."""
    asked_to_stop: str | None = None
    """The job that was ended by `podium pod stop`."""

    @property
    def outcome(self) -> JobOutcome:
        """The state of the job as a whole."""
        return outcome(self.workers)

    @property
    def name(self) -> str | None:
        """The job; None: there is none."""
        return next((status["job"] for status in self.workers if status and status.get("job")), None)

    @property
    def step(self) -> int:
        """The last step that a worker has reported."""
        parts = [status.get(part) or {} for status in self.workers if status for part in ("progress", "record")]
        return max((part.get("step") or 0 for part in parts), default=0)

    @property
    def silent(self) -> list[int]:
        """Workers that did not reply."""
        return [worker for worker, status in enumerate(self.workers) if status is None]


def status_command(job: str | None) -> str:
    """Prints the job that was asked to stop, and the agent's status of a job, or of the latest."""
    status = f"{AGENT} status {job or ''}".strip()
    return f"(cat {ASKED_TO_STOP} 2>/dev/null; echo; [ -x {AGENT} ] || exit {NO_AGENT}; {status})"


def log_command(job: str | None, offset: int) -> str:
    """Prints a job's log from a byte offset on, in base64."""
    return f"{AGENT} logs {job or ''} --from-byte {offset} 2>/dev/null | head -c {LOG_BYTES} | base64 -w0"


def stop_command(job: str, *, remember: bool) -> str:
    """Ends a job with all its processes; `remember`: it is not restarted."""
    note = f"echo {job} > {ASKED_TO_STOP}; " if remember else ""
    return f"(rm -rf {SECRETS}; [ -x {AGENT} ] || exit 0; {note}{AGENT} stop {job} --grace {STOP_S:.0f})"


def folder_command(spec: RunSpec) -> str:
    """Makes the folder for what is sent."""
    return f"umask 077; mkdir -p {spec.package.folder}"


def unpack_command(spec: RunSpec, files: Sequence[Path]) -> str:
    """Checks what has arrived, unpacks it, makes the agent and the folder for secrets, and probes the worker."""
    package = spec.package
    devices = find_accelerator(spec.accelerator).devices_per_host
    expected = "" if spec.on_cpu else f" --expect-devices {devices}"
    unpack = shlex.join(("sh", f"{package.folder}/setup.sh", "unpack", package.key, package.python or "-"))
    fresh = f"rm -rf {SECRETS} {ASKED_TO_STOP} && mkdir -m 700 {SECRETS}"
    return " && ".join((arrived(files, package.folder), unpack, fresh, f"{AGENT} probe{expected}"))


def setup_command(spec: RunSpec, job: str) -> str:
    """Starts the setup, the user's script and what is not installed yet, as a job of its own."""
    package = spec.package
    demo = DEMO_MODEL if "demo" in package.extras else "-"
    environment = "-" if package.python else package.environment
    options = shlex.join(("setup", package.key, environment, ",".join(package.extras), demo))
    setup = f'sh "$HOME/{package.folder}/setup.sh" {options}'
    return f"{AGENT} start {job} -- sh -c {shlex.quote(setup)}"


def start_command(addresses: Sequence[str], spec: RunSpec, job: str) -> str:
    """Starts the job on a worker, once, with the secrets that were sent, and deletes them."""
    package = spec.package
    installed = f'"$HOME/{HOME}/venvs/{package.environment}/bin/python"'
    python = shlex.quote(package.python) if package.python else installed
    options = [
        f"--peers {','.join(addresses)}",
        f"--accelerator {spec.accelerator}",
        f'--cwd "$code/"{shlex.quote(package.inside)}',
        "--env PYTHONPATH=$code",
        *(f"--env {name}={shlex.quote(value)}" for name, value in spec.environment.items()),
        *(("--env-file $secrets",) if spec.secrets else ()),
    ]
    train = f'{python} -m podium.cli train "$HOME/{package.folder}/{job}.yaml" --plain'
    start = f"{AGENT} start {job} --worker $worker {' '.join(options)} -- {train}"
    code = f"code=$HOME/{HOME}/code/{package.key}"
    return f"{_own_secrets(spec.secrets)}{code}; {start}; done=$?; rm -rf {SECRETS}; (exit $done)"


def _own_secrets(secrets: Secrets) -> str:
    """Sets `$secrets` to a worker's own file; a file that did not arrive complete is deleted, so nothing starts."""
    if not secrets:
        return ""
    own = f"[ $worker != 0 ] || secrets={SECRETS}/secrets-0; " if "0" in secrets_by_target(secrets) else ""
    return f"secrets={SECRETS}/secrets-all; {own}[ \"$(tail -n 1 $secrets 2>&1)\" = '{LAST_LINE}' ] || rm -f $secrets; "


def secrets_by_target(secrets: Secrets) -> dict[str, Secrets]:
    """What to send to `all` workers, and to worker `0` if it needs more."""
    others, first = secrets.of_worker(1), secrets.of_worker(0)
    return ({"all": others} if secrets else {}) | ({"0": first} if first.names != others.names else {})


def poll(remote: Remote, job: str | None = None) -> JobStatus:
    """What all workers report about a job, or about the latest."""
    replies = remote.ask(status_command(job), timeout_s=POLL_S + POLL_WORKER_S * remote.workers)
    workers: list[Status | None] = [None] * remote.workers
    asked = None
    for worker, reply in replies.items():
        asked = reply.text.partition("\n")[0].strip() or asked
        workers[worker] = NO_JOB if reply.status == NO_AGENT else reply.json()
    return JobStatus(workers=workers, asked_to_stop=asked)


def launch(remote: Remote, spec: RunSpec, *, clock: Clock, say: Callable[[str], None]) -> str:
    """Start the run, or find it running or done. Returns the name of its job.

    Raises:
        RemoteError: a step failed on some workers, or another job runs; the message names the workers.
    """
    remote.warm_up()
    before = poll(remote)
    ours = [status for status in before.workers if status and (status["job"] or "").startswith(spec.prefix)]
    running = any(status and status["state"] in ("running", "starting") for status in before.workers)
    if running and not ours:
        raise RemoteError(
            f"{remote.name} is busy with job {before.name}; wait for it, or: podium pod stop {remote.name}"
        )
    if running or (len(ours) == remote.workers and before.outcome == "done"):
        say(f"{before.name} is {'already running; following it' if running else 'done'}")
        return str(before.name)
    attempts = [int(status["job"].removeprefix(spec.prefix)) for status in ours]
    job = f"{spec.prefix}{max(attempts, default=0) + 1}"
    say(f"sending code {spec.package.key} and config to {remote.workers} workers")
    _send(remote, spec, job, say)
    if spec.package.sets_up:
        _set_up(remote, spec, f"{job}-setup", clock, say)
    try:
        for target, kept in secrets_by_target(spec.secrets).items():
            with written(kept, f"secrets-{target}") as file:
                remote.send([file], SECRETS, target=target)
        say(f"starting {job} on {remote.workers} workers")
        remote.ask_all(start_command(remote.addresses, spec, job), f"starting {job}", timeout_s=START_S)
    except BaseException:
        remote.ask(f"rm -rf {SECRETS}")
        raise
    return job


def stop_job(remote: Remote, job: str, *, remember: bool) -> JobStatus:
    """End a job on all workers; raises RemoteError where something of it is left. `remember`: it is not restarted."""
    remote.ask_all(stop_command(job, remember=remember), f"stopping {job}", timeout_s=STOP_S + 60.0)
    return poll(remote, job)


def read_log(remote: Remote, worker: int, job: str | None, offset: int) -> tuple[str, int]:
    """What a worker's log has after `offset` bytes, up to `LOG_BYTES`, and the next offset; "" without a reply."""
    reply = remote.ask(log_command(job, offset), worker=worker).get(worker)
    data = base64.b64decode(reply.text) if reply else b""
    return data.decode(errors="replace"), offset + len(data)


def _send(remote: Remote, spec: RunSpec, job: str, say: Callable[[str], None]) -> None:
    """Send code and config, unpack them, and check that every worker can run them."""
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / f"{job}.yaml"
        config.write_text(spec.config, encoding="utf-8")
        files = [*spec.package.files, config]
        remote.ask_all(folder_command(spec), "making folders")
        remote.send(files, spec.package.folder)
        replies = remote.ask(unpack_command(spec, files), timeout_s=UNPACK_S)
    _check_probes(remote, replies, say)


def _set_up(remote: Remote, spec: RunSpec, job: str, clock: Clock, say: Callable[[str], None]) -> None:
    """Run the user's script and the installation as a job of its own, and wait for it on all workers."""
    say("setting up the workers: this takes minutes the first time")
    remote.ask_all(setup_command(spec, job), "starting the setup", timeout_s=START_S)
    until = clock.time() + SETUP_S
    while clock.time() < until:
        workers = poll(remote, job).workers
        failed = [worker for worker, status in enumerate(workers) if status and status["exit"]]
        if failed:
            text, _ = read_log(remote, failed[0], job, 0)
            last = " | ".join(text.strip().splitlines()[-5:])
            raise RemoteError(f"{remote.name}: the setup failed on worker(s) {', '.join(map(str, failed))}: {last}")
        if all(status is not None and status["state"] in ("finished", "killed") for status in workers):
            return
        clock.sleep(SETUP_POLL_S)
    raise RemoteError(f"{remote.name}: the setup did not finish within {SETUP_S:.0f} s; podium pod ssh {remote.name}")


def _check_probes(remote: Remote, replies: dict[int, WorkerReply], say: Callable[[str], None]) -> None:
    """Raises RemoteError where a worker did not get what was sent, or cannot run it."""
    found = {}
    for worker, reply in replies.items():
        with contextlib.suppress(RemoteError):  # an earlier step failed there
            found[worker] = reply.json()
    problems = [f"    worker {worker}: {problem}" for worker in found for problem in found[worker].get("problems", ())]
    if problems:
        raise RemoteError("\n".join((f"{remote.name}: unusable workers:", *problems)))
    remote.check_all(replies, "unpacking the code")
    clocks = [each["time"] for each in found.values()]
    if max(clocks) - min(clocks) > SKEW_S:
        say(f"warning: the workers' clocks differ by {max(clocks) - min(clocks):.0f} s")
