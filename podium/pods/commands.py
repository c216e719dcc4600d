"""The `podium pod` commands: from renting a slice to deleting it.

Nothing is stored on this machine: every command queries Google for what exists, so it works from any of the owner's
laptops. Results go to stdout, progress to stderr. With `--dry-run` a command runs against placeholders
(`podium.pods.rehearsal`).
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from podium.job.job_records import STOPPED, first_failure
from podium.patience import patiently
from podium.pods.clusters import k8s_manifest, slurm_script
from podium.pods.endings import Endings
from podium.pods.gcloud import GcloudError
from podium.pods.inventory import BUCKET, LOST, RUN, STATE, STOP, Slice, machine_name
from podium.pods.keeper import keepers
from podium.pods.launch import LOG_BYTES, JobStatus, poll, read_log, stop_job
from podium.pods.options import Common, Rent, RunOptions, flattened
from podium.pods.project import Project, open_project
from podium.pods.rehearsal import Placeholders
from podium.pods.remote import RemoteError, UnusableError
from podium.pods.rental import new_order, rent_slice, zones_of
from podium.pods.run_command import run_config
from podium.pods.sky import sky_task
from podium.pods.slices import BadRequestError, SliceError
from podium.pods.tables import slice_json, slice_table, worker_table
from podium.pods.world import OWNER_VARIABLE, RUN_VARIABLE
from podium.prices import HOUR_S
from podium.settings import load_settings

POLL_S = 5.0
WHOLE_LOG_BYTES = 2**23
"""Bytes per read when printing a whole log."""
WITHOUT_MACHINES_S = 86400.0
"""Seconds that a slice without machines is kept beyond its lease."""
LINE_BYTES = 300
"""Assumed length of a log line, to read the last N lines."""

app = typer.Typer()

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the slice.")]
AnyName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="Name of the slice; unset: your only one.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConfigFiles = Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="YAML files; later ones win.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting. Repeatable.")]


@app.command()
@flattened
def up(name: Name, rent: Rent, common: Common) -> None:
    """Rent a slice and wait until it is ready. If you already have a slice of that name, wait for that one."""
    project = open_project(common, Placeholders(name=name, exists=False, zones=rent.zones or ()), follows=True)
    zones = zones_of(rent, project.slices, project.zone)
    tpu_slice = rent_slice(project.slices, new_order(name, rent, project.slices, zones), zones)
    machines = f"{len(tpu_slice.addresses)} machine{'s' if len(tpu_slice.addresses) > 1 else ''}"
    project.answer(f"{name} is ready in {tpu_slice.zone}: {tpu_slice.accelerator}, {machines}")
    project.say(f"next: podium pod run CONFIG --slice {name}; when done: podium pod down {name}")


@app.command()
@flattened
def run(config: ConfigFiles, rent: Rent, options: RunOptions, common: Common, settings: Settings = None) -> None:
    """Send code and config, start the run on all machines, and follow it to the end. With --type, rent a slice first.

    If repeated, from any laptop, the command follows the run that it started. Ctrl-C stops following; the run
    continues. Exit status: the run's own, or 130 after Ctrl-C.
    """
    raise typer.Exit(run_config(load_settings(config, settings or [], elsewhere=True), rent, options, common))


@app.command()
@flattened
def status(common: Common, name: AnyName = None, as_json: AsJson = False) -> None:
    """Show a slice, its workers, the run's progress, and what the slice has cost."""
    project = open_project(common, Placeholders(name=name))
    now = project.clock.time()
    try:
        tpu_slice = project.slices.locate(name)
    except SliceError:
        machines = [each for each in keepers(project, name) if project.slices.is_ours(each)]
        if not as_json and machines:  # one is renting the slice right now, or failed to
            project.answer(slice_table(machines, project.slices.owner, now))
        raise
    job = poll(project.remote(tpu_slice)) if tpu_slice.state == "ready" else JobStatus(workers=())
    if as_json:
        # each worker's status as its agent gives it, null for one that did not answer
        found = {"slice": slice_json(tpu_slice, now), "outcome": job.outcome, "workers": job.workers}
        return project.answer(json.dumps(found))
    project.answer(slice_table([tpu_slice], project.slices.owner, now))
    if job.workers:
        project.answer(worker_table(job.workers))
        project.answer(first_failure(job.workers) or f"{job.name or 'no job'}: {job.outcome}")


