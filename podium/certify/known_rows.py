"""Checks how rows of data become prompts: questions, answers, conversations and preferences of every form.

The rows are made up. Each is written to a file, and read by the task of its form.
"""

import csv
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podium.certify.check_result import Check
from podium.config.schema import TaskConfig
from podium.tasks.registry import make_task
from podium.tasks.task import Prompt

Row = Mapping[str, Any]
Said = tuple[str, str]
"""Role and content of a message."""


class Read(NamedTuple):
    """What a row must be read as."""

    answer: str
    messages: Sequence[Said]
    """The conversation to continue; its last message is the question."""
    data: Mapping[str, object] = {}
    """Columns that the prompt must have, besides."""


class Case(NamedTuple):
    """Rows of a task."""

    name: str
    options: Mapping[str, object]
    rows: Sequence[Row]
    read: Sequence[Read]


def _asked(text: str) -> list[Said]:
    """A question without a conversation."""
    return [("user", text)]


def _written(messages: Sequence[Said]) -> list[dict[str, str]]:
    """Messages as rows have them."""
    return [{"role": role, "content": content} for role, content in messages]


BEFORE: Sequence[Said] = (("system", "S"), ("user", "A?"), ("assistant", "B"), ("user", "C?"))
PAIR = {"chosen": "good", "rejected": "bad"}
GOOD, BAD = {"completion": "good", "label": True}, {"completion": "bad", "label": False}
CONVERSATIONS: Row = {side: [*_written(BEFORE), *_written([("assistant", text)])] for side, text in PAIR.items()}
CASES: Sequence[Case] = (
    Case(
        "gsm8k",
        {},
        [{"question": "How many?", "answer": "2 #### 3, so 5\n#### 1,234"}, {"question": "Why?", "answer": "####-7 "}],
        [Read("1,234", _asked("How many?")), Read("-7", _asked("Why?"))],
    ),
    Case(
        "math",
        {},
        [{"problem": "P", "answer": r"\frac12"}, {"problem": "Q", "answer": r"Then $x = \boxed{\frac{7}{2}}$."}],
        [Read(r"\frac12", _asked("P")), Read(r"\frac{7}{2}", _asked("Q"))],
    ),
    Case(
        "jsonl",
        {},
        [{"question": "P", "answer": "4", "level": "2"}, {"question": "Q", "answer": "x y", "level": "3"}],
        [Read("4", _asked("P"), {"level": "2"}), Read("x y", _asked("Q"), {"level": "3"})],
    ),
    Case(
        "jsonl",
        {"question": "q", "answer": "a"},
        [{"q": "P", "question": "other", "a": 4, "answer": 5}, {"q": "Q", "question": "other", "a": 2.5, "answer": 6}],
        [Read("4", _asked("P")), Read("2.5", _asked("Q"))],
    ),
    Case(
        "jsonl",
        {},
        [{"prompt": _written(BEFORE), "answer": "9"}],
        [Read("9", BEFORE)],
    ),
    Case("jsonl", {}, [{"problem": "P", "solution": r"3 - 1 is \boxed{2}."}], [Read("2", _asked("P"))]),
    Case(
        "preferences",
        {},
        [{"prompt": "P", **PAIR}, {"prompt": _written(BEFORE), **PAIR}, CONVERSATIONS],
        [Read("good", _asked("P"), PAIR), Read("good", BEFORE, PAIR), Read("good", BEFORE, PAIR)],
    ),
    Case(
        "labelled",
        {},
        [{"prompt": "P", **GOOD}, {"prompt": _written(BEFORE), **BAD}, CONVERSATIONS],
        [Read("good", _asked("P"), GOOD), Read("", BEFORE, BAD), Read("good", BEFORE, GOOD), Read("good", BEFORE, BAD)],
    ),
    Case(
        "chat",
        {"messages": "said"},
        [{"said": [*_written(BEFORE), {"role": "assistant", "content": "D"}]}],
        [Read("B", BEFORE[:2]), Read("D", BEFORE)],
    ),
)


def rows_check() -> Check:
    """Count the made-up rows that are read as other prompts than they are."""
    logging.disable(logging.WARNING)  # tasks say which of several columns they read
    with tempfile.TemporaryDirectory(prefix="podium-certify-") as folder:
        wrong = sum(_wrong_prompts(case, Path(folder)) for case in CASES)
    logging.disable(logging.NOTSET)
    return Check(
        name="rows of data",
        claim="rows in every form and kind of file are read as their questions, answers, conversations and pairs",
        difference=float(wrong),
        bar=0,
    )


def _wrong_prompts(case: Case, folder: Path) -> int:
    """Number of wrong prompts of a case in all kinds of files, which hold other rows, in another order, to evaluate."""
    wrong = 0
    kinds = [".jsonl", ".json"]
    if all(isinstance(value, str) for row in case.rows for value in row.values()):
        kinds.append(".csv")
    for kind in kinds:
        train, held_out = (folder / f"{split}{kind}" for split in ("train", "held_out"))
        _write(train, case.rows)
        _write(held_out, case.rows[:1])
        task = make_task(TaskConfig(name=case.name, path=str(train), eval_path=str(held_out), options={**case.options}))
        found = task.prompts("train")
        wrong += sum(map(_is_other, found, case.read)) + abs(len(found) - len(case.read))
        wrong += len({each.id for each in found}) != len(found)
        first = task.prompts("eval")
        wrong += not 0 < len(first) <= len(found) or sum(map(_is_other, first, case.read))
    return wrong


def _write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a file of the kind of its suffix."""
    if path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) if path.suffix == ".jsonl" else f"[{', '.join(lines)}]", encoding="utf-8")


def _is_other(prompt: Prompt, read: Read) -> bool:
    """Whether a prompt is not what its row must be read as."""
    own = prompt.messages or _written([("user", prompt.question)])
    messages = [(str(each["role"]), str(each["content"])) for each in own]
    data = {name: prompt.metadata.get(name) for name in read.data}
    return (prompt.answer, messages, prompt.question, data) != (
        read.answer,
        list(read.messages),
        read.messages[-1][1],
        dict(read.data),
    )
