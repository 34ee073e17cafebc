"""Named columns from data frames of pandas, polars and pyarrow, and from Parquet files."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt
from numpy.typing import NDArray

from fedlearn.errors import DataError
from fedlearn.training.csv_columns import NamedColumns, Place


def read_frame(
    frame: Any,  # Any: not looked at yet
    *,
    client: str,
    source: str,
    place: Place | None = None,
) -> NamedColumns:
    """Read the columns of a data frame of pandas, polars or pyarrow.

    A column of another type than numbers and texts, such as dates, becomes one of Python objects.

    Args:
        frame: The frame; an index of pandas is not read.
        client: Name of its client.
        source: Where it comes from, for messages.
        place: Formats a row for a message; ``None``: with its number and the source.

    Raises:
        DataError: It is no frame, two columns have the same name, or a column has values of several
            types.
    """
    if not hasattr(frame, "__arrow_c_stream__") or not hasattr(frame, "columns"):
        raise DataError(
            f"{source} is a {type(frame).__name__}; give a data frame of pandas, polars or "
            "pyarrow, or a mapping from clients' names to frames"
        )
    try:
        table = pa.table(frame)
    except pa.ArrowException as error:
        raise DataError(f"{source}: {error}; give each column values of one type") from error
    except (TypeError, ValueError) as error:  # pandas: sparse columns, two columns with a name
        raise DataError(f"{source} is no table of plain columns: {error}; change them") from error
    # Also columns 1 and "1" of pandas, which become one name.
    twice = [name for name, count in Counter(table.column_names).items() if count > 1]
    if twice:
        raise DataError(f"{source} has several columns {twice[0]!r}; give each its own name")
    index = (table.schema.pandas_metadata or {}).get("index_columns", ())
    columns = {
        name: _to_numpy(values)
        for name, values in zip(table.column_names, table.columns, strict=True)
        if name not in index
    }
    return NamedColumns(
        client=client,
        source=source,
        columns=columns,
        place=place or (lambda row: f"row {row} of {source}"),
    )


def read_parquet_table(path: Path) -> NamedColumns:
    """Read the columns of a Parquet file into memory; its name is the client's.

    Raises:
        DataError: The file is missing or damaged.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read as Parquet: {error}; correct its path, or write it again"
        ) from error
    return read_frame(
        table,
        client=path.stem,
        source=path.name,
        place=lambda row: f"{path.name}, row {row}",
    )


def is_parquet(path: Path) -> bool:
    """Whether a file's name says that it is Parquet; all others are taken for CSV."""
    return path.suffix.lower() == ".parquet"


def with_one_type(tables: Sequence[NamedColumns]) -> list[NamedColumns]:
    """Give columns without a value the type that they have in other tables, else numbers.

    Frames give them a type of their own: neither numbers nor texts.
    """
    texts = {
        name
        for each in tables
        for name, values in each.columns.items()
        if values.dtype.kind == "O" and any(value is not None for value in values)
    }
    return [
        replace(
            each,
            columns={
                name: np.full(len(values), np.nan)
                if name not in texts and values.dtype.kind == "O"
                else values
                for name, values in each.columns.items()
            },
        )
        for each in tables
    ]


def _to_numpy(values: Any) -> NDArray[Any]:  # Any: pyarrow has no types
    if pt.is_dictionary(values.type):
        # Arrow decodes no dictionaries of string views, which polars' categories are.
        values = pa.chunked_array([pa.array(values.to_pylist())])
    is_number = pt.is_integer(values.type) or pt.is_boolean(values.type)
    if (
        pt.is_floating(values.type)
        or pt.is_decimal(values.type)
        or (is_number and values.null_count)
    ):
        return np.array(values.cast(pa.float64()).to_numpy())
    if is_number:
        return np.array(values.to_numpy())
    return np.asarray(values.to_pylist(), object)
