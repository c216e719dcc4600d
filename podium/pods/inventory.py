"""Joins the nodes and queued resources that the API lists into slices.

`podium.pods.slices` requests the lists, rents and deletes. Everything about a slice is stored in its own labels, so any
laptop of the owner can use it; slices without these labels are never deleted.
"""

import dataclasses
import datetime
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

State = Literal["ready", "creating", "waiting", "dead", "failed", "deleting"]
"""ready: all machines run; creating: they are being created; waiting: queued; dead: preempted, stopped or ended;
failed: the queued resource will never get machines. Dead and failed slices use quota until they are deleted."""

OWNER = "podium-owner"
ID = "podium-id"
"""Random word that distinguishes a slice from earlier and later ones with the same name."""
LEASE = "podium-lease"
"""When the lease expires, in Unix seconds."""
LEASE_S = "podium-lease-s"
"""Length of the lease in seconds, also when it is renewed."""
ZONES = "podium-zones"
"""Zones in which the slice was requested, in order."""
RUN = "podium-run"
"""The job last started on the slice's machines, or about to start; attempt 0: the slice was rented for that run."""
STOP = "podium-stop"
"""Time of the last `podium pod stop`, in Unix seconds."""
END = "podium-end"
"""RUN-TIME-STATUS: a run that has ended, when and with which status, for other commands that keep it alive."""
LABEL_LENGTH = 63
"""Maximum length of a label's value: lower-case letters, digits, `-` and `_`."""
ApiObject = Mapping[str, Any]
"""A JSON object as the API describes it."""

