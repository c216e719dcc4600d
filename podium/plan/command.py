"""The `plan` command: what is to be planned, with what, and what is printed where.

The answer goes to stdout, as text or with --json as exactly one object; all else to stderr. Exit status: 0 it fits (of
several, one does), 2 nothing fits, 1 the question was wrong, 3 the compiler failed.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from podium.accelerators import Accelerator, find_accelerator
from podium.config.load import Override
from podium.config.schema import Config
from podium.files import to_json
from podium.models.params import check_divisible
from podium.models.presets import find_decoder
from podium.plan.auto import AUTO, SHOWN, headline, rank, table
from podium.plan.check import check_object, check_run
from podium.plan.compare import PlanEntry, Refused, cost_of, ranked
from podium.plan.defaults import Load, with_defaults
from podium.plan.formatting import probe_text, verdict_line
from podium.plan.json_answer import Object, comparison_object, plan_object, search_object, tune_object
from podium.plan.page import check_page, write_page
from podium.plan.planner import make_plan
from podium.plan.probe import Prober
from podium.plan.progress import follow
from podium.plan.report import WIDTH, print_sections
from podium.plan.result import Plan, Probe
from podium.plan.search import (
    Change,
    SearchResult,
    Trial,
    candidates,
    or_adapters,
    promising,
    search,
    search_range,
    suggest,
)
from podium.plan.sections import (
    Line,
    ReportSection,
    auto_sections,
    check_section,
    comparison_sections,
    plan_sections,
    search_section,
    tune_section,
)
from podium.plan.sizes import RunSizes, make_sizes
from podium.plan.topology import check_compiler
from podium.plan.tune import Settings, TuneResult, tune, tune_grid
from podium.prices import Price, load_prices

FITS, TOO_LARGE = 0, 2
QUICK_S = 60.0  # of compilation, up to which a change is compiled that nobody asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of the command."""

    on: str  # machines, separated by commas, or auto
    subject: str = ""  # configs or a model, as the user wrote them
    model: str | None = None  # what is planned with default settings, where there is no config
    fast: bool = False
    lengths: str = "gsm8k"
    lengths_known: bool = True  # whether the user said them
    steps: int | None = None  # whose cost is shown; None: the config's
    prices: Path | None = None
    as_json: bool = False
    html: Path | None = None
    search: str | None = None
    budget: int = 4  # plans that a search over several settings may compile
    compare: str | None = None
    suggest: bool | None = None  # None: by the closed form, and with the compiler where that is quick or needed


def plan_command(request: PlanRequest, load: Load) -> int:
    """Answer a question about a config; the exit status.

    Raises:
        ValueError: the question is wrong: a ConfigError where its settings are.
        CompilerError: the compiler failed.
    """
    if request.on == AUTO:
        return _auto(request, load)
    machines = [find_accelerator(name) for name in dict.fromkeys(request.on.split(","))]
    if request.search and request.compare:
        raise ValueError("--search and --compare cannot be combined; give only one")
    if request.suggest and (request.search or request.compare or len(machines) > 1):
        raise ValueError("--suggest works on one plan for one machine; drop it, or --search and --compare")
    if request.html is not None:
        check_page(request.html)
    prices, stderr = load_prices(request.prices), Console(stderr=True)
    plannings = [_planning(request, load, machine, prices, stderr) for machine in machines]
    for planning in plannings:
        planning.check(alone=len(plannings) == 1 and not (request.search or request.compare))
    if request.search:
        return _search(request.search, plannings)
    if request.compare or len(machines) > 1:
        return _compare(plannings, _settings(request.compare) if request.compare else [""])
    return _single(plannings[0])


