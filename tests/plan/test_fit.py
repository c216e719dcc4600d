"""Settings that fit: found by the closed form on machines that are not there, and judged by compilers made by hand."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from podium.accelerators import find_accelerator
from podium.config.schema import Config
from podium.plan.request.candidate import Case, Change
from podium.plan.request.phase_sizes import Planned
from podium.plan.request.plan_subject import Subject
from podium.plan.result import Peak, Plan
from podium.plan.search import fit as module
from podium.plan.search.fit import Fit, Fitted
from podium.plan.search.fit_candidates import Choice, Half, Halves, Place
from podium.plan.search.study import Study
from podium.settings import load_settings
from tests.plan.made_plans import GIB, HBM, MadeStudy, close, plan, too_large
from tests.plan.test_plan_command import planner, podium  # noqa: F401  # fixtures

TASK = "tasks=[{name: gsm8k}]"
QWEN_3B = ("model=Qwen/Qwen2.5-3B-Instruct", TASK, "prompts_per_step=16")
ROWS_OF_2560 = ("rollout.slots=128", "train.row_tokens=2560")


def settings_of(*given: str):
    """Loads the settings of a case."""
    return lambda case: load_settings([], [*given, *(each.override for each in case.changes)], {}).config


def planned_of(load: Callable[[Case], Config]) -> Callable[[Case], Planned]:
    """Finds the run of a case."""
    return lambda case: Planned.of(load(case), case.machine)


def fitted(
    machine: str, *given: str, lengths: str = "gsm8k", fixed: Sequence[str] = (), all_others: bool = False
) -> Fitted:
    """The fastest settings by traces."""
    study = Study(Subject(settings=given), lengths=lengths, by="trace")
    return Fit(study=study, now=Case(find_accelerator(machine)), fixed=fixed).find(all_others=all_others)


def estimated(machine: str, *given: str, lengths: str = "gsm8k") -> Plan:
    """A plan by the closed form."""
    return Study(Subject(settings=given), lengths=lengths, by="closed_form").plan(Case(find_accelerator(machine)))


def values(found: Fitted) -> dict[str, Any]:
    assert found.best is not None and found.best.plan.verdict == "fits"
    return {change.key: change.value for change in found.best.case.changes}


def test_many_rows_fit_where_the_users_number_stays():
    rows = "train.rows_per_device=64"
    found = fitted("v6e-8", *QWEN_3B, *ROWS_OF_2560, rows, lengths="fixed:1024", fixed=["train.rows_per_device"])
    assert found.before.verdict == "does_not_fit" and not found.learned
    chosen = values(found)
    assert "train.rows_per_device" not in chosen and chosen["train.remat"] == "offload"


def test_all_weights_of_a_7b_fit_with_the_optimizer_on_the_host():
    given = ("model=Qwen/Qwen2.5-7B-Instruct", TASK, "prompts_per_step=4", "rollout.max_new_tokens=7680")
    found = fitted("v6e-4", *given, "rollout.slots=32", lengths="fixed:7680")
    chosen = values(found)
    assert not found.learned and "lora.rank" not in chosen and chosen["train.offload_optimizer"] is True
    assert found.best is not None and found.best.plan.step is not None


@pytest.mark.parametrize(("machine", "model"), [("v6e-1", "Qwen/Qwen3-8B"), ("h100-1", "Qwen/Qwen2.5-3B-Instruct")])
def test_adapters_leave_room_for_slots(machine, model):
    given = (f"model={model}", TASK, "prompts_per_step=16", "lora.rank=32", "rollout.slots=16")
    found = fitted(machine, *given)
    assert found.best is not None and found.best.plan.slots > 16 and not found.learned
    assert found.best.plan.step is not None and found.before.step is not None
    assert found.best.plan.step.value < found.before.step.value


def test_rows_that_only_padding_would_fill_take_no_time():
    """16 prompts with 8 completions of 50 tokens fill less than a row of each of 8 chips."""
    given = ("model=Qwen/Qwen2.5-0.5B-Instruct", TASK, "prompts_per_step=16")
    few, many = (estimated("v6e-8", *given, f"train.rows_per_device={rows}", lengths="fixed:50") for rows in (1, 16))
    assert few.micro_batches == many.micro_batches == 1
    assert few.phase("update").seconds == many.phase("update").seconds


@pytest.mark.long
def test_what_the_run_learns_changes_only_if_nothing_else_fits_and_is_named():
    given = ("model=Qwen/Qwen3-8B", TASK, "prompts_per_step=16")
    found = fitted("v6e-1", *given)
    assert values(found)["lora.rank"] == 32 and [each.key for each in found.learned] == ["lora.rank"]
    kept = fitted("v6e-1", *given, fixed=["lora"])
    assert kept.best is None and not kept.learned


def test_every_change_is_worth_something():
    given = ("model=Qwen/Qwen2.5-7B-Instruct", TASK, "prompts_per_step=8", "rollout.slots=8")
    found = fitted("v6e-8", *given, all_others=True)
    assert found.best is not None and len(found.undone) == len(found.best.case.changes) > 0
    best = found.best.plan
    for each in found.undone:
        assert each.known is None or each.plan.verdict != "fits" or each.plan.step.value > best.step.value  # pyright: ignore[reportOptionalMemberAccess]


def test_changes_that_are_not_checked_are_those_of_the_loader():
    load = settings_of(*QWEN_3B)
    case = Case(find_accelerator("v6e-8"))
    changes = (
        Change(key="train.rows_per_device", value=2),
        Change(key="rollout.slots", value=64),
        Change(key="train.offload_optimizer", value=True),
        Change(key="train.layer_chunk_tokens", value=None),
    )
    assert planned_of(load)(case).changed_settings(changes) == load(case.but(*changes))
    assert [str(each) for each in changes[2:]] == ["train.offload_optimizer=true", "train.layer_chunk_tokens=null"]


def test_long_rows_are_split_where_one_does_not_fit():
    given = ("model=Qwen/Qwen2.5-3B-Instruct", TASK, "prompts_per_step=8", "rollout.max_new_tokens=512")
    load = settings_of(*given, "train.row_tokens=262144")
    halves = Halves(Planned.of(load(Case(find_accelerator("v6e-8"))), find_accelerator("v6e-8")), "gsm8k")
    meshes = [{each.key: each.value for each in place.changes}.get("mesh") for place in halves.places()]
    assert [mesh for mesh in dict.fromkeys(meshes) if mesh] == ["fsdp:4,sp:2", "fsdp:2,sp:4", "sp:8"]
    pair = Choice(halves.places(), HBM, fast=True, factors={}).best()
    assert pair is not None and "sp:" in str({each.key: each.value for each in pair.changes}["mesh"])


# With a compiler


def half(name: str, gib: float, took: float, like: str = "layer", phase: str = "update") -> Half:
    changes = () if name == "own" else (Change(key="train.rows_per_device", value=name),)
    return Half(changes=changes, peaks={phase: int(gib * GIB), "checkpoint": GIB}, seconds=took, like=like)


def place(updates: Sequence[Half], rollout_gib: float = 20.0, **changed: Any) -> Place:
    fields: dict[str, Any] = {"changes": (), "compiled": True, "ordinary": True}
    rollouts = [half("own", rollout_gib, 1.0, "rollout", "decode")]
    return Place(**{**fields, **changed}, make_updates=lambda: updates, make_rollouts=lambda: rollouts)


FIXED = ("lora", "train.optimizer.moments", "rollout.in_flight", "rollout.weights", "prompts_per_step")
UPDATES = (half("own", 36.0, 5.0), half("4", 29.0, 2.0), half("2", 24.0, 3.0), half("1", 22.0, 4.0))


def searched(
    monkeypatch,
    updates: Sequence[Half],
    true_gib: dict[str, float],
    *,
    fixed: Sequence[str] = FIXED,
    rollout_gib: float = 20.0,
) -> tuple[Fitted, list[str], list[str]]:
    """A search with a compiler that knows the updates' sizes, and what it compiled, by itself and as whole plans."""
    probed: list[str] = []
    planned: list[str] = []

    def name_of(case: Case) -> str:
        return str(case.changes[-1].value) if case.changes else "own"

    def peak(case: Case, phase: str) -> Peak:
        probed.append(f"{phase} {name_of(case)}")
        size = {"decode": 20.0, "update": true_gib[name_of(case)]}[phase]
        return Peak(phase=phase, bytes=int(size * GIB), refused=size * GIB > HBM, compiled=True)

    def planned_by(case: Case, fast: bool) -> Plan:
        if not fast:
            planned.append(name_of(case))
        return plan() if true_gib[name_of(case)] < 30 else too_large()

    monkeypatch.setattr(module, "Halves", lambda *given: FakeHalves(updates, rollout_gib))
    config = load_settings([], list(QWEN_3B), {}).config
    study = MadeStudy(planned_by, run=planned_of(lambda case: config), peak=peak)
    found = Fit(study=study, now=Case(find_accelerator("v6e-8")), fixed=fixed).find(all_others=False)
    return found, probed, planned


