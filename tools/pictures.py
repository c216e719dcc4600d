"""Pictures of README and docs, made from the files of a real run: `python -m tools.pictures`.

docs/demo/ holds what they need of a run of `make demo`; `python -m tools.pictures RUN` takes it from another run first.
The race with TRL is drawn from the results of its bench.
"""

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

from podium.files import read_lines, to_json
from podium.observe.curve_svg import save_curve
from podium.observe.identity import SUMMARY
from podium.observe.live_view import Progress
from podium.observe.metrics import ACCURACY, REWARD
from podium.observe.run_dir import CONFIG, CURVE, LENGTHS, METRICS, SAMPLES
from podium.observe.run_state import ShownCompletion
from podium.observe.summary import print_summary
from tools.race_picture import race_svg, read_race

DOCS = Path(__file__).parents[1] / "docs"
KEPT = DOCS / "demo"
RUN = Path("runs", "demo")
DRAWN = ("step", "eval/accuracy", REWARD, "train-seq_len/completion/mean", "throughput/", "time/", "optimizer/updates")
"""How the metrics begin that the pictures show."""
COLUMNS = 92
SHOWN_AT = 0.5
"""Of the run's steps: where the live view is looked at."""
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


def keep(run: Path) -> None:
    """Copy to docs/demo/ what the pictures need of a run."""
    KEPT.mkdir(exist_ok=True)
    shutil.copy(run / CONFIG, KEPT / CONFIG)
    metrics = [{name: x for name, x in line.items() if name.startswith(DRAWN)} for line in read_lines(run / METRICS)]
    (KEPT / METRICS).write_text("".join(to_json(line) + "\n" for line in metrics))
    samples, last = read_lines(run / SAMPLES), metrics[-1]["step"]
    at = shown_step(metrics)
    first = next(each for each in samples if (each["step"], each["split"]) == (at, "train"))
    asked = [first, *(each for each in samples if each["split"] == "eval" and each["step"] in (0, last))]
    with (KEPT / SAMPLES).open("w") as file:
        for each in asked:
            answer = {name: each["completions"][0][name] for name in ("text", "reward")}
            file.write(to_json({**each, "completions": [answer]}) + "\n")


def shown_step(metrics: list[dict[str, Any]]) -> int:
    """The step after which the live view is looked at."""
    return round(SHOWN_AT * metrics[-1]["step"])


def live_view(folder: Path, columns: int) -> RenderableType:
    """Render what a terminal of `columns` columns showed of a run in the middle of an update."""
    metrics, samples = read_lines(folder / METRICS), read_lines(folder / SAMPLES)
    done, steps = shown_step(metrics), yaml.safe_load((folder / CONFIG).read_text())["steps"]
    (sample,) = (each for each in samples if each["split"] == "train")
    (answer,) = sample["completions"]
    shown = ShownCompletion(sample["question"], answer["text"], answer["reward"])
    console = Console(file=io.StringIO(), width=columns, force_terminal=True, force_interactive=True)
    with mock.patch("time.monotonic", return_value=0.0) as clock:
        progress = Progress(folder.name, steps, console)
        for line in (line for line in metrics if line["step"] <= done):
            clock.return_value = line["time/wall_s"]
            if ACCURACY in line:
                progress.evaluated(line["step"], line)
            else:
                progress.phase("update")
                progress.step(line["step"], line, shown)
        following = next(line for line in metrics if line["step"] > done)
        clock.return_value += following["time/train/rollout_s"]
        progress.phase("update")
        clock.return_value += following["time/train/update_s"] / 2
        return progress.__rich__()


def screen(columns: int, *lines: RenderableType) -> Console:
    """A terminal with these lines on it, to be exported."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(line)
    return console


def picture(console: Console, title: str) -> str:
    """What a terminal shows as an SVG, which loads no font from anywhere."""
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id="podium")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", FONT)


def pictures() -> dict[str, str]:
    """Every picture by its file's name in docs/."""
    command = "podium train configs/demo.yaml"
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        shutil.copytree(KEPT, RUN)
        save_curve(RUN)
        for name in (LENGTHS, SUMMARY):  # a run has them, and they are listed
            (RUN / name).touch()
        (RUN / "checkpoints").mkdir()
        end = screen(COLUMNS)
        with mock.patch.dict(os.environ, PATH=str(Path(sys.executable).parent)):  # the environment is active
            print_summary(RUN, end)
        found = {"demo.svg": (RUN / CURVE).read_text(), "summary.svg": picture(end, command)}
        found["race.svg"] = race_svg(read_race())
        for name, columns in {"terminal.svg": COLUMNS, "terminal-120.svg": 120}.items():
            found[name] = picture(screen(columns, "$ make demo", live_view(RUN, columns)), command)
    return found


def main() -> None:
    """Write them."""
    if len(sys.argv) == 2:
        keep(Path(sys.argv[1]))
    for name, text in pictures().items():
        (DOCS / name).write_text(text)


if __name__ == "__main__":
    main()
