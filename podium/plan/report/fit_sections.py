"""The report of `--fit`: the settings, what each of them does, and what was tried."""

import podium.plan.report.formatting as text
from podium.config.show import to_yaml
from podium.plan.report.advice import fit_advice, options
from podium.plan.report.sections import Line, ReportSection, Table
from podium.plan.report.write import nested
from podium.plan.request.candidate import Change
from podium.plan.result import Plan
from podium.plan.search.fit import Fitted, Tried
from podium.plan.search.study import Outcome


def fit_sections(found: Fitted, *, alone: bool = False) -> list[ReportSection]:
    """The settings that fit, as YAML and as options, what each does, and what was tried.

    With `alone`, they begin a report; otherwise they follow the first line of a plan, which shows the options already.
    """
    sections: list[ReportSection] = []
    best = found.best
    if alone:
        lines = [
            Line(text=f"{found.before.accelerator}: {fit_advice(found)}", verdict=best.plan.verdict if best else None)
        ]
        sections.append(ReportSection("", tuple(lines)))
    if best is not None and best.case.changes:
        settings = {change.key: change.value for change in best.case.changes}
        yaml = tuple(Line(text=line) for line in to_yaml(nested(settings)).splitlines())
        sections.append(ReportSection("settings that fit", yaml))
    if best is not None and found.undone:
        rows = tuple(_worth(change, each, found) for change, each in zip(best.case.changes, found.undone, strict=True))
        heads = ("setting", "instead of", "without it, by the closed form")
        sections.append(ReportSection("what each does", (Table(heads=heads, rows=rows, text=frozenset({0, 1, 2})),)))
    if found.others:
        rows = tuple((options(each), _result(each.plan)) for each in found.others)
        heads = ("settings", "by the closed form")
        table = Table(heads=heads, rows=rows, text=frozenset({0, 1}))
        title = "what else would fit or be faster, and changes what is learned"
        sections.append(ReportSection(title, (table,)))
    if found.tried:
        heads = ("settings", "", "needs", "s per step", "by")
        rows = tuple(_tried(each) for each in found.tried)
        note = Line(text=f"{found.estimated} updates and rollouts were estimated by the closed form.")
        table = Table(heads=heads, rows=rows, text=frozenset({0, 1, 2, 4}))
        sections.append(ReportSection("what was tried", (note, table)))
    return sections


def _worth(change: Change, undone: Outcome, found: Fitted) -> tuple[str, str, str]:
    old = "unset" if change.old is None else str(change.old)
    mark = " (changes what is learned)" if change in found.learned else ""
    if undone.known is None:
        return f"{change}{mark}", old, f"contradicts the others: {undone.error}"
    return f"{change}{mark}", old, _result(undone.known, undone.before)


def _result(plan: Plan, best: Plan | None = None) -> str:
    """A plan in a few words, or how it differs from the `best` one."""
    if plan.verdict != "fits":
        worst = plan.worst
        needs = f"{worst.name} {text.gib(worst.bytes)} of {text.exact_gib(plan.hbm_bytes)} GiB"
        return f"{text.VERDICTS[plan.verdict]}: {needs}"
    if plan.step is None:
        return text.spare(plan)
    step = f"{text.number(plan.step.value)} s per step"
    if best is not None and best.step is not None:
        step += f" instead of {text.number(best.step.value)}"
    return f"{step}, {text.spare(plan)}"


def _tried(each: Tried) -> tuple[str, str, str, str, str]:
    settings = ", ".join(map(str, each.changes)) or "unchanged"
    fits = "fits" if each.fits else "too large"
    return settings, fits, f"{each.phase} {text.gib(each.bytes)} GiB", text.number(each.seconds), each.made_by
