"""Reads questions and answers from files and data sets, for all tasks with data.

A local path is a .jsonl, .json, .csv or .parquet file, or a folder with one per split; without a path, the data set is
loaded from the hub.
"""

import csv
import dataclasses
import decimal
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podium.config.errors import suggestion
from podium.files import parse_object
from podium.patience import fault_of, patiently, way_out
from podium.plain import clean_texts, message_of, once
from podium.tasks.known_sets import SUBSETS, AnswerForm, is_code, published_form
from podium.tasks.math_answers.correctness import is_correct
from podium.tasks.math_answers.final_answer import final_answer
from podium.tasks.messages import Message, read_messages, text_of
from podium.tasks.task import Prompt, TaskSource

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a data set that hold question and answer."""

    question: tuple[str, ...]
    """Names that the question column may have, of which one must be there. It holds text, or a list of messages."""
    answer: str | None
    """None: rows need no answer, because functions alone compute the reward."""
    reference: Callable[[str], str | None] | None = None
    """Extracts the reference from the answer column, or returns None if there is no reference. Unset: determined by the
    form in which the set is published (`podium.tasks.known_sets`)."""
    rule: str = "is empty"
    """End of the error message for an answer column without a reference."""


class QuestionSet:
    """A task with rows from files or a data set, each with a question and an answer, graded as mathematics."""

    system_prompt: str | None = None

    def __init__(self, name: str, source: TaskSource, columns: Columns) -> None:
        """Does not read anything yet."""
        self.name = name
        self.source = source
        self.columns = columns

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of `train` or `eval`.

        Raises ValueError if a file, split or column is missing, it is unclear which column is asked, a row has no
        question or answer, or there are no rows.
        """
        name = self.source.split_name(split)
        rows = read_rows(self.name, self.source, split)
        question = question_column(self.name, self.columns.question, rows)
        answers = self._answers(rows)
        if answers is not None and answers.without:
            logger.warning("%s: %s", self.name, answers.without)
        prompts = []
        for index, (location, row) in enumerate(rows):
            where = f"{self.name}: {location}"
            if answers is not None and answers.is_without(row):
                continue
            prompts.append(_prompt(f"{self.name}/{name}/{index}", where, row, question, answers))
        if not prompts:
            raise ValueError(
                f"{self.name}: no row has an answer to compare with; {rows[0][0]} has {', '.join(rows[0][1])}"
            )
        return prompts

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the final answer equals the reference."""
        return float(is_correct(completion, prompt.answer))

    def check_answer(self, prompt: Prompt) -> None:
        """Raise ValueError if no completion can earn anything, because the reference does not equal itself."""
        states = final_answer(prompt.answer) is not None or "</think>" in prompt.answer
        ways = ("{}",) if states else STATED  # what already states an answer is read as a completion is
        if not any(self.grade(prompt, way.format(prompt.answer)) for way in ways):
            raise ValueError(
                f"{self.name}: prompt {prompt.id}: no answer can equal the reference {prompt.answer!r:.200}, which does"
                " not equal itself when it is compared; name the column of the result alone (option `answer`), drop"
                " the row, or compare with a function of yours"
            )
        if self.grade(prompt, ""):
            raise ValueError(
                f"{self.name}: prompt {prompt.id}: the reference {prompt.answer!r:.200} equals an empty answer, because"
                " case and punctuation do not count; drop the row, or compare with a function of yours"
            )

    def _answers(self, rows: Sequence[tuple[str, dict[str, object]]]) -> "AnswerForm | None":
        """How the reference is read from a row; None if rows need no answer."""
        if self.columns.answer is None:
            return None
        if self.columns.reference is not None:
            return AnswerForm(self.columns.answer, self.columns.reference, self.columns.rule)
        return published_form(self.name, self.columns.answer, [row for _, row in rows])


STATED = ("\\boxed{{{}}}", "{}", "#### {}", "The answer is {}")
"""Ways to write a completion that states a reference and nothing else."""


def question_column(task: str, names: Sequence[str], rows: Sequence[tuple[str, dict[str, object]]]) -> str:
    """The column that holds the question, of those that it may be.

    Raises ValueError if several of them have values: TRL asks `prompt`, others `question`, and the texts may differ.
    """
    found = [name for name in names if any(not is_missing(row.get(name)) for _, row in rows)]
    if len(found) > 1:
        listed = " and ".join(map(repr, found))
        raise ValueError(
            f"{task}: {rows[0][0]}: the columns {listed} are both there, and either could be what is asked; name one:"
            f" options.question in a config, question={found[-1]!r} in Python"
        )
    return found[0] if found else names[0]


def is_missing(value: object) -> bool:
    """Whether a cell is empty: None, or NaN, which tables of numbers have instead."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def read_rows(task: str, source: TaskSource, split: str) -> list[tuple[str, dict[str, object]]]:
    """The rows of `train` or `eval`, each with its location for messages. Raises ValueError if there are none."""
    path = (source.eval_path if split == "eval" else None) or source.path
    if path:
        rows = [row for file in _local_files(task, split, source) for row in _file_rows(file)]
    elif source.dataset:
        rows = list(_hub_rows(task, source.dataset, source.subset, source.split_name(split)))
    else:
        raise ValueError(f"{task}: path must be set: a {any_of()} file, or a folder with one per split")
    if not rows:
        origin = path or f"{source.dataset} ({source.split_name(split)})"
        raise ValueError(f"{task}: {origin} has no questions; an empty data set cannot be trained or evaluated on")
    return [(location, clean_texts(row)) for location, row in rows]


