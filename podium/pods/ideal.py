"""A cloud in which nothing goes wrong and nothing is real: `--dry-run` runs a command against it and prints its gcloud.

So what is printed is what would be run, in the same order, with the same arguments; only addresses, and zones and
names that a command would first have to look up, are made up (written in capitals).
"""

import base64
import gzip
import json
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from podium.pods.gcloud import Finished

UNKNOWN_ZONE = "ZONE"


class IdealCloud:
    """Runs commands by saying them and answering as if all went well; its clock stands still."""

    def __init__(self, say: Callable[[str], None], *, zone: str | None, workers: int) -> None:
        """`zone` is where things are; None: it is made up. `workers` machines answer."""
        self.zone = zone or UNKNOWN_ZONE
        self._say, self._workers = say, workers
        self._queued = True
        self._slice: dict[str, Any] | None = None
        self._started: str | None = None
        self._said: set[tuple[str, ...]] = set()

    def holds(self, name: str, accelerator: str, labels: Mapping[str, str]) -> None:
        """There is a slice of that name."""
        self._slice = {"name": name, "accelerator": accelerator, "labels": dict(labels)}

    def time(self) -> float:
        """Now."""
        return time.time()

    def sleep(self, seconds: float, /) -> None:
        """Nothing is waited for."""

    def __call__(self, argv: Sequence[str], timeout_s: float) -> Finished:
        """Say a command once, and answer it."""
        argv = tuple(argv)
        if argv not in self._said:
            self._said.add(argv)
            self._say(shlex.join(re.sub(r"\b[0-9a-f]{12}\b(?= \$worker)", "MARK", word) for word in argv))
        return Finished(argv=argv, returncode=0, stdout=self._answer(argv), stderr="")

    def _answer(self, argv: tuple[str, ...]) -> str:
        flags = pairs(word.removeprefix("--") for word in argv if word.startswith("--"))
        match argv[3:5]:
            case ("locations", "list"):
                return json.dumps([{"locationId": self.zone}])
            case ("tpu-vm", "list"):
                return json.dumps([self._node()] if self._slice else [])
            case ("queued-resources", "list"):
                return json.dumps([self._request()] if self._slice and self._queued else [])
            case (group, "create"):
                self._queued, self.zone = group == "queued-resources", flags["zone"]
                self.holds(argv[5], flags["accelerator-type"], pairs(flags["labels"].split(",")))
            case (_, "delete"):
                self._slice = None
            case (_, "ssh"):
                return self._workers_answer(flags.get("worker", "0"), flags["command"])
        return "{}"

    def _node(self) -> dict[str, Any]:
        assert self._slice is not None
        name = f"projects/p/locations/{self.zone}/nodes/{self._slice['name']}"
        parent = {"queuedResource": name.replace("/nodes/", "/queuedResources/")} if self._queued else {}
        return {
            "name": name,
            "state": "READY",
            "acceleratorType": self._slice["accelerator"],
            "labels": self._slice["labels"],
            "schedulingConfig": {"spot": True},
            "networkEndpoints": [{"ipAddress": f"ADDRESS{worker}"} for worker in range(self._workers)],
            **parent,
        }

    def _request(self) -> dict[str, Any]:
        node = self._node()
        spec = {"node": {key: node[key] for key in ("acceleratorType", "labels")}}
        return {"name": node["queuedResource"], "state": {"state": "ACTIVE"}, "spot": {}, "tpu": {"nodeSpec": [spec]}}

    def _workers_answer(self, worker: str, command: str) -> str:
        mark = re.findall(r'echo "([0-9a-f]{12}) \$worker', command)[-1]
        text = self._said_by_worker(command)
        packed = base64.b64encode(gzip.compress(text.encode())).decode()
        asked = range(self._workers) if worker == "all" else [int(worker)]
        return "".join(f"{mark} {each} 0 {packed}\n" for each in asked)

    def _said_by_worker(self, command: str) -> str:
        if "agent logs" in command:
            return ""
        if found := re.search(r"agent start (\S+)", command):
            self._started = found[1]
        status = {"job": self._started, "state": "finished" if self._started else "none", "exit": 0, "time": 0.0}
        return "\n" + json.dumps({**status, "host": "HOST", "record": None, "progress": None, "log_bytes": 0})


def pairs(texts: Iterable[str]) -> dict[str, str]:
    """Names and values of `NAME=VALUE` texts."""
    split = (text.partition("=") for text in texts)
    return {name: value for name, _, value in split}