@app.command()
@flattened
def logs(
    common: Common,
    name: AnyName = None,
    worker: Annotated[int, typer.Option(min=0, help="Number of the worker.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines while the job runs.")] = False,
    tail: Annotated[int, typer.Option(min=1, help="How many of the last lines to print.")] = 200,
    whole: Annotated[bool, typer.Option("--all", help="Print the whole log.")] = False,
) -> None:
    """Print a worker's log."""
    project = open_project(common, Placeholders(name=name, workers=worker + 1))
    remote = project.remote(project.slices.locate(name))
    if worker >= remote.workers:
        raise BadRequestError(f"--worker {worker}: {remote.name} has workers 0 to {remote.workers - 1}")
    job = poll(remote)
    if job.name is None and not job.silent:
        return project.answer(f"no job has been started on {remote.name}")
    size = (job.workers[worker] or {}).get("log_bytes") or 0
    offset, before = 0, -1
    while whole and before < offset < size:
        before = offset
        text, offset = read_log(remote, worker, job.name, offset, WHOLE_LOG_BYTES)
        project.answer(text, end="")
    if not whole:
        text, offset = read_log(
            remote, worker, job.name, max(0, size - LINE_BYTES * tail), max(LOG_BYTES, LINE_BYTES * tail)
        )
        project.answer("".join(text.splitlines(keepends=True)[-tail:]), end="")
    while follow and (job.outcome == "running" or job.silent):
        project.clock.sleep(POLL_S)
        job = poll(remote, job.name)
        text, offset = read_log(remote, worker, job.name, offset)
        project.answer(text, end="")


@app.command()
@flattened
def stop(common: Common, name: AnyName = None) -> None:
    """Stop the run, which saves and can be continued. Machines are kept, unless --keep-alive rented them for
    the run.
    """
    project = open_project(common, Placeholders(name=name))
    slices = project.slices
    tpu_slice = slices.locate(name)
    where = f"{tpu_slice.name} in {tpu_slice.zone}"
    mark = f"{STOP}{project.world.random_word('WORD')}"
    if tpu_slice.run is not None:
        project.note("so that no command starts it elsewhere:")
        Endings(slices, tpu_slice.labels.get(BUCKET), tpu_slice.run).add(STOPPED, mark.removeprefix(STOP))
        if tpu_slice.state == "waiting" and slices.withdraw(tpu_slice):
            return project.answer(f"{where} was {tpu_slice.detail}, so nothing ran; the request is withdrawn")
        tpu_slice = slices.now(tpu_slice) or tpu_slice
    if tpu_slice.state != "ready":
        raise SliceError(
            f"{where} is not ready ({tpu_slice.detail}), so nothing runs there; podium pod down {tpu_slice.title} "
            "deletes it, so that --keep-alive no longer waits for it"
        )
    remote = project.remote(tpu_slice)
    try:
        if not tpu_slice.doomed:
            project.note("so that no command restarts it:")
            slices.label(tpu_slice, {STATE: mark})
        after = patiently(
            lambda: stop_job(remote, None),
            f"the workers of {tpu_slice.name}",
            may_pass=lambda error: isinstance(error, UnusableError),
            clock=project.clock,
            say=project.say,
        )
        now = slices.now(tpu_slice)
    except (RemoteError, GcloudError):
        if (now := slices.now(tpu_slice)) is None or now.state == "deleting":
            return project.answer(f"{where} has been deleted by the command that kept its run alive")
        raise
    if now is not None and not now.doomed and now.mark != mark:  # another command has restored old labels
        raise SliceError(f"{where} is no longer marked as stopped; run the command again")
    if after.name is None:
        return project.answer(f"no job has been started on {remote.name}")
    rented = f"is still rented: podium pod down {tpu_slice.title} deletes it"
    if now is None or now.doomed or now.state == "deleting":
        rented = "is deleted by the command that kept its run alive"
    project.answer(f"{after.name} has ended on all {remote.workers} workers ({after.outcome}); {where} {rented}")