def _prompt(prompt_id: str, location: str, row: dict[str, object], column: str, answers: AnswerForm | None) -> Prompt:
    """The prompt of one row. Raises ValueError, which names the row, if it is not a valid question and answer."""
    for name, option in ((column, "question"), (answers and answers.column, "answer")):
        if name is not None and name not in row:
            raise ValueError(
                f"{location}: no column {name!r} (the {option}); the task's options name the columns (`podium tasks`);"
                f" {suggestion(name, row)}"
            )
    question, messages = question_of(f"{location}: the question (column {column!r})", row[column])
    answer, within = ("", "") if answers is None else _reference(location, row, answers)
    return Prompt(id=prompt_id, question=question, answer=answer, within=within, metadata=row, messages=messages)


def question_of(what: str, value: object) -> tuple[str, list[Message] | None]:
    """A question's text and, if the question is the last message of a conversation, the conversation.

    Raises ValueError with a message that begins with `what`.
    """
    if isinstance(value, list):
        if value and all(isinstance(each, str) for each in value):
            rule = "a list of texts, as in a table of columns; give each question a row with its answer"
            raise ValueError(f"{what} is {value!r:.80}, {rule}")
        messages = read_messages(what, value)
        if messages[-1]["role"] == "assistant":
            raise ValueError(f"{what} ends with a message of the assistant's; drop it, the model is to write it")
        return text_of(messages[-1]), messages
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} is {value!r:.200}, not text, nor a list of messages")
    refuse_written_messages(what, value)
    return value, None


def refuse_written_messages(what: str, text: str) -> None:
    """Raise ValueError if a text is a conversation written as JSON or by Python, as tables of text hold it."""
    if _WRITTEN_MESSAGES.match(text):
        rule = "a conversation written as text, which the model would be asked literally"
        raise ValueError(
            f"{what} is {text!r:.80}, {rule}; parse it into a list (a .jsonl or .parquet file can hold one)"
        )


