"""Machines ranked for a run, and runs that are planned without a config."""

import dataclasses
import json

import pytest

from podium.accelerators import find_accelerator
from podium.plan import plan
from podium.plan.planner import make_plan
from podium.plan.report.sections import Line, Table, auto_sections
from podium.plan.request.phase_sizes import Planned
from podium.plan.request.plan_subject import Subject, names_model
from podium.plan.search import ranking
from podium.plan.search.ranking import machines, rank_machines
from podium.plan.search.study import RunCost, Study
from tests.plan.made_plans import MadeStudy, estimated, seconds, too_large
from tests.plan.made_plans import plan as made
from tests.plan.test_plan_command import planner, podium  # noqa: F401  # fixtures

PRICES = {"l4-1": 1.0, "h100-1": 2.0, "v6e-4": 3.0, "v6e-8": 4.0, "h100-8": 5.0}


@pytest.fixture
def compiled(monkeypatch):
    """The machines that were compiled for, in order; every compiler is there."""
    monkeypatch.setattr(ranking, "check_compiler", lambda machine: None)
    return []


def study(compiled, *, misjudged=(), fast=False, prices=lambda machine, plan: PRICES[machine]) -> Study:
    """Plans for the machines of PRICES, of which some do not fit once they are compiled."""

    def plan_of(case, fast):
        machine = case.machine
        if machine.name not in PRICES:
            raise ValueError("does not divide")
        if not fast:
            compiled.append(machine.name)
        found = estimated() if fast else too_large() if machine.name in misjudged else made()
        return dataclasses.replace(found, accelerator=machine.name, step=seconds(10.0 / machine.devices))

    def cost(case, plan):
        return RunCost(steps=100, chip_hours=seconds(1.0), usd=seconds(prices(case.machine.name, plan)))

    return MadeStudy(plan_of, fast=fast, cost=cost)


def names(found):
    return [each.case.machine.name for each in found.outcomes]


def test_the_cheapest_three_are_compiled(compiled):
    found = rank_machines(study(compiled))
    assert compiled == ["l4-1", "h100-1", "v6e-4"] and names(found) == list(PRICES)
    assert [each.plan.estimate_only for each in found.outcomes] == [False, False, False, True, True]
    assert found.refused == len(machines()) - len(PRICES)


def test_what_the_compiler_refuses_gives_way_to_the_next(compiled):
    found = rank_machines(study(compiled, misjudged=("l4-1",)))
    assert compiled == ["l4-1", "h100-1", "v6e-4", "v6e-8"]
    assert names(found) == ["h100-1", "v6e-4", "v6e-8", "h100-8"] and found.unsuitable == 1


def test_the_cheapest_is_compiled_even_if_three_others_are(compiled):
    """Once compiled, three machines take longer than the fourth was estimated to."""
    dear = {"l4-1": 6.0, "h100-1": 7.0, "v6e-4": 8.0}

    def prices(machine, plan):
        return PRICES[machine] if plan.estimate_only else dear.get(machine, 4.5)

    found = rank_machines(study(compiled, prices=prices))
    assert compiled == ["l4-1", "h100-1", "v6e-4", "v6e-8"]
    assert names(found)[0] == "v6e-8" and not found.outcomes[0].plan.estimate_only


def test_without_a_compiler_a_machine_stays_an_estimate(compiled, monkeypatch):
    def check(machine):
        if machine.platform == "gpu":
            raise ValueError("h100-1: the GPU compiler is not installed; pip install it")

    monkeypatch.setattr(ranking, "check_compiler", check)
    found = rank_machines(study(compiled))
    assert compiled == ["v6e-4", "v6e-8"] and found.not_compiled == [
        "h100-1: the GPU compiler is not installed; pip install it"
    ]
    assert len(found.outcomes) == 5


def test_nothing_is_compiled_if_that_is_asked_for(compiled):
    assert names(rank_machines(study(compiled, fast=True))) == list(PRICES) and compiled == []


