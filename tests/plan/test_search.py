import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from podium.accelerators import find_accelerator
from podium.config.schema import Config
from podium.plan.request.candidate import Case, Change
from podium.plan.request.phase_sizes import Planned, RunSizes
from podium.plan.result import TOO_CLOSE, Peak, Plan
from podium.plan.search import ranking
from podium.plan.search.largest import MOST_PROBES, Largest, search
from podium.plan.search.ranking import helps, ranked, suggestions
from podium.plan.search.reasons import difference
from podium.plan.search.study import Outcome, cost_of
from podium.plan.search.tunable_settings import SearchRange, candidates, search_range
from podium.prices import Price
from tests.plan.estimated import QWEN_3B
from tests.plan.made_plans import (
    GIB,
    HBM,
    MadeStudy,
    estimated,
    gathers,
    outcome,
    phase,
    phases,
    plan,
    seconds,
    too_large,
    workload,
    written,
)


def config(**changed: Any) -> Config:
    settings: dict[str, Any] = {
        "model": "none",
        "tasks": [{"name": "arithmetic"}],
        "prompts_per_step": 16,
        "group_size": 8,
        "rollout": {"max_prompt_tokens": 512, "max_new_tokens": 1024, "slots": 128, "prefill_rows": 16},
        "train": {"rows_per_device": 4},
    }
    for name, value in changed.items():
        settings[name] = {**settings[name], **value} if isinstance(value, dict) and name in settings else value
    return Config.model_validate({**settings, "rollout": {"layout": "replicated", **settings["rollout"]}})


def sizes(changed: Config | None = None, machine: str = "v6e-8") -> RunSizes:
    return Planned.of(changed or config(), find_accelerator(machine), QWEN_3B).sizes


def run_search(
    true_bytes, closed_form, values: SearchRange, *, refused=lambda value: False
) -> tuple[Largest, list[int]]:
    """A search, and the values that were probed in their order."""
    probed: list[int] = []

    def probe(wanted: Sequence[int]) -> list[Peak]:
        assert not set(wanted) & set(probed), "probed twice"
        assert len(wanted) <= 2 and all(value % values.unit == 0 and value <= values.most for value in wanted)
        probed.extend(wanted)
        return [Peak(phase="update", bytes=int(true_bytes(v)), refused=refused(v), compiled=True) for v in wanted]

    return search("k", values, closed_form=closed_form, probe=probe, hbm_bytes=HBM), probed


def largest(true_bytes, values: SearchRange, limit: float = HBM) -> int | None:
    fitting = [value for value in range(values.unit, values.most + 1, values.unit) if true_bytes(value) <= limit]
    return max(fitting, default=None)


@pytest.mark.parametrize("unit", [1, 8, 64])
@pytest.mark.parametrize("error", [0.8, 0.92, 1.0, 1.1, 1.3])
@pytest.mark.parametrize("slope", [0.3, 1.7, 6.0])
def test_the_largest_that_fits_is_found_and_proven(unit, error, slope):
    def true_bytes(value: int) -> float:
        return 10 * GIB + slope * GIB * value / unit

    values = SearchRange(unit=unit, most=100 * unit, why="")
    found, _ = run_search(true_bytes, lambda value: int(error * true_bytes(value)), values)
    assert found.best == largest(true_bytes, values)
    assert found.with_room == largest(true_bytes, values, (1 - TOO_CLOSE) * HBM)
    assert found.proven


@pytest.mark.parametrize("wrong", [0.5, 2.0])
@pytest.mark.parametrize("base", [1, 25])
def test_a_wrong_closed_form_costs_probes_but_no_wrong_answer(wrong, base):
    """The closed form misses what does not grow, or has what is not there."""

    def true_bytes(value: int) -> float:
        return (base + 0.37 * value**1.2) * GIB

    values = SearchRange(unit=1, most=60, why="")
    found, probed = run_search(true_bytes, lambda value: int(GIB * (1 + wrong * value)), values)
    assert len(probed) <= MOST_PROBES
    assert found.best == largest(true_bytes, values) and found.proven