_WRITTEN_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](?:role|content|from|value)['"]\s*:""")


def _reference(location: str, row: dict[str, object], answers: AnswerForm) -> tuple[str, str]:
    """Extract the reference from a row; also the column of which it is only a part, or an empty text."""
    what = f"{location}: the answer (column {answers.column!r})"
    value = answer_text(what, answers.value(row))
    listed = next((name for name in ("choices", "options") if isinstance(row.get(name), list)), None)
    if listed is not None and isinstance(answers.value(row), int):
        rule = f"and column {listed!r} is a list: the number may be an index into the list, or the answer itself"
        raise ValueError(f"{what} is {value}, {rule}; write the choices into the question and the letter as the answer")
    reference = answers.reference(value)
    if not reference:
        raise ValueError(f"{what} {answers.rule}: {value[-80:]!r}")
    return reference, "" if reference == value.strip() else answers.column


def answer_text(what: str, value: object) -> str:
    """An answer as text: a text as it is, a number as it is written.

    Raises ValueError, which begins with `what`, for values that are neither, and for what an empty cell leaves.
    """
    if isinstance(value, float | int | decimal.Decimal) and not isinstance(value, bool):
        return _number(what, value)
    if not isinstance(value, str):
        raise ValueError(f"{what} is {value!r:.200}, neither text nor a number; {_NAMED}")
    if value.strip() in ("nan", "NaN", "NaT", "<NA>"):
        raise ValueError(f"{what} is {value!r}, which is no number but what an empty cell leaves; {_NAMED}")
    return value


_NAMED = "give one, name another column (option `answer`), or drop the row"


def _number(what: str, value: float | decimal.Decimal) -> str:
    """A number as text: whole ones without a point, which a column with empty cells adds."""
    if not isinstance(value, int) and not math.isfinite(value):
        raise ValueError(f"{what} is {value}, no number to compare with (an empty cell?); {_NAMED}")
    try:
        whole = isinstance(value, int) or (value == int(value) and abs(value) < WRITTEN_OUT)
        return str(int(value)) if whole else str(value)
    except ValueError as error:  # more digits than Python writes
        raise ValueError(f"{what} cannot be written as text: {error}; {_NAMED}") from None


WRITTEN_OUT = 1e15
"""Whole floats up to this are exact, and are written without an exponent."""


def _local_files(task: str, split: str, source: TaskSource) -> list[Path]:
    """The files of a split: the named file, the folder's file, or the evaluation file next to the training file."""
    own_path = source.eval_path if split == "eval" else None
    path = Path(own_path or source.path or "").expanduser()
    name = source.split_name(split)
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


def holds_code(path: str) -> bool:
    """Whether the first training row of a file or folder has the columns of code with tests."""
    files = _local_files("data", "train", TaskSource(path=path))
    first = next((row for file in files for _, row in _file_rows(file)), None)
    return first is not None and is_code(first)


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
                yield f"{path}:{number}", parse_object(line, f"{path}:{number}", once)


def _json(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the rows of a JSON list of objects; a file that is not a list is read as JSON lines."""
    text = path.read_text("utf-8-sig")
    if not text.lstrip().startswith("["):
        yield from _lines(path)
        return
    try:
        rows = json.loads(text, object_pairs_hook=once)
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
            refuse_repeated(f"{path}: the first line", names)
            if len(names) == 1 and (other := next((each for each in ";\t|" if each in names[0]), None)):
                raise ValueError(f"{path}: the first line separates columns by {other!r}; separate them by commas")
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
        table = parquet.ParquetFile(path).read()
        names = table.column_names
        columns = [column.to_pylist() for column in table.columns]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable parquet file: {error}") from error
    refuse_repeated(str(path), names)
    kinds = {name: str(column.type) for name, column in zip(names, table.columns, strict=True)}
    for number, values in enumerate(zip(*columns, strict=True), 1):
        yield f"{path}: row {number}", floats_as_written(dict(zip(names, values, strict=True)), kinds)


def refuse_repeated(where: str, names: Sequence[object]) -> None:
    """Raise ValueError, which begins with `where`, if a table has two columns of one name."""
    if repeated := sorted({str(name) for name in names if names.count(name) > 1}):
        raise ValueError(f"{where}: column {repeated[0]!r} is there twice; rename one of them")


NARROW = {"float": np.float32, "float32": np.float32, "halffloat": np.float16, "float16": np.float16}
"""Number formats of fewer than 64 bits, by the names that pyarrow and datasets have for them."""


def floats_as_written(row: dict[str, object], kinds: Mapping[str, str]) -> dict[str, object]:
    """The row, with columns of narrow floats as the numbers that they stand for; `kinds` are the columns' types.

    As a 64-bit float, the 32-bit 0.1 is 0.10000000149011612, which is in no data.
    """
    narrow = {name: NARROW[kind] for name, kind in kinds.items() if kind in NARROW}
    values = {name: row[name] for name in narrow}
    return row | {name: float(str(narrow[name](value))) for name, value in values.items() if isinstance(value, float)}


def kinds_of(rows: object) -> dict[str, str]:
    """The types of the columns of a datasets.Dataset; empty for anything else, and for columns of lists and objects."""
    features = getattr(rows, "features", None) or {}
    return {name: each.dtype for name, each in features.items() if isinstance(getattr(each, "dtype", None), str)}


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


def hub_data(what: str, dataset: str, subset: str | None, *, split: str | None = None, otherwise: str = "") -> Any:
    """Load a data set of the hub, or of its cache: one split, or all of them. Waits while the hub does not answer.

    Raises ValueError if it cannot be loaded; the message begins with `what`, and ends with what to do `otherwise`.
    """
    end = f"; or {otherwise}" if otherwise else ""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{what}: data sets of the hub need `datasets`: pip install 'podium-rl[data]'{end}") from error
    chosen = subset or SUBSETS.get(dataset)
    wanted: dict[str, Any] = {} if split is None else {"split": split}
    try:
        return patiently(lambda: datasets.load_dataset(dataset, chosen, **wanted), f"the hub, for {dataset}")
    except (OSError, ValueError, RuntimeError) as error:
        name = dataset if split is None else f"split {split!r} of {dataset}"
        said = " ".join(message_of(error).split())
        login = f"; check its name, or {way_out('login', 'hub')}" if fault_of(error) == "login" else ""
        raise ValueError(f"{what}: could not load {name} from the hub: {said}{login}{end}") from error


def _hub_rows(task: str, dataset: str, subset: str | None, split: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each row of a split of a data set on the hub, or in the local cache, with its location."""
    otherwise = f"set path to a local file ({any_of()}), or train_split and eval_split to splits that exist"
    rows = hub_data(task, dataset, subset, split=split, otherwise=otherwise)
    kinds = kinds_of(rows)
    for number, row in enumerate(rows, 1):
        yield f"{dataset} ({split}) row {number}", floats_as_written(dict(row), kinds)
