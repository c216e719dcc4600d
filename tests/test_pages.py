"""The documentation as a whole: generated pages are current, every page is near, plans that are quoted are right."""

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import deque
from pathlib import Path
from urllib.parse import urldefrag

import pytest
import yaml
from shown_commands import FENCE, ROOT, fenced

from podium import __version__, cli
from podium.accelerators import GIB, find_accelerator
from podium.config.schema import Config
from podium.observe.metric_table import METRICS
from podium.observe.metrics import find_metric
from podium.plan.planner import make_plan
from podium.plan.request.phase_sizes import Planned
from podium.plan.result import Seconds
from podium.settings import load_settings
from tools.reference_pages import PAGES, settings_page
from tools.site_hooks import on_page_content

DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
NAMES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
LOG = sorted((DOCS / "log").glob("*.md"))
SECTIONS = {name.partition("/")[0] for metrics in METRICS.values() for metric in metrics for name in metric.names}


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says(name):
    made = PAGES[name]()
    assert (DOCS / name).read_text(encoding="utf-8") == made, "run python -m tools.reference_pages"


def test_every_setting_has_a_row_with_its_value_and_default():
    page = settings_page()
    for row in (
        "`rollout.temperature` | number, at least 1e-06, at most 1e+06 | `1.0` |",
        "`train.head` | `auto`, `chunked`, `fused` | `auto` |",
    ):
        assert f"| {row}" in page
    assert set(Config.model_fields) <= set(re.findall(r"`(\w+)[.\[`]", page))
    assert "`tasks[].curriculum.window`" in page and "`grading.judges[].rubric`" in page


def test_every_page_is_one_click_from_the_first_and_in_the_navigation():
    first = (DOCS / "index.md").read_text()
    linked = re.findall(r"\]\(([\w/-]+\.md)\)", first)
    shown = [page for section in SITE["nav"][1:] for entry in next(iter(section.values())) for page in entry.values()]
    assert sorted(linked) == sorted(shown) == [name for name in NAMES if name != "index.md"]


