"""The `podium plan` command: plan a run for one or more machines and print the result.

The result goes to stdout, as text or, with --json, as exactly one object; everything else goes to stderr. Exit status:
0 the run fits (at least one of several plans), 1 nothing fits, 2 wrong settings or usage, 3 the compiler failed.
"""

import dataclasses
import functools
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from podium.accelerators import Accelerator
from podium.config.document import dump_value
from podium.config.load import Override
from podium.files import to_json
from podium.observe.out_files import check_new, check_page
from podium.plan.calibration import find_machine
from podium.plan.compiled.compile_progress import follow
from podium.plan.planner import make_plan
from podium.plan.report.deviation import check_object, check_run
from podium.plan.report.fit_sections import fit_sections
from podium.plan.report.formatting import parted, probe_text, verdict_line
from podium.plan.report.html_page import write_page
from podium.plan.report.json_answer import Object, comparison_object, plan_object, search_object
from podium.plan.report.report import WIDTH, print_sections
from podium.plan.report.sections import (
    SHOWN,
    Line,
    ReportSection,
    auto_sections,
    check_section,
    comparison_sections,
    plan_sections,
    search_section,
)
from podium.plan.report.write import write_config
from podium.plan.request.defaults import Load, given, with_defaults
from podium.plan.request.phase_sizes import Planned
from podium.plan.request.topology import check_compiler
from podium.plan.result import Peak, Plan
from podium.plan.search.compare_plans import ranked
from podium.plan.search.fit import Fit, Fitted
from podium.plan.search.memory_probe import Prober
from podium.plan.search.rank_machines import AUTO, rank
from podium.plan.search.search import search
from podium.plan.search.study import Case, Change, Outcome, RunCost, Study, cost_of
from podium.plan.search.suggest import suggestions
from podium.plan.search.tunable_settings import candidates, search_range
from podium.prices import Price, load_prices
from podium.run.divisible import check_divisible

FITS, TOO_LARGE = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of the command."""

    on: str  # machine names separated by commas, or auto
    subject: str = ""  # configs or a model, as the user wrote them
    model: str | None = None  # the model to plan with default settings, without a config
    fast: bool = False
    lengths: str = "gsm8k"
    lengths_known: bool = True  # whether the user chose `lengths`
    steps: int | None = None  # steps to show the cost of; None: the config's number
    prices: Path | None = None
    as_json: bool = False
    html: Path | None = None
    files: Sequence[str] = ()  # the configs
    settings: Sequence[str] = ()  # of --set
    search: str | None = None
    compare: str | None = None
    suggest: bool | None = None  # None: always estimate; compile only if that is quick
    fit: bool = False
    write: Path | None = None  # file for the settings that fit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The output: one JSON object, or sections. The HTML page also has the folded sections, under their labels."""

    outcomes: Sequence[Outcome]
    value: Object
    sections: Sequence[ReportSection]
    folded: Mapping[str, Sequence[ReportSection]] = dataclasses.field(default_factory=dict)


def plan_command(request: PlanRequest, load: Load) -> int:
    """Run `podium plan`; returns the exit status.

    Raises:
        ValueError: the request is invalid; a ConfigError if its settings are.
        CompilerError: the compiler failed.
    """
    mark = f"podium plan: {request.subject} on {request.on}"
    if request.html is not None:
        check_page(request.html, "--html", mark)
    run = _Run(request, load, load_prices(request.prices))
    answer = _auto(run) if request.on == AUTO else _on_machines(run)
    if request.html is not None:
        title = f"podium plan: {answer.outcomes[0].plan.config}"
        write_page(request.html, title, answer.sections, answer.folded, mark=mark)
    _print(answer.value, answer.sections, as_json=request.as_json)
    return TOO_LARGE if all(each.plan.verdict == "does_not_fit" for each in answer.outcomes) else FITS


def check_command(run: Path, *, as_json: bool) -> int:
    """Tabulate a run's planned and measured figures; returns the exit status. Raises ValueError if they are missing."""
    rows = check_run(run)
    _print(check_object(run.name, rows), [check_section(rows)], as_json=as_json)
    return FITS