def _planning(
    request: PlanRequest, load: Load, machine: Accelerator, prices: dict[str, Price], stderr: Console
) -> "_Planning":
    """A request for one machine; of a model without a config, with the settings that fit it."""
    load, defaults = with_defaults(load, request.model, machine)
    return _Planning(request, load, machine, prices, stderr, defaults)


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
    defaults: tuple[str, ...] = ()  # settings that nobody wrote

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return self.load([]).config

    @property
    def next_steps(self) -> list[ReportSection]:
        """What to do with an estimate for a model: the settings that were assumed, and the command that compiles."""
        if not self.defaults:
            return []
        assumed = f"settings (change them with --set, or write them to a file): {' '.join(self.defaults[1:])}"
        compiles = f"podium plan {self.request.subject} --on {self.accelerator.name} --compile"
        lines = [Line(text=assumed)] + [Line(text=f"next: {compiles}")] * self.request.fast
        return [ReportSection("", tuple(lines))]

    def check(self, *, alone: bool) -> None:
        """Raises ValueError where the settings do not fit the machine (of several answers, only one may be refused so),
        and then where its compiler is missing: nobody should install one for settings that are wrong.
        """
        if alone:
            check_divisible(self.config, find_decoder(self.config), self.accelerator)
        if not self.request.fast:
            check_compiler(self.accelerator)

    def vary(self, change: Change) -> Config:
        """The settings with one changed. Raises ConfigError where it contradicts others."""
        return self.load([Override(change.key, change.value, f"podium plan, {change}")]).config

    def sizes(self, config: Config) -> RunSizes:
        """The numbers of a run on the machine."""
        return make_sizes(config, find_decoder(config), self.accelerator)

    def make(self, config: Config, *, fast: bool = False, whole: Sequence[str] = (), lengths: str = "") -> Plan:
        """The plan that was asked for, or the closed form's; how its compilation goes on is shown on stderr.

        Code is generated of the programs named `whole`.

        Raises:
            ValueError: the config does not fit the machine's mesh.
        """
        check_divisible(config, find_decoder(config), self.accelerator)
        again = bool(lengths)  # what was compiled before, at other lengths
        lengths = lengths or self.request.lengths
        if fast or self.request.fast:
            return make_plan(config, self.accelerator, fast=True, lengths=lengths)
        with self.stderr.status(f"planning for {self.accelerator.name}") as status:
            estimated = None if again else lambda: self.make(config, fast=True)
            tell = follow(self.accelerator.name, self._say, status.update, estimated)
            return make_plan(config, self.accelerator, lengths=lengths, progress=tell, whole=whole)

    def _say(self, text: str) -> None:
        self.stderr.print(Text(text, style="dim"), soft_wrap=True)

    def make_changed(self, change: Change) -> Plan:
        """The plan of the settings with one changed."""
        return self.make(self.vary(change))

    def entry(self, plan: Plan, config: Config, setting: str = "") -> PlanEntry:
        """A plan with its cost; a verdict that is too close gets a warning."""
        if plan.verdict == "too_close":
            self.stderr.print(Text(f"warning: {verdict_line(plan)}", style="yellow"), soft_wrap=True)
        cost = cost_of(plan, self.request.steps or config.steps, self.prices)
        return PlanEntry(plan=plan, cost=cost, setting=setting)

    def suggestions(self, config: Config, plan: Plan) -> list[Trial] | None:
        """Changes that help, best first, by the closed form: all compiled where that was asked for or the run does not
        fit, else the best one, if that is quick. None where they were not to be looked for.
        """
        if self.request.suggest is False:
            return None
        estimated = self.make(config, fast=True)

        def estimate(change: Change) -> Plan:
            return self.make(self.vary(change), fast=True)

        changes = promising(candidates(config, self.sizes(config)), estimated, estimate)
        changes = or_adapters(changes, config, estimated, estimate)
        if not self.request.fast and (self.request.suggest or plan.verdict != "fits"):
            return suggest(changes, plan, self.make_changed)
        guessed = suggest(changes, estimated, estimate)
        if self.request.fast or not guessed or self._compile_s(config, guessed[0].change, plan) > QUICK_S:
            return guessed
        return [*suggest([guessed[0].change], plan, self.make_changed), *guessed[1:]]

    def _compile_s(self, config: Config, change: Change, plan: Plan) -> float:
        """Seconds that the compiler took for the phases that a change moves."""
        prober = Prober(self.accelerator, self.request.lengths, fast=False)
        moved = prober.phases([config, self.vary(change)])
        return sum(phase.compile_s or 0.0 for phase in plan.phases if phase.name in moved)

    def longest(self, config: Config) -> Plan | None:
        """The plan with completions as long as they can be; None where the user said how long they are."""
        if self.request.lengths_known:
            return None
        return self.make(config, lengths=f"fixed:{config.rollout.max_new_tokens}")

    def search(self, key: str, config: Config) -> tuple[PlanEntry, SearchResult]:
        """The result of a search, and the plan of its value, compiled to the end; of the smallest if none fits."""
        values = search_range(key, config, self.sizes(config))

        @functools.cache
        def changed(value: int) -> Config:
            return self.vary(Change(key=key, value=value))

        fast = self.request.fast
        with self.stderr.status(f"searching {key} for {self.accelerator.name}") as status:
            tell = follow(self.accelerator.name, self._say, status.update, None)
            prober = Prober(self.accelerator, self.request.lengths, fast, tell)
            phases = prober.phases([changed(values.unit), changed(values.most // values.unit * values.unit)])

            def probe(wanted: Sequence[int]) -> list[Probe]:
                found = prober({value: changed(value) for value in wanted}, phases)
                for each in found:
                    self._say(f"{key}={each.value}: {probe_text(each, self.accelerator.hbm_bytes)}")
                return found

            @functools.cache
            def most_bytes(value: int) -> int:
                return prober.estimated(value, changed(value), phases).bytes

            limit = self.accelerator.hbm_bytes
            found = search(key, values, closed_form=most_bytes, probe=probe, hbm_bytes=limit)
        chosen = found.best or found.probes[0]
        config = changed(chosen.value)
        whole = () if fast or not found.best else tuple(prober.programs(config, phases))
        plan = self.make(config, whole=whole)
        return self.entry(plan, config, f"{key}={chosen.value}"), found


def _tuned(planning: _Planning, keys: Sequence[str]) -> tuple[PlanEntry, TuneResult]:
    """The result of a search over several settings, and the plan of the best."""
    config, request = planning.config, planning.request
    grid, now = tune_grid(keys, config, planning.sizes(config))

    def vary(settings: Settings) -> Config:
        changes = [Override(each.key, each.value, f"podium plan, {each}") for each in settings]
        return planning.load(changes).config

    found = tune(
        grid,
        now,
        estimate=lambda settings: planning.make(vary(settings), fast=True),
        make=None if request.fast else lambda settings: planning.make(vary(settings)),
        budget=request.budget,
    )
    best = found.best
    return planning.entry(best.plan, vary(best.settings), " ".join(map(str, best.settings))), found


def _single(planning: _Planning) -> int:
    """One plan of one machine."""
    config = planning.config
    plan = planning.make(config)
    entry = planning.entry(plan, config)
    suggestions, longest = planning.suggestions(config, plan), planning.longest(config)
    answer = plan_object(entry, suggestions, longest)
    first, *rest = plan_sections(entry, suggestions, longest)
    return _answer(planning.request, [entry], answer, [first, *planning.next_steps, *rest])


def _auto(request: PlanRequest, load: Load) -> int:
    """The cheapest machines for a run."""
    if request.search or request.compare or request.suggest or request.html:
        raise ValueError("--on auto ranks machines; name one for --search, --compare, --suggest and --html")
    prices, stderr = load_prices(request.prices), Console(stderr=True)
    load([], base=[f"model={request.model}", "tasks=[{name: gsm8k}]"] if request.model else [])

    def make(machine: Accelerator, fast: bool) -> PlanEntry:
        planning = _planning(request, load, machine, prices, stderr)
        plan = planning.make(planning.config, fast=fast)
        return PlanEntry(plan=plan, cost=cost_of(plan, request.steps or planning.config.steps, prices))

    found = rank(make, fast=request.fast)
    best = found.entries[:SHOWN]
    notes = [*found.not_compiled, f"prices: {request.prices or 'podium/prices.yaml'}, each with its source and date"]
    if best:
        compiles = " --compile" if request.model else ""
        notes.append(f"next: podium plan {request.subject} --on {best[0].plan.accelerator}{compiles}")
    answer = comparison_object(best, ())
    heads, rows = table(found) if best else ((), ())
    _print(answer, auto_sections(headline(found), heads, rows, notes), as_json=request.as_json)
    return FITS if best else TOO_LARGE


def _search(key: str, plannings: Sequence[_Planning]) -> int:
    """The largest value of a setting that fits, or of several keys the fastest settings that do, on each machine."""
    answers, sections, entries = [], [], []
    for planning in plannings:
        if "," in key:
            entry, tuned = _tuned(planning, [each.strip() for each in key.split(",")])
            section, found = tune_section(tuned), tune_object(tuned)
        else:
            entry, largest = planning.search(key, planning.config)
            section, found = search_section(largest), search_object(largest)
        answers.append(plan_object(entry) | {"search": found})
        sections += [section, *plan_sections(entry)]
        entries.append(entry)
    return _answer(plannings[0].request, entries, answers[0] if len(answers) == 1 else {"plans": answers}, sections)


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