@dataclasses.dataclass
class FakeHalves:
    updates: Sequence[Half]
    rollout_gib: float = 20.0

    def places(self) -> list[Place]:
        return [place(self.updates, self.rollout_gib)]


@pytest.mark.parametrize(
    ("given", "offered"), [((), True), (("rollout.weights=w8a8",), False), (("lora.base=nf4",), False)]
)
def test_int8_rollouts_are_offered_as_a_change_to_what_is_learned(given, offered):
    config = load_settings([], [*QWEN_3B, *given], {}).config
    study = MadeStudy(lambda case, fast: plan(), run=planned_of(lambda case: config))
    fit = Fit(study=study, now=Case(find_accelerator("v6e-8")), fixed=[])
    found = [change for changes in fit._changes_of_learning(smaller=False) for change in changes]
    assert (Change(key="rollout.weights", value="int8", old="dtype") in found) == offered


def test_only_the_best_pair_is_compiled_and_the_whole_run_planned_once(monkeypatch):
    found, probed, planned = searched(monkeypatch, UPDATES, {"own": 36.0, "4": 29.0})
    assert found.best is not None and found.best.setting == "train.rows_per_device=4"
    assert (probed, planned) == (["update 4"], ["4"])  # the decode surely fits, and is left to the whole plan


def test_a_decode_in_doubt_is_compiled_too(monkeypatch):
    _, probed, planned = searched(monkeypatch, UPDATES, {"own": 36.0, "4": 29.0}, rollout_gib=29.5)
    assert (probed, planned) == (["update 4", "decode 4"], ["4"])