_QUEUED_STATES: Mapping[str, State] = {
    **dict.fromkeys(("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES"), "waiting"),
    **dict.fromkeys(("PROVISIONING", "ACTIVE"), "creating"),  # the node's state says whether it is ready
    **dict.fromkeys(("SUSPENDING", "SUSPENDED"), "dead"),
    "FAILED": "failed",
    "DELETING": "deleting",
}
_NODE_STATES: Mapping[str, State] = {
    **dict.fromkeys(("CREATING", "STARTING", "RESTARTING", "REIMAGING", "REPAIRING"), "creating"),
    **dict.fromkeys(("STOPPING", "STOPPED", "SUSPENDING", "SUSPENDED", "PREEMPTED", "TERMINATED", "HIDDEN"), "dead"),
    "READY": "ready",
    "DELETING": "deleting",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """Machines that are rented or requested together."""

    name: str
    zone: str
    state: State
    detail: str
    """The state as the API names it."""
    accelerator: str
    runtime: str
    spot: bool
    queued: bool
    """Whether a queued resource of this name is listed."""
    from_queue: bool
    """Whether it was requested as a queued resource."""
    node: bool
    """Whether a node of this name exists."""
    addresses: tuple[str, ...]
    """Internal addresses of its machines, by worker number; empty before there are machines."""
    labels: Mapping[str, str]
    created: datetime.datetime | None
    """When its machines were created, or the request for them."""
    service_account: str | None = None

    @property
    def owner(self) -> str | None:
        """The owner who rented it with Podium; None: it was not rented with Podium."""
        return self.labels.get(OWNER)

    @property
    def identity(self) -> str:
        """Distinguishes it from other slices of the same name; empty if an older Podium rented it."""
        return self.labels.get(ID, "")

    def is_same(self, other: "Slice") -> bool:
        """Whether both are one slice, seen at two moments."""
        return (self.name, self.zone, self.owner, self.identity) == (
            other.name,
            other.zone,
            other.owner,
            other.identity,
        )

    @property
    def run(self) -> str | None:
        """The run that it was rented for or that was last started there, without the attempt's number."""
        label = self.labels.get(RUN)
        return label and re.sub(r"-\d+$", "", label)

    @property
    def started(self) -> bool:
        """Whether a job was started on its machines."""
        return RUN in self.labels and not self.labels[RUN].endswith("-0")

    @property
    def lease(self) -> float | None:
        """The end of its lease in Unix seconds; None if the label is missing or not a number.

        The lease starts when the machines are created at the earliest: time in the queue does not count.
        """
        end = self._number(LEASE)
        if end is None or self.lease_s is None or self.created is None or not self.node:
            return end
        return max(end, self.created.timestamp() + self.lease_s)

    @property
    def lease_s(self) -> float | None:
        """Length of its lease in seconds; None if it has no such label."""
        return self._number(LEASE_S)

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones in which it was requested, in order."""
        return tuple(filter(None, self.labels.get(ZONES, "").split("_"))) or (self.zone,)

    @property
    def alive(self) -> bool:
        """Whether it runs or may still run."""
        return self.state in ("ready", "creating", "waiting")

    @property
    def billed(self) -> bool:
        """Whether machines exist."""
        return self.node and self.state in ("ready", "creating")

    def _number(self, label: str) -> float | None:
        text = self.labels.get(label, "")
        return float(text) if text.isdecimal() else None


def owner_label(account: str) -> str:
    """An account as the value of the owner's label, with a digest that distinguishes `a.b@x` from `a-b@x`."""
    return f"{label_text(account)[: LABEL_LENGTH - 9]}-{hashlib.sha256(account.encode()).hexdigest()[:8]}"


def label_text(text: str) -> str:
    """A text as a label's value."""
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-")[:LABEL_LENGTH]


def machine_name(slice_name: str) -> str:
    """The name of the machine that keeps a slice's run alive."""
    return f"podium-{slice_name}"


def zones_label(zones: Iterable[str]) -> str:
    """The first zones, in order, that fit into a label's value."""
    text = "_".join(zones)
    return text if len(text) <= LABEL_LENGTH else text[: LABEL_LENGTH + 1].rpartition("_")[0]


def read_slices(nodes: Iterable[ApiObject], queued: Iterable[ApiObject]) -> list[Slice]:
    """Join nodes and queued resources into slices, sorted by zone and name.

    Args:
        nodes: the answer of `tpu-vm list`.
        queued: the answer of `queued-resources list`.
    """
    made: dict[tuple[str, str], ApiObject] = {}  # a queued resource's name and zone -> its first node
    slices = []
    for node in nodes:
        parent = node.get("queuedResource")
        if parent:
            made.setdefault(_name_and_zone(parent), node)
        else:
            slices.append(_slice(None, node))
    for each in queued:
        slices.append(_slice(each, made.pop(_name_and_zone(each["name"]), None)))
    slices.extend(_slice(None, node) for node in made.values())  # their queued resource is gone or was not listed
    return sorted(slices, key=lambda each: (each.zone, each.name))


def _slice(queued: ApiObject | None, node: ApiObject | None) -> Slice:
    """The slice of a queued resource, of its node, or of both."""
    request = queued or {}
    machines = node or {}
    name, zone = _name_and_zone((queued or machines)["name"])
    spec = (request.get("tpu", {}).get("nodeSpec") or [{}])[0].get("node", {}) if queued else machines
    scheduling = machines.get("schedulingConfig", {})
    created = (node or request).get("createTime")
    state, detail = _state(request, machines)
    return Slice(
        name=name,
        zone=zone,
        state=state,
        detail=detail,
        accelerator=spec.get("acceleratorType", "?").rpartition("/")[2],
        runtime=spec.get("runtimeVersion", "?"),
        spot="spot" in request if queued else bool(scheduling.get("spot") or scheduling.get("preemptible")),
        queued=queued is not None,
        from_queue=queued is not None or "queuedResource" in machines,
        node=node is not None,
        addresses=tuple(each.get("ipAddress", "") for each in machines.get("networkEndpoints", ())),
        labels={**spec.get("labels", {}), **machines.get("labels", {})},
        created=datetime.datetime.fromisoformat(re.sub(r"\.\d+", "", created)) if created else None,
        service_account=spec.get("serviceAccount", {}).get("email"),
    )


def _state(request: ApiObject, machines: ApiObject) -> tuple[State, str]:
    """The state of a slice and its detail; each argument may be empty."""
    own = machines.get("state", "STATE_UNSPECIFIED")
    if not request:
        return _NODE_STATES.get(own, "creating"), own
    detail = request.get("state", {}).get("state", "STATE_UNSPECIFIED")
    state = _QUEUED_STATES.get(detail, "waiting")
    if reason := request.get("state", {}).get("failedData", {}).get("error", {}).get("message"):
        return state, f"{detail}: {reason}"
    if machines and state in ("creating", "waiting"):
        return _NODE_STATES.get(own, "creating"), f"{detail}, node {own}"
    return state, detail


def _name_and_zone(name: str) -> tuple[str, str]:
    """NAME and ZONE of `projects/P/locations/ZONE/nodes/NAME`, or of a queued resource; P is a number or a name."""
    parts = name.split("/")
    return parts[-1], parts[3]
