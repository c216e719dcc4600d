"""The `plan` command: what is to be planned, with what, and what is printed where.

The answer goes to stdout, as text or with --json as exactly one object; all else to stderr. Exit status: 0 it fits (of
several, one does), 2 nothing fits, 1 the question was wrong, 3 the compiler failed.
"""

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from podium.accelerators import Accelerator, find_accelerator
from podium.config.load import Loaded, Override
from podium.config.schema import Config
from podium.files import to_json
from podium.models.presets import find_architecture
from podium.plan.check import check_object, check_run
from podium.plan.compare import Answer, Refused, ranked
from podium.plan.compile import Progress
from podium.plan.divides import check_divides
from podium.plan.estimate import estimate
from podium.plan.html import check_html, write_html
from podium.plan.objects import Object, comparison_object, plan_object, search_object
from podium.plan.planner import make_plan
from podium.plan.prices import Price, cost_of, load_prices
from podium.plan.report import WIDTH, print_check, print_comparison, print_plan, print_search
from podium.plan.result import Plan
from podium.plan.search import Found, search, search_range
from podium.plan.sizes import RunSizes, make_sizes
from podium.plan.suggest import PROVEN, Change, Suggestion, promising, proven
from podium.plan.words import verdict_line

FITS, TOO_LARGE = 0, 2

Load = Callable[[Sequence[str | Override]], Loaded]
"""The settings, with more of them on top."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """The options of the command."""

    tpu: str
    """Machines, separated by commas."""
    fast: bool = False
    lengths: str = "gsm8k"
    steps: int | None = None
    """Whose cost is told; None: the config's."""
    prices: Path | None = None
    as_json: bool = False
    html: Path | None = None
    search: str | None = None
    compare: str | None = None
    suggest: bool | None = None
    """None: by the closed form, or with the compiler where the run does not fit."""


def plan_command(question: Question, load: Load) -> int:
    """Answer a question about a config; the exit status.

    Args:
        question: the options of the command.
        load: the settings, with more of them on top.

    Raises:
        ValueError: the question is wrong: a ConfigError where its settings are.
        CompilerError: the compiler failed.
    """
    machines = [find_accelerator(name) for name in dict.fromkeys(question.tpu.split(","))]
    if question.search and question.compare:
        raise ValueError("--search and --compare: one at a time; give one of them")
    if question.suggest and (question.search or question.compare or len(machines) > 1):
        raise ValueError(
            "--suggest: goes with one plan of one machine; leave it out, or --search, --compare and others"
        )
    if not question.fast:
        _check_compiler(machines)
    if question.html is not None:
        check_html(question.html)
    prices, notices = load_prices(question.prices), Console(stderr=True)
    plannings = [_Planning(question, load, machine, prices, notices) for machine in machines]
    loaded = load([])
    if question.search:
        return _search(question.search, plannings, loaded.config)
    if question.compare or len(machines) > 1:
        return _compare(plannings, _settings(question.compare) if question.compare else [""])
    return _single(plannings[0], loaded.config)


@dataclasses.dataclass(frozen=True)
class _Planning:
    """A question about one machine."""

    question: Question
    load: Load
    accelerator: Accelerator
    prices: dict[str, Price]
    notices: Console

    def vary(self, change: Change) -> Config:
        """The settings with one changed. Raises ConfigError where it contradicts others."""
        key, value = change
        return self.load([Override(key, value, f"podium plan, {key}={value}")]).config

    def estimated(self, config: Config) -> Plan:
        """The closed form's plan. Raises ValueError where the config does not fit the machine's mesh."""
        check_divides(make_sizes(config, find_architecture(config.model), self.accelerator))
        return make_plan(config, self.accelerator, fast=True, lengths=self.question.lengths)

    def make(self, config: Config) -> Plan:
        """The plan that was asked for; how its compilation goes on is told on stderr."""
        if self.question.fast:
            return self.estimated(config)
        check_divides(make_sizes(config, find_architecture(config.model), self.accelerator))
        with self.notices.status(f"planning for {self.accelerator.name}") as status:
            follow = _Follow(self.accelerator.name, self.notices, status.update, lambda: self.estimated(config))
            return make_plan(config, self.accelerator, lengths=self.question.lengths, progress=follow)

    def answer(self, plan: Plan, config: Config, setting: str = "") -> Answer:
        """A plan with its cost; a verdict that is too close gets a warning."""
        if plan.verdict == "too_close":
            self.notices.print(Text(f"warning: {verdict_line(plan)}", style="yellow"), soft_wrap=True)
        cost = cost_of(plan, self.question.steps or config.steps, self.prices)
        return Answer(plan=plan, cost=cost, setting=setting)


class _Follow:
    """Tells how the compilation of a plan's phases goes on, and what the closed form says meanwhile."""

    def __init__(
        self, machine: str, notices: Console, update: Callable[[str], None], estimated: Callable[[], Plan]
    ) -> None:
        self.machine, self.notices, self.update, self.estimated = machine, notices, update, estimated
        self.running: dict[str, float] = {}
        self.begun = False

    def __call__(self, progress: Progress) -> None:
        if progress.state == "compiling":
            if not self.begun:
                self._line(f"while the compiler works: {verdict_line(self.estimated())}")
            self.begun, self.running[progress.phase] = True, progress.seconds
        elif progress.state == "compiled":
            self.running.pop(progress.phase, None)
            done = f"{progress.done} of {progress.total}"
            self._line(f"compiled {progress.phase} for {self.machine} in {progress.seconds:.0f} s ({done})")
        running = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in self.running.items())
        self.update(f"compiling for {self.machine}: {running} ({progress.done} of {progress.total} done)")

    def _line(self, text: str) -> None:
        self.notices.print(Text(text, style="dim"), soft_wrap=True)


