"""Keeps a run alive from a small Google machine instead of a laptop: `podium pod run --keep-alive --on-vm`.

The machine receives what workers receive (code, config, secrets) and runs one job of the agent: `podium pod run
--keep-alive` with the same config. Its slices have the laptop user's owner label, so every command works from any
laptop as before. When the run has ended the machine deletes the run's slice and itself; `podium pod down` deletes both
at any time. After a failure the machine is turned off instead, and its description says why.
"""

import dataclasses
import datetime
import shlex
from collections.abc import Mapping
from pathlib import Path

from podium.patience import patiently
from podium.pods.gcloud import GcloudError
from podium.pods.host.jobs import last_line
from podium.pods.inventory import OWNER, RUN, ApiObject, Slice, State, label_text, machine_name
from podium.pods.launch import RunSpec, SetupError, may_pass, prepare, start
from podium.pods.options import Rent, RunOptions
from podium.pods.project import Project
from podium.pods.push import HOME
from podium.pods.remote import RemoteError
from podium.pods.slices import SliceError
from podium.pods.world import OWNER_VARIABLE, RUN_VARIABLE

KEEP = Path(__file__).parent / "host" / "keep.sh"
PREPARE = "prepare-workers.sh"
"""Name under which this machine passes on the user's script."""
TOOLS = (
    "{ command -v git && python3 -c 'import ensurepip'; } >/dev/null 2>&1 || "
    "{ sudo apt-get update -q && sudo apt-get install -y -q git python3-venv; }"
)
TOOLS_S = 900.0
END = "podium-end"
"""Key in the machine's metadata under which keep.sh stores the end of its log."""
_STATES: Mapping[str, State] = {"RUNNING": "ready", "PROVISIONING": "creating", "STAGING": "creating"}


def keep_on_vm(project: Project, name: str, zone: str, rent: Rent, options: RunOptions, spec: RunSpec) -> None:
    """Rent a machine in this zone, which rents the slice if necessary, starts the run there and keeps it alive.

    If called again, it finds the machine and its job.

    Raises:
        SliceError: a machine of that name belongs to another owner.
        RemoteError: the machine cannot be reached, or cannot be set up.
    """
    machine = _rented(project, name, zone, rent)
    remote = project.remote(machine, vm=True)

    def prepared() -> tuple[str, bool]:
        remote.warm_up()
        try:
            remote.ask_all(TOOLS, "installing git", timeout_s=TOOLS_S)
        except RemoteError as error:
            raise SetupError(str(error)) from None
        return prepare(remote, own, stop=f"podium pod down {name}")

    own = keeper_spec(
        machine.name, machine.zone, owner=project.slices.owner, name=name, rent=rent, options=options, spec=spec
    )
    what = f"{machine.name}, and what its setup needs"
    job, needed = patiently(prepared, what, may_pass=may_pass, clock=project.clock, say=project.say)
    if needed:
        start(remote, own, job)
    project.answer(
        f"{machine.name} in {machine.zone} keeps {spec.name} alive on {name}; this machine is no longer needed"
    )
    project.say(f"podium pod status {name}, logs and stop work as before; when the run has ended, the machine deletes")
    shown = shlex.join(remote.gcloud.argv.ssh(machine.name, machine.zone, "0", f"{HOME}/agent logs"))
    project.say(f"itself; podium pod down {name} deletes both; its log: {shown}")


def keepers(project: Project, slice_name: str | None = None) -> list[Slice]:
    """List machines (of all owners) that keep the run of one slice, or of any slice, alive; each as a `Slice`.

    Without permission to list machines, prints that and returns an empty list.
    """
    gcloud = project.slices.gcloud
    name = machine_name(slice_name) if slice_name else None
    try:
        return [_as_slice(each) for each in project.slices.ask(gcloud.argv.vms(name))]
    except GcloudError as error:
        if error.transient or error.kind in ("missing", "project", "login"):
            raise  # an overlooked machine would rent the slice again
        if error.kind != "disabled":
            what = f"there is a machine {name}" if name else "machines keep runs alive"
            project.say(f"it cannot be seen whether {what}: {error.text}")
        return []


