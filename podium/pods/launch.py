"""Starts a job on ready machines, and reads its status. Every step runs on all workers and is safe to repeat.

connect to one -> poll -> send -> unpack -> probe all -> set up -> secrets -> start all -> poll

Every attempt is a job whose name starts with the run's name and a digest of config and code, so that the same command,
from any laptop, finds the job that it started. The setup of a job is a job too, `setup-JOB`.
"""

import base64
import contextlib
import dataclasses
import hashlib
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from podium.accelerators import find_accelerator
from podium.job.job_records import NO_JOB, JobOutcome, Status, listed, outcome
from podium.patience import fault_in
from podium.pods.gcloud import GcloudError
from podium.pods.push import DEMO_MODEL, HOME, Package
from podium.pods.remote import Remote, RemoteError, UnusableError, WorkerReply, arrived
from podium.pods.secrets import LAST_LINE, Secrets, written

AGENT = f"{HOME}/agent"
SECRETS = "/dev/shm/podrun-secrets"
"""Folder for secrets on the workers, in memory."""
NO_AGENT = 3
"""Exit status of a status command on a worker without an agent."""
UNPACK_S = 300.0
START_S = 90.0
STOP_S = 20.0
SETUP_S = 3600.0
SETUP_POLL_S = 10.0
SETUP_SILENCE_S = 300.0
"""Seconds without any answer during setup after which machines count as unusable."""
POLL_S = 15.0
"""Seconds that workers have to report their status; short, so that a lost host is reported soon."""
POLL_WORKER_S = 0.5
"""Additional seconds per worker."""
SKEW_S = 60.0
LOG_BYTES = 2**18
"""Bytes per read of a log."""
SETUP = "setup-"
UNDER_WAY = ("running", "starting")


class SetupError(RemoteError):
    """The user's script or the installation failed, perhaps because a server that it needs is unreachable for a
    while.
    """


def may_pass(error: Exception) -> bool:
    """Whether a start may succeed later: if no machine responded, or if the setup could not reach a server."""
    if isinstance(error, SetupError):
        return fault_in(str(error)) == "outage"
    return isinstance(error, UnusableError) and not error.answered


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run: settings, code, secrets and machines."""

    name: str
    config: str
    """The resolved settings, as YAML."""
    package: Package
    accelerator: str
    secrets: Secrets
    environment: Mapping[str, str]
    """Variables that are not secret."""
    command: str = "{python} -m podium.cli train {config} --plain"
    """The job's shell command, with placeholders `{python}` and `{config}`."""

    @property
    def on_cpu(self) -> bool:
        """Whether the run uses only CPUs, as tests do."""
        return self.environment.get("JAX_PLATFORMS") == "cpu"

    @property
    def prefix(self) -> str:
        """Start of the names of the run's jobs; equal for equal settings and code."""
        digest = hashlib.sha256(f"{self.package.key}\n{self.config}".encode()).hexdigest()[:6]
        return f"{self.name[:40]}-{digest}-"

    def attempt(self, job: str | None) -> int | None:
        """The attempt number of a job or of its setup; None if the job belongs to another run."""
        found = re.fullmatch(f"(?:{SETUP})?{re.escape(self.prefix)}([0-9]+)", job or "")
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The answers of the workers about a job."""

    workers: Sequence[Status | None]
    """The workers' answers, in order; None for a worker that did not answer."""

    @property
    def outcome(self) -> JobOutcome:
        """The state of the job as a whole."""
        return outcome(self.workers)

    @property
    def name(self) -> str | None:
        """The job's name; None without a job."""
        return next((status["job"] for status in self.workers if status and status.get("job")), None)

    @property
    def step(self) -> int:
        """The last step that any worker has reported."""
        parts = [status.get(part) or {} for status in self.workers if status for part in ("progress", "record")]
        return max((part.get("step") or 0 for part in parts), default=0)

    @property
    def silent(self) -> list[int]:
        """Workers that did not answer."""
        return [worker for worker, status in enumerate(self.workers) if status is None]

    @property
    def unheard(self) -> bool:
        """Whether no worker answered at all."""
        return not any(self.workers)

    @property
    def missing(self) -> bool:
        """Whether the launch guard found no problem other than a missing worker."""
        records = [status["record"] for status in self.workers if status and status.get("record")]
        return not any(record["kind"] == "guard" for record in records)

    @property
    def running(self) -> bool:
        """Whether the job runs on at least one worker."""
        return any(status and status["state"] in UNDER_WAY for status in self.workers)


def poll(remote: Remote, job: str | None = None) -> JobStatus:
    """Ask all workers for the status of a job (None: the latest)."""
    status = f"{AGENT} status {job or ''}".strip()
    replies = remote.ask(
        f"([ -x {AGENT} ] || exit {NO_AGENT}; {status})", timeout_s=POLL_S + POLL_WORKER_S * remote.workers
    )
    workers: list[Status | None] = [None] * remote.workers
    for worker, reply in replies.items():
        workers[worker] = NO_JOB if reply.status == NO_AGENT else reply.json()
    return JobStatus(workers=workers)


