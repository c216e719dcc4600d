"""Options of `podium plan`. The work is in `podium.plan.command`, which is imported only when the command runs.

Exit status: 0 the run fits, 1 it does not, 2 wrong settings or usage, 3 the compiler failed, 130 stopped by Ctrl-C.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

ConfigFiles = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG...",
        help="YAML files, later ones win; or a model (a hub id, a folder, a .gguf file), with default settings.",
        show_default=False,
    ),
]
Machines = Annotated[
    str | None,
    typer.Option(
        "--on",
        "--tpu",
        metavar="NAME[,NAME]",
        help="Machines to plan for: v6e-8, 2xv6e-16 (two slices), h100-8, a100-80-16, ...; auto: the cheapest.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, as rollout.max_new_tokens=64. Repeatable."),
]
Fast = Annotated[
    bool | None,
    typer.Option(
        "--fast/--compile",
        help="Trace the programs and compile those that decide (seconds), or compile all (minutes). Unset: compile;"
        " estimate a model without a config.",
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="gsm8k|fixed:N|RUN[,turns:T,reply:R,seconds:S]",
        help="Lengths of prompts and completions; unset: GSM8K's, with a note on the longest. With turns: conversations"
        " of T answers, with replies of R tokens after S seconds.",
    ),
]
SEARCHED = "train.rows_per_device, prompts_per_step, rollout.max_new_tokens or rollout.slots"
Largest = Annotated[str | None, typer.Option(metavar="KEY", help=f"Find the largest value that fits, of {SEARCHED}.")]
FindFit = Annotated[
    bool, typer.Option("--fit", help="Find the fastest settings that fit; settings of --set stay as they are.")
]
Write = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the settings that --fit finds as a config.")]
Compare = Annotated[
    str | None,
    typer.Option(
        metavar="KEY=A,B,C", help="Compare values of a setting, best first; 'KEY=A;B' if values contain commas."
    ),
]
Suggest = Annotated[
    bool | None,
    typer.Option(
        "--suggest/--no-suggest",
        help="Compile the changes most likely to help. Unset: estimate them; if the run does not fit, find what does.",
    ),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Number of steps to price; unset: the config's.")]
Prices = Annotated[Path | None, typer.Option(metavar="FILE", help="YAML file of prices, like podium/prices.yaml.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Page = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the report as a web page too.")]
Check = Annotated[
    Path | None, typer.Option(metavar="RUN", help="Instead, compare plan and measurements of a run on TPU or GPU.")
]
INTERRUPTED = 130


def plan(
    config: ConfigFiles = None,
    on: Machines = None,
    settings: Settings = None,
    fast: Fast = None,
    lengths: Lengths = None,
    search: Largest = None,
    fit: FindFit = False,
    write: Write = None,
    compare: Compare = None,
    suggest: Suggest = None,
    steps: Steps = None,
    prices: Prices = None,
    as_json: AsJson = False,
    html: Page = None,
    check: Check = None,
) -> None:
    """Say whether a run fits a machine you have not rented yet, what limits it, how fast it runs and what it costs.

    Exit status: 0 it fits (or is too close to call), 1 it does not fit, 2 wrong settings or usage, 3 the compiler
    failed.
    """
    from podium.plan.command import PlanRequest, check_command, plan_command
    from podium.plan.request.plan_subject import Subject

    others = (config, on, settings, fast, search, fit, write, compare, suggest, steps, prices, html)
    if check is not None and not any(others):
        raise typer.Exit(_answered(lambda: check_command(check, as_json=as_json)))
    if check is not None or not config or on is None:
        _fail("give CONFIG and --on, as `podium plan run.yaml --on v6e-8`, or --check RUN alone", status=2)
    subject = Subject.named(config, settings or ())
    by = "trace" if fast else "compiler"
    if fast is None and subject.model is not None:
        by = "closed_form"  # the first answer about a model needs no jax
    request = PlanRequest(
        subject=subject,
        on=on,
        search=search,
        compare=compare,
        fit=fit,
        write=write,
        suggest=suggest,
        by=by,
        lengths=lengths,
        steps=steps,
        prices=prices,
        html=html,
    )
    raise typer.Exit(_answered(lambda: plan_command(request, as_json=as_json)))


def _answered(answer: Callable[[], int]) -> int:
    """Run `answer` and return its exit status; print errors and exit: with status 2 if settings or usage are wrong."""
    from podium.config.errors import ConfigError, raised_here
    from podium.plan.compiled.compile import CompilerError

    try:
        return answer()
    except CompilerError as error:
        _fail(error, status=CompilerError.exit_code)
    except ValueError as error:
        if not isinstance(error, ConfigError) and not raised_here(error):
            raise
        _fail(error, status=2)
    except KeyboardInterrupt:
        print("\ninterrupted; compiled programs are kept, and the same command continues", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def _fail(error: Exception | str, *, status: int) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(status)
