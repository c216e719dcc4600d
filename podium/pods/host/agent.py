"""The worker's side of `podium pod`: short commands sent from the laptop, each safe to repeat.

    python -m podium.pods.host.agent [--home DIR] probe|start|status|stop|logs ...

Each prints one JSON object on one line (`logs` prints the log) and exits with 0 (done), 1 (failed), 2 (wrong usage) or
75 (another job is running here); never with 255, after which gcloud would run it again. Standard library only: it runs
before anything is installed.
"""

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from podium.files import RunFileError, room
from podium.job.cluster import COORDINATOR_PORT, chips, local_worker
from podium.pods.host.jobs import GRACE_S, LONGEST_STOP_S, BusyError, Host, JobSpec, StartError
from podium.pods.host.supervisor import supervise
from podium.pods.secrets import SecretError, read_variables

DONE = 0
FAILED = 1
USAGE = 2
BUSY = 75
LEAST_DISK = 2 * 2**30
"""Minimum free bytes on a worker."""
LEAST_FILES = 50_000
"""Minimum free files (inodes) on a worker, for code and installed packages."""
Command = Callable[[argparse.Namespace, Host], int]
"""Runs a command and returns its exit status."""
OURS = tuple(f"PODRUN_{name}" for name in ("JOB", "JOB_DIR", "WORKER", "WORKERS", "COORDINATOR", "ACCELERATOR"))
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class UsageError(ValueError):
    """A wrong command line; the message says why."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    try:
        args = _parser().parse_args(given[:split], argparse.Namespace(command=tuple(given[split + 1 :])))
        host = Host(Path(args.home).expanduser())
        if "job" in args:
            args.job = args.job or host.latest()
        return args.run(args, host)
    except (UsageError, SecretError) as error:
        return _answer({"error": str(error)}, USAGE)
    except BusyError as error:
        return _answer({"state": "busy", "job": error.job, "error": str(error)}, BUSY)
    except (StartError, OSError, RunFileError) as error:
        return _answer({"error": str(error)}, FAILED)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m podium.pods.host.agent", description="The worker's side of podium pod.")
    parser.add_argument("--home", default=os.environ.get("PODRUN_HOME", "~/podrun"), help="folder of this host's jobs")
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=_Parser)
    probe = verbs.add_parser("probe", help="check whether this host can run jobs")
    probe.add_argument("--expect-devices", type=int, help="number of chips that this host should have")
    probe.set_defaults(run=_probe)
    start = _with_job(verbs, "start", "start a job, once: start JOB ... -- COMMAND", _start, nargs=None)
    start.add_argument("--worker", type=int, help="index of this host; unset: the index of its address in --peers")
    start.add_argument("--peers", default="", help="addresses of all workers, in order")
    start.add_argument("--accelerator", help="type of the slice, such as v6e-16")
    start.add_argument("--cwd", default=".", help="folder in which the command runs")
    start.add_argument("--env-file", help="file of mode 600 with secrets, as NAME=VALUE lines")
    start.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable, not a secret"
    )
    _with_job(verbs, "status", "print the state of a job", _status)
    stop = _with_job(verbs, "stop", "end a job with all its processes", _stop)
    stop.add_argument("--grace", type=float, default=GRACE_S, help="seconds without a sign of life before SIGKILL")
    stop.add_argument("--wait", type=float, default=LONGEST_STOP_S, help="seconds to wait for its end")
    logs = _with_job(verbs, "logs", "print a job's log", _logs)
    logs.add_argument("--from-byte", type=int, default=0, help="print the log from this byte on")
    logs.add_argument("--bytes", type=int, default=sys.maxsize, help="largest number of bytes to print")
    _with_job(verbs, "supervise", "internal; used by start", lambda args, host: supervise(host, args.job), nargs=None)
    return parser


def _with_job(
    verbs: "argparse._SubParsersAction[_Parser]", name: str, help: str, run: Command, *, nargs: str | None = "?"
) -> argparse.ArgumentParser:
    """Add a command about a job: the named one, or the latest."""
    parser = verbs.add_parser(name, help=help)
    parser.add_argument("job", nargs=nargs, type=_job_name)
    parser.set_defaults(run=run)
    return parser


def _probe(args: argparse.Namespace, host: Host) -> int:
    host.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    python = platform.python_version()
    devices = chips()
    free, files = room(host.home)
    holder = host.holder()
    checks = {
        f"Python {python} is too old; 3.11 to 3.13 are supported": sys.version_info >= (3, 11),
        f"{host.home} has {free / 2**30:.1f} GiB free and needs {LEAST_DISK / 2**30:.0f}": free >= LEAST_DISK,
        f"{host.home} has {files} files (inodes) free and needs {LEAST_FILES:,}": files is None or files >= LEAST_FILES,
        f"this host has {devices} chips and should have {args.expect_devices}; recreate the slice": (
            args.expect_devices in (None, devices)
        ),
        f"job {holder} is running here": holder is None,
    }
    problems = [message for message, holds in checks.items() if not holds]
    found = {"time": time.time(), "python": python, "devices": devices, "job": holder, "problems": problems}
    return _answer(found, FAILED if problems else DONE)


def _start(args: argparse.Namespace, host: Host) -> int:
    peers = tuple(filter(None, args.peers.split(",")))
    variables = read_variables(args.env)
    if not args.command:
        raise UsageError("no command was given; write it after --")
    if taken := [name for name in OURS if name in variables]:
        raise UsageError(f"--env {taken[0]}: podium pod sets this one itself")
    worker = args.worker if args.worker is not None else local_worker(peers) if peers else 0
    if worker is None or not 0 <= worker < max(1, len(peers)):
        raise UsageError(f"this host must match exactly one of --peers {args.peers}; give its index with --worker")
    spec = JobSpec(
        job=args.job,
        command=args.command,
        worker=worker,
        workers=max(1, len(peers)),
        coordinator=f"{peers[0]}:{COORDINATOR_PORT}" if peers else None,
        accelerator=args.accelerator,
        cwd=str(Path(args.cwd).expanduser().absolute()),
        env=variables,
        env_file=args.env_file and str(Path(args.env_file).expanduser().absolute()),
    )
    state = host.start(spec)
    return _answer({**host.status(args.job), "state": state}, DONE)


def _status(args: argparse.Namespace, host: Host) -> int:
    return _answer(host.status(args.job), DONE)


def _stop(args: argparse.Namespace, host: Host) -> int:
    left = host.stop(args.job, args.grace, args.wait) if args.job else []
    return _answer({**host.status(args.job), "left": left}, DONE)


def _logs(args: argparse.Namespace, host: Host) -> int:
    if host.state(args.job) == "none":
        print(f"error: no job {args.job or 'has been started'} on this host", file=sys.stderr)
        return FAILED
    with (host.folder(args.job) / "log").open("rb") as log:
        log.seek(args.from_byte)
        left = args.bytes
        while left > 0 and (data := log.read(min(left, 2**20))):
            left -= sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return DONE


def _answer(found: Mapping[str, object], status: int) -> int:
    print(json.dumps(found), flush=True)
    return status


def _job_name(text: str) -> str:
    if JOB_NAME.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not a job name: letters, digits, '.', '_' and '-', up to 64")


if __name__ == "__main__":
    sys.exit(main())
