"""`--dry-run`: runs the actual command against a project that prints each gcloud command instead of running it.

So what a command does is not described a second time. Every request succeeds at once; words in capitals stand for
answers that the command depends on (NAME, ZONE, ADDRESS0, JOB). A query is printed only once.
"""

import dataclasses
import gzip
import json
import re
import shlex
from base64 import b64encode
from collections.abc import Mapping, Sequence

from podium.job.job_records import NO_JOB
from podium.pods.gcloud import Finished
from podium.pods.inventory import NAME as TITLE
from podium.pods.inventory import OWNER
from podium.pods.world import World

NAME = "NAME"
ZONE = "ZONE"
JOB = "JOB"
MARK = "MARK"
NO_CAPACITY = "ERROR: there is no more capacity in this zone"
VERBS = ("list", "create", "delete", "update", "ssh", "scp", "cp")
JsonAnswer = Mapping[str, object] | Sequence[Mapping[str, object]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placeholders:
    """The state of the project in a dry run."""

    name: str | None = None
    """The user's name for the slice; None: any name."""
    exists: bool = True
    """Whether the slice is rented already, once with and once without a queued resource, to show how each is
    deleted."""
    accelerator: str = "v6e-8"
    spot: bool = False
    workers: int = 1
    zones: Sequence[str] = ()
    """Zones in which the slice is requested; all but the last refuse."""
    keeper: str | None = None
    """The machine that keeps the slice's run alive."""
    job: str | None = JOB
    """The latest job on the machines; None for no job."""


def rehearsed(world: World, placeholders: Placeholders) -> World:
    """Make the world of a dry run of `world`: it prints commands and answers them."""
    rehearsal = Rehearsal(world, placeholders)
    return dataclasses.replace(
        world,
        runner=rehearsal.run,
        foreground=rehearsal.foreground,
        clock=rehearsal,
        random_word=lambda purpose: purpose,
        note=rehearsal.note,
        parallel=1,
        quiet=True,
    )


class Rehearsal:
    """A project of placeholders in which waiting takes no time."""

    def __init__(self, world: World, placeholders: Placeholders) -> None:
        self._world, self._found = world, placeholders
        self._name = f"{placeholders.name}-WORD" if placeholders.name else NAME
        self._zone = ZONE
        self._queued = placeholders.exists
        """Whether the slice with a queued resource exists."""
        self._lone = placeholders.exists
        """Whether the slice without a queued resource exists."""
        self._labels = {OWNER: world.owner(None), TITLE: placeholders.name or NAME}
        self._keeper = placeholders.keeper
        self._waited_s = 0.0
        self._when = ""
        self._comment = ""
        self._printed: set[tuple[str, Sequence[str]]] = set()

    def note(self, when: str) -> None:
        """Announce when the next commands would be run; empty: always."""
        self._when = when

    def time(self) -> float:
        """Seconds since 1970, excluding simulated waiting."""
        return self._world.clock.time()

    def monotonic(self) -> float:
        """Seconds waited so far."""
        return self._waited_s

    def sleep(self, seconds: float, /) -> None:
        """Add to the seconds waited, and return at once."""
        self._waited_s += seconds

    def foreground(self, argv: Sequence[str]) -> int:
        """Print a command that would use the terminal."""
        return self.run(argv, 0.0).returncode or 0

    def run(self, argv: Sequence[str], timeout_s: float) -> Finished:
        """Print a command, unless it was printed for the same case, and answer it."""
        words = tuple(argv)
        if (self._when, words) not in self._printed:
            self._printed.add((self._when, words))
            if self._when not in ("", self._comment):
                print(f"# {self._when}")
            self._comment = self._when
            print(shlex.join(words))
        verb = next(word for word in words if word in VERBS)
        group = words[words.index(verb) - 1]
        pairs = [word.removeprefix("--").partition("=") for word in words if word.startswith("--")]
        flags = {name: value for name, _, value in pairs}
        stdout = stderr = ""
        match verb:
            case "list":
                stdout = json.dumps(self._listed(group, flags.get("zone")))
            case "ssh":
                workers = 1 if group == "compute" else self._found.workers
                stdout = self._reply(flags.get("command", ""), workers)
            case "create" if flags["zone"] in self._found.zones[:-1]:
                stderr = NO_CAPACITY
            case _:
                self._change(group, verb, words[words.index(verb) + 1], flags)
        return Finished(argv=words, returncode=int(bool(stderr)), stdout=stdout, stderr=stderr)

    def _listed(self, group: str, zone: str | None) -> JsonAnswer:
        """The answer to gcloud's list command of this group, in a zone if it names one."""
        if group == "objects" or zone not in (None, "-", ZONE, self._zone):
            return []
        match group:
            case "config":
                return {"core": {"project": "PROJECT"}, "compute": {"zone": ZONE}}
            case "locations":
                return [{"locationId": ZONE}]
            case "queued-resources":
                node = {"acceleratorType": self._found.accelerator, "labels": self._labels}
                request = {"state": {"state": "ACTIVE"}, "tpu": {"nodeSpec": [{"node": node}]}}
                request |= {"spot": {}} if self._found.spot else {}
                return [{"name": self._path("queuedResources"), **request}] * self._queued
            case "instances":
                interfaces = [{"networkIP": "ADDRESS0"}]
                machine = {"name": self._keeper, "zone": f"zones/{self._zone}", "labels": self._labels}
                running = {"status": "RUNNING", "networkInterfaces": interfaces}
                return [machine | running] * (self._keeper is not None)
        endpoints = [{"ipAddress": f"ADDRESS{worker}"} for worker in range(self._found.workers)]
        node = {
            "name": self._path("nodes"),
            "state": "READY",
            "schedulingConfig": {"spot": self._found.spot},
            "acceleratorType": self._found.accelerator,
            "labels": self._labels,
            "networkEndpoints": endpoints,
        }
        return [node] * self._lone + [{**node, "queuedResource": self._path("queuedResources")}] * self._queued

    def _change(self, group: str, verb: str, name: str, flags: Mapping[str, str]) -> None:
        """Apply the effect of a command to the project."""
        if group == "instances":
            self._keeper = name if verb == "create" else None
            self._zone = flags["zone"]
        elif verb == "update":
            pairs = [pair.partition("=") for pair in flags["update-labels"].split(",")]
            self._labels |= {name: value for name, _, value in pairs}
        elif verb in ("create", "delete") and group != "storage":
            self._zone, self._name = flags["zone"], name
            if verb == "create":
                kind = flags["accelerator-type"]
                self._found = dataclasses.replace(self._found, accelerator=kind, spot="spot" in flags)
            if group == "queued-resources":
                self._queued = verb == "create"
            else:
                self._lone = verb == "create"

    def _reply(self, command: str, workers: int) -> str:
        """The workers' replies to a command: that its job has ended, or an empty log."""
        about = re.search(r"agent (?:status|stop) ?([A-Za-z0-9][\w.-]*)?", command)
        job = about and (about[1] or self._found.job)
        status = {**NO_JOB, "host": "HOST", "time": 0, "left": []}
        if job:
            status |= {"job": job, "state": "finished", "exit": 0, "log_bytes": 1}
        text = "" if "agent logs" in command else f"{self.time():.0f}" if "date +%s" in command else json.dumps(status)
        packed = b64encode(gzip.compress(text.encode())).decode()
        return "".join(f"{MARK} {worker} 0 {packed}\n" for worker in range(workers))

    def _path(self, kind: str) -> str:
        return f"projects/PROJECT/locations/{self._zone}/{kind}/{self._name}"
