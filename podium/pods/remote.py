"""Runs short commands on a slice's workers through gcloud's ssh. Each must be safe to repeat.

gcloud runs a command again when its connection drops (up to ten times), forgets failures of `--worker=2,3`, waits
forever for a lost host, and mixes the workers' outputs. So a command goes to all workers or to one; each worker replies
with one marked line that holds its number, its exit status and its packed output; gcloud's own exit status is ignored;
and a worker without a valid line counts as not having answered. Long processes are not children of ssh;
`podium.pods.host.agent` starts them on the worker.
"""

import base64
import binascii
import contextlib
import dataclasses
import gzip
import hashlib
import json
import re
import shlex
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from podium.job.job_records import JsonObject
from podium.patience import Clock, to_stderr
from podium.pods.gcloud import Gcloud, failure
from podium.pods.inventory import Slice
from podium.pods.world import random_word

REPLY_S = 45.0
"""Seconds for workers to reply; gcloud itself takes two seconds, plus five per refused connection."""
COPY_S = 600.0
NOT_RUN = 255
"""Exit status of ssh's own failures. Podium's commands never return it, because gcloud would run them again."""


class RemoteError(ValueError):
    """A command failed on some workers; the message names them."""


class UnusableError(RemoteError):
    """Machines do not respond, or lack something; others may work. `answered`: whether at least one responded."""

    def __init__(self, message: str, *, answered: bool = True) -> None:
        super().__init__(message)
        self.answered = answered


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerReply:
    """The reply of one worker."""

    worker: int
    status: int
    text: str
    """stdout and stderr of the command."""

    def json(self) -> JsonObject:
        """The JSON object on the last line. Raises RemoteError if it is not a JSON object."""
        line = self.text.strip().rpartition("\n")[2]
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
        raise RemoteError(f"worker {self.worker} answered {line[:300]!r} instead of a JSON object")


