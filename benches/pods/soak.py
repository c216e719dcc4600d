"""Bar soak: whole runs under --keep-alive on several laptops while everything fails, in a virtual time."""

import collections
import time
from collections.abc import Iterator

from benches.pods.bench import Bench, Row, seconds_since
from tests.pods.soak_judge import one_run

STORIES = 300
KINDS = ("lost", "wrong deletion", "left", "status", "stop undone")


def bar_soak(bench: Bench) -> Iterator[Row]:
    """Three hundred stories: no run lost or going on twice, nothing deleted wrongly, nothing left without a word."""
    begun = time.monotonic()
    stories = [one_run(seed) for seed in range(STORIES)]
    faults = collections.Counter(event.partition(" at ")[0] for each in stories for event in each["events"])
    problems = [problem for each in stories for problem in each["problems"]]
    statuses = collections.Counter(
        str(status) if isinstance(status, int) else "an error"
        for each in stories
        for name, status in each["statuses"].items()
        if name in ("first", "second", "third")
    )
    yield {
        "case": f"{STORIES} random stories of whole runs under --keep-alive on up to three laptops",
        "seconds": seconds_since(begun),
        "virtual_hours": round(sum(each["hours"] for each in stories), 1),
        "runs": sum(each["runs"] for each in stories),
        "deletions": sum(each["deletions"] for each in stories),
        "stories_with_a_stop": sum(each["stopped"] for each in stories),
        "statuses": dict(statuses.most_common()),
        "faults": dict(faults.most_common()),
        **{kind.replace(" ", "_"): sum(problem.startswith(kind) for problem in problems) for kind in KINDS},
        "problems": [
            {"seed": each["seed"], "events": each["events"], "problems": each["problems"]}
            for each in stories
            if each["problems"]
        ],
        "good": not problems,
    }
