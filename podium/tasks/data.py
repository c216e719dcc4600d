"""Questions and answers from files and data sets, for every task that reads data.

A local path is a .jsonl or .parquet file, or a folder with one per split; without a path, the hub is asked.
"""

import dataclasses
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

    question: str
    answer: str | None
    """None: rows need no answer, because only functions compute the reward."""
    reference: Callable[[str], str | None] = str.strip
    """Reads the reference from the answer column; returns None if it holds none."""
    rule: str = "is empty"
    """The error message about an answer column without a reference."""


@dataclasses.dataclass(frozen=True)
class HubDataset:
    """A data set on the Hugging Face hub."""

    name: str
    subset: str | None = None


class QuestionSet:
    """A task made of rows of files or of a data set, with a question and an answer each, graded as mathematics."""

    system_prompt: str | None = None

    def __init__(self, name: str, source: TaskSource, columns: Columns, dataset: HubDataset | None) -> None:
        """Read nothing yet. `dataset` is used for a source without a path; None if a path is required."""
        self.name = name
        self.source = source
        self.columns = columns
        self.dataset = dataset

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of `train` or `eval`.

        Raises ValueError for a file, split or column that is not there, a row without question or answer, or no rows.
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
        raise ValueError(f"{task}: path must be set: a .jsonl or .parquet file, or a folder with one per split")
    if not rows:
        origin = path or (dataset and f"{dataset.name} ({split_name})")
        raise ValueError(f"{task}: {origin} has no questions; an empty data set cannot be trained or evaluated on")
    return rows


def _prompt(prompt_id: str, location: str, row: dict[str, object], columns: Columns) -> Prompt:
    """The prompt of one row. Raises ValueError, which names the row, if it is not a valid question and answer."""
    for column, option in ((columns.question, "question"), (columns.answer, "answer")):
        if column is not None and column not in row:
            raise ValueError(
                f"{location}: no column {column!r} (the {option}); {suggestion(column, row)}. "
                f"The task's options name the columns (`podium tasks`)"
            )
    question = row[columns.question]
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{location}: the question (column {columns.question!r}) is {question!r}, not text")
    if columns.answer is None:
        return Prompt(id=prompt_id, question=question, answer="", metadata=row)
    answer = row[columns.answer]
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str):
        raise ValueError(f"{location}: the answer (column {columns.answer!r}) is {answer!r}, neither text nor a number")
    reference = columns.reference(answer)
    if not reference:
        raise ValueError(f"{location}: the answer (column {columns.answer!r}) {columns.rule}: {answer[-80:]!r}")
    return Prompt(id=prompt_id, question=question, answer=reference, metadata=row)


def _local_files(task: str, split: str, source: TaskSource) -> list[Path]:
    """The files of a split: the named file, the folder's file, or the evaluation file beside the training file."""
    own_path = source.eval_path if split == "eval" else None
    path = Path(own_path or source.path or "").expanduser()
    name = source.eval_split if split == "eval" else source.train_split
    if path.is_dir():
        files = [path / f"{name}{ending}" for ending in (".jsonl", ".parquet")]
        found = [file for file in files if file.is_file()][:1] or sorted(path.glob(f"{name}-*.parquet"))
        if not found:
            there = ", ".join(sorted(file.name for file in path.iterdir())[:10]) or "nothing"
            raise ValueError(f"{task}: {path} has no {name}.jsonl or {name}.parquet (it holds {there})")
        return found
    key = "eval_path" if own_path else "path"
    if not path.is_file():
        raise ValueError(f"{task}: {key}: there is no file or folder {path}")
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{task}: {key}: {path} is neither .jsonl nor .parquet")
    if split == "eval" and not own_path:
        beside = path.with_name(f"{name}{path.suffix}")
        if path.stem == source.train_split and beside.is_file():
            return [beside]
        logger.warning(
            "%s: %s is used for both training and evaluation; set eval_path for held-out questions", task, path
        )
    return [path]


def _file_rows(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each row of a file with its location for messages: file and line."""
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise ValueError(f"{path}: parquet files need pyarrow: pip install 'podium-rl[data]'") from error
        try:
            rows = parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: not a readable parquet file: {error}") from error
        yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, 1))
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", parse_object(line, f"{path}:{number}")


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
            f"Set path to a local .jsonl or .parquet file, or train_split and eval_split to splits that exist"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{dataset.name} ({split}) row {number}", dict(row)