def test_what_the_compiler_said_holds_for_other_changes_to_what_is_learned(monkeypatch):
    """Nothing fits with float32 moments; the estimates with bfloat16 ones are equal, so nothing is compiled again."""
    sizes = dict.fromkeys(("own", "4", "2", "1"), 50.0)
    _, once, _ = searched(monkeypatch, UPDATES, sizes)
    found, probed, _ = searched(monkeypatch, UPDATES, sizes, fixed=FIXED[:1])
    assert found.best is None and probed == once == ["update 4"]


def test_a_refusal_scales_the_estimates_of_all_that_are_alike(monkeypatch):
    """4 rows take 20 % more than estimated, so 2 rows, 28.8 GiB, are next."""
    found, probed, planned = searched(monkeypatch, UPDATES, {"own": 43.0, "4": 34.8, "2": 28.8})
    assert found.best is not None and found.best.setting == "train.rows_per_device=2"
    assert (probed, planned) == (["update 4", "update 2"], ["2"])
    assert [each.made_by for each in found.tried] == ["its refusal", "compiler", "whole plan"]


def test_what_is_not_alike_is_not_scaled(monkeypatch):
    updates = (*UPDATES[:3], half("other", 27.0, 2.5, like="offload"))
    found, probed, _ = searched(monkeypatch, updates, {"own": 43.0, "4": 40.0, "2": 30.0, "other": 28.0})
    assert found.best is not None and found.best.setting == "train.rows_per_device=other"
    assert probed == ["update 4", "update other"]


def test_what_needs_less_than_estimated_makes_room_for_something_faster(monkeypatch):
    """By the closed form only 1 row fits; it takes 20 % less, so 2 rows fit too."""
    updates = [dataclasses.replace(each, peaks={"update": int(each.peaks["update"] * 1.4)}) for each in UPDATES[1:]]
    updates[2] = dataclasses.replace(updates[2], peaks={"update": 30 * GIB})
    found, probed, _ = searched(monkeypatch, updates, {"own": 43.0, "4": 34.0, "2": 26.0, "1": 24.0})
    assert probed == ["update 1", "update 2"]
    assert found.best is not None and found.best.setting == "train.rows_per_device=2"


