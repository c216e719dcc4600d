"""Settings that fit, found for runs that do not: `podium plan --fit` on machines that are not there.

    python -m benches.fit [CASE ...]                 (half a minute to three minutes of two cores a case)

Each case is a model, a machine and lengths with settings that do not fit. The search may change what the run learns
only if nothing else fits. A row says whether the settings that it found fit once they are compiled, how many programs
the search and the plan at its end compiled, each case with an empty cache, what estimating and tracing took before the
first of them, and the seconds of a step, estimated and compiled. Cases that have not run are named. Writes
benches/results/fit-planned.json and its part of docs/planner.md; exit status 1 if a case has no settings that fit.
"""

import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benches.record import ROOT, arguments, children_cpu_s, record, recorded, write_section
from podium.accelerators import GIB, find_accelerator
from podium.plan.compiled.compile import cache_folder
from podium.plan.request.candidate import Case
from podium.plan.request.plan_subject import Subject
from podium.plan.result import Peak
from podium.plan.search.fit import Fit
from podium.plan.search.study import Study

NAME = "fit-planned"
NONE = ("train.remat=none", "train.rows_per_device=16")
LONG = ("rollout.max_new_tokens=7680", "rollout.slots=256")
CASES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    # name: the model, the machine, lengths, settings
    "0.5B, v5e-1": ("Qwen/Qwen2.5-0.5B-Instruct", "v5litepod-1", "gsm8k", ("train.rows_per_device=64",)),
    "0.6B, v5e-1": ("Qwen/Qwen3-0.6B", "v5litepod-1", "gsm8k", ("train.rows_per_device=16",)),
    "1B, v5e-4": (
        "meta-llama/Llama-3.2-1B-Instruct",
        "v5litepod-4",
        "fixed:2048",
        ("rollout.max_new_tokens=2048", *NONE),
    ),
    "1.5B, v6e-1": ("Qwen/Qwen2.5-1.5B-Instruct", "v6e-1", "gsm8k", ("train.rows_per_device=8",)),
    "1.7B, v4-8": ("Qwen/Qwen3-1.7B", "v4-8", "fixed:4096", ("rollout.max_new_tokens=4096", *NONE)),
    "3B, v6e-8, 64 rows": (
        "Qwen/Qwen2.5-3B-Instruct",
        "v6e-8",
        "fixed:2048",
        ("rollout.max_new_tokens=2048", "rollout.slots=512", "prompts_per_step=64", "train.rows_per_device=64"),
    ),
    "3B, v6e-4": ("Qwen/Qwen2.5-3B-Instruct", "v6e-4", "gsm8k", ("train.remat=none", "train.rows_per_device=8")),
    "3B, h100-1": ("Qwen/Qwen2.5-3B-Instruct", "h100-1", "gsm8k", ("train.rows_per_device=64",)),
    "4B, v5e-8": ("Qwen/Qwen3-4B", "v5litepod-8", "gsm8k", ("train.rows_per_device=16",)),
    "7B, v6e-4, 8k": ("Qwen/Qwen2.5-7B-Instruct", "v6e-4", "fixed:7680", LONG),
    "7B, v6e-8": ("Qwen/Qwen2.5-7B-Instruct", "v6e-8", "gsm8k", ("train.rows_per_device=8", "train.remat=products")),
    "8B, v6e-8": (
        "Qwen/Qwen3-8B",
        "v6e-8",
        "gsm8k",
        ("rollout.slots=512", "prompts_per_step=64", "train.rows_per_device=16"),
    ),
    "8B, v6e-1": ("Qwen/Qwen3-8B", "v6e-1", "gsm8k", ()),
    "8B LoRA, v6e-1": ("Qwen/Qwen3-8B", "v6e-1", "gsm8k", ("lora.rank=32", "rollout.slots=256")),
    "Gemma 1B, v5e-1": ("google/gemma-3-1b-it", "v5litepod-1", "gsm8k", ()),
    "Mistral 7B, v6e-4": ("mistralai/Mistral-7B-Instruct-v0.3", "v6e-4", "gsm8k", ()),
    "7B LoRA, l4-1": ("Qwen/Qwen2.5-7B-Instruct", "l4-1", "gsm8k", ("lora.rank=32",)),
    "7B LoRA, rtx4090-1": ("Qwen/Qwen2.5-7B-Instruct", "rtx4090-1", "gsm8k", ("lora.rank=32",)),
    "9B LoRA, v6e-4": ("Qwen/Qwen3.5-9B", "v6e-4", "gsm8k", ("lora.rank=32", "train.remat=products")),
    "30B-A3B LoRA, v6e-4": (
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "v6e-4",
        "gsm8k",
        ("lora.rank=8", "rollout.slots=256"),
    ),
}
HEADS = (
    "model, machine",
    "as given",
    "settings that fit",
    "needs, GiB",
    "step, s",
    "programs",
    "CPU, s",
    "before compiling",
)