class _Run:
    """The run of a request: loads its settings for each machine, and makes its plans."""

    def __init__(self, request: PlanRequest, load: Load, prices: Mapping[str, Price]) -> None:
        self.request = request
        self.load = load
        self.prices = prices
        self.study = Study(self.plan, fast=request.fast, cost=self.cost)
        self.stderr = Console(stderr=True)
        self._bases: dict[Accelerator, tuple[Load, tuple[Override, ...]]] = {}

    def base(self, machine: Accelerator) -> tuple[Load, tuple[Override, ...]]:
        """The loader of settings for a machine, and the defaults assumed for a model that has no config."""
        if machine not in self._bases:
            self._bases[machine] = with_defaults(self.load, self.request.model, machine, self.request.lengths)
        return self._bases[machine]

    def planned(self, case: Case) -> Planned:
        """The run of a case.

        Raises ConfigError if its settings contradict each other, ValueError if they do not fit the machine.
        """
        load, _ = self.base(case.machine)
        return Planned.of(load([change.override for change in case.changes]).config, case.machine)

    def cost(self, case: Case, plan: Plan) -> RunCost | None:
        """The cost of the requested number of steps; None if the plan has no seconds."""
        return cost_of(plan, self.request.steps or self.planned(case).config.steps, self.prices)

    def plan(
        self,
        case: Case,
        *,
        fast: bool,
        whole: Sequence[str] = (),
        lengths: str | None = None,
        largest: bool = False,
    ) -> Plan:
        """Plan a case; show the compiler's progress on stderr.

        Args:
            case: what to plan.
            fast: use only the closed form.
            whole: programs to generate machine code for.
            lengths: lengths to plan with instead of the request's; the programs compiled for those are reused.
            largest: compile only the largest program of each phase.

        Raises:
            ValueError: the settings contradict each other or do not fit the machine's mesh.
        """
        run, machine = self.planned(case), case.machine
        check_divisible(run.sizes.spec)
        drawn = lengths or self.request.lengths
        if fast:
            return make_plan(run, fast=True, lengths=drawn)
        with self.stderr.status(f"planning for {machine.name}") as status:
            estimated = None if lengths else lambda: self.plan(case, fast=True)
            tell = follow(machine.name, self.say, status.update, estimated)
            return make_plan(run, lengths=drawn, progress=tell, whole=whole, largest=largest)

    def probe(self, case: Case, phases: Sequence[str]) -> list[Peak]:
        """Compile the largest program of each of these phases; show progress on stderr."""
        machine = case.machine
        with self.stderr.status(f"compiling {' and '.join(phases)} for {machine.name}") as status:
            tell = follow(machine.name, self.say, status.update, None)
            found = Prober(self.request.lengths, fast=False, progress=tell).each(self.planned(case), phases)
        for peak in found:
            self.say(f"{' '.join(map(str, case.changes)) or 'unchanged'}: {probe_text(peak, machine.hbm_bytes)}")
        return found

    def fitted(self, case: Case, *, all_others: bool) -> Fitted:
        """Find the fastest settings that fit; see `Fit.find`."""
        load, _ = self.base(case.machine)
        fixed, lengths = given(load(())), self.request.lengths
        study = dataclasses.replace(self.study, planner=functools.partial(self.plan, largest=True))
        fit = Fit(study=study, now=case, planned=self.planned, lengths=lengths, fixed=fixed, probe=self.probe)
        return fit.find(all_others=all_others)

    def say(self, text: str) -> None:
        """Print a progress line on stderr."""
        self.stderr.print(Text(text, style="dim"), soft_wrap=True)

    def warned(self, outcome: Outcome) -> Outcome:
        """Return the outcome; print a warning first if its verdict is too close to call."""
        if outcome.plan.verdict == "too_close":
            self.stderr.print(Text(f"warning: {verdict_line(outcome.plan)}", style="yellow"), soft_wrap=True)
        return outcome


def _on_machines(run: _Run) -> Answer:
    """Plan the run for the named machines."""
    request = run.request
    cases = [Case(find_machine(name)) for name in dict.fromkeys(request.on.split(","))]
    asked = [name for name in ("search", "compare", "fit") if getattr(request, name)]
    if len(asked) > 1:
        raise ValueError(f"--{asked[0]} and --{asked[1]} cannot be combined; give only one")
    if request.suggest and (asked or len(cases) > 1):
        raise ValueError("--suggest works on one plan for one machine; drop it, or --search, --compare and --fit")
    if request.write is not None:
        if not request.fit or len(cases) > 1:
            raise ValueError("--write writes the settings that --fit finds for one machine; add --fit, or drop it")
        check_new(request.write, "--write")
    alone = len(cases) == 1 and not (request.search or request.compare)
    for case in cases:
        _check(run, case, alone=alone)
    if request.search:
        return _searches(run, request.search, cases)
    if request.fit:
        return _fits(run, cases)
    return _single(run, cases[0]) if alone else _comparison(run, cases)