def keeper_spec(
    machine: str, zone: str, owner: str, name: str, rent: Rent, options: RunOptions, spec: RunSpec
) -> RunSpec:
    """The job of the keeper machine, which keeps the run alive on the owner's slice with this name."""
    package = spec.package
    sent = f'"$HOME/{package.folder}"'
    words = ["--keep-alive", "--slice", name, *_options(rent, options)]
    paths = [f"--prepare {sent}/{PREPARE}"] if package.sends("prepare.sh") else []
    paths += [f"--wheel {sent}/{shlex.quote(options.wheel.name)}"] if options.wheel else []
    dirty = ["--allow-dirty"] if package.sends("changes.patch") else []
    slice_ = "-" if options.down is False else name
    keep = f"sh {sent}/{KEEP.name} {machine} {zone} {slice_} {{python}} {{config}}"
    files = (file.rename(file.with_name(PREPARE)) if file.name == "prepare.sh" else file for file in package.files)
    return dataclasses.replace(
        spec,
        name=f"keep-{spec.name}",
        package=dataclasses.replace(
            package, files=(*files, KEEP), extras=(), environment=f"{package.environment}-keep", python=None
        ),
        environment={OWNER_VARIABLE: owner, RUN_VARIABLE: label_text(spec.prefix), "JAX_PLATFORMS": "cpu"},
        command=" ".join((keep, *paths, shlex.join((*words, *dirty)))),
    )


def _options(rent: Rent, options: RunOptions) -> list[str]:
    """The options of `podium pod run` for the command on the machine."""
    words = [f"--restarts={options.restarts}", f"--replacements={options.replacements}"]
    words += [] if options.down is None else ["--down" if options.down else "--keep"]
    words += ["--spot" if rent.spot else "--on-demand", "--queued" if rent.queued else "--now"]
    given = {
        "--type": [rent.type],
        "--zone": rent.zones or (),
        "--valid-until": [rent.valid_until],
        "--lease": [rent.lease],
        "--runtime-version": [rent.runtime],
        "--service-account": [rent.service_account],
        "--env": options.env or (),
        "--python": [options.python],
    }
    return words + [f"{name}={value}" for name, values in given.items() for value in values if value is not None]


def _rented(project: Project, name: str, zone: str, rent: Rent) -> Slice:
    """Find the machine, or rent it if it does not exist."""
    gcloud = project.slices.gcloud
    owner = project.slices.owner
    project.note("")
    found = next(iter(keepers(project, name)), None)
    if found is not None and found.state == "dead" and found.owner == owner:
        project.say(f"deleting {found.name}: {found.detail}")
        gcloud.checked(gcloud.argv.delete_vm(found.name, found.zone))
        found = None
    if found is None:
        project.say(f"{zone}: renting {machine_name(name)}, an e2-micro")
        project.note("if it does not exist; the owner is that of gcloud's account:")
        labels = {OWNER: owner, RUN: name}
        gcloud.checked(gcloud.argv.create_vm(machine_name(name), zone, labels, rent.service_account))
        found = next(iter(keepers(project, name)), None)
    if found is None:
        raise SliceError(f"{machine_name(name)} was created in {zone} and is not listed; run the command again")
    if found.owner != owner:
        raise SliceError(f"{found.name} in {found.zone} is not yours and was not changed; choose another --slice")
    return found


def _as_slice(instance: ApiObject) -> Slice:
    status = instance.get("status", "?")
    created = datetime.datetime.fromisoformat(text) if (text := instance.get("creationTimestamp")) else None
    interfaces = instance.get("networkInterfaces") or [{}]
    metadata = {each["key"]: each.get("value", "") for each in instance.get("metadata", {}).get("items", [])}
    if END in metadata:
        status += f", it ended with: {last_line(metadata[END])}"
    return Slice(
        name=instance["name"],
        zone=instance["zone"].rpartition("/")[2],
        state=_STATES.get(instance.get("status", "?"), "dead"),
        detail=status,
        accelerator="e2-micro",
        runtime="debian-12",
        spot=False,
        queued=False,
        from_queue=False,
        node=True,
        addresses=(interfaces[0].get("networkIP", ""),),
        labels=instance.get("labels", {}),
        created=created,
        requested=created,
    )
