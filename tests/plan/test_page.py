import html.parser
import re
from pathlib import Path

import pytest

from podium.plan.report.formatting import peak_and_step, verdict_head
from podium.plan.report.html_page import write_page
from podium.plan.report.sections import comparison_sections, plan_sections
from podium.plan.request.candidate import Change
from podium.plan.search.ranking import ranked
from podium.plan.search.study import cost_of
from podium.prices import Price
from tests.plan.made_plans import gathers, outcome, phase, phases, plan, too_large, written

PRICES = {"v6e": Price(usd_per_chip_hour=2.0, source="the <shop>", date="2026-01-02")}
VOID = {"meta", "br", "hr", "img", "link", "input"}

MARK = "podium plan: a.yaml on v6e-8"


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


@pytest.fixture
def one(tmp_path) -> Page:
    made = plan(made=(*phases(collectives=(gathers(4e9, 36),)),))
    change = Change(key="train.rows_per_device", value=8, old=4)
    suggestion = outcome(plan(made=phases(took=0.8)), change, before=plan(), reason="2 micro-batches")
    entry = outcome(made, cost=cost_of(made, 100, PRICES))
    write_page(tmp_path / "plan.html", "podium plan: a run", plan_sections(entry, [suggestion]), mark=MARK)
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
        "train.rows_per_device=8 instead of 4: makes a step 2.8 s instead of 3.1 (compiled), 6.9 GiB to spare",
    ):
        assert text in one.text
    assert "all-gather fsdp 8 36 4 GB no" in one.text
    assert "Lengths are gsm8k's" in one.text and "libtpu 0.0.42.1" in one.text


def test_the_arrays_of_every_phase_are_there(one):
    for each in plan().phases:
        assert f"largest arrays of {each.name}" in one.text


def test_several_plans_stand_beside_each_other_with_their_reasons(tmp_path):
    made = [outcome(each, written(name)) for name, each in (("a=1", too_large()), ("a=2", plan()))]
    refused = [outcome(None, written("a=3"), on="v6e-4", error="3 < 4 & no")]
    entries = ranked(made)
    folded = {entry.label: plan_sections(entry) for entry in entries}
    write_page(
        tmp_path / "plan.html", "podium plan", comparison_sections(entries, refused), folded, mark="podium plan: a"
    )
    page = Page(tmp_path / "plan.html")
    assert page.text.index("v6e-8 a=2") < page.text.index("v6e-8 a=1")
    assert "v6e-4 a=3: cannot be planned: 3 < 4 & no" in page.text
    assert "saved activations 24.2 against 0" in page.text
    assert page.source.count("<details>") == 2 and page.text.count("memory per device by phase") == 2


def test_names_cannot_break_the_page(tmp_path):
    evil = phase("decode", gib={"<img src=x>": 1.0})
    made = plan(made=(evil, phase("update")), notes=("<script>alert(1)</script>",))
    write_page(
        tmp_path / "plan.html", "podium plan: </script><b> $body", plan_sections(outcome(made)), mark="podium plan: a"
    )
    page = Page(tmp_path / "plan.html")
    assert "<script>alert(1)</script>" in page.text and "podium plan: </script><b> $body" in page.text
    assert page.links == []
