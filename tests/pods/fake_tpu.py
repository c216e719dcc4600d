"""A fake of Cloud TPU's API: nodes, queued resources and operations as a state machine over a clock, and its faults.

`FakeTpu.handle` is the API without a network; `serve` puts it on a loopback port for the real gcloud
(CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU). Nothing moves by itself: every request first does what became due.
"""

import contextlib
import dataclasses
import heapq
import itertools
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

WORKERS = {"v6e-1": 1, "v6e-4": 1, "v6e-8": 1, "v6e-16": 4, "v6e-32": 8, "v4-8": 1, "v4-16": 2}
NO_CAPACITY = (
    'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are offered '
    "(see https://cloud.google.com/tpu/docs/regions)"
)
NO_QUOTA = "Quota limit 'TPUV6EPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone {zone}."


class LostError(Exception):
    """The connection breaks and no reply comes."""


class ApiError(Exception):
    """An error reply."""

    def __init__(self, http: int, status: str, message: str):
        super().__init__(message)
        self.http, self.status, self.message = http, status, message


@dataclasses.dataclass
class Fault:
    """What goes wrong with the next `times` requests that match."""

    match: str
    """Regular expression over `METHOD zone kind`, such as `POST us-a nodes` (or queuedResources, operations)."""
    kind: Literal["429", "503", "403", "quota", "drop", "lost_reply", "late", "operation"]
    """drop: nothing is done; lost_reply: all is done, nobody hears; late: the same, and done only after a while."""
    times: int = 1

    def error(self, zone: str) -> ApiError | None:
        """The error reply, where the fault is one."""
        replies = {
            "429": (429, "RESOURCE_EXHAUSTED", "Maximum number of CreateNode requests per minute exceeded."),
            "503": (503, "UNAVAILABLE", "The service is currently unavailable."),
            "403": (
                403,
                "PERMISSION_DENIED",
                f"Permission 'tpu.nodes.create' denied on '{zone}' (or it may not exist).",
            ),
            "quota": (429, "RESOURCE_EXHAUSTED", NO_QUOTA.format(zone=zone)),
        }
        return ApiError(*replies[self.kind]) if self.kind in replies else None