def test_what_hardly_fits_by_the_closed_form_is_traced_before_it_is_given_up(monkeypatch):
    """By the closed form nothing fits; the trace of 2 rows takes 10 % less, too much, but then 1 row fits."""
    traced: list[str] = []

    def trace(study: MadeStudy, case: Case, phases: Sequence[str]) -> Peak | None:
        if phases != ["update"]:
            return None
        traced.append(str(case.changes[-1].value))
        return Peak(phase="update", bytes=int(0.9 * 36 * GIB), refused=False, compiled=False)

    monkeypatch.setattr(MadeStudy, "traced_peak", trace)
    updates = [half("1", 33.0, 4.0), half("2", 36.0, 3.0), half("4", 42.0, 2.0)]
    found, probed, _ = searched(monkeypatch, updates, {"own": 43.0, "4": 38.0, "2": 32.4, "1": 29.7})
    assert found.best is not None and found.best.setting == "train.rows_per_device=1"
    assert probed == ["update 1"]
    assert traced == ["2"]  # 4 rows do not fit even if the closed form errs by all its margin


def test_what_is_too_close_to_call_gives_way_to_a_change_of_what_is_learned_that_fits(monkeypatch):
    def planned_by(case: Case, fast: bool) -> Plan:
        return plan() if any(change.key == "train.optimizer.moments" for change in case.changes) else close()

    def peak(case: Case, phase: str) -> Peak:
        return Peak(phase=phase, bytes=29 * GIB, refused=False, compiled=True)

    config = load_settings([], list(QWEN_3B), {}).config
    study = MadeStudy(planned_by, run=planned_of(lambda case: config), peak=peak)
    for fixed, learned in ((FIXED, []), (FIXED[:1], ["train.optimizer.moments=bfloat16"])):
        sizes = itertools.chain([29.0], itertools.repeat(24.0))  # as it is, and with each change of what is learned
        monkeypatch.setattr(module, "Halves", lambda *given, sizes=sizes: FakeHalves([half("1", next(sizes), 2.0)]))
        found = Fit(study=study, now=Case(find_accelerator("v6e-8")), fixed=fixed).find(all_others=False)
        assert found.best is not None and [str(change) for change in found.learned] == learned
        assert found.best.plan.verdict == ("fits" if learned else "too_close")


def test_if_nothing_fits_none_is_returned_with_what_was_tried(monkeypatch):
    found, probed, planned = searched(monkeypatch, UPDATES, dict.fromkeys(("own", "4", "2", "1"), 50.0))
    assert found.best is None and planned == [] and len(probed) <= module.MOST_PROGRAMS
    assert all(not each.fits for each in found.tried if each.phase == "update")


def test_rollouts_are_not_simulated_where_no_update_fits():
    def rollouts() -> Sequence[Half]:
        raise AssertionError("simulated in vain")

    hopeless = dataclasses.replace(place([half("own", 99.0, 1.0)]), make_rollouts=rollouts)
    choice = Choice([hopeless, place([half("1", 22.0, 4.0)])], HBM, fast=True, factors={})
    pair = choice.best()
    assert pair is not None and pair.update.changes[0].value == "1"
    assert choice.estimated == 3  # two updates and a rollout


def test_places_that_the_compiler_cannot_judge_come_last():
    host = place([half("host", 20.0, 1.0)], compiled=False)
    pair = Choice([place(UPDATES[:2]), host], HBM, fast=False, factors={}).best()
    assert pair is not None and pair.update.seconds == 2.0
    pair = Choice([place(UPDATES[:1]), host], HBM, fast=False, factors={}).best()
    assert pair is not None and pair.update.seconds == 1.0


def test_what_a_whole_plan_needs_beside_its_largest_program_is_left_to_the_next_ones():
    """The first plan needs more than its update alone, so the second, hardly smaller, is not planned."""
    limit = Choice([place(UPDATES)], HBM, fast=False, factors={}).limit(place(UPDATES)) / GIB
    beside = close().worst.bytes / GIB - (limit - 0.01)
    sizes = {"first": limit - 0.01, "second": limit - beside + 0.01, "third": limit - beside - 0.01}
    updates = [half(name, gib, n, like=name) for n, (name, gib) in enumerate(sizes.items(), 1)]
    choice = Choice([place(updates)], HBM, fast=False, factors={})
    for each in updates:
        choice.learn(each, "update", each.peaks["update"], refused=False)
    first = choice.best()
    assert first is not None and first.update is updates[0]
    choice.learn_plan(first, close())
    after = choice.best()
    assert after is not None and after.update is updates[2]


# The command


