"""What `podium pod ...` does, but for `run` (`podium.pods.run`): each command returns its exit status.

Nothing is kept on this machine: every command asks what there is, so that any laptop of the same owner can give it.
"""

import json
import shlex
import subprocess
from collections.abc import Sequence

from podium.job.records import first_failure
from podium.pods.context import Common, open_pod
from podium.pods.launch import View, look, read_log
from podium.pods.launch import stop as stop_job
from podium.pods.rental import Rent, rent_slice, tpu
from podium.pods.slices import AskedWronglyError
from podium.pods.tables import slice_json, slice_table, worker_table

POLL_S = 5.0
LINE_BYTES = 300
"""Of a log line, at the most, when the last so many are asked for."""
SOME = "NAME"
"""For --dry-run, a slice that was not named."""


def up(name: str, rent: Rent, common: Common) -> int:
    """Rent a slice, or take on the one of that name; it is ready then."""
    pod = open_pod(common, zones=rent.zones, workers=tpu(rent.type).hosts)
    one = rent_slice(pod.slices, name, rent, default_zone=pod.zone)
    machines = f"{len(one.addresses)} machine{'s' if len(one.addresses) > 1 else ''}"
    pod.answer(f"{one.name} is ready in {one.zone}: {one.accelerator}, {machines}")
    pod.say(f"next: podium pod run CONFIG --slice {one.name}; when done: podium pod down {one.name}")
    return 0


def status(name: str | None, common: Common, *, as_json: bool = False) -> int:
    """Show a slice, its workers, and how far the run is."""
    pod = open_pod(common, exists=name or SOME)
    one = pod.slices.locate(name)
    view = look(pod.remote(one)) if one.state == "ready" else View(statuses=())
    now = pod.clock.time()
    if as_json:
        found = {"slice": slice_json(one, now), "outcome": view.outcome, "workers": list(view.statuses)}
        pod.answer(json.dumps(found))
        return 0
    pod.answer(slice_table([one], pod.slices.owner, now))
    if view.statuses:
        pod.answer(worker_table(view.statuses))
        pod.answer(first_failure(view.statuses) or f"{view.job or 'no job'}: {view.outcome}")
    return 0


def logs(name: str | None, common: Common, *, worker: int = 0, follow: bool = False, tail: int = 200) -> int:
    """Print the end of a worker's log, and go on with it while the job runs."""
    pod = open_pod(common, exists=name or SOME, workers=worker + 1)
    remote = pod.remote(pod.slices.locate(name))
    if not 0 <= worker < remote.workers:
        raise AskedWronglyError(f"--worker {worker}: {remote.name} has workers 0 to {remote.workers - 1}")
    view = look(remote)
    if view.job is None and not view.silent and not common.dry_run:
        pod.answer(f"nothing was ever started on {remote.name}")
        return 0
    size = (view.statuses[worker] or {}).get("log_bytes") or 0
    text, place = read_log(remote, worker, view.job, max(0, size - LINE_BYTES * tail))
    pod.answer("".join(text.splitlines(keepends=True)[-tail:]), end="")
    while follow and (view.outcome == "running" or view.silent):
        pod.clock.sleep(POLL_S)
        view = look(remote, view.job)
        text, place = read_log(remote, worker, view.job, place)
        pod.answer(text, end="")
    return 0


def stop(name: str | None, common: Common) -> int:
    """End the job of a slice, which saves first and can be continued. The machines stay, and cost."""
    pod = open_pod(common, exists=name or SOME)
    one = pod.slices.locate(name)
    remote = pod.remote(one)
    before = look(remote)
    job = before.job or ("JOB" if common.dry_run else None)
    if job is None:
        pod.answer(f"nothing was ever started on {one.name}")
        return 0
    view = stop_job(remote, job, remember=before.outcome == "running")
    pod.answer(f"{job} has ended on all {remote.workers} workers ({view.outcome}); {one.name} is still rented")
    return 0


def down(name: str, common: Common) -> int:
    """Delete a slice, and see that it is gone."""
    pod = open_pod(common, exists=name)
    gone = pod.slices.down(name)
    listed = ", ".join(f"{each.name} in {each.zone}" for each in gone)
    pod.answer(f"deleted {listed}; no list shows it any more" if gone else f"no slice of yours is named {name}")
    return 0


def ls(common: Common, *, zones: Sequence[str] = (), everyone: bool = False, as_json: bool = False) -> int:
    """List what is rented or asked for."""
    pod = open_pod(common, zones=zones)
    found = [each for each in pod.slices.survey(zones or None) if everyone or pod.slices.is_ours(each)]
    now = pod.clock.time()
    if as_json:
        pod.answer(json.dumps([slice_json(each, now) for each in found]))
    elif found:
        pod.answer(slice_table(found, pod.slices.owner, now))
    else:
        pod.answer("the project has no slice" if everyone else "you have no slice")
    return 0


def reap(common: Common, *, everyone: bool = False) -> int:
    """Delete what is past its lease."""
    pod = open_pod(common, exists=SOME, lease_s=-1)
    gone = pod.slices.reap(everyone=everyone)
    pod.answer(f"deleted {', '.join(each.name for each in gone)}" if gone else "nothing is past its lease")
    return 0


def ssh(name: str | None, common: Common, *, worker: str = "0", command: str | None = None) -> int:
    """Open a shell on a worker, or run a command on one or all; gcloud's exit status, which is not to be trusted."""
    pod = open_pod(common, exists=name or SOME)
    one = pod.slices.locate(name)
    argv = pod.gcloud.argv.ssh(one.name, one.zone, worker, command)
    if common.dry_run:
        print(shlex.join(argv))
        return 0
    return subprocess.call(argv)
