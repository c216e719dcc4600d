"""Bar soak: whole runs under --keep-alive with everything around them failing, in a time that is not waited for."""

import collections
import time
from collections.abc import Iterator

from benches.pods.bench import Bench, Row, seconds_since
from tests.pods.soak import one_run

RUNS = 200


def bar_soak(bench: Bench) -> Iterator[Row]:
    """Two hundred runs, each with faults of its own: none lost, none deleted wrongly, nothing left, a stop wins."""
    begun = time.monotonic()
    runs = [one_run(seed) for seed in range(RUNS)]
    faults = collections.Counter(event.partition(" at ")[0] for run in runs for event in run["events"])
    bad = [
        {"seed": run["seed"], "events": run["events"], "problems": run["problems"]} for run in runs if run["problems"]
    ]
    yield {
        "case": f"{RUNS} random fault sequences over whole runs, keep-alive",
        "seconds": seconds_since(begun),
        "hours_of_runs": round(sum(run["hours"] for run in runs), 1),
        "faults": dict(faults.most_common()),
        "stopped_on_request": sum(run["stopped"] for run in runs),
        "lost": sum(any("lost" in each for each in run["problems"]) for run in runs),
        "wrong_deletions": sum(any("deleted" in each for each in run["problems"]) for run in runs),
        "left_rented": sum(any("left" in each for each in run["problems"]) for run in runs),
        "stops_undone": sum(any("stopped" in each for each in run["problems"]) for run in runs),
        "problems": bad,
        "good": not bad,
    }
