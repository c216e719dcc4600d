"""`podium pod run`: a config on a slice, followed to its end and kept alive if asked."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.accelerators import Accelerator, find_accelerator
from podium.config.errors import ConfigError, Problem
from podium.config.show import to_yaml
from podium.models.architecture import ModelError
from podium.pods.context import Common, Pod, open_pod
from podium.pods.gcloud import GcloudError
from podium.pods.inventory import Slice, label_text
from podium.pods.launch import NOTHING_STARTED, Run, View, launch, look, read_log, stop
from podium.pods.push import Package, pack
from podium.pods.recover import Policy, Seen, keep_alive
from podium.pods.remote import RemoteError
from podium.pods.rental import Rent, rent_again, rent_slice, tpu
from podium.pods.secrets import Secrets, gather
from podium.pods.slices import AskedWronglyError, SliceError

if TYPE_CHECKING:
    from podium.config.load import Loaded
    from podium.config.schema import Config

INTERRUPTED = 130


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `podium pod run` takes besides a config."""

    slice: str | None = None
    """None: the only one there is, or, with a type, one with the config's name."""
    rent: Rent = dataclasses.field(default_factory=Rent)
    """What to rent if it is not there."""
    keep_alive: bool = False
    restarts: int = 3
    replacements: int = 20
    wheel: Path | None = None
    allow_dirty: bool = False
    env_file: Path | None = None
    env: tuple[str, ...] = ()
    python: str | None = None
    prepare: Path | None = None
    detach: bool = False


def run(loaded: "Loaded", options: RunOptions, common: Common) -> int:
    """Run a config on a slice to its end; the run's exit status.

    Raises:
        ValueError: something is wrong that is seen before anything is rented, or on the way; the message says what.
    """
    secrets = gather(os.environ, options.env_file)
    environment = _environment(options)
    text = to_yaml(loaded.config.model_dump(mode="json"))
    if held := secrets.found_in(text):
        message = f"the settings hold the value of {held[0]}; take it out, it travels by itself"
        raise ConfigError([Problem(key="secrets", message=message)])
    _check_runs_dir(loaded, options, tpu(options.rent.type).hosts if options.rent.type else 1)
    if options.rent.type:
        _check_divides(loaded.config, tpu(options.rent.type), environment)
    with tempfile.TemporaryDirectory(prefix="podium-") as scratch:
        package = pack(
            loaded.config,
            Path(scratch),
            here=Path.cwd(),
            wheel=options.wheel,
            allow_dirty=options.allow_dirty,
            python=options.python,
            prepare=options.prepare,
            secrets=secrets,
        )
        pod = _open(options, common, secrets)
        if package.patched:
            pod.say("changes that are not committed are sent as a patch, kept beside the code on the workers")
        one = _slice_for(pod, loaded, options)
        _check_runs_dir(loaded, options, len(one.addresses))
        _check_divides(loaded.config, find_accelerator(one.accelerator), environment)
        session = Session(pod, one, options, lambda at: _make_run(loaded, text, package, secrets, at, environment))
        _begin(pod, session, options)
        if options.detach or common.dry_run:
            pod.say(f"podium pod logs -f {one.name} follows it")
            return 0
        return _follow(pod, session, options)


class Session:
    """A run on a slice: the verbs of `podium.pods.recover`."""

    def __init__(self, pod: Pod, one: Slice, options: RunOptions, make_run: Callable[[Slice], Run]) -> None:
        self.one = one
        self._pod, self._options, self._make_run = pod, options, make_run
        self._shown: dict[str, int] = {}  # job -> bytes of its log
        self._job: str | None = None

    def look(self) -> Seen:
        """The slice and its workers, now."""
        now = self._pod.slices.now(self.one)
        if now is None or now.state != "ready":
            return Seen(slice=now, view=None)
        if self._job is None:  # jobs of others are none of its business
            return Seen(slice=now, view=View(statuses=[NOTHING_STARTED] * len(now.addresses)))
        try:
            return Seen(slice=now, view=look(self._pod.remote(now), self._job))
        except GcloudError as error:
            if error.kind != "unusable":  # it ended since
                raise
            return Seen(slice=now, view=None)

    def start(self) -> None:
        """Start the run where it is not running."""
        run = self._make_run(self.one)
        self._job = launch(self._pod.remote(self.one), run, clock=self._pod.clock, say=self._pod.say)

    def stop(self) -> None:
        """End what is left of the job, on all workers."""
        if self._job is not None:
            stop(self._pod.remote(self.one), self._job, remember=False)

    def replace(self) -> None:
        """Delete the slice and rent another like it."""
        self._job = None
        self.one = rent_again(self._pod.slices, self.one, self._options.rent)

    def show(self, view: View) -> None:
        """Print what worker 0's log has got since; if its machine has gone meanwhile, the next look will tell."""
        first = view.statuses[0] if view.statuses else None
        if first and first.get("job"):
            with contextlib.suppress(RemoteError, GcloudError):
                self._show(first)

    def _show(self, first: Mapping[str, Any]) -> None:
        job = first["job"]
        place, further = self._shown.get(job, 0), -1
        while place < first["log_bytes"] and further != place:
            further = place
            text, place = read_log(self._pod.remote(self.one), 0, job, place)
            self._pod.answer(text, end="")
        self._shown[job] = place


