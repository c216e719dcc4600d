"""The plan as one HTML file that opens without a network: bars of memory by phase, the step's course, tables.

Plotly draws the bars; it is an optional extra (`report`), and its JavaScript is written into the file.
"""

import html
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from podium import __version__
from podium.accelerators import GIB
from podium.files import write_atomically
from podium.plan.compare import LIMITS, Answer, Refused, by_price
from podium.plan.prices import Cost
from podium.plan.result import Phase, Plan
from podium.plan.suggest import Suggestion
from podium.plan.words import (
    duration,
    gib,
    in_range,
    limit_gib,
    made_by,
    number,
    spoken,
    step_parts,
    told_parts,
    transferred,
    verdict_line,
)

COLOURS = ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#a463f2", "#6cc5b0", "#ff8ab7", "#9c6b4e", "#97bbf5")
REST_COLOUR, LIMIT_COLOUR = "#9498a0", "#c1121f"
STEP_COLOURS = {"sync": "#6cc5b0", "rollout": "#4269d0", "score": "#a463f2", "update": "#ff725c", "host": "#9498a0"}
REST = "others"
BAR_PX, AXIS_PX = 30, 60
STYLE = """
:root { color-scheme: light; --line: #d8dbe2; --soft: #5a6070; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f2a; background: #f5f6f9; margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.3rem; margin: 0 0 4px; } h2 { font-size: 1.05rem; margin: 0 0 8px; }
p { margin: 6px 0; } .soft { color: var(--soft); font-size: .9rem; }
section, details { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 16px; margin: 16px 0; }
details section { border: 0; padding: 0; } summary { cursor: pointer; font-weight: 600; }
.verdict { font-weight: 600; border-left: 6px solid; padding-left: 12px; }
.fits { border-color: #2a9d4a; } .too_close { border-color: #d98e04; } .does_not_fit { border-color: #c1121f; }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: .85rem; }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: 6px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
.text { text-align: left; } b { font-weight: 600; }
"""


def check_html(path: Path) -> None:
    """Raises ValueError where the page could not be written: found out before anything is compiled."""
    if importlib.util.find_spec("plotly") is None:
        raise ValueError(f"--html {path}: plotly is not installed; pip install 'podium-rl[report]'")
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
        raise ValueError(f"--html {path}: {what}; name a file, as plan.html")


def write_html(
    path: Path, answers: Sequence[Answer], refused: Sequence[Refused], suggestions: Sequence[Suggestion]
) -> None:
    """Write the page of one plan, or of several beside each other, best first."""
    from plotly.offline import get_plotlyjs

    title = f"podium plan: {answers[0].plan.config}" if answers else "podium plan"
    body = [_h(1, title)]
    if len(answers) == 1 and not refused:
        body.append(_plan_sections(answers[0], suggestions))
    else:
        body.append(_comparison_sections(answers, refused))
        body += [_details(answer.label, _plan_sections(answer, ())) for answer in answers]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><main>{''.join(body)}<p class=soft>Podium {__version__}</p></main>{_SCRIPT}</body></html>\n"
    )
    write_atomically(path, page)


# A chart in a closed <details> has no width: it is drawn anew when that opens.
_SCRIPT = """<script>for (const each of document.querySelectorAll("details")) each.addEventListener("toggle", () => {
  for (const chart of each.querySelectorAll(".js-plotly-plot")) Plotly.Plots.resize(chart); });</script>"""


def _plan_sections(answer: Answer, suggestions: Sequence[Suggestion]) -> str:
    """All that there is to say about one plan."""
    plan = answer.plan
    sections = [_section("", _verdict(plan)), _section("Memory of a device, by phase", _memory(plan))]
    if plan.step is not None:
        sections.append(_section("A step", _timeline(plan)))
    sections.append(_section("Phases", _phase_table(plan)))
    sections.append(_section(f"Largest arrays of {plan.worst.name}", _array_table(plan.worst)))
    if transfers := _transfer_table(plan):
        sections.append(_section("Transfers between chips, in a step", transfers))
    if answer.cost is not None:
        sections.append(_section("Cost", _cost(answer.cost, plan)))
    if suggestions:
        sections.append(_section("Changes that help most", _suggestion_list(suggestions)))
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    sections.append(_section("How this was found", "".join(map(_p, (made_by(plan), *plan.notes, versions)))))
    return "".join(sections)


