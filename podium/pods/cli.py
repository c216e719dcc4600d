"""The `podium pod` commands: TPU slices from renting one to giving it back. What they do is `podium.pods.commands`.

Nothing of podium.pods is imported before a command is given.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from podium.pods.context import Common
    from podium.pods.rental import Rent

pod_app = typer.Typer(help="TPU slices of Google Cloud: rent, run, watch, give back.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the slice.")]
AnyName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="Name of the slice; unset: your only one.", show_default=False)
]
Project = Annotated[str | None, typer.Option(metavar="PROJECT", help="Google Cloud project; unset: gcloud's own.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the gcloud commands, and run none.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Type = Annotated[str | None, typer.Option(metavar="TYPE", help="Accelerator type: v6e-8, v6e-16, v5litepod-16, v4-8.")]
Zones = Annotated[list[str] | None, typer.Option("--zone", metavar="ZONE", help="Where to ask, in order. Repeatable.")]
Spot = Annotated[bool, typer.Option("--spot/--on-demand", help="Cheap and taken away at any time, or neither.")]
Queued = Annotated[bool, typer.Option("--queued/--now", help="Wait in Google's queue, or take it now or never.")]
ValidUntil = Annotated[
    str, typer.Option("--valid-until", metavar="TIME", help="How long a zone may keep us waiting, as 90m, 4h.")
]
Lease = Annotated[str, typer.Option(metavar="TIME", help="After which `podium pod reap` deletes it, as 12h, 3d.")]
Runtime = Annotated[
    str | None, typer.Option("--runtime-version", metavar="VERSION", help="Software of the machines; unset: by type.")
]
Account = Annotated[str | None, typer.Option("--service-account", metavar="EMAIL", help="Whom the machines act for.")]


def _common(project: str | None, dry_run: bool) -> "Common":
    from podium.pods.context import Common

    return Common(project=project, dry_run=dry_run)


def _rent(
    type: str | None,
    zones: list[str] | None,
    spot: bool,
    queued: bool,
    valid_until: str,
    lease: str,
    runtime: str | None,
    account: str | None,
) -> "Rent":
    from podium.pods.rental import Rent

    return Rent(
        type=type,
        zones=tuple(zones or ()),
        spot=spot,
        queued=queued,
        valid_until=valid_until,
        lease=lease,
        runtime=runtime,
        service_account=account,
    )


@pod_app.command()
def up(
    name: Name,
    type: Type = None,
    zone: Zones = None,
    spot: Spot = True,
    queued: Queued = True,
    valid_until: ValidUntil = "4h",
    lease: Lease = "24h",
    runtime: Runtime = None,
    account: Account = None,
    project: Project = None,
    dry_run: DryRun = False,
) -> None:
    """Rent a slice, or take on the one of that name; it is ready then."""
    from podium.pods.commands import up as command

    rent = _rent(type, zone, spot, queued, valid_until, lease, runtime, account)
    raise typer.Exit(command(name, rent, _common(project, dry_run)))


@pod_app.command()
def run(
    config: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="YAML files; later ones win.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting. Repeatable.")
    ] = None,
    slice: Annotated[str | None, typer.Option("--slice", metavar="NAME", help="Unset: your only slice.")] = None,
    keep_alive: Annotated[
        bool, typer.Option("--keep-alive", help="Replace lost machines, restart after failures, go on.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Start, and do not follow.")] = False,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Send uncommitted changes too.")] = False,
    wheel: Annotated[Path | None, typer.Option(metavar="FILE", help="Podium as a wheel, not this checkout.")] = None,
    env_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="HF_TOKEN=..., WANDB_API_KEY=... of mode 600.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Not secret. Repeatable.")] = None,
    prepare: Annotated[
        Path | None, typer.Option(metavar="SCRIPT", help="Run on every machine first, as to mount a file system.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="A Python there that has everything; unset: installed.")
    ] = None,
    restarts: Annotated[int, typer.Option(min=0, help="With --keep-alive, of failures without a step between.")] = 3,
    replacements: Annotated[int, typer.Option(min=0, help="With --keep-alive, of machines, likewise.")] = 20,
    type: Type = None,
    zone: Zones = None,
    spot: Spot = True,
    queued: Queued = True,
    valid_until: ValidUntil = "4h",
    lease: Lease = "24h",
    runtime: Runtime = None,
    account: Account = None,
    project: Project = None,
    dry_run: DryRun = False,
) -> None:
    """Send code and config, start on all machines, follow to the end. With --type, rent first.

    Given again it finds what it started, from any laptop. Exit status: the run's own; 130 after Ctrl-C, which ends
    only the following.
    """
    from podium.settings import load_settings

    loaded = load_settings(config, settings or [])
    from podium.pods.run import RunOptions
    from podium.pods.run import run as command

    options = RunOptions(
        slice=slice,
        rent=_rent(type, zone, spot, queued, valid_until, lease, runtime, account),
        keep_alive=keep_alive,
        restarts=restarts,
        replacements=replacements,
        wheel=wheel,
        allow_dirty=allow_dirty,
        env_file=env_file,
        env=tuple(env or ()),
        python=python,
        prepare=prepare,
        detach=detach,
    )
    raise typer.Exit(command(loaded, options, _common(project, dry_run)))


@pod_app.command()
def status(name: AnyName = None, as_json: AsJson = False, project: Project = None, dry_run: DryRun = False) -> None:
    """Show a slice, its workers, how far the run is, and what it has cost."""
    from podium.pods.commands import status as command

    raise typer.Exit(command(name, _common(project, dry_run), as_json=as_json))


@pod_app.command()
def logs(
    name: AnyName = None,
    worker: Annotated[int, typer.Option(min=0, help="Whose log.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on while the job runs.")] = False,
    tail: Annotated[int, typer.Option(min=1, help="Begin with the last so many lines.")] = 200,
    project: Project = None,
    dry_run: DryRun = False,
) -> None:
    """Print a worker's log."""
    from podium.pods.commands import logs as command

    raise typer.Exit(command(name, _common(project, dry_run), worker=worker, follow=follow, tail=tail))


