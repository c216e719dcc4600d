"""`podium report`: one self-contained HTML file that shows whether a run learned, and if not, why and what to change.

The page is page.html with style and scripts inlined, plotly from its Python package, and the runs as one JSON object.
Texts from models and users are JSON strings, inserted only as text nodes, so they cannot act as markup. Imports no jax.
"""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args, get_origin

from pydantic import BaseModel

from podium.config.schema import Config
from podium.config.show import flat
from podium.files import write_atomically
from podium.observe.history import padding_share
from podium.observe.identity import RUN, stored_id
from podium.observe.metrics import ACCURACY, find_metric
from podium.observe.out_files import check_page, page_mark
from podium.observe.report.charts import CURVES, PHASES, WORK, charts
from podium.observe.report.compare_runs import comparison
from podium.observe.report.findings import evaluated_tasks, findings
from podium.observe.report.read import RunRecords, read_run
from podium.observe.report.sample_pages import read_samples

FOLDER = Path(__file__).parent
DIGITS = 6
"""Significant digits of values on the page."""


def write_report(folders: Sequence[Path], out: Path) -> None:
    """Write the report of one run, or of several runs side by side.

    An existing file is replaced only if it is a report of the same runs.

    Raises:
        ValueError: a folder contains no run, plotly is not installed, or `out` cannot be written or is another file.
    """
    mark = f"podium report: {' '.join(map(_name_of_run, folders))}"
    check_page(out, "-o", mark)
    write_atomically(out, make_page(report_object(folders), plotly_script(), mark=mark))


def _name_of_run(folder: Path) -> str:
    """The id of a run, or its folder's name if it has no id."""
    return stored_id(folder / RUN) or folder.resolve().name


def plotly_script() -> str:
    """The JavaScript of plotly's Python package. Raises ValueError if it is not installed."""
    try:
        import plotly
    except ImportError:
        raise ValueError(
            "podium report draws with plotly, which is not installed; pip install 'podium-rl[report]'"
        ) from None
    return (Path(plotly.__path__[0]) / "package_data" / "plotly.min.js").read_text("utf-8")


def make_page(content: dict[str, object], plotly: str, *, live: str = "", mark: str = "podium watch") -> str:
    """The page with everything inlined, and a content security policy that forbids loading anything.

    `mark` records in the page which command wrote it, and about which runs. With `live` (the runs' names as a path),
    the page receives changes from its own server.
    """
    data = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    page = _part("page.html")
    for place, text in (
        ("/*POLICY*/", page_policy(live=bool(live))),
        ("/*GENERATOR*/", page_mark(mark)),
        ("/*LIVE*/", html.escape(live, quote=True)),
        ("/*STYLE*/", _part("page.css")),
        ("/*DATA*/", data.replace("<", "\\u003c").replace("&", "\\u0026")),
        ("/*PLOTLY*/", plotly.replace("</script", "<\\/script")),
        ("/*SAMPLES*/", _part("page.samples.js")),
        ("/*SCRIPT*/", _part("page.js")),
    ):
        head, _, tail = page.partition(place)
        page = head + text + tail
    return page


def _part(name: str) -> str:
    return (FOLDER / name).read_text("utf-8")


