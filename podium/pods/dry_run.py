"""What `--dry-run` prints: the gcloud command lines of a `podium pod` command, in order; nothing is run.

A command that depends on an answer has a placeholder in capitals for it and a comment that says when it is run.
"""

import getpass
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence

from podium.pods import launch
from podium.pods.gcloud import Argv
from podium.pods.inventory import LEASE, LEASE_S, OWNER, RUN, STOP, label_text, owner_label
from podium.pods.keeper import TOOLS, keeper_spec, machine_name
from podium.pods.options import Common, Rent, RunOptions
from podium.pods.remote import wrapped
from podium.pods.rental import new_order, tpu

Line = Sequence[str] | str
"""The words of a command, or a comment."""
NAME, ZONE, JOB = "NAME", "ZONE", "JOB"


def show(lines: Iterable[Line]) -> None:
    """Print commands as a shell reads them, and comments."""
    for line in (Argv().settings(), *lines):
        print(f"# {line}" if isinstance(line, str) else shlex.join(line))


def up(common: Common, name: str, rent: Rent) -> Iterator[Line]:
    """Rent a slice."""
    argv, zones = Argv(common.project), rent.zones or [ZONE]
    order = new_order(name, rent, owner_label(getpass.getuser()), zones, time.time())
    yield from survey(common)
    yield f"if no slice is named {name}; the owner is that of gcloud's account; the next zone if one refuses:"
    for zone in zones:
        yield argv.create(order, zone)
    yield "until it is ready:"
    for zone in zones:
        yield from (argv.nodes(zone), argv.queued(zone))
    yield f"if {name} was rented before and its lease ends earlier:"
    yield argv.label(name, zones[0], {each: order.labels[each] for each in (LEASE, LEASE_S)})


def survey(common: Common, zones: Sequence[str] | None = None) -> Iterator[Line]:
    """List nodes and queued resources."""
    argv = Argv(common.project)
    if not zones:
        yield argv.zones()
    yield argv.nodes()
    if not zones:
        yield "for every zone:"
    yield from (argv.queued(zone) for zone in zones or [ZONE])


def ls(common: Common, zones: Sequence[str] | None) -> Iterator[Line]:
    """List slices, and the machines that keep runs alive."""
    yield from survey(common, zones)
    yield Argv(common.project).vms()


def down(common: Common, name: str | None) -> Iterator[Line]:
    """Delete a slice, or those whose lease has expired."""
    argv, which = Argv(common.project), f"of yours that is named {name}" if name else "whose lease has expired"
    if name:
        yield "what keeps its run alive, if anything does:"
        yield from (argv.vms(machine_name(name)), argv.delete_vm(machine_name(name), ZONE))
    yield from survey(common)
    yield f"for every slice {which}; the second if it was not queued:"
    yield from (argv.delete(name or NAME, ZONE, queued=queued) for queued in (True, False))
    yield "until it is no longer listed:"
    yield from (argv.nodes(ZONE), argv.queued(ZONE))


def status(common: Common, name: str | None) -> Iterator[Line]:
    """Poll the workers of a slice."""
    yield Argv(common.project).nodes()
    yield _ask(common, name, launch.status_command(None))


def logs(common: Common, name: str | None, worker: int) -> Iterator[Line]:
    """Read a worker's log."""
    yield from status(common, name)
    yield _ask(common, name, launch.log_command(JOB, 0), worker=str(worker))


def stop(common: Common, name: str | None) -> Iterator[Line]:
    """End the job of a slice."""
    argv = Argv(common.project)
    yield argv.nodes()
    yield "so that nobody restarts it:"
    yield argv.label(name or NAME, ZONE, {STOP: str(int(time.time()))})
    yield _ask(common, name, launch.status_command(None))
    yield "until it has saved and ended:"
    yield _ask(common, name, launch.stop_command(None))
    yield _ask(common, name, launch.status_command(None))