def _check(run: _Run, case: Case, *, alone: bool) -> None:
    """Check the settings of a single case, then that the machine's compiler is installed.

    Settings come first: a user should not have to install a compiler to learn that they are wrong.

    Raises:
        ValueError: the settings do not fit the machine, the model is unknown, or the compiler is missing.
    """
    run.base(case.machine)
    if alone:
        check_divisible(run.planned(case).sizes.spec)
    if not run.request.fast:
        check_compiler(case.machine)


def _single(run: _Run, case: Case) -> Answer:
    """One plan for one machine."""
    request = run.request
    outcome = run.warned(run.study.of(case))
    suggested = fitted = None
    if request.suggest is not False:
        if outcome.plan.verdict == "fits":
            suggested = _suggested(run, outcome)
        else:
            fitted = run.fitted(case, all_others=False)
    longest = None
    if not request.lengths_known:
        longest = run.plan(case, fast=request.fast, lengths=f"fixed:{run.planned(case).config.rollout.max_new_tokens}")
    first, *rest = plan_sections(outcome, suggested, longest, fitted)
    found = fit_sections(fitted) if fitted else []
    return Answer(
        outcomes=[outcome],
        value=plan_object(outcome, suggested, longest, fitted),
        sections=[first, *_first_lines(run, outcome), *found, *rest],
    )


def _suggested(run: _Run, outcome: Outcome) -> list[Outcome]:
    """Changes that help a run that fits, best first."""
    now, planned = outcome.case, run.planned(outcome.case)

    def compile_s(change: Change) -> float:
        """Seconds that the compiler took for the phases a change affects."""
        prober = Prober(run.request.lengths, fast=False)
        moved = prober.phases([planned, run.planned(now.but(change))])
        return sum(phase.compile_s or 0.0 for phase in outcome.plan.phases if phase.name in moved)

    return suggestions(
        run.study,
        candidates(planned),
        outcome.plan,
        now,
        compile_all=run.request.suggest,
        compile_s=compile_s,
    )


def _first_lines(run: _Run, outcome: Outcome) -> list[ReportSection]:
    """The lines after the first: a warning if compiled plan and closed form disagree; without a config, settings and
    the next command.
    """
    request = run.request
    machine = outcome.case.machine
    plan = outcome.plan
    lines: list[Line] = []
    if not plan.estimate_only and (warning := parted(plan, run.plan(outcome.case, fast=True))):
        lines.append(Line(text=warning))
    _, defaults = run.base(machine)
    if defaults:
        chosen = " ".join(f"{key}={dump_value(value)}" for key, value, _ in defaults[1:])
        lines.append(Line(text=f"settings (change them with --set, or write them with --fit --write FILE): {chosen}"))
        if plan.verdict != "fits":
            lines.append(Line(text=_next(run, machine, "--fit")))
        elif request.fast:
            lines.append(Line(text=_next(run, machine, "--compile")))
    return [ReportSection("", tuple(lines))] if lines else []


def _next(run: _Run, machine: Accelerator, *options: str) -> str:
    """The next command, with the user's settings."""
    request = run.request
    settings = [f"--set {shlex.quote(each)}" for each in request.settings]
    return " ".join(("next: podium plan", request.subject, "--on", machine.name, *settings, *options))


def _fits(run: _Run, cases: Sequence[Case]) -> Answer:
    """The fastest settings that fit each machine; written to a file if requested."""
    outcomes: list[Outcome] = []
    values: list[Object] = []
    sections: list[ReportSection] = []
    for case in cases:
        found = run.fitted(case, all_others=True)
        outcome = found.best or run.study.of(case, fast=True)
        outcomes.append(outcome)
        values.append(plan_object(outcome, fitted=found))
        sections += [*fit_sections(found, alone=True), *plan_sections(outcome)[1:]]
        if found.best is not None and run.request.write is not None:
            _write(run, found.best, run.request.write)
    return Answer(outcomes=outcomes, value=values[0] if len(values) == 1 else {"plans": values}, sections=sections)


def _write(run: _Run, best: Outcome, path: Path) -> None:
    """Write a config of the settings that fit."""
    request, case = run.request, best.case
    load, defaults = run.base(case.machine)
    keys = [*(each.key for each in defaults), *sorted(given(load(()))), *(each.key for each in case.changes)]
    command = " ".join(["podium plan", request.subject, "--on", case.machine.name, "--fit"])
    write_config(
        path, request.files, run.planned(case).config.document(), keys, f"{command}: {verdict_line(best.plan)}"
    )
    run.say(f"wrote {path}")


