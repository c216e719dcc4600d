"""No command replaces a file of the user's."""

import json

import pytest

from podium.config.errors import UsageError
from podium.observe.out_files import check_new, check_page, page_mark
from podium.observe.report.report_page import write_report


def test_a_new_file_must_be_new_and_have_a_folder(tmp_path):
    check_new(tmp_path / "answers.jsonl", "--out")
    (tmp_path / "answers.jsonl").touch()
    with pytest.raises(UsageError, match=r"--out .*answers.jsonl: exists already; name a new file, or delete it"):
        check_new(tmp_path / "answers.jsonl", "--out")
    with pytest.raises(UsageError, match=r"the folder .*none does not exist; create it"):
        check_new(tmp_path / "none" / "answers.jsonl", "--out")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists already"):
        check_new(tmp_path / "link", "--out")


def test_a_page_is_replaced_by_the_next_of_its_kind_alone(tmp_path):
    page = tmp_path / "plan.html"
    check_page(page, "--html", "podium plan: a.yaml on v6e-8")
    page.write_text(f"<html>{page_mark('podium plan: a.yaml on v6e-8')}</html>")
    check_page(page, "--html", "podium plan: a.yaml on v6e-8")
    for other in ("podium plan: b.yaml on v6e-8", "podium plan: a.yaml on h100-1", "podium report: a"):
        with pytest.raises(UsageError, match=r"exists already and is not an earlier page of the same podium"):
            check_page(page, "--html", other)
    page.write_bytes(b"\xff\xfe my own thesis")
    with pytest.raises(UsageError, match="exists already"):
        check_page(page, "--html", "podium plan: a.yaml on v6e-8")
    with pytest.raises(UsageError, match="is not a file"):
        check_page(tmp_path, "--html", "podium plan: a.yaml on v6e-8")
    with pytest.raises(UsageError, match=r"the folder .* does not exist"):
        check_page(tmp_path / "none" / "plan.html", "--html", "podium plan: a")


def test_a_report_replaces_that_of_its_run_and_nothing_else(tmp_path):
    for name, number in (("a", "1"), ("b", "2")):
        run = tmp_path / name
        run.mkdir()
        (run / "run.json").write_text(json.dumps({"run": number, "podium": "0.1.0"}))
        (run / "metrics.jsonl").write_text('{"step": 1, "train-reward/total/mean": 0.5}\n')
    out = tmp_path / "report.html"
    out.write_text("what I wrote last night")
    with pytest.raises(UsageError, match=r"-o .*report.html: exists already and is not an earlier page of the"):
        write_report([tmp_path / "a"], out)
    assert out.read_text() == "what I wrote last night"
    out.unlink()
    write_report([tmp_path / "a"], out)
    write_report([tmp_path / "a"], out)
    (tmp_path / "a").rename(tmp_path / "moved")
    write_report([tmp_path / "moved"], out)
    before = out.read_bytes()
    for runs in ([tmp_path / "b"], [tmp_path / "moved", tmp_path / "b"]):
        with pytest.raises(UsageError, match="exists already"):
            write_report(runs, out)
    assert out.read_bytes() == before
