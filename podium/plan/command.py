"""The `podium plan` command: plan a run for one or more machines and print the result.

The result goes to stdout, as text or, with --json, as exactly one object; everything else goes to stderr. Exit status:
0 the run fits (at least one of several plans), 1 nothing fits, 2 wrong settings or usage, 3 the compiler failed.
"""

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from podium.accelerators import Accelerator
from podium.config.document import dump_value
from podium.files import to_json
from podium.observe.out_files import check_new, check_page
from podium.plan.calibration import find_machine
from podium.plan.report.deviation import check_object, check_run
from podium.plan.report.fit_sections import fit_sections
from podium.plan.report.formatting import verdict_line
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
from podium.plan.request.candidate import Case, Change
from podium.plan.request.plan_subject import Subject
from podium.plan.request.topology import check_compiler
from podium.plan.result import By
from podium.plan.search.fit import Fit, Fitted
from podium.plan.search.largest import find_largest
from podium.plan.search.ranking import AUTO, rank_machines, ranked, suggestions
from podium.plan.search.study import Outcome, Study
from podium.prices import load_prices
from podium.run.divisible import check_divisible

FITS, TOO_LARGE = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of the command; at most one of `search`, `compare` and `fit`."""

    subject: Subject
    on: str
    """Machine names separated by commas, or auto."""
    search: str | None = None
    """The setting whose largest value that fits is searched."""
    compare: str | None = None
    """`KEY=a,b,c`: the values to compare."""
    fit: bool = False
    """Whether to search for the fastest settings that fit."""
    write: Path | None = None
    """The file for the settings that fit."""
    suggest: bool | None = None
    """Whether to compile changes that may help; None: always estimate them; compile one only if that is quick."""
    by: By = "compiler"
    lengths: str | None = None
    """None: GSM8K's are assumed."""
    steps: int | None = None
    """Steps to show the cost of; None: the config's number."""
    prices: Path | None = None
    html: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The output: one JSON object, or sections. The HTML page also has the folded sections, under their labels."""

    outcomes: Sequence[Outcome]
    value: Object
    sections: Sequence[ReportSection]
    folded: Mapping[str, Sequence[ReportSection]] = dataclasses.field(default_factory=dict)


def plan_command(request: PlanRequest, *, as_json: bool) -> int:
    """Run `podium plan`; returns the exit status.

    Raises:
        ValueError: the request is invalid; a ConfigError if its settings are.
        CompilerError: the compiler failed.
    """
    mark = f"podium plan: {request.subject} on {request.on}"
    if request.html is not None:
        check_page(request.html, "--html", mark)
    study = Study(
        request.subject,
        lengths=request.lengths or "gsm8k",
        by=request.by,
        steps=request.steps,
        prices=load_prices(request.prices),
    )
    answer = _auto(request, study) if request.on == AUTO else _on_machines(request, study)
    if request.html is not None:
        title = f"podium plan: {answer.outcomes[0].plan.config}"
        write_page(request.html, title, answer.sections, answer.folded, mark=mark)
    _print(answer.value, answer.sections, as_json=as_json)
    return TOO_LARGE if all(each.plan.verdict == "does_not_fit" for each in answer.outcomes) else FITS


def check_command(run: Path, *, as_json: bool) -> int:
    """Tabulate a run's planned and measured figures; returns the exit status. Raises ValueError if they are missing."""
    rows = check_run(run)
    _print(check_object(run.name, rows), [check_section(rows)], as_json=as_json)
    return FITS


def _on_machines(request: PlanRequest, study: Study) -> Answer:
    """Plan the run for the named machines."""
    cases = [Case(find_machine(name)) for name in dict.fromkeys(request.on.split(","))]
    asked = {"search": request.search, "compare": request.compare, "fit": request.fit}
    names = [name for name, value in asked.items() if value]
    if len(names) > 1:
        raise ValueError(f"--{names[0]} and --{names[1]} cannot be combined; give only one")
    if request.suggest and (names or len(cases) > 1):
        raise ValueError("--suggest works on one plan for one machine; drop it, or --search, --compare and --fit")
    if request.write is not None:
        if not request.fit or len(cases) > 1:
            raise ValueError("--write writes the settings that --fit finds for one machine; add --fit, or drop it")
        check_new(request.write, "--write")
    alone = len(cases) == 1 and not (request.search or request.compare)
    for case in cases:
        _check(study, case, alone=alone)
    if key := request.search:
        if "," in key:
            raise ValueError(f"--search {key}: takes one key; --fit finds the fastest settings that fit, over all keys")
        return _joined([_largest(study, key, case) for case in cases])
    if request.fit:
        return _joined([_fit(study, case, request.write) for case in cases])
    return _single(request, study, cases[0]) if alone else _comparison(study, request.compare, cases)


def _check(study: Study, case: Case, *, alone: bool) -> None:
    """Check the settings of a single case, then that the machine's compiler is installed.

    Settings come first: a user should not have to install a compiler to learn that they are wrong.

    Raises:
        ValueError: the settings do not fit the machine, the model is unknown, or the compiler is missing.
    """
    study.defaults(case.machine)
    if alone:
        check_divisible(study.run(case).sizes.spec)
    if not study.fast:
        check_compiler(case.machine)