def _auto(run: _Run) -> Answer:
    """Rank the cheapest machines for a run."""
    request = run.request
    if request.search or request.compare or request.suggest or request.html or request.fit:
        raise ValueError("--on auto ranks machines; name one for --search, --compare, --suggest, --fit and --html")
    run.load([], base=[f"model={request.model}", "tasks=[{name: gsm8k}]"] if request.model else [])
    found = rank(run.study)
    notes = [*found.not_compiled, f"prices: {request.prices or 'podium/prices.yaml'}, each with its source and date"]
    if found.outcomes:
        notes.append(_next(run, found.outcomes[0].case.machine, *(["--compile"] if request.model else [])))
    shown = found.outcomes[:SHOWN]
    return Answer(outcomes=shown, value=comparison_object(shown), sections=auto_sections(found, notes))


def _searches(run: _Run, key: str, cases: Sequence[Case]) -> Answer:
    """Search the largest value that fits on each machine.

    Raises ValueError for several keys.
    """
    if "," in key:
        raise ValueError(f"--search {key}: takes one key; --fit finds the fastest settings that fit, over all keys")
    values: list[Object] = []
    sections: list[ReportSection] = []
    outcomes: list[Outcome] = []
    for case in cases:
        outcome, section, found = _largest(run, key, case)
        values.append(plan_object(run.warned(outcome)) | {"search": found})
        sections += [section, *plan_sections(outcome)]
        outcomes.append(outcome)
    return Answer(outcomes=outcomes, value=values[0] if len(values) == 1 else {"plans": values}, sections=sections)


def _largest(run: _Run, key: str, case: Case) -> tuple[Outcome, ReportSection, Object]:
    """The largest value that fits (the smallest if none does), with the section and the object of the search."""
    machine, fast = case.machine, run.request.fast
    values = search_range(key, run.planned(case))

    @functools.cache
    def changed(value: int) -> Planned:
        return run.planned(case.but(Change(key=key, value=value)))

    with run.stderr.status(f"searching {key} for {machine.name}") as status:
        tell = follow(machine.name, run.say, status.update, None)
        prober = Prober(run.request.lengths, fast, tell)
        phases = prober.phases([changed(values.unit), changed(values.most // values.unit * values.unit)])

        def probe(wanted: Sequence[int]) -> list[Peak]:
            found = prober([changed(value) for value in wanted], phases)
            for value, peak in zip(wanted, found, strict=True):
                run.say(f"{key}={value}: {probe_text(peak, machine.hbm_bytes)}")
            return found

        @functools.cache
        def estimated_bytes(value: int) -> int:
            return prober.estimated(changed(value), phases).bytes

        found = search(key, values, closed_form=estimated_bytes, probe=probe, hbm_bytes=machine.hbm_bytes)
    value = found.best or min(found.tried)
    chosen = case.but(Change(key=key, value=value))
    whole = () if fast or not found.best else tuple(prober.programs(changed(value), phases))
    plan = run.plan(chosen, fast=fast, whole=whole)
    outcome = Outcome(case=chosen, known=plan, cost=run.cost(chosen, plan))
    return outcome, search_section(found), search_object(found)


def _comparison(run: _Run, cases: Sequence[Case]) -> Answer:
    """Every value on every machine, best first; cases that cannot be planned are listed with the reason."""
    changes = _compared(run.request.compare) if run.request.compare else [()]
    found = run.study.decide(case.but(*each) for case in cases for each in changes)
    refused = [each for each in found if each.known is None]
    planned = [run.warned(each) for each in found if each.known is not None]
    if not planned:
        raise ValueError("\n".join(f"{each.label}: {each.error}" for each in refused))
    best_first = ranked(planned)
    return Answer(
        outcomes=best_first,
        value=comparison_object(best_first, refused),
        sections=comparison_sections(best_first, refused),
        folded={each.label: plan_sections(each) for each in best_first},
    )


def _compared(text: str) -> list[tuple[Change]]:
    """The changes of `KEY=a,b,c`, or of `KEY=a;b;c` if values contain commas. Raises ValueError otherwise."""
    key, equals, values = text.partition("=")
    parts = [part.strip() for part in values.split(";" if ";" in values else ",") if part.strip()]
    if not equals or not key.strip() or not parts:
        raise ValueError(
            f"--compare {text}: write KEY=a,b,c, as rollout.layout=replicated,legacy; separate values that contain"
            " commas with semicolons, as in 'mesh=auto;fsdp:4,tp:2'"
        )
    return [(Change(key=key.strip(), value=part, written=True),) for part in dict.fromkeys(parts)]


def _print(value: Object, sections: Sequence[ReportSection], *, as_json: bool) -> None:
    """Print the answer. Output to a file is not narrowed to a terminal's width."""
    if as_json:
        sys.stdout.write(to_json(value, indent=2) + "\n")
    else:
        print_sections(sections, Console() if sys.stdout.isatty() else Console(width=WIDTH))
