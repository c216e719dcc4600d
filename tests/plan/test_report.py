import dataclasses
import datetime
import io
import itertools
import json
import re
import types

import pytest
from rich.console import Console

from podium.plan.report import sections
from podium.plan.report.formatting import duration, method_line, number, step_parts, verdict_line
from podium.plan.report.json_answer import comparison_object, plan_object
from podium.plan.report.report import print_sections
from podium.plan.report.sections import ReportSection, comparison_sections, plan_sections, search_line, search_section
from podium.plan.request.candidate import Change
from podium.plan.result import Peak, Plan, Seconds
from podium.plan.search.fit import Fitted
from podium.plan.search.largest import Largest
from podium.plan.search.ranking import ranked
from podium.plan.search.study import Outcome, cost_of
from podium.plan.search.tunable_settings import SearchRange
from podium.prices import Price, load_prices, months_old
from tests.plan.made_plans import GIB, HBM, close, estimated, outcome, phases, plan, seconds, too_large, written

PRICES = {"v6e": Price(usd_per_chip_hour=2.0, source="the shop", date="2026-01-02")}
ROWS = SearchRange(unit=1, most=16, why="all rows are there")


def output(sections: list[ReportSection], *, width: int = 110, colours: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colours, color_system="truecolor" if colours else None
    )
    print_sections(sections, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def entry(made: Plan, *changes: Change) -> Outcome:
    return outcome(made, *changes, cost=cost_of(made, 100, PRICES))


def test_the_first_line_says_what_to_do():
    def first(made: Plan, *suggested: Outcome) -> str:
        return output(plan_sections(entry(made), suggested)).splitlines()[0]

    decoding = "57% of a step is decode, bound by HBM bandwidth, with slots 65% busy"
    assert first(plan(), suggestion(plan(made=phases(took=0.8)))) == (
        f"fits v6e-8 with 6.9 GiB to spare. {decoding}: --set train.rows_per_device=8 makes a step 2.8 s instead of 3.1"
        " (compiled)"
    )
    assert first(plan(), suggestion(plan(made=phases(took=1.06)))).endswith("makes a step 1% shorter (compiled)")
    assert first(plan()) == (f"fits v6e-8 with 6.9 GiB to spare. {decoding}; no change that was tried makes it better")
    found = Fitted(before=too_large(), best=outcome(plan(), Change(key="train.rows_per_device", value=8)))
    assert output(plan_sections(entry(too_large()), None, None, found)).splitlines()[0] == (
        "does not fit v6e-8: update needs 36.4 of 31.25 GiB, over by 5.2 GiB. Most of update is saved activations 24.2"
        " and rollout weights 5.8 GiB: --set train.rows_per_device=8 fits, 6.9 GiB to spare, 3.1 s per step (compiled)"
    )
    found = Fitted(before=too_large(), best=None)
    assert (
        output(plan_sections(entry(too_large()), None, None, found))
        .splitlines()[0]
        .endswith(" GiB: none of the settings that were tried fits")
    )
    assert first(estimated(), suggestion(estimated(), before=estimated())).endswith("(estimated)")


def test_the_verdict_names_the_peak_and_the_parts_of_a_step():
    assert verdict_line(plan()) == (
        "fits v6e-8 with 6.9 GiB to spare; peak in update (layer activations 12.1 GiB); 3.1 s per step (2.5-3.7):"
        " rollout 1.9, update 1.1, sync 0.050, host 0.050"
    )


def test_lengths_that_were_only_assumed_are_told_with_their_effect():
    text = " ".join(output(plan_sections(entry(plan()), (), plan(step=seconds(10.4)))).split())
    assert "lengths: assumed to be GSM8K's, 200 tokens on average; with every completion as long as allowed, a" in text
    assert "step takes 10.4 s. --lengths RUN" in text
    assert "assumed to be GSM8K's" not in output(plan_sections(entry(plan())))


@pytest.mark.parametrize("width", [60, 80, 110])
def test_no_entry_of_the_key_is_broken(width):
    lines = output(plan_sections(entry(plan())), width=width).splitlines()
    for part in ("rollout weights", "layer activations", "gathered weights", "31.25 GiB, the memory limit"):
        assert any(part in line for line in lines), part


def test_what_a_phase_waits_for_is_a_time_and_never_how_much_memory_there_is():
    assert "bound by HBM bandwidth" in output(plan_sections(entry(plan())))


def test_the_verdict_says_by_how_much_a_run_is_too_large():
    line = verdict_line(too_large())
    assert line.startswith("does not fit v6e-8: update needs 36.4 of 31.25 GiB, over by 5.2 GiB; peak in update")
    assert "(saved activations 24.2 GiB); 3.1 s per step" in line


def test_a_close_verdict_is_no_yes():
    assert verdict_line(close()).startswith(
        "too close to call on v6e-8: update needs 30.8 of 31.25 GiB; peak in update"
    )


@pytest.mark.parametrize(
    "made", [estimated(), dataclasses.replace(estimated(), verdict="does_not_fit", spare_bytes=-GIB)]
)
def test_an_estimate_says_so_in_its_verdict(made):
    assert "by closed-form estimate" in verdict_line(made)


def test_what_is_compiled_and_what_is_estimated_is_told():
    text = output(plan_sections(entry(plan())))
    assert (
        "compiled for v6e-8: memory, operations and transfers of init, sync, prefill, copy, decode and update" in text
    )
    assert "estimated by the closed form: checkpoint" in " ".join(text.split())
    assert method_line(estimated()).startswith("everything is estimated by the closed form;")


def bar_of(text: str, phase: str) -> str:
    line = next(line for line in text.splitlines() if line.strip().startswith(f"{phase} "))
    found = re.search(r"\d\.\d  (.*?\u2503[A-Z.]*)", line)
    assert found is not None, line
    return found[1]


def letters_of(text: str) -> dict[str, str]:
    """The letter of each part, by the key below the bars."""
    key = " ".join(text[text.index("\n  R rollout weights") : text.index("the memory limit")].split())
    return {part.strip(): letter for letter, part in re.findall(r"([A-Z]) ([a-z][a-z ]+)", key)}


def test_bars_are_as_long_as_the_memory_they_stand_for():
    text = output(plan_sections(entry(plan())))
    bar, letters = bar_of(text, "update"), letters_of(text)
    cells = len(bar) - 1  # to the end of the memory
    for part, size in (("layer activations", 12.1), ("optimizer", 3.0), ("rollout weights", 5.75)):
        assert bar.count(letters[part]) / cells == pytest.approx(size / 31.25, abs=1 / cells)
    assert len(bar.rstrip("\u2503").rstrip()) / cells == pytest.approx(24.36 / 31.25, abs=1 / cells)
    assert letters["layer activations"] not in bar_of(text, "checkpoint")


def test_what_most_phases_hold_comes_first():
    bar = bar_of(output(plan_sections(entry(plan()))), "update")
    assert re.match(r"R+O+P+", bar)  # rollout weights, optimizer, parameters


def test_a_bar_that_does_not_fit_goes_past_the_end_of_the_memory():
    bar = bar_of(output(plan_sections(entry(too_large()))), "update")
    before, _, after = bar.partition("\u2503")
    assert " " not in before and after.strip()
    assert len(before) / (len(before) + 1 + len(after)) == pytest.approx(31.25 / 36.4, abs=0.03)


def test_every_part_has_its_own_letter_or_colour():
    letters = letters_of(output(plan_sections(entry(plan()))))
    assert set(letters) > {"rollout weights", "kv cache", "logits"} and len(letters) == len(set(letters.values()))
    coloured = output(plan_sections(entry(plan())), colours=True)
    assert "\x1b[34m\u2588" in coloured and "RRR" not in coloured


def test_the_timeline_goes_on_where_the_phase_before_ends():
    lines = output(plan_sections(entry(plan()))).splitlines()
    start = lines.index(next(line for line in lines if line.strip() == "a step"))
    bars = [(line.index("\u2588"), line.rindex("\u2588")) for line in lines[start:] if "\u2588" in line]
    assert len(bars) == 6  # sync, prefill, copy, decode, update, host
    assert all(after[0] in (before[1], before[1] + 1) for before, after in itertools.pairwise(bars))


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_but_the_verdict(width):
    lines = output(plan_sections(entry(plan())), width=width).splitlines()
    assert max(map(len, lines[1:])) <= width


def test_the_cost_is_chips_times_hours_times_price():
    cost = cost_of(plan(step=seconds(3.6)), 100, PRICES)
    assert cost is not None and cost.usd is not None
    assert (cost.chip_hours.value, cost.chip_hours.low) == pytest.approx((0.8, 0.64))  # 8 chips, 360 s
    assert cost.usd.value == pytest.approx(1.6)
    text = " ".join(output(plan_sections(entry(plan(step=seconds(3.6))))).split())
    assert (
        "100 steps: 0.80 (0.64-0.96) chip-hours, 1.6 (1.3-1.9) US dollars at 2.00 per chip-hour (the shop, 2026-01-02)"
        in text
    )


@pytest.mark.parametrize(
    ("date", "age"), [("2026-01-02", 10), ("2026-05-29", 6), ("2026-05-30", 5), ("2025-12-01", 11)]
)
def test_a_price_ages_by_whole_months(date, age):
    assert months_old(date, datetime.date(2026, 11, 29)) == age


class TheTwentyNinthOfNovember(datetime.date):
    @classmethod
    def today(cls):
        return cls(2026, 11, 29)


@pytest.mark.parametrize(
    ("date", "said"),
    [
        ("2026-05-30", ""),
        ("2026-05-29", ". That price is 6 months old: set today's with --prices FILE"),
        ("2025-01-31", ". That price is 21 months old: set today's with --prices FILE"),
    ],
)
def test_a_price_older_than_six_months_is_said_to_be(monkeypatch, date, said):
    monkeypatch.setattr(sections, "datetime", types.SimpleNamespace(date=TheTwentyNinthOfNovember))
    made = plan(step=seconds(3.6))
    price = Price(usd_per_chip_hour=2.0, source="the shop", date=date)
    shown = " ".join(output(plan_sections(outcome(made, cost=cost_of(made, 100, {"v6e": price})))).split())
    assert f"(the shop, {date}); excluding compilation, evaluations and checkpoints{said}" in shown
    assert ("months old" in shown) is bool(said)


def test_without_a_price_there_are_chip_hours_and_the_way_to_set_one():
    made = plan()
    cost = cost_of(made, 100, {})
    assert cost is not None and cost.usd is None
    text = output(plan_sections(outcome(made, cost=cost)))
    assert "the price of v6e-8 is unknown: set one with --prices FILE" in text and "dollars" not in text


def test_a_plan_without_seconds_has_neither_timeline_nor_cost():
    made = plan(step=None, tokens_per_s_per_chip=None, host=None)
    text = output(plan_sections(entry(made)))
    assert "seconds per step unknown" in text and "a step" not in text and "cost" not in text


def suggestion(made: Plan, before: Plan | None = None) -> Outcome:
    change = Change(key="train.rows_per_device", value=8, old=4)
    reason = "update 0.80 s against 1.1: 2 micro-batches against 4"
    return outcome(made, change, before=before or plan(), reason=reason)


def test_a_suggestion_says_what_it_makes_of_the_run_and_who_says_so():
    better = plan(made=phases(took=0.8))
    text = " ".join(output(plan_sections(entry(plan()), [suggestion(better)])).split())
    assert (
        "train.rows_per_device=8 instead of 4: makes a step 2.8 s instead of 3.1 (compiled), 6.9 GiB to spare" in text
    )
    assert "2 micro-batches against 4" in text
    assert "(estimated)" in output(plan_sections(entry(estimated()), [suggestion(estimated(), estimated())]))
    assert "None of the changes tried helps." in output(plan_sections(entry(plan()), []))


def test_the_object_has_what_the_issue_promises():
    value = json.loads(json.dumps(plan_object(entry(plan()), [suggestion(plan())])))
    assert (value["verdict"], value["tpu"], value["hbm_gib"]) == ("fits", "v6e-8", 31.25)
    assert value["step_seconds"]["low"] < value["step_seconds"]["value"] < value["step_seconds"]["high"]
    assert value["tokens_per_s_per_chip"]["value"] == pytest.approx(3200 / value["step_seconds"]["value"])
    assert [phase["name"] for phase in value["phases"]] == [
        "init", "sync", "prefill", "copy", "decode", "update", "checkpoint",
    ]  # fmt: skip
    update = value["phases"][5]
    assert {"name", "gib", "fits", "seconds", "bound_by", "largest"} <= set(update)
    assert update["gib"] == pytest.approx(sum(update["parts_gib"].values()))
    assert update["largest"][0]["name"] == "layer_activations"
    assert value["phases"][0]["seconds"] is None
    assert value["suggestions"][0]["value"] == 8 and value["suggestions"][0]["compiled"] is True
    assert value["cost"]["usd_per_chip_hour"] == 2.0


def test_the_parts_of_a_step_add_up():
    made = plan()
    assert made.step is not None
    assert sum(time.value for _, time in step_parts(made)) == pytest.approx(made.step.value)
    assert [name for name, _ in step_parts(made)] == ["sync", "rollout", "update", "host"]


def test_a_comparison_has_a_row_for_each_and_tells_what_could_not_be_planned():
    entries = ranked([entry(too_large(), written("a=1")), entry(plan(), written("a=2"))])
    refused = [outcome(None, written("a=3"), on="v6e-4", error="a does not divide")]
    text = output(comparison_sections(entries, refused))
    assert text.startswith("v6e-8 a=2 is best (fewest dollars per step): fits v6e-8 with")
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("v6e-8  ")]
    assert [row[1] for row in rows] == ["2", "1"]
    assert rows[1][2:6] == ["does", "not", "fit", "36.4/31.25"]
    assert "v6e-4 a=3: cannot be planned: a does not divide" in text
    value = comparison_object(entries, refused)
    assert [each["setting"] for each in value["plans"]] == ["a=2", "a=1"]
    assert value["refused"] == [{"tpu": "v6e-4", "setting": "a=3", "error": "a does not divide"}]