def prepare(remote: Remote, spec: RunSpec, *, stop: str | None = None) -> tuple[str, bool]:
    """Send and set up everything for a run, unless it is already running or finished.

    Args:
        remote: the workers.
        spec: the run.
        stop: for the error message, the command that ends another job; None: `podium pod stop SLICE`.

    Returns:
        The run's job, and whether it must still be started.

    Raises:
        UnusableError: machines do not answer, or lack something they need.
        RemoteError: a step failed on some workers, or another job is running, which the message names.
    """
    say = remote.say
    remote.warm_up()
    before = poll(remote)
    jobs = [status for status in before.workers if status and status["job"]]
    busy = [status["job"] for status in jobs if status["state"] in UNDER_WAY and spec.attempt(status["job"]) is None]
    if busy:
        stop = stop or f"podium pod stop {remote.name}"
        raise RemoteError(f"{remote.name} is busy with job {busy[0]}; wait for it, or: {stop}")
    newest = max((spec.attempt(status["job"]) or 0 for status in jobs), default=0)
    job = f"{spec.prefix}{newest}"
    for old in sorted({each["job"] for each in jobs if each["state"] in UNDER_WAY} - {job, SETUP + job}):
        stop_job(remote, old)  # an earlier attempt that other workers have ended
    here = [status for status in jobs if status["job"] == job]
    if any(status["state"] in UNDER_WAY for status in here):
        whole = len(here) == remote.workers or bool(before.silent)
        say(f"{job} is already running; " + ("following it" if whole else "starting it on the other workers"))
        return job, not whole
    if len(here) == remote.workers and before.outcome == "done":
        say(f"{job} is done")
        return job, False
    if before.silent:  # they may have a later attempt, whose name would be used again
        remote.ask_all("true", "looking for earlier attempts")  # names those that still do not answer
        return prepare(remote, spec, stop=stop)
    if any(status["job"] == SETUP + job and status["state"] in UNDER_WAY for status in jobs):
        say(f"{job} is being set up; waiting for that")
    else:
        job = f"{spec.prefix}{newest + 1}"
        remote.gcloud.note(
            f"if {spec.prefix}... does not run yet and is not done; the last number counts its attempts:"
        )
        say(f"sending code {spec.package.key} and config to {remote.workers} workers")
        _send(remote, spec, job)
    if spec.package.sets_up:
        _set_up(remote, spec, SETUP + job)
    return job, True


def start(remote: Remote, spec: RunSpec, job: str) -> None:
    """Start a prepared job on all workers, at most once on each. Raises RemoteError if some do not confirm it.

    The secrets are sent first, to a folder in memory; an incomplete file is deleted, so that no job starts.
    """
    package, secrets = spec.package, spec.secrets
    first, others = secrets.of_worker(0), secrets.of_worker(1)
    sent = {"all": others} if secrets else {}
    own = ""
    if first.names != others.names:
        sent["0"] = first
        own = f"[ $worker != 0 ] || secrets={SECRETS}/secrets-0; "
    whole = f"[ \"$(tail -n 1 $secrets 2>&1)\" = '{LAST_LINE}' ] || rm -f $secrets; "
    received = f"secrets={SECRETS}/secrets-all; {own}{whole}" if secrets else ""
    installed = f'"$HOME/{HOME}/venvs/{package.environment}/bin/python"'
    python = shlex.quote(package.python) if package.python else installed
    command = spec.command.format(python=python, config=f'"$HOME/{package.folder}/{job}.yaml"')
    options = (
        f"--peers {','.join(remote.addresses)}",
        f"--accelerator {spec.accelerator}",
        f'--cwd "$code/"{shlex.quote(package.inside)}',
        "--env PYTHONPATH=$code",
        f"--env PODRUN_NONCE={remote.random_word('NONCE')}",
        *(f"--env {name}={shlex.quote(value)}" for name, value in spec.environment.items()),
        *(("--env-file $secrets",) if secrets else ()),
    )
    starting = f"{AGENT} start {job} --worker $worker {' '.join(options)} -- {command}"
    code = f"code=$HOME/{HOME}/code/{package.key}"
    try:
        if secrets:
            remote.ask_all(f"rm -rf {SECRETS} && mkdir -m 700 {SECRETS}", "creating a folder in memory")
        for target, kept in sent.items():
            with written(kept, f"secrets-{target}") as file:
                remote.send([file], SECRETS, target=target)
        remote.say(f"starting {job} on {remote.workers} workers")
        command = f"{received}{code}; {starting}; done=$?; rm -rf {SECRETS}; (exit $done)"
        remote.ask_all(command, f"starting {job}", timeout_s=START_S)
    except BaseException:
        with contextlib.suppress(GcloudError, RemoteError):
            remote.ask(f"rm -rf {SECRETS}")
        raise