def reap(common: Common) -> Iterator[Line]:
    """Delete what is past its lease."""
    yield from survey(common)
    yield "for every slice whose lease has expired, if it is ready; one on which a job runs is kept:"
    yield _ask(common, None, launch.status_command(None))
    yield from list(down(common, None))[len(list(survey(common))) :]


def ssh(common: Common, name: str | None, worker: str, command: str | None) -> Iterator[Line]:
    """Open a shell, or run a command."""
    argv = Argv(common.project)
    yield argv.nodes()
    yield argv.ssh(name or NAME, ZONE, worker, command)


def run(common: Common, name: str | None, rent: Rent, spec: launch.RunSpec) -> Iterator[Line]:
    """Send code and config, and start the job."""
    argv = Argv(common.project)
    zone = rent.zones[0] if rent.type and rent.zones else ZONE
    target = name or NAME
    addresses = [f"ADDRESS{worker}" for worker in range(tpu(rent.type).hosts if rent.type else 1)]
    if rent.type:
        yield from up(common, target, rent)
    else:
        yield argv.nodes()
        yield "shown for a v6e-8; type, number and addresses of the machines come from the answer:"

    yield from _start(argv, target, zone, addresses, spec)


def keep(common: Common, name: str | None, rent: Rent, options: RunOptions, spec: launch.RunSpec) -> Iterator[Line]:
    """Rent a machine that keeps the run alive, and start that there."""
    argv, machine, zone = Argv(common.project, vm=True), machine_name(name or NAME), (rent.zones or [ZONE])[0]
    labels = {OWNER: owner_label(getpass.getuser()), RUN: label_text(name or NAME)}
    yield argv.vms(machine)
    yield "if it is not there; the owner is that of gcloud's account:"
    yield argv.create_vm(machine, zone, labels, rent.service_account)
    yield argv.ssh(machine, zone, "0", wrapped(TOOLS, "MARK", ["ADDRESS0"]))
    own = keeper_spec(machine, zone, labels[OWNER], name or NAME, rent, options, spec)
    yield from _start(argv, machine, zone, ["ADDRESS0"], own)


def _start(argv: Argv, target: str, zone: str, addresses: Sequence[str], spec: launch.RunSpec) -> Iterator[Line]:
    """Send code and config to machines, and start the job."""
    job = f"{spec.prefix}1"

    def ask(command: str, worker: str = "all") -> Line:
        return argv.ssh(target, zone, worker, wrapped(command, "MARK", addresses))

    yield ask("true", worker="0")
    yield ask(launch.status_command(None))
    yield f"if {spec.prefix}... does not run yet and is not done; the last number counts its attempts:"
    yield ask(launch.folder_command(spec))
    config = spec.package.files[0].with_name(f"{job}.yaml")
    config.write_text(spec.config, encoding="utf-8")
    files = [*spec.package.files, config]
    yield argv.scp([str(file) for file in files], target, zone, "all", f"{spec.package.folder}/")
    yield ask(launch.unpack_command(spec, files))
    if spec.package.sets_up:
        yield ask(launch.setup_command(spec, launch.SETUP + job))
        yield "until the setup is done:"
        yield ask(launch.status_command(launch.SETUP + job))
    if not argv.vm:
        yield argv.label(target, zone, {RUN: label_text(job)})
    if spec.secrets:
        yield ask(launch.secrets_folder())
    for worker in launch.secrets_by_target(spec.secrets):
        yield argv.scp([f"/dev/shm/FOLDER/secrets-{worker}"], target, zone, worker, f"{launch.SECRETS}/")
    yield ask(launch.start_command(addresses, spec, job, "NONCE"))
    yield "until the run has ended, with the log of worker 0:"
    yield ask(launch.status_command(job))
    yield ask(launch.log_command(job, 0), worker="0")


def _ask(common: Common, name: str | None, command: str, *, worker: str = "all") -> Line:
    """The ssh command that asks workers; MARK is a random number."""
    return Argv(common.project).ssh(name or NAME, ZONE, worker, wrapped(command, "MARK", ["ADDRESS0"]))