def _warned(study: Study, outcome: Outcome) -> Outcome:
    """Return the outcome; print a warning first if its verdict is too close to call."""
    if outcome.plan.verdict == "too_close":
        study.say(f"warning: {verdict_line(outcome.plan)}", style="yellow")
    return outcome


def _single(request: PlanRequest, study: Study, case: Case) -> Answer:
    """One plan for one machine."""
    outcome = _warned(study, study.of(case))
    suggested = fitted = None
    if request.suggest is not False:
        if outcome.plan.verdict == "fits":
            suggested = suggestions(study, outcome, compile_all=request.suggest)
        else:
            fitted = _fitted(study, case, all_others=False)
    longest = None
    if request.lengths is None:
        longest = study.plan(case, lengths=f"fixed:{study.run(case).config.rollout.max_new_tokens}")
    first, *rest = plan_sections(outcome, suggested, longest, fitted)
    found = fit_sections(fitted) if fitted else []
    return Answer(
        outcomes=[outcome],
        value=plan_object(outcome, suggested, longest, fitted),
        sections=[first, *_first_lines(study, outcome), *found, *rest],
    )


def _first_lines(study: Study, outcome: Outcome) -> list[ReportSection]:
    """The lines after the first, without a config: settings and the next command."""
    machine = outcome.case.machine
    plan = outcome.plan
    lines: list[Line] = []
    if defaults := study.defaults(machine):
        chosen = " ".join(f"{key}={dump_value(value)}" for key, value, _ in defaults[1:])
        lines.append(Line(text=f"settings (change them with --set, or write them with --fit --write FILE): {chosen}"))
        if plan.verdict != "fits":
            lines.append(Line(text=_next(study.subject, machine, "--fit")))
        elif study.fast:
            lines.append(Line(text=_next(study.subject, machine, "--compile")))
    return [ReportSection("", tuple(lines))] if lines else []


def _next(subject: Subject, machine: Accelerator, *options: str) -> str:
    """The next command, with the user's settings."""
    settings = [f"--set {shlex.quote(each)}" for each in subject.settings]
    return " ".join(("next: podium plan", str(subject), "--on", machine.name, *settings, *options))


def _fitted(study: Study, case: Case, *, all_others: bool) -> Fitted:
    """The fastest settings that fit, with those that the user gave as they are; see `Fit.find`."""
    return Fit(study=study, now=case, fixed=study.given(case.machine)).find(all_others=all_others)


def _fit(study: Study, case: Case, path: Path | None) -> Answer:
    """The fastest settings that fit a machine; written to a file if there is a path."""
    found = _fitted(study, case, all_others=True)
    outcome = found.best or study.of(case, closed_form=True)
    if found.best is not None and path is not None:
        _write(study, found.best, path)
    sections = [*fit_sections(found, alone=True), *plan_sections(outcome)[1:]]
    return Answer(outcomes=[outcome], value=plan_object(outcome, fitted=found), sections=sections)


def _write(study: Study, best: Outcome, path: Path) -> None:
    """Write a config of the settings that fit."""
    subject, case = study.subject, best.case
    defaults, given = study.defaults(case.machine), sorted(study.given(case.machine))
    keys = [*(each.key for each in defaults), *given, *(each.key for each in case.changes)]
    title = f"podium plan {subject} --on {case.machine.name} --fit: {verdict_line(best.plan)}"
    write_config(path, subject.files, study.run(case).config.document(), keys, title)
    study.say(f"wrote {path}")


def _auto(request: PlanRequest, study: Study) -> Answer:
    """Rank the cheapest machines for a run."""
    subject = request.subject
    if request.search or request.compare or request.suggest or request.html or request.fit:
        raise ValueError("--on auto ranks machines; name one for --search, --compare, --suggest, --fit and --html")
    subject.load(base=[f"model={subject.model}", "tasks=[{name: gsm8k}]"] if subject.model else [])
    found = rank_machines(study)
    notes = [*found.not_compiled, f"prices: {request.prices or 'podium/prices.yaml'}, each with its source and date"]
    if found.outcomes:
        notes.append(_next(subject, found.outcomes[0].case.machine, *(["--compile"] if subject.model else [])))
    shown = found.outcomes[:SHOWN]
    return Answer(outcomes=shown, value=comparison_object(shown), sections=auto_sections(found, notes))


def _largest(study: Study, key: str, case: Case) -> Answer:
    """The largest value of a setting that fits a machine, and its plan."""
    outcome, found = find_largest(study, key, case)
    value = plan_object(_warned(study, outcome)) | {"search": search_object(found)}
    return Answer(outcomes=[outcome], value=value, sections=[search_section(found), *plan_sections(outcome)])


def _joined(answers: Sequence[Answer]) -> Answer:
    """The answers for several machines as one."""
    values = [each.value for each in answers]
    return Answer(
        outcomes=[outcome for each in answers for outcome in each.outcomes],
        value=values[0] if len(values) == 1 else {"plans": values},
        sections=[section for each in answers for section in each.sections],
    )


def _comparison(study: Study, values: str | None, cases: Sequence[Case]) -> Answer:
    """Every value on every machine, best first; cases that cannot be planned are listed with the reason."""
    changes = _compared(values) if values else [()]
    found = study.outcomes(case.but(*each) for case in cases for each in changes)
    refused = [each for each in found if each.known is None]
    planned = [_warned(study, each) for each in found if each.known is not None]
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
