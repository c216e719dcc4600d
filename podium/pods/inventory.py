"""What is rented: nodes and queued resources as the API lists them, joined into slices.

Nothing is asked here and nothing changed; `podium.pods.slices` does both. All that Podium must remember of a slice
stands in its labels, so that any laptop of the same owner can go on with it, and so that nothing else is ever deleted.
"""

import dataclasses
import datetime
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

State = Literal["ready", "creating", "waiting", "dead", "failed", "deleting"]
"""ready: all machines run; creating: they are being made; waiting: queued; dead: preempted, stopped or ended; failed:
the queued resource will never get machines. dead and failed slices hold quota until they are deleted."""

OWNER = "podium-owner"
LEASE = "podium-lease"
ZONES = "podium-zones"
LABEL_LENGTH = 63
"""Characters that the API allows in a label's value: lower case letters, digits, `-` and `_`."""

_QUEUED_STATES: Mapping[str, State] = {
    "CREATING": "waiting",
    "ACCEPTED": "waiting",
    "WAITING_FOR_RESOURCES": "waiting",
    "PROVISIONING": "creating",
    "ACTIVE": "creating",  # until its node says that it is ready
    "SUSPENDING": "dead",
    "SUSPENDED": "dead",
    "FAILED": "failed",
    "DELETING": "deleting",
}
_NODE_STATES: Mapping[str, State] = {
    "CREATING": "creating",
    "STARTING": "creating",
    "RESTARTING": "creating",
    "REIMAGING": "creating",
    "REPAIRING": "creating",
    "READY": "ready",
    "DELETING": "deleting",
    "STOPPING": "dead",
    "STOPPED": "dead",
    "SUSPENDING": "dead",
    "SUSPENDED": "dead",
    "PREEMPTED": "dead",
    "TERMINATED": "dead",
    "HIDDEN": "dead",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """Machines that are rented, or asked for, together."""

    name: str
    zone: str
    state: State
    told: str
    """The API's own words for the state."""
    accelerator: str
    runtime: str
    spot: bool
    queued: bool
    """A queued resource of this name is listed."""
    from_queue: bool
    """It was asked for as a queued resource."""
    node: bool
    """A node of this name exists."""
    addresses: tuple[str, ...]
    """Internal addresses of its machines, in the order of their numbers; empty before it has any."""
    labels: Mapping[str, str]
    created: datetime.datetime | None
    """Its machines, or the request for them."""
    service_account: str | None = None

    @property
    def owner(self) -> str | None:
        """Whose it is; None: Podium did not make it."""
        return self.labels.get(OWNER)

    @property
    def lease(self) -> float | None:
        """Seconds since 1970 until which it may stand; None if the label is missing or not a number."""
        text = self.labels.get(LEASE, "")
        return float(text) if text.isdecimal() else None

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones that it was asked for in, in their order."""
        return tuple(filter(None, self.labels.get(ZONES, "").split("_"))) or (self.zone,)

    @property
    def alive(self) -> bool:
        """Whether it runs or may yet."""
        return self.state in ("ready", "creating", "waiting")

    @property
    def billed(self) -> bool:
        """Whether machines exist."""
        return self.node and self.state in ("ready", "creating")


def label_text(text: str) -> str:
    """A text as a label's value."""
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-")[:LABEL_LENGTH]


def zones_label(zones: Iterable[str]) -> str:
    """As many of the zones, in order, as a label's value holds."""
    kept = ""
    for zone in zones:
        longer = f"{kept}_{zone}" if kept else zone
        if len(longer) > LABEL_LENGTH:
            break
        kept = longer
    return kept


def read_slices(nodes: Iterable[Mapping[str, Any]], queued: Iterable[Mapping[str, Any]]) -> list[Slice]:
    """The slices that nodes and queued resources make, in the order of zone and name.

    Args:
        nodes: as `tpu-vm list` has them.
        queued: as `queued-resources list` has them.
    """
    made: dict[str, Mapping[str, Any]] = {}  # a queued resource's name -> its first node
    slices = []
    for node in nodes:
        parent = node.get("queuedResource")
        if parent:
            made.setdefault(_key(parent), node)
        else:
            slices.append(_of_node(node))
    for each in queued:
        slices.append(_of_queued(each, made.pop(_key(each["name"]), None)))
    slices.extend(_of_node(node) for node in made.values())  # their queued resource is gone, or was not asked for
    return sorted(slices, key=lambda one: (one.zone, one.name))


def _of_node(node: Mapping[str, Any]) -> Slice:
    name, zone = _name_and_zone(node["name"])
    told = node.get("state", "STATE_UNSPECIFIED")
    return Slice(
        name=name,
        zone=zone,
        state=_NODE_STATES.get(told, "creating"),
        told=told,
        queued=False,
        from_queue="queuedResource" in node,
        node=True,
        addresses=_addresses(node),
        created=_time(node.get("createTime")),
        spot=_is_spot(node),
        **_described(node),
    )


def _of_queued(queued: Mapping[str, Any], node: Mapping[str, Any] | None) -> Slice:
    name, zone = _name_and_zone(queued["name"])
    told = queued.get("state", {}).get("state", "STATE_UNSPECIFIED")
    state = _QUEUED_STATES.get(told, "waiting")
    spec = (queued.get("tpu", {}).get("nodeSpec") or [{}])[0].get("node", {})
    if reason := queued.get("state", {}).get("failedData", {}).get("error", {}).get("message"):
        told = f"{told}: {reason}"
    elif node is not None and state in ("creating", "waiting"):
        own = _of_node(node)
        state, told = own.state, f"{told}, node {own.told}"
    return Slice(
        name=name,
        zone=zone,
        state=state,
        told=told,
        queued=True,
        from_queue=True,
        node=node is not None,
        addresses=_addresses(node or {}),
        created=_time((node or queued).get("createTime")),
        spot="spot" in queued,
        **_described({**spec, "labels": {**spec.get("labels", {}), **(node or {}).get("labels", {})}}),
    )


def _described(node: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "accelerator": node.get("acceleratorType", "?").rpartition("/")[2],
        "runtime": node.get("runtimeVersion", "?"),
        "labels": dict(node.get("labels", {})),
        "service_account": node.get("serviceAccount", {}).get("email"),
    }


def _is_spot(node: Mapping[str, Any]) -> bool:
    scheduling = node.get("schedulingConfig", {})
    return bool(scheduling.get("spot") or scheduling.get("preemptible"))


def _addresses(node: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(each.get("ipAddress", "") for each in node.get("networkEndpoints", ()))


def _key(name: str) -> str:
    """Zone and own name of a resource: projects are told by number in some answers and by name in others."""
    return "/".join(_name_and_zone(name))


def _name_and_zone(name: str) -> tuple[str, str]:
    """Of `projects/P/locations/ZONE/nodes/NAME`, and likewise of queued resources."""
    parts = name.split("/")
    return parts[-1], parts[3]


def _time(text: str | None) -> datetime.datetime | None:
    return datetime.datetime.fromisoformat(re.sub(r"\.\d+", "", text)) if text else None