def test_memory_that_falls_again_is_seen():
    """As compiled of a 7B model on v4-16: 6 rows need 31.72 GiB, 7 need 31.20, 8 need 32.87."""
    measured = {5: 30.9, 6: 31.72, 7: 31.20, 8: 32.87}

    def true_bytes(value: int) -> float:
        return GIB * measured.get(value, 27 + 0.8 * value)

    found, _ = run_search(true_bytes, lambda value: int(GIB * (26 + value)), SearchRange(unit=1, most=32, why=""))
    assert found.best == 7
    assert {5, 6, 7, 8} <= set(found.tried)


def test_what_the_compiler_refuses_does_not_fit_whatever_its_figure():
    found, _ = run_search(
        lambda value: 20 * GIB + value,
        lambda value: value * GIB,
        SearchRange(1, 16, ""),
        refused=lambda value: value > 9,
    )
    assert found.best == 9
    assert found.too_large is not None and found.tried[found.too_large].refused


def test_where_all_fit_one_probe_is_enough():
    values = SearchRange(unit=8, most=64, why="")
    found, probed = run_search(lambda value: 3 * GIB, lambda value: 3 * GIB, values)
    assert probed == [64] and found.proven and found.too_large is None


def test_where_none_fits_the_smallest_was_probed():
    found, probed = run_search(lambda value: 40 * GIB, lambda value: 40 * GIB, SearchRange(unit=1, most=16, why=""))
    assert found.best is None and 1 in probed and found.proven


def test_a_search_ends_when_its_probes_are_spent():
    """The closed form says nothing, and memory goes up and down."""

    def true_bytes(value: int) -> float:
        return GIB * (31.25 + 0.5 * (-1) ** value + value / 1000)

    found, probed = run_search(true_bytes, lambda value: GIB, SearchRange(unit=1, most=1000, why=""))
    assert len(probed) == MOST_PROBES and found.best is not None


@pytest.mark.parametrize(
    ("key", "changed", "unit", "most"),
    [
        ("train.rows_per_device", {}, 1, 16),  # 128 completions over 8 devices
        ("train.rows_per_device", {"mesh": "fsdp:4,tp:2"}, 1, 32),
        ("train.rows_per_device", {"algorithm": {"minibatches": 4}}, 1, 4),
        ("prompts_per_step", {"algorithm": {"minibatches": 4}}, 4, 256),
        ("rollout.slots", {}, 8, 128),
        ("rollout.slots", {"group_size": 5}, 8, 80),
        ("rollout.max_new_tokens", {}, 64, 4096 - 512),
        ("rollout.max_new_tokens", {"train": {"row_tokens": 2000}}, 64, 1472),  # 2000 - 512 = 1488
    ],
)
def test_a_search_ends_where_more_has_no_use(key, changed, unit, most):
    found = search_range(key, Planned(config(**changed), sizes(config(**changed))))
    assert (found.unit, found.most) == (unit, most) and found.why


@pytest.mark.parametrize(
    ("key", "changed", "message"),
    [
        ("group_size", {}, "group_size: cannot be searched; search one of train.rows_per_device, prompts_per_step"),
        ("train.rows_per_device", {"train": {"rows_per_device": None, "tokens_per_device": 3072}}, "unset it with"),
        (
            "rollout.max_new_tokens",
            {"rollout": {"max_prompt_tokens": 4050, "max_new_tokens": 46}},
            "no other value",
        ),
    ],
)
def test_what_cannot_be_searched_says_why(key, changed, message):
    with pytest.raises(ValueError, match=message):
        search_range(key, Planned(config(**changed), sizes(config(**changed))))


def decoding(took: float, **changed: Any) -> Plan:
    """A plan whose decoding differs."""
    made = phase("decode", **{"took": took, "gib": {"kv_cache": 4.8}, "calls": 150.0, "bound_by": "hbm", **changed})
    return plan(made=tuple(made if each.name == "decode" else each for each in phases()))


REPLICATED = decoding(1.8)
LEGACY = decoding(9.5, bound_by="ici", collectives=(gathers(4.25e9 * 600, 600 * 36),))


def test_the_reason_of_a_slow_layout_is_what_it_sends():
    assert difference(LEGACY, REPLICATED) == (
        "decode 9.5 s against 1.8: gathers 4.25 GB per token between devices, the other gathers none"
    )
    assert difference(REPLICATED, LEGACY) == (
        "decode 1.8 s against 9.5: sends nothing between devices, the other gathers 4.25 GB per token"
    )


