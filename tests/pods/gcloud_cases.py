"""What gcloud is asked in which situation, to record the real one's answers and to hold the fake one to them."""

import dataclasses
from collections.abc import Sequence

from podium.pods.gcloud import Argv, Kind, Order
from tests.pods.fake_tpu import FakeTpu, Fault

ZONE = "us-east1-d"
ORDER = Order(
    name="run",
    accelerator="v6e-8",
    runtime="image",
    spot=True,
    queued=True,
    valid_until_s=3600,
    labels={"podium-owner": "ada", "podium-lease": "2000000000"},
)
DIRECT = dataclasses.replace(ORDER, queued=False)
ARGV = Argv()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One command in one situation."""

    argv: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()
    """Commands that make the situation."""
    faults: tuple[Fault, ...] = ()
    kind: Kind | None = None
    """What the failure is to be taken for; None: no failure."""
    project: bool = True
    slow: bool = False
    """The real gcloud takes half a minute to give up."""

    def prepare(self, fake: FakeTpu) -> None:
        """Has the faults happen from now on."""
        fake.faults = [dataclasses.replace(fault) for fault in self.faults]


CREATE = ARGV.create(ORDER, ORDER.name, ZONE)
CREATE_NODE = ARGV.create(DIRECT, DIRECT.name, ZONE)
CASES: dict[str, Case] = {
    "zones": Case(argv=ARGV.zones()),
    "create": Case(argv=CREATE),
    "create_node": Case(argv=CREATE_NODE),
    "list_queued": Case(argv=ARGV.queued(ZONE), before=(CREATE,)),
    "list_nodes": Case(argv=ARGV.nodes(), before=(CREATE_NODE,)),
    "list_nothing": Case(argv=ARGV.nodes()),
    "label": Case(argv=ARGV.label("run", ZONE, {"podium-lease": "2100000000"}), before=(CREATE_NODE,)),
    "delete": Case(argv=ARGV.delete("run", ZONE, queued=True), before=(CREATE,)),
    "delete_node": Case(argv=ARGV.delete("run", ZONE, queued=False), before=(CREATE_NODE,)),
    "exists": Case(argv=CREATE, before=(CREATE,), kind="exists"),
    "lost_reply": Case(argv=CREATE, faults=(Fault("POST", "lost_reply"),), kind="exists"),
    "rate": Case(argv=CREATE, faults=(Fault("POST", "429"),), kind="rate"),
    "quota": Case(argv=CREATE, faults=(Fault("POST", "quota"),), kind="quota"),
    "denied": Case(argv=CREATE, faults=(Fault("POST", "403"),), kind="denied"),
    "unknown_zone": Case(argv=ARGV.create(ORDER, ORDER.name, "mars-north1-a"), kind="denied"),
    "stockout": Case(argv=CREATE_NODE, faults=(Fault("POST", "operation"),), kind="stockout"),
    "unavailable": Case(argv=CREATE, faults=(Fault("POST", "503", times=99),), kind="unavailable", slow=True),
    "no_connection": Case(argv=CREATE, faults=(Fault("POST", "drop", times=99),), kind="unavailable", slow=True),
    "delete_nothing": Case(argv=ARGV.delete("run", ZONE, queued=True), kind="not_found"),
    "delete_made_node": Case(argv=ARGV.delete("run", ZONE, queued=False), before=(CREATE,), kind="precondition"),
    "no_project": Case(argv=ARGV.nodes(), kind="project", project=False),
    "retried_503": Case(argv=ARGV.nodes(), faults=(Fault("GET", "503"),)),
}


def without_times(text: str) -> str:
    """A text without what differs each time."""
    import re

    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME", text)
    text = re.sub(r"operation-\d+", "operation-N", text)
    text = re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", text)
    return re.sub(r"'date': '[^']*'", "'date': TIME", text)


def words(argv: Sequence[str]) -> str:
    """A command in one line, without options."""
    return " ".join(word for word in argv if not word.startswith("--"))
