"""gcloud without gcloud: the same commands, answers and bad habits, in this process, against `FakeTpu`.

What the real one says was recorded (recorded_gcloud.json, by record_gcloud.py); test_gcloud.py holds this one to it.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from podium.pods.gcloud import Finished, Gcloud, Runner
from podium.pods.launch import RunSpec
from podium.pods.project import Project
from podium.pods.push import Package
from podium.pods.secrets import Secrets
from podium.pods.slices import Slices
from tests.pods.clock import Clock
from tests.pods.fake_tpu import ApiError, FakeTpu, LostError

ATTEMPTS = 3
"""How often a request is sent that gets no reply, or 503."""
SENT_AGAIN = 10
"""Times that gcloud gives a command to a worker whose ssh ended with 255."""


class Hosts(Protocol):
    """The machines of a node."""

    def run(self, worker: int, command: str, timeout_s: float) -> tuple[int, str, str]:
        """Status, stdout and stderr of a command on one machine; status 255: it could not be reached."""
        ...

    def copy(self, worker: int, files: Sequence[str], folder: str) -> int:
        """Copy files to one machine; the status of scp."""
        ...


class FakeGcloud:
    """A `podium.pods.gcloud.Runner`."""

    def __init__(self, fake: FakeTpu, clock: Clock, hosts: Hosts | None = None, project: str | None = "p") -> None:
        self.fake, self.clock, self.hosts, self.project = fake, clock, hosts, project
        self.commands: list[tuple[str, ...]] = []
        self.parallel = True
        """Whether all machines are asked at once."""
        self.vms: dict[str, dict[str, Any]] = {}
        """Ordinary virtual machines, as Google describes them."""
        self.vms_refused = ""
        """What gcloud says to who may not list them."""
        self.machine: Hosts | None = None
        self.machine_address = ""
        """What all of them are, and where."""
        self.before: Callable[[tuple[str, ...]], None] = lambda argv: None
        """Called before each command; may raise, as if the laptop was closed."""
        self.instant: Callable[[str], None] = lambda method: None
        """Called before each request of a command: an update of labels is a GET and a PATCH, at two instants."""

    def __call__(self, argv: Sequence[str], timeout_s: float) -> Finished:
        argv = tuple(argv)
        self.before(argv)
        self.commands.append(argv)
        if argv[:3] == ("gcloud", "config", "list"):
            core = {"account": "ada@example.org"} | ({"project": self.project} if self.project else {})
            return self._finished(argv, 0, json.dumps({"core": core}))
        if argv[1] == "storage":
            return self._storage(argv)
        if argv[2] in ("instances", "ssh", "scp"):
            return self._virtual_machines(argv, timeout_s)
        assert argv[:3] == ("gcloud", "compute", "tpus"), argv
        group, verb = argv[3:5]
        flags = dict(word.removeprefix("--").partition("=")[::2] for word in argv[5:] if word.startswith("--"))
        words = [word for word in argv[5:] if not word.startswith("--")]
        if not (flags.get("project") or self.project):
            text = f"(gcloud.compute.tpus.{group}.{verb}) Error parsing [zone].\nFailed to find attribute [project]."
            return self._finished(argv, 1, "", f"ERROR: {text}\n")
        try:
            if verb in ("ssh", "scp"):
                return self._on_hosts(argv, verb, words, flags, timeout_s)
            answer = self._api(group, verb, words, flags)
        except ApiError as error:
            message = f"ERROR: (gcloud.compute.tpus.{group}.{verb}) {error.status}: {error.message}\n"
            return self._finished(argv, 1, "", message)
        except LostError:
            return self._finished(argv, 1, "", "ERROR: gcloud crashed (ConnectionError): ('Connection aborted.')\n")
        return self._finished(argv, *answer)

    def _storage(self, argv: tuple[str, ...]) -> Finished:
        """`gcloud storage`: copy into a bucket, and list what begins like this."""
        self.instant("PUT" if argv[2] == "cp" else "GET")
        if self.fake.storage_fails:
            return self._finished(argv, 1, "", self.fake.storage_fails)
        if argv[2] == "cp":
            self.fake.objects[argv[4]] = self.fake.clock()
            return self._finished(argv, 0, "")
        found = [
            {"name": name, "creation_time": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%S%z")}
            for name, created in self.fake.objects.items()
            if name.startswith(argv[4].removesuffix("*"))
        ]
        return self._finished(argv, 0, json.dumps(found))

    def _virtual_machines(self, argv: tuple[str, ...], timeout_s: float) -> Finished:
        """`gcloud compute instances`, and `ssh` and `scp` to one."""
        verb, words = argv[3], [word for word in argv[3:] if not word.startswith("--")]
        flags = dict(word.removeprefix("--").partition("=")[::2] for word in argv[3:] if word.startswith("--"))
        if argv[2] != "instances":
            if words[-1].partition(":")[0] not in self.vms:
                return self._finished(
                    argv, 1, "", "ERROR: (gcloud.compute.ssh) Could not fetch resource:\n - not found"
                )
            return self._on_hosts(argv, argv[2], words, flags, timeout_s)
        if verb == "list" and self.vms_refused:
            return self._finished(argv, 0, "[]", self.vms_refused)
        if verb == "list":
            name, label = flags["filter"].removeprefix("name="), flags["filter"].removeprefix("labels.")
            found = [vm for vm in self.vms.values() if name == vm["name"] or label[:-2] in vm.get("labels", {})]
            return self._finished(argv, 0, json.dumps(found))
        if verb == "create":
            self.vms[words[1]] = {
                "name": words[1],
                "zone": f"https://www.googleapis.com/compute/v1/projects/p/zones/{flags['zone']}",
                "status": "RUNNING",
                "labels": dict(each.split("=") for each in flags["labels"].split(",")),
                "networkInterfaces": [{"networkIP": self.machine_address}],
            }
        elif verb == "add-metadata":
            key, _, file = flags["metadata-from-file"].partition("=")
            self.vms[words[1]]["metadata"] = {"items": [{"key": key, "value": Path(file).read_text()}]}
            self.vms[words[1]]["status"] = "TERMINATED"  # it turns itself off next
        else:
            self.vms.pop(words[1], None)
        return self._finished(argv, 0, "[]")

    def _finished(self, argv: tuple[str, ...], code: int | None, stdout: str, stderr: str = "") -> Finished:
        return Finished(argv=argv, returncode=code, stdout=stdout, stderr=stderr)

    def _api(self, group: str, verb: str, words: list[str], flags: dict[str, str]) -> tuple[int, str, str]:
        if group == "locations":
            return 0, json.dumps(self._request("GET", "/v1/projects/p/locations")["locations"]), ""
        kind = "nodes" if group == "tpu-vm" else "queuedResources"
        place = f"/v2/projects/p/locations/{flags['zone']}/{kind}"
        if verb == "list":
            return 0, json.dumps(self._request("GET", place).get(kind, [])), ""
        name = words[0]
        if verb == "create":
            key = "nodeId" if kind == "nodes" else "queuedResourceId"
            body = _node(flags) if kind == "nodes" else _queued(name, flags)
            operation = self._request("POST", place, {key: name}, body)
        elif verb == "delete":
            operation = self._request("DELETE", f"{place}/{name}", {"force": "true"} if "force" in flags else {})
        elif verb == "update":
            node = self._request("GET", f"{place}/{name}")
            labels = node.get("labels", {}) | dict(each.split("=") for each in flags["update-labels"].split(","))
            operation = self._request("PATCH", f"{place}/{name}", {"updateMask": "labels"}, {"labels": labels})
        else:
            raise AssertionError(verb)
        while not operation["done"]:
            self.clock.sleep(2.0)
            operation = self._request("GET", f"/v2/{operation['name']}")
        if "error" in operation:
            message = json.dumps(operation["error"], indent=2)
            return 1, "", f"ERROR: (gcloud.compute.tpus.{group}.{verb}) {message}\n"
        return 0, json.dumps(operation), ""

    def _request(self, method: str, path: str, query: dict[str, str] | None = None, body: Any = None) -> dict[str, Any]:
        for attempt in range(ATTEMPTS):
            self.instant(method)
            try:
                return self.fake.handle(method, path, query or {}, body)
            except LostError:
                if attempt == ATTEMPTS - 1:
                    raise
            except ApiError as error:
                if attempt == ATTEMPTS - 1 or error.http != 503:
                    raise
            self.clock.sleep(5.0)
        raise AssertionError

    def _on_hosts(
        self, argv: tuple[str, ...], verb: str, words: list[str], flags: dict[str, str], timeout_s: float
    ) -> Finished:
        target = (words[0] if verb == "ssh" else words[-1].partition(":")[0]).rpartition("@")[2]
        if argv[2] != "tpus":
            assert self.machine is not None
            return self._reached(argv, verb, words, flags, timeout_s, self.machine, range(1))
        node = self._request("GET", f"/v2/projects/p/locations/{flags['zone']}/nodes/{target}")
        if node["state"] in ("PREEMPTED", "TERMINATED"):
            message = f'This TPU has terminal state "{node["state"]}", so it cannot be used anymore.'
            return self._finished(argv, 1, "", f"ERROR: (gcloud.compute.tpus.tpu-vm.{verb}) {message}\n")
        count = len(node["networkEndpoints"])
        workers = range(count) if flags.get("worker", "0") == "all" else [int(flags.get("worker", "0"))]
        assert self.hosts is not None
        return self._reached(argv, verb, words, flags, timeout_s, self.hosts, workers)

    def _reached(
        self,
        argv: tuple[str, ...],
        verb: str,
        words: list[str],
        flags: dict[str, str],
        timeout_s: float,
        hosts: Hosts,
        workers: Sequence[int],
    ) -> Finished:
        def of_worker(worker: int) -> tuple[int, str, str]:
            said, message = "", ""
            for _ in range(SENT_AGAIN):
                if verb == "scp":
                    status, out, err = hosts.copy(worker, words[:-1], words[-1].partition(":")[2]), "", ""
                else:
                    status, out, err = hosts.run(worker, flags["command"], timeout_s)
                said, message = said + out, message + err
                if status != 255:
                    break
                self.clock.sleep(5.0)
            return status, said, message

        with ThreadPoolExecutor(len(workers)) as pool:
            done = list((pool.map if self.parallel else map)(of_worker, workers))
        statuses = [status for status, _, _ in done]
        code = None if 255 in statuses else max(statuses)  # after ten times five seconds nobody waits any more
        return self._finished(argv, code, "".join(out for _, out, _ in done), "".join(err for _, _, err in done))


class Cloud:
    """A project of Google Cloud, as the base of every world of these tests."""

    def __init__(
        self, *, clock: Clock | None = None, zones: tuple[str, ...], hosts: Hosts | None = None, **options: Any
    ) -> None:
        self.clock = clock or Clock()
        self.fake = FakeTpu(clock=self.clock.time, zones=zones, **options)
        self.gcloud = FakeGcloud(self.fake, self.clock, hosts)
        self.said: list[str] = []

    def owned_by(self, owner: str, runner: Runner | None = None, *, follows: bool = False) -> Slices:
        """An owner's view of it."""
        gcloud = Gcloud(runner or self.gcloud)
        return Slices(gcloud, owner=owner, clock=self.clock, say=self.said.append, parallel=1, follows=follows)


