import io
import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest
from rich.console import Console

from podium.observe.live_view import SIDE_BY_SIDE, Progress
from podium.observe.run_state import ShownCompletion

METRICS = {
    "train-reward/total/mean": 0.75,
    "train-seq_len/completion/mean": 12.5,
    "throughput/train/valid_tokens_per_s": 1234.0,
    "time/train/step_s": 4.2,
    "time/train/rollout_s": 2.5,
    "time/train/update_s": 1.5,
}

LONG = {
    "time/train/step_s": 184.2,
    "throughput/train/valid_tokens_per_s": 12_345_678.0,
    **{f"time/train/{phase}_s": 102.5 for phase in ("rollout", "reward", "score", "update")},
    "time/train/sync_s": 10.0,
}


def plain_console():
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def output(console):
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def view(progress, width=100):
    """The live view as text."""
    console = Console(file=io.StringIO(), width=width)
    console.print(progress)
    return output(console)


def terminal_progress(width=100):
    return Progress("demo", 40, Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=width))


def test_the_devices_are_the_first_line_and_stay_in_the_live_view():
    console = plain_console()
    with Progress("demo", 40, console) as progress:
        progress.machine("1 x NVIDIA H200, 124.6 GiB, bfloat16")
        progress.phase("model")
    assert output(console).splitlines() == ["1 x NVIDIA H200, 124.6 GiB, bfloat16", "model ..."]
    progress = terminal_progress(80)
    progress.machine("8 x TPU v6 lite on 2 hosts, 31.2 GiB each, update bfloat16, rollout float32")
    for _ in range(2):
        assert "8 x TPU v6 lite on 2 hosts, 31.2 GiB each, update bfloat16, rollout float32" in view(progress, 80)
        progress.step(1, METRICS)


def test_without_a_terminal_there_is_one_line_a_step():
    console = plain_console()
    with Progress("demo", 40, console) as progress:
        for step in (1, 2, 3):
            progress.phase("rollout")
            progress.step(step, METRICS)
    lines = output(console).splitlines()
    assert lines[0] == "rollout ... (the first compiles)"
    assert lines[1] == "step 1/40  reward 0.750  length 12.5  1,234 tokens/s  4.20 s  left ?"
    assert [line[:9] for line in lines[2:]] == ["step 2/40", "step 3/40"]
    assert lines[-1].endswith("left 0:00")


def test_conversations_show_their_turns():
    talking = METRICS | {"env/turns/mean": 2.25}
    console = plain_console()
    with Progress("demo", 40, console) as progress:
        progress.step(1, talking)
    line = output(console).splitlines()[-1]
    assert line == "step 1/40  reward 0.750  length 12.5  turns 2.2  1,234 tokens/s  4.20 s  left ?"
    progress = terminal_progress()
    for step, turns in ((1, 1.0), (2, 3.5)):
        progress.step(step, METRICS | {"env/turns/mean": turns})
    assert re.search("turns +3.5  \u2581\u2588", view(progress))
    answered = terminal_progress()
    answered.step(1, METRICS)
    assert "turns" not in view(answered)


def test_preferences_show_their_margin():
    preferring = METRICS | {"train-reward/total/mean": 0.0, "rewards/margins": 2.25}
    console = plain_console()
    with Progress("demo", 40, console) as progress:
        progress.step(1, preferring)
        progress.evaluated(1, {"eval/accuracy": 0.125, "eval-rewards/accuracies": 1.0})
    step, evaluation = output(console).splitlines()[-2:]
    assert step.startswith("step 1/40  margin 2.250  length 12.5")
    assert evaluation == "evaluation at step 1  accuracy 0.125  pairs in order 1.000"
    progress = terminal_progress()
    progress.step(1, preferring)
    assert re.search("margin +2.250", view(progress)) and "reward" not in view(progress)


def test_a_step_that_trained_on_nothing_shows_no_speed():
    idle = METRICS | {"optimizer/updates": 0.0, "throughput/train/valid_tokens_per_s": 0.0}
    console = plain_console()
    with Progress("demo", 40, console) as progress:
        progress.step(1, idle)
    assert output(console).splitlines()[-1] == "step 1/40  reward 0.750  length 12.5  no update  4.20 s  left ?"
    progress = terminal_progress()
    progress.step(1, idle)
    assert "tokens/s" not in view(progress)


def test_without_a_terminal_there_are_no_control_sequences():
    console = plain_console()
    with Progress("demo", 40, console) as progress:
        progress.step(1, METRICS, ShownCompletion("7 + 5?", "\x1b[2J12", 1.0))
        progress.evaluated(1, {"eval/accuracy": 0.5})
        progress.message("checkpoint of step 1 saved")
    assert "\x1b" not in output(console)
    assert output(console).splitlines()[-2:] == ["evaluation at step 1  accuracy 0.500", "checkpoint of step 1 saved"]


def test_the_default_console_is_stderr(capsys):
    with Progress("demo", 40) as progress:
        progress.message("hello")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "hello\n"


def test_the_live_view_shows_phase_step_numbers_accuracy_and_the_last_sample():
    progress = terminal_progress()
    progress.evaluated(0, {"eval/accuracy": 0.25})
    progress.step(1, METRICS | {"train-reward/total/mean": 0.25})
    progress.step(2, METRICS, ShownCompletion("What is 7 + 5?", "It is 12.", 1.0))
    progress.evaluated(2, {"eval/accuracy": 0.5})
    progress.phase("rollout")
    text = view(progress)
    assert "podium demo" in text
    assert "step 2/40" in text
    assert "rollout 0 s" in text
    assert "0:00 left" in text
    assert "0.750  \u2581\u2588" in text
    assert "rollout 2.5  update 1.5  1,234 tokens/s" in text
    assert "0.500  0.25 > 0.50  (step 2)" in text
    assert "What is 7 + 5?" in text
    assert "It is 12." in text