def test_more_operations_are_a_reason_where_compute_binds():
    slow = plan(made=phases(took=1.5, gib={"layer_activations": 12.1}, flops=1.3e15))
    assert difference(slow, plan()) == "update 1.5 s against 1.1: 1.30 times the operations"


def test_fewer_calls_are_a_reason():
    fast = plan(made=phases(took=0.8), micro_batches=2)
    assert difference(fast, plan()) == "update 0.80 s against 1.1: 2 micro-batches against 4"


def test_without_a_count_the_time_of_each_is_told():
    slower = decoding(2.4)
    assert (
        difference(slower, REPLICATED)
        == "decode 2.4 s against 1.8: 4.0 ms per token against 3.0, bound by HBM bandwidth"
    )


def test_the_steps_of_decoding_are_counted_not_its_calls():
    fewer = dataclasses.replace(decoding(1.2), workload=workload(decodes={128: (75, 300, 250.0)}))
    assert difference(fewer, REPLICATED) == "decode 1.2 s against 1.8: 300 tokens against 600"


def test_what_does_not_fit_is_told_by_its_memory():
    assert difference(too_large(), plan()) == ("update needs 36.4 GiB against 24.4: saved activations 24.2 against 0")


def test_two_that_do_not_fit_differ_by_their_memory_however_fast_they_are():
    fast = dataclasses.replace(too_large(), step=seconds(0.5))
    larger = plan(made=phases(gib={"saved_activations": 34.0, "logits": 2.0}))
    assert difference(larger, fast) == "update needs 46.2 GiB against 36.4: saved activations 34.0 against 24.2"


def test_the_hosts_time_is_explained_by_calls():
    made = tuple(dataclasses.replace(each, calls=2 * each.calls) for each in phases())
    busy = plan(made=made, host=seconds(0.5), step=seconds(3.6))
    assert difference(busy, plan()) == "host 0.50 s against 0.050: 376 calls against 188"


def entries(*plans: tuple[str, Plan], prices: dict[str, Price] | None = None) -> list[Outcome]:
    return [
        outcome(made, written(f"a={name}"), on=made.accelerator, cost=cost_of(made, 100, prices or {}))
        for name, made in plans
    ]


def test_what_fits_is_better_than_what_is_fast():
    fast = dataclasses.replace(too_large(), step=seconds(0.5))
    order = ranked(entries(("fast", fast), ("slow", LEGACY), ("good", REPLICATED)))
    assert [each.setting for each in order] == ["a=good", "a=slow", "a=fast"]
    assert order[0].reason.startswith("best: decode 1.8 s against 9.5")
    assert order[2].reason.startswith("update needs 36.4 GiB")


def test_machines_are_ranked_by_dollars_where_prices_are_known_and_else_by_chip_seconds():
    small = plan(accelerator="v6e-8", devices=8, step=seconds(4.0))
    large = plan(accelerator="v5p-16", devices=8, step=seconds(3.0))
    prices = {
        "v6e": Price(usd_per_chip_hour=2.0, source="a", date="2026-01-01"),
        "v5p": Price(usd_per_chip_hour=4.0, source="a", date="2026-01-01"),
    }
    assert ranked(entries(("", small), ("", large)))[0].plan is large
    cheap = ranked(entries(("", small), ("", large), prices=prices))
    assert cheap[0].plan is small and cheap[1].reason.startswith("2.7 dollars against 1.8; ")


def test_one_plan_needs_no_reason():
    assert ranked(entries(("", plan())))[0].reason == ""


def test_candidates_change_nothing_that_is_learned():
    found = {(each.key, each.value): each.old for each in candidates(Planned(config(), sizes()))}
    assert found["train.rows_per_device", 8] == 4 and found["train.rows_per_device", 2] == 4
    assert found["rollout.slots", 64] == 128 and ("rollout.slots", 256) not in found  # 128 completions
    assert {value for key, value in found if key == "rollout.layout"} == {"hybrid", "tensor", "legacy", "maxtext"}
    learned = {"group_size", "prompts_per_step", "rollout.max_new_tokens", "train.optimizer.name", "algorithm.recipe"}
    assert not learned & {key for key, _ in found}


