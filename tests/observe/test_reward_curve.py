import json
import xml.etree.ElementTree as ElementTree

import pytest

from podium.observe.chart import BARS, MARK, reward_curve, value_range
from podium.observe.curve_svg import curve_svg, running_mean, save_curve

SVG = "{http://www.w3.org/2000/svg}"


def test_a_curve_rises_from_the_lower_left_to_the_upper_right():
    rows = reward_curve([(step, step / 8) for step in range(1, 9)], width=15, height=8).plain.splitlines()
    assert [row[7:] for row in rows[:8]] == [" " * (7 - i) + BARS[8] * (i + 1) for i in range(8)]
    assert rows[0].startswith("  1.00")
    assert rows[7].startswith("  0.00")
    assert rows[9].split() == ["0", "step", "8"]


def test_a_bar_ends_in_eighths_of_a_row():
    rows = reward_curve([(1, 0.5 + 3 / 8 / 4)], width=8, height=4).plain.splitlines()
    assert [row[7:] for row in rows[:4]] == [" ", BARS[3], BARS[8], BARS[8]]


def test_evaluations_are_marks_at_their_step_and_height():
    rows = reward_curve([(8, 0.0)], [(0, 0.0), (4, 0.5), (8, 1.0)], width=15, height=8).plain.splitlines()
    places = [(row, line.index(MARK) - 7) for row, line in enumerate(rows) if MARK in line]
    assert places == [(0, 7), (3, 4), (7, 0)]


def test_more_steps_than_columns_are_averaged():
    rows = reward_curve([(step, float(step % 2)) for step in range(1, 1001)], width=17, height=2).plain.splitlines()
    assert rows[0][7:] == " " * 10
    assert rows[1][7:] == BARS[8] * 10


@pytest.mark.parametrize(
    ("values", "ends"),
    [([0.2, 0.9], (0, 1)), ([0.0], (0, 1)), ([-1.0, 0.5], (-1, 0.5)), ([0.3, 2.0], (0, 2)), ([-2.0, -1.0], (-2, 0))],
)
def test_the_axis_holds_all_values(values, ends):
    assert value_range(values) == ends


def test_the_picture_is_an_svg_whose_lines_have_a_point_per_step():
    root = ElementTree.fromstring(curve_svg("a <b> & c", [(1, 0.2), (2, 0.4), (3, 0.9)], [(0, 0.25), (3, 0.75)]))
    lines = {line.get("class"): line.get("points", "").split() for line in root.iter(f"{SVG}polyline")}
    assert {name: len(points) for name, points in lines.items()} == {"raw": 3, "mean": 3, "eval": 2}
    heights = [float(point.split(",")[1]) for point in lines["raw"]]
    assert heights == sorted(heights, reverse=True)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "a <b> & c: accuracy 0.25 to 0.75 in 3 steps" in texts
    assert {"0.25", "0.75", "0.00", "1.00"} <= set(texts)


def test_of_many_evaluations_only_the_first_and_last_have_numbers():
    accuracies = [(step, step / 100) for step in range(21)]
    root = ElementTree.fromstring(curve_svg("run", [(1, 0.0), (20, 1.0)], accuracies))
    assert [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "value"] == ["0.00", "0.20"]


@pytest.mark.parametrize("last", [1, 7, 40, 100, 999, 123456])
def test_the_step_axis_has_a_few_round_numbers(last):
    root = ElementTree.fromstring(curve_svg("run", [(last, 0.5)], []))
    ticks = [int(text.text or "") for text in root.iter(f"{SVG}text") if (text.text or "").isdecimal()]
    assert ticks[0] == 0
    assert 2 <= len(ticks) <= 7
    assert ticks[-1] <= last


def test_a_running_mean_is_centred_and_short_at_the_ends():
    means = running_mean([(step, float(value)) for step, value in enumerate([0, 10, 20, 30, 40])])
    assert means == [(0, 10.0), (1, 15.0), (2, 20.0), (3, 25.0), (4, 30.0)]


def test_the_picture_of_a_run_is_made_from_its_metrics(tmp_path):
    run = tmp_path / "demo"
    run.mkdir()
    save_curve(run)
    assert not list(run.iterdir())
    line = {"step": 1, "train-reward/total/mean": 0.5, "time/wall_s": 1.0, "time/cpu_s": 2.0}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    save_curve(run)
    assert ElementTree.parse(run / "curve.svg").getroot().get("aria-label") == "Reward of demo over 1 steps"
