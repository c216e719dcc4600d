import html
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from podium.plan.compare import ranked
from podium.plan.formatting import peak_and_step, verdict_head
from podium.plan.page import check_page, write_page
from podium.plan.sections import comparison_sections, plan_sections
from podium.plan.study import Change, cost_of
from podium.prices import Price
from tests.plan.made_plans import GIB, HBM, gathers, outcome, phase, phases, plan, too_large, written

PRICES = {"v6e": Price(usd_per_chip_hour=2.0, source="the <shop>", date="2026-01-02")}
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(html.parser.HTMLParser):
    """Text, outside scripts and styles, and whether every element that begins ends."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self.feed(self.source)
        assert not self.open
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def charts(self) -> list[list[list[tuple[float, float]]]]:
        """The segments of each bar of each chart: where they begin and how long they are, in percent of the scale."""
        charts = re.findall(r'<div class="chart">(.*?)</div>', self.source)
        bars = [re.findall(r'<span class="bar".*?>(.*?)</span>', chart) for chart in charts]
        segment = r'<i style="left:([\d.]+)%;width:([\d.]+)%'
        return [[[(float(a), float(b)) for a, b in re.findall(segment, bar)] for bar in chart] for chart in bars]

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """Where each range begins and how long it is, in percent of the scale."""
        found = re.findall(r'<i class="range" style="left:([\d.]+)%;width:([\d.]+)%', self.source)
        return [(float(a), float(b)) for a, b in found]


@pytest.fixture
def one(tmp_path) -> Page:
    made = plan(made=(*phases(collectives=(gathers(4e9, 36),)),))
    change = Change(key="train.rows_per_device", value=8, old=4)
    suggestion = outcome(plan(made=phases(took=0.8)), change, before=plan(), reason="2 micro-batches")
    entry = outcome(made, cost=cost_of(made, 100, PRICES))
    write_page(tmp_path / "plan.html", "podium plan: a run", plan_sections(entry, [suggestion]))
    return Page(tmp_path / "plan.html")


def test_the_page_needs_no_network(one):
    assert one.links == []
    assert len(one.source) < 100_000
    assert not re.search(r"(?:src|href)\s*=|@import|url\(|<script", one.source)


def test_the_page_says_what_the_terminal_says(one):
    for text in (
        verdict_head(plan()),
        peak_and_step(plan()),
        "0.69 (0.55-0.83) chip-hours",
        "(the <shop>, 2026-01-02)",
        "train.rows_per_device=8 instead of 4 : makes a step 2.8 s instead of 3.1 (compiled), 6.9 GiB to spare",
    ):
        assert text in one.text
    assert "all-gather fsdp 8 36 4 GB no" in one.text
    assert "Lengths are gsm8k's" in one.text and "libtpu 0.0.42.1" in one.text


def test_the_bars_of_memory_add_up_to_the_phases(one):
    memory, _ = one.charts
    for bar, each in zip(memory, plan().phases, strict=True):
        begin, length = bar[-1]
        assert begin + length == pytest.approx(100 * each.bytes / HBM, abs=0.01)
        assert sum(length for _, length in bar) == pytest.approx(begin + length, abs=0.01)


def test_the_timeline_goes_on_where_the_phase_before_ends(one):
    _, timeline = one.charts
    segments = [segment for bar in timeline for segment in bar]
    assert len(segments) == 6  # sync, prefill, copy, decode, update, host
    ends = [begin + length for begin, length in segments]
    assert [begin for begin, _ in segments[1:]] == pytest.approx(ends[:-1], abs=0.01)
    ranges = one.ranges
    assert max(begin + length for begin, length in ranges) == pytest.approx(100, abs=0.01)
    for (begin, length), end in zip(ranges, ends, strict=True):
        assert begin < end < begin + length  # the value is within its range
    assert "where the end may be" in one.text


def test_the_arrays_of_every_phase_are_there(one):
    for each in plan().phases:
        assert f"largest arrays of {each.name}" in one.text


def test_a_table_says_that_it_scrolls_where_the_page_may_be_too_narrow(one):
    assert one.source.count("This table scrolls sideways.") == 2  # phases and transfers
    assert "@media (max-width: 900px) { .scroll { display: block; } }" in one.source


def test_several_plans_stand_beside_each_other_with_their_reasons(tmp_path):
    made = [outcome(each, written(name)) for name, each in (("a=1", too_large()), ("a=2", plan()))]
    refused = [outcome(None, written("a=3"), on="v6e-4", error="3 < 4 & no")]
    entries = ranked(made)
    folded = {entry.label: plan_sections(entry) for entry in entries}
    write_page(tmp_path / "plan.html", "podium plan", comparison_sections(entries, refused), folded)
    page = Page(tmp_path / "plan.html")
    assert page.text.index("v6e-8 a=2") < page.text.index("v6e-8 a=1")
    assert "v6e-4 a=3 : cannot be planned: 3 < 4 & no" in page.text
    assert "saved activations 24.2 against 0" in page.text
    assert len(page.charts) == 1 + 2 * 2  # the steps of both, and memory and step of each


def test_names_cannot_break_the_page(tmp_path):
    evil = phase("decode", gib={"<img src=x>": 1.0})
    made = plan(made=(evil, phase("update")), notes=("<script>alert(1)</script>",))
    write_page(tmp_path / "plan.html", "podium plan: </script><b> $body", plan_sections(outcome(made)))
    page = Page(tmp_path / "plan.html")
    assert "<script>alert(1)</script>" in page.text and "podium plan: </script><b> $body" in page.text
    assert page.links == []


@pytest.mark.parametrize(("name", "message"), [(".", "is a folder"), ("none/plan.html", "there is no folder")])
def test_a_page_that_cannot_be_written_is_told_before_any_work(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        check_page(tmp_path / name)
    check_page(tmp_path / "plan.html")


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MEASURE = """<script>addEventListener("load", () => setTimeout(() => {
  const shown = document.createElement("pre"); shown.id = "measured";
  shown.textContent = JSON.stringify({page: document.documentElement.scrollWidth, window: innerWidth,
    bars: document.querySelectorAll(".bar i").length, charts: document.querySelectorAll(".chart").length});
  document.body.append(shown); }, 500));</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
@pytest.mark.parametrize("width", [500, 1200])
def test_a_browser_draws_the_page_at_any_width(one, tmp_path, width):
    page = tmp_path / "measured.html"
    page.write_text(one.source.replace("</body>", MEASURE), encoding="utf-8")
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=8000",
        f"--window-size={width},900",
    ]
    command = [str(BROWSER), *options, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout)
    assert found is not None, done.stderr[-2000:]
    measured = json.loads(html.unescape(found[1]))
    assert measured["page"] <= measured["window"]  # nothing sticks out sideways
    assert measured["bars"] >= 7 * 6 and measured["charts"] >= 2


def test_memory_ends_at_a_line(one):
    memory = re.findall(r'<div class="chart">(.*?)</div>', one.source)[0]
    assert memory.count('<i class="limit" style="left:100.0000%"></i>') == len(plan().phases)
    assert f"{HBM / GIB:.4g} GiB, the memory limit" in one.text