def stop_job(remote: Remote, job: str | None) -> JobStatus:
    """Ask a job, or each worker's latest, to save and end, and wait until it has ended on all workers.

    Raises RemoteError if a worker does not answer; all others have received the request.
    """
    said = False
    remote.gcloud.note("until it has saved and ended:")
    stop = f"{AGENT} stop {job or ''} --wait {STOP_S:.0f}"
    command = f"(rm -rf {SECRETS}; [ -x {AGENT} ] || {{ echo '{{}}'; exit 0; }}; {stop})"
    while True:
        replies = remote.ask_all(command, f"stopping {job or 'the job'}", timeout_s=STOP_S + 60.0)
        saving = [reply.worker for reply in replies if reply.json().get("left")]
        if not saving:
            return poll(remote, job)
        if not said:
            remote.say(f"{job or 'the job'} is saving on {listed(saving)}")
        said = True
        remote.clock.sleep(1.0)


def read_log(remote: Remote, worker: int, job: str | None, offset: int, size: int = LOG_BYTES) -> tuple[str, int]:
    """Read up to `size` bytes of a worker's log; returns the text (empty without an answer) and the next offset."""
    command = f"{AGENT} logs {job or ''} --from-byte {offset} --bytes {size} 2>/dev/null | base64 -w0"
    reply = remote.ask(command, worker=worker).get(worker)
    data = base64.b64decode(reply.text) if reply else b""
    return data.decode(errors="replace"), offset + len(data)


def _send(remote: Remote, spec: RunSpec, job: str) -> None:
    """Send code and config, unpack them, make the agent, and check that every worker can run them."""
    package = spec.package
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / f"{job}.yaml"
        config.write_text(spec.config, encoding="utf-8")
        files = [*package.files, config]
        remote.ask_all(f"umask 077; mkdir -p {package.folder}", "making folders")
        remote.send(files, package.folder)
        unpack = shlex.join(("sh", f"{package.folder}/setup.sh", "unpack", package.key, package.python or "-"))
        devices = find_accelerator(spec.accelerator).devices_per_host
        probe = f"{AGENT} probe" if spec.on_cpu else f"{AGENT} probe --expect-devices {devices}"
        replies = remote.ask(f"{arrived(files, package.folder)} && {unpack} && {probe}", timeout_s=UNPACK_S)
    _check_probes(remote, replies)


def _set_up(remote: Remote, spec: RunSpec, job: str) -> None:
    """Run the user's script and the installation as a job, unless that job is already running, and wait for its end."""
    package, clock = spec.package, remote.clock
    remote.say("setting up the workers: this takes minutes the first time")
    demo = DEMO_MODEL if "demo" in package.extras else "-"
    environment = "-" if package.python else package.environment
    options = shlex.join(("setup", package.key, environment, ",".join(package.extras), demo))
    setup = shlex.quote(f'sh "$HOME/{package.folder}/setup.sh" {options}')
    remote.ask_all(f"{AGENT} start {job} -- sh -c {setup}", "starting the setup", timeout_s=START_S)
    remote.gcloud.note("until the setup is done:")
    heard = clock.monotonic()
    until = heard + SETUP_S
    while (now := clock.monotonic()) < until:
        workers = poll(remote, job).workers
        if any(workers):
            heard = now
        elif now - heard > SETUP_SILENCE_S:
            raise UnusableError(f"{remote.name}: no worker responds during the setup", answered=False)
        ended = [status and status["state"] in ("finished", "killed") for status in workers]
        failed = [worker for worker, status in enumerate(workers) if ended[worker] and status and status["exit"] != 0]
        if failed:
            size = (workers[failed[0]] or NO_JOB)["log_bytes"]
            text, _ = read_log(remote, failed[0], job, max(0, size - LOG_BYTES))
            last = " | ".join(text.strip().splitlines()[-5:])
            stop_job(remote, job)
            raise SetupError(f"{remote.name}: the setup failed on worker(s) {', '.join(map(str, failed))}: {last}")
        if all(ended):
            return
        clock.sleep(SETUP_POLL_S)
    stop_job(remote, job)
    raise RemoteError(f"{remote.name}: the setup did not finish within {SETUP_S:.0f} s; podium pod ssh {remote.name}")


def _check_probes(remote: Remote, replies: dict[int, WorkerReply]) -> None:
    """Raise RemoteError if a worker did not receive everything, or cannot run it."""
    found = {}
    for worker, reply in replies.items():
        with contextlib.suppress(RemoteError):  # an earlier step failed on this worker
            found[worker] = reply.json()
    problems = [f"    worker {worker}: {problem}" for worker in found for problem in found[worker].get("problems", ())]
    if problems:
        raise UnusableError("\n".join((f"{remote.name}: unusable workers:", *problems)))
    remote.check_all(replies, "unpacking the code")
    clocks = [each["time"] for each in found.values()]
    if max(clocks) - min(clocks) > SKEW_S:
        remote.say(f"warning: the workers' clocks differ by {max(clocks) - min(clocks):.0f} s")