def _comparison_sections(answers: Sequence[Answer], refused: Sequence[Refused]) -> str:
    """The table of all, best first, why, and the seconds of their steps as bars."""
    heads = ("machine", "setting", "verdict", "GiB", "s per step", "tokens/s/chip", "chip-hours", "dollars")
    rows = []
    for answer in answers:
        plan, cost = answer.plan, answer.cost
        figures = (plan.tokens_per_s_per_device, cost and cost.chip_hours, cost and cost.usd)
        row = [plan.accelerator, answer.setting or "as it is", spoken(plan.verdict)]
        row += [f"{gib(plan.worst.bytes)} of {limit_gib(plan.hbm_bytes)}"]
        row += [in_range(plan.step) if plan.step is not None else "-"]
        rows.append([*row, *(number(each.value) if each is not None else "-" for each in figures)])
    reasons = [_told(answer.label, answer.reason) for answer in answers if answer.reason]
    reasons += [_told(each.label, f"cannot be planned: {each.error}") for each in refused]
    rule = "the least dollars" if by_price(answers) else "the least chip-seconds"
    table = _table(heads, rows, text=(0, 1, 2)) if rows else ""
    timed = [answer for answer in answers if answer.plan.step is not None]
    chart = _section("Seconds per step", _steps_chart(timed)) if timed else ""
    return _section(f"Best first: {rule} per step", table + "".join(reasons)) + chart


def _verdict(plan: Plan) -> str:
    return f'<p class="verdict {plan.verdict}">{html.escape(verdict_line(plan))}</p>'


def _memory(plan: Plan) -> str:
    """Stacked bars, a phase each, with a line where the memory ends."""
    import plotly.graph_objects as go

    colours = _part_colours(plan.phases)
    names = [phase.name for phase in plan.phases]
    figure = go.Figure()
    for part, colour in colours.items():
        sizes = [_part_bytes(phase, part, colours) / GIB for phase in plan.phases]
        hover = f"%{{y}}: {spoken(part)} %{{x:.2f}} GiB<extra></extra>"
        figure.add_bar(
            y=names, x=sizes, name=spoken(part), orientation="h", marker={"color": colour}, hovertemplate=hover
        )
    ends = f"{limit_gib(plan.hbm_bytes)} GiB"
    figure.add_vline(
        x=plan.hbm_bytes / GIB,
        line={"color": LIMIT_COLOUR, "width": 2},
        annotation_text=ends,
        annotation_position="top",
    )
    longest = max(plan.hbm_bytes, plan.worst.bytes) / GIB
    figure.update_layout(barmode="stack", xaxis={"range": [0, 1.12 * longest], "ticksuffix": " GiB"})
    key = "".join(
        f'<span><i style="background:{colours[part]}"></i>{html.escape(spoken(part))}</span>' for part in colours
    )
    return _chart(figure, len(names)) + f'<div class="key">{key}</div>'


def _timeline(plan: Plan) -> str:
    """The phases of a step, each beginning where the one before ends."""
    import plotly.graph_objects as go

    rows = [(phase.name, phase.seconds, phase.bound_by) for phase in plan.phases if phase.seconds is not None]
    rows += [("host", plan.host, "")] if plan.host is not None else []
    figure, begun = go.Figure(), 0.0
    for name, time, bound in rows:
        part = name if name in STEP_COLOURS else "rollout"
        hover = f"{name}: {duration(time)}{f', bound by {LIMITS[bound]}' if bound else ''}<extra></extra>"
        figure.add_bar(
            y=[name],
            x=[time.value],
            base=[begun],
            orientation="h",
            marker={"color": STEP_COLOURS[part]},
            hovertemplate=hover,
        )
        begun += time.value
    figure.update_layout(barmode="overlay", xaxis={"ticksuffix": " s"})
    speed, tokens = plan.tokens_per_s_per_device, plan.composition.completion_tokens
    rate = f", {in_range(speed)} per second and chip" if speed is not None else ""
    assert plan.step is not None
    return _chart(figure, len(rows)) + _p(f"{duration(plan.step)} per step; {tokens:,} completion tokens{rate}")


def _steps_chart(answers: Sequence[Answer]) -> str:
    """A stacked bar of each plan's step in its parts."""
    import plotly.graph_objects as go

    parts = {answer.label.replace(" ", "<br>"): dict(step_parts(answer.plan)) for answer in answers}
    figure = go.Figure()
    for part, colour in STEP_COLOURS.items():
        times = [each[part].value if part in each else 0.0 for each in parts.values()]
        hover = f"%{{y}}: {part} %{{x:.3g}} s<extra></extra>"
        figure.add_bar(
            y=list(parts), x=times, name=part, orientation="h", marker={"color": colour}, hovertemplate=hover
        )
    figure.update_layout(barmode="stack", xaxis={"ticksuffix": " s"})
    key = "".join(f'<span><i style="background:{colour}"></i>{part}</span>' for part, colour in STEP_COLOURS.items())
    return _chart(figure, 2 * len(parts)) + f'<div class="key">{key}</div>'


