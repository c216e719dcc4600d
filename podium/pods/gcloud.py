"""A thin layer over the gcloud command line: exact arguments in, parsed JSON out, failures by kind.

Only the GA track is used. Defects of gcloud 528 decide how it is called; a test runs the real gcloud for each of them
(tests/pods/test_gcloud.py):

* a create whose reply was lost is sent again and fails with ALREADY_EXISTS, although the slice exists and costs money;
* 429 is not retried, and the result of `--worker=2,3` is lost, so callers retry and count workers themselves;
* listing virtual machines may fail with an empty list, a warning and exit status 0;
* the whole command line is written to gcloud's own log, so it must never contain a secret.

`podium.pods.slices` decides what is rented and deleted, `podium.pods.remote` runs commands on the workers.
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from podium.patience import Patience
from podium.pods.inventory import OWNER

# fmt: off
Kind = Literal[
    "missing", "project", "disk", "certificate", "login", "disabled", "denied", "exists", "not_found", "quota", "rate",
    "stockout", "invalid", "precondition", "unusable", "ssh_key", "unavailable", "timeout", "unknown",
]
# fmt: on
"""Kinds of gcloud failures. missing: gcloud is not installed; disk: this machine's disk is full; certificate: this
machine does not trust Google's certificate; disabled: the API is not enabled; rate: too many requests, may succeed
later; unusable: the node has ended; unavailable and timeout: the request may or may not have been carried out."""
_KINDS: tuple[tuple[Kind, str], ...] = (
    # on this machine, as Python reports it: a worker's shell does not print [Errno 28]
    ("disk", r"\[errno (28|122)\]"),
    ("certificate", r"certificate.?verify.?failed|certverif"),
    # without a network gcloud cannot refresh a user's token, and asks to log in
    (
        "unavailable",
        r"refreshing your current auth tokens.*(max retries|connection|resolve|timed out|unreachable|proxy)",
    ),
    ("project", r"property \[(core/)?project\] is not|attribute \[project\]"),
    ("login", r"active account selected|gcloud auth login|reauthenticat|invalid authentication credentials"),
    ("disabled", r"service_disabled|has not been used in project"),
    ("ssh_key", r"not present in the ssh agent"),
    ("unusable", r"this tpu has (terminal )?state"),
    ("stockout", r"no more capacity|not enough (resources|capacity)|insufficient capacity|stockout"),
    ("rate", r"per minute|rate.?limit|too many requests"),
    ("quota", r"quota"),
    # the API's codes, where the text is not more precise
    ("exists", r"^already_exists\b"),
    ("not_found", r"^not_found\b|matched no objects|: not found\b|not found: 404|httperror 404"),
    ("denied", r"^permission_denied\b|^required '[\w.]+' permission|does not have permission|httperror 403"),
    ("precondition", r"^failed_precondition\b"),
    ("invalid", r"^invalid_argument\b"),
    ("login", r"^unauthenticated\b"),
    ("rate", r"^resource_exhausted\b"),
    ("unavailable", r"^(unavailable|internal|deadline_exceeded|aborted|cancelled)\b"),
    # texts that may also occur in other errors
    ("unavailable", r"unavailable|gcloud crashed|timed out|connection|unable to find the server|network connectivity"),
    ("invalid", r"invalid|unrecognized arguments|argument --|must be specified"),
)
"""Patterns for an error's text in lower case, with their kinds; the first match applies."""
INCOMPLETE = "WARNING: Some requests did not succeed."
"""Printed by gcloud when a list has failed, with exit status 0."""
_WAYS_OUT: Mapping[Kind, str] = {
    "missing": "install the Google Cloud CLI (cloud.google.com/sdk/docs/install) and run: gcloud auth login",
    "project": "name a project with --project, or run: gcloud config set project PROJECT",
    "disk": "delete something on this machine, and run the command again",
    "certificate": "check this machine's clock, its certificates and its proxy, and run the command again",
    "login": "run: gcloud auth login",
    "disabled": "run: gcloud services enable tpu.googleapis.com, and compute.googleapis.com for --on-vm",
    "denied": "check the zone's name, and that your account has the role TPU Admin (roles/tpu.admin) in the project",
    "quota": (
        "request quota for this type and zone at console.cloud.google.com/iam-admin/quotas, delete slices that use "
        "it (podium pod ls; dead slices count too), or try another zone"
    ),
    "rate": "wait a minute and run the command again",
    "stockout": "try another zone, or wait longer in the queue with --valid-until",
    "invalid": "check accelerator type, zone and runtime version",
    "ssh_key": "add the key to your ssh-agent, as the message says",
    "unusable": "podium pod down NAME, and rent another slice",
    "unavailable": "run the command again; it first checks what exists",
    "timeout": "run the command again; it first checks what exists",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """A command that has ended."""

    argv: tuple[str, ...]
    returncode: int | None
    """Exit status; None if the command exceeded its time limit and was killed."""
    stdout: str
    stderr: str


ApiAnswer = Any
"""A JSON object of the API, or a list of them."""
Runner = Callable[[Sequence[str], float], Finished]
"""Runs a command with a time limit in seconds."""


class GcloudError(ValueError):
    """A gcloud command failed; the message quotes gcloud's message and says what to do."""

    def __init__(self, kind: Kind, text: str):
        self.kind, self.text = kind, text
        self.waited = False
        """Whether waiting for this error to pass was in vain."""
        super().__init__("; ".join(filter(None, (f"gcloud: {text}", _WAYS_OUT.get(kind)))))

    @property
    def uncertain(self) -> bool:
        """Whether the request may have been carried out despite the error."""
        return self.kind in ("unavailable", "timeout", "unknown")

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed soon."""
        return self.kind in ("unavailable", "timeout", "rate")

    @property
    def lasting(self) -> bool:
        """Whether neither waiting nor another slice would help: this machine or this account lacks something."""
        return self.kind in ("missing", "project", "disk", "certificate", "login", "disabled", "denied")

    def wait_out(self, patience: Patience, *, for_ever: bool = False) -> None:
        """Wait before the command is repeated; `for_ever`: without a limit if Google cannot be reached.

        Raises this error if waiting cannot help, or has not helped for half an hour.
        """
        if self.lasting or self.waited:
            raise self
        try:
            patience.wait(self, self.text, limited=not (for_ever and self.transient))
        except GcloudError:
            self.waited = True
            raise

    @property
    def gone(self) -> bool:
        """Whether the node that a command was for has ended or no longer exists."""
        return self.kind in ("unusable", "not_found")


def run_process(argv: Sequence[str], timeout_s: float) -> Finished:
    """Run a command without input and kill it after `timeout_s` seconds. Raises GcloudError if it is not installed."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError:
        raise GcloudError("missing", f"{argv[0]} is not installed or not in PATH") from None
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
        return Finished(argv=tuple(argv), returncode=process.returncode, stdout=stdout, stderr=stderr)
    except BaseException as error:  # leave no process behind, also after Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    return Finished(argv=tuple(argv), returncode=None, stdout=stdout, stderr=stderr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """An order for one slice."""

    name: str
    """The user's name for the slice."""
    accelerator: str
    runtime: str
    """Software version of the machines."""
    spot: bool
    queued: bool
    """Whether to request a queued resource, which waits for capacity, instead of a node, which fails without
    capacity."""
    valid_until_s: int
    """Seconds after which a queued resource without machines expires."""
    labels: Mapping[str, str]
    service_account: str | None = None
    run: str | None = None
    """The run to rent it for; slices that were rented for other runs are not used."""


@dataclasses.dataclass(frozen=True)
class Argv:
    """The exact command lines for one project."""

    project: str | None = None
    vm: bool = False
    """Whether `ssh` and `scp` go to an ordinary virtual machine, not to the workers of a slice."""

    def settings(self) -> tuple[str, ...]:
        """The command that prints gcloud's account, project and zone."""
        return ("gcloud", "config", "list", "--format=json", "--quiet")

    def nodes(self, zone: str = "-") -> tuple[str, ...]:
        """The command that lists the nodes of a zone, or of all zones."""
        return self._tpus("tpu-vm", "list", f"--zone={zone}")

    def queued(self, zone: str) -> tuple[str, ...]:
        """The command that lists the queued resources of a zone."""
        return self._tpus("queued-resources", "list", f"--zone={zone}")

    def zones(self) -> tuple[str, ...]:
        """The command that lists the zones with TPUs."""
        return self._tpus("locations", "list")

    def create(self, order: Order, name: str, zone: str) -> tuple[str, ...]:
        """The command that rents a slice in a zone under the unique name `name`."""
        common = (
            f"--zone={zone}",
            f"--accelerator-type={order.accelerator}",
            f"--labels={_pairs(order.labels)}",
            *(("--spot",) if order.spot else ()),
            *((f"--service-account={order.service_account}",) if order.service_account else ()),
        )
        if not order.queued:
            return self._tpus("tpu-vm", "create", name, f"--version={order.runtime}", *common)
        own = (f"--runtime-version={order.runtime}", f"--valid-until-duration={order.valid_until_s}s")
        return self._tpus("queued-resources", "create", name, f"--node-id={name}", *own, *common)

    def delete(self, name: str, zone: str, *, queued: bool, force: bool = True) -> tuple[str, ...]:
        """The command that deletes a queued resource, or a node without one.

        Without `force`, it fails if the queued resource has machines.
        """
        if queued:
            forced = ("--force",) if force else ()
            return self._tpus("queued-resources", "delete", name, f"--zone={zone}", *forced)
        return self._tpus("tpu-vm", "delete", name, f"--zone={zone}")

    def label(self, name: str, zone: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        """The command that sets labels of a node."""
        return self._tpus("tpu-vm", "update", name, f"--zone={zone}", f"--update-labels={_pairs(labels)}")

    def ssh(self, node: str, zone: str, worker: str, command: str | None) -> tuple[str, ...]:
        """The command that runs `command` on one worker or `all`; without a command, it opens a shell on one."""
        flags = (f"--ssh-flag=-o {option}" for option in SSH_OPTIONS)
        given = (f"--command={command}",) if command is not None else ()
        if self.vm:
            return self._gcloud("ssh", node, f"--zone={zone}", *flags, *given, output=())
        return self._tpus("tpu-vm", "ssh", node, f"--zone={zone}", f"--worker={worker}", *flags, *given, output=())

    def scp(self, files: Sequence[str], node: str, zone: str, worker: str, folder: str) -> tuple[str, ...]:
        """The command that copies files to a folder on one worker or `all`."""
        flags = (f"--scp-flag=-o {option}" for option in SSH_OPTIONS)
        to = (f"{node}:{folder}", f"--zone={zone}")
        if self.vm:
            return self._gcloud("scp", *files, *to, *flags, output=())
        return self._tpus("tpu-vm", "scp", *files, *to, f"--worker={worker}", *flags, output=())

    def vms(self, name: str | None = None) -> tuple[str, ...]:
        """The command that lists the virtual machines with this name, or all that Podium rented."""
        return self._gcloud("instances", "list", f"--filter=name={name}" if name else f"--filter=labels.{OWNER}:*")

    def create_vm(
        self, name: str, zone: str, labels: Mapping[str, str], service_account: str | None
    ) -> tuple[str, ...]:
        """The command that rents a small virtual machine with permission to rent and delete slices."""
        return self._gcloud(
            "instances",
            "create",
            name,
            f"--zone={zone}",
            "--machine-type=e2-micro",
            "--image-family=debian-12",
            "--image-project=debian-cloud",
            "--scopes=cloud-platform",
            f"--labels={_pairs(labels)}",
            *((f"--service-account={service_account}",) if service_account else ()),
        )

    def delete_vm(self, name: str, zone: str) -> tuple[str, ...]:
        """The command that deletes a virtual machine."""
        return self._gcloud("instances", "delete", name, f"--zone={zone}")

    def objects(self, prefix: str) -> tuple[str, ...]:
        """The command that lists the objects of a bucket whose names begin like this, with their times of creation."""
        return self._storage("objects", "list", f"{prefix}*", "--format=json(name,creation_time)")

    def put(self, file: str, target: str) -> tuple[str, ...]:
        """The command that copies a file into a bucket."""
        return self._storage("cp", file, target)

    def _storage(self, *arguments: str) -> tuple[str, ...]:
        project = (f"--project={self.project}",) if self.project else ()
        return ("gcloud", "storage", *arguments, *project, "--quiet")

    def _tpus(self, *arguments: str, output: tuple[str, ...] = ("--format=json",)) -> tuple[str, ...]:
        return self._gcloud("tpus", *arguments, output=output)

    def _gcloud(self, *arguments: str, output: tuple[str, ...] = ("--format=json",)) -> tuple[str, ...]:
        project = (f"--project={self.project}",) if self.project else ()
        return ("gcloud", "compute", *arguments, *project, *output, "--quiet")


def _pairs(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


SSH_OPTIONS = ("ConnectTimeout=10", "ServerAliveInterval=10", "ServerAliveCountMax=3")
"""ssh options that gcloud does not set; without them it would wait forever for a lost host."""
READ_S = 60.0
"""Time limit in seconds of commands that change nothing."""
CHANGE_S = 900.0
"""Time limit in seconds of all other commands."""


class Gcloud:
    """Access to one project's Cloud TPUs."""

    def __init__(
        self,
        runner: Runner = run_process,
        *,
        project: str | None = None,
        is_secret: Callable[[str], bool] = lambda word: False,
        note: Callable[[str], None] = lambda when: None,
        vm: bool = False,
    ) -> None:
        """Configure the access.

        Args:
            runner: runs each command.
            project: passed to each command; None: gcloud's default.
            is_secret: whether a word is a secret, which must not occur in a command.
            note: called in a dry run with a description of when the next commands are run.
            vm: whether `ssh` and `scp` go to ordinary virtual machines.
        """
        self.argv = Argv(project, vm=vm)
        self.note = note
        self._runner = runner
        self._is_secret = is_secret

    def for_vms(self) -> "Gcloud":
        """A copy whose `ssh` and `scp` go to ordinary virtual machines."""
        return Gcloud(self._runner, project=self.argv.project, is_secret=self._is_secret, note=self.note, vm=True)

    def ask(self, argv: Sequence[str], timeout_s: float = READ_S) -> ApiAnswer:
        """Run a command and return its parsed JSON output. Raises GcloudError if it fails."""
        finished = self.checked(argv, timeout_s)
        try:
            return json.loads(finished.stdout or "[]")
        except ValueError:
            raise GcloudError("unknown", f"{shlex.join(argv)} answered {finished.stdout[:200]!r}, not JSON") from None

    def checked(self, argv: Sequence[str], timeout_s: float = CHANGE_S) -> Finished:
        """Run a command. Raises GcloudError if it fails."""
        finished = self.run(argv, timeout_s)
        if finished.returncode != 0 or INCOMPLETE in finished.stderr:
            raise failure(finished)
        return finished

    def run(self, argv: Sequence[str], timeout_s: float) -> Finished:
        """Run a command, whether it succeeds or not."""
        assert not any(map(self._is_secret, argv)), "a secret in a command"
        return self._runner(argv, timeout_s)


def failure(finished: Finished) -> GcloudError:
    """The GcloudError for a failed command."""
    command = f"{shlex.join(finished.argv[:6])} ..."
    if finished.returncode is None:
        return GcloudError("timeout", f"no answer in time: {command}")
    text = _message(finished.stderr)
    kinds: list[Kind] = [kind for kind, pattern in _KINDS if re.search(pattern, text.lower())]
    other: Kind = "unavailable" if finished.returncode == 0 else "unknown"
    return GcloudError(kinds[0] if kinds else other, text or f"exit status {finished.returncode}: {command}")


def _message(stderr: str) -> str:
    """The message after the last `ERROR:`, as one line, without the command's name and gcloud's advice."""
    if INCOMPLETE in stderr:
        return stderr.partition(INCOMPLETE)[2].strip(" -\n").partition("\n")[0]
    start = stderr.rfind("ERROR: ")
    if start < 0:
        lines = [line.strip() for line in stderr.splitlines() if line.strip()]
        return lines[-1] if lines else ""
    text = " ".join(stderr[start:].removeprefix("ERROR: ").split())
    text = re.sub(r"^\([a-z.-]+\) ", "", text)
    found = re.search(r'"message": "((?:[^"\\]|\\.)*)"', text)
    if found:  # gcloud prints operations and unexpected replies as JSON
        status = re.search(r'"status": "([A-Z_]+)"', text)
        text = (f"{status[1]}: " if status else "") + json.loads(f'"{found[1]}"')
    return re.split(r" (?:This command is (?:un)?authenticated|If you would like to report this issue)", text)[0]
