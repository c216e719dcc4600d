"""Converts `data=` arguments: rows become a .jsonl file in the run's folder; paths and hub ids are kept."""

import decimal
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeGuard

import numpy as np

from podium.files import write_atomically
from podium.tasks.question_files import NARROW, READERS, any_of, floats_as_written, hub_data, kinds_of, refuse_repeated

Rows = Iterable[Mapping[str, object]]
"""Dicts, a dict of columns, a datasets.Dataset, or a pandas or polars DataFrame."""
Data = Rows | Mapping[str, Rows] | str | Path | Callable[..., object]
"""Rows, a datasets.DatasetDict, a file or folder of rows, a hub id, or a task's class."""

TRAIN_SPLITS = ("train",)
EVAL_SPLITS = ("test", "validation")
"""Splits of a DatasetDict to read for training or evaluation; the first that exists is used."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def hub_id(data: object) -> str | None:
    """Return `data` if it is the id of a hub data set, `owner/name`; None for an existing path or anything else."""
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
        ValueError: the file or split does not exist, an item is not a row, or a row contains a value that JSON cannot
            represent.
    """
    if name := hub_id(data):
        data = hub_data(what, name, subset)
    if isinstance(data, str | Path):
        return _existing(str(data), what)
    lines = [_line(row, f"{what}: row {index}") + "\n" for index, row in enumerate(_rows(data, what, splits))]
    if not lines:
        raise ValueError(f"{what}: it has no rows; give at least one")
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
            f"{what}: {path} does not exist; give a {any_of()} file, a folder, or a data set on the hub as owner/name"
        )
    return path


def _line(row: object, where: str) -> str:
    """A row as a line of JSON. Raises ValueError, beginning with `where`, if it is not a row that JSON can hold."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is {row!r:.80}; expected a dict, such as {{'question': ..., 'answer': ...}}")
    if unnamed := [name for name in row if not isinstance(name, str)]:
        raise ValueError(f"{where}: the column name {unnamed[0]!r} is not text; rename it")
    try:
        return json.dumps(dict(row), ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be written as JSON ({error}); drop that column") from None


def _rows(data: object, what: str, splits: Sequence[str]) -> Iterable[object]:
    """Iterate over the rows of a table, or of one split of a DatasetDict."""
    if isinstance(data, Mapping):
        return _split(data, what, splits) if _has_splits(data) else _transposed(data, what)
    if callable(to_dicts := getattr(data, "to_dicts", None)):  # polars
        return to_dicts()  # pyright: ignore[reportReturnType]  # polars is no dependency
    if _is_pandas(data):
        refuse_repeated(what, list(data.columns))
        narrow = [name for name, kind in data.dtypes.items() if str(kind) in NARROW]
        data = data.astype(dict.fromkeys(narrow, str)).astype(dict.fromkeys(narrow, float))
        return data.astype(object).where(data.notna(), None).to_dict("records")  # missing values are NaN
    if not isinstance(data, Iterable):
        raise ValueError(f"{what}: {data!r:.80} has no rows; give dicts, a datasets.Dataset, a DataFrame or a file")
    kinds = kinds_of(data)
    return (floats_as_written(dict(row), kinds) for row in data) if kinds else data


def _has_splits(data: Mapping[object, object]) -> bool:
    """Whether a mapping contains splits, which hold rows, instead of columns, which hold values."""
    return all(map(_may_be_rows, data.values()))


def _may_be_rows(values: object) -> bool:
    """Whether an entry is a table, a list that begins with a row, or an iterable that cannot be inspected."""
    if _is_pandas(values) or hasattr(values, "to_dicts"):
        return True
    if isinstance(values, str) or not isinstance(values, Iterable):
        return False
    if not hasattr(values, "__getitem__"):  # a generator, which can be read only once
        return True
    return isinstance(next(iter(values), None), Mapping | None)


def _split(data: Mapping[object, object], what: str, splits: Sequence[str]) -> Iterable[object]:
    """The rows of the first of these splits that exists. Raises ValueError if none exists."""
    found = next((name for name in splits if name in data), None)
    if found is None:
        first = next(iter(data), splits[0])
        raise ValueError(
            f"{what}: it has the splits {', '.join(map(str, data)) or 'none'}, and {' or '.join(splits)} is needed; "
            f"give one split: {what}=data[{first!r}]"
        )
    return _rows(data[found], what, splits)


def _transposed(data: Mapping[object, object], what: str) -> Iterable[object]:
    """The rows of a mapping from columns to lists of values. Raises ValueError if the lists differ in length."""
    columns: dict[object, list[object]] = {}
    for name, values in data.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ValueError(f"{what}: it is a single row, {dict(data)!r:.80}; give a list of rows: {what}=[...]")
        if isinstance(values, Mapping):
            raise ValueError(f"{what}: its entry {name!r} is a dict; expected rows of a split, or a column's values")
        columns[name] = list(values)
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"{what}: it is a dict of columns, and these differ in length: {listed}")
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


class _DataFrame(Protocol):
    """The part of pandas' DataFrame that this module uses; Podium does not require pandas."""

    columns: Iterable[object]
    dtypes: Mapping[object, object]

    def astype(self, dtype: type | Mapping[object, type]) -> "_DataFrame": ...

    def notna(self) -> object: ...

    def where(self, condition: object, other: None) -> "_DataFrame": ...

    def to_dict(self, orient: str) -> list[dict[str, object]]: ...


def _is_pandas(data: object) -> TypeGuard[_DataFrame]:
    return hasattr(data, "notna") and hasattr(data, "columns")


def _plain(value: object) -> object:
    """Convert values of numpy and decimals to Python's. Raises TypeError for values that JSON cannot represent."""
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, np.floating) and value.dtype.itemsize < 8:
        return float(str(value))  # the number as written: 0.1 rather than 0.10000000149011612
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} {value!r:.40}")