@pod_app.command()
def stop(name: AnyName = None, project: Project = None, dry_run: DryRun = False) -> None:
    """End the job, which saves and can be continued. The machines stay, and cost."""
    from podium.pods.commands import stop as command

    raise typer.Exit(command(name, _common(project, dry_run)))


@pod_app.command()
def down(name: Name, project: Project = None, dry_run: DryRun = False) -> None:
    """Delete a slice, and see that it is gone. Only ever your own."""
    from podium.pods.commands import down as command

    raise typer.Exit(command(name, _common(project, dry_run)))


@pod_app.command()
def ls(
    zone: Zones = None,
    everyone: Annotated[bool, typer.Option("--all", help="Others' slices too.")] = False,
    as_json: AsJson = False,
    project: Project = None,
    dry_run: DryRun = False,
) -> None:
    """List what is rented or asked for."""
    from podium.pods.commands import ls as command

    raise typer.Exit(command(_common(project, dry_run), zones=tuple(zone or ()), everyone=everyone, as_json=as_json))


@pod_app.command()
def reap(
    everyone: Annotated[bool, typer.Option("--all", help="What Podium made for others too.")] = False,
    project: Project = None,
    dry_run: DryRun = False,
) -> None:
    """Delete what is past its lease."""
    from podium.pods.commands import reap as command

    raise typer.Exit(command(_common(project, dry_run), everyone=everyone))


@pod_app.command()
def ssh(
    name: AnyName = None,
    worker: Annotated[str, typer.Option(metavar="N|all", help="Which machine.")] = "0",
    command: Annotated[str | None, typer.Option(metavar="COMMAND", help="Run it; unset: a shell.")] = None,
    project: Project = None,
    dry_run: DryRun = False,
) -> None:
    """Open a shell on a machine, or run a command there."""
    from podium.pods.commands import ssh as connect

    raise typer.Exit(connect(name, _common(project, dry_run), worker=worker, command=command))


@pod_app.command()
def sky(
    config: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="YAML files; later ones win.")],
    type: Annotated[str, typer.Option(metavar="TYPE", help="Accelerator type, as v6e-16.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting. Repeatable.")
    ] = None,
    zone: Annotated[str | None, typer.Option(metavar="ZONE", help="Unset: SkyPilot looks for one.")] = None,
    spot: Spot = True,
    runtime: Runtime = None,
) -> None:
    """Print the config as a SkyPilot task, for `sky launch` or `sky jobs launch`."""
    from podium.settings import load_settings

    loaded = load_settings(config, settings or [])
    from podium.pods.sky import sky_task

    print(sky_task(loaded.config, type, zone=zone, spot=spot, runtime=runtime), end="")