@pytest.mark.parametrize("width", [20, 60, 100, 300])
def test_the_live_view_fits_the_terminal(width):
    progress = terminal_progress(width)
    progress.step(1, METRICS, ShownCompletion("question " * 500, "answer " * 5000, 0.0))
    lines = view(progress, width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert len(lines) < 25


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_labels_and_values_are_whole_at_every_width(columns):
    progress = terminal_progress(columns)
    for step in range(1, 300):
        progress.step(step, METRICS | LONG, ShownCompletion("question " * 500, "answer " * 5000, 0.0))
        progress.evaluated(step, {"eval/accuracy": step / 300})
    progress.phase("evaluation")
    progress.advance(1319, 640, 123_456)
    text = view(progress, columns)
    lines = text.splitlines()
    for label in ("reward", "length", "step", "accuracy", "prompt", "answer"):
        assert re.search(rf"[│ ]{label} ", text), label
    for value in (
        "0.750",
        "12.5",
        "184.2 s",
        "rollout 102.5",
        "sync 10.0",
        "12,345,678 tokens/s",
        "0.997",
        "(step 299)",
    ):
        assert value in text, value
    assert "640 of 1319 completions, 123,456 tokens, 0:00 left" in text
    assert "\u2026" not in text
    assert {len(line) for line in lines} == {columns}
    assert len(lines) <= 23  # and a line for the cursor
    beside = next(line for line in lines if "reward" in line and "0.750" in line)
    assert ("prompt" in beside) == (columns >= SIDE_BY_SIDE)


def test_a_long_phase_says_every_30_seconds_how_far_it_is(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("podium.observe.live_view.time.monotonic", lambda: now[0])
    console = plain_console()
    progress = Progress("demo", 10, console)
    progress.phase("evaluation")
    for done in range(1, 41):
        now[0] += 2.0
        progress.advance(80, done, 100 * done)
    assert output(console).splitlines()[1:] == [
        "evaluation: 15 of 80 completions, 1,500 tokens, 2:10 left",
        "evaluation: 30 of 80 completions, 3,000 tokens, 1:40 left",
    ]


def test_a_narrower_terminal_is_drawn_anew():
    progress = terminal_progress(120)
    with progress:
        progress.step(1, METRICS)
        assert progress._live is not None
        progress._live.refresh()
        before = output(progress.console).count("\x1b[2J")
        progress.console.width = 80
        progress._live.refresh()
        assert output(progress.console).count("\x1b[2J") == before + 1


def test_what_a_model_wrote_cannot_move_the_terminal_or_be_read_as_markup():
    progress = terminal_progress()
    progress.step(1, METRICS, ShownCompletion("[bold]q[/bold]", "[/red] \x1b]0;title\x07 \x1b[2J\u202e[link=x]", 0.0))
    text = view(progress)
    assert "[bold]q[/bold]" in text
    assert "[/red] \\x1b]0;title\\x07 \\x1b[2J\\u202e[link=x]" in text
    assert "\x1b" not in text


def test_a_message_is_not_read_as_markup():
    console = plain_console()
    Progress("demo", 40, console).message("[/bold] failed [red]x[/red]")
    assert output(console) == "[/bold] failed [red]x[/red]\n"


def test_the_time_left_leaves_the_first_step_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("podium.observe.live_view.time.monotonic", lambda: now[0])
    console = plain_console()
    progress = Progress("demo", 10, console)
    for step, seconds in ((1, 60.0), (2, 4.0), (3, 6.0)):  # the first step compiles
        now[0] += seconds
        progress.step(step, METRICS)
    assert output(console).splitlines()[-1].endswith("left 0:35")  # 7 steps of 5 s


def test_an_exception_inside_passes_and_ends_the_view():
    progress = terminal_progress()
    with pytest.raises(KeyError), progress:
        progress.step(1, METRICS)
        raise KeyError("bug")
    text = output(progress.console)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_ctrl_c_on_a_real_terminal_gives_the_cursor_back():
    program = """
        import os, signal, sys
        from podium.observe.live_view import Progress
        with Progress("demo", 40) as progress:
            progress.phase("rollout")
            print("stray output of a library")
            os.kill(os.getpid(), signal.SIGINT)
            progress.phase("never")
    """
    master, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    done = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
    )
    os.close(terminal)
    shown = b""
    while chunk := _read(master):
        shown += chunk
    assert done.wait(120) != 0
    os.close(master)
    assert b"stray output of a library" in shown
    assert b"KeyboardInterrupt" in shown
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert shown.index(b"\x1b[?25l") < shown.index(b"rollout")


def test_a_run_behind_another_program_is_not_stopped_by_the_terminal():
    """As after `podium train run.yaml &`: asking a terminal for something from there stops a process."""
    program = """
        import os, subprocess, sys
        os.open(os.ttyname(0), os.O_RDWR)  # the terminal is this session's, and this process is in front
        run = "from podium.observe.live_view import Progress\\nwith Progress('demo', 40): pass"
        child = subprocess.Popen([sys.executable, "-c", run], process_group=0)
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        child.kill()
        sys.exit(os.WIFSTOPPED(status))
    """
    master, terminal = pty.openpty()
    command, streams = (
        [sys.executable, "-c", textwrap.dedent(program)],
        dict.fromkeys(("stdin", "stdout", "stderr"), terminal),
    )
    done = subprocess.Popen(command, **streams, start_new_session=True)
    os.close(terminal)
    while _read(master):
        pass
    assert done.wait(120) == 0
    os.close(master)


def _read(master):
    try:
        return os.read(master, 65536)
    except OSError:  # Linux's way to say that the other end is closed
        return b""
