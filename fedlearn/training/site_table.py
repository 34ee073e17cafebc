"""Reads a site's own CSV or Parquet file into the features and labels that a simulation had."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from fedlearn.core.json_files import read_json
from fedlearn.core.words import did_you_mean
from fedlearn.errors import DataError
from fedlearn.training.csv_columns import CsvFormat, NamedColumns, list_columns, read_csv
from fedlearn.training.data_names import DataNames, TableEncoding
from fedlearn.training.frames import is_parquet, read_parquet_table, with_one_type
from fedlearn.training.scaling import FeatureScaling

_NAMES = TypeAdapter(DataNames)
_log = structlog.get_logger(__name__)


def read_examples(
    path: Path | str, *, names: Path | str | DataNames, csv_format: CsvFormat | None = None
) -> tuple[Tensor, Tensor]:
    r"""Read a site's CSV or Parquet file as the run that recorded ``names`` did.

    Columns are chosen, ordered, one-hot encoded, filled in and scaled as recorded, and text labels
    get the recorded numbers. So all sites encode alike, though none sees the data of another. Other
    columns of the file do not matter.

    Args:
        path: The file: Parquet if its name ends in ``.parquet``, else CSV.
        names: ``data_names.json`` in the folder of a simulation with :func:`from_csv` or
            :func:`from_frame`, or the same as an object.
        csv_format: How a CSV file is written; ``None``: see :class:`CsvFormat`.

    Returns:
        Features, float32 [N, F], and labels: int64 classes or float32 numbers, [N].

    Raises:
        DataError: A file is missing or damaged, the names are not those of a table, a column is
            missing, a category or class is unknown, or a value is missing or of the wrong type.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> names = DataNames(
        ...     class_names=("no", "yes"),
        ...     feature_means=(50.0, 0.0, 0.0),
        ...     feature_stds=(10.0, 1.0, 1.0),
        ...     encoding=TableEncoding(
        ...         label="ill", columns=("age", "sex"), categories={"sex": ("f", "m")},
        ...         missing="error", num_classes=2,
        ...     ),
        ... )
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder, "aachen.csv")
        ...     _ = file.write_text("ill,sex,age\nyes,m,70\nyes,m,40\n")
        ...     read_examples(file, names=names)
        (tensor([[ 2.,  0.,  1.],
                [-1.,  0.,  1.]]), tensor([1, 1]))
    """
    found = names if isinstance(names, DataNames) else _load(Path(names))
    if found.encoding is None:
        raise DataError(
            f"{'names' if isinstance(names, DataNames) else names} does not say how the columns of "
            "a table are encoded; give data_names.json of a run on CSV files or data frames"
        )
    rows = _SiteRows(Path(path), found.encoding, csv_format or CsvFormat(), found.class_names)
    features = torch.from_numpy(np.hstack([rows.encode(each) for each in found.encoding.columns]))
    if found.feature_means is not None and found.feature_stds is not None:
        scaling = FeatureScaling(means=found.feature_means, stds=found.feature_stds)
        features = scaling.apply(features)
    return features, rows.encode_labels(found.class_names)


def _load(path: Path) -> DataNames:
    remedy = "copy data_names.json from the folder of the run again"
    found = read_json(
        path, _NAMES, raises=DataError, holds="the names of classes and features", remedy=remedy
    )
    if found is None:
        raise DataError(f"there is no file {path}; {remedy}, or correct the path")
    return found


class _SiteRows:
    """The rows of a file that have a value in every column of the encoding."""

    def __init__(
        self,
        path: Path,
        encoding: TableEncoding,
        csv_format: CsvFormat,
        class_names: tuple[str, ...] | None,
    ) -> None:
        self._encoding = encoding
        used = [encoding.label, *encoding.columns]
        texts = [name for name, known in encoding.categories.items() if _are_texts(known)]
        texts += [encoding.label] if class_names is not None else []
        table = _read_table(path, used, texts=texts, csv_format=csv_format)
        self._columns = {name: table.columns[name] for name in used}
        self._place: Callable[[int], str] = table.place
        if not len(self._columns[encoding.label]):
            raise DataError(f"{path} has no rows; a client needs at least one")
        self._resolve_missing()

    def encode(self, name: str) -> NDArray[np.float32]:
        """Encode a column as one feature, or as one for each category: [N, K]."""
        known = self._encoding.categories.get(name)
        if known is None:
            return self._numbers(name).astype(np.float32)[:, None]
        places = self._number(name, known, what="category")
        return np.eye(len(known), dtype=np.float32)[places]

    def encode_labels(self, class_names: tuple[str, ...] | None) -> Tensor:
        """Encode the labels: int64 classes, or float32 numbers."""
        name, num_classes = self._encoding.label, self._encoding.num_classes
        if num_classes is None:
            return torch.from_numpy(self._numbers(name)).to(torch.float32)
        known = range(num_classes) if class_names is None else class_names
        return torch.from_numpy(self._number(name, tuple(known), what="class"))

    def _resolve_missing(self) -> None:
        """Fill in missing values, leave out their rows, or refuse them, as recorded."""
        encoding = self._encoding
        is_dropped = np.zeros(len(self._columns[encoding.label]), np.bool_)
        for name, values in self._columns.items():
            is_missing = _find_missing(values)
            fill = None if name == encoding.label else encoding.fill(name)
            if not is_missing.any():
                continue
            if encoding.missing == "drop":
                is_dropped |= is_missing
            elif fill is None:
                place = self._place(int(is_missing.argmax()))
                raise DataError(
                    f"{place}, column {name!r}: the value is missing, and the run says nothing to "
                    "fill in; correct the row, or leave it out"
                )
            else:
                self._columns[name] = np.where(is_missing, fill, values)
        if is_dropped.all():
            raise DataError(
                f"every row has a missing value, such as {self._place(0)}; a client needs at least "
                "one row"
            )
        if is_dropped.any():
            kept, place_of = np.flatnonzero(~is_dropped), self._place
            note = f"{is_dropped.sum()} of {len(is_dropped)} rows have a missing value"
            _log.warning("rows_left_out", note=note)
            self._columns = {name: values[kept] for name, values in self._columns.items()}
            self._place = lambda row: place_of(int(kept[row]))

    def _numbers(self, name: str) -> NDArray[Any]:
        values = self._columns[name]
        if values.dtype.kind not in "biuf":
            raise DataError(
                f"{self._place(0)}, column {name!r}: {values[0]!r} is no number, as it was in the "
                "run; write numbers there, as the other clients do"
            )
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise DataError(
                f"{self._place(row)}, column {name!r}: {values[row]} is not finite; correct it, or "
                "leave the row out"
            )
        return values

    def _number(self, name: str, known: tuple[int | str, ...], *, what: str) -> NDArray[np.int64]:
        """Number the values of a column by their places in ``known``."""
        if not _are_texts(known):
            self._numbers(name)  # refuses texts
        numbers = {value: number for number, value in enumerate(known)}
        values = self._columns[name].tolist()
        for row, value in enumerate(values):
            if value not in numbers:
                hint = did_you_mean(str(value), [str(each) for each in known])
                raise DataError(
                    f"{self._place(row)}, column {name!r}: {value!r} is no {what} of the run; "
                    f"{hint}there are {list(known)}: correct it, leave the row out, or agree on it "
                    "with the other clients"
                )
        return np.array([numbers[value] for value in values], np.int64)


def _read_table(
    path: Path, used: list[str], *, texts: list[str], csv_format: CsvFormat
) -> NamedColumns:
    """Read the columns ``used``, of which those in ``texts`` are texts.

    Raises:
        DataError: The file is missing, cannot be read, or lacks a column.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}; correct the path")
    if is_parquet(path):
        [table] = with_one_type([read_parquet_table(path)])
        _require_columns(path, used, there=list(table.columns))
        return table
    there = list_columns(path, csv_format=csv_format)
    _require_columns(path, used, there=there)
    # Texts such as "1" look like numbers at a site that has no others. Columns without a role may
    # have any values.
    unused = [name for name in there if name not in used]
    [table] = read_csv(path, csv_format=csv_format.with_texts([*texts, *unused]))
    return table


def _require_columns(path: Path, names: list[str], *, there: list[str]) -> None:
    """Raise DataError if one of ``names`` is not there."""
    for name in names:
        if name not in there:
            raise DataError(
                f"{path.name} has no column {name!r}; {did_you_mean(name, there)}it has {there}: "
                "name the columns as in the run"
            )


def _are_texts(known: tuple[int | str, ...]) -> bool:
    return any(isinstance(each, str) for each in known)


def _find_missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    if values.dtype.kind == "f":
        return np.asarray(np.isnan(values))
    return np.array([each is None for each in values.tolist()], np.bool_)
