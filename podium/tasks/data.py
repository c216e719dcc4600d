"""Reads questions and answers from files and data sets, for all tasks with data.

A local path is a .jsonl, .json, .csv or .parquet file, or a folder with one per split; without a path, the data set is
loaded from the hub.
"""

import csv
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from podium.config.errors import suggestion
from podium.files import parse_object
from podium.tasks.answers import is_correct
from podium.tasks.task import Prompt, TaskSource

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a data set that hold question and answer."""

    question: tuple[str, ...]
    """Names of the question column; the first present in a row is used. It holds text, or a list of messages."""
    answer: str | None
    """None: rows need no answer, because functions alone compute the reward."""
    reference: Callable[[str], str | None] = str.strip
    """Extracts the reference from the answer column; returns None if there is none."""
    rule: str = "is empty"
    """End of the error message for an answer column without a reference."""


@dataclasses.dataclass(frozen=True)
class HubDataset:
    """A data set on the Hugging Face hub."""

    name: str
    subset: str | None = None


class QuestionSet:
    """A task with rows from files or a data set, each with a question and an answer, graded as mathematics."""

    system_prompt: str | None = None

    def __init__(self, name: str, source: TaskSource, columns: Columns, dataset: HubDataset | None) -> None:
        """Read nothing yet. `dataset` is used if the source has no path; None: a path is required."""
        self.name = name
        self.source = source
        self.columns = columns
        self.dataset = dataset

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of `train` or `eval`.

        Raises ValueError if a file, split or column is missing, a row has no question or answer, or there are no rows.
        """
        name = self.source.eval_split if split == "eval" else self.source.train_split
        return [
            _prompt(f"{self.name}/{name}/{index}", f"{self.name}: {location}", row, self.columns)
            for index, (location, row) in enumerate(read_rows(self.name, self.source, self.dataset, split))
        ]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the final answer equals the reference."""
        return float(is_correct(completion, prompt.answer))


def read_rows(
    task: str, source: TaskSource, dataset: HubDataset | None, split: str
) -> list[tuple[str, dict[str, object]]]:
    """The rows of `train` or `eval`, each with its location for messages. Raises ValueError if there are none."""
    split_name = source.eval_split if split == "eval" else source.train_split
    path = (source.eval_path if split == "eval" else None) or source.path
    if path:
        rows = [row for file in _local_files(task, split, source) for row in _file_rows(file)]
    elif dataset:
        rows = list(_hub_rows(task, dataset, split_name))
    else:
        raise ValueError(f"{task}: path must be set: a {any_of()} file, or a folder with one per split")
    if not rows:
        origin = path or (dataset and f"{dataset.name} ({split_name})")
        raise ValueError(f"{task}: {origin} has no questions; an empty data set cannot be trained or evaluated on")
    return rows


def _prompt(prompt_id: str, location: str, row: dict[str, object], columns: Columns) -> Prompt:
    """The prompt of one row. Raises ValueError, which names the row, if it is not a valid question and answer."""
    column = next((name for name in columns.question if name in row), columns.question[0])
    for name, option in ((column, "question"), (columns.answer, "answer")):
        if name is not None and name not in row:
            raise ValueError(
                f"{location}: no column {name!r} (the {option}); {suggestion(name, row)}. "
                f"The task's options name the columns (`podium tasks`)"
            )
    answer = "" if columns.answer is None else _reference(location, row[columns.answer], columns)
    question, messages = _question(f"{location}: the question (column {column!r})", row[column])
    return Prompt(id=prompt_id, question=question, answer=answer, metadata=row, messages=messages)


def _question(what: str, value: object) -> tuple[str, list[dict[str, str]] | None]:
    """A question's text and, if the question is the last message of a conversation, the conversation.

    Raises ValueError with a message that begins with `what`.
    """
    if isinstance(value, list):
        messages = read_messages(what, value)
        if messages[-1]["role"] == "assistant":
            raise ValueError(f"{what} ends with a message of the assistant's; drop it, the model is to write it")
        return messages[-1]["content"], messages
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} is {value!r:.200}, not text, nor a list of messages")
    return value, None


def read_messages(what: str, messages: object) -> list[dict[str, str]]:
    """Validate a conversation; returns its messages with only role and content. ValueErrors begin with `what`."""
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        rule = "a list of {role: system, user, assistant or tool, content: text}"
        raise ValueError(f"{what} is {messages!r:.200}; expected {rule}")
    return [{"role": each["role"], "content": each["content"]} for each in messages]


def _is_message(value: object) -> bool:
    roles = ("system", "user", "assistant", "tool")
    return isinstance(value, dict) and value.get("role") in roles and isinstance(value.get("content"), str)


def _reference(location: str, answer: object, columns: Columns) -> str:
    """Extract the reference from a row's answer column."""
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str):
        raise ValueError(f"{location}: the answer (column {columns.answer!r}) is {answer!r}, neither text nor a number")
    reference = columns.reference(answer)
    if not reference:
        raise ValueError(f"{location}: the answer (column {columns.answer!r}) {columns.rule}: {answer[-80:]!r}")
    return reference


