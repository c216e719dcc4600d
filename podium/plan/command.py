"""The `plan` command: what is to be planned, with what, and what is printed where.

The answer goes to stdout, as text or with --json as exactly one object; all else to stderr. Exit status: 0 it fits (of
several, one does), 2 nothing fits, 1 the question was wrong, 3 the compiler failed.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from podium.accelerators import Accelerator, find_accelerator
from podium.config.load import Loaded, Override
from podium.config.schema import Config
from podium.files import to_json
from podium.models.params import check_divisible
from podium.models.presets import find_architecture
from podium.plan.check import check_object, check_run
from podium.plan.compare import PlanEntry, Refused, cost_of, ranked
from podium.plan.compile import CompileProgress, OnProgress
from podium.plan.estimate import estimate
from podium.plan.formatting import verdict_line
from podium.plan.json_answer import Object, comparison_object, plan_object, search_object
from podium.plan.page import check_page, write_page
from podium.plan.planner import make_plan
from podium.plan.report import WIDTH, print_sections
from podium.plan.result import Plan
from podium.plan.search import (
    Change,
    SearchResult,
    Trial,
    candidates,
    promising,
    search,
    search_range,
    suggest,
)
from podium.plan.sections import ReportSection, check_section, comparison_sections, plan_sections, search_section
from podium.plan.sizes import RunSizes, make_sizes
from podium.plan.topology import check_compiler
from podium.prices import Price, load_prices

FITS, TOO_LARGE = 0, 2

Load = Callable[[Sequence[str | Override]], Loaded]  # the settings, with more of them on top


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of the command."""

    tpu: str  # machines, separated by commas
    fast: bool = False
    lengths: str = "gsm8k"
    steps: int | None = None  # whose cost is shown; None: the config's
    prices: Path | None = None
    as_json: bool = False
    html: Path | None = None
    search: str | None = None
    compare: str | None = None
    suggest: bool | None = None  # None: by the closed form, or with the compiler where the run does not fit


def plan_command(request: PlanRequest, load: Load) -> int:
    """Answer a question about a config; the exit status.

    Raises:
        ValueError: the question is wrong: a ConfigError where its settings are.
        CompilerError: the compiler failed.
    """
    machines = [find_accelerator(name) for name in dict.fromkeys(request.tpu.split(","))]
    if request.search and request.compare:
        raise ValueError("--search and --compare cannot be combined; give only one")
    if request.suggest and (request.search or request.compare or len(machines) > 1):
        raise ValueError("--suggest works on one plan for one machine; drop it, or --search and --compare")
    for machine in machines:
        if machine.compiles and not request.fast:
            check_compiler(machine)
    if request.html is not None:
        check_page(request.html)
    prices, stderr = load_prices(request.prices), Console(stderr=True)
    plannings = [_Planning(request, load, machine, prices, stderr) for machine in machines]
    loaded = load([])
    if request.search:
        return _search(request.search, plannings, loaded.config)
    if request.compare or len(machines) > 1:
        return _compare(plannings, _settings(request.compare) if request.compare else [""])
    return _single(plannings[0], loaded.config)


def check_command(run: Path, *, as_json: bool) -> int:
    """Tabulate a run's planned and measured figures; returns the exit status. Raises ValueError if it cannot."""
    rows = check_run(run)
    _print(check_object(run.name, rows), [check_section(rows)], as_json=as_json)
    return FITS


@dataclasses.dataclass(frozen=True)
class _Planning:
    """A request for one machine."""

    request: PlanRequest
    load: Load
    accelerator: Accelerator
    prices: dict[str, Price]
    stderr: Console

    def vary(self, change: Change) -> Config:
        """The settings with one changed. Raises ConfigError where it contradicts others."""
        return self.load([Override(change.key, change.value, f"podium plan, {change}")]).config

    def sizes(self, config: Config) -> RunSizes:
        """The numbers of a run on the machine."""
        return make_sizes(config, find_architecture(config.model), self.accelerator)

    def make(self, config: Config, *, fast: bool = False) -> Plan:
        """The plan that was asked for, or the closed form's; how its compilation goes on is shown on stderr.

        Raises:
            ValueError: the config does not fit the machine's mesh.
        """
        check_divisible(config, find_architecture(config.model), self.accelerator)
        if fast or self.request.fast:
            return make_plan(config, self.accelerator, fast=True, lengths=self.request.lengths)
        with self.stderr.status(f"planning for {self.accelerator.name}") as status:
            follow = self._follow(status.update, lambda: self.make(config, fast=True))
            return make_plan(config, self.accelerator, lengths=self.request.lengths, progress=follow)

    def _follow(self, update: Callable[[str], None], estimated: Callable[[], Plan]) -> OnProgress:
        """Shows how the compilation of a plan's phases goes on, and what the closed form says meanwhile."""
        machine, running, said = self.accelerator.name, dict[str, float](), list[str]()

        def say(text: str) -> None:
            said.append(text)
            self.stderr.print(Text(text, style="dim"), soft_wrap=True)

        def follow(progress: CompileProgress) -> None:
            counts = f"{progress.done} of {progress.total}"
            if progress.state == "compiling":
                if not said:
                    say(f"estimate while compiling: {verdict_line(estimated())}")
                running[progress.phase] = progress.seconds
            elif progress.state == "compiled":
                running.pop(progress.phase, None)
                say(f"compiled {progress.phase} for {machine} in {progress.seconds:.0f} s ({counts})")
            phases = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in running.items())
            update(f"compiling for {machine}: {phases} ({counts} done)")

        return follow

    def make_changed(self, change: Change) -> Plan:
        """The plan of the settings with one changed."""
        return self.make(self.vary(change))

    def entry(self, plan: Plan, config: Config, setting: str = "") -> PlanEntry:
        """A plan with its cost; a verdict that is too close gets a warning."""
        if plan.verdict == "too_close":
            self.stderr.print(Text(f"warning: {verdict_line(plan)}", style="yellow"), soft_wrap=True)
        cost = cost_of(plan, self.request.steps or config.steps, self.prices)
        return PlanEntry(plan=plan, cost=cost, setting=setting)

    def suggestions(self, config: Config, plan: Plan) -> tuple[list[Trial] | None, str]:
        """Changes that help, each planned as the plan was; where that was not asked for, None and what could be."""
        if self.request.suggest is False:
            return None, ""
        possible = candidates(config, self.sizes(config))
        estimated = self.make(config, fast=True)
        changes = promising(possible, estimated, lambda change: self.make(self.vary(change), fast=True))
        if self.request.suggest or self.request.fast or plan.verdict != "fits":
            return suggest(changes, plan, self.make_changed), ""
        named = ", ".join(map(str, changes))
        return None, f"--suggest compiles what the closed form finds best: {named}" if changes else ""

    def search(self, key: str, config: Config) -> tuple[PlanEntry, SearchResult]:
        """The result of a search, and the plan of the value that it found, or else of the smallest tried."""

        @functools.cache
        def most_bytes(value: int) -> int:
            run = self.sizes(self.vary(Change(key=key, value=value)))
            return max(phase.total for phase in estimate(run))

        found = search(
            key,
            search_range(key, config, self.sizes(config)),
            closed_form=most_bytes,
            make=self.make_changed,
            hbm_bytes=self.accelerator.hbm_bytes,
        )
        chosen = found.best or found.trials[0]
        return self.entry(chosen.plan, self.vary(chosen.change), str(chosen.change)), found


