"""`podium pod run`: runs a config on a slice, follows it to its end, and keeps it alive on request."""

import dataclasses
import os
import re
import tempfile
from pathlib import Path

from podium.accelerators import find_accelerator
from podium.config.errors import ConfigError, Problem
from podium.config.load import Loaded
from podium.config.schema import Config
from podium.config.show import to_yaml
from podium.files import BUCKETS
from podium.models.architecture import ModelError
from podium.patience import patiently
from podium.pods.endings import Endings, bucket_label
from podium.pods.inventory import Slice, label_text
from podium.pods.keeper import keep_on_vm
from podium.pods.launch import RunSpec, may_pass
from podium.pods.options import Common, Rent, RunOptions
from podium.pods.project import Project, open_project
from podium.pods.push import pack
from podium.pods.recover import Keeper, Policy
from podium.pods.rehearsal import Placeholders
from podium.pods.rental import new_order, rent_slice, same_again, tpu, zones_of
from podium.pods.secrets import gather, read_variables
from podium.pods.session import Session
from podium.pods.slices import BadRequestError, SliceError
from podium.pods.world import RUN_VARIABLE
from podium.run.divisible import check_divisible
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.run.roles import find_decoder

INTERRUPTED = 130


def run_config(loaded: Loaded, rent: Rent, options: RunOptions, common: Common) -> int:
    """Run a config on a slice to its end; returns the run's exit status."""
    secrets = gather(os.environ, options.env_file)
    environment = read_variables(options.env or ())
    if settings := [name for name in environment if name.startswith("PODIUM_")]:
        raise BadRequestError(f"--env {settings[0]}: this is a setting; use --set")
    _check_name(str(loaded.config.name), options)
    text = to_yaml(loaded.config.document())
    if held := secrets.found_in(text):
        message = f"the settings contain the value of {held[0]}; remove it, it is sent separately"
        raise ConfigError([Problem(key="secrets", message=message)])
    wanted = tpu(rent.type) if rent.type else None
    _check_runs_dir(loaded, options, wanted.hosts if wanted else 1)
    own_name = label_text(str(loaded.config.name)).replace("_", "-")[:40].strip("-")
    name = options.slice or (own_name if wanted else None)
    with tempfile.TemporaryDirectory(prefix="podium-") as scratch:
        spec = RunSpec(
            name=str(loaded.config.name),
            config=text,
            package=pack(loaded.config, Path(scratch), here=Path.cwd(), options=options, secrets=secrets),
            accelerator=wanted.name if wanted else "v6e-8",  # only for --dry-run; otherwise the slice's type is used
            secrets=secrets.placeholders() if common.dry_run else secrets,
            environment=environment,
        )
        if wanted:
            _check_divisible(loaded.config, spec)
        placeholders = Placeholders(
            name=name,
            exists=wanted is None,
            accelerator=spec.accelerator,
            workers=wanted.hosts if wanted else 1,
            zones=rent.zones or (),
            job=None,
        )
        project = open_project(common, placeholders, secrets, follows=not options.detach)
        if spec.package.sends("changes.patch"):
            project.say("uncommitted changes are sent as a patch, which is kept with the code on the workers")
        tpu_slice = None if wanted else _found(project, name, options)
        if tpu_slice is not None:
            rent, name = same_again(tpu_slice, rent), tpu_slice.title
            _check_runs_dir(loaded, options, len(tpu_slice.addresses))
            spec = dataclasses.replace(spec, accelerator=tpu_slice.accelerator)
            _check_divisible(loaded.config, spec)
        assert name is not None
        if options.on_vm:
            zone = tpu_slice.zone if tpu_slice else zones_of(rent, project.slices, project.zone)[0]
            keep_on_vm(project, name, zone=zone, rent=rent, options=options, spec=spec)
            return 0
        bucket = (bucket_label(loaded.config.runs_dir) or "") if options.keep_alive else None
        session = _make_session(project, name, rent, spec, bucket=bucket, fresh=wanted is not None)
        if options.detach or not options.keep_alive:  # otherwise `Keeper` does both, and handles failures
            session.slice = session.slice or rent_slice(project.slices, session.order, session.zones)
            what = f"{name}, and what its setup needs"
            patiently(session.start, what, may_pass=may_pass, clock=project.clock, say=project.say)
        if options.detach:
            project.say(f"to follow it: podium pod logs -f {name}")
            return 0
        return follow(project, session, options)


