"""`podium calibrate RUN...`: learns from finished runs, writes the user's file, and prints how far plans are off."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from podium.chips import user_file
from podium.config.errors import UsageError
from podium.doctor.calibrate import WRITER, Calibration, learn, read_sample
from podium.files import write_atomically
from podium.hosts.platform import prepare_platform
from podium.plan.calibration import USER_FILE, read_user_file


def calibrate(runs: Sequence[Path], *, fast: bool, as_json: bool) -> int:
    """Calibrate the machine of some runs, write its file, print the result, and return the exit status, 0.

    Args:
        runs: folders of runs.
        fast: plan them by the closed form instead of compiling.
        as_json: print one JSON object instead of tables.

    Raises:
        UsageError: a folder does not contain a run with settled steps, or the runs used different machines.
    """
    prepare_platform()
    samples = [read_sample(run) for run in runs]
    console = Console(stderr=as_json)
    with console.status("planning the runs"):
        found = learn(samples, fast=fast)
    path = user_file(found.machine.generation)
    own = read_user_file(found.machine.generation)
    if own is not None and not own.about.startswith(WRITER):
        raise UsageError(f"{path} has figures that podium calibrate did not write ({own.about}); move it away")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, USER_FILE.dump_json(found.file, indent=2) + b"\n")
    if as_json:
        print(json.dumps(as_object(found, path), indent=2))
    else:
        _print(found, path, console)
    return 0


def as_object(found: Calibration, path: Path) -> dict[str, object]:
    """The object that `--json` prints. Its keys are stable across versions."""
    return {
        "file": str(path),
        "about": found.file.about,
        "runs": [
            {
                "run": each.run,
                "steps": each.steps,
                "measured_s": each.measured_s,
                "before_s": each.before_s,
                "after_s": each.after_s,
            }
            for each in found.errors
        ],
        "each_by_the_others": found.apart,
        "memory": list(found.memory),
        "shares": {
            kind: {"value": each.value, "low": each.low, "high": each.high}
            for kind, each in found.file.calibration.items()
        },
    }


def _print(found: Calibration, path: Path, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("run", "steps", "s per step", "planned before", "error", "planned after", "error"):
        table.add_column(head, justify="left" if head == "run" else "right", no_wrap=True)
    for each in found.errors:
        planned = (f"{each.before_s:.3g}", f"{each.before:+.1%}", f"{each.after_s:.3g}", f"{each.after:+.1%}")
        table.add_row(each.run, f"{each.steps}", f"{each.measured_s:.3g}", *planned)
    console.print(table)
    shares = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("share of the roofline", "before", "now", "range"):
        shares.add_column(head, justify="left" if head == "share of the roofline" else "right", no_wrap=True)
    for kind, each in found.file.calibration.items():
        old = found.before.calibration[kind].value
        shares.add_row(kind, f"{old:.3g}", f"{each.value:.3g}", f"{each.low:.3g} to {each.high:.3g}")
    console.print(shares)
    before, after = (
        statistics.mean(abs(getattr(each, which)) for each in found.errors) for which in ("before", "after")
    )
    seen = "each run by the calibration of the others" if found.apart else "by a calibration that has seen them: give 3"
    console.print(f"steps were planned {before:.1%} off on average, and are {after:.1%} off now ({seen})")
    if found.memory:
        console.print(f"memory was {min(found.memory):.2f} to {max(found.memory):.2f} of what was planned")
    console.print(f"wrote {path}; podium plan uses it from now on, and says so", soft_wrap=True)
