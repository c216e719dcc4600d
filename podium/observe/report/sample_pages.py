"""Selects the samples that fit in a report, and averages each prompt's score over steps. Imports no jax."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.observe.report.read import records
from podium.observe.run_dir import SAMPLES
from podium.observe.text import cut

SAMPLE_BYTES = 3_000_000
"""Maximum bytes of samples.jsonl to include in a report."""
TEXT_LENGTH = 4_000
"""Maximum characters of a text to show."""
TOKENS_SHOWN = 1_000
MESSAGES_SHOWN = 64
HEAT_ROWS, HEAT_COLUMNS = 60, 50


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """Mean correctness over steps, by prompt, or by task if no prompt was seen twice."""

    rows: list[str]
    steps: list[int]
    """The last step of each column."""
    values: list[list[float | None]]
    """[rows, columns]; None if the prompt was not seen in these steps."""
    by_prompt: bool


@dataclasses.dataclass(frozen=True)
class Samples:
    """The part of samples.jsonl that a report shows."""

    shown: list[dict[str, Any]]
    """Selected lines in order of steps, with texts cut to TEXT_LENGTH."""
    recorded: int
    """Number of lines in the file."""
    heat: HeatMap | None


@dataclasses.dataclass(frozen=True)
class _Line:
    """A line of samples.jsonl without its texts."""

    start: int
    length: int
    step: int
    split: str
    task: str
    prompt: str
    score: float


def read_samples(folder: Path, problems: list[str]) -> Samples:
    """Read the samples of a run; damaged lines are skipped and reported in `problems`."""
    path = folder / SAMPLES
    lines = list(_index(path, problems))
    chosen = choose(lines)
    shown = []
    if chosen:
        with path.open("rb") as file:
            for line in chosen:
                file.seek(line.start)
                shown.append(_shortened(json.loads(file.read(line.length))))
    trained = [line for line in lines if line.split == "train"] or lines
    return Samples(shown, len(lines), heat_map(trained))


def choose(lines: Sequence[_Line], room: int = SAMPLE_BYTES) -> list[_Line]:
    """Choose the lines to show, in order of steps, within `room` bytes.

    Evaluations come first, then all lines of the prompts seen most often, then evenly spread steps, so that the page
    shows both one step's work and one prompt's development.
    """
    seen: dict[tuple[str, str, str], list[_Line]] = {}
    for line in lines:
        seen.setdefault((line.split, line.task, line.prompt), []).append(line)
    histories = sorted((h for h in seen.values() if len(h) > 1), key=lambda h: (h[0].split != "eval", -len(h)))
    taken: dict[int, _Line] = {}
    left = _take((line for history in histories for line in history), taken, room // 2)
    even = sorted(lines, key=lambda line: _bit_reversed(line.step))  # 0, half, quarters, eighths, ...
    _take(even, taken, left + room // 2)
    return sorted(taken.values(), key=lambda line: (line.step, line.start))


def _take(lines: Iterator[_Line] | Sequence[_Line], taken: dict[int, _Line], room: int) -> int:
    for line in lines:
        if line.start not in taken and line.length <= room:
            taken[line.start] = line
            room -= line.length
        if room < 200:  # lines are never shorter
            break
    return room


def _bit_reversed(step: int) -> int:
    return int(f"{step & 0xFFFFF:020b}"[::-1], 2)


def heat_map(lines: Sequence[_Line]) -> HeatMap | None:
    """Rows are the prompts seen most often (at least twice), otherwise tasks; the hardest is at the top."""
    if not lines:
        return None
    by_prompt: dict[str, list[_Line]] = {}
    for line in lines:
        by_prompt.setdefault(f"{line.task}: {line.prompt}", []).append(line)
    repeated = {name: seen for name, seen in by_prompt.items() if len({line.step for line in seen}) > 1}
    rows = dict(sorted(repeated.items(), key=lambda item: -len(item[1]))[:HEAT_ROWS])
    if not rows:
        for line in lines:
            rows.setdefault(line.task, []).append(line)
    last = max(line.step for line in lines)
    width = max(1, math.ceil((last + 1) / HEAT_COLUMNS))
    columns = last // width + 1
    table = {name: _row(seen, width, columns) for name, seen in rows.items()}
    names = sorted(table, key=lambda name: _last_known(table[name]))
    steps = [min(last, (column + 1) * width - 1) for column in range(columns)]
    return HeatMap(names, steps, [table[name] for name in names], by_prompt=bool(repeated))


def _row(lines: Sequence[_Line], width: int, columns: int) -> list[float | None]:
    sums, counts = [0.0] * columns, [0] * columns
    for line in lines:
        sums[line.step // width] += line.score
        counts[line.step // width] += 1
    return [round(total / count, 3) if count else None for total, count in zip(sums, counts, strict=True)]


def _last_known(row: Sequence[float | None]) -> float:
    return next((value for value in reversed(row) if value is not None), 0.0)


def _index(path: Path, problems: list[str]) -> Iterator[_Line]:
    strange = 0
    for start, length, record in records(path, problems):
        completions = record.get("completions")
        if not isinstance(completions, list) or not completions or not isinstance(record.get("step"), int):
            strange += 1
            continue
        split, task, prompt = (str(record.get(key, "")) for key in ("split", "task", "prompt"))
        yield _Line(
            start, length, step=record["step"], split=split, task=task, prompt=prompt, score=_score(completions)
        )
    if strange:
        problems.append(f"{path.name}: {strange} lines are not samples and were left out")


def _score(completions: Sequence[Any]) -> float:
    """The share of correct answers; without a reward part `correct`, the mean reward."""
    values = []
    for completion in completions:
        parts = completion.get("parts", {}) if isinstance(completion, Mapping) else {}
        value = parts.get("correct", completion.get("reward")) if isinstance(completion, Mapping) else None
        values.append(float(value) if isinstance(value, int | float) else 0.0)
    return sum(values) / len(values)


def _cut_messages(messages: Sequence[object]) -> list[dict[str, object]]:
    """The first messages of a conversation, with texts cut like answers."""
    shown = [each for each in messages[:MESSAGES_SHOWN] if isinstance(each, dict)]
    return [{**each, "content": cut(str(each.get("content") or ""), TEXT_LENGTH)} for each in shown]


def _shortened(record: dict[str, Any]) -> dict[str, Any]:
    """A record with texts cut to TEXT_LENGTH, tokens to TOKENS_SHOWN and messages to MESSAGES_SHOWN."""
    kept = {**record, "question": cut(str(record.get("question", "")), TEXT_LENGTH)}
    kept["answer"] = cut(str(record.get("answer", "")), TEXT_LENGTH)
    completions = [each for each in record["completions"] if isinstance(each, dict)]
    kept["completions"] = [
        {**each, "text": cut(str(each.get("text", "")), TEXT_LENGTH)}
        | ({"messages": _cut_messages(each["messages"])} if isinstance(each.get("messages"), list) else {})
        | ({"pieces": each["pieces"][:TOKENS_SHOWN]} if isinstance(each.get("pieces"), list) else {})
        for each in completions
    ]
    return kept