class Remote:
    """The workers of a slice whose machines are ready."""

    def __init__(
        self,
        gcloud: Gcloud,
        tpu_slice: Slice,
        *,
        redact: Callable[[str], str] = lambda text: text,
        random_word: Callable[[str], str] = random_word,
        clock: Clock = time,
        say: Callable[[str], None] = to_stderr,
    ) -> None:
        """`redact` removes secrets from replies, `say` prints progress. Raises RemoteError if the slice has no machines
        yet.
        """
        if not tpu_slice.addresses:
            name, zone = tpu_slice.name, tpu_slice.zone
            raise RemoteError(f"{name} in {zone} lists no machines ({tpu_slice.detail}); podium pod status {name}")
        self.gcloud = gcloud
        self.name = tpu_slice.name
        self.zone = tpu_slice.zone
        self.addresses = tpu_slice.addresses
        self.workers = len(tpu_slice.addresses)
        self.random_word = random_word
        self.clock = clock
        self.say = say
        self._redact = redact
        self._complaint = ""

    def ask(self, command: str, *, worker: int | None = None, timeout_s: float = REPLY_S) -> dict[int, WorkerReply]:
        """Run a command on workers and return the replies that came in time, by worker number.

        Args:
            command: for a POSIX shell; `$worker` is the worker's number. It may run more than once.
            worker: one worker; None: all.
            timeout_s: seconds to wait for replies.

        Raises:
            GcloudError: gcloud refused to connect, for example to a node that has ended.
        """
        mark = self.random_word("MARK")
        target = "all" if worker is None else str(worker)
        argv = self.gcloud.argv.ssh(self.name, self.zone, target, wrapped(command, mark, self.addresses))
        finished = self.gcloud.run(argv, timeout_s)
        self._complaint = _last_complaint(finished.stderr)
        answers: dict[int, WorkerReply] = {}
        torn: set[int] = set()
        for number, status, packed in re.findall(rf"{mark} (\S+) (\d+) (\S*)", finished.stdout):
            if not number.isdecimal():
                raise RemoteError(f"{self.name}: a machine with none of the slice's addresses answered")
            try:
                text = gzip.decompress(base64.b64decode(packed, validate=True)).decode(errors="replace")
            except (binascii.Error, EOFError, OSError, zlib.error):  # the line contains another worker's output
                torn.add(int(number))
            else:
                answers[int(number)] = WorkerReply(worker=int(number), status=int(status), text=self._redact(text))
        if not answers and not torn and finished.returncode is not None:
            error = failure(finished)
            if error.kind not in ("unknown", "unavailable"):
                raise error
        if worker is None and torn:  # if only one worker is asked, no other output can break its line
            hidden = set(range(self.workers)) if finished.returncode is not None else torn
            for each in sorted(hidden - set(answers)):
                answers |= self.ask(command, worker=each, timeout_s=timeout_s)
        return answers

    def ask_all(self, command: str, what: str, *, timeout_s: float = REPLY_S) -> list[WorkerReply]:
        """Run a command on all workers and return their replies in order; `what` describes it in the error.

        Raises:
            RemoteError: some workers did not answer or failed; the message names them and quotes their output.
        """
        answers = self.ask(command, timeout_s=timeout_s)
        self.check_all(answers, what)
        return [answers[worker] for worker in range(self.workers)]

    def check_all(self, answers: dict[int, WorkerReply], what: str) -> None:
        """Raise RemoteError unless every worker answered with status 0."""
        missing = [worker for worker in range(self.workers) if worker not in answers]
        failed = [answer for _, answer in sorted(answers.items()) if answer.status != 0]
        if not missing and not failed:
            return
        done = self.workers - len(missing) - len(failed)
        lines = [f"{self.name}: {what}: {done} of {self.workers} workers succeeded"]
        why = f": {self._complaint}" if self._complaint else ""
        lines += [f"    worker {worker} ({self.addresses[worker]}) did not answer{why}" for worker in missing]
        lines += [f"    worker {each.worker}: status {each.status}: {_last_lines(each.text)}" for each in failed]
        text = "\n".join(lines)
        raise UnusableError(text, answered=bool(answers)) if missing else RemoteError(text)

    def send(self, files: Sequence[Path], folder: str, *, target: str = "all") -> None:
        """Copy files into an existing folder of all workers, or of the worker with this number.

        gcloud does not report reliably whether they arrived, so the next command must check it (`arrived`).
        """
        argv = self.gcloud.argv.scp([str(file) for file in files], self.name, self.zone, target, f"{folder}/")
        self._complaint = _last_complaint(self.gcloud.run(argv, COPY_S).stderr)

    def warm_up(self) -> None:
        """Connect to worker 0 alone, so that gcloud adds its key to the node's metadata before parallel calls.

        Raises UnusableError if the worker cannot be reached.
        """
        answers = self.ask("true", worker=0, timeout_s=180.0)
        if 0 not in answers:
            why = self._complaint or "no answer"
            message = f"{self.name}: worker 0 ({self.addresses[0]}) cannot be reached by ssh: {why}"
            raise UnusableError(message, answered=bool(self.ask("true")))


def wrapped(command: str, mark: str, addresses: Sequence[str]) -> str:
    """Wrap a command for a worker's shell: it finds the worker's number by address and replies with one marked line.

    The line is written by one call, so lines of several workers do not mix unless they exceed a pipe's buffer; a
    checksum detects that case.
    """
    return (
        f'worker=unknown; index=0; own=" $(hostname -I) "; for each in {" ".join(addresses)}; do '
        'case "$own" in *" $each "*) worker=$index;; esac; index=$((index+1)); done; '
        f"text=$( {{ {command}; }} 2>&1 ); status=$?; [ $status -ne {NOT_RUN} ] || status=254; "
        f'echo "{mark} $worker $status $(printf \'%s\' "$text" | gzip -c | base64 -w0)"'
    )


def arrived(files: Sequence[Path], folder: str) -> str:
    """A command that succeeds if the files have arrived completely."""
    sums = " ".join(shlex.quote(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}") for file in files)
    return f"(cd {folder} && printf '%s\\n' {sums} | sha256sum --check --quiet -)"


def _last_lines(text: str, lines: int = 3) -> str:
    kept = [line.strip() for line in text.splitlines() if line.strip()][-lines:]
    return " | ".join(kept) or "(no output)"


def _last_complaint(stderr: str) -> str:
    """The last line of ssh's own error messages; empty if there are none."""
    starts = re.compile(r"^(ssh|scp|kex|client|Connection|.*[Pp]ermission denied|.*Host key)", re.MULTILINE)
    found = [line.strip() for line in stderr.splitlines() if starts.match(line) and "Attempting" not in line]
    return found[-1] if found else ""