def _single(planning: _Planning, config: Config) -> int:
    """One plan of one machine."""
    plan = planning.make(config)
    entry = planning.entry(plan, config)
    suggestions, hint = planning.suggestions(config, plan)
    answer = plan_object(entry, suggestions or ())
    return _answer(planning.request, [entry], answer, plan_sections(entry, suggestions, hint))


def _search(key: str, plannings: Sequence[_Planning], config: Config) -> int:
    """The largest value of a setting that fits, on each machine."""
    results = [planning.search(key, config) for planning in plannings]
    answers = [plan_object(entry) | {"search": search_object(found)} for entry, found in results]
    sections = [each for entry, found in results for each in (search_section(found), *plan_sections(entry))]
    answer = answers[0] if len(answers) == 1 else {"plans": answers}
    return _answer(plannings[0].request, [entry for entry, _ in results], answer, sections)


def _compare(plannings: Sequence[_Planning], settings: Sequence[str]) -> int:
    """Every setting on every machine, best first; what cannot be planned is listed with its reason."""
    entries, refused = [], []
    for planning in plannings:
        for setting in settings:
            try:
                config = planning.load([setting] if setting else []).config
                entries.append(planning.entry(planning.make(config), config, setting))
            except ValueError as error:  # a ConfigError, a mesh or heads that do not divide: others may
                text = "; ".join(line.strip() for line in str(error).splitlines()) or repr(error)
                refused.append(Refused(tpu=planning.accelerator.name, setting=setting, error=text))
    if not entries:
        raise ValueError("\n".join(f"{each.label}: {each.error}" for each in refused))
    best_first = ranked(entries)
    folded = {entry.label: plan_sections(entry) for entry in best_first}
    answer, sections = comparison_object(best_first, refused), comparison_sections(best_first, refused)
    return _answer(plannings[0].request, best_first, answer, sections, folded)


def _answer(
    request: PlanRequest,
    entries: Sequence[PlanEntry],
    answer: Object,
    sections: Sequence[ReportSection],
    folded: dict[str, list[ReportSection]] | None = None,
) -> int:
    """Print the answer, write the page if one was asked for; the exit status."""
    if request.html is not None:
        write_page(request.html, f"podium plan: {entries[0].plan.config}", sections, folded)
    _print(answer, sections, as_json=request.as_json)
    return TOO_LARGE if all(entry.plan.verdict == "does_not_fit" for entry in entries) else FITS


def _settings(text: str) -> list[str]:
    """The settings of `KEY=a,b,c`, or of `KEY=a;b;c` where values have commas. Raises ValueError for anything else."""
    key, equals, values = text.partition("=")
    parts = [part.strip() for part in values.split(";" if ";" in values else ",") if part.strip()]
    if not equals or not key.strip() or not parts:
        raise ValueError(
            f"--compare {text}: write KEY=a,b,c, as rollout.layout=replicated,legacy; separate values that contain"
            " commas with semicolons, as in 'mesh=auto;fsdp:4,tp:2'"
        )
    return [f"{key.strip()}={part}" for part in dict.fromkeys(parts)]


def _print(answer: Object, sections: Sequence[ReportSection], *, as_json: bool) -> None:
    """The answer on stdout; a file has room for what a narrow terminal has not."""
    if as_json:
        sys.stdout.write(to_json(answer, indent=2) + "\n")
    else:
        print_sections(sections, Console() if sys.stdout.isatty() else Console(width=WIDTH))