def test_fit_prints_options_yaml_and_what_was_tried_and_writes_a_config_that_loads(podium):  # noqa: F811
    Path("slow.yaml").write_text("base: run.yaml\nmodel: Qwen/Qwen2.5-7B-Instruct\nrollout: {slots: 8}\n")
    arguments = ["plan", "slow.yaml", "--on", "v6e-8", "--fast", "--fit", "--set", "rollout.refill_steps=4"]
    status, out, err = podium(*arguments, "--write", "mine.yaml")
    first = out.splitlines()[0]
    assert status == 0 and first.startswith("v6e-8: --set ") and first.endswith("s per step (traced)")
    assert "what was tried" in out and "settings that fit" in out and "wrote mine.yaml" in err
    options = [part.partition(" ")[0].strip("'") for part in first.split("--set ")[1:]]
    config = load_settings(["mine.yaml"], []).config
    same = load_settings(["slow.yaml"], ["rollout.refill_steps=4", *options]).config
    assert config == same.model_copy(update={"name": "mine"})
    assert "base: slow.yaml" in Path("mine.yaml").read_text()
    value = json.loads(podium(*arguments, "--json")[1])
    assert value["fit"]["verdict"] == "fits" and value["fit"]["settings"]


@pytest.mark.long
def test_a_model_without_a_config_is_written_whole(podium):  # noqa: F811
    status, _, _ = podium("plan", "./model", "--on", "v6e-8", "--fast", "--fit", "--write", "mine.yaml")
    config = load_settings(["mine.yaml"], []).config
    assert status == 0 and (config.model, config.tasks[0].name) == ("./model", "gsm8k")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--write", "mine.yaml"), "--write writes the settings that --fit finds for one machine; add --fit, or drop"),
        (("--fit", "--write", "run.yaml"), "--write run.yaml: exists already; name a new file, or delete it"),
        (
            ("--fit", "--write", "none/mine.yaml"),
            "--write none/mine.yaml: the folder none does not exist; create it, or",
        ),
        (("--fit", "--search", "rollout.slots"), "--search and --fit cannot be combined; give only one"),
        (("--search", "rollout.slots,train.remat"), "--search rollout.slots,train.remat: takes one key; --fit finds"),
    ],
)
def test_wrong_options_are_status_2(podium, arguments, message):  # noqa: F811
    status, out, err = podium("plan", "run.yaml", "--on", "v6e-8", "--fast", *arguments)
    assert (status, out) == (2, "") and err.startswith(f"error: {message}") and err.count("\n") == 1


def test_advice_to_a_run_that_does_not_fit_was_planned(podium):  # noqa: F811
    given = ["--set", "rollout.max_new_tokens=128", "--set", "rollout.max_prompt_tokens=128"]
    settings = [*given, "--set", "model=Qwen/Qwen3-8B", "--set", "lora.rank=32", "--set", "train.rows_per_device=64"]
    status, out, _ = podium("plan", "run.yaml", "--on", "l4-1", "--fast", *settings)
    first = out.splitlines()[0]
    assert status == 1 and first.startswith("does not fit l4-1 as traced: ")
    planned = (" fits, ", " is too close to call, ")
    assert "none of the settings that were tried fits" in first or any(
        each in first.rpartition("--set ")[2] for each in planned
    )


def test_the_next_command_keeps_the_users_settings(podium):  # noqa: F811
    given = ["--set", "rollout.refill_steps=4", "--set", 'name="a b"']
    lines = podium("plan", "./model", "--on", "v6e-8", *given)[1].splitlines()
    wanted = "next: podium plan ./model --on v6e-8 --set rollout.refill_steps=4 --set 'name=\"a b\"' --compile"
    assert lines[2] == wanted


@pytest.mark.long
def test_what_fits_by_the_search_is_what_the_compiler_takes(tmp_path):
    """Qwen2.5-0.5B with long rows on one v5e chip: does not fit as given; compiled, with few programs."""
    given = ("model=Qwen/Qwen2.5-0.5B-Instruct", TASK, "prompts_per_step=16", "train.rows_per_device=64")
    fit = Fit(study=Study(Subject(settings=given)), now=Case(find_accelerator("v5litepod-1")), fixed=())
    found = fit.find(all_others=False)
    compiled = [each for each in fit.tried if each.made_by in ("compiler", "its refusal")]
    assert found.before.verdict == "does_not_fit" and len(compiled) <= module.MOST_PROGRAMS
    assert found.best is not None and found.best.plan.verdict == "fits" and not found.best.plan.estimate_only
