"""`podium doctor`: examines the machine that it runs on and prints a table, or one JSON object.

Exit status: 0 if nothing is wrong, else 1.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from podium.doctor import facts, measure
from podium.doctor.diagnosis import Diagnosis, Row
from podium.doctor.kernels import kernels
from podium.doctor.machine_subject import Probe, Sizes, Subject, make_subject
from podium.doctor.model import small_model
from podium.doctor.system import System, ThisSystem
from podium.hosts.platform import prepare_platform

WITHOUT_DEVICES: Mapping[str, Probe] = {
    "versions": lambda subject: facts.versions(subject.facts),
    "devices": lambda subject: facts.devices(subject.facts),
    "memory": lambda subject: facts.memory(subject.facts, subject.accelerator),
    "disk": measure.disk,
}
PROBES: Mapping[str, Probe] = {
    **WITHOUT_DEVICES,
    "products": measure.products,
    "bandwidth": measure.bandwidth,
    "host": measure.host_link,
    "links": measure.links,
    "kernels": kernels,
    "model": small_model,
}


def doctor(runs_dir: Path, *, full: bool, as_json: bool) -> int:
    """Examine this machine, print the result, and return the exit status: 0 if nothing is wrong, else 1.

    Args:
        runs_dir: where runs are written.
        full: with the larger sizes that were measured on an H100.
        as_json: print one JSON object instead of a table.
    """
    prepare_platform()
    console = Console(stderr=as_json)
    with console.status("asking the machine") as status:
        found = diagnose(ThisSystem(), runs_dir, full=full, progress=lambda name: status.update(f"measuring: {name}"))
    if as_json:
        print(json.dumps(as_object(found), indent=2))
    else:
        print_diagnosis(found, console)
    return 1 if found.problems else 0


def diagnose(
    system: System,
    runs_dir: Path,
    *,
    sizes: Sizes | None = None,
    full: bool = False,
    probes: Mapping[str, Probe] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Diagnosis:
    """Run all probes; those that compute are left out if jax finds no device.

    Args:
        system: the machine.
        runs_dir: where runs are written.
        sizes: how much to compute; unset: what suits the machine.
        full: if `sizes` is unset, the larger ones.
        probes: the parts of the examination by name; unset: all.
        progress: called with the name of each part when it begins.
    """
    start = time.perf_counter()
    subject = make_subject(system, sizes, runs_dir, full=full)
    suiting = PROBES if subject.facts.devices else WITHOUT_DEVICES
    sections = {}
    for name, probe in (suiting if probes is None else probes).items():
        progress(name)
        sections[name] = tuple(_rows(probe, subject))
    kinds = [device.kind for device in subject.facts.devices]
    machine = f"{len(kinds)} x {kinds[0]}" if kinds else "no devices"
    return Diagnosis(machine=machine, sections=sections, seconds=time.perf_counter() - start)


def _rows(probe: Probe, subject: Subject) -> Iterator[Row]:
    """The rows of a probe. If the device fails, the last row says so, and the other probes still run."""
    try:
        yield from probe(subject)
    except jax.errors.JaxRuntimeError as error:
        yield Row(name="failed", problem=str(error).strip().splitlines()[0][:300])


def as_object(found: Diagnosis) -> dict[str, object]:
    """The object that `--json` prints. Its keys are stable across versions."""
    sections = {
        section: [
            {
                "name": row.name,
                "unit": row.unit or None,
                "measured": row.measured,
                "assumed": row.assumed,
                "ratio": row.ratio,
                "text": row.text or None,
                "problem": row.problem or None,
            }
            for row in rows
        ]
        for section, rows in found.sections.items()
    }
    problems = [f"{section}, {row.name}: {row.problem}" for section, row in found.problems]
    return {
        "ok": not problems,
        "problems": problems,
        "machine": found.machine,
        "sections": sections,
        "seconds": round(found.seconds, 1),
    }


def print_diagnosis(found: Diagnosis, console: Console) -> None:
    """Print the table, then what is wrong and what to do."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for name in ("measured", "assumed", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for section, rows in found.sections.items():
        for number, row in enumerate(rows):
            style = "bold red" if row.problem else ""
            unit = f" {row.unit}" if row.unit else ""
            measured = "" if row.measured is None else f"{_number(row.measured)}{unit}"
            assumed = "" if row.assumed is None else _number(row.assumed)
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            cells = (section if not number else "", row.name, measured, assumed, ratio, row.text)
            table.add_row(*(Text(cell, style=style) for cell in cells))
    console.print(table)
    for section, row in found.problems:
        console.print(Text(f"{section}, {row.name}: {row.problem}", style="red"), soft_wrap=True)
    verdict = f"{len(found.problems)} wrong" if found.problems else "nothing is wrong"
    console.print(f"{found.machine}: {verdict}, {found.seconds:.0f} s")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or float(value).is_integer() else f"{value:.3g}"