def _local_files(task: str, split: str, source: TaskSource) -> list[Path]:
    """The files of a split: the named file, the folder's file, or the evaluation file beside the training file."""
    own_path = source.eval_path if split == "eval" else None
    path = Path(own_path or source.path or "").expanduser()
    name = source.eval_split if split == "eval" else source.train_split
    if path.is_dir():
        files = [path / f"{name}{ending}" for ending in READERS]
        found = [file for file in files if file.is_file()][:1] or sorted(path.glob(f"{name}-*.parquet"))
        if not found:
            there = ", ".join(sorted(file.name for file in path.iterdir())[:10]) or "nothing"
            raise ValueError(f"{task}: {path} has no {any_of(name)} (it holds {there})")
        return found
    key = "eval_path" if own_path else "path"
    if not path.is_file():
        raise ValueError(f"{task}: {key}: there is no file or folder {path}")
    if path.suffix not in READERS:
        raise ValueError(f"{task}: {key}: {path} is not {any_of()}")
    if split == "eval" and not own_path:
        beside = path.with_name(f"{name}{path.suffix}")
        if path.stem == source.train_split and beside.is_file():
            return [beside]
        logger.warning(
            "%s: %s is used for both training and evaluation; set eval_path for held-out questions", task, path
        )
    return [path]


def _file_rows(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each row of a file with its location for messages: file and line. Raises ValueError if it is damaged."""
    try:
        yield from READERS[path.suffix](path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8: {error}; convert it") from error


def _lines(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the rows of a file with one JSON object per line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", parse_object(line, f"{path}:{number}")


def _json(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the rows of a JSON list of objects; a file that is not a list is read as JSON lines."""
    text = path.read_text("utf-8-sig")
    if not text.lstrip().startswith("["):
        yield from _lines(path)
        return
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable list of JSON: {error}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number} is {row!r:.80}; expected an object with question and answer")
        yield f"{path}: row {number}", row


def _csv(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the rows of a CSV table with a header line; all values are text, and empty ones None."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file, strict=True)
        try:
            names = table.fieldnames or []
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{path}: column {repeated[0]!r} is there twice; the first line names the columns")
            for row in table:
                where = f"{path}:{table.line_num}"
                if None in row or None in row.values():
                    found = sum(value is not None for value in row.values()) + len(row.get(None, ())) - (None in row)
                    raise ValueError(f"{where}: {found} values for {len(names)} columns; quote values that hold commas")
                yield where, {name: value or None for name, value in row.items()}
        except csv.Error as error:
            raise ValueError(f"{path}:{table.line_num}: not a readable table: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the rows of an Apache Parquet table."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{path}: parquet files need pyarrow: pip install 'podium-rl[data]'") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable parquet file: {error}") from error
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, 1))


READERS: dict[str, Callable[[Path], Iterator[tuple[str, dict[str, object]]]]] = {
    ".jsonl": _lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""File readers, by file name extension."""


def any_of(name: str = "") -> str:
    """The kinds of file that hold rows, for messages; with a name, the files of that name."""
    *first, last = (f"{name}{ending}" for ending in READERS)
    return f"{', '.join(first)} or {last}"


def _hub_rows(task: str, dataset: HubDataset, split: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each row of a split of a data set on the hub, or in the local cache, with its location."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{task}: data sets of the hub need `datasets`: pip install 'podium-rl[data]' (or set path to a local file)"
        ) from error
    try:
        rows = datasets.load_dataset(dataset.name, dataset.subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{task}: could not load split {split!r} of {dataset.name} from the hub: {error}. "
            f"Set path to a local file ({any_of()}), or train_split and eval_split to splits that exist"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{dataset.name} ({split}) row {number}", dict(row)