def _single(planning: _Planning, config: Config) -> int:
    """One plan of one machine."""
    question = planning.question
    plan = planning.make(config)
    answer = planning.answer(plan, config)
    suggestions, hint = _suggestions(planning, config, plan)
    if question.html is not None:
        write_html(question.html, [answer], [], suggestions or ())
    if question.as_json:
        _print_object(plan_object(answer, suggestions or ()))
    else:
        print_plan(answer, _console(), suggestions=suggestions, hint=hint)
    return _status([answer])


def _suggestions(planning: _Planning, config: Config, plan: Plan) -> tuple[list[Suggestion] | None, str]:
    """Changes that help, each planned as the plan was; where that was not asked for, None and what could be."""
    question = planning.question
    if question.suggest is False:
        return None, ""
    run = make_sizes(config, find_architecture(config.model), planning.accelerator)
    changes = promising(config, run, vary=planning.vary, estimated=planning.estimated)[:PROVEN]
    if question.suggest or question.fast or plan.verdict != "fits":
        return proven(changes, plan, vary=planning.vary, make=planning.make), ""
    named = ", ".join(map(str, changes))
    return None, f"--suggest compiles what the closed form finds best: {named}" if changes else ""


def _search(key: str, plannings: Sequence[_Planning], config: Config) -> int:
    """The largest value of a setting that fits, on each machine."""
    question = plannings[0].question
    results = [_search_one(key, planning, config) for planning in plannings]
    answers = [answer for answer, _ in results]
    if question.html is not None:
        write_html(question.html, answers, [], ())
    if question.as_json:
        objects = [plan_object(answer) | {"search": search_object(found)} for answer, found in results]
        _print_object(objects[0] if len(objects) == 1 else {"plans": objects})
    else:
        for answer, found in results:
            print_search(found, _console())
            print_plan(answer, _console(), suggestions=None)
    return _status(answers)


def _search_one(key: str, planning: _Planning, config: Config) -> tuple[Answer, Found]:
    """What a search on one machine came to, and the plan of the value that it found, or else of the smallest tried."""

    @functools.cache
    def sizes(value: int) -> RunSizes:
        changed = planning.vary((key, value))
        return make_sizes(changed, find_architecture(changed.model), planning.accelerator)

    now = make_sizes(config, find_architecture(config.model), planning.accelerator)
    found = search(
        key,
        search_range(key, config, now),
        closed_form=lambda value: _most_bytes(sizes(value)),
        make=lambda value: planning.make(planning.vary((key, value))),
        hbm_bytes=planning.accelerator.hbm_bytes,
    )
    chosen = found.best or found.tries[0]
    return planning.answer(chosen.plan, planning.vary((key, chosen.value)), f"{key}={chosen.value}"), found


def _most_bytes(run: RunSizes) -> int:
    """Of the phase that needs most, by the closed form."""
    return max(phase.total for phase in estimate(run))


def _compare(plannings: Sequence[_Planning], settings: Sequence[str]) -> int:
    """Every setting on every machine, best first; what cannot be planned is told apart."""
    question, answers, refused = plannings[0].question, [], []
    for planning in plannings:
        for setting in settings:
            try:
                config = planning.load([setting] if setting else []).config
                answers.append(planning.answer(planning.make(config), config, setting))
            except ValueError as error:  # a ConfigError, a mesh or heads that do not divide: others may
                text = "; ".join(line.strip() for line in str(error).splitlines()) or repr(error)
                refused.append(Refused(accelerator=planning.accelerator.name, setting=setting, error=text))
    if not answers:
        raise ValueError("\n".join(f"{each.label}: {each.error}" for each in refused))
    best_first = ranked(answers)
    if question.html is not None:
        write_html(question.html, best_first, refused, ())
    if question.as_json:
        _print_object(comparison_object(best_first, refused))
    else:
        print_comparison(best_first, refused, _console())
    return _status(best_first)


def _settings(text: str) -> list[str]:
    """The settings of `KEY=a,b,c`, or of `KEY=a;b;c` where values have commas. Raises ValueError for anything else."""
    key, equals, values = text.partition("=")
    parts = [part.strip() for part in values.split(";" if ";" in values else ",") if part.strip()]
    if not equals or not key.strip() or not parts:
        raise ValueError(
            f"--compare {text}: write KEY=a,b,c, as rollout.layout=replicated,legacy; separate values that have commas"
            " by semicolons, as 'mesh=auto;fsdp:4,tp:2'"
        )
    return [f"{key.strip()}={part}" for part in dict.fromkeys(parts)]


def _check_compiler(machines: Iterable[Accelerator]) -> None:
    """Raises ValueError where a TPU is asked for and its compiler is not here: found out before any work."""
    tpu = next((machine for machine in machines if machine.compiles), None)
    if tpu is not None and importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"{tpu.name}: the TPU's compiler (libtpu) is not installed; pip install 'podium-rl[tpu]', or plan with"
            " --fast"
        )


def _status(answers: Sequence[Answer]) -> int:
    return TOO_LARGE if all(answer.plan.verdict == "does_not_fit" for answer in answers) else FITS


def _console() -> Console:
    """Of stdout; a file has room for what a narrow terminal has not."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def _print_object(value: Object) -> None:
    sys.stdout.write(to_json(value, indent=2) + "\n")


def check_command(run: Path, *, as_json: bool) -> int:
    """Tabulate planned beside measured of a run; the exit status. Raises ValueError where that cannot be done."""
    rows = check_run(run)
    if as_json:
        _print_object(check_object(run.name, rows))
    else:
        print_check(rows, _console())
    return FITS
