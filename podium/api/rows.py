"""Converts `data=` arguments: rows become a .jsonl file in the run's folder; paths and hub ids are kept."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeGuard

from podium.files import write_atomically
from podium.tasks.data import READERS, any_of

Rows = Iterable[Mapping[str, object]]
"""Dicts, a datasets.Dataset, or a pandas or polars DataFrame."""
Data = Rows | Mapping[str, Rows] | str | Path | Callable[..., object]
"""Rows, a datasets.DatasetDict, a file or folder of rows, a hub id, or a task's class."""

TRAIN_SPLITS = ("train",)
EVAL_SPLITS = ("test", "validation")
"""Splits of a DatasetDict to read for training or evaluation; the first that exists is used."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def hub_id(data: object) -> str | None:
    """The data if it is the id of a hub data set, `owner/name`; None for an existing path, and for anything else."""
    if not isinstance(data, str) or not _HUB_ID.fullmatch(data) or Path(data).expanduser().exists():
        return None
    return None if Path(data).suffix in READERS else data


def is_task(data: object) -> bool:
    """Whether the data is a task's class, or another callable that makes a task."""
    return isinstance(data, type) or (callable(data) and not isinstance(data, Iterable))


def data_file(
    data: object, folder: Path, what: str, splits: Sequence[str] = EVAL_SPLITS, *, subset: str | None = None
) -> str:
    """Return the path of the data; rows are first written to a file named after a hash of their content.

    Args:
        data: a path, which is returned unchanged; rows; or a hub id.
        folder: folder of the written file.
        what: name of the argument, for messages and for the file name.
        splits: the first of these splits that exists is read, for a DatasetDict or a hub data set.
        subset: configuration of a hub data set.

    Raises:
        ValueError: there is no such file or split, an item is not a row, or it holds a value that JSON cannot
            represent.
    """
    if name := hub_id(data):
        data = _hub_splits(name, subset, what)
    if isinstance(data, str | Path):
        return _existing(str(data), what)
    lines = []
    for index, row in enumerate(_rows(data, what, splits)):
        if not isinstance(row, Mapping):
            expected = "a dict, such as {'question': ..., 'answer': ...}"
            raise ValueError(f"{what}: row {index} is {row!r:.80}; expected {expected}")
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, default=_scalar) + "\n")
        except TypeError as error:
            raise ValueError(f"{what}: row {index} cannot be written as JSON ({error}); drop that column") from None
    if not lines:
        raise ValueError(f"{what}: it has no rows")
    text = "".join(lines)
    path = folder / f"{what}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return str(path)


def _existing(path: str, what: str) -> str:
    """Return the path. Raises ValueError if it does not exist."""
    if not Path(path).expanduser().exists():
        raise ValueError(
            f"{what}: there is no file or folder {path}; give a {any_of()} file, a folder, or a data set of the hub as"
            " owner/name"
        )
    return path


def _rows(data: object, what: str, splits: Sequence[str]) -> Iterable[object]:
    """Iterate over the rows of a table, or of one split of a DatasetDict."""
    if isinstance(data, Mapping):
        found = next((name for name in splits if name in data), None)
        if found is None:
            raise ValueError(
                f"{what}: it has the splits {', '.join(map(str, data)) or 'none'}, and {' or '.join(splits)} is read;"
                f" give one split: {what}=data[{next(iter(data), splits[0])!r}]"
            )
        return data[found]
    if callable(to_dicts := getattr(data, "to_dicts", None)):  # polars
        return to_dicts()  # pyright: ignore[reportReturnType]  # polars is no dependency
    if _is_pandas(data):
        return data.astype(object).where(data.notna(), None).to_dict("records")  # a value that is missing is NaN
    if not isinstance(data, Iterable):
        raise ValueError(f"{what}: {data!r:.80} has no rows; give dicts, a datasets.Dataset, a DataFrame or a file")
    return data


class _DataFrame(Protocol):
    """The part of pandas' DataFrame that this module uses; Podium does not require pandas."""

    def astype(self, dtype: type) -> "_DataFrame": ...

    def notna(self) -> object: ...

    def where(self, condition: object, other: None) -> "_DataFrame": ...

    def to_dict(self, orient: str) -> list[dict[str, object]]: ...


def _is_pandas(data: object) -> TypeGuard[_DataFrame]:
    return hasattr(data, "notna")


def _hub_splits(name: str, subset: str | None, what: str) -> object:
    """The splits of a hub data set. Raises ValueError if it cannot be loaded."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{what}: data sets of the hub need `datasets`: pip install 'podium-rl[data]'") from error
    try:
        return datasets.load_dataset(name, subset)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what}: could not load {name} from the hub: {error}") from error


def _scalar(value: object) -> object:
    """Convert numpy values to Python's."""
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    raise TypeError(f"{type(value).__name__} {value!r:.40}")