def made_spec(name: str, file: Path) -> RunSpec:
    """A run whose code is one file."""
    package = Package(key="code-1", files=(file,), inside="", extras=("tpu",), environment="e", python=None)
    config, secrets = f"name: {name}\n", Secrets({})
    return RunSpec(name=name, config=config, package=package, accelerator="v4-16", secrets=secrets, environment={})


class Heard(Project):
    """A project whose attribute `hear` gets each line that it says, and that answers nothing."""

    def say(self, line: str) -> None:
        self.__dict__["hear"](line)

    def answer(self, text: str, *, end: str = "\n") -> None:
        pass


def _node(flags: dict[str, str]) -> dict[str, Any]:
    return {
        "acceleratorType": flags["accelerator-type"],
        "runtimeVersion": flags["version"],
        "labels": dict(each.split("=") for each in flags["labels"].split(",")),
        "schedulingConfig": {"spot": "spot" in flags},
    }


def _queued(name: str, flags: dict[str, str]) -> dict[str, Any]:
    node = _node({**flags, "version": flags["runtime-version"]})
    del node["schedulingConfig"]
    spec = {"parent": f"projects/p/locations/{flags['zone']}", "nodeId": flags["node-id"], "node": node}
    policy = {"validUntilDuration": flags["valid-until-duration"]}
    return {"tpu": {"nodeSpec": [spec]}, "queueingPolicy": policy} | ({"spot": {}} if "spot" in flags else {})


class Closed(BaseException):
    """The laptop was closed at this command."""