class FakeTpu:
    """The API of one project."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        zones: tuple[str, ...] = ("us-a", "us-b", "eu-c"),
        provision_s: float = 60.0,
        operation_s: float = 5.0,
        addresses: Callable[[str, int], list[str]] = lambda name, count: [f"10.200.0.{2 + i}" for i in range(count)],
        on_keys: Callable[[str], None] = lambda keys: None,
    ) -> None:
        """`addresses` gives a node's machines (name, how many); `on_keys` hears of ssh keys put into metadata."""
        self.clock, self.zones = clock, zones
        self.provision_s, self.operation_s = provision_s, operation_s
        self.nodes: dict[str, dict[str, Any]] = {}
        self.queued: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.capacity: dict[str, int] = {}  # slices that a zone has left; one that is not named has enough
        self.stuck_zones: set[str] = set()  # where machines are made for ever
        self.unreachable: set[str] = set()  # they answer nothing, and lists of all zones leave them out
        self.objects: dict[str, float] = {}  # in buckets, and when each was created
        self.storage_fails = ""  # what gcloud says about every bucket
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, str, Any]] = []
        """Method, path, query and body of all requests."""
        self.lock = threading.RLock()
        self._addresses, self._on_keys = addresses, on_keys
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()

    # what tests do to it

    def preempt(self, name: str) -> None:
        """Google takes the machines of every node of that name; the node stays, and holds quota."""
        with self.lock:
            self.tick()
            for node in self.nodes.values():
                if _called(node["name"], name) and node["state"] == "READY":
                    node["state"] = "PREEMPTED"
                    parent = self.queued.get(node.get("queuedResource", ""))
                    if parent:
                        parent["state"] = {"state": "SUSPENDED", "stateInitiator": "SERVICE", "suspendedData": {}}

    def vanish(self, name: str) -> None:
        """Somebody deletes all of that name in the web console."""
        with self.lock:
            self.tick()
            for table in (self.nodes, self.queued):
                for key in [key for key in table if _called(key, name)]:
                    del table[key]

    def everything(self) -> list[str]:
        """Full names of all nodes and queued resources there are or will be, in order."""
        with self.lock:
            while self._due:
                self.tick(until=self._due[0][0])
            return sorted([*self.nodes, *self.queued])

    def stranger(
        self, zone: str, name: str, labels: Mapping[str, str] | None = None, accelerator: str = "v6e-8"
    ) -> str:
        """A node that somebody else made; its full name."""
        full = f"projects/p/locations/{zone}/nodes/{name}"
        node = self._new_node(full, {"acceleratorType": accelerator, "labels": dict(labels or {})})
        node["state"] = "READY"
        return full

    # the API

    def handle(self, method: str, path: str, query: Mapping[str, str], body: Any) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            ApiError: an error reply.
            LostError: no reply.
        """
        with self.lock:
            self.requests.append((method, path, urllib.parse.urlencode(query), body))
            self.tick()
            if re.fullmatch(r"/compute/v1/projects/[^/]+", path):
                return {"kind": "compute#project", "name": "p", "commonInstanceMetadata": {"items": []}}
            if path.endswith("/aggregated/instances"):
                return {"kind": "compute#instanceAggregatedList", "items": {}}
            if re.fullmatch(r"/v\w+/projects/[^/]+/locations", path):
                return {"locations": [{"name": f"projects/p/locations/{z}", "locationId": z} for z in self.zones]}
            parts = re.fullmatch(r"/v\w+/(projects/[^/]+/locations/([^/]+))/(\w+)(?:/([^/:]+))?(?::(\w+))?", path)
            if not parts:
                raise ApiError(404, "NOT_FOUND", f"no route {method} {path}")
            return self._faulty(method, parts[1], parts[2], parts[3], parts[4], parts[5], query, body)

    def tick(self, until: float | None = None) -> None:
        """Do what is due."""
        now = self.clock() if until is None else until
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()

    def _faulty(self, method, parent, zone, kind, name, verb, query, body) -> dict[str, Any]:
        fault = self._fault(f"{method} {zone} {kind}")
        if fault is not None and (error := fault.error(zone)):
            raise error
        if fault is not None and fault.kind == "drop":
            raise LostError
        if zone in self.unreachable:
            raise ApiError(503, "UNAVAILABLE", f"Location {zone} cannot be reached.")
        if zone not in (*self.zones, "-"):
            raise ApiError(403, "PERMISSION_DENIED", f"Location {zone} is not found or access is unauthorized.")

        def work() -> dict[str, Any]:
            failing = fault is not None and fault.kind == "operation"
            return self._route(method, parent, zone, kind, name, verb, query, body, failing=failing)

        if fault is not None and fault.kind == "late":

            def belated() -> None:
                with contextlib.suppress(ApiError):
                    work()

            self._later(8.0, belated)
            raise LostError
        reply = work()
        if fault is not None and fault.kind == "lost_reply":
            raise LostError
        return reply

    def _fault(self, request: str) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.match, request):
                fault.times -= 1
                return fault
        return None

    def _route(self, method, parent, zone, kind, name, verb, query, body, *, failing) -> dict[str, Any]:
        table = {"nodes": self.nodes, "queuedResources": self.queued, "operations": self.operations}[kind]
        if name is None and method == "GET":
            listed = {key: each for key, each in table.items() if key.split("/")[3] not in self.unreachable}
            found = [each for key, each in listed.items() if zone == "-" or key.startswith(f"{parent}/{kind}/")]
            return {kind: [_public(each) for each in found]} if found else {}
        if name is None:
            name = query["nodeId" if kind == "nodes" else "queuedResourceId"]
            full = f"{parent}/{kind}/{name}"
            if full in table:
                raise ApiError(409, "ALREADY_EXISTS", f"Resource '{full}' already exists")
            create = self._create_node if kind == "nodes" else self._create_queued
            return create(full, zone, dict(body or {}), failing)
        full = f"{parent}/{kind}/{name}"
        if full not in table:
            raise ApiError(404, "NOT_FOUND", f"Resource '{full}' was not found")
        if verb == "getGuestAttributes":
            raise ApiError(400, "FAILED_PRECONDITION", "no guest attributes here")
        if method == "PATCH":
            return self._update(full, query["updateMask"].split(","), body)
        if method == "DELETE":
            return self._delete_node(full) if kind == "nodes" else self._delete_queued(full, query)
        return _public(table[full])

    def _create_node(self, full: str, zone: str, body: dict[str, Any], failing: bool) -> dict[str, Any]:
        if failing or not self._take(zone):
            return self._operation(full, error={"code": 8, "message": NO_CAPACITY.format(zone=zone)})
        node = self._new_node(full, body)
        return self._operation(full, lambda: node.update(state="READY"), lambda: _public(node), self.provision_s)

    def _create_queued(self, full: str, zone: str, body: dict[str, Any], failing: bool) -> dict[str, Any]:
        queued = {**body, "name": full, "createTime": self._now(), "state": {"state": "ACCEPTED"}}
        self.queued[full] = queued
        if failing:
            _fail(queued, NO_CAPACITY.format(zone=zone))
        else:
            self._later(self.provision_s / 3, lambda: self._provision(full, zone))
            valid_s = float(body.get("queueingPolicy", {}).get("validUntilDuration", "1e9s").rstrip("s"))
            self._later(valid_s, lambda: self._expire(full))
        return self._operation(full, result=lambda: _public(queued))

    def _provision(self, full: str, zone: str) -> None:
        queued = self.queued.get(full)
        if queued is None or queued["state"]["state"] not in ("ACCEPTED", "WAITING_FOR_RESOURCES"):
            return
        spec = queued["tpu"]["nodeSpec"][0]
        node_name = f"{spec['parent']}/nodes/{spec['nodeId']}"
        if node_name in self.nodes or not self._take(zone):
            queued["state"] = {"state": "WAITING_FOR_RESOURCES"}
            self._later(self.provision_s, lambda: self._provision(full, zone))
            return
        queued["state"] = {"state": "PROVISIONING"}
        node = self._new_node(node_name, spec["node"])
        node["queuedResource"] = full
        node["schedulingConfig"] = {"spot": True} if "spot" in queued else {}
        self._later(self.provision_s, lambda: self._activate(queued, node))

    def _activate(self, queued: dict[str, Any], node: dict[str, Any]) -> None:
        if queued["state"]["state"] == "PROVISIONING" and queued["name"].split("/")[3] not in self.stuck_zones:
            node["state"] = "READY"
            queued["state"] = {"state": "ACTIVE", "activeData": {}}

    def _expire(self, full: str) -> None:
        queued = self.queued.get(full)
        if queued is not None and queued["state"]["state"] in ("ACCEPTED", "WAITING_FOR_RESOURCES"):
            _fail(queued, "The request was not fulfilled before its deadline.")

    def _delete_node(self, full: str) -> dict[str, Any]:
        node = self.nodes[full]
        if node.get("queuedResource") in self.queued:
            raise ApiError(400, "FAILED_PRECONDITION", f"'{full}' was made by a queued resource; delete that instead.")
        node["state"] = "DELETING"
        return self._operation(full, lambda: self.nodes.pop(full, None))

    def _delete_queued(self, full: str, query: Mapping[str, str]) -> dict[str, Any]:
        queued = self.queued[full]
        forced = query.get("force", "").lower() == "true"
        if queued["state"]["state"] in ("PROVISIONING", "ACTIVE") and not forced:
            message = f"'{full}' is in state {queued['state']['state']}; use force to delete its nodes too."
            raise ApiError(400, "FAILED_PRECONDITION", message)
        queued["state"] = {"state": "DELETING"}

        def gone() -> None:
            self.queued.pop(full, None)
            for key in [key for key, node in self.nodes.items() if node.get("queuedResource") == full]:
                del self.nodes[key]

        return self._operation(full, gone)

    def _update(self, full: str, mask: list[str], body: Mapping[str, Any]) -> dict[str, Any]:
        node = self.nodes[full]
        node.update({key: body[key] for key in mask if key in body})
        if keys := node.get("metadata", {}).get("ssh-keys"):
            self._on_keys(keys)
        return self._operation(full, result=lambda: _public(node))

    def _new_node(self, full: str, body: Mapping[str, Any]) -> dict[str, Any]:
        count = WORKERS[body["acceleratorType"]]
        endpoints = [{"ipAddress": each, "port": 8470} for each in self._addresses(_last(full), count)]
        self.nodes[full] = {
            **body,
            "name": full,
            "id": str(next(self._ids)),
            "state": "CREATING",
            "health": "HEALTHY",
            "apiVersion": "V2",
            "createTime": self._now(),
            "networkEndpoints": endpoints,
        }
        return self.nodes[full]

    def _take(self, zone: str) -> bool:
        left = self.capacity.get(zone, 1)
        if zone in self.capacity and left:
            self.capacity[zone] -= 1
        return left > 0

    def _operation(
        self,
        target: str,
        apply: Callable[[], Any] = lambda: None,
        result: Callable[[], dict[str, Any]] = dict,
        seconds: float | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        name = f"{target.rsplit('/', 2)[0]}/operations/operation-{next(self._ids)}"
        operation: dict[str, Any] = {"name": name, "done": False, "metadata": {"target": target}}

        def finish() -> None:
            apply()
            operation["done"] = True
            kind = "nodes" if "/nodes/" in target else "queuedResources"
            of = {"nodes": "Node", "queuedResources": "QueuedResource"}[kind]
            answer = result()
            full = {"@type": f"type.googleapis.com/google.cloud.tpu.v2.{of}", **answer}
            empty = {"@type": "type.googleapis.com/google.protobuf.Empty"}
            operation.update({"error": error} if error else {"response": full if answer else empty})

        self.operations[name] = operation
        self._later(self.operation_s if seconds is None else seconds, finish)
        return _public(operation)

    def _later(self, seconds: float, action: Callable[[], Any]) -> None:
        heapq.heappush(self._due, (self.clock() + seconds, next(self._ids), action))

    def _now(self) -> str:
        return datetime.fromtimestamp(self.clock(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _public(resource: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(resource))


def _fail(queued: dict[str, Any], message: str) -> None:
    queued["state"] = {"state": "FAILED", "failedData": {"error": {"code": 8, "message": message}}}


def _called(full: str, title: str) -> bool:
    """Whether it has this name, or this title before the word that makes its name its own."""
    return _last(full) == title or _last(full).rpartition("-")[0] == title


def _last(name: str) -> str:
    return name.rpartition("/")[2]


@contextlib.contextmanager
def serve(fake: FakeTpu, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """The API on HTTP; its address, as `http://127.0.0.1:PORT/`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            query = dict(urllib.parse.parse_qsl(url.query))
            try:
                self.reply(200, fake.handle(self.command, urllib.parse.unquote(url.path), query, body))
            except ApiError as error:
                told = {"code": error.http, "status": error.status, "message": error.message}
                self.reply(error.http, {"error": told})
            except LostError:
                self.close_connection = True

        do_POST = do_PATCH = do_DELETE = do_GET

        def reply(self, code: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
