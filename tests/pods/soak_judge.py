"""Judges a story of `tests.pods.soak` by what the API and the machines recorded and by what the commands said."""

from collections.abc import Iterator
from typing import Any

from podium.pods.inventory import OWNER
from tests.pods.soak import CERTIFICATE, DISK, Command, Deletion, Soak, label_of, story
from tests.pods.soak_machines import STEPS

TAKEN = ("was rented for the run", "is busy with job")
"""What is said by a command whose slice another run has or had."""
WORDS = "podium pod down demo"
"""What is said by a command that leaves something rented."""


def one_run(seed: int) -> dict[str, Any]:
    """What came of a drawn story: `problems` is empty if all is well."""
    soak = story(seed)
    return {
        "seed": seed,
        "events": soak.events,
        "statuses": {each.laptop.name: each.status for each in soak.commands if each.role != "reap"},
        "hours": round((soak.timeline.now - 1e9) / 3600, 1),
        "stopped": bool(soak.stops),
        "runs": len({each.run for each in soak.commands if each.run}),
        "deletions": len(soak.deletions),
        "problems": [*_wrong_deletions(soak), *_lost(soak), *_statuses(soak), *_left(soak), *soak.twice[:1]],
        "said": [f"{time - 1e9:6.0f} {each.laptop.name}: {line}" for each in soak.commands for time, line in each.said],
    }


def _wrong_deletions(soak: Soak) -> Iterator[str]:
    """Deletions of what is somebody else's or in use, whoever asked for them."""
    for each in soak.deletions:
        by = next(command for command in soak.commands if command.laptop.name == each.by and _at(command, each.time))
        if why := _wrong(soak, each, by):
            yield f"wrong deletion: {each.by} deleted {each.full} at {each.time - 1e9:.0f}: {why}"


def _at(command: Command, time: float) -> bool:
    return command.began <= time <= (command.laptop.ended or time)


def _wrong(soak: Soak, deletion: Deletion, by: Command) -> str | None:
    if deletion.owner != "ada":
        return "it was a stranger's"
    if by.role == "down":
        return None
    if deletion.healthy:
        return f"{deletion.healthy} was going on there"
    if by.role == "reap":
        if deletion.lease_left_s is not None and deletion.lease_left_s > 0 and not deletion.dead:
            return f"its lease ends in {deletion.lease_left_s:.0f} s"
        waiting = [each for each in soak.commands if each.role == "keeper" and _at(each, deletion.time)]
        return (
            f"{waiting[0].laptop.name} waits for it" if waiting and not deletion.ready and not deletion.dead else None
        )
    if deletion.ready and by.run and deletion.run not in (None, label_of(soak, by.run)):
        return f"it was there for {deletion.run}"
    return None


def _lost(soak: Soak) -> Iterator[str]:
    """Runs that nobody finished, although nobody wanted them to end and somebody could have kept them."""
    for run in {each.run for each in soak.commands if each.run}:
        keepers = [each for each in soak.commands if each.run == run]
        label = label_of(soak, run)
        if label in soak.stopped_at and soak.fleet.saved[label] > soak.stopped_at[label][1]:
            began_later = any(
                max(each.began, each.again) > soak.stops[label] for each in keepers
            )  # while the run was still saving, too
            if not began_later:
                yield f"stop undone: {run} was trained on"
        if soak.fleet.saved[label] < STEPS and not any(_excuse(soak, each) for each in keepers):
            yield f"lost: {run} has {soak.fleet.saved[label]} of {STEPS} steps"


def _statuses(soak: Soak) -> Iterator[str]:
    """Exit statuses that are not what came of the run."""
    for each in soak.commands:
        if each.role != "keeper":
            continue
        name = f"{each.laptop.name} ({each.run})"
        assert each.run is not None
        done = soak.fleet.saved[label_of(soak, each.run)] == STEPS
        if each.laptop.ended is None:
            yield f"{name} has not ended"
        elif each.status == 0 and not done:
            yield f"status: {name} ended with 0, and the run is not done"
        elif each.status == 143 and label_of(soak, each.run) not in soak.stops:
            yield f"status: {name} ended with 143, and nobody stopped it"
        elif each.status not in (0, 143) and not _excuse(soak, each):
            yield f"status: {name} ended with {each.status}, for no reason of its own"


def _excuse(soak: Soak, command: Command) -> str | None:
    """Why a command that keeps a run alive may end before the run is done, by what happened; None: it may not."""
    assert command.run is not None and command.laptop.ended is not None
    label, ended = label_of(soak, command.run), command.laptop.ended
    if label in soak.stops and soak.stops[label] <= ended:
        return "stopped"
    if any(each.role == "down" and each.began <= ended for each in soak.commands):
        return "down"
    if any(text in (DISK, CERTIFICATE) and since <= ended for since, _, text in command.bad):
        return "this laptop's own fault"
    others = [each for each in soak.commands if each.run and each.run != command.run and each.began <= ended]
    last = " ".join(line for _, line in command.said[-4:])
    if others and any(words in last for words in TAKEN):
        return "another run took the name"
    if "taken in every zone" in last:
        return "strangers have the name everywhere"
    if not command.followed:
        return "it got no slice, and said why"
    return _uninformed(soak, command)


def _uninformed(soak: Soak, command: Command) -> str | None:
    """Whether the slice was deleted by another command, rightly, while this one could not see why."""
    ended = command.laptop.ended or 0.0
    if "was deleted" not in " ".join(line for _, line in command.said[-4:]):
        return None
    blind = [*command.laptop.closed, *((since, until) for since, until, _ in command.bad)]
    by_others = [each.time for each in soak.deletions if each.by != command.laptop.name and each.time <= ended]
    if any(since - 60 <= time <= until + 60 for since, until in blind for time in by_others):
        return "it was away when another command deleted the slice"
    return None


def _left(soak: Soak) -> Iterator[str]:
    """What is rented or requested when all commands have ended, and no command has said so at its end."""
    last_words = [
        time for each in soak.commands if each.role != "reap" for time, line in each.said[-4:] if WORDS in line
    ]
    for node in soak.fake.nodes.values():
        if node.get("labels", {}).get(OWNER) == "ada" and not last_words:
            yield f"left: {node['name']} ({node['state']})"
    for queued in soak.fake.queued.values():
        labels = queued["tpu"]["nodeSpec"][0]["node"].get("labels", {})
        if labels.get(OWNER) == "ada" and not last_words:
            yield f"left: {queued['name']} ({queued['state']['state']})"