def anchor(heading: str) -> str:
    """What GitHub and the site link a heading by."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).lower())


def test_the_log_s_index_has_a_line_for_each_entry():
    expected = []
    for page in LOG:
        for entry in page.read_text(encoding="utf-8").split("\n## ")[1:]:
            heading, _, date, *_ = entry.splitlines()
            end = ", superseded" if "Superseded" in entry else ""
            expected.append(f"- {date[:10]} [{heading}](docs/log/{page.name}#{anchor(heading)}){end}")
    lines = (ROOT / "LOG.md").read_text(encoding="utf-8").splitlines()
    assert sorted(line for line in lines if line.startswith("- ")) == sorted(expected)


def test_a_change_is_one_line_of_the_changelog():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not re.match(r"#{1,3} |- ", line)] == []
    assert [line for line in lines if len(line) > 160] == []


@pytest.mark.parametrize("page", LOG, ids=lambda page: page.stem)
def test_an_entry_of_the_log_is_a_question_a_result_and_a_decision(page):
    for entry in page.read_text(encoding="utf-8").split("\n## ")[1:]:
        said = re.findall(r"^- \*\*(\w+)\.\*\* ", entry, re.MULTILINE)
        assert said == ["Question", "Result", "Decision"], entry.splitlines()[0]


def test_links_within_the_pages_name_headings_that_exist():
    headings = {
        page: {anchor(heading) for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)}
        for page in (DOCS / name for name in NAMES)
    }
    for page in (ROOT / "README.md", ROOT / "LOG.md", *headings):
        for target, name in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            found = headings.get((page.parent / target).resolve() if target else page, {name})
            assert name in found, f"{page.name}: {target}#{name}"


def names_in(page: str) -> set[str]:
    """What a page has in backticks."""
    return set(re.findall(r"`([^`\n]+)`", FENCE.sub("", (DOCS / page).read_text())))


def test_troubleshooting_names_metrics_and_settings_that_exist():
    names = names_in("troubleshooting.md")
    metrics = {name for name in names if name.partition("/")[0] in SECTIONS and "/" in name}
    wrong = [name for name in metrics if find_metric(re.sub("<part>|<task>", "x", name)) is None]
    assert len(metrics) > 30 and wrong == []
    settings = {name.partition(":")[0] for name in names if re.match(r"(rollout|train|algorithm|eval|grading)\.", name)}
    page = settings_page()
    assert len(settings) > 20 and [name for name in settings if f"| `{name}` |" not in page] == []
    causes = (DOCS / "troubleshooting.md").read_text().partition("## The reward stays flat")[2].partition("\n## ")[0]
    assert len([line for line in causes.splitlines() if line.startswith("| ")]) == 12  # the heads and eleven causes


def plans(page: Path) -> list[tuple[str, str]]:
    """Each last command of a block that plans without a compiler, and the block of output behind it."""
    found, blocks = [], FENCE.findall(page.read_text(encoding="utf-8"))
    for (kind, shell), (after, output) in itertools.pairwise(blocks):
        command = shell.strip().splitlines()[-1] if kind == "" and shell.strip() else ""
        if command.startswith("podium plan") and after == "text":
            found.append((re.sub(r"\s+#.*", "", command), output))
    return found


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "one-gpu.md", DOCS / "one-tpu.md"], ids=lambda x: x.stem)
def test_a_plan_that_a_page_quotes_is_what_podium_says(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert plans(page)
    for command, quoted in plans(page):
        said = io.StringIO()
        monkeypatch.setattr(sys, "argv", command.split())
        with contextlib.redirect_stdout(said), pytest.raises(SystemExit):
            cli.main()
        text = " ".join(said.getvalue().split())
        for part in " ".join(quoted.split()).split(" ... "):
            assert part.strip(". ") in text, command


ONE_GPU = [
    "gsm8k_qwen25_3b_lora.yaml rtx4090-1",
    "gsm8k.yaml rtx4090-1 model=Qwen/Qwen2.5-0.5B-Instruct rollout.slots=64",
    "gsm8k_qwen25_7b_lora.yaml rtx4090-1 lora.base=int8 rollout.slots=32 train.rows_per_device=2",
    "gsm8k_qwen25_7b_lora.yaml rtx4090-1 lora.base=int8 rollout.slots=32 train.rows_per_device=2"
    " lora.rollout=apart rollout.cache_tokens=24576",
    "gsm8k_qwen25_7b_lora.yaml h100-1",
    "gsm8k_qwen25_7b_lora.yaml h100-1 model=Qwen/Qwen3-8B",
    "gsm8k.yaml h100-1",
    "gsm8k.yaml h100-1 model=Qwen/Qwen2.5-1.5B-Instruct",
]
"""Config, card and settings of each row of what fits one GPU."""


def fast_plan(command: str) -> tuple[str, Seconds]:
    """Memory and seconds of a step as traced, of a config on a machine with settings."""
    config, machine, *changes = command.split()
    given = load_settings([str(ROOT / "configs" / config)], changes).config
    plan = make_plan(Planned.of(given, find_accelerator(machine)), by="trace")
    usable = plan.hbm_bytes / GIB
    assert plan.step is not None
    return f"{usable - plan.spare_bytes / GIB:.1f} of {usable:.1f} GiB", plan.step


@pytest.mark.parametrize("command", [each for each in ONE_GPU if "_lora.yaml" in each and "=" not in each])
def test_a_config_for_one_gpu_begins_with_what_its_plan_says_and_so_does_the_readme(command):
    config, _ = command.split()
    memory, step = fast_plan(command)
    seconds = f"{step.value:.1f} s ({step.low:.1f}-{step.high:.1f}) a step"
    header = " ".join((ROOT / "configs" / config).read_text(encoding="utf-8").replace("\n#", "").split())
    assert f"{memory}, {seconds}" in header
    (row,) = (line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if config in line)
    assert row.endswith(f"| planned: {seconds} |")


@pytest.mark.parametrize("command", ONE_GPU)
def test_what_fits_one_gpu_is_what_the_plans_say(command):
    memory, step = fast_plan(command)
    seconds = f"{step.value:.1f} s ({step.low:.1f} to {step.high:.1f})"
    rows = re.findall(r"^\| \d+ GB .*", (DOCS / "one-gpu.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == len(ONE_GPU)
    assert rows[ONE_GPU.index(command)].endswith(f"| {memory} | {seconds} |")


def test_the_first_example_is_the_readme_s():
    (code, *_) = fenced(ROOT / "README.md", "python")
    script = (ROOT / "examples" / "first.py").read_text()
    assert script.partition('"""\n\n')[2] == code
    assert len([line for line in code.splitlines() if line.strip()]) <= 11, "ten, and a docstring"


