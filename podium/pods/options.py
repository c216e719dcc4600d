"""Options of `podium pod`, each declared once, in a dataclass that the command line fills and the code reads."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from typer import Option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command that calls gcloud."""

    project: Annotated[str | None, Option(metavar="PROJECT", help="Google Cloud project; unset: gcloud's own.")] = None
    dry_run: Annotated[bool, Option("--dry-run", help="Print the gcloud commands without running them.")] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rent:
    """Options that describe what to rent."""

    type: Annotated[str | None, Option(metavar="TYPE", help="Accelerator type: v6e-8, v6e-16, v5litepod-16, v4-8.")] = (
        None
    )
    zones: Annotated[
        list[str] | None, Option("--zone", metavar="ZONE", help="Zones to try, in this order. Repeatable.")
    ] = None
    spot: Annotated[bool, Option("--spot/--on-demand", help="Whether to rent cheaper but preemptible machines.")] = True
    queued: Annotated[
        bool,
        Option(
            "--queued/--now",
            help="Wait in Google's queue, or fail if no machine is free (with --keep-alive: ask again).",
        ),
    ] = True
    valid_until: Annotated[str, Option(metavar="TIME", help="How long to wait in each zone's queue, such as 90m.")] = (
        "4h"
    )
    lease: Annotated[
        str | None,
        Option(
            metavar="TIME",
            help=(
                "`podium pod reap` deletes the slice when no job has run on it for this time, such as 12h; unset: "
                "24h, or as before."
            ),
        ),
    ] = None
    runtime: Annotated[
        str | None, Option("--runtime-version", metavar="VERSION", help="TPU software version; unset: by type.")
    ] = None
    service_account: Annotated[str | None, Option(metavar="EMAIL", help="Service account of the machines.")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `podium pod run`, except the config and what to rent."""

    slice: Annotated[str | None, Option(metavar="NAME", help="Slice to run on; unset: your only one.")] = None
    keep_alive: Annotated[
        bool, Option("--keep-alive", help="Replace lost machines, restart after failures, and continue the run.")
    ] = False
    on_vm: Annotated[
        bool,
        Option("--on-vm", help="Follow from a small Google machine (e2-micro) instead of this one; with --keep-alive."),
    ] = False
    detach: Annotated[bool, Option("--detach", help="Start the run and return without following it.")] = False
    allow_dirty: Annotated[bool, Option("--allow-dirty", help="Send uncommitted changes too.")] = False
    wheel: Annotated[Path | None, Option(metavar="FILE", help="Send Podium as a wheel, not this checkout.")] = None
    env_file: Annotated[
        Path | None, Option(metavar="FILE", help="File of mode 600 with HF_TOKEN=..., WANDB_API_KEY=...")
    ] = None
    env: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="Environment variable, not a secret. Repeatable.")
    ] = None
    prepare: Annotated[
        Path | None, Option(metavar="SCRIPT", help="Script that every machine runs first, for example to mount a disk.")
    ] = None
    python: Annotated[
        str | None,
        Option(metavar="PATH", help="Python on the machines that has all dependencies; unset: install them."),
    ] = None
    down: Annotated[
        bool | None,
        Option("--down/--keep", help="Delete the slice when the run has ended; unset: only with --keep-alive."),
    ] = None
    restarts: Annotated[int, Option(min=0, help="With --keep-alive: maximum restarts in a row without a new step.")] = 3
    replacements: Annotated[
        int, Option(min=0, help="With --keep-alive: maximum replacements in a row without a new step.")
    ] = 20


def flattened(command: Callable[..., object]) -> Callable[..., object]:
    """Replace the dataclass parameters of a command by their fields, as typer needs them."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Callable[..., object]] = {}
    for each in parameters:
        if isinstance(each.annotation, type) and dataclasses.is_dataclass(each.annotation):
            groups[each.name] = each.annotation
    fields = {name: inspect.signature(group).parameters for name, group in groups.items()}
    own = [each.replace(kind=each.KEYWORD_ONLY) for each in parameters if each.name not in groups]
    own += [each for group in fields.values() for each in group.values()]

    @functools.wraps(command)
    def run(**given: object) -> object:
        for name, group in groups.items():
            given[name] = group(**{each: given.pop(each) for each in fields[name]})
        return command(**given)

    run.__signature__ = inspect.Signature(own)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {each.name: each.annotation for each in own}
    return run
