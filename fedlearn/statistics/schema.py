"""Columns of the clients' tables: their public description, and a client's values as tensors.

============ ================================== ======================= =============
column       values                             tensor                  missing
============ ================================== ======================= =============
number       real numbers                       float64 [n]             NaN
category     one of known values                int64 [n], their places -1
text         any text, up to a width in bytes   uint8 [n, width], UTF-8 zeros
============ ================================== ======================= =============
"""

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Annotated, Any, ClassVar, TypeAlias

import numpy as np
import torch
from annotated_types import Le, doc
from torch import Tensor

from fedlearn.core.features import Features, name_inputs
from fedlearn.core.ranges import Count, Ranged, is_number
from fedlearn.core.words import did_you_mean
from fedlearn.errors import ConfigError, DataError

_MAX_WIDTH = 256


@dataclass(frozen=True, kw_only=True)
class NumberColumn:
    """Real numbers.

    With a range, values outside count as its nearest end in means, correlations and quantiles. The
    range is public, so choose it without looking at the data. It also keeps the digits of the
    variance of large numbers, such as times.

    Raises:
        ConfigError: Only one end is given, or they are not finite numbers in order.
    """

    kind: ClassVar[str] = "number"

    low: Annotated[float | None, doc("Smallest value; not set: there is none.")] = None
    high: Annotated[float | None, doc("Largest value, > low; not set: there is none.")] = None

    def __post_init__(self) -> None:
        given = (self.low, self.high)
        if given == (None, None):
            return
        low, high = (math.nan if not is_number(each) else float(each) for each in given)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(
                f"low is {self.low!r} and high is {self.high!r}; give two finite numbers, the "
                "smaller one first, or leave out both"
            )

    @property
    def has_range(self) -> bool:
        """Whether the values have a public range."""
        return self.low is not None

    @property
    def center(self) -> float:
        """The middle of the range; 0 without a range."""
        return 0.0 if self.low is None or self.high is None else (self.low + self.high) / 2.0

    @property
    def radius(self) -> float:
        """Half of the width of the range; 1 without a range."""
        return 1.0 if self.low is None or self.high is None else (self.high - self.low) / 2.0

    def clip(self, values: Tensor) -> Tensor:
        """Move values outside of the range to its nearest end; NaN stays."""
        return values.clamp(self.low, self.high) if self.has_range else values

    def encode(self, values: Iterable[Any], *, place: str) -> Tensor:
        """Convert to float64.

        Raises:
            DataError: A value is not a number; the message begins with ``place``.
        """
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
        if array.dtype.kind not in "biuf":
            numbers = [_number_of(each, place=place, row=row) for row, each in enumerate(array)]
            array = np.asarray(numbers, np.float64)
        encoded = torch.from_numpy(array.astype(np.float64))
        if not self.has_range and bool(encoded.isinf().any()):
            row = int(encoded.isinf().nonzero()[0])
            raise DataError(
                f"{place}, row {row} is infinite, and the column has no range to clip it to; give "
                "the column low and high, or replace the value"
            )
        return encoded

    def is_missing(self, values: Tensor) -> Tensor:
        """NaN is missing."""
        return values.isnan()

    def missing(self, num_rows: int) -> Tensor:
        """Return NaN."""
        return torch.full((num_rows,), math.nan, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class CategoryColumn:
    """Values from a known, public list.

    Raises:
        ConfigError: There are no values, or two are equal.
    """

    kind: ClassVar[str] = "category"

    values: Annotated[tuple[str | int, ...], doc("The known values: texts or whole numbers.")]
    other: Annotated[
        str | None,
        doc("Name under which all other values count; not set: they are errors at the client."),
    ] = None

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigError("values is empty; give a list of the known values")
        for value in self.values:
            if not isinstance(value, str | int):
                raise ConfigError(f"values has {value!r}; give texts or whole numbers")
        if self.other is not None and not isinstance(self.other, str):
            raise ConfigError(f"other is {self.other!r}; give a text")
        if len(set(self.names)) < len(self.names):
            twice = next(each for each in self.names if self.names.count(each) > 1)
            raise ConfigError(f"values has {twice!r} twice; name each value once")

    @property
    def names(self) -> tuple[str, ...]:
        """The values as texts, by their places."""
        return tuple(map(str, self.values)) + (() if self.other is None else (self.other,))

    def encode(self, values: Iterable[Any], *, place: str) -> Tensor:
        """Convert to places in the list.

        Raises:
            DataError: A value is not a known value; the message begins with ``place``.
        """
        known: dict[object, int] = {each: code for code, each in enumerate(self.values)}
        codes = []
        for row, value in enumerate(values):
            code = -1 if _is_missing(value) else known.get(_plain(value))
            if code is None and self.other is None:
                names = ", ".join(self.names[:10])
                raise DataError(
                    f"{place}, row {row} is {_plain(value)!r}, which is not one of the known "
                    f"values {names}; add it to the column's values, or give the column a name "
                    "for all others, such as other = 'other'"
                )
            codes.append(len(self.values) if code is None else code)
        return torch.tensor(codes, dtype=torch.int64)

    def is_missing(self, values: Tensor) -> Tensor:
        """Places outside of the list are missing."""
        return (values < 0) | (values >= len(self.names))

    def missing(self, num_rows: int) -> Tensor:
        """Return -1."""
        return torch.full((num_rows,), -1, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class TextColumn(Ranged):
    """Texts of which no list is known, such as what people typed.

    Texts are compared in Unicode's composed form (NFC), and cut to the width.

    Raises:
        ConfigError: The width is out of range.
    """

    kind: ClassVar[str] = "text"

    width: Annotated[Count, Le(_MAX_WIDTH), doc("Most bytes of a text in UTF-8, 1 to 256.")]

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def encode(self, values: Iterable[Any], *, place: str) -> Tensor:
        """Convert to bytes.

        Raises:
            DataError: A value is not a text; the message begins with ``place``.
        """
        rows = [self._bytes_of(each, place=place, row=row) for row, each in enumerate(values)]
        joined = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), self.width)
        return torch.from_numpy(joined.copy())

    def decode(self, values: Sequence[int]) -> str:
        """Convert the bytes of one text back; zeros at the end are not part of it."""
        return bytes(values).rstrip(b"\0").decode("utf-8", errors="replace")

    def is_missing(self, values: Tensor) -> Tensor:
        """Texts without a first byte are missing: empty texts are, too."""
        return values[:, 0] == 0

    def missing(self, num_rows: int) -> Tensor:
        """Return zeros."""
        return torch.zeros(num_rows, self.width, dtype=torch.uint8)

    def _bytes_of(self, value: object, *, place: str, row: int) -> bytes:
        if _is_missing(value):
            return bytes(self.width)
        if not isinstance(value, str):
            raise DataError(
                f"{place}, row {row} is a {type(value).__name__} in a column of texts; convert it "
                "with str(), or make the column one of numbers or categories"
            )
        # A zero byte would end the text.
        text = unicodedata.normalize("NFC", value).replace("\0", "\ufffd")
        whole = text.encode("utf-8", errors="replace")[: self.width]
        # A character that the width cuts in two is left out.
        return whole.decode("utf-8", errors="ignore").encode().ljust(self.width, b"\0")