def page_policy(*, live: bool) -> str:
    """The content security policy of a page: loads nothing; a live page may request data from its own server."""
    connect = "'self'" if live else "'none'"
    return (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def report_object(folders: Sequence[Path]) -> dict[str, object]:
    """Everything on the page as JSON values: the charts, each run, and the comparison."""
    runs = [read_run(folder) for folder in folders]
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    counts = {str(run.setting("eval.samples")) for run in runs}
    samples = counts.pop() if len(counts) == 1 else "k"
    return {
        "curves": charts(CURVES, names, samples),
        "phases": next(iter(charts([PHASES], names, samples)), None),
        "work": charts(WORK, names, samples),
        "definitions": {name: metric.definition for name in names if (metric := find_metric(name))},
        "runs": [run_object(run) for run in runs],
        "comparison": comparison(runs),
    }


def run_object(run: RunRecords) -> dict[str, object]:
    """One run in the page's JSON form."""
    problems = list(run.problems)
    samples = read_samples(run.folder, problems)
    return {
        "name": run.name,
        "headline": headline(run),
        "settings": changed_settings(run),
        "metrics": {
            name: {"steps": series.steps, "values": [float(f"{value:.{DIGITS}g}") for value in series.values]}
            for name, series in run.metrics.items()
        },
        "findings": [finding.__dict__ for finding in findings(run)],
        "plan": planned(run),
        "samples": samples.shown,
        "recorded_samples": samples.recorded,
        "heat": samples.heat.__dict__ if samples.heat else None,
        "problems": problems,
    }


def headline(run: RunRecords) -> dict[str, object]:
    """The summary at the top: accuracy of each task before and after, steps, seconds, tokens, machine, commit.

    A run that recorded only its mean accuracy has one task, with an empty name.
    """
    tasks = []
    evaluated = evaluated_tasks(run)
    if not evaluated and ACCURACY in run.metrics:
        evaluated = [("", run.metrics[ACCURACY])]
    for task, accuracy in evaluated:
        ends = [run.metrics.last(f"eval/{task}/accuracy_interval/{end}") for end in ("low", "high")]
        tasks.append(
            {
                "task": task,
                "first": [accuracy.steps[0], accuracy.values[0]],
                "last": [accuracy.steps[-1], accuracy.values[-1]],
                "interval": [end for end in ends if end is not None],
                **{kind: run.metrics.last(f"eval/{task}/{kind}") for kind in ("avg_at_k", "pass_at_k")},
            }
        )
    reward = run.metrics.get("train-reward/total/mean")
    return {
        "tasks": tasks,
        "samples": run.setting("eval.samples"),
        "reward": [reward.values[0], reward.values[-1]] if reward else None,
        "model": run.setting("model"),
        "recipe": run.setting("algorithm.recipe"),
        "steps": run.metrics.steps,
        "planned_steps": run.setting("steps"),
        "wall_s": run.metrics.last("time/wall_s"),
        "cpu_s": run.metrics.last("time/cpu_s"),
        "generated_tokens": run.metrics.total("rollout/completion_tokens"),
        "trained_tokens": run.metrics.total("train-other/total_valid_token_count"),
        "padding": padding_share(run.metrics),
        "machine": run.machine.get("text"),
        "commit": run.summary.get("commit"),
    }


def changed_settings(run: RunRecords) -> list[list[str]]:
    """Settings that differ from the defaults, as [key, value, default]."""
    defaults = _defaults(Config)
    fields = {name: field.annotation for name, field in Config.model_fields.items()}
    sections = {name: get_args(kind)[0] for name, kind in fields.items() if get_origin(kind) is list}
    for name, element in sections.items():
        for index in range(len(run.setting(name) or ())):
            defaults |= {f"{name}.{index}.{key}": value for key, value in _defaults(element).items()}
    return [
        [key, json.dumps(value), json.dumps(defaults[key]) if key in defaults else "(none)"]
        for key, value in flat(run.config).items()
        if key not in defaults or value != defaults[key]
    ]


def _defaults(model: type[BaseModel]) -> dict[str, object]:
    return flat(model.model_construct().model_dump(mode="json", warnings=False))


def planned(run: RunRecords) -> dict[str, object] | None:
    """The run's plan, for display next to the measurements; None without a plan."""
    seconds = run.plan.get("step_seconds")
    if not isinstance(seconds, dict):
        return None
    parts = run.plan.get("step_parts")
    phases = [phase for phase in run.plan.get("phases") or [] if isinstance(phase, dict)]
    return {
        "text": run.plan.get("text"),
        "seconds": seconds,
        "parts": parts if isinstance(parts, dict) else {},
        "memory": [[str(phase.get("name")), phase.get("gib")] for phase in phases],
        "hbm_gib": run.plan.get("hbm_gib"),
    }