def test_candidates_divide_over_the_devices():
    found = list(candidates(Planned(config(rollout={"slots": 24}), sizes(config(rollout={"slots": 24})))))
    assert [each.value for each in found if each.key == "rollout.slots"] == [48]


def test_candidates_of_tokens_per_device_are_tokens():
    changed = config(train={"rows_per_device": None, "tokens_per_device": 4 * 1536})
    found = [
        (each.key, each.value) for each in candidates(Planned(changed, sizes(changed))) if "per_device" in each.key
    ]
    assert found == [("train.tokens_per_device", 2 * 1536), ("train.tokens_per_device", 8 * 1536)]


V6E_8 = Case(find_accelerator("v6e-8"))


def suggested(estimate, make, *, compile_all: bool | None = True) -> list[Outcome]:
    """Suggestions by these judges of one change; compiling takes long."""
    before = plan(made=tuple(dataclasses.replace(each, compile_s=100.0) for each in phases()))

    def planner(case: Case, fast: bool) -> Plan:
        if not case.changes:
            return before
        return estimate(case.changes[0]) if fast else make(case.changes[0])

    study = MadeStudy(planner, run=lambda case: Planned(config(), sizes()))
    return suggestions(study, Outcome(case=V6E_8, known=before), compile_all=compile_all)


def test_only_changes_that_the_closed_form_likes_are_compiled_and_only_proven_ones_shown():
    """By the closed form 8 rows and 64 slots are faster, remat none does not fit; by the compiler 64 slots are not."""
    fast, slow = plan(made=phases(took=0.8)), plan(made=phases(took=1.4))
    estimates = {"train.rows_per_device=8": 0.7, "rollout.slots=64": 0.5}

    def estimate(change: Change) -> Plan:
        if change.key == "train.head_chunk_tokens":
            raise ValueError("contradicts")
        if change.value == "none":
            return too_large()
        return plan(made=phases(took=estimates.get(str(change), 1.1)))

    compiled = []

    def make(change: Change) -> Plan:
        compiled.append(str(change))
        return fast if change.key == "train.rows_per_device" else slow

    (found,) = suggested(estimate, make)
    assert compiled == ["rollout.slots=64", "train.rows_per_device=8"]
    assert found.case.changes == (Change(key="train.rows_per_device", value=8, old=4),)
    assert found.reason == "update 0.80 s against 1.1: 200 ms per micro-batch against 275, bound by compute"
    estimates_alone = suggested(estimate, make, compile_all=None)
    assert [each.setting for each in estimates_alone] == ["rollout.slots=64", "train.rows_per_device=8"]
    assert len(compiled) == 2


def test_at_most_three_changes_are_shown_best_first(monkeypatch):
    changes = [Change(key="train.rows_per_device", value=value, old=4) for value in (1, 2, 3, 5)]
    took = {1: 0.9, 2: 0.5, 3: 0.8, 5: 0.7}

    def make(change: Change) -> Plan:
        return plan(made=phases(took=took[int(change.value)]))

    monkeypatch.setattr(ranking, "candidates", lambda run: changes)
    found = suggested(make, make)
    assert [each.case.changes[0].value for each in found] == [2, 5, 3]


@pytest.mark.parametrize(
    ("changed", "before", "better"),
    [
        (plan(made=phases(took=0.8)), plan(), True),
        (plan(made=phases(took=1.099)), plan(), False),  # as fast
        (plan(made=phases(took=1.3)), plan(), False),
        (too_large(), plan(), False),
        (plan(), too_large(), True),
        (plan(made=phases(gib={"saved_activations": 22.0})), too_large(), True),  # nearer
        (dataclasses.replace(too_large(), step=seconds(0.1)), too_large(), False),  # faster, and as large
        (plan(made=phases(gib={"layer_activations": 20.6}, took=0.1)), plan(), False),  # too close
        (estimated(), estimated(), False),
    ],
)
def test_a_change_helps_if_it_fits_or_is_faster_and_fits_still(changed, before, better):
    assert helps(changed, before) is better