Column: TypeAlias = NumberColumn | CategoryColumn | TextColumn
Schema: TypeAlias = Mapping[str, Column]
"""The columns of every client's table, by name."""

COLUMNS: Mapping[str, type[Column]] = {
    each.kind: each for each in (NumberColumn, CategoryColumn, TextColumn)
}


@dataclass(frozen=True, eq=False)
class ClientTable:
    """One client's rows, column by column.

    Attributes:
        columns: Encoded values by column, [n, ...] each; n may be 0.

    Example:
        >>> sex = CategoryColumn(values=("f", "m"))
        >>> schema = {"age": NumberColumn(low=0, high=120), "sex": sex}
        >>> table = ClientTable.of({"age": [31, None], "sex": ["m", "f"]}, schema)
        >>> len(table), table.columns["sex"].tolist()
        (2, [1, 0])
    """

    columns: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, values: Mapping[str, Iterable[Any]], schema: Schema, *, owner: str = ""
    ) -> "ClientTable":
        """Convert a client's columns; those that are not in the schema are left out.

        Args:
            values: By column, a list, NumPy array or pandas Series; or a data frame.
            schema: The columns that all clients agree on.
            owner: The client's name, for messages.

        Raises:
            DataError: A column is missing, has another length, or a value does not fit.
        """
        of_whom = f"client {owner}: " if owner else ""
        encoded: dict[str, Tensor] = {}
        # Iterating over a frame of Polars yields columns, not their names.
        names = {str(each): each for each in getattr(values, "columns", values)}
        for name, column in schema.items():
            if name not in names:
                raise DataError(
                    f"{of_whom}the table has no column {name!r}; "
                    f"{did_you_mean(name, names)}it has {', '.join(list(names)[:20]) or 'none'}"
                )
            place, found = f"{of_whom}column {name!r}", values[names[name]]
            if isinstance(found, str) or not isinstance(found, Iterable):
                raise DataError(f"{place} is a {type(found).__name__}; give one value a row")
            if (num_dimensions := getattr(found, "ndim", 1)) != 1:
                raise DataError(
                    f"{place} has {num_dimensions} dimensions, as if there were several of this "
                    "name; give one value a row"
                )
            encoded[name] = column.encode(found, place=place)
        lengths = {name: len(each) for name, each in encoded.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{of_whom}columns have different lengths: {lengths}; make them equal")
        return cls(encoded)

    @classmethod
    def from_features(cls, features: Features, labels: Tensor, schema: Schema) -> "ClientTable":
        """Return the table whose :attr:`features` and :attr:`labels` these are.

        Raises:
            DataError: A column is missing, or its tensor is not of the column's kind.
        """
        if not isinstance(features, Mapping):
            raise DataError(
                f"statistics need named columns, but the client has "
                f"{', '.join(name_inputs(features))}; give it the features of a ClientTable"
            )
        is_row = labels.flatten() > 0
        found = {}
        for name, column in schema.items():
            like = column.missing(0)
            tensor = features.get(name)
            if tensor is None:
                raise DataError(
                    f"the client has no column {name!r}; {did_you_mean(name, features)}it has "
                    f"{', '.join(features)}"
                )
            if tensor.dtype != like.dtype or tensor.shape[1:] != like.shape[1:]:
                raise DataError(
                    f"column {name!r} is {tensor.dtype} of shape {list(tensor.shape)}, where a "
                    f"{column.kind} column is {like.dtype} of shape [n"
                    f"{''.join(f', {each}' for each in like.shape[1:])}]; make the table with "
                    "ClientTable.of and the columns of this plan"
                )
            found[name] = tensor[is_row]
        return cls(found)

    def __len__(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values())))

    @property
    def features(self) -> Mapping[str, Tensor]:
        """The columns as a client's features; an empty table has one row of padding."""
        if len(self):
            return self.columns
        return {name: _padding(each) for name, each in self.columns.items()}

    @property
    def labels(self) -> Tensor:
        """1 for each row, 0 for the padding of an empty table: int64 [n]."""
        return torch.ones(len(self), dtype=torch.int64) if len(self) else torch.zeros(1).long()

    def limit(self, num_rows: int | None) -> "ClientTable":
        """Return the table, or if it is longer, a fixed random choice of its rows."""
        if num_rows is None or len(self) <= num_rows:
            return self
        # The same rows in every round, so that the rounds of a bisection fit together.
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))
        rows = order[:num_rows].sort().values
        return ClientTable({name: each[rows] for name, each in self.columns.items()})


def _padding(values: Tensor) -> Tensor:
    return values.new_zeros((1, *values.shape[1:]))


def _is_missing(value: object) -> bool:
    """Whether a value is None, NaN, or one of pandas' signs for missing."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and math.isnan(value)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


def _number_of(value: object, *, place: str, row: int) -> float:
    if _is_missing(value):
        return math.nan
    if isinstance(value, Real | Decimal):
        return float(value)
    raise DataError(
        f"{place}, row {row} is a {type(value).__name__} in a column of numbers; convert it, or "
        "make the column one of categories or texts"
    )