@app.command()
@flattened
def down(name: Name, common: Common) -> None:
    """Delete a slice of yours and the machine that keeps its run alive, and verify that they no longer exist."""
    project = open_project(common, Placeholders(name=name, keeper=machine_name(name)))
    project.note("the machine that keeps its run alive, if there is one:")
    for keeper in () if os.environ.get(OWNER_VARIABLE) else filter(project.slices.is_ours, keepers(project, name)):
        gcloud = project.slices.gcloud
        gcloud.checked(gcloud.argv.delete_vm(keeper.name, keeper.zone))
        project.say(f"deleted {keeper.name}, which kept its run alive")

    def tell(found: Sequence[Slice]) -> None:
        for each in found:
            if each.run is not None:  # a sleeping command may keep the run alive
                endings = Endings(project.slices, each.labels.get(BUCKET), each.run)
                endings.add(1, project.world.random_word("WORD"))

    deleted = project.slices.down(name, os.environ.get(RUN_VARIABLE), tell=tell)
    listed = ", ".join(f"{each.name} in {each.zone}" for each in deleted)
    project.answer(f"deleted {listed}; it is no longer listed" if deleted else f"no slice of yours is named {name}")


@app.command()
@flattened
def ls(
    common: Common,
    zones: Annotated[list[str] | None, typer.Option("--zone", metavar="ZONE", help="Unset: all. Repeatable.")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="List other people's slices too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List slices that are rented or requested, and the machines of --on-vm, with their cost."""
    project = open_project(common, Placeholders())
    slices = project.slices.survey(zones or None)
    machines = [each for each in keepers(project) if not zones or each.zone in zones]
    found = [each for each in (*slices, *machines) if everyone or project.slices.is_ours(each)]
    now = project.clock.time()
    if as_json:
        project.answer(json.dumps([slice_json(each, now) for each in found]))
    elif found:
        project.answer(slice_table(found, project.slices.owner, now))
        for each in filter(project.slices.is_ours, machines):
            of = each.labels.get(RUN, "NAME")
            keeps = "no longer keeps" if each.state == "dead" else "keeps"
            project.say(f"{each.name} {keeps} the run on {of} alive; podium pod down {of} deletes both")
    else:
        project.answer("the project has no slices" if everyone else "you have no slices")


@app.command()
@flattened
def reap(
    common: Common,
    everyone: Annotated[bool, typer.Option("--all", help="Also delete what other people rented with Podium.")] = False,
) -> None:
    """Delete slices on which no job has run for the length of their lease."""
    project = open_project(common, Placeholders())
    slices = project.slices
    deleted = []
    for each in slices.survey():
        if each.idle_s is None or each.owner is None or not (everyone or slices.is_ours(each)):
            continue
        lease_s = each.idle_s

        def used(listed: Slice, lease_s: float = lease_s) -> bool:
            project.note("for every slice that is ready:")
            idle_s = _idle_s(project, listed)
            return idle_s is None or idle_s < lease_s

        if used(each):
            continue
        project.say(
            f"deleting {each.name} in {each.zone}: no job has run there for its lease, {lease_s / HOUR_S:.1f} h"
        )
        project.note("for every slice whose lease has expired (the second command if it was not queued):")
        if slices.give_up(each, LOST, used=used):
            deleted.append(each.name)
    project.answer(f"deleted {', '.join(deleted)}" if deleted else "nothing was deleted")


def _idle_s(project: Project, tpu_slice: Slice) -> float | None:
    """Seconds since a job last ran on a slice, by its machines' clocks; None if a job is running, or if it is unknown.

    A slice without machines costs nothing, a command may be about to replace it, and this machine's clock may be wrong;
    so a day is subtracted for such slices.
    """
    if tpu_slice.created is None or tpu_slice.state in ("waiting", "creating", "deleting"):
        return None
    created = tpu_slice.created.timestamp()
    if tpu_slice.state != "ready":
        return project.clock.time() - created - WITHOUT_MACHINES_S
    remote = project.remote(tpu_slice)
    try:
        job = poll(remote)
        times = [reply.text.strip() for reply in remote.ask("date +%s").values()]
    except GcloudError as error:
        if error.gone:  # deleted since it was listed
            return None
        raise
    if job.running or job.silent or not times:
        if not job.running:
            project.say(f"{tpu_slice.name} in {tpu_slice.zone} is kept: its machines do not respond")
        return None
    used = [status[when] or 0.0 for status in job.workers if status for when in ("created", "ended")]
    return min(map(float, filter(str.isdecimal, times)), default=created) - max(created, *used)


@app.command()
@flattened
def ssh(
    common: Common,
    name: AnyName = None,
    worker: Annotated[str, typer.Option(metavar="N|all", help="Number of the worker, or all.")] = "0",
    command: Annotated[str | None, typer.Option(metavar="COMMAND", help="Command to run; unset: a shell.")] = None,
) -> None:
    """Open a shell on a machine, or run a command there; the exit status is gcloud's, which hides some failures."""
    project = open_project(common, Placeholders(name=name))
    tpu_slice = project.slices.locate(name)
    argv = project.slices.gcloud.argv.ssh(tpu_slice.name, tpu_slice.zone, worker, command)
    raise typer.Exit(project.world.foreground(argv))


@app.command()
def sky(
    config: ConfigFiles,
    type: Annotated[str, typer.Option(metavar="TYPE", help="Accelerator type, such as v6e-16.")],
    settings: Settings = None,
    zone: Annotated[str | None, typer.Option(metavar="ZONE", help="Zone; unset: SkyPilot chooses one.")] = None,
    spot: Annotated[
        bool, typer.Option("--spot/--on-demand", help="Whether to rent cheaper but preemptible machines.")
    ] = True,
    runtime: Annotated[
        str | None, typer.Option("--runtime-version", metavar="VERSION", help="TPU software version; unset: by type.")
    ] = None,
) -> None:
    """Print the config as a SkyPilot task, for `sky launch` or `sky jobs launch`."""
    loaded = load_settings(config, settings or [], elsewhere=True)
    print(sky_task(loaded.config, type, zone=zone, spot=spot, runtime=runtime), end="")


@app.command()
def slurm(
    config: ConfigFiles,
    settings: Settings = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines, with one process each.")] = 1,
    gpus: Annotated[int, typer.Option("--gpus-per-node", min=0, help="GPUs per machine; 0: request none.")] = 0,
    time: Annotated[
        str, typer.Option(metavar="TIME", help="Time limit, after which the job saves and is requeued.")
    ] = "24:00:00",
    python: Annotated[str, typer.Option(metavar="PATH", help="Python with Podium's dependencies.")] = "python",
) -> None:
    """Print the config as a script for Slurm's sbatch."""
    loaded = load_settings(config, settings or [], elsewhere=True)
    print(slurm_script(loaded.config, nodes=nodes, gpus=gpus, time=time, python=python), end="")


@app.command()
def k8s(
    config: ConfigFiles,
    type: Annotated[
        str, typer.Option(metavar="TYPE", help="Accelerator type, such as v6e-16, 2xv6e-16 (two slices) or h100-8.")
    ],
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Container image with Podium and its dependencies; see Dockerfile.")
    ],
    settings: Settings = None,
    nodes: Annotated[int, typer.Option(min=1, help="Multiple of the GPU type; for a TPU, leave it out.")] = 1,
    claim: Annotated[
        str | None, typer.Option(metavar="NAME", help="PersistentVolumeClaim that is mounted at runs_dir.")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot/--on-demand", help="Which machines the node pool has.")] = True,
) -> None:
    """Print the config as a JobSet for Kubernetes: for GKE's TPUs and GPUs, several slices, or any nodes with GPUs."""
    loaded = load_settings(config, settings or [], elsewhere=True)
    print(k8s_manifest(loaded.config, type, nodes=nodes, image=image, claim=claim, spot=spot), end="")