def _make_session(
    project: Project, name: str, rent: Rent, spec: RunSpec, *, bucket: str | None, fresh: bool
) -> Session:
    """The session of a run; `bucket` is the label of the run's bucket if it is kept alive, empty without a bucket."""
    zones = zones_of(rent, project.slices, project.zone)
    run = os.environ.get(RUN_VARIABLE) or label_text(spec.prefix)
    order = new_order(name, rent, project.slices, zones, run, bucket=bucket)
    endings = Endings(project.slices, bucket or None, run)
    return Session(project, spec, order, zones, endings, fresh=fresh)


def _found(project: Project, name: str | None, options: RunOptions) -> Slice:
    """The existing slice to run on. Raises SliceError if it is not ready and would not be replaced."""
    tpu_slice = project.slices.locate(name)
    project.note("shown for a v6e-8; in a real run, type, number and addresses of the machines come from the answer:")
    if tpu_slice.state == "ready" or options.keep_alive:  # `Keeper` replaces it if necessary
        return tpu_slice
    raise SliceError(
        f"{tpu_slice.name} in {tpu_slice.zone} is not ready ({tpu_slice.detail}); wait for it with podium pod up "
        f"{tpu_slice.title} --type {tpu_slice.accelerator} --zone {tpu_slice.zone}, or replace it with --keep-alive"
    )


def _check_name(name: str, options: RunOptions) -> None:
    """Raise ConfigError if a run's name cannot name a job, and BadRequestError for contradictory options."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        message = f"{name!r} cannot name a job on the machines: letters, digits, '.', '_' and '-', such as name=my-run"
        raise ConfigError([Problem(key="name", message=message)])
    if options.detach and options.down:
        raise BadRequestError("--down needs a run that is followed to its end; leave out --detach, or --down")
    if options.on_vm and (options.detach or not options.keep_alive):
        raise BadRequestError("--on-vm follows a run for you: give it with --keep-alive and without --detach")


def _check_runs_dir(loaded: Loaded, options: RunOptions, workers: int) -> None:
    """Raise ConfigError if every machine would have its own run folder, or the folder would be lost with them."""
    folder = loaded.config.runs_dir
    if folder.startswith(BUCKETS):
        return
    replaced = "--keep-alive replaces machines and their disks" if options.keep_alive else ""
    deleted = replaced or ("--down deletes the machines and their disks" if options.down else "")
    if not Path(folder).is_absolute():
        where = "is below each machine's own home"
        why = f"{workers} workers need one folder" if workers > 1 else deleted
    else:
        where = "is on each machine's own disk unless something is mounted there"
        why = "" if options.prepare else deleted
    if not why:
        return
    message = (
        f"{folder!r} {where}, and {why}; write to a bucket, as --set runs_dir=gs://BUCKET/runs, or mount a file system "
        "on all (--prepare SCRIPT) and set its path"
    )
    places = (loaded.provenance["runs_dir"],) if "runs_dir" in loaded.provenance else ()
    raise ConfigError([Problem(key="runs_dir", message=message, origins=places)])


def _check_divisible(config: Config, spec: RunSpec) -> None:
    """Raise BadRequestError if weights or sequences do not split evenly over the slice; unknown models are not
    checked.
    """
    if spec.on_cpu:
        return
    try:
        decoder = find_decoder(config)
    except ModelError:
        return
    try:
        check_divisible(resolve(config, decoder, Machine.planned(find_accelerator(spec.accelerator))))
    except ValueError as error:
        raise BadRequestError(f"on {spec.accelerator}: {error}") from None


def follow(project: Project, session: Session, options: RunOptions) -> int:
    """Follow a run to its end, and keep it alive if `--keep-alive` was given; returns its exit status."""
    restarts, replacements = (options.restarts, options.replacements) if options.keep_alive else (0, 0)
    down = False if options.down is None and not options.keep_alive else options.down
    policy = Policy(restarts=restarts, replacements=replacements, down=down)
    name = session.title
    try:
        return Keeper(session, policy, clock=project.clock, say=project.say).keep()
    except KeyboardInterrupt:
        if session.slice is None:
            project.say("\nstopped while requesting machines: a request remains, and may cost money later;")
            project.say(f"podium pod down {name} withdraws it, and the same command continues with it")
            return INTERRUPTED
        project.say(f"\nstopped following; the run continues. podium pod logs -f {name} shows its log,")
        project.say(f"podium pod stop {name} ends it, and the same command follows it again")
        return INTERRUPTED
    except (ValueError, OSError):
        project.say(f"no longer followed: {name} may still be rented and cost money; podium pod down {name} deletes it")
        raise