def _open(options: RunOptions, common: Common, secrets: Secrets) -> Pod:
    workers = tpu(options.rent.type).hosts if options.rent.type else 1
    exists = None if options.rent.type else options.slice or "NAME"
    return open_pod(common, secrets=secrets, zones=options.rent.zones, workers=workers, exists=exists)


def _slice_for(pod: Pod, loaded: "Loaded", options: RunOptions) -> Slice:
    """The slice to run on: the one that is there, or a new one where a type is given."""
    if options.rent.type is not None:
        name = options.slice or label_text(str(loaded.config.name)).replace("_", "-")[:40].strip("-")
        return rent_slice(pod.slices, name, options.rent, default_zone=pod.zone)
    one = pod.slices.locate(options.slice)
    if one.state == "ready":
        return one
    if options.keep_alive:
        return rent_again(pod.slices, one, options.rent)
    raise SliceError(
        f"{one.name} in {one.zone} is not ready ({one.told}); wait for it with podium pod up {one.name} --type "
        f"{one.accelerator} --zone {one.zone}, or have it replaced with --keep-alive"
    )


def _make_run(
    loaded: "Loaded", text: str, package: Package, secrets: Secrets, one: Slice, environment: dict[str, str]
) -> Run:
    return Run(
        name=str(loaded.config.name),
        config=text,
        package=package,
        accelerator=one.accelerator,
        devices_per_worker=None if _without_tpu(environment) else find_accelerator(one.accelerator).devices_per_host,
        secrets=secrets,
        environment=environment,
    )


def _environment(options: RunOptions) -> dict[str, str]:
    """The variables of --env. Raises AskedWronglyError where one is not NAME=VALUE, or looks like a secret."""
    found = {}
    for pair in options.env:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise AskedWronglyError(f"--env {pair}: write NAME=VALUE")
        if name.startswith("PODIUM_"):
            raise AskedWronglyError(f"--env {name}: settings go into the config; use --set")
        if name.upper().endswith(("KEY", "TOKEN", "SECRET", "PASSWORD")):
            raise AskedWronglyError(
                f"--env {name}: secrets have no place in a command; put it into a file for --env-file"
            )
        found[name] = value
    return found


def _check_runs_dir(loaded: "Loaded", options: RunOptions, workers: int) -> None:
    """Raises ConfigError where the run's folder would be another one on every machine, or lost with the machines."""
    folder = Path(loaded.config.runs_dir)
    if folder.is_absolute() or (workers == 1 and not options.keep_alive):
        return
    why = f"{workers} workers need one folder" if workers > 1 else "--keep-alive replaces machines with their disks"
    message = (
        f"{loaded.config.runs_dir!r} is below each machine's own home, and {why}; mount a file system on all "
        "(--prepare SCRIPT) and name its path, as --set runs_dir=/mnt/runs"
    )
    places = (loaded.provenance["runs_dir"],) if "runs_dir" in loaded.provenance else ()
    raise ConfigError([Problem(key="runs_dir", message=message, places=places)])


def _begin(pod: Pod, session: Session, options: RunOptions) -> None:
    """Start the run. What fails then is with --keep-alive seen, and tried again, like any later failure."""
    try:
        session.start()
    except (RemoteError, GcloudError) as error:
        hopeless = isinstance(error, GcloudError) and not error.transient and error.kind != "unusable"
        if hopeless or not options.keep_alive or options.detach:
            raise
        pod.say(str(error))


def _check_divides(config: "Config", accelerator: Accelerator, environment: dict[str, str]) -> None:
    """Raises AskedWronglyError where weights or sequences do not divide over a slice; not of models unknown here."""
    from podium.models.params import check_divides
    from podium.models.presets import find_architecture

    if _without_tpu(environment):
        return
    try:
        decoder = find_architecture(config.model)
    except ModelError:
        return
    try:
        check_divides(config, decoder, accelerator)
    except ValueError as error:
        raise AskedWronglyError(f"on {accelerator.name}: {error}") from None


def _without_tpu(environment: dict[str, str]) -> bool:
    return environment.get("JAX_PLATFORMS") == "cpu"


def _follow(pod: Pod, session: Session, options: RunOptions) -> int:
    policy = Policy(restarts=options.restarts, replacements=options.replacements)
    if not options.keep_alive:
        policy = dataclasses.replace(policy, restarts=0, replacements=0)
    try:
        return keep_alive(session, policy, clock=pod.clock, say=pod.say)
    except KeyboardInterrupt:
        name = session.one.name
        pod.say(f"\nthe run goes on without this machine; podium pod logs -f {name} follows it,")
        pod.say(f"podium pod stop {name} ends it, and this command again follows and keeps it as before")
        return INTERRUPTED
