"""Joins the nodes and queued resources that the API lists into slices.

`podium.pods.slices` requests the lists, rents and deletes. Everything about a slice is stored in its own labels, so any
laptop of the owner can use it; slices without these labels are never deleted. All labels except one are set when the
slice is requested and never change, because gcloud updates labels by first reading and later writing all of them.
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
NAME = "podium-name"
"""Label with the user's name for the slice. The slice's actual name ends with a random word, so that it is never
reused."""
RUN = "podium-run"
"""Label with the run that `--keep-alive` rented the slice for; only that run uses and deletes it. Without this label,
the user does."""
IDLE_S = "podium-lease-s"
"""Label with the seconds without a job after which `podium pod reap` deletes the slice."""
ZONES = "podium-zones"
"""Label with the zones in which the slice was requested, in order."""
BUCKET = "podium-bucket"
"""Label with the run's bucket, where `podium.pods.endings` records that the run is over."""
STATE = "podium-state"
"""The only label that changes: `started`, then `stop-WORD` (`podium pod stop`), `end-STATUS` or `lost`.

A command that keeps a run alive sets `end-STATUS` or `lost` before it deletes machines; after that, no command starts
anything there."""
STARTED, LOST = "started", "lost"
STOP, END = "stop-", "end-"
LABEL_LENGTH = 63
"""Maximum length of a label's value: lower-case letters, digits, `-` and `_`."""
ApiObject = Mapping[str, Any]
"""A JSON object of the API."""

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
    """Internal addresses of the machines, by worker number; empty before the machines exist."""
    labels: Mapping[str, str]
    created: datetime.datetime | None
    """When the machines were created, or else requested."""
    requested: datetime.datetime | None
    service_account: str | None = None

    @property
    def owner(self) -> str | None:
        """The owner who rented the slice with Podium; None if it was not rented with Podium."""
        return self.labels.get(OWNER)

    @property
    def title(self) -> str:
        """The user's name for the slice."""
        return self.labels.get(NAME, self.name)

    @property
    def order(self) -> tuple[float, str]:
        """A sort key by which the slice requested first comes first, by Google's clock."""
        return (self.requested.timestamp() if self.requested else 0.0, self.name)

    @property
    def run(self) -> str | None:
        """The run that the slice was rented for; None if it was rented for any run."""
        return self.labels.get(RUN)

    @property
    def mark(self) -> str:
        """The value of the label STATE; empty if no job was started on the slice."""
        return self.labels.get(STATE, "")

    @property
    def doomed(self) -> bool:
        """Whether the command that kept the slice's run alive is about to delete the slice."""
        return self.mark == LOST or self.mark.startswith(END)

    @property
    def idle_s(self) -> float | None:
        """Seconds without a job after which the slice may be deleted; None if the label is missing or not a number."""
        text = self.labels.get(IDLE_S, "")
        return float(text) if text.isdecimal() else None

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones in which the slice was requested, in order."""
        return tuple(filter(None, self.labels.get(ZONES, "").split("_"))) or (self.zone,)

    @property
    def alive(self) -> bool:
        """Whether the slice runs or may still run."""
        return self.state in ("ready", "creating", "waiting")

    @property
    def billed(self) -> bool:
        """Whether machines exist."""
        return self.node and self.state in ("ready", "creating")


def owner_label(account: str) -> str:
    """The owner label's value for an account, with a digest that distinguishes `a.b@x` from `a-b@x`."""
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
    slices.extend(_slice(None, node) for node in made.values())  # queued resource deleted or not listed
    return sorted(slices, key=lambda each: (each.zone, each.name))


def _slice(queued: ApiObject | None, node: ApiObject | None) -> Slice:
    """The slice of a queued resource, of its node, or of both."""
    request = queued or {}
    machines = node or {}
    name, zone = _name_and_zone((queued or machines)["name"])
    spec = (request.get("tpu", {}).get("nodeSpec") or [{}])[0].get("node", {}) if queued else machines
    scheduling = machines.get("schedulingConfig", {})
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
        created=_time((node or request).get("createTime")),
        requested=_time((queued or machines).get("createTime")),
        service_account=spec.get("serviceAccount", {}).get("email"),
    )


def _time(text: str | None) -> datetime.datetime | None:
    return datetime.datetime.fromisoformat(text) if text else None


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