def test_a_comparison_fits_eighty_columns():
    entries = ranked([entry(too_large(), written("a=1")), entry(plan(), written("a=2"))])
    table = [
        line for line in output(comparison_sections(entries, []), width=80).splitlines() if line.startswith(" v6e-8")
    ]
    assert len(table) == 2 and all("\u2026" not in line and len(line) <= 80 for line in table)


@pytest.mark.parametrize(
    ("tries", "proven", "says"),
    [
        ({8: 24, 9: 33}, True, "k: 8 is the largest that fits; 9 does not"),
        ({8: 24, 9: 33, 10: 34}, True, "k: 8 is the largest that fits; 9 does not (tried up to 10)"),
        (
            {7: 30, 8: 31, 9: 33},
            True,
            "k: 8 is the largest that fits, but it is within 3% of the memory, too close to call; 7 leaves more;"
            " 9 does not",
        ),
        ({8: 24, 12: 33}, False, "k: 8 is the largest that fits; 12 does not; values in between were not tried"),
        ({16: 24}, True, "k: 16 fits, and more would not help: all rows are there"),
        ({1: 36.4}, True, "k: even 1 does not fit (36.4 GiB)"),
    ],
)
def test_a_search_says_how_sure_it_is(tries, proven, says):
    tried = {
        value: Peak(phase="update", bytes=int(gib * GIB), refused=gib > 32, compiled=True)
        for value, gib in tries.items()
    }
    found = Largest(key="k", range=ROWS, tried=tried, hbm_bytes=HBM)
    assert found.proven is proven and search_line(found) == says
    text = output([search_section(found)])
    assert text.count("compiler") + text.count("its refusal") == len(tries)