def commands(workflow: str) -> str:
    """What the steps of a workflow run."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text())["jobs"].values()
    return "\n".join(step.get("run", "") for job in jobs for step in job["steps"])


def test_the_workflows_run_what_a_developer_runs():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for workflow in ("check.yml", "publish.yml"):
        run = re.findall(r"^make ([\w-]+)", commands(workflow), re.MULTILINE)
        assert {"check", "test"} <= set(run) <= targets
    nightly = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())["jobs"]["nightly"]
    assert {line.split()[1] for line in nightly["strategy"]["matrix"]["run"]} <= targets
    assert set(re.findall(r"^make ([\w-]+)", commands("nightly.yml"), re.MULTILINE)) == {"test-newest"} <= targets
    publish = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}, "trusted publishing, without a token"
    assert publish["needs"] == "install", "nothing is published that was not installed before"


def test_what_is_published_links_to_the_repository_that_publishes_it(tmp_path):
    """No address stands in pyproject.toml: a fork's packages would name it too."""
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    build = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())["jobs"]["build"]["steps"]
    (add,) = (step["run"] for step in build if "project.urls" in step.get("run", ""))
    of_github = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "a/b", "GITHUB_REF_NAME": "v1.2.3"}
    subprocess.run(["bash", "-euc", add], cwd=tmp_path, env=os.environ | of_github, check=True)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["name"] == "podium-rl"
    assert project["urls"] == {
        "Repository": "https://github.com/a/b",
        "Issues": "https://github.com/a/b/issues",
        "Changelog": "https://github.com/a/b/blob/v1.2.3/CHANGELOG.md",
    }


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_a_workflow_names_the_commit_of_each_action(path):
    used = re.findall(r"uses: (\S+)( # v[\d.]+)?", path.read_text())
    assert used
    assert [action for action, version in used if not version or not re.search(r"@[0-9a-f]{40}$", action)] == []


def test_citation_and_issue_forms_can_be_read():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    for form in ("bug.yml", "wish.yml"):
        body = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / form).read_text())["body"]
        assert len({entry["id"] for entry in body}) == len(body)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by the mkdocs of `make docs`."""
    mkdocs = shutil.which("mkdocs") or str(ROOT / ".venv-docs" / "bin" / "mkdocs")
    if not Path(mkdocs).exists():
        pytest.skip("mkdocs is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [mkdocs, "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def links(page: Path) -> list[str]:
    """Targets of a page's links within the site."""
    return re.findall(r"<a\b[^>]*?\bhref=\"(?!https?:|mailto:|javascript:)([^\"]+)\"", page.read_text(encoding="utf-8"))


@pytest.mark.long
def test_the_site_has_no_dead_link_and_every_page_is_two_clicks_away(site):
    clicks, queue = {site / "index.html": 0}, deque([site / "index.html"])
    while queue:
        page = queue.popleft()
        for link in links(page):
            path, anchor = urldefrag(link)
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor and anchor != "__skip":
                assert f'id="{anchor}"' in target.read_text(encoding="utf-8"), f"{page.name}: {link}"
            if target.suffix == ".html" and target not in clicks:
                clicks[target] = clicks[page] + 1
                queue.append(target)
    pages = {site / Path(name).with_suffix(".html") for name in NAMES}
    assert pages <= clicks.keys() and max(clicks[page] for page in pages) <= 2


@pytest.mark.long
def test_the_search_works_from_a_disk_and_finds_a_setting_by_its_parts(site):
    separator = json.loads((site / "search" / "search_index.json").read_text())["config"]["separator"]
    assert re.split(separator, "--set train.rows_per_device=1, 0.5") == [
        "",
        "set",
        "train",
        "rows_per_device",
        "1",
        "0.5",
    ]
    assert (site / "search" / "search_index.js").exists()
    assert '<script src="site/iframe-worker.js">' in (site / "index.html").read_text()
    assert 'location.protocol === "file:"' in (site / "site" / "iframe-worker.js").read_text()


def test_cells_of_a_wide_table_say_their_column():
    head = "<thead><tr><th>a</th><th>b <em>c</em></th><th>d &amp; e</th></tr></thead>"
    row = '<tr><td><code>train.rows_per_device</code></td><td></td><td style="x"><a href="y">z</a></td></tr>'
    made = on_page_content(f"<table>{head}<tbody>{row}{row}</tbody></table>")
    assert made.startswith("<table data-stack>") and made.count("<tr>") == 3 and head in made
    assert '<td data-label="a"><span><code>train.<wbr>rows_<wbr>per_<wbr>device</code></span></td>' in made
    assert '<td data-label="b c"></td><td data-label="d &amp; e" style="x"><span><a href="y">z</a></span></td>' in made
    narrow = "<table><thead><tr><th>a</th><th>b</th></tr></thead></table>"
    assert on_page_content(narrow) == narrow
    assert on_page_content('<img alt="a" src="b.svg" />') == '<a href="b.svg"><img alt="a" src="b.svg" /></a>'


@pytest.mark.long
def test_the_site_loads_nothing_from_elsewhere_and_tables_are_tables(site):
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"<(?:script|link|img)\b[^>]*(?:src|href)=\"https?://[^\"]*", text) == [], path.name
        assert "<p>|" not in text and "\n|---" not in text, path.name