def _chart(figure: Any, bars: int) -> str:
    """A figure of horizontal bars, the first on top, as wide as the page."""
    figure.update_layout(
        height=AXIS_PX + BAR_PX * bars,
        margin={"l": 8, "r": 8, "t": 24, "b": 8},
        showlegend=False,
        plot_bgcolor="white",
        paper_bgcolor="white",
        font={"family": "system-ui, sans-serif", "size": 13},
        yaxis={"autorange": "reversed", "automargin": True},
    )
    figure.update_xaxes(gridcolor="#e6e8ee", automargin=True, fixedrange=True)
    figure.update_yaxes(fixedrange=True)
    config = {"displayModeBar": False, "responsive": True}
    return figure.to_html(full_html=False, include_plotlyjs=False, config=config)


def _part_colours(phases: Sequence[Phase]) -> dict[str, str]:
    """A colour of each part that is told; the rest share one."""
    return dict(zip(told_parts(phases, len(COLOURS)), COLOURS, strict=False)) | {REST: REST_COLOUR}


def _part_bytes(phase: Phase, part: str, told: Iterable[str]) -> int:
    if part != REST:
        return phase.parts.get(part, 0)
    return sum(size for name, size in phase.parts.items() if name not in told)


def _phase_table(plan: Plan) -> str:
    heads = (
        "phase",
        "GiB",
        "fits",
        "time",
        "calls",
        "bound by",
        "TFLOP",
        "of closed form",
        "made by",
        "compiled in",
    )
    rows = [
        (
            phase.name,
            f"{phase.bytes / GIB:.2f}",
            "yes" if phase.fits else "no",
            duration(phase.seconds) if phase.seconds is not None else "-",
            f"{phase.calls:,.0f}",
            LIMITS[phase.bound_by] if phase.bound_by else "-",
            number(phase.flops / 1e12),
            f"{phase.flops / phase.closed_form_flops:.2f}" if phase.closed_form_flops else "-",
            "compiler" if phase.compiled else "closed form",
            f"{phase.compile_s:.0f} s" if phase.compile_s is not None else "-",
        )
        for phase in plan.phases
    ]
    return _table(heads, rows, text=(0, 5, 8))


def _array_table(phase: Phase) -> str:
    rows = [(spoken(each.name), each.shape, f"{each.bytes / GIB:.2f}") for each in phase.largest]
    return _table(("array", "shape", "GiB"), rows, text=(0, 1))


def _transfer_table(plan: Plan) -> str:
    """Empty where there are no transfers."""
    rows = [
        (
            phase.name,
            each.kind,
            " x ".join(each.axes) or "-",
            str(each.group),
            f"{each.calls:,.0f}",
            transferred(each.sent),
            "yes" if each.overlaps else "no",
        )
        for phase in plan.phases
        for each in phase.collectives
    ]
    heads = ("phase", "kind", "mesh axes", "devices", "calls", "sent by a device", "while computing")
    return _table(heads, rows, text=(0, 1, 2)) if rows else ""


def _cost(cost: Cost, plan: Plan) -> str:
    text = f"{cost.steps:,} steps on {plan.devices} chips: {in_range(cost.chip_hours)} chip-hours"
    if cost.price is None or cost.usd is None:
        return _p(f"{text}. No price of this chip is known.")
    price = f"{cost.price.usd_per_chip_hour:.2f} per chip-hour ({cost.price.source}, {cost.price.date})"
    return _p(
        f"{text}, {in_range(cost.usd)} US dollars at {price}. Compiling, evaluations and checkpoints come on top."
    )


def _suggestion_list(suggestions: Sequence[Suggestion]) -> str:
    """Changes with what they make of memory and step, and why."""
    lines = []
    for each in suggestions:
        how = "closed form" if each.plan.estimate_only else "compiled"
        change = f"{each.change} instead of {each.change.old} ({how})"
        lines.append(_told(change, f"{verdict_line(each.plan)}. {each.reason}"))
    return "".join(lines)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[int] = ()) -> str:
    """A table that scrolls sideways where the page is narrow; columns that are no numbers are named by `text`."""

    def cell(tag: str, column: int, content: str) -> str:
        return f"<{tag}{' class=text' * (column in text)}>{html.escape(content)}</{tag}>"

    lines = [("th", heads), *(("td", row) for row in rows)]
    body = "".join(f"<tr>{''.join(cell(tag, i, each) for i, each in enumerate(row))}</tr>" for tag, row in lines)
    return f'<div class="wide"><table>{body}</table></div>'


def _told(name: str, text: str) -> str:
    return f"<p><b>{html.escape(name)}</b>: {html.escape(text)}</p>"


def _section(title: str, content: str) -> str:
    return f"<section>{_h(2, title) if title else ''}{content}</section>"


def _details(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def _h(level: int, text: str) -> str:
    return f"<h{level}>{html.escape(text)}</h{level}>"


def _p(text: str) -> str:
    return f"<p>{html.escape(text)}</p>" if text else ""
