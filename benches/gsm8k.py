r"""GSM8K end to end on this machine, and its grader on all of its test answers.

    python -m benches.gsm8k --data FOLDER        (train.jsonl and test.jsonl of GSM8K; CPU, some minutes)

Each answer of the test set, written in four ways, must be graded correct for its own question; numbers that differ
from it, written in the same ways, must not; and no solution's last calculation (`16-3`) may be accepted for its
result. Then configs/gsm8k_smollm2.yaml is trained: three steps of SmolLM2-135M and an evaluation on 64 test
questions. Prints the results and writes benches/results/gsm8k-cpu.json; exit status 1 where a grade is wrong.
`--set` reaches the run.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benches.record import ROOT, arguments, record, train_command
from podium.config.schema import TaskConfig
from podium.tasks.math_answers.number_text import read_number
from podium.tasks.registry import make_task
from podium.tasks.task import Prompt, Task

CONFIG = ROOT / "configs" / "gsm8k_smollm2.yaml"
FORMS = {
    "alone": "{}",
    "boxed": r"First 3 and 4, then \boxed{{{}}}",
    "hashes": "There are 5 * 6 = 30 of them.\n#### {}",
    "sentence": "Adding 1 and 2 twice, the answer is {}.",
}


def check_grader(task: Task) -> dict[str, Any]:
    """How many answers of the test set are graded wrongly, and the first few of them."""
    prompts = task.prompts("eval")
    start, missed, accepted = time.perf_counter(), [], []
    for prompt, following in zip(prompts, [*prompts[1:], prompts[0]], strict=True):
        others = different_numbers(prompt, following)
        for name, form in FORMS.items():
            if task.grade(prompt, form.format(prompt.answer)) != 1.0:
                missed.append(f"{prompt.id} {name}: {prompt.answer}")
            accepted += [
                f"{prompt.id} {name}: {other} for {prompt.answer}"
                for other in others
                if task.grade(prompt, form.format(other)) != 0.0
            ]
    return {
        "questions": len(prompts),
        "forms": list(FORMS),
        "own_answer_missed": len(missed),
        "different_number_accepted": len(accepted),
        "shown": [*missed[:5], *accepted[:5]],
        "wall_s": round(time.perf_counter() - start, 2),
    }


def different_numbers(prompt: Prompt, following: Prompt) -> list[str]:
    """One more, the negative, ten times as much, and the next question's answer, as far as they differ."""
    number = read_number(prompt.answer)
    if number is None:
        raise ValueError(f"{prompt.id}: the reference {prompt.answer!r} is not a number; is this GSM8K?")
    value = number.value
    candidates = [str(value + 1), str(-value), str(10 * value), following.answer]
    other = read_number(following.answer)
    differ = [True, value != 0, value != 0, other is not None and other.value != value]
    return [text for text, kept in zip(candidates, differ, strict=True) if kept]


def check_calculations(task: Task, file: Path) -> dict[str, Any]:
    """How many solutions' last calculation, boxed before it is evaluated, is graded correct for the final result."""
    references = {prompt.question: prompt for prompt in task.prompts("eval")}
    annotated = calculations = 0
    accepted: list[str] = []
    for row in map(json.loads, file.read_text().splitlines()):
        if not (annotations := re.findall(r"<<([^<>=]*)=", row["answer"])):
            continue
        annotated += 1
        prompt, calculation = references[row["question"]], annotations[-1]
        if not re.search(r"[-+*/]", calculation[1:]):
            continue  # <<5=5>>: nothing to calculate
        calculations += 1
        if task.grade(prompt, rf"\boxed{{{calculation}}}") != 0.0:
            accepted.append(f"{prompt.id}: {calculation} for {prompt.answer}")
    return {
        "annotated_solutions": annotated,
        "calculations": calculations,
        "accepted": len(accepted),
        "shown": accepted[:5],
    }


def train(data: Path, folder: Path, settings: list[str]) -> dict[str, Any]:
    """The run's summary, the time from start to exit, and its steps."""
    changes = [f"tasks.0.path={data}", "name=gsm8k", f"runs_dir={folder}", *settings]
    start = time.perf_counter()
    if status := subprocess.run(train_command(CONFIG, *changes), stdout=sys.stderr).returncode:
        sys.exit(f"podium train ended with status {status}; its output stands above")
    wall_s = time.perf_counter() - start
    lines = [json.loads(line) for line in (folder / "gsm8k" / "metrics.jsonl").read_text().splitlines()]
    times = ("step_s", "step_cpu_s", "rollout_s", "update_s")
    return {
        "wall_s": round(wall_s, 1),
        "summary": json.loads((folder / "gsm8k" / "summary.json").read_text()),
        "steps": [
            {name: round(line[f"time/train/{name}"], 2) for name in times}
            | {"reward": line["train-reward/total/mean"], "completion_tokens": line["rollout/completion_tokens"]}
            for line in lines
            if "train-reward/total/mean" in line
        ],
        "evaluation": {name: value for name, value in lines[-1].items() if "eval/" in name},
    }


def main() -> None:
    """Prints and writes both; exit status 1 where an answer is graded wrongly or the run fails."""
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="with train.jsonl and test.jsonl")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="as in podium")
    args = parser.parse_args()
    task = make_task(TaskConfig(name="gsm8k", path=str(args.data)))
    grader, calculations = check_grader(task), check_calculations(task, args.data / "test.jsonl")
    print("grader:", grader)
    print("calculations:", calculations)
    with tempfile.TemporaryDirectory() as folder:
        run = train(args.data.absolute(), Path(folder), args.settings)
    print(f"run: {run['wall_s']} s, steps {run['steps']}, evaluation {run['evaluation']}")
    results = {"grader": grader, "calculations": calculations, "settings": args.settings, "run": run}
    record("gsm8k-cpu", results, args.results)
    sys.exit(bool(grader["own_answer_missed"] or grader["different_number_accepted"] or calculations["accepted"]))


if __name__ == "__main__":
    main()