def test_a_search_by_the_closed_form_says_so_first():
    tried = {16: Peak(phase="update", bytes=24 * GIB, refused=False, compiled=False)}
    found = Largest(key="k", range=ROWS, tried=tried, hbm_bytes=HBM)
    assert search_line(found).startswith("estimated by the closed form, not compiled: k: 16 fits")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.0"), (1234.4, "1,234"), (12.34, "12.3"), (3.14, "3.1"), (0.354, "0.35"), (0.00312, "0.0031")],
)
def test_numbers_are_told_with_two_digits(value, text):
    assert number(value) == text


def test_short_times_are_told_in_milliseconds():
    assert duration(Seconds(value=0.051, low=0.0394, high=0.081)) == "51.0 ms (39.4-81.0)"
    assert duration(Seconds(value=3.1, low=2.6, high=3.7)) == "3.1 s (2.6-3.7)"


def test_our_own_prices_name_their_source_and_day():
    prices = load_prices(None)
    assert {"v4", "v5e", "v5p", "v6e"} <= set(prices)
    assert all(price.source and re.fullmatch(r"20\d\d-\d\d-\d\d", price.date) for price in prices.values())


def test_a_users_prices_replace_ours(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("v6e: {usd_per_chip_hour: 1, source: a friend, date: 2026-03-04}\n")
    assert load_prices(path) == {"v6e": Price(usd_per_chip_hour=1.0, source="a friend", date="2026-03-04")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"cannot be read \(No such file"),
        ("v6e: [", "cannot be read"),
        ("- 1", "expected entries such as"),
        ("v6e: 2.7", "expected entries such as"),
        ("v7: {}", "'v7' is not a kind of chip; write one of a100-40, a100-80, a10g, a6000"),
        ("v6e: {usd: 2}", "v6e: expected usd_per_chip_hour, source, date; found usd"),
        ("v6e: {usd_per_chip_hour: free, source: a, date: 2026-01-01}", "expected a number above 0, got 'free'"),
        ("v6e: {usd_per_chip_hour: -1, source: a, date: 2026-01-01}", "expected a number above 0, got -1"),
        ("v6e: {usd_per_chip_hour: 1, source: '', date: 2026-01-01}", "v6e.source: expected the source"),
        (
            "v6e: {usd_per_chip_hour: 1, source: a, date: today}",
            "v6e.date: expected a date, such as 2026-08-01, got 'today'",
        ),
    ],
)
def test_wrong_prices_are_told_in_a_line(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_prices(path)
    assert "\n" not in str(error.value) and str(error.value).startswith(f"prices {path}: ")
