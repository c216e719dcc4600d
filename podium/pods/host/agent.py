"""The worker's side of `podium pod`: what the laptop asks of a host, by short commands that may come twice.

    python -m podium.pods.host.agent [--home DIR] probe|start|status|stop|logs ...

Each prints one JSON object on one line (but `logs`, which prints the log), and exits with 0, 1 failed, 2 wrong usage,
or 75 another job has the host; never with 255, after which gcloud would run it again. Standard library only: it runs
before anything is installed.
"""

import argparse
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from podium.job.cluster import COORDINATOR_PORT, chips, local_worker, tpu_metadata
from podium.pods.host.supervisor import GRACE_S, BusyError, Host, Spec, StartError, supervise, unit_command

DONE, FAILED, USAGE, BUSY = 0, 1, 2, 75
PACKAGES = ("podium-rl", "jax", "jaxlib", "libtpu", "optax", "orbax-checkpoint", "transformers", "numpy")
LEAST_DISK = 2 * 2**30
FOLLOW_S = 0.25
SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$", re.IGNORECASE)
OURS = tuple(f"PODRUN_{name}" for name in ("JOB", "JOB_DIR", "WORKER", "WORKERS", "COORDINATOR", "ACCELERATOR"))
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class UsageError(ValueError):
    """The command cannot be understood; the message says why."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one question or do one thing; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    try:
        args = _parser().parse_args(given[:split])
        args.command = tuple(given[split + 1 :])
        return args.run(args, Host(Path(args.home).expanduser()))
    except UsageError as error:
        return _answer({"error": str(error)}, USAGE)
    except BusyError as error:
        return _answer({"state": "busy", "job": error.job, "error": str(error)}, BUSY)
    except (StartError, OSError) as error:
        return _answer({"error": str(error)}, FAILED)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m podium.pods.host.agent", description="The worker's side of podium pod.")
    parser.add_argument("--home", default=os.environ.get("PODRUN_HOME", "~/podrun"), help="where this host's jobs are")
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=_Parser)
    probe = verbs.add_parser("probe", help="what this host has")
    probe.add_argument("--expect-devices", type=int, help="chips that it should have")
    probe.set_defaults(run=_probe)
    start = verbs.add_parser("start", help="start a job, once: start JOB ... -- COMMAND")
    start.add_argument("job", type=_job_name)
    start.add_argument("--worker", type=int, help="index of this host; unset: of the peer that is this host")
    start.add_argument("--peers", default="", help="addresses of all workers, in their order")
    start.add_argument("--port", type=int, default=COORDINATOR_PORT, help="of worker 0")
    start.add_argument("--accelerator", help="type of the slice, as v6e-16")
    start.add_argument("--cwd", default=".", help="where the command runs")
    start.add_argument("--env-file", help="secrets, NAME=VALUE lines, mode 600")
    start.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="what is not secret")
    start.add_argument("--grace", type=float, default=GRACE_S, help="seconds from SIGTERM to SIGKILL")
    start.set_defaults(run=_start)
    status = verbs.add_parser("status", help="what has become of a job")
    status.add_argument("job", nargs="?", type=_job_name)
    status.set_defaults(run=_status)
    stop = verbs.add_parser("stop", help="end a job and all that it started")
    stop.add_argument("job", nargs="?", type=_job_name)
    stop.add_argument("--grace", type=float, default=GRACE_S, help="seconds from SIGTERM to SIGKILL")
    stop.set_defaults(run=_stop)
    logs = verbs.add_parser("logs", help="print a job's log")
    logs.add_argument("job", nargs="?", type=_job_name)
    logs.add_argument("-f", "--follow", action="store_true", help="until the job has ended")
    logs.add_argument("--tail", type=int, help="the last so many lines")
    logs.add_argument("--from-byte", type=int, default=0, help="what comes after so many bytes")
    logs.set_defaults(run=_logs)
    inner = verbs.add_parser("supervise", help="for start's own use")
    inner.add_argument("job", type=_job_name)
    inner.set_defaults(run=lambda args, host: supervise(host.home, args.job))
    return parser


def _probe(args: argparse.Namespace, host: Host) -> int:
    host.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = tpu_metadata(os.environ)
    free = shutil.disk_usage(host.home).free
    holder = host.holder()
    rules = (
        (sys.version_info >= (3, 11), f"Python {platform.python_version()} is too old; 3.11 to 3.13 are supported"),
        (free >= LEAST_DISK, f"{host.home} has {free / 2**30:.1f} GiB free and needs {LEAST_DISK / 2**30:.0f}"),
        (
            args.expect_devices in (None, chips()),
            f"this host has {chips()} chips and should have {args.expect_devices}; recreate the slice",
        ),
        (holder is None, f"job {holder} runs here"),
    )
    problems = [message for holds, message in rules if not holds]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _answer(
        {
            "host": socket.gethostname(),
            "time": time.time(),
            "python": platform.python_version(),
            "versions": _versions(),
            "commit": _commit(),
            "devices": chips(),
            "disk_free_bytes": free,
            "memory_bytes": memory,
            "lock": "free" if holder is None else "held",
            "job": holder,
            "systemd": bool(unit_command("probe")),
            "metadata": found
            and {
                "accelerator": found.accelerator,
                "worker": found.worker,
                "addresses": found.addresses,
            },
            "problems": problems,
        },
        FAILED if problems else DONE,
    )


def _start(args: argparse.Namespace, host: Host) -> int:
    peers = tuple(filter(None, args.peers.split(",")))
    if not args.command:
        raise UsageError("no command was given; write it behind --")
    worker = args.worker if args.worker is not None else local_worker(peers) if peers else 0
    if worker is None or not 0 <= worker < max(1, len(peers)):
        raise UsageError(f"this host is not exactly one of --peers {args.peers}; give its index with --worker")
    spec = Spec(
        job=args.job,
        command=args.command,
        worker=worker,
        workers=max(1, len(peers)),
        coordinator=f"{peers[0]}:{args.port}" if peers else None,
        accelerator=args.accelerator,
        cwd=str(Path(args.cwd).expanduser().absolute()),
        env=_open_settings(args.env),
        env_file=args.env_file and str(Path(args.env_file).expanduser().absolute()),
        grace_s=args.grace,
    )
    state = host.start(spec)
    return _answer({**host.status(args.job), "state": state}, DONE)


def _status(args: argparse.Namespace, host: Host) -> int:
    return _answer(host.status(args.job or host.latest()), DONE)


def _stop(args: argparse.Namespace, host: Host) -> int:
    job = args.job or host.latest()
    left = host.stop(job, args.grace) if job else []
    return _answer({**host.status(job), "left": left}, FAILED if left else DONE)


def _logs(args: argparse.Namespace, host: Host) -> int:
    job = args.job or host.latest()
    if job is None or host.state(job) == "none":
        print(f"error: no job {job or 'was ever started'} on this host", file=sys.stderr)
        return FAILED
    path, place = host.folder(job) / "log", args.from_byte
    if args.tail is not None:
        lines = path.read_bytes().splitlines(keepends=True)
        place = sum(map(len, lines[: max(0, len(lines) - args.tail)]))
    while True:
        goes_on = args.follow and host.state(job) in ("starting", "running")  # asked before the last look
        with path.open("rb") as log:
            log.seek(place)
            data = log.read()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        place += len(data)
        if not goes_on:
            return DONE
        time.sleep(FOLLOW_S)


def _answer(found: dict[str, Any], status: int) -> int:
    print(json.dumps(found), flush=True)
    return status


def _job_name(text: str) -> str:
    if JOB_NAME.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is no name of a job: letters, digits, '.', '_' and '-', up to 64")


def _open_settings(pairs: Sequence[str]) -> dict[str, str]:
    """The settings of --env; secrets have no place in a command."""
    settings: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name in OURS or SECRET_NAME.search(name):
            raise UsageError(f"--env {name}: write NAME=VALUE, not one of {', '.join(OURS)}; secrets into --env-file")
        settings[name] = value
    return settings


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit of the checkout that this runs from, if it is one."""
    root = Path(__file__).absolute().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    sys.exit(main())
