"""What every result in benches/results/ says besides its numbers: the command, the commit, the machine, versions, date.

Benches are modules: `python -m benches.NAME` from the root of the checkout. Those that measure write to build/results,
or to `--results FOLDER`; with `--record` they replace the committed result, and the tables of it in docs/.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.accelerators import find_accelerator
from podium.observe.summary import commit, versions
from podium.plan.compiled.compile import CompileProgress
from podium.plan.request.topology import compiler_environment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benches" / "results"
"""The committed results."""
DRAFTS = ROOT / "build" / "results"
"""Where results go that are not to be committed."""
MEASUREMENTS = ROOT / "docs" / "planner-measurements.md"


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the module's docstring as its help, `--results` and `--record`."""
    parser = argparse.ArgumentParser(program(), description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    where = f"where the numbers are written; default: {DRAFTS.relative_to(ROOT)}"
    chosen.add_argument("--results", type=Path, default=DRAFTS, metavar="FOLDER", help=where)
    replaced = f"write them to {RESULTS.relative_to(ROOT)}, in place of what is there"
    chosen.add_argument("--record", dest="results", action="store_const", const=RESULTS, help=replaced)
    return parser


def record(name: str, result: Mapping[str, Any], folder: Path, *, packages: Sequence[str] = ()) -> Path:
    """Write `folder/name.json`: how the numbers came about, then the numbers.

    Args:
        name: the question and the kind of hardware, `kill-resume-cpu`.
        result: what JSON can hold.
        folder: where to; made if it is not there.
        packages: whose versions matter besides those that every run records.
    """
    about = {
        "command": command(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions() | {package: importlib.metadata.version(package) for package in packages},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(about | dict(result), indent=2) + "\n")
    print(f"written: {path}", file=sys.stderr)
    return path


def recorded(name: str, key: str, folder: Path = RESULTS) -> Any:
    """A part of the results that an earlier run wrote, or None."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text())[key] if path.exists() else None


def train_command(config: Path, *settings: str) -> list[str]:
    """`podium train` in a process of its own, with settings over those of the config."""
    changes = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", "podium.cli", "train", str(config), "--plain", *changes]


def children_cpu_s() -> float:
    """CPU seconds of the processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def medians(programs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Median CPU and wall seconds of each program. They take turns, and the first turn does not count."""
    import jax

    cpu: dict[str, list[float]] = {name: [] for name in programs}
    wall: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats + 1):
        for name, program in programs.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            jax.block_until_ready(program())
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
    return {
        name: {"cpu_s": statistics.median(cpu[name][1:]), "wall_s": statistics.median(wall[name][1:])}
        for name in programs
    }


def within_noise(values: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the means of two samples differ by at most twice the standard error of their difference."""
    error = math.sqrt(sum(statistics.variance(each) / len(each) for each in (values, others)))
    return abs(statistics.mean(values) - statistics.mean(others)) <= 2 * error


def child_for(machine: str, module: str, *arguments: str, xla_flags: str = "") -> dict[str, Any]:
    """What a bench prints last, as JSON, in a process that compiles for an accelerator that is not there."""
    environment = {**os.environ, **compiler_environment(find_accelerator(machine))}
    if xla_flags:
        environment["XLA_FLAGS"] += f" {xla_flags}"
    command = [sys.executable, "-m", module, machine, *arguments]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{process.stderr[-3000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def show_progress(progress: CompileProgress) -> None:
    """Print what became of each program of a plan, once it is there."""
    if progress.state != "compiling":
        print(f"  {progress.phase}: {progress.state}, {progress.seconds:.0f} s", flush=True)


def write_section(page: Path, name: str, lines: Sequence[str], results: Path) -> None:
    """Replace what is between `<!-- name -->` and `<!-- end of name -->` of a page.

    The page shows what is committed: unless the numbers are written to those `results`, the lines are printed instead.
    """
    if results.resolve() != RESULTS.resolve():
        print(*lines, sep="\n")
        return
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no lines {begin.strip()} and {end}; put them where the numbers belong")
    page.write_text("".join([before, begin, *(f"{line}\n" for line in lines), end, after]), encoding="utf-8")


def _commit() -> str | None:
    """The commit of what is measured: results and tables that benches wrote before do not make it dirty."""
    found = commit()
    written = (f":(exclude){path}" for path in (RESULTS, MEASUREMENTS))
    others = ["git", "-C", str(RESULTS.parent), "status", "--porcelain", "--", ":/", *written]
    if found is None or subprocess.run(others, capture_output=True, text=True).stdout:
        return found
    return found.removesuffix("-dirty")


def program() -> str:
    """What this process runs, as one types it in the root of the checkout."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec is not None else ""
    return f"python -m {module}" if module else shlex.join(["python", Path(sys.argv[0]).name])


def command() -> str:
    """The program with its arguments, as typed; of a path from the root of a machine, the last name alone."""
    typed = (Path(each).name if Path(each).is_absolute() else each for each in sys.argv[1:])
    return " ".join([program(), *map(shlex.quote, typed)])


def machine() -> dict[str, Any]:
    """The processor, how busy it was, and the accelerators that jax sees."""
    import jax

    from podium.hosts.platform import prepare_platform

    prepare_platform()
    accelerators = [device.device_kind for device in jax.devices() if device.platform != "cpu"]
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1_min": round(os.getloadavg()[0], 2),
        "accelerators": accelerators,
    }


def cpu_model() -> str:
    """The processor's name; several processors share one, so what it can do that decides speed here stands behind."""
    path = Path("/proc/cpuinfo")
    found: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in found.get("flags", "").split()]
    return " ".join([found.get("model name", platform.processor() or platform.machine()), *flags])
