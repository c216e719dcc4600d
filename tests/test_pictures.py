"""The pictures of README and docs show the run whose files are in docs/demo/, and nothing of it is cut."""

import html
import json
import re
from functools import cache

import pytest

from podium.files import read_lines
from podium.observe.history import read_history
from podium.observe.metrics import ACCURACY, REWARD
from podium.observe.run_dir import METRICS, SAMPLES, read_config
from tools.pictures import DOCS, KEPT, pictures, shown_step
from tools.race_picture import RESULTS

PAGES = {
    "terminal.svg": "report.md",
    "terminal-120.svg": "report.md",
    "summary.svg": "report.md",
    "demo.svg": None,
    "race.svg": None,
}


def shown(svg: str) -> list[str]:
    """The text of a picture, piece by piece."""
    return [html.unescape(each).replace("\xa0", " ") for each in re.findall(r"<text[^>]*>([^<]+)</text>", svg)]


def text_of(name: str) -> str:
    """All text of a committed picture, as words."""
    return " ".join(" ".join(shown((DOCS / name).read_text())).split())


made = cache(pictures)


@pytest.mark.parametrize("name", PAGES)
def test_a_picture_is_what_the_tool_makes_of_the_run_now(name):
    assert shown((DOCS / name).read_text()) == shown(made()[name])


def test_every_picture_has_its_place():
    assert made().keys() == PAGES.keys()
    readme = (DOCS.parent / "README.md").read_text()
    assert "](docs/terminal.svg)" in readme[: readme.index("\n## ")]
    assert "](docs/demo.svg)" in readme
    assert "](docs/race.svg)" in readme
    for name, page in PAGES.items():
        assert page is None or f"]({name})" in (DOCS / page).read_text()


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_cut_and_nothing_is_loaded_from_elsewhere(name):
    svg = (DOCS / name).read_text()
    assert "\u2026" not in svg
    assert not re.search(r"url\((?!#)|@import|href", svg)


@pytest.mark.parametrize("name", ["terminal.svg", "terminal-120.svg"])
def test_the_live_view_has_the_run_s_numbers_and_labels(name):
    text, metrics = text_of(name), read_lines(KEPT / METRICS)
    step = shown_step(metrics)
    trained = next(line for line in metrics if line["step"] == step and REWARD in line)
    speed = trained["throughput/train/valid_tokens_per_s"]
    accuracies = [value for at, value in read_history(KEPT).points(ACCURACY) if at <= step]
    for expected in (
        f"step {step}/{read_config(KEPT).steps}",
        f"{trained[REWARD]:.3f}",
        f"{trained['train-seq_len/completion/mean']:.1f}",
        f"{trained['time/train/step_s']:.1f} s",
        f"{speed:,.0f} tokens/s" if speed else "no update",
        f"{accuracies[-1]:.3f}",
        " > ".join(f"{each:.2f}" for each in accuracies),
        next(each["question"] for each in read_lines(KEPT / SAMPLES) if each["step"] == step),
    ):
        assert expected in text


def test_the_summary_has_the_run_s_numbers_and_commands():
    text = text_of("summary.svg")
    history = read_history(KEPT)
    (_, first), *_, (step, last) = history.points(ACCURACY)
    assert f"{history.steps} steps" in text
    assert f"{first:.3f} (step 0) -> {last:.3f} (step {step})" in text
    for expected in ("checkpoints", "before", "after", "podium eval runs/demo --show 5"):
        assert expected in text


def test_the_race_ends_at_the_cpu_seconds_and_rewards_that_were_measured():
    """The last corner of each line lies as far along and as high as its measured end, by the axes' own numbers."""
    svg = (DOCS / "race.svg").read_text()
    lines = re.findall(r'<polyline class="race (\w+) (\w+)" points="[^"]* ([\d.]+),([\d.]+)"', svg)
    formats = json.loads(RESULTS.read_text())["formats"]
    numbers = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">(\d+)</text>', svg)
    (left, zero), (right, most) = ((float(x), float(value)) for x, value in (numbers[0], numbers[-1]))
    levels = re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)</text>', svg)
    (low, none), (high, whole) = ((float(y) - 4, float(value)) for y, value in (levels[0], levels[-1]))
    assert len(lines) == 4
    for name, dtype, x, y in lines:
        side = formats[dtype][name]
        cpu_s = zero + (float(x) - left) / (right - left) * (most - zero)
        reward = none + (float(y) - low) / (high - low) * (whole - none)
        assert cpu_s == pytest.approx(sum(side["step_cpu_s"]), abs=1)
        assert reward == pytest.approx(side["rewards"][-1], abs=0.005)
