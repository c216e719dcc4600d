"""`podium train --profile`: the trace of some steps, and a table by the names of our own scopes."""

import re

import pytest
from tiny_runs import make_config

from podium.train.loop import train
from podium.train.profile import (
    TOUCHED,
    Operation,
    Window,
    operation_table,
    operations,
    parse_window,
    scope_of,
)

pytestmark = [
    pytest.mark.usefixtures("one_device"),
    # Of jax's reader of traces, on Python 3.13; as an error it would end the process.
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning"),
]


def test_a_window_and_a_touched_file_are_profiled(tiny_model, tmp_path, capsys):
    config = make_config(tiny_model, tmp_path, steps=5, eval={"at_start": False, "at_end": False})

    def touch(step, metrics, samples):
        if step == 3:
            (tmp_path / "run" / TOUCHED).touch()

    assert train(config, plain=True, profile=Window(1, 2), on_step=touch) == 0
    folder = tmp_path / "run" / "profile"
    assert {path.name for path in folder.iterdir()} == {"steps-1-2", "steps-1-2.txt", "steps-4-4", "steps-4-4.txt"}
    assert list(folder.glob("steps-4-4/**/*.trace.json.gz")) and list(folder.glob("steps-4-4/**/*.xplane.pb"))
    assert not (tmp_path / "run" / TOUCHED).exists()
    lines = (folder / "steps-4-4.txt").read_text().splitlines()
    shares = [float(re.match(r"\s*([\d.]+)%", line)[1]) for line in lines[1:]]
    assert len(lines) == 22 and sum(shares) == pytest.approx(100, abs=1.5)
    assert shares[:20] == sorted(shares[:20], reverse=True)
    assert any(" train_step " in line for line in lines) and any(" decode" in line for line in lines)
    assert "profile: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0:3", "5:4", "a:b", "3:", ":3", "1:2:3"])
def test_what_is_no_window_is_refused(text):
    with pytest.raises(ValueError, match="expected steps as FIRST:LAST"):
        parse_window(text)


def test_one_step_is_a_window():
    assert (parse_window("7"), parse_window("10:12")) == (Window(7, 7), Window(10, 12))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("jit(train_step)/transpose(jvp(mlp))/dot_general", "mlp/dot_general"),
        ("jit(train_step)/while/body/checkpoint/attention/jit(softmax)/exp", "attention/softmax/exp"),
        ("jit(decode)/add", "add"),
    ],
)
def test_a_path_is_shortened_to_our_names(path, name):
    assert scope_of(path) == name


def test_events_are_summed_by_scope_and_ranked():
    events = [
        ("jit_f", "fusion.1", 0.5),
        ("jit_f", "fusion.2", 1.0),
        ("jit_f", "copy.3", 0.5),
        ("jit_g", "fusion.1", 1.0),
    ]
    scopes = {("jit_f", "fusion.1"): "mlp/dot", ("jit_f", "fusion.2"): "mlp/dot"}
    found = operations(events, scopes)
    assert found[0] == Operation("f", "mlp/dot", 1.5, 2)
    assert {each[:2] for each in found[1:]} == {("f", "copy.3"), ("g", "fusion.1")}
    assert operation_table(found)[1].split() == ["50.0%", "1.5000", "2", "f", "mlp/dot"]