def test_the_headline_has_the_cheapest_and_the_fastest(compiled):
    (section,) = auto_sections(rank_machines(study(compiled, fast=True)), ["a note"])
    first, table, note = section.content
    assert isinstance(first, Line) and first.text.startswith(
        "cheapest: l4-1, 1.0 dollars and 0.28 hours for 100 steps; fastest: v6e-8, 4.0 dollars and 0.035 hours"
    )
    assert isinstance(table, Table) and [row[0] for row in table.rows] == list(PRICES)
    assert note == Line(text="a note")


def test_machines_that_one_rents_are_tried():
    found = {each.name for each in machines()}
    assert {"v6e-8", "v5p-128", "tpu7x-64", "l4-1", "h100-8", "b200-64"} <= found
    assert not {"h100-3", "h100-128", "v6e-128", "mi300x-8", "tpu8t-8"} & found


def test_auto_prints_a_table_and_the_next_command(podium, planner):  # noqa: F811
    status, out, err = podium("plan", "run.yaml", "--on", "auto", "--fast")
    assert status == 0 and err == ""
    assert out.startswith("cheapest: ") and "; fastest: " in out.splitlines()[0]
    assert "next: podium plan run.yaml --on " in out
    value = json.loads(podium("plan", "run.yaml", "--on", "auto", "--fast", "--json")[1])
    usd = [each["cost"]["usd"]["value"] for each in value["plans"]]
    assert usd == sorted(usd) and all(each["verdict"] == "fits" for each in value["plans"])


def test_auto_ranks_and_does_nothing_else(podium):  # noqa: F811
    status, _, err = podium("plan", "run.yaml", "--on", "auto", "--search", "rollout.slots")
    assert status == 2 and err.startswith("error: --on auto ranks machines; name one for --search")


# Without a config


@pytest.mark.parametrize(
    ("text", "is_model"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", True),
        ("x.gguf", True),
        ("run.yaml", False),
        ("missing/run.yml", False),
        ("demo", True),
    ],
)
def test_a_model_is_told_from_a_config(text, is_model):
    assert names_model(text) == is_model


def test_a_model_is_planned_with_settings_that_are_printed(podium):  # noqa: F811
    status, out, _ = podium("plan", "./model", "--on", "v6e-8")
    lines = out.splitlines()
    assert status == 0 and lines[0].startswith("fits v6e-8 by closed-form estimate")
    assert lines[1].startswith(
        "settings (change them with --set, or write them with --fit --write FILE): tasks=[{name: gsm8k}]"
    )
    assert "rollout.max_prompt_tokens=128 rollout.max_new_tokens=128 rollout.slots=128" in lines[1]
    assert lines[2] == "next: podium plan ./model --on v6e-8 --compile"


def test_settings_of_the_user_win_over_the_defaults(podium):  # noqa: F811
    status, out, _ = podium("plan", "./model", "--on", "v6e-8", "--set", "rollout.slots=16", "--json")
    assert status == 0 and json.loads(out)["text"].startswith("fits")
    status, _, err = podium("plan", "./model", "--on", "v6e-8", "--set", "rollout.slots=7")
    assert status == 2 and err.startswith("error: rollout.slots is 7 and is split over ")


@pytest.mark.parametrize(("machine", "fits"), [("v6e-8", True), ("l4-1", False), ("v6e-256", True)])
def test_the_fastest_rows_and_slots_that_fit_are_taken(machine, fits):
    accelerator = find_accelerator(machine)
    subject = Subject(model="Qwen/Qwen2.5-7B-Instruct")
    settings = subject.defaults(accelerator)
    config = subject.load(base=settings).config
    assert {each.key: each.value for each in settings}["rollout.slots"] == config.rollout.slots
    assert (make_plan(Planned.of(config, accelerator), by="closed_form").verdict == "fits") is fits
    if not fits:
        assert (config.train.rows_per_device, config.rollout.slots) == (1, 16)


def test_a_plan_is_a_call():
    found = plan("Qwen/Qwen2.5-0.5B-Instruct", "h100-1", settings=["prompts_per_step=8"], fast=True)
    assert (found.accelerator, found.verdict, found.estimate_only) == ("h100-1", "fits", True)
    with pytest.raises(ValueError, match="unknown accelerator 'a5000-1'; nearest: "):
        plan("Qwen/Qwen2.5-0.5B-Instruct", "a5000-1", fast=True)
