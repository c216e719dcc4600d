"""Progress in a notebook, with a stand-in for IPython; a long test of tests/train runs a real kernel."""

import base64
import re
import sys
import types

import pytest

from podium.observe.live_view import Progress, run_console
from podium.observe.notebook import in_notebook

METRICS = {"train-reward/total/mean": 0.5, "train-seq_len/completion/mean": 12.5, "time/train/step_s": 4.2}


@pytest.fixture
def shown(monkeypatch):
    """The contents of the cell's outputs, by output, in order."""
    outputs: list[list[dict[str, str]]] = []

    class Handle:
        def __init__(self, contents):
            self.contents = contents

        def update(self, data, raw):
            assert raw
            self.contents.append(data)

    def display(data, raw, display_id):
        assert raw and display_id
        outputs.append([data])
        return Handle(outputs[-1])

    ipython, part = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.__dict__["get_ipython"] = lambda: types.SimpleNamespace(kernel=object())
    part.__dict__["display"] = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", part)
    return outputs


def picture(data):
    """The SVG of an output's image."""
    found = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', data["text/html"])
    return base64.b64decode(found[1]).decode() if found else ""


def test_one_output_shows_a_curve_that_grows_and_no_line_is_printed(shown, capsys):
    with Progress("a <run>", 3, run_console(plain=False)) as progress:
        progress.phase("model")
        progress.phase("rollout")
        progress.evaluated(0, {"eval/accuracy": 0.25})
        for step in (1, 2, 3):
            progress.step(step, METRICS | {"train-reward/total/mean": step / 4})
            progress.phase("rollout")
        progress.evaluated(3, {"eval/accuracy": 0.75})
    (contents,) = shown
    assert capsys.readouterr() == ("", "")
    assert re.search(r"step 3/3  reward 0\.750  0:0\d</div>$", contents[-1]["text/html"])
    widths = [len(re.findall(r",", picture(data).partition('class="raw"')[2].partition("/>")[0])) for data in contents]
    assert widths == sorted(widths) and widths[-1] == 3
    assert "accuracy 0.25 to 0.75" in picture(contents[-1])
    assert "<run>" not in contents[-1]["text/html"]
    rows = re.findall(r"<tr>(.*?)</tr>", contents[-1]["text/html"])
    assert [re.findall(r">([^<]+)</t[hd]>", row) for row in rows] == [
        ["step", "reward", "length", "entropy", "seconds"],
        ["1", "0.250", "12.5", "\u2013", "4.2"],
        ["2", "0.500", "12.5", "\u2013", "4.2"],
        ["3", "0.750", "12.5", "\u2013", "4.2"],
    ]


def test_the_table_keeps_the_last_steps(shown):
    with Progress("run", 20, run_console(plain=False)) as progress:
        for step in range(1, 21):
            progress.step(step, METRICS)
    assert re.findall(r"<tr><td[^>]*>(\d+)<", shown[0][-1]["text/html"]) == ["15", "16", "17", "18", "19", "20"]


def test_messages_are_plain_lines_of_the_cell(shown, capsys):
    with Progress("run", 4, run_console(plain=False)) as progress:
        progress.message("continuing after step 2")
    assert capsys.readouterr() == ("continuing after step 2\n", "")


def test_a_run_without_rewards_shows_its_line(shown):
    with Progress("run", 4, run_console(plain=False)) as progress:
        progress.step(1, {})
        progress.phase("update")
    assert "<img" not in shown[0][-1]["text/html"] and "step 1/4" in shown[0][-1]["text/plain"]


def test_a_run_that_was_stopped_says_how_to_continue(shown):
    with Progress("mine", 4, run_console(plain=False)) as progress:
        progress.step(1, METRICS)
    assert shown[0][-1]["text/plain"].endswith("; the same call with name='mine' continues")


def test_a_shell_of_ipython_is_no_notebook(shown, monkeypatch):
    assert in_notebook()
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: types.SimpleNamespace(kernel=None))
    assert not in_notebook()
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: None)
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()