def given(name: str) -> list[str]:
    """The settings of a case."""
    model, _, _, settings = CASES[name]
    return [f"model={model}", "tasks=[{name: gsm8k}]", "prompts_per_step=16", *settings]


class Counted(Study):
    """A study that keeps the programs that were compiled by themselves, and when the first of them was."""

    probed: tuple[str, ...] = ()
    uncompiled_cpu_s: float | None = None
    """CPU seconds of this process and its children when the first program is compiled."""

    def peaks(self, asked: Sequence[tuple[Case, Sequence[str]]]) -> list[Peak]:
        """The peak memory of each case in its phases."""
        if self.uncompiled_cpu_s is None:
            self.uncompiled_cpu_s = cpu_s()
        self.probed += tuple(name for case, phases in asked for name in self.programs(case, phases))
        return super().peaks(asked)


def measure(name: str) -> dict[str, Any]:
    """One line of the table."""
    _, machine, lengths, _ = CASES[name]
    settings, accelerator = given(name), find_accelerator(machine)
    study = Counted(Subject(settings=settings), lengths=lengths)
    began, cpu = time.monotonic(), cpu_s()
    found = Fit(study=study, now=Case(accelerator), fixed=()).find(all_others=False)
    best = found.best
    before_s = None if study.uncompiled_cpu_s is None else study.uncompiled_cpu_s - cpu
    spent = {"seconds": time.monotonic() - began, "cpu_s": cpu_s() - cpu, "cpu_s_before_compiling": before_s}
    before = {"verdict": found.before.verdict, "phase": found.before.worst.name, "gib": found.before.worst.bytes / GIB}
    compiled = len(list((cache_folder() / "programs").glob("*.json")))
    row: dict[str, Any] = {"given": settings, "before": before, "lengths": lengths, "compiled_programs": compiled}
    row["of_the_search"] = list(study.probed)
    row |= spent
    tried = [each._asdict() | {"changes": [str(change) for change in each.changes]} for each in found.tried]
    row |= {"estimated": found.estimated, "tried": tried, "settings": None}
    if best is None:
        return row
    estimate = study.plan(best.case, closed_form=True)
    assert best.plan.step is not None and estimate.step is not None
    return row | {
        "settings": [str(change) for change in best.case.changes],
        "learned": [str(change) for change in found.learned],
        "verdict": best.plan.verdict,
        "compiled": not best.plan.estimate_only,
        "gib": best.plan.worst.bytes / GIB,
        "hbm_gib": accelerator.hbm_bytes / GIB,
        "step_s": best.plan.step.value,
        "step_s_estimated": estimate.step.value,
    }


def cpu_s() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime + children_cpu_s()


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for name, row in found.items():
        before = f"{row['before']['phase']} {row['before']['gib']:.1f} GiB"
        early = row.get("cpu_s_before_compiling")
        counted = [str(row["compiled_programs"]), f"{row['cpu_s']:.0f}", "" if early is None else f"{early:.0f}"]
        if row["settings"] is None:
            lines.append(f"| {' | '.join([name, before, 'none fit', '', '', *counted])} |")
            continue
        settings = ", ".join(f"`{each}`" for each in row["settings"])
        learned = " (changes what is learned)" if row["learned"] else ""
        size = f"{row['gib']:.1f} of {row['hbm_gib']:.1f}"
        step = f"{row['step_s']:.1f} ({row['step_s_estimated']:.1f} estimated)"
        cells = [name, before, settings + learned, size, step, *counted]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE", help="; ".join(CASES))
    args = parser.parse_args()
    known: dict[str, dict[str, Any]] = recorded(NAME, "cases", args.results) or {}
    found: dict[str, dict[str, Any]] = {}
    fits: dict[str, bool] = {}
    for name in args.cases or CASES:
        with tempfile.TemporaryDirectory(prefix="podium-fit-") as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            known[name] = measure(name)
        print(f"{name}: {known[name]}", flush=True)
        found = {name: known[name] for name in CASES if name in known}
        fits = {name: row["settings"] is not None and row["verdict"] == "fits" for name, row in found.items()}
        waiting = [name for name in CASES if name not in found]
        record(NAME, {"cases": found, "fits": fits, "not_run": waiting}, args.results, packages=["libtpu"])
    write_section(ROOT / "docs" / "planner.md", "fit", table(found), args.results)
    print(*table(found), sep="\n")
    sys.exit(not all(fits.values()))


if __name__ == "__main__":
    main()
